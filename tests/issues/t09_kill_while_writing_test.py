#!/usr/bin/env python3
"""T9 (pytorch-lightning #688): SIGKILL while a checkpoint is written; loading it fails with EOF.

Here a shard has its name only when it is whole and on disk: the torn directory is told from a
checkpoint, the one before it resumes.
"""
import signal, time

from standalone import Job, run


def test_a_torn_checkpoint_is_never_taken_for_one():
    job = Job(60)
    assert job.finish(stop_after=30)[0] == 0
    whole = job.checkpoints()
    # 60 kB at 0.02 MiB/s: three seconds a shard
    child = job.start(whole[-1], sets=["checkpoint.write_mib_s=0.02", "run.steps=100000", "run.log_every=100"])
    end = time.monotonic() + 20
    while not (torn := [t for t in (job.dir / "ckpt").glob("*.a2/.*.tmp") if t.stat().st_size]):
        assert time.monotonic() < end, "no checkpoint was begun"
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.stdout.read()
    assert child.wait() == -signal.SIGKILL
    assert job.checkpoints() == whole, "a torn shard carries the name of a whole one"
    code, text = job.finish(torn[0].parent)
    assert code != 0 and "safetensors" in text, text
    code, text = job.finish(whole[-1])
    assert code == 0, text


run(globals())
