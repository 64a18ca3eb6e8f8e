"""Dense attention of DTensors sharded by batch or heads alone: that of the local tensors.

Every device attends with its batch entries and heads; nothing is sent. torch's way, which asks the
operator's sharding rule (integrations/dtensor.py), gives the same and takes ten times as long on
the host. It serves what this module leaves to it: other placements, packed sequences, variants,
calls that a mode watches.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from pantile import _torch_private
from pantile._fast_path import AVAILABLE, WATCHERS
from pantile._schema import lengths_of

Tensor = torch.Tensor

_Spec = _torch_private.look_up_feature("torch.distributed.tensor._dtensor_spec.DTensorSpec")
_Meta = _torch_private.look_up_feature("torch.distributed.tensor._dtensor_spec.TensorMeta")
_KNOWN = AVAILABLE and None not in (_Spec, _Meta)
# Of [batch, seq, heads, dim], and where these axes are in LSE [batch, heads, seq] and in max_logit
# [batch, heads].
_BATCH, _HEADS = 0, 2
_OF_SCORES = {_BATCH: Shard(0), _HEADS: Shard(1)}


class _Outputs(NamedTuple):
    """How the results of a call are spread."""

    o: Any
    o_float32: Any
    lse: Any
    max_logit: Any
    gradients: tuple  # of q, k, v


def _spec(like: Any, placements: tuple, shape: tuple, dtype: torch.dtype) -> Any:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    meta = _Meta(torch.Size(shape), tuple(strides), dtype)
    return _Spec(like.mesh, placements, tensor_meta=meta)


def _splits_heads(spec: Any, heads_k: int) -> bool:
    """Whether every device gets equally many key heads, and the query heads of these."""
    sizes = zip(spec.mesh.shape, spec.placements, strict=True)
    parts = math.prod(size for size, place in sizes if place == Shard(_HEADS))
    return heads_k % parts == 0


@functools.lru_cache(maxsize=256)
def _outputs(q: Any, k: Any, v: Any) -> _Outputs | None:
    """Of operands with these specs; None: torch's rules decide."""
    shapes = [x.tensor_meta.shape for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes):
        return None
    if q.mesh.get_coordinate() is None:
        return None  # this process has no part of them
    places = q.placements
    if any(x.placements != places or x.mesh != q.mesh for x in (k, v)):
        return None
    if any(type(p) not in (Shard, Replicate) for p in places):
        return None
    if any(type(p) is Shard and p.dim not in _OF_SCORES for p in places):
        return None
    batch, rows, heads_q, _ = shapes[0]
    heads_k = shapes[1][2]
    if any(shape[0] != batch for shape in shapes) or shapes[2][2] != heads_k:
        return None  # an error, which names the whole shapes
    if heads_k == 0 or heads_q % heads_k or not _splits_heads(q, heads_k):
        return None
    scores = tuple(_OF_SCORES[p.dim] if type(p) is Shard else p for p in places)
    o, dtype = (batch, rows, heads_q, shapes[2][3]), q.tensor_meta.dtype
    return _Outputs(
        _spec(q, places, o, dtype),
        _spec(q, places, o, torch.float32),
        _spec(q, scores, (batch, heads_q, rows), torch.float32),
        _spec(q, scores, (batch, heads_q), torch.float32),
        tuple(_spec(x, places, x.tensor_meta.shape, x.tensor_meta.dtype) for x in (q, k, v)),
    )


class _Locals(torch.autograd.Function):
    """The local tensors of q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, specs):
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(x._local_tensor.view_as(x._local_tensor) for x in (q, k, v))

    @staticmethod
    def backward(ctx, *grads):
        return *map(whole_of, grads, ctx.specs), None


class _Whole(torch.autograd.Function):
    """The DTensor of a local tensor."""

    @staticmethod
    def forward(ctx, local, spec):
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return whole_of(local.view_as(local), spec)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(ctx.spec.mesh, ctx.spec.placements)
        return grad.to_local(), None


def whole_of(local: Tensor | None, spec: Any) -> Any:
    if local is None:
        return None
    # A copy: torch changes specs of its DTensors. DTensor.__init__ does nothing, slowly.
    return DTensor.__new__(DTensor, local, copy.copy(spec), requires_grad=local.requires_grad)


def locals_of(q: Any, k: Any, v: Any) -> tuple | None:
    """(the local tensors, how the results are spread), or None where torch's rules decide."""
    if not (_KNOWN and type(q) is type(k) is type(v) is DTensor):
        return None
    outputs = _outputs(q._spec, k._spec, v._spec)
    return outputs and ((q._local_tensor, k._local_tensor, v._local_tensor), outputs)


def plain_attention(attend: Any, q: Any, k: Any, v: Any, call: Any) -> Any:
    """o by ``attend(q, k, v, call)``, or None where this is not the way or that gives None."""
    found = locals_of(q, k, v)
    if found is None or _records(q, k, v):
        return None
    local, outputs = found
    o = attend(*local, call)
    return None if o is None else whole_of(o, outputs.o)


def _records(q: Any, k: Any, v: Any) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def attention(attend: Any, q: Any, k: Any, v: Any, call: Any, flags: tuple, extras: Any) -> Any:
    """What ``attend(q, k, v, call, *flags, extras)`` gives of DTensors, or None where torch's rules
    decide. ``flags``: deterministic, checked, return_lse."""
    if any(x is not None for x in lengths_of(call)) or any(watches() for watches in WATCHERS):
        return None
    found = locals_of(q, k, v)
    if found is None:
        return None
    local, outputs = found
    records = _records(q, k, v)
    if records:
        local = _Locals.apply(q, k, v, outputs.gradients)
    answer = attend(*local, call, *flags, extras)
    parts = answer if type(answer) is tuple else (answer,)
    return_max, float32 = extras or (False, False)
    specs = [outputs.o_float32 if float32 else outputs.o]
    specs += [outputs.lse] if flags[2] else []
    specs += [outputs.max_logit] if return_max else []
    wrap = _Whole.apply if records else whole_of
    whole = tuple(map(wrap, parts, specs))
    return whole if type(answer) is tuple else whole[0]
