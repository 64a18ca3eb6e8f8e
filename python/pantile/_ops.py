"""The torch operators ``pantile::forward``, ``pantile::forward_extra`` and ``pantile::backward``.

All are ordinary dispatcher operators: kernels for CPU and CUDA, a fake kernel for tracing, an
Autograd kernel, an Autocast kernel, a vmap rule and a FLOP formula. They decide everything that
depends on torch's state, and torch.func, torch.compile and exported programs meet nothing else.
Plain eager calls take a short cut around the dispatcher that does the same work (_fast_path.py).
"""

from __future__ import annotations

import contextlib

import torch
from torch.autograd import forward_ad
from torch.utils import flop_counter

from pantile import _C, _fake, _torch_private
from pantile._direct import (
    BACKEND_SETTING,
    LENGTHS_COUNT,
    batch_of,
    keeps_low,
    lse_shape,
    no_low,
    o_shape,
    run_backward,
    run_forward,
    split_output,
)
from pantile._direct import final_settings as final_settings  # for explain
from pantile._fake import prepare as prepare  # for explain
from pantile._fast_path import is_compiling, is_plain, present, records, takes_short_cut
from pantile._masks import visible_pairs
from pantile._torch_private import below_autograd, in_transform

Tensor = torch.Tensor

# What both operators share, in the order in which the bindings take it.
_SETTINGS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, SymInt window_left, "
    "SymInt window_right, str backend"
)
_SETTINGS_COUNT = 10
_NO_LENGTHS = (None,) * LENGTHS_COUNT

