"""The case catalogue: reads cases.toml into plain records that every benchmark shares."""

from __future__ import annotations

import math
import pathlib
import random
import sys
from dataclasses import dataclass, replace

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("with Python 3.10 the benchmarks need tomli") from error

CATALOGUE = tomllib.loads((pathlib.Path(__file__).parent / "cases.toml").read_text())


@dataclass(frozen=True)
class Case:
    name: str
    batch: int  # sequences
    heads_q: int
    heads_k: int
    head_dim: int
    seqlen: int  # tokens per sequence; the longest one when `lengths` is given
    causal: bool
    window_left: int | None = None
    lengths: tuple[int, ...] | None = None  # packed sequences

    def pairs(self) -> float:
        """Query-key pairs the mask shows, per head. Causal counts half the square, as the
        papers do, so that numbers can be compared with theirs."""
        if self.window_left is not None:
            rows, left = self.seqlen, min(self.window_left, self.seqlen - 1)
            return self.batch * (rows * (left + 1) - left * (left + 1) / 2)
        half = 0.5 if self.causal else 1.0
        lengths = self.lengths or (self.seqlen,) * self.batch
        return half * sum(float(n) * n for n in lengths)

    def flops(self, what: str) -> float:
        forward = 4.0 * self.pairs() * self.heads_q * self.head_dim
        return {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}[what] * forward


def small(case: Case, longest: int = 200) -> Case:
    """The case with its head dim, mask, grouping and spread of lengths, but few heads and short
    sequences: what tests of correctness run."""
    shrink = max(1.0, case.seqlen / longest)
    heads_k = min(2, case.heads_k)
    lengths = None
    if case.lengths is not None:
        by_length = sorted(case.lengths, reverse=True)
        lengths = tuple(round(n / shrink) for n in by_length[::5])
    return replace(
        case,
        batch=min(2, case.batch) if lengths is None else len(lengths),
        heads_q=case.heads_q // case.heads_k * heads_k,
        heads_k=heads_k,
        seqlen=round(case.seqlen / shrink),
        window_left=None if case.window_left is None else round(case.window_left / shrink),
        lengths=lengths,
    )


def grid(head_dims=None, lengths=None, masks=None, batch=None, heads=None, heads_k=None):
    """The grid of the catalogue, or a part of it; the number of tokens and the hidden size give
    the sequences and the heads that are not named."""
    spec = CATALOGUE["grid"]
    found = []
    for d in head_dims or spec["head_dims"]:
        own = heads or spec["hidden"] // d
        for mask in masks or spec["masks"]:
            for n in lengths or spec["lengths"]:
                size = batch or max(1, spec["tokens"] // n)
                found.append(
                    Case(f"d{d} {mask} {n}", size, own, heads_k or own, d, n, mask == "causal")
                )
    return found


def suite(name: str) -> dict:
    """What the arguments of ``pantile bench`` are unless given."""
    return dict(CATALOGUE["suite"].get(name, {}))


def quick(device: str) -> dict:
    """The shapes of the suite quick: keyword arguments of :func:`grid`."""
    return CATALOGUE["quick"][device]


def special() -> list[Case]:
    return [Case(**case) for case in CATALOGUE["special"]]


def varlen() -> Case:
    spec = dict(CATALOGUE["varlen"])
    draw = random.Random(spec.pop("seed"))
    total, low, high = spec.pop("total"), spec.pop("shortest"), spec.pop("longest")
    lengths: list[int] = []
    while sum(lengths) < total:
        length = round(math.exp(draw.uniform(math.log(low), math.log(high))))
        lengths.append(min(length, total - sum(lengths)))
    return Case(batch=len(lengths), seqlen=max(lengths), lengths=tuple(lengths), **spec)
