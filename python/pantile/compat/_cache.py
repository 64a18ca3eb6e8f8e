"""The FlashAttention doors over a key-value cache, by decode or by chunked prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pantile import _C
from pantile._arguments import integer, shown
from pantile._attention import load_torch
from pantile._expressions import Score
from pantile._kv import _append, _arrays, _new_rows, append, decode
from pantile._kv_cache import KVCache
from pantile._options import DEFAULT_OPTIONS
from pantile._varlen import varlen_attention
from pantile.compat import _shared
from pantile.compat._shared import Tensor

_FP8 = torch.float8_e4m3fn
# Queries of a sequence from which on the forward kernels, which share a tile of keys among many
# rows, take the call; below, decode splits the keys.
_PREFILL_ROWS = 65


@dataclass(frozen=True)
class Place:
    """Where the keys of a call are, and where its queries and new keys are packed."""

    k_cache: Tensor
    v_cache: Tensor
    lengths: Any  # int32 [batch], a number, or None: the cache is full
    index: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    cu_q: Tensor | None = None
    longest_q: int | None = None
    cu_new: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        slots = self.k_cache.shape[1]
        return slots if self.table is None else slots * self.table.shape[1]


@dataclass(frozen=True)
class Rotation:
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    # Positions of the first new key, in place of those of the cache. Callers give them without a
    # rotation, too, which they do not change then.
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Mask:
    causal: bool
    window: tuple[int, int] | None
    chunk: int = 0  # queries see the keys of their own chunk of so many; 0: no chunks

    def moves(self, capacity: int) -> bool:
        """Whether queries of one sequence see different keys, as FlashAttention decides it."""
        return self.causal or any(0 <= side < capacity for side in self.window or ())


def attend(
    q: Tensor,
    place: Place,
    new: tuple[Tensor | None, Tensor | None],
    rotation: Rotation,
    mask: Mask,
    descales: tuple = (None, None, None),
    *,
    scale: float | None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: Any = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """o or (o, lse). ``new``: keys and values that are written into the cache first."""
    load_torch()
    k_cache, v_cache = place.k_cache, place.v_cache
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor) or x.ndim != (3 if x is q and place.cu_q is not None else 4):
            raise ValueError(f"{name} is {shown(x)}; it must be a tensor of rows of a cache call")
    _refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, k=new[0], v=new[1])
    place = replace(place, lengths=_lengths(q, place, new[0]))
    q, cache, writer, new = _records(q, place, new, descales)
    rotary, q, new = _rotate(q, place, new, rotation, mask, writer is cache)
    how = {"scale": scale, "softcap": softcap, "sinks": sinks, "return_lse": return_lse}
    how |= {"causal": mask.causal, "window": mask.window}
    decodes = not (alibi is not None or dropout is not None or mask.chunk)
    decodes = decodes and not _is_prefill(q, place, cache)
    if not decodes:
        _check_prefill(place, cache, mask)
    is_narrow = any(x.shape[-1] % _columns(q, cache) for x in (k_cache, v_cache))
    if decodes and not is_narrow:
        answer = _decoded(q, place, cache, writer, new, rotary, rotation.interleaved, how)
        return _answered(answer, out, return_lse)
    if rotary is not None:
        q = _written(q, place, writer, new, rotary, rotation.interleaved)
    elif new[0] is not None:
        append(writer, *new, place.lengths, **_packing_of_new(place, new), **_slots(place))
    place = replace(place, lengths=_after(place, new))
    if not is_narrow:
        how |= {"alibi": alibi, "dropout": dropout}
        return _prefill(q, place, cache, how, mask.chunk, out)
    q, cache, how = _widened(q, cache, how)
    if decodes:
        answer = _decoded(q, place, cache, cache, (None, None), None, False, how)
    else:
        how |= {"alibi": alibi, "dropout": dropout}
        answer = _prefill(q, place, cache, how, mask.chunk, None)
    o, lse = answer if return_lse else (answer, None)
    o = o[..., : v_cache.shape[-1]].contiguous()
    return _answered(o if lse is None else (o, lse), out, return_lse)


def _answered(answer: Any, out: Tensor | None, has_lse: bool) -> Any:
    if out is None:
        return answer
    if has_lse:
        return _shared.written_to(out, answer[0]), answer[1]
    return _shared.written_to(out, answer)


# ---- head dims that kernels for GPUs do not read in place


def _columns(q: Tensor, cache: KVCache) -> int:
    """Head dims must be multiples of this many elements, on a GPU 16 bytes."""
    return 1 if q.device.type == "cpu" else 16 // cache.k.element_size()


def _widened(q: Tensor, cache: KVCache, how: dict) -> tuple:
    """(q, cache, how) with zeros behind the columns, in copies. FlashAttention makes the same
    copies of the whole cache; new keys are in the caller's cache by now."""
    columns = _columns(q, cache)
    scale = q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"]
    k, v = _padded(cache.k, columns), _padded(cache.v, columns)
    wide = replace(cache, k=k, v=v, head_dim_v=None)
    return _padded(q, columns), wide, {**how, "scale": scale}


