"""Markdown tables of the lines that gpu_bench.py writes: gpu_bench.py --table [FILE...]."""
import json, re


class Row(dict):
    """Older lines lack some of the keys."""

    def __missing__(self, key):
        return None


def read(files):
    """The latest line of each name."""
    rows = {}
    for file in files:
        for line in file.read_text().splitlines():
            row = Row(json.loads(line))
            if row["name"] not in rows or rows[row["name"]]["date"] <= row["date"]:
                rows[row["name"]] = row
    return rows


def number(x, digits=4):
    if x is None:
        return ""
    if isinstance(x, str):
        return x
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"


def table(title, note, columns, lines):
    if not lines:
        return []
    out = [f"## {title}", ""] + ([note, ""] if note else [])
    out += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return out + ["| " + " | ".join(number(x) for x in line) + " |" for line in lines] + [""]


def clock(r):
    return f"{r['sm_mhz']:.0f}, {r['watts']:.0f}" if r.get("sm_mhz") and r.get("watts") else ""


def ratio(a, b):
    return a["value"] / b["value"] if a and b else None


def starting(rows, prefix):
    return [r for n, r in sorted(rows.items()) if n.startswith(prefix)]


NULL = "One rank with NULL collectives: the other ranks are not there, and what travels takes no time."


def steps(rows):
    return table("Whole steps", "Clip and AdamW with fp32 master weights included.",
                 ["", "tokens/s", "peer", "ratio", "us/token", "peak GiB", "peer's", "SM MHz, W"],
                 [(r["name"], r["value"], r["peer_value"], r["ratio"], r["us_per_token"], r["peak_gib"],
                   r.get("peer_peak_gib"), clock(r)) for r in starting(rows, "step_")])


def profiles(rows):
    kinds = ("gemm", "attention", "head", "element", "optimizer", "copy")
    return table("Where a step's time goes, %", "Of head the loss alone, its products are under gemm. Lines of a rank "
                 "(tp4) have NULL collectives.", ["", "idle", *kinds, "ms/step", "launches"],
                 [(r["name"].removeprefix("idle_pct_"), r["value"], *(r.get(f"{k}_pct") for k in kinds), r["step_ms"],
                   r["launches"]) for r in starting(rows, "idle_pct_")])


def floors(rows):
    return table("Floor of a step", "One captured sequence of the step's products, attention and copies, nothing else; "
                 "the peer is a floor built elsewhere.", ["", "us/token", "peer", "tokens/s", "copied GB", "SM MHz, W"],
                 [(r["name"], r["value"], r["peer_value"], r["tokens_s"], r["copied_gb"], clock(r))
                  for r in starting(rows, "floor_")])


def ranks(rows):
    lines = [(r["name"].removeprefix("rank_"), r["value"], r["peer_value"], r["ratio"], r["arena_mib_layer"], clock(r))
             for r in starting(rows, "rank_")]
    out = table("Layers of one rank: forward and backward", NULL,
                ["", "ms/layer", "peer", "ratio", "MiB/layer", "SM MHz, W"], lines)
    pairs, cases = [], (re.fullmatch(r"rank_(\w+_tp\d+)_full_b\d+", n) for n in rows)
    for case in sorted({m[1] for m in cases if m}):
        for b in (4, 1):
            full, vanilla, btp = (rows.get(f"rank_{case}_{way}_b{b}") for way in ("full", "vanilla", "btp"))
            if full and btp:
                pairs.append((f"{case} B{b}", full["value"], vanilla and vanilla["value"], btp["value"],
                              ratio(full, btp), ratio(vanilla, btp)))
    return out + table("Full rank and vanilla against BTP", NULL,
                       ["", "full ms", "vanilla ms", "BTP ms", "full / BTP", "vanilla / BTP"], pairs)


def fits(rows):
    modes = ("none", "low_rank", "layer")
    found = (re.fullmatch(r"fit_(\w+?)_(none|low_rank|layer)", n) for n in rows)
    models = list(dict.fromkeys(m[1] for m in found if m))
    lines = [(m, *(rows.get(f"fit_{m}_{mode}", {}).get("value") for mode in modes),
              next((rows[f"fit_{m}_{mode}"]["room_gib"] for mode in modes if f"fit_{m}_{mode}" in rows), None),
              rows.get(f"fit_{m}_none", {}).get("seq_len")) for m in models]
    return table("Largest micro-batch, sequences", "By recompute mode; lines of a rank (tp4) have NULL collectives.",
                 ["", "NONE", "LOW_RANK", "LAYER", "room GiB", "tokens a sequence"], lines)


