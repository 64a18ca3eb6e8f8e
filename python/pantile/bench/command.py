"""Attention on this machine against torch, or one of the project's benchmarks.

    pantile bench                    this machine, a few shapes, in a minute
    pantile bench --suite hopper     the papers' grid, special cases, FA3, cuDNN
    pantile bench --suite ampere     a part of them, FA2, GPUs from 8.0 on
    pantile bench --suite cpu        the CPU backend, with its backward

Times are medians of interleaved rounds; every result is compared with the
textbook before it is timed. Only the ratios of one run mean something: a GPU's
clock drifts. Ctrl-C ends the run and keeps what was measured.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import pantile
from pantile._report import INTERRUPTED, Progress, print_table, run_to_the_end

NOT_POSSIBLE = 2  # exit status when an argument is wrong or what was asked for is not there
PASSES = ("forward", "backward", "forward+backward")
DTYPES = ("bfloat16", "float16", "float32", "float8")
NUMBERS, WORDS = "comma-separated, such as", "one or more of"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """An argument that is not given is the suite's: its default here is None."""

    def add(name: str, text: str, **keywords) -> None:
        p.add_argument(name, help=text, **keywords)

    def flag(name: str, text: str) -> None:
        add(name, text, action="store_true")

    suites = ["quick", "hopper", "ampere", "cpu"]
    add("--suite", "shapes and peers (default: quick)", choices=suites, default="quick")
    devices = ["auto", "cuda", "cpu"]
    add("--device", "default: the suite's, of quick a GPU if there is one", choices=devices)
    backends = ["auto", "hopper", "ampere", "cpu", "reference"]
    add("--backend", "of ours (default: the suite's, of quick auto)", choices=backends)
    add("--passes", f"{WORDS} {', '.join(PASSES)} (default: forward,backward)")
    add("--head-dims", f"{NUMBERS} 64,128 (default: the suite's)")
    add("--lengths", f"tokens, {NUMBERS} 1024,4096 (default: the suite's)")
    add("--masks", "full, causal or both (default: full,causal)")
    add("--batch", "sequences (default: 16384 tokens in all, or the suite's)", type=int)
    add("--heads", "of queries (default: hidden size 2048, or the suite's)", type=int)
    add("--heads-k", "of keys and values (default: as --heads)", type=int)
    types = f"{WORDS} {', '.join(DTYPES)}"
    add("--dtype", f"{types} (default: bfloat16 on a GPU, float32 on the CPU)")
    precisions = ["highest", "high", "medium"]
    text = "torch's setting for float32 products (default: highest)"
    add("--float32-precision", text, choices=precisions, default="highest")
    add("--peers", "comma-separated names, or all (default: the suite's)")
    flag("--no-special", "only the grid of the suite")
    flag("--only-special", "only its special cases: GQA, window, packed, odd head dims")
    flag("--flushed", "on a GPU: time with a flushed L2 as well")
    flag("--graphs", "on a GPU: time replays of a captured call as well, each beside its eager row")
    flag("--deterministic", "time our deterministic backward as well")
    flag("--softmax", "time every softmax of the Ampere forward as well")
    add("--rounds", "figures that a median is of (default: 5)", type=int, default=5)
    text = "milliseconds of a contender's round (default: 12)"
    add("--round-ms", text, type=float, default=12.0)
    add("--threads", "of torch and ours on the CPU (default: torch's)", type=int)
    add("--out", "write the results here, as JSON lines", type=pathlib.Path)
    flag("--append", "keep the timings that --out holds")


# ---- what is asked for


def _numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(word) for word in text.split(",") if word]
    except ValueError:
        values = [0]
    if not values or any(value < 1 for value in values):
        raise ValueError(f"{name} is {text!r}; it must be positive integers, comma-separated")
    return values


