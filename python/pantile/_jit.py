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

  [[attention]]              # kernels of a variant; what is left out is off
  backend = "hopper"         # or "ampere"
  dtype = "bf16"             # or "f16"
  head_dim = 128
  mask = "causal"            # or "full", "window"
  softcap = true
  alibi = true
  dropout = true
  bias = "as q"              # or "f32"
  gradients = ["alibi"]      # "alibi", "bias": those that are trained
  passes = ["forward"]       # default: and "backward"
  deterministic = false
  head_dim_v = 128           # these have defaults; they decide the tile of some
  seqlen_q = 4096            # kernels, as do seqlen_k, batch, heads_q, heads_k

  [[kernel]]                 # a kernel of your own
  name = "mine"              # for messages
  source = '#include "hopper/forward/kernel.cuh"'
  entry = "mine"             # an extern "C" kernel, or instance of a template
  arch = 90                  # or 80
"""
_KERNEL = {"name": str, "source": str, "entry": str, "arch": int}
_ATTENTION: dict[str, Any] = {
    "backend": None,  # None: must be given
    "dtype": None,
    "head_dim": None,
    "mask": None,
    "softcap": False,
    "alibi": False,
    "dropout": False,
    "bias": "none",
    "gradients": [],
    "passes": ["forward", "backward"],
    "deterministic": False,
    "head_dim_v": 0,  # 0: that of q
    "seqlen_q": 4096,
    "seqlen_k": 4096,
    "batch": 1,
    "heads_q": 16,
    "heads_k": 16,
}
_TYPES = {"backend": str, "dtype": str, "mask": str, "head_dim": int}
_SIZES = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


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


def _check_fields(where: str, row: dict[str, Any], types: dict[str, type], needed: set) -> None:
    missing, unknown = sorted(needed - set(row)), sorted(set(row) - set(types))
    if missing or unknown:
        what = f"lacks {missing}" if missing else f"has {unknown}"
        raise ValueError(f"{where} {what}; it may have {sorted(types)}")
    for field, value in row.items():
        if type(value) is not types[field]:
            raise ValueError(f"{where}: {field} is {value!r}; it must be {types[field].__name__}")


def _check_words(where: str, field: str, words: list[Any], allowed: tuple[str, ...]) -> None:
    for word in words:
        if word not in allowed:
            raise ValueError(f"{where}: {field} has {word!r}; it must have {', '.join(allowed)}")


def _read_attention(where: str, row: dict[str, Any]) -> dict[str, Any]:
    types = {name: _TYPES.get(name, type(value)) for name, value in _ATTENTION.items()}
    _check_fields(where, row, types, {name for name, value in _ATTENTION.items() if value is None})
    row = {**_ATTENTION, **row}
    row["head_dim_v"] = row["head_dim_v"] or row["head_dim"]
    _check_words(where, "passes", row["passes"], ("forward", "backward"))
    _check_words(where, "gradients", row["gradients"], ("alibi", "bias"))
    for gradient in row["gradients"]:
        if row[gradient] in (False, "none"):
            raise ValueError(f"{where}: gradients has {gradient!r}, but {gradient} is not given")
    return row


def _read_list(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """What a TOML file lists, checked: the kind of each entry, and its fields."""
    content = read_toml(path)
    kinds = {"attention", "kernel"}
    if set(content) - kinds or not all(isinstance(rows, list) for rows in content.values()):
        raise ValueError(f"{path} must have tables [[attention]] and [[kernel]] only")
    entries = []
    for kind in sorted(content):
        for number, row in enumerate(content[kind], 1):
            where = f"{path}, {kind} {number}"
            if kind == "kernel":
                _check_fields(where, row, _KERNEL, set(_KERNEL))
            else:
                row = _read_attention(where, row)
            entries.append((kind, row))
    if not entries:
        raise ValueError(f"{path} lists no [[attention]] and no [[kernel]]")
    return entries


def _compile_attention(row: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    made = []
    for pass_ in row["passes"]:
        backward = pass_ == "backward"
        made += _C.compile_attention(
            pass_=pass_,
            sizes=tuple(row[size] for size in _SIZES),
            grad_alibi=backward and "alibi" in row["gradients"],
            grad_bias=backward and "bias" in row["gradients"],
            folder=folder,
            **{name: row[name] for name in ("backend", "dtype", "mask", "softcap", "alibi")},
            **{name: row[name] for name in ("bias", "dropout", "deterministic")},
        )
    if not made:
        raise ValueError(f"the library has all kernels of {row}; nothing is compiled for it")
    return made


def compile_list(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Compiles what a TOML file lists into a folder. Needs NVRTC and no GPU."""
    entries = _read_list(path)
    progress = Progress(len(entries))
    made = []
    try:
        for kind, row in entries:
            if kind == "kernel":
                progress.start(row["name"])
                made.append(_C.compile_kernel(folder=os.fspath(folder), **row))
            else:
                progress.start(f"{row['backend']} {row['dtype']} d{row['head_dim']} {row['mask']}")
                made += _compile_attention(row, os.fspath(folder))
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
