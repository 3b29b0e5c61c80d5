#!/usr/bin/env python3
# time limit: 300 s
"""kill -9 of each process of a running job: what dies with it, what goes on, and what the job loses (nothing).

Limits are those of the contract with the defaults of the configuration, and the measured times are printed.
"""
import os, signal, time

from harness import alive, run, wait_until
from jobs import (Shared, at, attempts, ended, endless, job_of, losses, newest_committed, rank_step, same_losses,
                  steps_for, twin_of, wait_committed, wait_event, wait_rank_step)

shared = Shared(cpu_slots=2, boostd_set={"backoff_min_ms": 1000, "backoff_max_ms": 300000})


def length(c):
    """Steps of every job here: some 2.5 s of them."""
    return steps_for(c, 2.5)


def start(c, name):
    """A job with a committed checkpoint behind it; its number and its ranks' pids."""
    job = c.submit(job_of(c, steps=length(c), name=name))
    wait_committed(c, job, 10)
    pids = c.rank_pids(job, 1)
    assert sorted(pids) == [0, 1], pids
    return job, pids


def finish(c, job, n_attempts, text=""):
    """It completes after so many attempts, with the losses of its undisturbed twin."""
    row = c.wait_state(job, "COMPLETED", deadline=90)
    steps = length(c)
    assert row["attempt"] == n_attempts and row["step"] == steps, row
    replayed = same_losses(c, job, twin_of(c, steps=steps), steps)
    print(f"# {text}: {replayed} steps were replayed, all {steps} losses are those of the twin")


def restart_agent(c):
    """Until the controller has taken it."""
    before = c.agents["n1"].log_text().count("registered as node")
    c.start_agent("n1")
    wait_until(lambda: c.agents["n1"].log_text().count("registered as node") > before, 10, "the agent is registered")


def recovers_from_kill(c, victim, name):
    job, pids = start(c, name)
    wait_rank_step(c, job, 1, 45)
    killed, mono = time.time(), time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    wait_until(lambda: ended(pids.values()), 1.0, "the rest of the attempt gone within 1 s")
    gone = time.monotonic() - mono
    state = c.status(job)
    known = time.monotonic() - mono
    assert state["state"] == "RECOVERING" and known < 1.0, (known, state)
    assert "SIGKILL" in c.json("show", job)["reason_text"], c.json("show", job)
    wait_event(c, job, "running", attempt=2, deadline=10)
    event = wait_event(c, job, "rank-exit")
    running = wait_event(c, job, "running", attempt=2)
    stepped = at(running) - killed
    print(f"# kill -9 of rank {victim}: known after {at(event) - killed:.3f} s, the other rank gone after {gone:.3f} s, "
          f"RECOVERING seen after {known:.3f} s, first new steps of all ranks after {stepped:.3f} s")
    assert stepped < 5.0, stepped
    assert f"rank {victim}" in event["text"] and "signal 9 (SIGKILL)" in event["text"], event
    assert "no restart used" in event["text"], event
    finish(c, job, 2, f"kill -9 of rank {victim}")
    first, second = attempts(c, job)
    assert first["reason"] == "RankSignal" and second["reason"] == "", (first, second)
    assert second["from_step"] == newest_committed(c, job, 1) >= 20, (second, c.json("ckpt", "ls", job))
    steps = sorted(s for s, by in losses(c, job).items() if 2 in by)
    assert steps == list(range(second["from_step"] + 1, length(c) + 1)), "attempt 2 goes on behind its checkpoint"


@shared
def test_kill_9_of_a_rank(c):
    recovers_from_kill(c, 1, "rank-one")


@shared
def test_kill_9_of_rank_0(c):
    recovers_from_kill(c, 0, "rank-zero")


@shared
def test_kill_9_of_boostd_disturbs_no_rank(c):
    job, pids = start(c, "no-boostd")
    before = c.status(job)
    c.boostd.kill9()
    step = rank_step(c, job, 1)
    wait_rank_step(c, job, 1, step + 20, deadline=20)  # they train on alone
    begin = time.monotonic()
    c.start_boostd()
    after = c.status(job)
    answered = time.monotonic() - begin
    assert (after["id"], after["name"], after["attempt"]) == (job, "no-boostd", before["attempt"]), after
    assert after["state"] == "RUNNING", after
    # Which step it is at comes with the agent, which has to connect again.
    wait_until(lambda: (c.status(job).get("step") or 0) >= before["step"], 2.0 - answered, "the job as it was within 2 s")
    print(f"# restarted boostd answers for the job after {answered:.3f} s, knows its step after "
          f"{time.monotonic() - begin:.3f} s")
    assert c.rank_pids(job, 1) == pids
    finish(c, job, 1, "kill -9 of boostd")
    assert [e["kind"] for e in c.events(job)].count("started") == 1, c.events(job)


