#!/usr/bin/env python3
"""Writes the measured numbers of README.md and docs from the files in benchmarks/results.

A page holds a block between the lines
    <!-- results NAME: begin -->    and    <!-- results NAME: end -->
where NAME is one of BLOCKS. `--check` changes nothing and fails when a page is out of date, so that
no number in a block can be typed by hand. Needs nothing but Python.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable

import results_backward as backward
import results_fp8 as fp8
import results_kernels as kernels
import results_reports as reports
import results_softmax
import results_speed
from results_files import ROOT

BLOCKS: dict[str, Callable[[pathlib.Path], list[str]]] = {
    "accuracy": reports.accuracy,
    "accuracy-fp8": reports.accuracy_fp8,
    "ampere-cells": kernels.ampere_cells,
    "ampere-float32": kernels.ampere_float32,
    "backward-cells": backward.cells,
    "backward-conversions": backward.conversions,
    "backward-deterministic": backward.deterministic,
    "backward-more-cells": backward.more_cells,
    "backward-stalls": backward.stalls,
    "backward-variants": backward.variants,
    "build": reports.build_facts,
    "cpu-bars": kernels.cpu_bars,
    "durations": reports.durations,
    "forward-cells": kernels.forward_cells,
    "fp8-cells": kernels.fp8_cells,
    "fp8-gradient": fp8.gradient,
    "fp8-law": fp8.law,
    "fp8-length": fp8.length,
    "fp8-offset": fp8.offset,
    "fp8-quantiser": kernels.fp8_quantiser,
    "fp8-steps": fp8.steps,
    "fp8-training": fp8.training,
    "gpus": reports.gpus,
    "headline": results_speed.headline,
    "io-check": reports.io_check,
    "io-table": reports.io_table,
    "memory": reports.memory,
    "plots": results_speed.plots,
    "repeat": results_speed.repeat,
    "roofline": reports.roofline_table,
    "softmax-counters": results_softmax.counters,
    "softmax-cycles": results_softmax.cycles,
    "softmax-hopper": results_softmax.hopper,
    "softmax-model": results_softmax.model,
    "softmax-speed": results_softmax.speed,
    "softmax-stages": results_softmax.stages,
    "softmax-variants": results_softmax.variants,
    "speed": results_speed.speed,
    "training": reports.training,
    "utilisation": reports.utilisation,
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
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
