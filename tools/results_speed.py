"""Speed on the pages: every timing file, and the headline of the README."""

from __future__ import annotations

import json
import math
import pathlib

import results_files
from results_files import OURS, image, lines_of, link, mean, speed_files, table

MANY = 4  # from more contenders on a cell is a row with a column for each
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


def type_text(row: dict) -> str:
    """The operands' type, and whether float32 may be multiplied by TF32."""
    tf32 = row["dtype"] == "float32" and row.get("float32_precision", "highest") != "highest"
    return f"{row['dtype']}{' by TF32' if tf32 else ''}"


def contenders(rows: list[dict], state: str) -> list[str]:
    """Ours and the peers that ran, without our variants."""
    names = dict.fromkeys(n for r in rows for n in r["results"][state])
    return [n for n in names if not n.startswith(f"{OURS},")]


def contenders_table(rows: list[dict], state: str, factor: float) -> list[str]:
    names = contenders(rows, state)

    def text(results: dict, name: str) -> str:
        return f"{results[name]['tflops'] * factor:.0f}" if name in results else "-"

    found = [
        [
            r["case"],
            *(text(r["results"][state], n) for n in names),
            f"{ratio(r['results'][state]):.2f}",
        ]
        for r in rows
    ]
    return table(["case", *names, "ratio to the best"], found)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


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


def counted(values: dict[str, float]) -> str:
    """What the ratios of all cells come to."""
    worst = min(values, key=values.get)
    return (
        f"geometric mean {mean(list(values.values())):.3f} over {len(values)} cells, worst "
        f"{values[worst]:.2f} ({worst}), {sum(v < 1 for v in values.values())} below 1"
    )


def below_one(values: dict[str, float]) -> list[str]:
    """The lost cells by name, the worst first."""
    lost = sorted((value, case) for case, value in values.items() if value < 1)
    texts = ", ".join(f"{case} {value:.3f}" for value, case in lost)
    return [f"Below 1: {texts}.", ""] if lost else []


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


def part_of(rows: list[dict], what: str, state: str) -> list[str]:
    """One pass, type and cache state of a file: a sentence and its tables."""
    rows = [r for r in rows if OURS in r["results"].get(state, {})]
    values = ratios(rows, what, state)
    if not rows:
        return []
    unit, factor = unit_of(rows, state)
    text = f"{what.capitalize()}, {type_text(rows[0])}, {STATES[state]}: {unit}"
    many = len(contenders(rows, state)) > MANY
    if values:
        where = "" if many else "in brackets "
        text += (
            f", {where}the ratio to the best of {peers_text(rows, state)}. "
            f"{capital(counted(values))}{by_peer_text(rows, state)}"
        )
    out = [f"{text}.", ""]
    if many:
        return [*out, *contenders_table(rows, state, factor), ""]
    if any(map(is_grid, rows)):
        out += [*grid_table(rows, state, factor), ""]
    special = special_table(rows, state, unit, factor)
    out += [*special, ""] if special else []
    return [*out, *below_one(values), *variants_text(rows, state)]


def cells(path: pathlib.Path, what: str, page: pathlib.Path) -> list[str]:
    """One pass of a file on the page of its kernel: every cell, and the lost ones by name."""
    state, lines = "back_to_back", lines_of(path)
    rows = [r for r in lines if r["kind"] == "timing" and r["pass"] == what]
    rows = [r for r in rows if OURS in r["results"].get(state, {})]
    if not rows:
        return ["Not measured yet."]
    values = ratios(rows, what, state)
    unit, factor = unit_of(rows, state)
    special = special_table(rows, state, unit, factor)
    out = [
        f"{run_facts(lines[0])} ({link(path, page)}). {unit}, in brackets the ratio to the best "
        f"of {peers_text(rows, state)}.",
        "",
        *grid_table(rows, state, factor),
        "",
        *([*special, ""] if special else []),
        *([f"{capital(counted(values))}{by_peer_text(rows, state)}.", ""] if values else []),
        *below_one(values),
    ]
    return out[:-1]


# Contender -> what it is known by (pantile.bench.peers.versions).
LIBRARIES = {
    "FA3": {"forward": "FA3_SO", "backward": "DEW3_SO"},
    "cuDNN FP8": {"forward": "nvidia-cudnn-frontend", "backward": "nvidia-cudnn-frontend"},
}


def libraries_text(run: dict, timings: list[dict]) -> list[str]:
    """Which builds of the peers that torch does not bring were measured."""
    found = {}
    for row in timings:
        for name, of_pass in LIBRARIES.items():
            ran = any(name in results for results in row["results"].values())
            version = run.get("peers", {}).get(of_pass.get(row["pass"], ""))
            if ran and version:
                found[f"{name} {row['pass']}"] = version
    texts = ", ".join(f"{name}: {version}" for name, version in found.items())
    return [f"Builds: {texts}.", ""] if texts else []


