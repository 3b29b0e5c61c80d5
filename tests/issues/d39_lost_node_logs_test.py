#!/usr/bin/env python3
"""D39: a node has crashed and its logs cannot be reached: that is said, and what the controller kept is shown, after a
restart of the controller too: 64 KiB of the first failing rank, 4 KiB of each other."""
import os, signal, subprocess, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, run, wait_until
from jobs import ended, endless, wait_event, wait_rank_step


def say(c, job, rank, data, attempt=1):
    """Writes into the rank's own output, as if it had printed it."""
    with open(f"/proc/{c.rank_pids(job, attempt)[rank]}/fd/1", "wb", buffering=0) as out:
        out.write(data)


def log(c, ref, rank):
    p = subprocess.run([BIN / "boostctl", "logs", str(ref), "--rank", str(rank)], env=c.env, capture_output=True, timeout=60)
    assert p.returncode == 0, p.stderr
    return p.stdout, p.stderr.decode()


def crash(c, job):
    """The node: agent, keeper and ranks at once; nothing of it says a word any more."""
    pids = [c.keeper_pid(job, 1), *c.rank_pids(job, 1).values()]
    c.agents["n1"].kill9()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ended(pids), 10, "the node is gone")


def test_d39_a_node_that_crashed_while_its_ranks_ran():
    with Cluster(cpu_slots=2, boostd_set={"suspect_ms": 1500, "node_timeout_ms": 3000, "restart_grace_ms": 1000}) as c:
        job = c.submit(endless(c, tp=2))
        wait_rank_step(c, job, 1, 2)
        words = b"".join(b"line %d of rank 1\n" % i for i in range(1000))
        say(c, job, 1, words)
        wait_until(lambda: log(c, job, 1)[0] == words, 10, "the agent has it all")
        time.sleep(11)  # the controller is told within 10 s, and shows it only of a node that is gone
        crash(c, job)
        for restarted in (False, True):
            if restarted:
                wait_event(c, job, "node-lost" if any(e["kind"] == "node-lost" for e in c.events(job)) else "recovering",
                           deadline=60)
                wait_until(lambda: list((c.dir / "boostd" / "kept").glob(f"{job}.1")), 30, "a file of what is kept")
                c.restart_boostd()
            data, said = log(c, f"{job}.1", 1)
            assert data == words[-4096:], (restarted, len(data), data[-100:])
            assert "node n1 cannot be reached: the last 4096 bytes that the controller kept" in said, said


def test_d39_the_first_failing_rank_has_more():
    with Cluster(cpu_slots=2, boostd_set={"backoff_min_ms": 60000, "backoff_max_ms": 60000}) as c:
        job = c.submit(endless(c, tp=2))
        wait_rank_step(c, job, 1, 2)
        long = [b"".join(b"%d: line %d\n" % (rank, i) for i in range(10000)) for rank in (0, 1)]
        say(c, job, 1, long[1])
        wait_until(lambda: log(c, job, 1)[0] == long[1], 10, "rank 1's output is in its log")
        say(c, job, 0, long[0])
        wait_until(lambda: log(c, job, 0)[0].count(b"0: line") == 10000, 10, "rank 0's too")
        os.kill(c.rank_pids(job, 1)[1], signal.SIGABRT)
        wait_event(c, job, "recovering", deadline=30)
        whole = log(c, f"{job}.1", 0)[0]
        c.agents["n1"].kill9()
        wait_until(lambda: list((c.dir / "boostd" / "kept").glob(f"{job}.1")), 10, "a file of what is kept")
        for restarted in (False, True):
            if restarted:
                c.restart_boostd()
            data, said = log(c, f"{job}.1", 1)
            assert len(data) == 64 << 10 and long[1].endswith(data[-1000:]), (restarted, len(data), said)
            data, said = log(c, f"{job}.1", 0)
            assert len(data) == 4 << 10 and whole.endswith(data), (restarted, len(data), said)
            assert "kept" in said, said


run(globals())
