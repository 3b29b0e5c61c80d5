#!/usr/bin/env python3
"""Writes the golden files of tests/unit/worker/logits_test.c: weights, tokens, logits and loss.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy
    /tmp/venv/bin/python tests/golden/make_logits.py        (writes beside itself)

This is the model's definition in numpy (worker/README.md), written without looking at the
engine: plain RMSNorm before each projection, no grouping, no shards, attention head by head.
It needs numpy; the tests only need the files.

File, little-endian:
    8 bytes  "BGOLD001"
    int64    seed of the weights and tokens
    int32    model (0 COLA, 1 SVD, 2 FULL_RANK; LAX on COLA: 3 identity and 5 tensor gate, on SVD: 4 linear), tied, mlp_silu, d, f, r, L, h, hk, V, s, b
    float64  rope_theta, norm_eps
    int32    number of tensors; for each: int32 length of name, name, int64 rows, cols, float64 values
    int32    inputs [b, s], targets [b, s]
    float64  logits [b, s, V], sum of the losses of the targets that are not negative
"""
import struct
from pathlib import Path

import numpy as np

COLA, SVD, FULL_RANK, LAX_IDENTITY, LAX_LINEAR, LAX_TENSOR = range(6)
CASES = {
    "cola_gqa_untied": dict(model=COLA, tied=0, mlp_silu=0, d=16, f=24, r=4, L=2, h=4, hk=2, V=48, s=9, b=2, seed=11),
    "svd_tied_silu": dict(model=SVD, tied=1, mlp_silu=1, d=16, f=20, r=5, L=3, h=4, hk=4, V=40, s=8, b=2, seed=12),
    "full_rank_gqa_silu": dict(model=FULL_RANK, tied=0, mlp_silu=1, d=16, f=20, r=0, L=2, h=4, hk=2, V=40, s=9, b=2, seed=13),
    "lax_identity": dict(model=LAX_IDENTITY, tied=0, mlp_silu=0, d=12, f=16, r=6, L=3, h=2, hk=2, V=24, s=7, b=2, seed=14),
    "lax_svd_linear": dict(model=LAX_LINEAR, tied=0, mlp_silu=0, d=12, f=16, r=6, L=3, h=2, hk=2, V=24, s=7, b=2, seed=15),
    "lax_tensor": dict(model=LAX_TENSOR, tied=1, mlp_silu=0, d=12, f=16, r=6, L=3, h=2, hk=2, V=24, s=7, b=2, seed=16),
}
THETA, EPS = 10000.0, 1e-6


def weights(c, rng):
    """Every tensor [out, in], drawn wide enough that each matters for the logits."""
    d, f, r, kv = c["d"], c["f"], c["r"], c["hk"] * (c["d"] // c["h"])
    shapes = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    w = {"embedding": rng.normal(0, 0.7, (c["V"], d))}
    for i in range(c["L"]):
        w[f"layers.{i}.norm1"] = 1 + 0.3 * rng.normal(size=(1, d))
        w[f"layers.{i}.norm2"] = 1 + 0.3 * rng.normal(size=(1, d))
        for name, (n_in, n_out) in shapes.items():
            if c["model"] == FULL_RANK:
                w[f"layers.{i}.{name}.W"] = rng.normal(0, 1.6 * (n_in + n_out) ** -0.5, (n_out, n_in))
                continue
            std = 1.6 * (r * (n_in + n_out)) ** -0.25
            w[f"layers.{i}.{name}.A"] = rng.normal(0, std, (r, n_in))
            w[f"layers.{i}.{name}.B"] = rng.normal(0, std, (n_out, r))
            if i and c["model"] >= LAX_IDENTITY:
                w.update(crossing_weights(c["model"], f"layers.{i}.{name}.cross.", r, rng))
    w["norm"] = 1 + 0.3 * rng.normal(size=(1, d))
    if not c["tied"]:
        w["head"] = rng.normal(0, 0.4, (c["V"], d))
    return w


def crossing_weights(model, at, r, rng):
    w = {at + "gain": 1 + 0.3 * rng.normal(size=(1, r)), at + "bias": 0.3 * rng.normal(size=(1, r))}
    if model == LAX_LINEAR:
        w[at + "W"] = rng.normal(0, r ** -0.5, (r, r))
        w[at + "b"] = 0.3 * rng.normal(size=(1, r))
    if model == LAX_TENSOR:  # r = 6 is a matrix of 2 rows and 3 columns
        w[at + "right"] = rng.normal(0, 0.7, (3, 3))
        w[at + "left"] = rng.normal(0, 0.7, (2, 2))
    return w


def silu(x):
    return x / (1 + np.exp(-x))


def crossed(model, w, at, p):
    """What a latent takes of the one before, row by row."""
    if model == LAX_IDENTITY:
        return p
    if model == LAX_LINEAR:
        return p @ w[at + "W"].T + w[at + "b"]
    return np.stack([(w[at + "left"] @ row.reshape(2, 3) @ w[at + "right"].T).ravel() for row in p])


def layer_norm(u, w, at):
    centred = u - u.mean(axis=-1, keepdims=True)
    return w[at + "gain"] * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPS) + w[at + "bias"]


def rms_norm(x, gain):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * gain


def rotate(x):
    """x [s, e]: the first half of the head is the real part, the second the imaginary one."""
    s, e = x.shape
    z = x[:, : e // 2] + 1j * x[:, e // 2 :]
    frequency = THETA ** (-np.arange(e // 2) * 2 / e)
    z = z * np.exp(1j * np.outer(np.arange(s), frequency))
    return np.concatenate([z.real, z.imag], axis=1)


def attention(q, k, v, h, hk):
    """One sequence, head by head, token by token."""
    s, d = q.shape
    e = d // h
    out = np.zeros_like(q)
    for n in range(h):
        kv = n // (h // hk)
        qn = rotate(q[:, n * e : (n + 1) * e])
        kn = rotate(k[:, kv * e : (kv + 1) * e])
        vn = v[:, kv * e : (kv + 1) * e]
        for i in range(s):
            score = kn[: i + 1] @ qn[i] / np.sqrt(e)
            p = np.exp(score - score.max())
            out[i, n * e : (n + 1) * e] = (p / p.sum()) @ vn[: i + 1]
    return out


def forward(c, w, tokens):
    """Logits [s, V] of one sequence."""
    before = {}  # latent of each projection, from the layer before

    def linear(x, name):
        if c["model"] == FULL_RANK:
            return x @ w[name + ".W"].T
        latent = x @ w[name + ".A"].T
        kind = name.split(".")[-1]
        if name + ".cross.gain" in w:
            latent = layer_norm(latent + crossed(c["model"], w, name + ".cross.", before[kind]), w, name + ".cross.")
        before[kind] = latent if c["model"] in (SVD, LAX_LINEAR) else silu(latent)
        return before[kind] @ w[name + ".B"].T

    x = w["embedding"][tokens]
    for i in range(c["L"]):
        at = f"layers.{i}."
        n = rms_norm(x, w[at + "norm1"])
        q, k, v = linear(n, at + "q"), linear(n, at + "k"), linear(n, at + "v")
        x = x + linear(attention(q, k, v, c["h"], c["hk"]), at + "o")
        n = rms_norm(x, w[at + "norm2"])
        gate, up = linear(n, at + "gate"), linear(n, at + "up")
        x = x + linear((silu(gate) if c["mlp_silu"] else gate) * up, at + "down")
    return rms_norm(x, w["norm"]) @ w["embedding" if c["tied"] else "head"].T


def loss_sum(logits, targets):
    total = 0.0
    for row, target in zip(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)):
        if target >= 0:
            top = row.max()
            total += top + np.log(np.exp(row - top).sum()) - row[target]
    return total


def write(path, c):
    rng = np.random.default_rng(c["seed"])
    w = weights(c, rng)
    inputs = rng.integers(0, c["V"], (c["b"], c["s"])).astype("<i4")
    targets = rng.integers(0, c["V"], (c["b"], c["s"])).astype("<i4")
    targets[0, 2] = targets[1, 5] = -1
    logits = np.stack([forward(c, w, row) for row in inputs])
    with open(path, "wb") as out:
        out.write(b"BGOLD001" + struct.pack("<q", c["seed"]))
        keys = ["model", "tied", "mlp_silu", "d", "f", "r", "L", "h", "hk", "V", "s", "b"]
        out.write(struct.pack("<12i2di", *(c[k] for k in keys), THETA, EPS, len(w)))
        for name, values in w.items():
            out.write(struct.pack("<i", len(name)) + name.encode() + struct.pack("<2q", *values.shape))
            out.write(values.astype("<f8").tobytes())
        out.write(inputs.tobytes() + targets.tobytes() + logits.astype("<f8").tobytes())
        out.write(struct.pack("<d", loss_sum(logits, targets)))
    print(f"{path.name}: {path.stat().st_size} bytes, loss sum {loss_sum(logits, targets):.6f}")


if __name__ == "__main__":
    for case, config in CASES.items():
        write(Path(__file__).parent / f"logits_{case}.bin", config)
