"""The torch operators ``pantile::quantize`` and ``pantile::fp8_forward``.

``pantile::dequantize`` is in _fp8_numbers.py, the gradients are in _fp8_gradient.py.
"""

from __future__ import annotations

import math

import torch
from torch.utils import flop_counter

from pantile import _C, _direct, _fake, _ops, _watch
from pantile._fast_path import present, records_any, takes_short_cut
from pantile._flops import visible_pairs_of_call
from pantile._fp8_codes import Sequences, in_sequences, means_of_rows, nonfinite_values
from pantile._fp8_gradient import Codes, Form, Fp8Attention, apply_directly, numbers_of
from pantile._fp8_numbers import (
    CODES,
    check_forms,
    follow_threads,
    operand_forms,
    quantize_call,
)
from pantile._options import FP8_BACKWARDS, quantize_backend
from pantile._quantized import Quantized
from pantile._schema import (
    FP8_FORWARD,
    FP8_OPERAND_NAMES,
    PACKING,
    QUANTIZE,
    Call,
    bind,
)
from pantile._torch_private import below_autograd, in_transform

Tensor = torch.Tensor

_SOURCE_COUNT = 3  # q, k and v come before the operands

_library = torch.library.Library("pantile", "FRAGMENT")
for _signature in (QUANTIZE, FP8_FORWARD):
    _library.define(_signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
quantize_op = torch.ops.pantile.quantize.default
fp8_forward_op = torch.ops.pantile.fp8_forward.default


# ---- quantize


def _new_operands(q, k, v, cu_seqlens_q, cu_seqlens_k, *format_) -> tuple:
    forms = operand_forms(q.shape, k.shape, v.shape[-1], cu_seqlens_q, cu_seqlens_k, format_)
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in forms)


def _check_ranks(q, k, v, call) -> None:
    rank = 4 if call.cu_seqlens_q is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have {rank}")


def _quantize_kernel(*arguments):
    a = QUANTIZE.split(arguments)
    call = bind(quantize_call(a))
    _check_ranks(a.q, a.k, a.v, call)
    follow_threads()
    bounds = call.cu_seqlens_q, call.cu_seqlens_k
    operands = _new_operands(a.q, a.k, a.v, *bounds, a.block_q, a.block_k, a.smooth_k)
    inputs = [a.q, a.k, a.v]
    descales = a.descale_q, a.descale_k, a.descale_v
    while copies := _C.quantize(
        *inputs, *descales, operands, call, a.block_q, a.block_k, a.hadamard, a.smooth_k
    ):
        _direct.copy_operands(copies, inputs, ("q", "k", "v"))
    return operands


@torch.library.register_fake("pantile::quantize", lib=_library)
def _fake_quantize(*arguments):
    a = QUANTIZE.split(arguments)
    q, k, v, call = a.q, a.k, a.v, quantize_call(a)
    _check_ranks(q, k, v, call)

    def check(*arguments, **_):
        _C.explain_fp8(*arguments, a.block_q, a.block_k, a.hadamard, a.smooth_k, "code")

    sizes = _fake.checked_call(check, q, k, v, call)
    packed = call.cu_seqlens_q is not None
    heads_k = sizes.of("k", k.shape)[-2]
    for name in ("descale_q", "descale_k", "descale_v"):
        x = getattr(a, name)
        if x is None and q.dtype is CODES:
            raise ValueError(f"{name} is null; it must be set because dtype == e4m3 is true")
        if x is not None and q.dtype is not CODES:
            raise ValueError(f"{name} is set; it must be null because dtype == e4m3 is false")
        if x is not None:
            _fake.require_dtype(name, x, torch.float32)
            batch = _fake.known(x.shape[0]) if packed else sizes.of("q", q.shape)[0]
            _fake.require_shape(name, tuple(map(_fake.known, x.shape)), (batch, heads_k))
    bounds = call.cu_seqlens_q, call.cu_seqlens_k
    return _new_operands(q, k, v, *bounds, a.block_q, a.block_k, a.smooth_k)


def _quantize_autograd(*args):
    """Codes have no derivative: gradients pass by them, see fp8_forward."""
    with below_autograd():
        return quantize_op(*args)


# ---- fp8_forward


# ``a``: the operator's arguments by name.


def _operands_of(a) -> tuple:
    return tuple(getattr(a, name) for name in FP8_OPERAND_NAMES)


