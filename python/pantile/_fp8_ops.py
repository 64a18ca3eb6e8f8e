"""The torch operators ``pantile::quantize`` and ``pantile::fp8_forward``.

Only the forward works on codes. Its backward is that of the unquantised attention: it runs
``pantile::forward`` on q, k and v as they came, for their O and LSE, and ``pantile::backward`` with
these. Inputs in float32 are rounded to bfloat16 for it.
"""

from __future__ import annotations

import torch
from torch.utils import flop_counter

from pantile import _C, _direct, _fake, _ops
from pantile._fast_path import present, takes_short_cut
from pantile._quantized import Quantized
from pantile._torch_private import below_autograd, in_transform

Tensor = torch.Tensor

_ROWS = 128  # rows of a block
_CODES = torch.float8_e4m3fn
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
_LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_OPERANDS = (
    "Tensor codes_q, Tensor codes_k, Tensor codes_v, Tensor scale_q, Tensor scale_kv, "
    "Tensor nonfinite_v, Tensor q_dot_mean, Tensor mean_k"
)
_OPERAND_COUNT = 8
_SOURCE_COUNT = 3
# Of fp8_forward behind the operands: the settings of pantile::forward, then what is FP8's own.
_SETTINGS_END = _ops._SETTINGS_COUNT

