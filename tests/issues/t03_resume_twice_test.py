#!/usr/bin/env python3
"""T3 (torchtitan PR 647): stop and resume twice; the second save wrote the loaded, old state.

Here a run that is stopped and resumed twice is the straight run bit for bit.
"""
from standalone import Job, run

STEPS = 1500


def test_resume_of_a_resume_is_the_straight_run():
    straight = Job(STEPS)
    assert straight.finish()[0] == 0
    want = straight.metric("loss")
    job, got = Job(STEPS), {0: None}
    for more in (20, 20, None):
        have, stop_after = job.checkpoints(), more and max(got) + more  # on a busy machine a run is far ahead of its log
        code, text = job.finish(have[-1] if have else None, stop_after=stop_after)
        assert code == 0, text
        got.update(job.metric("loss"))
        if stop_after:
            assert max(got) < STEPS, "stopped too late to resume"
            assert job.checkpoints()[-1].name.startswith(f"step-{max(got)}.a"), "the stop saved its own step"
    del got[0]
    assert got == want


run(globals())
