"""Time of an attention step with each backward of FP8, beside bfloat16: forward and backward of
``pantile.attention`` as autograd runs them, quantising included.

    python benchmarks/fp8_training.py --out benchmarks/results/h200_fp8_training.jsonl
    python benchmarks/fp8_training.py --runs demo/losses.json --out ...      # needs no GPU

With ``--runs`` it summarises training runs of ``examples/train_gpt.py`` instead: a record for each
run, with its loss in a hundred parts and the cosines of gradients. Otherwise a record is one cell
(head dim, mask, length; 16384 tokens, hidden size 2048) with milliseconds of the step, of the
forward alone and of the backward alone, and what autograd keeps in between.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys

import pantile
import torch
from pantile.bench import measure

TOKENS, HIDDEN = 16384, 2048
MODES = {
    "bf16": None,
    "fp8, bf16 backward": pantile.Options(fp8=True, fp8_backward="bf16"),
    "fp8, full": pantile.Options(fp8=True, fp8_backward="full"),
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


def summary(report: dict, run: dict) -> dict:
    """Of one run in the ``losses.json`` of train_gpt.py."""
    losses = run["losses"]
    part, tenth = max(1, len(losses) // 100), max(1, len(losses) // 10)
    parts = [losses[i : i + part] for i in range(0, len(losses), part)]
    fields = ("device", "layers", "width", "heads", "context", "batch", "qk_norm", "outliers")
    return {
        "kind": "fp8_training_run",
        "attention": run["attention"],
        **{name: report[name] for name in fields},
        "steps": len(losses),
        "torch": report["torch"],
        "commit": report["commit"],
        "finite": all(math.isfinite(x) for x in losses),
        "loss": [round(sum(some) / len(some), 4) for some in parts],
        "last_tenth": round(sum(losses[-tenth:]) / tenth, 5),
        "largest_norm": round(max(run["gradient_norms"]), 3),
        "step_ms": round(run["step_seconds"] * 1e3, 3),
        "peak_bytes": run["peak_bytes"],
        "gradients": [
            {
                "step": found["step"],
                "least_cosine": round(min(found["cosine"]), 4),
                "mean_cosine": round(sum(found["cosine"]) / len(found["cosine"]), 4),
            }
            for found in run["gradients"]
        ],
    }


def write(out: pathlib.Path | None, record: dict) -> None:
    if out:
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="append records to this file")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="1024,4096,8192,16384")
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--runs", type=pathlib.Path, nargs="*", help="losses.json of train_gpt.py, to summarise"
    )
    arguments = parser.parse_args()
    for path in arguments.runs or ():
        report = json.loads(path.read_text())
        for run in report["runs"]:
            write(arguments.out, summary(report, run))
    if arguments.runs:
        return
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
                write(arguments.out, record)


if __name__ == "__main__":
    main()
