"""The torch operators ``pantile::forward``, ``pantile::forward_extra`` and ``pantile::backward``.

All are ordinary dispatcher operators: kernels for CPU and CUDA, a fake kernel for tracing, an
Autograd kernel, an Autocast kernel, a vmap rule and a FLOP formula. Plain eager calls take a short
cut around the dispatcher that does the same work; it is taken only when nothing can be watching.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils import flop_counter

from pantile import _C
from pantile._direct import (
    BACKEND_SETTING,
    LENGTHS_COUNT,
    THREADS_FOLLOW,
    batch_of,
    lse_shape,
    run_backward,
    run_forward,
)
from pantile._direct import final_settings as final_settings  # for explain
from pantile._masks import visible_pairs

Tensor = torch.Tensor

# What both operators share, in the order in which the bindings take it.
_SETTINGS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, SymInt window_left, "
    "SymInt window_right, str backend"
)
_SETTINGS_COUNT = 10
_NO_LENGTHS = (None,) * LENGTHS_COUNT

_TENSOR_NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

_library = torch.library.Library("pantile", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool deterministic, bool checked)"
    " -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"forward_extra(Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool deterministic, bool checked,"
    " bool max_logit, bool output_f32) -> (Tensor o, Tensor lse, Tensor max_logit)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_SETTINGS}, bool deterministic) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
forward_op = torch.ops.pantile.forward.default
# With what few calls want; max_logit is [0, heads] when it is not wanted.
extra_op = torch.ops.pantile.forward_extra.default
backward_op = torch.ops.pantile.backward.default
_PLAIN_ARGUMENTS = 3 + _SETTINGS_COUNT + 2  # of forward


# ---- kernels


def _forward_kernel(q, k, v, *rest):
    settings, (_, checked) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    return run_forward(q, k, v, settings, checked, True)[:2]


def _extra_kernel(q, k, v, *rest):
    settings, (_, checked, *extras) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    o, lse, max_logit = run_forward(q, k, v, settings, checked, True, extras)
    if max_logit is None:
        max_logit = q.new_empty((0, q.shape[-2]), dtype=torch.float32)
    return o, lse, max_logit


def _backward_kernel(grad_o, grad_lse, q, k, v, o, lse, *rest):
    settings, (deterministic,) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
    return run_backward(grad_o, grad_lse, q, k, v, o, lse, settings, deterministic)


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward_kernel, _key)
    _library.impl("forward_extra", _extra_kernel, _key)
    _library.impl("backward", _backward_kernel, _key)


# ---- fake kernels: shapes for tracing and for the meta device


@torch.library.register_fake("pantile::forward", lib=_library)
def _fake_forward(q, k, v, *rest):
    rank = 4 if rest[0] is None else 3
    if q.ndim != rank or v.ndim != rank:
        raise ValueError(f"q has {q.ndim} and v {v.ndim} dimensions; both must have {rank}")
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(lse_shape(q.shape), dtype=torch.float32)


@torch.library.register_fake("pantile::forward_extra", lib=_library)
def _fake_extra(q, k, v, *rest):
    o, lse = _fake_forward(q, k, v, *rest)
    wants_max_logit, output_f32 = rest[-2:]
    if output_f32:
        o = o.to(torch.float32)
    rows = batch_of(q, rest) if wants_max_logit else 0
    return o, lse, q.new_empty((rows, q.shape[-2]), dtype=torch.float32)


@torch.library.register_fake("pantile::backward", lib=_library)
def _fake_backward(grad_o, grad_lse, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


# ---- autograd


def _no_second_derivative(*_):
    raise _C.UnsupportedError(
        "second derivatives of attention are not implemented; do not differentiate its gradient "
        "(create_graph=True, double backward)"
    )


def _no_forward_mode(*_):
    raise _C.UnsupportedError("forward-mode derivatives (jvp) of attention are not implemented")


_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Attention(torch.autograd.Function):
    """First derivatives, in eager mode and in traced graphs.

    ``call`` is (settings, deterministic, checked, direct, wants_lse, extras); ``direct`` calls the
    kernels without the dispatcher, for the short cut below. One tuple, and lse and max_logit as
    outputs only when they are wanted, because every argument and output costs time.
    """

    @staticmethod
    def forward(ctx, q, k, v, call):
        settings, deterministic, checked, direct, wants_lse, extras = call
        if direct:
            o, lse, max_logit = run_forward(q, k, v, settings, checked, True, extras)
        else:
            with _below_autograd():
                o, lse, max_logit = _dispatch(q, k, v, settings, deterministic, checked, extras)
        if settings[0] is None:
            ctx.save_for_backward(q, k, v, o, lse)
        else:
            ctx.save_for_backward(q, k, v, o, lse, *settings[:LENGTHS_COUNT])
        ctx.call = (settings[LENGTHS_COUNT:], deterministic, direct)
        ctx.set_materialize_grads(False)
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
            return (o, lse, max_logit) if wants_lse else (o, max_logit)
        return (o, lse) if wants_lse else o

    @staticmethod
    def backward(ctx, grad_o, grad_lse=None, _=None):
        if grad_o is None and grad_lse is None:
            return None, None, None, None
        settings, deterministic, direct = ctx.call
        q, k, v, o, lse, *lengths = ctx.saved_tensors
        settings = (*(lengths or _NO_LENGTHS), *settings)
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        o, grad_o = _like_query(q, o), _like_query(q, grad_o)
        # create_graph=True must meet the operator, whose own derivative raises.
        if direct and not torch.is_grad_enabled() and _takes_short_cut((grad_o,)):
            run, flat = run_backward, (settings, deterministic)
        else:
            run, flat = backward_op, (*settings, deterministic)
        return (*run(grad_o, grad_lse, q, k, v, o, lse, *flat), None)

    jvp = staticmethod(_no_forward_mode)


def _dispatch(q, k, v, settings, deterministic, checked, extras):
    """(o, lse, max_logit or None) by the operators."""
    if extras is None:
        return *forward_op(q, k, v, *settings, deterministic, checked), None
    o, lse, max_logit = extra_op(q, k, v, *settings, deterministic, checked, *extras)
    return o, lse, max_logit if extras[0] else None


def _like_query(q: Tensor, x: Tensor) -> Tensor:
    """o and its gradient as the backward takes them, when the forward gave o in float32."""
    return x if x.dtype is q.dtype else x.to(q.dtype)


class _AttentionGradient(torch.autograd.Function):
    """On the gradient's own Autograd key, so that a second derivative is never silently wrong."""

    @staticmethod
    def forward(ctx, *args):
        with _below_autograd():
            return backward_op(*args)

    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_mode)


