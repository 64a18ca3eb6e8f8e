"""Errors of FP8 gradients by variant, emulated on the CPU (docs/experiments/fp8.md).

Q, K and V are the codes of ``pantile.fp8.quantize``, O and LSE those of the FP8 forward. The
products of the backward are float32 products of operands that were rounded first, to e4m3 with
block scales or to bfloat16. The reference is float64 on the same bfloat16 inputs. An error is
||g - g_ref|| / ||g_ref||; the leak is ||row sums of dS|| / ||dS||, which is 0 in exact arithmetic.

    python tools/fp8_gradient_error.py              # the table, as JSON lines
    python tools/fp8_gradient_error.py --golden     # writes tests/golden/fp8_gradient.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import pantile
import torch
from pantile.bench import harness

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # rows that share a scale
STEP_ROWS = 64  # of a step of the Hopper backward: dS has a scale for each 64 x 128 of it
LAWS = ("normal", "outlier", "mean", "sharp", "rows")
# Codes of Q, K, V by rows and dO end here: sums of head_dim products fit float16 accumulators.
SCORE_LIMIT = 16.0
WEIGHT_SHIFT = 8.0  # P is multiplied by 2 to this before it becomes e4m3
GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "fp8_gradient.json"


@dataclass(frozen=True)
class Variant:
    """Which operands a backward takes; the products are S, dP, dV, dK and dQ."""

    fp8: frozenset[str] = frozenset()  # products of e4m3 operands; the others are of bfloat16
    lse: str = "own"  # "own": of the FP8 forward; "exact"
    delta: str = "own"  # dO * O of the FP8 forward's O; "exact": of the exact O
    value: str = "codes"  # V of dP where that is not in FP8; "exact"
    scores: str = "codes"  # Q and K of S where that is not in FP8; "exact"
    block: int | None = BLOCK  # rows to a scale; None: one for each head
    hadamard: bool = True
    smooth_k: bool = True


def _fp8(*products: str, **rest) -> Variant:
    return Variant(frozenset(products), **rest)


ALL = ("S", "dP", "dV", "dK", "dQ")
EXACT = {"lse": "exact", "delta": "exact", "value": "exact", "scores": "exact"}
VARIANTS = {
    "bf16": Variant(**EXACT),
    "bf16 at FP8's LSE and O": Variant(value="exact", scores="exact"),
    "paired, products in bf16": Variant(),
    "S dP dQ, paired": _fp8("S", "dP", "dQ"),
    "all, paired": _fp8(*ALL),
    "all, exact LSE": _fp8(*ALL, lse="exact"),
    "all, delta of the exact O": _fp8(*ALL, delta="exact"),
    "all, a scale a head": _fp8(
        *ALL, lse="own", delta="exact", block=None, hadamard=False, smooth_k=False
    ),
    "dV dK dQ": _fp8("dV", "dK", "dQ", **EXACT),
}


def draw(law: str, length: int, heads: int, dim: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, v and dO, bfloat16 [1, length, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(1, length, heads, dim, generator=generator)

    def with_outliers() -> Tensor:
        hit = torch.rand(1, length, heads, dim, generator=generator) < 0.001
        return normal() * torch.where(hit, 10.0, 1.0)

    part = normal if law == "normal" else with_outliers
    q, k, v, grad_o = part(), part(), part(), normal()
    if law == "mean":
        k += 3.0 * torch.randn(1, 1, heads, dim, generator=generator)
        v += torch.randn(1, 1, heads, dim, generator=generator)
    elif law == "sharp":
        q *= 3.0
    elif law == "rows":
        grad_o *= torch.exp(1.5 * torch.randn(1, length, heads, 1, generator=generator))
    return tuple(x.bfloat16() for x in (q, k, v, grad_o))


# ---- rounding


def power_of_two_scale(x: Tensor, limit: float, axes: tuple[int, ...]) -> Tensor:
    """The smallest power of two s with amax / s <= limit; 1 where all is zero."""
    amax = x.abs().amax(axes, keepdim=True)
    return torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / limit))), 1.0)


def to_e4m3(x: Tensor) -> Tensor:
    return x.to(E4M3).float()


def blocks_to_e4m3(x: Tensor, rows: int | None, columns: int | None, limit: float) -> Tensor:
    """[heads, rows, columns] through e4m3 with a power-of-two scale for each block."""
    length, width = x.shape[1:]
    rows, columns = rows or length, columns or width
    padded = torch.nn.functional.pad(x, (0, -width % columns, 0, -length % rows))
    blocked = padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))
    scale = power_of_two_scale(blocked, limit, (2, 4))
    rounded = to_e4m3(blocked / scale) * scale
    return rounded.flatten(3, 4).flatten(1, 2)[:, :length, :width]


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# ---- operands: float32 [heads, length, dim]


def heads_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


@dataclass
class Operands:
    """Of one forward: codes times scales, in the basis of q and k, and its outputs."""

    q: Tensor
    k: Tensor  # less its mean, if smoothed
    v: Tensor
    o: Tensor
    lse: Tensor  # of the scores of q and of k as given here


def forward_in_fp8(q: Tensor, k: Tensor, v: Tensor, variant: Variant, causal: bool) -> Operands:
    """The library's quantiser and FP8 forward."""
    if variant.block is None:
        return _forward_with_scales_of_heads(q, k, v, causal)
    made = pantile.fp8.quantize(q, k, v, hadamard=variant.hadamard, smooth_k=variant.smooth_k)
    o, lse = pantile.fp8.attention(made, causal=causal, return_lse=True)
    whole = pantile.fp8.dequantize(made, dtype=torch.float32, keep_mean=False)
    lse = lse[0]
    if variant.smooth_k:
        rows = made.q_dot_mean[:, : q.shape[1]]
        lse = lse - q.shape[-1] ** -0.5 * rows
    return Operands(*(heads_first(x) for x in whole), heads_first(o).float(), lse)


