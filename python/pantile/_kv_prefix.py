"""Decode of sequences that share a prefix: its keys are read once for all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pantile._arguments import flag, length
from pantile._kv import _cache, decode
from pantile._kv_cache import optional_tensor, tensor
from pantile._merge import merge_attention
from pantile._options import DEFAULT_OPTIONS, resolve_options

if TYPE_CHECKING:
    from pantile._kv import Split
    from pantile._kv_cache import KVCache
    from pantile._options import Options
    from pantile._types import Tensor


def _check_ints(name: str, x: Any, count: int | None, first: Tensor) -> None:
    """int32 ``[count]`` on the device of the cache; None: any count from 1 on."""
    import torch

    from pantile._fake import check_operand, require_dtype

    check_operand(name, tensor(name, x, "an int32 torch.Tensor"), first)
    require_dtype(name, x, torch.int32)
    if x.ndim != 1 or x.shape[0] != (max(x.shape[0], 1) if count is None else count):
        expected = "[groups + 1]" if count is None else f"[{count}]"
        raise ValueError(f"{name} has shape {list(x.shape)}; it must be {expected}")


def decode_shared_prefix(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    cu_members: Tensor,
    max_members: int,
    prefix_lengths: Tensor,
    block_table: Tensor | None = None,
    tree_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    split: Split = "auto",
    options: Options | None = None,
) -> Any:
    """:func:`pantile.decode` of groups of sequences that begin with the same keys.

    The queries of a group attend to its prefix together, as those of one sequence, each sequence to
    the keys behind it alone, and both are merged by their LSE: three steps on the device, whose
    sizes depend on capacities only. The result is that of ``decode`` up to rounding. It pays where
    a group is large and its prefix long.

    Args:
        q: ``[batch, n, heads_q, head_dim]``; the sequences of a group follow each other.
        cache: of pages.
        lengths: int32 ``[batch]``, keys of each sequence, prefix included; new keys have been
            appended (:func:`pantile.append`).
        cu_members: int32 ``[groups + 1]``: group g holds the sequences ``cu_members[g]`` to
            ``cu_members[g + 1] - 1``, all of them together ``batch``.
        max_members: sequences of the largest group.
        prefix_lengths: int32 ``[groups]``, keys that the sequences of a group share, 0 for none.
            They are read by the block_table of its first sequence. At most the length of each
            sequence less n: all queries see the whole prefix.
        block_table, tree_mask, sinks, softcap, scale, return_lse, split, options: as
            :func:`pantile.decode` takes them. The mask is causal.

    Returns:
        As :func:`pantile.decode`.

    Raises:
        TypeError, ValueError, pantile.UnsupportedError: as :func:`pantile.decode`.
    """
    import torch

    from pantile._fake import check_operand

    cache = _cache(cache)
    check_operand("q", tensor("q", q), cache.k)
    flag("return_lse", return_lse)
    table = (
        cache.block_table if optional_tensor("block_table", block_table) is None else block_table
    )
    if table is None:
        raise ValueError("block_table is None; a shared prefix needs a cache of pages")
    if q.ndim != 4:
        raise ValueError(f"q has {q.ndim} dimensions; it must have 4")
    _check_ints("lengths", lengths, q.shape[0], cache.k)
    _check_ints("cu_members", cu_members, None, cache.k)
    _check_ints("prefix_lengths", prefix_lengths, cu_members.shape[0] - 1, cache.k)
    members = length("max_members", max_members)
    batch, queries = q.shape[:2]
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    exact = dataclasses.replace(options, output_dtype="float32")
    common = {"scale": scale, "softcap": softcap, "split": split, "return_lse": True}
    o_prefix, lse_prefix = decode(
        q.flatten(0, 1),
        cache,
        prefix_lengths,
        cu_seqlens_q=cu_members * queries,
        max_seqlen_q=members * queries,
        cache_index=cu_members[:-1].contiguous(),
        block_table=table,
        causal=False,
        options=exact,
        **common,
    )
    sequence = torch.arange(batch, dtype=cu_members.dtype, device=q.device)
    group = torch.searchsorted(cu_members[1:].contiguous(), sequence, right=True)
    tail = decode(
        q,
        cache,
        lengths,
        leftpad=prefix_lengths[group],
        block_table=table,
        tree_mask=tree_mask,
        sinks=sinks,
        options=exact,
        **common,
    )
    prefix = (
        o_prefix.unflatten(0, (batch, queries)),
        lse_prefix.unflatten(1, (batch, queries)).transpose(0, 1),
    )
    o, lse = merge_attention([prefix, tail])
    o = o if options.output_f32 else o.to(q.dtype)
    return (o, lse) if return_lse else o
