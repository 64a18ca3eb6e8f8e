"""Speed on the pages: every timing file, and the headline of the README."""

from __future__ import annotations

import json
import math
import pathlib

import results_files
from results_files import OURS, image, lines_of, link, mean, speed_files, table

STATES = {"back_to_back": "back to back", "flushed": "flushed L2"}


def ratio(results: dict) -> float:
    others = [r["ms"] for n, r in results.items() if not n.startswith(OURS)]
    if OURS not in results or not others:
        return math.nan
    return min(others) / results[OURS]["ms"]


def ratios(lines: list[dict], what: str, state: str) -> dict[str, float]:
    """Case -> our speed over the best peer's, where both ran."""
    found = {
        line["case"]: ratio(line["results"].get(state, {}))
        for line in lines
        if line["kind"] == "timing" and line["pass"] == what
    }
    return {case: value for case, value in found.items() if not math.isnan(value)}


def run_facts(run: dict) -> str:
    before = run.get("state_before", {})
    where = before.get("name") or run.get("cpu") or run.get("device", "unknown device")
    facts = [where]
    if "driver_version" in before:
        facts.append(f"driver {before['driver_version']}")
    facts.append(f"torch {run['torch']}")
    if run.get("cudnn"):
        facts.append(f"cuDNN {run['cudnn']}")
    facts.append(f"commit {run['commit']}")
    during = run.get("during") or {}
    for name, unit in (("clocks.sm", "MHz"), ("power.draw", "W")):
        if name in during:
            facts.append(f"{during[name]['median']:.0f} {unit}")
    return ", ".join(facts)


def is_grid(line: dict) -> bool:
    words = line["case"].split()
    return len(words) == 3 and words[0] == f"d{line['head_dim']}"


def unit_of(rows: list[dict], state: str) -> tuple[str, float]:
    """(name, of a TFLOP/s): GFLOP/s where our numbers are small."""
    fastest = max(r["results"][state][OURS]["tflops"] for r in rows)
    return ("TFLOP/s", 1.0) if fastest >= 10 else ("GFLOP/s", 1e3)


def cell(results: dict, factor: float) -> str:
    value = ratio(results)
    text = f"{results[OURS]['tflops'] * factor:.0f}"
    return text if math.isnan(value) else f"{text} ({value:.2f})"


def grid_table(rows: list[dict], state: str, factor: float) -> list[str]:
    lines: dict[tuple, dict[int, str]] = {}
    for r in filter(is_grid, rows):
        key = (r["head_dim"], r["causal"])
        lines.setdefault(key, {})[r["seqlen"]] = cell(r["results"][state], factor)
    lengths = sorted({n for cells in lines.values() for n in cells})
    return table(
        ["d, mask", *map(str, lengths)],
        [
            [f"{d} {'causal' if causal else 'full'}", *(cells.get(n, "-") for n in lengths)]
            for (d, causal), cells in sorted(lines.items())
        ],
    )


def special_table(rows: list[dict], state: str, unit: str, factor: float) -> list[str]:
    found = [[r["case"], cell(r["results"][state], factor)] for r in rows if not is_grid(r)]
    return table(["case", f"{unit} (ratio)"], found) if found else []


def peers_text(rows: list[dict], state: str) -> str:
    names = dict.fromkeys(n for r in rows for n in r["results"][state] if not n.startswith(OURS))
    return ", ".join(names) or "no peer"


def by_peer_text(rows: list[dict], state: str) -> str:
    """Our speed over each peer alone: geometric means."""
    found: dict[str, list[float]] = {}
    for results in (r["results"][state] for r in rows):
        for name in (n for n in results if not n.startswith(OURS)):
            found.setdefault(name, []).append(results[name]["ms"] / results[OURS]["ms"])
    if len(found) < 2:
        return ""
    texts = (f"{name} {mean(values):.2f} ({len(values)})" for name, values in found.items())
    return f"; by peer (cells) {', '.join(texts)}"


def variants_text(rows: list[dict], state: str) -> list[str]:
    """Our variants ("pantile, deterministic"): their mean speed against our own."""
    out = []
    names = dict.fromkeys(n for r in rows for n in r["results"][state] if n.startswith(f"{OURS},"))
    for name in names:
        both = [r["results"][state] for r in rows if name in r["results"][state]]
        values = [results[OURS]["ms"] / results[name]["ms"] for results in both]
        out.append(
            f"{name}: {mean(values):.3f} of the speed (geometric mean, {len(values)} cells), "
            f"at worst {min(values):.2f}."
        )
    return [*out, ""] if out else []


def absent_text(rows: list[dict]) -> list[str]:
    """Contenders that were missing from every row, each with its first reason."""
    reasons: dict[str, str] = {}
    for r in rows:
        for name, reason in r.get("absent", {}).items():
            reasons.setdefault(name, reason)
    ran = {name for r in rows for results in r["results"].values() for name in results}
    texts = [f"{name} ({reason})" for name, reason in reasons.items() if name not in ran]
    return [f"Absent: {'; '.join(texts)}.", ""] if texts else []


