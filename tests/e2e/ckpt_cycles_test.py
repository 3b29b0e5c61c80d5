#!/usr/bin/env python3
"""200 checkpoints of one job (BOOST_CKPT_CYCLES: another number): descriptors, memory and directory entries are flat."""
import os, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Cluster, run, tiny_job, wait_until

CYCLES = int(os.environ.get("BOOST_CKPT_CYCLES") or 200)
KEEP = 2


def measures(pids):
    """{name: (descriptors, resident KiB)}"""
    out = {}
    for name, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0])
        out[name] = len(os.listdir(f"/proc/{pid}/fd")), rss
    return out


def all_entries(top):
    """Names in all folders below, less those of the checkpoints that come and go."""
    return sum(len(files) + len([d for d in folders if not d.startswith("step-")])
               for at, folders, files in os.walk(top) if "/step-" not in at)


def test_many_checkpoints_leave_nothing_behind():
    with Cluster(cpu_slots=1) as c:
        # so slow a step that the next checkpoint finds the last one written
        job = c.submit(tiny_job(c, steps=1_000_000, every=2, hidden=32, layers=1, seq_len=64, batch=8, name="cycles")
                       .replace("keep: 3", f"keep: {KEEP}"))
        c.wait_state(job, "RUNNING")

        def rows():
            return c.json("ckpt", "ls", job, "-a")["checkpoints"]

        def committed():
            return sum(k["state"] in ("COMMITTED", "DELETING", "DELETED") for k in rows())

        def entries():
            return [x for x in os.listdir(base) if x.startswith("step-")]
        wait_until(lambda: committed() >= CYCLES // 4, 20 + CYCLES, "the first quarter")
        base = os.path.dirname([k["path"] for k in rows() if k["state"] == "COMMITTED"][-1])
        pids = {"boostd": c.boostd.pid, "agent": c.agents["n1"].pid, "keeper": c.keeper_pid(job, 1),
                "rank": c.rank_pids(job, 1)[0]}
        before, names = measures(pids), all_entries(c.dir)
        wait_until(lambda: committed() >= CYCLES, 20 + CYCLES, f"{CYCLES} checkpoints")
        after = measures(pids)
        for name, (fds, rss) in before.items():
            # a checkpoint or a connection that is just being made has descriptors too
            assert after[name][0] <= fds + 4, (name, before, after)
            assert after[name][1] <= 1.1 * rss + 4096 + 2 * CYCLES, (name, before, after)
        assert len(entries()) <= KEEP + 4, entries()
        assert all_entries(c.dir) <= names + 8, (names, all_entries(c.dir))  # logs rotate, temporary files come and go
        c.ok("cancel", "--now", job)
        c.wait_state(job, "CANCELLED")
        wait_until(lambda: len(entries()) == sum(k["state"] == "COMMITTED" for k in rows()) <= KEEP, 20,
                   "the last ones to be deleted")
        print(f"# {len(rows())} checkpoints: {before} -> {after}, {names} -> {all_entries(c.dir)} names")


run(globals())
