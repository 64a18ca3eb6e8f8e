"""Sharding rules of the attention operators for torch's DTensor (tensor and data parallelism).

``pantile.attention`` of DTensors whose batch or heads are sharded runs on the local tensors,
without a collective, forward and backward; ``pantile.varlen_attention`` likewise for heads.
Sharded sequences are gathered first. Rules are registered at the first call with DTensors;
programs that compile their first call register them by hand::

    import pantile.integrations.dtensor

    pantile.integrations.dtensor.register()
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pantile._attention import load_torch
from pantile._schema import (
    BACKWARD,
    BACKWARD_VARIANT,
    CAPTURED,
    FORWARD,
    FORWARD_EXTRA,
    FORWARD_VARIANT,
)

__all__ = ["register"]

_registered = False


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "tensor_meta")


def _shape(x: Any) -> tuple:
    return tuple(x.tensor_meta.shape)


def _sharded_by(x: Any, dim: int) -> int:
    """Over how many devices dimension ``dim`` of x is spread."""
    sizes = x.mesh.shape
    return math.prod(
        size
        for size, place in zip(sizes, x.placements, strict=True)
        if place.is_shard() and place.dim == dim
    )


class _Rules:
    """Rows of placements of one operator: all replicated, by batch, by heads.

    ``axis``: the dimension of q, k, v and o that is sharded; ``lse``: that of the LSE and of
    max_logit. Of ``alibi`` and the like it follows from their shape.
    """

    def __init__(self, signature: Any, arguments: tuple) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.shard, self.partial, self.whole = Shard, Partial(), Replicate()
        self.arguments = arguments
        self.named = signature.split(arguments)
        self.packed = self.named.call.cu_seqlens_q is not None
        self.names = self._names(signature)

    def _names(self, signature: Any) -> list[str]:
        from pantile._schema import NAMES

        fields = list(self.named._fields)
        at = fields.index("call")
        return [*fields[:at], *NAMES, *fields[at + 1 :]]

    def kinds(self) -> list[str]:
        a = self.named
        # Dropout counts sequences and heads from the first one, and expressions read their numbers.
        if any(getattr(a, name, None) for name in ("dropout", "score", "mask_expression")):
            return ["whole"]
        kinds = ["whole"]
        if not self.packed:
            kinds.append("batch")
        axis = 1 if self.packed else 2
        spread = max(_sharded_by(x, axis) for x in (a.q, a.k, a.v))
        if spread > 1 and _shape(a.k)[axis] % spread == 0:
            kinds.append("heads")
        return kinds

    def _extra(self, kind: str, name: str, x: Any) -> Any:
        """Of a tensor of a variant."""
        shape = _shape(x)
        if name in ("sinks", "alibi") and len(shape) == 1:
            return self.shard(0) if kind == "heads" else self.whole
        if name == "alibi":
            return self.shard(1 if kind == "heads" else 0)
        if name in ("bias", "mask", "block_mask"):
            axis = 1 if kind == "heads" else 0
            return self.shard(axis) if shape[axis] > 1 else self.whole
        if name in ("query_ids", "key_ids", "prefixes") and kind == "batch" and shape[0] > 1:
            return self.shard(0)
        return self.whole

    def rows(self, kind: str) -> Any:
        """Of q, k, v, o and their gradients."""
        if kind == "whole":
            return self.whole
        axis = 0 if kind == "batch" else (1 if self.packed else 2)
        return self.shard(axis)

    def lse(self, kind: str) -> Any:
        """[batch, heads, rows] or [heads, total]; max_logit [batch, heads]."""
        if kind == "whole":
            return self.whole
        return self.shard(0 if kind == "batch" or self.packed else 1)

    def max_logit(self, kind: str) -> Any:
        if kind == "whole":
            return self.whole
        return self.shard(0 if kind == "batch" else 1)

    def inputs(self, kind: str) -> list:
        answer = []
        for name, x in zip(self.names, self.arguments, strict=True):
            if not _is_tensor(x):
                answer.append(None)
            elif name in ("q", "k", "v", "o", "o_low", "grad_o"):
                answer.append(self.rows(kind))
            elif name in ("lse", "grad_lse"):
                answer.append(self.lse(kind))
            elif kind == "whole":
                answer.append(self.whole)
            else:
                answer.append(self._extra(kind, name, x))
        return answer

    def gradient(self, kind: str, name: str) -> Any:
        """Of alibi, sinks or bias: what every part of a sharded batch has a share in is a sum.
        Calls with captured tensors are not sharded."""
        if name in CAPTURED:
            return self.whole
        x = getattr(self.named, name)
        if kind == "whole" or not getattr(self.named, f"wants_{name}"):
            return self.whole
        place = self._extra(kind, name, x)
        return place if place.is_shard() else self.partial


def _forward_rules(signature: Any, with_max: bool) -> Any:
    def rules(*arguments: Any) -> list:
        r = _Rules(signature, arguments)
        answer = []
        for kind in r.kinds():
            outputs = [r.rows(kind), r.lse(kind), r.rows(kind)]
            if with_max:
                outputs.append(r.max_logit(kind))
            answer.append((outputs, r.inputs(kind)))
        return answer

    return rules


def _backward_rules(signature: Any, learned: tuple[str, ...]) -> Any:
    def rules(*arguments: Any) -> list:
        r = _Rules(signature, arguments)
        return [
            ([r.rows(kind)] * 3 + [r.gradient(kind, name) for name in learned], r.inputs(kind))
            for kind in r.kinds()
        ]

    return rules


def register() -> None:
    """Registers the rules; a second call does nothing."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    load_torch()  # pantile may have been imported before torch
    ops = torch.ops.pantile
    for op, rules in (
        (ops.forward.default, _forward_rules(FORWARD, False)),
        (ops.forward_extra.default, _forward_rules(FORWARD_EXTRA, True)),
        (ops.forward_variant.default, _forward_rules(FORWARD_VARIANT, True)),
        (ops.backward.default, _backward_rules(BACKWARD, ())),
        (
            ops.backward_variant.default,
            _backward_rules(BACKWARD_VARIANT, ("alibi", "sinks", "bias", *CAPTURED)),
        ),
    ):
        register_sharding(op)(rules)
    _registered = True
