#!/usr/bin/env python3
"""boostctl ckpt export, import and convert: what is written, by an own reader, and that training goes on from it."""
import os, shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run, tiny_job
from jobs import Shared
from shards import expected, read_checkpoint, read_model

shared = Shared(cpu_slots=2)
SEQ, STEPS = 32, 12
FORMS = {
    "FULL_RANK": ("factorization: COLA", "factorization: FULL_RANK", "rank: 8 ", "", "strategy: BTP", "strategy: FULL"),
    "SVD": ("factorization: COLA", "factorization: SVD kv_heads: 2"),
    "COLA": ("vocab: 256", "vocab: 256 tie_embeddings: true"),
}
made = {}


def trained(c, form):
    """A job of that form, tp 2, that has ended, and the directory of its last checkpoint."""
    if form not in made:
        text = tiny_job(c, steps=STEPS, tp=2, every=STEPS, name=form.lower().replace("_", "-"), seq_len=SEQ)
        held_out = c.dir / "eval.txt"  # two windows
        held_out.write_bytes((c.dir / "train.txt").read_bytes()[:2 * SEQ + 1])
        text = text.replace(f'eval {{ path: "{c.dir}/train.txt" }}', f'eval {{ path: "{held_out}" }}')
        text = text.replace("eval_tokens", f"eval_every: {STEPS} eval_tokens")
        swaps = iter(FORMS[form])
        for a in swaps:
            assert a in text, a
            text = text.replace(a, next(swaps))
        job = c.submit(text)
        c.wait_state(job, "COMPLETED")
        made[form] = job, [k["path"] for k in c.json("ckpt", "ls", job)["checkpoints"] if k["state"] == "COMMITTED"][-1]
    return made[form]


def close(a, b, bound):
    scale = max(abs(x) for x in a) or 1
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b)) <= bound * scale


def compare(directory, weights, form, dtype):
    got, config = read_model(directory)
    want = expected(weights, form)
    assert set(got) == set(want), set(got) ^ set(want)
    for name, (shape, values, exact) in want.items():
        kind, there, found = got[name]
        assert kind == dtype and list(there) == shape, (name, kind, there, shape)
        bound = 1e-6 if not exact else 0
        assert close(values, found, 2 ** -8 if dtype == "BF16" else bound), name
    return config


@shared
def test_export_holds_the_training_state(c):
    for form in FORMS:
        job, path = trained(c, form)
        out = c.dir / f"hf-{form}"
        assert "is exported" in c.ok("ckpt", "export", job, out)
        config = compare(out, read_checkpoint(path), form, "F32")
        assert config["model_type"] == ("cola" if form == "COLA" else "llama"), config
        assert config["tie_word_embeddings"] is (form == "COLA") and config["vocab_size"] == 256, config
    job, path = trained(c, "SVD")
    c.ok("ckpt", "export", f"{job}@{STEPS}", "hf-bf16", "--dtype", "bf16", cwd=c.dir)
    compare(c.dir / "hf-bf16", read_checkpoint(path), "SVD", "BF16")
    r = c.ctl("ckpt", "export", job, c.dir / "hf-bf16")
    assert r.rc and "is in the way" in r.err, r
    assert not [x for x in os.listdir(c.dir) if x.startswith("hf-") and x not in
                ("hf-bf16", *(f"hf-{f}" for f in FORMS))], "a half-made directory is left"


@shared
def test_what_is_exported_can_be_imported(c):
    for form in ("FULL_RANK", "COLA"):
        job, path = trained(c, form)
        out, back = c.dir / f"again-{form}", c.dir / f"back-{form}"
        c.ok("ckpt", "export", path, out)
        text = c.ok("ckpt", "import", out, back)
        assert f"{back}/step-0.a1" in text, text
        was, now = read_checkpoint(path), read_checkpoint(back / "step-0.a1")
        assert {n: (r, k, v.tobytes()) for n, (r, k, v) in was.items()} == \
               {n: (r, k, v.tobytes()) for n, (r, k, v) in now.items()}, form


