#!/usr/bin/env python3
"""Runs the ampere kernels under compute-sanitizer: memcheck, racecheck and synccheck.

    python tools/gpu_sanitizer.py [--tools racecheck] [--backend ampere] [--only PATTERN]

Each tool runs a few small cases, chosen so that every way through a kernel is taken: ragged tiles,
causal and window masks, packed sequences, rows and keys that nobody sees, shared key heads, both
kinds of sums of dQ. One line a tool; exit status 1 when a tool found something.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time

TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = {
    # rows, keys, query heads, key heads, arguments
    "full": (130, 150, 2, 1, {}),
    "causal": (150, 130, 2, 2, {"causal": True}),
    "window": (40, 200, 1, 1, {"window": (33, 12)}),
}
HEAD_DIMS = {"bfloat16": (64, 96, 128, 256), "float32": (64, 128, 256)}


def run_cases(backend: str, only: str) -> None:
    """Forward and both backward passes of every case, on tensors that come from the host."""
    import pantile
    import torch

    for dtype, head_dims in HEAD_DIMS.items():
        precisions = ("highest", "tf32") if dtype == "float32" else ("auto",)
        for head_dim in head_dims:
            for name, (rows, keys, heads, heads_k, arguments) in CASES.items():
                for precision in precisions:
                    label = f"{dtype} d{head_dim} {name} {precision}"
                    if not re.search(only, label):
                        continue
                    options = pantile.Options(backend=backend, float32_precision=precision)
                    shapes = [(1, rows, heads, head_dim)] + 2 * [(1, keys, heads_k, head_dim)]
                    q, k, v = (
                        torch.randn(s).to(getattr(torch, dtype)).cuda().requires_grad_()
                        for s in shapes
                    )
                    grad_o = torch.randn(shapes[0]).to(q.dtype).cuda()
                    for deterministic in (False, True):
                        o = pantile.attention(
                            q, k, v, deterministic=deterministic, options=options, **arguments
                        )
                        torch.autograd.grad(o, (q, k, v), grad_o)
                    torch.cuda.synchronize()
                    print("ran", label, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--backend", default="ampere")
    parser.add_argument("--only", default="", help="regular expression of case labels")
    parser.add_argument("--run", action="store_true", help="the cases alone, without a tool")
    arguments = parser.parse_args()
    if arguments.run:
        run_cases(arguments.backend, arguments.only)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return 2
    failed = False
    for tool in arguments.tools.split(","):
        started = time.monotonic()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        command += [sys.executable, __file__, "--run", "--backend", arguments.backend]
        result = subprocess.run(
            [*command, "--only", arguments.only],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        text = result.stdout + result.stderr
        summary = re.findall(r"=+ (\w+ SUMMARY: .*)", text)
        cases = len(re.findall(r"^ran ", text, re.M))
        print(f"{tool}: {cases} cases, {summary[-1] if summary else 'no summary'}", end="")
        print(f", {time.monotonic() - started:.0f} s", flush=True)
        if result.returncode != 0 or cases == 0:
            failed = True
            print(text[-4000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
