"""Joins attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pantile._arguments import dtype_name, shown

if TYPE_CHECKING:
    from pantile._types import Array

_DTYPES = ("float32", "float16", "bfloat16", "float64")


def _numpy_arrays(x: object) -> Any:
    """pantile._numpy if x is a NumPy array of whatever subclass."""
    if sys.modules.get("numpy") is None:
        return None
    from pantile import _numpy

    return _numpy if isinstance(x, _numpy.np.ndarray) else None


def _is_tensor(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _pairs(partials: object) -> list[tuple]:
    if _is_tensor(partials) or _numpy_arrays(partials) or not isinstance(partials, Iterable):
        raise TypeError(f"partials is {shown(partials)}; it must hold pairs (o, lse)")
    pairs = []
    for i, part in enumerate(partials):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise TypeError(f"partials[{i}] is {shown(part)}; it must be a pair (o, lse)")
        pairs.append(tuple(part))
    if not pairs:
        raise ValueError("partials is empty; it must hold at least one pair (o, lse)")
    return pairs


def _check_kind(name: str, x: Any, first: Any, arrays: Any) -> None:
    """A dense array or tensor of real numbers in floating point, like the first o."""
    if arrays is not None:
        arrays.check_plain(name, x, "the first o")
    elif not _is_tensor(x):
        allowed = "a torch.Tensor or a numpy.ndarray" if x is first else "a torch.Tensor"
        raise TypeError(f"{name} is {shown(x)}; it must be {allowed}")
    elif x.is_nested or str(x.layout) != "torch.strided":
        raise ValueError(
            f"{name} has layout {'nested' if x.is_nested else x.layout}; it must be torch.strided"
        )
    elif x.device != first.device:
        raise ValueError(
            f"{name} is on {x.device}; it must be on the device of the first o, {first.device}"
        )
    if dtype_name(x.dtype) not in _DTYPES:
        raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be {_allowed_dtypes()}")


def _allowed_dtypes() -> str:
    return f"{', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"


def _check_shapes(pairs: list[tuple]) -> None:
    first_o, first_lse = pairs[0]
    for i, (o, lse) in enumerate(pairs):
        if o.shape != first_o.shape or lse.shape != first_lse.shape:
            raise ValueError(
                f"partials[{i}] has shapes {tuple(o.shape)} and {tuple(lse.shape)}; they must be "
                f"those of partials[0], {tuple(first_o.shape)} and {tuple(first_lse.shape)}"
            )
    if first_o.ndim < 3:
        raise ValueError(f"partials[0][0] has {first_o.ndim} dimensions; o must have 3 or 4")
    expected = (*first_o.shape[:-3], first_o.shape[-2], first_o.shape[-3])
    if tuple(first_lse.shape) != tuple(expected):
        raise ValueError(
            f"lse has shape {tuple(first_lse.shape)}; for o of shape {tuple(first_o.shape)} it "
            f"must be {tuple(expected)}"
        )


def _output_dtype(dtype: Any, first_o: Any, arrays: Any) -> Any:
    if dtype is None:
        return first_o.dtype
    name = dtype_name(dtype)
    if name not in _DTYPES:
        raise TypeError(f"dtype is {shown(dtype)}; it must be {_allowed_dtypes()}, or None")
    if arrays is None:
        return getattr(sys.modules["torch"], name)
    if name == dtype_name(first_o.dtype):
        return first_o.dtype
    try:
        return arrays.np.dtype(dtype if isinstance(dtype, arrays.np.dtype | type) else name)
    except TypeError:  # bfloat16, which NumPy has from ml_dtypes
        raise TypeError(
            f"dtype is {shown(dtype)}; for arrays it must be that of ml_dtypes"
        ) from None


def _spread(weights: Any) -> Any:
    """[.., heads, rows] as [.., rows, heads, 1], to multiply o with."""
    return weights.swapaxes(-1, -2)[..., None]


def _merge(xp: Any, outputs: list, lses: Any, largest: Any) -> tuple:
    """(o, lse) of float32 parts. ``xp`` is torch or numpy; ``largest``: the maximum of lses."""
    # Subtracting a maximum of -inf, and the logarithm of 0, would give NaN gradients.
    largest = xp.where(xp.isneginf(largest), xp.zeros_like(largest), largest)
    weights = xp.exp(lses - largest)
    total = weights.sum(0)
    nothing = total == 0.0
    total = xp.where(nothing, xp.ones_like(total), total)
    merged = sum(_spread(w) * o for w, o in zip(weights, outputs, strict=True)) / _spread(total)
    lse = largest + xp.log(total)
    return merged, xp.where(nothing, xp.full_like(lse, -xp.inf), lse)


def merge_attention(
    partials: Iterable[tuple[Array, Array]], *, dtype: Any = None
) -> tuple[Array, Array]:
    """Attention over all keys from attention over disjoint parts of them (context parallelism).

    With ``lse = log(sum(exp(lse_i)))`` the output is ``sum(exp(lse_i - lse) * o_i)``: exact up to
    float32 rounding when the parts come with ``Options(output_dtype="float32")``. Differentiable,
    also through each lse, so that gradients reach the keys of every part.

    Args:
        partials: pairs (o, lse) as :func:`pantile.attention` or :func:`pantile.varlen_attention`
            return them with ``return_lse``, all of one shape: the same queries, different keys.
            Torch tensors, or NumPy arrays. With a causal mask every part must be given the mask
            that is its own.
        dtype: of the merged o: a dtype or its name, ``"float32"``; default that of the first o.

    Returns:
        (o, lse), lse float32. A row that attends to nothing in any part has o = 0, lse = -inf.

    Raises:
        TypeError, ValueError: a part is no pair, or differs from the first in shape, device or
        kind; the message names it, its value and the rule.
    """
    pairs = _pairs(partials)
    first_o = pairs[0][0]
    arrays = _numpy_arrays(first_o)
    for i, pair in enumerate(pairs):
        for j, x in enumerate(pair):
            _check_kind(f"partials[{i}][{j}]", x, first_o, arrays)
    _check_shapes(pairs)
    dtype = _output_dtype(dtype, first_o, arrays)
    if arrays is not None:
        np = arrays.np
        outputs = [o.astype(np.float32) for o, _ in pairs]
        lses = np.stack([lse.astype(np.float32) for _, lse in pairs])
        with np.errstate(invalid="ignore"):  # infinite scores give NaN, as in torch
            merged, lse = _merge(np, outputs, lses, lses.max(0))
        return merged.astype(dtype), lse
    torch = sys.modules["torch"]
    lses = torch.stack([lse.float() for _, lse in pairs])
    merged, lse = _merge(torch, [o.float() for o, _ in pairs], lses, lses.detach().amax(0))
    return merged.to(dtype), lse
