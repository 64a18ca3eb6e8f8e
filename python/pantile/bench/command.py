"""``python -m pantile bench``: attention on this machine against torch, in a minute.

Cases come from the catalogue that the project's own benchmarks use; times are medians of
interleaved rounds. Only the ratios of one run mean something: a GPU's clock drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys

import pantile
from pantile._report import print_table

NO_DEVICE = 2  # exit status when what was asked for is not there


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    p.add_argument(
        "--backend", choices=["auto", "hopper", "ampere", "cpu", "reference"], default="auto"
    )
    p.add_argument("--passes", default="forward,backward", help="forward, backward or both")
    p.add_argument("--head-dims", default="", help="comma-separated, such as 64,128")
    p.add_argument("--lengths", default="", help="comma-separated, such as 1024,4096")
    p.add_argument("--masks", default="", help="full, causal or both")
    p.add_argument("--batch", type=int)
    p.add_argument("--heads", type=int)
    p.add_argument("--dtype", default="", choices=["", "bfloat16", "float16", "float32"])
    p.add_argument("--peers", default="", help="comma-separated names, or all")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--flushed", action="store_true", help="GPU: time with a flushed L2 as well")
    p.add_argument("--out", type=pathlib.Path, help="write the results as JSON lines")


def _numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(word) for word in text.split(",") if word]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise ValueError(f"{name} is {text!r}; it must be positive integers, comma-separated")
    return values


def _words(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = [word for word in text.split(",") if word]
    for word in words:
        if word not in allowed:
            raise ValueError(f"{name} is {text!r}; it must be of {', '.join(allowed)}")
    return words


def _device(wanted: str) -> tuple[str, str]:
    """The device, or why the one that was asked for cannot be had."""
    import torch

    reason = "" if torch.cuda.is_available() else "torch sees no CUDA device"
    reason = reason or pantile.cuda_reason()
    if wanted == "cuda" and reason:
        return "", f"--device cuda: {reason}"
    return ("cpu" if wanted == "cpu" or reason else "cuda"), ""


def _chosen(arguments: argparse.Namespace, device: str) -> list:
    from pantile.bench import cases

    grid = cases.quick(device)
    given = {
        "head_dims": _numbers("--head-dims", arguments.head_dims),
        "lengths": _numbers("--lengths", arguments.lengths),
        "masks": _words("--masks", arguments.masks, ("full", "causal")),
        "batch": arguments.batch,
        "heads": arguments.heads,
    }
    for name in ("batch", "heads"):
        if given[name] is not None and given[name] < 1:
            raise ValueError(f"--{name} is {given[name]}; it must be a positive integer")
    return cases.small_grid(**(grid | {k: v for k, v in given.items() if v}))


class _Progress:
    """A bar on a terminal with rich; otherwise a line on stderr for each case."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.bar = None
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import Progress

            console = Console(stderr=True)
            if console.is_terminal:
                self.bar = Progress(console=console, transient=True)

    def __enter__(self) -> _Progress:
        if self.bar is not None:
            self.bar.start()
            self.task = self.bar.add_task("measuring", total=self.total)
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.stop()

    def step(self, row: dict) -> None:
        self.done += 1
        text = f"{row['case']} {row['pass']}"
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=text)
        else:
            print(f"[{self.done}/{self.total}] {text}", file=sys.stderr, flush=True)


def _table(lines: list[dict], names: list[str]) -> None:
    from pantile.bench import sweep

    unit, factor = ("GFLOP/s", 1e3) if "cpu" in lines[0] else ("TFLOP/s", 1.0)
    rows = []
    for line in (line for line in lines if line["kind"] == "timing"):
        for state, results in line["results"].items():
            value, best = sweep.ratio(results)
            cells = []
            for name in [sweep.OURS, *names]:
                found = results.get(name)
                cells.append("-" if found is None else f"{found['ms']:.3f}")
                cells.append("-" if found is None else f"{found['tflops'] * factor:.0f}")
            verdict = "" if best == "-" else f"{value:.2f}x {best}"
            label = line["case"] + ("" if state == "back_to_back" else ", flushed")
            rows.append([label, line["pass"], *cells, verdict])
    columns = ["case", "pass"]
    for name in [sweep.OURS, *names]:
        columns += [f"{name} ms", unit]
    print_table("medians; ratio: best peer's time over ours", [*columns, "ratio"], rows)
    reasons = {}
    for line in (line for line in lines if line["kind"] == "timing"):
        for name, reason in line["absent"].items():
            reasons.setdefault((name, reason), []).append(f"{line['case']} {line['pass']}")
    for (name, reason), where in reasons.items():
        print(f"absent in {len(where)} of the rows: {name}: {reason}")
    for line in (line for line in lines if line["kind"] == "summary"):
        print(sweep.summary_text(line))


def _named_peers(text: str, device: str) -> list[str]:
    from pantile.bench import peers

    usual = {"cuda": "cuDNN (torch),FA2 (torch)", "cpu": "torch"}[device]
    return peers.chosen(text or usual, device)


def bench(arguments: argparse.Namespace) -> int:
    try:
        import torch  # noqa: F401
    except ImportError:
        print("pantile bench compares with torch, which is not installed", file=sys.stderr)
        return NO_DEVICE
    pantile.load_torch()
    device, missing = _device(arguments.device)
    if missing:
        print(f"pantile bench: {missing}", file=sys.stderr)
        return NO_DEVICE
    from pantile.bench import sweep

    try:
        chosen = _chosen(arguments, device)
        passes = _words("--passes", arguments.passes, ("forward", "backward"))
        names = _named_peers(arguments.peers, device)
    except ValueError as error:
        print(f"pantile bench: {error}", file=sys.stderr)
        return NO_DEVICE
    setup = sweep.Setup(
        device=device,
        backend=arguments.backend,
        dtype=arguments.dtype or {"cuda": "bfloat16", "cpu": "float32"}[device],
        peers=tuple(names),
        rounds=arguments.rounds,
        flushed=arguments.flushed and device == "cuda",
    )
    with _Progress(len(chosen) * len(passes)) as progress:
        lines = sweep.run(chosen, passes, setup, progress.step)
    run = lines[0]
    where = run.get("cpu") or run["state_before"].get("name", "CUDA device")
    print(f"{where}, {setup.dtype}, torch {run['torch']}, pantile {pantile.__version__}")
    _table(lines, names)
    if arguments.out is not None:
        sweep.write(arguments.out, lines)
        print(f"wrote {arguments.out}")
    served = any(sweep.OURS in r for line in lines for r in line.get("results", {}).values())
    wrong = any(sweep.OURS in line.get("wrong", ()) for line in lines)
    return 0 if served and not wrong else 1
