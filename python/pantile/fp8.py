"""FP8 attention (docs/fp8.md): quantise once, attend to the operands as often as wanted.

    operands = pantile.fp8.quantize(q, k, v)
    o = pantile.fp8.attention(operands, causal=True)     # o in bfloat16 or float16

``pantile.attention(q, k, v, options=pantile.Options(fp8=True))`` does both in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from pantile._arguments import dtype_name, flag, shown
from pantile._attention import _fp8_ops
from pantile._attention import attention as _attention
from pantile._foreign import refuse
from pantile._fp8 import quantize
from pantile._options import DEFAULT_OPTIONS, Options, quantize_backend, resolve_options
from pantile._quantized import Quantized

if TYPE_CHECKING:
    import torch

    from pantile._types import Tensor, Window

__all__ = ["Quantized", "attention", "dequantize", "quantize"]

_FLOATS = ("float32", "float16", "bfloat16")
_BY_NAME = ("causal", "window", "scale", "return_lse", "deterministic", "options")


@overload
def attention(
    operands: Quantized,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    options: Options | None = ...,
) -> Tensor: ...
@overload
def attention(
    operands: Quantized,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    options: Options | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    operands: Quantized,
    *,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: bool,
    deterministic: bool = ...,
    options: Options | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    operands: Quantized,
    *extra: Any,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    options: Options | None = None,
    **foreign: Any,
) -> Any:
    """Attention on FP8 operands, dense or packed as they were quantised.

    Algorithm: FlashAttention-3 (Shah et al. 2024, section 3.3).

    Args:
        operands: of :func:`quantize`.
        causal, window, scale, return_lse, deterministic: as in :func:`pantile.attention`.
        options: its backend, ``fp8_exp``, ``fp8_backward``, ``checked`` and softmax options.

    Returns:
        o: ``[batch, seqlen_q, heads_q, head_dim_v]``, packed ``[total_q, heads_q, head_dim_v]``, in
        ``operands.dtype``: float16 of float16 inputs, else bfloat16. With ``return_lse`` the pair
        (o, lse), lse float32 ``[batch, heads_q, seqlen_q]``, packed ``[heads_q, total_q]``.
        Differentiable with respect to what was quantised, as ``options.fp8_backward`` says.

    Raises:
        As :func:`pantile.attention`.
    """
    if extra or foreign:
        refuse("fp8.attention", extra, foreign, _BY_NAME)
    if type(operands) is not Quantized:
        raise TypeError(
            f"operands is {shown(operands)}; it must be what pantile.fp8.quantize(q, k, v) returns"
        )
    return _attention(
        operands,
        causal=causal,
        window=window,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        options=options,
    )


def dequantize(
    operands: Quantized,
    *extra: Any,
    dtype: torch.dtype | None = None,
    keep_mean: bool = True,
    options: Options | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v that FP8 operands stand for: codes times scales, rotated back.

    Not differentiable. The values are on the grid of e4m3 before the rotation; NaN and Inf of the
    inputs come back as NaN.

    Args:
        operands: of :func:`quantize`.
        dtype: of the tensors: float32, float16 or bfloat16; default ``operands.dtype``.
        keep_mean: False gives k less its mean, as it is quantised with ``smooth_k``.
        options: its backend.

    Returns:
        (q, k, v), shaped as they were quantised.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    if extra or foreign:
        refuse("fp8.dequantize", extra, foreign, ("dtype", "keep_mean", "options"))
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    if type(operands) is not Quantized:
        raise TypeError(
            f"operands is {shown(operands)}; it must be what pantile.fp8.quantize(q, k, v) returns"
        )
    flag("keep_mean", keep_mean)
    name = dtype_name(operands.dtype if dtype is None else dtype)
    if name not in _FLOATS:
        allowed = ", ".join(_FLOATS)
        raise ValueError(f"dtype is {shown(dtype)}; it must be one of {allowed}, or None")
    device = operands.codes_q.device.type
    backend = quantize_backend(options.backend, options.backend_preferred, device)
    return _fp8_ops().dequantize(operands, name, keep_mean, backend)
