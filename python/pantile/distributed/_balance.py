"""The exchange of equal tokens, which evens out the work of ranks; what cuts are found with."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from pantile.distributed._layout import Run, Work

_QUERY_TILE = 128


def crossing(function: Callable[[int], int], target: float, most: int) -> int:
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


def rounded(function: Callable[[int], int], count: int, most: int, error: float) -> int:
    """``count`` at a multiple of a query tile, or of less where the function would change by more
    than ``error``."""
    step, value = _QUERY_TILE, function(count)
    while step > 1:
        near = min((count + step // 2) // step * step, most)
        if abs(function(near) - value) <= error:
            return near
        step //= 2
    return count


def swap(work: Work, much: list[Run], little: list[Run], wanted: float, error: float) -> int:
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
            count = rounded(gain, crossing(gain, wanted - moved, most), most, error)
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


def even_out(work: Work, shares: list[list[Run]], slack: float) -> None:
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
        moved = swap(work, shares[a], shares[b], wanted, allowed / 4)
        if moved <= 0:  # a single token is too much
            continue
        if excess + moved < -allowed:
            heapq.heappush(much, (excess + moved, a))
        if lack + moved < 0 and wanted < allowed - lack:
            heapq.heappush(little, (lack + moved, b))
