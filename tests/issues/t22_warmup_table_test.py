#!/usr/bin/env python3
"""T22 (torchtitan PR 1261, gpt-neox #1373, transformers #34754, Megatron-Bridge #5399): warm-up starts at
rate 0, or lags by one step, or starts again after a resume.

Here lr(1) = peak/warmup, lr(warmup) = peak, lr(last) = final, and a resumed run has the same table.
"""
import math

from standalone import Job, run


def test_the_table_and_the_table_after_a_resume():
    job = Job(60)
    assert job.finish(sets=["optimizer.min_lr_ratio=0.25"])[0] == 0
    lr = job.metric("lr")
    assert math.isclose(lr[1], 1e-2 / 10) and math.isclose(lr[10], 1e-2) and math.isclose(lr[60], 0.25e-2)
    assert max(lr.values()) == lr[10] and len(lr) == 60
    first = next(c for c in job.checkpoints() if c.name != "step-60.a1")
    code, text = job.finish(first, sets=["optimizer.min_lr_ratio=0.25"])
    assert code == 0, text
    again = job.metric("lr")
    assert again and all(again[n] == lr[n] for n in again)


run(globals())
