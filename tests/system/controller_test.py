#!/usr/bin/env python3
# time limit: 600
"""kill -9 of the controller in each phase of a job over four nodes: starting, running, checkpointing, recovering,
stopping. No rank notices, nothing that was acknowledged is lost, and the job ends with its twin's losses."""
import os, signal, time

from netns import NetCluster, alive, ended, event, job_of, ranks_of, same_losses, wait_until
from harness import run

STEPS = 1500
# Until every agent speaks with the new controller: a back-off of at most 3.2 s and a handshake, on a busy machine.
REGISTERED_S = 8.0
RECOVERY_S = 20.0  # as in nodes_test.py

shared = {}


def cluster():
    if "c" not in shared:
        c = shared["c"] = NetCluster(4)
        shared["twin"] = c.submit(job_of(c, STEPS, name="twin", every=100))
        assert c.wait_state(shared["twin"], "COMPLETED", deadline=300)["attempt"] == 1
    return shared["c"]


def test(phase):
    def runs():
        c = cluster()
        try:
            phase(c)
        except BaseException as e:
            shared.clear()
            c.__exit__(type(e), e, None)
            raise
    runs.__name__ = phase.__name__
    return runs


def away(c, what, meanwhile=lambda: time.sleep(1)):
    """boostd dies, and comes back; nodes' registrations are awaited."""
    c.boostd.kill9()
    meanwhile()
    begin = time.monotonic()
    c.start_boostd()
    c.ok("status")
    answers = time.monotonic() - begin
    c.wait_nodes(4, deadline=REGISTERED_S + 10)
    took = time.monotonic() - begin
    print(f"# killed while {what}: answers {answers:.2f} s after its start, all nodes UP after {took:.2f} s",
          flush=True)
    assert took <= REGISTERED_S, took


def paused(c, job, attempt):
    """One of the job's ranks, as soon as there is one, stopped: what the job does now takes as long as a test wants."""
    pid = wait_until(lambda: next(iter(ranks_of(c, job, attempt)), None), 60, "a rank")
    os.kill(pid, signal.SIGSTOP)
    return pid


def finish(c, job, attempts, what):
    row = c.wait_state(job, "COMPLETED", deadline=200)
    assert row["attempt"] == attempts, row
    twice = same_losses(c, job, shared["twin"], STEPS)
    assert not ranks_of(c, job, 1) + ranks_of(c, job, 2)
    print(f"# killed while {what}: all {STEPS} losses are the twin's, {twice} steps were done twice", flush=True)


@test
def test_starting(c):
    job = c.submit(job_of(c, STEPS, name="starting", every=100))
    pid = paused(c, job, 1)
    assert c.status(job)["state"] == "STARTING", c.status(job)
    away(c, "starting")
    assert c.status(job)["state"] == "STARTING" and alive(pid), c.status(job)
    os.kill(pid, signal.SIGCONT)
    finish(c, job, 1, "starting")


@test
def test_running(c):
    job = c.submit(job_of(c, STEPS, name="running", every=100))
    event(c, job, "running")
    pids = ranks_of(c, job, 1)
    assert len(pids) == 8, pids
    away(c, "running")
    row = c.status(job)
    assert (row["state"], row["attempt"]) == ("RUNNING", 1) and set(ranks_of(c, job, 1)) <= set(pids), row
    finish(c, job, 1, "running")


@test
def test_checkpointing(c):
    job = c.submit(job_of(c, STEPS, name="checkpointing", every=100))
    event(c, job, "running")

    def begun():
        """A checkpoint that ranks write and boostd has not committed."""
        known = {k["step"] for k in c.json("ckpt", "ls", job, "-a")["checkpoints"] if k["state"] != "WRITING"}
        there = {int(d.name[5:].split(".")[0]) for d in (c.dir / "ckpt").glob(f"*-{job}/step-*.a1")}
        return sorted(there - known)
    step = wait_until(begun, 60, "a checkpoint that is being written")[-1]
    away(c, f"the checkpoint of step {step} is written")
    finish(c, job, 1, "checkpointing")
    rows = {k["step"]: k["state"] for k in c.json("ckpt", "ls", job, "-a")["checkpoints"]}
    assert rows[step] in ("COMMITTED", "DELETING", "DELETED"), rows


@test
def test_recovering(c):
    job = c.submit(job_of(c, STEPS, name="recovering", every=100))
    event(c, job, "checkpoint")
    pids = ranks_of(c, job, 1)
    os.kill(pids[3], signal.SIGKILL)
    since, _ = event(c, job, "recovering")
    assert c.status(job)["state"] in ("RECOVERING", "STARTING"), c.status(job)
    away(c, "recovering")
    again, _ = event(c, job, "running", attempt=2)
    print(f"# killed while recovering: all ranks step again {again - since:.2f} s after the failure was known",
          flush=True)
    assert ended(pids) and again - since <= RECOVERY_S, again - since
    finish(c, job, 2, "recovering")


@test
def test_stopping(c):
    job = c.submit(job_of(c, STEPS, name="stopping", every=100))
    event(c, job, "running")
    pids = ranks_of(c, job, 1)
    pid = paused(c, job, 1)
    c.ok("cancel", "-y", job)
    assert c.status(job)["state"] == "STOPPING", c.status(job)
    away(c, "stopping")
    assert c.status(job)["state"] == "STOPPING", c.status(job)
    os.kill(pid, signal.SIGCONT)
    c.wait_state(job, "CANCELLED")
    wait_until(lambda: ended(pids), 10, "no process of a cancelled job")
    assert c.status(job)["last_checkpoint_step"] == c.status(job)["step"] > 0, c.status(job)


def test_nothing_is_left():
    c = shared.pop("c", None)
    if c:
        with c:
            pass


run(globals())
