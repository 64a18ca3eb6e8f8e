"""Attention into a tensor of the caller: ``torch.ops.pantile.forward_out``.

O is written in the strides that it has, and nothing is differentiated. One operator serves calls
with and without a variant; plain eager calls go around the dispatcher, as in _ops.py.
"""

from __future__ import annotations

import torch

from pantile import _C, _fake
from pantile._direct import o_shape, readable_variant, run_forward
from pantile._fast_path import is_compiling, nothing_watches, present, records_any
from pantile._ops import (
    _chosen,
    _library,
    _or_empty,
    differentiates,
    lse_shape,
    new_max_logit,
    prepare,
)
from pantile._schema import (
    FORWARD_OUT,
    NO_VARIANT,
    VARIANT_TENSOR_COUNT,
    Variant,
    bind,
    lengths_of,
    variant_of,
)
from pantile._torch_private import below_autograd
from pantile._variant_ops import seeded_variant

Tensor = torch.Tensor

_library.define(FORWARD_OUT.schema, tags=(torch.Tag.pt2_compliant_tag,))
out_op = torch.ops.pantile.forward_out.default

_NUMBERS = NO_VARIANT[VARIANT_TENSOR_COUNT:]


def _given(a) -> Variant | None:
    """The variant among the arguments of the operator, if there is one."""
    variant = variant_of(a)
    some = any(x is not None for x in variant[:VARIANT_TENSOR_COUNT])
    return variant if some or variant[VARIANT_TENSOR_COUNT:] != _NUMBERS else None


def _refuse_gradients() -> None:
    raise _C.UnsupportedError(
        "out is given, and autograd would record the call: attention into out has no derivative; "
        "call it inside torch.no_grad(), or without out"
    )


def _kernel(*arguments):
    a = FORWARD_OUT.split(arguments)
    given = _given(a)
    _, lse, _, max_logit = run_forward(
        *(a.q, a.k, a.v, bind(a.call), a.checked, True, (a.max_logit, False), False),
        None if given is None else readable_variant(given),
        a.out,
    )
    return lse, _or_empty(max_logit, a.q)


for _key in ("CPU", "CUDA"):
    _library.impl("forward_out", _kernel, _key)


def _check_out(q: Tensor, k: Tensor, v: Tensor, out: object) -> None:
    """What no kernel could say: of tensors without memory, too."""
    _fake.check_operand("out", out, q)
    if out.dtype not in (q.dtype, torch.float32):
        kind = str(q.dtype).removeprefix("torch.")
        raise TypeError(
            f"out has dtype {str(out.dtype).removeprefix('torch.')}; it must have the dtype of q, "
            f"{kind}, or be float32"
        )
    if q.ndim == out.ndim and v.ndim:
        shapes = _fake.known_shapes(tuple(out.shape), o_shape(q, v))
        _fake.require_shape("out", *shapes)


@torch.library.register_fake("pantile::forward_out", lib=_library)
def _fake_out(*arguments):
    a = FORWARD_OUT.split(arguments)
    _check_out(a.q, a.k, a.v, a.out)
    f32 = a.out.dtype is torch.float32
    _fake.check_forward(a.q, a.k, a.v, a.call, a.max_logit, f32, _given(a))
    lse = a.q.new_empty(lse_shape(a.q.shape), dtype=torch.float32)
    return lse, new_max_logit(a)


def _autograd(*arguments):
    tensors = present(arguments[: FORWARD_OUT.operand_count])
    if differentiates(x for x in tensors if x.is_floating_point()):
        _refuse_gradients()
    with below_autograd():
        return out_op(*arguments)


_library.impl("forward_out", _autograd, "Autograd")


def attention(q, k, v, out, call, variant, dropout, checked, return_lse, extras):
    """As _ops.attention and _variant_ops.variant_attention, into ``out``, which is o of the answer.

    ``variant``: None without one. ``extras``: (max_logit, float32), or None.
    """
    _check_out(q, k, v, out)
    if extras is not None and extras[1] and out.dtype is not torch.float32:
        raise ValueError(
            f"output_dtype is float32, and out has dtype {str(out.dtype).removeprefix('torch.')}; "
            "leave output_dtype out, the dtype of out decides"
        )
    if variant is not None:
        variant = seeded_variant(variant, dropout, q)
    max_logit = extras is not None and extras[0]
    tensors = present((q, k, v, out, *(() if variant is None else variant[:VARIANT_TENSOR_COUNT])))
    if type(call) is _C.Call and nothing_watches((*tensors, *present(lengths_of(call)))):
        if records_any(tensors):
            _refuse_gradients()
        _, lse, _, largest = run_forward(
            *(q, k, v, call, checked, return_lse, (max_logit, False), False),
            None if variant is None else readable_variant(variant),
            out,
        )
        return _chosen(out, lse, largest, return_lse)
    if not is_compiling():
        prepare(q, k, v, lengths_of(call))
    given = NO_VARIANT if variant is None else variant
    lse, largest = out_op(
        *(q, k, v, out, *given[:VARIANT_TENSOR_COUNT], *call, *given[VARIANT_TENSOR_COUNT:]),
        *(checked, max_logit),
    )
    return _chosen(out, lse, largest if max_logit else None, return_lse)
