"""Kills of random processes at random moments and at named points, and what has to be true all the while: asked of the
store (SQLite, read only), of /proc and of the files, not of the programs under test.

    with Chaos(seed) as chaos:
        chaos.rounds(20)
"""
import os, random, signal, sqlite3, time
from collections import defaultdict
from pathlib import Path

from harness import Cluster, alive, wait_until
from jobs import job_of, losses, same_losses, twin_of

STEPS = 60
LIMITS = "restart { max_restarts: 100000 no_progress_limit: 100000 }"
KINDS = {  # of jobs: what two ranks are cut into, and over how many nodes
    "tp": dict(steps=STEPS, every=5, extra=LIMITS),
    "two-nodes": dict(steps=STEPS, every=5, extra=LIMITS + " resources { device: CPU nodes: 2 devices_per_node: 1 }"),
}
# A kill waits until something new is there of this name.
POINTS = {
    "run directory": "agent-*/attempts/*", "keeper started": "agent-*/attempts/*/keeper.id",
    "rank started": "agent-*/attempts/*/rank-*.pid", "rank done": "agent-*/attempts/*/rank-*.done",
    "rank ended": "agent-*/attempts/*/rank-*.exit", "keeper ended": "agent-*/attempts/*/keeper.end",
    "checkpoint begun": "ckpt/*/step-*", "shard written": "ckpt/*/step-*/*.safetensors",
    "manifest written": "ckpt/*/step-*/manifest*",
}
VICTIMS = ("rank", "rank", "keeper", "agent", "boostd", "boostd", "agent and boostd", "agent and keeper")
QUEUED, HELD, STARTING, RUNNING, RECOVERING, STOPPING, COMPLETED, FAILED, CANCELLED, TIMEOUT = range(10)
# What a job can be behind its last event of these.
AFTER = {"submitted": {QUEUED, STOPPING}, "started": {STARTING, RECOVERING, STOPPING}, "cancel": {STOPPING},
         "running": {RUNNING, RECOVERING, STOPPING}, "recovering": {RECOVERING, STOPPING}, "completed": {COMPLETED},
         "failed": {FAILED}, "cancelled": {CANCELLED}, "timeout": {TIMEOUT}, "held": {HELD}, "queued": {QUEUED}}
WRITING, COMMITTED, DELETING, DELETED, ABANDONED = range(5)


