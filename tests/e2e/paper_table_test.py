#!/usr/bin/env python3
# time limit: 180 s
"""tests/bench/paper-table.sh on the CPU with a tiny model: names, lines and tables of a run through real jobs; its
volumes against formulas written out here and boostctl's plan; what it does without time and without room."""
import argparse, json, os, subprocess, sys
from pathlib import Path

from harness import BIN, ROOT, Cluster, run

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import paper_model as pm
import paper_table as paper_table_module
import paper_tables
from paper_lines import measured, random_tokens

SCRIPT = ROOT / "tests" / "bench" / "paper-table.sh"
OUT = Path(os.environ.get("BOOST_TEST_DIR", "/tmp")) / "paper.jsonl"
QUICK = ("--cpu", "--batch", "2", "--steps", "3", "--seconds", "0.05", "--warm-s", "0.02", "--out", OUT)


def paper_table(*arguments):
    p = subprocess.run([str(x) for x in (SCRIPT, *arguments)], env={**os.environ, "BUILD": str(BIN.parent)}, text=True,
                       capture_output=True, timeout=150)
    rows = [json.loads(x) for x in OUT.read_text().splitlines()] if OUT.exists() else []
    return p, {r["name"]: r for r in rows}


# tiny: d 32, f 64, r 8, V 256, 2 layers, 4 heads; 2 sequences of 32
D, F, R, V, L, T, S, TP = 32, 64, 8, 256, 2, 64, 32, 2