_library = torch.library.Library("pantile", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool deterministic, bool checked,"
    " bool keep_low) -> (Tensor o, Tensor lse, Tensor o_low)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"forward_extra(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool deterministic, bool checked,"
    " bool keep_low, bool max_logit, bool output_f32)"
    " -> (Tensor o, Tensor lse, Tensor o_low, Tensor max_logit)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o,"
    f" Tensor? o_low, Tensor lse, {_SETTINGS}, bool deterministic)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# keep_low: o_low, int8 of the shape of o, holds 8 more bits of a 16-bit o, from which the backward
# takes rowsum(dO * O). Their Autograd kernels ask for it where they record. It is [0, ..] when it
# is not asked for and for float32.
forward_op = torch.ops.pantile.forward.default
# With what few calls want; max_logit is [0, heads] when it is not wanted.
extra_op = torch.ops.pantile.forward_extra.default
backward_op = torch.ops.pantile.backward.default


# ---- kernels


def _forward_kernel(q, k, v, *rest):
    settings, (_, checked, keep_low) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    o, lse, o_low, _ = run_forward(q, k, v, settings, checked, True, None, keep_low)
    return o, lse, no_low(q, v) if o_low is None else o_low


def _extra_kernel(q, k, v, *rest):
    settings, (_, checked, keep_low, *extras) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    o, lse, o_low, max_logit = run_forward(q, k, v, settings, checked, True, extras, keep_low)
    return o, lse, no_low(q, v) if o_low is None else o_low, _or_empty(max_logit, q)


def _or_empty(max_logit: Tensor | None, q: Tensor) -> Tensor:
    if max_logit is None:
        return q.new_empty((0, q.shape[-2]), dtype=torch.float32)
    return max_logit


def _backward_kernel(grad_o, grad_lse, q, k, v, o, o_low, lse, *rest):
    settings, (deterministic,) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    return run_backward(grad_o, grad_lse, q, k, v, o, o_low, lse, settings, deterministic)


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _key)
    _library.impl("forward_extra", _extra_kernel, _key)
    _library.impl("backward", _backward_kernel, _key)


# ---- fake kernels: shapes for tracing and for the meta device


def _new_fake(q, v, keep_low, dtype):
    o = q.new_empty(o_shape(q, v), dtype=dtype)
    o_low = torch.empty_like(o, dtype=torch.int8) if keeps_low(q, keep_low) else no_low(q, v)
    return o, q.new_empty(lse_shape(q.shape), dtype=torch.float32), o_low


@torch.library.register_fake("pantile::forward", lib=_library)
def _fake_forward(q, k, v, *rest):
    _fake.check_forward(q, k, v, rest[:_SETTINGS_COUNT])
    return _new_fake(q, v, rest[-1], q.dtype)


@torch.library.register_fake("pantile::forward_extra", lib=_library)
def _fake_extra(q, k, v, *rest):
    keep_low, wants_max_logit, output_f32 = rest[-3:]
    _fake.check_forward(q, k, v, rest[:_SETTINGS_COUNT], wants_max_logit, output_f32)
    rows = batch_of(q, rest) if wants_max_logit else 0
    max_logit = q.new_empty((rows, q.shape[-2]), dtype=torch.float32)
    return *_new_fake(q, v, keep_low, torch.float32 if output_f32 else q.dtype), max_logit


@torch.library.register_fake("pantile::backward", lib=_library)
def _fake_backward(grad_o, grad_lse, q, k, v, o, o_low, lse, *rest):
    _fake.check_backward(grad_o, grad_lse, q, k, v, o, o_low, lse, rest[:_SETTINGS_COUNT])
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


# ---- autograd


def _no_second_derivative(*_):
    raise _C.UnsupportedError(
        "second derivatives of attention are not implemented; do not differentiate its gradient "
        "(create_graph=True, double backward)"
    )


def _no_forward_mode(*_):
    raise _C.UnsupportedError("forward-mode derivatives (jvp) of attention are not implemented")


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply`` for an Autograd kernel, also inside transforms of torch.func.

    There the kernel runs once for each transform that differentiates, on the tensors of that one,
    and below it the next transform is met by the operator. So the plain form of Function, for one
    level, is the right one; by itself it refuses to run inside transforms. The Function's last
    argument is added here: the grad mode for :func:`lower`.
    """
    if not in_transform():
        return function.apply(*args, False)
    with _torch_private.single_level_function():
        return super(torch.autograd.Function, function).apply(*args, torch.is_grad_enabled())


@contextlib.contextmanager
def lower(grad_mode: bool):
    """For the operator that a Function's forward calls: below this Autograd kernel.

    A Function's forward runs without grad mode and forward mode. Transforms further out would
    inherit that and lose their gradient.
    """
    with below_autograd():
        if not in_transform():
            yield
            return
        with torch.set_grad_enabled(grad_mode), _torch_private.set_forward_grad(True):
            yield


class _Attention(torch.autograd.Function):
    """First derivatives, in eager mode and in traced graphs.

    ``call`` is (settings, deterministic, checked, direct, wants, extras); ``direct`` calls the
    kernels without the dispatcher, for the short cut below; ``wants`` is (lse, o_low). One tuple,
    and lse, o_low and max_logit as outputs only when they are wanted, because every argument and
    output costs time.
    """

    @staticmethod
    def forward(ctx, q, k, v, call, grad_mode):
        settings, deterministic, checked, direct, (wants_lse, wants_low), extras = call
        # An o in float32 is saved as it is: the backward takes its low bits from it.
        keep_low = wants_low or extras is None or not extras[1]
        if direct:
            o, lse, o_low, max_logit = run_forward(
                q, k, v, settings, checked, True, extras, keep_low
            )
        else:
            with lower(grad_mode):
                o, lse, o_low, max_logit = _dispatch(
                    q, k, v, settings, deterministic, checked, keep_low, extras
                )
        saved_low = o_low if keeps_low(q, o.dtype is q.dtype) else None
        if settings[0] is None:
            ctx.save_for_backward(q, k, v, o, saved_low, lse)
        else:
            ctx.save_for_backward(q, k, v, o, saved_low, lse, *settings[:LENGTHS_COUNT])
        ctx.call = (settings[LENGTHS_COUNT:], deterministic, direct, wants_lse)
        ctx.set_materialize_grads(False)
        if not wants_low and max_logit is None:
            return (o, lse) if wants_lse else o
        whole = [
            x for x, wanted in ((o_low, wants_low), (max_logit, max_logit is not None)) if wanted
        ]
        ctx.mark_non_differentiable(*whole)
        return (o, lse, *whole) if wants_lse else (o, *whole)

    @staticmethod
    def backward(ctx, grad_o, *grads):
        settings, deterministic, direct, wants_lse = ctx.call
        grad_lse = grads[0] if wants_lse else None
        if grad_o is None and grad_lse is None:
            return None, None, None, None, None
        q, k, v, o, o_low, lse, *lengths = ctx.saved_tensors
        settings = (*(lengths or _NO_LENGTHS), *settings)
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        if o.dtype is not q.dtype:  # as the backward takes it, of a forward that gave it in float32
            o, o_low = split_output(o, q.dtype)
            grad_o = grad_o.to(q.dtype)
        # Gradients come from anywhere, and saved tensors through anybody's hooks. create_graph=True
        # must meet the operator, whose own derivative raises.
        operands = (grad_o, q, k, v, o, lse, *present((grad_lse, o_low, *lengths)))
        if direct and not torch.is_grad_enabled() and takes_short_cut(operands):
            run, flat = run_backward, (settings, deterministic)
        else:
            run, flat = backward_op, (*settings, deterministic)
        return (*run(grad_o, grad_lse, q, k, v, o, o_low, lse, *flat), None, None)

    jvp = staticmethod(_no_forward_mode)


def _dispatch(q, k, v, settings, deterministic, checked, keep_low, extras):
    """(o, lse, o_low, max_logit or None) by the operators."""
    if extras is None:
        return *forward_op(q, k, v, *settings, deterministic, checked, keep_low), None
    *outputs, max_logit = extra_op(q, k, v, *settings, deterministic, checked, keep_low, *extras)
    return *outputs, max_logit if extras[0] else None


class _AttentionGradient(torch.autograd.Function):
    """On the gradient's own Autograd key, so that a second derivative is never silently wrong."""

    @staticmethod
    def forward(ctx, *args):
        *args, grad_mode = args
        with lower(grad_mode):
            return backward_op(*args)

    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_mode)


