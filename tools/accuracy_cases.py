"""Cases of the accuracy report: inputs, the exact answer in float64, figures of an error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

LAWS = ("normal", "outlier", "shifted", "peaked")  # see accuracy.py
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ROW_CHUNK = 1024  # rows of float64 scores that exist at a time


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    mask: str  # full or causal
    length: int
    law: str
    heads: int = 2
    batch: int = 1

    @property
    def key(self) -> str:
        return f"{self.dtype} d{self.head_dim} {self.mask} {self.length} {self.law}"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


Tensors = dict[str, torch.Tensor]


# ---- inputs and the exact answer


@functools.lru_cache(maxsize=1)  # cases that differ in type and mask follow each other
def _drawn(shape: tuple[int, ...], law: str) -> Tensors:
    generator = torch.Generator().manual_seed(20)
    found = {}
    for name in ("q", "k", "v", "grad_o"):
        x = torch.randn(shape, generator=generator)
        if law == "outlier" and name != "grad_o":
            large = torch.randn(shape, generator=generator) * 10
            x = x + large * (torch.rand(shape, generator=generator) < 1e-3)
        if law == "shifted" and name == "v":
            x = x + 1
        if law == "peaked" and name == "q":
            x = x * 8
        found[name] = x
    return found


def draw(case: Case, device: str) -> Tensors:
    """q, k, v, grad_o as float32 that are exact in the case's dtype, [batch, seq, heads, dim]."""
    shape = (case.batch, case.length, case.heads, case.head_dim)
    drawn = _drawn(shape, case.law)
    return {name: x.to(device).to(DTYPES[case.dtype]).float() for name, x in drawn.items()}


def exact(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """The textbook in float64, a chunk of rows at a time: memory stays linear in the length."""
    q, k, v, g = (inputs[n].double().transpose(1, 2) for n in ("q", "k", "v", "grad_o"))
    scale = case.head_dim**-0.5
    o, lse, dq = torch.empty_like(q), torch.empty_like(q[..., 0]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    position = torch.arange(case.length, device=q.device)
    for begin in range(0, case.length, ROW_CHUNK):
        rows = slice(begin, min(begin + ROW_CHUNK, case.length))
        seen = slice(0, rows.stop if case.causal else case.length)
        keys, values = k[:, :, seen], v[:, :, seen]
        p = q[:, :, rows] @ keys.transpose(-1, -2) * scale
        if case.causal:
            p.masked_fill_(position[seen][None, :] > position[rows][:, None], -math.inf)
        lse[:, :, rows] = torch.logsumexp(p, -1)
        p = p.sub_(lse[:, :, rows, None]).exp_()
        o[:, :, rows] = p @ values
        if backward:
            dv[:, :, seen] += p.transpose(-1, -2) @ g[:, :, rows]
            ds = g[:, :, rows] @ values.transpose(-1, -2)
            ds.sub_((g[:, :, rows] * o[:, :, rows]).sum(-1, keepdim=True)).mul_(p)
            dq[:, :, rows] = ds @ keys * scale
            dk[:, :, seen] += ds.transpose(-1, -2) @ q[:, :, rows] * scale
    answer = {"o": o.transpose(1, 2), "lse": lse}
    if backward:
        answer |= {n: x.transpose(1, 2) for n, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    return answer


def errors(found: Tensors, truth: Tensors) -> dict[str, dict[str, float]]:
    """RMSE, largest error, and RMSE over the root mean square of the exact result."""
    result = {}
    for name, value in found.items():
        difference = value.double() - truth[name]
        rmse = difference.square().mean().sqrt().item()
        size = truth[name].square().mean().sqrt().item()
        result[name] = {
            "rmse": float(f"{rmse:.4g}"),
            "max": float(f"{difference.abs().max().item():.4g}"),
            "relative": float(f"{rmse / size:.4g}"),
        }
    return result
