"""The rules of a call for tensors without memory: fake, meta and symbolic ones.

The bindings check q, k, v and the settings of every call. Here they check stand-ins of the same
shapes and dtypes, so that a traced call is refused for the same reason and in the same words. A
symbolic size is checked by the value that it has in the example; a comparison of symbols would
guard the traced program. Sizes without a value pass.
"""

from __future__ import annotations

import functools
import sys

import torch

from pantile import _C, _torch_private
from pantile._direct import keeps_low
from pantile._schema import (
    LENGTHS,
    VARIANT_TENSOR_COUNT,
    VARIANT_TENSOR_NAMES,
    Call,
    bind,
    lengths_of,
)

Tensor = torch.Tensor

_TENSOR_NAMES = ("q", "k", "v", *LENGTHS)
_ANY_SIZE = 1  # stands for sizes without a value: of every axis of that name

_ROWS = {  # of tensors by name; dense ones have a batch axis before these
    "q": ("rows", "heads", "head_dim"),
    "k": ("keys", "heads", "head_dim"),
    "v": ("keys", "heads", "head_dim_v"),
    "cu_seqlens_q": ("sequences",),
    "cu_seqlens_k": ("sequences",),
    "seqused_q": ("sequences",),
    "seqused_k": ("sequences",),
    "k_begin": ("sequences",),
    "mask_shift": ("sequences",),
    "block_table": ("sequences", "table pages"),
    "o": ("rows", "heads", "head_dim_v"),
    "o_low": ("rows", "heads", "head_dim_v"),
    "grad_o": ("rows", "heads", "head_dim_v"),
    "lse": ("heads", "rows"),
    "grad_lse": ("heads", "rows"),
}


# ---- checks that no stand-in can make


def check_operand(name: str, x: object, q: Tensor) -> None:
    if x is None:
        raise TypeError(f"{name} is missing; it must be a torch.Tensor like q")
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor like q")
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ValueError(f"{name} has layout {kind}; it must be torch.strided")
    if x.is_quantized:  # no kernel of any dispatch key takes it
        raise TypeError(
            f"{name} has dtype {_text(x.dtype)}; it must not be a quantized tensor of torch"
        )
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name} is on {x.device}; it must be on the CPU or a CUDA device")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; it must be on the device of q, {q.device}")


def prepare(q, k, v, lengths: tuple) -> tuple:
    """The operands, after the checks that no kernel could make."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(q, distributed.DTensor):
        from pantile.integrations import dtensor

        dtensor.register()
    for name, x in zip(_TENSOR_NAMES, (q, k, v, *lengths), strict=True):
        if x is not None or name in ("q", "k", "v"):
            check_operand(name, x, q)
    return q, k, v


# ---- sizes


def known(size) -> int | None:
    """The value of a size; of a symbol that of the example, None if it has none. Never guards."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.has_hint() else None


def _known_or(value, other):
    if value is None or isinstance(value, int | float | str):
        return value
    found = known(value)
    return other if found is None else found


class _Sizes:
    """Shapes as numbers, with one number for all axes of a name of which some have no value."""

    def __init__(self, tensors: dict[str, Tensor | None], packed: bool) -> None:
        self._batch_axis = () if packed else ("batch",)
        self._paged = tensors.get("block_table") is not None
        self.unknown = {
            axis
            for name, x in tensors.items()
            if x is not None
            for axis, size in zip(self._axes(name), x.shape, strict=False)
            if known(size) is None
        }

    def _axes(self, name: str) -> tuple[str, ...]:
        axes = _ROWS[name]
        if self._paged and name in ("k", "v"):
            return ("pages", "slots", *axes[1:])
        return axes if axes[0] == "sequences" else self._batch_axis + axes

    def of(self, name: str, shape) -> tuple[int, ...]:
        axes = self._axes(name)
        extra = ("",) * max(len(shape) - len(axes), 0)
        return tuple(
            self._stand_in(name, axis) if axis in self.unknown else _known_or(size, _ANY_SIZE)
            for axis, size in zip(axes + extra, shape, strict=False)
        )

    def _stand_in(self, name: str, axis: str) -> int:
        bounds = axis == "sequences" and name.startswith("cu_")
        return _ANY_SIZE + 1 if bounds else _ANY_SIZE


# ---- stand-ins


@functools.cache
def _no_dispatch():
    """torch's context in which a tensor mode sees nothing; only traced calls need it."""
    return _torch_private.require("torch.utils._mode_utils.no_dispatch")


@functools.cache
def _one(dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device="cpu")


