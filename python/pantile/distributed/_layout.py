"""Which rank holds which tokens: pure functions of the lengths, equal on every rank.

A run is a range ``(start, stop, document)`` of tokens of one document, in global positions. A
layout is one tuple of runs for each rank, in ascending order.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pantile._masks import UNBOUNDED, visible_pairs

# Keys of a window start at a multiple of this many keys of their document, where the tiles of every
# kernel start: a row then meets the tiles that it meets in one process.
KEY_TILE = 768
_QUERY_TILE = 128  # runs are cut at multiples of this where the lengths leave the choice
_CHUNKS_PER_RANK = 16
_LARGEST_CHUNK = 4096
_SMALLEST_CHUNK = 16

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

    def pairs(self) -> int:
        queries, keys = self.stop - self.start, self.last_key - self.first_key
        return visible_pairs(queries, keys, self.left, self.right)


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
    while step > 1 and total < parts * step * _CHUNKS_PER_RANK:
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


def chunk_tokens(total: int, ranks: int) -> int:
    """About a sixteenth of a share, a power of two."""
    share = max(total // ranks // _CHUNKS_PER_RANK, 1)
    return min(1 << (share.bit_length() - 1), _LARGEST_CHUNK)


def _chunks(
    bounds: Sequence[int], ranks: int, mask: Mask, chunk: int
) -> list[tuple[int, int, int, int]]:
    """(-work, start, stop, document), most work first. A chunk with more than a fourth of a rank's
    work is cut."""

    def add(start: int, stop: int, document: int) -> None:
        if causal:  # what the line below gives, in a tenth of its time
            tokens = stop - start
            work = tokens * (start - bounds[document]) + tokens * (tokens + 1) // 2
        else:
            work = piece_of(Run(start, stop, document), bounds, mask).pairs()
        chunks.append((-work, start, stop, document))

    causal = mask == Mask(UNBOUNDED, 0)
    chunks: list[tuple[int, int, int, int]] = []
    for document in range(len(bounds) - 1):
        end = bounds[document + 1]
        for start in range(bounds[document], end, chunk):
            add(start, min(start + chunk, end), document)
    large = -sum(item[0] for item in chunks) // (4 * ranks) + 1
    whole, chunks = chunks, []
    for negative, start, stop, document in whole:
        parts = min(-(negative // large), max((stop - start) // _SMALLEST_CHUNK, 1))
        if parts <= 1:
            chunks.append((negative, start, stop, document))
            continue
        step = -((start - stop) // parts)
        for begin in range(start, stop, step):
            add(begin, min(begin + step, stop), document)
    chunks.sort()
    return chunks


def _least_loaded(
    least: list, load: list, room: list, holders: set, slack: float, candidates: int
) -> int:
    """A rank with about the least work, if possible one that holds a part of the document."""
    taken: list[tuple[float, int]] = []
    chosen = -1
    while least and len(taken) < candidates:
        known, rank = least[0]
        if not room[rank]:
            heapq.heappop(least)
        elif known != load[rank]:  # entries are renewed when they come up
            heapq.heapreplace(least, (load[rank], rank))
        elif taken and known > taken[0][0] + slack:
            break
        else:
            taken.append(heapq.heappop(least))
            if rank in holders:
                chosen = rank
                break
    for entry in taken:
        heapq.heappush(least, entry)
    return taken[0][1] if chosen < 0 else chosen


def documents(
    bounds: Sequence[int], ranks: int, mask: Mask, chunk: int, slack: float
) -> list[tuple[Run, ...]]:
    """Equal tokens and equal work: the chunk with the most work first.

    A chunk goes to the rank that got the last chunk of its document if that rank's expected final
    work exceeds the mean by at most ``slack``; otherwise to one with about the least work. What is
    expected: its work so far, and the mean of the chunks that are left on the tokens that it lacks.
    A chunk that finds less room than it has tokens is cut.
    """
    chunks = _chunks(bounds, ranks, mask, chunk)
    total = bounds[-1]
    left_work, left_tokens = -sum(item[0] for item in chunks), total
    limit = (1.0 + slack) * left_work / ranks
    room = [total // ranks + (r < total % ranks) for r in range(ranks)]
    load = [0.0] * ranks
    held: list[list[Run]] = [[] for _ in range(ranks)]
    least = [(0.0, r) for r in range(ranks) if room[r]]
    candidates = max(4, min(64, 4096 // ranks))  # what is looked at costs time
    last_rank = [-1] * len(bounds)
    holders: list[set[int]] = [set() for _ in bounds]
    for negative, start, stop, document in chunks:
        density = -negative / (stop - start)
        while start < stop:
            rank, tokens = last_rank[document], stop - start
            if rank >= 0:
                lacks = room[rank] - tokens
                rest = lacks * left_work / left_tokens if lacks > 0 else 0.0
                if not room[rank] or load[rank] + density * tokens + rest > limit:
                    rank = -1
            if rank < 0:
                rank = _least_loaded(
                    least, load, room, holders[document], slack * limit, candidates
                )
            holders[document].add(rank)
            tokens = min(tokens, room[rank])
            # The end of a chunk that is cut: it needs the keys of the start anyway.
            held[rank].append(Run(stop - tokens, stop, document))
            stop -= tokens
            last_rank[document] = rank
            load[rank] += density * tokens
            room[rank] -= tokens
            left_work -= density * tokens
            left_tokens -= tokens
    return [merged(runs) for runs in held]


def work_of(runs: Iterable[Run], bounds: Sequence[int], mask: Mask) -> int:
    """Visible pairs of one head."""
    return sum(piece_of(run, bounds, mask).pairs() for run in runs)


def imbalance(shares: Sequence[tuple[Run, ...]], bounds: Sequence[int], mask: Mask) -> float:
    """Work of the slowest rank over the mean."""
    works = [work_of(runs, bounds, mask) for runs in shares]
    return max(works) * len(works) / sum(works) if sum(works) else 1.0


def make(
    bounds: Sequence[int], ranks: int, mask: Mask, layout: str, chunk: int | None, slack: float
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
    chunk = chunk_tokens(bounds[-1], ranks) if chunk is None else chunk
    return "documents", documents(bounds, ranks, mask, chunk, slack)


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
