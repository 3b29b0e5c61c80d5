#!/usr/bin/env python3
"""T19 (Megatron-LM #2459, RWKV-LM #346, tokenizers #1609): a token id at or above the vocabulary ends in
an assert far away, or is masked without a word.

Here the host checks each batch and names file, position, id and vocabulary; the exit code says that no
restart can help.
"""
from standalone import Job, run


def test_the_id_is_named():
    for tp in (1, 2):
        job = Job(20)
        code, text = job.finish(sets=["model.vocab=112", f"parallel.tp={tp}"])  # 'w' is 119
        assert code == 64, text
        for part in ("train.txt", "token id 1", "at token", "vocabulary of 112"):
            assert part in text, text


run(globals())
