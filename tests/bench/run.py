#!/usr/bin/env python3
"""Runs the benchmarks and writes <build>/bench.jsonl, one JSON object a line.

Keys: name, value, unit, peer, peer_value, ratio (null where nothing was measured beside it),
date, commit, device; some benchmarks add more. A file that is there is replaced. With names
as arguments only those run, and the lines of the others are kept.

Times are of the machine as it is: run it on a quiet one.
"""
import argparse, contextlib, datetime, json, os, platform, sqlite3, statistics, struct, subprocess, sys, tempfile, time
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))


def device():
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit():
    p = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return p.stdout.strip() or "unknown"


def line(name, value, unit, **extra):
    value, *rest = (float(f"{v:.6g}") if isinstance(v, float) else v for v in (value, *extra.values()))
    extra = dict(zip(extra, rest))
    row = {"name": name, "value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None,
           "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": commit(),
           "device": device(), **extra}
    print(f"  {name:18} {value:>12.6g} {unit}" + "".join(f"  {k} {v:.4g}" for k, v in extra.items()
                                                         if isinstance(v, (int, float))), flush=True)
    return row


# ---- submit ------------------------------------------------------------------


def bench_submit(build):
    """A boostd without agents, so that nothing but the submit is measured; its state on the disk of $TMPDIR."""
    from harness import Cluster, tiny_job
    with Cluster(agents=0) as c:
        job = c.dir / "bench.pbtxt"
        job.write_text(tiny_job(c, name="bench"))

        def clients(n, submits):
            out = subprocess.run([build / "bench" / "submit_bench", c.socket, job, str(n), str(submits)], check=True,
                                 capture_output=True, text=True, timeout=300).stdout
            return json.loads(out)
        one, eight = clients(1, 2000), clients(8, 1000)
        note = {"clients": 1, "submits": one["submits"]}
        rows = [line("submit_p50_ms", one["p50_ms"], "ms", **note), line("submit_p99_ms", one["p99_ms"], "ms", **note),
                line("submits_per_s", eight["per_s"], "1/s", clients=8, submits=eight["submits"],
                     p50_ms=eight["p50_ms"], p99_ms=eight["p99_ms"], one_client_per_s=one["per_s"])]
        return rows


def bench_many(build):
    """100,000 jobs that have ended in the store, written there by copying one; then status, and submits beside them."""
    from harness import Cluster, tiny_job
    jobs, took = 100_000, []
    with Cluster(agents=0) as c:
        job = c.dir / "bench.pbtxt"
        job.write_text(tiny_job(c, name="bench"))
        c.ok("cancel", "--now", c.submit(job))
        c.boostd.terminate()
        with contextlib.closing(sqlite3.connect(c.state_dir / "state.db")) as db, db:
            columns = ",".join(row[1] for row in db.execute("PRAGMA table_info(job)") if row[1] != "id")
            db.execute(f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {jobs}) "
                       f"INSERT INTO job(id, {columns}) SELECT i, {columns} FROM n, job WHERE job.id = 1")
        start = time.monotonic()
        c.start_boostd()
        boot = time.monotonic() - start
        for _ in range(15):
            start = time.monotonic()
            c.ok("status")
            took.append(1000 * (time.monotonic() - start))

        def clients(n, submits):
            out = subprocess.run([build / "bench" / "submit_bench", c.socket, job, str(n), str(submits)], check=True,
                                 capture_output=True, text=True, timeout=300).stdout
            return json.loads(out)
        one, many = clients(1, 2000), clients(64, 400)
        return [line("status_ms_100k", statistics.median(took), "ms", jobs=jobs, slowest=max(took), boot_s=boot),
                line("submit_p99_ms_100k", one["p99_ms"], "ms", jobs=jobs, p50_ms=one["p50_ms"], clients=1),
                line("submits_per_s_64", many["per_s"], "1/s", jobs=jobs, clients=64, submits=many["submits"],
                     p50_ms=many["p50_ms"], p99_ms=many["p99_ms"])]


