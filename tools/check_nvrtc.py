#!/usr/bin/env python3
"""Compiles kernels of both GPU families by NVRTC, as pantile does at run time: that NVRTC reads
the embedded headers, and that the code spills nothing and serialises nothing.

usage: check_nvrtc.py FOLDER, where `pip install --target FOLDER` put nvidia-cuda-nvrtc. Needs the
installed package and no GPU.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from pantile import _C, _jit

LIST = pathlib.Path(__file__).with_name("nvrtc_kernels.toml")
CUDA_13 = "nvidia/cu13/lib"  # of the package


def problems(row: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """What is wrong with a kernel: `spills` of its row is what ptxas may spill."""
    found = []
    if made["spill_bytes"] > row.get("spills", 0):
        found.append(f"spills {made['spill_bytes']} bytes, at most {row.get('spills', 0)}")
    if made["advisories"]:
        found.append(f"advisories {made['advisories']}")
    if made["registers"] == 0 or made["bytes"] == 0:
        found.append("no registers or no code were reported")
    return [f"{row['name']}: {problem}" for problem in found]


def compiled(row: dict[str, Any]) -> dict[str, Any]:
    source = {key: value for key, value in row.items() if key != "spills"}
    with tempfile.TemporaryDirectory() as folder:
        return _C.compile_kernel(folder=folder, **source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    os.environ["PANTILE_NVRTC"] = str(parser.parse_args().folder / CUDA_13)
    rows = _jit.read_toml(LIST)["kernel"]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, rows))
    wrong = [problem for pair in zip(rows, made, strict=True) for problem in problems(*pair)]
    _jit.print_facts(made)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"peak memory of a process: {peak} MB")
    for problem in wrong:
        print(problem)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
