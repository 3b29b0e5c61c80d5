#!/usr/bin/env python3
# time limit: 600
"""Whole runs of one rank on a GPU: a resume repeats every bit, with and without captured steps; a checkpoint of the CPU
goes on on the GPU and back."""
import os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "issues"))
import gpu
from standalone import Job, run

MODEL = ["model.hidden=256", "model.layers=3", "model.intermediate=512", "model.heads=4", "model.kv_heads=2",
         "model.rank=64", "data.seq_len=128", "parallel.tp=1", "parallel.micro_batch=4", "parallel.global_batch=8",
         "optimizer.lr=1e-3", "optimizer.warmup_steps=10", "run.precision=BF16"]
CUDA, CPU = ["resources.device=CUDA"], ["resources.device=CPU"]
STEPS = 60


def newest(job):
    found = [d for d in (job.dir / "ckpt").glob("step-*.a*") if list(d.glob("rank-00000-of-00001.safetensors"))]
    return max(found, key=lambda d: [int(x) for x in d.name[5:].split(".a")])


def losses(job, **options):
    code, text = job.finish(**options)
    assert code == 0, text
    return job.metric("loss"), job.metric("grad_norm")


def test_a_resumed_run_repeats_every_bit():
    gpu.need()
    whole, norms = losses(Job(STEPS), sets=MODEL + CUDA)
    assert whole[STEPS] < 0.8 * whole[1], (whole[1], whole[STEPS])
    job = Job(STEPS)
    code, _ = job.finish(sets=MODEL + CUDA, stop_after=35, how=9)
    assert code == -9
    first = job.metric("loss")
    again, again_norms = losses(job, resume=newest(job), sets=MODEL + CUDA)
    start = min(again)
    assert start > 1 and max(again) == STEPS, (start, max(again))
    for step, loss in {**first, **again}.items():
        assert loss == whole[step], f"step {step}: {loss!r}, undisturbed {whole[step]!r}"
    for step, norm in again_norms.items():
        assert norm == norms[step], f"step {step}: norm {norm!r}, undisturbed {norms[step]!r}"
    print(f"# {STEPS} steps, resumed at {start}: losses and norms equal to the bit; loss {whole[1]:.4f} to {whole[STEPS]:.4f}")


def test_captured_steps_are_the_plain_ones():
    gpu.need()
    captured, norms = losses(Job(20), sets=MODEL + CUDA)
    os.environ["BOOST_CUDA_GRAPHS"] = "0"
    try:
        plain, plain_norms = losses(Job(20), sets=MODEL + CUDA)
    finally:
        del os.environ["BOOST_CUDA_GRAPHS"]
    assert captured == plain and norms == plain_norms


def carry_over(first, second):
    """A run on `first` to step 20; step 21 on both and on the CPU in fp32, from that checkpoint."""
    job = Job(40)
    code, text = job.finish(sets=MODEL + first + ["run.steps=20"])
    assert code == 0, text
    at = newest(job)
    there = losses(job, resume=at, sets=MODEL + second + ["run.steps=21"])[0][21]
    here = losses(job, resume=at, sets=MODEL + first + ["run.steps=21"])[0][21]
    exact = losses(job, resume=at, sets=MODEL + CPU + ["run.steps=21", "run.precision=FP32"])[0][21]
    print(f"# from {first[0]} to {second[0]}: loss of step 21 {there:.6f}, staying {here:.6f}, in fp32 {exact:.6f}")
    # both are bf16's rounding of one number; its mean over 1024 tokens is known to about 1e-3 of itself
    assert abs(there - exact) <= max(2 * abs(here - exact), 1e-3 * exact)


def test_a_checkpoint_of_the_cpu_goes_on_on_the_gpu():
    gpu.need()
    carry_over(CPU, CUDA)


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu():
    gpu.need()
    carry_over(CUDA, CPU)


run(globals())
