#!/usr/bin/env python3
"""300 kills (BOOST_CHAOS_KILLS: another number) of workers, keepers, agents and boostd, at random moments and named
points, half of them of daemons that talk by the Unix socket, half by TLS; BOOST_CHAOS_SEED repeats a run.
tests/e2e/chaos.py says what holds all the while."""
# time limit: 5400
import os, random, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from chaos import Chaos
from harness import run

SEED = int(os.environ.get("BOOST_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
KILLS = int(os.environ.get("BOOST_CHAOS_KILLS") or 300)


def test_kills_by_unix_socket():
    with Chaos(SEED) as chaos:
        chaos.rounds(KILLS - KILLS // 2)


def test_kills_by_tls():
    with Chaos(SEED, tls=True) as chaos:
        chaos.rounds(KILLS // 2)


run(globals())
