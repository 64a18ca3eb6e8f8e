"""The goals of variants beside what was measured: reads files that variants.py and masks.py wrote.

    python benchmarks/variant_bars.py benchmarks/results/h200_variants.jsonl

One line a goal: the measured figure (for ratios of many cells their geometric mean), the goal, and
whether it is met. A goal of which nothing was measured says so. `--out` writes the same as JSON."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from pantile.bench import figures

PASSES = ("forward", "backward")
Line = dict


@dataclass(frozen=True)
class Bar:
    name: str
    goal: float
    at_least: bool  # else at most
    measured: float | None = None
    cells: int = 0

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.goal if self.at_least else self.measured <= self.goal


def _of(
    name: str,
    goal: float,
    values: list[float],
    at_least: bool = True,
    join: Callable[[Iterable[float]], float] = figures.mean,
) -> Bar:
    measured = round(join(values), 4) if values else None
    return Bar(name, goal, at_least, measured, len(values))


def _ratios(lines: list[Line], peers: tuple[str, ...], variants: tuple[str, ...] = ()):
    """Of each line the best of the peers over ours."""
    found = []
    for line in lines:
        times = [line["ms"][p] for p in peers if p in line["ms"]]
        if times and "pantile" in line["ms"] and (not variants or line.get("variant") in variants):
            found.append(min(times) / line["ms"]["pantile"])
    return found


def _over_plain(lines: list[Line], variant: str) -> list[float]:
    """Of the variant at head dim 128 under a causal mask."""
    return [
        line["ms"]["pantile"] / line["ms"]["plain"]
        for line in lines
        if line.get("variant") == variant
        and line["head_dim"] == 128
        and line["causal"]
        and "pantile" in line["ms"]
    ]


def _peer_bars(what: str, lines: list[Line], masks: list[Line]) -> list[Bar]:
    flex, cudnn, fa2 = "FlexAttention", "cuDNN (torch)", "FA2 (torch)"
    second = what == "backward"
    groups = {
        "FlexAttention": _ratios(lines + masks, (flex,)),
        "cuDNN and FA2, dropout": _ratios(lines, (cudnn, fa2), ("dropout",)),
        "cuDNN, bias": _ratios(lines, (cudnn,), ("bias", "learned bias")),
    }
    goals = {
        "FlexAttention": (1.9, 1.6),
        "cuDNN and FA2, dropout": (1.8, 1.4),
        "cuDNN, bias": (1.3, 1.1),
    }
    bars = [
        _of(f"{what}, ahead of {name}", goals[name][second], values)
        for name, values in groups.items()
    ]
    every = [x for values in groups.values() for x in values]
    return [*bars, _of(f"{what}, least of all cells", 1.0, every, join=min)]


def _own_bars(what: str, lines: list[Line]) -> list[Bar]:
    second = what == "backward"
    goals = {
        "ALiBi": (1.12, 1.10),
        "softcap": (1.35, 1.20),
        "dropout": (1.50, 1.25),
        "learned bias" if second else "bias": (1.5, 1.4),
        "sinks": (1.0, 1.0),
    }
    bars = [
        _of(f"{what}, {name} over plain", goal[second], _over_plain(lines, name), at_least=False)
        for name, goal in goals.items()
    ]
    by_hand = [x for line in lines if (x := line.get("over_hook"))]
    bars.append(_of(f"{what}, expression over hook", 1.10, by_hand, False, max))
    return bars


def _mask_bars(what: str, masks: list[Line]) -> list[Bar]:
    """Of each mask the worst cell: its time less what its share of the tiles may take."""
    over = [x for x in masks if x.get("over_full")]
    lists = [x["over_full"] - x["share"] for x in over]
    documents = [
        x["over_full"] / x["share"]
        for x in over
        if x["mask"].startswith("documents") and " or " not in x["mask"]
    ]
    windows = [x["over_window"] for x in masks if x.get("over_window")]
    return [
        _of(f"{what}, lists: of full less the share", 0.03, lists, False, max),
        _of(f"{what}, documents over their share", 1.08, documents, False, max),
        _of(f"{what}, band over window", 1.03, windows, False, max),
    ]


def bars_of(lines: list[Line]) -> list[Bar]:
    """``lines`` of both benchmarks; the kinds that are no timings are left out."""
    timings = [line for line in lines if line["kind"] == "timing"]
    found = []
    for what in PASSES:
        mine = [x for x in timings if x["pass"] == what]
        variants = [x for x in mine if "variant" in x]
        masks = [x for x in mine if "mask" in x]
        found += _peer_bars(what, variants, masks)
        found += _own_bars(what, variants) + _mask_bars(what, masks)
    first = [x for line in timings if (x := line.get("first_use_s"))]
    return [*found, _of("seconds of a first use", 4.0, first, False, max)]


def text_of(bar: Bar) -> str:
    sign = ">=" if bar.at_least else "<="
    verdict = {None: "not measured", True: "met", False: "missed"}[bar.met]
    figure = "-" if bar.measured is None else f"{bar.measured:.3f}"
    return f"{bar.name:48} {figure:>8} {sign} {bar.goal:<5} of {bar.cells:3} cells: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    lines = [line for file in given.files for line in figures.read(file)]
    bars = bars_of(lines)
    for bar in bars:
        print(text_of(bar))
    if given.out:
        rows = [{**asdict(bar), "met": bar.met} for bar in bars]
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
