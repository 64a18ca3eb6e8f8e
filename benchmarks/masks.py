"""Masks of tiles (blocks at random, patterns, documents, windows as blocks) beside full attention,
the built-in window and FlexAttention (compiled) with the same mask.

    python benchmarks/masks.py --out benchmarks/results/h200_masks.jsonl

Every contender of a line runs in one process, interleaved. `share`: of all tiles of 128 x 128,
those that the mask leaves. `over_full`: our time as a share of full attention's. The building of
our lists is part of every call; FlexAttention's block mask is made before."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pantile
import torch
from pantile.bench import harness, peers
from torch.nn.attention import flex_attention
from variants import contender, parser

SHAPES = ((4, 4096), (1, 16384))  # batch, length
HIDDEN = 2048
BLOCK = 128
FLEX = "FlexAttention"
WINDOW = 1024
DOCUMENTS = 8
CASES = (
    "all",
    "random 0.25",
    "random 0.5",
    "documents",
    "documents causal",
    "prefix",
    "band",
    "butterfly",
    "local + global",
    "elements",
)


def grid(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = length // BLOCK
    i = torch.arange(count, device="cuda")
    return i[:, None], i[None, :]


def blocks_of(case: str, heads: int, length: int) -> torch.Tensor | None:
    i, j = grid(length)
    if case == "all":
        return torch.ones(len(i), len(i), dtype=torch.bool, device="cuda")
    if case.startswith("random"):
        return torch.rand(heads, len(i), len(i), device="cuda") < float(case.split()[1])
    if case == "band":
        return (i >= j) & (i - j <= WINDOW // BLOCK)
    if case == "butterfly":
        return ((i ^ j) & ((i ^ j) - 1)) == 0
    if case == "local + global":
        return ((i - j).abs() <= 1) | (i == 0) | (j == 0)
    return None


def arguments_of(case: str, batch: int, heads: int, length: int):
    """(arguments of attention, mask_mod of FlexAttention, share of the tiles)."""
    blocks = blocks_of(case, heads, length)
    ids = (torch.arange(length, device="cuda") * DOCUMENTS // length).to(torch.int32)
    whole = {"all": {}, "band": {"causal": True}}.get(case, {})
    if blocks is not None:
        by_head = blocks if blocks.ndim == 3 else blocks[None].expand(heads, -1, -1)

        def shows(b, h, i, j):
            seen = by_head[h, i // BLOCK, j // BLOCK]
            return seen & (j <= i) if case == "band" else seen

        share = float(blocks.float().mean())
        return {"mask": pantile.BlockMask(blocks), **whole}, shows, share
    tiles = length // BLOCK
    per = tiles // DOCUMENTS
    if case == "documents":
        return {"mask": pantile.Documents(ids)}, lambda b, h, i, j: ids[i] == ids[j], 1 / DOCUMENTS
    if case == "documents causal":
        share = DOCUMENTS * per * (per + 1) / 2 / tiles**2
        given = {"mask": pantile.Documents(ids), "causal": True}
        return given, lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i), share
    if case == "prefix":
        lengths = torch.full((batch,), length // 4, dtype=torch.int32, device="cuda")
        i, j = grid(length)
        share = float(((j < tiles // 4) | (j <= i)).float().mean())
        shows = lambda b, h, i, j: (j < length // 4) | (j <= i)  # noqa: E731
        return {"mask": pantile.Prefix(lengths)}, shows, share
    mask = ids[:, None] == ids[None, :]
    return {"mask": mask}, lambda b, h, i, j: mask[i, j], 1 / DOCUMENTS


def line_of(
    case: str, head_dim: int, batch: int, length: int, what: str, flex: bool, warm: bool
) -> dict:
    """One line of the results; ``warm``: no times, only the first calls."""
    heads = HIDDEN // head_dim
    torch.manual_seed(0)
    *inputs, grad_o = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    leaves = tuple(x.requires_grad_(what == "backward") for x in inputs)
    given, shows, share = arguments_of(case, batch, heads, length)
    line = {
        "kind": "timing",
        "mask": case,
        "pass": what,
        "head_dim": head_dim,
        "batch": batch,
        "heads": heads,
        "seqlen": length,
        "share": round(share, 5),
    }
    calls = {
        "full": lambda: pantile.attention(*leaves),
        "pantile": lambda: pantile.attention(*leaves, **given),
    }
    if case == "band":
        calls["window"] = lambda: pantile.attention(*leaves, window=(WINDOW, 0))
    absent: dict[str, str] = {}
    makers = {
        name: lambda name=name, call=call: contender(name, what, call, leaves, grad_o)
        for name, call in calls.items()
    }
    running = harness.running(makers, absent, harness.OURS_REFUSES)
    if flex:
        swapped = tuple(
            x.detach().transpose(1, 2).requires_grad_(what == "backward") for x in inputs
        )
        torch._dynamo.reset()
        mask = flex_attention.create_block_mask(
            shows, None, heads if case.startswith("random") else None, length, length, "cuda"
        )

        def call():
            return peers.compiled_flex()[0](*swapped, block_mask=mask)

        grad = grad_o.transpose(1, 2)
        makers = {FLEX: lambda: contender(FLEX, what, call, swapped, grad)}
        running += harness.running(makers, absent)
    if warm:
        return {**line, "kind": "warm", "absent": absent}
    ms = harness.medians(running)
    own = ms.get("pantile")
    line |= {"ms": ms, "absent": absent}
    line["over_full"] = harness.quotient(own, ms.get("full"), 4)
    line["over_window"] = harness.quotient(own, ms.get("window"), 4)
    line["ahead_of_flex"] = harness.quotient(ms.get(FLEX), own)
    return line


def lines_of(given: argparse.Namespace) -> Iterator[dict]:
    yield harness.header()
    for what in given.passes:
        for case in given.cases:
            for head_dim in given.head_dims:
                for batch, length in SHAPES:
                    yield line_of(
                        case, head_dim, batch, length, what, not given.no_flex, given.warm
                    )


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cases", type=harness.words, default=list(CASES))
    p.add_argument("--no-flex", action="store_true")
    given = p.parse_args()
    harness.require_gpu()
    harness.emit(None if given.warm else given.out, lines_of(given))


if __name__ == "__main__":
    main()
