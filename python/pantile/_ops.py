"""The torch operators ``pantile::forward``, ``pantile::forward_extra`` and ``pantile::backward``.

All are ordinary dispatcher operators: kernels for CPU and CUDA, a fake kernel for tracing, an
Autograd kernel, an Autocast kernel, a vmap rule and a FLOP formula. They decide everything that
depends on torch's state, and torch.func, torch.compile and exported programs meet nothing else.
Plain eager calls take a short cut around the dispatcher that does the same work (_fast_path.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys

import torch
from torch.autograd import forward_ad
from torch.utils import flop_counter

from pantile import _C, _fake, _torch_private, _watch
from pantile._direct import (
    batch_of,
    keeps_low,
    lse_shape,
    no_low,
    o_shape,
    run_backward,
    run_forward,
    split_output,
)
from pantile._direct import final_call as final_call  # for explain
from pantile._fake import prepare as prepare  # for explain
from pantile._fast_path import (
    is_compiling,
    nothing_watches,
    present,
    records,
    takes_short_cut,
)
from pantile._flops import backward_flops, forward_flops
from pantile._schema import (
    BACKWARD,
    FORWARD,
    FORWARD_EXTRA,
    LENGTHS,
    NO_LENGTHS,
    Call,
    bind,
    lengths_of,
)
from pantile._torch_private import below_autograd, in_transform

Tensor = torch.Tensor

_library = torch.library.Library("pantile", "DEF")
for _signature in (FORWARD, FORWARD_EXTRA, BACKWARD):
    _library.define(_signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
# keep_low: o_low, int8 of the shape of o, holds 8 more bits of a 16-bit o, from which the backward
# takes rowsum(dO * O). Their Autograd kernels ask for it where they record. It is [0, ..] when it
# is not asked for and for float32.
forward_op = torch.ops.pantile.forward.default
# With what few calls want; max_logit is [0, heads] when it is not wanted.
extra_op = torch.ops.pantile.forward_extra.default
backward_op = torch.ops.pantile.backward.default


# ---- kernels


def _forward_kernel(*arguments):
    a = FORWARD.split(arguments)
    o, lse, o_low, _ = run_forward(a.q, a.k, a.v, bind(a.call), a.checked, True, None, a.keep_low)
    return o, lse, no_low(a.q, a.v) if o_low is None else o_low


def _extra_kernel(*arguments):
    a = FORWARD_EXTRA.split(arguments)
    extras = a.max_logit, a.output_f32
    o, lse, o_low, max_logit = run_forward(
        a.q, a.k, a.v, bind(a.call), a.checked, True, extras, a.keep_low
    )
    return o, lse, no_low(a.q, a.v) if o_low is None else o_low, _or_empty(max_logit, a.q)


def _or_empty(max_logit: Tensor | None, q: Tensor) -> Tensor:
    if max_logit is None:
        return q.new_empty((0, q.shape[-2]), dtype=torch.float32)
    return max_logit


def _backward_kernel(*arguments):
    a = BACKWARD.split(arguments)
    return run_backward(*arguments[: BACKWARD.operand_count], bind(a.call), a.deterministic)


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _key)
    _library.impl("forward_extra", _extra_kernel, _key)
    _library.impl("backward", _backward_kernel, _key)


# ---- fake kernels: shapes for tracing and for the meta device


def _new_fake(q, v, keep_low, dtype):
    o = q.new_empty(o_shape(q, v), dtype=dtype)
    o_low = torch.empty_like(o, dtype=torch.int8) if keeps_low(q, keep_low) else no_low(q, v)
    return o, q.new_empty(lse_shape(q.shape), dtype=torch.float32), o_low


def new_max_logit(a) -> Tensor:
    """``a``: the arguments of an operator that may want it."""
    rows = batch_of(a.q, a.call) if a.max_logit else 0
    return a.q.new_empty((rows, a.q.shape[-2]), dtype=torch.float32)


def new_fake_extra(a):
    """With max_logit; ``a``: the arguments of an operator that may want it, or a float32 o."""
    dtype = torch.float32 if a.output_f32 else a.q.dtype
    return *_new_fake(a.q, a.v, a.keep_low, dtype), new_max_logit(a)


@torch.library.register_fake("pantile::forward", lib=_library)
def _fake_forward(*arguments):
    a = FORWARD.split(arguments)
    _fake.check_forward(a.q, a.k, a.v, a.call)
    return _new_fake(a.q, a.v, a.keep_low, a.q.dtype)


@torch.library.register_fake("pantile::forward_extra", lib=_library)
def _fake_extra(*arguments):
    a = FORWARD_EXTRA.split(arguments)
    _fake.check_forward(a.q, a.k, a.v, a.call, a.max_logit, a.output_f32)
    return new_fake_extra(a)


@torch.library.register_fake("pantile::backward", lib=_library)
def _fake_backward(*arguments):
    a = BACKWARD.split(arguments)
    _fake.check_backward(*arguments[: BACKWARD.operand_count], a.call)
    contiguous = torch.contiguous_format
    return tuple(torch.empty_like(x, memory_format=contiguous) for x in (a.q, a.k, a.v))


# ---- autograd


def _no_second_derivative(*_):
    raise _C.UnsupportedError(
        "second derivatives of attention are not implemented; do not differentiate its gradient "
        "(create_graph=True, double backward)"
    )


def _no_forward_mode(*_):
    raise _C.UnsupportedError("forward-mode derivatives (jvp) of attention are not implemented")


class _FirstOnly(torch.autograd.Function):
    """Gradients as they are, whose own derivative is refused."""

    @staticmethod
    def forward(ctx, *grads):
        return tuple(None if g is None else g.view_as(g) for g in grads)

    backward = staticmethod(_no_second_derivative)


def first_derivatives_only(backward):
    """Of a Function's backward that autograd could not differentiate: it exchanges tensors with
    other processes, so that parts of a second derivative would be missing without a word."""

    @functools.wraps(backward)
    def refusing(ctx, *grads):
        with torch.no_grad():
            answers = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return answers
        fresh = (None if g is None else g.detach().requires_grad_() for g in answers)
        return _FirstOnly.apply(*fresh)

    return refusing


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

    ``how`` is (call, deterministic, checked, direct, wants, extras). ``direct`` calls the kernels
    without the dispatcher, for the short cut below; ``call`` is then that of the bindings.
    ``wants`` is (lse, o_low). One tuple, and lse, o_low and max_logit as outputs only when they are
    wanted, because every argument and output costs time.
    """

    @staticmethod
    def forward(ctx, q, k, v, how, grad_mode):
        call, deterministic, checked, direct, (wants_lse, wants_low), extras = how
        # An o in float32 is saved as it is: the backward takes its low bits from it.
        keep_low = wants_low or extras is None or not extras[1]
        if direct:
            o, lse, o_low, max_logit = run_forward(q, k, v, call, checked, True, extras, keep_low)
        else:
            with lower(grad_mode):
                o, lse, o_low, max_logit = _dispatch(
                    q, k, v, call, deterministic, checked, keep_low, extras
                )
        saved_low = o_low if keeps_low(q, o.dtype is q.dtype) else None
        if call.cu_seqlens_q is None:
            ctx.save_for_backward(q, k, v, o, saved_low, lse)
        else:
            ctx.save_for_backward(q, k, v, o, saved_low, lse, *lengths_of(call))
            call = call._replace(**NO_LENGTHS)
        # The fields beside the call: compiled autograd traces the backward, and no _C.Call.
        ctx.how = (call, tuple(call), deterministic, direct, wants_lse)
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
        call, fields, deterministic, direct, wants_lse = ctx.how
        grad_lse = grads[0] if wants_lse else None
        if grad_o is None and grad_lse is None:
            return None, None, None, None, None
        if is_compiling():
            call = Call(*fields)
        grads = _gradients(grad_o, grad_lse, ctx.saved_tensors, call, deterministic, direct)
        return (*grads, None, None)

    jvp = staticmethod(_no_forward_mode)


