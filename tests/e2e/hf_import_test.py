#!/usr/bin/env python3
"""Hugging Face directories made by hand, through boost-worker ckpt import and export: every bit pattern of each type, many
files with an index, and all that a directory can have wrong."""
import array, json, math, os, struct, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import run
from hf_models import COLA, Dir, INDEX, LLAMA, SIZE, export, imported, model, numbers, shapes, worker, write_model
from shards import expected, read_file

def same(weights, form, files):
    """What was imported is what lay there: `files` as read by read_file, F16 and BF16 widened."""
    want = expected(weights, form)
    assert set(want) == set(files)
    for name, (shape, values, _) in want.items():
        _, there, found = files[name]
        assert list(there) == shape and values.tobytes() == found.tobytes(), name


def test_every_number_of_each_type_is_read_exactly():
    with Dir() as d:
        c = {**LLAMA, "vocab_size": 65536 // 16}
        patterns = struct.pack("<65536H", *range(65536))
        for dtype in ("F16", "BF16"):
            tensors = model(c, dtype)
            tensors["model.embed_tokens.weight"] = (dtype, (4096, 16), patterns)
            weights, _ = imported(write_model(d / dtype, c, tensors), d / f"{dtype}-in")
            got = weights["embedding"][2]
            if dtype == "F16":
                want = array.array("f", struct.unpack("<65536e", patterns))
            else:
                want = array.array("f", b"".join(struct.pack("<I", i << 16) for i in range(65536)))
            for i, (a, b) in enumerate(zip(got, want)):
                assert (math.isnan(a) and math.isnan(b)) or struct.pack("f", a) == struct.pack("f", b), (dtype, i, a, b)
            assert sum(map(math.isnan, got)) == sum(map(math.isnan, want)) and math.inf in got
            files, _ = read_file(d / dtype / "model.safetensors")
            del files["model.embed_tokens.weight"], weights["embedding"]
            same(weights, "FULL_RANK", files)
        tensors = model(LLAMA)
        for name, (_, shape, raw) in tensors.items():  # types may be mixed
            if name.endswith("norm.weight"):
                tensors[name] = "F64", shape, array.array("d", array.array("f", raw)).tobytes()
        weights, _ = imported(write_model(d / "mixed", LLAMA, tensors), d / "mixed-in")
        files, _ = read_file(d / "mixed" / "model.safetensors")
        same(weights, "FULL_RANK", {n: (t, s, array.array("f", v)) for n, (t, s, v) in files.items()})


def test_config_says_what_the_model_is():
    with Dir() as d:
        for name, c, want in (
                ("llama", LLAMA, {"factorization": "FULL_RANK", "kv_heads": 2, "rope_theta": 500000, "norm_eps": 1e-5,
                                  "mlp_activation": "ON", "tie_embeddings": False}),
                ("new", {**{k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")},
                         "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "hidden_act": "linear",
                         "tie_word_embeddings": True},
                 {"rope_theta": 70000, "mlp_activation": "OFF", "tie_embeddings": True}),
                ("cola", COLA, {"factorization": "COLA", "kv_heads": 4, "rank": 4, "mlp_activation": "ON"}),
                ("cola1b", {k: v for k, v in COLA.items() if k not in ("only_lr_act", "hidden_act")},
                 {"mlp_activation": "OFF", "rope_theta": 10000})):
            weights, spec = imported(write_model(d / name, c, model(c)), d / f"{name}-in")
            m = spec["model"]
            assert all(m[k] == v for k, v in want.items()), (name, m)
            assert spec["data"]["seq_len"] == 64, spec
            files, config = export(d / f"{name}-in" / "step-0.a1", d / f"{name}-out")
            same(weights, m["factorization"], files)
            again, spec = imported(d / f"{name}-out", d / f"{name}-back")
            assert spec["model"] == m and again == weights, (spec["model"], m)
            if m["factorization"] == "COLA":  # the words of the public code, which gives hidden_act to the latents
                assert config["architectures"] == ["ColaForCausalLM"] and config["hidden_act"] == "silu", config
                assert config["rank"] == 4 and config["only_lr_act"] is (m["mlp_activation"] == "OFF"), config
            else:
                assert config["hidden_act"] == ("silu" if m["mlp_activation"] == "ON" else "linear"), config


def test_key_value_heads_of_cola_are_written_for_each_query_head():
    with Dir() as d:
        c = {**COLA, "num_key_value_heads": 2}
        weights, spec = imported(write_model(d / "grouped", c, model(c)), d / "in")
        assert spec["model"]["kv_heads"] == 2
        files, config = export(d / "in" / "step-0.a1", d / "out")
        assert config["num_key_value_heads"] == 4, config
        e, r = 4, 4
        for name, (dtype, shape, values) in read_file(d / "grouped" / "model.safetensors")[0].items():
            kind, there, found = files[name]
            if not name.endswith(("k_proj.cola_b", "v_proj.cola_b")):
                assert (kind, there, found) == (dtype, shape, values), name
                continue
            assert shape == [r, 2 * e] and there == [r, 4 * e], name
            for row in range(r):
                for head in range(4):
                    assert found[(row * 4 + head) * e:][:e] == values[(row * 2 + head // 2) * e:][:e], (name, row, head)
        assert imported(d / "out", d / "back")[1]["model"]["kv_heads"] == 4


def test_many_files():
    """Files of at most a MiB, but for a tensor that is larger; and back to the same shard."""
    with Dir() as d:
        c = {**LLAMA, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 3000, "num_hidden_layers": 4}
        tensors = model(c)
        weights, _ = imported(write_model(d / "five", c, tensors, 5), d / "in")
        write_model(d / "one", c, tensors)
        same(weights, "FULL_RANK", read_file(d / "one" / "model.safetensors")[0])
        checkpoint = d / "in" / "step-0.a1"
        for dtype, option in (("F32", ()), ("BF16", ("--bf16",))):
            out = d / f"out{dtype}"
            files, _ = export(checkpoint, out, "--file-mib", 1, *option)
            parts = sorted(x for x in os.listdir(out) if x.endswith(".safetensors"))
            assert len(parts) >= 4 and parts[0] == f"model-00001-of-{len(parts):05d}.safetensors", parts
            total = 0
            for part in parts:
                held, meta = read_file(out / part)
                size = sum(SIZE[t] * math.prod(s) for t, s, _ in held.values())
                total += size
                assert size <= 1 << 20 or len(held) == 1, (part, size, list(held))
                assert meta["format"] == "pt"
            assert total == json.loads((out / INDEX).read_text())["metadata"]["total_size"]
            assert total == SIZE[dtype] * sum(map(math.prod, shapes(c).values()))
            assert any(len(read_file(out / p)[0]) > 1 for p in parts) and {t for t, _, _ in files.values()} == {dtype}
        imported(d / "outF32", d / "back")
        a, b = (next(x.glob("rank*")).read_bytes() for x in (checkpoint, d / "back" / "step-0.a1"))
        assert a == b
        assert len(os.listdir(export(checkpoint, d / "whole") and d / "whole")) == 3


def drop(*names):
    return lambda c, t, x: [t.pop(n) for n in names]


def put(name, shape, dtype="F32"):
    return lambda c, t, x: t.update({name: (dtype, shape, numbers(shape, dtype if dtype in SIZE else "F32"))})


def config(**values):
    return lambda c, t, x: c.update(values)


def later(change):
    """On what is written."""
    return lambda c, t, x: x.append(change)


def cut(bytes_left):
    def change(directory):
        path = next(directory.glob("*.safetensors"))
        size = path.stat().st_size
        os.truncate(path, bytes_left if bytes_left >= 0 else size + bytes_left)
    return later(change)


def index(change):
    def edit(directory):
        value = json.loads((directory / INDEX).read_text())
        change(value)
        (directory / INDEX).write_text(json.dumps(value))
    return later(edit)


Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
FAULTS = [
    (LLAMA, 1, drop(f"{Q}.weight"), (f"no tensor {Q}.weight",)),
    (LLAMA, 2, drop(f"{Q}.weight"), (INDEX, f"no tensor {Q}.weight")),
    (LLAMA, 2, index(lambda v: v["weight_map"].pop(f"{Q}.weight")), (INDEX, f"no tensor {Q}.weight")),
    (LLAMA, 2, index(lambda v: v["weight_map"].update({f"{Q}.weight": "other.safetensors"})),
     ("other.safetensors", "index")),
    (LLAMA, 2, index(lambda v: v["weight_map"].update({f"{Q}.weight": "../x.safetensors"})), ("../x.safetensors",)),
    (LLAMA, 2, index(lambda v: v["weight_map"].update({f"{Q}.weight": 3})), (f"{Q}.weight",)),
    (LLAMA, 2, index(lambda v: v.pop("weight_map")), ("no weight_map",)),
    (LLAMA, 2, later(lambda d: (d / INDEX).write_text("{")), (INDEX, "line 1")),
    (LLAMA, 1, put(f"{Q}.weight", (16, 15)), (f"{Q}.weight", "[16, 15]", "[16, 16]")),
    (LLAMA, 1, put(f"{Q}.weight", (256,)), (f"{Q}.weight", "[256]", "[16, 16]")),
    (LLAMA, 1, put("model.norm.weight", (1, 16)), ("model.norm.weight", "[1, 16]", "[16]")),
    (LLAMA, 1, config(num_key_value_heads=4), (f"self_attn.k_proj.weight", "[8, 16]", "[16, 16]")),
    (LLAMA, 1, config(vocab_size=41), ("embed_tokens", "[40, 16]", "[41, 16]")),
    (LLAMA, 1, config(num_hidden_layers=1), ("model.layers.1.", "does not have", "config.json")),
    (LLAMA, 1, config(num_hidden_layers=3), ("no tensor model.layers.2.",)),
    (LLAMA, 1, put("model.layers.0.mlp.extra.weight", (2, 2)), ("model.layers.0.mlp.extra.weight", "does not have")),
    (LLAMA, 1, put(f"{Q}.bias", (16,)), (f"{Q}.bias", "no biases")),
    (LLAMA, 1, config(attention_bias=True), ("attention_bias", "no biases")),
    (LLAMA, 1, config(mlp_bias=True), ("mlp_bias", "no biases")),
    (LLAMA, 1, config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ("rope_scaling", "scaled")),
    (LLAMA, 1, config(rope_scaling={"type": "linear", "factor": 2.0}), ("rope_scaling", "scaled")),
    (LLAMA, 1, config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ("rope_parameters", "scaled")),
    (LLAMA, 1, config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), ("rope_parameters",)),
    (LLAMA, 1, config(hidden_act="gelu"), ("hidden_act", "gelu")),
    (LLAMA, 1, config(head_dim=8), ("head_dim",)),
    (LLAMA, 1, config(num_key_value_heads=3), ("num_key_value_heads 3",)),
    (LLAMA, 1, config(hidden_size="16"), ("hidden_size",)),
    (LLAMA, 1, config(num_attention_heads=0), ("num_attention_heads",)),
    (LLAMA, 1, config(rms_norm_eps="small"), ("rms_norm_eps",)),
    (LLAMA, 1, config(quantization_config={"bits": 4}), ("quantiz",)),
    (LLAMA, 1, config(model_type="mistral"), ("mistral", "llama")),
    (LLAMA, 1, config(architectures=["LlamaForSequenceClassification"]), ("LlamaForSequenceClassification",)),
    (LLAMA, 1, later(lambda d: (d / "config.json").unlink()), ("config.json",)),
    (LLAMA, 1, later(lambda d: (d / "config.json").write_text("[]")), ("config.json", "model_type")),
    (LLAMA, 1, later(lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin")),
     ("model.safetensors", "pytorch_model.bin")),
    (LLAMA, 1, drop("lm_head.weight"), ("lm_head.weight", "tie_word_embeddings")),
    (LLAMA, 1, config(tie_word_embeddings=True), ("lm_head.weight", "tie_word_embeddings")),
    (LLAMA, 1, put(f"{Q}.weight", (16, 16), "F8_E4M3"), (f"{Q}.weight", "F8_E4M3", "save it as one")),
    (LLAMA, 1, lambda c, t, x: t.update({f"{Q}.weight": ("I32", (16, 16), bytes(1024))}), (f"{Q}.weight", "I32")),
    (LLAMA, 1, cut(-1), ("model.safetensors", "copy it again")),
    (LLAMA, 3, cut(-100), ("-of-00003.safetensors", "copy it again")),
    (LLAMA, 1, cut(40), ("model.safetensors", "copy it again")),
    (LLAMA, 1, cut(0), ("model.safetensors", "ends early")),
    (COLA, 1, config(rank=5), ("cola_a", "[16, 4]", "[16, 5]")),
    (COLA, 1, put(f"{K}.cola_b", (5, 16)), (f"{K}.cola_b", "[5, 16]", "[4, 16]")),
    (COLA, 1, drop(f"{K}.cola_b"), (f"no tensor {K}.cola_b",)),
    (COLA, 1, config(hidden_act="gelu"), ("hidden_act", "gelu")),
    (COLA, 1, config(hidden_act="linear"), ("hidden_act", "linear")),
    (COLA, 1, config(lr_act_type="relu"), ("lr_act_type", "relu")),
    (COLA, 1, config(architectures=["ColaMForCausalLM"]), ("ColaMForCausalLM", "ColaForCausalLM")),
    (COLA, 1, put("model.layers.0.mlp.gate_proj.bias", (24,)), ("gate_proj.bias", "no biases")),
]


def test_what_is_wrong_is_named():
    with Dir() as d:
        for i, (base, files, change, words) in enumerate(FAULTS):
            c, at, after = dict(base), d / f"m{i}", []
            tensors = model(c)
            change(c, tensors, after)
            write_model(at, c, tensors, files)
            for step in after:
                step(at)
            r = worker("import", at, d / "to")
            assert r.returncode == 1 and all(w in r.stderr for w in words), (i, words, r)
            assert not (d / "to").exists(), (i, words)


def test_what_is_harmless_is_taken():
    with Dir() as d:
        for i, (c, change) in enumerate((
                (LLAMA, lambda c, t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,), bytes(8))})),
                (LLAMA, lambda c, t: c.update(rope_scaling={"rope_type": "default"}, head_dim=None)),
                (LLAMA, lambda c, t: (c.update(tie_word_embeddings=True),
                                      t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))),
                (COLA, lambda c, t: (c.pop("rank"), c.update(lr_act_type="silu"))))):
            c, tensors = dict(c), model(c)
            change(c, tensors)
            weights, spec = imported(write_model(d / f"m{i}", c, tensors), d / f"in{i}")
            assert ("head" in weights) is not spec["model"]["tie_embeddings"]


run(globals())
