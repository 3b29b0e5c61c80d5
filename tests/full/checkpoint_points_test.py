#!/usr/bin/env python3
"""T9, D56: boostd, the agent or the rank is killed, or its disk fails, at every point of what becomes of a checkpoint:
its writing, its manifest, the report, the commit and what that displaces, pins, a removal.

Whatever happens, nothing that was committed is lost, nothing torn is offered, no directory is left that nobody knows,
the job trains on, and the next checkpoint is as good as ever.
"""
# time limit: 1200
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from points import Points


def walked(*walks):
    p = Points()
    try:
        for who, how, where, act, at_least in walks:
            n = p.walk(who, how, where.replace("DIR", str(p.c.dir)), lambda: getattr(p, act)())
            assert n >= at_least, (who, how, where, n)
        p.resume()
        p.check("at the end")
        p.close()
    finally:
        p.c._kill_all()


def test_a_resume_whatever_dies_meanwhile():
    walked(("boostd", "KILL", "state.db", "resume", 20), ("boostd", "EIO", "state.db", "resume", 20),
           ("agent", "KILL", "socket:", "resume", 4))


def test_boostd_killed_at_each_call_of_its_store():
    walked(("boostd", "KILL", "state.db", "all_of_it", 50))


def test_boostd_killed_before_each_message():
    walked(("boostd", "KILL", "socket:", "all_of_it", 20))


def test_the_disk_of_the_store_is_full_from_each_call_on():
    walked(("boostd", "ENOSPC", "state.db", "all_of_it", 50))


def test_the_disk_of_the_store_fails_once_at_each_call():
    walked(("boostd", "EIO", "state.db", "all_of_it", 50))


def test_the_log_of_the_store_is_emptied():
    """At rest its pages are copied into the database, and it is cut to nothing."""
    p = Points()
    log = p.c.state_dir / "state.db-wal"

    def is_empty():
        return p.rows() and (not log.exists() or not os.path.getsize(log))

    def rest():
        p.save()
        try:
            p.until(is_empty, "an empty log", deadline=4)
        except AssertionError:  # its disk failed: it is tried again behind the next commit
            p.save()
            p.until(is_empty, "an empty log")
    try:
        for how in ("KILL", "EIO"):
            p.walk("boostd", how, "state.db", rest)
        p.resume()
        p.close()
    finally:
        p.c._kill_all()


def test_the_agent_killed_at_each_point():
    walked(("agent", "KILL", "DIR/ckpt/", "save", 12), ("agent", "KILL", "socket:", "save", 4))


def test_the_agents_disk():
    walked(("agent", "ENOSPC", "DIR/ckpt/", "save", 12), ("agent", "EIO", "DIR/ckpt/", "save", 12),
           ("agent", "ENOSPC", "/agent-n1/", "save", 2), ("agent", "EIO", "/agent-n1/", "save", 2))


def test_the_ranks_disk():
    walked(*[("rank", how, "/step-", "save", 5) for how in ("ENOSPC", "EIO", "DROP")])


run(globals())
