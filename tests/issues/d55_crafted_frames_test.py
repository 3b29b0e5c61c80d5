#!/usr/bin/env python3
"""D55 (protobuf-c#796, #63; CVE-2022-48468, CVE-2022-33070): crafted lengths and counts, a failed unpack.

Frames that are damaged at random, and some built to make a parser allocate, go to a running boostd;
it answers or hangs up, keeps its size, and serves the next client.
"""
import os, random, socket, struct, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import Cluster, run
from wire import LIST, SUBMIT, Wire, frame, num, parse, sub


def rss_mib(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def spec():
    model = num(1, 2) + num(2, 64) + num(3, 2) + num(4, 4) + num(6, 128) + num(7, 8) + num(8, 256)
    data = sub(1, sub(1, "/tmp/x")) + num(4, 32)
    return (num(1, 1) + sub(2, "fuzz") + sub(3, model) + sub(4, num(1, 2) + num(6, 2)) + sub(5, data) +
            sub(8, sub(1, "/tmp/ckpt")) + sub(16, sub(1, "k") + sub(2, "v")))


def exchange(c, data):
    """Sends it as one frame; the replies until the peer stops."""
    with Wire(c) as w:
        try:
            w.send(data)
            w.s.shutdown(socket.SHUT_WR)
            while True:
                w.reply()
        except (EOFError, ConnectionError):
            return


def test_damaged_frames():
    rng = random.Random(55)
    with Cluster(agents=0) as c:
        body = num(1, 7) + sub(SUBMIT, sub(1, spec()) + num(2, 1))
        before = None
        for i in range(600):
            bad = bytearray(body)
            for _ in range(rng.choice((1, 1, 2, 8))):
                how, at = rng.randrange(4), rng.randrange(len(bad))
                if how == 0:
                    bad[at] = rng.randrange(256)
                elif how == 1:
                    del bad[at:at + rng.randrange(1, 6)]
                elif how == 2:
                    bad[at:at] = rng.randbytes(rng.randrange(1, 6))
                else:
                    bad[at:at + 1] = b"\xff\xff\xff\xff\x0f"
                if not bad:
                    bad = bytearray(b"\0")
            exchange(c, frame(bytes(bad)))
            if i == 100:
                before = rss_mib(c.boostd.pid)
        with Wire(c) as w:
            w.ping()
        assert rss_mib(c.boostd.pid) < before + 20, "it grows with every bad frame"


def test_frames_built_to_allocate():
    with Cluster(agents=0) as c:
        before = rss_mib(c.boostd.pid)
        two_mi = 2 << 20
        bombs = [
            sub(LIST, sub(1, b"") * (two_mi // 2)),                        # a million empty references
            sub(LIST, num(4, 1) * (two_mi // 2)),                          # a million states, unpacked
            sub(LIST, sub(4, b"\x01" * two_mi)),                           # the same, packed
            sub(SUBMIT, sub(1, sub(16, b"") * (two_mi // 3))),             # labels
            sub(SUBMIT, b"\x0a\xff\xff\xff\xff\x0f"),                      # a length of 4 GiB inside
            sub(SUBMIT, sub(1, sub(2, b"n" * (3 << 20)))),                 # a name of 3 MiB
            b"\x0b" * two_mi,                                              # groups, never closed
            num(1, 1) * (two_mi // 2),                                     # the id a million times
        ]
        for bomb in bombs:
            exchange(c, frame(num(1, 1) + bomb))
            with Wire(c) as w:
                w.ping()
        assert rss_mib(c.boostd.pid) < before + 200, "memory of a bad frame is not given back"


def test_a_name_with_a_nul_is_refused_not_cut():
    with Cluster(agents=0) as c, Wire(c) as w:
        w.request(1, SUBMIT, sub(1, sub(2, b"ab\0cd")))
        failure = parse(w.reply()[3][0])
        assert b"NUL" in failure[2][0] or b"zero byte" in failure[2][0], failure


run(globals())