def differentiates(tensors) -> bool:
    if not _torch_private.KNOWS_FORWARD_MODE:
        tensors = tuple(tensors)
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            return True
    elif _torch_private.in_forward_mode():  # inside dual_level: Function refuses tangents by name
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _recorded_outputs(q, k, v, rest, extras):
    """(o, lse, o_low, max_logit or None) of an operator that is recorded."""
    settings = rest[:_SETTINGS_COUNT]
    deterministic, checked, keep_low = rest[_SETTINGS_COUNT : _SETTINGS_COUNT + 3]
    keep_low = keeps_low(q, keep_low)
    call = (settings, deterministic, checked, False, (True, keep_low), extras)
    o, lse, *others = apply(_Attention, q, k, v, call)
    o_low = others.pop(0) if keep_low else no_low(q, v)
    return o, lse, o_low, *(others or [None])


def _forward_autograd(q, k, v, *rest):
    if differentiates((q, k, v)):
        return _recorded_outputs(q, k, v, rest, None)[:3]
    with below_autograd():
        return forward_op(q, k, v, *rest)


def _extra_autograd(q, k, v, *rest):
    if differentiates((q, k, v)):
        *outputs, max_logit = _recorded_outputs(q, k, v, rest, tuple(rest[-2:]))
        return *outputs, _or_empty(max_logit, q)
    with below_autograd():
        return extra_op(q, k, v, *rest)


def _backward_autograd(*args):
    if differentiates(x for x in args[:8] if x is not None):
        return apply(_AttentionGradient, *args)
    with below_autograd():
        return backward_op(*args)


