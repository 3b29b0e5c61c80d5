#!/usr/bin/env python3
"""Benchmarks of training on one GPU, each beside the program that a user would take instead.

  gpu_bench.py [options] [NAME...]     only these; what is no whole name stands for all that start with it
  gpu_bench.py --table [FILE...]       Markdown tables of such lines; without files those of tests/bench/results

Ours is gpu_bench (tests/bench/gpu_bench.c), run once a round for each name, or gpu_ops (gpu_ops.c) for single
operations: many lines a run, each with its own peer (such as the best algorithm that the library has). Other peers are
PyTorch programs of the folder $BOOST_PEERS, run in turn with ours on the same device; without that folder or without
PyTorch there are none. Writes one JSON object a line to --out: name, value, unit, peer, peer_value, ratio (ours over
the peer's; null where nothing was measured beside it), date, commit, device, and what belongs to the figure. Lines of
other names in that file are kept.
Tables of profiles go to --out with the ending .NAME.txt.
"""
import argparse, datetime, functools, glob, json, os, re, statistics, subprocess, sys, threading, time
from pathlib import Path

sys.dont_write_bytecode = True
import gpu_tables, paper_model, paper_tables
from gpu_machine import Smi, machine

HERE = Path(__file__).resolve().parent
OURS_LIMIT, PEER_LIMIT = 150, 300  # seconds, start and compilation included
SHORT = 0.06                       # of --seconds that a line of single operations has
SETTLED = 3                        # seconds at the end of a peer's run that it measures at least


# ---- what there is ---------------------------------------------------------------


class Case:
    def __init__(self, mode, model, *fields, peer=None, options=(), program="gpu_bench", share=None):
        self.mode, self.model, self.fields, self.peer, self.options = mode, model, fields, peer, options
        self.share = share or (SHORT if program == "gpu_ops" else 1)  # of --seconds, for a line
        self.program = program  # gpu_ops: many lines of one run, whose names start with the case's


ON = "model.mlp_activation=ON"  # as the peers' models have it, whose steps are compared
NONDET = "parallel.deterministic=false"


def batch(n):
    return f"parallel.micro_batch={n}", f"parallel.global_batch={n}"


def step_cases():
    out = {}
    for size in ("1b", "350m"):
        for kind in ("cola", "full"):
            peer = ("torch_model.py", f"{size},{kind},8,2048,default,bf16")
            out[f"step_{size}_{kind}_b8_t2048"] = Case("step", f"{size},{kind}", ON, peer=peer)
            out[f"step_{size}_{kind}_b8_t2048_nondet"] = Case("step", f"{size},{kind}", ON, NONDET, peer=peer)
    for mode in ("LOW_RANK", "LAYER"):
        out[f"step_1b_cola_b8_t2048_{mode.lower()}"] = Case("step", "1b,cola", ON, f"parallel.recompute={mode}")
    out["step_1b_cola_b8_t2048_uncaptured"] = Case("step", "1b,cola", ON, options=("--plain",))
    for name, kind, more in (("cola", "cola", ()), ("cola_nondet", "cola", (NONDET,)), ("full", "full", ())):
        out[f"idle_pct_1b_{name}"] = Case("profile", f"1b,{kind}", ON, *more)
    for name, kind, more in (("btp", "cola", ()), ("full", "full", ()), ("vanilla", "cola", ("parallel.strategy=VANILLA",))):
        for b in (4, 1):
            out[f"idle_pct_7b_tp4_{name}_b{b}"] = Case("profile", f"7b,{kind}", *more, *batch(b), options=("--layers",))
    for kind in ("cola", "full"):
        out[f"ops_ms_1b_{kind}"] = Case("ops", f"1b,{kind}", ON)
    out["ckpt_stall_ms_1b"] = Case("stall", "1b,cola", ON)
    return out


def fit_cases():
    """Largest micro-batches."""
    out = {}
    for mode in ("NONE", "LOW_RANK", "LAYER"):
        for name, model, *fields in (("1b_full", "1b,full", ON), ("1b_cola", "1b,cola", ON), ("7b_tp4_full", "7b,full"),
                                     ("7b_tp4_vanilla", "7b,cola", "parallel.strategy=VANILLA"),
                                     ("7b_tp4_btp", "7b,cola")):
            if mode != "LOW_RANK" or "full" not in name:
                out[f"fit_{name}_{mode.lower()}"] = Case("fit", model, *fields, f"parallel.recompute={mode}")
    return out


