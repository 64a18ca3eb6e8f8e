"""FlashAttention-2's functions on pantile, with its names, argument order and layouts.

    from pantile.compat.flash_attn import flash_attn_func
    o = flash_attn_func(q, k, v, 0.1, causal=True)       # the fourth argument is dropout_p

``pantile.compat.install()`` puts them where ``import flash_attn`` looks. What is different:

- Dropout has the rate p rounded to a multiple of 1/256 and scales by exactly ``1 / (1 - rate)``, so
  that its expectation is that without dropout; FlashAttention-2 rounds p too, and scales by
  ``1 / (1 - p)``. p = 0.17 is 44/256 = 0.1719 here.
- softmax_lse of a row that sees no key is -inf, theirs is +inf. With ALiBi and a causal mask theirs
  lacks a term of the row; here it is the logarithm of the sum of the scores as documented.
- ``S_dmask`` is computed from q and k when it is asked for, in torch, with a largest weight of 1 in
  every row; theirs has the scale of its blocks of keys.
- float32, head dims to 512 and tensors on the CPU are served as well.
"""

from __future__ import annotations

from typing import Any

import torch

from pantile import _C
from pantile._attention import attention
from pantile._varlen import varlen_attention
from pantile.compat import _cache, _shared
from pantile.compat._shared import Tensor

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# Of the interface, for programs that ask.
__version__ = "2.8.3+pantile"


def _change(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, wants_seed):
    """Arguments of pantile.attention."""
    return {
        "causal": causal,
        "window": _shared.window_of(window_size),
        "scale": softmax_scale,
        "softcap": _shared.softcap_of(softcap),
        "alibi": alibi_slopes,
        "dropout": _shared.dropout_of(dropout_p, q, wants_seed),
    }


def _no_weights(q: Tensor) -> Tensor:
    return q.new_empty(0)


def _seen(change: dict) -> dict:
    """The arguments of signed_weights."""
    return {name: change[name] for name in ("scale", "causal", "window", "softcap", "alibi")}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over dense tensors.

    Args:
        q, k, v: ``[batch, seqlen, heads, head_dim]``; k and v may have fewer heads.
        dropout_p: probability with which a weight is removed.
        softmax_scale: default ``head_dim ** -0.5``.
        causal: aligned to the bottom right.
        window_size: ``(left, right)``; a negative number lifts a side.
        softcap: 0 is none.
        alibi_slopes: float32 ``[heads]`` or ``[batch, heads]``.
        deterministic: bit-equal gradients for equal inputs.
        return_attn_probs: also return the LSE and S_dmask, for tests.

    Returns:
        out, or ``(out, softmax_lse, S_dmask)``; S_dmask is empty without dropout.
    """
    change = _change(
        *(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_attn_probs,
    )
    if not return_attn_probs:
        return attention(q, k, v, deterministic=deterministic, **change)
    o, lse = attention(q, k, v, deterministic=deterministic, return_lse=True, **change)
    drop = change["dropout"]
    with torch.no_grad():
        weights = (
            _no_weights(q) if drop is None else _shared.signed_weights(q, k, drop, **_seen(change))
        )
    return o, lse, weights


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of kv ``[batch, seqlen, 2, heads_k, head_dim]``, read in place."""
    k, v = _shared.parts("kv", kv, 2, 2)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of qkv ``[batch, seqlen, 3, heads, head_dim]``, read in place."""
    q, k, v = _shared.parts("qkv", qkv, 2, 3)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over sequences packed one after the other.

    Args:
        q, k, v: ``[total, heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``.
        max_seqlen_q, max_seqlen_k: of the longest sequence.
        dropout_p, softmax_scale, causal, window_size, softcap: as in :func:`flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as in :func:`flash_attn_func`.
        block_table: int32 ``[batch, max_pages]``: k and v are pages ``[pages, page_size, heads_k,
            head_dim]``, of which ``cu_seqlens_k`` only says how many keys there are. No gradient.

    Returns:
        out, or ``(out, softmax_lse [heads, total_q], S_dmask [batch, heads, max_seqlen_q,
        max_seqlen_k])``.
    """
    longest = (
        _shared.longest_of("max_seqlen_q", max_seqlen_q),
        _shared.longest_of("max_seqlen_k", max_seqlen_k),
    )
    change = _change(
        *(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_attn_probs,
    )
    drop = change["dropout"]
    packed = (q, k, v, cu_seqlens_q, cu_seqlens_k, *longest)
    change["deterministic"] = deterministic
    if block_table is not None:
        if drop is not None and return_attn_probs:
            raise _C.UnsupportedError(
                "return_attn_probs is True; S_dmask of paged keys is not served, leave it out"
            )
        packed = (q, k, v, cu_seqlens_q, None, *longest)
        change |= {"block_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    if not return_attn_probs:
        return varlen_attention(*packed, **change)
    o, lse = varlen_attention(*packed, return_lse=True, **change)
    if drop is None:
        return o, lse, _no_weights(q)
    with torch.no_grad():
        lengths = _shared.sequences(cu_seqlens_q, cu_seqlens_k)
        weights = _shared.signed_weights(
            q, k, drop, lengths=lengths, longest=longest, **_seen(change)
        )
    return o, lse, weights


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of kv ``[total_k, 2, heads_k, head_dim]``."""
    k, v = _shared.parts("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of qkv ``[total, 3, heads, head_dim]``."""
    q, k, v = _shared.parts("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
        *(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a key-value cache, which k and v are written into first, in place.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``.
        k_cache, v_cache: ``[batch_cache, seqlen_cache, heads_k, head_dim]``, or pages ``[pages,
            page_size, heads_k, head_dim]`` of any size with ``block_table``.
            On a GPU a head_dim whose rows are no multiple of 16 bytes costs a copy of the caches
            in each call, as in FlashAttention; new keys are written in place.
        k, v: ``[batch, seqlen_new, heads_k, head_dim]``: written to the slots from
            ``cache_seqlens`` on.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: k is rotated by its slot. Query i
            is rotated by ``cache_seqlens + i`` where a causal mask or a window is set, and all by
            ``cache_seqlens`` otherwise. Needs k.
        cache_seqlens: int32 ``[batch]`` or a number: slots in use before the call. Default: all.
        cache_batch_idx: int32 ``[batch]``: which row of the cache a sequence has. Default: its own.
        cache_leftpad: int32 ``[batch]``: slots at the front that hold no key.
        block_table: int32 ``[batch, max_pages]``.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in :func:`flash_attn_func`.
        rotary_interleaved: pairs are channels 2c and 2c + 1, else c and c + rotary_dim / 2.
        num_splits: a hint without effect.
        return_softmax_lse: also return the LSE.

    Returns:
        out, or ``(out, softmax_lse [batch, heads, seqlen_q])``. Has no gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was written.
        pantile.UnsupportedError: a tensor requires grad, or ALiBi slopes meet a cache whose pages
            are padded at the front or whose sequences do not follow each other in memory.
    """
    place = _cache.Place(
        *(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    )
    return _cache.attend(
        *(q, place, (k, v), _cache.Rotation(rotary_cos, rotary_sin, rotary_interleaved)),
        _cache.Mask(causal, _shared.window_of(window_size)),
        scale=softmax_scale,
        softcap=_shared.softcap_of(softcap),
        alibi=alibi_slopes,
        return_lse=return_softmax_lse,
    )


def _get_block_size_n(*_: object, **__: object) -> int:
    """Keys after which the scale of S_dmask changes; here it is one for the whole row."""
    return 2**30
