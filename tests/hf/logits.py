"""Compares the logits of an exported model in transformers (of COLA: in cola.py) with those computed here, in fp64, from the
checkpoint that it was exported from.

    python3 tests/hf/logits.py compare TOKENS.json CKPTDIR FP32DIR BF16DIR ...

TOKENS.json: [window, ...], each of seq_len + 1 ids. Prints a line {"fp32": largest relative difference, "bf16": ..., "loss":
mean loss of the windows} for each three directories.

    python3 tests/hf/logits.py make DTYPE DIR ...

Small models with random weights, saved by transformers in files of 100 kB with an index.

    python3 tests/hf/logits.py same DIR OTHER ...

Prints the largest difference of the logits of each two directories, computed in fp32. Wants numpy, torch and transformers.
"""
import json, os, sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
import cola  # noqa: E402
from shards import read_checkpoint  # noqa: E402


def reference(weights, model, ids):
    """[windows, s, vocab] of the model that worker/README.md describes."""
    w = {n: np.array(v, dtype=np.float64).reshape(r, c) for n, (r, c, v) in weights.items()}
    d, h, hk, eps = model["hidden"], model["heads"], model["kv_heads"], model["norm_eps"]
    e, (b, s) = d // h, ids.shape

    def layer(name, x):
        if name + ".W" in w:
            return x @ w[name + ".W"].T
        z = x @ w[name + ".A"].T
        if model["factorization"] == "COLA":
            z = z / (1 + np.exp(-z))
        return z @ w[name + ".B"].T

    def norm(name, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name][0]

    angle = np.arange(s)[:, None] * model["rope_theta"] ** (-2 * np.arange(e // 2) / e)[None]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rope(x):
        a, c = x[..., :e // 2], x[..., e // 2:]
        return np.concatenate([a * cos - c * sin, c * cos + a * sin], -1)

    x = w["embedding"][ids]
    for i in range(model["layers"]):
        p = f"layers.{i}."
        n = norm(p + "norm1", x)
        q = rope(layer(p + "q", n).reshape(b, s, h, e))
        k = np.repeat(rope(layer(p + "k", n).reshape(b, s, hk, e)), h // hk, 2)
        v = np.repeat(layer(p + "v", n).reshape(b, s, hk, e), h // hk, 2)
        a = np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(e)
        a = np.where(np.tril(np.ones((s, s), bool)), a, -np.inf)
        a = np.exp(a - a.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        x = x + layer(p + "o", np.einsum("bhqk,bkhe->bqhe", a, v).reshape(b, s, d))
        n = norm(p + "norm2", x)
        gate = layer(p + "gate", n)
        if model.get("mlp_activation") == "ON":
            gate = gate / (1 + np.exp(-gate))
        x = x + layer(p + "down", gate * layer(p + "up", n))
    return norm("norm", x) @ w["embedding" if model.get("tie_embeddings") else "head"].T


def llama(path, dtype):
    m = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    assert type(m).__name__ == "LlamaForCausalLM", type(m)
    return m


def compare(tokens, ckpt, fp32, bf16):
    model = json.load(open(os.path.join(ckpt, "manifest.json")))["spec"]["model"]
    windows = np.array(json.load(open(tokens)))
    ids, targets = windows[:, :-1], windows[:, 1:]
    want = reference(read_checkpoint(ckpt), model, ids)
    out = {}
    for name, path, dtype in (("fp32", fp32, torch.float32), ("bf16", bf16, torch.bfloat16)):
        m = cola.load(path) if model["factorization"] == "COLA" else llama(path, dtype)
        assert next(m.parameters()).dtype is dtype, path
        with torch.no_grad():
            got = m(torch.tensor(ids))
        got = getattr(got, "logits", got).double().numpy()
        out[name] = float(np.abs(got - want).max() / np.abs(want).max())
    top = want.max(-1, keepdims=True)
    logsum = np.log(np.exp(want - top).sum(-1)) + top[..., 0]
    out["loss"] = float((logsum - np.take_along_axis(want, targets[..., None], -1)[..., 0]).mean())
    print(json.dumps(out), flush=True)


def make(dtype, directory):
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=500, max_position_embeddings=64, rms_norm_eps=1e-5)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="100KB")


def same(one, other):
    ids = torch.arange(128).view(2, 64) * 7 % 500
    with torch.no_grad():
        a, b = (llama(path, torch.float32)(ids).logits for path in (one, other))
    print(float((a - b).abs().max()))


what, args = sys.argv[1], sys.argv[2:]
if what == "compare":
    for at in range(1, len(args), 3):
        compare(args[0], *args[at:at + 3])
else:
    for at in range(0, len(args), 2):
        {"make": make, "same": same}[what](*args[at:at + 2])
