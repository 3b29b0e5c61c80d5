#!/usr/bin/env python3
"""T9, D56: boostd and the agent killed, or their disks full, while checkpoints are committed, pinned and deleted. A
sample of the points; tests/full/checkpoint_points_test.py has all."""
import os, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from jobs import wait_event
from points import Points


def test_points_of_boostd_agent_and_rank():
    p = Points()
    try:
        p.walk("boostd", "KILL", "state.db", p.all_of_it, range(3, 84, 16))
        p.walk("boostd", "KILL", "socket:", p.all_of_it, range(4, 50, 15))
        p.walk("boostd", "ENOSPC", "state.db", p.all_of_it, (10, 40))
        p.walk("agent", "KILL", f"{p.c.dir}/ckpt/", p.save, (4,))
        p.walk("agent", "EIO", f"{p.c.dir}/ckpt/", p.save, (3,))
        p.walk("agent", "ENOSPC", "/agent-n1/", p.save, (1,))
        p.walk("rank", "DROP", "/step-", p.save, (3,))
        p.walk("boostd", "KILL", "state.db", p.resume, (12, 24))
        p.close()
    finally:
        p.c._kill_all()


def test_a_job_held_for_want_of_room_says_so_and_goes_on_when_there_is_some():
    p = Points(no_progress_limit=3)
    c, job = p.c, p.job
    try:
        newest = p.committed()[-1]
        p.arm("rank", "any 1 ENOSPC /step-")
        for attempt in (1, 2, 3, 4):  # the first has come to a checkpoint before
            wait_event(c, job, "running", attempt=attempt)
            c.ok("checkpoint", job)
            wait_event(c, job, "checkpoint-abandoned", attempt=attempt)
            assert c.status(job)["reason"] == "DiskFull", c.status(job)
            os.kill(c.rank_pids(job, attempt)[0], signal.SIGKILL)
        row = c.wait_state(job, "HELD", deadline=30)
        assert row["reason"] == "DiskFull" and "disk is full; release with" in row["info"], row
        assert "No space left on device" in c.json("show", job)["reason_text"]
        p.lift("rank")
        c.ok("release", job)
        wait_event(c, job, "running", attempt=5)
        p.save()
        assert p.committed()[-1] > newest and c.status(job)["reason"] == "", c.status(job)
        p.close()
    finally:
        c._kill_all()


run(globals())
