"""Errors of gradients where K and V have a common part: ours beside other libraries.

    python tools/gradient_laws.py --out benchmarks/results/h200_gradient_laws.jsonl

One line for each law, length, mask and contender: ``||dX - exact|| / ||exact||`` of dQ, dK and dV
against float64, 16-bit inputs, head dim 128. Contenders: textbook attention in the same dtype, this
library's GPU backends, the same without the low bits of O ("rounded O"), and the fused backends of
torch's scaled_dot_product_attention (FlashAttention-2, cuDNN). Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pantile
import torch
from pantile import _direct
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS, HEAD_DIM = 4, 128
LENGTHS = (512, 1024, 2048, 4096)


def draw(law: str, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dO, [1, length, HEADS, HEAD_DIM]."""
    torch.manual_seed(length)
    shape = (1, length, HEADS, HEAD_DIM)
    q, k, v, grad_o = (torch.randn(shape, device="cuda") for _ in range(4))
    if law == "offset 3":
        k, v = k + 3, v + 3
    elif law != "normal":
        if law == "mean 3 sigma, outliers":
            q, k, v = (x * torch.where(torch.rand_like(x) < 1e-3, 10.0, 1.0) for x in (q, k, v))
        mean = torch.sign(torch.randn(1, 1, HEADS, HEAD_DIM, device="cuda"))
        k, v = k + 3 * k.std() * mean, v + 1
    return [x.to(dtype) for x in (q, k, v, grad_o)]


LAWS = ("normal", "offset 3", "mean 3 sigma", "mean 3 sigma, outliers")


def _scores(q, k, causal: bool) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_DIM)
    if causal:
        hidden = torch.ones(scores.shape[-2:], device="cuda", dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def exact(q, k, v, grad_o, causal: bool) -> list[torch.Tensor]:
    q, k, v, grad_o = (x.double() for x in (q, k, v, grad_o))
    p = _scores(q, k, causal).softmax(-1)
    dp = torch.einsum("bihd,bjhd->bhij", grad_o, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(HEAD_DIM)
    return [
        torch.einsum("bhij,bjhd->bihd", ds, k),
        torch.einsum("bhij,bihd->bjhd", ds, q),
        torch.einsum("bhij,bihd->bjhd", p, grad_o),
    ]


def textbook(q, k, v, causal: bool) -> torch.Tensor:
    return torch.einsum("bhij,bjhd->bihd", _scores(q, k, causal).softmax(-1), v)


def ours(backend: str):
    options = pantile.Options(backend=backend)
    return lambda q, k, v, causal: pantile.attention(q, k, v, causal=causal, options=options)


def rounded(q, k, v, causal: bool) -> torch.Tensor:
    """Ours as it was when delta came from the 16-bit O."""
    keeps = _direct.keeps_low
    _direct.keeps_low = lambda *_: False
    try:
        return pantile.attention(q, k, v, causal=causal)
    finally:
        _direct.keeps_low = keeps


def fused(backend: SDPBackend):
    def call(q, k, v, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            operands = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*operands, is_causal=causal).transpose(1, 2)

    return call


CONTENDERS = {
    "textbook": textbook,
    "hopper": ours("hopper"),
    "ampere": ours("ampere"),
    "rounded O": rounded,
    "FlashAttention-2 (torch)": fused(SDPBackend.FLASH_ATTENTION),
    "cuDNN (torch)": fused(SDPBackend.CUDNN_ATTENTION),
}


def errors(call, operands, expected, causal: bool) -> list[float]:
    *inputs, grad_o = operands
    inputs = [x.clone().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(call(*inputs, causal), inputs, grad_o)
    return [
        ((x.double() - e).norm() / e.norm()).item() for x, e in zip(grads, expected, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    arguments = parser.parse_args()
    with arguments.out.open("w") as out:
        for dtype in arguments.dtypes:
            for law in LAWS:
                for length in LENGTHS:
                    for causal in (False, True):
                        operands = draw(law, length, getattr(torch, dtype))
                        expected = exact(*operands, causal)
                        for name, call in CONTENDERS.items():
                            dq, dk, dv = errors(call, operands, expected, causal)
                            record = {
                                "kind": "gradient_error", "law": law,
                                "dtype": dtype, "length": length, "causal": causal,
                                "contender": name, "dq": dq, "dk": dk, "dv": dv,
                                "gpu": torch.cuda.get_device_name(),
                            }  # fmt: skip
                            out.write(json.dumps(record) + "\n")
                            out.flush()
                        print(f"{dtype} {law} {length} {'causal' if causal else 'full'}")


if __name__ == "__main__":
    main()
