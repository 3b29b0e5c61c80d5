#!/usr/bin/env python3
"""T19 (Megatron-LM #2459, RWKV-LM #346, tokenizers #1609): a token id at or above the vocabulary ends in
an assert far away, or is masked without a word.

Here the host checks each batch and names file, position, id and vocabulary; the exit code says that no
restart can help.
"""
import re, struct

from standalone import SEQ, Job, run


def test_the_id_is_named():
    for tp in (1, 2):
        job = Job(20)
        code, text = job.finish(sets=["model.vocab=112", f"parallel.tp={tp}"])  # 'w' is 119
        assert code == 64, text
        for part in ("train.txt", "token id 1", "at token", "vocabulary of 112"):
            assert part in text, text


def test_of_every_format():
    bad = 3 * SEQ + 5
    ids = [i % 100 for i in range(4 * SEQ + 1)]
    u8, wrong = bytes([*ids[:bad], 127, *ids[bad + 1:]]), [*ids[:bad], 1000, *ids[bad + 1:]]
    n = len(ids)

    def packed(kind, values=wrong):
        return struct.pack(f"<{n}{kind}", *values)

    def index(code, width):
        return b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q2q", 1, code, 2, 2, 40, n - 40, 0, 40 * width, 0, 2)
    formats = {  # name: files, the id, the byte where it lies
        "x.txt": ({"x.txt": u8}, 127, bad),
        "x.u16": ({"x.u16": packed("H")}, 1000, 2 * bad),
        "x.u32": ({"x.u32": packed("I")}, 1000, 4 * bad),
        "l.bin": ({"l.bin": struct.pack("<256i", 20240520, 1, n, *[0] * 253) + packed("H")}, 1000, 1024 + 2 * bad),
        "k.bin": ({"k.bin": struct.pack("<256i", 20240801, 7, n, *[0] * 253) + packed("I")}, 1000, 1024 + 4 * bad),
        "m.bin": ({"m.bin": packed("H"), "m.idx": index(8, 2)}, 1000, 2 * bad),
        "i.bin": ({"i.bin": packed("i", [*ids[:bad], -1, *ids[bad + 1:]]), "i.idx": index(4, 4)}, -1, 4 * bad),
    }
    for name, (files, wanted, byte) in formats.items():
        job = Job(20)
        for other, content in files.items():
            (job.dir / other).write_bytes(content)
        spec = (job.dir / "job.pbtxt").read_text()
        spec = re.sub(r'train.txt" \} format: TEXT', f'{name}" }}', spec)
        (job.dir / "job.pbtxt").write_text(spec)
        code, text = job.finish(sets=["model.vocab=112"])
        assert code == 64, text
        for part in (f"{job.dir}/{name}: token id {wanted} at token {bad} (byte {byte})", "vocabulary of 112"):
            assert part in text, (name, part, text)


run(globals())
