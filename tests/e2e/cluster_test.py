#!/usr/bin/env python3
"""Jobs over several nodes: agents of one machine with addresses of their own (127.0.0.x), all by TLS, one checkpoint
directory."""
import csv, io, os, shutil, signal, subprocess, time

from harness import BIN, Cluster, Process, Skip, processes_with, run, tiny_job, wait_until

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


def test_the_controller_restarts_under_load():
    """Killed and started again in every phase of a job over several nodes; no rank notices."""
    with Cluster(agents=3, cpu_slots=1, tls=True, boostd_set=QUICK) as c:
        job = c.submit(job_of(c, 3, steps=1500, every=10))
        for _ in range(2):  # starting
            c.restart_boostd()
        c.wait_state(job, "RUNNING")
        ranks = pids(c, job)
        for step in (20, 60, 100, 140):
            c.wait_step(job, step)
            c.restart_boostd()
        c.wait_nodes(3)
        assert pids(c, job) == ranks
        row = c.wait_state(job, "COMPLETED")
        assert row["attempt"] == 1, c.explain(job)


def test_a_job_ends_while_everybody_is_away():
    """Its ranks end without controller, and the agents that saw it are killed: what is on disk tells, once, and in full."""
    with Cluster(agents=2, cpu_slots=1, tls=True, boostd_set=QUICK) as c:
        job = c.submit(job_of(c, 2, steps=150, every=50))
        c.wait_state(job, "RUNNING")
        c.boostd.kill9()
        wait_until(lambda: not any(pids(c, job).values()), 60, "the ranks end by themselves")
        for n in ("n1", "n2"):
            c.agents[n].kill9()
        c.start_boostd()
        for n in ("n1", "n2"):
            c.start_agent(n)
        row = c.wait_state(job, "COMPLETED")
        assert row["attempt"] == 1 and row["step"] == 150 and row["last_checkpoint_step"] == 150, row
        rows = list(csv.DictReader(io.StringIO(c.ok("metrics", job, "--name", "loss", "-o", "csv"))))
        assert [int(r["step"]) for r in rows] == list(range(1, 151)), rows[:3]


def pids(c, job, attempt=1):
    return {n: c.rank_pids(job, attempt, n) for n in c.agents}


def test_a_standby_takes_over():
    """Its store is the last copy. The old controller still lives, and is obeyed no more."""
    with Cluster(agents=0, cpu_slots=1, tls=True, boostd_set={**QUICK, "backup_every_s": 1}) as c:
        c.boostd.terminate()
        copy = c.dir / "copy"
        old = c.start_boostd(backup_dir=copy)
        first, second = c.address, c.address.replace("127.0.0.1", "127.0.0.9")
        for n in ("n1", "n2"):
            c.start_agent(n, controller_address=[first, second])
        c.wait_nodes(2)
        job = c.submit(job_of(c, 2, steps=1_000_000, every=200))
        c.wait_state(job, "RUNNING")
        ranks = pids(c, job)
        made = time.time()
        wait_until(lambda: (copy / "state.db").exists() and (copy / "state.db").stat().st_mtime > made + 0.1, 20, "copy")
        shutil.copytree(copy, c.dir / "standby", ignore=shutil.ignore_patterns("*.new*"))
        late = c.submit(tiny_job(c, name="late"), "--hold")

        c.certs("controller", "s", "--san", "127.0.0.9")
        argv = [BIN / "boostd", "--config", "/dev/null", "--state-dir", c.dir / "standby", "--socket", c.dir / "s2",
                "--listen", second]
        for key, value in {**c.boostd_set, "restart_grace_ms": 30000, **c.tls_set("controller", "s")}.items():
            argv += ["--set", f"{key}={value}"]
        refused = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=20)
        assert refused.returncode == 1 and "boostd --adopt" in refused.stderr, refused
        begin = time.monotonic()
        new = Process(argv + ["--adopt"], c.dir / "standby.log", c.env)
        c._procs.append(new)
        assert new.ready_line.split("store=")[1].split()[0] == old.ready_line.split("store=")[1].split()[0]
        c.env["BOOST_HOST"] = second
        c.wait_nodes(2, deadline=30)
        print(f"# adopted to all nodes UP: {time.monotonic() - begin:.1f} s")
        assert pids(c, job) == ranks, "the ranks were touched"
        assert c.status(job)["attempt"] == 1 and c.status(job)["state"] == "RUNNING", c.status(job)
        step = c.status(job)["step"]
        c.wait_step(job, step + 50)

        # The old one knows, says so, and acknowledges nothing more; even after a restart.
        wait_until(lambda: "was replaced" in old.log_text(), 5, "the old one hears of it")
        r = c.ctl("--host", first, "submit", "--hold", next(c.dir.glob("job-*.pbtxt")))
        assert r.rc == 5 and "was replaced: node n" in r.err, r
        assert c.ctl("--host", first, "status").rc == 0
        assert "nothing is submitted or changed here any more" in old.log_text()
        old.kill9()
        c.boostd_set["backup_dir"] = copy
        old = c.start_boostd(listen=first)
        c.env["BOOST_HOST"] = second
        wait_until(lambda: old.log_text().count("any more") == 2, 20, "the old one hears of it again")
        assert c.ctl("--host", first, "cancel", "-y", job).rc == 5
        # What was submitted after the copy is lost, and its number is not given again.
        assert c.ctl("show", late).rc == 4
        assert c.submit(tiny_job(c, name="new"), "--hold") > late
        # An agent that starts again still obeys the later one.
        c.agents["n1"].kill9()
        c.start_agent("n1", controller_address=[first, second])
        wait_until(lambda: "was replaced" in c.agents["n1"].log_text(), 20, "refusal of the old one")
        c.wait_nodes(2)
        assert pids(c, job) == ranks
        c.ok("cancel", "--now", "-y", job)
        c.wait_state(job, "CANCELLED")
        old.terminate()
        c.boostd = new


def committed(c, job):
    return {k["step"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"}


def test_checkpoints_made_after_the_copy_are_found():
    """All that the copy knows of are deleted by now; the job goes on from the newest there is all the same."""
    with Cluster(cpu_slots=1, boostd_set={**QUICK, "backup_every_s": 86400}) as c:
        job = c.submit(tiny_job(c, steps=100_000, every=10))
        wait_until(lambda: committed(c, job), 30, "a checkpoint")
        c.boostd.terminate()
        shutil.copytree(c.state_dir, c.dir / "copy")
        c.start_boostd()
        known = committed(c, job)
        wait_until(lambda: committed(c, job) and min(committed(c, job)) > max(known), 30, "the old checkpoints are gone")
        c.boostd.kill9()
        kill_node(c, "n1")
        left = max(int(p.name[5:].split(".")[0]) for p in (c.dir / "ckpt").glob("*/step-*") if (p / "manifest.json").exists())
        shutil.rmtree(c.dir / "agent-n1" / "attempts")  # or it would tell of its shards again
        shutil.rmtree(c.state_dir)
        shutil.move(c.dir / "copy", c.state_dir)
        argv = [*c.boostd.argv, "--adopt"]
        c.boostd = Process(argv, c.dir / "boostd.log", c.env)
        c._procs.append(c.boostd)
        c.start_agent("n1")
        c.wait_state(job, "RUNNING")
        texts = [e["text"] for e in c.events(job)]
        assert any(f"from the checkpoint of step {left}" in t for t in texts), (left, texts)
        c.ok("cancel", "--now", "-y", job)
        c.wait_state(job, "CANCELLED")


run(globals())
