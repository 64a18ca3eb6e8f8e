#!/usr/bin/env python3
"""Holds the sources to the layers and sizes of CONTRIBUTING.md.

* Includes: a folder may include only what LAYERS allows (down the stack, plus cpp/core). A project
  header must exist.
* Sizes: lines of a file, of a function at namespace scope, and columns.
* Words: no work notes, no printing from kernels.

Reads the files git knows or would add, so build trees do not count.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

PUBLIC, CORE = "cpp/include/pantile/", "cpp/core/"
FAMILY_PLANS = ["cuda/backend.h", "cuda/hopper/plan.h", "cuda/ampere/plan.h"]
HOST = [PUBLIC, CORE, "cpp/host/"]
TILES = ["cuda/tile/", "cuda/prim/", CORE, PUBLIC]
KERNELS = ["cuda/common/", "cuda/attn/", "cuda/driver.h", *TILES]

# What the files under a prefix may include; the longest prefix that fits a file counts.
LAYERS = {
    "cpp/include/": [PUBLIC],
    "cpp/core/": [CORE],
    "cpp/host/": [*HOST, "cpp/cpu/backend.h", *FAMILY_PLANS],
    "cpp/cpu/": [PUBLIC, CORE, "cpp/cpu/"],
    "cuda/prim/": ["cuda/prim/", CORE, f"{PUBLIC}dtype.h"],
    "cuda/tile/": TILES,
    "cuda/attn/": ["cuda/attn/", *TILES],
    "cuda/common/": KERNELS,
    "cuda/hopper/": ["cuda/hopper/", *KERNELS],
    "cuda/ampere/": ["cuda/ampere/", *KERNELS],
    "cuda/driver.": [PUBLIC],
    "cuda/backend.": [PUBLIC, "cuda/backend.h", "cuda/driver.h"],
    "python/bindings/": [PUBLIC, "python/bindings/"],
    "tests/consumer/": [PUBLIC],
    "examples/": [PUBLIC],
    "tests/core/": [CORE, PUBLIC, "tests/core/"],
    "tests/": [""],
    "benchmarks/": [PUBLIC],
}
INCLUDE_ROOTS = ("cpp/include", "cpp", "cuda")
GENERATED = {"build_info.h", "kernel_rows.inc"}  # in the build tree, for cpp/host and its tests

COLUMNS = 100
FILE_LINES = {".cuh": 450, ".cu": 450, ".h": 450, ".cc": 450, ".py": 600}
FUNCTION_LINES = 60
ROLE_LINES = 120  # in cuda/, where a role's main loop is one function

CODE = (".h", ".cc", ".cuh", ".cu", ".py")
CXX = (".h", ".cc", ".cuh", ".cu")
WORK_NOTES = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def sources() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(done.stdout.split("\n"))
    return sorted(f for f in listed if f.endswith(CODE) and (ROOT / f).exists())


def resolve(file: str, included: str) -> str | None:
    """The project file that an include means; None when there is none."""
    folder = str(pathlib.PurePosixPath(file).parent)
    for root in (folder, *INCLUDE_ROOTS):
        if (ROOT / root / included).is_file():
            return f"{root}/{included}"
    return None


def check_includes(file: str, text: str) -> list[str]:
    prefix = max((p for p in LAYERS if file.startswith(p)), key=len, default=None)
    if prefix is None:
        return [f"{file}: no layer is known for this folder; add it to LAYERS"]
    errors = []
    for number, line in enumerate(text.splitlines(), 1):
        quoted = re.match(r'\s*#include "([^"]+)"', line)
        angled = re.match(r"\s*#include <(pantile/[^>]+|(?:core|host|cpu)/[^>]+)>", line)
        if not (quoted or angled):
            continue
        included = (quoted or angled)[1]
        target = resolve(file, included)
        if target is None:
            if not (included in GENERATED and file.startswith(("cpp/host/", "tests/host/"))):
                errors.append(f"{file}:{number}: {included} is no file of the project")
        elif not target.startswith(tuple(LAYERS[prefix])):
            errors.append(f"{file}:{number}: {prefix} may not include {target}")
    return errors


def is_function_head(head: str) -> bool:
    """Whether the text before a brace opens a function, not a namespace, type or initialiser."""
    record = re.search(r"\b(namespace|struct|union|enum)\b|\bclass \w+ *(final|:|$)", head)
    return ")" in head and not record and not head.endswith("=")


def check_functions(file: str, lines: list[str]) -> list[str]:
    """Length of the functions at namespace scope and in types at namespace scope. clang-format's
    layout is relied on: namespaces do not indent, and a function ends at its own indentation."""
    errors = []
    limit = ROLE_LINES if file.startswith("cuda/") else FUNCTION_LINES
    head, indent = "", 0  # the declaration being read, and where its first line starts
    start, closing = 0, ""  # the function being counted, and how its last line starts
    for number, raw in enumerate(lines, 1):
        line = re.sub(r"\s*//.*", "", raw)
        if start:
            if line.startswith(closing):
                length = number - start + 1
                if length > limit:
                    errors.append(f"{file}:{start}: a function of {length} lines, at most {limit}")
                start = 0
            continue
        if not head:
            indent = len(line) - len(line.lstrip())
        head = f"{head} {line.strip()}".strip()
        if line.endswith("{"):
            if is_function_head(head[:-1].strip()):
                start, closing = number, " " * indent + "}"
            head = ""
        elif not line or line.startswith("#") or line.endswith((";", "}", ":")):
            head = ""
    return errors


def check_text(file: str, text: str) -> list[str]:
    lines = text.splitlines()
    limit = FILE_LINES[pathlib.PurePosixPath(file).suffix]
    errors = []
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        if len(line) > COLUMNS:
            errors.append(f"{where}: {len(line)} columns, at most {COLUMNS}")
        if file != "tools/check_layers.py" and WORK_NOTES.search(line):
            errors.append(f"{where}: a work note")
        if file.startswith("cuda/") and re.search(r"(?<![\w:])printf\(", line):
            errors.append(f"{where}: printf in a kernel file")
    if len(lines) > limit and not file.startswith("tests/"):
        errors.append(f"{file}: {len(lines)} lines, at most {limit}")
    return errors


def main() -> int:
    errors, files = [], sources()
    for file in files:
        text = (ROOT / file).read_text()
        errors += check_text(file, text)
        if file.endswith(CXX):
            errors += check_includes(file, text) + check_functions(file, text.splitlines())
    print(*errors, f"{len(files)} files, {len(errors)} problems", sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
