"""Gradients of FP8 attention, by ``Options.fp8_backward`` (docs/fp8.md).

``"bf16"``: the 16-bit backward on what the codes stand for, with the O and LSE of the FP8 forward.
All of them belong together: scores are those that the LSE was made of, and V is that of which O is
a mean. For that Q and K stay rotated: so their numbers are exact in 16 bits, and the gradients are
rotated back. With q, k and v as they came, probabilities would not sum to 1 over a row, by as much
as the largest scores err; that error grows with the scores and feeds itself through the weights.

``"recompute"``: the gradient of the unquantised attention. A 16-bit forward on q, k and v gives it
an O and LSE of its own.

``"full"``: the same with all five products of e4m3 numbers; dO, P and dS are rounded to e4m3, too,
and delta is made of the rounded dO (the operator ``pantile::fp8_backward``).

Quantising counts as the identity in all of them. Inputs in float32 are rounded to bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pantile import _ops
from pantile._direct import run_backward
from pantile._fast_path import present, takes_short_cut
from pantile._fp8_backward import fp8_backward_op, require_kernel, run_fp8_backward
from pantile._fp8_codes import (
    Sequences,
    hadamard_group,
    in_sequences,
    means_of_rows,
    rotate_back,
    rotation_balance,
)
from pantile._fp8_numbers import dequantize_op as _op
from pantile._fp8_numbers import run_dequantize
from pantile._options import quantize_backend
from pantile._schema import (
    DEQUANTIZE,
    FP8_FORWARD,
    LENGTHS,
    NO_LENGTHS,
    PACKING,
    Call,
    bind,
    lengths_of,
)
from pantile._torch_private import in_transform

Tensor = torch.Tensor

_DEQUANTIZED = DEQUANTIZE.operand_count  # the operands that pantile::dequantize takes


class Form(NamedTuple):
    """What the operands' tensors do not show of them."""

    batch: int
    rows: int  # of a dense sequence; packed: of all
    keys: int
    head_dim: int
    block_q: int
    block_k: int
    hadamard: bool
    smooth_k: bool


class Codes(NamedTuple):
    """The operands that a gradient needs."""

    codes_q: Tensor
    codes_k: Tensor
    codes_v: Tensor
    scale_q: Tensor
    scale_kv: Tensor
    q_dot_mean: Tensor
    mean_k: Tensor


def numbers_of(codes: Codes, form: Form, call: Any, dtype: torch.dtype, rotated: bool) -> tuple:
    """(q, k less its mean, v), shaped as they were quantised."""
    operands = codes[:_DEQUANTIZED]
    run = run_dequantize if takes_short_cut((*operands, *present(lengths_of(call)))) else _op
    packing = tuple(call)[: len(PACKING)]
    blocks = form.block_q, form.block_k, form.hadamard
    backend = quantize_backend(call.backend, call.backend_preferred, codes.codes_q.device.type)
    return run(*operands, *packing, *form[:4], dtype, *blocks, rotated, backend)


