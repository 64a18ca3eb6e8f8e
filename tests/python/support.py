"""Inputs, the float64 reference and the contract's bound, for every test file."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

import pantile
import pytest
import torch
from pantile import reference
from pantile._masks import window_bounds

GPU_DTYPE = torch.bfloat16  # where one will do
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    """A backend, the device its tensors live on, and the dtype that tests of no dtype use."""

    backend: str
    device: str
    gpu_dtype: torch.dtype = torch.bfloat16

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else self.gpu_dtype

    @property
    def options(self) -> pantile.Options:
        return pantile.Options(backend=self.backend)

    def exact_options(self, **arguments) -> pantile.Options:
        """For calls without LSE whose output is compared, bit by bit, with that of one with LSE.

        Where nobody gets the LSE, the Ampere backend sums the rounded weights on tensor cores.
        """
        return pantile.Options(backend=self.backend, softmax="vector", **arguments)


@dataclass
class Case:
    """Tensors and arguments of one call; ``lengths``: (cu_seqlens_q, cu_seqlens_k) if packed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict = field(default_factory=dict)
    lengths: tuple = ()
    longest: tuple = ()

    @property
    def operands(self):
        return self.q, self.k, self.v

    def ours(self, q, k, v, **extra):
        """(o, lse)."""
        arguments = {**self.arguments, "return_lse": True, **extra}
        if self.lengths:
            return pantile.varlen_attention(q, k, v, *self.lengths, *self.longest, **arguments)
        return pantile.attention(q, k, v, **arguments)

    def expected(self, q, k, v, dtype):
        """(o, lse) of the textbook in ``dtype``; None: the dtype of q."""
        call = reference.varlen_attention if self.lengths else reference.attention
        return call(q, k, v, *self.lengths, **self.arguments, dtype=dtype)

    def explain(self, **extra) -> pantile.Explanation:
        arguments = {**self.arguments, **extra}
        return pantile.explain(*self.operands, *self.lengths, *self.longest, **arguments)


def dense(
    target: Target,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    rows: int = 37,
    keys: int = 45,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    seed: int = 0,
    **arguments,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, rows, heads, head_dim),
        (batch, keys, heads_k, head_dim),
        (batch, keys, heads_k, head_dim if head_dim_v is None else head_dim_v),
    ]
    tensors = [torch.randn(s, generator=generator).to(target.device, dtype) for s in shapes]
    return Case(*tensors, arguments)


def packed(
    target: Target,
    lengths_q: list[int],
    lengths_k: list[int],
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    seed: int = 0,
    **arguments,
) -> Case:
    case = dense(
        target,
        dtype,
        1,
        sum(lengths_q),
        sum(lengths_k),
        heads,
        heads_k,
        head_dim,
        head_dim_v,
        seed,
        **arguments,
    )
    bounds = tuple(
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32).to(target.device)
        if x
        else torch.zeros(1, dtype=torch.int32, device=target.device)
        for x in (lengths_q, lengths_k)
    )
    longest = (max(lengths_q, default=0), max(lengths_k, default=0))
    return Case(case.q[0], case.k[0], case.v[0], arguments, bounds, longest)


def require_kernel(case: Case, target: Target, backward: bool = False) -> None:
    """Skips, with the reason, what a GPU backend does not serve. The CPU serves everything."""
    plan = case.explain(options=target.options)
    passes = [plan.forward, plan.backward] if backward else [plan.forward]
    for one in passes:
        if one.kernel is None:
            assert target.device != "cpu", one.reason
            pytest.skip(f"{target.backend}: {one.reason}")


def gradients(function, operands, grad_o=None, grad_lse=None):
    """[o, lse, dq, dk, dv] of ``function`` on fresh leaves with the strides of the operands."""
    leaves = [x.detach().requires_grad_() for x in operands]
    o, lse = function(*leaves)
    outputs, grads = [], []
    for output, grad in ((o, grad_o), (lse, grad_lse)):
        if grad is not None and output.requires_grad:  # not where the reference has no terms
            outputs.append(output)
            grads.append(grad.to(output.dtype))
    found = [None] * 3
    if outputs:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [o.detach(), lse.detach(), *found]


NAMES = ("o", "lse", "dq", "dk", "dv")


