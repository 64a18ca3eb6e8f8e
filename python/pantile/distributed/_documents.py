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
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from pantile.distributed._layout import Mask, Run, Work, merged, needed_keys, rows_of

_QUERY_TILE = 128
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
        _even_out(work, shares, slack / 2)
    layouts = [[merged(runs) for runs in shares] for shares in beginnings]
    if len(layouts) == 1:
        return layouts[0]
    return min(layouts, key=lambda shares: _most_received(shares, bounds, mask))


def _most_received(shares: Sequence[Sequence[Run]], bounds: Sequence[int], mask: Mask) -> int:
    """Rows of others that the rank with the most of them needs."""
    most = 0
    for runs in shares:
        needed = needed_keys(runs, bounds, mask).values()
        rows = sum(last - first for ranges in needed for first, last in ranges)
        most = max(most, rows - rows_of(runs))
    return most


def _rooms(total: int, ranks: int) -> list[int]:
    """Tokens of each rank."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def _crossing(function: Callable[[int], int], target: float, most: int) -> int:
    """The count from 0 to ``most`` at which a rising function is nearest to ``target``.

    False position, exact in one step where the function is linear, and halves in turn. Where it
    rises and falls, one of the places where it passes the target.
    """
    low, high = 0, most
    low_value, high_value = function(low), function(high)
    if low_value >= target:
        return low
    if high_value < target:
        return high
    linear = True
    while high - low > 1:
        middle = (low + high) // 2
        if linear:
            part = (target - low_value) / (high_value - low_value)
            middle = min(max(low + round(part * (high - low)), low + 1), high - 1)
        linear = not linear
        value = function(middle)
        if value < target:
            low, low_value = middle, value
        else:
            high, high_value = middle, value
            if value == target:
                break
    return high if high_value - target <= target - low_value else low


def _rounded(function: Callable[[int], int], count: int, most: int, error: float) -> int:
    """``count`` at a multiple of a query tile, or of less where the function would change by more
    than ``error``."""
    step, value = _QUERY_TILE, function(count)
    while step > 1:
        near = min((count + step // 2) // step * step, most)
        if abs(function(near) - value) <= error:
            return near
        step //= 2
    return count


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
        count = _crossing(pairs, wanted, most)
        if count == rest.size(dense) < room and pairs(count) < wanted:
            keep(rest.take_end(dense, count))  # more dense tokens are needed
            continue
        count = _rounded(pairs, count, most, error)
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


# ---- the exchange


def _swap(work: Work, much: list[Run], little: list[Run], wanted: float, error: float) -> int:
    """Moves about ``wanted`` pairs from one share to the other for equally many tokens; returns
    how many pairs it moved."""

    def start_density(run: Run) -> int:
        return work.density(run.document, run.start - work.bounds[run.document])

    def end_density(run: Run) -> int:
        return work.density(run.document, run.stop - 1 - work.bounds[run.document])

    much.sort(key=lambda run: (end_density(run), run))
    little.sort(key=lambda run: (-start_density(run), run))
    given: list[Run] = []
    taken: list[Run] = []
    moved, done = 0, False
    while much and little and not done:
        dense, sparse = much.pop(), little.pop()
        most = count = min(dense.stop - dense.start, sparse.stop - sparse.start)

        def gain(count: int, dense=dense, sparse=sparse) -> int:
            given = dense._replace(start=dense.stop - count)
            taken = sparse._replace(stop=sparse.start + count)
            return work.of_run(given) - work.of_run(taken)

        done = moved + gain(most) >= wanted
        if done:
            count = _rounded(gain, _crossing(gain, wanted - moved, most), most, error)
        moved += gain(count)
        given.append(dense._replace(start=dense.stop - count))
        taken.append(sparse._replace(stop=sparse.start + count))
        much.append(dense._replace(stop=dense.stop - count))
        little.append(sparse._replace(start=sparse.start + count))
        for runs in (given, taken, much, little):
            if runs[-1].start == runs[-1].stop:
                runs.pop()
    much += taken
    little += given
    return moved


def _even_out(work: Work, shares: list[list[Run]], slack: float) -> None:
    """Every exchange settles a rank: the one with too much gets the mean, or the other one, which
    may get ``slack`` more than that."""
    works = [work.of_runs(runs) for runs in shares]
    mean = sum(works) / len(works)
    allowed = slack * mean
    much = [(mean - has, r) for r, has in enumerate(works) if has > mean + allowed]
    little = [(has - mean, r) for r, has in enumerate(works) if has < mean]
    heapq.heapify(much)
    heapq.heapify(little)
    while much and little:
        (excess, a), (lack, b) = heapq.heappop(much), heapq.heappop(little)
        wanted = min(-excess, allowed - lack)
        moved = _swap(work, shares[a], shares[b], wanted, allowed / 4)
        if moved <= 0:  # a single token is too much
            continue
        if excess + moved < -allowed:
            heapq.heappush(much, (excess + moved, a))
        if lack + moved < 0 and wanted < allowed - lack:
            heapq.heappush(little, (lack + moved, b))