def _differentiates(tensors) -> bool:
    if forward_ad._current_level >= 0:  # inside dual_level: Function refuses tangents by name
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _forward_autograd(q, k, v, *rest):
    if _differentiates((q, k, v)):
        settings, (deterministic, checked) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
        return _Attention.apply(q, k, v, (settings, deterministic, checked, False, True, None))
    with _below_autograd():
        return forward_op(q, k, v, *rest)


def _extra_autograd(q, k, v, *rest):
    if _differentiates((q, k, v)):
        settings, (deterministic, checked, *extras) = rest[:_SETTINGS_COUNT], rest[_SETTINGS_COUNT:]
        call = (settings, deterministic, checked, False, True, tuple(extras))
        o, lse, *max_logit = _Attention.apply(q, k, v, call)
        return o, lse, *(max_logit or [q.new_empty((0, q.shape[-2]), dtype=torch.float32)])
    with _below_autograd():
        return extra_op(q, k, v, *rest)


def _backward_autograd(*args):
    if _differentiates(x for x in args[:7] if x is not None):
        return _AttentionGradient.apply(*args)
    with _below_autograd():
        return backward_op(*args)


_library.impl("forward", _forward_autograd, "Autograd")
_library.impl("forward_extra", _extra_autograd, "Autograd")
_library.impl("backward", _backward_autograd, "Autograd")


# ---- autocast: like torch's own attention, inputs take the autocast dtype


