#!/usr/bin/env python3
"""T7 (Megatron-LM #1713): a checkpoint written behind is that of its own step, however far training is by then.
T10 (DeepSpeed #2898, #3810): a state saved on so many ranks is loaded on fewer and on more."""
import shutil

from standalone import Job, run


def test_t07_a_slow_write_holds_the_state_of_its_step():
    quick, slow = Job(60), Job(60)
    code, text = quick.finish(sets=["run.steps=60", "checkpoint.every_steps=10"])
    assert code == 0, text
    # 60 kB at 0.05 MiB/s: a second, in which all other steps are done
    code, text = slow.finish(sets=["run.steps=60", "checkpoint.every_steps=10", "checkpoint.write_mib_s=0.05"])
    assert code == 0 and "postponed" in text, text
    same = [d.name for d in slow.checkpoints() if d.name in {x.name for x in quick.checkpoints()}]
    assert "step-10.a1" in same, same
    for name in same:
        for shard in (slow.dir / "ckpt" / name).glob("*.safetensors"):
            assert shard.read_bytes() == (quick.dir / "ckpt" / name / shard.name).read_bytes(), (name, shard.name)


def test_t10_saved_on_four_ranks_loaded_on_two_and_one_and_back():
    job = Job(20)
    layouts = {4: ["parallel.tp=2", "parallel.dp=2"], 2: ["parallel.tp=1", "parallel.pp=2"], 1: ["parallel.tp=1"]}
    code, text = job.finish(sets=layouts[4])
    assert code == 0, text
    want = job.metric("loss")
    base = job.dir / "ckpt" / "step-10.a1"
    for n, sets in layouts.items():
        code, text = job.finish(base, sets=sets)
        assert code == 0, (n, text)
        got = job.metric("loss")
        assert set(got) == set(range(11, 21)), got
        for step, loss in got.items():
            assert abs(loss - want[step]) < 1e-5 * abs(want[step]), (n, step, loss, want[step])
        for old in (job.dir / "ckpt").glob("step-20.a2"):
            shutil.move(old, job.dir / f"from-{n}")
    # saved on one, loaded on four
    one = job.dir / "ckpt" / "step-20.a2"
    shutil.move(job.dir / "from-1", one)
    code, text = job.finish(one, sets=[*layouts[4], "run.steps=22"])
    assert code == 0, text


run(globals())
