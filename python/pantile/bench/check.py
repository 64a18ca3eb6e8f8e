"""Compares what a contender computes with the textbook, once, before it is timed.

One sequence (the longest) with the query heads of its last key head is enough: a kernel that is
wrong for a shape is wrong there by far more than rounding, and the textbook of a whole benchmark
case would take longer than timing it. It is worked out in float32, a chunk of queries at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pantile._masks import window_bounds
from pantile.bench.measure import Contender
from pantile.bench.peers import FP8, Problem

CHUNK_SCORES = 2**26  # of a chunk of queries and all keys: 256 MiB in float32
# Root mean square of the error over that of the exact result. Textbook attention in bfloat16 is off
# by up to 0.02; a tile of keys that is left out of a hundred costs 0.1. FP8: what quantising costs.
MOST_ERROR = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.05, FP8: 0.3}
NAMES = {
    "forward": ("o",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("dq", "dk", "dv"),
}


@dataclass(frozen=True)
class Sample:
    """Where the compared part lies in tensors like q (and o) and like k (and v)."""

    queries: tuple
    keys: tuple

    def of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x[self.keys if name in ("k", "v", "dk", "dv") else self.queries]


def sample_of(problem: Problem) -> Sample:
    case = problem.case
    group = case.heads_q // case.heads_k
    heads = slice(case.heads_q - group, case.heads_q)
    if problem.cu_seqlens is None:
        at = (case.batch - 1, slice(None))
    else:
        longest = case.lengths.index(max(case.lengths))
        begin = sum(case.lengths[:longest])
        at = (slice(begin, begin + case.lengths[longest]),)
    return Sample((*at, heads), (*at, case.heads_k - 1))


def _shown(problem: Problem, first: int, last: int, keys: int, device) -> torch.Tensor:
    """Boolean [last - first, keys]: what queries first to last see."""
    window = None if problem.case.window_left is None else (problem.case.window_left, 0)
    left, right = window_bounds(problem.case.causal, window)
    position = torch.arange(first, last, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    shown = torch.ones(last - first, keys, dtype=torch.bool, device=device)
    if left >= 0:
        shown &= key >= position - left
    if right >= 0:
        shown &= key <= position + right
    return shown


def textbook(problem: Problem, inputs: tuple) -> dict[str, torch.Tensor]:
    """float32 results of the sampled q [rows, heads, dim], k, v [keys, dim] and dO: o or gradients,
    in the layout of the inputs."""
    q, k, v, grad_o = (x.detach().float() for x in inputs)
    q, grad_o = q.transpose(0, 1), grad_o.transpose(0, 1)  # [heads, rows, dim]
    scale = q.shape[-1] ** -0.5
    o, dq = torch.empty_like(grad_o), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    rows = max(CHUNK_SCORES // (q.shape[0] * k.shape[0]), 1)
    for first in range(0, q.shape[1], rows):
        at = slice(first, min(first + rows, q.shape[1]))
        scores = q[:, at] @ k.T * scale
        shown = _shown(problem, at.start, at.stop, k.shape[0], q.device)
        p = torch.softmax(scores.masked_fill_(~shown, -math.inf), -1)
        o[:, at] = p @ v
        if problem.what == "forward":
            continue
        dv += (p.transpose(1, 2) @ grad_o[:, at]).sum(0)
        delta = (grad_o[:, at] * o[:, at]).sum(-1, keepdim=True)
        ds = p * (grad_o[:, at] @ v.T - delta)
        dq[:, at] = ds @ k * scale
        dk += (ds.transpose(1, 2) @ q[:, at]).sum(0) * scale
    found = {"o": o.transpose(0, 1), "dq": dq.transpose(0, 1), "dk": dk, "dv": dv}
    return {name: found[name] for name in NAMES[problem.what]}


class Judge:
    """The textbook of one problem, worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sample = sample_of(problem)
        self._own: dict | None = None

    def _expected(self, contender: Contender) -> dict[str, torch.Tensor]:
        if contender.inputs is not None:  # it made tensors of its own
            return self._textbook(contender.inputs())
        if self._own is None:
            p = self.problem
            self._own = self._textbook((p.q, p.k, p.v, p.grad_o))
        return self._own

    def _textbook(self, tensors: tuple) -> dict[str, torch.Tensor]:
        names = ("q", "k", "v", "do")
        parts = (self.sample.of(name, x) for name, x in zip(names, tensors, strict=True))
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return textbook(self.problem, tuple(parts))
        finally:
            torch.set_float32_matmul_precision(precision)

    def wrong(self, contender: Contender) -> str:
        """What is wrong with its results; "" when they are right."""
        if contender.answer is None:
            return "it does not say what it computes, so that nothing can be compared"
        most = MOST_ERROR[self.problem.dtype]
        expected = self._expected(contender)
        answers = contender.answer()
        for name, found in zip(expected, answers, strict=True):
            part = self.sample.of(name, found).float()
            if part.shape != expected[name].shape:
                shapes = f"{list(part.shape)} instead of {list(expected[name].shape)}"
                return f"wrong result, not timed: {name} has shape {shapes}"
            size = expected[name].square().mean().sqrt()
            error = float((part - expected[name]).square().mean().sqrt() / size)
            if not error <= most:  # NaN too
                return f"wrong result, not timed: {name} is off by {error:.2g}, more than {most}"
        return ""
