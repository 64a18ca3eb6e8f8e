"""The committed budget of the compiled kernels, tools/kernel_budget.json, and how it is held.

Two reports share the file: `ptxas` (kernel_report.py) and `sass` (sass_report.py). An entry is one
line, so that a change of a kernel shows in review as one changed line.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

Figures = dict[str, Any]
MASKS = ("full", "causal", "window", "any")  # in the order of MaskKind (registry.h)
DTYPES = ("f32", "f16", "bf16", "e4m3")  # in the order of DType (dtype.h)
BUDGET = pathlib.Path(__file__).with_name("kernel_budget.json")


def load() -> dict[str, Any]:
    if not BUDGET.exists():
        return {"nvcc": "", "ptxas": {}, "sass": {}}
    return json.loads(BUDGET.read_text())


def save(
    section: str, nvcc: str, entries: dict[str, Figures], left_out: tuple[str, ...] = ()
) -> None:
    """Replaces one section and writes the file, one entry a line, sorted. Entries of kernels that
    the build leaves out stay."""
    budget = load()
    kept = {k: v for k, v in budget[section].items() if needed_option(k) in left_out}
    budget["nvcc"] = nvcc
    budget[section] = kept | entries
    parts = [f'  "nvcc": {json.dumps(budget["nvcc"])}']
    for name in ("ptxas", "sass"):
        lines = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(budget[name].items())]
        parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    BUDGET.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def build_fact(build: pathlib.Path, name: str) -> str:
    """One string of the build's own description, generated/build_info.h."""
    text = (build / "generated" / "build_info.h").read_text()
    found = re.search(rf'"{name}": "([^"]*)"', text)
    if not found:
        raise SystemExit(f"{build}/generated/build_info.h does not say {name}")
    return found[1]


def nvcc_release(build: pathlib.Path) -> str:
    """Major and minor version of the build's nvcc: figures of different releases differ."""
    return ".".join(build_fact(build, "nvcc").split(".")[:2])


def needed_option(key: str) -> str:
    """The option of CMakeLists.txt without which a build has no kernel of this entry; or none."""
    row, _, kernel = key.partition("/")
    if "trial_" in kernel:
        return "experiments"
    on_hopper = (
        kernel.startswith("sm_90/")
        and row.startswith("ampere_")
        and ("_f32_" not in row or "_quantize_" in row)
    )
    return "ampere_on_hopper" if on_hopper else ""


def left_out(build: pathlib.Path) -> tuple[str, ...]:
    """The options that are off in a build."""
    text = (build / "generated" / "build_info.h").read_text()
    return tuple(x for x in ("experiments", "ampere_on_hopper") if f'"{x}": true' not in text)


def row_names(build: pathlib.Path) -> list[str]:
    """The rows of cuda/kernels.def that this build compiled."""
    text = (build / "generated" / "kernel_rows.inc").read_text()
    return re.findall(r"^PANTILE_KERNEL_ROW\((\w+),", text, re.M)


def file_of(row: str) -> str:
    """The generated file with the instance of a row: rows that differ in the mask, or in bf16 or
    f16, share one."""
    return re.sub(r"_b?f16_", "_16bit_", row.rpartition("_")[0])


def row_of(file: str, mangled: str) -> str:
    """The row of a kernel in such a file, by the MaskKind and the DType among its template
    arguments. A kernel without a MaskKind is of a row for any mask."""
    mask = re.search(r"8MaskKindE(\d)E", mangled)
    if "_16bit_" in file:
        dtype = re.search(r"5DTypeE(\d)E", mangled)
        if not dtype:
            raise SystemExit(f"{file}: no DType among the template arguments of {mangled}")
        file = file.replace("_16bit_", f"_{DTYPES[int(dtype[1])]}_")
    return f"{file}_{MASKS[int(mask[1])] if mask else 'any'}"


def kernel_name(mangled: str) -> str:
    """The last identifier of a mangled name: _ZN7pantile6hopper7forwardI...  ->  forward."""
    rest = re.sub(r"^_ZN?K?", "", mangled)
    name = mangled
    while match := re.match(r"\d+", rest):
        length = int(match[0])
        name = rest[match.end() : match.end() + length]
        rest = rest[match.end() + length :]
    return name


def compare(
    section: str,
    nvcc: str,
    found: dict[str, Figures],
    worse: Callable[[Figures, Figures], list[str]],
    worse_elsewhere: Callable[[Figures, Figures], list[str]],
    left_out: tuple[str, ...] = (),
) -> list[str]:
    """What is wrong: kernels the budget does not list, listed kernels that are gone, but for those
    that need an option that is off, and figures that `worse(found, budgeted)` names. Releases of
    nvcc allocate registers and order instructions differently: figures of another release are held
    to `worse_elsewhere`."""
    if not BUDGET.exists():
        return [f"there is no {BUDGET.name}: make it with --update"]
    budget = load()
    if budget["nvcc"] != nvcc:
        print(f"the budget is of nvcc {budget['nvcc']}, this build of {nvcc}: only what must hold")
        print("for every compiler is checked")
        worse = worse_elsewhere
    allowed = budget[section]
    errors = [f"{key}: not in the budget" for key in found if key not in allowed]
    errors += [
        f"{key}: in the budget, but not in this build"
        for key in allowed
        if key not in found and needed_option(key) not in left_out
    ]
    for key in sorted(found.keys() & allowed.keys()):
        errors += [f"{key}: {problem}" for problem in worse(found[key], allowed[key])]
    return errors


def report(
    section: str,
    doc: str,
    read: Callable[[pathlib.Path], tuple[dict[str, Figures], list[str]]],
    worse: Callable[[Figures, Figures], list[str]],
    worse_elsewhere: Callable[[Figures, Figures], list[str]],
) -> int:
    """The program of a report: `read(build)` prints and returns its figures, and what is wrong with
    the build itself. Returns the exit status."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="a build folder with CUDA kernels")
    parser.add_argument("--update", action="store_true", help="make these figures the budget")
    chosen = parser.parse_args()
    found, errors = read(chosen.build)
    nvcc, absent = nvcc_release(chosen.build), left_out(chosen.build)
    if chosen.update and not errors:
        save(section, nvcc, found, absent)
    errors += compare(section, nvcc, found, worse, worse_elsewhere, absent)
    for error in errors:
        print(f"error: {error}")
    if errors:
        print(f"{len(errors)} problems. Intended? --update, and review the change.")
        return 1
    print(f"{section}: within budget")
    return 0