def _gradients(grad_o, grad_lse, saved, call, deterministic, direct):
    """Of q, k and v, by the shortest way; one of the first two may be None."""
    q, k, v, o, o_low, lse, *lengths = saved
    if lengths:
        call = call._replace(**dict(zip(LENGTHS, lengths, strict=True)))
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    if o.dtype is not q.dtype:  # as the backward takes it, of a forward that gave it in float32
        o, o_low = split_output(o, q.dtype)
        grad_o = grad_o.to(q.dtype)
    # Gradients come from anywhere, and saved tensors through anybody's hooks. create_graph=True
    # must meet the operator, whose own derivative raises.
    operands = (grad_o, q, k, v, o, lse, *present((grad_lse, o_low, *lengths)))
    if direct and not torch.is_grad_enabled() and takes_short_cut(operands):
        run, flat = run_backward, (call, deterministic)
    else:
        run, flat = backward_op, (*call, deterministic)
    return run(grad_o, grad_lse, q, k, v, o, o_low, lse, *flat)


# As compiled autograd needs them beside the call; of the two calls that _attention.py keeps.
_fields_of = functools.cache(tuple)


class _NeedsMore(Exception):  # noqa: N818 - no error: a plain call that needs the other way
    pass


class _PlainAttention(torch.autograd.Function):
    """The same of a plain call that says no more than ``causal``: each pass is one call of the
    bindings, outputs included. What that does not serve goes the way of _Attention: the forward
    raises _NeedsMore."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        kept = _C.attend_recorded(q, k, v, call)
        if kept is None:
            raise _NeedsMore
        o, o_low, lse = kept
        ctx.save_for_backward(q, k, v, o, o_low, lse)
        ctx.how = call, _fields_of(call)
        return o

    @staticmethod
    def backward(ctx, grad_o):
        call, fields = ctx.how
        saved = ctx.saved_tensors
        if is_compiling():
            call = Call(*fields)
        elif not _watch.watchers:
            deterministic = torch.are_deterministic_algorithms_enabled()
            grads = _C.gradients(grad_o, *saved, call, deterministic)
            if grads is not None:
                return grads
        return (*_gradients(grad_o, None, saved, call, False, True), None)

    jvp = staticmethod(_no_forward_mode)


def _dispatch(q, k, v, call, deterministic, checked, keep_low, extras):
    """(o, lse, o_low, max_logit or None) by the operators."""
    if extras is None:
        return *forward_op(q, k, v, *call, deterministic, checked, keep_low), None
    *outputs, max_logit = extra_op(q, k, v, *call, deterministic, checked, keep_low, *extras)
    return *outputs, max_logit if extras[0] else None


def gradient_function(op):
    """Of a backward operator, on its own Autograd key, so that a second derivative is never
    silently wrong."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            *args, grad_mode = args
            with lower(grad_mode):
                return op(*args)

        backward = staticmethod(_no_second_derivative)
        jvp = staticmethod(_no_forward_mode)

    return Gradient


