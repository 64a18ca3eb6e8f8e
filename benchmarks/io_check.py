"""Holds the IO model to the DRAM counters of the GPU: textbook and ours, four sizes each.

    python benchmarks/io_check.py --out benchmarks/results/h200_io.jsonl

Needs ncu with the right to read counters. The exit status is 1 when a forward differs from the
model by more than 15 %; the backward's model is a lower bound and only shown. Operands are large
against the L2, so that what it still holds at the end of a call does not matter."""

from __future__ import annotations

import sys

import counters
import pantile
import torch
from pantile import io_model

LIMIT = 0.15
HEAD_DIM = 128
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
METRICS = [READ, WRITTEN, TIME]
# name -> (implementation, length, heads)
CASES = {
    **{f"textbook {n}": ("textbook", n, 2**30 // n**2) for n in (2048, 4096, 8192, 16384)},
    **{f"pantile {n}": ("pantile", n, 2**19 // n) for n in (2048, 8192, 32768, 131072)},
    **{f"backward {n}": ("pantile backward", n, 2**19 // n) for n in (2048, 8192)},
}


def tensors(length: int, heads: int) -> list[torch.Tensor]:
    shape = (1, length, heads, HEAD_DIM)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def prepare(name: str):
    kind, length, heads = CASES[name]
    q, k, v = tensors(length, heads)
    if kind == "pantile":
        return lambda: pantile.attention(q, k, v)
    if kind == "pantile backward":
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = pantile.attention(*leaves)
        grad_o = torch.randn_like(o)
        return lambda: torch.autograd.grad(o, leaves, grad_o, retain_graph=True)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def textbook():
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    return textbook


def predicted(name: str, gpu: io_model.Gpu) -> io_model.Traffic:
    kind, length, heads = CASES[name]
    shape = io_model.Shape(length, length, HEAD_DIM, heads)
    if kind == "textbook":
        return io_model.textbook_forward(shape)
    if kind == "pantile backward":
        return io_model.pantile_backward(shape)
    q = torch.empty(1, length, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    tile_q = pantile.explain(q, q, q).forward.tile_q
    return io_model.pantile_forward(shape, tile_q, gpu)


def rows_of(found: dict[str, list[dict]], gpu: io_model.Gpu) -> list[dict]:
    rows = []
    for name, launches in found.items():
        model = predicted(name, gpu)
        read, written, ns = (sum(x[metric] for x in launches) for metric in METRICS)
        row = dict(zip(("implementation", "length", "heads"), CASES[name], strict=True))
        row |= {"kind": "io", "head_dim": HEAD_DIM, "kernels": len(launches)}
        row |= {"read_bytes": read, "written_bytes": written}
        row |= {"model_read_bytes": model.read_bytes, "model_written_bytes": model.written_bytes}
        row |= {"ratio": round((read + written) / model.bytes, 4), "ms": round(ns / 1e6, 4)}
        rows.append(row)
    return rows


def this_gpu() -> io_model.Gpu:
    name = torch.cuda.get_device_name()
    found = next((gpu for key, gpu in io_model.GPUS.items() if key in name), None)
    return found or sys.exit(f"{name} is not in the table of pantile.io_model.GPUS")


def main() -> None:
    def measured(found: dict[str, list[dict]]) -> list[dict]:
        return rows_of(found, this_gpu())

    rows = counters.report(__doc__, list(CASES), METRICS, prepare, measured, "io.jsonl")
    judged = [r for r in rows if not r["implementation"].endswith("backward")]
    outside = [r for r in judged if abs(r["ratio"] - 1) > LIMIT]
    if outside:
        sys.exit(f"{len(outside)} of {len(judged)} rows differ by more than {LIMIT:.0%}")


if __name__ == "__main__":
    main()
