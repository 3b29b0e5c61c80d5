#!/usr/bin/env python3
"""D7, D8, D9, D13: "cannot reach" is not "failed". An attempt whose node was away too long is fenced, and the node has
to confirm its death before the next attempt starts on it; a controller that was away, or has just come back, kills nothing."""
import time
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run, wait_until
from jobs import Shared, attempts, ended, endless, rank_step, wait_committed, wait_rank_step

FAST = {"heartbeat_ms": 100, "suspect_ms": 400, "node_timeout_ms": 1200, "restart_grace_ms": 2500}
shared = Shared(cpu_slots=2, boostd_set=FAST)


def node(c):
    return c.json("node", "ls")["nodes"][0]["state"]


@shared
def test_d07_a_node_that_comes_back_kills_the_old_attempt_before_it_gets_the_new_one(c):
    job = c.submit(endless(c, tp=2, every=10))
    wait_committed(c, job, 10)
    old = c.rank_pids(job, 1)
    c.agents["n1"].kill9()
    wait_until(lambda: node(c) == "SUSPECT", 10, "the node is SUSPECT first")
    assert c.status(job)["state"] == "RUNNING"
    wait_until(lambda: node(c) == "DOWN", 10, "the node is DOWN")
    row = c.wait_state(job, "RECOVERING", deadline=5)
    assert row["reason"] == "NodeLost" and "n1" in row["info"], row
    step = rank_step(c, job, 1)
    wait_rank_step(c, job, 1, step + 5)  # nobody has told the old ranks: they train on, and nothing else runs
    assert not c.rank_pids(job, 2) and not ended(old.values())
    c.start_agent("n1")
    wait_until(lambda: c.rank_pids(job, 2), 20, "attempt 2 has ranks")
    assert ended(old.values()), "attempt 2 started while attempt 1 still ran"
    c.wait_state(job, "RUNNING", deadline=20)
    one, two = attempts(c, job)
    assert one["reason"] == "NodeLost" and "n1 lost" in one["text"], one
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d08_a_controller_that_was_away_for_long_restarts_nothing(c):
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    pids = c.rank_pids(job, 1)
    c.boostd.kill9()
    away = time.monotonic()
    wait_until(lambda: time.monotonic() - away > 2 * FAST["node_timeout_ms"] / 1000, 10, "twice the node time-out over")
    c.start_boostd(restart_grace_ms=10000)  # an agent tries again every 3 s at most
    c.wait_nodes(1)
    c.wait_step(job, rank_step(c, job, 1) + 3)
    assert c.rank_pids(job, 1) == pids and c.status(job)["attempt"] == 1
    kinds = [e["kind"] for e in c.events(job)]
    assert kinds.count("started") == 1 and "recovering" not in kinds and "node-lost" not in kinds, kinds
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d09_a_controller_that_has_just_started_declares_no_node_down(c):
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    pids = c.rank_pids(job, 1)
    c.agents["n1"].kill9()
    c.restart_boostd()
    up = time.monotonic()
    while time.monotonic() - up < FAST["restart_grace_ms"] / 1000 - 0.5:
        assert node(c) == "JOINING", node(c)
        assert c.status(job)["state"] == "RUNNING", c.status(job)
    wait_until(lambda: node(c) == "DOWN", 10, "DOWN after the grace")
    c.wait_state(job, "RECOVERING", deadline=5)
    c.start_agent("n1")
    c.wait_state(job, "RUNNING", deadline=20)
    assert ended(pids.values()) and c.status(job)["attempt"] == 2
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


test_nothing_is_left = shared.last

run(globals())
