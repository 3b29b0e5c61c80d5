#!/usr/bin/env python3
"""T9, D56: the agent is killed, or its disk fails, at every point of writing a manifest and of deleting a checkpoint.

Whatever happens, no committed checkpoint is lost, nothing torn is offered, and as soon as an agent is there again the
checkpoint that was on its way is committed or given up, and the deletion done.
"""
# time limit: 600
import os, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from harness import BIN, Cluster, run, wait_until
from jobs import endless, wait_rank_step

FAULTY = BIN.parent / "tests" / "fakes" / "faulty.so"
GIVE_UP = 30  # points; there are fewer


class Points:
    """A job whose checkpoints are asked for one at a time, two of which are kept; its agent is one with a fault."""

    def __init__(self, c):
        self.c, self.log = c, c.dir / "calls"
        spec = endless(c, name="points").replace("keep: 3", "keep: 2")
        self.job = c.submit(spec)
        wait_rank_step(c, self.job, 1, 3)
        for _ in range(2):
            self.next()

    def rows(self):
        return {k["step"]: k for k in self.c.json("ckpt", "ls", self.job, "-a")["checkpoints"]}

    def committed(self):
        return sorted(s for s, k in self.rows().items() if k["state"] == "COMMITTED")

    def settled(self):
        return not [k for k in self.rows().values() if k["state"] in ("WRITING", "DELETING")]

    def next(self):
        before = max(self.rows(), default=-1)
        self.c.ok("checkpoint", self.job)
        wait_until(lambda: max(self.rows(), default=-1) > before, 20, "the next checkpoint")
        return wait_until(lambda: self.settled() and max(self.rows()), 20, "its commit")

    def agent(self, fault):
        self.c.agents["n1"].kill9()
        self.log.unlink(missing_ok=True)
        self.c.env.update(LD_PRELOAD=str(FAULTY), BOOST_TEST_FAULT=fault, BOOST_TEST_FAULT_LOG=str(self.log))
        try:
            self.c.start_agent("n1")
        finally:
            for name in ("LD_PRELOAD", "BOOST_TEST_FAULT", "BOOST_TEST_FAULT_LOG"):
                del self.c.env[name]
        self.c.wait_nodes(1)

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def walk(self, how, where):
        for n in range(1, GIVE_UP):
            self.agent(f"any {n} {how} {where}")
            old, newest = self.committed(), max(self.rows())
            self.c.ok("checkpoint", self.job)
            agent = self.c.agents["n1"]
            wait_until(lambda: not agent.running() or (max(self.rows()) > newest and self.settled()), 20, "an end")
            touched = len(self.calls()) >= n
            assert set(old[1:]) <= set(self.committed()) | {max(self.rows())}, (how, n, old, self.rows())
            if not agent.running():
                agent.kill9()  # as the fault did
                self.c.start_agent("n1")
                self.c.wait_nodes(1)
            wait_until(lambda: max(self.rows()) > newest and self.settled(), 30, "all to be settled")
            self.check(f"{how} at {n} ({self.calls()[-1:]})")
            if not touched:
                print(f"# {how}: {n - 1} points of {where}")
                return
        raise AssertionError(f"no end after {GIVE_UP} points")

    def check(self, what):
        """What is COMMITTED is whole; what is not there is not offered; nothing is left between."""
        rows = self.rows()
        for step, k in rows.items():
            if k["state"] == "COMMITTED":
                assert self.c.ctl("ckpt", "verify", f"{self.job}@{step}").rc == 0, (what, k)
        base = os.path.dirname([k["path"] for k in rows.values() if k["state"] == "COMMITTED"][0])
        there = {x for x in os.listdir(base) if (Path(base) / x / "manifest.json").exists()}
        mine = {os.path.basename(k["path"]) for k in rows.values() if k["state"] == "COMMITTED"}
        assert mine <= there, (what, there, mine)
        assert not [x for x in os.listdir(base) if x.endswith(".deleting")], (what, os.listdir(base))
        assert len(mine) >= 2 or "ABANDONED" in [k["state"] for k in rows.values()], (what, rows)


def test_manifest_and_deletion_at_every_point():
    with Cluster(cpu_slots=1) as c:
        p = Points(c)
        p.walk("KILL", f"{c.dir}/ckpt/")
        p.walk("EIO", "manifest.json")
        p.c.ok("cancel", "--now", p.job)


run(globals())