def backend_text(run: dict) -> str:
    backend = run.get("backend", "unknown")
    named = {"cpu": "CPU backend", "auto": "the backend that a plain call gets"}
    return named.get(backend, f"{backend.capitalize()} backend")


def overview(paths: list[pathlib.Path], page: pathlib.Path) -> list[str]:
    """Every file in a few lines: what it holds, and how often we lose."""
    rows = []
    for path in paths:
        timings = [line for line in lines_of(path) if line["kind"] == "timing"]
        for what, dtype in dict.fromkeys((r["pass"], r["dtype"]) for r in timings):
            mine = [r for r in timings if (r["pass"], r["dtype"]) == (what, dtype)]
            values = ratios(mine, what, "back_to_back")
            if not values:
                continue
            worst = min(values, key=values.get)
            rows.append(
                [
                    link(path, page),
                    what,
                    type_text(mine[0]),
                    f"{len(values)}",
                    f"{mean(list(values.values())):.3f}",
                    f"{values[worst]:.2f} ({worst})",
                    f"{sum(v < 1 for v in values.values())}",
                ]
            )
    columns = ["file", "pass", "type", "cells", "geometric mean", "worst", "below 1"]
    return ["Ratios to the best peer of each cell:", "", *table(columns, rows), ""] if rows else []


def speed_section(path: pathlib.Path, page: pathlib.Path) -> list[str]:
    lines = lines_of(path)
    timings = [line for line in lines if line["kind"] == "timing"]
    out = [f"### {path.stem}: {backend_text(lines[0])}", ""]
    out += [f"{run_facts(lines[0])} ({link(path, page)}).", ""]
    out += [f"{capital(lines[0]['what'])}.", ""] if "what" in lines[0] else []
    out += libraries_text(lines[0], timings)
    out += [f"    {command}" for command in lines[0].get("commands", [])]
    out += [""] if out[-1] else []
    for what, dtype in dict.fromkeys((r["pass"], r["dtype"]) for r in timings):
        rows = [r for r in timings if (r["pass"], r["dtype"]) == (what, dtype)]
        for state in STATES:
            out += part_of(rows, what, state)
    out += absent_text(timings)
    for what in ("forward", "backward"):
        stem = path.stem if path.stem.endswith(what) else f"{path.stem}_{what}"
        for suffix, title in (("", "speed"), ("_ratio", "ratio")):
            picture = path.with_name(f"{stem}{suffix}.png")
            if picture.exists():
                out += [image(picture, f"{path.stem} {what} {title}", page), ""]
    return out


def speed(page: pathlib.Path) -> list[str]:
    paths = speed_files()
    sections = [line for path in paths for line in speed_section(path, page)]
    return [*overview(paths, page), *sections][:-1] if sections else ["Not measured yet."]


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


# File, title, pass, the only peer that counts (None: the best of each cell), and the command.
HOPPER = "python benchmarks/hopper.py"
HEADLINE = (
    ("h200_forward.jsonl", "forward, bf16", "forward", None, f"{HOPPER} --passes forward"),
    ("h200_backward.jsonl", "backward, bf16", "backward", None, f"{HOPPER} --passes backward"),
    (
        "h200_fp8.jsonl",
        "forward, FP8",
        "forward",
        None,
        f'{HOPPER} --dtype float8 --passes forward --no-special --peers "FA3,cuDNN FP8"',
    ),
    (
        "h200_ampere.jsonl",
        "Ampere path against FlashAttention-2, forward, bf16",
        "forward",
        "FA2 (torch)",
        "python benchmarks/ampere.py",
    ),
    (
        "h200_ampere.jsonl",
        "the same, backward",
        "backward",
        "FA2 (torch)",
        "python benchmarks/ampere.py",
    ),
)
TRAINING = "python examples/train_gpt.py --preset large --attention pantile,flash,cudnn"


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
    for name, title, what, peer, command in HEADLINE:
        path = results_files.RESULTS / name
        if not path.exists():
            continue
        values = ratios(only_against(lines_of(path), peer), what, "back_to_back")
        numbers = list(values.values())
        if not numbers:
            continue
        below = f"{sum(v < 1 for v in numbers)} of {len(numbers)}"
        figures = [f"{mean(numbers):.2f}x", f"{min(numbers):.2f}x", below]
        rows.append([f"{title} ({link(path, page)})", *figures, f"`{command}`"])
    path = results_files.RESULTS / "h200_train_gpt.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    values = train_ratio(report) if report else None
    if values is not None:
        context = f"{report['context'] // 1024}k context"
        title = f"training step of a {values[1]:.0f} M parameter GPT, {context}, bf16"
        figures = [f"{values[0]:.2f}x", "", f"{int(values[0] < 1)} of 1"]
        rows.append([f"{title} ({link(path, page)})", *figures, f"`{TRAINING}`"])
    columns = ["speed against the best peer of each cell", "geometric mean", "worst", "below 1"]
    return table([*columns, "measured by"], rows)


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
