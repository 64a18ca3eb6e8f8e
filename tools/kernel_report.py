#!/usr/bin/env python3
"""Registers, spills, stack frames, shared memory and advisories of every compiled kernel.

Reads what ptxas said (the <object>.ptxas files that cmake/nvcc_log.sh keeps), prints a table, and
fails when a kernel is worse than its line in tools/kernel_budget.json, has no line there, or when
ptxas gave an advisory (C7508, C7510-C7516: setmaxnreg ignored, wgmma serialised, ...) or used
local memory that the budget does not allow.
"""

from __future__ import annotations

import pathlib
import re
import sys

import kernel_budget as budget

LIMITS = ("registers", "stack_bytes", "spill_bytes", "smem_bytes")
LIMITS_OF_EVERY_NVCC = ("stack_bytes", "spill_bytes")


def parse(log: str, file: str = "") -> dict[tuple[str, str, str], budget.Figures]:
    """(row, architecture, kernel) -> figures, of one object's log. Instances of one template that
    share a name are joined by their largest figures. ``file``: of cuda/kernels.def; a kernel of
    another file has the empty row."""
    result: dict[tuple[str, str], budget.Figures] = {}
    current: budget.Figures = {}
    advisories: list[str] = []
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            row = budget.row_of(file, entry[1]) if file else ""
            key = (row, entry[2], budget.kernel_name(entry[1]))
            current = result.setdefault(key, dict.fromkeys(LIMITS, 0))
        elif frame := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            raise_to(current, "stack_bytes", int(frame[1]))
            raise_to(current, "spill_bytes", int(frame[2]) + int(frame[3]))
        elif used := re.search(r"Used (\d+) registers", line):
            raise_to(current, "registers", int(used[1]))
            smem = re.search(r"(\d+) bytes smem", line)
            raise_to(current, "smem_bytes", int(smem[1]) if smem else 0)
        if code := re.search(r"\((C\d{4})\)", line):
            advisories.append(code[1])
    for figures in result.values():
        figures["advisories"] = sorted(set(advisories))
    return result


def raise_to(figures: budget.Figures, name: str, value: int) -> None:
    figures[name] = max(figures.get(name, 0), value)


def read_build(build: pathlib.Path) -> tuple[dict[str, budget.Figures], list[str]]:
    """All kernels of a build, and the rows of the kernel table that left no log."""
    found: dict[str, budget.Figures] = {}
    rows = budget.row_names(build)
    files = {budget.file_of(row) for row in rows}
    seen = set()
    for path in sorted(build.rglob("*.cu.o.ptxas")):
        file = path.name.removesuffix(".cu.o.ptxas")
        generated = path.parent.name == "instances"
        if generated and file not in files:
            continue  # left behind by rows that are gone
        for (row, arch, kernel), figures in parse(path.read_text(), generated * file).items():
            seen.add(row)
            owner = row or f"{path.parent.name}_{file}"  # of a family's folder: hopper_row_kernels
            found[f"{owner}/{arch}/{kernel}"] = figures
    return found, [row for row in rows if row not in seen]


def worse(
    found: budget.Figures, allowed: budget.Figures, limits: tuple[str, ...] = LIMITS
) -> list[str]:
    problems = [
        f"{name} {found[name]}, budget {allowed[name]}"
        for name in limits
        if found[name] > allowed[name]
    ]
    new = sorted(set(found["advisories"]) - set(allowed["advisories"]))
    return problems + [f"ptxas advisory {code}" for code in new]


def worse_elsewhere(found: budget.Figures, allowed: budget.Figures) -> list[str]:
    return worse(found, allowed, LIMITS_OF_EVERY_NVCC)


def read_and_print(build: pathlib.Path) -> tuple[dict[str, budget.Figures], list[str]]:
    found, missing = read_build(build)
    if not found:
        raise SystemExit(f"no ptxas logs under {build}: was it built with CUDA?")
    width = max(len(key) for key in found)
    print(f"{'kernel':{width}}  registers  stack  spills   smem  advisories")
    for key, f in sorted(found.items()):
        print(
            f"{key:{width}}  {f['registers']:9}  {f['stack_bytes']:5}  {f['spill_bytes']:6}  "
            f"{f['smem_bytes']:5}  {' '.join(f['advisories']) or '-'}"
        )
    return found, [f"{row}: a row of kernels.def that left no ptxas log" for row in missing]


if __name__ == "__main__":
    sys.exit(budget.report("ptxas", __doc__, read_and_print, worse, worse_elsewhere))
