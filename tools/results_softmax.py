"""Tables of docs/flashattention-t.md from the results of benchmarks/flashattention_t.py."""

from __future__ import annotations

import pathlib

from results_files import RESULTS, counter_cells, lines_of, link, table

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
    return [f"{_source(path, run, page)}. Change of the time.", "", *table(head, rows)]
