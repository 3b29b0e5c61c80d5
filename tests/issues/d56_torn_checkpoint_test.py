#!/usr/bin/env python3
"""D56, T9: a newest checkpoint that is torn or damaged is passed over for the one before, and that is said."""
# time limit: 240
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


def shards(k):
    return sorted(os.path.join(k["path"], f) for f in os.listdir(k["path"]) if f.endswith(".safetensors"))


def held_again(c, job, attempt):
    """Goes on and is held once it has two newer checkpoints of this attempt; all that are committed."""
    def own():
        return [k for k in committed(c, job) if k["attempt"] == attempt]
    wait_until(lambda: len(own()) >= 2, 30, f"two checkpoints of attempt {attempt}")
    c.ok("hold", job)
    c.wait_state(job, "HELD", deadline=40)
    return committed(c, job)


@shared
def test_d56_every_kind_of_damage_is_named_and_passed_over(c):
    """In turn, of one job: what is wrong with the newest is in the event and in `ckpt verify`, and the one before is taken."""
    job = c.submit(endless(c, tp=2, every=6, name="kinds"), "--set", "checkpoint.keep=100")
    ks = held_again(c, job, 1)

    def half(path):
        os.truncate(path, os.path.getsize(path) // 2)

    def other_step(k):
        shutil.copy(shards(ks[-2])[0], shards(k)[0])

    def linked(path):
        os.rename(path, path + ".away")
        os.symlink(path + ".away", path)
    kinds = [(lambda k: os.unlink(shards(k)[1]), 1, "No such file"),
             (lambda k: half(shards(k)[0]), 0, "bytes"),
             (lambda k: os.truncate(shards(k)[1], 0), 1, "bytes"),
             (other_step, 0, "CRC"),
             (lambda k: linked(shards(k)[1]), 1, "regular file"),
             (lambda k: half(os.path.join(k["path"], "manifest.json")), None, "manifest.json"),
             (lambda k: os.unlink(os.path.join(k["path"], "manifest.json")), None, "manifest.json")]
    for n, (spoil, shard, says) in enumerate(kinds):
        newest, before = ks[-1], ks[-2]
        file = os.path.basename(shards(newest)[shard]) if shard is not None else "manifest.json"
        spoil(newest)
        r = c.ctl("ckpt", "verify", f"{job}@{newest['step']}")
        assert r.rc == 1 and any(file in x and says in x for x in r.out.splitlines()), (n, r)
        c.ok("release", job)
        c.wait_state(job, "RUNNING")
        assert attempts(c, job)[-1]["from_step"] == before["step"], (n, attempts(c, job)[-1], before)
        text = c.ok("events", job)
        line = next(x for x in text.splitlines() if f"checkpoint of step {newest['step']} does not verify" in x)
        assert file in line and f"a resume would take the one of step {before['step']}" in line, (n, line)
        ks = held_again(c, job, n + 2)

    # the same step, written by two attempts: the shard of the one in the place of the other's
    first = next(k for k in ks if k["attempt"] == len(kinds) + 1)
    older = [k for k in ks if k["step"] < first["step"] and "damaged" not in k.get("note", "")][-1]
    c.ok("restart", job, "--from", older["step"])
    ks = held_again(c, job, len(kinds) + 2)
    twice = next(k for k in ks if k["step"] == first["step"] and k["attempt"] == len(kinds) + 2)
    shutil.copy(shards(first)[1], shards(twice)[1])
    for k in ks:
        if k["step"] > twice["step"]:
            os.unlink(shards(k)[0])
    r = c.ctl("ckpt", "verify", f"{job}@{twice['step']}")
    name = os.path.basename(shards(twice)[1])
    assert r.rc == 1 and any(name in x and f"attempt {first['attempt']}" in x for x in r.out.splitlines()), r
    c.ok("release", job)
    c.wait_state(job, "RUNNING")
    assert attempts(c, job)[-1]["from_step"] < twice["step"], attempts(c, job)[-1]
    assert f"checkpoint of step {twice['step']} does not verify" in c.ok("events", job)
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED")


@shared
def test_d56_a_directory_that_is_not_there_is_waited_for(c):
    """As where a file system is not mounted: that says nothing about the checkpoints, and the job does not begin anew."""
    job, ks = held_with_checkpoints(c, "unmounted")
    base = os.path.dirname(ks[-1]["path"])
    for away in (base, os.path.dirname(base)):
        os.rename(away, away + ".away")
        r = c.ctl("ckpt", "verify", job)
        assert r.rc not in (0, 1) and "is not there" in r.err and "mounted" in r.err, r
        c.ok("release", job)
        row = wait_until(lambda: (r := c.status(job)) and "is not there" in r["info"] and r, 20, "the wait in status")
        assert base in row["info"] and "mounted" in row["info"] and "empty directory" in row["info"] and row["state"] == "QUEUED", row
        assert not any(k.get("note") for k in committed(c, job)), committed(c, job)
        os.rename(away + ".away", away)
        if away == base:
            wait_event(c, job, "running", attempt=2)
            assert attempts(c, job)[-1]["from_step"] == ks[-1]["step"], attempts(c, job)
            c.ok("hold", job)
            c.wait_state(job, "HELD", deadline=40)
            ks = committed(c, job)
    c.wait_state(job, "COMPLETED")
    assert attempts(c, job)[-1]["from_step"] == ks[-1]["step"], attempts(c, job)
    assert "does not verify" not in c.ok("events", job)
    same_losses(c, job, twin_of(c, steps=STEPS, every=8), STEPS)


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
