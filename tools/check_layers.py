#!/usr/bin/env python3
"""Holds the sources to the layers and sizes of CONTRIBUTING.md.

* Includes: a folder may include only what LAYERS allows (down the stack, plus cpp/core). A project
  header must exist.
* Sizes: lines of a file, of a function at namespace scope, and columns.
* Words: no work notes, no printing from kernels.
* Pages: columns of prose, lines of a design page.

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
JIT = "cpp/jit/"
LOADED = f"{JIT}loaded_kernel.h"
HOST = [PUBLIC, CORE, JIT, "cpp/host/", "cpp/expression/"]
TILES = ["cuda/tile/", "cuda/prim/", CORE, PUBLIC]
KERNELS = ["cuda/common/", "cuda/attn/", "cuda/driver.h", *TILES]

# What the files under a prefix may include; the longest prefix that fits a file counts.
LAYERS = {
    "cpp/include/": [PUBLIC],
    "cpp/core/": [CORE],
    "cpp/host/": [*HOST, "cpp/cpu/backend.h", *FAMILY_PLANS],
    "cpp/expression/": [PUBLIC, CORE, "cpp/expression/"],
    "cpp/cpu/": [PUBLIC, CORE, "cpp/cpu/", "cpp/expression/"],
    "cpp/jit/": [PUBLIC, JIT],
    "cuda/prim/": ["cuda/prim/", CORE, f"{PUBLIC}dtype.h"],
    "cuda/tile/": TILES,
    "cuda/attn/": ["cuda/attn/", *TILES],
    "cuda/common/": KERNELS,
    "cuda/common/expressions.": [*KERNELS, "cpp/expression/"],
    "cuda/decode/": ["cuda/decode/", *KERNELS],
    "cuda/hopper/": ["cuda/hopper/", "cuda/decode/", "cpp/expression/", JIT, *KERNELS],
    "cuda/ampere/": ["cuda/ampere/", "cuda/decode/", "cpp/expression/", JIT, *KERNELS],
    "cuda/driver.": [PUBLIC, LOADED],
    "cuda/backend.": [PUBLIC, "cuda/backend.h", "cuda/driver.h"],
    "python/bindings/": [PUBLIC, "python/bindings/"],
    "tests/consumer/": [PUBLIC],
    "examples/": [PUBLIC, "examples/"],
    "tests/core/": [CORE, PUBLIC, "tests/core/"],
    "tests/": [""],
    "benchmarks/": [PUBLIC],
}
INCLUDE_ROOTS = ("cpp/include", "cpp", "cuda")
# In the build tree, and who may include them.
GENERATED = {
    "build_info.h": ("cpp/host/", JIT, "tests/host/"),
    "kernel_rows.inc": ("cpp/host/", "tests/host/"),
    **{
        f"kernel_rows_{name}.inc": ("cpp/host/",)
        for name in ("forward", "backward", "quantize", "decode", "append")
    },
    "build_options.h": ("cuda/ampere/", "cuda/hopper/", "tests/host/"),
}

COLUMNS = 100
FILE_LINES = {".cuh": 450, ".cu": 450, ".h": 450, ".cc": 450, ".py": 600}
FUNCTION_LINES = 60
ROLE_LINES = 120  # in cuda/, where a role's main loop is one function

DESIGN_LINES = 150  # of a page in docs/design
GENERATED_PAGES = {"docs/gpu-verification.md"}

CODE = (".h", ".cc", ".cuh", ".cu", ".py")
CXX = (".h", ".cc", ".cuh", ".cu")
WORK_NOTES = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def project_files(suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Those that end in one of the suffixes."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(done.stdout.splitlines())
    return sorted(f for f in listed if f.endswith(suffixes) and (ROOT / f).exists())


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
            if not file.startswith(GENERATED.get(included, ())):
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
    errors = [
        f"{file}:{n}: {len(line)} columns, at most {COLUMNS}"
        for n, line in enumerate(lines, 1)
        if len(line) > COLUMNS
    ]
    limit = FILE_LINES[pathlib.PurePosixPath(file).suffix]
    if len(lines) > limit and not file.startswith("tests/"):
        errors.append(f"{file}: {len(lines)} lines, at most {limit}")
    if file != "tools/check_layers.py":
        errors += [
            f"{file}:{n}: a work note" for n, line in enumerate(lines, 1) if WORK_NOTES.search(line)
        ]
    if file.startswith("cuda/"):
        errors += [
            f"{file}:{n}: printf in a kernel file"
            for n, line in enumerate(lines, 1)
            if re.search(r"(?<![\w:])printf\(", line)
        ]
    return errors


def check_page(file: str, text: str) -> list[str]:
    """Columns of a page outside of tables and generated blocks, which cannot be wrapped, and the
    length of a design page. A line without a space cannot be wrapped either."""
    errors = []
    generated = False
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if re.match(r"<!-- .+: begin -->$", line):
            generated = True
        elif re.match(r"<!-- .+: end -->$", line):
            generated = False
        elif len(line) > COLUMNS and " " in line and not (generated or line.startswith("|")):
            errors.append(f"{file}:{number}: {len(line)} columns, at most {COLUMNS}")
    if file.startswith("docs/design/") and len(lines) > DESIGN_LINES:
        errors.append(f"{file}: {len(lines)} lines, a design page has at most {DESIGN_LINES}")
    return errors


def main() -> int:
    errors = []
    files = project_files(CODE)
    pages = [page for page in project_files((".md",)) if page not in GENERATED_PAGES]
    for page in pages:
        errors += check_page(page, (ROOT / page).read_text())
    for file in files:
        text = (ROOT / file).read_text()
        errors += check_text(file, text)
        if file.endswith(CXX):
            errors += check_includes(file, text)
            errors += check_functions(file, text.splitlines())
    for error in errors:
        print(error)
    print(f"{len(files)} files, {len(pages)} pages, {len(errors)} problems")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