def _padded(x: Tensor, columns: int) -> Tensor:
    missing = -x.shape[-1] % columns
    if not missing:
        return x
    if x.dtype is _FP8:  # has no padding of its own
        return torch.nn.functional.pad(x.view(torch.uint8), (0, missing)).view(_FP8)
    return torch.nn.functional.pad(x, (0, missing))


def _refuse_gradients(**tensors: Tensor | None) -> None:
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x is not None and x.requires_grad:
                raise _C.UnsupportedError(
                    f"{name} requires grad; attention over a cache has no backward, call it under "
                    "torch.no_grad()"
                )


def _batch(q: Tensor, place: Place) -> int:
    return q.shape[0] if place.cu_q is None else place.cu_q.shape[0] - 1


def _lengths(q: Tensor, place: Place, k: Tensor | None) -> Tensor:
    if isinstance(place.lengths, Tensor):
        return place.lengths
    if place.lengths is None:
        if k is not None:
            raise ValueError("cache_seqlens is None; with k it must say where the new keys go")
        number = place.capacity
    else:
        number = integer("cache_seqlens", place.lengths, "an int32 tensor or an integer")
    return torch.full((_batch(q, place),), number, dtype=torch.int32, device=q.device)


# ---- rotary embedding


def _rotate(
    q: Tensor, place: Place, new: tuple, rotation: Rotation, mask: Mask, one_record: bool
) -> tuple:
    """(what the kernel that appends rotates with, q, new).

    FlashAttention's positions count from slot 0, whatever the padding, and queries that all see
    the same keys share the position of the first. pantile's append does neither; torch rotates
    then, and codes, which are written and read by two records.
    """
    given = {"rotary_cos": rotation.cos, "rotary_sin": rotation.sin}
    if all(x is None for x in given.values()):
        return None, q, new
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[0] < place.capacity:
            raise ValueError(
                f"{name} is {shown(x)}; it must be [positions, rotary_dim / 2] with a position for "
                f"each of the {place.capacity} slots of a sequence"
            )
    if new[0] is None:
        raise ValueError("rotary_cos is given without k; only calls with new keys rotate")
    moves = mask.moves(place.capacity) or (place.cu_q is None and q.shape[1] == 1)
    if moves and one_record and place.leftpad is None and rotation.lengths is None:
        return (rotation.cos, rotation.sin), q, new
    starts = place.lengths if rotation.lengths is None else rotation.lengths
    q = _turned(q, place.cu_q, starts, rotation, moves)
    return None, q, (_turned(new[0], place.cu_new, starts, rotation, True), new[1])


def _positions(x: Tensor, bounds: Tensor | None, starts: Tensor, moves: bool) -> Tensor:
    """Of the rows of x, in the shape of its axes before heads."""
    rows = torch.arange(x.shape[0 if bounds is not None else 1], device=x.device)
    if bounds is None:
        return starts.long()[:, None] + (rows if moves else torch.zeros_like(rows))
    sequence = torch.searchsorted(bounds[1:].contiguous(), rows.int(), right=True)
    sequence = sequence.clamp_max(starts.shape[0] - 1)  # rows behind the last belong to nobody
    return starts.long()[sequence] + (rows - bounds[sequence] if moves else 0)


def _turned(x: Tensor, bounds: Tensor | None, starts: Tensor, by: Rotation, moves: bool) -> Tensor:
    """x rotated in float32 and rounded once."""
    assert by.cos is not None
    assert by.sin is not None
    # Positions behind the table are those of rows without a slot.
    at = _positions(x, bounds, starts, moves).clamp_(0, by.cos.shape[0] - 1)
    cos, sin = by.cos.float()[at][..., None, :], by.sin.float()[at][..., None, :]
    pairs = 2 * by.cos.shape[1]
    head = x[..., :pairs].float()
    a, b = (head[..., ::2], head[..., 1::2]) if by.interleaved else head.chunk(2, -1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if by.interleaved else -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., pairs:]), -1)


