#!/usr/bin/env python3
"""Checkpoints besides those of the interval, of four ranks (tp 2, dp 2): on demand, on SIGTERM, at a time limit, before a
preemption, a hold, a drain and a cancel. All ranks write the same step, none is lost, and where the write fails the user is
told."""
# time limit: 240
import json, os, signal, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run, wait_until
from jobs import Shared, attempts, job_of, same_losses, tiny_job, wait_event, wait_rank_step
from shards import read_file

shared = Shared(cpu_slots=4, boostd_set={"preempt": "true", "preempt_gap": 20})
STEPS = 90
state = {}


def cut(text):
    return text.replace("tp: 2 micro_batch: 48", "tp: 2 dp: 2 micro_batch: 24")


def started(c, name, steps=STEPS, extra=""):
    """A job on four ranks that has done some steps and has no interval."""
    job = c.submit(cut(job_of(c, steps=steps, every=0, name=name, extra=extra)))
    wait_rank_step(c, job, 1, 15)
    return job


def twin(c):
    if "twin" not in state:
        state["twin"] = c.submit(cut(job_of(c, steps=STEPS, every=0, name="twin")))
        c.wait_state(state["twin"], "COMPLETED")
    return state["twin"]


def demand(c, job):
    c.ok("checkpoint", job)


def sigterm(c, job):
    """Of one rank alone: what it votes for all do."""
    os.kill(c.rank_pids(job, 1)[2], signal.SIGTERM)


def preempt(c, job):
    high = c.submit(tiny_job(c, steps=5, every=0, tp=2, name="high", extra="priority: 90"))
    c.wait_state(high, "COMPLETED")


def hold(c, job):
    c.ok("hold", job)
    c.wait_state(job, "HELD")
    c.ok("release", job)


def drain(c, job):
    c.ok("node", "drain", "n1", "--reason", "a test", "--deadline", "0s")
    c.wait_state(job, "QUEUED")
    c.ok("node", "resume", "n1")


def committed(c, job, attempt=1):
    return [k for k in c.json("ckpt", "ls", job, "-a")["checkpoints"]
            if k["attempt"] == attempt and k["state"] == "COMMITTED"]


def one_step_of_all(c, job, k):
    """Four shards that say the same step and position, which together are a whole checkpoint."""
    assert k["shards"] == 4, k
    said = []
    for rank in range(4):
        _, meta = read_file(os.path.join(k["path"], f"rank-{rank:05d}-of-00004.safetensors"))
        assert (meta["rank"], meta["layout"]) == (str(rank), "tp=2 pp=1 dp=2"), meta
        said.append({x: meta[x] for x in ("step", "samples", "tokens", "adam_t", "attempt")})
    assert all(x == said[0] for x in said) and int(said[0]["step"]) == k["step"] and said[0]["attempt"] == "1", said
    answer = json.loads(c.ok("-o", "json", "ckpt", "verify", f"{job}@{k['step']}"))
    assert answer["sound"] and not answer["faults"], answer


def goes_on(occasion):
    """The job loses no step: one checkpoint, of the step at which all stopped; the rest has the twin's losses."""
    def test(c):
        want = twin(c)
        job = started(c, occasion.__name__)
        occasion(c, job)
        row = c.wait_state(job, "COMPLETED")
        found = committed(c, job)
        if occasion is demand:
            assert row["attempt"] == 1 and len(found) == 2 and found[-1]["step"] == STEPS, (row, found)
        else:
            first, second = attempts(c, job)
            assert len(found) == 1 and second["from_step"] == first["to_step"] == found[0]["step"], (found, first, second)
        assert 15 < found[0]["step"] < STEPS, found
        one_step_of_all(c, job, found[0])
        replayed = same_losses(c, job, want, STEPS)
        assert not replayed, f"{replayed} steps were done twice"
    test.__name__ = f"test_{occasion.__name__}"
    return shared(test)


test_demand = goes_on(demand)
test_sigterm = goes_on(sigterm)
test_preemption = goes_on(preempt)
test_hold = goes_on(hold)
test_drain = goes_on(drain)


@shared
def test_time_limit_and_cancel(c):
    limited = started(c, "limited", steps=1_000_000, extra="time_limit_s: 2")
    row = c.wait_state(limited, "TIMEOUT")
    cancelled = started(c, "cancelled", steps=1_000_000)
    c.ok("cancel", cancelled)
    for job, row in ((limited, row), (cancelled, c.wait_state(cancelled, "CANCELLED"))):
        k = committed(c, job)
        assert len(k) == 1 and k[0]["step"] == row["step"] == attempts(c, job)[0]["to_step"], (k, row)
        one_step_of_all(c, job, k[0])


@shared
def test_a_write_that_fails_is_told(c):
    """Where the job's directory should be there is a file."""
    base = os.path.dirname(committed(c, state["twin"])[0]["path"])
    store = os.path.basename(base).split("-")[0]

    def spoiled(name, **options):
        job = started(c, name, steps=1_000_000, **options)
        path = Path(base).parent / f"{store}-{job}"
        path.rmdir()  # made and tried before the job started
        path.write_text("")
        return job, path

    def told(job, *states):
        row = c.wait_state(job, states)
        event = wait_event(c, job, "checkpoint-abandoned")
        step = int(event["text"].split("of step ")[1].split()[0])
        assert "could not write its shard" in event["text"] and "is not a directory" in event["text"], event
        assert f"no checkpoint of step {step}" in row["info"] and "is not a directory" in row["info"], row
        assert not committed(c, job)
        return row, step

    job, path = spoiled("demand")
    c.ok("checkpoint", job)
    wait_until(lambda: "no checkpoint" in c.status(job)["info"], 20, "the failure in status")
    told(job, "RUNNING")
    path.unlink()
    path.mkdir()  # mended: the next one is written
    c.ok("checkpoint", job)
    wait_until(lambda: committed(c, job), 20, "the next checkpoint")
    assert "no checkpoint" not in c.status(job)["info"]
    c.ok("cancel", "--now", job)

    for name, what, states, says in (
            ("cancel", lambda j: c.ok("cancel", j), "CANCELLED", "cancelled by"),
            ("hold", lambda j: c.ok("hold", j), "HELD", "held by")):
        job, path = spoiled(name)
        what(job)
        row, step = told(job, states)
        assert says in row["info"] and row["step"] == step, row
        if states == "HELD":
            c.ok("cancel", job)

    job, path = spoiled("limit", extra="time_limit_s: 2")
    row, step = told(job, "TIMEOUT")
    assert "time limit of 2 s" in row["info"] and row["step"] == step, row

    job, path = spoiled("preempted")
    preempt(c, job)
    queued = wait_event(c, job, "queued", attempt=1)
    assert "preempted" in queued["text"] and "no checkpoint of step" in queued["text"], queued
    c.ok("cancel", "--now", "-y", job)

    job, path = spoiled("sigterm")
    sigterm(c, job)
    event = wait_event(c, job, "checkpoint-abandoned", attempt=1)
    assert "could not write its shard" in event["text"], event
    assert "from the beginning" in wait_event(c, job, "recovering")["text"]
    path.unlink()
    c.ok("cancel", "--now", "-y", job)
    c.wait_state(job, "CANCELLED")


test_nothing_is_left = shared.last

run(globals())
