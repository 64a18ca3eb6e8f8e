"""Tables of docs/experiments/flashattention-t.md, from benchmarks/flashattention_t.py."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

from results_files import RESULTS, ROOT, counter_cells, lines_of, link, table

NAME = "*flashattention_t.jsonl"


def _rows(kind: str) -> list[tuple[pathlib.Path, dict, dict]]:
    """(file, the run that the row belongs to, row) of all rows of a kind that were measured."""
    found = []
    for path in sorted(RESULTS.glob(NAME)):
        run: dict = {}
        for row in lines_of(path):
            if row["kind"] == "run":
                run = row
            elif row["kind"] == kind and not isinstance(row.get("absent"), str):
                found.append((path, run, row))
    return found


def _source(path: pathlib.Path, run: dict, page: pathlib.Path) -> str:
    return f"{run['gpu']}, commit {run['commit']} ({link(path, page)})"


def speed(page: pathlib.Path) -> list[str]:
    found = _rows("softmax_timing")
    if not found:
        return ["Not measured yet."]
    path, run, first = found[0]
    modes = list(first["ratio"])
    rows = []
    for _, _, row in found:
        cells = [f"{row['tflops'][modes[0]]:.0f}"]
        cells += [f"{row['ratio'][m]:.2f}" if m in row["ratio"] else "-" for m in modes[1:]]
        rows.append([row["case"], row["dtype"], *cells])
    return [
        f"{_source(path, run, page)}. TFLOP/s of the baseline, then speed against it.",
        "",
        *table(["case", "dtype", *modes], rows),
    ]


def model(page: pathlib.Path) -> list[str]:
    found = _rows("softmax_model")
    if not found:
        return ["Not measured yet."]
    modes = list(found[0][2]["ratio"])
    rows = [
        [f"d{row['head_dim']}", *(f"{row['ratio'][m]:.2f}" for m in modes)] for _, _, row in found
    ]
    return table(["model", *modes], rows)


def counters(page: pathlib.Path) -> list[str]:
    found = _rows("softmax_counters")
    if not found:
        return ["Not measured yet."]
    path, run, first = found[0]
    columns = list(first["percent"])
    rows = [
        [
            row["case"],
            row["implementation"],
            *counter_cells(row, columns),
            f"{row['tensor_idle']:.1f}",
            f"{row['idle_ratio']:.2f}",
        ]
        for _, _, row in found
    ]
    head = ["case", "mode", *columns, "bank conflicts", "tensor idle", "times lower"]
    return [f"{_source(path, run, page)}. Percent of the unit's peak.", "", *table(head, rows)]


def stages(page: pathlib.Path) -> list[str]:
    found = _rows("softmax_stages")
    if not found:
        return ["Not measured yet."]
    path, run, _ = found[0]
    left_out = list(dict.fromkeys(row["without"] for _, _, row in found))
    kernels = dict.fromkeys((row["head_dim"], row["mask"], row["unit"]) for _, _, row in found)
    rows = []
    for kernel in kernels:
        of = {
            row["without"]: row
            for _, _, row in found
            if (row["head_dim"], row["mask"], row["unit"]) == kernel
        }
        cells = [f"{of[left_out[0]]['ms']:.3f}"]
        cells += [f"{of[stage]['share']:+.1%}" for stage in left_out[1:]]
        rows.append([f"d{kernel[0]} {kernel[1]}", kernel[2], *cells])
    head = ["case", "mode", "whole, ms", *(f"without {stage}" for stage in left_out[1:])]
    return [
        f"{_source(path, run, page)}. Change of the time.",
        "",
        *table(head, rows),
        "",
        exposed_text(found),
    ]


def _ratios(found: list[tuple[pathlib.Path, dict, dict]], page: pathlib.Path) -> list[str]:
    """A table of rows that hold the speed of a first contender and the ratios of all to it."""
    if not found:
        return ["Not measured yet."]
    path, run, _ = found[0]
    modes = list(dict.fromkeys(mode for _, _, row in found for mode in row["ratio"]))
    rows = [
        [
            row["case"],
            f"{row['tflops']}",
            *(f"{row['ratio'][m]:.3f}" if m in row["ratio"] else "-" for m in modes[1:]),
        ]
        for _, _, row in found
    ]
    head = ["case", f"{modes[0]}, TFLOP/s", *modes[1:]]
    return [f"{_source(path, run, page)}, {found[0][2]['dtype']}.", "", *table(head, rows)]


def hopper(page: pathlib.Path) -> list[str]:
    """Ways to take the row sum in the Hopper forward."""
    return _ratios(_rows("softmax_hopper"), page)


def variants(page: pathlib.Path) -> list[str]:
    """Kinds of the Ampere softmax, most of them not in the table of kernels: a table a set."""
    found = [x for x in _rows("softmax_variants") if "set" in x[2]]
    lines: list[str] = []
    for name in dict.fromkeys(row["set"] for _, _, row in found):
        lines += [*_ratios([x for x in found if x[2]["set"] == name], page), ""]
    return lines[:-1] or ["Not measured yet."]


def exposed_text(found: list[tuple[pathlib.Path, dict, dict]]) -> str:
    """What leaving out all of the softmax says: how much of the time it is exposed."""
    shares: dict[int, dict[str, float]] = {}
    for row in (row for _, _, row in found if row["without"] == "all"):
        shares.setdefault(row["head_dim"], {})[row["unit"]] = -row["share"]
    texts = [
        f"from {of['vector always']:.0%} to {of['tensor']:.0%} at head dim {d} "
        f"({of['vector always'] / of['tensor']:.1f}x lower)"
        for d, of in sorted(shares.items())
        if {"vector always", "tensor"} <= of.keys()
    ]
    return f"The share of time that the softmax is exposed falls {', '.join(texts)}."


def _softmax_cycles():
    """benchmarks/softmax_cycles.py, which needs nothing but Python."""
    path = ROOT / "benchmarks/softmax_cycles.py"
    spec = importlib.util.spec_from_file_location("softmax_cycles", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def cycles(_: pathlib.Path) -> list[str]:
    """What the cycle model predicts, as speed against the mode that rescales always."""
    model = _softmax_cycles()
    modes = list(model.MODES)[1:]
    rows = [
        [f"{chip.name} d{d}", *(f"{model.predicted_ratio(chip, d, mode):.2f}" for mode in modes)]
        for chip in model.CHIPS.values()
        for d in (64, 128)
    ]
    return table(["", *modes], rows)
