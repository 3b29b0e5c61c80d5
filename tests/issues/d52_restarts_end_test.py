#!/usr/bin/env python3
"""D12, D52: restarts are bounded: by a budget that progress resets, and by attempts without progress, whatever the cause."""
import os, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from jobs import Shared, attempts, ended, endless, wait_committed, wait_event

shared = Shared(cpu_slots=2)


def kill(c, job, attempt, sig, rank=0):
    wait_event(c, job, "running", attempt=attempt)
    os.kill(c.rank_pids(job, attempt)[rank], sig)


@shared
def test_d52_the_budget_of_application_failures(c):
    job = c.submit(endless(c, name="segfaults", tp=2, extra="restart { max_restarts: 1 no_progress_limit: 5 }"))
    for attempt in (1, 2):
        kill(c, job, attempt, signal.SIGSEGV, rank=1)
    row = c.wait_state(job, "FAILED", deadline=20)
    assert row["reason"] == "RankSignal" and "rank 1 on n1: signal 11 (SIGSEGV" in row["info"], row
    events = [e["text"] for e in c.events(job) if e["kind"] == "rank-exit"]
    assert "restart 1 of 1" in events[0] and "all 1 restarts used" in events[1], events
    assert ended(c.rank_pids(job, 2).values())
    r = c.ctl("wait", job)
    assert r.rc == 1 and "FAILED" in r.err, r


@shared
def test_d52_attempts_without_progress_end_in_held(c):
    job = c.submit(endless(c, name="stuck", extra="restart { no_progress_limit: 2 }"))
    for attempt in (1, 2):
        kill(c, job, attempt, signal.SIGKILL)
    row = c.wait_state(job, "HELD", deadline=20)
    assert row["reason"] == "NoProgress", row
    assert f"no progress in 2 attempts; release with: boostctl release {job}" in row["info"], row
    c.ok("release", job)
    wait_event(c, job, "running", attempt=3)
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d12_progress_gives_the_budget_back(c):
    job = c.submit(endless(c, name="gets-on", every=5, extra="restart { max_restarts: 1 no_progress_limit: 2 }"))
    for attempt in (1, 2, 3):
        wait_event(c, job, "running", attempt=attempt)
        wait_committed(c, job, attempts(c, job)[-1]["from_step"] + 1)
        kill(c, job, attempt, signal.SIGSEGV)
        assert "restart 1 of 1" in wait_event(c, job, "rank-exit", attempt=attempt)["text"]
    wait_event(c, job, "running", attempt=4)
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


test_nothing_is_left = shared.last

run(globals())
