#!/usr/bin/env python3
"""T1, T3, T4: losses after a resume, and after a resume of a resume, are those of a run that never stopped, to the last
bit; the data goes on where it was."""
import os, random, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from jobs import Shared, attempts, job_of, losses, same_losses, twin_of, wait_event, wait_rank_step

STEPS, EVERY = 60, 7
shared = Shared(cpu_slots=2)


def tokens(c, job):
    return {(r["attempt"], r["step"]): r["tokens"] for r in c.json("metrics", job, "--name", "tokens")["metrics"] if "tokens" in r}


@shared
def test_t03_stopped_and_resumed_three_times(c):
    job = c.submit(job_of(c, steps=STEPS, every=0, name="stops"))
    stops = []
    for attempt, step in ((1, 8), (2, 22), (3, 36)):
        wait_rank_step(c, job, attempt, step)
        c.ok("hold", job)
        row = c.wait_state(job, "HELD", deadline=40)
        stops.append(row["step"])
        assert row["last_checkpoint_step"] == row["step"], row
        c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert [a["from_step"] for a in attempts(c, job)] == [0, *stops], attempts(c, job)
    assert same_losses(c, job, twin_of(c, steps=STEPS, every=0), STEPS) == 0, "nothing is done twice"


@shared
def test_t01_t04_killed_at_random_steps(c):
    rng = random.Random(11)
    job = c.submit(job_of(c, steps=STEPS, every=EVERY, name="dies"))
    for attempt, low in ((1, 8), (2, 24), (3, 40)):
        wait_rank_step(c, job, attempt, low + rng.randrange(6))
        os.kill(c.rank_pids(job, attempt)[rng.randrange(2)], signal.SIGKILL)
        wait_event(c, job, "running", attempt=attempt + 1)
    c.wait_state(job, "COMPLETED")
    replayed = same_losses(c, job, twin_of(c, steps=STEPS, every=EVERY), STEPS)
    per_step = 48 * 64
    assert all(n == step * per_step for (_, step), n in tokens(c, job).items()), "tokens consumed go on, not from 0"
    distinct = [next(iter(x.values())) for x in losses(c, job).values()]
    assert len(set(distinct)) == len(distinct), "no batch comes twice"
    print(f"# 3 kills, {replayed} steps replayed with the same losses")


test_nothing_is_left = shared.last

run(globals())
