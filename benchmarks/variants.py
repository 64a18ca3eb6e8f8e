"""Variants of attention (softcap, ALiBi, dropout, bias, sinks, expressions) beside plain attention
and the peers that have the feature: FlexAttention (compiled), torch's cuDNN and FA2 attention.

An expression (`softcap expression`, `ALiBi expression`, `relative expression`) runs beside the hook
written by hand that computes the same: `over_hook` is its time in units of that.

    python benchmarks/variants.py --out benchmarks/results/h200_variants.jsonl
    python benchmarks/variant_bars.py benchmarks/results/h200_variants.jsonl

FlexAttention compiles a kernel for each line, and we one for each variant. `--warm --part 1/8`
makes the kernels of every eighth line and times nothing: eight such processes side by side fill the
caches of both on disk, and a run that follows times all lines in a fraction of the time.

Every contender of a line runs in one process, interleaved. FlexAttention's compilation, and ours of
a kernel's first use, are over before the clock starts; `first_use_s` tells how long ours took. Each
line also has the error of ours, relative to attention in float32 on the first heads."""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Iterator

import pantile
import torch
import torch.nn.functional as F
from pantile.bench import harness, peers
from pantile.bench.measure import Contender, repeat
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

SHAPES = ((4, 4096), (1, 16384))  # batch, length
HIDDEN = 2048
SOFTCAP, DROPOUT = 50.0, 0.1
RELATIVE = 512  # distances of the table of a relative expression
EXPRESSION = " expression"
LEARNED = "learned "  # with the gradient of the variant's tensor
DEFAULT_VARIANTS = [
    "softcap",
    "ALiBi",
    "dropout",
    "bias",
    "learned bias",
    "sinks",
    "softcap expression",
    "ALiBi expression",
    "relative expression",
]
PEERS = ("FlexAttention", "cuDNN (torch)", "FA2 (torch)")


def tensors_of(variant: str, heads: int, length: int) -> dict[str, torch.Tensor]:
    """What the variant needs beside Q, K and V."""
    if variant.startswith(LEARNED):
        found = tensors_of(variant.removeprefix(LEARNED), heads, length)
        return {name: x.requires_grad_() for name, x in found.items()}
    if variant == "relative expression":
        return {"table": torch.randn(heads, RELATIVE, device="cuda")}
    if variant in ("ALiBi", "ALiBi expression"):
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
        return {"alibi": slopes.float()}
    if variant == "bias":
        return {"bias": torch.randn(1, 1, length, length, device="cuda", dtype=torch.bfloat16)}
    if variant == "sinks":
        return {"sinks": torch.randn(heads, device="cuda")}
    return {}


def score_of(variant: str, tensors: dict) -> pantile.Score:
    if variant == "softcap expression":
        return pantile.Score(f"{SOFTCAP} * tanh(s / {SOFTCAP})")
    if variant == "ALiBi expression":  # under a causal mask i - j is the distance
        return pantile.Score("s + slope[h] * (j - i)", slope=tensors["alibi"])
    return pantile.Score(f"s + table[h, min(abs(i - j), {RELATIVE - 1})]", table=tensors["table"])


def keywords_of(variant: str, tensors: dict) -> dict:
    if variant.endswith(EXPRESSION):
        return {"score": score_of(variant, tensors)}
    variant = variant.removeprefix(LEARNED)
    fixed = {"softcap": {"softcap": SOFTCAP}, "dropout": {"dropout": pantile.Dropout(DROPOUT)}}
    return {**tensors, **fixed.get(variant, {})}


def flex_score(variant: str, tensors: dict):
    variant = variant.removeprefix(LEARNED)
    if variant == "relative expression":
        table = tensors["table"]
        return lambda s, b, h, i, j: s + table[h, (i - j).abs().clamp(max=RELATIVE - 1)]
    if variant == "ALiBi expression":
        slope = tensors["alibi"]
        return lambda s, b, h, i, j: s + slope[h] * (j - i)
    if variant in ("softcap", "softcap expression"):
        return lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP)
    if variant == "ALiBi":
        slopes = tensors["alibi"]
        return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
    if variant == "bias":
        bias = tensors["bias"]
        return lambda s, b, h, i, j: s + bias[0, 0, i, j]
    return None


def peer_call(name: str, variant: str, causal: bool, leaves, tensors: dict):
    """A function of no arguments, or why there is none. ``leaves``: [batch, heads, seq, dim]."""
    length = leaves[0].shape[2]
    if name == "FlexAttention":
        score = flex_score(variant, tensors)
        if score is None and variant != "plain":
            return "not offered by FlexAttention"
        torch._dynamo.reset()
        mask = None
        if causal:
            mask = flex_attention.create_block_mask(
                lambda b, h, i, j: j <= i, None, None, length, length, device="cuda"
            )
        return lambda: peers.compiled_flex()[0](*leaves, score_mod=score, block_mask=mask)
    backend = {
        "cuDNN (torch)": SDPBackend.CUDNN_ATTENTION,
        "FA2 (torch)": SDPBackend.FLASH_ATTENTION,
    }[name]
    options: dict = {"is_causal": causal}
    if variant == "dropout":
        options["dropout_p"] = DROPOUT
    elif variant.endswith("bias") and not causal and backend == SDPBackend.CUDNN_ATTENTION:
        options["attn_mask"] = tensors["bias"]
    elif variant != "plain":
        return "not offered by scaled_dot_product_attention"

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves, **options)

    return call


def contender(name: str, what: str, forward, leaves, grad_o, more=()) -> Contender:
    """``more``: tensors of the variant whose gradients the backward takes as well."""
    call = peers.pass_of(what, forward, (*leaves, *more), grad_o)
    call()
    return Contender(name, repeat(call))


