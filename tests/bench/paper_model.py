"""What the rows of the paper's table are: shapes, ways to train them, the collectives of a layer, and an estimate of a
step that owes nothing to a run. Pure; for paper_table.py and its test."""
from collections import namedtuple

# BOOST, arXiv 2512.12131: LLaMA-2's family, rank hidden/4. tiny: for a trial on the CPU.
Size = namedtuple("Size", "hidden layers heads intermediate rank vocab seq_len")
SIZES = {
    "1b": Size(2048, 24, 32, 5472, 512, 32000, 4096),
    "3b": Size(3072, 28, 24, 8192, 768, 32000, 4096),
    "7b": Size(4096, 32, 32, 11008, 1024, 32000, 4096),
    "13b": Size(5120, 40, 40, 13824, 1280, 32000, 4096),
    "30b": Size(8192, 36, 64, 22016, 2048, 32000, 4096),
    "tiny": Size(32, 2, 4, 64, 8, 256, 32),
}

# factorization, strategy, other fields of `parallel`. btp is the full system, beside it with one thing left out.
Way = namedtuple("Way", "factorization strategy fields")
PUBLISHED = {"vanilla_attention": "PUBLISHED"}
WAYS = {
    "full": Way("FULL_RANK", "FULL", {}),
    "vanilla_published": Way("COLA", "VANILLA", PUBLISHED),
    "vanilla": Way("COLA", "VANILLA", {"vanilla_attention": "SLICED"}),
    "btp": Way("COLA", "BTP", {"overlap": "ON"}),
    "btp_no_overlap": Way("COLA", "BTP", {"overlap": "OFF"}),
    "btp_ungrouped": Way("COLA", "BTP", {"overlap": "ON", "grouped": "OFF"}),
    "btp_sync": Way("COLA", "BTP", {"overlap": "ON", "norm": "SYNC"}),
    "btp_low_rank": Way("COLA", "BTP", {"overlap": "ON", "recompute": "LOW_RANK"}),
    "btp_layer": Way("COLA", "BTP", {"overlap": "ON", "recompute": "LAYER"}),
    "vanilla_published_low_rank": Way("COLA", "VANILLA", {**PUBLISHED, "recompute": "LOW_RANK"}),
    "vanilla_published_layer": Way("COLA", "VANILLA", {**PUBLISHED, "recompute": "LAYER"}),
    "full_layer": Way("FULL_RANK", "FULL", {"recompute": "LAYER"}),
    "svd": Way("SVD", "BTP", {}),
    "lax": Way("LAX", "BTP", {}),
    "svd_vanilla_published": Way("SVD", "VANILLA", PUBLISHED),
    "lax_vanilla_published": Way("LAX", "VANILLA", PUBLISHED),
}


class Cell(namedtuple("Cell", "size tp way batch layers nondet", defaults=(0, False))):
    """One job of the table. layers: 0, or another number than the size has, which the name then tells."""

    @property
    def depth(self):
        return self.layers or SIZES[self.size].layers

    def named(self, what="iter"):
        less = f"_l{self.layers}" if self.layers else ""
        return f"{what}_{self.size}_tp{self.tp}_{self.way}_b{self.batch}{less}{'_nondet' * self.nondet}"


def fields_of(cell):
    """What differs from cell to cell, as boostctl's --set and rank_bench take it."""
    s, w = SIZES[cell.size], WAYS[cell.way]
    model = {"hidden": s.hidden, "layers": cell.depth, "heads": s.heads, "intermediate": s.intermediate,
             "vocab": s.vocab, "tie_embeddings": "true"}
    if w.factorization != "FULL_RANK":
        model["rank"] = s.rank
    parallel = {"strategy": w.strategy, "tp": cell.tp, "micro_batch": cell.batch, "global_batch": cell.batch,
                "recompute": "NONE", **w.fields, **({"deterministic": "false"} if cell.nondet else {})}
    return {**{f"model.{k}": v for k, v in model.items()}, **{f"parallel.{k}": v for k, v in parallel.items()},
            "data.seq_len": s.seq_len}


def job_text(cell, data, folder, device):
    """A job without an end and without checkpoints: it is cancelled once its steps were seen."""
    groups = {"model": [f"factorization: {WAYS[cell.way].factorization}"]}
    for key, value in fields_of(cell).items():
        group, name = key.split(".")
        groups.setdefault(group, []).append(f"{name}: {value}")
    groups["data"].append(f'train {{ path: "{data}" }}')
    body = "\n".join(f"{group} {{ {' '.join(values)} }}" for group, values in groups.items())
    return f"""spec_version: 1
name: "{cell.named()}"
{body}
optimizer {{ lr: 1e-4 schedule: CONSTANT }}
run {{ steps: 1000000 precision: BF16 }}
checkpoint {{ dir: "{folder}/ckpt" }}
restart {{ max_restarts: 0 }}
resources {{ device: {device} }}
"""


# ---- collectives of a layer -------------------------------------------------------------

# bytes: of the main segment, bf16; second: of the statistic that goes along, fp32.
Call = namedtuple("Call", "kind bytes second")
REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"


