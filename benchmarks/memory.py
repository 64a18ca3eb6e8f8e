"""Peak memory against sequence length: the textbook's matrices, and ours up to a million tokens.

    python benchmarks/memory.py --out benchmarks/results/h200_memory.jsonl      # with a CUDA GPU
    python benchmarks/memory.py --device cpu --out build/memory.jsonl

One head, forward and backward. On a GPU the peak is what torch's allocator handed out, which
includes our workspace; on the CPU it is the growth of the resident memory of a process that runs
one length, read from Linux's /proc. The exit status is 1 when our bytes per token vary by more than
5 % over the lengths whose tensors dwarf what a process needs anyway."""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pantile
import torch
from pantile import io_model, reference
from pantile.bench import measure, sweep

LENGTHS = {"cuda": (16384, 32768, 65536, 262144, 1048576), "cpu": (8192, 16384, 32768)}
TEXTBOOK = {"cuda": (4096, 8192, 16384, 32768), "cpu": (1024, 2048, 4096)}
HEAD_DIM = {"cuda": 128, "cpu": 64}
LINEAR_FROM = {"cuda": 65536, "cpu": 8192}  # tokens
LIMIT = 0.05


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def start_measuring(device: str) -> int:
    """Forgets the peak so far; bytes that are there already and do not count."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return 0
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    return resident("VmRSS")


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")


def step(implementation: str, operands: list[torch.Tensor], grad_o: torch.Tensor) -> None:
    q, k, v = operands
    if implementation == "pantile":
        o = pantile.attention(q, k, v, causal=True)
    else:
        o, _ = reference.attention(q, k, v, causal=True, dtype=None)
    o.backward(grad_o)


def draw(length: int, head_dim: int, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    dtype = torch.bfloat16
    shape = (1, length, 1, head_dim)
    q, k, v, g = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], g


def run_one(implementation: str, length: int, device: str) -> dict:
    """A short call for what is needed once, then the one that counts."""
    head_dim = HEAD_DIM[device]
    step(implementation, *draw(64, head_dim, device))
    before = start_measuring(device)
    operands, grad_o = draw(length, head_dim, device)
    started = time.perf_counter()
    step(implementation, operands, grad_o)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    shape = io_model.Shape(length, length, head_dim, causal=True)
    textbook = implementation == "textbook"
    model = io_model.textbook_peak_bytes if textbook else io_model.pantile_peak_bytes
    return {
        "kind": "memory",
        "device": device,
        "implementation": implementation,
        "length": length,
        "head_dim": head_dim,
        "peak_bytes": peak_bytes(device) - before,
        "model_bytes": model(shape, training=True),
        "matrix_bytes": shape.scores_bytes,
        "seconds": round(seconds, 4),
    }


def absent(implementation: str, length: int, reason: str) -> dict:
    row = {"kind": "absent", "implementation": implementation, "length": length}
    return row | {"reason": reason[:200]}


def in_this_process(implementation: str, length: int, device: str) -> dict:
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return run_one(implementation, length, device)
    except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
        return absent(implementation, length, str(error).splitlines()[0])


def in_own_process(implementation: str, length: int, device: str) -> dict:
    command = [sys.executable, __file__, "--device", device, "--one", implementation, str(length)]
    # Old pages of the allocator would hide growth: hand freed memory back at once.
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    lines = done.stderr.strip().splitlines()
    return absent(implementation, length, lines[-1] if lines else f"ended with {done.returncode}")


def bytes_per_token(rows: list[dict], device: str) -> list[float]:
    return [
        row["peak_bytes"] / row["length"]
        for row in rows
        if row.get("implementation") == "pantile"
        and row["kind"] == "memory"
        and row["length"] >= LINEAR_FROM[device]
    ]


def is_linear(values: list[float]) -> bool:
    """Two lengths at least, and bytes per token within the limit of each other."""
    return len(values) > 1 and max(values) <= (1 + LIMIT) * min(values)


def print_row(row: dict) -> None:
    label = f"{row['implementation']:<9} N {row['length']:>8}"
    if row["kind"] == "absent":
        print(f"{label}  absent: {row['reason']}", flush=True)
        return
    print(
        f"{label}  peak {row['peak_bytes'] / 2**20:10.1f} MiB  model "
        f"{row['model_bytes'] / 2**20:10.1f}  one N x N matrix {row['matrix_bytes'] / 2**20:10.1f}"
        f"  {row['seconds']:8.3f} s",
        flush=True,
    )


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    p.add_argument("--lengths", default="", help="ours, comma-separated")
    p.add_argument("--textbook-lengths", default="", help="the textbook's, comma-separated")
    p.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results/memory.jsonl")
    )
    p.add_argument("--one", nargs=2, metavar=("IMPLEMENTATION", "LENGTH"), help=argparse.SUPPRESS)
    return p.parse_args()


def numbers(text: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x) or otherwise


def main() -> None:
    arguments = parse()
    there = torch.cuda.is_available()
    device = arguments.device if arguments.device != "auto" else "cuda" if there else "cpu"
    if device == "cuda" and not there:
        sys.exit("--device cuda: torch sees no CUDA device")
    if arguments.one:
        print(json.dumps(run_one(arguments.one[0], int(arguments.one[1]), device)))
        return
    rows = []
    # Ours first: the textbook makes cuBLAS take a workspace, which stays.
    chosen = [("pantile", n) for n in numbers(arguments.lengths, LENGTHS[device])]
    chosen += [("textbook", n) for n in numbers(arguments.textbook_lengths, TEXTBOOK[device])]
    print(f"{device}, bf16, causal, one head of dim {HEAD_DIM[device]}, forward and backward")
    run = in_this_process if device == "cuda" else in_own_process
    for implementation, length in chosen:
        rows.append(run(implementation, length, device))
        print_row(rows[-1])
    values = bytes_per_token(rows, device)
    verdict = {"kind": "verdict", "bytes_per_token": values, "linear": is_linear(values)}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    header = {"kind": "run", "commit": measure.commit(), "device": name, "torch": torch.__version__}
    sweep.write(arguments.out, [header, *rows, verdict])
    print(f"bytes per token: {', '.join(f'{x:.0f}' for x in values)}; wrote {arguments.out}")
    if not verdict["linear"]:
        sys.exit(f"our memory is not linear within {LIMIT:.0%}, or too few lengths ran")


if __name__ == "__main__":
    main()