@torch.no_grad()
def error_of(o: torch.Tensor, inputs, causal: bool, variant: str, tensors: dict) -> float | None:
    """Of the last 256 queries of the first head; not of dropout, whose mask is random."""
    if variant == "dropout":
        return None
    q, k, v = (x[0, :, 0].float() for x in inputs)
    rows = torch.arange(len(q) - 256, len(q), device=q.device)
    distance = rows[:, None] - torch.arange(len(k), device=q.device)
    s = q[rows] @ k.T * q.shape[-1] ** -0.5
    if variant == "relative expression":
        s = s + tensors["table"][0, distance.abs().clamp(max=RELATIVE - 1)]
    elif variant == "ALiBi expression":
        s = s - tensors["alibi"][0] * distance
    elif variant in ("softcap", "softcap expression"):
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
    elif variant == "ALiBi":
        s = s - tensors["alibi"][0] * distance.abs()
    elif variant.endswith("bias"):
        s = s + tensors["bias"][0, 0, rows].float()
    if causal:
        s = s.masked_fill(distance < 0, -math.inf)
    if variant == "sinks":
        s = torch.cat([s, tensors["sinks"][0].expand(256, 1)], 1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    exact = torch.softmax(s, 1) @ v
    return float((o[0, rows, 0].float() - exact).norm() / exact.norm())


def line_of(
    variant: str, head_dim: int, batch: int, length: int, causal: bool, what: str, warm: bool
) -> dict:
    """One line of the results; ``warm``: no times, only the first calls."""
    heads = HIDDEN // head_dim
    torch.manual_seed(0)
    inputs = [
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    grad_o = inputs.pop()
    leaves = tuple(x.requires_grad_(what == "backward") for x in inputs)
    swapped = tuple(x.detach().transpose(1, 2).requires_grad_(what == "backward") for x in inputs)
    tensors = tensors_of(variant, heads, length)
    more = tuple(x for x in tensors.values() if x.requires_grad)
    absent: dict[str, str] = {}
    line = {
        "kind": "timing",
        "variant": variant,
        "pass": what,
        "head_dim": head_dim,
        "batch": batch,
        "heads": heads,
        "seqlen": length,
        "causal": causal,
    }

    def own(name: str, keywords: dict, more=()) -> Contender:
        def forward():
            return pantile.attention(*leaves, causal=causal, **keywords)

        return contender(name, what, forward, leaves, grad_o, more)

    def first_use() -> Contender:
        keywords = keywords_of(variant, tensors)
        started = time.perf_counter()
        o = pantile.attention(*leaves, causal=causal, **keywords)
        torch.cuda.synchronize()
        line["first_use_s"] = round(time.perf_counter() - started, 3)
        line["error"] = error_of(o, inputs, causal, variant, tensors)
        return own("pantile", keywords, more)

    def peer(name: str) -> Contender | str:
        call = peer_call(name, variant, causal, swapped, tensors)
        if isinstance(call, str):
            return call
        return contender(name, what, call, swapped, grad_o.transpose(1, 2), more)

    running = [own("plain", {})]
    running += harness.running({"pantile": first_use}, absent, harness.OURS_REFUSES)
    hook = variant.removesuffix(EXPRESSION)
    if variant.endswith(EXPRESSION) and hook in ("softcap", "ALiBi"):
        running.append(own("by hand", keywords_of(hook, tensors)))
    running += harness.running({name: functools.partial(peer, name) for name in PEERS}, absent)
    if warm:
        return {**line, "kind": "warm", "absent": absent}
    ms = harness.medians(running)
    mine = ms.get("pantile")
    best = min((ms[name] for name in PEERS if name in ms), default=None)
    line |= {"ms": ms, "absent": absent}
    line["over_hook"] = harness.quotient(mine, ms.get("by hand"))
    line["over_plain"] = harness.quotient(mine, ms["plain"])
    line["ahead_of_best_peer"] = harness.quotient(best, mine)
    return line


def cells_of(given: argparse.Namespace) -> list[tuple]:
    """(variant, head dim, batch, length, causal, pass) of the lines that are asked for."""
    cells = [
        (variant, head_dim, batch, length, mask == "causal", what)
        for what in given.passes
        for variant in given.variants
        for head_dim in given.head_dims
        for batch, length in SHAPES
        for mask in given.masks
        if length in given.lengths
    ]
    part, parts = map(int, given.part.split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"--part is {given.part}; it must be from 1/{parts} to {parts}/{parts}")
    return cells[part - 1 :: parts]


def lines_of(given: argparse.Namespace) -> Iterator[dict]:
    yield harness.header()
    for cell in cells_of(given):
        yield line_of(*cell, given.warm)


def parser(doc: str) -> argparse.ArgumentParser:
    p = harness.parser(doc)
    p.add_argument("--passes", type=harness.words, default=["forward", "backward"])
    p.add_argument("--head-dims", type=harness.numbers, default=[64, 128])
    p.add_argument("--warm", action="store_true", help="compile, but time nothing")
    return p


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--variants", type=harness.words, default=DEFAULT_VARIANTS)
    p.add_argument("--lengths", type=harness.numbers, default=[4096, 16384])
    p.add_argument("--masks", type=harness.words, default=["causal", "full"])
    p.add_argument("--part", default="1/1", help="which lines, such as 3/8")
    given = p.parse_args()
    harness.require_gpu()
    harness.emit(None if given.warm else given.out, lines_of(given))


if __name__ == "__main__":
    main()