def _words(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = [word for word in text.split(",") if word]
    if not words or any(word not in allowed for word in words):
        raise ValueError(f"{name} is {text!r}; it must be of {', '.join(allowed)}")
    return words


def _device(wanted: str) -> str:
    import torch

    reason = "" if torch.cuda.is_available() else "torch sees no CUDA device"
    reason = reason or pantile.cuda_reason()
    if wanted == "cuda" and reason:
        raise ValueError(f"--device cuda: {reason}")
    return "cpu" if wanted == "cpu" or reason else "cuda"


def _refuse_backend(backend: str, device: str) -> None:
    """Before anything is measured: a backend that cannot serve any case of this machine."""
    if backend == "auto":
        return
    where = "cuda" if backend in ("hopper", "ampere") else "cpu"
    if where != device:
        raise ValueError(f"--backend {backend} runs on {where}; the device is {device}")
    if not any(row["compiled"] for row in pantile.kernels() if row["backend"] == backend):
        raise ValueError(f"--backend {backend}: this build has no kernels of it")
    if device == "cuda":
        import torch

        found = torch.cuda.get_device_capability()
        if (backend == "hopper" and found[0] != 9) or found[0] < 8:
            needed = "9.0" if backend == "hopper" else "8.0 or later"
            raise ValueError(
                f"--backend {backend} needs compute capability {needed}; it is {found}"
            )


def _chosen(given: dict, device: str) -> list:
    """The cases, from the arguments and the suite."""
    from pantile.bench import cases

    shape = dict(cases.quick(device)) if given["suite"] == "quick" else {}
    for name, read in (("head_dims", _numbers), ("lengths", _numbers), ("masks", _words)):
        option = f"--{name.replace('_', '-')}"
        if given.get(name) is not None:
            words = (("full", "causal"),) if read is _words else ()
            shape[name] = read(option, given[name], *words)
    for name in ("batch", "heads", "heads_k"):
        if given.get(name) is not None:
            shape[name] = given[name]
    found = [] if given["only_special"] else cases.grid(**shape)
    if given.get("special") and not given["no_special"]:
        found += [*cases.special(), *([cases.varlen()] if given.get("packed") else [])]
    if not found:
        raise ValueError(f"the suite {given['suite']} has no special cases")
    return found


def setups_of(given: dict, device: str) -> list:
    from pantile.bench import peers, sweep

    dtype = given.get("dtype") or {"cuda": "bfloat16", "cpu": "float32"}[device]
    usual = {"cuda": "cuDNN (torch),FA2 (torch)", "cpu": "torch"}[device]
    shared = {
        "device": device,
        "backend": given.get("backend") or "auto",
        "peers": tuple(peers.chosen(given.get("peers") or usual, device)),
        "rounds": given["rounds"],
        "round_ms": given["round_ms"],
        "flushed": given["flushed"] and device == "cuda",
        "graphs": given["graphs"],
        "deterministic": given["deterministic"],
        "softmax": given["softmax"],
    }
    return [sweep.Setup(dtype=name, **shared) for name in _words("--dtype", dtype, DTYPES)]


def _refuse_numbers(given: dict) -> None:
    for name in ("batch", "heads", "heads_k", "rounds", "round_ms", "threads"):
        value = given.get(name)
        if value is not None and not value > 0:
            kind = "number" if name == "round_ms" else "integer"
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is {value}; it must be a positive {kind}")


# ---- what is printed


def _table(lines: list[dict]) -> None:
    from pantile.bench import figures

    timings = [line for line in lines if line["kind"] == "timing"]
    names = dict.fromkeys(n for x in timings for r in x["results"].values() for n in r)
    unit, factor = ("GFLOP/s", 1e3) if "cpu" in lines[0] else ("TFLOP/s", 1.0)
    types = len({line["dtype"] for line in timings}) > 1
    rows = []
    for line in timings:
        for state, results in line["results"].items():
            value, best = figures.ratio(results)
            cells = []
            for found in map(results.get, names):
                cells += ["-", "-"] if found is None else [f"{found['ms']:.3f}"]
                cells += [] if found is None else [f"{found['tflops'] * factor:.0f}"]
            text = "-" if best == "-" else f"{value:.2f}x {best}"
            if line.get("bar") is not None:
                text += f", {'meets' if line['met'] else 'MISSES'} {line['bar']:.2f}"
            what = f"{line['pass']} {line['dtype']}" if types else line["pass"]
            where = what if state == "back_to_back" else f"{what}, {figures.STATES[state]}"
            rows.append([line["case"], where, *cells, text])
    columns = ["case", "pass", *(c for name in names for c in (f"{name} ms", unit)), "ratio"]
    narrow = tuple(f"{name} ms" for name in names)
    print_table("medians; ratio: best peer's time over ours", columns, rows, narrow)
    reasons: dict[tuple[str, str], int] = {}
    for line in timings:
        for name, reason in line["absent"].items():
            reasons[name, reason] = reasons.get((name, reason), 0) + 1
    for (name, reason), count in reasons.items():
        print(f"absent in {count} of the rows: {name}: {reason}")
    for line in (line for line in lines if line["kind"] == "summary"):
        print(
            f"{line['pass']}, {line['dtype']}, {figures.STATES[line['state']]}: geometric mean "
            f"{line['geometric_mean']:.3f} of the best peer over {line['cells']} cells, worst "
            f"{line['worst']:.3f} ({line['worst_case']}), {line['below_one']} below 1"
        )


# ---- the run


def measure_all(
    chosen: list, passes: list[str], setups: list, judge: Callable[[dict, dict], None] | None
) -> list[dict]:
    """Every line of the results file: the run, its timings as far as they got, their summary."""
    import torch

    from pantile.bench import figures, measure, sweep

    torch.manual_seed(0)
    run, rows = sweep.header(setups[0]), []
    progress = Progress(len(chosen) * len(passes) * len(setups))
    started = time.perf_counter()
    with measure.Monitor() as monitor:
        try:
            for setup in setups:
                for what in passes:
                    for case in chosen:
                        progress.start(f"{case.name}, {what}, {setup.dtype}")
                        rows.append(sweep.measure_case(case, what, setup))
                        if judge is not None:
                            judge(rows[-1], run)
        except KeyboardInterrupt:
            run["interrupted"] = True
    progress.finish()
    run["seconds"] = round(time.perf_counter() - started, 1)
    if setups[0].device == "cuda":
        run |= {"during": monitor.summary, "state_after": measure.gpu_state()}
    return [run, *rows, *figures.summarise(rows)]


def bench(arguments: argparse.Namespace, judge: Callable[[dict, dict], None] | None = None) -> int:
    """Measures and prints; ``judge(row, run)`` may add `bar` and `met` to a row."""
    try:
        import torch
    except ImportError:
        print("pantile bench compares with torch, which is not installed", file=sys.stderr)
        return NOT_POSSIBLE
    pantile.load_torch()
    from pantile.bench import cases, figures, sweep

    given = {k: v for k, v in vars(arguments).items() if v is not None}
    given = cases.suite(given["suite"]) | given
    try:
        _refuse_numbers(given)
        device = _device(given.get("device", "auto"))
        _refuse_backend(given.get("backend", "auto"), device)
        if given["graphs"] and device != "cuda":
            raise ValueError(f"--graphs captures CUDA graphs; the device is {device}")
        chosen = _chosen(given, device)
        passes = _words("--passes", given.get("passes", "forward,backward"), PASSES)
        setups = setups_of(given, device)
    except ValueError as error:
        print(f"pantile bench: {error}", file=sys.stderr)
        return NOT_POSSIBLE
    torch.set_float32_matmul_precision(given["float32_precision"])
    if "threads" in given:
        torch.set_num_threads(given["threads"])
    lines = measure_all(chosen, passes, setups, judge)
    run = lines[0]
    if arguments.out is not None:  # before the table: its reader may be gone
        earlier = arguments.append and arguments.out.exists()
        kept = sweep.joined(figures.read(arguments.out), lines) if earlier else lines
        figures.write(arguments.out, kept)
    types = ", ".join(setup.dtype for setup in setups)
    where = f"{figures.device_of(run)}, {types}, torch {run['torch']}"
    print(f"{where}, pantile {pantile.__version__}, commit {run['commit']}")
    _table(lines)
    if arguments.out is not None:
        print(f"wrote {arguments.out}")
    if run.get("interrupted"):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    timings = [line for line in lines if line["kind"] == "timing"]
    served = any(figures.OURS in r for line in timings for r in line["results"].values())
    wrong = any(figures.OURS in line["wrong"] or line.get("met") is False for line in timings)
    return 0 if served and not wrong else 1


def script(suite: str, judge: Callable[[dict, dict], None] | None = None) -> None:
    """`pantile bench --suite SUITE`, as a program: what benchmarks/hopper.py and the like are."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(p)
    p.set_defaults(suite=suite)
    sys.exit(run_to_the_end(lambda: bench(p.parse_args(), judge)))