def _stand_in(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A CPU tensor of this shape and the dtype of x, in the memory of one element."""
    return _one(x.dtype).expand(shape)


def _length_stand_in(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    strides = tuple(_known_or(stride, 1) for stride in x.stride())
    return torch.empty_strided(shape, strides, dtype=x.dtype, device="cpu")


_UNKNOWN = {  # what stands for a number of the call that has no value
    "max_seqlen_q": _ANY_SIZE,
    "max_seqlen_k": _ANY_SIZE,
    "scale": 1.0,
    "window_left": -1,
    "window_right": -1,
}


def _known_call(call, sizes: _Sizes) -> _C.Call:
    """The call in numbers, with stand-ins for its tensors."""
    known = {name: _known_or(getattr(call, name), other) for name, other in _UNKNOWN.items()}
    tensors = {
        name: None if x is None else _length_stand_in(x, sizes.of(name, x.shape))
        for name, x in zip(LENGTHS, lengths_of(call), strict=True)
    }
    return bind(call._replace(**known, **tensors))


def checked_call(check, q: Tensor, k: Tensor, v: Tensor, call: Call, others=None) -> _Sizes:
    """Calls ``check(q, k, v, call, sizes=)`` with stand-ins; ``others`` share names of axes."""
    lengths = dict(zip(LENGTHS, lengths_of(call), strict=True))
    prepare(q, k, v, tuple(lengths.values()))
    operands = {"q": q, "k": k, "v": v}
    sizes = _Sizes({**operands, **lengths, **(others or {})}, call.cu_seqlens_q is not None)
    with _no_dispatch()():
        stand_ins = [_stand_in(x, sizes.of(name, x.shape)) for name, x in operands.items()]
        check(*stand_ins, _known_call(call, sizes), sizes=sizes)
    return sizes


# ---- the operators


def _known_variant(variant, sizes: _Sizes):
    """The variant in numbers, with stand-ins for its tensors; None where a size has no value."""
    tensors = variant[:VARIANT_TENSOR_COUNT]
    shapes = [None if x is None else tuple(map(known, x.shape)) for x in tensors]
    if sizes.unknown or any(None in shape for shape in shapes if shape is not None):
        return None
    stand_ins = [
        None
        if x is None
        else _one(x.dtype).expand(shape)
        if len(shape) == 4  # large; the strides do not matter here
        else torch.empty(shape, dtype=x.dtype, device="cpu")
        for x, shape in zip(tensors, shapes, strict=True)
    ]
    numbers = [_known_or(value, 0) for value in variant[VARIANT_TENSOR_COUNT:]]
    return type(variant)(*stand_ins, *numbers)


def _check_variant(variant, q: Tensor) -> None:
    for name, x in zip(VARIANT_TENSOR_NAMES, variant, strict=False):
        if x is not None:
            check_operand(name, x, q)


def check_forward(
    q, k, v, call: Call, wants_max_logit=False, output_f32=False, variant=None
) -> None:
    if variant is not None:
        _check_variant(variant, q)

    def check(*arguments, sizes):
        known_variant = None if variant is None else _known_variant(variant, sizes)
        _C.explain(*arguments, False, wants_max_logit, output_f32, False, known_variant)

    checked_call(check, q, k, v, call)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_dtype(name: str, x: Tensor, dtype: torch.dtype, q: Tensor | None = None) -> None:
    """With q: that of q."""
    if x.dtype is not dtype:
        expected = f"have the dtype of q, {_text(dtype)}" if q is not None else f"be {_text(dtype)}"
        raise TypeError(f"{name} has dtype {_text(x.dtype)}; it must {expected}")


def known_shapes(found, expected) -> tuple[tuple, tuple]:
    """Both as numbers; an axis of which either has no value counts as equal."""
    pairs = [(known(a), known(b)) for a, b in zip(found, expected, strict=False)]
    pairs = [(_ANY_SIZE, _ANY_SIZE) if None in pair else pair for pair in pairs]
    rest = [tuple(map(known, shape[len(pairs) :])) for shape in (found, expected)]
    return (*(a for a, _ in pairs), *rest[0]), (*(b for _, b in pairs), *rest[1])


def require_shape(name: str, found: tuple, shape: tuple) -> None:
    if found != shape:
        raise ValueError(f"{name} has shape {list(found)}; it must be {list(shape)}")


def check_backward(grad_o, grad_lse, q, k, v, o, o_low, lse, call: Call, variant=None) -> None:
    outputs = {"o": o, "grad_o": grad_o, "lse": lse, "o_low": o_low, "grad_lse": grad_lse}
    if variant is not None:
        _check_variant(variant, q)

    def check(*arguments, sizes):
        known_variant = None if variant is None else _known_variant(variant, sizes)
        _C.explain(*arguments, False, False, False, False, known_variant)

    sizes = checked_call(check, q, k, v, call, outputs)
    *leading, rows, heads, _ = sizes.of("q", q.shape)
    like_o = (*leading, rows, heads, sizes.of("v", v.shape)[-1])
    like_lse = (*leading, heads, rows)
    for name, dtype, shape in (
        ("o", None, like_o),
        ("grad_o", None, like_o),
        ("lse", torch.float32, like_lse),
        ("o_low", torch.int8, like_o),
        ("grad_lse", torch.float32, like_lse),
    ):
        x = outputs[name]
        if x is not None:
            require_dtype(name, x, *((q.dtype, q) if dtype is None else (dtype,)))
            check_operand(name, x, q)
            require_shape(name, sizes.of(name, x.shape), shape)
    if o_low is not None and not keeps_low(q, True):
        raise ValueError(
            "has_o_low is true; it must be false unless dtype is f16 or bf16, it is f32"
        )
