#!/usr/bin/env python3
"""T4 (KempnerForge #51, Megatron-Bridge PR 3503, prime-diloco #97), with several weighted files of several
formats: a resumed run starts some of its files again, or all.

Here it goes on with the next sample, also when the step is cut into other micro-batches than before.
"""
import math, re, struct

from standalone import Job, run


def with_mixture():
    job = Job(60)
    text = (job.dir / "train.txt").read_bytes()
    half = text[:900]
    (job.dir / "a.bin").write_bytes(struct.pack("<256i", 20240520, 1, len(half), *[0] * 253)
                                    + struct.pack(f"<{len(half)}H", *half))
    (job.dir / "b.bin").write_bytes(struct.pack("<500i", *text[1000:1500]))
    (job.dir / "b.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q2q", 1, 4, 2, 2, 200, 300, 0, 800, 0, 2))
    files = "".join(f'train {{ path: "{job.dir}/{name}" weight: {weight} }} '
                    for name, weight in (("a.bin", 0.5), ("b.idx", 0.2)))
    spec = (job.dir / "job.pbtxt").read_text()
    spec = re.sub(r'train \{ path: "[^"]*" \} format: TEXT', files + "format: AUTO", spec)
    (job.dir / "job.pbtxt").write_text(spec)
    return job


def test_the_mixture_goes_on_where_it_was():
    sets = ["run.precision=FP64"]
    straight, job = with_mixture(), with_mixture()
    code, text = straight.finish(sets=sets)
    assert code == 0, text
    assert "a.bin, 900 tokens, 56 windows, 5 of 7 samples" in text, text
    assert "b.bin, 500 tokens, 31 windows, 2 of 7 samples" in text, text
    code, text = job.finish(sets=sets, stop_after=23)
    assert code == 0, text
    at = job.checkpoints()[-1]
    step = int(at.name[5:].split(".a")[0])
    assert 23 <= step < 60
    code, text = job.finish(at, sets=[*sets, "parallel.micro_batch=4"])
    assert code == 0, text
    want, got = straight.metric("loss"), job.metric("loss")
    assert sorted(got) == list(range(step + 1, 61))
    for n in got:
        assert math.isclose(got[n], want[n], rel_tol=1e-9), (n, got[n], want[n])


run(globals())
