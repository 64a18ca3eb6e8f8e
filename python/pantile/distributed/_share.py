"""What one share computes and what it exchanges: pieces, ranges of keys, index arrays.

Everything here is made on the host, once a plan, from lengths alone; the index arrays go to the
device of the tensors at first use.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from pantile.distributed._layout import Mask, Run, needed_keys, piece_of, rows_of

Tensor = torch.Tensor


class Segment(NamedTuple):
    """A part of a run: where its tokens are."""

    start: int  # global
    stop: int
    share: int
    row: int  # of ``start`` in that share


class Call(NamedTuple):
    """Consecutive pieces of one window: one packed call."""

    rows: tuple[int, int]  # of the share's queries
    keys: tuple[int, int]  # of the share's key list
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    left: int
    right: int


def segments_of(shares: Sequence[Sequence[Run]]) -> list[Segment]:
    """All runs in global order."""
    found = []
    for share, runs in enumerate(shares):
        row = 0
        for run in runs:
            found.append(Segment(run.start, run.stop, share, row))
            row += run.stop - run.start
    found.sort()
    return found


def ranges_to_rows(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """int64: all numbers of the ranges (first, last + 1), one range after the other."""
    pairs = torch.tensor(list(ranges), dtype=torch.int64).reshape(-1, 2)
    lengths = pairs[:, 1] - pairs[:, 0]
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(pairs[:, 0] - (ends - lengths), lengths, output_size=total)
    return torch.arange(total) + shift


def levels(index: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Splits sums over ``index`` into steps without repetitions: (source rows, target rows) each.

    Step i takes the i-th occurrence of every target, so that the sum has one order, whatever the
    device does in parallel. The targets of a step ascend.
    """
    order = torch.argsort(index, stable=True)
    targets = index[order]
    count = torch.arange(len(index))
    is_first = torch.ones(len(index), dtype=torch.bool)
    is_first[1:] = targets[1:] != targets[:-1]
    occurrence = count - torch.cummax(torch.where(is_first, count, 0), 0).values
    steps = int(occurrence.max()) + 1 if len(index) else 0
    return [(order[occurrence == i], targets[occurrence == i]) for i in range(steps)]


