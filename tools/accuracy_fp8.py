"""FP8 in the accuracy report: ours, the peers', and what the format alone costs."""

from __future__ import annotations

import math

import pantile
import torch
from accuracy_cases import DTYPES, Case, Tensors, exact
from pantile.bench import cases, cudnn_fp8, peers
from pantile.bench.peers import FP8


def scales_of(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """amax / 448, for each (batch, block of rows, head); one of all when `block` is None."""
    if block is None:
        return (x.abs().amax() / 448).expand(x.shape[0], 1, x.shape[2])
    rows = -(-x.shape[1] // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * block - x.shape[1]))
    return padded.unflatten(1, (rows, block)).abs().amax((2, 4)) / 448


def through_fp8(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """x rounded to e4m3 with the scales of :func:`scales_of`, back in its own dtype."""
    scales = scales_of(x, block).clamp_min(1e-30)
    rows = scales.repeat_interleave(block, 1)[:, : x.shape[1]] if block else scales
    rows = rows.unsqueeze(-1)
    return (x / rows).to(FP8).to(x.dtype) * rows


def hadamard(dim: int, device) -> torch.Tensor:
    """Orthogonal, with random signs: spreads an outlier over the whole head dim."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(7)) * 2 - 1
    return (h * signs / dim**0.5).to(device)


def emulated_fp8(case: Case, inputs: Tensors, block: int | None, rotate: bool) -> torch.Tensor:
    """Exact arithmetic on inputs that went through e4m3: what the format alone costs."""
    q, k, v = (inputs[n].double() for n in ("q", "k", "v"))
    if rotate:
        turn = hadamard(case.head_dim, q.device)
        q, k = q @ turn, k @ turn
    rounded = {n: through_fp8(x, block) for n, x in (("q", q), ("k", k), ("v", v))}
    return exact(case, rounded | {"grad_o": inputs["grad_o"]}, False)["o"]


def fp8_baseline(case: Case, inputs: Tensors) -> torch.Tensor:
    """The textbook with one scale per tensor, also for P, as the paper's baseline."""
    q, k, v = (through_fp8(inputs[n].float(), None).transpose(1, 2) for n in ("q", "k", "v"))
    s = q @ k.transpose(-1, -2) * case.head_dim**-0.5
    if case.causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    p = (torch.softmax(s, -1) * 448).to(FP8).float() / 448
    return (p @ v).transpose(1, 2)


def fp8_fa3(case: Case, inputs: Tensors) -> torch.Tensor:
    """One scale per batch and head, the finest that FlashAttention-3 takes."""
    operands, scales = [], {}
    for name in ("q", "k", "v"):
        x = inputs[name]
        scale = (x.abs().amax((1, 3)) / 448).contiguous()
        operands.append((x / scale[:, None, :, None]).to(FP8))
        scales[f"{name}_descale"] = scale
    forward = peers.fa3_operators().fwd
    settings = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
    return forward(*operands, **settings, **scales)[0]


def fp8_cudnn(case: Case, inputs: Tensors) -> torch.Tensor:
    """One scale per tensor, also for O, which comes back in e4m3."""
    operands, scales = [], {}
    for name in ("q", "k", "v"):
        scale = inputs[name].abs().amax() / 448
        operands.append((inputs[name] / scale).to(FP8))
        scales[f"descale_{name}"] = scale.reshape(1, 1, 1, 1)
    largest = inputs["v"].abs().amax()
    one = torch.ones(1, 1, 1, 1, device=largest.device)
    scales |= {"scale_s": one * 448, "descale_s": one / 448}
    scales["scale_o"] = (448 / largest).reshape(1, 1, 1, 1)
    shape = (case.batch, case.heads, case.heads, case.head_dim, case.length, case.causal)
    problem = peers.Problem(
        cases.Case(case.key, *shape), "forward", *operands, inputs["grad_o"].bfloat16(), None
    )
    return cudnn_fp8.forward(problem, scales).float() * (largest / 448)


def fp8_pantile(
    case: Case, inputs: Tensors, exp: str = "code", backend: str = "auto", **settings
) -> torch.Tensor:
    options = pantile.Options(backend=backend, fp8_exp=exp)
    operands = pantile.quantize(
        *(inputs[n].to(DTYPES[case.dtype]) for n in ("q", "k", "v")), options=options, **settings
    )
    return pantile.attention(operands, causal=case.causal, options=options)


FP8_METHODS = {
    "baseline, per-tensor scales": fp8_baseline,
    "FA3, per-head scales": fp8_fa3,
    "cuDNN, per-tensor scales": fp8_cudnn,
    "pantile, block scales, Hadamard, K smoothing": fp8_pantile,
    "pantile, the same with exact weights": lambda c, i: fp8_pantile(c, i, exp="exp2"),
    "pantile without Hadamard": lambda c, i: fp8_pantile(c, i, hadamard=False),
    "pantile without K smoothing": lambda c, i: fp8_pantile(c, i, smooth_k=False),
    "exact arithmetic, per-tensor scales": lambda c, i: emulated_fp8(c, i, None, False),
    "exact arithmetic, blocks of 128": lambda c, i: emulated_fp8(c, i, 128, False),
    "exact arithmetic, blocks of 128 and Hadamard": lambda c, i: emulated_fp8(c, i, 128, True),
}
