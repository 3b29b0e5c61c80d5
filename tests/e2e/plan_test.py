#!/usr/bin/env python3
"""boostctl plan: the numbers of LLaMA-7B against formulas written out here, tables, and what it refuses. No daemon."""
import json

from harness import Cluster, run

c = Cluster(start=False)
D, F, R, L, V, S = 4096, 11008, 1024, 32, 32000, 4096
USAGE, REFUSED, INVALID = 2, 5, 6
JOB = f"""spec_version: 1 name: "seven"
model {{ factorization: COLA hidden: {D} layers: {L} heads: 32 intermediate: {F} rank: {R} vocab: {V} }}
parallel {{ strategy: BTP tp: 4 micro_batch: 4 global_batch: 8 }}
data {{ train {{ path: "/nowhere/train.txt" }} seq_len: {S} }}
optimizer {{ lr: 1e-3 }} run {{ steps: 1000 }} checkpoint {{ dir: "/nowhere/ckpt" }}
"""
path = c.dir / "seven.pbtxt"
path.write_text(JOB)


def plan(**sets):
    flags = [x for k, v in sets.items() for x in ("--set", f"{k.replace('__', '.')}={v}")]
    o = json.loads(c.ok("-o", "json", "plan", path, *flags))
    assert o["schema"] == "boost.plan/1", o
    return o


def calls(o, **want):
    """Calls, elements and bytes of all collectives with these values."""
    rows = [x for x in o["collectives"] if all(x[k] == v for k, v in want.items())]
    return tuple(sum(x[k] for x in rows) for k in ("calls", "elements", "bytes"))


