"""``python -m pantile check``: every available backend against float64, one row each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import pantile
from pantile import reference

_PASSES = ("forward", "backward")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 8)},
    "varlen": {"causal": True},
}
# Two lengths that are no multiple of any tile, grouped heads.
BATCH, ROWS, KEYS, HEADS_Q, HEADS_K = 2, 211, 257, 4, 2


@dataclass(frozen=True)
class Row:
    """One comparison; error and bound are None when no kernel serves the case."""

    backend: str
    kernel: str
    dtype: str
    head_dim: int
    mask: str
    pass_: str
    error: float | None
    bound: float | None

    @property
    def verdict(self) -> str:
        if self.error is None:
            return "-"
        return "ok" if self.error <= self.bound else "FAIL"


def available_backends() -> list[tuple[str, str]]:
    """(backend, torch device) pairs that this machine and build can run."""
    pairs = [("cpu", "cpu"), ("reference", "cpu")]
    compiled = {row["backend"] for row in pantile.kernels() if row["compiled"]}
    capabilities = []
    if torch.cuda.is_available():
        capabilities = [d["compute_capability"] for d in pantile.devices() if d["type"] == "cuda"]
    if "hopper" in compiled and (9, 0) in capabilities:
        pairs.append(("hopper", "cuda"))
    if "ampere" in compiled and any(capability >= (8, 0) for capability in capabilities):
        pairs.append(("ampere", "cuda"))
    return pairs


def _head_dims(backend: str, dtype: str) -> list[int]:
    if backend in ("cpu", "reference"):
        return [64]
    return sorted(
        {
            row["head_dim"]
            for row in pantile.kernels()
            if row["backend"] == backend and row["dtype"] == dtype and row["pass"] in _PASSES
        }
    )


def _inputs(device: str, dtype: torch.dtype, head_dim: int, mask: str):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (BATCH, ROWS, HEADS_Q, head_dim),
        (BATCH, KEYS, HEADS_K, head_dim),
        (BATCH, KEYS, HEADS_K, head_dim),
        (BATCH, ROWS, HEADS_Q, head_dim),
    ]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    lengths = ()
    if mask == "varlen":
        tensors = [x.flatten(0, 1) for x in tensors]
        bounds_q = [0, 60, 60, BATCH * ROWS]
        bounds_k = [0, 131, 200, BATCH * KEYS]
        lengths = tuple(
            torch.tensor(x, dtype=torch.int32, device=device) for x in (bounds_q, bounds_k)
        )
    return tensors, lengths


def _reference(q, k, v, lengths, arguments, dtype):
    if lengths:
        return reference.varlen_attention(q, k, v, *lengths, **arguments, dtype=dtype)
    return reference.attention(q, k, v, **arguments, dtype=dtype)


def _ours(q, k, v, lengths, arguments, options):
    if lengths:
        longest = [int(x.diff().max()) for x in lengths]
        return pantile.varlen_attention(q, k, v, *lengths, *longest, **arguments, options=options)
    return pantile.attention(q, k, v, **arguments, options=options)


def _explain(q, k, v, lengths, arguments, options):
    longest = [int(x.diff().max()) for x in lengths]
    return pantile.explain(q, k, v, *lengths, *longest, **arguments, options=options)


def _with_gradients(function, tensors):
    """[o] + [dq, dk, dv] of ``function`` on fresh leaves."""
    *operands, grad_o = tensors
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, grad_o.to(o.dtype))]


def _case(backend: str, device: str, dtype_name: str, head_dim: int, mask: str) -> Iterator[Row]:
    dtype = DTYPES[dtype_name]
    arguments = MASKS[mask]
    options = pantile.Options(backend=backend, checked=True)
    tensors, lengths = _inputs(device, dtype, head_dim, mask)
    plan = _explain(*tensors[:3], lengths, arguments, options)

    exact = _with_gradients(
        lambda *x: _reference(*x, lengths, arguments, None)[0], [x.double() for x in tensors]
    )
    textbook = _with_gradients(lambda *x: _reference(*x, lengths, arguments, None)[0], tensors)
    scale_o, _, *scales = reference.rounding_scales(
        lambda *x: _reference(*x, lengths, arguments, torch.float64), *tensors
    )
    scales = [scale_o, *scales]
    ours: list[torch.Tensor] = []
    if plan.forward.kernel and plan.backward.kernel:
        ours = _with_gradients(lambda *x: _ours(*x, lengths, arguments, options), tensors)
    elif plan.forward.kernel:
        ours = [_ours(*tensors[:3], lengths, arguments, options)]

    for pass_, part in (("forward", slice(0, 1)), ("backward", slice(1, 4))):
        worst = None
        for result, book, truth, scale in zip(
            ours[part], textbook[part], exact[part], scales[part], strict=False
        ):
            pair = reference.error(result, truth), reference.bound(book, truth, dtype, scale)
            if worst is None or pair[0] / pair[1] > worst[0] / worst[1]:
                worst = pair
        kernel = getattr(plan, pass_).kernel or "no kernel"
        error, bound = worst or (None, None)
        yield Row(backend, kernel, dtype_name, head_dim, mask, pass_, error, bound)


def check_rows(backends: list[str] | None = None) -> Iterator[Row]:
    """All comparisons, as they are made. ``backends`` restricts them."""
    for backend, device in available_backends():
        if backends and backend not in backends:
            continue
        for dtype in DTYPES:
            for head_dim in _head_dims(backend, dtype):
                for mask in MASKS:
                    yield from _case(backend, device, dtype, head_dim, mask)
