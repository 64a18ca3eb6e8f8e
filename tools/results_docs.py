#!/usr/bin/env python3
"""Writes the measured numbers of README.md and docs from the files in benchmarks/results.

    python tools/results_docs.py [--check]

benchmarks/results/contents.toml says which page holds which blocks, and what each block is made of.
A page holds a block between the lines
    <!-- results NAME: begin -->    and    <!-- results NAME: end -->
`--check` changes nothing and fails when a page is out of date, so that no number in a block can be
typed by hand. Needs nothing but Python.

A block is one or more [[part]]s, one after the other. What most parts are:

    files     results files; `records` is the kind of their lines, or the name of a list in a
              JSON file, or `module.py: expression`, which gives records
    expand    an expression, a dict: one record for each of its items, which is `name` and `value`
              (or the fields of the value, when that is a dict)
    base      fields of the record that others of the same `same` are compared with: their `base`
    where     an expression: the records that count; sort: the fields by which they are ordered
    each      a template: one table for each of its values, which stands above it
    text      a template, before the table, and `note`, after it: of the first record
    rows      title -> template of the first columns; a row for each of their values
    columns   a template with a column for each of its values, or title -> template
    cell      the template of a cell; the records that meet there are its `group`

Templates are f-strings over a record (`record`: as a dict), the header of its run, and
NAMES, which go before. Parts with a `form`
of their own (FORMS) show timings.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
MANY = 4  # from more contenders on a cell is a row with a column for each
BLOCK = re.compile(r"(<!-- results ([\w-]+): begin -->\n).*?(<!-- results \2: end -->)", re.DOTALL)


def module(name: str):
    """A file of this project that needs nothing but Python, without the package around it."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(name).stem, ROOT / name)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


figures = module("python/pantile/bench/figures.py")
OURS, mean = figures.OURS, figures.mean


def contents() -> dict:
    return tomllib.loads((RESULTS / "contents.toml").read_text())


# ---- templates


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def picked(records: list[dict], **fields) -> dict:
    """The one record with these fields."""
    (found,) = (r for r in records if all(r[k] == v for k, v in fields.items()))
    return found


def listed(texts) -> str:
    return ", ".join(texts) or "none"


BUILTINS = (abs, dict, float, int, len, list, max, min, round, sorted, str, sum, zip)
NAMES = {f.__name__: f for f in (*BUILTINS, listed, mean, picked, shown)}


def value_of(expression: str, scope: dict) -> object:
    return eval(expression, {"__builtins__": {}} | scope | NAMES | {"record": scope})


def fill(template: str, scope: dict) -> str:
    return value_of(f"f'''{template}'''", scope)


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def joined(parts: list[list[str]]) -> list[str]:
    """Paragraphs with an empty line between them."""
    lines = [line for part in parts if part for line in [*part, ""]]
    return lines[:-1]


# ---- records


