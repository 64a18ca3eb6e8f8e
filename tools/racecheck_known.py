"""Hazards of racecheck that are an order which it does not see, told apart from others.

racecheck takes an arrival at an mbarrier for the order of what the arriving thread did itself. Here
lane 0 arrives for its warp, after __syncwarp() or a named barrier, behind which the reads of the
other lanes are done (PTX ISA, "Memory Consistency Model": causality order goes on through both).
So racecheck reports their reads against the next write of the thread that waits on the mbarrier.
tests/gpu/racecheck_probe.cu shows it: the same reads are clean where each lane arrives, and lane
0's own words are clean where lane 0 arrives. Known is what has all of this in common:

    kernel   one of KERNELS
    kind     write after read
    write    by thread 0, the loader, which alone waits on the mbarrier of what is free again
    read     by a lane other than 0 of another warp

Where several lanes read a word racecheck names one of them: a word that lane 0 reads with others
can be known for that alone. Which barrier stands between the reads and the arrival:

    row terms, LSE     read_row_scale(): __syncwarp() of send_dQ(); raw scores: the barrier that
                       hands over dS, before release_query()
    row terms, delta   dropout, compute_dS(): the same barrier, before release_grad()
    TileInfo           math warps: __syncwarp() of write_output(), then o_full; the storer:
                       __syncwarp() before q_empty, o_empty; and the ring is longer than the loader
                       may run ahead
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

# Row terms of the backward, which integer sums, softcap and dropout read by ordinary loads;
# descriptions of tiles of the forward; kernels that are compiled at run time have both.
KERNELS = (
    r"pantile::hopper::backward_paired<.*\(pantile::hopper::SumKind\)1>",
    r"pantile::hopper::forward_kernel<",
    r"^pantile_variant\+",
)
TEXT = (
    "racecheck takes an arrival at an mbarrier for the order of what that thread did itself.",
    "Where lane 0 arrives for its warp, behind `__syncwarp()` or a named barrier, it reports the",
    "reads of the other lanes against the next write of the loader, which waits on that mbarrier.",
    "Such hazards, of the kernels and threads that `tools/racecheck_known.py` names, are counted",
    "as known; any other one fails.",
)
LOADER = 0
WARP = 32

_ACCESS = r"=+ +(Read|Write) Thread \((\d+),(\d+),(\d+)\) at (.*)\n"
_HAZARD = re.compile(
    r"=+ \w+: Potential (\w+) hazard detected at __shared__ (\w+) in block \([\d,]+\) :\n"
    + 2 * _ACCESS
    + r"(?:=+ +(?:Current Value|Device Frame|Saved host|Host Frame).*\n)*(?:=+ *\n)?"
)
_SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors, (\d+) warnings\)")


@dataclass(frozen=True)
class Hazard:
    kind: str  # WAR, RAW, WAW
    accesses: tuple[tuple[str, int, str], ...]  # Read or Write, thread, where

    def of(self, name: str) -> tuple[int, str] | None:
        found = [(thread, where) for what, thread, where in self.accesses if what == name]
        return found[0] if len(found) == 1 else None


def _hazard(match: re.Match) -> Hazard:
    kind, _, *rest = match.groups()
    accesses = []
    for what, x, y, z, where in (rest[:5], rest[5:]):
        thread = int(x) if (y, z) == ("0", "0") else -1  # blocks here have one dimension
        accesses.append((what, thread, where.strip()))
    return Hazard(kind, tuple(accesses))


def is_known(hazard: Hazard) -> bool:
    read, write = hazard.of("Read"), hazard.of("Write")
    if hazard.kind != "WAR" or read is None or write is None:
        return False
    kernels = [k for k in KERNELS if all(re.search(k, where) for _, where in (read, write))]
    return bool(kernels) and write[0] == LOADER and read[0] >= WARP and read[0] % WARP != 0


@dataclass(frozen=True)
class Report:
    known: int
    others: Counter  # of (kind, one access, the other), without threads
    complete: bool  # as many as racecheck counted
    text: str  # the tool's, without the known ones


def read(text: str) -> Report:
    known, others = 0, Counter()
    kept, end = [], 0
    for match in _HAZARD.finditer(text):
        hazard = _hazard(match)
        if is_known(hazard):
            known += 1
            kept.append(text[end : match.start()])
            end = match.end()
        else:
            places = (f"{what} {where}" for what, _, where in hazard.accesses)
            others[(hazard.kind, *places)] += 1
    kept.append(text[end:])
    counted = sum(sum(map(int, pair)) for pair in _SUMMARY.findall(text))
    complete = bool(_SUMMARY.search(text)) and counted == known + others.total()
    return Report(known, others, complete, "".join(kept))