class Invariants:
    """Each check() compares with what all earlier ones saw."""

    def __init__(self, c, slots):
        self.c, self.slots = c, slots
        self.acknowledged, self.ended, self.attempts, self.events = set(), {}, {}, defaultdict(int)

    def read(self, *queries):
        """Rows of each query, all of one moment."""
        db = sqlite3.connect(f"file:{self.c.state_dir}/state.db?mode=ro", uri=True, isolation_level=None, timeout=10)
        try:
            db.execute("BEGIN")
            return [db.execute(q).fetchall() for q in queries]
        finally:
            db.close()

    def check(self):
        jobs, attempts, events, checkpoints = self.read(
            "SELECT id, state, attempt FROM job",
            "SELECT job, attempt, from_step, start_ns, end_ns, reason FROM attempt",
            "SELECT job, kind FROM event WHERE job IS NOT NULL ORDER BY id",
            "SELECT job, step, attempt, state, path FROM checkpoint")
        self.check_jobs(jobs, attempts, events)
        self.check_checkpoints(attempts, checkpoints)
        self.check_processes()

    def check_jobs(self, jobs, attempts, events):
        there = {job: state for job, state, _ in jobs}
        assert self.acknowledged <= set(there), f"acknowledged and lost: {self.acknowledged - set(there)}"
        for job, state in self.ended.items():
            assert there[job] == state, f"job {job} was at its end in state {state} and is {there[job]}"
        self.ended.update({j: s for j, s in there.items() if s >= COMPLETED})
        newest = defaultdict(int)
        for row in attempts:
            key, was = row[:2], self.attempts.get(row[:2])
            newest[row[0]] = max(newest[row[0]], row[1])
            assert not was or was[2:4] == row[2:4], f"attempt {key} has begun twice: {was}, {row}"
            assert not was or not was[4] or was == row, f"attempt {key} was over: {was}, {row}"
        assert set(self.attempts) <= {r[:2] for r in attempts}, "an attempt has vanished"
        self.attempts = {r[:2]: r for r in attempts}
        for job, state, attempt in jobs:
            assert attempt == newest[job], f"job {job}: attempt {attempt}, rows up to {newest[job]}"
        kinds = defaultdict(list)
        for job, kind in events:
            kinds[job].append(kind)
        for job, state, _ in jobs:
            assert len(kinds[job]) >= self.events[job], f"events of job {job} have vanished"
            self.events[job] = len(kinds[job])
            last = [k for k in kinds[job] if k in AFTER][-1]
            assert state in AFTER[last], f"job {job} is in state {state} behind {kinds[job][-5:]}"
            over = [k for k in kinds[job] if AFTER.get(k, {0}) <= {COMPLETED, FAILED, CANCELLED, TIMEOUT}]
            assert len(over) == (state >= COMPLETED), f"job {job} has ended as {over}, its state is {state}"

    def check_checkpoints(self, attempts, checkpoints):
        good = {(job, step) for job, step, _, state, _ in checkpoints if state in (COMMITTED, DELETING, DELETED)}
        for job, attempt, start, *_ in attempts:
            assert start <= 0 or (job, start) in good, \
                f"attempt {job}.{attempt} went on from step {start}, not committed"
        for job, step, attempt, state, path in checkpoints:
            if state != COMMITTED or self.sound(job, step, attempt, path):
                continue
            now, = self.read(f"SELECT state FROM checkpoint WHERE job={job} AND step={step} AND attempt={attempt}")
            assert now[0][0] != COMMITTED, f"committed, and not whole: {path}"

    def sound(self, job, step, attempt, path):
        """Its manifest is there, and every shard, as long as was told."""
        shards, = self.read(f"SELECT file, bytes FROM shard WHERE job={job} AND step={step} AND attempt={attempt}")
        try:
            return bool(shards) and any(Path(path).glob("manifest*")) and \
                all((Path(path) / file).stat().st_size == size for file, size in shards)
        except OSError:
            return False

    def running(self):
        """{(job, attempt): {node: pids of ranks}}, from the environment of every process."""
        found, at = defaultdict(lambda: defaultdict(set)), f"BOOST_RUN_DIR={self.c.dir}/agent-"
        for entry in os.listdir("/proc"):
            try:
                if not entry.isdigit() or Path(f"/proc/{entry}/comm").read_text().strip() != "boost-worker":
                    continue
                names = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # gone
            for name in names:
                if name.startswith(at) and alive(int(entry)):
                    node, _, run = name[len(at):].split("/")[:3]
                    job, attempt = map(int, run.rsplit("-", 1)[1].split("."))
                    found[job, attempt][node].add(int(entry))
        return found

    def wrong_processes(self):
        """What is wrong, and the pids that prove it, or None."""
        by_node, by_job = defaultdict(set), defaultdict(dict)
        for (job, attempt), nodes in self.running().items():
            for node, pids in nodes.items():
                by_node[node] |= pids
                by_job[job].setdefault(attempt, set()).update(pids)
        for node, pids in by_node.items():
            if len(pids) > self.slots:
                return f"{len(pids)} ranks on {node}, which has {self.slots} slots", pids
        for job, attempts in by_job.items():
            if len(attempts) > 1:
                return f"attempts {sorted(attempts)} of job {job} live", set.union(*attempts.values())
            if self.ended.get(job, FAILED) != FAILED and job in self.ended:
                return f"job {job} is over", set.union(*attempts.values())
        return None

    def check_processes(self):
        """/proc is not read at one moment: only what two looks in a row agree on is wrong."""
        wrong = self.wrong_processes()
        if not wrong or not all(alive(p) for p in wrong[1]):
            return
        again = self.wrong_processes()
        assert not again or again[0] != wrong[0] or not all(alive(p) for p in again[1]), \
            f"{wrong[0]}: {sorted(wrong[1])}"

    def check_end(self):
        """Everything has ended."""
        check, = self.read("PRAGMA quick_check")
        assert check == [("ok",)], check
        wait_until(lambda: not list(self.c.dir.glob("agent-*/attempts/*-*.*")), 20, "every run directory gone")

        def strays():
            rows, = self.read(f"SELECT path FROM checkpoint WHERE state={COMMITTED}")
            return {str(p) for p in self.c.dir.glob("ckpt/*/step-*")} ^ {path for path, in rows}
        wait_until(lambda: not strays(), 20, "the files of committed checkpoints and no others")