_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("forward_extra", _extra_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")


# ---- autocast: like torch's own attention, inputs take the autocast dtype


def _register_autocast(device_type: str, key: str) -> None:
    without_autocast = _torch_private.without_autocast(device_type, key)

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        castable = x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if castable else x

    def casting(op):
        def call(q, k, v, *rest):
            dtype = torch.get_autocast_dtype(device_type)
            with without_autocast():
                return op(cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest)

        return call

    _library.impl("forward", casting(forward_op), key)
    _library.impl("forward_extra", casting(extra_op), key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# ---- torch.func: vmap rules


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension joined with the batch."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _select(x, dim: int | None, index: int):
    return x if dim is None or not isinstance(x, Tensor) else x.select(dim, index)


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    if parts[0].dtype is not torch.float8_e4m3fn:
        return torch.stack(parts)
    codes = torch.stack([x.view(torch.uint8) for x in parts])  # autocast stacks no float8
    return codes.view(torch.float8_e4m3fn)


def mapped_in_a_loop(call, info, in_dims, *args):
    """``call`` once for each entry of a mapped dimension."""
    answers = [
        call(*(_select(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    results = tuple(_stacked(parts) for parts in zip(*answers, strict=True))
    return results, (0,) * len(results)


def _mapped(call, operand_count: int, info, in_dims, *args):
    """``call`` over a mapped dimension: one call for dense tensors, a loop for packed ones."""
    size = info.batch_size
    if args[operand_count] is not None:  # cu_seqlens_q
        return mapped_in_a_loop(call, info, in_dims, *args)
    operands = (
        _fold(x, dim, size)
        for x, dim in zip(args[:operand_count], in_dims[:operand_count], strict=True)
    )
    answer = call(*operands, *args[operand_count:])
    results = tuple(x.unflatten(0, (size, -1)) for x in answer)
    return results, (0,) * len(results)


def _vmap_forward(info, in_dims, *args):
    return _mapped(forward_op, 3, info, in_dims, *args)


def _vmap_extra(info, in_dims, *args):
    return _mapped(extra_op, 3, info, in_dims, *args)


def _vmap_backward(info, in_dims, *args):
    return _mapped(backward_op, 8, info, in_dims, *args)


torch.library.register_vmap("pantile::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("pantile::forward_extra", _vmap_extra, lib=_library)
torch.library.register_vmap("pantile::backward", _vmap_backward, lib=_library)


# ---- FLOPs: two products forward; five backward, of which the recomputed scores are one


def visible_pairs_of_call(batch, rows, keys, settings) -> int:
    """(query row, key) pairs of one head that the mask lets through, over the batch.

    ``batch``, ``rows`` and ``keys`` are those of dense tensors. Packed sequences are counted by
    their lengths; where these have no contents that can be read (fake, meta and wrapped tensors),
    as if all were the longest.
    """
    cu_seqlens = settings[:2]
    bounds = settings[7:9]
    if cu_seqlens[0] is None:
        return batch * visible_pairs(rows, keys, *bounds)
    if not all(is_plain(x) for x in cu_seqlens):
        return (cu_seqlens[0].shape[0] - 1) * visible_pairs(settings[4], settings[5], *bounds)
    lengths = zip(*(x.diff().tolist() for x in cu_seqlens), strict=True)
    return sum(visible_pairs(sq, sk, *bounds) for sq, sk in lengths)


def _pairs(q, k, rest) -> int:
    """Over batch and query heads."""
    return q.shape[-2] * visible_pairs_of_call(q.shape[0], q.shape[1], k.shape[1], rest)


@flop_counter.register_flop_formula(
    [torch.ops.pantile.forward, torch.ops.pantile.forward_extra], get_raw=True
)
def _forward_flops(q, k, v, *rest, out_val=None, **_) -> int:
    return 2 * _pairs(q, k, rest) * (q.shape[-1] + v.shape[-1])


@flop_counter.register_flop_formula(torch.ops.pantile.backward, get_raw=True)
def _backward_flops(grad_o, grad_lse, q, k, v, o, o_low, lse, *rest, out_val=None, **_) -> int:
    return 2 * _pairs(q, k, rest) * (3 * q.shape[-1] + 2 * v.shape[-1])


# ---- calls

# What Function.apply comes to when no torch.func transform is active, without asking again.
_apply_directly = super(torch.autograd.Function, _Attention).apply


def _chosen(o, lse, max_logit, return_lse: bool):
    if max_logit is not None:
        return (o, lse, max_logit) if return_lse else (o, max_logit)
    return (o, lse) if return_lse else o


def attention(q, k, v, settings, deterministic, checked, return_lse, extras):
    """o, or a tuple of o and what else is wanted, by the shortest way that torch's state allows."""
    operands = (q, k, v)
    if settings[0] is not None:
        operands += present(settings[:LENGTHS_COUNT])
    if takes_short_cut(operands):
        if records(q, k, v):
            call = (settings, deterministic, checked, True, (return_lse, False), extras)
            return _apply_directly(q, k, v, call, False)
        if return_lse or extras is not None:
            o, lse, _, max_logit = run_forward(q, k, v, settings, checked, return_lse, extras)
            return _chosen(o, lse, max_logit, return_lse)
        return run_forward(q, k, v, settings, checked, False)[0]
    if not is_compiling():
        prepare(q, k, v, settings[:LENGTHS_COUNT])
    o, lse, _, max_logit = _dispatch(q, k, v, settings, deterministic, checked, False, extras)
    return _chosen(o, lse, max_logit, return_lse)


def plain_attention(q, k, v, causal: bool, settings):
    """o, for a call that says no more than ``causal``."""
    if not is_compiling():
        o = _C.attend(q, k, v, causal, settings[BACKEND_SETTING])
        if o is not None:
            return o
    return attention(q, k, v, settings, False, False, False, None)
