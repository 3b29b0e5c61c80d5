#!/usr/bin/env python3
"""T4 (KempnerForge #51, Megatron-Bridge PR 3503, prime-diloco #97): killed mid-epoch, the resumed run
starts again at sample 0.

Here the next batch is the next unseen one, and the tokens consumed go on counting.
"""
import signal

from standalone import BATCH, SEQ, Job, run, wait_until


def test_data_goes_on_where_it_was():
    straight = Job(600)
    assert straight.finish()[0] == 0
    job = Job(600)
    child = job.start()
    wait_until(job.checkpoints, 20, "a first checkpoint")
    child.send_signal(signal.SIGKILL)
    child.communicate()
    at = job.checkpoints()[-1]
    assert child.returncode == -signal.SIGKILL
    step = int(at.name[5:].split(".a")[0])
    code, text = job.finish(at)
    assert code == 0, text
    tokens = job.metric("tokens")
    assert min(tokens) == step + 1
    assert all(tokens[n] == n * BATCH * SEQ for n in tokens)
    want = straight.metric("loss")
    assert job.metric("loss") == {n: want[n] for n in range(step + 1, 601)}


run(globals())
