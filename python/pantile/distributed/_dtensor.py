"""DTensors in and out of ``attention``, and how pantile's operators may be sharded.

Without context parallelism the operators work on each shard of the batch or of the heads by
themselves: their DTensor rules say so, and no rank sends anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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


# ---- rules of the operators: one row each for replicated, by batch, by heads


def _rows(packed: bool, outputs_lse: tuple[bool, ...], inputs_lse: tuple, heads_divide: bool):
    """Acceptable (outputs, inputs) of one mesh dimension. ``inputs_lse``: of each input whether it
    has the layout of lse; None: no tensor."""

    def row(of_rows: Any, of_lse: Any) -> tuple[list, list]:
        def placed(is_lse):
            return None if is_lse is None else of_lse if is_lse else of_rows

        return [placed(x) for x in outputs_lse], [placed(x) for x in inputs_lse]

    found = [row(Replicate(), Replicate())]
    if not packed:
        found.append(row(Shard(0), Shard(0)))
    if heads_divide:
        head = 1 if packed else 2
        found.append(row(Shard(head), Shard(head - 1)))
    return found


def register() -> None:
    """Rules for ``torch.ops.pantile.forward`` and ``backward``; once."""
    from torch.distributed.tensor.experimental import register_sharding

    from pantile._schema import BACKWARD, FORWARD

    def divides(k, q) -> bool:
        """Of every mesh dimension: a rule does not know which it is asked for."""
        return all(k.shape[-2] % size == 0 for size in k.mesh.shape)

    @register_sharding(torch.ops.pantile.forward.default)
    def forward_rule(*arguments):
        a = FORWARD.split(arguments)
        packed = a.call.cu_seqlens_q is not None
        inputs = (False, False, False)
        rows = _rows(packed, (False, True, False), inputs, divides(a.k, a.q))
        return _with_others(rows, arguments, len(inputs))

    @register_sharding(torch.ops.pantile.backward.default)
    def backward_rule(*arguments):
        count = BACKWARD.operand_count
        a = BACKWARD.split(arguments)
        packed = a.call.cu_seqlens_q is not None
        names = BACKWARD._arguments._fields[:count]
        inputs = tuple(
            None if x is None else name in ("lse", "grad_lse")
            for name, x in zip(names, arguments, strict=False)
        )
        rows = _rows(packed, (False,) * 3, inputs, divides(a.k, a.q))
        return _with_others(rows, arguments, count)


def _with_others(rows, arguments, operands: int):
    """The other arguments: tensors (lengths) are replicated, the rest is None."""
    others = [
        Replicate() if hasattr(x, "placements") or hasattr(x, "tensor_meta") else None
        for x in arguments[operands:]
    ]
    return [(outputs, [*inputs, *others]) for outputs, inputs in rows]
