#!/usr/bin/env python3
"""The peer of train_bench: the same model, loss and AdamW in JAX on the CPU, by the same protocol on standard input
and output. Usage: train_jax.py 'JSON that train_bench printed first'

One jitted function is a whole step: forward, backward, clip by the global norm, update; its state is donated. Branches
that share an input go through one product, as in BOOST. Of what was tried this was the fastest on the CPU; slower
were a scan over the layers, jax.nn.dot_product_attention, einsum in token-major order, and weights stored [in, out].
"""
import json, os, sys, time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax, jax.numpy as jnp, numpy as np

sys.dont_write_bytecode = True
C = json.loads(sys.argv[1])
D, F, R, V, L, H, HK, S = (C[k] for k in ("hidden", "intermediate", "rank", "vocab", "layers", "heads", "kv_heads",
                                           "seq_len"))
E = D // H
B, ACCUMULATION, BATCHES = C["micro_batch"], C["accumulation"], C["batches"]


def read_weights(path):
    """Canonical order; weights are [out, in]."""
    flat, at = np.fromfile(path, np.float32), 0

    def take(*shape):
        nonlocal at
        n = int(np.prod(shape))
        at += n
        return flat[at - n:at].reshape(shape)
    KV = HK * E
    table = take(V, D)
    layers = [{
        "norm1": take(D), "A_qkv": take(3 * R, D), "B_q": take(D, R), "B_k": take(KV, R), "B_v": take(KV, R),
        "A_o": take(R, D), "B_o": take(D, R), "norm2": take(D), "A_gu": take(2 * R, D), "B_gate": take(F, R),
        "B_up": take(F, R), "A_down": take(R, F), "B_down": take(D, R)} for _ in range(L)]
    params = {"embedding": table, "layers": layers, "norm": take(D), "head": take(V, D)}
    assert at == flat.size, (at, flat.size)
    return jax.tree.map(jnp.asarray, params)


def decay_of(params):
    tables = C["weight_decay"] if C["decay_embeddings"] else 0.0
    of = {"embedding": tables, "head": tables}

    def one(path, _):
        name = path[-1].key
        return 0.0 if name.startswith("norm") else of.get(name, C["weight_decay"])
    return jax.tree_util.tree_map_with_path(one, params)


angles = np.arange(S)[:, None] * C["theta"] ** (-2.0 * np.arange(E // 2) / E)
COSINE, SINE = (f(angles)[None, :, None, :].astype(np.float32) for f in (np.cos, np.sin))
MASK = np.tril(np.ones((S, S), bool))


def rope(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * COSINE - b * SINE, b * COSINE + a * SINE], -1)


def rms(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + C["norm_eps"]) * gain


def latent(x, A):
    h = x @ A.T
    return jax.nn.silu(h) if C["latent_silu"] else h


def attention(q, k, v):
    if HK != H:
        k, v = (jnp.repeat(t, H // HK, 2) for t in (k, v))
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = (q * E ** -0.5) @ k.swapaxes(-1, -2)
    p = jax.nn.softmax(jnp.where(MASK, scores, -jnp.inf), -1)
    return (p @ v).transpose(0, 2, 1, 3)


def block(x, w):
    n = rms(x, w["norm1"])
    zq, zk, zv = jnp.split(latent(n, w["A_qkv"]), 3, -1)
    q, k, v = (z @ w[b].T for z, b in ((zq, "B_q"), (zk, "B_k"), (zv, "B_v")))
    ctx = attention(rope(q.reshape(B, S, H, E)), rope(k.reshape(B, S, HK, E)), v.reshape(B, S, HK, E))
    x = x + latent(ctx.reshape(B, S, D), w["A_o"]) @ w["B_o"].T
    n = rms(x, w["norm2"])
    zg, zu = jnp.split(latent(n, w["A_gu"]), 2, -1)
    gate, up = zg @ w["B_gate"].T, zu @ w["B_up"].T
    if C["mlp_silu"]:
        gate = jax.nn.silu(gate)
    return x + latent(gate * up, w["A_down"]) @ w["B_down"].T


def loss_sum(params, inputs, targets):
    x = params["embedding"][inputs]
    for w in params["layers"]:
        x = block(x, w)
    logits = rms(x, params["norm"]) @ params["head"].T
    top = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - top)


def gradients(params, inputs, targets):
    """Of the loss sum over all micro-batches."""
    if ACCUMULATION == 1:
        return jax.value_and_grad(loss_sum)(params, inputs[0], targets[0])

    def add(total, micro):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_sum)(params, *micro)), None
    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, (inputs, targets))[0]


def make_step(decay):
    def step(state, inputs, targets, lr):
        params, m, v, t = state
        total, grads = gradients(params, inputs, targets)
        tokens = inputs.size
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))) / tokens
        scale = (jnp.minimum(1.0, C["grad_clip"] / norm) if C["grad_clip"] else 1.0) / tokens
        t = t + 1
        step_size, root = lr / (1 - C["beta1"] ** t), 1 / jnp.sqrt(1 - C["beta2"] ** t)

        def one(w, g, m, v, decay):
            g = g * scale
            m = C["beta1"] * m + (1 - C["beta1"]) * g
            v = C["beta2"] * v + (1 - C["beta2"]) * g * g
            return w - (step_size * m / (jnp.sqrt(v) * root + C["eps"]) + lr * decay * w), m, v
        new = jax.tree.map(one, params, grads, m, v, decay)
        params, m, v = (jax.tree.map(lambda x: x[i], new, is_leaf=lambda x: isinstance(x, tuple)) for i in range(3))
        return (params, m, v, t), total / tokens
    return jax.jit(step, donate_argnums=0)


def batches():
    i = np.arange(BATCHES * ACCUMULATION * B * (S + 1), dtype=np.uint32)
    x = i * np.uint32(2654435761)
    x = (x ^ x >> 15) * np.uint32(2246822519)
    x = (x ^ x >> 13) * np.uint32(3266489917)
    x = ((x ^ x >> 16) % np.uint32(V)).astype(np.int32).reshape(BATCHES, ACCUMULATION, B, S + 1)
    return np.ascontiguousarray(x[..., :-1]), np.ascontiguousarray(x[..., 1:])


def main():
    params = read_weights(C["weights"])
    step = make_step(decay_of(params))
    inputs, targets = batches()
    state = (params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
    at = 0
    for line in sys.stdin:
        n, losses = int(line), []
        start = time.perf_counter()
        for _ in range(n):
            state, loss = step(state, inputs[at % BATCHES], targets[at % BATCHES], C["lr"])
            losses.append(loss)
            at += 1
        jax.block_until_ready((state, losses))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": n * inputs[0].size, "losses": [float(x) for x in losses]}),
              flush=True)


main()