def _new_outputs(a):
    heads, head_dim_v = a.codes_q.shape[0], a.codes_v.shape[2]
    leading = (a.batch, a.rows) if a.call.cu_seqlens_q is None else (a.rows,)
    o = a.codes_q.new_empty((*leading, heads, head_dim_v), dtype=a.dtype)
    lse = a.codes_q.new_empty((*leading[:-1], heads, a.rows), dtype=torch.float32)
    return o, lse


def run_fp8_forward(a):
    follow_threads()
    call = bind(a.call)
    o, lse = _new_outputs(a)
    if a.checked and call.packed:
        _direct.check_contents(call, a.rows, a.keys)
    format_ = a.block_q, a.block_k, a.smooth_k, a.fp8_exp
    if _watch.watchers:
        _watch.skip("FP8 attention")
    _C.forward_fp8(_operands_of(a), o, lse, a.head_dim, a.keys, call, *format_)
    return o, lse


def _check_without_memory(a) -> None:
    """The rules of fp8_forward's other arguments, for tensors without memory."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {a.dtype}; it must be torch.bfloat16 or torch.float16")
    dense = (a.batch,) if a.call.cu_seqlens_q is None else ()
    heads_q, heads_k, head_dim_v = a.codes_q.shape[0], a.codes_k.shape[0], a.codes_v.shape[2]
    q = a.codes_q.new_empty((*dense, a.rows, heads_q, a.head_dim), dtype=a.dtype)
    k = a.codes_k.new_empty((*dense, a.keys, heads_k, a.head_dim), dtype=a.dtype)
    v = a.codes_v.new_empty((*dense, a.keys, heads_k, head_dim_v), dtype=a.dtype)

    def check(*arguments, **_):
        _C.explain_fp8(*arguments, a.block_q, a.block_k, False, a.smooth_k, a.fp8_exp)

    _fake.checked_call(check, q, k, v, a.call)


def _check_backward(a) -> None:
    if a.fp8_backward not in FP8_BACKWARDS:
        allowed = ", ".join(FP8_BACKWARDS)
        raise ValueError(f"fp8_backward is {a.fp8_backward!r}; it must be one of {allowed}")


def _fp8_forward_kernel(*arguments):
    a = FP8_FORWARD.split(arguments)
    _check_backward(a)
    check_forms(a, FP8_OPERAND_NAMES, a.smooth_k)
    return run_fp8_forward(a)


@torch.library.register_fake("pantile::fp8_forward", lib=_library)
def _fake_fp8_forward(*arguments):
    a = FP8_FORWARD.split(arguments)
    _check_backward(a)
    check_forms(a, FP8_OPERAND_NAMES, a.smooth_k)
    _check_without_memory(a)
    return _new_outputs(a)


def _fp8_forward_autograd(*args):
    source = [x for x in args[:_SOURCE_COUNT] if x is not None]
    if len(source) == _SOURCE_COUNT and _ops.differentiates(source):
        return _ops.apply(Fp8Attention, *source, args[_SOURCE_COUNT:])
    with below_autograd():
        return fp8_forward_op(*args)


for _key in ("CPU", "CUDA"):
    _library.impl("quantize", _quantize_kernel, _key)
    _library.impl("fp8_forward", _fp8_forward_kernel, _key)
_library.impl("quantize", _quantize_autograd, "Autograd")
_library.impl("fp8_forward", _fp8_forward_autograd, "Autograd")


@flop_counter.register_flop_formula(torch.ops.pantile.fp8_forward, get_raw=True)
def _fp8_flops(*arguments, out_val=None, **_) -> int:
    a = FP8_FORWARD.split(arguments)
    pairs = visible_pairs_of_call(a.batch, a.rows, a.keys, a.call)
    return 2 * a.codes_q.shape[0] * pairs * (a.head_dim + a.codes_v.shape[2])


# ---- torch.func: a call for each entry, because the forms put heads before sequences


def _vmap_quantize(info, in_dims, *args):
    return _ops.mapped_in_a_loop(quantize_op, info, in_dims, *args)


def _vmap_fp8_forward(info, in_dims, *args):
    return _ops.mapped_in_a_loop(fp8_forward_op, info, in_dims, *args)


torch.library.register_vmap("pantile::quantize", _vmap_quantize, lib=_library)
torch.library.register_vmap("pantile::fp8_forward", _vmap_fp8_forward, lib=_library)


# ---- the calls


def _autocast(tensors: tuple) -> tuple:
    """Like torch's own attention, inputs take the autocast dtype."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x
        for x in tensors
    )


