"""Markdown of the lines that paper_table.py writes, and the checks of what the paper promises; gpu_bench.py --table
shows them too."""
import json, re

from gpu_tables import number, table


# ---- checks ------------------------------------------------------------------------------


class Found:
    """Lines by name."""

    def __init__(self, rows):
        self.rows = rows

    def row(self, name, layers=""):
        row = self.rows.get(name + layers)
        return row if row and row["value"] is not None else None

    def value(self, name, layers=""):
        r = self.row(name, layers)
        return r["value"] if r else None

    def depths(self, name):
        """Endings of lines of this name: of fewer layers _lN, of deterministic: false _nondet; the whole model's
        first."""
        ending = re.compile(re.escape(name) + r"((?:_l\d+)?(?:_nondet)?)")
        return sorted({m[1] for m in map(ending.fullmatch, self.rows) if m}, key=lambda x: (x.startswith("_l"), x))

    def over(self, a, b):
        """value(a) / value(b) and the ending, of one depth and of one commit."""
        return self.over_key(a, b, "value")

    def over_key(self, a, b, key):
        for layers in self.depths(a):
            x, y = self.row(a, layers), self.row(b, layers)
            if x and y and x.get(key) and y.get(key) and x.get("commit") == y.get("commit"):
                return x[key] / y[key], layers
        return None, ""


# what, size, tp, micro-batch, numerator, at least (None: reported)
RATIOS = (
    ("full rank / BTP", "3b", 2, 4, "full", 1.6),
    ("vanilla published / BTP", "3b", 2, 4, "vanilla_published", 1.8),
    ("vanilla sliced / BTP", "3b", 2, 4, "vanilla", None), ("full rank / BTP", "3b", 2, 1, "full", 1.3),
    ("vanilla published / BTP", "3b", 2, 1, "vanilla_published", None),
    *(("full rank / BTP", s, 2, b, "full", None) for s in ("1b", "7b") for b in (4, 1)),
    *(("vanilla published / BTP", s, 2, b, "vanilla_published", None) for s in ("1b", "7b") for b in (4, 1)),
    ("full rank / BTP", "7b", 4, 4, "full", 1.75),
    ("vanilla published / BTP", "7b", 4, 4, "vanilla_published", 2.5),
    ("vanilla sliced / BTP", "7b", 4, 4, "vanilla", None), ("full rank / BTP", "7b", 4, 1, "full", 1.4),
    *(("full rank / BTP", "13b", t, 4, "full", 1.59) for t in (4, 8)),
    *(("full rank / BTP", "30b", t, 4, "full", 1.91) for t in (4, 8)),
)
# BTP as a job has it that says nothing of overlap, which is judged, and with overlap beside it.
OVERLAPS = (("btp_no_overlap", "", True), ("btp", ", overlap on", None))


def ratio_checks(f):
    out = []
    for what, size, tp, b, over, need in RATIOS:
        cell = f"{size}_tp{tp}"
        for way, overlap, bound in OVERLAPS:
            value, layers = f.over(f"iter_{cell}_{over}_b{b}", f"iter_{cell}_{way}_b{b}")
            alone = bound and f.over_key(f"alone_{cell}_{over}_b{b}", f"alone_{cell}_{way}_b{b}", "est_ms")[0]
            if value is not None or alone or (bound and need is not None):
                out.append((f"{what}, {size} tp {tp} B{b}{overlap}{depth(layers)}", value, "at least", bound and need,
                            alone))
    return out


def depth(layers):
    m = re.match(r"(?:_l(\d+))?(_nondet)?", layers)
    return (f", {m[1]} layers" if m[1] else "") + (", not deterministic" if m[2] else "")


def comm_checks(f):
    out = []
    for size, tp in (("7b", 4), ("3b", 2)):
        cell, need = f"{size}_tp{tp}", size == "7b"
        for over, bound in (("vanilla_published", 5 if need else None), ("full", 1 if need else None)):
            for key, what in (("comm_ms_layer_fwd", "forward, as the paper's"), ("comm_ms_layer", "both ways")):
                value, layers = f.over_key(f"iter_{cell}_{over}_b4", f"iter_{cell}_btp_no_overlap_b4", key)
                alone = f.over_key(f"alone_{cell}_{over}_b4", f"alone_{cell}_btp_no_overlap_b4", "est_" + key)[0]
                if value is not None or alone or (need and key.endswith("fwd")):
                    out.append((f"communication a layer {what}, {over} / BTP, {size} tp {tp} B4{depth(layers)}", value,
                                "at least", bound if key.endswith("fwd") else None, alone))
        name = f"exposed_comm_pct_{cell}_b4"
        layers = next(iter(f.depths(name)), "")
        value = f.value(name, layers)
        if value is not None or need:
            out.append((f"communication exposed, %, overlap on, {size} tp {tp} B4{depth(layers)}", value, "at most",
                        15 if need else None, None))
    return out


