"""Block-sparse attention with the patterns of FlashAttention-1 (Dao et al. 2022, section 3.3).

    python examples/block_sparse.py                 # on the CPU, or on a GPU that serves it
    python examples/block_sparse.py --length 8192

A pattern says which blocks of 128 queries x 128 keys are computed. The others are neither read nor
multiplied, so time follows the share of visible blocks. Prints the share, the time against full
attention, and the error against textbook attention in float64 with the same mask.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import pantile
import torch
from pantile import reference

BLOCK = 128


def butterfly(count: int) -> torch.Tensor:
    """Blocks whose numbers differ in at most one bit: all meet within log2(count) layers."""
    i = torch.arange(count)
    difference = i[:, None] ^ i[None, :]
    return (difference & (difference - 1)) == 0


def local_and_global(count: int, near: int = 1, anchors: int = 1) -> torch.Tensor:
    """Neighbours, and the first blocks as keys and as queries of all."""
    i = torch.arange(count)
    blocks = (i[:, None] - i[None, :]).abs() <= near
    blocks[:, :anchors] = True
    blocks[:anchors] = True
    return blocks


PATTERNS = {"butterfly": butterfly, "local + global": local_and_global}


def seconds(call, device: str, repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """Forward and backward."""
    o = pantile.attention(q, k, v, mask=mask)
    o.sum().backward()
    return o


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="queries and keys")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    shape = (1, arguments.length, arguments.heads, 64)
    q, k, v = (
        torch.randn(shape, device=arguments.device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    count = -(-arguments.length // BLOCK)
    full = seconds(lambda: step(q, k, v, None), arguments.device)
    print(f"{arguments.length} queries and keys, {count} x {count} blocks of {BLOCK}")
    print(f"{'full':<16} 100 %  {full * 1e3:8.1f} ms forward and backward")
    for name, pattern in PATTERNS.items():
        mask = pantile.BlockMask(pattern(count).to(arguments.device), BLOCK)
        took = seconds(lambda mask=mask: step(q, k, v, mask), arguments.device)
        share = float(mask.blocks.double().mean())
        o = pantile.attention(q, k, v, mask=mask)
        rows = slice(0, min(arguments.length, 512))
        part = pantile.BlockMask(mask.blocks[: -(-rows.stop // BLOCK)], BLOCK)
        exact, _ = reference.attention(q[:, rows], k, v, mask=part)
        error = float((o.detach()[:, rows].double() - exact).abs().max())
        print(
            f"{name:<16} {share:4.0%}  {took * 1e3:8.1f} ms, {took / full:4.0%} of full, "
            f"largest error {error:.1e}"
        )


if __name__ == "__main__":
    main()
