#!/usr/bin/env python3
"""300 kills (BOOST_CHAOS_KILLS: another number) of workers, keepers, agents and boostd, at random moments and named
points; BOOST_CHAOS_SEED repeats a run. tests/e2e/chaos.py says what holds all the while."""
# time limit: 5400
import os, random, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from chaos import Chaos
from harness import run


def test_kills():
    with Chaos(int(os.environ.get("BOOST_CHAOS_SEED") or random.SystemRandom().randrange(10**6))) as chaos:
        chaos.rounds(int(os.environ.get("BOOST_CHAOS_KILLS") or 300))


run(globals())