def rank_cases():
    out = {}
    ways = {"full": ("full", (), "full"), "vanilla": ("cola", ("parallel.strategy=VANILLA",), "van"),
            "btp": ("cola", ("parallel.strategy=BTP",), "btp")}
    for size, tp in (("7b", 4), ("3b", 2), ("13b", 4), ("30b", 4)):
        for name, (kind, fields, peer) in ways.items():
            for b in (4, 1):
                out[f"rank_{size}_tp{tp}_{name}_b{b}"] = Case("layer", f"{size},{kind}", *fields, *batch(b),
                                                              peer=("torch_rank.py", f"{size},{peer},{b}"))
    for b in (4, 1):
        for kind in ("svd", "lax"):
            out[f"rank_7b_tp4_{kind}_btp_b{b}"] = Case("layer", f"7b,{kind}", "parallel.strategy=BTP", *batch(b))
        out[f"rank_7b_tp4_btp_ungrouped_b{b}"] = Case("layer", "7b,cola", "parallel.grouped=OFF", *batch(b))
        out[f"rank_7b_tp4_btp_sync_b{b}"] = Case("layer", "7b,cola", "parallel.norm=SYNC", *batch(b))
        for name, (kind, fields, peer) in ways.items():
            out[f"rank_7b_tp4_{name}_nondet_b{b}"] = Case("layer", f"7b,{kind}", *fields, NONDET, *batch(b),
                                                          peer=("torch_rank.py", f"7b,{peer},{b}"))
    for way in ("btp", "vanilla"):
        for mode in ("LOW_RANK", "LAYER"):
            out[f"rank_7b_tp4_{way}_b4_{mode.lower()}"] = Case("layer", "7b,cola", *ways[way][1], *batch(4),
                                                               f"parallel.recompute={mode}")
    return out


# B,H,HK,S,E: 1B; a whole layer of 7B and a rank's of TP4; grouped queries.
ATTENTION = ("8,32,32,2048,64", "4,32,32,4096,128", "4,8,8,4096,128", "1,8,8,4096,128", "4,32,8,4096,128")
CPU_SHAPES = ("2,4,4,64,16",)
# GiB that a step's element-wise tensors take to read and write once each, in one fused pass: 78 MiB of T 16384 behind
# each of the 24 products of a CoLA layer, and 12 of a full-rank one.
COPIES = {"cola": "87.75", "full": "43.875"}
# The BTP paper's HFU of A100s (312 TFLOP/s), TP4: attention's pair, the MLP's.
PUBLISHED_HFU = {("3b", 4, "full"): (71.8, 77.9), ("3b", 4, "vanilla"): (44.1, 46.6), ("3b", 4, "btp"): (60.0, 67.2),
                 ("7b", 4, "full"): (77.8, 79.6), ("7b", 4, "vanilla"): (61.5, 62.1), ("7b", 4, "btp"): (72.6, 75.3),
                 ("13b", 4, "full"): (87.0, 84.4), ("13b", 4, "vanilla"): (63.4, 65.1), ("13b", 4, "btp"): (77.0, 75.9),
                 ("7b", 1, "vanilla"): (48.1, 52.6), ("7b", 2, "vanilla"): (56.8, 59.0),
                 ("7b", 8, "vanilla"): (65.7, 64.1),
                 ("7b", 1, "btp"): (55.1, 64.9), ("7b", 2, "btp"): (69.7, 69.9), ("7b", 8, "btp"): (76.1, 76.6)}


def ops_cases():
    """Single operations, many lines a run."""
    out = {"gemm_1b_cola": Case("gemm", "1b,cola", ON, program="gpu_ops"),
           "gemm_1b_full": Case("gemm", "1b,full", ON, program="gpu_ops")}
    for b in (4, 1):
        for name, kind, *fields in (("full", "full"), ("vanilla", "cola", "parallel.strategy=VANILLA"),
                                    ("btp", "cola", "parallel.strategy=BTP")):
            out[f"gemm_7b_tp4_{name}_b{b}"] = Case("gemm", f"7b,{kind}", *fields, *batch(b), program="gpu_ops")
    out["attention"] = Case("attention", *ATTENTION, program="gpu_ops")
    for kind in ("cola", "full"):
        out[f"kernel_1b_{kind}"] = Case("kernel", f"1b,{kind}", ON, program="gpu_ops")
        out[f"floor_1b_{kind}"] = Case("floor", f"1b,{kind}", ON, options=("--gib", COPIES[kind]), program="gpu_ops",
                                       share=0.5)
    for size, b in (("3b", 4), ("13b", 4), ("7b", 1), ("7b", 2), ("7b", 4), ("7b", 8)):
        out[f"hfu_{size}_tp4_b{b}"] = Case("hfu", f"{size},cola", "parallel.tp=4", *batch(b), program="gpu_ops")
    return out


