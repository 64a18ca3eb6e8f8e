#!/usr/bin/env python3
"""Writes the table of what is supported into README.md and docs, from the kernel table.

A page holds the table between the lines
    <!-- support-matrix: begin -->    and    <!-- support-matrix: end -->
`--check` changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import re
import sys

import results_docs

ROOT = results_docs.ROOT
BEGIN, END = "<!-- support-matrix: begin -->", "<!-- support-matrix: end -->"
BACKENDS = {
    "hopper": "`hopper`: H100, H200 (sm_90a)",
    "ampere": "`ampere`: A100 and later (sm_80)",
    "cpu": "`cpu`: x86-64 and others",
    "reference": "`reference`: textbook, double, on the CPU",
}
DTYPES = ("f32", "f16", "bf16", "e4m3")
MASKS = ("full", "causal", "window")
Row = tuple[str, str, str, str, str]  # backend, pass, dtype, head dims, mask


def read_rows() -> list[Row]:
    """The rows of cuda/kernels.def and the CPU rows of cpp/host/kernel_table.cc."""
    rows: list[Row] = []
    for line in (ROOT / "cuda/kernels.def").read_text().splitlines():
        if match := re.match(r"PANTILE_KERNEL\((\w+), (\w+), (\w+), (\d+), (\d+), (\w+)\)", line):
            backend, way, dtype, dim, dim_v, mask = match.groups()
            rows.append((backend, way, dtype, dim if dim == dim_v else f"{dim}x{dim_v}", mask))
    table = (ROOT / "cpp/host/kernel_table.cc").read_text()
    problem = (ROOT / "cpp/include/pantile/problem.h").read_text()
    largest = re.search(r"kMaxHeadDim = (\d+)", problem)
    scaling = (ROOT / "cpp/core/scaling.h").read_text()
    largest_fp8 = re.search(r"kMaxFp8Dim = (\d+)", scaling)
    for backend, way, dtype in re.findall(
        r'(cpu|reference)_(forward|backward|quantize)\w*\("\w+", DType::(\w+)\)', table
    ):
        most = largest_fp8 if way == "quantize" or dtype == "e4m3" else largest
        rows.append((backend, way, dtype, f"1 to {most[1]}", "any"))
    return rows


def joined(values: set[str], order: tuple[str, ...] | None = None) -> str:
    if order:
        return ", ".join(v for v in order if v in values)
    return ", ".join(sorted(values, key=lambda v: [int(n) for n in re.findall(r"\d+", v)]))


def make_table() -> str:
    """One line for each backend, pass and set of masks that serve the same dtypes and head dims."""
    rows = read_rows()
    columns = ["backend", "pass", "element types", "head dims (Q, K x V, O)", "masks"]
    lines = []
    for backend, title in BACKENDS.items():
        for way in ("forward", "backward", "quantize"):
            by_masks: dict[frozenset[str], list[Row]] = {}
            kernels = {(r[2], r[3]) for r in rows if r[:2] == (backend, way)}
            for dtype, dims in sorted(kernels):
                mine = [r for r in rows if r[:4] == (backend, way, dtype, dims)]
                by_masks.setdefault(frozenset(r[4] for r in mine), []).extend(mine)
            for masks, group in sorted(by_masks.items(), key=lambda item: sorted(item[0])):
                shown = set(MASKS) if "any" in masks else set(masks)
                types = joined({r[2] for r in group}, DTYPES)
                dims = joined({r[3] for r in group})
                lines.append([title, way, types, dims, joined(shown, MASKS)])
    return "\n".join(results_docs.table(columns, lines))


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print("usage: support_matrix.py [--check]")
        return 2
    table, stale = make_table(), 0
    for page in results_docs.pages():
        text = page.read_text()
        if BEGIN in text:
            before, rest = text.split(BEGIN, 1)
            new = f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"
            stale += results_docs.rewrite(page, new, check, "run tools/support_matrix.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