def test_seven_milliards():
    o, T = plan(), 4 * S
    low = L * (8 * D * R + 3 * (D + F) * R)
    assert o["parameters"]["total"] == low + 2 * V * D + (2 * L + 1) * D, o["parameters"]
    pad = -V % (128 * 4)
    stage, = o["parameters"]["stages"]
    assert stage == {"stage": 0, "first_layer": 0, "layers": L,
                     "elements_a_rank": (low + (2 * V + pad) * D + (2 * L + 1) * D) // 4}, stage
    assert o["tokens_per_step"] == 8 * S and o["micro_batches"] == 2 and o["ranks"] == 4 and o["micro_batch_given"]
    # 6 for each token and matrix element, and causal attention: s + 1 keys for two queries
    assert o["model_flop_per_step"] == 8 * S * (6 * (low + V * D) + 6 * L * D * (S + 1)), o["model_flop_per_step"]
    # two micro-batches; 7Tr a layer and the two statistics, the last norm's and the loss's 4T; fp32
    elements = 2 * (L * (7 * T * R + 2 * T) + T + 4 * T)
    assert calls(o, group="tp", kind="all_reduce", **{"pass": "forward"}) == (2 * (4 * L + 3), elements, 4 * elements)
    assert calls(o, kind="all_reduce", **{"pass": "backward"}) == (2 * 4 * L, 2 * L * 7 * T * R, 8 * L * 7 * T * R)
    assert calls(o, group="world") == (1, 8, 64)
    # one layer's products of all ranks are 6 T for every element of its pairs
    work = sum(g["flop"] * g["calls"] for g in o["gemms"] if g["place"] == "layer")
    assert 4 * work == 6 * T * low // L, work
    up = next(g for g in o["gemms"] if g["weights"] == "gate up B" and g["gives"] == "output")
    assert (up["m"], up["n"], up["k"], up["batch"]) == (T, F // 4, R, 2), up
    assert up["bytes"] == 4 * 2 * (T * R + R * F // 4 + T * F // 4), up
    assert abs(up["flop_per_byte"] - up["flop"] / up["bytes"]) < 1e-9, up


def test_bf16_has_statistics_of_fp32():
    """They go along with bf16 latents in one call, and on their own at the edges; gradients of weights are fp32."""
    T = 4 * S

    def tp(*args, **sets):
        o = plan(run__precision="BF16", **sets)
        return [calls(o, group="tp", kind="all_reduce", **{"pass": x}) for x in args]
    edge, norms = T + 4 * T, L * 2 * T
    latents = L * 7 * T * R
    forward, backward, evaluation = tp("forward", "backward", "eval")
    assert forward[1:] == (2 * (latents + norms + edge), 2 * (2 * latents + 4 * (norms + edge))), forward
    assert backward[1:] == (2 * latents, 4 * latents), backward
    assert evaluation[1:] == (latents + norms + edge, 2 * latents + 4 * (norms + edge)), evaluation
    backward, = tp("backward", parallel__norm="SYNC")
    assert backward[1:] == (2 * (latents + norms), 2 * (2 * latents + 4 * norms)), backward
    again, = tp("recompute", parallel__recompute="LAYER")
    assert again[1:] == (2 * (latents + norms), 2 * (2 * latents + 4 * norms)), again
    o = plan(run__precision="BF16", parallel__dp=2, parallel__micro_batch=1, parallel__zero=1)
    elements = o["parameters"]["stages"][0]["elements_a_rank"]
    assert calls(o, group="dp", kind="reduce_scatter")[1:] == (elements, 4 * elements)
    assert calls(o, group="dp", kind="all_gather")[1:] == (elements, 2 * elements)
    assert calls(o, group="world")[1:] == (8, 64)


def test_memory_by_recompute():
    o = plan()
    rows = {m["recompute"]: m for m in o["memory_bytes"]}
    assert sorted(rows) == ["LAYER", "LOW_RANK", "NONE"], rows
    assert [m for m in rows if rows[m]["of_this_job"]] == ["NONE"], rows
    parameters = ("weights", "grads", "moments")
    for m in rows.values():
        assert m["total"] == sum(m[k] for k in (*parameters, "master", "saved", "scratch", "head")), m
        elements = o["parameters"]["stages"][0]["elements_a_rank"]
        for k, times in zip(parameters, (1, 1, 2)):
            assert 0 <= m[k] - 4 * times * elements < 1024, (k, m)
    # LOW_RANK keeps a layer's latents (7r), one residual (d/t) and two factors a token; LAYER that residual alone
    T = 4 * S
    assert rows["LOW_RANK"]["saved"] == L * T * 4 * (7 * R + D // 4 + 2), rows["LOW_RANK"]
    assert rows["LAYER"]["saved"] == L * T * 4 * (D // 4), rows["LAYER"]
    assert rows["NONE"]["total"] > rows["LOW_RANK"]["total"] > rows["LAYER"]["total"], rows
    chosen = plan(parallel__recompute="LAYER")
    assert chosen["recompute"] == "LAYER" and calls(chosen, **{"pass": "recompute"})[1] == 2 * L * (7 * T * R + 2 * T)


def test_stages_and_replicas():
    o = plan(parallel__pp=3, parallel__dp=2, parallel__zero=1, parallel__tp=1, parallel__micro_batch=1)
    stages = o["parameters"]["stages"]
    assert [(s["first_layer"], s["layers"]) for s in stages] == [(0, 11), (11, 11), (22, 10)], stages
    assert {m["stage"] for m in o["memory_bytes"]} == {0, 1, 2} and len(o["memory_bytes"]) == 9
    for s in stages:
        elements = s["elements_a_rank"]
        assert calls(o, stage=s["stage"], group="dp", kind="reduce_scatter")[1:] == (elements, 4 * elements), s
    # four micro-batches over two borders, each way
    assert calls(o, group="pp", kind="send", **{"pass": "forward"})[1] == 2 * 4 * S * D
    assert calls(o, group="pp", kind="recv", **{"pass": "backward"})[1] == 2 * 4 * S * D
    table = c.ok("plan", path, "--set", "parallel.pp=3", "--set", "parallel.tp=1")
    assert "stage 2 (layers 22 to 31)" in table and table.count("LOW_RANK") == 1, table
    assert c.ok("-o", "wide", "plan", path, "--set", "parallel.pp=3", "--set", "parallel.tp=1").count("LOW_RANK") == 3


def test_a_dense_model():
    text = JOB.replace("COLA", "FULL_RANK").replace(f"rank: {R}", "").replace("BTP", "FULL")
    o = json.loads(c.ok("-o", "json", "plan", "-", input=text))
    assert sorted(m["recompute"] for m in o["memory_bytes"]) == ["LAYER", "NONE"], o["memory_bytes"]
    assert o["parameters"]["total"] == L * (4 * D * D + 3 * D * F) + 2 * V * D + (2 * L + 1) * D
    T = 4 * S
    assert calls(o, **{"pass": "backward"})[:2] == (2 * (2 * L + 1), 2 * (2 * L + 1) * T * D), o["collectives"]


def test_tables():
    out = c.ok("plan", path)
    for text in ("seven: COLA, BTP, FP32 on the CPU; tp 4 x pp 1 x dp 1 = 4 ranks", "32768 tokens = 2 x 4 sequences of 4096",
                 "NONE (this job)", "q k v A", "FLOP/B"):
        assert text in out, (text, out)
    assert str(7 * 4 * S * R * L * 2) in c.ok("-o", "wide", "plan", path)  # exact
    assert len(c.ok("-o", "jsonl", "plan", path).splitlines()) == 1
    one = c.ok("plan", "-", "--set", "parallel.tp=1", input=JOB.replace("micro_batch: 4", ""))
    assert "none: one rank" in one and "parallel.micro_batch is left out" in one, one


def test_on_cuda():
    cuda = ("plan", path, "--set", "resources.device=CUDA")
    assert "COLA, BTP, BF16 on CUDA; tp 4" in c.ok(*cuda)
    plain, o = c.json("plan", path), c.json(*cuda)
    assert plain["device"] == "CPU" and o["device"] == "CUDA" and o["precision"] == "BF16", o
    for cpu, gpu in zip(plain["memory_bytes"], o["memory_bytes"]):  # fp32 all through, against bf16 with fp32 masters
        assert gpu["weights"] * 2 == cpu["weights"] and gpu["master"] == cpu["grads"] == gpu["grads"], (cpu, gpu)
        assert gpu["saved"] < cpu["saved"], (cpu, gpu)


def test_what_it_refuses():
    for rc, says, args in (
        (REFUSED, ("--devices is not built in this version", "hint: "), (path, "--devices", "8")),
        (REFUSED, ("--calibrate is not built in this version", "hint: "), (path, "--calibrate")),
        (INVALID, ("model.heads = 32 is not divisible by parallel.tp = 3", "hint: "), (path, "--set", "parallel.tp=3")),
        (INVALID, ("model.hiden", "hidden"), (path, "--set", "model.hiden=3")),
        (USAGE, ("takes one job file",), ()),
    ):
        r = c.ctl("plan", *args)
        assert r.rc == rc and not r.out and all(x in r.err for x in says), (args, r)
    r = c.ctl("-o", "name", "plan", path)
    assert r.rc == USAGE and "has no ids" in r.err and not r.out, r


def test_nothing_is_left():
    with c:
        pass


run(globals())
