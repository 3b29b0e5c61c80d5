#!/usr/bin/env python3
"""Jobs cut over replicas and pipeline stages: ranks are processes, the losses are those of one rank, and a rank
that is killed changes nothing but the time."""
import os, signal

from harness import run
from jobs import Shared, job_of, losses, same_losses, wait_committed

STEPS = 20
shared = Shared(cpu_slots=4)


def job(c, name, layout, every=0):
    text = job_of(c, steps=STEPS, every=every, name=name, tp=1, layers=3, hidden=32, seq_len=16)
    return c.submit(text, *layout)


def evals(c, job):
    return {r["step"]: r["eval_loss"] for r in c.json("metrics", job)["metrics"] if "eval_loss" in r}


def sets(**fields):
    return [x for k, v in fields.items() for x in ("--set", f"{k.replace('__', '.')}={v}")]


@shared
def test_losses_do_not_depend_on_the_layout(c):
    common = dict(run__precision="FP64", run__eval_every=10, parallel__micro_batch=2, resources__threads_per_rank=1)
    one = job(c, "one", sets(**common))
    c.wait_state(one, "COMPLETED", deadline=90)
    want = losses(c, one)
    for name, layout in {
        "dp2-pp2": dict(parallel__dp=2, parallel__pp=2),
        "dp4-zero": dict(parallel__dp=4, parallel__zero=1),
        "tp2-pp2": dict(parallel__tp=2, parallel__pp=2, model__tie_embeddings="false"),
    }.items():
        other = job(c, name, sets(**common, **layout))
        c.wait_state(other, "COMPLETED", deadline=120)
        got = losses(c, other)
        assert got.keys() == want.keys(), name
        worst = max(abs(got[s][1] / want[s][1] - 1) for s in want)
        assert worst < 1e-9, f"{name}: losses differ by {worst:.1e}"
        a, b = evals(c, one), evals(c, other)
        assert a.keys() == b.keys() and len(a) >= 2 and all(abs(a[s] / b[s] - 1) < 1e-9 for s in a), (name, a, b)


@shared
def test_a_killed_stage_costs_time_only(c):
    layout = sets(parallel__dp=2, parallel__pp=2, parallel__zero=1, parallel__micro_batch=2, resources__threads_per_rank=1)
    twin = job(c, "peace", layout, every=5)
    c.wait_state(twin, "COMPLETED", deadline=120)
    hurt = job(c, "hurt", layout, every=5)
    wait_committed(c, hurt, 5)
    os.kill(c.rank_pids(hurt, 1)[2], signal.SIGKILL)  # first replica of the second stage
    row = c.wait_state(hurt, "COMPLETED", deadline=120)
    assert row["attempt"] == 2, row
    same_losses(c, hurt, twin, STEPS)


test_nothing_is_left = shared.last

if __name__ == "__main__":
    run(globals())
