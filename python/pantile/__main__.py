"""What there is on this machine, is it right, is it fast: info, kernels, check, bench, compile."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import platform
import sys

import pantile
from pantile import _info, _jit
from pantile._report import INTERRUPTED, Progress, print_table, run_to_the_end
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


def _why_no_cuda() -> str:
    reason = pantile.cuda_reason()
    return f"{reason} (is there an NVIDIA driver?)" if "InsufficientDriver" in reason else reason


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
    rows.append(["cuda", _why_no_cuda()])
    rows.append(["compiler", _jit.describe_nvrtc()])
    table = pantile.kernels()
    for backend in dict.fromkeys(row["backend"] for row in table):
        mine = [row for row in table if row["backend"] == backend]
        compiled = sum(row["compiled"] for row in mine)
        rows.append([f"backend {backend}", f"{compiled} of {len(mine)} kernels compiled"])
    print_table("pantile info", ["what", "value"], [row for row in rows if row[1]])
    return 0


def kernels(_: argparse.Namespace) -> int:
    columns = ["name", "backend", "pass", "dtype", "head_dim", "head_dim_v", "mask", "compiled"]
    rows = [
        ["yes" if row[c] is True else "no" if row[c] is False else str(row[c]) for c in columns]
        for row in pantile.kernels()
    ]
    title = "kernels, in the order in which they are tried"
    # What the name says too may be left out.
    print_table(title, columns, rows, ("backend", "pass", "dtype", "mask", "head_dim_v"))
    return 0


def check(arguments: argparse.Namespace) -> int:
    if _load_torch() == "not installed":
        print("pantile check compares with torch, which is not installed", file=sys.stderr)
        return 2
    from pantile._check import check_rows

    found, progress, interrupted = [], Progress(), False
    try:
        for row in check_rows(arguments.backend):
            found.append(row)
            progress.start(f"{row.kernel}, {row.mask}: {row.verdict}")
    except KeyboardInterrupt:
        interrupted = True
    progress.finish()
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
    title = "largest error against float64; bound: twice the textbook's"
    print_table(title, columns, rows, ("backend", "dtype", "pass", "head_dim"))
    failed = sum(row.verdict == "FAIL" for row in found)
    served = sum(row.error is not None for row in found)
    early = "interrupted: " if interrupted else ""
    print(
        f"{early}{served - failed} ok, {failed} failed, {len(found) - served} not served by any "
        "kernel"
    )
    if interrupted:
        return INTERRUPTED
    return 1 if failed else 0


def compile_kernels(arguments: argparse.Namespace) -> int:
    try:
        made = _jit.compile_list(arguments.list, arguments.out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"pantile compile: {error}", file=sys.stderr)
        return 2
    _jit.print_facts(made)
    print(f"written to {arguments.out}; PANTILE_CACHE={arguments.out} makes calls find them")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="pantile", description=__doc__)
    p.add_argument("--version", action="version", version=f"pantile {pantile.__version__}")
    commands = p.add_subparsers(dest="command", metavar="command")
    for name, run, what in (
        ("info", info, "devices, backends, build"),
        ("kernels", kernels, "the kernel table"),
        ("check", check, "every available backend against float64"),
        ("bench", command.bench, "speed on this machine against torch"),
        ("compile", compile_kernels, "kernels for machines without a compiler"),
    ):
        text = {"bench": command.__doc__, "compile": _jit.COMPILE_HELP}.get(name, f"{what}.")
        form = argparse.RawDescriptionHelpFormatter
        one = commands.add_parser(name, help=what, description=text, formatter_class=form)
        one.set_defaults(run=run)
        if name == "bench":
            command.add_arguments(one)
        if name == "check":
            one.add_argument(
                "--backend",
                action="append",
                choices=["hopper", "ampere", "cpu", "reference"],
                help="only this backend; may be repeated (default: all that this machine has)",
            )
        if name == "compile":
            one.add_argument(
                "--list", required=True, type=pathlib.Path, metavar="FILE", help="a TOML file"
            )
            one.add_argument(
                "-o", "--out", required=True, type=pathlib.Path, metavar="FOLDER", help="where to"
            )
    return p


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    chosen = p.parse_args(arguments)
    if chosen.command is None:
        p.print_help()
        return 0
    return chosen.run(chosen)


def command_line() -> int:
    """The entry point of ``pantile`` and ``python -m pantile``."""
    return run_to_the_end(main)


if __name__ == "__main__":
    sys.exit(command_line())