_AttentionGradient = gradient_function(backward_op)


def has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def differentiates(tensors) -> bool:
    if not _torch_private.KNOWS_FORWARD_MODE:
        tensors = tuple(tensors)
        if any(map(has_tangent, tensors)):
            return True
    elif _torch_private.in_forward_mode():  # inside dual_level: Function refuses tangents by name
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _recorded_outputs(a, extras):
    """(o, lse, o_low, max_logit or None) of an operator that is recorded; ``a``: its arguments."""
    keep_low = keeps_low(a.q, a.keep_low)
    how = (a.call, a.deterministic, a.checked, False, (True, keep_low), extras)
    o, lse, *others = apply(_Attention, a.q, a.k, a.v, how)
    o_low = others.pop(0) if keep_low else no_low(a.q, a.v)
    return o, lse, o_low, *(others or [None])


def _forward_autograd(*arguments):
    if differentiates(arguments[:3]):  # q, k and v
        return _recorded_outputs(FORWARD.split(arguments), None)[:3]
    with below_autograd():
        return forward_op(*arguments)


def _extra_autograd(*arguments):
    if differentiates(arguments[:3]):
        a = FORWARD_EXTRA.split(arguments)
        *outputs, max_logit = _recorded_outputs(a, (a.max_logit, a.output_f32))
        return *outputs, _or_empty(max_logit, a.q)
    with below_autograd():
        return extra_op(*arguments)


def _backward_autograd(*arguments):
    if differentiates(present(arguments[: BACKWARD.operand_count])):
        return apply(_AttentionGradient, *arguments)
    with below_autograd():
        return backward_op(*arguments)


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


def _mapped(op, signature, info, in_dims, *args):
    """``op`` over a mapped dimension: one call for dense tensors, a loop for packed ones."""
    size = info.batch_size
    if signature.split(args).call.cu_seqlens_q is not None:
        return mapped_in_a_loop(op, info, in_dims, *args)
    operand_count = signature.operand_count
    operands = (
        _fold(x, dim, size)
        for x, dim in zip(args[:operand_count], in_dims[:operand_count], strict=True)
    )
    answer = op(*operands, *args[operand_count:])
    results = tuple(x.unflatten(0, (size, -1)) for x in answer)
    return results, (0,) * len(results)