def _descale(name: str, value, q: Tensor, batch: int, heads_k: int) -> Tensor:
    """float32 [batch, heads_k] of what a caller gave."""
    if value is None:
        value = 1.0
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}; it must be a number or a float32 tensor")
        if not 0.0 < value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be positive and finite")
        return q.new_full((batch, heads_k), value, dtype=torch.float32)
    if value.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {value.dtype}; it must be float32")
    if value.numel() == 1:
        return value.reshape(1, 1).expand(batch, heads_k).contiguous()
    if value.shape != (batch, heads_k):
        raise ValueError(
            f"{name} has shape {list(value.shape)}; it must be [{batch}, {heads_k}], one number "
            "for each sequence and key head, or hold one number"
        )
    return value.contiguous()


def _descales(q, k, values: tuple, batch: int) -> tuple:
    names = ("descale_q", "descale_k", "descale_v")
    if q.dtype is CODES:
        return tuple(
            _descale(name, value, q, batch, k.shape[-2])
            for name, value in zip(names, values, strict=True)
        )
    for name, value in zip(names, values, strict=True):
        if value is not None:
            raise ValueError(f"{name} is set; it must be None for q of dtype {q.dtype}")
    return None, None, None


def _output_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype is torch.float16 else torch.bfloat16


def _may_be_differentiated(tensors: tuple) -> bool:
    """Whether the operator may have to record. Inside transforms of torch.func only its Autograd
    kernel can tell: a tensor does not show what the transforms further out want of it."""
    if torch.compiler.is_compiling() or in_transform():
        return True
    return _ops.differentiates(tensors)


def _versions(tensors: tuple) -> tuple[int, ...]:
    """How often each tensor was changed in place; nothing where torch does not count."""
    if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
        return ()
    return tuple(x._version for x in tensors)


class _Changed(torch.autograd.Function):
    """A source that is no longer what was quantised: its values are not needed for the output, only
    for the gradient, so only that is refused."""

    @staticmethod
    def forward(x, name, versions):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.change = inputs[1:]

    @staticmethod
    def backward(ctx, _):
        name, (quantized, found) = ctx.change
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {name} was at version {quantized} when it was quantized and at version "
            f"{found} when attention was computed"
        )

    @staticmethod
    def vmap(info, in_dims, x, name, versions):
        return _Changed.apply(x, name, versions), in_dims[0]

    jvp = staticmethod(_ops._no_forward_mode)


def _source_of(operands: Quantized) -> tuple:
    """q, k and v for the gradient, which refuses those that were changed since."""
    if not operands.versions or torch.compiler.is_compiling():
        return operands.source
    changes = zip(operands.source, "qkv", operands.versions, strict=True)
    return tuple(
        x if x._version == version else _Changed.apply(x, name, (version, x._version))
        for x, name, version in changes
    )


def quantize(q, k, v, packing: tuple, backend: str, descales, format_: tuple) -> Quantized:
    """``packing``: of _schema.PACKING; ``format_``: block_q, block_k, hadamard, smooth_k.

    None for one of the last two is its default.
    """
    lengths, longest = packing[:-2], packing[-2:]
    block_q, block_k, hadamard, smooth_k = format_
    _ops.prepare(q, k, v, lengths)
    q, k, v = _autocast((q, k, v))
    _check_ranks(q, k, v, Call(*packing))
    codes = q.dtype is CODES
    hadamard = not codes if hadamard is None else hadamard
    smooth_k = not codes if smooth_k is None else smooth_k
    batch = q.shape[0] if lengths[0] is None else lengths[0].shape[0] - 1
    format_ = (block_q, block_k, hadamard, smooth_k)
    tensors = (*(x.detach() for x in (q, k, v)), *_descales(q, k, descales, batch), *lengths)
    run = _quantize_kernel if takes_short_cut(present(tensors)) else quantize_op
    operands = run(*tensors, *longest, *format_, backend)
    recorded = _may_be_differentiated((q, k, v))
    return Quantized(
        *operands,
        tuple(q.shape),
        tuple(k.shape),
        *format_,
        _output_dtype(q.dtype),
        lengths,
        longest,
        (q, k, v) if recorded else (None, None, None),
        _versions((q, k, v)) if recorded else (),
    )