def bench_sched(build):
    """The core alone, with 10,000 nodes of 8 devices; CPU time. Jobs enough that 10,000 still wait when all is full."""
    out = subprocess.run([build / "bench" / "core_bench", "10000", "33000"], check=True, capture_output=True, text=True,
                         timeout=300).stdout
    r = json.loads(out)
    return [line("sched_pass_ms_10k", r["median_ms"], "ms", nodes=r["nodes"], queued=r["jobs"] - r["started_jobs"],
                 max_ms=r["max_ms"], first_ms=r["first_ms"], first_starts=r["started_jobs"],
                 submit_us=r["submit_us"], summary_us=r["summary_us"], register_us=r["register_us"], heartbeat_us=r["heartbeat_us"])]


# ---- from a submit to the first step ------------------------------------------


def bench_first_step(build):
    """boostctl submit to the end of the first step, seen by `boostctl wait`: both programs' start included."""
    from harness import Cluster, tiny_job
    times = []
    with Cluster(agents=1) as c:
        job_file = c.dir / "first.pbtxt"
        job_file.write_text(tiny_job(c, steps=3, tp=2, every=0, name="first"))
        for _ in range(7):
            start = time.monotonic()
            job = c.submit(job_file)
            c.ok("wait", job, "--for=step>=1", "--timeout", "60s")
            times.append(time.monotonic() - start)
            c.wait_state(job, "COMPLETED")
    return [line("first_step_s", statistics.median(times), "s", runs=len(times), fastest=min(times),
                 slowest=max(times))]


# ---- tokens a second -----------------------------------------------------------


def demo_text(c):
    """What the demo trains on, or a text of our own where that package is missing: speed does not depend on it."""
    from harness import words
    path = c.dir / "text.txt"
    try:
        text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = b""
    path.write_bytes(text if len(text) > 1_000_000 else words(1_000_000).encode())
    return path


def bench_demo(build):
    """Jobs of deploy/examples/demo.pbtxt through the whole product; medians over the steps after the first ten."""
    from harness import Cluster
    rows, skip, steps = [], 10, 60
    with Cluster(agents=1, cpu_slots=2) as c:
        text = demo_text(c)
        spec = ROOT / "deploy" / "examples" / "demo.pbtxt"
        for tp in (1, 2):
            job = c.submit(spec, "--set", f"parallel.tp={tp}", "--set", f"data.train[0].path={text}", "--set",
                           "data.eval=", "--set", "run.eval_every=0", "--set", f"run.steps={steps}", "--set",
                           f"checkpoint.dir={c.dir}/ckpt{tp}", "--set", "checkpoint.every_steps=0")
            c.wait_state(job, "COMPLETED", deadline=300)
            tokens = tokens_per_step(c, job)
            measured = [r for r in metric_rows(c, job) if r["step"] > skip and "step_ms" in r]
            assert len(measured) >= steps - skip, f"{len(measured)} steps were measured"
            ms = {k: statistics.median(r.get(k, 0.0) for r in measured) for k in ("step_ms", "gemm_ms", "comm_ms")}
            gemm, comm = (100 * ms[k] / ms["step_ms"] for k in ("gemm_ms", "comm_ms"))
            rows.append(line(f"demo_tok_s_tp{tp}", tokens / ms["step_ms"] * 1000, "tokens/s", gemm_pct=gemm,
                             comm_pct=comm, rest_pct=100 - gemm - comm, step_ms=ms["step_ms"]))
    return rows


def tokens_per_step(c, job):
    resolved = c.json("show", job)["resolved"]
    return resolved["parallel"]["global_batch"] * resolved["data"]["seq_len"]


def metric_rows(c, job):
    """One dict a step, of rank 0."""
    return c.json("metrics", job)["metrics"]


# ---- elements over tp ------------------------------------------------------------


def bench_elements(build):
    """A layer of LLaMA-7B, tp 4, four sequences: counted by the engine, beside the closed form. Nothing is timed."""
    out = subprocess.run([build / "bench" / "elements_bench"], check=True, capture_output=True, text=True, timeout=120)
    return [line(f"elements_7b_{name}", counted, "elements/layer", peer="closed form", peer_value=formula,
                 ratio=counted / formula) for name, (counted, formula) in json.loads(out.stdout).items()]


