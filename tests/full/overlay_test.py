#!/usr/bin/env python3
# time limit: 900
"""200 steps of a two-layer model from one start: the losses of tp 1, 2, 4, pp 1, 2 and dp 1, 2 lie on one curve.

The model of BOOST's parity runs, scaled to a CPU: 2 layers, hidden 64, width 192, 8 heads, rank 16, rate 3e-3 after
30 steps. In double precision nothing but the order of sums differs, and what training makes of 1e-16 in 200
steps; in single precision it makes 1e-5 of 1e-8.
"""
import os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "issues"))
from standalone import Job, run

STEPS = 200
MODEL = ["model.hidden=64", "model.intermediate=192", "model.heads=8", "model.kv_heads=8", "model.rank=16",
         "data.seq_len=32", "parallel.global_batch=8", "parallel.micro_batch=2", "optimizer.lr=3e-3",
         "optimizer.warmup_steps=30", "checkpoint.every_steps=0"]
LAYOUTS = {"tp 2": (2, 1, 1, 0), "tp 4": (4, 1, 1, 0), "pp 2": (1, 2, 1, 0), "dp 2": (1, 1, 2, 0),
           "dp 2 zero": (1, 1, 2, 1), "tp 2 pp 2 dp 2": (2, 2, 2, 1)}


def curve(job, layout, precision):
    tp, pp, dp, zero = layout
    code, text = job.finish(sets=MODEL + [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.dp={dp}",
                                          f"parallel.zero={zero}", f"run.precision={precision}"])
    assert code == 0, text
    loss = job.metric("loss")
    assert sorted(loss) == list(range(1, STEPS + 1))
    return [loss[s] for s in sorted(loss)]


def overlay(precision, early, late):
    job = Job(STEPS)
    one = curve(job, (1, 1, 1, 0), precision)
    assert one[-1] < 0.6 * one[0], "it learns, so the comparison means something"
    for name, layout in LAYOUTS.items():
        off = [abs(a / b - 1) for a, b in zip(curve(job, layout, precision), one)]
        print(f"# {precision} {name}: to step 10 {max(off[:10]):.1e}, to step {STEPS} {max(off):.1e}")
        assert max(off[:10]) < early and max(off) < late, (name, max(off[:10]), max(off))


def test_in_double_precision():
    overlay("FP64", 1e-13, 1e-11)


def test_in_single_precision():
    overlay("FP32", 1e-6, 1e-3)


run(globals())