# ---- the record of the cache


def _records(q: Tensor, place: Place, new: tuple, descales: tuple) -> tuple:
    """(q, cache to read, cache to write, new) in forms that decode and append take."""
    k_cache, v_cache, paged = place.k_cache, place.v_cache, place.table is not None
    names = ("q_descale", "k_descale", "v_descale")
    if k_cache.dtype is not _FP8:
        for name, x in zip(names, descales, strict=True):
            if x is not None:
                raise ValueError(
                    f"{name} is {shown(x)}; it goes with a cache in float8_e4m3fn, k_cache has "
                    f"{k_cache.dtype}"
                )
        cache = KVCache(k_cache, v_cache, pages=paged)
        return q, cache, cache, new
    q_descale, k_descale, v_descale = descales
    if q.dtype is not _FP8 and q_descale is not None:
        raise ValueError(f"q_descale is {shown(q_descale)}; it goes with q in float8_e4m3fn")
    one = torch.ones((), dtype=torch.float32, device=q.device)
    scale_k = one if k_descale is None else k_descale
    scale_v = one if v_descale is None else v_descale
    cache = KVCache(k_cache, v_cache, scale_k=scale_k, scale_v=scale_v, pages=paged)
    if q.dtype is not _FP8:
        return q, cache, cache, new
    # bfloat16 holds every code exactly; the scale of q goes to that of k, which it multiplies.
    if q_descale is not None:
        cache = replace(cache, scale_k=scale_k * q_descale)
    codes = tuple(None if x is None else x.to(torch.bfloat16) for x in new)
    for name, x in zip("kv", new, strict=True):
        if x is not None and x.dtype is not _FP8:
            raise ValueError(f"{name} has {x.dtype}; q is float8_e4m3fn, so it must be, too")
    return q.to(torch.bfloat16), cache, replace(cache, scale_k=one, scale_v=one), codes


# ---- the two engines


def _is_prefill(q: Tensor, place: Place, cache: KVCache) -> bool:
    """Many queries, where chunked prefill can say where the keys are."""
    longest = place.longest_q if place.cu_q is not None else q.shape[1]
    if longest is None or longest < _PREFILL_ROWS or cache.k.dtype is _FP8:
        return False
    return place.leftpad is None if place.table is not None else _is_flat(place)


def _is_flat(place: Place) -> bool:
    """Whether the rows of a dense cache follow each other."""
    return all(
        x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
        for x in (place.k_cache, place.v_cache)
    )


def _packing_of_new(place: Place, new: tuple) -> dict:
    if place.cu_new is None:
        return {}
    # No sequence has more than all of them.
    return {"cu_seqlens_new": place.cu_new, "max_seqlen_new": new[0].shape[0]}


def _slots(place: Place) -> dict:
    return {
        "block_table": place.table,
        "cache_index": place.index,
        "leftpad": place.leftpad,
    }


def _after(place: Place, new: tuple) -> Tensor:
    """Slots in use after the append."""
    if new[0] is None:
        return place.lengths
    if place.cu_new is None:
        return place.lengths + new[0].shape[1]
    return place.lengths + place.cu_new.diff()


def _decoded(q, place, cache, writer, new, rotary, interleaved, how):
    change = dict(how)
    lengths = place.lengths
    if place.cu_q is not None:
        change |= {"cu_seqlens_q": place.cu_q, "max_seqlen_q": place.longest_q}
    if writer is cache and new[0] is not None:
        change |= {"k_new": new[0], "v_new": new[1], **_packing_of_new(place, new)}
        if rotary is not None:
            change |= {"rotary": rotary, "rotary_interleaved": interleaved}
    elif new[0] is not None:
        append(writer, *new, lengths, **_packing_of_new(place, new), **_slots(place))
        lengths = _after(place, new)
    return decode(q, cache, lengths, **_slots(place), **change)


