#!/usr/bin/env python3
"""T9, D56: the power goes while checkpoints are written, committed, pinned and deleted, on a disk that keeps only what
was synced. A sample of the moments; tests/full/power_cut_test.py has all."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from power import Recorded


def test_what_users_were_told_is_there_and_whole():
    r = Recorded()
    try:
        entries = r.disk.entries()
        for eager in (False, True):
            for n, what, _, _, path in [e for e in entries if e[1] == "fsync" or eager][5::17]:
                r.on_again(n, f"cut behind {n}, the {what} of {path}, eager: {eager}", eager=eager)
        r.lies()
    finally:
        r.close()


run(globals())
