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
    at: tuple
    if case.lengths is None:
        at = (case.batch - 1, slice(None))
    else:
        longest = case.lengths.index(max(case.lengths))
        begin = sum(case.lengths[:longest])
        at = (slice(begin, begin + case.lengths[longest]),)
    return Sample((*at, heads), (*at, case.heads_k - 1))


def _hidden(rows: slice, keys: int, bounds: tuple[int, int], device) -> torch.Tensor:
    """Boolean [rows, keys]: what queries do not see, of a window (left, right); -1: no bound."""
    position = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    hidden = torch.zeros(len(position), keys, dtype=torch.bool, device=device)
    left, right = bounds
    if left >= 0:
        hidden |= key < position - left
    if right >= 0:
        hidden |= key > position + right
    return hidden


def textbook(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_o: torch.Tensor,
    bounds: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
) -> dict[str, torch.Tensor]:
    """o, lse and, with ``backward``, dq, dk and dv of [..., heads, rows, dim]; a chunk of queries
    at a time, so that memory stays linear in the length. k and v may have one head for all."""
    q, k, v, grad_o = (x.detach().to(dtype) for x in (q, k, v, grad_o))
    scale = q.shape[-1] ** -0.5
    o, lse, dq = torch.empty_like(grad_o), torch.empty_like(q[..., 0]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    count = max(CHUNK_SCORES // (q[..., 0, 0].numel() * k.shape[-2]), 1)
    for first in range(0, q.shape[-2], count):
        at = slice(first, min(first + count, q.shape[-2]))
        scores = q[..., at, :] @ k.mT * scale
        scores.masked_fill_(_hidden(at, k.shape[-2], bounds, q.device), -math.inf)
        lse[..., at] = torch.logsumexp(scores, -1)
        p = scores.sub_(lse[..., at, None]).exp_()
        o[..., at, :] = p @ v
        if not backward:
            continue
        gradient = grad_o[..., at, :]
        dv += (p.mT @ gradient).sum_to_size(v.shape)
        delta = (gradient * o[..., at, :]).sum(-1, keepdim=True)
        ds = (gradient @ v.mT).sub_(delta).mul_(p)
        dq[..., at, :] = ds @ k * scale
        dk += (ds.mT @ q[..., at, :]).sum_to_size(k.shape) * scale
    return {"o": o, "lse": lse} | ({"dq": dq, "dk": dk, "dv": dv} if backward else {})


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def _one_head(x: torch.Tensor) -> torch.Tensor:
    return x[0]


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
        case = self.problem.case
        q, k, v, grad_o = map(self.sample.of, ("q", "k", "v", "do"), tensors)
        window = None if case.window_left is None else (case.window_left, 0)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            found = textbook(
                q.transpose(0, 1),  # [heads, rows, dim]
                k[None],
                v[None],
                grad_o.transpose(0, 1),
                window_bounds(case.causal, window),
                backward=self.problem.differentiates,
            )
        finally:
            torch.set_float32_matmul_precision(precision)
        layout = {"o": _rows_first, "dq": _rows_first, "dk": _one_head, "dv": _one_head}
        return {name: layout[name](found[name]) for name in NAMES[self.problem.what]}

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