def _forward_with_scales_of_heads(q, k, v, causal: bool) -> Operands:
    """As peers have it: one scale for each head, no rotation, P rounded to e4m3."""
    operands = tuple(blocks_to_e4m3(heads_first(x).float(), None, None, 448.0) for x in (q, k, v))
    q8, k8, v8 = operands
    scores = masked(q8 @ k8.mT * q.shape[-1] ** -0.5, causal)
    top = scores.amax(-1, keepdim=True)
    weights = to_e4m3(torch.exp(scores - top) * 2.0**WEIGHT_SHIFT)
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() - WEIGHT_SHIFT * math.log(2.0) + top)[..., 0]
    return Operands(*operands, to_bf16(weights @ v8 / total), lse)


def masked(scores: Tensor, causal: bool) -> Tensor:
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf)


# ---- the backward


@dataclass
class Gradients:
    dq: Tensor
    dk: Tensor
    dv: Tensor
    leak: float


def exact_gradients(q, k, v, grad_o, causal: bool) -> tuple[Gradients, Tensor, Tensor]:
    """With O and LSE, in float64."""
    q, k, v, grad_o = (heads_first(x).double() for x in (q, k, v, grad_o))
    scale = q.shape[-1] ** -0.5
    scores = masked(q @ k.mT * scale, causal)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None])
    o = weights @ v
    dS = weights * (grad_o @ v.mT - (grad_o * o).sum(-1, keepdim=True))
    return Gradients(scale * dS @ k, scale * dS.mT @ q, weights.mT @ grad_o, 0.0), o, lse


def gradients(variant: Variant, inputs, truth, made: Operands, causal: bool) -> Gradients:
    """``inputs``: q, k, v, dO; ``truth``: (O, LSE) in float64; ``made``: of the FP8 forward."""
    q, k, v, grad_o = (heads_first(x).float() for x in inputs)
    scale = q.shape[-1] ** -0.5
    rows = variant.block
    grad_8 = blocks_to_e4m3(grad_o, rows, None, SCORE_LIMIT if rows else 448.0)
    in_fp8 = variant.fp8.__contains__
    exact_scores = variant.scores == "exact" and not in_fp8("S")
    if variant.lse == "exact":
        lse = truth[1].float()
        if not exact_scores and variant.smooth_k and variant.block is not None:
            lse = lse - scale * (q @ k.mean(1, keepdim=True).mT)[..., 0]
    elif exact_scores and variant.smooth_k:
        lse = made.lse + scale * (q @ k.mean(1, keepdim=True).mT)[..., 0]
    else:
        lse = made.lse
    score_q, score_k = (q, k) if exact_scores else (made.q, made.k)
    weights = torch.exp(masked(score_q @ score_k.mT * scale, causal) - lse[..., None])
    value = v if variant.value == "exact" and not in_fp8("dP") else made.v
    # What dP multiplies is what delta is made of.
    grad = grad_8 if in_fp8("dP") else grad_o
    o = truth[0].float() if variant.delta == "exact" else made.o
    dS = weights * (grad @ value.mT - (grad * o).sum(-1, keepdim=True))
    leak = (dS.sum(-1).norm() / dS.norm()).item()
    tile = (STEP_ROWS, BLOCK) if rows else (None, None)
    dS_8, dS_16 = blocks_to_e4m3(dS, *tile, 448.0), to_bf16(dS)
    dq = dS_8 @ made.k if in_fp8("dQ") else dS_16 @ (k if exact_scores else made.k)
    dk = dS_8.mT @ made.q if in_fp8("dK") else dS_16.mT @ (q if exact_scores else made.q)
    if in_fp8("dV"):
        dv = (to_e4m3(weights * 2.0**WEIGHT_SHIFT) * 2.0**-WEIGHT_SHIFT).mT @ grad_8
    else:
        dv = to_bf16(weights).mT @ grad_o
    return Gradients(*(to_bf16(x) for x in (scale * dq, scale * dk, dv)), leak)


