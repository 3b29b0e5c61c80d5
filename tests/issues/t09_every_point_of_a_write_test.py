#!/usr/bin/env python3
"""T9: a checkpoint's write fails or is killed at every single point of it, one after another.

The rank makes directories and files, writes, syncs, renames and reports: each of these calls is the one that kills the
process before or behind it, that finds the disk full or broken, or that is dropped unnoticed. Whatever happens, the
checkpoint before stays to the bit and resumes, and what carries the name of a shard is whole.
"""
import hashlib, os, shutil, signal

from standalone import BIN, Job, run

FAULTY = BIN.parent / "tests" / "fakes" / "faulty.so"
FIRST, NEXT = 3, 5


def state(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.glob("*"))}


class Scenario:
    """A whole checkpoint of step 3, from which runs go on to step 5, where they write the next."""

    def __init__(self):
        self.job = Job(FIRST)
        code, text = self.job.finish(sets=["checkpoint.every_steps=0"])
        assert code == 0, text
        self.base, = self.job.checkpoints()
        self.before = state(self.base)
        self.good, log = self.go_on("any 0 PASS /step-5")
        assert self.good == 0
        self.calls = [line.split()[0] for line in log]
        self.whole = state(self.newest())
        shutil.rmtree(self.newest())

    def newest(self):
        return self.job.dir / "ckpt" / f"step-{NEXT}.a2"

    def go_on(self, fault):
        log = self.job.dir / "calls"
        log.unlink(missing_ok=True)
        os.environ.update(LD_PRELOAD=str(FAULTY), BOOST_TEST_FAULT=fault, BOOST_TEST_FAULT_LOG=str(log))
        try:
            code, self.text = self.job.finish(self.base, sets=["checkpoint.every_steps=0", f"run.steps={NEXT}"])
        finally:
            for name in ("LD_PRELOAD", "BOOST_TEST_FAULT", "BOOST_TEST_FAULT_LOG"):
                del os.environ[name]
        return code, log.read_text().splitlines() if log.exists() else []

    def check(self, what):
        assert state(self.base) == self.before, f"{what}: the checkpoint before has changed"
        shards = {n: h for n, h in (state(self.newest()) if self.newest().exists() else {}).items()
                  if n.startswith("rank-")}
        for name, digest in shards.items():
            assert self.whole[name] == digest, f"{what}: {name} is torn"
        shutil.rmtree(self.newest(), ignore_errors=True)


def walk(how, killed):
    s = Scenario()
    n = 0
    while True:
        n += 1
        code, log = s.go_on(f"any {n} {how} /step-{NEXT}")
        # of two ranks one may die with a call that is counted and not yet in the log
        touched = code == -signal.SIGKILL if killed else len(log) >= n
        s.check(f"{how} at call {n} of {len(s.calls)} ({log[n - 1] if len(log) >= n else 'none'})")
        if not touched:
            assert code == 0, s.text
            break
        if not killed and code:  # said, and what it was
            assert "No space left" in s.text or "Input/output error" in s.text, (n, s.text)
    assert n > 8, n
    print(f"# {how}: {n - 1} points: {' '.join(s.calls)}")


def test_killed_before_each_call():
    walk("KILL", True)


def test_killed_behind_each_call():
    walk("AFTER", True)


def test_disk_full_from_each_call_on():
    walk("ENOSPC", False)


def test_each_call_fails_once():
    walk("EIO", False)


def test_reports_that_cannot_be_written():
    """The record that tells of a shard: without it nobody counts the shard, and the run says so."""
    s = Scenario()
    for how in ("KILL", "EIO"):
        code, log = s.go_on(f"any 1 {how} .shards")
        assert log, "the record log is elsewhere"
        s.check(f"report {how}")
    code, text = s.job.finish(s.base, sets=["checkpoint.every_steps=0", f"run.steps={NEXT}"])
    assert code == 0 and state(s.newest()) == {**s.whole, **state(s.newest())}, text


run(globals())