# ---- training on the CPU, beside JAX ----------------------------------------------


def jax_python():
    """An interpreter that has JAX, or None."""
    python = os.environ.get("BOOST_JAX_PYTHON") or sys.executable
    try:
        found = subprocess.run([python, "-c", "import jax"], capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        found = False
    return python if found else None


class Trainer:
    """A program that trains as many steps as it is told to (tests/bench/train_bench.c)."""

    def __init__(self, *command):
        env = {"GOMP_SPINCOUNT": "5000", **os.environ}  # as daemon/keeper_rank.c starts a rank
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def read(self):
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"{self.process.args[0]} ended with {self.process.wait()}")
        return json.loads(text)

    def train(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.read()

    def speed(self, steps):
        done = self.train(steps)
        return done["tokens"] / done["seconds"]

    def close(self):
        self.process.kill()
        self.process.communicate()


def bench_cpu_train(build):
    """The demo's model in one process on all cores, and in JAX: the same weights, tokens, loss and optimizer, which the
    losses of the first steps show. Windows of both in turn, the median of each."""
    spec, warm_up, steps, windows = ROOT / "deploy" / "examples" / "demo.pbtxt", 4, 5, 7
    threads, python, trainers = len(os.sched_getaffinity(0)), jax_python(), []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            trainers.append(Trainer(build / "bench" / "train_bench", spec, str(threads), f"{scratch}/weights",
                                    "parallel.tp=1"))
            model = trainers[0].read()
            if python:
                trainers.append(Trainer(python, ROOT / "tests" / "bench" / "train_jax.py", json.dumps(model)))
            losses = [t.train(warm_up)["losses"] for t in trainers]
            # Equal functions differ by the order of fp32 sums over at most 2048 terms.
            apart = max(abs(a / b - 1) for a, b in zip(losses[0], losses[-1]))
            assert apart < 1e-4, f"not the same model: losses {losses}"
            measured = [[t.speed(steps) for t in trainers] for _ in range(windows)]
        finally:
            for t in trainers:
                t.close()
    ours, *theirs = (statistics.median(w) for w in zip(*measured))
    beside = {"peer": "JAX, CPU", "peer_value": theirs[0], "ratio": ours / theirs[0]} if theirs else {}
    return [line("cpu_train_tok_s", ours, "tokens/s", **beside, threads=threads, parameters=model["parameters"],
                 windows=windows, fastest=max(w[0] for w in measured))]


# ---- checkpoints -----------------------------------------------------------------

CHECKPOINT_JOB = """
spec_version: 1
name: "ckpt"
model {{ factorization: COLA hidden: 512 layers: 4 heads: 8 intermediate: 1536 rank: 192 vocab: 2048 }}
parallel {{ strategy: BTP tp: {tp} micro_batch: 1 global_batch: 1 }}
data {{ train {{ path: "{dir}/train.txt" }} format: TEXT seq_len: {seq} }}
optimizer {{ lr: 1e-3 }}
run {{ steps: {steps} }}
checkpoint {{ dir: "{dir}/ckpt" every_steps: {every} }}
"""


def bench_checkpoints(build):
    """One rank with a state of more than 100 MB, in one process on all cores, on the disk of $TMPDIR. The ratio is the
    longest step that a checkpoint is written in, or that it is copied behind, with the copy, to the median of the steps
    before the first one plus that copy; its median over the saves, for steps of two lengths, of which the worse is told.
    Restoring is the time from the process's start to its first step, from a checkpoint of its own layout and from one of
    tp 2."""
    sys.path.insert(0, str(ROOT / "tests" / "issues"))
    from standalone import fields, records
    every, saves = 15, 6
    with tempfile.TemporaryDirectory() as scratch:
        d = Path(scratch)
        (d / "train.txt").write_text("in the beginning was the word, and the word was with code. " * 4000)

        def train(name, tp, steps, resume=None, seq=64):
            """Seconds until it trains."""
            (d / f"{name}.pbtxt").write_text(
                CHECKPOINT_JOB.format(dir=d / name, tp=tp, steps=steps, every=every, seq=seq))
            (d / name).mkdir(exist_ok=True)
            if not (d / name / "train.txt").exists():
                (d / name / "train.txt").symlink_to(d / "train.txt")
            argv = [build / "bin" / "boost-worker", "--standalone", d / f"{name}.pbtxt", "--run-dir", d / f"{name}.run"]
            start, began = time.monotonic(), None
            p = subprocess.Popen([*argv, *(["--resume", resume] if resume else [])], stdout=subprocess.PIPE, text=True)
            for text in p.stdout:
                began = began or (time.monotonic() - start if text.startswith("attempt") else None)
            assert p.wait() == 0, f"{name}: status {p.returncode}"
            return began

        def measure(name, seq):
            train(name, 1, every * saves, seq=seq)
            values = {}
            for record in records(d / f"{name}.run" / "rank-0.metrics"):
                message = fields(record)
                step = dict((k, v) for k, v in message if k != 4)[2]
                for m in (dict(fields(v)) for k, v in message if k == 4):
                    values.setdefault(m[1].decode(), {})[step] = struct.unpack("<d", m[2])[0]
            step_ms, copy_ms = values["step_ms"], values["ckpt_ms"]
            median = statistics.median(v for s, v in step_ms.items() if 1 < s < every)
            shards = [dict(fields(r)) for r in records(d / f"{name}.run" / "rank-0.shards")]
            assert len(shards) == saves and shards[0][5] > 100e6, shards
            ratios = []
            for shard, s in zip(shards, sorted(copy_ms)[:-1]):  # the last is written when no step is left
                longest, left = step_ms[s] + copy_ms[s], shard[7]
                while left > 0:
                    s += 1
                    longest, left = max(longest, step_ms[s]), left - step_ms[s]
                ratios.append(longest / (median + copy_ms[shard[2]]))
            return {"ratios": ratios, "step": median, "copy": statistics.median(copy_ms.values()), "size": shards[0][5],
                    "mb_s": statistics.median(s[5] / 1e3 / s[7] for s in shards)}

        short, long = measure("whole", 64), measure("long", 256)
        train("halves", 2, 1)
        own, = (d / "whole" / "ckpt").glob(f"step-{every * saves}.a1")
        other, = (d / "halves" / "ckpt").glob("step-1.a1")
        restore = train("again", 1, every * saves + 1, own)
        reshard = train("other", 1, 2, other)
    worse = max((short, long), key=lambda m: statistics.median(m["ratios"]))
    mb = {"shard_mb": short["size"] / 1e6}
    return [line("ckpt_step_ratio", statistics.median(worse["ratios"]), "", median_step_ms=worse["step"],
                 copy_ms=worse["copy"], saves=len(worse["ratios"]), worst=max(worse["ratios"]), **mb),
            line("ckpt_write_mb_s", short["mb_s"], "MB/s", saves=saves, **mb),
            line("restore_s", restore, "s", **mb), line("reshard_restore_s", reshard, "s", **mb)]


# ---- a thousand agents -----------------------------------------------------------


def used_s(pid):
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid, field):
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith(field + ":"):
            return int(text.split()[1]) * 1024 / 1e6
    raise ValueError(field)


