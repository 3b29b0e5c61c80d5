#!/usr/bin/env python3
"""Every program with standard streams that are closed: what it would print ends in no file and no socket of its own."""
import os, signal, struct, subprocess
from harness import BIN, Cluster, run, tiny_job, wait_until

CLOSED = ("<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-")


def without(streams, *argv):
    """The command line that runs argv with these streams closed."""
    return ["sh", "-c", f'exec "$@" {streams}', "sh", *map(str, argv)]


def output(*argv, env=None):
    p = subprocess.run([str(a) for a in argv], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                       timeout=60)
    return p.returncode, p.stdout, p.stderr


def script(c, name, streams):
    """A program of BOOST that closes these streams first, as the agent's --keeper and --worker."""
    path = c.dir / f"{name}.sh"
    path.write_text(f'#!/bin/sh\nexec {BIN / name} "$@" {streams}\n')
    path.chmod(0o755)
    return path


def whole_records(path):
    """How many records a log of a rank has (proto/reclog.h); AssertionError when bytes of anything else are in it."""
    data, at, n = path.read_bytes(), 0, 0
    while at < len(data):
        assert at + 8 <= len(data), (path, at)
        at += 8 + struct.unpack_from("<I", data, at)[0]
        n += 1
    assert at == len(data), (path, at, len(data))
    return n


def node_runs_a_job(c, streams):
    agent = c.dir / "agent-n1"
    child = subprocess.Popen(without(streams, BIN / "boost-agent", "--config", "/dev/null", "--state-dir", agent, "--node",
                                     "n1", "--cpu-slots", 2, "--set", "nvml_library=",
                                     "--keeper", script(c, "boost-keeper", streams),
                                     "--worker", script(c, "boost-worker", streams)),
                             env=c.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             start_new_session=True)
    try:
        c.wait_nodes(1)
        job = c.submit(tiny_job(c, tp=2, every=0))
        row = c.wait_state(job, "COMPLETED", deadline=20)
        assert row["attempt"] == 1, row
        losses = [m for m in c.json("metrics", job)["metrics"] if "loss" in m]
        assert [m["step"] for m in losses] == list(range(1, 21)), losses
        assert (agent / "lock").read_text() == f"{child.pid}\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(15) == 0
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def test_agent_keeper_and_ranks():
    with Cluster(agents=0) as c:
        for streams in CLOSED:
            node_runs_a_job(c, streams)


def test_boostctl():
    with Cluster() as c:
        path = c.dir / "job.pbtxt"
        path.write_text(tiny_job(c, every=0))
        ctl, jobs = BIN / "boostctl", 0
        for streams in CLOSED:
            for argv in (("--parsable",), ("--wait",), ("--follow",)):
                rc, out, err = output(*without(streams, ctl, "submit", path, *argv), env=c.env)
                jobs += 1
                assert rc == 0 and (out == "") == (">&-" in streams.split()), (streams, argv, rc, out, err)
                assert "boostctl:" not in err, err
            for argv in (("events", jobs), ("wait", jobs, "--follow"), ("metrics", jobs), ("-o", "json", "status", "-a")):
                rc, out, err = output(*without(streams, ctl, *argv), env=c.env)
                assert rc == 0 and not err, (streams, argv, rc, err)
            assert output(*without(streams, ctl, "show", 999), env=c.env)[0] == 4
        rc, _, err = output(*without("<&-", ctl, "submit", "-"), env=c.env)
        assert rc == 6 and err, (rc, err)
        assert [j["id"] for j in c.json("status", "-a")["jobs"]] == list(range(1, jobs + 1))
        assert "over the limit" not in c.boostd.log_text()


def test_boost_worker_standalone():
    with Cluster(start=False) as c:
        path = c.dir / "job.pbtxt"
        path.write_text(tiny_job(c, tp=2))
        for i, streams in enumerate(CLOSED):
            run_dir = c.dir / f"run-{i}"
            rc, out, err = output(*without(streams, BIN / "boost-worker", "--standalone", path, "--run-dir", run_dir,
                                           "--set", f"checkpoint.dir={c.dir}/ckpt-{i}"), env=dict(os.environ))
            assert rc == 0 and ("step 20/20" in out) == (">&-" not in streams.split()), (streams, rc, out, err)
            assert whole_records(run_dir / "rank-0.metrics") >= 20


def test_boostd():
    with Cluster(start=False) as c:
        child = subprocess.Popen(without(CLOSED[-1], BIN / "boostd", "--config", "/dev/null", "--state-dir", c.state_dir,
                                         "--socket", c.socket), start_new_session=True)
        try:
            wait_until(lambda: c.ctl("ping").rc == 0, 10, "boostd to answer")
            assert (c.state_dir / "boostd.lock").read_text() == f"{child.pid}\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(15) == 0
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


run(globals())
