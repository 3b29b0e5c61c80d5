#!/usr/bin/env python3
"""Causal attention of PyTorch (SDPA, its cuDNN backend) at the shapes given as B,H,HK,S,E: one JSON object a line with
the shape's name, TFLOP/s forward and backward, counted as gpu_ops counts them. Sustained: --warm seconds of products
first, --seconds for each figure. For tests/bench/gpu_bench.py."""
import argparse, json, time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def sustained(run, seconds):
    """Milliseconds of a call, in bursts of about 20 ms."""
    run()
    torch.cuda.synchronize()
    start, calls, burst = time.monotonic(), 0, 1
    while True:
        before = time.monotonic()
        for _ in range(burst):
            run()
        torch.cuda.synchronize()
        now = time.monotonic()
        calls += burst
        if now - start >= seconds:
            return (now - start) * 1e3 / calls
        burst = burst * 2 if now - before < 0.02 else burst


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--warm", type=float, default=2)
    p.add_argument("--seconds", type=float, default=0.3)
    p.add_argument("shapes", nargs="+")
    args = p.parse_args()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sustained(lambda: a @ a, args.warm)
    for shape in args.shapes:
        b, h, hk, s, e = (int(x) for x in shape.split(","))
        q, k, v = (torch.randn(b, s, n, e, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                   for n in (h, hk, hk))
        grad = torch.randn(b, s, h, e, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

        def forward():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != hk)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            with torch.no_grad():
                fwd = sustained(forward, args.seconds)
            out = forward()
            bwd = sustained(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), args.seconds)
        flop = 2 * b * h * e * s * s
        print(json.dumps({"shape": f"b{b}_h{h}_s{s}_e{e}", "key_heads": hk, "fwd": flop / fwd * 1e-9,
                          "bwd": 2.5 * flop / bwd * 1e-9}), flush=True)


main()