def halves(calls):
    return [Call(c.kind, c.bytes // 2, c.second // 2) for c in calls for _ in range(2)]


def btp_calls(s, T, fields):
    grouped, sync = fields.get("grouped") != "OFF", fields.get("norm") == "SYNC"
    statistic = 0 if sync else 4 * T
    latent = lambda n, second=0: ([Call(REDUCE, 2 * T * s.rank * n, second)] if grouped else
                                  [Call(REDUCE, 2 * T * s.rank, second * (i == n - 1)) for i in range(n)])
    forward = latent(3, statistic) + latent(1) + latent(2, statistic) + latent(1)
    backward = latent(3) + latent(1) + latent(2) + latent(1)
    if fields.get("overlap") == "ON":
        forward, backward = halves(forward), halves(backward)
    norms = [Call(REDUCE, 4 * T, 0)] * 2 if sync else []
    return forward + norms, backward + norms


def vanilla_calls(s, T, fields):
    d, f = 2 * T * s.hidden, 2 * T * s.intermediate
    if fields.get("vanilla_attention") == "PUBLISHED":
        return [Call(REDUCE, x, 0) for x in (d, d, d, d, f, f, d)], [Call(REDUCE, x, 0) for x in (d, d, d, f)]
    return ([Call(SCATTER, d, 0)] * 3 + [Call(GATHER, d, 0)] + [Call(REDUCE, x, 0) for x in (d, f, f, d)],
            [Call(GATHER, d, 0)] * 3 + [Call(SCATTER, d, 0)] + [Call(REDUCE, x, 0) for x in (d, d, f)])


def layer_calls(cell):
    """(forward, backward) of one layer and micro-batch, without what recompute repeats; None for LAX under VANILLA,
    whose layers differ. The formulas are derived in worker/plan/README.md; the plan's counts are what they must add
    up to."""
    s, w = SIZES[cell.size], WAYS[cell.way]
    T = cell.batch * s.seq_len
    if cell.tp == 1:
        return [], []
    if w.strategy == "BTP":
        return btp_calls(s, T, w.fields)
    if w.strategy == "FULL":
        calls = [Call(REDUCE, 2 * T * s.hidden, 0)] * 2
        return calls, list(calls)
    return None if w.factorization == "LAX" else vanilla_calls(s, T, w.fields)


def wire(kind, tp):
    """Of a payload, what a ring sends from each rank."""
    return (2 if kind == REDUCE else 1) * (tp - 1) / tp


# ---- the estimate -----------------------------------------------------------------------

# NCCL between two H200s (NVLink, no NVLS, memory that ranks share): a straight line through what was measured at 16 and
# 256 MiB, latency and bytes a second of the wire; for more GPUs the same line on a ring's share of the payload.
ALPHA_US = {REDUCE: 11, SCATTER: 7, GATHER: 8}
BETA_GB_S = {REDUCE: 343, SCATTER: 288, GATHER: 343}
# One H200, sustained under its power limit, TFLOP/s: large products; causal attention both ways by width of a head.
PRODUCTS, ATTENTION = 650, {64: 300, 128: 420}
# Bytes of an update for each parameter of a rank: gradient twice (norm, update), master and moments in and out, weight.
UPDATE_BYTES, MEMORY_GB_S = 34, 4000


def call_us(kind, size, tp):
    return ALPHA_US[kind] + size * wire(kind, tp) / BETA_GB_S[kind] / 1e3


def estimate(plan, cell):
    """Milliseconds of a step by an alpha-beta model: products, attention, update and every collective one after the
    other, at the rates above; no element-wise work, no launches, nothing hidden, nothing recomputed. From the counts of
    `boostctl plan`."""
    s, way, micro = SIZES[cell.size], WAYS[cell.way], plan["micro_batches"]
    flop = sum(g["flop"] * g["calls"] * (cell.depth if g["place"] == "layer" else 1) for g in plan["gemms"]) * micro
    whole = way.fields.get("vanilla_attention") == "PUBLISHED"  # every rank works on all heads
    width = s.hidden / (1 if whole else cell.tp)
    # forward 2 products of (s + 1) / 2 keys a query, backward 2.5 times that
    attention = 3.5 * cell.depth * 2 * plan["tokens_per_step"] * (s.seq_len + 1) * width
    rate = ATTENTION[64 if s.hidden // s.heads <= 64 else 128]
    own = plan["parameters"]["stages"][0]["elements_a_rank"]
    comm = sum(x["calls"] * ALPHA_US[x["kind"]] + x["bytes"] * wire(x["kind"], cell.tp) / BETA_GB_S[x["kind"]] / 1e3
               for x in plan["collectives"] if x["group"] == "tp" and x["pass"] != "eval")
    parts = {"est_products_ms": flop / PRODUCTS / 1e9, "est_attention_ms": attention / rate / 1e9,
             "est_update_ms": own * UPDATE_BYTES / MEMORY_GB_S / 1e6, "est_comm_ms": comm / 1e3}
    return {"est_ms": sum(parts.values()), **parts}


def volume(plan, shallower):
    """MiB a rank hands to collectives for one layer: (forward, backward, repeated, calls), by two plans that differ in
    one layer."""
    def of(p, which):
        rows = [x for x in p["collectives"] if x["group"] == "tp" and x["pass"] in which]
        return sum(x["bytes"] for x in rows) / p["micro_batches"], sum(x["calls"] for x in rows) / p["micro_batches"]
    passes = (("forward",), ("backward",), ("recompute",), ("forward", "backward", "recompute"))
    less = [[a - b for a, b in zip(of(plan, w), of(shallower, w))] for w in passes]
    return {"comm_mib_layer_fwd": less[0][0] / 2**20, "comm_mib_layer_bwd": less[1][0] / 2**20,
            "comm_mib_layer_repeated": less[2][0] / 2**20, "comm_calls_layer": less[3][1]}