_library = torch.library.Library("pantile", "FRAGMENT")
_library.define(
    "quantize(Tensor q, Tensor k, Tensor v, Tensor? descale_q, Tensor? descale_k, "
    f"Tensor? descale_v, {_LENGTHS}, {_LONGEST}, int block_q, int block_k, bool hadamard, "
    f"bool smooth_k, str backend) -> ({_OPERANDS})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"fp8_forward(Tensor? q, Tensor? k, Tensor? v, {_OPERANDS}, {_ops._SETTINGS}, "
    "SymInt batch, SymInt rows, SymInt keys, SymInt head_dim, ScalarType dtype, int block_q, "
    "int block_k, bool smooth_k, str fp8_exp, bool deterministic, bool checked)"
    " -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
quantize_op = torch.ops.pantile.quantize.default
fp8_forward_op = torch.ops.pantile.fp8_forward.default


# ---- quantize


def _blocks(cu_seqlens: Tensor | None, shape) -> int:
    """Blocks of 128 rows of one head of q or k."""
    if cu_seqlens is not None:
        return shape[0] // _ROWS + cu_seqlens.shape[0] - 1
    return shape[0] * ((shape[1] + _ROWS - 1) // _ROWS)


_OPERAND_NAMES = (
    *("codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", "nonfinite_v", "q_dot_mean"),
    "mean_k",
)


def _operand_forms(shape_q, shape_k, head_dim_v, cu_seqlens_q, cu_seqlens_k, format_) -> tuple:
    """(shape, dtype) of each operand; ``format_`` is (block_q, block_k, smooth_k)."""
    block_q, block_k, smooth_k = format_
    *_, heads_q, head_dim = shape_q
    heads_k = shape_k[-2]
    blocks_q, blocks_k = _blocks(cu_seqlens_q, shape_q), _blocks(cu_seqlens_k, shape_k)
    batch = shape_q[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    width = (head_dim + 15) // 16 * 16
    f32 = torch.float32
    return (
        ((heads_q, _ROWS * blocks_q, width), _CODES),
        ((heads_k, _ROWS * blocks_k, width), _CODES),
        ((heads_k, blocks_k, head_dim_v, _ROWS), _CODES),
        ((heads_q, _ROWS // max(block_q, 1) * blocks_q), f32),
        ((heads_k, _ROWS // max(block_k, 1) * blocks_k, 2), f32),
        ((heads_k, blocks_k, head_dim_v, _ROWS // 32), torch.int32),
        ((heads_q, _ROWS * blocks_q) if smooth_k else (0,), f32),
        ((batch, heads_k, head_dim) if smooth_k else (0,), f32),
    )


def _new_operands(q, k, v, cu_seqlens_q, cu_seqlens_k, *format_) -> tuple:
    forms = _operand_forms(q.shape, k.shape, v.shape[-1], cu_seqlens_q, cu_seqlens_k, format_)
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in forms)


def _check_ranks(q, k, v, cu_seqlens_q) -> None:
    rank = 4 if cu_seqlens_q is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != rank:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have {rank}")


def _follow_threads() -> None:
    if not _direct.THREADS_FOLLOW:
        _C.set_cpu_threads(torch.get_num_threads())


def _quantize_kernel(q, k, v, descale_q, descale_k, descale_v, *rest):
    lengths, longest, format_ = rest[:4], rest[4:6], rest[6:]
    block_q, block_k, _, smooth_k, _ = format_
    _check_ranks(q, k, v, lengths[0])
    _follow_threads()
    operands = _new_operands(q, k, v, *lengths[:2], block_q, block_k, smooth_k)
    inputs = [q, k, v]
    while copies := _C.quantize(
        *inputs, descale_q, descale_k, descale_v, operands, *lengths, *longest, *format_
    ):
        _direct.copy_operands(copies, inputs, ("q", "k", "v"))
    return operands


@torch.library.register_fake("pantile::quantize", lib=_library)
def _fake_quantize(q, k, v, descale_q, descale_k, descale_v, *rest):
    lengths, longest, format_ = rest[:4], rest[4:6], rest[6:]
    block_q, block_k, _, smooth_k, backend = format_
    _check_ranks(q, k, v, lengths[0])

    def check(*arguments):
        _C.explain_fp8(*arguments, *format_[:-1], "code")

    settings = (*lengths, *longest, 1.0, -1, -1, backend)
    sizes = _fake.checked_call(check, q, k, v, settings)
    heads_k = sizes.of("k", k.shape)[-2]
    for name, x in (("descale_q", descale_q), ("descale_k", descale_k), ("descale_v", descale_v)):
        if x is None and q.dtype is _CODES:
            raise ValueError(f"{name} is null; it must be set because dtype == e4m3 is true")
        if x is not None and q.dtype is not _CODES:
            raise ValueError(f"{name} is set; it must be null because dtype == e4m3 is false")
        if x is not None:
            _fake.require_dtype(name, x, torch.float32)
            batch = sizes.of("q", q.shape)[0] if lengths[0] is None else _fake.known(x.shape[0])
            _fake.require_shape(name, tuple(map(_fake.known, x.shape)), (batch, heads_k))
    return _new_operands(q, k, v, *lengths[:2], block_q, block_k, smooth_k)


def _quantize_autograd(*args):
    """Codes have no derivative: gradients pass by them, see fp8_forward."""
    with below_autograd():
        return quantize_op(*args)


# ---- fp8_forward


def _new_outputs(operands, settings, batch, rows, dtype):
    codes_q, _, codes_v, *_ = operands
    heads, head_dim_v = codes_q.shape[0], codes_v.shape[2]
    leading = (batch, rows) if settings[0] is None else (rows,)
    o = codes_q.new_empty((*leading, heads, head_dim_v), dtype=dtype)
    lse = codes_q.new_empty((*leading[:-1], heads, rows), dtype=torch.float32)
    return o, lse


def _run_fp8_forward(operands, settings, own, checked: bool):
    batch, rows, keys, head_dim, dtype, block_q, block_k, smooth_k, exp = own
    _follow_threads()
    o, lse = _new_outputs(operands, settings, batch, rows, dtype)
    if checked and settings[0] is not None:
        lengths = [None if x is None else x.cpu() for x in settings[:4]]
        _C.check_sequences(*lengths, settings[4], settings[5], rows, keys)
    _C.forward_fp8(operands, o, lse, head_dim, keys, *settings, block_q, block_k, smooth_k, exp)
    return o, lse


def _check_forms(operands, settings, own) -> None:
    """Shapes and dtypes of fp8_forward's operands, against each other and against its sizes."""
    batch, rows, keys, head_dim, _, *format_, _ = own
    codes_q, codes_k, codes_v, *_ = operands
    for name, x, rank in zip(_OPERAND_NAMES, operands, (3, 3, 4), strict=False):
        if x.ndim != rank:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have {rank}")
    dense = (batch,) if settings[0] is None else ()
    shape_q = (*dense, rows, codes_q.shape[0], head_dim)
    shape_k = (*dense, keys, codes_k.shape[0], head_dim)
    forms = _operand_forms(shape_q, shape_k, codes_v.shape[2], *settings[:2], format_)
    for name, x, (shape, expected) in zip(_OPERAND_NAMES, operands, forms, strict=True):
        _fake.require_dtype(name, x, expected)
        _fake.require_shape(name, *_fake.known_shapes(x.shape, shape))


def _check_without_memory(operands, settings, own) -> None:
    """The rules of fp8_forward's other arguments, for tensors without memory."""
    batch, rows, keys, head_dim, dtype, block_q, block_k, smooth_k, exp = own
    codes_q, codes_k, codes_v, *_ = operands
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is {dtype}; it must be torch.bfloat16 or torch.float16")
    dense = (batch,) if settings[0] is None else ()
    q = codes_q.new_empty((*dense, rows, codes_q.shape[0], head_dim), dtype=dtype)
    k = codes_k.new_empty((*dense, keys, codes_k.shape[0], head_dim), dtype=dtype)
    v = codes_v.new_empty((*dense, keys, codes_k.shape[0], codes_v.shape[2]), dtype=dtype)

    def check(*arguments):
        _C.explain_fp8(*arguments, block_q, block_k, False, smooth_k, exp)

    _fake.checked_call(check, q, k, v, settings)


def _split(args):
    """(source, operands, settings, own, deterministic, checked) of fp8_forward's arguments."""
    source, args = args[:_SOURCE_COUNT], args[_SOURCE_COUNT:]
    operands, args = args[:_OPERAND_COUNT], args[_OPERAND_COUNT:]
    settings, own = args[:_SETTINGS_END], args[_SETTINGS_END:-2]
    return source, tuple(operands), settings, own, *args[-2:]


def _fp8_forward_kernel(*args):
    _, operands, settings, own, _, checked = _split(args)
    _check_forms(operands, settings, own)
    return _run_fp8_forward(operands, settings, own, checked)


@torch.library.register_fake("pantile::fp8_forward", lib=_library)
def _fake_fp8_forward(*args):
    _, operands, settings, own, *_ = _split(args)
    _check_forms(operands, settings, own)
    _check_without_memory(operands, settings, own)
    batch, rows, _, _, dtype, *_ = own
    return _new_outputs(operands, settings, batch, rows, dtype)


class _Fp8Attention(torch.autograd.Function):
    """The gradient of the unquantised attention: quantising counts as the identity.

    Probabilities recomputed with the FP8 forward's LSE would not sum to 1 over a row, by as much as
    the largest scores err; that error grows with the scores and feeds itself through the weights.
    """

    @staticmethod
    def forward(ctx, q, k, v, *args):
        *args, grad_mode = args
        _, operands, settings, own, deterministic, checked = _split((q, k, v, *args))
        with _ops.lower(grad_mode):
            o, lse = fp8_forward_op(None, None, None, *operands, *settings, *own, False, checked)
        ctx.save_for_backward(q, k, v, *settings[:4])
        ctx.call = (settings[4:], o.dtype, deterministic, len(args) + 1)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        settings, dtype, deterministic, count = ctx.call
        if grad_o is None and grad_lse is None:
            return (None,) * (_SOURCE_COUNT + count)
        q, k, v, *lengths = ctx.saved_tensors
        rounded = tuple(x.to(dtype) for x in (q, k, v))
        with torch.no_grad():
            o, lse, o_low = _ops.forward_op(
                *rounded, *lengths, *settings, deterministic, False, True
            )
        # By the operator's Autograd kernel: with create_graph=True it records that the gradient has
        # no derivative, and one that is asked for is refused by name.
        grads = _ops.backward_op(
            torch.zeros_like(o) if grad_o is None else grad_o,
            grad_lse,
            *rounded,
            o,
            o_low,
            lse,
            *lengths,
            *settings,
            deterministic,
        )
        grads = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
        return (*grads, *(None,) * count)

    jvp = staticmethod(_ops._no_forward_mode)


def _fp8_forward_autograd(*args):
    source = [x for x in args[:_SOURCE_COUNT] if x is not None]
    if len(source) == _SOURCE_COUNT and _ops.differentiates(source):
        return _ops.apply(_Fp8Attention, *args)
    with below_autograd():
        return fp8_forward_op(*args)


for _key in ("CPU", "CUDA"):
    _library.impl("quantize", _quantize_kernel, _key)
    _library.impl("fp8_forward", _fp8_forward_kernel, _key)
_library.impl("quantize", _quantize_autograd, "Autograd")
_library.impl("fp8_forward", _fp8_forward_autograd, "Autograd")


@flop_counter.register_flop_formula(torch.ops.pantile.fp8_forward, get_raw=True)
def _fp8_flops(*args, out_val=None, **_) -> int:
    _, operands, settings, (batch, rows, keys, head_dim, *_), *_ = _split(args)
    heads, head_dim_v = operands[0].shape[0], operands[2].shape[2]
    pairs = _ops.visible_pairs_of_call(batch, rows, keys, settings)
    return 2 * heads * pairs * (head_dim + head_dim_v)


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
    if q.dtype is _CODES:
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


def quantize(q, k, v, settings, descales, block_q, block_k, hadamard, smooth_k) -> Quantized:
    lengths, longest, backend = settings[:4], settings[4:6], settings[-1]
    _ops.prepare(q, k, v, lengths)
    q, k, v = _autocast((q, k, v))
    _check_ranks(q, k, v, lengths[0])
    codes = q.dtype is _CODES
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


def attention(operands: Quantized, settings, exp: str, deterministic, checked, return_lse):
    """Attention on operands; ``settings`` as of pantile::forward, its first six not read."""
    packed = operands.lengths[0] is not None
    batch = operands.lengths[0].shape[0] - 1 if packed else operands.shape_q[0]
    rows, keys = (shape[0 if packed else 1] for shape in (operands.shape_q, operands.shape_k))
    settings = (*operands.lengths, *operands.longest, *settings[6:])
    own = (
        batch,
        rows,
        keys,
        operands.shape_q[-1],
        operands.dtype,
        operands.block_q,
        operands.block_k,
        operands.smooth_k,
        exp,
    )
    recorded = operands.source[0] is not None and torch.is_grad_enabled()
    if not recorded and takes_short_cut((*operands.operands, *present(operands.lengths))):
        o, lse = _run_fp8_forward(operands.operands, settings, own, checked)
    else:
        source = _source_of(operands) if recorded else operands.source
        o, lse = fp8_forward_op(
            *source, *operands.operands, *settings, *own, deterministic, checked
        )
    return (o, lse) if return_lse else o


def quantized_attention(q, k, v, settings, format_, exp, deterministic, checked, return_lse):
    """Attention on q, k and v by way of quantising them; o has the dtype of q."""
    if isinstance(q, Tensor) and q.dtype is _CODES:
        raise TypeError("q has dtype float8_e4m3fn; pantile.quantize takes it, with descales")
    operands = quantize(q, k, v, settings, (None, None, None), *format_)
    o, lse = attention(operands, settings, exp, deterministic, checked, True)
    if not torch.is_autocast_enabled(q.device.type):
        o = o.to(q.dtype)
    return (o, lse) if return_lse else o


def like_backward(operands: tuple) -> tuple:
    """Tensors like q, k and v as the backward takes them."""
    return tuple(torch.empty_like(x, dtype=_output_dtype(x.dtype)) for x in operands)