class Chaos(Cluster):
    """Two nodes with two slots each, and always a job of each kind, which both want a whole node's worth."""

    def __init__(self, seed, tls=False):
        super().__init__(agents=2, tls=tls, boostd_set={"backoff_min_ms": 50, "backoff_max_ms": 200})
        print(f"# BOOST_CHAOS_SEED={seed}", flush=True)
        self.rng, self.done, self.jobs, self.live = random.Random(seed), [], 0, {}
        self.invariants = Invariants(self, self.cpu_slots)
        try:
            self.twins = {kind: twin_of(self, **options) for kind, options in KINDS.items()}
        except BaseException:
            self._kill_all()
            raise
        self.of_kind, self.cancelled = {}, set()

    def rounds(self, n):
        """So many kills; a round that finds nothing to kill is not counted."""
        while len(self.done) < n:
            for kind in KINDS:
                if kind not in self.live:
                    self.jobs += 1
                    job = self.submit(job_of(self, **{**KINDS[kind], "name": f"{kind}-{self.jobs}"}))
                    self.invariants.acknowledged.add(job)
                    self.live[kind], self.of_kind[job] = job, kind
            try:
                self.round()
                self.invariants.check()
            except BaseException:
                print(f"# in round {len(self.done)}, behind: {'; '.join(self.done[-5:])}", flush=True)
                raise
        self.finish()

    def round(self):
        point = self.rng.choice([None, None, "acknowledged", *POINTS])
        if point == "acknowledged":
            kind = self.rng.choice(sorted(self.live))
            if self.status(self.live[kind])["state"] not in ("COMPLETED", "CANCELLED"):
                self.ctl("cancel", *self.rng.choice([[], ["--now"]]), "-y", self.live[kind])
                self.cancelled.add(self.live[kind])
        elif point:
            self.reach(point)
        else:
            time.sleep(self.rng.random() * 0.4)
        killed = self.kill(self.rng.choice(VICTIMS))
        if killed:
            self.done.append(f"{killed} ({point or 'at random'})")
        for kind, job in list(self.live.items()):
            if self.status(job)["state"] in ("COMPLETED", "CANCELLED"):
                self.over(job)
                del self.live[kind]

    def reach(self, point, deadline=1.5):
        """Something new of that name; what does not come in time is not waited for."""
        before, end = set(self.dir.glob(POINTS[point])), time.monotonic() + deadline
        while not set(self.dir.glob(POINTS[point])) - before and time.monotonic() < end:
            time.sleep(0.001)

    def kill(self, victim):
        """What was killed, None: there was nothing of that kind. Daemons are back when this returns."""
        name = self.rng.choice(sorted(self.agents))
        if victim == "rank":
            running = self.invariants.running()
            if not running:
                return None
            job, attempt = self.rng.choice(sorted(running))
            pid = self.rng.choice(sorted(set().union(*running[job, attempt].values())))
            sig = self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV])
            return self.signal(pid, sig) and f"a rank of {job}.{attempt}, signal {int(sig)}"
        if "keeper" in victim:
            found = [self._pids(f.parent, r"(keeper)\.id").get("keeper")
                     for f in self.dir.glob(f"agent-{name}/attempts/*/keeper.id")]
            if not any([self.signal(pid, signal.SIGKILL) for pid in found if pid]) and victim == "keeper":
                return None
        if "agent" in victim:
            self.agents[name].kill9()
        if "boostd" in victim:
            self.boostd.kill9()
        time.sleep(self.rng.random() * 0.3)  # how long it is away is part of the dice
        if "boostd" in victim:
            self.start_boostd()
        if "agent" in victim:
            self.start_agent(name)
        return f"{victim} of {name}"

    @staticmethod
    def signal(pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False  # it has just ended by itself
        return True

    def over(self, job):
        """A job that has ended did what its twin did."""
        twin, row = self.twins[self.of_kind[job]], self.status(job)
        assert row["state"] == "COMPLETED" or job in self.cancelled, f"job {job} is {row}"
        if row["state"] == "COMPLETED":
            wait_until(lambda: len(losses(self, job)) == STEPS, 20, f"every metric of job {job}")
            same_losses(self, job, twin, STEPS)
            return
        want = {s: next(iter(x.values())) for s, x in losses(self, twin).items()}
        for step, by in losses(self, job).items():
            assert all(x == want[step] for x in by.values()), \
                f"step {step} of job {job}: {by}, undisturbed {want[step]}"

    def finish(self):
        for job in self.live.values():
            wait_until(lambda: self.status(job)["state"] in ("COMPLETED", "CANCELLED"), 60, f"the end of job {job}")
            self.over(job)
        self.invariants.check()
        self.invariants.check_end()
        attempts = sum(j.get("attempt", 0) for j in self.json("status", "-a")["jobs"])
        print(f"# {len(self.done)} kills over {self.jobs} jobs with {attempts} attempts: {'; '.join(self.done[:40])}")