def attention(operands: Quantized, call, how: tuple, deterministic, checked, return_lse):
    """Attention on operands; of ``call`` all but the packing, which they know. ``how``: fp8_exp and
    fp8_backward."""
    packed = operands.lengths[0] is not None
    batch = operands.lengths[0].shape[0] - 1 if packed else operands.shape_q[0]
    rows, keys = (shape[0 if packed else 1] for shape in (operands.shape_q, operands.shape_k))
    arguments = (
        *operands.operands,
        *operands.lengths,
        *operands.longest,
        *tuple(call)[len(PACKING) :],
        batch,
        rows,
        keys,
        operands.shape_q[-1],
        operands.dtype,
        operands.block_q,
        operands.block_k,
        operands.hadamard,
        operands.smooth_k,
        *how,
        deterministic,
        checked,
    )
    recorded = operands.source[0] is not None and torch.is_grad_enabled()
    source = _source_of(operands) if recorded else operands.source
    if not takes_short_cut((*operands.operands, *present((*source, *operands.lengths)))):
        o, lse = fp8_forward_op(*source, *arguments)
    elif recorded and records_any(source):
        o, lse = apply_directly(*source, arguments, run_fp8_forward)
    else:
        o, lse = run_fp8_forward(FP8_FORWARD.split((None, None, None, *arguments)))
    return (o, lse) if return_lse else o


def quantized_attention(q, k, v, call, format_, how, deterministic, checked, return_lse):
    """Attention on q, k and v by way of quantising them; o has the dtype of q."""
    if isinstance(q, Tensor) and q.dtype is CODES:
        raise TypeError("q has dtype float8_e4m3fn; pantile.quantize takes it, with descales")
    packing = tuple(call)[: len(PACKING)]
    backend = quantize_backend(call.backend, call.backend_preferred, q.device.type)
    operands = quantize(q, k, v, packing, backend, (None, None, None), format_)
    o, lse = attention(operands, call, how, deterministic, checked, True)
    if not torch.is_autocast_enabled(q.device.type):
        o = o.to(q.dtype)
    return (o, lse) if return_lse else o


def dequantize(operands: Quantized, dtype_name: str, keep_mean: bool, backend: str) -> tuple:
    """(q, k, v) that the codes stand for; NaN where a code or v is not finite."""
    dtype = getattr(torch, dtype_name)
    packed = operands.lengths[0] is not None
    batch = operands.lengths[0].shape[0] - 1 if packed else operands.shape_q[0]
    rows, keys = (shape[0 if packed else 1] for shape in (operands.shape_q, operands.shape_k))
    flags = operands.block_q, operands.block_k, operands.hadamard, operands.smooth_k
    form = Form(batch, rows, keys, operands.shape_q[-1], *flags)
    codes = Codes(*(getattr(operands, name) for name in Codes._fields))
    call = Call(*operands.lengths, *operands.longest, backend=backend)
    adds_mean = operands.smooth_k and keep_mean
    with torch.no_grad():
        q, k, v = numbers_of(codes, form, call, torch.float32 if adds_mean else dtype, False)
        if adds_mean:
            k += means_of_rows(operands.mean_k, k.shape[-2], keys, operands.lengths[1])
        lost = nonfinite_values(operands.nonfinite_v, operands.scale_kv[..., 1])
        lost = in_sequences(lost, Sequences(batch, keys, operands.lengths[1]))
        return tuple(x.to(dtype) for x in (q, k, v.masked_fill_(lost, torch.nan)))


def saved_bytes(operands: tuple, call, format_: tuple, of_codes: bool) -> int:
    """What a call keeps for its backward, without the lengths of packed sequences."""
    q, k, v = operands
    if not of_codes:
        return sum(x.numel() * x.element_size() for x in operands)
    block_q, block_k, _, smooth_k = format_
    bounds = call.cu_seqlens_q, call.cu_seqlens_k
    forms = operand_forms(q.shape, k.shape, v.shape[-1], *bounds, (block_q, block_k, smooth_k))
    sizes = dict(zip(FP8_OPERAND_NAMES, forms, strict=True))
    kept = sum(math.prod(sizes[name][0]) * sizes[name][1].itemsize for name in Codes._fields)
    rows = math.prod(q.shape[:-1])
    return kept + rows * (v.shape[-1] * _output_dtype(q.dtype).itemsize + torch.float32.itemsize)


def like_backward(operands: tuple) -> tuple:
    """Tensors like q, k and v as the backward takes them."""
    return tuple(torch.empty_like(x, dtype=_output_dtype(x.dtype)) for x in operands)
