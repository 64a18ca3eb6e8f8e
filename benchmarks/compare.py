"""Is the second results file faster than the first? A verdict that knows the noise.

    python benchmarks/compare.py before.jsonl after.jsonl

Only what both files measured is compared. Two runs of a power-limited GPU differ as a whole, so
each cell is divided by how much the peers of the same cell changed: what is left is our change. A
cell counts as faster or slower when that exceeds its noise, which is the spread (p80 - p20) of
everything that enters, and at least 3 %. Files without common peers are compared as they are, and
it is said. The exit status is 1 when the geometric mean is slower than --tolerance allows, or a
cell is slower by more than --cell allows."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from dataclasses import dataclass

from pantile.bench.figures import OURS, is_peer, mean, read

LEAST_NOISE = 0.03  # what repeated runs of one build differ by, ratios taken


@dataclass(frozen=True)
class Cell:
    name: str
    change: float  # our speed after over before, the peers' drift taken out
    noise: float  # relative
    drift: float | None  # the peers' speed after over before; None without common peers

    @property
    def verdict(self) -> str:
        if self.change > 1 + self.noise:
            return "faster"
        if self.change < 1 / (1 + self.noise):
            return "slower"
        return "same"


def results_of(path: pathlib.Path) -> dict[tuple[str, str, str, str], dict]:
    """(case, pass, dtype, cache state) -> {contender: figures}."""
    return {
        (line["case"], line["pass"], line["dtype"], state): results
        for line in read(path)
        if line["kind"] == "timing"
        for state, results in line["results"].items()
    }


def spread(figures: dict) -> float:
    return (figures["ms_p80"] - figures["ms_p20"]) / figures["ms"]


def compare_cell(name: str, before: dict, after: dict) -> Cell:
    common = [n for n in before if n in after and is_peer(n)]
    change = before[OURS]["ms"] / after[OURS]["ms"]
    squares = [spread(x[OURS]) ** 2 for x in (before, after)]
    drift = None
    if common:
        drift = mean([before[n]["ms"] / after[n]["ms"] for n in common])
        change /= drift
        # The mean of several peers is as much steadier.
        squares += [spread(x[n]) ** 2 / len(common) ** 2 for x in (before, after) for n in common]
    return Cell(name, change, max(LEAST_NOISE, math.sqrt(sum(squares))), drift)


def compare(before: dict, after: dict) -> list[Cell]:
    return [
        compare_cell(" ".join(key), before[key], after[key])
        for key in before
        if key in after and OURS in before[key] and OURS in after[key]
    ]


def overall(cells: list[Cell]) -> tuple[float, float]:
    """Geometric mean of the changes, and its noise: cells are independent."""
    noise = math.sqrt(sum(cell.noise**2 for cell in cells)) / len(cells)
    return mean([cell.change for cell in cells]), noise


def failures(cells: list[Cell], tolerance: float, cell_tolerance: float) -> list[str]:
    change, noise = overall(cells)
    problems = []
    if change * (1 + noise) < 1 - tolerance:
        problems.append(f"geometric mean {change:.3f}, allowed {1 - tolerance:.3f}")
    problems += [
        f"{cell.name}: {cell.change:.3f}, noise {cell.noise:.0%}"
        for cell in cells
        if cell.verdict == "slower" and cell.change < 1 - cell_tolerance
    ]
    return problems


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    p.add_argument("before", type=pathlib.Path)
    p.add_argument("after", type=pathlib.Path)
    p.add_argument("--tolerance", type=float, default=0.01, help="of the mean; default 0.01")
    p.add_argument("--cell", type=float, default=0.05, help="of one cell; default 0.05")
    p.add_argument("--all", action="store_true", help="also list the cells that stayed the same")
    chosen = p.parse_args()
    before, after = results_of(chosen.before), results_of(chosen.after)
    cells = compare(before, after)
    if not cells:
        sys.exit("the two files have no cell of ours in common")
    for cell in sorted(cells, key=lambda cell: cell.change):
        if chosen.all or cell.verdict != "same":
            drift = "no common peer" if cell.drift is None else f"peers {cell.drift:.3f}"
            numbers = f"{cell.change:7.3f}  noise {cell.noise:5.1%}  {drift:<16}"
            print(f"{cell.verdict:<8}{numbers}{cell.name}")
    change, noise = overall(cells)
    counts = {v: sum(c.verdict == v for c in cells) for v in ("faster", "same", "slower")}
    print(
        f"{len(cells)} cells: {counts['faster']} faster, {counts['same']} the same, "
        f"{counts['slower']} slower; geometric mean {change:.3f} +- {noise:.3f}"
    )
    if alone := len(set(before) ^ set(after)):
        print(f"{alone} cells are in one file only")
    if problems := failures(cells, chosen.tolerance, chosen.cell):
        sys.exit("slower: " + "; ".join(problems))


if __name__ == "__main__":
    main()
