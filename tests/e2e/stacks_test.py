#!/usr/bin/env python3
"""boostctl stacks: where the ranks of a running and of a hung job are, and whom they wait for."""
import os, signal, struct, time

from harness import Cluster, run, tiny_job, wait_until
from jobs import Shared, endless, rank_step, wait_rank_step

shared = Shared(cpu_slots=2)


def stacks(c, job, *options):
    o = c.json("stacks", job, *options)
    assert o["schema"] == "boost.stacks/1" and o["job"] > 0, o
    return {r["rank"]: r for r in o["ranks"]}, o["behind"]


def frames(rank):
    return [f for t in rank["threads"] for f in t["frames"]]


@shared
def test_a_running_job(c):
    c.job = c.submit(endless(c, tp=2, hidden=256))  # more computing, less waiting
    wait_rank_step(c, c.job, 1, 3)
    pids = c.rank_pids(c.job, 1)
    began = time.monotonic()
    for _ in range(5):
        ranks, behind = stacks(c, c.job)
        assert sorted(ranks) == [0, 1] and not behind, (ranks, behind)
        for r, rank in ranks.items():
            assert rank["answered"] and rank["moved"] and rank["node"] == "n1", rank
            assert rank["pid"] == pids[r] == rank["threads"][0]["tid"], rank
            assert rank["phase"] == "training" and rank["step"] >= 3, rank
            assert any("main+0x" in f and f.endswith(" (boost-worker)") for f in rank["threads"][0]["frames"]), rank
            groups = {x["group"]: x for x in rank["collectives"]}
            assert groups["tp"]["call"] > 10 and groups["tp"]["bytes"] > 0 and groups["world"]["what"] == "agreement", rank
            assert rank["collective"].split(" (")[0].endswith(('in group tp', 'in group world')), rank
    took = (time.monotonic() - began) / 5
    assert took < 1.0, took
    print(f"# answered within {took:.2f} s")


def state_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]


def inside_a_collective(c, rank):
    """As its memory-mapped status page says (proto/rankfiles.h)."""
    page = (c.run_dir(c.job, 1) / f"rank-{rank}.status").read_bytes()
    return any(struct.unpack_from("<I", page, 232 + 96 * group + 16)[0] for group in range(5))


def stop_outside_collectives(c, pid):
    """Stops rank 1 where others come to wait for it: not inside a call that they are in as well."""
    for _ in range(40):
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T", 5, "rank 1 stopped")
        wait_until(lambda: not stacks(c, f"{c.job}/0")[0][0]["moved"], 10, "rank 0 waits")
        if not inside_a_collective(c, 1):
            return
        os.kill(pid, signal.SIGCONT)
        wait_rank_step(c, c.job, 1, rank_step(c, c.job, 1) + 1)
    raise AssertionError("rank 1 was never found outside of a collective")


@shared
def test_a_stopped_rank(c):
    """Rank 1 stands still: it shows what the kernel says, the other the collective that it waits in, and for whom."""
    pids = c.rank_pids(c.job, 1)
    try:
        stop_outside_collectives(c, pids[1])
        began = time.monotonic()
        ranks, behind = stacks(c, c.job)
        took = time.monotonic() - began
        stopped, waiting = ranks[1], ranks[0]
        assert not stopped["answered"] and "did not answer in 2 s" in stopped["note"], stopped
        main = stopped["threads"][0]
        assert main["tid"] == pids[1] and main["state"] == "T (stopped)", main
        assert main["wchan"] and main["syscall"], main
        assert waiting["answered"] and not waiting["moved"], waiting
        inside = [x for x in waiting["collectives"] if x["where"] == "INSIDE"]
        assert len(inside) == 1 and inside[0]["group"] in ("tp", "world"), waiting
        assert any(f"comm_{inside[0]['kind']}+0x" in f for f in frames(waiting)), (inside, frames(waiting))
        assert [b["rank"] for b in behind] == [1], (behind, ranks)
        assert behind[0]["waiting"] == [0] and behind[0]["waits_in"] == inside[0], behind
        assert behind[0]["calls"] == inside[0]["call"] - 1, behind
        assert 2.0 <= took < 5.0, took
        text = c.ok("stacks", c.job)
        for part in ("rank 0 on n1: training", f"in group {inside[0]['group']} (call ", "T (stopped)", "wait channel",
                     "system call", f"behind: rank 1 on n1 has begun {behind[0]['calls']} calls of group"):
            assert part in text, (part, text)
        only, _ = stacks(c, f"{c.job}.1/0")
        assert list(only) == [0] and only[0]["answered"], only
    finally:
        os.kill(pids[1], signal.SIGCONT)
    wait_rank_step(c, c.job, 1, rank_step(c, c.job, 1) + 5)
    ranks, behind = stacks(c, c.job)
    assert ranks[1]["answered"] and not behind, (ranks, behind)


