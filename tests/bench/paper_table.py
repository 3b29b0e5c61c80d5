#!/usr/bin/env python3
"""The table of the BOOST paper on this machine's GPUs, through boostd, boost-agent and real jobs.

  paper_table.py [options]            measures; paper-table.sh sets the libraries' places first
  paper_table.py --table [FILE...]    Markdown tables and the checks; without files those of tests/bench/results

Parts, in the order of --parts; of each the most important rows first:
  iter      a job for each size, tp, way and micro-batch: milliseconds of an iteration, from `boostctl metrics`
  layer     the same with four layers: forward and backward of a layer by difference, less its update, which is that of
            ranks with NULL collectives (build/bench/rank_bench)
  comm      bus bandwidth (busbw_*) and the calls of the cells above by themselves (build/bench/comm_bench)
  alone     a step of one rank of each cell with NULL collectives (build/bench/rank_bench), of a tp with more ranks than
            there are GPUs too: with the model's communication behind it an estimate of the iteration
  exposed   what the jobs of the cells take longer than that rank alone
  peers     programs of $BOOST_PEERS: tp2_layers.py, nccl_busbw.py
  variants  grouping, norm and recompute at the first size of each tp; SVD and LaX at 7B
  kill      kill -9 of one rank: time until its job trains again
  loss      200 steps of a small model at every tp and at 1: whether the curves are one

A job is cancelled once enough steps were seen, so it writes no checkpoint. Times of communication: jobs on GPUs report
none, so comm_ms_layer is the sum of a layer's calls by themselves at the same sizes, and exposed is the job's iteration
less that of a rank with NULL collectives. Both say so in every line ("comm_by", "exposed_by"). BTP at tp 2 without
overlap makes no such calls where its ranks reach each other's memory: its kernels add up what both have, so for it
comm_ms_layer is what calls would take, and the rank with NULL collectives has those kernels without the sum. Without
waits a GPU is at its power limit more, hence slower: same_clock_pct is exposed as if all work went by the SM clock.

Writes one JSON object a line to --out after each row, in the form of gpu_bench.py; lines of other names stay.
"""
import argparse, json, os, re, shutil, signal, statistics, subprocess, sys, tempfile, threading, time
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "e2e")]
import paper_model as pm
import paper_tables
from paper_lines import Clocks, Lines, along, measured, median_of, random_tokens

PARTS = ("iter", "layer", "comm", "alone", "exposed", "peers", "variants", "kill", "loss")
MAIN_WAYS = ("full", "vanilla_published", "btp", "vanilla", "btp_no_overlap")
VARIANTS = ("btp_low_rank", "vanilla_published_layer", "btp_ungrouped", "btp_sync", "btp_layer", "full_layer",
            "vanilla_published_low_rank")
ARCHITECTURES = ("svd", "lax", "svd_vanilla_published", "lax_vanilla_published")
FIRST = {2: "3b", 4: "7b", 8: "13b", 1: "1b"}  # of each tp the size that the checks are about
SHALLOW = 4       # layers of the other job of a difference
RESERVE_MIB = 1536
GRID_KIB = (16, 256, 1024, 4096, 16384, 32768, 65536, 131072, 262144)
COMM_BY = "sum of the layer's calls, each timed by itself at its size (comm_bench)"
ALONE_BY = "rank 0 with NULL collectives (rank_bench); est_ms: and every collective behind it, by the model"
EXPOSED_BY = "the job's iteration less that of rank 0 with NULL collectives (rank_bench)"


class Stop(Exception):
    """A signal asks for the end."""


class Late(Exception):
    """The next row of a part would not be done in time."""


class Unfit(Exception):
    """A row that cannot be measured here; the text says why."""


# ---- the run -----------------------------------------------------------------------------


