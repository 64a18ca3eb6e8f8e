"""Kernels that are compiled at run time: where their compiler may be, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pantile import _C
from pantile._options import log
from pantile._report import Progress, print_table

# Where pip packages put NVRTC, for CUDA 13 and 12.
_NVRTC_PLACES = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_LEVELS = (10, 20, 30)  # of logging, by pantile::jit::LogLevel

COMPILE_HELP = """Compiles kernels by NVRTC, without a GPU, into a folder for machines that
have no compiler: PANTILE_CACHE names it there. The list is a TOML file:

  [[kernel]]
  name = "mine"       # for messages
  source = '#include "hopper/forward/kernel.cuh"'
  entry = "mine"      # an extern "C" kernel, or an instance of a template
  arch = 90           # or 80
"""
_FIELDS = {"name": str, "source": str, "entry": str, "arch": int}


def nvrtc_folders() -> list[str]:
    """Folders of this Python's packages that may hold NVRTC."""
    found = [os.path.join(part, place) for place in _NVRTC_PLACES for part in sys.path]
    return [folder for folder in found if ":" not in folder and os.path.isdir(folder)]


def _say(level: int, text: str) -> None:
    log.log(_LEVELS[level], "%s", text)


def install() -> None:
    """Tells the library; nothing is loaded before a call needs it."""
    shipped = os.path.join(os.path.dirname(__file__), "kernels")
    _C.set_jit(":".join(nvrtc_folders()), shipped, _say)


def describe_nvrtc() -> str:
    found, text = _C.find_nvrtc()
    return f"NVRTC {text}" if found else text


def read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    with path.open("rb") as file:
        try:
            return tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not TOML: {error}") from None


def _read_list(path: Path) -> list[dict[str, Any]]:
    """The kernels that a TOML file lists, checked."""
    content = read_toml(path)
    unknown = sorted(set(content) - {"kernel"})
    if unknown or not isinstance(content.get("kernel", []), list):
        raise ValueError(f"{path} has {unknown or 'kernel'}; it must have tables [[kernel]] only")
    rows = content.get("kernel", [])
    if not rows:
        raise ValueError(f"{path} lists no [[kernel]]")
    for number, row in enumerate(rows, 1):
        where = f"{path}, kernel {number}"
        if set(row) != set(_FIELDS):
            raise ValueError(f"{where} has {sorted(row)}; it must have {sorted(_FIELDS)}")
        for field, kind in _FIELDS.items():
            if type(row[field]) is not kind:
                raise ValueError(f"{where}: {field} is {row[field]!r}; it must be {kind.__name__}")
    return rows


def compile_list(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Compiles the kernels that a TOML file lists into a folder. Needs NVRTC and no GPU."""
    rows = _read_list(path)
    progress = Progress(len(rows))
    made = []
    try:
        for row in rows:
            progress.start(row["name"])
            made.append(_C.compile_kernel(folder=os.fspath(folder), **row))
    finally:
        progress.finish()
    return made


def print_facts(made: list[dict[str, Any]]) -> None:
    columns = ["kernel", "registers", "spills", "KB", "seconds", "advisories"]
    rows = [
        [
            one["name"],
            str(one["registers"]),
            str(one["spill_bytes"]),
            f"{one['bytes'] / 1024:.0f}",
            f"{one['seconds']:.2f}",
            one["advisories"] or "-",
        ]
        for one in made
    ]
    print_table(f"compiled by {describe_nvrtc()}", columns, rows)
