#!/usr/bin/env python3
# time limit: 300
"""Twenty kills of random processes at random moments and named points, starting and stopping included: jobs still end,
with the losses of undisturbed runs to the last bit, and all that chaos.py asks of store, processes and files holds.
BOOST_CHAOS_SEED repeats a run, BOOST_CHAOS_KILLS makes it longer."""
import os, random

from chaos import COMPLETED, RUNNING, Chaos, Invariants
from harness import run


def test_random_kills():
    with Chaos(int(os.environ.get("BOOST_CHAOS_SEED") or random.SystemRandom().randrange(10**6))) as chaos:
        chaos.rounds(int(os.environ.get("BOOST_CHAOS_KILLS") or 20))


class Planted(Invariants):
    """Of a store that says what the test wants."""

    def __init__(self, *rows):
        super().__init__(None, 2)
        self.tables, self.acknowledged = rows, {1}

    def read(self, *queries):
        return self.tables if len(queries) > 1 else [[(1,)]]

    def check_processes(self):
        pass


def test_what_is_wrong_is_seen():
    jobs, attempts = [(1, RUNNING, 2)], [(1, 1, 0, 5, 9, 3), (1, 2, 10, 11, 0, 0)]
    events, checkpoints = [(1, "submitted"), (1, "started"), (1, "running")], [(1, 10, 1, 3, "/x")]
    sound = [jobs, attempts, events, checkpoints]
    ended = [[(1, COMPLETED, 2)], attempts, events + [(1, "completed")], checkpoints]
    Planted(*sound).check()
    for text, first, then in [
            ("acknowledged and lost", sound, [[], [], [], []]),
            ("was at its end", ended, sound),
            ("was over", sound, [jobs, [(1, 1, 0, 5, 12, 3), attempts[1]], events, checkpoints]),
            ("begun twice", sound, [jobs, [attempts[0], (1, 2, 10, 12, 0, 0)], events, checkpoints]),
            ("an attempt has vanished", sound, [[(1, RUNNING, 2)], attempts[1:], events, checkpoints]),
            ("rows up to", sound, [[(1, RUNNING, 1)], attempts, events, checkpoints]),
            ("have vanished", sound, [jobs, attempts, events[:1] + events[2:], checkpoints]),
            ("is in state", sound, [[(1, COMPLETED, 2)], attempts, events, checkpoints]),
            ("has ended as", sound, [ended[0], attempts, events + [(1, "completed")] * 2, checkpoints]),
            ("not committed", sound, [jobs, attempts, events, [(1, 10, 1, 4, "/x")]]),
            ("not whole", sound, [jobs, attempts, events, checkpoints + [(1, 20, 2, 1, "/nowhere")]])]:
        invariants = Planted(*first)
        invariants.check()
        invariants.tables = then
        try:
            invariants.check()
        except AssertionError as e:
            assert text in str(e), f"{text!r} was planted, seen: {e}"
        else:
            raise AssertionError(f"not seen: {text}")


run(globals())
