"""Results files, and what their timings say. Needs nothing but Python: the pages are made by it."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable

OURS = "pantile"  # our variants are named "pantile, ...": they are no peers
STATES = {"back_to_back": "back to back", "flushed": "flushed L2", "graph": "CUDA graph"}


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: pathlib.Path, lines: Iterable[dict]) -> None:
    """Line by line, so that a run that ends early leaves what was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()


def is_peer(name: str) -> bool:
    return not name.startswith(OURS)


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def ratio(results: dict, peer: str = "") -> tuple[float, str]:
    """Our speed over the best peer's (or over that of `peer`), and whose; NaN without either."""
    others = {name: r["ms"] for name, r in results.items() if is_peer(name)}
    if peer:
        others = {name: ms for name, ms in others.items() if name == peer}
    if OURS not in results or not others:
        return math.nan, "-"
    best = min(others, key=lambda name: others[name])
    return others[best] / results[OURS]["ms"], best


def ratios(rows: list[dict], state: str = "back_to_back", peer: str = "") -> dict[str, float]:
    """Case -> our speed over the best peer's, where both ran."""
    found = {row["case"]: ratio(row["results"].get(state, {}), peer)[0] for row in rows}
    return {case: value for case, value in found.items() if not math.isnan(value)}


def summarise(rows: list[dict]) -> list[dict]:
    """Geometric mean and worst cell of the ratio to the best peer, per pass, type and state."""
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        for state in row["results"]:
            groups.setdefault((row["pass"], row["dtype"], state), []).append(row)
    lines = []
    for (what, dtype, state), mine in sorted(groups.items()):
        values = ratios(mine, state)
        if values:
            worst = min(values, key=lambda case: values[case])
            line: dict = {"kind": "summary", "pass": what, "dtype": dtype, "state": state}
            line |= {"cells": len(values), "geometric_mean": round(mean(values.values()), 4)}
            line |= {"worst": round(values[worst], 4), "worst_case": worst}
            lines.append(line | {"below_one": sum(value < 1 for value in values.values())})
    return lines


def is_grid(row: dict) -> bool:
    """Whether a timing is of the grid: "d128 causal 4096" and the like."""
    words = row["case"].split()
    return len(words) == 3 and words[0] == f"d{row['head_dim']}"


def device_of(run: dict) -> str:
    named = run.get("state_before", {}).get("name")
    return named or run.get("cpu") or run.get("gpu") or run.get("device") or "unknown device"
