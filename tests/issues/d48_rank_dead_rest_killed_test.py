#!/usr/bin/env python3
"""D46, D48: one rank dead, the rest killed at once, even one that does not run; many jobs at once never fight for a port."""
import os, signal, time
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run, tiny_job, wait_until
from jobs import Shared, ended, endless, wait_event

shared = Shared(cpu_slots=8)


@shared
def test_d48_one_dead_of_four(c):
    job = c.submit(endless(c, tp=4))
    c.wait_state(job, "RUNNING")
    pids = c.rank_pids(job, 1)
    assert len(pids) == 4
    os.kill(pids[3], signal.SIGSTOP)  # one that answers nothing
    begin = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    wait_until(lambda: ended(pids.values()), 1.0, "all four gone within 1 s")
    print(f"# one of four killed, one stopped: all gone after {time.monotonic() - begin:.3f} s")
    event = wait_event(c, job, "rank-exit")
    assert "rank 2 on n1: signal 9" in event["text"], event
    wait_event(c, job, "running", attempt=2)
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d46_many_jobs_at_once(c):
    jobs = [c.submit(tiny_job(c, tp=2, steps=5, every=0, layers=1, name=f"j{i}")) for i in range(12)]
    for job in jobs:
        row = c.wait_state(job, "COMPLETED", deadline=90)
        assert row["attempt"] == 1, (row, c.events(job))


test_nothing_is_left = shared.last

run(globals())
