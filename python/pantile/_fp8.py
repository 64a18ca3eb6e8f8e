"""The public call of the FP8 quantiser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pantile._arguments import flag, integer, real, shown
from pantile._attention import (
    _engine,
    _fp8_ops,
    _require_torch,
    packing_of,
)
from pantile._explain_calls import require_no_lengths
from pantile._foreign import refuse
from pantile._options import DEFAULT_OPTIONS, Options, quantize_backend, resolve_options
from pantile._quantized import Quantized
from pantile._schema import NO_PLACES

if TYPE_CHECKING:
    from pantile._types import Tensor

_BLOCKS = (64, 128)
_BLOCKS_Q = (1, 64, 128)
_SMALLEST, _LARGEST = 2.0**-149, (2.0 - 2.0**-23) * 2.0**127  # positive numbers of float32


def _rows(name: str, value: object, allowed: tuple[int, ...]) -> int:
    rows = integer(name, value)
    if rows not in allowed:
        allowed_text = ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {shown(value)}; it must be one of {allowed_text}")
    return rows


def _flag(name: str, value: object) -> bool | None:
    return None if value is None else flag(name, value, "True, False or None")


def _descale(name: str, value: object, q: Any, ops: Any) -> object:
    """A tensor, None, or a number within the range of float32."""
    if value is None:
        return None
    if isinstance(value, ops.Tensor):
        from pantile._fake import check_operand

        check_operand(name, value, q)
        return value
    number = real(name, value, "a number or a float32 tensor")
    if not _SMALLEST <= number <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}; it must be positive and finite")
    return number


def _check_bounds(name: str, cu_seqlens: Any) -> None:
    """That they count sequences: operands are allocated for them before the bindings look."""
    if cu_seqlens.ndim != 1:
        raise ValueError(
            f"{name} has {cu_seqlens.ndim} dimensions; it must have 1: one entry per sequence"
        )
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} is empty; it must hold batch + 1 entries")


_BY_NAME = (
    *("seqused_q", "seqused_k", "block", "block_q", "hadamard", "smooth_k"),
    *("descale_q", "descale_k", "descale_v", "options"),
)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *extra: Any,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block: int = 128,
    block_q: int | None = None,
    hadamard: bool | None = None,
    smooth_k: bool | None = None,
    descale_q: float | Tensor | None = None,
    descale_k: float | Tensor | None = None,
    descale_v: float | Tensor | None = None,
    options: Options | None = None,
    **foreign: Any,
) -> Quantized:
    """Q, K and V as FP8 (e4m3) operands with block scales, for :func:`pantile.fp8.attention`.

    Algorithm: FlashAttention-3 (Shah et al. 2024, section 3.3: block quantisation and incoherent
    processing); K smoothing of SageAttention (Zhang et al. 2024).

    ``attention(quantize(q, k, v))`` is differentiable with respect to q, k and v, as
    ``Options.fp8_backward`` says.

    Args:
        q, k, v: torch tensors as :func:`pantile.attention` takes them, float32, float16 or
            bfloat16; with ``cu_seqlens`` packed, as :func:`pantile.varlen_attention` takes them. Or
            all three float8_e4m3fn, with descales. Head dims up to 256.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as in
            :func:`pantile.varlen_attention`.
        block: keys that share a scale in K and in V, 64 or 128.
        block_q: query rows that share a scale: 1 (a scale for each token), 64 or 128; default
            ``block``.
        hadamard: rotate Q and K by a Hadamard matrix with random signs, which spreads outliers
            over the channels. Default: True, for FP8 inputs False.
        smooth_k: quantise K less its mean over the sequence, which leaves the attention as it is;
            LSE is corrected. Default: True, for FP8 inputs False.
        descale_q, descale_k, descale_v: FP8 inputs only: what their numbers are multiplied by; a
            number, a float32 tensor with one element, or float32 ``[batch, heads_k]``. Default 1.
        options: its backend.

    Returns:
        :class:`Quantized`, in blocks that belong to one sequence each.

    Raises:
        As :func:`pantile.attention`.
    """
    if extra or foreign:
        refuse("quantize", extra, foreign, _BY_NAME)
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    block = _rows("block", block, _BLOCKS)
    block_q = block if block_q is None else _rows("block_q", block_q, _BLOCKS_Q)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *NO_PLACES)
    longest = (max_seqlen_q, max_seqlen_k)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"{name} is None; both must be int32 tensors of batch + 1 offsets, or None")
    if cu_seqlens_q is None:
        require_no_lengths(lengths, longest)
        packing = (*lengths, 0, 0)
    else:
        packing = packing_of(q, k, lengths, longest)
    engine = _engine(q)
    _require_torch(engine)
    engine.prepare(q, k, v, lengths)
    if cu_seqlens_q is not None:
        _check_bounds("cu_seqlens_q", cu_seqlens_q)
        _check_bounds("cu_seqlens_k", cu_seqlens_k)
    descales = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
    return _fp8_ops().quantize(
        q,
        k,
        v,
        packing,
        quantize_backend(options.backend, options.backend_preferred, q.device.type),
        tuple(_descale(name, value, q, engine) for name, value in descales.items()),
        (block_q, block, _flag("hadamard", hadamard), _flag("smooth_k", smooth_k)),
    )