def _register_autocast(device_type: str, key: str) -> None:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        castable = x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if castable else x

    def casting(op):
        def call(q, k, v, *rest):
            dtype = torch.get_autocast_dtype(device_type)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return op(cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest)

        return call

    _library.impl("forward", casting(forward_op), key)
    _library.impl("forward_extra", casting(extra_op), key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# ---- torch.func: vmap rules, and a Function in the form that its transforms demand


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension joined with the batch."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _select(x, dim: int | None, index: int):
    return x if dim is None or not isinstance(x, Tensor) else x.select(dim, index)


def _mapped(call, operand_count: int, info, in_dims, *args):
    """``call`` over a mapped dimension: one call for dense tensors, a loop for packed ones."""
    size = info.batch_size
    if args[operand_count] is not None:  # cu_seqlens_q
        answers = [
            call(*(_select(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(size)
        ]
        results = tuple(torch.stack(parts) for parts in zip(*answers, strict=True))
    else:
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
    return _mapped(backward_op, 7, info, in_dims, *args)


torch.library.register_vmap("pantile::forward", _vmap_forward, lib=_library)
torch.library.register_vmap("pantile::forward_extra", _vmap_extra, lib=_library)
torch.library.register_vmap("pantile::backward", _vmap_backward, lib=_library)


class _TransformedGradient(torch.autograd.Function):
    @staticmethod
    def forward(*args):
        return backward_op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_no_second_derivative)

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _mapped(_TransformedGradient.apply, 7, info, in_dims, *args)


class _TransformedAttention(torch.autograd.Function):
    """Only for torch.func transforms: their form of Function is three times slower to call."""

    @staticmethod
    def forward(*args):
        return (forward_op if len(args) == _PLAIN_ARGUMENTS else extra_op)(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *rest = inputs
        ctx.save_for_backward(q, k, v, *output[:2], *rest[:LENGTHS_COUNT])
        ctx.settings = rest[LENGTHS_COUNT : _SETTINGS_COUNT + 1]  # to `deterministic`
        ctx.inputs = len(inputs)
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, grad_o, grad_lse, _=None):
        q, k, v, o, lse, *lengths = ctx.saved_tensors
        grads = _TransformedGradient.apply(
            _like_query(q, grad_o), grad_lse, q, k, v, _like_query(q, o), lse, *lengths,
            *ctx.settings,
        )  # fmt: skip
        return (*grads, *(None,) * (ctx.inputs - 3))

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _mapped(_TransformedAttention.apply, 3, info, in_dims, *args)


# ---- FLOPs: two products forward; five backward, of which the recomputed scores are one


def _pairs(q, k, rest) -> int:
    """(query row, key) pairs that the mask lets through, over batch and query heads."""
    cu_seqlens_q, cu_seqlens_k = rest[0], rest[1]
    left, right = rest[7], rest[8]
    if cu_seqlens_q is None:
        batch, seqlen_q, heads, _ = q.shape
        return batch * heads * visible_pairs(seqlen_q, k.shape[1], left, right)
    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, torch._subclasses.FakeTensor):
        lengths = [(rest[4], rest[5])] * (cu_seqlens_q.shape[0] - 1)
    else:
        lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    return q.shape[1] * sum(visible_pairs(sq, sk, left, right) for sq, sk in lengths)


@flop_counter.register_flop_formula(
    [torch.ops.pantile.forward, torch.ops.pantile.forward_extra], get_raw=True
)
def _forward_flops(q, k, v, *rest, out_val=None, **_) -> int:
    return 2 * _pairs(q, k, rest) * (q.shape[-1] + v.shape[-1])


@flop_counter.register_flop_formula(torch.ops.pantile.backward, get_raw=True)
def _backward_flops(grad_o, grad_lse, q, k, v, o, lse, *rest, out_val=None, **_) -> int:
    return 2 * _pairs(q, k, rest) * (3 * q.shape[-1] + 2 * v.shape[-1])


# ---- the short cut of plain eager calls


def _key_set(*names: str) -> int:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Dispatch keys of ordinary tensors, and of those made in inference mode: not sparse, nested, lazily
# negated, fake, wrapped by a transform or on another device.
_PLAIN_KEYS = {
    *(_key_set(d, "ADInplaceOrView", f"Autograd{d}", f"Autocast{d}") for d in ("CPU", "CUDA")),
    *(_key_set(d, f"Autocast{d}") for d in ("CPU", "CUDA")),
}
_keys_of = torch._C._dispatch_keys
_is_compiling = torch.compiler.is_compiling
_in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_autocasting = torch._C._is_any_autocast_enabled
_profiling = torch.autograd._profiler_enabled
_tracing = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled


def _forward_mode() -> bool:
    return forward_ad._current_level >= 0


_WATCHERS = (
    _in_transform,
    _dispatch_modes,
    _function_modes,
    _autocasting,
    _profiling,
    _tracing,
    _forward_mode,
)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD_KEYS = {
    False: torch._C.DispatchKey.AutogradCPU,
    True: torch._C.DispatchKey.AutogradCUDA,
}
# What Function.apply comes to when no torch.func transform is active, without asking again.
_apply_directly = super(torch.autograd.Function, _Attention).apply


def _takes_short_cut(tensors: tuple[Tensor, ...]) -> bool:
    """Ordinary dense tensors, and no mode, transform, tracer, autocast or profiler at work."""
    if _is_compiling():
        return False
    for x in tensors:
        if type(x) not in _PLAIN_TYPES or _keys_of(x).raw_repr() not in _PLAIN_KEYS:
            return False
    for watches in _WATCHERS:  # noqa: SIM110 (a generator costs as much as the calls)
        if watches():
            return False
    return True


# For _C.attend. Where C++ cannot read torch's thread count, run_forward must pass it on.
if THREADS_FOLLOW:
    _C.set_plain(torch.nn.Parameter, _grad_enabled, _WATCHERS, torch.empty_like)


def _records(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd wants to know; not inside another operator's kernel, below autograd."""
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return not _is_excluded(_AUTOGRAD_KEYS[q.is_cuda])
    return False


def _check_operand(name: str, x: object, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor like q")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ValueError(f"{name} has layout {kind}; it must be torch.strided")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name} is on {x.device}; it must be on the CPU or a CUDA device")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; it must be on the device of q, {q.device}")


def prepare(q, k, v, lengths: tuple) -> tuple:
    """The operands, after the checks that no kernel could make."""
    for name, x in zip(_TENSOR_NAMES, (q, k, v, *lengths), strict=True):
        if x is not None or name in ("q", "k", "v"):
            _check_operand(name, x, q)
    return q, k, v


def _chosen(o, lse, max_logit, return_lse: bool):
    if max_logit is not None:
        return (o, lse, max_logit) if return_lse else (o, max_logit)
    return (o, lse) if return_lse else o


def attention(q, k, v, settings, deterministic, checked, return_lse, extras):
    """o, or a tuple of o and what else is wanted, by the shortest way that torch's state allows."""
    operands = (q, k, v)
    if settings[0] is not None:
        operands += tuple(x for x in settings[:LENGTHS_COUNT] if x is not None)
    if _takes_short_cut(operands):
        if _records(q, k, v):
            call = (settings, deterministic, checked, True, return_lse, extras)
            return _apply_directly(q, k, v, call)
        if return_lse or extras is not None:
            answer = run_forward(q, k, v, settings, checked, return_lse, extras)
            return _chosen(*answer, return_lse)
        return run_forward(q, k, v, settings, checked, False)[0]
    if not _is_compiling():
        prepare(q, k, v, settings[:LENGTHS_COUNT])
    if not _is_compiling() and _in_transform():
        o, lse, *rest = _TransformedAttention.apply(
            q, k, v, *settings, deterministic, checked, *(extras or ())
        )
        return _chosen(o, lse, rest[0] if extras and extras[0] else None, return_lse)
    return _chosen(*_dispatch(q, k, v, settings, deterministic, checked, extras), return_lse)


def plain_attention(q, k, v, causal: bool, settings):
    """o, for a call that says no more than ``causal``."""
    if not _is_compiling():
        o = _C.attend(q, k, v, causal, settings[BACKEND_SETTING])
        if o is not None:
            return o
    return attention(q, k, v, settings, False, False, False, None)
