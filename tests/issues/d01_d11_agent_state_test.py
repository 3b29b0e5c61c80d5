#!/usr/bin/env python3
"""D1, D11: what an agent finds after a crash may not be what it left: pids that belong to others by now, files of no bytes."""
import os, signal, subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import alive, run, wait_until
from jobs import Shared, endless, wait_committed

shared = Shared(cpu_slots=2)


def crash(c, job):
    """The agent, the keeper and the ranks of attempt 1, as by a power cut; the run directory."""
    pids = [*c.rank_pids(job, 1).values(), c.keeper_pid(job, 1)]
    c.agents["n1"].kill9()
    for pid in reversed(pids):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: not any(alive(p) for p in pids), 10, "all to be gone")
    return c.run_dir(job, 1)


def recovers(c, job, step):
    wait_until(lambda: c.status(job)["attempt"] == 2 and c.status(job)["state"] == "RUNNING", 30, "attempt 2")
    shown = c.json("show", job)
    assert shown["attempts"][1]["from_step"] >= step and shown["restarts_used"] == 0, shown["attempts"]
    assert shown["attempts"][0]["text"], "an end without a word"
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_d01_a_pid_that_belongs_to_somebody_else_is_left_alone(c):
    job = c.submit(endless(c, tp=2, every=20, name="reused"))
    step = wait_committed(c, job, 20)
    run_dir = crash(c, job)
    stranger = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        for name in ("rank-0.pid", "rank-1.pid", "keeper.id"):
            boot, _, start = (run_dir / name).read_text().split()
            (run_dir / name).write_text(f"{boot} {stranger.pid} {start}\n")
        c.start_agent("n1")
        recovers(c, job, step)
        assert stranger.poll() is None, "a process of somebody else was killed"
    finally:
        stranger.kill()
        stranger.wait()


@shared
def test_d11_files_of_no_bytes_cost_their_attempt_and_not_the_agent(c):
    job = c.submit(endless(c, tp=2, every=20, name="emptied"))
    step = wait_committed(c, job, 20)
    run_dir = crash(c, job)
    for path in run_dir.iterdir():
        if path.is_file():
            path.write_bytes(b"")
    c.start_agent("n1")
    recovers(c, job, step)
    assert any((c.dir / "agent-n1" / "lost+found").iterdir()), "what was damaged is kept for people to look at"


test_nothing_is_left = shared.last

run(globals())
