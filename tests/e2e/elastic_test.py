#!/usr/bin/env python3
"""A job over three nodes that loses one: on fewer nodes with the same batches, back on all, and with a spare.

A node is lost with all that is on it: its agent, its keeper and its ranks are killed at once."""
import os, signal, time

from harness import Cluster, alive, run, wait_until
from jobs import endless, losses, wait_committed

QUICK = {"node_timeout_ms": 1500, "suspect_ms": 700, "heartbeat_ms": 200, "restart_grace_ms": 1500}


def spread(c, name, nodes, min_nodes, spares=0, every=20, steps=1_000_000):
    """One replica a node, one rank each; 12 sequences a step."""
    text = endless(c, name=name, tp=1, every=every, batch=12)
    text = text.replace("steps: 1000000", f"steps: {steps}")
    text = text.replace("optimizer {", "optimizer { schedule: CONSTANT")  # else the rates follow from run.steps
    parallel = "tp: 1 micro_batch: 12 global_batch: 12"
    assert parallel in text, text
    text = text.replace(parallel, f"tp: 1 dp: {nodes} micro_batch: {12 // nodes} global_batch: 12")
    return text + f"resources {{ nodes: {nodes} min_nodes: {min_nodes} devices_per_node: 1 spares: {spares} }}\n"


def kill_node(c, node, job, attempt):
    pids = [*c.rank_pids(job, attempt, node).values(), c.keeper_pid(job, attempt, node)]
    os.kill(c.agents[node].pid, signal.SIGKILL)
    for pid in filter(None, pids):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    c.agents[node].kill9()
    wait_until(lambda: not any(alive(p) for p in pids if p), 10, f"the processes of {node} to be gone")
    return time.monotonic()


def attempt_of(c, job, number):
    return c.json("show", job)["attempts"][number - 1]


def wait_running(c, job, attempt):
    wait_until(lambda: (lambda s: s["attempt"] >= attempt and s["state"] == "RUNNING")(c.status(job)), 30,
               f"attempt {attempt} of job {job} to run")


def test_fewer_nodes_and_back():
    with Cluster(agents=3, cpu_slots=1, boostd_set=QUICK) as c:
        job = c.submit(spread(c, "elastic", 3, 1))
        wait_committed(c, job, 20)
        begin = kill_node(c, "n3", job, 1)
        wait_running(c, job, 2)
        print(f"# a node was lost: the job runs on two after {time.monotonic() - begin:.2f} s")
        two = attempt_of(c, job, 2)
        assert sorted(two["nodes"]) == ["n1", "n2"] and two["dp"] == 2 and two["from_step"] >= 20, two
        assert c.json("show", job)["restarts_used"] == 0
        row = c.status(job)
        assert row["devices"] == 2 and "(2 of 3 nodes)" in row["info"], row
        c.start_agent("n3")
        c.wait_nodes(3)
        wait_running(c, job, 3)
        three = attempt_of(c, job, 3)
        assert sorted(three["nodes"]) == ["n1", "n2", "n3"] and three["dp"] == 3, three
        assert any(e["kind"] == "growing" for e in c.events(job))
        assert three["from_step"] >= attempt_of(c, job, 2)["to_step"], "it grows at a checkpoint, and loses no step"
        c.wait_step(job, three["from_step"] + 5)
        last = c.status(job)["step"]
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")
        # Each step has the samples of the undisturbed job: the same losses but for the order of sums.
        twin = c.submit(spread(c, "twin", 3, 3, steps=last))
        c.wait_state(twin, "COMPLETED", deadline=90)
        mine, whole = losses(c, job), losses(c, twin)
        checked = 0
        for step in range(1, last + 1):
            for attempt, loss in mine.get(step, {}).items():
                assert abs(loss / whole[step][1] - 1) < 1e-3, (step, attempt, loss, whole[step])
                checked += attempt > 1
        print(f"# {checked} losses of later attempts are those of the undisturbed job")
        assert checked > 5


def test_spare_takes_over():
    with Cluster(agents=3, cpu_slots=1, boostd_set={**QUICK, "backoff_min_ms": 60000, "backoff_max_ms": 60000}) as c:
        job = c.submit(spread(c, "spared", 2, 2, spares=1))
        wait_committed(c, job, 20)
        first = attempt_of(c, job, 1)
        spare, = first["spares"]
        assert f"spare {spare}" in c.ok("show", job)
        busy = {n["name"]: n["devices_busy"] for n in c.json("node", "ls")["nodes"]}
        assert busy == {"n1": 1, "n2": 1, "n3": 1}, busy
        lost = first["nodes"][1]
        begin = kill_node(c, lost, job, 1)
        wait_running(c, job, 2)
        print(f"# a node was lost: the spare runs after {time.monotonic() - begin:.2f} s")
        two = attempt_of(c, job, 2)
        assert sorted(two["nodes"]) == sorted([first["nodes"][0], spare]) and not two.get("spares"), two
        c.start_agent(lost)
        wait_until(lambda: attempt_of(c, job, 2).get("spares") == [lost], 20, "the node that is back to be the spare")
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")
        wait_until(lambda: all(n["devices_busy"] == 0 for n in c.json("node", "ls")["nodes"]), 10, "all nodes to be free")


run(globals())
