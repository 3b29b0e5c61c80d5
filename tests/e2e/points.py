"""A job's checkpoints while one process of the three that care for them is killed, or its disk fails, at the Nth call:
for every N until all passes untouched."""
import json, os, signal, threading
from pathlib import Path

from disk import FAULTY, content
from harness import Cluster, wait_until
from jobs import attempts, endless, rank_step


KEEP, LIMIT = 2, 1000  # checkpoints; points, of which there are fewer
NOT_FOUND = 4          # boostctl


class Died(Exception):
    """The process with the fault is dead, as was wanted."""


def stored(path):
    """{name: digest} of a checkpoint's shards, and what its manifest says of them: that itself may be written again."""
    found = content(path)
    if found.pop("manifest.json", None):
        found["manifest.json"] = json.loads((Path(path) / "manifest.json").read_text())["shards"]
    return found


class Points:
    """A cluster whose boostd, agent and rank fail when they are told to; of the checkpoints two are kept.

    What users are told is remembered, and check() holds the product to it.
    """

    def __init__(self, no_progress_limit=1000):
        self.c = c = Cluster(start=False, cpu_slots=1)
        self.start_boostd()
        self.start_agent()
        c.wait_nodes(1)
        env = "".join(f'env {{ key: "{k}" value: "{v}" }}\n' for k, v in self.env_of("rank").items())
        extra = env + f"restart {{ no_progress_limit: {no_progress_limit} }}\n"
        self.job = c.submit(endless(c, name="points", extra=extra).replace("keep: 3", "keep: 2"))
        c.wait_state(self.job, "RUNNING")
        self.seen, self.removed, self.pinned = {}, set(), set()  # told to users: {step: stored()}, steps, steps
        self.attempt, self.from_step = 1, 0
        self.fill()
        self.base = Path(next(iter(self.rows().values()))["path"]).parent

    # ---- processes with faults ----

    def env_of(self, who):
        return {"LD_PRELOAD": str(FAULTY), "BOOST_TEST_FAULT": f"@{self.c.dir}/fault-{who}",
                "BOOST_TEST_FAULT_LOG": str(self.c.dir / f"calls-{who}")}

    def _with(self, who, start):
        self.c.env.update(self.env_of(who))
        try:
            start()
        finally:
            for name in self.env_of(who):
                del self.c.env[name]

    def start_boostd(self):
        self._with("boostd", self.c.start_boostd)

    def start_agent(self):
        self._with("agent", lambda: self.c.start_agent("n1"))

    def process(self, who):
        return self.c.boostd if who == "boostd" else self.c.agents["n1"]

    def arm(self, who, text):
        (self.c.dir / f"calls-{who}").unlink(missing_ok=True)
        new = self.c.dir / "fault.new"
        new.write_text(text)
        new.rename(self.c.dir / f"fault-{who}")

    def lift(self, who):
        (self.c.dir / f"fault-{who}").unlink(missing_ok=True)

    def calls(self, who):
        try:
            return (self.c.dir / f"calls-{who}").read_text().splitlines()
        except FileNotFoundError:
            return []

    # ---- what users do ----

    def ctl(self, *args, fails=()):
        """Its JSON; Died when that is why it failed."""
        r = self.c.ctl("-o", "json", *args)
        if r.rc in (0, *fails):
            return json.loads(r.out) if r.out.startswith("{") else {}
        try:
            wait_until(lambda: not self.c.boostd.running() or not self.c.agents["n1"].running(), 2)
        except AssertionError:
            raise AssertionError(f"{args}: {r}") from None
        raise Died

    def list(self):
        return self.ctl("ckpt", "ls", self.job, "-a")["checkpoints"]

    def rows(self):
        rows = {k["step"]: k for k in self.list()}
        for step, k in rows.items():
            if k["state"] == "COMMITTED" and step not in self.seen:
                self.seen[step] = stored(k["path"])
        return rows

    def committed(self):
        return sorted(s for s, k in self.rows().items() if k["state"] == "COMMITTED")

    def settled(self):
        return not [k for k in self.rows().values() if k["state"] in ("WRITING", "DELETING")]

    def until(self, condition, what, deadline=30):
        """Died when the process with the fault has."""
        def there():
            if not self.c.agents["n1"].running():
                raise Died
            return condition()
        wait_until(there, deadline, what)

    def save(self):
        before = len(self.list())
        self.ctl("checkpoint", self.job)
        self.until(lambda: len(self.list()) > before and self.settled(), "a checkpoint, or its being given up")

    def pin(self, step):
        self.ctl("ckpt", "pin", f"{self.job}@{step}")
        self.pinned.add(step)

    def unpin(self, step):
        self.pinned.discard(step)
        self.ctl("ckpt", "unpin", f"{self.job}@{step}")

    def remove(self, step):
        self.removed.add(step)
        # one that was asked for before boostd died may come only now, and have this one deleted for it
        self.ctl("ckpt", "rm", f"{self.job}@{step}", fails=[NOT_FOUND])
        self.until(self.settled, "the removal")

    def runs(self):
        """Its ranks do: what the store says may be of the time before."""
        row = self.ctl("status", "-a", self.job)["jobs"][0]
        is_it = row["state"] == "RUNNING" and row["attempt"] == self.attempt
        return is_it and self.c.rank_pids(self.job, self.attempt)

    def resume(self):
        """The rank is killed: the next attempt goes on from the newest."""
        pid = self.c.rank_pids(self.job, self.attempt)[0]
        newest = self.committed()[-1]
        self.attempt, self.from_step = self.attempt + 1, newest
        os.kill(pid, signal.SIGKILL)
        self.until(self.runs, "the next attempt")

    def fill(self):
        """Two that are kept."""
        for _ in range(4):
            if len(self.committed()) >= 2:
                return
            self.save()
        raise AssertionError(f"no checkpoints: {self.rows()}")

    def all_of_it(self):
        """Whatever changes the registry: a pin, a commit with what it displaces, a removal."""
        newest = self.committed()[-1]
        self.pin(newest)
        self.unpin(newest)
        self.save()
        if len(self.committed()) > 1:
            self.remove(self.committed()[0])
        self.save()

    # ---- the walk ----

    def walk(self, who, how, where, act, points=None, check=None):
        """Every N, or those of `points`, until act() passes without the Nth call; how many points there were."""
        n = reached = 0
        for n in points or range(1, LIMIT):
            self.arm(who, f"any {n} {how} {where}")
            what = f"{who}: {how} at {n} of {where}"
            try:
                if how in ("KILL", "AFTER", "DROP", "EIO"):
                    act()
                else:
                    self.full(who, n, act)
            except Died:
                pass
            touched = len(self.calls(who)) >= n
            what += f" ({self.calls(who)[n - 1:n]})"
            self.lift(who)
            self.back()
            self.check(what)
            if check and touched:
                check(what)
            self.fill()
            if not touched:
                break
            reached += 1
        else:
            assert points, f"no end of {who}, {how} of {where} after {n}"
        assert reached, f"{who} {how} {where}: never came to {n}"
        print(f"# {who} {how} {where}: {reached} points", flush=True)
        return reached

    def full(self, who, n, act):
        """The disk is full from the Nth call on; there is room again when it has been tried once more."""
        stop = threading.Event()

        def make_room():
            while not stop.wait(0.01):
                if len(self.calls(who)) > n:
                    step = rank_step(self.c, self.job, self.attempt)
                    wait_until(lambda: stop.is_set() or rank_step(self.c, self.job, self.attempt) > step, 20, "a step")
                    self.lift(who)
                    return
        room = threading.Thread(target=make_room)
        room.start()
        try:
            act()
        finally:
            stop.set()
            room.join()

    def back(self):
        """What died is there again, without its fault."""
        if not self.c.boostd.running():
            self.c.boostd.kill9()
            self.start_boostd()
        if not self.c.agents["n1"].running():
            self.c.agents["n1"].kill9()
            self.start_agent()
        self.c.wait_nodes(1)
        self.until(self.runs, f"attempt {self.attempt}")
        self.until(self.settled, "all to be settled")

    def check(self, what):
        rows = {}

        def one_picture():
            """What boostd says is what is there: a checkpoint that was asked for may be on its way yet."""
            rows.clear()
            rows.update(self.rows())
            known = sorted(os.path.basename(k["path"]) for k in rows.values() if k["state"] == "COMMITTED")
            return sorted(os.listdir(self.base)) == known and self.settled()
        try:
            wait_until(one_picture, 20)
        except AssertionError:
            raise AssertionError(f"{what}: there is {sorted(os.listdir(self.base))}, known {rows}") from None
        have = sorted(s for s, k in rows.items() if k["state"] == "COMMITTED")
        once = [s for s, k in rows.items() if k["state"] in ("COMMITTED", "DELETED")]
        for step in self.seen:
            kept = step in have or step in self.removed or len([s for s in once if s > step]) >= KEEP
            assert kept, f"{what}: step {step} was committed, there are {rows}"
        for step in have:
            assert stored(rows[step]["path"]) == self.seen[step], f"{what}: step {step} is not what was committed"
            assert "manifest.json" in self.seen[step], f"{what}: {rows[step]}"
        pinned = {s for s, k in rows.items() if k.get("pinned")}
        assert self.pinned <= pinned, f"{what}: pinned {self.pinned}, there {pinned}"
        if have:
            r = self.c.ctl("ckpt", "verify", f"{self.job}@{have[-1]}")
            assert r.rc == 0, (what, r)
        live = [a for a in attempts(self.c, self.job) if not a.get("end")]
        assert [(a["attempt"], a["from_step"]) for a in live] == [(self.attempt, self.from_step)], (what, live)
        for step in pinned - self.pinned:  # the answer was lost, or what was to take it back
            self.unpin(step)

    def close(self):
        for who in ("boostd", "agent", "rank"):
            self.lift(who)
        self.c.ok("cancel", "--now", self.job)
        self.c.close()
