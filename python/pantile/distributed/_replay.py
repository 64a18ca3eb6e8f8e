"""Replays the schedule of a plan on many ranks: times, and whether any rank waits on a cycle.

A rank has two queues, as on a GPU: transfers and attention. A transfer begins when the one before
it is over and what it waits for is computed; it moves when all ranks that it involves have begun
it; attention waits for its transfer. What cannot be finished waits on a cycle, and is named.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from pantile.distributed._layout import Mask, Run, Work, needed_keys
from pantile.distributed._share import segments_of


class Transfer(NamedTuple):
    name: str
    after: int  # index of the attention that must be over; -1: none
    peers: Sequence[int]  # ranks that must have begun it, too
    seconds: float  # from when all have


class Attention(NamedTuple):
    seconds: float
    transfer: int  # index of the one that it waits for; -1: none


class Program(NamedTuple):
    """Of one rank, in the order in which it is issued."""

    transfers: list[Transfer]
    attention: list[Attention]


class Outcome(NamedTuple):
    seconds: float  # of the slowest rank
    busy: float  # mean part of that time in which a rank attends
    waiting: dict[int, str]  # ranks that never finish: the transfer they wait in


class _Rank:
    """What a rank has done."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.moved: list[float] = []  # when its transfers were over
        self.attended: list[float] = []
        self.name = ""  # of the transfer that it has begun
        self.missing = 0  # peers that have not begun it
        self.latest = 0.0  # when the last of those that have, did

    def attend(self) -> None:
        steps = self.program.attention
        while len(self.attended) < len(steps):
            step = steps[len(self.attended)]
            if step.transfer >= len(self.moved):
                return
            begin = self.attended[-1] if self.attended else 0.0
            if step.transfer >= 0:
                begin = max(begin, self.moved[step.transfer])
            self.attended.append(begin + step.seconds)

    def next_transfer(self) -> Transfer | None:
        """If it can begin."""
        steps, at = self.program.transfers, len(self.moved)
        if self.name or at == len(steps) or steps[at].after >= len(self.attended):
            return None
        return steps[at]

    def ready_at(self, step: Transfer) -> float:
        time = self.moved[-1] if self.moved else 0.0
        return time if step.after < 0 else max(time, self.attended[step.after])

    def finish(self) -> None:
        step = self.program.transfers[len(self.moved)]
        self.moved.append(self.latest + step.seconds)
        self.name = ""


def replay(programs: Sequence[Program]) -> Outcome:
    """If rank a is a peer of b in a transfer, b must be one of a."""
    ranks = [_Rank(program) for program in programs]
    begun: dict[str, dict[int, float]] = {}  # by transfer and rank
    ready = list(range(len(ranks)))
    while ready:
        number = ready.pop()
        rank = ranks[number]
        rank.attend()
        step = rank.next_transfer()
        if step is None:
            continue
        rank.latest = time = rank.ready_at(step)
        rank.name, rank.missing = step.name, 0
        times = begun.setdefault(step.name, {})
        times[number] = time
        for peer in step.peers:
            other = times.get(peer)
            if other is None:
                rank.missing += 1
                continue
            rank.latest = max(rank.latest, other)
            waiting = ranks[peer]
            waiting.latest = max(waiting.latest, time)
            waiting.missing -= 1
            if not waiting.missing:
                waiting.finish()
                ready.append(peer)
        if not rank.missing:
            rank.finish()
            ready.append(number)
    waiting_ranks = {r: rank.name for r, rank in enumerate(ranks) if rank.name}
    ends = [max([*rank.moved[-1:], *rank.attended[-1:], 0.0]) for rank in ranks]
    total = max(ends)
    work = sum(step.seconds for program in programs for step in program.attention)
    return Outcome(total, work / (len(ranks) * total) if total else 1.0, waiting_ranks)


def received_rows(
    shares: Sequence[Sequence[Run]], bounds: Sequence[int], mask: Mask
) -> list[dict[int, int]]:
    """Of each rank: how many rows come from which other rank."""
    segments = segments_of(shares)
    starts = [segment.start for segment in segments]
    received: list[dict[int, int]] = []
    for rank, runs in enumerate(shares):
        rows: dict[int, int] = {}
        for ranges in needed_keys(runs, bounds, mask).values():
            for first, last in ranges:
                i = bisect.bisect_right(starts, first) - 1
                while i < len(starts) and starts[i] < last:
                    s = segments[i]
                    part = min(s.stop, last) - max(s.start, first)
                    if part > 0 and s.share != rank:
                        rows[s.share] = rows.get(s.share, 0) + part
                    i += 1
        received.append(rows)
    return received


class Costs(NamedTuple):
    """Seconds, of all heads that a rank has."""

    pair: float  # of a query and a key
    row: float  # of a row of keys that moves
    latency: float  # of a transfer
    split: float  # of each exchange of heads inside a node


def exchange_programs(
    shares: Sequence[Sequence[Run]],
    bounds: Sequence[int],
    mask: Mask,
    received: Sequence[dict[int, int]],
    *,
    inner: int,
    groups: int,
    costs: Costs,
) -> list[Program]:
    """The forward of ``exchange`` with ``groups`` groups of key heads, double buffered, on a mesh
    of ``len(shares)`` by ``inner`` ranks, of which those along the second split the heads."""
    sent: list[dict[int, int]] = [{} for _ in shares]
    for share, rows in enumerate(received):
        for source, count in rows.items():
            sent[source][share] = count
    programs, pairs = [], Work(bounds, mask)
    for share, runs in enumerate(shares):
        others = sorted({*received[share], *sent[share]})
        most = max(sum(received[share].values()), sum(sent[share].values()))
        move = costs.latency + most * costs.row / groups
        work = pairs.of_runs(runs) * costs.pair / groups
        node = range(share * inner, (share + 1) * inner)
        for i in range(inner):
            rank = share * inner + i
            mates = [r for r in node if r != rank]
            peers = [other * inner + i for other in others]
            before = [Transfer(f"split {x}", -1, mates, costs.split) for x in "qkv" if inner > 1]
            first = len(before)
            keys = [Transfer(f"keys {g}", g - 2, peers, move) for g in range(groups)]
            after = [Transfer("join o", groups - 1, mates, costs.split)] if inner > 1 else []
            attention = [Attention(work, first + g) for g in range(groups)]
            programs.append(Program([*before, *keys, *after], attention))
    return programs


def ring_programs(size: int, *, step_seconds: float, move_seconds: float) -> list[Program]:
    programs = []
    for rank in range(size):
        peers = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        transfers = [
            Transfer(f"turn {s}", s - 1, peers, move_seconds) for s in range(size - 1)
        ]  # the buffer of a turn is free when the attention before it is over
        attention = [Attention(step_seconds, s - 1) for s in range(size)]
        programs.append(Program(transfers, attention))
    return programs
