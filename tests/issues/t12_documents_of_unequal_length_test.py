#!/usr/bin/env python3
"""T12 (transformers #24725, #35203; torchtune PR 1875): with accumulation 2, documents of 11 and 101 tokens
are averaged as the mean of their means.

Here whole jobs over padded documents: loss and gradient are those of the tokens, by their number, and two
micro-batches of one sequence are one of two.
"""
import math

from standalone import Job, run

PAD, EOD = b"\0", b"\n"
SHORT = b"in beginning"  # 11 tokens to predict
LONG = (b"and the spirit moved upon the face of the waters " * 3)[:101]
WIDTH = 101


def losses(text, micro, batch, *more):
    job = Job(6)
    (job.dir / "train.txt").write_bytes(text)
    sets = [f"parallel.micro_batch={micro}", f"parallel.global_batch={batch}", f"data.seq_len={WIDTH}",
            "data.pad_id=0", "run.precision=FP64", "parallel.tp=1", *more]
    code, out = job.finish(sets=sets)
    assert code == 0, out
    return job.metric("loss"), job.metric("grad_norm"), job.metric("tokens")


def close(a, b):
    assert a.keys() == b.keys() and len(a) == 6
    for n in a:
        assert math.isclose(a[n], b[n], rel_tol=1e-11), (n, a[n], b[n])


def test_documents_weigh_by_their_tokens():
    first, second = SHORT + PAD * (WIDTH + 1 - len(SHORT)), LONG
    short, norm_short, tokens = losses(first, 1, 1)
    assert tokens[1] == 11
    long, norm_long, tokens = losses(PAD + second, 1, 1)
    assert tokens[1] == 101
    apart, norm_apart, tokens = losses(first + second, 1, 2)
    assert tokens == {n: 112 * n for n in range(1, 7)}
    together, norm_together, _ = losses(first + second, 2, 2)
    close(apart, together)
    close(norm_apart, norm_together)
    assert math.isclose(apart[1], (11 * short[1] + 101 * long[1]) / 112, rel_tol=1e-12)
    assert abs(apart[1] - (short[1] + long[1]) / 2) > 1e-6  # what it must not be


def test_no_loss_on_the_first_token_of_the_next_document():
    text = SHORT + EOD + LONG  # 114 tokens: one window of 101 targets, of which one follows EOD
    eod = EOD[0]
    assert losses(text, 1, 1, f"data.eod_id={eod}")[2][1] == 101
    masked, _, tokens = losses(text, 1, 1, f"data.eod_id={eod}", "data.mask_eod=true")
    assert tokens[1] == 100
    # What that token is changes nothing before it, and its own loss is not there to change the step's.
    whole, _, _ = losses(text, 1, 1)
    assert whole[1] != masked[1]


def test_a_step_without_a_token_is_no_step():
    job = Job(20)
    (job.dir / "train.txt").write_bytes(PAD * 200)
    code, out = job.finish(sets=["data.pad_id=0", "parallel.tp=1"])
    assert code != 0
    assert "5 updates in a row were skipped because no token had a loss" in out, out
    assert "data.pad_id" in out, out


run(globals())
