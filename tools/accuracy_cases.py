"""Cases of the accuracy reports: inputs, the exact answer in float64, figures of an error."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from pantile.bench import check

LAWS = ("normal", "outlier", "shifted", "peaked")  # see accuracy.py
GRADIENT_LAWS = ("offset 3", "mean 3 sigma", "mean 3 sigma, outliers")  # of K and V
MODE_LAWS = ("normal", "outlier", "growing", "uniform")  # of the softmax modes
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
OPERANDS = ("q", "k", "v", "grad_o")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    mask: str  # full or causal
    length: int
    law: str
    heads: int = 2
    batch: int = 1
    seed: int = 20
    queries: int = 0  # the last so many of the sequence, without a mask; 0: all

    @property
    def key(self) -> str:
        return f"{self.dtype} d{self.head_dim} {self.mask} {self.length} {self.law}"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


def outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    large = torch.randn(x.shape, generator=generator) * 10
    return x + large * (torch.rand(x.shape, generator=generator) < 1e-3)


@functools.lru_cache(maxsize=1)  # cases that differ in type and mask follow each other
def _drawn(shape: tuple[int, ...], law: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in OPERANDS:
        x = torch.randn(shape, generator=generator)
        if law == "outlier" and name != "grad_o":
            x = outliers(x, generator)
        found[name] = x
    if law == "shifted":
        found["v"] += 1
    if law == "peaked":
        found["q"] *= 8
    if law == "growing":
        # Kernels visit keys from the last to the first: each tile brings new maxima.
        size = 6 * (1 - torch.arange(shape[1]) / shape[1])
        direction = found["q"][:1, :1, :1].sign()
        found["k"] = direction * size[None, :, None, None] + found["k"] / 8
    if law == "uniform":
        found["q"] /= 1000
        found["v"] += 1
    if law == "offset 3":
        found |= {name: found[name] + 3 for name in ("k", "v")}
    if law.startswith("mean 3 sigma"):
        if law.endswith("outliers"):
            for name in ("q", "k", "v"):
                hit = torch.rand(shape, generator=generator) < 1e-3
                found[name] = found[name] * torch.where(hit, 10.0, 1.0)
        mean = torch.randn(1, 1, *shape[2:], generator=generator).sign()
        found["k"] = found["k"] + 3 * found["k"].std() * mean
        found["v"] = found["v"] + 1
    return found


def draw(case: Case, device: str) -> Tensors:
    """q, k, v, grad_o as float32 that are exact in the case's dtype, [batch, seq, heads, dim]."""
    shape = (case.batch, case.length, case.heads, case.head_dim)
    drawn = _drawn(shape, case.law, case.seed)
    if case.queries:
        drawn = drawn | {name: drawn[name][:, -case.queries :] for name in ("q", "grad_o")}
    return {name: x.to(device).to(DTYPES[case.dtype]).float() for name, x in drawn.items()}


def exact(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """The textbook in float64. There may be fewer queries than keys where there is no mask."""
    operands = (inputs[name].transpose(1, 2) for name in OPERANDS)
    bounds = (-1, 0 if case.causal else -1)
    found = check.textbook(*operands, bounds, torch.float64, backward)
    return {name: x if name == "lse" else x.transpose(1, 2) for name, x in found.items()}


def errors(found: Tensors, truth: Tensors) -> dict[str, dict[str, float]]:
    """RMSE, largest error, and RMSE over the root mean square of the exact result."""
    result = {}
    for name, value in found.items():
        difference = value.double() - truth[name]
        rmse = difference.square().mean().sqrt().item()
        size = truth[name].square().mean().sqrt().item()
        figures = {"rmse": rmse, "max": difference.abs().max().item(), "relative": rmse / size}
        result[name] = {key: float(f"{x:.4g}") for key, x in figures.items()}
    return result
