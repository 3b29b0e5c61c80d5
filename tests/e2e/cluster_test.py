#!/usr/bin/env python3
"""Jobs over several nodes: agents of one machine with addresses of their own (127.0.0.x), all by TLS, one checkpoint
directory."""
import os, signal, subprocess, time

from harness import Cluster, Skip, processes_with, run, tiny_job, wait_until

QUICK = {"heartbeat_ms": 100, "suspect_ms": 700, "node_timeout_ms": 2000, "restart_grace_ms": 500}


def job_of(c, nodes, **kw):
    return tiny_job(c, extra=f"resources {{ device: CPU nodes: {nodes} devices_per_node: 1 }}", **kw).replace(
        "micro_batch: 2 global_batch: 2", f"dp: {nodes} micro_batch: 1 global_batch: {nodes * 2}")


def kill_node(c, name):
    """Everything that runs there, at once."""
    at = f"agent-{name}/"
    c.agents[name].child.send_signal(signal.SIGKILL)
    for _ in range(20):
        pids = processes_with(str(c.dir / at))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not pids:
            break
    c.agents[name].child.wait()
    c.agents[name].child.stdout.close()


def test_a_job_over_two_nodes_survives_one_of_them():
    with Cluster(agents=3, cpu_slots=1, tls=True, boostd_set=QUICK) as c:
        job = c.submit(job_of(c, 2, steps=400, every=10))
        c.wait_step(job, 30)
        row = c.status(job)
        assert len(row["nodes"]) == 2 and row["attempt"] == 1, row
        lost = row["nodes"][1]
        spare = ({"n1", "n2", "n3"} - set(row["nodes"])).pop()
        begin = time.monotonic()
        kill_node(c, lost)
        wait_until(lambda: c.status(job)["attempt"] == 2 and c.status(job)["state"] == "RUNNING", 30, "recovery")
        print(f"# node lost to RUNNING again: {time.monotonic() - begin:.2f} s")
        row = c.wait_state(job, "COMPLETED")
        assert set(row["nodes"]) == {"n1", "n2", "n3"} - {lost} and spare in row["nodes"], row
        kinds = [e["text"] for e in c.events(job)]
        assert any(lost in t and "lost" in t or "no heartbeat" in t for t in kinds), kinds
        assert any("from the checkpoint of step" in t for t in kinds), kinds


def test_checkpoints_on_two_file_systems_are_refused():
    """n2 sees another directory under the same name: its agent runs in a mount namespace of its own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        raise Skip("needs a mount namespace")
    with Cluster(agents=1, cpu_slots=1, tls=True, boostd_set=QUICK) as c:
        (c.dir / "ckpt").mkdir()
        c.start_agent("n2", wrap=["unshare", "-m", "sh", "-c", f"mount -t tmpfs none {c.dir}/ckpt && exec \"$@\"", "-"])
        c.wait_nodes(2)
        job = c.submit(job_of(c, 2, steps=20))
        c.wait_state(job, "FAILED")
        row = c.status(job)
        assert row["reason"] == "SpecError", row
        text = c.ok("show", job)
        assert "is not one directory on all nodes: what n1 writes there n2 does not see" in text, text
        assert not [x for x in os.listdir(c.dir / "ckpt") if x.startswith(".boost")], "the proof is left"
        # One node alone is well off with either.
        c.wait_state(c.submit(tiny_job(c, steps=20)), "COMPLETED")


run(globals())