class Table:
    def __init__(self, args):
        self.args, self.lines, self.asked_tp = args, Lines(args.out), list(args.tp)
        self.end = time.monotonic() + args.budget_s
        self.plans, self.points = {}, {}
        self.clocks, self.cluster, self.mounted, self.shm = Clocks(), None, False, None
        self.device = "CPU" if args.cpu else "CUDA"

    def left(self):
        return self.end - time.monotonic()

    def need(self, seconds):
        if self.left() < seconds:
            raise Late(f"{self.left():.0f} s are left of --budget-s, the next row takes about {seconds:.0f}")

    def start(self):
        from harness import Cluster
        agent = {} if self.args.cpu else {"nvml_library": "libnvidia-ml.so.1", "ranks_per_gpu": self.args.share}
        self.cluster = c = Cluster(agents=1, cpu_slots=max(self.args.tp), agent_set=agent)
        node = c.json("node", "ls")["nodes"][0]
        self.gpus = node.get("gpus", [])
        self.memory_mib = min((g["memory_mib"] for g in self.gpus), default=None)
        if not self.args.cpu and not self.gpus:
            raise SystemExit("paper_table: no GPU here (--cpu tries it out)")
        n = len(self.gpus) * self.args.share if self.gpus else max(self.args.tp)
        for tp in [t for t in self.args.tp if t > n]:
            print(f"tp {tp} is left out but for ranks alone: {n} devices", flush=True)
            self.args.tp.remove(tp)
        self.room = self.make_room()
        self.data = c.dir / "tokens.u16"
        self.data.write_bytes(random_tokens(self.args.vocab, 1 << (16 if self.args.cpu else 22)))

    def make_room(self):
        """A folder for checkpoints that are never written: boostd takes a job only where one has room, and those of the
        larger models are hundreds of GiB. As root an empty file system in memory that promises as much; else what has
        most room."""
        large = self.cluster.dir / "room"
        large.mkdir()
        if os.geteuid() == 0 and not self.args.cpu:
            command = ["mount", "-t", "tmpfs", "-o", "size=4096g", "none", large]
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        if not self.mounted and not self.args.cpu and os.access("/dev/shm", os.W_OK):
            free = lambda f: os.statvfs(f).f_bavail * os.statvfs(f).f_frsize
            if free("/dev/shm") > free(large):
                self.shm = Path(tempfile.mkdtemp(prefix="paper-table-", dir="/dev/shm"))
                return self.shm
        return large

    def close(self):
        self.clocks.close()
        if not self.cluster:
            return
        self.cluster._kill_all()
        if self.mounted:
            subprocess.run(["umount", "-l", self.room])
        for folder in (self.shm, self.cluster.dir):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    # ---- what is asked for ----

    def sizes_at(self, tp):
        """The one of the checks first."""
        first = FIRST.get(tp)
        return sorted(self.args.sizes, key=lambda s: (s != first, self.args.sizes.index(s)))

    def cells(self, ways, tps=None):
        out = []
        for rank, _ in enumerate(self.args.sizes):
            for tp in tps or self.args.tp:
                for batch in self.args.batch:
                    for way in ways:
                        size = self.sizes_at(tp)[rank:rank + 1]
                        alone = tp == 1 and way in ("vanilla", "btp_no_overlap")  # on one GPU the same as another
                        if size and not alone and (not self.args.ways or way in self.args.ways):
                            out.append(self.cell(size[0], tp, way, batch))
        return out

    def cell(self, size, tp, way, batch):
        """With as many layers as were asked for: --layers N, or fit: as many as fit into the memory in every way."""
        cell = pm.Cell(size, tp, way, batch, 0, self.args.nondet)
        depth = pm.SIZES[size].layers
        if self.args.layers == "fit" and self.memory_mib:
            while depth > 2 and not all(self.fits(cell._replace(way=w, layers=depth)) for w in MAIN_WAYS):
                depth -= 2
        elif self.args.layers.isdigit():
            depth = min(depth, int(self.args.layers))
        return cell._replace(layers=0 if depth == pm.SIZES[size].layers else depth)

    def plan(self, cell):
        if cell not in self.plans:
            r = self.cluster.ctl("-o", "json", "plan", self.job_file(cell))
            if r.rc:
                raise Unfit("refused: " + first_line(r.err.split(".pbtxt: ")[-1]))
            self.plans[cell] = json.loads(r.out)
        return self.plans[cell]

    def job_file(self, cell):
        path = self.cluster.dir / f"{cell.named()}.pbtxt"
        path.write_text(pm.job_text(cell, self.data, self.room, self.device))
        return path

    def memory(self, cell):
        """GiB that a rank needs and that it may have."""
        need = max(m["total"] for m in self.plan(cell)["memory_bytes"] if m["of_this_job"])
        return need / 2**30, (self.memory_mib - RESERVE_MIB) / 1024 if self.memory_mib else None

    def fits(self, cell):
        try:
            need, room = self.memory(cell)
        except Unfit:  # in no depth
            return True
        return room is None or need <= room

    # ---- a job ----

    def steps_of(self, cell):
        """The metrics of the measured steps, and when they were; the job is ended."""
        c, a = self.cluster, self.args
        need, room = self.memory(cell)
        if room is not None and need > room:
            raise Unfit(f"does not fit: {need:.1f} GiB a rank of {room:.1f}")
        begin = time.monotonic()
        r = c.ctl("submit", self.job_file(cell), "--parsable")
        if r.rc:
            raise Unfit("refused: " + first_line(r.err))
        job = int(r.out.split()[0])
        try:
            return (*self.await_steps(job, begin), begin)
        finally:
            c.ctl("cancel", "--now", "-y", job)
            c.ctl("wait", job, "--timeout", "30s")

    def await_steps(self, job, begin):
        c, a = self.cluster, self.args
        limit = begin + min(a.job_s, max(self.left(), 1))
        while True:
            rows = [r for r in c.json("metrics", job)["metrics"] if "step_ms" in r]
            found = measured(rows, a.steps, a.warm_s, a.seconds)
            if found:
                return found, time.monotonic()
            status = c.status(job)
            over = status["state"] in ("FAILED", "HELD", "CANCELLED", "TIMEOUT")
            if over or (status.get("attempt", 1) > 1 and self.ended_ranks(job)):  # an attempt refused is one to come
                raise Unfit(self.why(job, status))
            if time.monotonic() > limit:
                raise Unfit(f"{len(rows)} steps within {time.monotonic() - begin:.0f} s, state {status['state']} "
                            f"{status.get('info') or ''}")
            time.sleep(0.1)

    def ended_ranks(self, job):
        return [e["text"] for e in self.cluster.events(job) if e["kind"] == "rank-exit"]

    def why(self, job, status):
        refused = [e["text"] for e in self.cluster.events(job) if e["kind"] == "attempt-refused"]
        text = (self.ended_ranks(job) or refused or [status.get("info") or status["state"]])[0]
        return ("does not fit: " if re.search("memory|arena", text) else "failed: ") + first_line(text)

    def planned(self, cell):
        """What is known without a run."""
        plan = self.plan(cell)
        found = {**pm.estimate(plan, cell), "plan_gib": self.memory(cell)[0], "model_flop": plan["model_flop_per_step"]}
        if cell.tp > 1:
            found.update(pm.volume(self.plan(cell._replace(layers=cell.depth + 1)), plan))
        if "recompute" in pm.WAYS[cell.way].fields:
            found["est_leaves_out"] = "what recompute repeats"
        return found

    def measure(self, cell):
        """One line of an iteration; its milliseconds, None where there are none."""
        s, T = pm.SIZES[cell.size], cell.batch * pm.SIZES[cell.size].seq_len
        about = {"size": cell.size, "tp": cell.tp, "way": cell.way, "micro_batch": cell.batch, "seq_len": s.seq_len,
                 "layers": cell.depth, "layers_whole": s.layers, "nondet": cell.nondet, "shared": self.args.share > 1}
        try:
            about.update(self.planned(cell))
            rows, end, begin = self.steps_of(cell)
        except Unfit as e:
            self.lines.put(cell.named(), None, "ms", note=str(e), **{"est_ms": None, **about})
            return None
        ms = [r["step_ms"] for r in rows]
        value = statistics.median(ms)
        about.update(tokens_s=T / value * 1e3, mfu=median_of(rows, "mfu"), loss=rows[-1].get("loss"), steps=len(ms),
                     ms_p95=sorted(ms)[int(0.95 * (len(ms) - 1))], ms_min=min(ms), job_s=end - begin,
                     **self.clocks.between(end - sum(ms) / 1e3, end))
        if median_of(rows, "comm_ms") is not None:  # on the CPU the ranks tell it themselves
            about.update(job_comm_ms=median_of(rows, "comm_ms"))
        self.lines.put(cell.named(), value, "ms", **about)
        return value

    def run_cells(self, cells):
        took = 30
        for cell in cells:
            if self.args.skip_done and self.lines.value(cell.named()):
                continue
            self.need(took)
            begin = time.monotonic()
            self.measure(cell)
            took = max(10, time.monotonic() - begin)

    # ---- the parts ----

    def part_iter(self):
        self.run_cells(self.cells(MAIN_WAYS))

    def derive(self):
        """Lines that follow from others."""
        self.scaling()
        self.recompute()
        self.join_peers()

    def part_variants(self):
        wanted = lambda way: not self.args.ways or way in self.args.ways
        try:
            for tp in [t for t in self.args.tp if t > 1]:
                for batch in self.args.batch:
                    self.run_cells([self.cell(self.sizes_at(tp)[0], tp, w, batch) for w in VARIANTS if wanted(w)])
            for size in {"7b", "tiny"} & set(self.args.sizes):
                self.run_cells([self.cell(size, tp, w, batch) for tp in self.args.tp if tp > 1
                                for batch in self.args.batch for w in ARCHITECTURES if wanted(w)])
        finally:
            self.join_comm()

    def recompute(self):
        """MiB saved for each millisecond added, of cells with and without."""
        for name, row in list(self.lines.rows.items()):
            m = re.fullmatch(r"iter_(\w+_tp\d+)_(btp|vanilla_published|full)_(low_rank|layer)_(b\d+\w*)", name)
            plain = m and self.lines.rows.get(f"iter_{m[1]}_{m[2]}_{m[4]}")
            if not plain or not plain["value"] or not row["value"]:
                continue
            saved, added = (plain["plan_gib"] - row["plan_gib"]) * 1024, row["value"] - plain["value"]
            self.lines.put(f"saved_per_ms_{m[1]}_{m[2]}_{m[3]}_{m[4]}", saved / added if added > 0 else None, "MiB/ms",
                           saved_mib=saved, added_ms=added, layers=row["layers"])

    def scaling(self):
        """FLOP a second of a GPU beside the first's. Strong: 7B BTP; weak: 1B on one GPU, 3B on two, 7B on four.
        Estimates: of the model, and of ranks alone with the model's communication."""
        sets = {"strong": [("7b", t) for t in (1, 2, 4, 8)], "weak": [("1b", 1), ("3b", 2), ("7b", 4)]}
        for kind, places in sets.items():
            for batch in self.args.batch:
                speeds = [(s, t, self.speeds(s, t, batch)) for s, t in places]
                speeds = [x for x in speeds if x[2]]
                for size, tp, of in speeds[1:]:
                    base = speeds[0][2]
                    value, model, alone = (of[k] / base[k] if of[k] and base[k] else None for k in
                                           ("measured", "model", "alone"))
                    self.lines.put(f"{kind}_scaling_{size}_tp{tp}_b{batch}", value, "of linear", est_value=model,
                                   est_alone_value=alone, base=f"{speeds[0][0]} on {speeds[0][1]}")

    def speeds(self, size, tp, batch):
        """FLOP a millisecond of a GPU, BTP as a job has it that says nothing of overlap; None without any line."""
        cell = f"{size}_tp{tp}_btp{'_no_overlap' * (tp > 1)}_b{batch}"
        ran, alone = (self.lines.rows.get(f"{what}_{cell}", {}) for what in ("iter", "alone"))
        flop = ran.get("model_flop") or alone.get("model_flop")
        ms = {"measured": ran.get("value"), "model": ran.get("est_ms") or alone.get("est_model_ms"),
              "alone": alone.get("est_ms") if tp > 1 else ran.get("value")}
        found = {k: flop / v / tp if v else None for k, v in ms.items()}
        return found if found["measured"] or found["alone"] else None

    def part_layer(self):
        for tp in self.args.tp:
            size = self.sizes_at(tp)[0]
            for batch in self.args.batch:
                for way in MAIN_WAYS:
                    whole = self.cell(size, tp, way, batch)
                    if tp == 1 or (self.args.ways and way not in self.args.ways) or whole.depth <= 1:
                        continue
                    few = whole._replace(layers=min(SHALLOW, whole.depth - 1))
                    deep = self.lines.value(whole.named())
                    if not deep or (self.args.skip_done and self.lines.value(whole.named("layer"))):
                        continue
                    self.need(25)
                    shallow = self.measure(few)
                    if shallow:
                        layers, update = whole.depth - few.depth, self.update_ms(whole, few)
                        self.lines.put(whole.named("layer"), (deep - shallow - update) / layers, "ms/layer",
                                       est_ms=self.estimate_between(whole, few), ms_deep=deep, ms_shallow=shallow,
                                       layers_deep=whole.depth, layers_shallow=few.depth, update="left out",
                                       update_ms=update / layers, size=size, tp=tp, way=way, micro_batch=batch)

    def update_ms(self, deep, shallow):
        """Of the layers that the one has more."""
        step, gradients = ([self.alone(cell, mode)["value"] for cell in (deep, shallow)] for mode in
                           ("step", "gradients"))
        return (step[0] - gradients[0]) - (step[1] - gradients[1])

    def estimate_between(self, deep, shallow):
        """Of a layer, forward and backward."""
        both = [pm.estimate(self.plan(c), c) for c in (deep, shallow)]
        ms = [x["est_ms"] - x["est_update_ms"] for x in both]
        return (ms[0] - ms[1]) / (deep.depth - shallow.depth)

    def wanted_calls(self, tp):
        calls = [pm.Call(kind, kib * 1024, 0) for kind in pm.ALPHA_US for kib in self.grid()]
        for size in self.args.sizes:
            for batch in self.args.batch:
                for way in [*MAIN_WAYS, "btp_ungrouped", "btp_sync"]:
                    forward, backward = pm.layer_calls(pm.Cell(size, tp, way, batch, 0))
                    calls += forward + backward
                edge = 2 * batch * pm.SIZES[size].seq_len * pm.SIZES[size].hidden
                calls += [pm.Call(kind, edge, 0) for kind in pm.ALPHA_US]
        return list(dict.fromkeys(calls))

    def grid(self):
        return [k for k in GRID_KIB if k <= 256] if self.args.cpu or self.args.share > 1 else GRID_KIB

    def part_comm(self):
        for tp in [t for t in self.args.tp if t > 1]:
            self.need(20)
            devices = ",".join(str(i // self.args.share) for i in range(tp))
            where = ["--cpu"] if self.args.cpu else ["--devices", devices]
            texts = [f"{c.kind}:{c.bytes}" + (f"+{c.second}" if c.second else "") for c in self.wanted_calls(tp)]
            command = [self.args.build / "bench" / "comm_bench", *where, str(tp), *texts]
            p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            timer = threading.Timer(min(240, max(self.left(), 5)), p.kill)
            timer.start()
            for row in map(json.loads, p.stdout):
                self.points[tp, row["kind"], row["bytes"], row["second"]] = row["us"]
                if row["bytes"] % 1024 == 0 and row["bytes"] // 1024 in self.grid() and not row["second"]:
                    self.lines.put(f"busbw_{row['kind']}_{row['bytes'] // 1024}k_tp{tp}", row["busbw_gb_s"], "GB/s",
                                   us=row["us"], est_us=pm.call_us(row["kind"], row["bytes"], tp), tp=tp,
                                   **{k: row[k] for k in ("backend", "shared", "calls")})
            said = p.stderr.read().strip()
            timer.cancel()
            if p.wait():
                self.lines.put(f"busbw_tp{tp}", None, "GB/s", note=f"failed ({p.returncode}): {said[-300:]}")
        self.join_comm()

    def call_us(self, tp, call):
        return self.points.get((tp, call.kind, call.bytes, call.second))

    def edges_us(self, cell, calls):
        """Of embedding, head and loss: what the plan counts beyond the layers; one large call of a kind and pass, the
        others small. Between the sizes measured on a straight line."""
        total = 0
        for kind in pm.ALPHA_US:
            points = sorted((k[2], us) for k, us in self.points.items() if k[:2] == (cell.tp, kind) and not k[3])
            for which, layer in zip(("forward", "backward"), calls):
                rows = [x for x in self.plan(cell)["collectives"]
                        if (x["group"], x["kind"], x["pass"]) == ("tp", kind, which)]
                mine = [c for c in layer if c.kind == kind]
                n = sum(x["calls"] for x in rows) - len(mine) * cell.depth
                left = sum(x["bytes"] for x in rows) - sum(c.bytes + c.second for c in mine) * cell.depth
                if n > 0 and points:
                    total += along(points, left) + (n - 1) * points[0][1]
        return total

    def join_comm(self):
        """Times of a layer's and a step's communication, to the lines of the iterations."""
        for name, row in list(self.lines.rows.items()):
            if not name.startswith("iter_") or row.get("tp", 1) < 2 or not self.lines.same_build(name):
                continue
            cell = pm.Cell(row["size"], row["tp"], row["way"], row["micro_batch"],
                           0 if row["layers"] == row["layers_whole"] else row["layers"], row["nondet"])
            calls = pm.layer_calls(cell)
            times = [[self.call_us(cell.tp, c) for c in half] for half in calls] if calls else [[None], []]
            if any(t is None for half in times for t in half):
                continue
            forward, backward = (sum(half) / 1e3 for half in times)
            step = (forward + backward) * cell.depth + self.edges_us(cell, calls) / 1e3
            more = {"comm_ms_layer_fwd": forward, "comm_ms_layer": forward + backward, "comm_ms": step,
                    "comm_by": COMM_BY}
            if "recompute" in pm.WAYS[cell.way].fields:
                more["comm_leaves_out"] = "what recompute repeats"
            self.lines.change(name, **more)

    def part_alone(self):
        took = 20
        for cell in self.cells(MAIN_WAYS, [t for t in self.asked_tp if t > 1]):
            if self.args.skip_done and self.lines.same_build(cell.named("alone")):
                continue
            self.need(took)
            begin = time.monotonic()
            self.rank_alone(cell)
            took = max(8, time.monotonic() - begin)

    def rank_alone(self, cell):
        """The line of a rank of it with NULL collectives; its value is None where it cannot be."""
        name = cell.named("alone")
        if name in self.lines.mine or (self.args.skip_done and self.lines.same_build(name)):
            return self.lines.rows[name]
        about = {"size": cell.size, "tp": cell.tp, "way": cell.way, "micro_batch": cell.batch, "layers": cell.depth,
                 "layers_whole": pm.SIZES[cell.size].layers, "nondet": cell.nondet, "alone_by": ALONE_BY}
        try:
            need, room = self.memory(cell)
            if room is not None and need > room:
                raise Unfit(f"does not fit: {need:.1f} GiB a rank of {room:.1f}")
            found = self.alone(cell, "step")
        except (Unfit, RuntimeError, subprocess.TimeoutExpired) as e:
            self.lines.put(name, None, "ms", note=str(e)[:300], **about)
            return self.lines.rows[name]
        plan = self.plan(cell)
        model = pm.estimate(plan, cell)
        calls = pm.layer_calls(cell) or ([], [])
        each = [sum(pm.call_us(c.kind, c.bytes + c.second, cell.tp) for c in half) / 1e3 for half in calls]
        self.lines.put(name, found["value"], "ms", est_ms=found["value"] + model["est_comm_ms"],
                       est_comm_ms=model["est_comm_ms"], est_comm_ms_layer_fwd=each[0] or None,
                       est_comm_ms_layer=sum(each) or None, est_model_ms=model["est_ms"],
                       model_flop=plan["model_flop_per_step"], peak_gib=found["peak_gib"], sm_mhz=found["sm_mhz"],
                       watts=found.get("watts"), **about)
        return self.lines.rows[name]

    def part_exposed(self):
        cells = [c for c in self.cells(MAIN_WAYS) if c.tp > 1 and self.lines.value(c.named())]
        order = {w: i for i, w in enumerate(("btp", "btp_no_overlap", "full", "vanilla_published", "vanilla"))}
        for cell in sorted(cells, key=lambda c: order[c.way]):
            if self.args.skip_done and self.lines.value(exposed_name(cell)) is not None:
                continue
            self.need(20)
            self.expose(cell)

    def alone(self, cell, mode):
        """What rank_bench says of a rank of it with NULL collectives."""
        kind = {"FULL_RANK": "full"}.get(pm.WAYS[cell.way].factorization, pm.WAYS[cell.way].factorization.lower())
        where = ["--cpu"] if self.args.cpu else []
        fields = [f"{k}={v}" for k, v in pm.fields_of(cell).items()]
        env = {**os.environ, **({} if self.args.cpu else {"CUDA_VISIBLE_DEVICES": "0"})}
        p = subprocess.run([self.args.build / "bench" / "rank_bench", *where, "--name", cell.named(mode), "--warm",
                            str(self.args.warm_s), "--seconds", str(self.args.seconds), mode, f"{cell.size},{kind}",
                            *fields], text=True, capture_output=True, timeout=min(180, max(self.left(), 5)), env=env)
        if p.returncode:
            raise RuntimeError(f"rank_bench {mode} of {cell.named()}: {p.stderr.strip()[-300:]}")
        return json.loads(p.stdout)

    def expose(self, cell):
        name, row = exposed_name(cell), self.lines.rows[cell.named()]
        null = self.rank_alone(cell)
        if null["value"] is None:
            self.lines.put(name, None, "%", note=null["note"])
            return
        exposed, comm = row["value"] - null["value"], row.get("comm_ms")
        clocks = row["sm_mhz"] and null["sm_mhz"]
        slower = row["value"] - null["value"] * null["sm_mhz"] / row["sm_mhz"] if clocks else None
        self.lines.change(cell.named(), null_ms=null["value"], exposed_ms=exposed, exposed_by=EXPOSED_BY)
        self.lines.put(name, 100 * exposed / comm if comm else None, "% of comm_ms", exposed_ms=exposed, comm_ms=comm,
                       iter_ms=row["value"], null_ms=null["value"], null_sm_mhz=null["sm_mhz"],
                       iter_sm_mhz=row["sm_mhz"], exposed_pct_of_iteration=100 * exposed / row["value"],
                       same_clock_pct=100 * slower / comm if slower is not None and comm else None,
                       exposed_by=EXPOSED_BY, comm_by=COMM_BY,
                       size=cell.size, tp=cell.tp, way=cell.way, micro_batch=cell.batch, layers=cell.depth)

    # ---- peers ----

    def part_peers(self):
        folder = os.environ.get("BOOST_PEERS")
        if not folder or self.args.cpu or self.args.share > 1 or 2 not in self.args.tp:
            print("no peers: BOOST_PEERS is not set, or there is no tp 2", flush=True)
            return
        for batch in self.args.batch:
            text = self.peer(Path(folder) / "tp2_layers.py", [str(batch)], 100)
            for kind, ms in re.findall(r"^tp2 d3072 (\w+) +B\d+ fwd\+bwd ([\d.]+) ms/layer", text, re.M):
                way = {"vanred": "vanilla_published"}.get(kind, kind)
                self.lines.put(f"peer_layer_3b_tp2_{way}_b{batch}", float(ms), "ms/layer", program="tp2_layers.py",
                               update="none")
        text = self.peer(Path(folder) / "nccl_busbw.py", [], 60)
        names = {"ar": pm.REDUCE, "rs": pm.SCATTER, "ag": pm.GATHER}
        for op, kib, gb in re.findall(r"^(\w\w) +(\d+) KiB +[\d.]+ us busbw +([\d.]+) GB/s", text, re.M):
            self.lines.put(f"peer_busbw_{names[op]}_{kib}k_tp2", float(gb), "GB/s", program="nccl_busbw.py")

    def peer(self, script, arguments, seconds):
        """What it prints; it has its own libraries, and sees two GPUs."""
        self.need(seconds / 2)
        env = {**{k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}, "CUDA_VISIBLE_DEVICES": "0,1"}
        p = subprocess.Popen([sys.executable, "-u", script, *arguments], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True)
        timer = threading.Timer(min(240, max(self.left(), 5)), os.killpg, (p.pid, signal.SIGKILL))
        timer.start()
        try:
            text = p.communicate()[0]
        finally:
            timer.cancel()
        if p.returncode:
            print(f"  {script.name}: status {p.returncode}: {text.strip()[-400:]}", flush=True)
        return text

    def join_peers(self):
        for name in list(self.lines.rows):
            theirs = self.lines.rows.get("peer_" + name)
            theirs = theirs or self.lines.rows.get("peer_" + name.replace("_btp_no_overlap_", "_btp_"))
            ours = self.lines.rows[name]
            if theirs and ours["value"]:
                self.lines.change(name, peer="PyTorch, " + theirs["program"], peer_value=theirs["value"],
                                  ratio=ours["value"] / theirs["value"])

    def part_kill(self):
        import paper_jobs  # not before the programs' folder is known
        paper_jobs.kill_a_rank(self)

    def part_loss(self):
        import paper_jobs
        paper_jobs.overlay(self)


def first_line(text):
    return text.strip().split("\n")[0][:300]


def exposed_name(cell):
    """The full system's has no way in its name."""
    name = cell.named("exposed_comm_pct")
    return name.replace("_btp_b", "_b") if cell.way == "btp" else name


# ---- the command line --------------------------------------------------------------------


def names_of(choices):
    def read(text):
        found = [x for x in text.split(",") if x]
        wrong = [x for x in found if x not in choices]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(choices)}")
        return found
    return read


def numbers(text):
    return [int(x) for x in text.split(",")]


def read_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build", type=Path)
    p.add_argument("--out", type=Path, help="default: paper-table.jsonl in the build folder")
    p.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), help="in this order; default: all")
    p.add_argument("--tp", type=numbers, default=[2, 4, 8, 1], help="those that the machine has; default: 2,4,8,1")
    p.add_argument("--sizes", type=names_of(pm.SIZES), help="default: 3b,1b,7b,13b,30b")
    p.add_argument("--batch", type=numbers, default=[4, 1], help="micro-batches; default: 4,1")
    p.add_argument("--ways", type=names_of(pm.WAYS), help="only these: " + ", ".join(pm.WAYS))
    p.add_argument("--layers", default="all", help="all, N at most, or fit: as many as fit in every way; names get _lN")
    p.add_argument("--nondet", action="store_true", help="deterministic: false, as PyTorch's are; names get _nondet")
    p.add_argument("--steps", type=int, default=12, help="measured at least; default: 12")
    p.add_argument("--seconds", type=float, default=3, help="measured at least; default: 3")
    p.add_argument("--warm-s", type=float, default=2, help="of work before; default: 2")
    p.add_argument("--budget-s", type=float, default=1e9, help="for all; rows not done by then are left out")
    p.add_argument("--job-s", type=float, default=150, help="for a job; default: 150")
    p.add_argument("--skip-done", action="store_true", help="leave out what --out has already")
    p.add_argument("--share", type=int, default=1, help="ranks of a GPU: a trial, slow (NCCL over sockets)")
    p.add_argument("--cpu", action="store_true", help="a trial with the size tiny, without a GPU")
    p.add_argument("--table", action="store_true", help="measures nothing; standard output")
    p.add_argument("files", nargs="*", type=Path, help="of --table")
    args = p.parse_args()
    if args.files and not args.table:
        p.error("files are for --table")
    args.build = args.build.resolve()
    args.out = args.out.resolve() if args.out else args.build / "paper-table.jsonl"
    args.sizes = args.sizes or (["tiny"] if args.cpu else ["3b", "1b", "7b", "13b", "30b"])
    args.vocab = min(pm.SIZES[s].vocab for s in args.sizes)
    if args.layers not in ("all", "fit") and not args.layers.isdigit():
        p.error("--layers takes all, fit or a number")
    return args


def stop(number, frame):
    raise Stop(f"signal {number}")


def main():
    args = read_arguments()
    if args.table:
        print(paper_tables.render(args.files or sorted((HERE / "results").glob("*-x[0-9]*.jsonl"))), end="")
        return 0
    os.environ["BOOST_BIN"] = str(args.build / "bin")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table, failed = Table(args), []
    try:
        table.start()
        for part in args.parts:
            print(f"{part}: {table.left():.0f} s left" if args.budget_s < 1e9 else part, flush=True)
            try:
                getattr(table, "part_" + part)()
            except Late as e:
                print(f"  {part}: {e}", flush=True)
            except Stop:
                raise
            except Exception as e:
                failed.append(part)
                print(f"  {part}: FAILED: {type(e).__name__}: {e}", flush=True)
    except Stop as e:
        print(f"stopped: {e}", flush=True)
    finally:
        table.close()
    table.derive()
    print("\n".join(paper_tables.check_lines(table.lines.rows)))
    print(f"{len(table.lines.mine)} lines in {args.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or not table.lines.mine else 0


if __name__ == "__main__":
    sys.exit(main())
