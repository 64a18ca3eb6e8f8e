"""FlashAttention-3's functions on pantile, with its names, argument order and layouts.

    from pantile.compat.flash_attn_3 import flash_attn_func
    o = flash_attn_func(q, k, v, None, True)             # the fourth argument is softmax_scale

``pantile.compat.install()`` puts them where ``import flash_attn_interface`` looks.

- q, k and v in float8_e4m3fn are attended in FP8, with ``q_descale``, ``k_descale`` and
  ``v_descale``; out is bfloat16. Differentiate with respect to 16-bit operands through
  ``pantile.Options(fp8=True)``; codes have no gradient, here as there.
- ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are hints about speed: they
  change no result, and pantile plans without them.
- ``attention_chunk`` is a mask of the user's own here (:class:`pantile.Mask`), compiled at its
  first use on a GPU.
- ``qv`` is refused by name.
- softmax_lse of a row that sees no key is -inf.
"""

from __future__ import annotations

from typing import Any

import torch

from pantile import _C, fp8
from pantile._arguments import shown
from pantile._attention import attention
from pantile._merge import merge_attention
from pantile._varlen import varlen_attention
from pantile.compat import _cache, _shared
from pantile.compat._shared import Tensor

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_FP8 = torch.float8_e4m3fn
_QV = "a second product with the values is not served; leave it out"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: dict,
    descales: tuple,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    variant: dict | None = None,
    out: Tensor | None = None,
) -> Any:
    """``packing``: arguments of varlen_attention, or nothing. ``descales``: of q, k and v."""
    change = {
        "causal": causal,
        "window": _shared.window_of(window_size),
        "scale": softmax_scale,
        "deterministic": deterministic,
        "return_lse": return_lse,
    }
    cap = _shared.softcap_of(softcap)
    variant = {} if variant is None else dict(variant)
    if cap is not None:
        variant["softcap"] = cap
    names = ("q_descale", "k_descale", "v_descale")
    if q.dtype is not _FP8:
        for name, value in zip(names, descales, strict=True):
            if value is not None:
                raise ValueError(
                    f"{name} is {shown(value)}; it goes with float8_e4m3fn, q has {q.dtype}"
                )
        call = varlen_attention if packing else attention
        return call(q, k, v, **packing, **change, **variant, out=out)
    for name, value in variant.items():
        _shared.refuse(name, value, "FP8 attention does not serve it")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        q, k, v = (x.detach() for x in (q, k, v))  # codes: nothing could follow their gradient
    given = {f"descale_{name[0]}": x for name, x in zip(names, descales, strict=True)}
    operands = fp8.quantize(q, k, v, **packing, **given)
    answer = fp8.attention(operands, **change)
    if return_lse:
        return _shared.written_to(out, answer[0]), answer[1]
    return _shared.written_to(out, answer)