def bench_agents(build):
    """Connections, registrations and a heartbeat a second of 1,000 nodes (agents_bench.c): boostd's share of one core
    while they beat, and its memory; by TCP with TLS, as clusters do, and over the Unix socket."""
    from harness import Cluster
    n, seconds, rows = 1000, 30, []
    for way in ("", "_unix"):
        with Cluster(agents=0, tls=not way, boostd_set={"log_level": "warn"}) as c:
            to = [c.socket, str(n)] if way else [c.address, str(n), c.dir / "certs"]
            agents = subprocess.Popen([build / "bench" / "agents_bench", *to], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True)
            try:
                started = json.loads(agents.stdout.readline())
                begin, before = time.monotonic(), used_s(c.boostd.pid)
                time.sleep(seconds)
                took, used = time.monotonic() - begin, used_s(c.boostd.pid) - before
                rss, peak = (memory_mb(c.boostd.pid, f) for f in ("VmRSS", "VmHWM"))
                states = [x["state"] for x in c.json("node", "ls")["nodes"]]
                beats = json.loads(agents.communicate(timeout=60)[0])
            finally:
                agents.kill()
                agents.wait()
            assert states.count("UP") == n, {s: states.count(s) for s in states}
            assert beats["answers"] >= 0.9 * n * seconds, beats
            rows += [line(f"agents_{n}{way}_cpu_pct", 100 * used / took, "% of a core", start_s=started["start_s"],
                          beats_per_s=beats["beats"] / took, slowest_answer_ms=beats["slowest_ms"]),
                     line(f"agents_{n}{way}_rss_mb", rss, "MB", peak_mb=peak)]
    return rows