def _vmap_forward(info, in_dims, *args):
    return _mapped(forward_op, FORWARD, info, in_dims, *args)


def _vmap_extra(info, in_dims, *args):
    return _mapped(extra_op, FORWARD_EXTRA, info, in_dims, *args)


def _vmap_backward(info, in_dims, *args):
    return _mapped(backward_op, BACKWARD, info, in_dims, *args)


torch.library.register_vmap("pantile::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("pantile::forward_extra", _vmap_extra, lib=_library)
torch.library.register_vmap("pantile::backward", _vmap_backward, lib=_library)


# ---- FLOPs

for _op, _formula in (
    (torch.ops.pantile.forward, forward_flops(FORWARD)),
    (torch.ops.pantile.forward_extra, forward_flops(FORWARD_EXTRA)),
    (torch.ops.pantile.backward, backward_flops(BACKWARD)),
):
    flop_counter.register_flop_formula(_op, get_raw=True)(_formula)


# ---- calls

# What Function.apply comes to when no torch.func transform is active, without asking again.
_apply_directly = super(torch.autograd.Function, _Attention).apply
_apply_plain = super(torch.autograd.Function, _PlainAttention).apply


def _chosen(o, lse, max_logit, return_lse: bool):
    if max_logit is not None:
        return (o, lse, max_logit) if return_lse else (o, max_logit)
    return (o, lse) if return_lse else o


def attention(q, k, v, call, deterministic, checked, return_lse, extras):
    """o, or a tuple of o and what else is wanted, by the shortest way that torch's state allows.

    ``call``: that of the bindings, unless the call is traced.
    """
    operands = (q, k, v)
    if call.cu_seqlens_q is not None:
        operands += present(lengths_of(call))
    if type(call) is _C.Call and nothing_watches(operands):
        if records(q, k, v):
            how = (call, deterministic, checked, True, (return_lse, False), extras)
            return _apply_directly(q, k, v, how, False)
        if return_lse or extras is not None:
            o, lse, _, max_logit = run_forward(q, k, v, call, checked, return_lse, extras)
            return _chosen(o, lse, max_logit, return_lse)
        return run_forward(q, k, v, call, checked, False)[0]
    if not is_compiling():
        if is_dtensor(q):
            flags = deterministic, checked, return_lse
            answer = _sharded_attention(q, k, v, call, flags, extras)
            if answer is not None:
                return answer
        prepare(q, k, v, lengths_of(call))
    o, lse, _, max_logit = _dispatch(q, k, v, call, deterministic, checked, False, extras)
    return _chosen(o, lse, max_logit, return_lse)


def is_dtensor(x) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _sharded_attention(q, k, v, call, flags: tuple, extras):
    from pantile import _sharded  # with DTensors only: it imports them

    return _sharded.attention(attention, q, k, v, call, flags, extras)


def plain_sharded_attention(q, k, v, call: _C.Call):
    """o of DTensors, for a call that says no more than ``causal``; None: by the other way."""
    from pantile import _sharded

    return _sharded.plain_attention(_attend_watched, q, k, v, call)


def _attend_watched(q, k, v, call: _C.Call):
    o = _C.attend(q, k, v, call)
    if o is None or o is True:
        return None
    if _watch.watchers:
        _watch.forward(q, k, v, call, None, o, None)
    return o


def _plain_attention(q, k, v, call: _C.Call):
    """o, for a call that says no more than ``causal``; not traced."""
    o = _C.attend(q, k, v, call)
    if o is True:
        try:
            return _apply_plain(q, k, v, call)
        except _NeedsMore:
            o = None
    return attention(q, k, v, call, False, False, False, None) if o is None else o


def _watched_plain_attention(q, k, v, call: _C.Call):
    """The same, while somebody watches: calls that do not come to run_forward are shown here."""
    o = _attend_watched(q, k, v, call)
    return attention(q, k, v, call, False, False, False, None) if o is None else o


def watch_plain_calls(watched: bool) -> None:
    global plain_attention
    plain_attention = _watched_plain_attention if watched else _plain_attention


watch_plain_calls(bool(_watch.watchers))
