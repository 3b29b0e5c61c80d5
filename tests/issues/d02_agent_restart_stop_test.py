#!/usr/bin/env python3
"""D2, D5, D31: a new agent owns what the old one had started: it stops it, and it never runs it again."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import alive, run, wait_until
from jobs import Shared, attempts, ended, endless, job_of, wait_rank_step

shared = Shared(cpu_slots=2)


@shared
def test_d02_cancel_after_a_restart_of_the_agent_leaves_no_process(c):
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    pids, keeper = c.rank_pids(job, 1), c.keeper_pid(job, 1)
    c.agents["n1"].kill9()
    c.start_agent("n1")
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)
    assert ended(pids.values())
    wait_until(lambda: not alive(keeper), 5, "the keeper is gone")
    job = c.submit(endless(c, tp=2, name="graceful"))
    c.wait_state(job, "RUNNING")
    assert c.agents["n1"].terminate() == 0  # an orderly end leaves ranks running as well
    step = c.status(job)["step"]
    wait_rank_step(c, job, 1, step + 5)
    pids = c.rank_pids(job, 1)
    c.start_agent("n1")
    c.ok("cancel", job)
    row = c.wait_state(job, "CANCELLED", deadline=40)
    assert ended(pids.values()) and row["last_checkpoint_step"] == row["step"], row


@shared
def test_d05_a_job_that_finished_while_the_agent_was_down_is_not_run_again(c):
    job = c.submit(job_of(c, steps=60, every=0, name="finishes"))
    wait_rank_step(c, job, 1, 5)
    pids = c.rank_pids(job, 1)
    c.agents["n1"].kill9()
    wait_until(lambda: ended(pids.values()), 60, "the ranks are done")
    c.start_agent("n1")
    row = c.wait_state(job, "COMPLETED", deadline=20)
    assert row["attempt"] == 1 and len(attempts(c, job)) == 1, row
    c.agents["n1"].kill9()  # and a second time nothing comes of it either
    c.start_agent("n1")
    c.wait_nodes(1)
    assert c.status(job)["state"] == "COMPLETED" and not c.rank_pids(job, 2)


@shared
def test_d31_the_end_of_a_rank_is_its_exit_and_not_the_end_of_its_pipe(c):
    """Somebody else holds the write end of a rank's output open."""
    job = c.submit(job_of(c, steps=40, every=0, name="pipe-held"))
    wait_rank_step(c, job, 1, 3)
    with open(f"/proc/{c.rank_pids(job, 1)[0]}/fd/1", "wb"):
        c.wait_state(job, "COMPLETED", deadline=40)
        assert "step 40/40" in c.ok("logs", job)


test_nothing_is_left = shared.last

run(globals())
