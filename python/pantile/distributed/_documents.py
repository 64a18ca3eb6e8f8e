"""The layout ``documents``: equal tokens and equal work on every rank, and few keys to receive.

The density of a token is the number of keys that it sees. Every rank gets equally many tokens and,
up to the slack, equally many visible pairs, so that it mixes dense tokens with sparse ones. The mix
decides what it receives: the end of a long document needs all keys before it; whole documents need
no keys of others.

1. The sweep. Rank after rank takes tokens from two sides: the end of the densest document, and
   short documents in the order of the pack, then starts of long ones, the sparsest first. They are
   divided so that the rank has its part of the work. The densest ends so go together with documents
   that need no transfer, and the sum of what both sides need stays small on every rank.
   For few ranks there is a second beginning: whole documents, the most work first, to the rank with
   the least work that has room.
2. The exchange. A rank with too much work and one with too little swap equally many tokens, dense
   ones for sparse ones, until one of them has enough. Between swapping nothing and swapping all,
   the work of each passes every value between the two, so that this ends for every mask.
3. The levelling (``_traffic``). Who holds the start of a long document sends it to all that hold
   later parts: ranks that send much swap such rows for rows that few need.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pantile.distributed._balance import crossing, even_out, rounded
from pantile.distributed._layout import Mask, Run, Work, merged
from pantile.distributed._traffic import Needs, level

_SHORT = 0.5  # of a share: documents up to this length are not cut for their density
_FEW = 64  # ranks for which whole documents are tried as well


def documents(bounds: Sequence[int], ranks: int, mask: Mask, slack: float) -> list[tuple[Run, ...]]:
    """Runs of each rank; the work of none exceeds the mean by more than ``slack``, or by that of
    one token."""
    work = Work(bounds, mask)
    beginnings = [_sweep(work, ranks, slack / 4)]
    if ranks <= _FEW:
        beginnings.append(_whole_documents(work, ranks))
    for shares in beginnings:
        even_out(work, shares, slack / 2)
    leveled = [level(work, shares, 0.75 * slack) for shares in beginnings]
    layouts = [[merged(runs) for runs in shares] for shares in leveled]
    if len(layouts) == 1:
        return layouts[0]
    return min(layouts, key=lambda shares: Needs(shares, bounds, mask).most)


def _rooms(total: int, ranks: int) -> list[int]:
    """Tokens of each rank."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


# ---- the beginnings


class _Rest:
    """What no rank holds yet: of each document one range."""

    def __init__(self, work: Work, short: float) -> None:
        self.work = work
        self.start, self.stop = [0] * len(work.lengths), list(work.lengths)
        self._short = [i for i, length in enumerate(self.stop) if 0 < length <= short][::-1]
        long = [i for i, length in enumerate(self.stop) if length > short]
        # Entries of a heap: (its order, document, the position that they are about).
        self._ends = [(-work.density(i, self.stop[i] - 1), i, self.stop[i]) for i in long]
        self._starts = [(work.density(i, 0), i, 0) for i in long]
        heapq.heapify(self._ends)
        heapq.heapify(self._starts)

    def size(self, i: int) -> int:
        return self.stop[i] - self.start[i]

    def densest(self) -> int:
        """The long document with the densest end; -1: none is left."""
        return self._first(self._ends, self.stop)

    def sparsest(self) -> int:
        """The next short document, or the long one with the sparsest start."""
        while self._short and not self.size(self._short[-1]):
            self._short.pop()
        return self._short[-1] if self._short else self._first(self._starts, self.start)

    def _first(self, heap: list[tuple[int, int, int]], now: list[int]) -> int:
        while heap and (now[heap[0][1]] != heap[0][2] or not self.size(heap[0][1])):
            heapq.heappop(heap)
        return heap[0][1] if heap else -1

    def take_end(self, i: int, count: int) -> Run:
        self.stop[i] -= count
        if self.size(i):
            density = self.work.density(i, self.stop[i] - 1)
            heapq.heappush(self._ends, (-density, i, self.stop[i]))
        return self.work.run(i, self.stop[i], self.stop[i] + count)

    def take_start(self, i: int, count: int) -> Run:
        self.start[i] += count
        if self.size(i):
            heapq.heappush(self._starts, (self.work.density(i, self.start[i]), i, self.start[i]))
        return self.work.run(i, self.start[i] - count, self.start[i])


def _part(rest: _Rest, room: int, wanted: float, error: float) -> list[Run]:
    """``room`` tokens with about ``wanted`` pairs."""
    work, runs = rest.work, []

    def keep(run: Run) -> None:
        nonlocal room, wanted
        runs.append(run)
        room -= run.stop - run.start
        wanted -= work.of_run(run)

    while room:
        dense, sparse = rest.densest(), rest.sparsest()
        if dense < 0 or (dense == sparse and rest.size(dense) <= room):
            keep(rest.take_start(sparse, min(room, rest.size(sparse))))
            continue
        start, stop, available = rest.start[sparse], rest.stop[dense], rest.size(sparse)
        tokens, most = room, min(room, rest.size(dense))

        def pairs(count, dense=dense, sparse=sparse, start=start, stop=stop,
                  tokens=tokens, available=available):  # fmt: skip
            """Of ``count`` tokens of the dense end and the others of the sparse start."""
            others = min(tokens - count, available)
            return work.of(dense, stop - count, stop) + work.of(sparse, start, start + others)

        if 0 < room - available <= most and pairs(room - available) >= wanted:
            keep(rest.take_start(sparse, available))  # more sparse tokens are needed
            continue
        count = crossing(pairs, wanted, most)
        if count == rest.size(dense) < room and pairs(count) < wanted:
            keep(rest.take_end(dense, count))  # more dense tokens are needed
            continue
        count = rounded(pairs, count, most, error)
        if count:
            keep(rest.take_end(dense, count))
        if room and rest.size(sparse):
            keep(rest.take_start(sparse, min(room, rest.size(sparse))))
    return runs


def _sweep(work: Work, ranks: int, slack: float) -> list[list[Run]]:
    tokens = work.bounds[-1]
    left = total = sum(work.of(i, 0, length) for i, length in enumerate(work.lengths))
    rest, shares = _Rest(work, _SHORT * tokens / ranks), []
    for room in _rooms(tokens, ranks):
        wanted = left * room / tokens if tokens else 0.0
        shares.append(_part(rest, room, wanted, slack * total / ranks))
        left -= work.of_runs(shares[-1])
        tokens -= room
    return shares


def _whole_documents(work: Work, ranks: int) -> list[list[Run]]:
    """The most work first, to the rank with the least that has room; cut where none has."""
    room, load = _rooms(work.bounds[-1], ranks), [0] * ranks
    shares: list[list[Run]] = [[] for _ in room]
    works = [work.of(i, 0, length) for i, length in enumerate(work.lengths)]
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        left = work.lengths[i]
        while left:
            fitting = [r for r in range(ranks) if room[r] >= left]
            if fitting:
                rank = min(fitting, key=lambda r: (load[r], r))
            else:
                rank = max(range(ranks), key=lambda r: (room[r], -r))
            tokens = min(room[rank], left)
            run = work.run(i, left - tokens, left)
            shares[rank].append(run)
            load[rank] += work.of_run(run)
            room[rank] -= tokens
            left -= tokens
    return shares