CASES = {**step_cases(), **rank_cases(), **fit_cases(), **ops_cases()}


# ---- what follows from other lines ---------------------------------------------------

MODELLED = ("collectives: by the alpha-beta line of paper_model.py, none of it hidden; the rest measured with NULL "
            "ones")


def repeated_ms(row):
    """Of the collectives that a layer's recompute repeats."""
    total = 0
    for kind in paper_model.ALPHA_US:
        calls = row.get(f"repeated_{kind}_calls", 0)
        if calls:
            total += calls * paper_model.call_us(kind, row[f"repeated_{kind}_mib"] * 2**20 / calls, row["tp"]) / 1e3
    return total


def recompute_lines(by):
    out, per_ms, none = [], {}, {"peer": None, "peer_value": None}
    for way in ("btp", "vanilla"):
        plain = by.get(f"rank_7b_tp4_{way}_b4")
        for mode in ("low_rank", "layer"):
            again = by.get(f"rank_7b_tp4_{way}_b4_{mode}")
            if not plain or not again:
                continue
            saved, added = plain["arena_mib_layer"] - again["arena_mib_layer"], again["value"] - plain["value"]
            comm, of = repeated_ms(again), f"7b_tp4_{way}_{mode}"
            modelled = {"modelled": MODELLED, "measured_ms": added, "modelled_ms": comm}
            out += [{**again, **none, "name": f"recompute_saved_mb_{of}", "unit": "MiB/layer", "value": saved},
                    {**again, **none, "name": f"recompute_added_ms_{of}", "unit": "ms/layer", "value": added},
                    {**again, **none, "name": f"recompute_added_ms_{of}_modelled", "unit": "ms/layer",
                     "value": added + comm, **modelled}]
            if added + comm > 0:
                per_ms[way, mode] = saved / (added + comm)
                out.append({**again, **none, "name": f"recompute_mb_per_ms_{of}_modelled", "unit": "MiB/ms",
                            "value": per_ms[way, mode], **modelled})
    if ("btp", "low_rank") in per_ms and ("vanilla", "layer") in per_ms:
        out.append({**by["rank_7b_tp4_btp_b4_low_rank"], "name": "recompute_7b_tp4_btp_over_vanilla_modelled",
                    "unit": "x", "value": per_ms["btp", "low_rank"] / per_ms["vanilla", "layer"], "modelled": MODELLED,
                    "peer": "published: A100, 193.5 / 113.7 MB/ms", "peer_value": 193.5 / 113.7})
    return out


def derived(rows):
    """Lines that follow from others of the same run."""
    by = {r["name"]: r for r in rows}
    step = by.get("step_1b_cola_b8_t2048")
    peak = [{**step, "name": "peak_gib_1b_cola", "value": step["peak_gib"], "unit": "GiB",
             "peer_value": step.get("peer_peak_gib")}] if step else []
    return peak + recompute_lines(by)


# ---- running -----------------------------------------------------------------------


def ours(build, name, case, args):
    """The lines that the program prints; its profile beside it."""
    what = [case.model, *case.fields]
    if args.cpu:
        what = CPU_SHAPES if case.mode == "attention" else ["tiny," + case.model.split(",")[1],
                                                            *(f for f in case.fields if f != NONDET)]
    trial = ["--cpu", "--gib", "0.01" if case.mode == "floor" else "1"] if args.cpu else []
    command = [build / "bench" / case.program, *case.options, "--name", name, "--warm", str(args.warm), "--seconds",
               str(args.seconds * case.share), *trial, case.mode, *what]
    p = subprocess.run(command, capture_output=True, text=True, timeout=OURS_LIMIT, env=environment())
    if p.returncode:
        raise RuntimeError(p.stderr.strip() or f"{case.program} ended with {p.returncode}")
    if case.mode in ("profile", "ops"):
        Path(f"{args.out}.{name}.txt").write_text(p.stderr)
        print(p.stderr, end="", flush=True)
    return [json.loads(line) for line in p.stdout.splitlines()]


