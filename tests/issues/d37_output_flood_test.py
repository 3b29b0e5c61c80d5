#!/usr/bin/env python3
"""D37, D41: what a rank prints never blocks it, and passes through as it is: a flood, bytes that are no UTF-8, endless lines."""
import json, os, subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, run, wait_until
from jobs import Shared, endless, rank_step, wait_event, wait_rank_step

shared = Shared(cpu_slots=2)


def say(c, job, rank, data, attempt=1):
    """Writes into the rank's own output, as if it had printed it."""
    with open(f"/proc/{c.rank_pids(job, attempt)[rank]}/fd/1", "wb", buffering=0) as out:
        view = memoryview(data)
        while view:
            view = view[out.write(view):]


def raw_log(c, *args):
    p = subprocess.run([BIN / "boostctl", "logs", *map(str, args)], env=c.env, stdout=subprocess.PIPE, timeout=60)
    assert p.returncode == 0
    return p.stdout


@shared
def test_d37_a_flood_of_output(c):
    job = c.submit(endless(c, tp=2))
    c.wait_state(job, "RUNNING")
    line = b"0123456789abcdef" * 63 + b"\n"
    flood = 160 << 20  # more than a log and its predecessor hold
    for _ in range(flood // (len(line) * 4096)):
        say(c, job, 1, line * 4096)
    say(c, job, 1, b"the end of it\n")
    step = rank_step(c, job, 1)
    wait_rank_step(c, job, 1, step + 3)  # it trains on
    size = sum(f.stat().st_size for f in c.run_dir(job, 1).glob("rank-1.log*"))
    assert size <= (2 * 64 << 20) + (1 << 20), f"{size} bytes of log"
    last = c.ok("logs", job, "--rank", "1", "--tail", "2").splitlines()
    assert last[-1] == "the end of it", last
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d41_bytes_that_are_no_utf8_and_long_lines(c):
    job = c.submit(endless(c, tp=2, name="bytes"))
    c.wait_state(job, "RUNNING")
    odd = b"caf\xe9 \xff\xfe \xe2\x82 \xf0\x9f\x98 \x1b[31mred \x00 nul \xc3\xa9 \xe2\x82\xac end\n"
    say(c, job, 1, odd)
    say(c, job, 1, b"y" * 200_000 + b"\nafter\n")
    wait_until(lambda: raw_log(c, job, "--rank", 1, "--tail", 1) == b"after\n", 20, "the keeper to have written it")
    text = raw_log(c, job, "--rank", 1)
    assert text.startswith(odd), text[:100]
    lines = text[len(odd):].split(b"\n")
    assert max(map(len, lines)) <= (64 << 10) + 64 and text.count(b"y") >= 200_000, "a long line is split, and whole"
    os.kill(c.rank_pids(job, 1)[1], 6)
    event = wait_event(c, job, "rank-exit")
    assert "after" in event["text"], event
    p = subprocess.run([BIN / "boostctl", "-o", "json", "show", str(job)], env=c.env, stdout=subprocess.PIPE)
    json.loads(p.stdout.decode("utf-8", "strict"))
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


@shared
def test_d41_a_last_word_that_is_no_utf8(c):
    job = c.submit(endless(c, name="last-words"))
    c.wait_state(job, "RUNNING")
    say(c, job, 0, b"\n\xff\xfelast \xe2\x82 words \x1b[2J\n")
    os.kill(c.rank_pids(job, 1)[0], 6)
    wait_event(c, job, "rank-exit")
    for args in (["events", job], ["show", job], ["status"]):
        p = subprocess.run([BIN / "boostctl", "-o", "json", *map(str, args)], env=c.env, stdout=subprocess.PIPE)
        json.loads(p.stdout.decode("utf-8", "strict"))
        p = subprocess.run([BIN / "boostctl", *map(str, args)], env=c.env, stdout=subprocess.PIPE)
        assert b"\x1b" not in p.stdout and b"\xff" not in p.stdout, p.stdout
    c.ok("cancel", "--now", job)
    c.wait_state(job, "CANCELLED", deadline=15)


test_nothing_is_left = shared.last

run(globals())
