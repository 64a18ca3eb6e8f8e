#!/usr/bin/env python3
"""Adds compiled kernels of common variants to a wheel, so that their first call compiles nothing.

usage: wheel_seeds.py WHEEL [--list tools/seeds.toml] [--most-kb 700]

The library in the wheel makes them, by `pantile compile`: so they have the keys that it looks for
at run time (docs/design/jit.md). Needs NVRTC and no GPU. Kernels with an advisory of the compiler
are refused, and so is a list whose kernels take more room in the wheel than --most-kb; the wheel
stays as it was then.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

LIST = pathlib.Path(__file__).with_name("seeds.toml")
FOLDER = "pantile/kernels"  # of the package, where pantile looks first
HEAD_BYTES = 4096  # more than the text before the machine code of a file
MODE = 0o100644 << 16  # a file that not everybody may write to: others are not loaded


def compile_kernels(site: pathlib.Path, kernels: pathlib.Path, folder: pathlib.Path) -> None:
    """By the package unpacked in ``site``."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-m", "pantile", "compile", "--list", str(kernels), "-o", str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=site,
    )


def fields_of(file: pathlib.Path) -> dict[str, str]:
    """The head of a kernel's file."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES).partition(b"\nbytes ")[0].decode()
    return dict(line.partition(" ")[::2] for line in head.splitlines())


def check_kernels(files: list[pathlib.Path]) -> None:
    if not files:
        raise SystemExit("no kernel was compiled")
    slow = [fields_of(f) for f in files]
    slow = [x for x in slow if x["advisories"]]
    if slow:
        raise SystemExit(
            "\n".join(f"{x['name']}: advisory {x['advisories']}; it is no seed" for x in slow)
        )


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def add_files(wheel: pathlib.Path, files: list[pathlib.Path], most_bytes: int) -> int:
    """Writes the wheel anew with the files in FOLDER, in place of those there; what they take."""
    mine = {f"{FOLDER}/{f.name}": f.read_bytes() for f in sorted(files)}
    partial = wheel.with_name(wheel.name + ".partial")
    try:
        with (
            zipfile.ZipFile(wheel) as old,
            zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
        ):
            (record,) = (n for n in old.namelist() if n.endswith(".dist-info/RECORD"))
            kept = [x for x in old.infolist() if not x.filename.startswith(f"{FOLDER}/")]
            for entry in kept:
                if entry.filename != record:
                    new.writestr(entry, old.read(entry), entry.compress_type, 9)
            taken = 0
            for name, content in mine.items():
                info = zipfile.ZipInfo(name)  # of 1980: equal contents give equal wheels
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, MODE
                new.writestr(info, content)
                taken += info.compress_size
            lines = old.read(record).decode().splitlines(keepends=True)
            text = "".join(x for x in lines if not x.startswith(f"{FOLDER}/"))
            text += "".join(record_line(*item) for item in mine.items())
            new.writestr(old.getinfo(record), text)
        if taken > most_bytes:
            raise SystemExit(
                f"{len(mine)} kernels take {taken / 1024:.0f} KB of the wheel; "
                f"--most-kb allows {most_bytes // 1024}"
            )
        partial.replace(wheel)
    finally:
        partial.unlink(missing_ok=True)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--list", type=pathlib.Path, default=LIST)
    parser.add_argument("--most-kb", type=int, default=700)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site, out = pathlib.Path(folder) / "site", pathlib.Path(folder) / "kernels"
        with zipfile.ZipFile(given.wheel) as wheel:
            wheel.extractall(site)
        compile_kernels(site, given.list.resolve(), out)
        files = sorted(out.glob("*.kernel"))
        check_kernels(files)
        taken = add_files(given.wheel, files, given.most_kb * 1024)
    print(f"{given.wheel.name}: {len(files)} kernels, {taken / 1024:.0f} KB")


if __name__ == "__main__":
    main()
