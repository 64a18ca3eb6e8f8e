"""Timing. Contenders are interleaved in one process so that the drift of a power-limited GPU
cancels: the order rotates every round, and only ratios within one run mean anything."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any current GPU


@dataclass
class Contender:
    """`call(n)` enqueues n calls. `wall` is for work on a stream that CUDA events of torch's
    current stream cannot see: it is timed by the clock, with `wait` to drain it."""

    name: str
    call: Callable[[int], object]
    wall: bool = False
    wait: Callable[[], object] = torch.cuda.synchronize
    milliseconds: list[float] = field(default_factory=list)

    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def percentile(self, p: float) -> float:
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, round(p * (len(ordered) - 1)))]


def _back_to_back(contender: Contender, calls: int) -> float:
    contender.call(1)
    if contender.wall:
        contender.wait()
        started = time.perf_counter()
        contender.call(calls)
        contender.wait()
        return (time.perf_counter() - started) * 1e3 / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    contender.call(calls)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def _flushed(contender: Contender, calls: int, flush: torch.Tensor) -> float:
    if contender.wall:
        total = 0.0
        for _ in range(calls):
            flush.zero_()
            torch.cuda.synchronize()
            started = time.perf_counter()
            contender.call(1)
            contender.wait()
            total += time.perf_counter() - started
        return total * 1e3 / calls
    events = []
    for _ in range(calls):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        contender.call(1)
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def interleave(
    contenders: list[Contender], *, rounds: int = 5, round_ms: float = 12.0, flushed: bool = False
) -> None:
    """Fills `milliseconds` of every contender with one figure per round. A round of one contender
    lasts about `round_ms`. Results of earlier calls are dropped."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flushed else None
    calls = {}
    for contender in contenders:
        contender.milliseconds = []
        contender.call(2)  # first-call work: module load, handles, attributes
        contender.wait()
        once = max(_back_to_back(contender, 3), 1e-3)
        calls[contender.name] = max(3, min(200, int(round_ms / once)))
    for i in range(rounds):
        shift = i % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            if flush is not None:
                value = _flushed(contender, min(10, calls[contender.name]), flush)
            else:
                value = _back_to_back(contender, calls[contender.name])
            contender.milliseconds.append(value)


def gpu_state() -> dict:
    """Clocks, power and temperature as the driver reports them now; empty when it does not."""
    fields = ["name", "driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]
    try:
        text = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (x.strip() for x in text.splitlines()[0].split(",")), strict=True))


def commit() -> str:
    """Commit of the working tree, with '+' when it has changes. Outside git PANTILE_COMMIT says it,
    or it is 'unknown'."""
    if "PANTILE_COMMIT" in os.environ:
        return os.environ["PANTILE_COMMIT"]
    try:

        def git(*words: str) -> str:
            return subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True
            ).stdout

        return git("rev-parse", "--short", "HEAD").strip() + (
            "+" if git("diff", "HEAD", "--stat") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