def other_checks(f):
    out = []
    for way, overlap, bound in OVERLAPS:
        row = next((f.row(f"layer_3b_tp2_{way}_b4", x) for x in f.depths(f"layer_3b_tp2_{way}_b4")), None) or {}
        about = ", its update included" * (row.get("update") == "included") + overlap
        ours = row.get("value")
        if not bound and not ours:
            continue
        out.append((f"a layer of 3B tp 2 B4 over PyTorch's 9.1 ms of an earlier run{about}", ours and ours / 9.1,
                    "at most", bound and 0.75, None))
        if row.get("ratio"):
            out.append((f"the same over PyTorch's of its own run{about}", row["ratio"], "at most", bound and 0.75,
                        None))
    for name in sorted(f.rows):
        m = re.fullmatch(r"saved_per_ms_(\w+_tp\d+)_btp_low_rank_(b\d+\w*)", name)
        if m:
            for mode in ("layer", "low_rank"):
                value = f.over(name, f"saved_per_ms_{m[1]}_vanilla_published_{mode}_{m[2]}")[0]
                if value is not None or mode == "layer":
                    out.append((f"MiB saved per ms, BTP LOW_RANK / vanilla {mode.upper()}, {m[1]} {m[2]}", value,
                                "at least", 1.7, None))
    for name, row in sorted(f.rows.items()):
        if name.startswith("overlay_max_pct"):
            out.append((f"losses of tp {name[18:]} off {row.get('beside')}'s, % at most in {row.get('steps')} steps",
                        row["value"], "at most", 2, None))
    return out


def checks(rows):
    """(what, value or None, "at least" or "at most", bound or None, estimate by ranks alone or None)"""
    f = Found(rows)
    return ratio_checks(f) + comm_checks(f) + other_checks(f)


def verdict(value, sense, need):
    if value is None:
        return "not measured"
    if need is None:
        return "reported"
    return "met" if (value >= need if sense == "at least" else value <= need) else "MISSED"


def check_lines(rows):
    return [f"{verdict(v, sense, need):>12}  {what}: {'-' if v is None else f'{v:.3g}'}"
            f"{'' if need is None else f' ({sense} {need:g})'}{f', estimate {e:.3g}' if e else ''}"
            for what, v, sense, need, e in checks(rows)]


# ---- tables ------------------------------------------------------------------------------


def cells(rows):
    order = lambda r: (r["size"], r["tp"], -r["micro_batch"], r["name"])
    return sorted((r for n, r in rows.items() if n.startswith("iter_") and "est_ms" in r), key=order)


def iterations(rows):
    lines = [(r["name"].removeprefix("iter_"), r["value"], r["est_ms"], r.get("tokens_s"),
              r.get("mfu") and 100 * r["mfu"], r.get("peak_gib"), f"{r['layers']}/{r['layers_whole']}",
              r.get("sm_mhz") and f"{r['sm_mhz']:.0f}, {r.get('watts') or 0:.0f}", r.get("note")) for r in cells(rows)]
    return table("The paper's table: iterations", "Jobs through boostd, 4096 tokens a sequence, one micro-batch an "
                 "iteration, clip and AdamW with fp32 masters included; medians, sustained. estimate: alpha-beta model "
                 "of products, attention, update and collectives one after the other (tests/bench/paper_model.py).",
                 ["", "ms", "estimate", "tokens/s", "MFU %", "peak GiB", "layers", "SM MHz, W", ""], lines)


def communication(rows):
    lines = [(r["name"].removeprefix("iter_"), r.get("comm_calls_layer"), r.get("comm_mib_layer_fwd"),
              r.get("comm_mib_layer_bwd"), r.get("comm_ms_layer_fwd"), r.get("comm_ms_layer"), r.get("comm_ms"),
              r.get("est_comm_ms"), r.get("exposed_ms"), r.get("null_ms"))
             for r in cells(rows) if r["tp"] > 1 and r.get("comm_calls_layer")]
    return table("The paper's table: communication", "MiB that a rank hands to the collectives of a layer, by the "
                 "plan. ms: each call timed by itself at its size, and added up. exposed: the iteration less that of "
                 "rank 0 with NULL collectives.",
                 ["", "calls a layer", "MiB forward", "backward", "ms a layer forward", "both", "ms a step", "estimate",
                  "exposed ms", "with NULL ones"], lines)


def ratios(rows):
    pick = lambda r, way: rows.get(r["name"].replace("_btp_b", f"_{way}_b"))
    lines = []
    for r in cells(rows):
        if r["way"] == "btp" and r["value"]:
            beside = [pick(r, w) for w in ("full", "vanilla_published", "vanilla", "btp_no_overlap")]
            lines.append((r["name"].removeprefix("iter_").replace("_btp_", "_"),
                          *(x["value"] / r["value"] if x and x["value"] else None for x in beside)))
    return table("The paper's table: ratios to BTP", None,
                 ["", "full rank", "vanilla published", "vanilla sliced", "BTP, overlap off"], lines)


