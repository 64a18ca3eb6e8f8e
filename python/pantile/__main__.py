"""``python -m pantile info | kernels | check | bench``: what there is, is it right, is it fast."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys

import pantile
from pantile import _info
from pantile._report import print_table
from pantile.bench import command


def _load_torch() -> str:
    """torch's version, or why it is missing."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    pantile.load_torch()
    return torch.__version__


def _describe(device: dict) -> str:
    if device["type"] == "cpu":
        return f"{device['name']}, {device['isa']}, {device['threads']} threads"
    major, minor = device["compute_capability"]
    return (
        f"{device['name']}, compute capability {major}.{minor}, "
        f"{device['multiprocessors']} multiprocessors"
    )


def info(_: argparse.Namespace) -> int:
    torch_version = _load_torch()
    build = pantile.build_info()
    rows = [
        ["pantile", pantile.__version__],
        ["python", platform.python_version()],
        ["torch", torch_version],
        ["tensors", _info.tensor_path()],
    ]
    rows += [[f"build: {key}", str(value)] for key, value in build.items() if key != "version"]
    for device in pantile.devices():
        rows.append([f"{device['type']}:{device['index']}", _describe(device)])
    if pantile.cuda_reason():
        rows.append(["cuda", pantile.cuda_reason()])
    table = pantile.kernels()
    for backend in dict.fromkeys(row["backend"] for row in table):
        mine = [row for row in table if row["backend"] == backend]
        compiled = sum(row["compiled"] for row in mine)
        rows.append([f"backend {backend}", f"{compiled} of {len(mine)} kernels compiled"])
    print_table("pantile info", ["what", "value"], rows)
    return 0


def kernels(_: argparse.Namespace) -> int:
    columns = ["name", "backend", "pass", "dtype", "head_dim", "head_dim_v", "mask", "compiled"]
    rows = [
        ["yes" if row[c] is True else "no" if row[c] is False else str(row[c]) for c in columns]
        for row in pantile.kernels()
    ]
    print_table("kernels, in the order in which they are tried", columns, rows)
    return 0


def check(arguments: argparse.Namespace) -> int:
    if _load_torch() == "not installed":
        print("pantile check compares with torch, which is not installed", file=sys.stderr)
        return 2
    from pantile._check import check_rows

    found = list(check_rows(arguments.backend))
    rows = [
        [
            row.verdict,
            row.backend,
            row.dtype,
            str(row.head_dim),
            row.mask,
            row.pass_,
            "" if row.error is None else f"{row.error:.2e}",
            "" if row.bound is None else f"{row.bound:.2e}",
            row.kernel,
        ]
        for row in found
    ]
    columns = ["", "backend", "dtype", "head_dim", "mask", "pass", "error", "bound", "kernel"]
    print_table("largest error against float64; bound: twice the textbook's", columns, rows)
    failed = sum(row.verdict == "FAIL" for row in found)
    served = sum(row.error is not None for row in found)
    print(f"{served - failed} ok, {failed} failed, {len(found) - served} not served by any kernel")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pantile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="devices, backends, build").set_defaults(run=info)
    commands.add_parser("kernels", help="the kernel table").set_defaults(run=kernels)
    checker = commands.add_parser("check", help="every available backend against float64")
    checker.add_argument(
        "--backend",
        action="append",
        choices=["hopper", "ampere", "cpu", "reference"],
        help="only this backend; may be repeated",
    )
    checker.set_defaults(run=check)
    measure = commands.add_parser("bench", help="speed on this machine against torch")
    command.add_arguments(measure)
    measure.set_defaults(run=command.bench)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