def _rotated_back(grad_q: Tensor, grad_k: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Of gradients of rotated q and k those of q and k. The matrix holds powers of two."""
    if not form.hadamard:
        return grad_q, grad_k
    group, balance = hadamard_group(form.head_dim), rotation_balance(form.head_dim)
    return (
        rotate_back(grad_q, form.head_dim, 1.0 / balance),
        rotate_back(grad_k, form.head_dim, balance / group),
    )


def _rows_of_lse(x: Tensor, form: Form, cu_seqlens_q: Tensor | None) -> Tensor:
    """[heads, rows of the operands] in the shape of an LSE."""
    return in_sequences(x, Sequences(form.batch, form.rows, cu_seqlens_q)).transpose(-1, -2)


def _scale_of(call: Any, form: Form) -> float:
    return form.head_dim**-0.5 if call.scale is None else call.scale


def _run_backward(tensors: tuple, call: Any, deterministic: bool) -> tuple:
    """``pantile::backward``. create_graph=True must meet the operator's Autograd kernel: it records
    that the gradient has no derivative, and one that is asked for is refused by name."""
    operands = present((*tensors, *lengths_of(call)))
    if not torch.is_grad_enabled() and takes_short_cut(operands):
        return run_backward(*tensors, bind(call), deterministic)
    return _ops.backward_op(*tensors, *call, deterministic)


def _at_the_numbers(
    codes: Codes, form: Form, call: Any, outputs: tuple, above: tuple, det
) -> tuple:
    """Gradients by the 16-bit backward; rotated."""
    o, lse = outputs
    tensors = (
        *above,
        *numbers_of(codes, form, call, o.dtype, True),
        o,
        None,
        _lse_of_smoothed_keys(codes, form, call, lse) if form.smooth_k else lse,
    )
    return _run_backward(tensors, call, det)


def _in_fp8(codes: Codes, form: Form, call: Any, outputs: tuple, above: tuple, det) -> tuple:
    """Gradients by products of e4m3 numbers; rotated."""
    *operands, q_dot_mean, _ = codes
    tensors = (*above, *operands, q_dot_mean, *outputs)
    short = not torch.is_grad_enabled() and takes_short_cut(present((*tensors, *lengths_of(call))))
    run = run_fp8_backward if short else fp8_backward_op
    flags = form.block_q, form.block_k, form.smooth_k, det
    grads = run(*tensors, *call, *form[:4], *flags)
    if form.hadamard:
        return grads
    balance = rotation_balance(form.head_dim)
    return grads[0] / balance, grads[1] * balance, grads[2]


def _paired(ctx, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple:
    """The gradients of q, k and v at what the codes stand for."""
    call, form, deterministic, mode = ctx.how
    count = len(Codes._fields)
    codes = Codes(*ctx.saved_tensors[:count])
    o, lse, *lengths = ctx.saved_tensors[count:]
    call = call._replace(**dict(zip(LENGTHS, lengths, strict=True)))
    bounds = call.cu_seqlens_q, call.cu_seqlens_k
    above = torch.zeros_like(o) if grad_o is None else grad_o, grad_lse
    run = _in_fp8 if mode == "full" else _at_the_numbers
    grads = list(run(codes, form, call, (o, lse), above, deterministic))
    grads[:2] = _rotated_back(*grads[:2], form)
    if form.smooth_k and grad_lse is not None:
        # LSE holds scale * q . mean(K) besides that of the smoothed keys.
        means = means_of_rows(codes.mean_k, codes.codes_q.shape[0], form.rows, bounds[0])
        part = _scale_of(call, form) * grad_lse.transpose(-1, -2)[..., None] * means
        grads[0] = (grads[0].float() + part).to(grads[0].dtype)
    return tuple(grads)


def _lse_of_smoothed_keys(codes: Codes, form: Form, call, lse: Tensor) -> Tensor:
    """The LSE of Q (K - mean(K)); -inf where a row has no key."""
    shift = _rows_of_lse(codes.q_dot_mean, form, call.cu_seqlens_q)
    shifted = torch.sub(lse, shift, alpha=_scale_of(call, form))
    if call.cu_seqlens_q is None and call.seqused_q is None:
        return shifted
    # Rows that are not in use have no product with the mean.
    return torch.where(lse == -torch.inf, lse, shifted)


def _recomputed(ctx, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple:
    """The gradients of the unquantised attention."""
    call, dtype, deterministic = ctx.how
    q, k, v, *lengths = ctx.saved_tensors
    call = call._replace(**dict(zip(LENGTHS, lengths, strict=True)))
    rounded = tuple(x.to(dtype) for x in (q, k, v))
    with torch.no_grad():
        o, lse, o_low = _ops.forward_op(*rounded, *call, deterministic, False, True)
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    return _run_backward((grad_o, grad_lse, *rounded, o, o_low, lse), call, deterministic)


class Fp8Attention(torch.autograd.Function):
    """``pantile::fp8_forward``, differentiable with respect to what was quantised.

    ``rest``: its other arguments, as one, because every argument costs time. ``how``: the grad mode
    for the operator, or what runs without the dispatcher.
    """

    @staticmethod
    def forward(ctx, q, k, v, rest, how):
        a = FP8_FORWARD.split((q, k, v, *rest))
        if callable(how):
            o, lse = how(a)
        else:
            # The transforms further out differentiate by q, k and v. Without these the codes are
            # constants to them, and a second derivative would be 0 instead of refused.
            source = (q, k, v) if in_transform() else (None, None, None)
            with _ops.lower(how):
                o, lse = torch.ops.pantile.fp8_forward.default(*source, *rest)
        call = Call(*a.call)._replace(**NO_LENGTHS)
        if a.fp8_backward == "recompute":
            ctx.save_for_backward(q, k, v, *lengths_of(a.call))
            ctx.how = (call, o.dtype, a.deterministic)
        else:
            codes = (getattr(a, name) for name in Codes._fields)
            ctx.save_for_backward(*codes, o, lse, *lengths_of(a.call))
            form = Form(*(getattr(a, name) for name in Form._fields))
            ctx.how = (call, form, a.deterministic, a.fp8_backward)
            if a.fp8_backward == "full":
                require_kernel(a, o, lse)
        ctx.recomputes = a.fp8_backward == "recompute"
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        if grad_o is None and grad_lse is None:
            return None, None, None, None, None
        grads = (_recomputed if ctx.recomputes else _paired)(ctx, grad_o, grad_lse)
        cast = (g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
        return (*cast, None, None)

    jvp = staticmethod(_ops._no_forward_mode)


# What Function.apply comes to when no torch.func transform is active, without asking again.
apply_directly = super(torch.autograd.Function, Fp8Attention).apply
