#!/usr/bin/env python3
"""D56, T9: a newest checkpoint that is torn or damaged is passed over for the one before, and that is said."""
import os, shutil, signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run, wait_until
from jobs import (Shared, attempts, endless, job_of, same_losses, twin_of, wait_committed, wait_event, wait_rank_step)

STEPS = 60
shared = Shared(cpu_slots=2)


def held_with_checkpoints(c, name, at_least=3):
    """Stopped with some committed checkpoints, newest last."""
    job = c.submit(job_of(c, steps=STEPS, every=8, name=name))
    wait_rank_step(c, job, 1, 26)
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    return job, committed(c, job)


def committed(c, job):
    return [k for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"]


def goes_on(c, job, from_step, says):
    c.ok("release", job)
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == from_step, attempts(c, job)
    text = c.ok("events", job)
    for what in says:
        assert what in text, (what, text)
    same_losses(c, job, twin_of(c, steps=STEPS, every=8), STEPS)


@shared
def test_d56_a_flipped_byte_in_the_newest(c):
    job, ks = held_with_checkpoints(c, "flipped")
    shards = sorted(f for f in os.listdir(ks[-1]["path"]) if f.endswith(".safetensors"))
    path = os.path.join(ks[-1]["path"], shards[1])
    with open(path, "r+b") as f:
        f.seek(os.path.getsize(path) // 2)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 1]))
    goes_on(c, job, ks[-2]["step"], ["checkpoint-damaged", f"checkpoint of step {ks[-1]['step']} does not verify",
                                     shards[1], f"the one of step {ks[-2]['step']} is tried"])
    note, = [k.get("note", "") for k in c.json("ckpt", "ls", job, "-a")["checkpoints"]
             if (k["step"], k["attempt"]) == (ks[-1]["step"], 1)]
    assert "damaged" in note, note


@shared
def test_d56_a_cut_shard_and_a_missing_one(c):
    job, ks = held_with_checkpoints(c, "cut")
    one = os.path.join(ks[-1]["path"], sorted(f for f in os.listdir(ks[-1]["path"]) if f.endswith(".safetensors"))[0])
    os.truncate(one, os.path.getsize(one) - 1)
    shutil.rmtree(ks[-2]["path"])
    goes_on(c, job, ks[-3]["step"], [f"step {ks[-1]['step']} does not verify", f"step {ks[-2]['step']} does not verify"])


@shared
def test_d56_nothing_left_starts_from_the_beginning_and_says_so(c):
    job, ks = held_with_checkpoints(c, "all-gone")
    for k in ks:
        shutil.rmtree(k["path"])
    goes_on(c, job, 0, ["no committed checkpoint of it verifies"])


@shared
def test_t09_sigkill_in_the_middle_of_a_write(c):
    """Shards of a quarter MiB, written at 0.2 MiB/s: a rank is killed while the last one is on its way."""
    spec = job_of(c, steps=STEPS, every=0, name="torn")
    job = c.submit(spec, "--set", "checkpoint.write_mib_s=0.2")
    wait_rank_step(c, job, 1, 10)
    c.ok("checkpoint", job)
    first = wait_committed(c, job)
    base = os.path.dirname(committed(c, job)[0]["path"])

    def writing():
        """Directories that hold something and no manifest."""
        found = []
        for d in os.listdir(base):
            try:
                inside = os.listdir(os.path.join(base, d))
            except FileNotFoundError:
                continue
            if inside and "manifest.json" not in inside:
                found.append(d)
        return found
    torn = wait_until(writing, 20, "a checkpoint being written")
    os.kill(c.rank_pids(job, 1)[0], signal.SIGKILL)
    wait_event(c, job, "running", attempt=2)
    assert attempts(c, job)[1]["from_step"] == first, (attempts(c, job), torn)
    wait_until(lambda: not [d for d in writing() if ".a1" in d], 10, "what attempt 1 left half-written is cleared away")
    c.wait_state(job, "COMPLETED")
    same_losses(c, job, twin_of(c, steps=STEPS, every=8), STEPS)


test_nothing_is_left = shared.last

run(globals())