def assert_within_bound(results, textbooks, exacts, case: Case, grad_o) -> None:
    """The contract: error at most twice the textbook's in the same dtype, plus the floor."""
    scales = reference.rounding_scales(
        lambda *x: case.expected(*x, torch.float64),
        *case.operands,
        grad_o,
        case.arguments.get("scale"),
    )
    for name, result, textbook, exact, scale in zip(
        NAMES, results, textbooks, exacts, scales, strict=False
    ):
        assert result.shape == exact.shape, f"{name}: {result.shape}, expected {exact.shape}"
        error = reference.error(result, exact)
        dtype = torch.float32 if name == "lse" else case.q.dtype
        bound = reference.bound(textbook, exact, dtype, scale)
        assert error <= bound, f"{name}: error {error:.3e} above bound {bound:.3e}"


def check_forward(case: Case, target: Target) -> list[torch.Tensor]:
    require_kernel(case, target)
    results = list(case.ours(*case.operands, options=target.options))
    exact = case.expected(*case.operands, torch.float64)
    textbook = case.expected(*case.operands, None)
    assert_within_bound(results, textbook, exact, case, torch.zeros_like(exact[0]))
    return results


def check_both(case: Case, target: Target, with_lse: bool = False, **extra) -> list[torch.Tensor]:
    """Forward and backward against the bound. Where only a forward kernel exists, only that."""
    plan = case.explain(options=target.options)
    if plan.backward.kernel is None and plan.forward.kernel is not None:
        assert target.device != "cpu", plan.backward.reason
        return check_forward(case, target)
    require_kernel(case, target)
    generator = torch.Generator().manual_seed(1)
    o, lse = case.expected(*case.operands, torch.float64)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype)
    grad_lse = None
    if with_lse:
        grad_lse = torch.randn(lse.shape, generator=generator).to(o.device)
    results = gradients(
        lambda *x: case.ours(*x, options=target.options, **extra), case.operands, grad_o, grad_lse
    )
    exact = gradients(
        lambda *x: case.expected(*x, None),
        [x.double() for x in case.operands],
        grad_o,
        grad_lse,
    )
    textbook = gradients(lambda *x: case.expected(*x, None), case.operands, grad_o, grad_lse)
    assert_within_bound(results, textbook, exact, case, grad_o)
    return results


def backward_inputs(case: Case, with_lse: bool):
    """Exact o and LSE, rounded as a forward kernel would, and random gradients of both."""
    o, lse = case.expected(*case.operands, torch.float64)
    generator = torch.Generator().manual_seed(1)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(o.device) if with_lse else None
    return o.to(case.q.dtype).contiguous(), lse.float().contiguous(), grad_o, grad_lse


def run_backward(case: Case, target: Target, inputs, deterministic: bool = False):
    """(dq, dk, dv) of the backward operator alone, whatever kernel would do the forward."""
    o, lse, grad_o, grad_lse = inputs
    bounds = (*case.lengths, None, None, *case.longest) if case.lengths else (None,) * 4 + (0, 0)
    mask = window_bounds(case.arguments.get("causal", False), case.arguments.get("window"))
    settings = (*bounds, case.arguments.get("scale"), *mask, target.backend)
    return torch.ops.pantile.backward(
        grad_o, grad_lse, *case.operands, o, lse, *settings, deterministic
    )


def check_backward(case: Case, target: Target, with_lse: bool = False) -> None:
    """The backward operator alone against the bound."""
    inputs = backward_inputs(case, with_lse)
    grads = inputs[2:]
    doubles = [x.double() for x in case.operands]
    exact = gradients(lambda *x: case.expected(*x, None), doubles, *grads)
    textbook = gradients(lambda *x: case.expected(*x, None), case.operands, *grads)
    results = [*exact[:2], *run_backward(case, target, inputs)]  # o and lse are given
    assert_within_bound(results, textbook, exact, case, inputs[2])


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits, so that NaN compares and -0 differs from 0."""
    return x.detach().contiguous().view(torch.int32 if x.dtype.itemsize == 4 else torch.int16)


def assert_same_bits(first, second, names=NAMES) -> None:
    for name, a, b in zip(names, first, second, strict=True):
        assert torch.equal(bits(a), bits(b)), f"{name} differs"


def run_python(source: str, *arguments: str, timeout: float = 120, **environment: str) -> str:
    """Runs ``source`` in a fresh interpreter and returns what it printed."""
    import os

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
