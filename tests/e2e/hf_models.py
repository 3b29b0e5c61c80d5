"""Hugging Face directories made by hand, and boost-worker ckpt as it reads and writes them."""
import json, math, os, random, shutil, subprocess, tempfile
from pathlib import Path

from harness import BIN
from shards import read_checkpoint, read_model, write_file

INDEX = "model.safetensors.index.json"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40,
         "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 64,
         "tie_word_embeddings": False, "attention_bias": False, "rope_scaling": None, "torch_dtype": "float32"}
# the public configurations say no more than this
COLA = {"architectures": ["ColaForCausalLM"], "model_type": "cola", "hidden_act": "silu", "hidden_size": 16,
        "intermediate_size": 24, "max_sequence_length": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6, "vocab_size": 40, "rank": 4, "only_lr_act": False, "pad_token_id": 0}
SIZE = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2}
rng = random.Random(7)


def shapes(c):
    """{name: shape} of the model that config.json describes."""
    d, f, e = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    kv = c.get("num_key_value_heads", c["num_attention_heads"]) * e
    out = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = out[at + "post_attention_layernorm.weight"] = (d,)
        for name, o, n in (("self_attn.q", d, d), ("self_attn.k", kv, d), ("self_attn.v", kv, d), ("self_attn.o", d, d),
                           ("mlp.gate", f, d), ("mlp.up", f, d), ("mlp.down", d, f)):
            if c["model_type"] == "cola":
                out[f"{at}{name}_proj.cola_a"], out[f"{at}{name}_proj.cola_b"] = (n, c["rank"]), (c["rank"], o)
            else:
                out[f"{at}{name}_proj.weight"] = (o, n)
    out["model.norm.weight"] = (d,)
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = (c["vocab_size"], d)
    return out


def numbers(shape, dtype="F32"):
    """Random bits that are finite numbers below 2."""
    size = SIZE[dtype]
    raw = bytearray(rng.randbytes(math.prod(shape) * size))
    raw[size - 1::size] = bytes(x & 0xBF for x in raw[size - 1::size])
    return bytes(raw)


def model(c, dtype="F32"):
    return {name: (dtype, shape, numbers(shape, dtype)) for name, shape in shapes(c).items()}


def write_model(directory, c, tensors, files=1):
    os.makedirs(directory)
    (directory / "config.json").write_text(json.dumps(c))
    if files == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    names, weight_map = list(tensors), {}
    for k in range(files):
        file = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
        part = names[k::files]
        write_file(directory / file, {n: tensors[n] for n in part})
        weight_map.update((n, file) for n in part)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return directory


def worker(*args):
    return subprocess.run([BIN / "boost-worker", "ckpt", *map(str, args)], capture_output=True, text=True, timeout=60)


def imported(directory, to):
    r = worker("import", directory, to)
    assert r.returncode == 0, r
    return read_checkpoint(to / "step-0.a1"), json.loads((to / "step-0.a1" / "manifest.json").read_text())["spec"]


def export(checkpoint, to, *options):
    r = worker("export", *options, checkpoint, to)
    assert r.returncode == 0, r
    return read_model(to)


class Dir:
    def __enter__(self):
        self.path = Path(tempfile.mkdtemp(prefix="boost-hf-"))
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path)
