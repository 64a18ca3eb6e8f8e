"""What ranks receive and send in an exchange of keys, and a planner's step that evens it out.

A transfer takes as long as the rank that receives or sends the most, so that the larger of the two
is what layouts of equal work are compared by. All numbers are integers and all orders are fixed:
every rank comes to the same layout.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from pantile.distributed._balance import swap
from pantile.distributed._layout import Mask, Run, Work, needed_keys, rows_of

_QUERY_TILE = 128
_ROUNDS = 3  # the needs of all ranks are counted anew in each
_SWAPS = 128  # of a round
_MOST_RANKS = 512  # for more it would take longer than the rest of the planner
_PARTNERS = 4  # ranks with the least to send that a swap is tried with
_MORE_PARTNERS = 16  # where the rank with the most sends more than a fourth of an all-gather
_HOT_RUNS = 2  # of the rank with the most to send
_MORE_HOT_RUNS = 3
_LEAST_GAIN = 64  # a swap lowers what the rank sends by this part of it, or does not pay


def received_by(runs: Sequence[Run], work: Work) -> int:
    """Rows of others that the rank with these runs needs."""
    needed = needed_keys(sorted(runs), work.bounds, work.mask).values()
    return sum(last - first for ranges in needed for first, last in ranges) - rows_of(runs)


class Needs:
    """How many ranks need a row: a step function of the row."""

    def __init__(self, shares: Sequence[Sequence[Run]], bounds: Sequence[int], mask: Mask) -> None:
        self.received = []
        change: dict[int, int] = {0: 0, bounds[-1]: 0}
        for runs in shares:
            rows = -rows_of(runs)
            for ranges in needed_keys(sorted(runs), bounds, mask).values():
                for first, last in ranges:
                    rows += last - first
                    change[first] = change.get(first, 0) + 1
                    change[last] = change.get(last, 0) - 1
            self.received.append(rows)
        self._rows = sorted(change)
        self._count = list(accumulate(change[row] for row in self._rows))
        steps = ((b - a) * n for (a, b), n in zip(pairwise(self._rows), self._count, strict=False))
        self._sums = [0, *accumulate(steps)]
        self.sent = [sum(map(self.of_run, runs)) for runs in shares]

    def _up_to(self, row: int) -> int:
        i = bisect.bisect_right(self._rows, row) - 1
        return self._sums[i] + (row - self._rows[i]) * self._count[i]

    def of(self, start: int, stop: int) -> int:
        """Copies of these rows that others need, whose holder needs them, too."""
        return self._up_to(stop) - self._up_to(start) - (stop - start)

    def of_run(self, run: Run) -> int:
        return self.of(run.start, run.stop)

    @property
    def most(self) -> int:
        """Rows that a rank receives or sends, of the one with the most."""
        return max(*self.received, *self.sent)


def _ends(run: Run, rows: int) -> tuple[Run, Run]:
    return run._replace(stop=run.start + rows), run._replace(start=run.stop - rows)


def _without(runs: list[Run], run: Run, part: Run) -> list[Run]:
    """``runs`` where ``part``, one end of ``run``, is missing."""
    rest = run._replace(start=part.stop) if part.start == run.start else run._replace(
        stop=part.start
    )  # fmt: skip
    return [other for other in runs if other != run] + ([rest] if rest.start < rest.stop else [])


def level(work: Work, shares: list[list[Run]], slack: float) -> list[list[Run]]:
    """Ranks that send much swap rows which many need for as many which few need.

    Where the work of one would so exceed the mean by more than ``slack``, it returns dense rows for
    sparse ones. None comes to receive more than the larger of what a rank sends after the swap and
    what one received before. Ends where no rank sends more than one receives: a transfer takes as
    long as the larger of the two.
    """
    if len(shares) > _MOST_RANKS:
        return shares
    shares = [list(runs) for runs in shares]
    works = [work.of_runs(runs) for runs in shares]
    most_work = max(*works, int((1.0 + slack) * sum(works) / len(works)), 0)
    for _ in range(_ROUNDS):
        needs = Needs(shares, work.bounds, work.mask)
        for _ in range(_SWAPS):
            if max(needs.sent) <= max(needs.received):
                break
            if not _swap_one(shares, works, needs, work, most_work):
                break
    return shares


class _Swap(NamedTuple):
    """What two ranks have after it."""

    sent: tuple[int, int]
    received: tuple[int, int]
    moved: int  # pairs
    runs: tuple[list[Run], list[Run]]


def _swap_one(
    shares: list[list[Run]], works: list[int], needs: Needs, work: Work, most_work: int
) -> bool:
    """Between the rank that sends the most and the one with which that gains the most."""
    sent, received = needs.sent, needs.received
    a = max(range(len(shares)), key=lambda r: (sent[r], -r))
    partners, hot_count = _PARTNERS, _HOT_RUNS
    if 4 * sent[a] > work.bounds[-1]:
        partners, hot_count = _MORE_PARTNERS, _MORE_HOT_RUNS
    best, partner = None, -1
    least = sent[a] - sent[a] // _LEAST_GAIN  # what the next swap must stay below
    hot_runs = sorted(shares[a], key=lambda run: (-needs.of_run(run), run))[:hot_count]
    for b in heapq.nsmallest(partners, range(len(shares)), key=lambda r: (sent[r], r)):
        for hot, cold in itertools.product(hot_runs, shares[b]):
            rows = _rows_to_swap(needs, hot, cold, sent[a] - sent[b])
            for given, taken in itertools.product(_ends(hot, rows), _ends(cold, rows)):
                less = needs.of_run(given) - needs.of_run(taken)
                if max(sent[a] - less, sent[b] + less) >= least:
                    continue
                runs = [*_without(shares[a], hot, given), taken], [
                    *_without(shares[b], cold, taken), given]  # fmt: skip
                moved = work.of_run(given) - work.of_run(taken)
                excess = works[a] - moved - most_work, works[b] + moved - most_work
                if excess[0] > 0:
                    moved += swap(work, runs[0], runs[1], excess[0], 0.0)
                elif excess[1] > 0:
                    moved -= swap(work, runs[1], runs[0], excess[1], 0.0)
                if max(works[a] - moved, works[b] + moved) > most_work:
                    continue
                sends = sum(map(needs.of_run, runs[0])), sum(map(needs.of_run, runs[1]))
                if max(sends) >= least:
                    continue
                receives = received_by(runs[0], work), received_by(runs[1], work)
                if max(receives) <= max(*received, *sends):
                    best, partner, least = _Swap(sends, receives, moved, runs), b, max(sends)
    if best is None:
        return False
    sent[a], sent[partner] = best.sent
    received[a], received[partner] = best.received
    works[a], works[partner] = works[a] - best.moved, works[partner] + best.moved
    shares[a], shares[partner] = best.runs
    return True


def _rows_to_swap(needs: Needs, hot: Run, cold: Run, gap: int) -> int:
    """As many as let both ranks send alike, a multiple of a query tile; 0: it would not help."""
    hot_rows, cold_rows = hot.stop - hot.start, cold.stop - cold.start
    difference = needs.of_run(hot) // hot_rows - needs.of_run(cold) // cold_rows
    rows = min(hot_rows, cold_rows)
    if difference <= 0:
        return 0
    wanted = gap // (2 * difference)
    if wanted < rows and rows >= _QUERY_TILE:
        return max(wanted // _QUERY_TILE, 1) * _QUERY_TILE
    return rows
