#!/usr/bin/env python3
"""The logits of exported models in transformers, against the checkpoints that they were exported from, and of models that
transformers saved, imported and exported again.

Wants a Python with numpy, torch and transformers: $BOOST_HF_PYTHON, else this one."""
# time limit: 400
import json, os, subprocess, tempfile
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "e2e"))
from harness import BIN, Cluster, Skip, run, tiny_job

SEQ, STEPS = 32, 12
FORMS = {"FULL_RANK": ("rank: 8 ", "", "strategy: BTP", "strategy: FULL"), "SVD": ("vocab: 256", "vocab: 256 kv_heads: 2"),
         "COLA": (), "COLA grouped": ("vocab: 256", "vocab: 256 kv_heads: 2 mlp_activation: ON tie_embeddings: true")}


def python_with_torch():
    find = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('numpy', 'torch', 'transformers'))))"
    for python in (os.environ.get("BOOST_HF_PYTHON"), sys.executable):
        if python and not subprocess.run([python, "-c", find], capture_output=True).returncode:
            return python
    raise Skip("no Python with torch and transformers; BOOST_HF_PYTHON names one")


def logits(python, *args):
    p = subprocess.run([python, TESTS / "hf" / "logits.py", *map(str, args)], capture_output=True, text=True, timeout=900,
                       env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert p.returncode == 0, p.stderr[-2000:]
    return p.stdout


def test_what_transformers_saves_comes_back():
    """Import of F16, BF16 and F32 in many files: exact, so the same logits."""
    python = python_with_torch()
    with tempfile.TemporaryDirectory(prefix="boost-hf-") as d:
        dirs = {t: [Path(d) / f"{t}-{x}" for x in ("in", "ckpt", "out")] for t in ("float16", "bfloat16", "float32")}
        logits(python, "make", *[x for t in dirs for x in (t, dirs[t][0])])
        for saved, checkpoint, out in dirs.values():
            assert len(list(saved.glob("model-*.safetensors"))) > 3, os.listdir(saved)
            for args in (("import", saved, checkpoint), ("export", checkpoint / "step-0.a1", out)):
                subprocess.run([BIN / "boost-worker", "ckpt", *map(str, args)], check=True, timeout=60)
        out = logits(python, "same", *[x for t in dirs for x in (dirs[t][0], dirs[t][2])]).split()
        assert list(map(float, out)) == [0, 0, 0], dict(zip(dirs, out))


def test_logits_in_transformers():
    python = python_with_torch()
    with Cluster(cpu_slots=2) as c:
        loss, args = {}, []
        for form, swaps in FORMS.items():
            text = tiny_job(c, steps=STEPS, tp=2, every=STEPS, name=form.lower().translate(str.maketrans("_ ", "--")), seq_len=SEQ)
            data = (c.dir / "train.txt").read_bytes()
            (c.dir / "eval.txt").write_bytes(data[:2 * SEQ + 1])  # two windows, evaluated at the end
            text = text.replace(f'eval {{ path: "{c.dir}/train.txt" }}', f'eval {{ path: "{c.dir}/eval.txt" }}')
            text = text.replace("eval_tokens", f"eval_every: {STEPS} eval_tokens").replace("COLA", form.split()[0])
            for was, now in zip(swaps[::2], swaps[1::2]):
                assert was in text, was
                text = text.replace(was, now)
            job = c.submit(text)
            c.wait_state(job, "COMPLETED")
            loss[form] = [m["eval_loss"] for m in c.json("metrics", job)["metrics"] if "eval_loss" in m][-1]
            args.append([k["path"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"][-1])
            for dtype in ("fp32", "bf16"):
                args.append(c.dir / f"{job}-{dtype}")
                c.ok("ckpt", "export", job, args[-1], "--dtype", dtype)
        (c.dir / "tokens.json").write_text(json.dumps([list(data[i * SEQ:i * SEQ + SEQ + 1]) for i in range(2)]))
        out = logits(python, "compare", c.dir / "tokens.json", *args)
        for form, out in zip(FORMS, map(json.loads, out.splitlines()[-len(FORMS):])):
            print(f"# {form}: {out}")
            assert out["fp32"] < 1e-5 and out["bf16"] < 1e-2, (form, out)
            assert abs(out["loss"] - loss[form]) < 1e-5 * loss[form], (form, out, loss)


run(globals())
