"""Which rank holds which tokens: pure functions of the lengths, equal on every rank.

A run is a range ``(start, stop, document)`` of tokens of one document, in global positions. A
layout is one tuple of runs for each rank, in ascending order.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pantile._masks import UNBOUNDED

# Keys of a window start at a multiple of this many keys of their document, where the tiles of every
# kernel start: a row then meets the tiles that it meets in one process.
KEY_TILE = 768
_QUERY_TILE = 128  # runs are cut at multiples of this where the lengths leave the choice

LAYOUTS = ("auto", "zigzag", "contiguous", "documents", "te_zigzag")


class Run(NamedTuple):
    start: int
    stop: int
    document: int


class Mask(NamedTuple):
    """Bounds of the window as kernels take them; -1: unbounded."""

    left: int
    right: int


class Piece(NamedTuple):
    """The queries of one run, with the keys that they need and the window that goes with them."""

    start: int  # of the queries, global
    stop: int
    first_key: int  # global
    last_key: int  # one past it
    left: int
    right: int


def piece_of(run: Run, bounds: Sequence[int], mask: Mask) -> Piece:
    """The mask of a call is aligned to the bottom right, so that ``extra`` keys to the right of the
    last query move both bounds by as many."""
    first, end = bounds[run.document], bounds[run.document + 1]
    first_key, last_key = first, end
    if mask.left != UNBOUNDED:
        tile = max(run.start - mask.left - first, 0) // KEY_TILE
        first_key = first + tile * KEY_TILE
    if mask.right != UNBOUNDED:
        last_key = min(run.stop + mask.right, end)
    extra = last_key - run.stop
    left = UNBOUNDED if mask.left == UNBOUNDED else mask.left + extra
    right = UNBOUNDED if mask.right == UNBOUNDED else mask.right - extra
    return Piece(run.start, run.stop, first_key, last_key, left, right)


def is_alone(run: Run, bounds: Sequence[int], mask: Mask) -> bool:
    """Whether its queries see the keys of the run, and no others."""
    piece = piece_of(run, bounds, mask)
    return piece.first_key == run.start and piece.last_key == run.stop


def cut(start: int, stop: int, bounds: Sequence[int]) -> Iterable[Run]:
    """A range of tokens as runs, at the ends of documents."""
    document = bisect.bisect_right(bounds, start) - 1
    while start < stop:
        end = min(stop, bounds[document + 1])
        if end > start:
            yield Run(start, end, document)
        start, document = max(start, end), document + 1


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Ascending, neighbours of one document joined."""
    joined: list[Run] = []
    for run in sorted(runs):
        if joined and joined[-1].stop == run.start and joined[-1].document == run.document:
            joined[-1] = joined[-1]._replace(stop=run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def _marks(total: int, parts: int) -> list[int]:
    """Where ``total`` tokens are cut into ``parts``: equal where that divides, otherwise at
    multiples of a query tile, or of less where a part would differ by more than a sixteenth."""
    if total % parts == 0:
        return [i * (total // parts) for i in range(parts + 1)]
    step = _QUERY_TILE
    while step > 1 and total < parts * step * 16:
        step //= 2
    inner = [round(i * total / (parts * step)) * step for i in range(parts)]
    return [*inner, total]


def contiguous(bounds: Sequence[int], ranks: int) -> list[tuple[Run, ...]]:
    marks = _marks(bounds[-1], ranks)
    return [tuple(cut(marks[r], marks[r + 1], bounds)) for r in range(ranks)]


def zigzag(bounds: Sequence[int], ranks: int) -> list[tuple[Run, ...]]:
    """Rank r holds the parts r and 2 P - 1 - r of 2 P: an early one and a late one."""
    marks = _marks(bounds[-1], 2 * ranks)
    both = ((r, 2 * ranks - 1 - r) for r in range(ranks))
    return [
        merged(run for part in parts for run in cut(marks[part], marks[part + 1], bounds))
        for parts in both
    ]


def te_zigzag(bounds: Sequence[int], ranks: int) -> list[tuple[Run, ...]]:
    """The parts r and 2 P - 1 - r of every document, as TransformerEngine and Megatron cut them."""
    held: list[list[Run]] = [[] for _ in range(ranks)]
    for document in range(len(bounds) - 1):
        first, tokens = bounds[document], bounds[document + 1] - bounds[document]
        part, rest = divmod(tokens, 2 * ranks)
        if rest:
            raise ValueError(
                f"document {document} has {tokens} tokens; layout 'te_zigzag' needs a multiple of "
                f"{2 * ranks}, twice the ranks"
            )
        for rank in range(ranks if part else 0):
            for i in (rank, 2 * ranks - 1 - rank):
                held[rank].append(Run(first + i * part, first + (i + 1) * part, document))
    return [merged(runs) for runs in held]


def _ramp(count: int, most: int) -> int:
    """Sum of min(i, most) over i < count."""
    if most == UNBOUNDED or count <= most + 1:
        return count * (count - 1) // 2
    return most * (most + 1) // 2 + (count - most - 1) * most


class Work:
    """Visible pairs of query and key of one head, by formulas; positions are those in a
    document."""

    def __init__(self, bounds: Sequence[int], mask: Mask) -> None:
        self.bounds, self.mask = bounds, mask
        self.lengths = [b - a for a, b in pairwise(bounds)]
        self._causal = mask == Mask(UNBOUNDED, 0)

    def of(self, document: int, start: int, stop: int) -> int:
        if self._causal:
            return (stop - start) * (start + stop + 1) // 2
        length, (left, right) = self.lengths[document], self.mask
        before = _ramp(stop, left) - _ramp(start, left)
        after = _ramp(length - start, right) - _ramp(length - stop, right)
        return stop - start + before + after

    def of_run(self, run: Run) -> int:
        first = self.bounds[run.document]
        return self.of(run.document, run.start - first, run.stop - first)

    def of_runs(self, runs: Iterable[Run]) -> int:
        return sum(map(self.of_run, runs))

    def density(self, document: int, position: int) -> int:
        """Keys that one query sees."""
        return self.of(document, position, position + 1)

    def run(self, document: int, start: int, stop: int) -> Run:
        first = self.bounds[document]
        return Run(first + start, first + stop, document)


def imbalance(shares: Sequence[Sequence[Run]], bounds: Sequence[int], mask: Mask) -> float:
    """Work of the slowest rank over the mean."""
    work = Work(bounds, mask)
    works = [work.of_runs(runs) for runs in shares]
    return max(works) * len(works) / sum(works) if sum(works) else 1.0


def make(
    bounds: Sequence[int], ranks: int, mask: Mask, layout: str, slack: float
) -> tuple[str, list[tuple[Run, ...]]]:
    """(name, runs of each rank). ``auto`` takes the first balanced one of contiguous, which moves
    the fewest keys, zigzag and documents."""
    simple = {"contiguous": contiguous, "zigzag": zigzag}
    named = {**simple, "te_zigzag": te_zigzag}
    if layout in named:
        return layout, named[layout](bounds, ranks)
    if layout == "auto":
        for name, function in simple.items():
            shares = function(bounds, ranks)
            if imbalance(shares, bounds, mask) <= 1.0 + slack:
                return name, shares
    from pantile.distributed._documents import documents

    return "documents", documents(bounds, ranks, mask, slack)


def needed_keys(
    runs: Iterable[Run], bounds: Sequence[int], mask: Mask
) -> dict[int, list[tuple[int, int]]]:
    """Ranges of keys that the queries of ``runs`` need, by document, ascending and disjoint."""
    needed: dict[int, list[tuple[int, int]]] = {}
    for run in runs:  # ascending, and so are the starts of their keys
        piece = piece_of(run, bounds, mask)
        ranges = needed.setdefault(run.document, [])
        if ranges and piece.first_key <= ranges[-1][1]:
            first = ranges[-1][0]
            ranges[-1] = (first, max(ranges[-1][1], piece.last_key))
        else:
            ranges.append((piece.first_key, piece.last_key))
    return needed


def rows_of(runs: Iterable[Run]) -> int:
    return sum(run.stop - run.start for run in runs)
