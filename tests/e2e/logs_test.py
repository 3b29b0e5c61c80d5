#!/usr/bin/env python3
"""logs --node and --since: the ranks of a node side by side, and what was printed lately; through a restart too."""
import os, signal, time

from harness import run, wait_until
from jobs import Shared, endless, wait_rank_step

shared = Shared(cpu_slots=2)


def say(c, job, rank, text, attempt=1):
    """As if the rank had printed it."""
    with open(f"/proc/{c.rank_pids(job, attempt)[rank]}/fd/1", "wb", buffering=0) as out:
        out.write(text.encode())


def of_rank(text, rank):
    return "".join(line.partition(": ")[2] + "\n" for line in text.splitlines() if line.startswith(f"rank {rank}: "))


@shared
def test_since(c):
    c.job = c.submit(endless(c, tp=2))
    wait_rank_step(c, c.job, 1, 1)
    say(c, c.job, 1, "early\n")
    wait_until(lambda: c.ok("logs", c.job, "--rank", 1) == "early\n", 5, "the first line")
    time.sleep(2.2)  # times are kept by the second
    between = time.time() - 1.1
    say(c, c.job, 1, "late\n")
    wait_until(lambda: c.ok("logs", c.job, "--rank", 1) == "early\nlate\n", 5, "the second line")
    assert c.ok("logs", c.job, "--rank", 1, "--since", "1h") == "early\nlate\n"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(between)) + f"{between % 1:.3f}"[1:] + "Z"
    assert c.ok("logs", c.job, "--rank", 1, "--since", stamp) == "late\n", stamp
    time.sleep(1.2)
    assert c.ok("logs", c.job, "--rank", 1, "--since", "100ms") == ""
    follow = c.popen_ctl("logs", c.job, "--rank", 1, "--since", "20s", "-f")
    assert [follow.stdout.readline() for _ in range(2)] == ["early\n", "late\n"]
    say(c, c.job, 1, "followed\n")
    assert follow.stdout.readline() == "followed\n"
    follow.kill()
    follow.communicate()


@shared
def test_node_side_by_side(c):
    say(c, c.job, 1, "no line end yet")
    wait_until(lambda: c.ok("logs", c.job, "--rank", 1).endswith("yet"), 5, "a line without an end")
    text = c.ok("logs", c.job, "--node", "n1")
    assert "step 1/" in of_rank(text, 0) and of_rank(text, 1) == "early\nlate\nfollowed\nno line end yet\n", text
    assert all(line.startswith(("rank 0: ", "rank 1: ")) for line in text.splitlines()), text
    tail = c.ok("logs", c.job, "--node", "n1", "--tail", "2")
    assert of_rank(tail, 1) == "followed\nno line end yet\n" and of_rank(tail, 0).count("\n") == 2, tail


@shared
def test_node_followed_across_a_restart(c):
    follow = c.popen_ctl("logs", c.job, "--node", "n1", "--since", "1h", "-f", stderr=-1)
    try:
        os.kill(c.rank_pids(c.job, 1)[1], signal.SIGKILL)
        wait_until(lambda: c.status(c.job)["attempt"] == 2, 60, "attempt 2")
        wait_rank_step(c, c.job, 2, 2)
        say(c, c.job, 1, "from the second\n", attempt=2)
        wait_until(lambda: "from the second" in c.ok("logs", c.job, "--rank", 1), 5, "the line")
        time.sleep(0.7)
        c.ok("cancel", c.job, "--now")
        c.wait_state(c.job, "CANCELLED")
        out, err = follow.communicate(timeout=30)
    finally:
        follow.kill()
    assert follow.returncode == 0 and "boostctl: attempt 2" in err, err
    assert of_rank(out, 1).endswith("no line end yet\nfrom the second\n"), of_rank(out, 1)
    assert out == "".join(sorted_by_attempt(c, out)), "every line of both attempts"


def sorted_by_attempt(c, out):
    """The lines as they came, after a look that each rank's are those of its two logs."""
    for rank in (0, 1):
        whole = "".join(log if log.endswith("\n") or not log else log + "\n"
                        for log in (c.ok("logs", f"{c.job}.{k}", "--rank", rank) for k in (1, 2)))
        assert of_rank(out, rank) == whole, (rank, of_rank(out, rank)[-300:], whole[-300:])
    return out.splitlines(keepends=True)


test_nothing_is_left = shared.last

run(globals())
