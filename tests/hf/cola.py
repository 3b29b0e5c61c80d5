"""A COLA model in PyTorch, by the structure and the names of the public CoLA code (arXiv 2502.10940: ColaForCausalLM), for
comparison only: every projection is y = act(x a) b with a [in, rank] and b [rank, out]; `hidden_act` is act, and unless
`only_lr_act` also stands on the gate. Wants torch and safetensors."""
import json, os

import torch
from safetensors.torch import load_file
from torch import nn

ACTS = {"silu": nn.functional.silu}


class Pair(nn.Module):
    def __init__(self, inputs, outputs, c):
        super().__init__()
        self.act = ACTS[c["hidden_act"]]
        self.cola_a = nn.Parameter(torch.empty(inputs, c["rank"]))
        self.cola_b = nn.Parameter(torch.empty(c["rank"], outputs))

    def forward(self, x):
        return self.act(x @ self.cola_a) @ self.cola_b


class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(c["hidden_size"])), c["rms_norm_eps"]

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.heads, self.theta = c["hidden_size"], c["num_attention_heads"], c["rope_theta"]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Pair(d, d, c) for _ in range(4))

    def turn(self, x):
        half, n = x.shape[-1] // 2, x.shape[-2]
        angle = torch.arange(n)[:, None] * self.theta ** (-torch.arange(half) / half)[None]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (p(x).view(b, n, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = Pair(d, f, c), Pair(d, f, c), Pair(f, d, c)
        self.act = (lambda x: x) if c["only_lr_act"] else ACTS[c["hidden_act"]]

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = Norm(c), Norm(c)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = Norm(c)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Cola(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = Body(c)
        if not c["tie_word_embeddings"]:
            self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids):
        head = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        return self.model(ids) @ head.weight.T


def load(directory):
    """The model of an exported directory: each tensor of it has to be in the files, and nothing else."""
    config = json.load(open(os.path.join(directory, "config.json")))
    index = json.load(open(os.path.join(directory, "model.safetensors.index.json")))
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(os.path.join(directory, file)))
    model = Cola(config).to(next(iter(tensors.values())).dtype)
    model.load_state_dict(tensors, strict=True)
    return model.eval()