@shared
def test_alike_ranks_are_folded(c):
    text = c.ok("stacks", c.job)
    assert text.startswith(f"job {c.job}, attempt 1: 2 ranks\n"), text
    assert "main thread" in text and text.count("  main+0x") <= 2, text
    assert "ranks 0-1" in text, text  # whatever they do, their helpers wait alike


def test_more_ranks_than_one_answer_holds():
    """Ten ranks of a node are asked for in two goes; one that stands still keeps none of the others."""
    with Cluster(cpu_slots=10) as c:
        job = c.submit(tiny_job(c, steps=1_000_000, every=0, tp=2, batch=1), "--set", "parallel.dp=5", "--set",
                       "parallel.global_batch=5")
        wait_rank_step(c, job, 1, 2)
        pids = c.rank_pids(job, 1)
        assert len(pids) == 10, pids
        os.kill(pids[9], signal.SIGSTOP)
        try:
            ranks, _ = stacks(c, job)
        finally:
            os.kill(pids[9], signal.SIGCONT)
        assert sorted(ranks) == list(range(10)), ranks
        assert [r for r in ranks if not ranks[r]["answered"]] == [9], ranks
        c.ok("cancel", job, "--now", "-y")
        c.wait_state(job, "CANCELLED")


def test_ranks_on_two_nodes():
    """Each rank by its own node's agent; of a node that cannot be reached that is said, and nobody is accused."""
    with Cluster(agents=2, cpu_slots=1) as c:
        job = c.submit(endless(c, tp=2), "--set", "resources.nodes=2", "--set", "resources.devices_per_node=1")
        c.wait_state(job, "RUNNING")
        ranks, _ = stacks(c, job)
        node = {r: ranks[r]["node"] for r in (0, 1)}
        assert sorted(node.values()) == ["n1", "n2"] and all(r["answered"] for r in ranks.values()), ranks
        pid = ranks[1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: not stacks(c, f"{job}/0")[0][0]["moved"], 10, "rank 0 waits")
            ranks, behind = stacks(c, job)
            assert ranks[0]["answered"] and not ranks[1]["answered"], ranks
            assert all(b["rank"] == 1 and b["node"] == node[1] and b["waiting"] == [0] for b in behind), behind
            lines = c.ok("logs", job, "--node", node[0], "--tail", "1").splitlines()
            assert len(lines) == 1 and lines[0].startswith("rank 0: step "), lines
            c.agents[node[1]].kill9()
            ranks, behind = stacks(c, job)
            assert ranks[0]["answered"] and not behind and not ranks[1]["threads"], (ranks, behind)
            assert f"{node[1]} cannot be reached" in ranks[1]["note"], ranks[1]
        finally:
            os.kill(pid, signal.SIGCONT)
        c.start_agent(node[1])
        wait_until(lambda: stacks(c, job)[0][1]["answered"], 20, "the agent is back")
        c.ok("cancel", job, "--now", "-y")
        c.wait_state(job, "CANCELLED")


@shared
def test_what_is_refused(c):
    def fails(code, words, *args):
        r = c.ctl("stacks", *args)
        assert r.rc == code and words in r.err, (args, r.rc, r.err)
    fails(2, "takes one job")
    fails(4, "no job", "99")
    fails(4, "no attempt 7", f"{c.job}.7")
    fails(4, "ranks 0 to 1", f"{c.job}/2")
    held = c.submit(endless(c, name="held"), "--hold")
    fails(5, "no rank of it runs", held)
    c.ok("cancel", held)


@shared
def test_an_ended_job(c):
    c.ok("cancel", c.job, "--now", "-y")
    c.wait_state(c.job, "CANCELLED")
    r = c.ctl("stacks", c.job)
    assert r.rc == 5 and "is CANCELLED" in r.err, r.err


test_nothing_is_left = shared.last

run(globals())
