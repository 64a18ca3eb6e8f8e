"""The torch operator ``pantile::dequantize``, and the forms of FP8 operands."""

from __future__ import annotations

import torch

from pantile import _C, _direct, _fake, _ops
from pantile._fp8_codes import ROWS
from pantile._schema import DEQUANTIZE, FP8_OPERAND_NAMES, Call, bind
from pantile._torch_private import below_autograd

Tensor = torch.Tensor

CODES = torch.float8_e4m3fn

_library = torch.library.Library("pantile", "FRAGMENT")
_library.define(DEQUANTIZE.schema, tags=(torch.Tag.pt2_compliant_tag,))
dequantize_op = torch.ops.pantile.dequantize.default


def _blocks(cu_seqlens: Tensor | None, shape) -> int:
    """Blocks of 128 rows of one head of q or k."""
    if cu_seqlens is not None:
        return shape[0] // ROWS + cu_seqlens.shape[0] - 1
    return shape[0] * ((shape[1] + ROWS - 1) // ROWS)


def operand_forms(shape_q, shape_k, head_dim_v, cu_seqlens_q, cu_seqlens_k, format_) -> tuple:
    """(shape, dtype) of each operand; ``format_`` is (block_q, block_k, smooth_k)."""
    block_q, block_k, smooth_k = format_
    *_, heads_q, head_dim = shape_q
    heads_k = shape_k[-2]
    blocks_q, blocks_k = _blocks(cu_seqlens_q, shape_q), _blocks(cu_seqlens_k, shape_k)
    batch = shape_q[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    width = (head_dim + 15) // 16 * 16
    f32 = torch.float32
    return (
        ((heads_q, ROWS * blocks_q, width), CODES),
        ((heads_k, ROWS * blocks_k, width), CODES),
        ((heads_k, blocks_k, head_dim_v, ROWS), CODES),
        ((heads_q, ROWS // max(block_q, 1) * blocks_q), f32),
        ((heads_k, ROWS // max(block_k, 1) * blocks_k, 2), f32),
        ((heads_k, blocks_k, head_dim_v, ROWS // 32), torch.int32),
        ((heads_q, ROWS * blocks_q) if smooth_k else (0,), f32),
        ((batch, heads_k, head_dim) if smooth_k else (0,), f32),
    )


def check_forms(a, names: tuple[str, ...], smooth_k: bool) -> None:
    """Shapes and dtypes of operands, the first ``names`` of all, against each other and against the
    sizes of the call."""
    operands = tuple(getattr(a, name) for name in names)
    for name, x, rank in zip(names, operands, (3, 3, 4), strict=False):
        if x.ndim != rank:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must have {rank}")
    bounds = a.call.cu_seqlens_q, a.call.cu_seqlens_k
    dense = (a.batch,) if bounds[0] is None else ()
    shape_q = (*dense, a.rows, a.codes_q.shape[0], a.head_dim)
    shape_k = (*dense, a.keys, a.codes_k.shape[0], a.head_dim)
    format_ = a.block_q, a.block_k, smooth_k
    forms = operand_forms(shape_q, shape_k, a.codes_v.shape[2], *bounds, format_)
    for name, x, (shape, expected) in zip(names, operands, forms, strict=False):
        _fake.require_dtype(name, x, expected)
        _fake.require_shape(name, *_fake.known_shapes(x.shape, shape))


def follow_threads() -> None:
    if not _direct.THREADS_FOLLOW:
        _C.set_cpu_threads(torch.get_num_threads())


def quantize_call(a) -> Call:
    """Of the operator's arguments: it has no mask, no scale and no softmax."""
    return a.call._replace(scale=1.0, backend=a.backend)


_DEQUANTIZED = FP8_OPERAND_NAMES[: DEQUANTIZE.operand_count]
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)


def _check_numbers(a) -> None:
    if a.dtype not in _NUMBERS:
        raise ValueError(f"dtype is {a.dtype}; it must be one of {', '.join(map(str, _NUMBERS))}")
    check_forms(a, _DEQUANTIZED, False)


def _new_numbers(a) -> tuple:
    dense = (a.batch,) if a.call.cu_seqlens_q is None else ()
    heads_q, heads_k = a.codes_q.shape[0], a.codes_k.shape[0]
    shapes = (
        (a.rows, heads_q, a.head_dim),
        (a.keys, heads_k, a.head_dim),
        (a.keys, heads_k, a.codes_v.shape[2]),
    )
    return tuple(a.codes_q.new_empty((*dense, *shape), dtype=a.dtype) for shape in shapes)


def _dequantize_kernel(*arguments):
    _check_numbers(DEQUANTIZE.split(arguments))
    return run_dequantize(*arguments)


def run_dequantize(*arguments):
    """Of operands that one call of the quantiser made."""
    a = DEQUANTIZE.split(arguments)
    follow_threads()
    q, k, v = _new_numbers(a)
    codes = arguments[: DEQUANTIZE.operand_count]
    call = bind(quantize_call(a))
    if _C.dequantize(q, k, v, codes, call, a.block_q, a.block_k, a.hadamard, a.keep_rotation):
        raise AssertionError("a contiguous tensor was refused for its layout")
    return q, k, v


@torch.library.register_fake("pantile::dequantize", lib=_library)
def _fake_dequantize(*arguments):
    a = DEQUANTIZE.split(arguments)
    _check_numbers(a)
    return _new_numbers(a)


def _dequantize_autograd(*args):
    with below_autograd():
        return dequantize_op(*args)


def _vmap_dequantize(info, in_dims, *args):
    return _ops.mapped_in_a_loop(dequantize_op, info, in_dims, *args)


for _key in ("CPU", "CUDA"):
    _library.impl("dequantize", _dequantize_kernel, _key)
_library.impl("dequantize", _dequantize_autograd, "Autograd")
torch.library.register_vmap("pantile::dequantize", _vmap_dequantize, lib=_library)