@shared
def test_boostd_away_while_the_job_ends(c):
    job, pids = start(c, "ends-alone")
    wait_rank_step(c, job, 1, length(c) // 2)
    c.boostd.kill9()
    wait_until(lambda: ended(pids.values()), 60, "the ranks at their end without boostd")
    c.start_boostd()
    finish(c, job, 1, "ended while boostd was away")


@shared
def test_kill_9_of_boost_agent_disturbs_no_rank(c):
    job, pids = start(c, "no-agent")
    keeper = c.keeper_pid(job, 1)
    c.agents["n1"].kill9()
    step = rank_step(c, job, 1)
    wait_rank_step(c, job, 1, step + 20, deadline=20)
    begin = time.monotonic()
    restart_agent(c)
    print(f"# a new agent is registered after {time.monotonic() - begin:.3f} s")
    assert c.rank_pids(job, 1) == pids and c.keeper_pid(job, 1) == keeper, "the new agent adopts the keeper"
    finish(c, job, 1, "kill -9 of boost-agent")


@shared
def test_ranks_that_end_while_the_agent_is_away(c):
    job, pids = start(c, "ends-unseen")
    wait_rank_step(c, job, 1, length(c) // 2)
    c.agents["n1"].kill9()
    wait_until(lambda: ended(pids.values()), 60, "the ranks at their end without an agent")
    assert c.status(job)["state"] == "RUNNING"
    c.start_agent("n1")
    finish(c, job, 1, "ended while the agent was away")


@shared
def test_a_signal_while_the_agent_is_away_is_told_as_that_signal(c):
    job, pids = start(c, "segv-unseen")
    c.agents["n1"].kill9()
    os.kill(pids[1], signal.SIGSEGV)
    wait_until(lambda: ended(pids.values()), 30, "both ranks at their end")
    c.start_agent("n1")
    event = wait_event(c, job, "rank-exit")
    assert "rank 1 on n1: signal 11 (SIGSEGV" in event["text"], event
    assert "application failure, restart 1 of 3" in event["text"], event
    finish(c, job, 2, "SIGSEGV while the agent was away")


@shared
def test_kill_9_of_both_daemons(c):
    job, pids = start(c, "no-daemons")
    c.boostd.kill9()
    c.agents["n1"].kill9()
    step = rank_step(c, job, 1)
    wait_rank_step(c, job, 1, step + 20, deadline=20)
    c.start_boostd()
    assert c.status(job)["state"] == "RUNNING", c.status(job)  # not heard of yet is not lost
    restart_agent(c)
    assert c.rank_pids(job, 1) == pids
    finish(c, job, 1, "kill -9 of boostd and boost-agent")


@shared
def test_kill_9_of_a_following_boostctl(c):
    path = c.dir / "followed.pbtxt"
    path.write_text(job_of(c, steps=length(c), name="followed"))
    follow = c.popen_ctl("submit", path, "--follow")
    try:
        line = follow.stdout.readline()
        job = int(line.split()[1])
        wait_rank_step(c, job, 1, 50)
    finally:
        follow.kill()
        follow.communicate()
    finish(c, job, 1, "kill -9 of a following boostctl")


@shared
def test_kill_9_of_the_keeper(c):
    job, pids = start(c, "no-keeper")
    keeper = c.keeper_pid(job, 1)
    killed, mono = time.time(), time.monotonic()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: ended(pids.values()), 5.0, "the ranks of a dead keeper are killed")
    print(f"# kill -9 of the keeper: its ranks gone after {time.monotonic() - mono:.3f} s", end="")
    running = wait_event(c, job, "running", attempt=2, deadline=20)
    print(f", first new steps after {at(running) - killed:.3f} s")
    finish(c, job, 2, "kill -9 of the keeper")


@shared
def test_kill_9_of_the_keeper_while_the_agent_is_away(c):
    job, pids = start(c, "no-keeper-no-agent")
    keeper = c.keeper_pid(job, 1)
    c.agents["n1"].kill9()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not alive(keeper), 5, "the keeper is gone")
    c.start_agent("n1")
    wait_event(c, job, "running", attempt=2, deadline=20)
    assert ended(pids.values()), "attempt 2 runs beside ranks of attempt 1"
    finish(c, job, 2, "kill -9 of keeper and agent")


@shared
def test_cancel_now_of_a_stopped_rank(c):
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    pids = c.rank_pids(job, 1)
    os.kill(pids[1], signal.SIGSTOP)
    try:
        begin = time.monotonic()
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED", deadline=10)
        print(f"# cancel --now with a stopped rank took {time.monotonic() - begin:.3f} s")
        assert ended(pids.values())
    finally:
        for pid in pids.values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


test_nothing_is_left = shared.last

run(globals())