def part_of(rows: list[dict], what: str, dtype: str, state: str) -> list[str]:
    """One pass, dtype and cache state of a file: a sentence and its tables."""
    rows = [r for r in rows if OURS in r["results"].get(state, {})]
    values = ratios(rows, what, state)
    if not rows:
        return []
    unit, factor = unit_of(rows, state)
    text = f"{what.capitalize()}, {dtype}, {STATES[state]}: {unit}"
    if values:
        worst = min(values, key=values.get)
        middle = mean(list(values.values()))
        text += (
            f", in brackets the ratio to the best of {peers_text(rows, state)}. "
            f"Geometric mean {middle:.3f} over {len(values)} cells, worst {values[worst]:.2f} "
            f"({worst}), {sum(v < 1 for v in values.values())} below 1{by_peer_text(rows, state)}"
        )
    out = [f"{text}.", ""]
    if any(map(is_grid, rows)):
        out += [*grid_table(rows, state, factor), ""]
    special = special_table(rows, state, unit, factor)
    out += [*special, ""] if special else []
    return out + variants_text(rows, state)


def speed_section(path: pathlib.Path, page: pathlib.Path) -> list[str]:
    lines = lines_of(path)
    out = [f"### {path.stem}", "", f"{run_facts(lines[0])} ({link(path, page)}).", ""]
    timings = [line for line in lines if line["kind"] == "timing"]
    for what, dtype in dict.fromkeys((r["pass"], r["dtype"]) for r in timings):
        rows = [r for r in timings if (r["pass"], r["dtype"]) == (what, dtype)]
        for state in STATES:
            out += part_of(rows, what, dtype, state)
    out += absent_text(timings)
    for what in ("forward", "backward"):
        stem = path.stem if path.stem.endswith(what) else f"{path.stem}_{what}"
        for suffix, title in (("", "speed"), ("_ratio", "ratio")):
            picture = path.with_name(f"{stem}{suffix}.png")
            if picture.exists():
                out += [image(picture, f"{path.stem} {what} {title}", page), ""]
    return out


def speed(page: pathlib.Path) -> list[str]:
    sections = [line for path in speed_files() for line in speed_section(path, page)]
    return sections[:-1] if sections else ["Not measured yet."]


def repeat(page: pathlib.Path) -> list[str]:
    """How far the ratios of two runs of one build differ."""
    rows = []
    for first in sorted(results_files.RESULTS.glob("*_repeat1.jsonl")):
        second = first.with_name(first.name.replace("_repeat1", "_repeat2"))
        runs = [lines_of(path) for path in (first, second)]
        for what in dict.fromkeys(r["pass"] for r in runs[0] if r["kind"] == "timing"):
            one, two = (ratios(lines, what, "back_to_back") for lines in runs)
            changes = {case: two[case] / one[case] for case in one if case in two}
            if not changes:
                continue
            worst = max(changes, key=lambda case: abs(math.log(changes[case])))
            values = list(changes.values())
            within = sum(abs(value - 1) <= 0.03 for value in values)
            rows.append(
                [
                    f"{link(first, page)}, {link(second, page)}",
                    what,
                    f"{mean(values):.3f}",
                    f"{within} of {len(values)}",
                    f"{changes[worst]:.3f} ({worst})",
                ]
            )
    if not rows:
        return ["Not measured yet."]
    columns = ["two runs", "pass", "mean change of the ratio", "within 3 %", "largest change"]
    return table(columns, rows)


# File, title, pass, and the only peer that counts (None: the best of each cell).
HEADLINE = (
    ("h200_forward.jsonl", "forward, bf16", "forward", None),
    ("h200_backward.jsonl", "backward, bf16", "backward", None),
    ("h200_fp8.jsonl", "forward, FP8", "forward", None),
    (
        "h200_ampere.jsonl",
        "Ampere path against FlashAttention-2, forward, bf16",
        "forward",
        "FA2 (torch)",
    ),
)


def only_against(lines: list[dict], peer: str | None) -> list[dict]:
    """The lines with no other peer in their results."""
    if peer is None:
        return lines
    kept = []
    for line in (line for line in lines if line["kind"] == "timing"):
        results = {
            state: {n: r for n, r in found.items() if n in (OURS, peer)}
            for state, found in line["results"].items()
        }
        kept.append(line | {"results": results})
    return kept


def headline(page: pathlib.Path) -> list[str]:
    rows = []
    for name, title, what, peer in HEADLINE:
        path = results_files.RESULTS / name
        if not path.exists():
            continue
        values = ratios(only_against(lines_of(path), peer), what, "back_to_back")
        numbers = list(values.values())
        if not numbers:
            continue
        figures = [f"{len(numbers)}", f"{mean(numbers):.2f}x", f"{min(numbers):.2f}x"]
        rows.append([f"{title} ({link(path, page)})", *figures])
    path = results_files.RESULTS / "h200_train_gpt.json"
    values = train_ratio(json.loads(path.read_text()))
    if values is not None:
        title = f"training step of a {values[1]:.0f} M parameter GPT, 8k context"
        rows.append([f"{title} ({link(path, page)})", "1", f"{values[0]:.2f}x", ""])
    return table(["against the best peer of each cell", "cells", "geometric mean", "worst"], rows)


# Plots of the README, as far as they are there.
PLOTS = {
    "h200_forward.png": "forward on the H200",
    "h200_backward.png": "backward on the H200",
    "h200_fp8_forward.png": "FP8 forward on the H200",
    "h200_memory.png": "memory against length on the H200",
}


def plots(page: pathlib.Path) -> list[str]:
    paths = {results_files.RESULTS / name: title for name, title in PLOTS.items()}
    return [image(path, title, page) for path, title in paths.items() if path.exists()]


def train_ratio(result: dict) -> tuple[float, float] | None:
    """Our speed over the best other attention's in the training run, and millions of parameters."""
    speeds = {run["attention"]: run["tokens_per_second"] for run in result["runs"]}
    others = [v for name, v in speeds.items() if name != OURS]
    if OURS not in speeds or not others:
        return None
    return speeds[OURS] / max(others), result["parameters"] / 1e6
