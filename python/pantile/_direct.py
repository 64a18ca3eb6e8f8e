"""Calls of the bindings with torch tensors: allocate, call, copy what the bindings cannot take."""

from __future__ import annotations

import torch

from pantile import _C, _runtime, _watch
from pantile._explain import FOLD_SCALE, PAD_HEAD_DIMS
from pantile._options import log
from pantile._schema import (
    CAPTURED,
    LENGTHS,
    VARIANT_TENSOR_COUNT,
    VARIANT_TENSOR_NAMES,
    lengths_of,
)

Tensor = torch.Tensor

# Of the low bits of a 16-bit o (cpp/core/low_bits.h): last bits of a float32 to a step, as a power
# of two, and the alignment that the bindings ask for, in bytes.
_LOW_SHIFT = {torch.bfloat16: 8, torch.float16: 5}
_LOW_ALIGN = 16
_STATISTICS_BOUNDS = 8  # kKeyStatisticsBounds of cpp/include/pantile/problem.h

THREADS_FOLLOW = _runtime.install()


def copy_operands(answer: int, operands: list[Tensor | None], names: tuple[str, ...]) -> None:
    """Replaces the operands whose bit is set by contiguous copies."""
    for bit, name in enumerate(names):
        if answer >> bit & 1:
            tensor = operands[bit]
            log.debug("copies %s, strides %s", name, tuple(tensor.stride()))
            operands[bit] = tensor.clone(memory_format=torch.contiguous_format)


def _reject(q, k, v, call: _C.Call) -> None:
    """Raises what is wrong with operands from which no output shape can be made."""
    _C.explain(q, k, v, call, False)
    raise AssertionError("unreachable: the bindings accepted operands of a wrong rank")


def lse_shape(shape) -> tuple:
    """Of q's [batch, seq, heads, dim]: [batch, heads, seq]; packed [total, ..]: [heads, total]."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])


def o_shape(q: Tensor, v: Tensor) -> tuple:
    return (*q.shape[:-1], v.shape[-1])


def batch_of(q: Tensor, call) -> int:
    bounds = call.cu_seqlens_q
    return q.shape[0] if bounds is None else max(bounds.shape[0] - 1, 0)


def _new_lse(q: Tensor) -> Tensor:
    return q.new_empty(*lse_shape(q.shape), dtype=torch.float32)  # faster than with a tuple


def _new_low(o: Tensor) -> Tensor:
    if o.is_contiguous():
        return torch.empty_like(o, dtype=torch.int8)
    return torch.empty_like(o, dtype=torch.int8, memory_format=torch.contiguous_format)


def _new_outputs(q: Tensor, v: Tensor, wants_lse: bool, output_f32: bool):
    shape = q.shape
    if output_f32:
        o = q.new_empty(o_shape(q, v), dtype=torch.float32)
    elif shape[-1] == v.shape[-1] and q.is_contiguous():
        o = torch.empty_like(q)
    else:
        o = q.new_empty(o_shape(q, v))
    return o, _new_lse(q) if wants_lse else None


def check_contents(call: _C.Call, q: Tensor, k: Tensor) -> None:
    """Of cu_seqlens, seqused and where keys lie; waits for the GPU if they are there."""
    host = [None if x is None else x.cpu() for x in lengths_of(call)]
    call = call._replace(**dict(zip(LENGTHS, host, strict=True)))
    page_size = 0 if call.block_table is None else k.shape[1]
    _C.check_sequences(call, q.shape[0], k.shape[0], page_size)


def final_call(q: Tensor, call):
    """With torch's float32 precision, if it matters and none is asked for."""
    if q.dtype is torch.float32 and q.is_cuda and call.float32_precision == "auto":
        highest = torch.get_float32_matmul_precision() == "highest"
        return call._replace(float32_precision="highest" if highest else "tf32")
    return call


