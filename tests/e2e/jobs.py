"""What the end-to-end tests share beyond the harness: clusters for several tests, jobs of a known
length, a rank's status page, and comparisons of whole runs."""
import atexit, json, os, shutil, struct, subprocess
from datetime import datetime

import harness
from harness import Cluster, Process, Skip, alive, tiny_job, wait_until


class Shared:
    """One cluster for several tests of a program. A test that fails takes its cluster with it.

        shared = Shared(cpu_slots=2)

        @shared
        def test_something(c): ...

        test_nothing_is_left = shared.last
    """

    def __init__(self, **options):
        self.options, self.cluster = options, None
        atexit.register(self._give_up)  # when only some tests are run, `last` is not among them

    def _give_up(self):
        if self.cluster:
            self.cluster._kill_all()
            shutil.rmtree(self.cluster.dir, ignore_errors=True)

    def __call__(self, test):
        def runs():
            if not self.cluster:
                self.cluster = Cluster(**self.options)
            c = self.cluster
            try:
                test(c)
            except BaseException as e:
                self.cluster = None
                c.__exit__(type(e), e, None)
                raise
        runs.__name__ = test.__name__
        return runs

    def last(self):
        c, self.cluster = self.cluster, None
        if c:
            with c:
                pass


# ---- jobs --------------------------------------------------------------------------


def job_of(c, steps=200, every=10, name="long", tp=2, **options):
    """A job of some 10 ms a step, so that there is time to hurt it."""
    options = {"hidden": 64, "seq_len": 64, "layers": 1, "batch": 48, **options}
    return tiny_job(c, steps=steps, tp=tp, every=every, name=name, **options)


def endless(c, name="endless", tp=1, every=0, **options):
    """A job that no test waits for the end of."""
    return job_of(c, steps=1_000_000, every=every, name=name, tp=tp, **options)


_paces = {}