class Share:
    """Share ``mine`` of ``shares``: one a rank, or one a group of ranks that split the heads.

    ``queries``: of which runs of mine it computes the attention; default all. It must hold those
    that see keys of other shares.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[Run]],
        mine: int,
        bounds: Sequence[int],
        mask: Mask,
        queries: Sequence[Run] | None = None,
    ) -> None:
        self.shares, self.mine, self.bounds, self.mask = shares, mine, bounds, mask
        self.count = len(shares)
        self.rows = [rows_of(runs) for runs in shares]
        self.most_rows = max(self.rows)
        self.queries = shares[mine] if queries is None else queries
        self.pieces = [piece_of(run, bounds, mask) for run in self.queries]
        self.ring_steps: dict[int, list] = {}  # by the share whose keys they use

    # ---- what is computed

    @functools.cached_property
    def calls(self) -> list[Call]:
        calls: list[Call] = []
        row = key = 0
        for piece in self.pieces:
            rows, keys = piece.stop - piece.start, piece.last_key - piece.first_key
            if not calls or calls[-1][4:] != (piece.left, piece.right):
                calls.append(Call((row, row), (key, key), [0], [0], piece.left, piece.right))
            call = calls[-1]
            call.cu_seqlens_q.append(call.cu_seqlens_q[-1] + rows)
            call.cu_seqlens_k.append(call.cu_seqlens_k[-1] + keys)
            row, key = row + rows, key + keys
            calls[-1] = call._replace(rows=(call.rows[0], row), keys=(call.keys[0], key))
        return calls

    @property
    def key_count(self) -> int:
        """Rows of the key list: a key counts once for each piece that needs it."""
        return sum(piece.last_key - piece.first_key for piece in self.pieces)

    # ---- what is exchanged

    @functools.cached_property
    def _segments(self) -> list[Segment]:
        return segments_of(self.shares)

    @functools.cached_property
    def received(self) -> list[Segment]:
        """Needed parts of runs, by share, ascending: the rows that the exchange delivers."""
        starts = [segment.start for segment in self._segments]
        parts = []
        needed = needed_keys(self.queries, self.bounds, self.mask)
        for first, last in (key_range for ranges in needed.values() for key_range in ranges):
            i = bisect.bisect_right(starts, first) - 1
            while i < len(starts) and starts[i] < last:
                s = self._segments[i]
                start, stop = max(s.start, first), min(s.stop, last)
                if start < stop:
                    parts.append(Segment(start, stop, s.share, s.row + start - s.start))
                i += 1
        parts.sort(key=lambda s: (s.share, s.start))
        return parts

    @functools.cached_property
    def receive_rows(self) -> list[int]:
        """From each share."""
        return self._rows_by_share(self.received)

    @functools.cached_property
    def sent(self) -> list[Segment]:
        """Parts of my runs that others need (``share``: who), by share, ascending."""
        mine = {}
        row = 0
        for run in self.shares[self.mine]:
            mine.setdefault(run.document, []).append((run, row))
            row += run.stop - run.start
        parts = []
        for share, runs in enumerate(self.shares):
            runs = self.queries if share == self.mine else runs
            wanted = [run for run in runs if run.document in mine]
            for document, ranges in needed_keys(wanted, self.bounds, self.mask).items():
                for first, last in ranges:
                    for run, row in mine[document]:
                        start, stop = max(run.start, first), min(run.stop, last)
                        if start < stop:
                            parts.append(Segment(start, stop, share, row + start - run.start))
        parts.sort(key=lambda s: (s.share, s.start))
        return parts

    @functools.cached_property
    def send_rows(self) -> list[int]:
        return self._rows_by_share(self.sent)

    def _rows_by_share(self, parts: Iterable[Segment]) -> list[int]:
        rows = [0] * self.count
        for part in parts:
            rows[part.share] += part.stop - part.start
        return rows

    @functools.cached_property
    def needed_fraction(self) -> float:
        """Rows of other shares that the exchange delivers, as a part of all that they hold."""
        others = self.bounds[-1] - self.rows[self.mine]
        return (sum(self.receive_rows) - self.receive_rows[self.mine]) / max(others, 1)

    # ---- index arrays

    @functools.cached_property
    def send_index(self) -> Tensor:
        """My rows in the order in which the exchange sends them."""
        return ranges_to_rows((s.row, s.row + s.stop - s.start) for s in self.sent)

    @functools.cached_property
    def needed_index(self) -> Tensor:
        """Of the key list: rows of the buffer that the exchange delivers."""
        positions, position = [], 0
        for s in self.received:
            positions.append(position)
            position += s.stop - s.start
        return self._key_index(self.received, positions)

    @functools.cached_property
    def gathered_index(self) -> Tensor:
        """Of the key list: rows of the buffer that an all-gather of ``most_rows`` a share makes."""
        positions = [s.share * self.most_rows + s.row for s in self._segments]
        return self._key_index(self._segments, positions)

    def _key_index(self, segments: list[Segment], positions: list[int]) -> Tensor:
        order = sorted(range(len(segments)), key=segments.__getitem__)
        starts = torch.tensor([segments[i].start for i in order], dtype=torch.int64)
        shift = torch.tensor([positions[i] for i in order], dtype=torch.int64) - starts
        keys = ranges_to_rows((piece.first_key, piece.last_key) for piece in self.pieces)
        return keys + shift[torch.searchsorted(starts, keys, right=True) - 1]

    @functools.cached_property
    def key_levels(self) -> list[tuple[Tensor, Tensor]]:
        """How gradients of the key list are added to those of the rows that were received."""
        return levels(self.needed_index)

    @functools.cached_property
    def touched_rows(self) -> Tensor:
        """My rows that gradients come back for, ascending."""
        return self.owner_levels[0][1] if self.owner_levels else torch.empty(0, dtype=torch.int64)

    @functools.cached_property
    def touched_levels(self) -> list[tuple[Tensor, Tensor]]:
        """As ``owner_levels``, targets counted in ``touched_rows``."""
        return [(a, torch.searchsorted(self.touched_rows, b)) for a, b in self.owner_levels]

    @functools.cached_property
    def owner_levels(self) -> list[tuple[Tensor, Tensor]]:
        """How gradients that come back are added to those of my rows: in the order of shares."""
        return levels(self.send_index)
