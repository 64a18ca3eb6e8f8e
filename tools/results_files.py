"""Result files and the pieces of a Markdown page that results_docs.py makes of them."""

from __future__ import annotations

import json
import math
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
OURS = "pantile"


def lines_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def speed_files() -> list[pathlib.Path]:
    """Files with timings; a pair of *_repeat1 and *_repeat2 shows only how far two runs differ."""
    return [
        path
        for path in sorted(RESULTS.glob("*.jsonl"))
        if "_repeat" not in path.stem and any(line["kind"] == "timing" for line in lines_of(path))
    ]


def files_of(kind: str) -> list[tuple[pathlib.Path, dict, list[dict]]]:
    """(file, its run, its rows of a kind) of all files that have some."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        lines = lines_of(path)
        rows = [line for line in lines if line["kind"] == kind]
        if rows:
            found.append((path, lines[0], rows))
    return found


def rows_of(kind: str) -> list[tuple[pathlib.Path, dict, dict]]:
    """(file, its run, row) of all rows of a kind."""
    return [(path, run, row) for path, run, rows in files_of(kind) for row in rows]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)]


def counter_cells(row: dict, units: list[str]) -> list[str]:
    """Of a row of GPU counters: percent of each unit's peak and bank conflicts; - where absent."""
    percent, conflicts = row["percent"], row["bank_conflicts"]
    return [
        *("-" if percent[unit] is None else f"{percent[unit]:.0f}" for unit in units),
        "-" if conflicts is None else f"{conflicts:.1%}",
    ]


def link(path: pathlib.Path, page: pathlib.Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return f"[`{path.name}`]({up}{path.relative_to(ROOT)})"


def image(path: pathlib.Path, title: str, page: pathlib.Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return f"![{title}]({up}{path.relative_to(ROOT)})"


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