def bench_mirror(build):
    """256 MiB to a store on this machine (tests/e2e/s3server.py, in memory, which takes part of the time) and back: signing,
    checksums, parts of 8 MiB one after the other."""
    import s3server
    size = 256 << 20
    env = {**os.environ, "AWS_ACCESS_KEY_ID": s3server.KEY, "AWS_SECRET_ACCESS_KEY": s3server.SECRET, "no_proxy": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as tmp, subprocess.Popen(
            [sys.executable, ROOT / "tests" / "e2e" / "s3server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True) as server:
        file = Path(tmp) / "shard"
        file.write_bytes(os.urandom(1 << 20) * (size >> 20))
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        took = []
        for _ in range(3):
            out = subprocess.run([build / "bench" / "mirror_bench", url, "models", file], check=True, env=env,
                                 capture_output=True, text=True, timeout=300).stdout
            took.append(json.loads(out))
        server.stdin.close()
    up, down = (size / 1e6 / statistics.median(x[k] for x in took) for k in ("up_s", "down_s"))
    return [line("mirror_mb_s", up, "MB/s", down_mb_s=down, bytes=size)]


BENCHES = [
    (("mirror_mb_s",), bench_mirror),
    (tuple(f"agents_1000{way}_{x}" for way in ("", "_unix") for x in ("cpu_pct", "rss_mb")), bench_agents),
    (("submit_p50_ms", "submit_p99_ms", "submits_per_s"), bench_submit),
    (("status_ms_100k", "submit_p99_ms_100k", "submits_per_s_64"), bench_many),
    (("sched_pass_ms_10k",), bench_sched),
    (("first_step_s",), bench_first_step),
    (("demo_tok_s_tp1", "demo_tok_s_tp2"), bench_demo),
    (("cpu_train_tok_s",), bench_cpu_train),
    (("ckpt_step_ratio", "ckpt_write_mb_s", "restore_s", "reshard_restore_s"), bench_checkpoints),
    (tuple(f"elements_7b_{way}_{s}" for s in ("full", "vanilla", "btp") for way in ("fwd", "fwdbwd")), bench_elements),
]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("names", nargs="*", help="only benchmarks whose name starts with one of these")
    args = p.parse_args()
    build = Path(args.build).resolve()
    os.environ["BOOST_BIN"] = str(build / "bin")
    out = build / "bench.jsonl"
    chosen = [(names, f) for names, f in BENCHES
              if not args.names or any(n.startswith(a) for n in names for a in args.names)]
    done = {n for names, _ in chosen for n in names}
    kept = [json.loads(x) for x in out.read_text().splitlines()] if args.names and out.exists() else []
    rows, failed = [r for r in kept if r["name"] not in done], []
    for names, bench in chosen:
        try:
            rows += bench(build)
        except Exception as e:
            failed.append(names)
            print(f"  {', '.join(names)}: FAILED: {e}", flush=True)
        out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    print(f"{len(rows)} results in {out}" + (f"; {len(failed)} benchmarks failed" if failed else ""))
    return 1 if failed else 0


sys.exit(main())
