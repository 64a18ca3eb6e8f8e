"""Timing. Contenders are interleaved in one process so that the drift of a power-limited GPU
cancels: the order rotates every round, and only ratios within one run mean anything."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 * 2**20  # several times the L2 of any current GPU
MONITORED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")  # MHz, MHz, W, Celsius


def drained() -> None:
    """What waiting means for work that is done when its call returns."""


@dataclass
class Contender:
    """`call(n)` enqueues n calls. `wall` is for work that CUDA events of torch's current stream
    cannot see (the CPU, another library's stream): it is timed by the clock, with `wait` to drain
    it. `answer()` gives what one call computes, o or (dq, dk, dv) as [batch, seq, heads, dim] or
    packed, and `inputs()` (q, k, v, dO) where they are not those of the case (check.py)."""

    name: str
    call: Callable[[int], object]
    wall: bool = False
    wait: Callable[[], object] = torch.cuda.synchronize
    answer: Callable[[], tuple] | None = None
    inputs: Callable[[], tuple] | None = None
    milliseconds: list[float] = field(default_factory=list)  # of one call, one figure a round

    def median(self) -> float:
        return statistics.median(self.milliseconds)

    def percentile(self, p: float) -> float:
        ordered = sorted(self.milliseconds)
        return ordered[min(len(ordered) - 1, round(p * (len(ordered) - 1)))]


def repeat(call: Callable[[], object]) -> Callable[[int], None]:
    def loop(n: int) -> None:
        for _ in range(n):
            call()

    return loop


def on_cpu(
    name: str, call: Callable[[], object], answer: Callable[[], tuple] | None = None
) -> Contender:
    return Contender(name, repeat(call), wall=True, wait=drained, answer=answer)


def captured(calls: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, which have run on the stream once before."""
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        calls()
    return graph


def in_graph(make: Callable[[], Contender | str]) -> Contender | str:
    """Replays of a graph of one call of the contender that ``make`` gives, or why there is none.
    It is made on the stream of the graph: autograd runs a backward on the stream of its forward.
    The answer is what a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = make()
    if isinstance(made, str):
        return made
    if made.wall or made.answer is None:
        return "its calls are not on a stream that torch captures"
    answer = made.answer
    kept: list[tuple] = []

    def call() -> None:
        kept[:] = [answer()]

    graph = captured(call, stream)

    def replayed() -> tuple:
        graph.replay()
        return kept[0]

    return Contender(made.name, repeat(graph.replay), answer=replayed)


def _timed(contender: Contender, calls: int) -> Callable[[], float]:
    """Runs calls; what tells the milliseconds of one, when all work is done."""
    if contender.wall:
        contender.wait()
        started = time.perf_counter()
        contender.call(calls)
        contender.wait()
        milliseconds = (time.perf_counter() - started) * 1e3 / calls
        return lambda: milliseconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    contender.call(calls)
    end.record()
    return lambda: begin.elapsed_time(end) / calls


def _back_to_back(contender: Contender, calls: int) -> float:
    contender.call(1)
    timed = _timed(contender, calls)
    contender.wait()
    return timed()


def _flushed(contender: Contender, calls: int, flush: torch.Tensor) -> float:
    """Call by call, each after a write that throws its operands out of the L2."""
    timed = []
    for _ in range(calls):
        flush.zero_()
        if contender.wall:
            torch.cuda.synchronize()
        timed.append(_timed(contender, 1))
    torch.cuda.synchronize()
    return statistics.median(read() for read in timed)


def _warm(contender: Contender) -> float:
    """First-call work (module load, handles, attributes) off the clock; a call's milliseconds."""
    contender.call(2)
    contender.wait()
    return max(_back_to_back(contender, 3), 1e-3)


def interleave(
    contenders: list[Contender], *, rounds: int = 5, round_ms: float = 12.0, flushed: bool = False
) -> None:
    """Fills `milliseconds` of every contender with one figure per round. A round of one contender
    lasts about `round_ms`. Results of earlier calls are dropped."""
    if not contenders:
        return
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flushed else None
    calls = {}
    for contender in contenders:
        contender.milliseconds = []
        once = _warm(contender)
        fewest = 1 if once > round_ms else 3
        calls[contender.name] = max(fewest, min(200, int(round_ms / once)))
    for i in range(rounds):
        shift = i % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            count = calls[contender.name]
            if flush is None:
                contender.milliseconds.append(_back_to_back(contender, count))
            else:
                contender.milliseconds.append(_flushed(contender, min(10, count), flush))


def _query(*options: str) -> list[str]:
    return ["nvidia-smi", *options, "--format=csv,noheader,nounits"]


def gpu_state() -> dict:
    """Name, driver, clocks, power and temperature as the driver reports them now; empty when it
    does not."""
    fields = ("name", "driver_version", *MONITORED)
    command = _query(f"--query-gpu={','.join(fields)}")
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",")
    return {name: value.strip() for name, value in zip(fields, values, strict=True)}


def summarise_samples(lines: list[str]) -> dict:
    """{field: {"median", "lowest", "highest"}} of the monitor's lines; fields that are no numbers
    (the driver answers "[N/A]" then) are left out."""
    rows = [row for row in (line.split(",") for line in lines) if len(row) == len(MONITORED)]
    found = {}
    for i, name in enumerate(MONITORED):
        values = []
        for row in rows:
            with contextlib.suppress(ValueError):
                values.append(float(row[i]))
        if values:
            extremes = {"lowest": min(values), "highest": max(values)}
            found[name] = {"median": statistics.median(values)} | extremes
    return found


class Monitor:
    """Samples clocks, power and temperature of the first GPU while the block runs, five times a
    second, in a process of its own. `summary` is empty where there is no driver."""

    def __enter__(self) -> Monitor:
        self.summary: dict = {}
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                _query("-i", "0", f"--query-gpu={','.join(MONITORED)}", "-lms", "200"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self

    def __exit__(self, *_) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text = self._process.communicate()[0]
        self.summary = summarise_samples(text.splitlines())


def command() -> str:
    """The command line that started the program, without the place that it writes to."""
    program, *words = sys.argv
    for option in ("--out", "--json"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    path = pathlib.PurePath(program)
    folder = "tools" if path.parent.name == "tools" else "benchmarks"
    script = ["-m", "pantile"] if path.name == "__main__.py" else [f"{folder}/{path.name}"]
    return shlex.join(["python", *script, *words])


def commit() -> str:
    """Commit of the project's working tree that the program runs in, with '+' when it has changes.
    Elsewhere PANTILE_COMMIT says it, or it is 'unknown'."""
    if "PANTILE_COMMIT" in os.environ:
        return os.environ["PANTILE_COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout

    try:
        root = pathlib.Path(git("rev-parse", "--show-toplevel").strip())
        if not (root / "cuda/kernels.def").exists():
            return "unknown"
        changed = "+" if git("diff", "HEAD", "--stat") else ""
        return git("rev-parse", "--short", "HEAD").strip() + changed
    except (OSError, subprocess.SubprocessError):
        return "unknown"
