#!/usr/bin/env python3
"""D15 (skypilot#1507, #3863, #4552): "database is locked" when another program writes, or under many requests.

Here one thread writes; an outside program that holds the write lock for 3 s delays submits, fails
none, and keeps nobody from looking.
"""
import os, sqlite3, sys, threading, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import Cluster, run, tiny_job

HOLD_S = 3.0


def test_an_outside_lock_delays_a_submit_and_fails_nothing():
    with Cluster(agents=0) as c:
        c.submit(tiny_job(c, name="before"), "--hold")
        other = sqlite3.connect(c.state_dir / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        done = {}

        def submit():
            start = time.monotonic()
            done["id"] = c.submit(tiny_job(c, name="during"), "--hold")
            done["took"] = time.monotonic() - start
        worker = threading.Thread(target=submit)
        released = time.monotonic() + HOLD_S
        worker.start()
        slowest = 0.0
        while time.monotonic() < released:  # the loop goes on answering
            start = time.monotonic()
            assert "before" in c.ok("status")
            slowest = max(slowest, time.monotonic() - start)
            assert "id" not in done, "acknowledged while its commit could not be durable"
        other.execute("ROLLBACK")
        other.close()
        worker.join(20)
        assert done["id"] == 2 and done["took"] >= HOLD_S * 0.9, done
        assert slowest < 1.0, f"a look took {slowest:.2f} s"


def test_a_thousand_cancels_at_once():
    with Cluster(agents=0) as c:
        spec = c.dir / "job.pbtxt"
        spec.write_text(tiny_job(c))
        ids = []

        def submit(n):
            for _ in range(n):
                ids.append(c.submit(spec, "--hold"))
        first = [threading.Thread(target=submit, args=(25,)) for _ in range(8)]
        for t in first:
            t.start()
        for t in first:
            t.join()
        assert sorted(ids) == list(range(1, 201))
        failed = []

        def cancel(mine):  # five requests of 40 jobs each from every thread: each job is cancelled five times
            for _ in range(5):
                r = c.ctl("cancel", "-y", *mine)
                if r.rc not in (0, 5) or "locked" in r.err:
                    failed.append(r)
        threads = [threading.Thread(target=cancel, args=(ids[i::5],)) for i in range(5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed, failed[0]
        states = [j["state"] for j in c.json("status", "-a")["jobs"]]
        assert states == ["CANCELLED"] * 200, states


run(globals())
