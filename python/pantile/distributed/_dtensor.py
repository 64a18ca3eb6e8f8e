"""DTensors in and out of ``attention``; for those sharded by batch or heads alone, see
:mod:`pantile.integrations.dtensor`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

Tensor = torch.Tensor


def _lse_placement(placement: Any, ndim: int) -> Any:
    """Of lse ``[.., heads, tokens]`` for a placement of q ``[.., tokens, heads, dim]``."""
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim % ndim
    return Shard({ndim - 3: ndim - 2, ndim - 2: ndim - 3}.get(dim, dim))


def attention_of_dtensors(attention, q, k, v, return_lse: bool, named: dict) -> Any:
    """:func:`pantile.distributed.attention` of DTensors, whose local rows are those of the plan."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} is a {type(x).__name__}; q, k and v must all be DTensors")
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(
                f"{name} is placed as {x.placements} on {x.device_mesh}; it must be placed as q, "
                f"{q.placements} on {q.device_mesh}"
            )
    tokens = q.ndim - 3
    for placement in q.placements:
        if isinstance(placement, Partial) or (
            isinstance(placement, Shard) and placement.dim % q.ndim == q.ndim - 1
        ):
            raise ValueError(
                f"q is placed as {q.placements}; it must be sharded along tokens, batch or heads"
            )
    if not any(isinstance(p, Shard) and p.dim % q.ndim == tokens for p in q.placements):
        raise ValueError(
            f"q is placed as {q.placements}; one must be Shard({tokens}), along the tokens: "
            "pantile.attention takes DTensors sharded by batch or heads alone"
        )
    answer = attention(*(x.to_local() for x in (q, k, v)), **named)
    o, lse = answer if return_lse else (answer, None)
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    o = _whole(o, q, q.placements, shape)
    if lse is None:
        return o
    placements = [_lse_placement(p, q.ndim) for p in q.placements]
    return o, _whole(lse, q, placements, torch.Size((*q.shape[:-3], q.shape[-2], q.shape[-3])))


def _whole(local: Tensor, like: DTensor, placements, shape: torch.Size) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )
