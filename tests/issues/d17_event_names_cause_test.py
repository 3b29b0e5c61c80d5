#!/usr/bin/env python3
"""D17, D22: an event names rank, node, code or signal and what it cost; every end says why, the cause before what followed."""
import os, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run, tiny_job
from jobs import Shared, endless, wait_event

shared = Shared(cpu_slots=2)


@shared
def test_d17_the_event_of_a_failure(c):
    job = c.submit(endless(c, tp=2))
    for attempt, sig, says in ((1, signal.SIGABRT, ["rank 1 on n1: signal 6 (SIGABRT", "application failure, restart 1 of 3"]),
                               (2, signal.SIGKILL, ["rank 0 on n1: signal 9 (SIGKILL)", "no restart used"])):
        wait_event(c, job, "running", attempt=attempt)
        os.kill(c.rank_pids(job, attempt)[0 if sig == signal.SIGKILL else 1], sig)
        event = wait_event(c, job, "rank-exit", attempt=attempt)
        for text in [*says, f"attempt {attempt} at step"]:
            assert text in event["text"], (text, event)
        assert event["node"] == "n1" and event["actor"] == "controller", event
        if attempt == 1:
            # rank 0 lost its peer; that is told of nobody
            assert [e["kind"] for e in c.events(job)].count("rank-exit") == 1, c.events(job)
    shown = c.json("show", job)["attempts"]
    assert shown[0]["reason"] == shown[1]["reason"] == "RankSignal", shown
    assert "signal 6" in shown[0]["text"] and "last log lines" in shown[1]["text"], shown
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d22_every_end_says_why(c):
    missing = c.dir / "goes-away.txt"
    missing.write_text("words " * 1000)
    gone = tiny_job(c, name="gone").replace(str(c.dir / "train.txt"), str(missing))
    data = c.submit(gone, "--hold")
    missing.unlink()  # after the job was taken, before it starts
    c.ok("release", data)
    limit = c.submit(endless(c, name="limited", extra="time_limit_s: 1"))
    ended = {data: ("FAILED", "DataError", str(missing)), limit: ("TIMEOUT", "TimeLimit", "time limit of 1 s")}
    for job, (state, reason, text) in ended.items():
        row = c.wait_state(job, state, deadline=30)
        assert row["reason"] == reason and text in row["info"] and text in c.json("show", job)["reason_text"], row
        assert reason in c.ok("show", job).splitlines()[1], c.ok("show", job)
    assert c.status(data)["attempt"] == 1, "a data error is not tried again"
    stopped = c.submit(endless(c, name="stopped"))
    c.wait_state(stopped, "RUNNING")
    c.ok("cancel", "--now", stopped)
    row = c.wait_state(stopped, "CANCELLED", deadline=15)
    assert row["reason"] == "Cancelled" and f"uid {os.getuid()}" in row["info"], row


test_nothing_is_left = shared.last

run(globals())