def layers(rows):
    lines = [(n.removeprefix("layer_"), r["value"], r["update"], r.get("est_ms"), r["peer_value"], r["ratio"])
             for n, r in sorted(rows.items()) if n.startswith("layer_")]
    return table("The paper's table: a layer", "Forward and backward by difference of two depths; the peer's has no "
                 "update.", ["", "ms", "its update", "estimate", "peer", "ratio"], lines)


def alone(rows):
    """Estimates of iterations, beside those that were measured at the same commit."""
    def beside(r):
        ran = rows.get(r["name"].replace("alone_", "iter_", 1), {})
        return ran.get("value") if ran.get("commit") == r.get("commit") else None
    order = lambda r: (r["size"], r["tp"], -r["micro_batch"], r["name"])
    found = sorted((r for n, r in rows.items() if n.startswith("alone_")), key=order)
    lines = [(r["name"].removeprefix("alone_"), r["value"], r.get("est_comm_ms"), r.get("est_ms"), beside(r),
              beside(r) and r["value"] and r["est_ms"] / beside(r), r.get("peak_gib"),
              r.get("sm_mhz") and f"{r['sm_mhz']:.0f}, {r.get('watts') or 0:.0f}", r.get("note")) for r in found]
    return table("The paper's table: a rank alone", "One rank with NULL collectives, measured on one GPU; "
                 "communication by the model, a call after the other, nothing hidden. Where a job ran at the same "
                 "commit, its iteration beside it.",
                 ["", "ms", "communication, model", "together", "iteration", "together / iteration", "peak GiB",
                  "SM MHz, W", ""], lines)


def bandwidth(rows):
    lines = []
    for n, r in rows.items():
        m = re.fullmatch(r"busbw_(\w+)_(\d+)k_tp(\d+)", n)
        if m:
            theirs = rows.get("peer_" + n)
            lines.append((m[1], int(m[3]), int(m[2]), r["value"], r["us"], r["est_us"], theirs and theirs["value"]))
    return table("NCCL bus bandwidth", "Captured calls through the engine's interface.",
                 ["", "GPUs", "KiB", "GB/s", "us", "estimate", "peer GB/s"], sorted(lines))


def rest(rows):
    start = ("exposed_", "saved_per_ms_", "strong_", "weak_", "recover_", "overlay_")
    keys = ("est_value", "est_alone_value", "base", "attempt_2_s", "steps_again", "equal_to_the_bit", "saved_mib",
            "added_ms", "mean_pct", "first", "last", "last_beside", "exposed_pct_of_iteration", "same_clock_pct", "note")
    def detail(r):
        return "; ".join(f"{k} {number(r[k]) if not isinstance(r[k], bool) else str(r[k]).lower()}"
                         for k in keys if r.get(k) is not None)
    lines = [(n, r["value"], r["unit"], detail(r)) for n, r in sorted(rows.items())
             if n.startswith(start) and "_modelled" not in n]
    return table("The paper's table: scaling, recompute, overlap, faults, curves", None, ["", "value", "unit", ""],
                 lines)


def verdicts(rows):
    if not any(n.startswith(("iter_", "alone_")) for n in rows):
        return []
    lines = [(what, v, f"{sense} {need:g}" if need is not None else "", verdict(v, sense, need), e)
             for what, v, sense, need, e in checks(rows)]
    return table("The paper's table: checks", "estimate: by a rank alone, measured with NULL collectives, and the "
                 "model's communication behind it.", ["", "value", "wanted", "", "estimate"], lines)


PARTS = (verdicts, iterations, ratios, communication, layers, alone, bandwidth, rest)
SHOWN = ("iter_", "alone_", "exposed_comm_pct_", "saved_per_ms_", "strong_scaling_", "weak_scaling_", "recover_s_kill_",
         "overlay_max_pct_", "layer_", "peer_layer_", "busbw_", "peer_busbw_")


def render(files):
    rows = {}
    for file in files:
        for row in map(json.loads, file.read_text().splitlines()):
            if row["name"] not in rows or rows[row["name"]]["date"] <= row["date"]:
                rows[row["name"]] = row
    if not rows:
        return "No lines.\n"
    about = sorted({tuple(str(r.get(k)) for k in ("commit", "device", "driver", "nccl", "cublaslt", "cudnn"))
                    + (r["date"][:10],) for r in rows.values()})
    out = [f"- {date}, commit {commit}: {device}, driver {driver}, NCCL {nccl}, cuBLASLt {lt}, cuDNN {dnn}"
           for commit, device, driver, nccl, lt, dnn, date in about] + [""]
    return "\n".join(out + [line for part in PARTS for line in part(rows)])
