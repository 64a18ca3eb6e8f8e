"""Peak memory against sequence length: the textbook's matrices, and ours up to a million tokens.

    python benchmarks/memory.py --out benchmarks/results/h200_memory.jsonl      # with a CUDA GPU
    python benchmarks/memory.py --device cpu --out build/memory.jsonl

One head, forward and backward; each length in a process of its own. The textbook stores as few
matrices as autograd lets it. On a GPU the peak of ours is all that torch's allocator had handed
out, our workspace included; that of the textbook is without what was there before its call
(cuBLAS's workspace). On the CPU it is the growth of the resident memory of the process, read from
Linux's /proc. The exit status is 1 when our bytes per token vary by more than 5 % over the lengths
whose tensors dwarf what a process needs anyway."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pantile
import torch
from pantile import io_model
from pantile.bench import harness

LENGTHS = {"cuda": (16384, 32768, 65536, 262144, 1048576), "cpu": (8192, 16384, 32768)}
TEXTBOOK = {"cuda": (4096, 8192, 16384, 32768), "cpu": (1024, 2048, 4096)}
HEAD_DIM = {"cuda": 128, "cpu": 64}
LINEAR_FROM = {"cuda": 65536, "cpu": 8192}  # tokens
LIMIT = 0.05


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def forget_peak(implementation: str, device: str) -> int:
    """Bytes that are there already and do not count."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return 0 if implementation == "pantile" else torch.cuda.memory_allocated()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    return resident("VmRSS")


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """P = softmax of the masked scores, O = P V. Q is scaled instead of the scores, which are
    masked in place, so that only P lives on until the backward."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return (torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1) @ v).transpose(1, 2)


def step(implementation: str, operands: list[torch.Tensor], grad_o: torch.Tensor) -> None:
    q, k, v = operands
    if implementation == "pantile":
        o = pantile.attention(q, k, v, causal=True)
    else:
        o = textbook(q, k, v)
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
    before = forget_peak(implementation, device)
    operands, grad_o = draw(length, head_dim, device)
    started = time.perf_counter()
    step(implementation, operands, grad_o)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    shape = io_model.Shape(length, length, head_dim, causal=True)
    textbook = implementation == "textbook"
    model = io_model.textbook_peak_bytes if textbook else io_model.pantile_peak_bytes
    row = {"kind": "memory", "device": device, "implementation": implementation, "length": length}
    row |= {"head_dim": head_dim, "peak_bytes": peak - before, "seconds": round(seconds, 4)}
    return row | {"model_bytes": model(shape, True), "matrix_bytes": shape.scores_bytes}


def in_own_process(implementation: str, length: int, device: str) -> dict:
    """A row of a process that runs this length alone, or why it has none."""
    command = [sys.executable, __file__, "--device", device, "--one", implementation, str(length)]
    # Old pages of the allocator would hide growth: hand freed memory back at once.
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:200]
    row = {"kind": "absent", "implementation": implementation, "length": length}
    return row | {"reason": reason}


def bytes_per_token(rows: list[dict], device: str) -> list[float]:
    rows = [row for row in rows if (row["kind"], row["implementation"]) == ("memory", "pantile")]
    return [r["peak_bytes"] / r["length"] for r in rows if r["length"] >= LINEAR_FROM[device]]


def is_linear(values: list[float]) -> bool:
    """Two lengths at least, and bytes per token within the limit of each other."""
    return len(values) > 1 and max(values) <= (1 + LIMIT) * min(values)


def shown(line: dict) -> str:
    if line["kind"] == "run":
        return f"{line['device']}, bf16, causal, one head, forward and backward; MiB"
    if line["kind"] == "verdict":
        return f"bytes per token: {', '.join(f'{x:.0f}' for x in line['bytes_per_token'])}"
    text = line.get("reason") or (
        f"peak {line['peak_bytes'] / 2**20:10.1f}  model {line['model_bytes'] / 2**20:10.1f}"
        f"  one N x N matrix {line['matrix_bytes'] / 2**20:10.1f}"
    )
    return f"{line['implementation']:<9} N {line['length']:>8}  {text}"


def lines_of(device: str, ours: list[int], textbooks: list[int]) -> Iterator[dict]:
    yield harness.header(device)
    rows = []
    for implementation, lengths in (("pantile", ours), ("textbook", textbooks)):
        for length in lengths:
            rows.append(in_own_process(implementation, length, device))
            yield rows[-1]
    values = bytes_per_token(rows, device)
    yield {"kind": "verdict", "bytes_per_token": values, "linear": is_linear(values)}


def main() -> None:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    p = harness.parser(__doc__, "memory.jsonl")
    p.add_argument("--device", choices=["cuda", "cpu"], default=there, help="default: %(default)s")
    p.add_argument("--lengths", type=harness.numbers, help="ours, comma-separated")
    text = "the textbook's, comma-separated"
    p.add_argument("--textbook-lengths", type=harness.numbers, help=text)
    p.add_argument("--one", nargs=2, metavar=("IMPLEMENTATION", "LENGTH"), help=argparse.SUPPRESS)
    chosen = p.parse_args()
    device = chosen.device
    if device == "cuda":
        harness.require_gpu()
    if chosen.one:
        print(json.dumps(run_one(chosen.one[0], int(chosen.one[1]), device)))
        return
    ours, textbooks = chosen.lengths or LENGTHS[device], chosen.textbook_lengths or TEXTBOOK[device]
    *_, verdict = harness.emit(chosen.out, lines_of(device, ours, textbooks), shown)
    if not verdict["linear"]:
        sys.exit(f"our memory is not linear within {LIMIT:.0%}, or too few lengths ran")


if __name__ == "__main__":
    main()
