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

import itertools
import json
import math
import pathlib

import pantile
import torch
from pantile.bench import harness, measure

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

    def step(self) -> tuple:
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


def run_cell(length: int, head_dim: int, mask: str, rounds: int) -> dict:
    torch.manual_seed(0)
    operands, grad_o = draw(length, head_dim, "cuda")
    causal = mask == "causal"
    steps = {name: Step(options, operands, grad_o, causal) for name, options in MODES.items()}
    record: dict = {"kind": "fp8_training", "head_dim": head_dim, "mask": mask, "length": length}
    record["saved_bytes"] = {name: saved_bytes(step) for name, step in steps.items()}
    for part in ("step", "forward", "backward"):
        contenders = [
            measure.Contender(name, measure.repeat(getattr(one, part)))
            for name, one in steps.items()
        ]
        record[f"{part}_ms"] = harness.medians(contenders, rounds, round_ms=12.0)
    return record


def shown(record: dict) -> str:
    if "step_ms" not in record:
        return ""
    times = record["step_ms"]
    texts = [f"{name} {ms:.3f} ({times['bf16'] / ms:.2f}x)" for name, ms in times.items()]
    return f"d{record['head_dim']} {record['mask']} {record['length']}: {', '.join(texts)}"


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


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--head-dims", type=harness.numbers, default="64,128")
    parser.add_argument("--lengths", type=harness.numbers, default="1024,4096,8192,16384")
    parser.add_argument("--masks", type=harness.words, default="full,causal")
    parser.add_argument("--rounds", type=int, default=5)
    text = "losses.json of train_gpt.py, to summarise"
    parser.add_argument("--runs", type=pathlib.Path, nargs="*", default=[], help=text)
    given = parser.parse_args()
    if given.runs:
        reports = [json.loads(path.read_text()) for path in given.runs]
        lines = [summary(report, run) for report in reports for run in report["runs"]]
        harness.emit(given.out, lines)
        return
    harness.require_gpu()
    cells = itertools.product(given.head_dims, given.masks, given.lengths)
    lines = (run_cell(length, dim, mask, given.rounds) for dim, mask, length in cells)
    harness.emit(given.out, itertools.chain([harness.header()], lines), shown)


if __name__ == "__main__":
    main()
