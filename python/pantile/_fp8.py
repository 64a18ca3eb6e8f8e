"""The public call of the FP8 quantiser."""

from __future__ import annotations

from pantile._attention import _engine, _fp8_ops, _length, _require_torch
from pantile._options import DEFAULT_OPTIONS, Options, resolve_options
from pantile._quantized import Quantized

_BLOCKS = (64, 128)
_BLOCKS_Q = (1, 64, 128)


def _rows(name: str, value: object, allowed: tuple[int, ...]) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an integer")
    if value not in allowed:
        raise ValueError(f"{name} is {value}; it must be one of {', '.join(map(str, allowed))}")
    return value


def _flag(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be True, False or None")
    return value


def quantize(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    seqused_q=None,
    seqused_k=None,
    block: int = 128,
    block_q: int | None = None,
    hadamard: bool | None = None,
    smooth_k: bool | None = None,
    descale_q=None,
    descale_k=None,
    descale_v=None,
    options: Options | None = None,
) -> Quantized:
    """Q, K and V as FP8 (e4m3) operands with block scales, for :func:`attention`.

    Algorithm: FlashAttention-3 (Shah et al. 2024, section 3.3: block quantisation and incoherent
    processing); K smoothing of SageAttention (Zhang et al. 2024).

    ``attention(quantize(q, k, v))`` is differentiable with respect to q, k and v: the gradient is
    that of the unquantised attention.

    Args:
        q, k, v: torch tensors as :func:`attention` takes them, float32, float16 or bfloat16; with
            ``cu_seqlens`` packed, as :func:`varlen_attention` takes them. Or all three
            float8_e4m3fn, with descales. Head dims up to 256.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k: as in
            :func:`varlen_attention`.
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
        As :func:`attention`.
    """
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    block = _rows("block", block, _BLOCKS)
    block_q = block if block_q is None else _rows("block_q", block_q, _BLOCKS_Q)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"{name} is None; both must be int32 tensors of batch + 1 offsets, or None")
    if cu_seqlens_q is None and (seqused_q is not None or seqused_k is not None):
        raise ValueError("seqused_q and seqused_k need cu_seqlens_q and cu_seqlens_k")
    longest = _length("max_seqlen_q", max_seqlen_q), _length("max_seqlen_k", max_seqlen_k)
    settings = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *longest, options.backend)
    _require_torch(_engine(q))
    return _fp8_ops().quantize(
        q,
        k,
        v,
        settings,
        (descale_q, descale_k, descale_v),
        block_q,
        block,
        _flag("hadamard", hadamard),
        _flag("smooth_k", smooth_k),
    )
