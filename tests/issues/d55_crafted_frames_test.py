#!/usr/bin/env python3
"""D55 (protobuf-c#796, #63; CVE-2022-48468, CVE-2022-33070): crafted lengths and counts, a failed unpack.

Frames that are damaged at random, and some built to make a parser allocate, go to a running boostd;
it answers or hangs up, keeps its size, and serves the next client.
"""
import os, random, socket, struct, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import Cluster, run, tiny_job
from wire import LIST, SUBMIT, Wire, agent_hello, frame, num, parse, register, sub, varint


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


# What an agent may report (AgentMessage of proto/agent.proto): j job, a attempt, r rank, i number, e small number,
# s text, d double; a dict is a message, a list a repeated one.
EXIT = {1: "j", 2: "a", 3: "r", 4: "i", 5: "e", 6: "e", 7: "e", 8: "e", 9: "e", 10: "e", 11: "i", 12: "s", 13: "e",
        14: "s", 15: "i"}
SHARD = {1: "i", 2: "i", 3: "r", 4: "s", 5: "i", 6: "i", 7: "i", 8: "s", 9: "e", 10: "s"}
REPORTS = {
    3: {1: "j", 2: "a", 3: "r", 4: "e", 5: "i", 6: "i"},
    4: {1: EXIT},
    5: {1: "j", 2: "a", 3: "s"},
    6: {1: "j", 2: "a", 3: "r", 4: [SHARD]},
    7: {1: "j", 2: "a", 3: "r", 4: [{1: "i", 2: "i", 3: "i", 4: [{1: "s", 2: "d"}]}]},
    8: {1: "i", 2: "j", 3: "a", 4: "r", 5: {1: "e", 2: "s", 3: "s", 4: "s", 5: "i"}},
    9: {1: "e", 2: {1: "e", 2: "s", 3: "s"}, 3: "s", 4: "i", 5: "e"},
    10: {1: "j", 2: "a", 3: "e", 4: "e", 5: "s", 6: "s"},
    11: {1: "j", 2: "a", 3: "r", 4: "s"},
}
NUMBERS = (0, 1, 2, 3, 7, 64, 2**31 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (b"", b"loss", b"rank-0.log", b"../../etc", b"/", b"x" * 3000, b"\xff\xfe", b"world")
DOUBLES = (0.0, -1.0, 1e308, float("inf"), float("nan"), 2.5)


def message(rng, shape, jobs):
    """A message of this shape; fields may be missing, numbers are mostly not what they should be."""
    body = b""
    for field, kind in shape.items():
        if rng.random() < 0.15:
            continue
        for _ in range(rng.randrange(4) if isinstance(kind, list) else 1):
            kind = kind[0] if isinstance(kind, list) else kind
            if isinstance(kind, dict):
                body += sub(field, message(rng, kind, jobs))
            elif kind == "s":
                body += sub(field, rng.choice(TEXTS))
            elif kind == "d":
                body += varint(field << 3 | 1) + struct.pack("<d", rng.choice(DOUBLES))
            else:
                body += num(field, {"j": lambda: rng.choice(jobs), "a": lambda: rng.randrange(1, 4),
                                    "r": lambda: rng.randrange(3), "e": lambda: rng.randrange(8),
                                    "i": lambda: rng.choice(NUMBERS)}[kind]())
    return body


def some_report(rng, jobs):
    kind = rng.choice(list(REPORTS))
    return sub(kind, message(rng, REPORTS[kind], jobs))


def test_an_agent_that_talks_nonsense():
    """It may spoil its own job; boostd, and what it tells others, must hold."""
    rng = random.Random(5)
    with Cluster(agents=0, boostd_set={"restart_grace_ms": 0}) as c:
        held = c.submit(tiny_job(c, name="other"), "--hold")
        victims = [c.submit(tiny_job(c, name=f"victim{i}", tp=2)) for i in range(20)]  # start once the agent is there
        messages = connections = 0
        while messages < 4000:
            with Wire(c, agent_hello("n1"), timeout=0.2) as agent:
                connections += 1
                assert connections < 3000, "every message ends the connection"
                agent.send(register("n1", instance=f"i{connections}"))
                try:
                    for _ in range(rng.randrange(1, 60)):
                        body = some_report(rng, victims)
                        if rng.random() < 0.01:
                            at = rng.randrange(len(body))
                            body = body[:at] + rng.randbytes(2) + body[at + 1:]
                        agent.send(frame(body))
                        messages += 1
                    agent.s.setblocking(False)
                    while agent.s.recv(1 << 16):
                        pass
                except OSError:
                    pass  # hung up on, or nothing more to read
            assert c.boostd.running(), c.boostd.log_text()[-2000:]
        assert c.status(held)["state"] == "HELD"
        c.restart_boostd()  # and what it stored of that can be read again
        assert c.status(held)["state"] == "HELD"
        assert len(c.json("status", "-a")["jobs"]) == 1 + len(victims)


def test_a_name_with_a_nul_is_refused_not_cut():
    with Cluster(agents=0) as c, Wire(c) as w:
        w.request(1, SUBMIT, sub(1, sub(2, b"ab\0cd")))
        failure = parse(w.reply()[3][0])
        assert b"NUL" in failure[2][0] or b"zero byte" in failure[2][0], failure


run(globals())
