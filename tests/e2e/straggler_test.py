#!/usr/bin/env python3
"""A rank that is slowed from outside, by stopping it again and again, is named with its node; nothing else happens."""
import os, signal, threading, time

from harness import run, wait_until
from jobs import Shared, endless, wait_rank_step

shared = Shared(cpu_slots=2)


class Brake:
    """Lets a process run a fifth of the time, in pieces shorter than a step: one long stop in many steps would leave
    most of them as they were."""

    def __init__(self, pid):
        self.pid, self.off = pid, threading.Event()
        self.thread = threading.Thread(target=self._work)

    def _work(self):
        while not self.off.is_set():
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(0.006)
            os.kill(self.pid, signal.SIGCONT)
            self.off.wait(0.0015)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.off.set()
        self.thread.join()


@shared
def test_slowed_and_named(c):
    job = c.submit(endless(c, tp=2))
    wait_rank_step(c, job, 1, 20)
    pids = c.rank_pids(job, 1)
    with Brake(pids[1]):
        event = wait_until(lambda: [e for e in c.events(job) if e["kind"] == "straggler" and e["node"] == "n1" and
                                    e["text"].startswith("rank 1 on n1 is slow: ")], 60, "a straggler")[-1]
        assert "times" in event["text"], event
        wait_until(lambda: "rank 1 on n1" in c.status(job)["info"] and "slow" in c.status(job)["info"], 5, "the hint")
        slow = [s for s in c.json("show", job)["stragglers"] if s["rank"] == 1]  # a busy machine may slow the other too
        assert len(slow) == 1 and slow[0]["node"] == "n1" and slow[0]["factor"] >= 1.15, slow
        assert slow[0]["outside_ms"] > slow[0]["fastest_ms"] or slow[0]["against"] == "ITSELF", slow
        assert "slow ranks" in c.ok("show", job), c.ok("show", job)
    row = c.status(job)
    assert row["state"] == "RUNNING" and row["attempt"] == 1 and c.rank_pids(job, 1) == pids, row
    c.ok("cancel", job, "--now")
    c.wait_state(job, "CANCELLED")


test_nothing_is_left = shared.last

run(globals())
