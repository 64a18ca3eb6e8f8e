"""Chunks of a prompt over many keys: the forward with its keys whole, in parts by the model, and in
a list of numbers of parts, beside FlashAttention-3 with num_splits.

    python benchmarks/splits.py --out benchmarks/results/h200_splits.jsonl

Every contender of a line runs in one process, interleaved. `auto`: the parts that the model chose;
`best`: the number that was fastest here; `auto_over_best`: what the model's choice costs. `ahead`:
the fastest FlashAttention-3 over `auto`. `error`: of `auto`, the largest difference to the whole
call's O, in units of the last place at 1. With --check, one pass over small shapes of every head
dim and mask instead: bits of repeats, and the difference to whole keys; exit 1 if one is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import pantile
import torch
from decode import first_module
from pantile.bench import harness
from pantile.bench.measure import Contender, repeat

# Queries, keys, query heads, key heads, sequences.
SHAPES = (
    *((rows, keys, 16, 4, 1) for rows in (128, 512, 1024) for keys in (16384, 65536, 262144)),
    *((rows, 65536, heads, heads, 1) for rows in (65, 256) for heads in (4, 8)),
    (256, 32768, 8, 8, 4),
    (1024, 4096, 32, 8, 4),  # the GPU is busy: auto must be whole
)
SPLITS = (2, 4, 8, 16, 32)
UNIT = 2.0**-8  # of bf16, at 1


def chosen(num_splits) -> pantile.Options:
    return pantile.Options(num_splits=num_splits)


def number_of(text: str) -> int:
    """Of the explanation of a call."""
    return int(text.split(",")[0]) if text else 1


def operands(shape: tuple, head_dim: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    rows, keys, heads, heads_k, batch = shape
    torch.manual_seed(0)
    sizes = [(batch, rows, heads, head_dim), *[(batch, keys, heads_k, head_dim)] * 2]
    return [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]


def fa3(q, k, v, causal: bool) -> list[Contender]:
    module = first_module("tokenspeed_fa3.flash_attn_interface", "flash_attn_interface")

    def maker(splits: int):
        def call():
            return module.flash_attn_with_kvcache(q, k, v, causal=causal, num_splits=splits)

        call()
        return Contender(f"FA3, {splits or 'auto'}", repeat(call))

    return [maker(splits) for splits in (0, 1, *SPLITS)]


def line_of(shape: tuple, head_dim: int, causal: bool) -> dict:
    q, k, v = operands(shape, head_dim)
    names = {"whole": 1, "auto": "auto", **{f"{n} parts": n for n in SPLITS}}

    def ours(name: str) -> Contender:
        def call():
            return pantile.attention(q, k, v, causal=causal, options=chosen(names[name]))

        call()
        return Contender(name, repeat(call))

    plan = pantile.explain(q, k, v, causal=causal, options=chosen("auto")).forward
    absent: dict[str, str] = {}
    running = harness.running({name: lambda n=name: ours(n) for name in names}, absent)
    running += harness.running({"FA3": lambda: fa3(q, k, v, causal)}, absent)
    ms = harness.medians(running)
    mine = {name: ms[name] for name in names if name in ms}
    theirs = [time for name, time in ms.items() if name.startswith("FA3")]
    auto, whole = (
        pantile.attention(q, k, v, causal=causal, options=chosen(n)) for n in ("auto", 1)
    )
    line = dict(zip(("rows", "keys", "heads", "heads_k", "batch"), shape, strict=True))
    line |= {"kind": "timing", "head_dim": head_dim, "causal": causal}
    line |= {"ms": ms, "absent": absent, "auto": number_of(plan.splits)}
    line |= {"best": min(mine, key=mine.get)}
    line["over_whole"] = harness.quotient(ms.get("whole"), ms.get("auto"))
    line["auto_over_best"] = harness.quotient(ms.get("auto"), min(mine.values()))
    line["ahead"] = harness.quotient(min(theirs, default=None), ms.get("auto"))
    line["error"] = round(float((auto.float() - whole.float()).abs().max()) / UNIT, 3)
    return line


def lines_of(given: argparse.Namespace) -> Iterator[dict]:
    yield harness.header()
    for head_dim in given.head_dims:
        for causal in (False, True):
            for shape in SHAPES:
                yield line_of(shape, head_dim, causal)


def check(given: argparse.Namespace) -> None:
    wrong = 0
    for head_dim in given.head_dims:
        for mask in ({}, {"causal": True}, {"window": (700, 0)}):
            q, k, v = operands((200, 3000, 4, 2, 2), head_dim)
            results = [
                pantile.attention(q, k, v, **mask, return_lse=True, options=chosen(n))
                for n in (1, 7, 7)
            ]
            (o, lse), (cut, cut_lse), again = results
            far = float((o.float() - cut.float()).abs().max()) / UNIT
            repeats = torch.equal(cut, again[0]) and torch.equal(cut_lse, again[1])
            good = repeats and far <= 4 and float((lse - cut_lse).abs().max()) <= 1e-3
            wrong += not good
            print(f"d{head_dim} {mask}: {far:.2f} units, repeats {repeats}, good {good}")
    sys.exit(wrong > 0)


def main() -> None:
    p = harness.parser(__doc__)
    p.add_argument("--head-dims", type=harness.numbers, default=[64, 128, 256])
    p.add_argument("--check", action="store_true", help="no times: results of small shapes")
    given = p.parse_args()
    harness.require_gpu()
    if given.check:
        check(given)
    harness.emit(given.out, lines_of(given))


if __name__ == "__main__":
    main()