def steps_for(c, seconds, at_least=80, at_most=1000):
    """How many steps of job_of() at tp 2 take about so long on this machine, measured once a cluster."""
    if c not in _paces:
        probe = c.submit(job_of(c, steps=50, every=0, name="probe"))
        c.wait_state(probe, "COMPLETED")
        ms = sorted(r["step_ms"] for r in c.json("metrics", probe)["metrics"] if "step_ms" in r)
        _paces[c] = ms[len(ms) // 2]
    return max(at_least, min(at_most, int(1000 * seconds / _paces[c])))


def rank_step(c, job, attempt, rank=0, node="n1"):
    """Steps done, from the rank's memory-mapped status page: says what it does while daemons are away."""
    try:
        page = (c.run_dir(job, attempt, node) / f"rank-{rank}.status").read_bytes()
    except OSError:
        return -1
    return struct.unpack_from("<q", page, 24)[0] if len(page) >= 32 else -1


def wait_rank_step(c, job, attempt, step, deadline=60.0):
    wait_until(lambda: rank_step(c, job, attempt) >= step, deadline, f"rank 0 of {job}.{attempt} at step {step}")


def wait_committed(c, job, step=1, deadline=60.0):
    """Until a checkpoint of this step or later is COMMITTED; its step."""
    def there():
        s = c.status(job)
        return s.get("last_checkpoint_step") if (s.get("last_checkpoint_step") or 0) >= step else None
    return wait_until(there, deadline, f"job {job}: a checkpoint at step {step} or later")


def wait_event(c, job, kind, attempt=None, deadline=30.0):
    """The first event of this kind (and attempt)."""
    def there():
        found = [e for e in c.events(job) if e["kind"] == kind and attempt in (None, e.get("attempt"))]
        return found[0] if found else None
    return wait_until(there, deadline, f"an event {kind} of job {job}: there are {[e['kind'] for e in c.events(job)]}")


def at(event):
    """Seconds since the epoch of an event; a test compares with its own clock of the same machine."""
    return datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


def ended(pids):
    return not any(alive(p) for p in pids)


# ---- whole runs ----------------------------------------------------------------------


def losses(c, job):
    """{step: {attempt: loss}}, losses exact (17 digits)."""
    out = {}
    for row in c.json("metrics", job, "--name", "loss")["metrics"]:
        if "loss" in row:
            steps = out.setdefault(row["step"], {})
            assert row["attempt"] not in steps, f"step {row['step']} of attempt {row['attempt']} is there twice"
            steps[row["attempt"]] = row["loss"]
    return out


def same_losses(c, job, twin, steps):
    """Every step of the job is there and has the twin's loss to the last bit, replayed ones in each attempt."""
    mine, other = losses(c, job), losses(c, twin)
    missing = [s for s in range(1, steps + 1) if s not in mine]
    assert not missing, f"no metric of steps {missing} of job {job}"
    for step in range(1, steps + 1):
        want = next(iter(other[step].values()))
        assert all(x == want for x in mine[step].values()), f"step {step}: {mine[step]}, undisturbed {want}"
    return sum(len(x) > 1 for x in mine.values())


_twins = {}


def twin_of(c, **options):
    """The same job left in peace, once a cluster; its number."""
    key = (c, json.dumps(options, sort_keys=True))
    if key not in _twins:
        job = c.submit(job_of(c, **{**options, "name": "twin"}))
        row = c.wait_state(job, "COMPLETED", deadline=120)
        assert row["attempt"] == 1, row
        _twins[key] = job
    return _twins[key]


def newest_committed(c, job, attempt):
    """Highest step that this attempt committed, 0 if none; also those that retention has deleted since."""
    rows = c.json("ckpt", "ls", job, "-a")["checkpoints"]
    return max([k["step"] for k in rows if k["attempt"] == attempt and k["state"] in
                ("COMMITTED", "DELETING", "DELETED")], default=0)


def attempts(c, job):
    return c.json("show", job)["attempts"]


# ---- another user --------------------------------------------------------------------


class NobodyCluster(Cluster):
    """Started by root: daemons that run as `nobody`, and as_nobody() for boostctl. Otherwise a plain cluster."""

    def __init__(self, **options):
        self.drop = []
        if os.geteuid() == 0:
            if not shutil.which("setpriv"):
                raise Skip("root without setpriv cannot run daemons as nobody")
            self.drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        super().__init__(start=False, **options)
        bin_dir = self.dir / "bin"
        bin_dir.mkdir()
        for name in ("boostd", "boost-agent", "boost-keeper", "boost-worker", "boostctl"):
            shutil.copy(harness.BIN / name, bin_dir)  # nobody may not see the build folder
        if self.drop:
            for above in (self.dir, *self.dir.parents[:-1]):
                if not above.stat().st_mode & 0o001:
                    os.chmod(above, above.stat().st_mode | 0o711)
            os.chown(self.dir, 65534, 65534)
        self.bin = bin_dir
        try:
            self._start("boostd", "--state-dir", self.state_dir, "--socket", self.socket)
            self.boostd = self._procs[-1]
            self.agents["n1"] = self._start("boost-agent", "--state-dir", self.dir / "agent-n1",
                                            "--controller-socket", self.socket, "--node", "n1", "--cpu-slots", self.cpu_slots,
                                            "--set", "nvml_library=")
            self.wait_nodes(1)
        except BaseException:
            self._kill_all()
            raise

    def _start(self, name, *argv):
        argv = [*self.drop, self.bin / name, "--config", "/dev/null", *argv]
        self._procs.append(Process(argv, self.dir / f"{name}.log", self.env))
        return self._procs[-1]

    def as_nobody(self, *args, uid=65534):
        drop = [x.replace("65534", str(uid)) for x in self.drop]
        p = subprocess.run([*drop, str(self.bin / "boostctl"), *map(str, args)], env=self.env,
                           cwd=self.dir, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        return harness.Result(p.returncode, p.stdout, p.stderr)
