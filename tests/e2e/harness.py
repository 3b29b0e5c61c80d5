"""Whole-process tests: a private boostd with agents, boostctl, and a TAP runner.

A test program:

    from harness import Cluster, run, wait_until

    def test_one_job_completes():
        with Cluster(agents=1) as c:
            job = c.submit(tiny_job(c))
            c.wait_state(job, "COMPLETED")

    run(globals())

Programs come from $BOOST_BIN (default build/bin), files go below $BOOST_TEST_DIR. Leaving
the `with` stops everything and fails the test if a process of the cluster still runs
then. Ranks outlive their agent by design, so close() ends jobs by cancelling them first.
Standard library only.
"""
import json, os, pwd, re, select, shutil, signal, subprocess, sys, tempfile, time, traceback
from collections import namedtuple
from pathlib import Path

ROOT = Path(os.environ.get("BOOST_ROOT") or Path(__file__).resolve().parents[2])
BIN = Path(os.environ.get("BOOST_BIN") or ROOT / "build" / "bin")
TERMINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

Result = namedtuple("Result", "rc out err")


class Skip(Exception):
    """Raised by a test that cannot run here; the text says why."""


def wait_until(condition, deadline=10.0, what=""):
    """Calls condition() until it is true; returns its value. AssertionError after `deadline` seconds."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what or getattr(condition, '__name__', condition)}")
        time.sleep(0.01)


def started(pid):
    """When, as the kernel counts it; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def processes_with(text):
    """Pids whose command line, or BOOST_RUN_DIR (of a rank and what it starts), holds the text, the caller's own apart."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            names = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # gone, or another user's
        ours = text in line or any(n.startswith("BOOST_RUN_DIR=") and text in n for n in names)
        if ours and alive(int(entry)):
            found.append(int(entry))
    return found


class Process:
    """A daemon with its log file. `ready` waits for its first line on stdout."""

    def __init__(self, argv, log, env, ready_timeout=20.0):
        self.argv, self.log = [str(a) for a in argv], Path(log)
        self.name = Path(self.argv[0]).name
        with open(self.log, "ab") as err:
            self.child = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                                          env=env, start_new_session=True)
        self.ready_line = self._first_line(ready_timeout)

    @property
    def pid(self):
        return self.child.pid

    def _first_line(self, timeout):
        fd, line, end = self.child.stdout.fileno(), b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            ready = select.select([fd], [], [], max(0, left))[0]
            data = os.read(fd, 4096) if ready else b""
            if not data:
                if not ready:
                    self.child.kill()
                rc = self.child.wait()
                raise AssertionError(f"{self.name} was not ready (status {rc}):\n{self.log_text()[-3000:]}")
            line += data
        return line.decode().strip()

    def log_text(self):
        return self.log.read_text(errors="replace")

    def running(self):
        return self.child.poll() is None

    def kill9(self):
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self.child.stdout.close()

    def terminate(self, timeout=15.0):
        """SIGTERM and its exit status; AssertionError if it does not end."""
        if self.running():
            self.child.send_signal(signal.SIGTERM)
        try:
            rc = self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise AssertionError(f"{self.name} did not end within {timeout} s of SIGTERM")
        finally:
            self.child.stdout.close()
        return rc


class Cluster:
    """A private boostd and its agents, all state in one directory.

    boostd_set, agent_set: dicts of configuration fields. The defaults make failures show
    quickly; `agents` is how many start at once, named n1, n2, ... With `tls` boostd also listens by TCP, and agents and
    boostctl go that way, with certificates that certs() has made; the agents' data_address is 127.0.0.1, .2, ...
    """

    def __init__(self, agents=1, cpu_slots=2, boostd_set=None, agent_set=None, start=True, wait=True, tls=False):
        base = Path(os.environ.get("BOOST_TEST_DIR") or tempfile.gettempdir())
        self.dir = Path(tempfile.mkdtemp(prefix="c-", dir=base))
        self._short = None
        socket_dir = self.dir
        if len(str(self.dir)) > 80:  # a socket path has at most 107 bytes
            self._short = socket_dir = Path(tempfile.mkdtemp(prefix="boost-"))
        self.socket = socket_dir / "s"
        self.env = dict(os.environ, BOOST_SOCKET=str(self.socket))
        self.env.pop("XDG_RUNTIME_DIR", None)
        self.cpu_slots = cpu_slots
        self.boostd_set = {"backoff_min_ms": 100, "backoff_max_ms": 1000, **(boostd_set or {})}
        # Tests of a cluster are of the CPU, whatever the machine has: AUTO would be its GPUs.
        self.agent_set = {"nvml_library": "", **(agent_set or {})}
        self.boostd, self.agents, self._procs = None, {}, []
        self.keep = False
        self.tls, self.address = tls, None
        try:
            if tls:
                self.certs("ca")
                self.certs("controller", "c", "--san", "127.0.0.1", "--san", "localhost")
                self.certs("user", pwd.getpwuid(os.geteuid()).pw_name)
                self.env["BOOST_TLS_DIR"] = str(self.cert_dir("user", pwd.getpwuid(os.geteuid()).pw_name))
            if start:
                self.start_boostd()
                for i in range(agents):
                    self.start_agent(f"n{i + 1}")
                if wait and agents:
                    self.wait_nodes(agents)
        except BaseException:
            self._kill_all()
            raise

    # ---- daemons -------------------------------------------------------------

    @property
    def state_dir(self):
        return self.dir / "boostd"

    def certs(self, *args):
        """deploy/make-certs.sh on this cluster's certificates."""
        subprocess.run(["sh", str(ROOT / "deploy" / "make-certs.sh"), str(self.dir / "certs"), *args], check=True,
                       stdout=subprocess.DEVNULL)

    def cert_dir(self, role, name):
        return self.dir / "certs" / f"{role}-{name}"

    def tls_set(self, role, name):
        """The fields of a configuration."""
        at = self.cert_dir(role, name)
        return {"tls_certificate": at / "tls.crt", "tls_key": at / "tls.key", "tls_ca": at / "ca.crt"}

    def start_boostd(self, wrap=(), **sets):
        """`wrap`: the beginning of a command line that runs the rest of it."""
        argv = [*wrap, BIN / "boostd", "--config", "/dev/null", "--state-dir", self.state_dir, "--socket", self.socket]
        tls = {**self.tls_set("controller", "c"), "listen": self.address or "127.0.0.1:0"} if self.tls else {}
        for key, value in {**self.boostd_set, **tls, **sets}.items():
            for one in value if isinstance(value, list) else [value]:  # of a repeated field
                argv += ["--set", f"{key}={one}"]
        self.boostd = Process(argv, self.dir / "boostd.log", self.env)
        self._procs.append(self.boostd)
        if self.tls:  # the port that it got is kept through restarts
            self.address = re.search(r"listen=([^,\s]+)", self.boostd.ready_line).group(1)
            self.env["BOOST_HOST"] = self.address
        return self.boostd

    def start_agent(self, name, wrap=(), **sets):
        argv = [BIN / "boost-agent", "--config", "/dev/null", "--state-dir", self.dir / f"agent-{name}", "--node", name,
                "--cpu-slots", str(self.cpu_slots)]  # the socket comes from $BOOST_SOCKET
        if self.tls:
            if not self.cert_dir("node", name).exists():
                self.certs("node", name)
            number = int(re.sub(r"\D", "", name) or 1)
            sets = {**self.tls_set("node", name), "controller_address": self.address,
                    "data_address": f"127.0.0.{number}", **sets}
        for key, value in {**self.agent_set, **sets}.items():
            for one in value if isinstance(value, list) else [value]:  # of a repeated field
                argv += ["--set", f"{key}={one}"]
        self.agents[name] = Process([*wrap, *argv], self.dir / f"agent-{name}.log", self.env)
        self._procs.append(self.agents[name])
        return self.agents[name]

    def restart_boostd(self):
        self.boostd.kill9()
        return self.start_boostd()

    def wait_nodes(self, n, deadline=20.0):
        def up():
            r = self.ctl("-o", "json", "node", "ls")
            return r.rc == 0 and sum(x["state"] == "UP" for x in json.loads(r.out)["nodes"]) >= n
        wait_until(up, deadline, f"{n} nodes UP")

    # ---- boostctl ------------------------------------------------------------

    def ctl(self, *args, timeout=60.0, input=None, cwd=None, env=None):
        """Runs boostctl; Result(rc, out, err)."""
        p = subprocess.run([str(BIN / "boostctl"), *map(str, args)], env={**self.env, **(env or {})},
                           cwd=cwd or self.dir, input=input, timeout=timeout, text=True, errors="replace",
                           stdin=subprocess.DEVNULL if input is None else None, capture_output=True)
        return Result(p.returncode, p.stdout, p.stderr)

    def ok(self, *args, **kw):
        """As ctl(), but anything other than status 0 fails the test; standard output."""
        r = self.ctl(*args, **kw)
        assert r.rc == 0, f"boostctl {' '.join(map(str, args))}: status {r.rc}\n{r.out}{r.err}"
        return r.out

    def json(self, *args, **kw):
        return json.loads(self.ok("-o", "json", *args, **kw))

    def popen_ctl(self, *args, **kw):
        kw = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True, **kw}
        child = subprocess.Popen([str(BIN / "boostctl"), *map(str, args)], env=self.env, cwd=self.dir, **kw)
        return child

    def submit(self, spec, *options):
        """A job file's path, or its text; the job's number."""
        if not isinstance(spec, Path):
            path = self.dir / f"job-{time.monotonic_ns()}.pbtxt"
            path.write_text(spec)
            spec = path
        return int(self.ok("submit", spec, "--parsable", *options).split()[0])

    def status(self, job):
        """The job's row of `boostctl -o json status`."""
        return self.json("status", "-a", job)["jobs"][0]

    def wait_state(self, job, states, deadline=60.0):
        """Until the job is in one of the states; its row. Another end than the wanted one fails at once."""
        states = (states,) if isinstance(states, str) else tuple(states)
        last = {}

        def there():
            last.clear()
            last.update(self.status(job))
            if last["state"] in states:
                return True
            assert last["state"] not in TERMINAL, f"job {job} ended {last['state']}: {last}\n{self.explain(job)}"
            return False
        try:
            wait_until(there, deadline, f"job {job} in {'/'.join(states)}")
        except AssertionError as e:
            raise AssertionError(f"{e}; it is {last}\n{self.explain(job)}") from None
        return dict(last)

    def wait_step(self, job, step, deadline=60.0):
        wait_until(lambda: (self.status(job).get("step") or 0) >= step, deadline, f"job {job} at step {step}")

    def events(self, job):
        return self.json("events", job)["events"]

    def explain(self, job):
        """What a failed test needs to know."""
        text = [self.ctl("show", job).out, self.ctl("events", job).out]
        for log in sorted(self.dir.glob("*.log")):
            text.append(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
        return "\n".join(text)

    # ---- ranks ---------------------------------------------------------------

    def run_dir(self, job, attempt, node="n1"):
        """The attempt's run directory on the node, <store id>-<job>.<attempt>; a path that is not there when gone."""
        attempts = self.dir / f"agent-{node}" / "attempts"
        return next(attempts.glob(f"*-{job}.{attempt}"), attempts / f"?-{job}.{attempt}")

    def rank_pids(self, job, attempt, node="n1"):
        """{rank: pid} of the ranks that run, from their identity files (boot id, pid, start time)."""
        return self._pids(self.run_dir(job, attempt, node), r"rank-(\d+)\.pid")

    def keeper_pid(self, job, attempt, node="n1"):
        return self._pids(self.run_dir(job, attempt, node), r"(keeper)\.id").get("keeper")

    @staticmethod
    def _pids(directory, pattern):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return {}  # not made yet, or the agent is done with it: at any moment, so no glob(), which looks twice
        found = {}
        for key, name in ((m[1], m[0]) for m in (re.fullmatch(pattern, n) for n in names) if m):
            try:
                _, number, start = (directory / name).read_text().split()[:3]
                pid = int(number)
            except (OSError, ValueError):
                continue  # being written, or gone
            if alive(pid) and started(pid) == start:  # else the number is another process's by now
                found[int(key) if key.isdigit() else key] = pid
        return found

    def processes(self):
        """Every process of this cluster, however it was started."""
        return sorted(set(processes_with(str(self.dir))) | {p.pid for p in self._procs if p.running()})

    # ---- the end -------------------------------------------------------------

    def close(self):
        """Cancels what runs, stops all, and fails if anything is left."""
        if self.boostd and self.boostd.running():
            r = self.ctl("-o", "json", "status")
            live = [str(j["id"]) for j in json.loads(r.out)["jobs"]] if r.rc == 0 else []
            if live and any(a.running() for a in self.agents.values()):
                self.ctl("cancel", "--now", "-y", *live)
                for job in live:
                    self.ctl("wait", job, "--timeout", "20s")
        left = []
        for p in reversed(self._procs):
            if not p.child.stdout.closed:
                rc = p.terminate()
                if rc != 0:
                    left.append(f"{p.name} ended with status {rc}:\n{p.log_text()[-3000:]}")
        try:
            wait_until(lambda: not self.processes(), 5.0, "no process left")
        except AssertionError:
            for pid in self.processes():
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left.append(f"still running: {pid} {line}")
        self._kill_all()
        assert not left, "\n".join(left)

    def _kill_all(self):
        for p in self._procs:
            if p.running():
                p.kill9()
        for _ in range(50):
            pids = processes_with(str(self.dir))
            if not pids:
                break
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
        if self._short:
            shutil.rmtree(self._short, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.close()
            shutil.rmtree(self.dir, ignore_errors=True)
            return
        if not issubclass(kind, Skip):
            for log in sorted(self.dir.glob("*.log")):
                for line in log.read_text(errors="replace").splitlines()[-25:]:
                    print(f"# {log.name}: {line}")
        self._kill_all()


def words(n, seed=1):
    """About n bytes of text with some structure, the same for the same seed."""
    state, out, size = seed * 2654435761 % 2**32, [], 0
    vocabulary = ["the", "rank", "of", "a", "low", "matrix", "and", "train", "step", "is", "loss", "small"]
    while size < n:
        state = (state * 1664525 + 1013904223) % 2**32
        word = vocabulary[(state >> 16) % len(vocabulary)]
        out.append(word)
        size += len(word) + 1
    return " ".join(out)[:n]


def tiny_job(cluster, steps=20, tp=1, every=5, name="tiny", seq_len=32, hidden=32, layers=2, batch=2, extra=""):
    """The text of a job that trains in seconds on the CPU; its data file lies in the cluster's directory."""
    data = cluster.dir / "train.txt"
    if not data.exists():
        data.write_text(words(200_000))
    return f"""spec_version: 1
name: "{name}"
model {{ factorization: COLA hidden: {hidden} layers: {layers} heads: 4 intermediate: {2 * hidden} rank: 8 vocab: 256 }}
parallel {{ strategy: BTP tp: {tp} micro_batch: {batch} global_batch: {batch} }}
data {{ train {{ path: "{data}" }} eval {{ path: "{data}" }} format: TEXT seq_len: {seq_len} }}
optimizer {{ lr: 3e-3 warmup_steps: 5 }}
run {{ steps: {steps} eval_tokens: {seq_len * batch} }}
checkpoint {{ dir: "{cluster.dir}/ckpt" every_steps: {every} keep: 3 }}
{extra}
"""


def run(namespace):
    """Runs every test_* of a module in the order of definition, prints TAP, exits.

    With arguments only the tests whose name contains one of them.
    """
    only = sys.argv[1:]
    tests = [(n, f) for n, f in namespace.items() if n.startswith("test_") and callable(f)]
    tests = [(n, f) for n, f in tests if not only or any(o in n for o in only)]
    print(f"1..{len(tests)}", flush=True)
    failed = 0
    for i, (name, test) in enumerate(tests, 1):
        title = name[len("test_"):].replace("_", " ")
        start = time.monotonic()
        try:
            test()
            print(f"ok {i} - {title} # {time.monotonic() - start:.2f} s", flush=True)
        except Skip as e:
            print(f"ok {i} - {title} # SKIP {e}", flush=True)
        except BaseException as e:
            failed += 1
            print(f"not ok {i} - {title}", flush=True)
            for line in traceback.format_exc().splitlines():
                print(f"# {line}", flush=True)
            if isinstance(e, KeyboardInterrupt):
                break
    sys.exit(1 if failed else 0)