def link(name: str, page: pathlib.Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return f"[`{pathlib.Path(name).name}`]({up}benchmarks/results/{name})"


def image(name: str, title: str, page: pathlib.Path) -> str:
    return f"!{link(name, page)}".replace(f"`{pathlib.Path(name).name}`", title)


def lines_of(name: str) -> list[dict]:
    """The lines of a results file; the one object of a JSON file is a line of kind run."""
    path = RESULTS / name
    if path.suffix == ".jsonl":
        return figures.read(path)
    return [{"kind": "run"} | json.loads(path.read_text())]


def timings(name: str, what: str | None = None) -> list[dict]:
    """Timings with ours in them; the attentions of a training report are one cell."""
    lines = lines_of(name)
    if "runs" in lines[0]:
        times = {r["attention"]: {"ms": r["step_seconds"] * 1e3} for r in lines[0]["runs"]}
        return [{"case": "step", "pass": "step", "results": {"back_to_back": times}}]
    rows = [line for line in lines if line["kind"] == "timing" and what in (None, line["pass"])]
    return [row for row in rows if OURS in row["results"].get("back_to_back", {})]


def as_records(found: dict | list) -> list[dict]:
    """Of a dict, a record an item: its name, its value, and the fields of the value."""
    if not isinstance(found, dict):
        return found
    fields = {name: v if isinstance(v, dict) else vars_of(v) for name, v in found.items()}
    return [{"name": n, "value": found[n]} | of for n, of in fields.items()]


def vars_of(value: object) -> dict:
    return vars(value) if dataclasses.is_dataclass(value) else {}


def records_of(part: dict, page: pathlib.Path) -> list[dict]:
    """The records of a part, with the header of their run (of a file the last one above them)."""
    found, chosen = [], part["records"]
    if ".py:" in chosen:
        name, expression = chosen.split(":", 1)
        scope = vars(module(name))
        found = [scope | record for record in as_records(value_of(expression.strip(), scope))]
    for name in part.get("files", []):
        run: dict = {}
        for line in lines_of(name):
            run = line if line["kind"] == "run" else run
            extra = {"file": name, "link": link(name, page), "run": run}
            if line["kind"] == "timing":
                extra["ratio"] = figures.ratio(line["results"]["back_to_back"])[0]
            if line["kind"] == chosen:
                found.append(run | line | extra)
            elif chosen in run and line is run:
                found += [run | record | extra for record in as_records(run[chosen])]
    if "names" in part:  # kind, field of the name, field of its text
        kind, key, text = part["names"]
        lines = (line for name in part["files"] for line in lines_of(name))
        names = {line[key]: line[text] for line in lines if line["kind"] == kind}
        found = [record | {"names": names} for record in found]
    if "expand" in part:
        parts = ((r, as_records(value_of(part["expand"], r))) for r in found)
        found = [record | item for record, items in parts for item in items]
    if "base" in part:

        def key(record: dict) -> tuple:
            return tuple(record.get(field) for field in part["same"])

        of = {key(r): r for r in found if all(r[k] == v for k, v in part["base"].items())}
        found = [record | {"base": of.get(key(record))} for record in found]
    if "where" in part:
        found = [record for record in found if value_of(part["where"], record)]
    return sorted(found, key=lambda r: [r[field] for field in part.get("sort", [])])


def table_of(part: dict, records: list[dict]) -> list[str]:
    head, columns = part.get("rows", {}), part["columns"]
    if isinstance(columns, dict):
        all_columns = head | columns
        rows = [[fill(t, record) for t in all_columns.values()] for record in records]
        return table([fill(title, records[0]) for title in all_columns], rows)
    cells: dict[tuple, dict[str, list[dict]]] = {}
    for record in records:
        row = cells.setdefault(tuple(fill(t, record) for t in head.values()), {})
        row.setdefault(fill(columns, record), []).append(record)
    titles = list(dict.fromkeys(title for row in cells.values() for title in row))
    if all(title.isdigit() for title in titles):
        titles.sort(key=int)

    def cell(group: list[dict] | None) -> str:
        return "-" if group is None else fill(part["cell"], group[-1] | {"group": group})

    rows = [[*key, *(cell(row.get(title)) for title in titles)] for key, row in cells.items()]
    return table([*(fill(title, records[0]) for title in head), *titles], rows)


def general(part: dict, page: pathlib.Path) -> list[str]:
    records = records_of(part, page)
    if not records:
        raise ValueError(f"block {part['block']}: no record of {part.get('files', '')} is left")
    links = ", ".join(dict.fromkeys(r["link"] for r in records if "link" in r))
    first = records[0] | {"records": records, "links": links}
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(fill(part.get("each", ""), record), []).append(record)
    out = [[fill(part["text"], first)]] if "text" in part else []
    for title, group in groups.items():
        out += [[title] if title else [], table_of(part, group) if "columns" in part else []]
    return joined([*out, [fill(part["note"], first)] if "note" in part else []])


# ---- timings


def type_of(row: dict) -> str:
    """The operands' type, and whether float32 may be multiplied by TF32."""
    tf32 = row["dtype"] == "float32" and row.get("float32_precision", "highest") != "highest"
    return f"{row['dtype']}{' by TF32' if tf32 else ''}"


def kinds_of(rows: list[dict]) -> list[tuple[str, str, list[dict]]]:
    """(pass, type, rows): what is summed up together."""
    kinds: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        kinds.setdefault((row["pass"], type_of(row)), []).append(row)
    return [(*key, mine) for key, mine in kinds.items()]


# Known by their build, because torch does not bring them (pantile.bench.peers.versions).
BUILDS = {"FA3_SO": "FA3", "DEW3_SO": "FA3", "nvidia-cudnn-frontend": "cuDNN FP8"}


def run_facts(run: dict, rows: list[dict]) -> str:
    before, during = run.get("state_before", {}), run.get("during") or {}
    driver, cudnn = before.get("driver_version"), run.get("cudnn")
    facts = [figures.device_of(run), f"driver {driver}" if driver else ""]
    facts += [f"torch {run['torch']}", f"cuDNN {cudnn}" if cudnn else ""]
    facts.append(f"commit {run['commit']}")
    units = {"clocks.sm": "MHz", "power.draw": "W"}
    facts += [f"{during[n]['median']:.0f} {unit}" for n, unit in units.items() if n in during]
    ran = {name for row in rows for name in row["results"]["back_to_back"]}
    builds = run.get("peers", {}).items()
    facts += [f"{name} {version}" for name, version in builds if BUILDS.get(name) in ran]
    return ", ".join(filter(None, facts))


def counted(values: dict[str, float]) -> str:
    worst = min(values, key=values.get)
    return (
        f"geometric mean {mean(values.values()):.3f} over {len(values)} cells, worst "
        f"{values[worst]:.2f} ({worst}), {sum(v < 1 for v in values.values())} below 1"
    )


def against_each(rows: list[dict], state: str) -> list[str]:
    """Our speed over each peer, and our variants' over ours: geometric means, and the cells."""
    found: dict[str, list[float]] = {}
    for results in (row["results"][state] for row in rows):
        for name in (name for name in results if name != OURS):
            times = results[name]["ms"], results[OURS]["ms"]
            share = times[0] / times[1] if figures.is_peer(name) else times[1] / times[0]
            found.setdefault(name, []).append(share)
    peers = [f"{n} {mean(v):.2f} ({len(v)})" for n, v in found.items() if figures.is_peer(n)]
    ours = [
        f"{n} {mean(v):.3f} (at worst {min(v):.2f})"
        for n, v in found.items()
        if not figures.is_peer(n)
    ]
    out = [f"Speed over each peer (cells): {', '.join(peers)}."] if len(peers) > 1 else []
    return [*out, *([f"Speed of our variants over ours: {', '.join(ours)}."] if ours else [])]


def cells_of(rows: list[dict], what: str, dtype: str, state: str) -> list[str]:
    """One pass, type and cache state: every cell, and the lost ones by name."""
    rows = [row for row in rows if OURS in row["results"].get(state, {})]
    if not rows:
        return []
    fast = max(row["results"][state][OURS]["tflops"] for row in rows) >= 10
    unit, factor = ("TFLOP/s", 1.0) if fast else ("GFLOP/s", 1e3)
    names = dict.fromkeys(name for row in rows for name in row["results"][state])
    names = [name for name in names if name == OURS or figures.is_peer(name)]
    values = figures.ratios(rows, state)

    def text(row: dict, name: str = OURS) -> str:
        found = row["results"][state].get(name)
        return "-" if found is None else f"{found['tflops'] * factor:.0f}"

    def cell(row: dict) -> str:
        value = values.get(row["case"])
        return text(row) if value is None else f"{text(row)} ({value:.2f})"

    head = f"{what.capitalize()}, {dtype}, {figures.STATES[state]}: {unit}"
    if values:
        head += f" (ratio to the best of {', '.join(names[1:])}); {counted(values)}"
    if len(names) > MANY:
        more = [[r["case"], *(text(r, n) for n in names), f"{values[r['case']]:.2f}"] for r in rows]
        tables = [table(["case", *names, "ratio to the best"], more)]
    else:
        grid = [row | {"text": cell(row)} for row in rows if figures.is_grid(row)]
        grid.sort(key=lambda row: (row["head_dim"], row["causal"]))
        mask = "{head_dim} {['full', 'causal'][causal]}"
        form = {"rows": {"d, mask": mask}, "columns": "{seqlen}", "cell": "{text}"}
        special = [[row["case"], cell(row)] for row in rows if not figures.is_grid(row)]
        tables = [table_of(form, grid) if grid else []]
        tables += [table(["case", f"{unit} (ratio)"], special)] if special else []
    lost = sorted((value, case) for case, value in values.items() if value < 1)
    below = f"Below 1: {', '.join(f'{case} {value:.3f}' for value, case in lost)}."
    return joined([[f"{head}."], *tables, [below] if lost else [], against_each(rows, state)])


def cells(part: dict, page: pathlib.Path) -> list[str]:
    out = []
    for name in part["files"]:
        rows = timings(name, part.get("pass"))
        out.append([f"{link(name, page)}: {run_facts(lines_of(name)[0], rows)}."])
        for what, dtype, mine in kinds_of(rows):
            out += [cells_of(mine, what, dtype, state) for state in figures.STATES]
        ran = {n for row in rows for results in row["results"].values() for n in results}
        missing = {n: r for row in rows for n, r in row.get("absent", {}).items() if n not in ran}
        texts = "; ".join(f"{n} ({reason})" for n, reason in missing.items())
        out.append([f"Absent: {texts}."] if missing else [])
    return joined(out)


def overview(part: dict, page: pathlib.Path) -> list[str]:
    """Every file in a few lines: what it holds, how often we lose, how it was measured."""
    rows, runs = [], []
    for name in part["files"]:
        run = lines_of(name)[0]
        for what, dtype, mine in kinds_of(timings(name)):
            values = figures.ratios(mine)
            worst = min(values, key=values.get)
            last = [f"{values[worst]:.2f} ({worst})", f"{sum(v < 1 for v in values.values())}"]
            counts = [f"{len(values)}", f"{mean(values.values()):.3f}", *last]
            rows.append([link(name, page), what, dtype, *counts])
        seconds = f", {run['seconds']:.0f} s" if "seconds" in run else ""
        runs.append([f"{link(name, page)}: commit {run['commit']}{seconds}."])
        runs.append([f"    {command}" for command in run.get("commands", [])])
    columns = ["file", "pass", "type", "cells", "geometric mean", "worst", "below 1"]
    return joined([["Ratios to the best peer of each cell:"], table(columns, rows), *runs])


def headline(part: dict, page: pathlib.Path) -> list[str]:
    rows = []
    for title, name, what, peer, command in part["lines"]:
        rows.append([f"{title} ({link(name, page)})"])
        values = list(figures.ratios(timings(name, what), peer=peer).values())
        below = f"{sum(v < 1 for v in values)} of {len(values)}"
        rows[-1] += [f"{mean(values):.2f}x", f"{min(values):.2f}x", below, f"`{command}`"]
    columns = ["speed against the best peer of each cell", "geometric mean", "worst", "below 1"]
    return table([*columns, "measured by"], rows)


def images(part: dict, page: pathlib.Path) -> list[str]:
    return joined([[image(name, title, page)] for name, title in part["images"].items()])


FORMS: dict[str, Callable[[dict, pathlib.Path], list[str]]] = {
    "general": general,
    "cells": cells,
    "overview": overview,
    "headline": headline,
    "images": images,
}


# ---- pages


def wrapped(line: str) -> str:
    """Prose within the columns of a page; tables, commands and pictures as they are."""
    if line.startswith(("|", "    ", "![", "#")):
        return line
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)


