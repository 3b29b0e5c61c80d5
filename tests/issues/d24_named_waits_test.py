#!/usr/bin/env python3
"""D19, D24, D30: every wait has a name and a timer, is there again after a restart of the controller, and has an end."""
import os, signal, time
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run, wait_until
from jobs import Shared, ended, endless, wait_rank_step

shared = Shared(cpu_slots=2)


def waits(c, job):
    return c.json("show", job)["waits"]


@shared
def test_d24_a_stop_is_waited_for_by_name_and_across_a_restart(c):
    job = c.submit(endless(c, tp=2))
    wait_rank_step(c, job, 1, 5)
    pids = c.rank_pids(job, 1)
    os.kill(pids[0], signal.SIGSTOP)
    try:
        c.ok("cancel", job)
        c.wait_state(job, "STOPPING", deadline=5)
        first, = waits(c, job)
        assert first["name"] and first["limit_s"] >= 30, first
        c.restart_boostd()
        row = c.status(job)
        assert row["state"] == "STOPPING", row
        again, = [w for w in waits(c, job) if w["name"] == first["name"]]
        assert again["limit_s"], again
    finally:
        os.kill(pids[0], signal.SIGCONT)
    row = c.wait_state(job, "CANCELLED", deadline=40)
    assert row["last_checkpoint_step"] == row["step"] and ended(pids.values()), row


@shared
def test_d19_a_stop_that_is_not_obeyed_ends_in_a_kill(c):
    job = c.submit(endless(c, tp=2, name="deaf", extra="stop_grace_s: 1"))
    wait_rank_step(c, job, 1, 5)
    pids = c.rank_pids(job, 1)
    os.kill(pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    c.ok("cancel", job)
    c.wait_state(job, "CANCELLED", deadline=15)
    print(f"# a stop with stop_grace_s 1 that was not obeyed took {time.monotonic() - begin:.2f} s")
    assert ended(pids.values())
    assert any(e["kind"] == "stop-overdue" for e in c.events(job)) or "kill" in c.ok("events", job), c.events(job)


@shared
def test_d24_starting_and_back_off_are_waits(c):
    c.boostd.kill9()
    c.start_boostd(backoff_min_ms=3000, backoff_max_ms=3000)
    c.wait_nodes(1)
    job = c.submit(endless(c, tp=2, name="backs-off"))
    c.wait_state(job, "RUNNING")
    os.kill(c.rank_pids(job, 1)[0], signal.SIGKILL)
    c.wait_state(job, "RECOVERING", deadline=5)
    back_off, = wait_until(lambda: [w for w in waits(c, job) if "back-off" in w["name"]], 5, "a wait for the back-off")
    assert 2 < back_off["limit_s"] <= 3, back_off
    assert "attempt 2" in c.status(job)["info"], c.status(job)
    c.restart_boostd()
    row = c.wait_state(job, "RUNNING", deadline=20)
    assert row["attempt"] == 2, row
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


test_nothing_is_left = shared.last

run(globals())