def library_gradients(inputs, causal: bool, backward: str) -> Gradients:
    """Of Options(fp8=True, fp8_backward=...), which do not tell their leak."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    options = pantile.Options(fp8=True, fp8_backward=backward)
    o = pantile.attention(*leaves, causal=causal, options=options)
    grads = torch.autograd.grad(o, leaves, inputs[3])
    return Gradients(*(heads_first(x).float() for x in grads), math.nan)


LIBRARY = {f'Options(fp8_backward="{name}")': name for name in ("recompute", "bf16", "full")}


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


def measure(
    names, law: str, causal: bool, length: int, heads: int = 4, dim: int = 128, seeds: int = 2
) -> dict[str, dict[str, float]]:
    """{variant: {dq, dk, dv, leak}}, means over the draws."""
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for seed in range(seeds):
        inputs = draw(law, length, heads, dim, seed)
        reference, *truth = exact_gradients(*inputs, causal)
        forwards: dict[tuple, Operands] = {}
        for name in names:
            if name in LIBRARY:
                got = library_gradients(inputs, causal, LIBRARY[name])
            else:
                variant = VARIANTS[name]
                form = (variant.block, variant.hadamard, variant.smooth_k)
                if form not in forwards:
                    forwards[form] = forward_in_fp8(*inputs[:3], variant, causal)
                got = gradients(variant, inputs, truth, forwards[form], causal)
            for key in ("dq", "dk", "dv", "leak"):
                value = getattr(got, key)
                error = value if key == "leak" else relative(value, getattr(reference, key))
                found[name][key] = found[name].get(key, 0.0) + error / seeds
    return found


# What the golden file holds: (law, mask, length), one draw of two heads.
GOLDEN_CASES = (
    *((law, "causal", 384) for law in LAWS),
    ("outlier", "full", 384),
    ("mean", "full", 1024),
)
GOLDEN_VARIANTS = ("paired, products in bf16", "all, paired", *LIBRARY)


def golden() -> dict[str, dict[str, dict[str, float]]]:
    return {
        f"{law} {mask} {length}": measure(
            GOLDEN_VARIANTS, law, mask == "causal", length, heads=2, seeds=1
        )
        for law, mask, length in GOLDEN_CASES
    }


def rounded(value: float) -> float | None:
    """None for a leak that is not known."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def rows(given: argparse.Namespace) -> Iterator[dict]:
    for mask, law in itertools.product(given.masks, given.laws):
        names, causal = (*VARIANTS, *LIBRARY), mask == "causal"
        for name, errors in measure(names, law, causal, given.length, dim=given.dim).items():
            row = {"kind": "fp8_gradient_law", "law": law, "mask": mask, "length": given.length}
            row |= {"head_dim": given.dim, "variant": name}
            yield row | {key: rounded(value) for key, value in errors.items()}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--laws", type=harness.words, default=",".join(LAWS))
    parser.add_argument("--masks", type=harness.words, default="causal,full")
    parser.add_argument("--golden", action="store_true", help=f"write {GOLDEN.name}")
    given = parser.parse_args()
    if not given.golden:
        harness.emit(given.out, rows(given))
        return
    cases = {
        case: {name: {key: rounded(x) for key, x in one.items()} for name, one in found.items()}
        for case, found in golden().items()
    }
    GOLDEN.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