def block(name: str, page: pathlib.Path, parts: list[dict]) -> list[str]:
    mine = [part for part in parts if part["block"] == name]
    if not mine:
        names = ", ".join(dict.fromkeys(part["block"] for part in parts))
        raise ValueError(f"{page.name}: block {name!r}; there are: {names}")
    try:
        return joined([FORMS[part.get("form", "general")](part, page) for part in mine])
    except (KeyError, NameError, TypeError) as error:
        raise ValueError(f"block {name} of contents.toml: {error!r}") from error


def render(text: str, page: pathlib.Path, parts: list[dict]) -> str:
    """The page with every block written anew."""

    def write(match: re.Match) -> str:
        lines = map(wrapped, block(match[2], page, parts))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return BLOCK.sub(write, text)


def misplaced(text: str, page: str, names: list[str]) -> list[str]:
    """Blocks that contents.toml and the page do not agree on."""
    found = [match[2] for match in BLOCK.finditer(text)]
    errors = [f"{page}: no block {n}, which contents.toml lists" for n in names if n not in found]
    return errors + [f"{page}: block {n} is not in contents.toml" for n in found if n not in names]


def only_check() -> bool:
    """Whether the command line of a program that writes pages says --check: change nothing, and
    fail where a page is out of date."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    return parser.parse_args().check


def rewrite(page: pathlib.Path, new: str, check: bool) -> int:
    """Writes a page, or only says that it is out of date; how many pages that concerns."""
    if page.exists() and page.read_text() == new:
        return 0
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    print(f"{name} is out of date: run make docs" if check else f"{name}: written")
    if not check:
        page.write_text(new)
    return 1


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main() -> int:
    check = only_check()
    found, stale, errors = contents(), 0, []
    for page in pages(ROOT):
        name, text = str(page.relative_to(ROOT)), page.read_text()
        errors += misplaced(text, name, found["pages"].pop(name, []))
        if not errors:
            stale += rewrite(page, render(text, page, found["part"]), check)
    errors += [
        f"contents.toml lists blocks of {name}, which is not there" for name in found["pages"]
    ]
    for error in errors:
        print(error)
    return 1 if errors or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