def recompute(rows):
    return table("Recompute", "What is marked modelled adds the repeated collectives, which are NULL in the "
                 "measurement, from a model of NVLink.", ["", "value", "unit", "measured ms", "modelled ms", "peer"],
                 [(r["name"].removeprefix("recompute_"), r["value"], r["unit"], r.get("measured_ms"),
                   r.get("modelled_ms"), r["peer_value"]) for r in starting(rows, "recompute_")])


def kernels(rows):
    out = []
    for model in sorted({"_".join(n.split("_")[1:3]) for n in rows if n.startswith("kernel_")}):
        of = sorted(starting(rows, f"kernel_{model}_"), key=lambda r: -r["ms_step"])
        out += table(f"Operations of {model.replace('_', ' ')} that are no products",
                     f"GB/s of the fewest bytes possible, beside a device copy's {number(of[0]['peer_value'])}; the "
                     "last column is what a copy of these bytes would take. Of each time, about "
                     f"{number(of[0]['event_us'], 2)} us are the events'.",
                     ["", "GB/s", "of copy", "calls", "us each", "GB/step", "ms/step", "as copy"],
                     [(r["name"].removeprefix(f"kernel_{model}_"), r["value"], r["ratio"], r["calls"], r["us_each"],
                       r["gb_step"], r["ms_step"], r["ms_step_as_copy"]) for r in of])
    return out


def algorithm(x):
    return f"split {x['split_k']}, {x['reduction'].lower()}" if x else ""


def best(r):
    """The fastest candidate."""
    return max((c for c in r["candidates"] if c["tflops"]), key=lambda c: c["tflops"], default=None)


def gemms(rows):
    return table("Matrix products, TFLOP/s", "The engine's choice beside the candidates of cuBLASLt's heuristic. "
                 "Shapes of a rank (tp4) come from steps with NULL collectives.",
                 ["", "m n k", "us", "engine", "best", "ratio", "best reproducible", "best not split", "the engine's",
                  "the best"],
                 [(r["name"].removeprefix("gemm_"), f"{r['m']:.0f} {r['n']:.0f} {r['k']:.0f} x{r['batch']:.0f}",
                   r["ms"] * 1e3, r["value"], r["peer_value"], r["ratio"], r["best_reproducible"], r["best_not_split"],
                   algorithm(r["chosen"]), algorithm(best(r))) for r in starting(rows, "gemm_")])


def attentions(rows):
    return table("Causal attention, TFLOP/s", "Of the scores below the diagonal.",
                 ["", "kernel", "ms", "TFLOP/s", "peer", "ratio", "SM MHz, W"],
                 [(r["name"].removeprefix("attention_"), r["kernel"], r["ms"], r["value"], r["peer_value"], r["ratio"],
                   clock(r)) for r in starting(rows, "attention_")])


def hfus(rows):
    return table("Products of one projection on a rank of TP4", "Forward, per cent of 989.4 TFLOP/s; published are the "
                 "BTP paper's figures, per cent of an A100's 312. NULL collectives: none is in it on either side.",
                 ["", "ms", "%", "published %", "SM MHz, W"],
                 [(r["name"].removeprefix("hfu_"), r["ms"], r["value"], r["peer_value"], clock(r))
                  for r in starting(rows, "hfu_")])


def render(files, more_parts=(), more_shown=()):
    """more: tables of other lines, and what the names of these start with."""
    rows = read(files)
    if not rows:
        return "No lines.\n"
    about = sorted({(r["date"][:10], r["commit"], r["device"], r.get("driver"), r.get("cublaslt"), r.get("cudnn"))
                    for r in rows.values()})
    out = ["# Measured on a GPU", "", "Tables of the `.jsonl` files here, made by `tests/bench/gpu_bench.py --table`; "
           "the latest line of each name. Figures are sustained; a ratio is ours over the peer's of the same run.", ""]
    out += [f"- {date}, commit {commit}: {device}, driver {driver}, cuBLASLt {lt}, cuDNN {dnn}"
            for date, commit, device, driver, lt, dnn in about] + [""]
    for part in (steps, profiles, floors, ranks, fits, recompute, kernels, gemms, attentions, hfus, *more_parts):
        out += part(rows)
    shown = ("step_", "idle_pct_", "floor_", "rank_", "fit_", "recompute_", "kernel_", "gemm_", "attention_", "hfu_")
    out += table("Others", None, ["", "value", "unit", "peer", "ratio"],
                 [(n, r["value"], r["unit"], r["peer_value"], r["ratio"]) for n, r in sorted(rows.items())
                  if not n.startswith((*shown, *more_shown))])
    return "\n".join(out)