def _check_prefill(place: Place, cache: KVCache, mask: Mask) -> None:
    """Before anything is written."""
    what = "attention_chunk" if mask.chunk else "alibi_slopes or dropout"
    if cache.k.dtype is _FP8 and not mask.chunk:
        raise _C.UnsupportedError(
            f"k_cache is in float8_e4m3fn; with {what} it must have 16 or 32 bits"
        )
    if place.table is not None and place.leftpad is not None and not mask.chunk:
        raise _C.UnsupportedError(f"cache_leftpad is given; with {what} and pages it must be None")
    if place.table is None and not _is_flat(place):
        raise _C.UnsupportedError(
            f"k_cache has strides {place.k_cache.stride()} and v_cache {place.v_cache.stride()}; "
            f"with {what} the sequences must follow each other in memory"
        )


def _written(q, place, cache, new, rotary, interleaved) -> Tensor:
    """Appends, and returns q rotated by the same kernel."""
    packing = _packing_of_new(place, new)
    longest_new = _new_rows(
        cache, *new, packing.get("cu_seqlens_new"), packing.get("max_seqlen_new")
    )
    arrays = _arrays(
        *(cache, place.lengths, place.table, place.index, place.leftpad),
        *(place.cu_q, place.cu_new),
    )
    longest = 0 if place.cu_q is None else place.longest_q
    return _append(
        *(cache, arrays, *new, q, rotary, interleaved, longest, longest_new, DEFAULT_OPTIONS)
    )


def _prefill(q, place: Place, cache: KVCache, how: dict, chunk: int, out) -> Any:
    if chunk:
        return _chunked(q, place, cache, how, chunk, out)
    return _prefilled(q, place, cache, how, out)


def _chunked(q, place: Place, cache: KVCache, how: dict, chunk: int, out) -> Any:
    """With a mask of chunks, which also hides the padding. Codes are widened, in a copy."""
    used = place.lengths
    rows = q.shape[1] if place.cu_q is None else place.cu_q.diff()
    how = {**how, "mask": _shared.chunk_mask(chunk, used - rows, place.leftpad)}
    how["window"] = _shared.chunk_window(chunk, how["window"])
    place = replace(place, leftpad=None)
    if cache.k.dtype is not _FP8:
        return _prefilled(q, place, cache, how, out)
    scales = [_for_queries(x, used.shape[0], cache, q) for x in (cache.scale_k, cache.scale_v)]
    how["score"] = Score("s * scale[b, h]", scale=scales[0])
    wide = KVCache(cache.k.to(q.dtype), cache.v.to(q.dtype), pages=place.table is not None)
    answer = _prefilled(q, place, wide, how, None)
    o, lse = answer if how["return_lse"] else (answer, None)
    factor = scales[1][:, None, :, None]
    if place.cu_q is not None:
        factor = torch.repeat_interleave(scales[1], rows, 0, output_size=q.shape[0])[..., None]
    o = _shared.written_to(out, (o * factor).to(o.dtype))
    return o if lse is None else (o, lse)


def _for_queries(scale: Tensor, batch: int, cache: KVCache, q: Tensor) -> Tensor:
    """float32 [batch, heads_q] of a scale, [batch, heads_k] or a number."""
    heads_k, heads = cache.k.shape[2], q.shape[-2]
    return scale.float().expand(batch, heads_k).repeat_interleave(heads // heads_k, 1)


def _prefilled(q, place, cache, how, out):
    """With the keys that are in the cache: ``place.lengths`` counts all of them."""
    used = place.lengths
    if place.table is not None:
        table = place.table if place.index is None else place.table[place.index]
        k, v, where = cache.k, cache.v, {"block_table": table, "seqused_k": used}
    else:
        rows = place.index
        if rows is None:
            rows = torch.arange(used.shape[0], dtype=torch.int32, device=q.device)
        begin = rows * place.capacity
        if place.leftpad is not None:
            begin, used = begin + place.leftpad, used - place.leftpad
        k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        where = {"k_begin": begin, "seqused_k": used}
    packed = place.cu_q is not None
    bounds = place.cu_q if packed else _shared.dense_bounds(q, q.shape[1])
    longest = place.longest_q if packed else q.shape[1]
    rows_q = q if packed else q.flatten(0, 1)
    if out is not None and not packed:
        out = out.view(rows_q.shape[0], *out.shape[2:])
    answer = varlen_attention(
        *(rows_q, k, v, bounds, None, longest, place.capacity), **where, **how, out=out
    )
    if packed:
        return answer
    o, lse = answer if how["return_lse"] else (answer, None)
    o = o.view(*q.shape[:-1], o.shape[-1])
    if lse is None:
        return o
    return o, lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1).contiguous()
