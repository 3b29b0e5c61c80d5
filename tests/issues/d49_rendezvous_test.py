#!/usr/bin/env python3
"""D49: a node or rank that dies or stands still while the ranks meet: the others do not hang, and the missing one is named."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, run, wait_until
from jobs import endless, wait_event

# In the first attempt rank 1 never comes to the meeting.
WORKER = """#!/bin/sh
case "$*" in
*-1.1*"--rank 1") {what} ;;
esac
exec "{worker}" "$@"
"""


def late(what, agents, nodes):
    c = Cluster(agents=0, cpu_slots=2 // nodes, boostd_set={"rendezvous_timeout_ms": 1500})
    worker = c.dir / "worker.sh"
    worker.write_text(WORKER.format(what=what, worker=BIN / "boost-worker"))
    worker.chmod(0o755)
    for i in range(agents):
        c.start_agent(f"n{i + 1}", wrap=["sh", "-c", f'exec "$@" --worker {worker}', "-"])
    c.wait_nodes(agents)
    return c


def test_d49_a_rank_that_never_comes():
    with late("exec sleep 1000", 1, 1) as c:
        job = c.submit(endless(c, tp=2, every=20))
        event = wait_event(c, job, "rendezvous-timeout")
        assert "no rendezvous in 2 s: rank 1 missing (first one on n1)" in event["text"], event
        assert "no restart used" in event["text"], event
        wait_until(lambda: c.status(job)["state"] == "RUNNING" and c.status(job)["attempt"] == 2, 30, "attempt 2")
        first = c.json("show", job)["attempts"][0]
        assert first["reason"] == "RendezvousTimeout", first
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")


def test_d49_a_rank_that_dies_on_its_way():
    with late("kill -9 $$", 1, 1) as c:
        job = c.submit(endless(c, tp=2, every=20))
        event = wait_event(c, job, "rank-exit")
        assert "rank 1 on n1: signal 9 (SIGKILL)" in event["text"], event
        wait_until(lambda: c.status(job)["state"] == "RUNNING" and c.status(job)["attempt"] == 2, 30, "attempt 2")
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")


run(globals())
