"""Time of an attention step with each backward of FP8, beside bfloat16: forward and backward of
``pantile.attention`` as autograd runs them, quantising included.

    python benchmarks/fp8_training.py --out benchmarks/results/h200_fp8_training.jsonl

A record is one cell (head dim, mask, length; 16384 tokens, hidden size 2048) with milliseconds of
the step, of the forward alone and of the backward alone, and what autograd keeps in between."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import pantile
import torch
from pantile.bench import measure

TOKENS, HIDDEN = 16384, 2048
MODES = {
    "bf16": None,
    "fp8, bf16 backward": pantile.Options(fp8=True, fp8_backward="bf16"),
    "fp8, recompute": pantile.Options(fp8=True, fp8_backward="recompute"),
}


class Step:
    """One mode at one shape, with gradients that take the place of the ones before."""

    def __init__(self, options, operands, grad_o, causal: bool) -> None:
        self.options, self.operands, self.grad_o, self.causal = options, operands, grad_o, causal
        self.o = self.forward()

    def forward(self) -> torch.Tensor:
        return pantile.attention(*self.operands, causal=self.causal, options=self.options)

    def backward(self) -> tuple:
        return torch.autograd.grad(self.o, self.operands, self.grad_o, retain_graph=True)

    def whole(self) -> tuple:
        return torch.autograd.grad(self.forward(), self.operands, self.grad_o)


def saved_bytes(step: Step) -> int:
    kept = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        step.forward()
    return sum(kept.values())


def draw(length: int, head_dim: int, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    shape = (TOKENS // length, length, HIDDEN // head_dim, head_dim)
    q, k, v, g = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], g


def run_cell(length: int, head_dim: int, causal: bool, rounds: int) -> dict:
    torch.manual_seed(0)
    operands, grad_o = draw(length, head_dim, "cuda")
    steps = {name: Step(options, operands, grad_o, causal) for name, options in MODES.items()}
    parts = {"step": "whole", "forward": "forward", "backward": "backward"}
    record: dict = {
        "kind": "fp8_training",
        "head_dim": head_dim,
        "mask": "causal" if causal else "full",
        "length": length,
        "saved_bytes": {name: saved_bytes(step) for name, step in steps.items()},
    }
    for part, method in parts.items():
        contenders = [
            measure.Contender(name, measure.repeat(getattr(step, method)))
            for name, step in steps.items()
        ]
        measure.interleave(contenders, rounds=rounds)
        record[f"{part}_ms"] = {c.name: round(c.median(), 4) for c in contenders}
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="append records to this file")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="1024,4096,8192,16384")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fp8_training.py needs a CUDA device")
    machine = {
        "gpu": measure.gpu_state(),
        "torch": torch.__version__,
        "commit": measure.commit(),
        "command": measure.command(),
    }
    for head_dim in map(int, arguments.head_dims.split(",")):
        for mask in arguments.masks.split(","):
            for length in map(int, arguments.lengths.split(",")):
                record = run_cell(length, head_dim, mask == "causal", arguments.rounds) | machine
                step = record["step_ms"]
                base = step["bf16"]
                shown = ", ".join(f"{n} {ms:.3f} ({base / ms:.2f}x)" for n, ms in step.items())
                print(f"d{head_dim} {mask} {length}: {shown}", flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