def split_output(o: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(o, o_low) as the forward would have written them, of an o in float32.

    o_low counts the steps from the rounded o to the exact one, to the nearest, halves up.
    """
    shift = _LOW_SHIFT[dtype]
    rounded = o.to(dtype)
    exact = rounded.float()
    distance = o.contiguous().view(torch.int32) - exact.contiguous().view(torch.int32)
    low = ((distance + (1 << (shift - 1))) >> shift).clamp_(-128, 127)
    nothing = (exact == 0.0) | ~exact.isfinite()
    return rounded, low.masked_fill_(nothing, 0).to(torch.int8)


def keeps_low(q: Tensor, wanted: bool) -> bool:
    return wanted and q.dtype in _LOW_SHIFT


def no_low(q: Tensor, v: Tensor) -> Tensor:
    """o_low of a call that keeps none."""
    return q.new_empty((0, *o_shape(q, v)[1:]), dtype=torch.int8)


def _readable_low(o_low: Tensor | None) -> Tensor | None:
    """o_low as the bindings take it: they ask for no copy of it."""
    if o_low is None or (o_low.is_contiguous() and o_low.data_ptr() % _LOW_ALIGN == 0):
        return o_low
    log.debug("copies o_low, strides %s", tuple(o_low.stride()))
    return o_low.clone(memory_format=torch.contiguous_format)


def run_forward(
    q,
    k,
    v,
    call: _C.Call,
    checked: bool,
    wants_lse: bool,
    extras=None,
    keep_low=False,
    variant=None,
    out=None,
):
    """(o, lse, o_low, max_logit), the last three None when not wanted.

    ``out``: o itself, in any strides that do not overlap, the last one 1; of the dtype of q or
    float32, whatever ``extras`` say.

    ``variant``: as :func:`readable_variant` gives it, or None. ``extras``: (max_logit, f32).
    ``keep_low``: with 8 more bits of a 16-bit o, for the backward.
    """
    if q.dtype is torch.float32:
        call = final_call(q, call)
    if not THREADS_FOLLOW:
        _C.set_cpu_threads(torch.get_num_threads())
    packed = call.packed
    rank = 3 if packed else 4
    if q.ndim != rank or v.ndim != (rank if call.block_table is None else 4):
        _reject(q, k, v, call)
    if checked and packed:
        check_contents(call, q, k)
    max_logit = o_low = None
    keep_low = keeps_low(q, keep_low)
    if extras is None and out is None:
        o, lse = _new_outputs(q, v, wants_lse, False)
    else:
        if out is None:
            o, lse = _new_outputs(q, v, wants_lse, extras[1])
        else:
            o, lse = out, _new_lse(q) if wants_lse else None
        if extras is not None and extras[0]:  # kernels raise it
            shape = (batch_of(q, call), q.shape[-2])
            max_logit = q.new_full(shape, -torch.inf, dtype=torch.float32)
    split_low = keep_low and o.dtype is torch.float32
    if keep_low and not split_low:
        o_low = _new_low(o)
    copies = _C.forward(q, k, v, o, lse, o_low, max_logit, call, variant)
    if copies:
        operands = [q, k, v]
        while copies:
            if copies >= PAD_HEAD_DIMS:
                return _run_changed_forward(
                    copies, operands, call, wants_lse, extras, keep_low, variant, out
                )
            copy_operands(copies, operands, ("q", "k", "v"))
            copies = _C.forward(*operands, o, lse, o_low, max_logit, call, variant)
        q, k, v = operands
    if split_low:
        o_low = split_output(o, q.dtype)[1]
    if _watch.watchers:  # of padded operands, if they were
        _watch.forward(q, k, v, call, variant, o, lse)
    return o, lse, o_low, max_logit


def readable_variant(variant):
    """The tensors as the bindings take them: they ask for no copy of these."""
    tensors = []
    for name, x in zip(VARIANT_TENSOR_NAMES, variant, strict=False):
        if x is not None and name in ("alibi", "sinks", "dropout_seed"):
            x = x.contiguous()
        elif name in CAPTURED:  # of any strides
            pass
        elif x is not None and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
            log.debug("copies %s, strides %s", name, tuple(x.stride()))
            x = x.contiguous()
        tensors.append(x)
    return type(variant)(*tensors, *variant[VARIANT_TENSOR_COUNT:])


# ---- inputs that no kernel takes as they are: copies padded with zeros, a scale made positive


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _unpadded(x: Tensor, head_dim: int) -> Tensor:
    return x if x.shape[-1] == head_dim else x[..., :head_dim].contiguous()


def _changed_scale(changes: int, q: Tensor, call: _C.Call) -> tuple[float | None, _C.Call]:
    """What q is to be multiplied with, or None, and the call that goes with it."""
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    factor = None
    if changes & FOLD_SCALE:
        factor, scale = (-1.0, -scale) if scale < 0 else (0.0, 1.0)
    log.debug("pads head dims: %s, folds scale: %s", bool(changes & PAD_HEAD_DIMS), factor)
    return factor, call._replace(scale=scale)


def _run_changed_forward(
    changes, operands, call, wants_lse: bool, extras, keep_low: bool, variant, out=None
):
    q, k, v = operands
    if out is not None:
        extras = (extras is not None and extras[0], out.dtype is torch.float32)
    factor, call = _changed_scale(changes, q, call)
    if factor is not None:
        q = q * factor
    padded = (_padded(q), _padded(k), _padded(v))
    o, lse, o_low, max_logit = run_forward(
        *padded, call, False, wants_lse, extras, keep_low, variant
    )
    if o_low is not None:
        o_low = _unpadded(o_low, v.shape[-1])
    if out is not None:
        log.debug("copies out, which has the padding of head dims left out")
        return out.copy_(o[..., : v.shape[-1]]), lse, o_low, max_logit
    return _unpadded(o, v.shape[-1]), lse, o_low, max_logit


def _run_changed_backward(
    changes, operands, o_low, call, deterministic: bool, variant, into, statistics
):
    q, k, v, grad_o, o, lse, grad_lse = operands
    factor, call = _changed_scale(changes, q, call)
    changed_q = q if factor is None else q * factor
    padded = (_padded(changed_q), _padded(k), _padded(v), _padded(o))
    low = None if o_low is None else _padded(o_low)
    if statistics is not None:  # the mean of what is padded is 0
        statistics = torch.nn.functional.pad(statistics, (0, padded[1].shape[-1] - k.shape[-1]))
    grads = run_backward(
        *(_padded(grad_o), grad_lse, *padded, low, lse, call, deterministic, variant),
        key_statistics=statistics,
    )
    grad_q, grad_k, grad_v = (
        _unpadded(x, like.shape[-1]) for x, like in zip(grads, (q, k, v), strict=True)
    )
    grads = (grad_q if factor is None else grad_q * factor, grad_k, grad_v)
    if into is None:
        return grads
    return tuple(to.copy_(x) for to, x in zip(into, grads, strict=True))


def _new_gradient(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return torch.empty_like(x)  # a little faster than with a memory format
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def run_backward(
    grad_o,
    grad_lse,
    q,
    k,
    v,
    o,
    o_low,
    lse,
    call: _C.Call,
    deterministic: bool,
    variant=(),
    into=None,
    key_statistics=None,
):
    """The gradients of q, k and v.

    ``variant``: nothing, or the readable variant and where the gradients of its slopes, sinks and
    bias go, None for those that are not wanted, and a tuple of those for what it captures.
    ``into``: the gradients themselves, of the dtype of q, in any strides that do not overlap, the
    last one 1. ``key_statistics``: of :func:`key_statistics`, of more keys than k and v hold; with
    ``deterministic``.
    """
    o_low = _readable_low(o_low)
    call = final_call(q, call)
    if not THREADS_FOLLOW:
        _C.set_cpu_threads(torch.get_num_threads())
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    grads = into
    if grads is None:
        grads = (_new_gradient(q), _new_gradient(k), _new_gradient(v))
    more = {} if key_statistics is None else {"key_statistics": key_statistics}
    copies = _C.backward(
        grad_o, grad_lse, q, k, v, o, o_low, lse, *grads, call, deterministic, *variant, **more
    )
    if copies:
        names = ("q", "k", "v", "grad_o", "o", "lse", "grad_lse")
        operands = [q, k, v, grad_o, o, lse, grad_lse]
        while copies:
            if copies >= PAD_HEAD_DIMS:
                return _run_changed_backward(
                    *(copies, operands, o_low, call, deterministic, variant, into),
                    key_statistics,
                )
            copy_operands(copies, operands, names)
            q, k, v, grad_o, o, lse, grad_lse = operands
            copies = _C.backward(
                grad_o, grad_lse, q, k, v, o, o_low, lse, *grads, call, deterministic, *variant,
                **more,
            )  # fmt: skip
    if _watch.watchers:
        values = variant[0] if variant else None
        _watch.backward(grad_o, grad_lse, q, k, v, o, o_low, lse, call, values, grads)
    return grads


def key_statistics(k: Tensor, v: Tensor, call: _C.Call) -> Tensor:
    """int32 ``[sequences, heads_k, 8 + head_dim]``: what a deterministic backward finds out about
    the keys of each sequence before its main pass (KeyStatistics of cpp/include/pantile/problem.h).

    ``call``: the packing of the keys as that of the queries, too, without a window.
    """

    def written(k: Tensor, v: Tensor) -> tuple[int, Tensor]:
        shape = batch_of(k, call), k.shape[-2], _STATISTICS_BOUNDS + k.shape[-1]
        statistics = torch.empty(shape, dtype=torch.int32, device=k.device)
        return _C.key_statistics(k, v, statistics, final_call(k, call)), statistics

    copies, statistics = written(k, v)
    if copies:
        columns = statistics.shape[-1]
        copies, statistics = written(_padded(k.contiguous()), _padded(v.contiguous()))
        assert copies == 0, copies
        statistics = statistics[..., :columns].contiguous()
    return statistics
