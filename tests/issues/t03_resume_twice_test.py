#!/usr/bin/env python3
"""T3 (torchtitan PR 647): stop and resume twice; the second save wrote the loaded, old state.

Here a run that is stopped and resumed twice is the straight run bit for bit.
"""
from standalone import Job, run


def test_resume_of_a_resume_is_the_straight_run():
    straight = Job(400)
    assert straight.finish()[0] == 0
    want = straight.metric("loss")
    job, got = Job(400), {}
    for stop_after in (20, 60, None):
        have = job.checkpoints()
        code, text = job.finish(have[-1] if have else None, stop_after=stop_after)
        assert code == 0, text
        got.update(job.metric("loss"))
        if stop_after:
            assert max(got) < 400, "stopped too late to resume"
            assert job.checkpoints()[-1].name.startswith(f"step-{max(got)}.a"), "the stop saved its own step"
    assert got == want


run(globals())