def _chunks_of(attention_chunk: Any, q: Tensor, rows: Any, keys: Any) -> dict | None:
    """The variant. ``rows`` and ``keys``: of a sequence, or int32 tensors [batch]."""
    chunk = _shared.chunk_of(attention_chunk)
    if not chunk:
        return None
    if q.dtype is _FP8:
        raise _C.UnsupportedError(
            f"attention_chunk is {chunk}; FP8 attention does not serve it, 16 bits do"
        )
    shift = keys - rows
    if not isinstance(shift, Tensor):
        shift = torch.full((1,), shift, dtype=torch.int32, device=q.device)
    return {"mask": _shared.chunk_mask(chunk, shift)}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over dense tensors.

    Args:
        q, k, v: ``[batch, seqlen, heads, head_dim]``, 16-bit or all three float8_e4m3fn.
        softmax_scale, causal, window_size, softcap, deterministic: as in
            :func:`pantile.compat.flash_attn.flash_attn_func`.
        qv: refused.
        attention_chunk: queries see the keys of their own chunk of so many; 0: all chunks.
        q_descale, k_descale, v_descale: float32 ``[batch, heads_k]``, of FP8 operands.
        num_splits, pack_gqa, sm_margin: hints without effect.
        return_attn_probs: also return the LSE; its name is theirs.

    Returns:
        out, or ``(out, softmax_lse)``.
    """
    _shared.refuse("qv", qv, _QV)
    return attend(
        *(q, k, v, {}, (q_descale, k_descale, v_descale)),
        variant=_chunks_of(attention_chunk, q, q.shape[1], k.shape[1]),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of qkv ``[batch, seqlen, 3, heads, head_dim]``; with ``num_heads_q``
    of ``[batch, seqlen, heads_q + 2 * heads_k, head_dim]``. Read in place."""
    if num_heads_q is None:
        q, k, v = _shared.parts("qkv", qkv, 2, 3)
    else:
        heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if qkv.ndim != 4 or odd or heads_k <= 0:
            raise ValueError(
                f"qkv is {shown(qkv)}; with num_heads_q {num_heads_q} it must be [batch, seqlen, "
                "num_heads_q + 2 * heads_k, head_dim]"
            )
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale),
        *(window_size, attention_chunk, softcap, 1, None, deterministic, sm_margin),
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over packed sequences ``[total, heads, head_dim]``.

    Args:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in
            :func:`pantile.varlen_attention`.
        seqused_q, seqused_k: int32 ``[batch]``: how many rows of each sequence exist.
        qv: refused.
        attention_chunk: queries see the keys of their own chunk of so many; 0: all chunks.
        num_splits, pack_gqa, sm_margin: hints without effect.

    Returns:
        out, or ``(out, softmax_lse [heads, total_q])``.
    """
    _shared.refuse("qv", qv, _QV)
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": _shared.longest_of("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": _shared.longest_of("max_seqlen_k", max_seqlen_k),
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    variant = None
    if attention_chunk:
        rows = cu_seqlens_q.diff() if seqused_q is None else seqused_q
        keys = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        variant = _chunks_of(attention_chunk, q, rows, keys)
    return attend(
        *(q, k, v, packing, (q_descale, k_descale, v_descale)),
        variant=variant,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint parts of the keys.

    Args:
        out_partial: ``[splits, batch, seqlen, heads, head_dim]`` or ``[splits, total, heads,
            head_dim]``.
        lse_partial: ``[splits, batch, seqlen, heads]`` or ``[splits, total, heads]``.
        out: where the result is copied to.
        out_dtype: of the result; default that of ``out`` or ``out_partial``.

    Returns:
        ``(out, lse)``, lse of the layout of ``lse_partial``.
    """
    if out_partial.ndim not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial is {shown(out_partial)} and lse_partial {shown(lse_partial)}; they must "
            "be [splits, (batch,) seqlen, heads, head_dim] and the same without head_dim"
        )
    if out_dtype is None:
        out_dtype = out_partial.dtype if out is None else out.dtype
    pairs = [(o, lse.transpose(-1, -2)) for o, lse in zip(out_partial, lse_partial, strict=True)]
    merged, lse = merge_attention(pairs, dtype=out_dtype)
    return _shared.written_to(out, merged), lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention over a key-value cache, which k and v are written into first, in place.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``, or packed ``[total_q, heads, head_dim]`` with
            ``cu_seqlens_q``.
        k_cache, v_cache: ``[batch_cache, seqlen_cache, heads_k, head_dim]``, or pages ``[pages,
            page_size, heads_k, head_dim]`` of any size with ``page_table``; the head dim of values
            may differ.
        k, v: ``[batch, seqlen_new, heads_k, head_dim]``, or with ``cu_seqlens_k_new`` packed:
            written to the slots from ``cache_seqlens`` on.
        qv: refused.
        attention_chunk: queries see the keys of their own chunk of so many; 0: all chunks.
        rotary_cos, rotary_sin, cache_seqlens, cache_leftpad, rotary_interleaved: as in
            :func:`pantile.compat.flash_attn.flash_attn_with_kvcache`.
        cache_batch_idx: int32 ``[batch]``: which row of the cache, or of ``page_table``, a sequence
            has.
        page_table: int32 ``[batch, max_pages]``.
        max_seqlen_q: most queries of a sequence, with ``cu_seqlens_q``.
        rotary_seqlens: int32 ``[batch]``: positions to rotate by, in place of ``cache_seqlens``.
        q_descale, k_descale, v_descale: float32 ``[batch, heads_k]``, of a cache in float8_e4m3fn;
            q and k are float8_e4m3fn, too, or 16-bit without ``q_descale``.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: hints without effect.
        return_softmax_lse: also return the LSE.
        s_aux: sinks, float32 ``[heads]``; not an argument of the original.

    Returns:
        out, or ``(out, softmax_lse)``, in bfloat16 of FP8 queries. Has no gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was written.
        pantile.UnsupportedError: a tensor requires grad, or an argument that is refused is set.
    """
    _shared.refuse("qv", qv, _QV)
    if cu_seqlens_q is not None:
        max_seqlen_q = _shared.longest_of("max_seqlen_q", max_seqlen_q)
    place = _cache.Place(
        *(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table),
        *(cu_seqlens_q, max_seqlen_q, cu_seqlens_k_new),
    )
    return _cache.attend(
        *(q, place, (k, v)),
        _cache.Rotation(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        _cache.Mask(causal, _shared.window_of(window_size), _shared.chunk_of(attention_chunk)),
        (q_descale, k_descale, v_descale),
        scale=softmax_scale,
        softcap=_shared.softcap_of(softcap),
        sinks=None if s_aux is None else s_aux.float(),
        return_lse=return_softmax_lse,
    )


def get_scheduler_metadata(*_: Any, cache_seqlens: Tensor | None = None, **__: Any) -> Tensor:
    """A plan for ``flash_attn_with_kvcache``; pantile makes its own, so that this one is empty.

    Args:
        cache_seqlens: on the device of the answer; other arguments are not read.
    """
    device = None if cache_seqlens is None else cache_seqlens.device
    return torch.empty(0, dtype=torch.int32, device=device)
