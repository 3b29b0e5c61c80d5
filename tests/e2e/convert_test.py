#!/usr/bin/env python3
"""boost-worker ckpt convert, of a model whose layers have singular values that are known: W = sum over k of s_k u_k v_k^T with
the orthonormal vectors of a cosine transform."""
import array, math, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run
from hf_models import Dir, LLAMA, export, imported, model, shapes, worker, write_model
from shards import read_checkpoint

RANK = 5
MODEL = {**LLAMA, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}


def basis(n):
    return [[math.sqrt((2 if k else 1) / n) * math.cos(math.pi * k * (2 * i + 1) / (2 * n)) for i in range(n)]
            for k in range(n)]


def value(layer, k):
    """Another size of the layers' values for each, so that none is taken for another."""
    return (1 + layer) * 0.7 ** k


def terms(rows, cols, layer, end):
    u, v = basis(rows), basis(cols)
    return [sum(value(layer, k) * u[k][i] * v[k][j] for k in range(end)) for i in range(rows) for j in range(cols)]


def known_model():
    tensors = model(MODEL)
    layers = [n for n in tensors if "proj" in n]
    for i, name in enumerate(layers):
        rows, cols = tensors[name][1]
        tensors[name] = "F32", (rows, cols), array.array("f", terms(rows, cols, i, min(rows, cols))).tobytes()
    return tensors, layers


def product(b, a):
    (m, r, x), (_, n, y) = b, a
    return [sum(x[i * r + k] * y[k * n + j] for k in range(r)) for i in range(m) for j in range(n)]


def converted(source, to, *options):
    r = worker("convert", *options, source, to)
    assert r.returncode == 0, r
    return read_checkpoint(to / "step-0.a1")


def distance(a, b):
    assert len(a) == len(b)
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


def test_the_error_is_what_was_discarded():
    tensors, layers = known_model()
    with Dir() as d:
        dense, _ = imported(write_model(d / "m", MODEL, tensors), d / "in")
        low = converted(d / "in" / "step-0.a1", d / "low", "--rank", RANK)
        back = converted(d / "low" / "step-0.a1", d / "back")
        files, config = export(d / "low" / "step-0.a1", d / "hf")
        assert set(back) == set(dense) and config["model_type"] == "llama"
        assert set(files) == set(shapes(MODEL))
        seen = 0
        for name, (rows, cols, values) in dense.items():
            if not name.endswith(".W"):
                assert low[name] == back[name] == (rows, cols, values), name
                continue
            i = [n for n in layers if tensors[n][2] == values.tobytes()]
            assert len(i) == 1, name
            layer, seen = layers.index(i[0]), seen + 1
            b, a = low[name[:-1] + "B"], low[name[:-1] + "A"]
            assert b[:2] == (rows, RANK) and a[:2] == (RANK, cols), name
            cut = product(b, a)
            kept = terms(rows, cols, layer, RANK)
            size = math.sqrt(sum(value(layer, k) ** 2 for k in range(min(rows, cols))))
            discarded = math.sqrt(sum(value(layer, k) ** 2 for k in range(RANK, min(rows, cols))))
            # Eckart and Young: the first terms, and an error of the singular values that are left out
            assert distance(cut, kept) < 2e-6 * size, (name, distance(cut, kept), size)
            assert abs(distance(cut, values) - discarded) < 2e-6 * size, (name, distance(cut, values), discarded)
            # and the pairs multiplied, here and on export, are their product
            assert distance(back[name][2], cut) < 1e-6 * size, name
            assert distance(files[i[0]][2], cut) < 1e-6 * size, name
        assert seen == len(layers) == 14


def test_a_rank_that_a_layer_cannot_have_is_refused():
    tensors, _ = known_model()
    with Dir() as d:
        imported(write_model(d / "m", MODEL, tensors), d / "in")
        converted(d / "in" / "step-0.a1", d / "most", "--rank", 12)  # kv_heads 2 x 6
        r = worker("convert", "--rank", 13, d / "in" / "step-0.a1", d / "more")
        assert r.returncode == 1 and "rank 13" in r.stderr and "--rank 12" in r.stderr and "kv_heads" in r.stderr, r
        assert not (d / "more").exists()
        name = next(n for n in tensors if n.endswith("q_proj.weight"))
        kind, shape, raw = tensors[name]
        tensors[name] = kind, shape, array.array("f", [math.nan]).tobytes() + raw[4:]
        imported(write_model(d / "nan", MODEL, tensors), d / "nan-in")
        r = worker("convert", "--rank", 4, d / "nan-in" / "step-0.a1", d / "nan-low")
        assert r.returncode == 1 and "finite" in r.stderr, r


run(globals())