@shared
def test_training_starts_from_an_import_and_from_conversions(c):
    job, path = trained(c, "FULL_RANK")
    last = [m["loss"] for m in c.json("metrics", job)["metrics"] if "loss" in m][-1]
    c.ok("ckpt", "convert", job, c.dir / "low", "--rank", "32")
    low = c.dir / "low" / f"step-{STEPS}.a1"
    c.ok("ckpt", "convert", low, c.dir / "dense")
    was, now = read_checkpoint(path), read_checkpoint(c.dir / "dense" / f"step-{STEPS}.a1")
    assert set(was) == set(now)
    for name, (_, _, values) in was.items():  # rank 32 is all of it
        assert close(values, now[name][2], 1e-5), name
    text = tiny_job(c, steps=2, tp=2, every=0, name="from", seq_len=SEQ)
    svd = text.replace("factorization: COLA", "factorization: SVD").replace("rank: 8", "rank: 32")
    one = c.submit(svd.replace("every_steps: 0", f'init_from {{ path: "{low}" weights_only: true }}'))
    full = text
    swaps = iter(FORMS["FULL_RANK"])
    for a in swaps:
        full = full.replace(a, next(swaps))
    back = f"{c.dir}/back-FULL_RANK/step-0.a1"
    two = c.submit(full.replace("every_steps: 0", f'init_from {{ path: "{back}" weights_only: true }}'))
    first = {}
    for j in (one, two):
        c.wait_state(j, "COMPLETED")
        first[j] = [m["loss"] for m in c.json("metrics", j)["metrics"] if "loss" in m][0]
    assert abs(first[one] - first[two]) < 1e-3, first  # the same function
    assert abs(first[two] - last) < 0.6 and first[two] < 5.2, (first, last)  # an untrained one has 5.5
    # without weights_only there is nothing to go on from, whatever the batch is
    for batch in ("2", "1"):
        r = c.ctl("submit", "-", "--set", f"parallel.global_batch={batch}", "--set", f"parallel.micro_batch={batch}",
                  input=full.replace("every_steps: 0", f'init_from {{ path: "{c.dir}/back-FULL_RANK/step-0.a1" }}'))
        assert r.rc == 6 and "holds weights alone" in r.err and "weights_only: true" in r.err, r


@shared
def test_training_starts_from_an_exported_directory(c):
    """checkpoint.init_from of Hugging Face's layout itself: the bits are those of an import, at any cut."""
    def submit(form, path, cut=None):
        text = tiny_job(c, steps=3, tp=2, every=0, name="hf", seq_len=SEQ)
        for a, b in zip(FORMS[form][::2], FORMS[form][1::2]):
            text = text.replace(a, b)
        if cut:
            text = text.replace("tp: 2 micro_batch: 2", cut)
        return c.ctl("submit", "-", "--parsable", input=text.replace(
            "every_steps: 0", f'init_from {{ path: "{path}" weights_only: true }}'))

    def losses(*args):
        r = submit(*args)
        assert r.rc == 0, r
        job = int(r.out.split()[0])
        c.wait_state(job, "COMPLETED")
        return [m["loss"] for m in c.json("metrics", job)["metrics"] if "loss" in m]
    for form in ("FULL_RANK", "COLA"):
        directory, checkpoint = c.dir / f"again-{form}", c.dir / f"back-{form}" / "step-0.a1"
        for cut in (None, "tp: 1 dp: 2 zero: 1 micro_batch: 1", "tp: 1 pp: 2 micro_batch: 1"):
            got, want = losses(form, directory, cut), losses(form, checkpoint, cut)
            assert got == want and len(got) == 3 and got[0] < 5.2, (form, cut, got, want)
    spoiled = c.dir / "spoiled"
    shutil.copytree(c.dir / "again-COLA", spoiled)
    shard = next(spoiled.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    for args, words in ((("COLA", c.dir / "nowhere"), ("nowhere", "config.json")),
                        (("FULL_RANK", c.dir / "again-COLA"), ("model.factorization", "COLA")),
                        (("COLA", spoiled), (shard.name, "size of the data"))):
        r = submit(*args)
        assert r.rc == 6 and "checkpoint.init_from" in r.err and all(w in r.err for w in words), (args, r)
    r = c.ctl("submit", "-", input=tiny_job(c).replace("every_steps: 5", f'init_from {{ path: "{c.dir}/again-COLA" }}'))
    assert r.rc == 6 and "weights_only: true" in r.err, r


@shared
def test_refusals_say_why(c):
    job, path = trained(c, "COLA")
    for args, words in ((("convert", job, c.dir / "x"), ("activation", "COLA")),
                        (("convert", job, c.dir / "x", "--rank", "4"), ("FULL_RANK",)),
                        (("export", job, "/nowhere/at/all"), ("/nowhere",)),
                        (("import", path, c.dir / "x"), ("config.json",)),
                        (("export", f"{job}@7", c.dir / "x"), ("step 7",)),
                        (("verify", job, "--rank", "3"), ("--rank is for ckpt convert",))):
        r = c.ctl("ckpt", *args)
        assert r.rc and all(w in r.err for w in words), (args, r)
    assert not (c.dir / "x").exists()


test_nothing_is_left = shared.last

run(globals())
