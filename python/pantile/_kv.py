"""Inference over a cache: decode, append and their schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from pantile._arguments import (
    MAX_SEQLEN,
    choice,
    flag,
    integer,
    length,
    optional_scale,
    real,
    shown,
)
from pantile._kv_cache import KVCache, optional_tensor, tensor
from pantile._masks import window_bounds
from pantile._options import DEFAULT_OPTIONS, Options, resolve_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pantile._types import DecodeChoices, Rotary, Split, Tensor, Window

_SPLIT_GRANULE = 64  # keys; kSplitGranule of pantile/kv.h
_LATENT, _ROPE = 512, 64  # channels of a slot of a latent cache


def _split(split: object) -> tuple[str, int]:
    if isinstance(split, str):
        choice("split", split, ("auto", "invariant"))
        return ("automatic" if split == "auto" else "invariant"), 0
    keys = integer("split", split, '"auto", "invariant" or an integer')
    if not _SPLIT_GRANULE <= keys <= MAX_SEQLEN or keys % _SPLIT_GRANULE:
        raise ValueError(
            f'split is {shown(keys)}; it must be "auto", "invariant" or a positive multiple of '
            f"{_SPLIT_GRANULE} keys"
        )
    return "fixed", keys


def _options(options: object) -> Options:
    resolved = DEFAULT_OPTIONS if options is None else resolve_options(options)
    if resolved.fp8:
        raise ValueError("options.fp8 is True; an FP8 cache is a KVCache in float8_e4m3fn")
    if resolved is not DEFAULT_OPTIONS and resolved.softmax not in (
        "auto",
        "vector",
        DEFAULT_OPTIONS.softmax,
    ):
        raise ValueError(f"options.softmax is {shown(resolved.softmax)}; decode has no other one")
    return resolved


def _cache(cache: object) -> KVCache:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is {shown(cache)}; it must be a pantile.KVCache")
    return cache


def _arrays(
    cache: KVCache, lengths, block_table, cache_index, leftpad, cu_seqlens_q, cu_seqlens_new
) -> tuple:
    """The tensors of the cache, in the order of _kv_ops.CACHE."""
    tensor("lengths", lengths, "an int32 torch.Tensor")
    table = cache.block_table if block_table is None else tensor("block_table", block_table)
    if cache.pages and table is None:
        raise ValueError("block_table is None; a cache of pages needs one")
    arrays = {
        "cache_index": cache_index,
        "leftpad": leftpad,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_new": cu_seqlens_new,
    }
    return (
        cache.k,
        cache.v,
        cache.scale_k,
        cache.scale_v,
        lengths,
        table,
        *(optional_tensor(name, x) for name, x in arrays.items()),
    )


def _check_query(q: Any, cu_seqlens_q: object) -> None:
    rank = 4 if cu_seqlens_q is None else 3
    if tensor("q", q).ndim != rank:
        raise ValueError(f"q has {q.ndim} dimensions; it must have {rank}")


def _longest(name: str, value: object, packed: bool) -> int:
    if not packed:
        if value is not None:
            raise ValueError(f"{name} is {shown(value)}; it must be None unless packed")
        return 0
    if value is None:
        raise TypeError(f"{name} is missing; it must be the length of the longest sequence")
    return length(name, value)


def _rotary(rotary: object) -> tuple:
    if rotary is None:
        return None, None
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise TypeError(f"rotary is {shown(rotary)}; it must be a pair (cos, sin) or None")
    return tensor("rotary[0]", rotary[0]), tensor("rotary[1]", rotary[1])


def _new_rows(cache: KVCache, k_new, v_new, cu_seqlens_new, max_seqlen_new) -> int:
    """The longest of the new keys."""
    tensor("k_new", k_new)
    if (v_new is None) != (cache.v is None):
        have = "no v" if cache.v is None else "a v"
        raise ValueError(f"v_new is {shown(v_new)}; the cache has {have}")
    optional_tensor("v_new", v_new)
    packed = cu_seqlens_new is not None
    longest = _longest("max_seqlen_new", max_seqlen_new, packed)
    rank = 3 if packed else 4
    if k_new.ndim != rank:
        raise ValueError(f"k_new has {k_new.ndim} dimensions; it must have {rank}")
    return longest if packed else k_new.shape[1]


def _append(
    cache: KVCache, arrays, k_new, v_new, q, rotary, interleaved, longest_q, longest_new, options
):
    cos, sin = _rotary(rotary)
    from pantile import _kv_ops

    return _kv_ops.append(
        arrays,
        (k_new, v_new, q, cos, sin),
        (
            interleaved,
            longest_q,
            longest_new,
            cache.layout == "NHD",
            cache.head_dim_v,
            options.backend,
            options.checked,
        ),
    )


def append(
    cache: KVCache,
    k_new: Tensor,
    v_new: Tensor | None,
    lengths: Tensor,
    *,
    cu_seqlens_new: Tensor | None = None,
    max_seqlen_new: int | None = None,
    block_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    leftpad: Tensor | None = None,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    options: Options | None = None,
) -> None:
    """Writes new keys and values into the cache, in place, rotated and quantised.

    New key i of sequence b goes to slot ``lengths[b] + i``. A key whose slot lies outside of the
    sequence's table or of the cache is dropped; checked calls
    (``options=pantile.Options(checked=True)``), and all calls on the CPU, refuse it instead.
    Nothing else is written. Two sequences must not share the slots that are written.

    Args:
        cache: where to.
        k_new: ``[batch, n, heads_k, head_dim]``, or packed ``[total, heads_k, head_dim]`` with
            cu_seqlens_new; float32, float16 or bfloat16, and the dtype of the cache unless that has
            8 bits.
        v_new: the same with ``head_dim_v``; None where the cache has no v.
        lengths: int32 ``[batch]``, slots in use before the call; on the device of the cache and
            never read by the host, except by checked calls.
        cu_seqlens_new: int32 ``[batch + 1]``, bounds of packed new keys.
        max_seqlen_new: most new keys of a sequence; needed with cu_seqlens_new.
        block_table: int32 ``[sequences, pages]``; default: the cache's.
        cache_index: int32 ``[batch]``, the row of block_table, or of a dense cache, that a sequence
            uses.
        leftpad: int32 ``[batch]``, slots at the front without keys; positions count from there.
        rotary: (cos, sin), each ``[positions, rotary_dim / 2]`` in float32 or the dtype of k_new:
            the first ``rotary_dim`` channels of a key are rotated by position
            ``lengths[b] + i - leftpad[b]``; of a latent cache the last.
        rotary_interleaved: pairs are channels 2c and 2c + 1; else c and c + rotary_dim / 2.
        options: backend and checked are read.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was written.
        pantile.UnsupportedError: no compiled kernel serves the call, or a tensor requires grad.
    """
    cache = _cache(cache)
    flag("rotary_interleaved", rotary_interleaved)
    resolved = _options(options)
    longest = _new_rows(cache, k_new, v_new, cu_seqlens_new, max_seqlen_new)
    arrays = _arrays(cache, lengths, block_table, cache_index, leftpad, None, cu_seqlens_new)
    _append(cache, arrays, k_new, v_new, None, rotary, rotary_interleaved, 0, longest, resolved)


def _numbers(cache: KVCache, longest_q, seqlen_new, scale, causal, window, softcap, split, options):
    left, right = window_bounds(causal, window)
    if softcap is not None:
        softcap = real("softcap", softcap)
        if not 0.0 < softcap < float("inf"):
            raise ValueError(f"softcap is {softcap}; it must be positive and finite, or None")
    return (
        longest_q,
        seqlen_new,
        cache.layout == "NHD",
        cache.head_dim_v,
        optional_scale(scale),
        left,
        right,
        softcap or 0.0,
        *_split(split),
        options.backend,
    )


@overload
def decode(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **choices: Unpack[DecodeChoices],
) -> Tensor: ...
@overload
def decode(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    return_lse: Literal[True],
    **choices: Unpack[DecodeChoices],
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    return_lse: bool,
    **choices: Unpack[DecodeChoices],
) -> Tensor | tuple[Tensor, Tensor]: ...
def decode(
    q,
    cache,
    lengths,
    *,
    k_new=None,
    v_new=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    cu_seqlens_new=None,
    max_seqlen_new=None,
    block_table=None,
    cache_index=None,
    leftpad=None,
    rotary=None,
    rotary_interleaved=False,
    causal=True,
    window=None,
    tree_mask=None,
    sinks=None,
    softcap=None,
    scale=None,
    return_lse=False,
    split="auto",
    schedule=None,
    options=None,
) -> Any:
    """Attention of new queries to all keys of their sequences in a cache. No derivative.

    With k_new, :func:`pantile.append` runs first; the keys of sequence b are then its slots
    ``leftpad[b] <= j < lengths[b] + n``, without it ``leftpad[b] <= j < lengths[b]``. Other slots,
    and pages that are not named, are never read. Masks are aligned to the last key: query i of n
    sees the keys up to ``keys - n + i``.

    Args:
        q: ``[batch, n, heads_q, head_dim]``, or packed ``[total, heads_q, head_dim]`` with
            cu_seqlens_q; float32, float16 or bfloat16. heads_q is a multiple of heads_k.
        cache, lengths, k_new, v_new, cu_seqlens_new, max_seqlen_new, block_table, cache_index,
            leftpad: as :func:`pantile.append` takes them. Several sequences may use one row of
            the cache if nothing is appended.
        cu_seqlens_q: int32 ``[batch + 1]``, bounds of packed queries.
        max_seqlen_q: most queries of a sequence; needed with cu_seqlens_q.
        rotary, rotary_interleaved: for k_new and, at the same positions, for q.
        causal, window: as :func:`pantile.attention` takes them.
        tree_mask: int64 ``[batch, n]``, packed ``[total]``, n at most 64: bit j of query i: that
            it sees draft token j, key ``keys - n + j``; earlier keys are all seen.
        sinks: float32 ``[heads_q]``: logits of a key without a value, one a head.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        scale: of q k^T; default ``head_dim ** -0.5``.
        return_lse: also the natural logarithm of the sum of weights, float32
            ``[batch, heads_q, n]``, packed ``[heads_q, total]``; -inf for a query without keys.
        split: where keys are cut into parts that are computed apart. ``"auto"``: where the device
            is used best. ``"invariant"``: by the sequence's own length, so that its bits do not
            depend on the batch. An integer, a multiple of 64: after that many keys, so that the
            bits of a query do not depend on how many queries come with it, either.
        schedule: of :func:`pantile.decode_schedule`, for the same lengths.
        options: backend, checked and output_dtype are read.

    Returns:
        o, ``[batch, n, heads_q, head_dim_v]`` or packed, in the dtype of q; with return_lse
        (o, lse).

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched or written, except that
            checks of decode follow the append.
        pantile.UnsupportedError: no compiled kernel serves the call, or a tensor requires grad.
    """
    from pantile import _kv_ops

    cache = _cache(cache)
    _check_query(q, cu_seqlens_q)
    for name, value in (("return_lse", return_lse), ("rotary_interleaved", rotary_interleaved)):
        flag(name, value)
    options = _options(options)
    longest_q = _longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q is not None)
    arrays = _arrays(
        cache, lengths, block_table, cache_index, leftpad, cu_seqlens_q, cu_seqlens_new
    )
    for name, x in (("tree_mask", tree_mask), ("sinks", sinks), ("schedule", schedule)):
        optional_tensor(name, x)
    longest_new = 0
    if k_new is not None:
        longest_new = _new_rows(cache, k_new, v_new, cu_seqlens_new, max_seqlen_new)
    elif v_new is not None or cu_seqlens_new is not None:
        given = "v_new" if v_new is not None else "cu_seqlens_new"
        raise ValueError(f"{given} is set; it needs k_new")
    numbers = _numbers(
        cache, longest_q, longest_new, scale, causal, window, softcap, split, options
    )
    if rotary is not None and k_new is None:
        k_new = q.new_empty((lengths.shape[0], 0, cache.heads_k, cache.head_dim))
        if cache.v is not None:
            v_new = q.new_empty((lengths.shape[0], 0, cache.heads_k, cache.head_dim_v))
    if k_new is not None:
        rows = q if rotary is not None else None
        rotated = _append(
            cache,
            arrays,
            k_new,
            v_new,
            rows,
            rotary,
            rotary_interleaved,
            longest_q,
            longest_new,
            options,
        )
        q = q if rows is None else rotated
    flags = return_lse, options.output_f32, options.checked
    o, lse = _kv_ops.decode(arrays, q, tree_mask, sinks, schedule, numbers, flags)
    return (o, lse) if return_lse else o


def decode_schedule(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    seqlen_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    leftpad: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    tree_mask: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    split: Split = "auto",
    options: Options | None = None,
) -> Tensor:
    """How the decodes of one step cut their work: made once, given to the decode of every layer.

    Without it each :func:`pantile.decode` makes its own. Its size depends on the capacity of the
    cache alone, so that a CUDA graph may hold the call.

    Args:
        q: of the shape, dtype and device of the queries; its values are not read.
        seqlen_new: new keys that each decode appends (with cu_seqlens_new the most of a sequence).
        tree_mask, sinks, return_lse: whether the decodes have them.
        cache, lengths, cu_seqlens_q, max_seqlen_q, cu_seqlens_new, block_table, cache_index,
            leftpad, causal, window, softcap, split, options: as the decodes get them.

    Returns:
        int32, of a form of its own.

    Raises:
        TypeError, ValueError, pantile.UnsupportedError: as :func:`pantile.decode`.
    """
    from pantile import _kv_ops

    cache = _cache(cache)
    _check_query(q, cu_seqlens_q)
    resolved = _options(options)
    for name, value in (("tree_mask", tree_mask), ("sinks", sinks), ("return_lse", return_lse)):
        flag(name, value)
    longest_q = _longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q is not None)
    arrays = _arrays(
        cache, lengths, block_table, cache_index, leftpad, cu_seqlens_q, cu_seqlens_new
    )
    new = length("seqlen_new", seqlen_new)
    numbers = _numbers(cache, longest_q, new, None, causal, window, softcap, split, resolved)
    flags = tree_mask, sinks, return_lse, resolved.output_f32, resolved.checked
    return _kv_ops.decode_schedule(arrays, q, numbers, flags)


def _joined(name: str, x: Any, other_name: str, other: Any) -> Any:
    """Side by side along the last axis."""
    import torch

    if x.shape[:-1] != other.shape[:-1] or x.dtype is not other.dtype:
        raise ValueError(
            f"{other_name} is {shown(other)} and {name} {shown(x)}; they must be alike but for the "
            "last axis"
        )
    return torch.cat((x, other), -1)


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    scale: float,
    latent_new: Tensor | None = None,
    rope_new: Tensor | None = None,
    **others: Any,
) -> Any:
    """Decode of multi-head latent attention (MLA), in its absorbed form.

    A slot of the cache holds one head of 512 latent channels and 64 rotary ones; the values are the
    latent channels. ``score = scale * (q_nope . latent + q_rope . rope)``.

    Args:
        q_nope: ``[batch, n, heads, 512]`` or packed ``[total, heads, 512]``: queries times the
            up-projection of the keys.
        q_rope: the same with 64 channels.
        cache: ``KVCache.paged(..., heads_k=1, head_dim=576, head_dim_v=512, latent=True)``, or of
            the caller's tensors with ``v=None`` and ``head_dim_v=512``.
        scale: as the model defines it, of its unabsorbed head dim.
        latent_new: ``[batch, m, 512]`` or packed ``[total, 512]``, appended with rope_new of
            64 channels.
        lengths, others: as :func:`pantile.decode` takes them, k_new and v_new excepted. ``rotary``
            turns q_rope and rope_new.

    Returns:
        o, ``[batch, n, heads, 512]`` or packed, still to be multiplied by the up-projection of the
        values; with return_lse (o, lse).

    Raises:
        TypeError, ValueError, pantile.UnsupportedError: as :func:`pantile.decode`.
    """

    from pantile._fake import check_operand

    cache = _cache(cache)
    for name, x, dim in (
        ("q_nope", q_nope, _LATENT),
        ("q_rope", q_rope, _ROPE),
        ("latent_new", latent_new, _LATENT),
        ("rope_new", rope_new, _ROPE),
    ):
        if x is None and name.endswith("new"):
            continue
        check_operand(name, tensor(name, x), cache.k)
        if x.ndim < 2 or x.shape[-1] != dim:
            raise ValueError(f"{name} has shape {list(x.shape)}; its last axis must be {dim}")
    expected = (1, _LATENT + _ROPE, _LATENT)
    if cache.v is not None or (cache.heads_k, cache.head_dim, cache.head_dim_v) != expected:
        raise ValueError(
            f"cache has {cache.heads_k} heads of {cache.head_dim} channels and v "
            f"{'None' if cache.v is None else 'set'}; a latent cache has one head of 576 channels, "
            "no v, and head_dim_v 512"
        )
    for name in ("k_new", "v_new"):
        if name in others:
            raise TypeError(f"mla_decode() has no argument {name}: give latent_new and rope_new")
    if (latent_new is None) != (rope_new is None):
        raise ValueError("latent_new and rope_new must be given together")
    k_new = None
    if latent_new is not None:
        k_new = _joined("latent_new", latent_new, "rope_new", rope_new).unsqueeze(-2)
    q = _joined("q_nope", q_nope, "q_rope", q_rope)
    return decode(q, cache, lengths, k_new=k_new, scale=scale, **others)
