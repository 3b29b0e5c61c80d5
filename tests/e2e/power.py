"""A power cut at any moment of a recorded life of checkpoints: what the machine has when it is on again, and what
becomes of the job."""
import os, signal

from disk import Disk, content
from harness import Cluster, alive, processes_with, wait_until
from jobs import endless

PARTS = ("boostd", "agent-n1", "ckpt")


class Recorded:
    """Some checkpoints, some of them pinned, removed, or past what is kept; then the power goes.

    `marks` are moments with what users had been told by then: (moment, committed steps, pinned steps).
    """

    def __init__(self, tp=1):
        self.c = c = Cluster(start=False, cpu_slots=2)
        self.disk, self.marks, self.whole = Disk(c.dir), [], {}
        c.env.update(self.disk.env)
        c.start_boostd()
        c.start_agent("n1")
        c.wait_nodes(1)
        self.up = self.disk.now()
        env = "".join(f'env {{ key: "{k}" value: "{v}" }}\n' for k, v in self.disk.env.items())
        self.job = c.submit(endless(c, tp=tp, name="power", extra=env).replace("keep: 3", "keep: 2"))
        self.submitted = self.disk.now()
        c.wait_state(self.job, "RUNNING")
        for act in ("save", "save", "pin", "save", "save", "remove", "unpin", "save"):
            self.mark()
            getattr(self, act)()
        self.mark()
        for name in self.disk.env:
            del c.env[name]
        self.cut()

    # ---- the life ----

    def rows(self):
        return self.c.json("ckpt", "ls", self.job, "-a")["checkpoints"]

    def committed(self):
        return sorted(k["step"] for k in self.rows() if k["state"] == "COMMITTED")

    def settled(self):
        return not [k for k in self.rows() if k["state"] in ("WRITING", "DELETING")]

    def save(self):
        n = len(self.rows())
        self.c.ok("checkpoint", self.job)
        wait_until(lambda: len(self.rows()) > n and self.settled(), 20, "a checkpoint")
        for k in self.rows():
            if k["state"] == "COMMITTED" and k["step"] not in self.whole:
                self.whole[k["step"]] = content(k["path"])

    def pin(self):
        self.c.ok("ckpt", "pin", f"{self.job}@{self.committed()[0]}")

    def unpin(self):
        self.c.ok("ckpt", "unpin", f"{self.job}@{self.committed()[0]}")

    def remove(self):
        self.c.ok("ckpt", "rm", f"{self.job}@{self.committed()[1]}")
        wait_until(self.settled, 20, "the removal")

    def mark(self):
        rows = self.rows()  # first: what was told is of a moment before
        committed = {k["step"] for k in rows if k["state"] == "COMMITTED"}
        pinned = {k["step"] for k in rows if k.get("pinned")}
        self.marks.append((self.disk.now(), committed, pinned))

    # ---- the power ----

    def cut(self):
        for pid in processes_with(str(self.c.dir)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for p in self.c._procs:
            if not p.child.stdout.closed:
                p.kill9()
        wait_until(lambda: not [p for p in processes_with(str(self.c.dir)) if alive(p)], 10, "all to be gone")

    def told(self, moment):
        """What has to be there: committed and pinned steps that nothing was to change between two marks."""
        before = [m for m in self.marks if m[0] <= moment]
        if not before:
            return set(), set()
        after = self.marks[len(before)] if len(before) < len(self.marks) else before[-1]
        return before[-1][1] & after[1], before[-1][2] & after[2]

    def on_again(self, moment, what, lies=False, **how):
        """Everything after a power cut at that moment. Of fsyncs that lie only this is asked: that damage is seen."""
        c = self.c
        self.disk.restore(PARTS, moment, **how)
        c.start_boostd()
        jobs = [j["id"] for j in c.json("status", "-a")["jobs"]]
        if moment >= self.submitted:
            assert jobs == [self.job], (what, jobs)
        rows = {k["step"]: k for k in self.rows()} if jobs else {}
        have = {s for s, k in rows.items() if k["state"] == "COMMITTED"}
        committed, pinned = self.told(moment)
        assert committed <= have, f"{what}: committed {committed}, there {rows}"
        assert pinned <= {s for s, k in rows.items() if k.get("pinned")}, f"{what}: pinned {pinned}, there {rows}"
        sound = {s for s in have if os.path.isdir(rows[s]["path"]) and content(rows[s]["path"]) == self.whole.get(s)}
        if not lies:
            assert sound == have, f"{what}: committed and not whole: {have - sound}"
        c.start_agent("n1")
        if jobs:
            self.goes_on(what, sound, have)
        self.cut()
        return sound == have

    def goes_on(self, what, sound, have):
        c = self.c
        last = {}

        def runs():
            """Its ranks do: what the store says may be of the time before."""
            row = c.status(self.job)
            last.update(c.json("show", self.job)["attempts"][-1] if row.get("attempt") else {})
            newest = row["state"] == "RUNNING" and row["attempt"] == last["attempt"]
            return newest and c.rank_pids(self.job, row["attempt"])
        try:
            wait_until(runs, 30)
        except AssertionError:
            raise AssertionError(f"{what}: does not go on\n{c.explain(self.job)}") from None
        if last["attempt"] > 1:  # else it had not begun
            # a checkpoint whose shards were reported may be committed yet
            newest = max(sound, default=0)
            assert last["from_step"] >= newest, f"{what}: {last}, not from step {newest}\n{c.explain(self.job)}"
            assert last["from_step"] in {0, *self.committed(), *sound}, (what, last, self.rows())
        if have and max(have) not in sound:
            assert last["from_step"] == max(sound, default=0), (what, last, sound)
            assert f"checkpoint of step {max(have)} does not verify" in c.ok("events", self.job), what
        wait_until(self.settled, 20, f"{what}: all to be settled")
        base = c.dir / "ckpt"

        def clean():
            """Directories are those of the rows."""
            mine = {os.path.basename(k["path"]) for k in self.rows() if k["state"] == "COMMITTED"}
            there = {d.name for d in base.glob("*/*")}
            missing = {f"step-{s}.a1" for s in have - sound}
            return there - missing == mine - missing
        try:
            wait_until(clean, 10)
        except AssertionError:
            left = sorted(str(d) for d in base.glob("*/*"))
            raise AssertionError(f"{what}: left {left}, known {self.rows()}") from None

    def lies(self):
        """Each fsync of the last checkpoint's files lied, one at a time; how many of them it damaged."""
        first, end = self.marks[-2][0], self.marks[-1][0]
        step = max(self.marks[-1][1])
        damaged = []
        for n, what, kind, _, path in self.disk.entries():
            if what == "fsync" and first < n <= end and f"/step-{step}." in path + "/":
                if not self.on_again(end, f"the fsync {n} of {path} lied", lies=True, without={n}):
                    damaged.append(os.path.basename(path))
        # the bytes of both, and the name of the last
        for name in (".rank", "manifest", "step-"):
            assert [x for x in damaged if x.startswith(name)], (name, damaged)
        return damaged

    def close(self):
        self.cut()
        self.disk.close()
        self.c._kill_all()