def test_a_run_through_jobs():
    p, rows = paper_table(*QUICK, "--tp", "2", "--parts", "iter,comm,exposed,kill", "--ways", "full,btp_no_overlap,btp")
    assert p.returncode == 0, p.stdout + p.stderr
    names = {f"iter_tiny_tp2_{w}_b2" for w in ("full", "btp", "btp_no_overlap")}
    names |= {f"exposed_comm_pct_tiny_tp2_{w}b2" for w in ("full_", "", "btp_no_overlap_")} | {"recover_s_kill_tp2"}
    names |= {f"busbw_{k}_{kib}k_tp2" for k in ("all_reduce", "reduce_scatter", "all_gather") for kib in (16, 256)}
    names |= {f"alone_tiny_tp2_{w}_b2" for w in ("full", "btp", "btp_no_overlap")}
    assert set(rows) == names, set(rows) ^ names
    for r in rows.values():
        assert {"value", "unit", "peer", "peer_value", "ratio", "date", "commit", "device"} <= set(r), r
        assert r["value"] is not None, r
    full, btp = rows["iter_tiny_tp2_full_b2"], rows["iter_tiny_tp2_btp_no_overlap_b2"]
    assert full["unit"] == "ms" and full["steps"] >= 3 and abs(full["tokens_s"] * full["value"] / 1e3 / T - 1) < 1e-4
    # Bytes of a layer in bf16: FULL 2Td each way; BTP 7Tr, forward with two statistics in fp32.
    for r, forward, backward, calls in ((full, 2 * 2 * T * D, 2 * 2 * T * D, 4),
                                        (btp, 2 * 7 * T * R + 4 * 2 * T, 2 * 7 * T * R, 8)):
        assert abs(r["comm_mib_layer_fwd"] * 2**20 - forward) < 1, r
        assert abs(r["comm_mib_layer_bwd"] * 2**20 - backward) < 1, r
        assert r["comm_calls_layer"] == calls and r["comm_ms"] > r["comm_ms_layer"] > r["comm_ms_layer_fwd"] > 0, r
        assert "comm_bench" in r["comm_by"] and "NULL" in r["exposed_by"], r
        assert abs(r["exposed_ms"] - (r["value"] - r["null_ms"])) < 1e-3, r
    assert rows["iter_tiny_tp2_btp_b2"]["comm_calls_layer"] == 16, "two slices"
    # The estimate of FULL, in other words: 6 FLOP a token and matrix element, attention's pairs of a query and a key,
    # 34 bytes a parameter, and of collectives the layer's, the embedding's Td, two of the loss and one of the head.
    parameters = L * (4 * D * D + 3 * D * F) + V * D
    attention = 3.5 * L * (T // S) * (4 * D * S * (S + 1) / 2)
    bytes_ = L * 4 * 2 * T * D + 2 * 2 * T * D + 4 * 4 * T
    want = (6 * T * parameters / TP / 650e9 + attention / TP / 300e9 + 34 * (parameters / TP + (2 * L + 1) * D) / 4e9 +
            (4 * L + 4) * 11e-3 + bytes_ / 343e6)
    assert abs(full["est_ms"] / want - 1) < 1e-4, (full["est_ms"], want)
    # A rank alone, and its collectives by the same model, by themselves those of the layers.
    alone = rows["alone_tiny_tp2_full_b2"]
    comm = (4 * L + 4) * 11e-3 + bytes_ / 343e6
    assert abs(alone["est_ms"] - alone["value"] - comm) < 1e-4 and alone["value"] == full["null_ms"], (alone, comm)
    assert abs(alone["est_comm_ms_layer"] - 4 * (11e-3 + 2 * T * D / 343e6)) < 1e-6, alone
    assert abs(alone["est_comm_ms_layer_fwd"] - alone["est_comm_ms_layer"] / 2) < 1e-6, alone
    killed = rows["recover_s_kill_tp2"]
    assert killed["equal_to_the_bit"] and killed["from_step"] >= 10 and 0 < killed["value"] < 30, killed
    p, _ = paper_table("--table", OUT)
    for text in ("## The paper's table: iterations", "| tiny_tp2_full_b2 |", "## NCCL bus bandwidth",
                 "recover_s_kill_tp2", "not measured"):
        assert text in p.stdout, (text, p.stdout)


def test_what_is_left_out_is_said():
    before = OUT.read_text() if OUT.exists() else ""
    p, _ = paper_table(*QUICK, "--tp", "2", "--parts", "iter", "--budget-s", "1")
    assert p.returncode == 1 and "the next row takes about" in p.stdout, p.stdout + p.stderr
    assert (OUT.read_text() if OUT.exists() else "") == before, "lines of other runs stay"
    # A cell that cannot be: a line with the reason, and the others go on.
    p, rows = paper_table(*QUICK, "--tp", "3,2", "--parts", "iter,layer", "--ways", "full")
    assert p.returncode == 0, p.stdout + p.stderr
    assert rows["iter_tiny_tp3_full_b2"]["value"] is None and "refused" in rows["iter_tiny_tp3_full_b2"]["note"], rows
    assert rows["iter_tiny_tp2_full_b2"]["value"] > 0
    layer = rows["layer_tiny_tp2_full_b2"]
    deep, shallow = (rows[f"iter_tiny_tp2_full_b2{of}"]["value"] for of in ("", "_l1"))
    assert abs(layer["value"] - (deep - shallow - layer["update_ms"])) < 1e-3 and layer["update_ms"] != 0, layer


def test_ranks_alone_and_scaling():
    """Of a tp with more ranks than devices, and what follows from it."""
    p, rows = paper_table(*QUICK, "--tp", "4", "--parts", "alone", "--ways", "full,btp_no_overlap")
    assert p.returncode == 0, p.stdout + p.stderr
    full, btp = (rows[f"alone_tiny_tp4_{w}_b2"] for w in ("full", "btp_no_overlap"))
    assert full["value"] > 0 and full["est_ms"] > full["value"] and btp["tp"] == 4, rows
    lines = {}
    def line(name, flop, **more):
        where = dict(size="7b", tp=int(name.split("_tp")[1][0]), micro_batch=1, commit="a")
        lines[name] = {"name": name, "value": None, "model_flop": flop, **where, **more}
    line("iter_7b_tp1_btp_b1", 8, value=4.0, est_ms=2.0)
    line("iter_7b_tp2_btp_no_overlap_b1", 8, value=2.5, est_ms=1.0)
    line("alone_7b_tp2_btp_no_overlap_b1", 8, value=2.0, est_ms=2.2, est_model_ms=1.0)
    line("alone_7b_tp4_btp_no_overlap_b1", 8, value=1.0, est_ms=1.25, est_model_ms=0.8)
    line("alone_7b_tp4_full_b1", 16, value=2.0, est_ms=2.5, est_model_ms=1.5)
    table = paper_table_module.Table.__new__(paper_table_module.Table)
    table.args, table.lines = argparse.Namespace(batch=[1]), Kept(lines)
    table.scaling()
    two, four = (lines[f"strong_scaling_7b_tp{t}_b1"] for t in (2, 4))
    assert (two["value"], two["est_value"]) == (0.8, 1.0) and abs(two["est_alone_value"] - 4 / 2.2 / 2) < 1e-9, two
    assert (four["value"], four["est_value"], four["est_alone_value"]) == (None, 2 / 0.8 / 4, 4 / 1.25 / 4), four
    said = paper_tables.check_lines(lines)
    assert any("full rank / BTP, 7b tp 4 B1: - (at least 1.4), estimate 2" in x for x in said), said
    assert "| 7b_tp2_btp_no_overlap_b1 | 2 |  | 2.2 | 2.5 | 0.88 |" in "\n".join(paper_tables.alone(lines))


class Kept:
    """In place of paper_lines.Lines: nothing on disk."""

    def __init__(self, rows):
        self.rows = rows

    def put(self, name, value, unit, **more):
        self.rows[name] = {"name": name, "value": value, "unit": unit, **more}


def test_calls_of_a_layer_are_the_plans():
    c = Cluster(start=False)
    path = c.dir / "job.pbtxt"
    seen = 0
    for size in ("3b", "7b"):
        for way, w in pm.WAYS.items():
            for tp in (2, 4):
                cell = pm.Cell(size, tp, way, 4)
                plans = []
                for layers in (2, 3):
                    path.write_text(pm.job_text(cell._replace(layers=layers), "/none.u16", c.dir, "CUDA"))
                    plans.append(c.json("plan", path))
                v, calls = pm.volume(plans[1], plans[0]), pm.layer_calls(cell)
                if calls is None:
                    continue
                seen += 1
                for half, key in zip(calls, ("fwd", "bwd")):
                    assert sum(x.bytes + x.second for x in half) == v[f"comm_mib_layer_{key}"] * 2**20, (cell, key, v)
                if "recompute" not in w.fields:
                    assert sum(map(len, calls)) == v["comm_calls_layer"], (cell, v)
    assert seen >= 50, seen


def test_steps_that_count():
    rows = [{"step": i, "step_ms": 100} for i in range(1, 31)]
    assert measured(rows[:10], 5, 0.5, 0.1) is None, "4 skipped, 5 for warmth, 1 left"
    assert [r["step"] for r in measured(rows[:14], 5, 0.5, 0.1)] == [10, 11, 12, 13, 14]
    assert measured(rows[:14], 5, 0.5, 1) is None and len(measured(rows[:19], 5, 0.5, 1)) == 10
    data = random_tokens(32000, 5000)
    assert max(data[i] + 256 * data[i + 1] for i in range(0, len(data), 2)) < 32000


def test_checks():
    def line(name, value, **more):
        return name, {"name": name, "value": value, **more}
    rows = dict([line("iter_3b_tp2_full_b4", 160), line("iter_3b_tp2_btp_no_overlap_b4", 100),
                 line("iter_3b_tp2_btp_b4", 200), line("iter_3b_tp2_full_b1", 50),
                 line("iter_3b_tp2_btp_no_overlap_b1", 40), line("iter_7b_tp4_full_b4_l8", 80),
                 line("iter_7b_tp4_btp_no_overlap_b4_l8", 40), line("iter_7b_tp4_vanilla_published_b4", 80),
                 line("iter_7b_tp4_full_b1", 80, commit="a"), line("iter_7b_tp4_btp_no_overlap_b1", 40, commit="b"),
                 line("exposed_comm_pct_7b_tp4_b4", 15)])
    said = paper_tables.check_lines(rows)
    def verdict(what):
        found = [x for x in said if what + ":" in x]
        assert len(found) == 1, (what, said)
        return found[0].split("  ")[0].strip() or found[0].strip().split("  ")[0]
    assert verdict("full rank / BTP, 3b tp 2 B4") == "met"
    assert verdict("full rank / BTP, 3b tp 2 B4, overlap on") == "reported", "a job that says nothing has it off"
    assert verdict("full rank / BTP, 3b tp 2 B1") == "MISSED"
    assert verdict("full rank / BTP, 7b tp 4 B1") == "not measured", "no two of one commit"
    assert verdict("full rank / BTP, 7b tp 4 B4, 8 layers") == "met"
    assert verdict("vanilla published / BTP, 7b tp 4 B4") == "not measured", "no two of one depth"
    assert verdict("communication exposed, %, overlap on, 7b tp 4 B4") == "met"


run(globals())