def environment():
    env = dict(os.environ)
    places = [p for base in sys.path if base for p in glob.glob(f"{base}/nvidia/*/lib/libcupti.so.13")]
    if places:
        env.setdefault("BOOST_CUPTI", places[0])
    return env


def clocks_before(smi, until):
    """Means of the last seconds before `until`, of a program that does not log them itself."""
    last = smi.between(until - SETTLED, until)
    return {"peer_sm_mhz": statistics.mean(s[1] for s in last),
            "peer_watts": statistics.mean(s[2] for s in last)} if last else {}


def peer(case, folder):
    """Value, peak memory and clocks of the PyTorch program, on its own libraries."""
    script, argument = case.peer
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    smi = Smi("clocks.sm,power.draw", 200, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    until, line, text = time.monotonic(), "", []
    p = subprocess.Popen([sys.executable, "-u", folder / script, argument], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, env=env)
    watchdog = threading.Timer(PEER_LIMIT, p.kill)
    watchdog.start()
    try:
        for got in p.stdout:
            text.append(got)
            if re.search(r"tok/s|ms/layer", got):
                until, line = time.monotonic(), got
    finally:
        watchdog.cancel()
        p.kill()
        p.wait()
        smi.close()
    found = re.search(r"([\d.]+) tok/s", line) or re.search(r"fwd\+bwd ([\d.]+) ms/layer", line)
    peak = re.search(r"peak ([\d.]+) GiB", line)
    if not found:
        raise RuntimeError("".join(text)[-500:] or f"{script} ended with {p.returncode}")
    return {"value": float(found[1]), "peak": float(peak[1]) if peak else None, **clocks_before(smi, until)}


@functools.lru_cache
def has_torch():
    try:
        torch = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        torch = False
    if not torch:
        print("no PyTorch here: nothing of it is measured beside ours", flush=True)
    return torch


def peers_folder(args):
    """Where the peers are, if they can run."""
    folder = os.environ.get("BOOST_PEERS")
    return Path(folder) if folder and not args.no_peer and not args.cpu and has_torch() else None


def beside_attention(rows, args):
    """PyTorch's attention at the same shapes, behind ours in the same run."""
    if args.no_peer or args.cpu or not has_torch():
        return
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    p = subprocess.run([sys.executable, HERE / "peer_attention.py", "--warm", str(args.warm), "--seconds",
                        str(args.seconds * SHORT), *ATTENTION], capture_output=True, text=True, timeout=PEER_LIMIT,
                       env=env)
    if p.returncode:
        print(f"  peer_attention.py: {p.stderr.strip()[-300:]}", flush=True)
    found = {r["shape"]: r for r in map(json.loads, p.stdout.splitlines())}
    for row in rows:
        shape = row["name"].split("attention_")[1]
        for theirs in (found[s] for s in found if shape.startswith(s + "_")):
            if row["key_heads"] == theirs["key_heads"]:
                row.update(peer="PyTorch, SDPA by cuDNN", peer_value=theirs["bwd" if "_bwd" in shape else "fwd"])


def beside_floor(name, rows, folder):
    """A floor built elsewhere, from a program `step_floor` in the folder probes beside the peers' one."""
    program = folder.parent / "probes" / "step_floor" if folder else None
    if name != "floor_1b_cola" or not program or not os.access(program, os.X_OK):
        return
    names = {"products, first candidates": "_gemm", "attention dp": "_attention", "attention acc": "_attention_nondet",
             "products + attention dp": "_gemm_attention", "products + attention acc": "_gemm_attention_nondet",
             "products + attention dp + copies": "", "products + attention acc + copies": "_nondet"}
    text = subprocess.run([program], capture_output=True, text=True, timeout=PEER_LIMIT).stdout
    found = re.findall(r"^1B CoLA +(.*?) +[\d.]+ ms/step +([\d.]+) us/token", text, re.M)
    theirs = {name + names[what]: float(us) for what, us in found if what in names}
    for row in rows:
        if row["name"] in theirs:
            row.update(peer="step_floor", peer_value=theirs[row["name"]])


def beside_hfu(name, rows):
    """Published figures, of another card: beside ours, not measured."""
    size, b = re.fullmatch(r"hfu_(\w+)_tp4_b(\d+)", name).groups()
    for row in rows:
        way, pair = row["name"].removeprefix(name + "_").split("_")
        figures = PUBLISHED_HFU.get((size, int(b), way))
        if figures:
            row.update(peer="published: A100, % of 312 TFLOP/s", peer_value=figures[pair == "mlp"])


def measure(build, name, case, folder, known, args):
    """Ours and the peer's in turn, `rounds` times; medians. A peer that several cases share runs for the first of them."""
    mine, theirs = {}, []
    for _ in range(args.rounds):
        for row in ours(build, name, case, args):
            mine.setdefault(row["name"], []).append(row)
        if folder and case.peer and case.peer not in known:
            theirs.append(peer(case, folder))
    if theirs:
        known[case.peer] = sorted(theirs, key=lambda r: r["value"])[len(theirs) // 2]
    beside = known.get(case.peer) if case.peer else None
    out = []
    for rows in mine.values():
        row = sorted(rows, key=lambda r: r["value"])[len(rows) // 2]
        extra = {"rounds": args.rounds, "values": [r["value"] for r in rows]}
        if beside:
            extra.update({k: v for k, v in beside.items() if k.startswith("peer_")}, peer_peak_gib=beside["peak"],
                         peer=f"PyTorch, {' '.join(case.peer)}", peer_value=beside["value"])
        out.append({"peer": None, "peer_value": None, **row, **extra})
    if case.mode == "attention":
        beside_attention(out, args)
    if case.mode == "floor":
        beside_floor(name, out, folder)
    if case.mode == "hfu" and not args.cpu:
        beside_hfu(name, out)
    return out


def finish(row, about):
    row["ratio"] = row["value"] / row["peer_value"] if row.get("peer_value") else None
    first = ("name", "value", "unit", "peer", "peer_value", "ratio")
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    whole = {**{k: row.get(k) for k in first}, "date": date, **about, **{k: v for k, v in row.items() if k not in first}}
    clock = f"  {whole['sm_mhz']:.0f} MHz {whole['watts']:.0f} W" if whole.get("sm_mhz") and whole.get("watts") else ""
    ratio = f"  peer {whole['peer_value']:.5g}  ratio {whole['ratio']:.3f}" if whole["ratio"] else ""
    print(f"  {whole['name']:44} {whole['value']:>11.5g} {whole['unit']}{ratio}{clock}", flush=True)
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in whole.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default="build")
    p.add_argument("--out", help="default: gpu-bench.jsonl in the build folder")
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--warm", type=float, default=2)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--no-peer", action="store_true")
    p.add_argument("--cpu", action="store_true", help="tries the programs out on a tiny model, without a GPU")
    p.add_argument("--list", action="store_true")
    p.add_argument("--table", action="store_true", help="measures nothing; standard output")
    p.add_argument("names", nargs="*")
    args = p.parse_args()
    if args.table:
        files = [Path(f) for f in args.names] or sorted((HERE / "results").glob("*.jsonl"))
        print(gpu_tables.render(files, paper_tables.PARTS, paper_tables.SHOWN), end="")
        return 0
    build = Path(args.build).resolve()
    args.out = Path(args.out).resolve() if args.out else build / "gpu-bench.jsonl"
    chosen = {n: c for n, c in CASES.items() if not args.names or n in args.names or
              any(n.startswith(a) for a in args.names if a not in CASES)}
    if args.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        p.error("no benchmark has such a name (--list)")
    about, folder, known, rows, failed = machine("cublaslt", "cudnn"), peers_folder(args), {}, [], []
    kept = [json.loads(x) for x in args.out.read_text().splitlines()] if args.out.exists() else []
    for name, case in chosen.items():
        try:
            rows += [finish(r, about) for r in measure(build, name, case, folder, known, args)]
        except Exception as e:
            failed.append(name)
            print(f"  {name}: FAILED: {e}", flush=True)
        more = [finish(r, about) for r in derived(rows)] if name == list(chosen)[-1] else []
        done = {r["name"] for r in rows + more}
        lines = [r for r in kept if r["name"] not in done] + rows + more
        args.out.write_text("".join(json.dumps(r) + "\n" for r in lines))
    print(f"{len(rows)} measured, lines in {args.out}" + (f"; {len(failed)} benchmarks failed" if failed else ""))
    return 1 if failed else 0


sys.exit(main())
