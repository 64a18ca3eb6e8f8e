#!/usr/bin/env python3
"""Writes the measured numbers of README.md and docs from the files in benchmarks/results.

A page holds a block between the lines
    <!-- results NAME: begin -->    and    <!-- results NAME: end -->
where NAME is one of BLOCKS. `--check` changes nothing and fails when a page is out of date, so that
no number in a block can be typed by hand. Needs nothing but Python.
"""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
OURS = "pantile"
STATES = {"back_to_back": "back to back", "flushed": "flushed L2"}


def _io_model():
    """pantile.io_model without the package, which need not be built when pages are checked."""
    path = ROOT / "python/pantile/io_model.py"
    spec = importlib.util.spec_from_file_location("pantile_io_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


io_model = _io_model()


# ---- reading


def lines_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def speed_files() -> list[pathlib.Path]:
    return [
        path
        for path in sorted(RESULTS.glob("*.jsonl"))
        if any(line["kind"] == "timing" for line in lines_of(path))
    ]


def rows_of(kind: str) -> list[tuple[pathlib.Path, dict, dict]]:
    """(file, its run, row) of all rows of a kind."""
    found = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        lines = lines_of(path)
        found += [(path, lines[0], line) for line in lines if line["kind"] == kind]
    return found


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)]


def link(path: pathlib.Path, page: pathlib.Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return f"[`{path.name}`]({up}{path.relative_to(ROOT)})"


def image(path: pathlib.Path, title: str, page: pathlib.Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    return f"![{title}]({up}{path.relative_to(ROOT)})"


# ---- speed


def ratio(results: dict) -> float:
    others = [r["ms"] for n, r in results.items() if n != OURS]
    if OURS not in results or not others:
        return math.nan
    return min(others) / results[OURS]["ms"]


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


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


def cell(results: dict) -> str:
    value = ratio(results)
    text = f"{results[OURS]['tflops']:.0f}"
    return text if math.isnan(value) else f"{text} ({value:.2f})"


def grid_table(rows: list[dict], state: str) -> list[str]:
    rows = [r for r in rows if is_grid(r) and OURS in r["results"].get(state, {})]
    lengths = sorted({r["seqlen"] for r in rows})
    lines = {}
    for r in rows:
        key = (r["head_dim"], r["causal"])
        lines.setdefault(key, {})[r["seqlen"]] = cell(r["results"][state])
    return table(
        ["d, mask", *map(str, lengths)],
        [
            [f"{d} {'causal' if causal else 'full'}", *(cells.get(n, "-") for n in lengths)]
            for (d, causal), cells in sorted(lines.items())
        ],
    )


def special_table(rows: list[dict], state: str) -> list[str]:
    rows = [r for r in rows if not is_grid(r) and OURS in r["results"].get(state, {})]
    return (
        table(["case", "TFLOP/s (ratio)"], [[r["case"], cell(r["results"][state])] for r in rows])
        if rows
        else []
    )


def peers_text(rows: list[dict], state: str) -> str:
    names = dict.fromkeys(n for r in rows for n in r["results"].get(state, {}) if n != OURS)
    return ", ".join(names) or "none"


def speed_section(path: pathlib.Path, page: pathlib.Path) -> list[str]:
    lines = lines_of(path)
    out = [f"### {path.stem}", "", f"{run_facts(lines[0])} ({link(path, page)}).", ""]
    for what in ("forward", "backward"):
        rows = [r for r in lines if r["kind"] == "timing" and r["pass"] == what]
        for state, words in STATES.items():
            values = ratios(rows, what, state)
            if not values:
                continue
            worst = min(values, key=values.get)
            middle = mean(list(values.values()))
            dtype = "/".join(dict.fromkeys(r["dtype"] for r in rows))
            out += [
                f"{what.capitalize()}, {dtype}, {words}: TFLOP/s, in brackets the ratio to the "
                f"best of {peers_text(rows, state)}. Geometric mean {middle:.3f} over "
                f"{len(values)} cells, worst {values[worst]:.2f} ({worst}), "
                f"{sum(v < 1 for v in values.values())} below 1.",
                "",
                *grid_table(rows, state),
                "",
            ]
            special = special_table(rows, state)
            out += [*special, ""] if special else []
        stem = path.stem if path.stem.endswith(what) else f"{path.stem}_{what}"
        for suffix, title in (("", "speed"), ("_ratio", "ratio")):
            picture = path.with_name(f"{stem}{suffix}.png")
            if picture.exists():
                out += [image(picture, f"{path.stem} {what} {title}", page), ""]
    return out


def speed(page: pathlib.Path) -> list[str]:
    sections = [line for path in speed_files() for line in speed_section(path, page)]
    return sections[:-1] if sections else ["Not measured yet."]


HEADLINE = {
    "h200_forward.jsonl": ("forward, bf16", "forward"),
    "h200_backward.jsonl": ("backward, bf16", "backward"),
}


def headline(page: pathlib.Path) -> list[str]:
    rows = []
    for name, (title, what) in HEADLINE.items():
        path = RESULTS / name
        values = ratios(lines_of(path), what, "back_to_back")
        numbers = list(values.values())
        figures = [f"{len(numbers)}", f"{mean(numbers):.2f}x", f"{min(numbers):.2f}x"]
        rows.append([f"{title} ({link(path, page)})", *figures])
    path = RESULTS / "h200_train_gpt.json"
    values = train_ratio(json.loads(path.read_text()))
    if values is not None:
        title = f"training step of a {values[1]:.0f} M parameter GPT, 8k context"
        rows.append([f"{title} ({link(path, page)})", "1", f"{values[0]:.2f}x", ""])
    return table(["against the best peer of each cell", "cells", "geometric mean", "worst"], rows)


def train_ratio(result: dict) -> tuple[float, float] | None:
    """Our speed over the best other attention's in the training run, and millions of parameters."""
    speeds = {run["attention"]: run["tokens_per_second"] for run in result["runs"]}
    others = [v for name, v in speeds.items() if name != OURS]
    if OURS not in speeds or not others:
        return None
    return speeds[OURS] / max(others), result["parameters"] / 1e6


# ---- memory


def megabytes(count: float) -> str:
    return f"{count / 2**20:,.1f}"


def memory(page: pathlib.Path) -> list[str]:
    found = rows_of("memory")
    if not found:
        return ["Not measured yet."]
    out = []
    for path in dict.fromkeys(path for path, _, _ in found):
        mine = [(run, row) for p, run, row in found if p == path]
        run = mine[0][0]
        rows = [
            [
                row["implementation"],
                f"{row['length']:,}",
                megabytes(row["peak_bytes"]),
                megabytes(row["model_bytes"]),
                megabytes(row["matrix_bytes"]),
                f"{row['peak_bytes'] / row['length']:,.0f}",
            ]
            for _, row in mine
        ]
        first = mine[0][1]
        out += [
            f"{run['device']}, commit {run['commit']} ({link(path, page)}): bf16, causal, one head "
            f"of dim {first['head_dim']}, forward and backward; MiB.",
            "",
            *table(["", "length", "peak", "model", "one N x N matrix", "peak bytes a token"], rows),
            "",
        ]
        case = {row["implementation"]: row for _, row in mine if row["length"] == 32768}
        if len(case) == 2:
            ours, textbook = case[OURS]["peak_bytes"], case["textbook"]["peak_bytes"]
            out += [
                f"At 32,768 tokens one matrix takes {megabytes(first_matrix(case))} MiB, the "
                f"textbook's step {megabytes(textbook)} MiB and ours {megabytes(ours)} MiB: "
                f"{textbook / ours:.0f} times less.",
                "",
            ]
        picture = path.with_suffix(".png")
        if picture.exists():
            out += [image(picture, "memory against length", page), ""]
    return out[:-1]


def first_matrix(case: dict) -> int:
    return case[OURS]["matrix_bytes"]


# ---- IO model


def gb(count: float) -> str:
    return f"{count / 1e9:,.2f}"


def gpus(_: pathlib.Path) -> list[str]:
    rows = [
        [
            gpu.name,
            f"{gpu.tflops_16bit:.0f}",
            "-" if gpu.tflops_fp8 is None else f"{gpu.tflops_fp8:.0f}",
            f"{gpu.hbm_tbps:.2f}",
            f"{gpu.hbm_gb}",
            f"{gpu.l2_mib}",
            f"{gpu.shared_kib}",
            f"{gpu.multiprocessors} x {gpu.clock_ghz:.2f}",
            f"{io_model.ridge(gpu):.0f}",
        ]
        for gpu in io_model.GPUS.values()
    ]
    return table(
        [
            "GPU",
            "16-bit TFLOP/s",
            "FP8 TFLOP/s",
            "HBM TB/s",
            "HBM GB",
            "L2 MiB",
            "shared KiB",
            "SMs x GHz",
            "ridge, FLOP/byte",
        ],
        rows,
    )


MODEL_LENGTHS = (1024, 4096, 16384, 65536)
MODEL_HEADS = 16
MODEL_TILE = 128  # rows of a tile of the Hopper forward


def io_table(_: pathlib.Path) -> list[str]:
    """GB through HBM of one forward, 16 heads of dim 128, on an H200."""
    gpu = io_model.GPUS["H200"]
    tiles1 = io_model.paper_tiles(128, gpu.shared_kib * 1024)
    rows = []
    for length in MODEL_LENGTHS:
        shape = io_model.Shape(length, length, 128, MODEL_HEADS)
        moved = [
            io_model.textbook_forward(shape),
            io_model.flash1_forward(shape, *tiles1),
            io_model.flash2_forward(shape, MODEL_TILE, MODEL_TILE),
            io_model.pantile_forward(shape, MODEL_TILE, gpu),
        ]
        fused = io_model.roofline(gpu, shape, moved[-1])
        stored = io_model.roofline(gpu, shape, moved[0])
        rows.append(
            [
                f"{length:,}",
                *(gb(t.bytes) for t in moved),
                f"{shape.flops() / moved[0].bytes:.0f}",
                f"{shape.flops() / moved[-1].bytes:.0f}",
                f"{stored.milliseconds:.3f} ({stored.slowest})",
                f"{fused.milliseconds:.3f} ({fused.slowest})",
            ]
        )
    return table(
        [
            "length",
            "textbook",
            f"FlashAttention-1, tiles {tiles1[0]} x {tiles1[1]}",
            f"FlashAttention-2, {MODEL_TILE} rows",
            "ours, with the L2",
            "FLOP/byte textbook",
            "ours",
            "roofline ms, textbook",
            "ours",
        ],
        rows,
    )


def roofline_table(_: pathlib.Path) -> list[str]:
    """Milliseconds of each unit for the forward at 16384 tokens, hidden 2048."""
    rows = []
    for gpu in io_model.GPUS.values():
        for head_dim in (64, 128, 256):
            shape = io_model.Shape(16384, 16384, head_dim, 2048 // head_dim)
            bound = io_model.roofline(gpu, shape, io_model.pantile_forward(shape, 128, gpu))
            rows.append(
                [
                    gpu.name,
                    f"{head_dim}",
                    f"{bound.tensor_ms:.3f}",
                    f"{bound.exp_ms:.3f}",
                    f"{bound.memory_ms:.3f}",
                    f"{shape.flops() / bound.milliseconds / 1e9:.0f}",
                ]
            )
    columns = ["GPU", "d", "tensor ms", "exp ms", "HBM ms", "TFLOP/s of the slowest"]
    return table(columns, rows)


def io_check(page: pathlib.Path) -> list[str]:
    found = rows_of("io")
    if not found:
        return ["Not measured yet."]
    path, run, _ = found[0]
    rows = [
        [
            row["implementation"],
            f"{row['length']:,}",
            f"{row['heads']}",
            f"{gb(row['read_bytes'])} ({gb(row['model_read_bytes'])})",
            f"{gb(row['written_bytes'])} ({gb(row['model_written_bytes'])})",
            f"{row['ratio']:.3f}",
        ]
        for _, _, row in found
    ]
    return [
        f"{run['gpu']}, commit {run['commit']} ({link(path, page)}), head dim 128, bf16, full; GB.",
        "",
        *table(
            ["", "length", "heads", "read (model)", "written (model)", "measured / model"], rows
        ),
    ]


# ---- accuracy


def scientific(value: float) -> str:
    return f"{value:.1e}"


def accuracy(page: pathlib.Path) -> list[str]:
    """RMSE of O by implementation, laws and lengths as rows."""
    found = rows_of("accuracy")
    if not found:
        return ["Not measured yet."]
    out = []
    for path in dict.fromkeys(path for path, _, _ in found):
        mine = [(run, row) for p, run, row in found if p == path]
        names = list(dict.fromkeys(row["implementation"] for _, row in mine))
        for result in ("o", "dq", "dk", "dv"):
            cells: dict[tuple, dict[str, str]] = {}
            for _, row in mine:
                key = tuple(row[k] for k in ("dtype", "head_dim", "mask", "length", "law"))
                error = row["errors"].get(result)
                if error is not None:
                    text = f"{scientific(error['rmse'])} / {scientific(error['max'])}"
                    cells.setdefault(key, {})[row["implementation"]] = text
            if not cells:
                continue
            run = mine[0][0]
            out += [
                f"{result}: RMSE / largest error against float64, {run['device']}, commit "
                f"{run['commit']} ({link(path, page)}).",
                "",
                *table(
                    ["dtype", "d", "mask", "length", "law", *names],
                    [
                        [*map(str, key), *(values.get(n, "-") for n in names)]
                        for key, values in cells.items()
                    ],
                ),
                "",
            ]
    return out[:-1]


def accuracy_fp8(page: pathlib.Path) -> list[str]:
    found = rows_of("accuracy_fp8")
    if not found:
        return ["Not measured yet."]
    path, run, _ = found[0]
    kinds = list(dict.fromkeys((r["head_dim"], r["mask"]) for _, _, r in found))
    names = list(dict.fromkeys(r["implementation"] for _, _, r in found))
    cells = {(r["implementation"], r["head_dim"], r["mask"]): r for _, _, r in found}
    rows = []
    for name in names:
        texts = []
        for kind in kinds:
            row = cells[(name, *kind)]
            texts.append("-" if row["absent"] else f"{scientific(row['errors']['o']['rmse'])}")
        rows.append([name, *texts])
    head = f"RMSE of O, {found[0][2]['length']} tokens, {run['device']}, commit {run['commit']}"
    absent = {r["implementation"]: r["absent"] for _, _, r in found if r["absent"]}
    return [
        f"{head} ({link(path, page)}).",
        "",
        *table(["FP8 forward", *(f"d{d} {mask}" for d, mask in kinds)], rows),
        *(
            ["", "Absent: " + "; ".join(f"{n}: {r}" for n, r in absent.items()) + "."]
            if absent
            else []
        ),
    ]


# ---- utilisation, build facts


def utilisation(page: pathlib.Path) -> list[str]:
    found = rows_of("utilisation")
    if not found:
        return ["Not measured yet."]
    path, run, first = found[0]
    columns = list(first["percent"])
    rows = [
        [
            row["implementation"],
            row["case"],
            *("-" if row["percent"][c] is None else f"{row['percent'][c]:.0f}" for c in columns),
            "-" if row["bank_conflicts"] is None else f"{row['bank_conflicts']:.1%}",
            f"{row['ghz']:.2f}",
            f"{row['us']:.0f}",
        ]
        for _, _, row in found
    ]
    return [
        f"{run['gpu']}, commit {run['commit']} ({link(path, page)}); % of the unit's peak while "
        "the kernel runs.",
        "",
        *table(["", "case", *columns, "bank conflicts", "GHz", "us"], rows),
    ]


def build_facts(page: pathlib.Path) -> list[str]:
    path = RESULTS / "build_facts.json"
    if not path.exists():
        return ["Not measured yet."]
    facts = json.loads(path.read_text())
    columns = list(facts["columns"])
    rows = [
        [name, *(str(values.get(column, "-")) for column in columns)]
        for name, values in facts["rows"].items()
    ]
    notes = [f"{name}: {text}" for name, text in facts["sources"].items()]
    notes.append(facts["public"])
    return [f"{link(path, page)}.", "", *table(["", *columns], rows), "", "; ".join(notes) + "."]


BLOCKS: dict[str, Callable[[pathlib.Path], list[str]]] = {
    "accuracy": accuracy,
    "accuracy-fp8": accuracy_fp8,
    "build": build_facts,
    "gpus": gpus,
    "headline": headline,
    "io-check": io_check,
    "io-table": io_table,
    "memory": memory,
    "roofline": roofline_table,
    "speed": speed,
    "utilisation": utilisation,
}
BLOCK = re.compile(r"(<!-- results ([\w-]+): begin -->\n).*?(<!-- results \2: end -->)", re.DOTALL)


def render(text: str, page: pathlib.Path) -> str:
    """The page with every block written anew."""

    def write(match: re.Match) -> str:
        name = match[2]
        if name not in BLOCKS:
            raise ValueError(f"{page.name}: block {name!r}; there are: {', '.join(BLOCKS)}")
        return match[1] + "\n".join(BLOCKS[name](page)) + "\n" + match[3]

    return BLOCK.sub(write, text)


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print("usage: results_docs.py [--check]")
        return 2
    stale = 0
    for page in pages():
        text = page.read_text()
        new = render(text, page)
        if new != text:
            stale += 1
            name = page.relative_to(ROOT)
            if check:
                print(f"{name}: numbers differ from benchmarks/results: run make docs")
            else:
                page.write_text(new)
                print(f"{name}: written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
