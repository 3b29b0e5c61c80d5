#!/usr/bin/env python3
"""T9, D56, D11: the power goes at every moment at which something was made durable, on a disk that keeps nothing else.

What users were told is there, every committed checkpoint is whole to the bit, the job goes on from the newest, and no
directory is left that nobody knows. Likewise on a disk that has kept all names but no bytes that were not synced, and on
one whose fsync lied once: there damage has to be seen.
"""
# time limit: 1500
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import run
from power import Recorded


def walk(r, moments, **how):
    entries = {e[0]: e for e in r.disk.entries()}
    for n in moments:
        _, what, _, _, path = entries[n]
        r.on_again(n, f"{how or 'cut'} behind {n}, the {what} of {path}", **how)
    print(f"# {how or 'cut'}: {len(moments)} moments")


def recorded(check):
    r = Recorded(tp=2)
    try:
        check(r)
    finally:
        r.close()


def test_the_power_goes_behind_every_fsync():
    recorded(lambda r: walk(r, [e[0] for e in r.disk.entries() if e[1] == "fsync"]))


def test_a_disk_that_keeps_names_at_once():
    recorded(lambda r: walk(r, [e[0] for e in r.disk.entries()], eager=True))


def test_an_fsync_that_lies():
    recorded(lambda r: print(f"# damaged by a lie, and seen to be: {r.lies()}"))


run(globals())
