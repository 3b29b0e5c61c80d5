"""An own reader of safetensors files, checkpoints and exported models. Standard library only."""
import array, json, os, struct


def read_file(path):
    """{name: (dtype, shape, values)}, metadata; values as array of floats."""
    with open(path, "rb") as f:
        data = f.read()
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    meta, out = header.pop("__metadata__", {}), {}
    for name, e in header.items():
        begin, end = e["data_offsets"]
        raw = data[8 + size + begin:8 + size + end]
        if e["dtype"] == "BF16":
            wide = bytearray(2 * len(raw))
            wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
            raw = bytes(wide)
        if e["dtype"] == "F16":
            values = array.array("f", struct.unpack(f"<{len(raw) // 2}e", raw))
        else:
            values = array.array("d" if e["dtype"] == "F64" else "f", raw)
        out[name] = (e["dtype"], e["shape"], values)
    return out, meta


def write_file(path, tensors, meta=None):
    """tensors: {name: (dtype, shape, bytes)}, in their order."""
    header, at = {"__metadata__": meta or {"format": "pt"}}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, raw in tensors.values():
            f.write(raw)


def read_checkpoint(directory):
    """{name: (rows, cols, values)} of the weights of all shards, put together."""
    whole = {}
    for file in sorted(os.listdir(directory)):
        if not file.endswith(".safetensors"):
            continue
        tensors, meta = read_file(os.path.join(directory, file))
        for name, (_, shape, values) in tensors.items():
            where = meta.get("shard:" + name)
            if not where:
                continue  # a moment
            n = [int(x) for x in where.split(",")]
            rows, cols, row0, col0 = n[:4]
            ncols = n[5] if len(n) > 4 else shape[1]
            first = n[6] if len(n) > 4 else 0
            out = whole.setdefault(name, (rows, cols, array.array("f", bytes(4 * rows * cols))))[2]
            for i, v in enumerate(values):
                row, col = divmod(first + i, ncols)
                out[(row0 + row) * cols + col0 + col] = v
    return whole


def read_model(directory):
    """{name: (dtype, shape, values)} of all files that the index names, and config.json."""
    index = json.load(open(os.path.join(directory, "model.safetensors.index.json")))
    out = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors, _ = read_file(os.path.join(directory, file))
        assert all(index["weight_map"][n] == file for n in tensors), file
        out.update(tensors)
    assert set(out) == set(index["weight_map"])
    return out, json.load(open(os.path.join(directory, "config.json")))


MODULES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
           "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def transposed(rows, cols, values):
    return array.array("f", [values[r * cols + c] for c in range(cols) for r in range(rows)])


def expected(weights, factorization):
    """What an export of these weights has to hold, by name: (shape, values, exact)."""
    out = {}
    for name, (rows, cols, values) in weights.items():
        parts = name.split(".")
        if name in ("embedding", "head"):
            out["model.embed_tokens.weight" if name == "embedding" else "lm_head.weight"] = ([rows, cols], values, True)
        elif name == "norm":
            out["model.norm.weight"] = ([cols], values, True)
        elif parts[2].startswith("norm"):
            there = "input_layernorm" if parts[2] == "norm1" else "post_attention_layernorm"
            out[f"model.layers.{parts[1]}.{there}.weight"] = ([cols], values, True)
        else:
            module = f"model.layers.{parts[1]}.{MODULES[parts[2]]}"
            if factorization == "COLA":
                out[f"{module}.cola_{parts[3].lower()}"] = ([cols, rows], transposed(rows, cols, values), True)
            elif parts[3] == "W":
                out[f"{module}.weight"] = ([rows, cols], values, True)
            elif parts[3] == "B":
                r, width, a = weights[name[:-1] + "A"]
                product = array.array("f", [sum(values[i * r + k] * a[k * width + j] for k in range(r))
                                            for i in range(rows) for j in range(width)])
                out[f"{module}.weight"] = ([rows, width], product, False)
    return out
