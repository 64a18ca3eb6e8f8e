"""The function that vLLM calls for prefill and decoding, with its names and argument order.

    from pantile.compat.vllm import flash_attn_varlen_func

An attention backend of vLLM or SGLang that hands packed queries and packed or paged keys to this
function runs on pantile: few queries a sequence by :func:`pantile.decode`, many by
:func:`pantile.varlen_attention`. Context parallelism of decoding is refused by name.
"""

from __future__ import annotations

from typing import Any

from pantile._arguments import shown
from pantile.compat import _cache, _shared
from pantile.compat._shared import Tensor
from pantile.compat.flash_attn_3 import _QV, attend

__all__ = ["flash_attn_varlen_func"]

_CP = "context parallelism over a cache is not served; leave it out"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 3,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attention of packed queries over packed or padded keys.

    Args:
        q: ``[total_q, heads_q, head_dim]``.
        k, v: ``[total_k, heads_k, head_dim]`` with ``cu_seqlens_k``; without it ``[batch, seqlen_k,
            heads_k, head_dim]``, of which ``seqused_k`` keys of each sequence exist.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``.
        seqused_k: int32 ``[batch]``.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in
            :func:`pantile.compat.flash_attn.flash_attn_varlen_func`.
        block_table: int32 ``[batch, max_pages]``: k and v are pages ``[pages, page_size, heads_k,
            head_dim]``; ``seqused_k`` or ``cu_seqlens_k`` says how many keys there are.
        q_v: refused.
        return_softmax_lse: also return the LSE ``[heads_q, total_q]``.
        out: ``[total_q, heads_q, head_dim_v]``: the output is written to it; of decoding and FP8
            operands it is copied.
        q_descale, k_descale, v_descale: float32 ``[batch, heads_k]``, of FP8 operands; one that is
            expanded is taken as it is.
        s_aux: sinks ``[heads_q]``.
        scheduler_metadata, num_splits, fa_version: hints without effect.
        return_attn_probs, cp_world_size, cp_rank, cp_tot_seqused_k: refused.

    Returns:
        out, or ``(out, softmax_lse)``.
    """
    _shared.refuse("q_v", q_v, _QV)
    _shared.refuse("cp_tot_seqused_k", cp_tot_seqused_k, _CP)
    _shared.refuse("cp_world_size", cp_world_size, _CP, absent=1)
    _shared.refuse("cp_rank", cp_rank, _CP, absent=0)
    _shared.refuse("return_attn_probs", return_attn_probs, "use return_softmax_lse", absent=False)
    if block_table is not None:
        return _paged(
            *(q, k, v, cu_seqlens_q, max_seqlen_q, cu_seqlens_k, seqused_k, block_table),
            *((q_descale, k_descale, v_descale), out, return_softmax_lse),
            mask=_cache.Mask(causal, _shared.window_of(window_size)),
            scale=softmax_scale,
            softcap=_shared.softcap_of(softcap),
            alibi=alibi_slopes,
            sinks=None if s_aux is None else s_aux.float(),
            dropout=_shared.dropout_of(dropout_p, q, False),
        )
    if cu_seqlens_k is None:
        k, v, cu_seqlens_k = _padded_keys(k, v, seqused_k)
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": _shared.longest_of("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": _shared.longest_of("max_seqlen_k", max_seqlen_k),
        "seqused_k": seqused_k,
    }
    variant = {
        "alibi": alibi_slopes,
        "sinks": None if s_aux is None else s_aux.float(),
        "dropout": _shared.dropout_of(dropout_p, q, False),
    }
    return attend(
        *(q, k, v, packing, (q_descale, k_descale, v_descale)),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_softmax_lse,
        variant=variant,
        out=out,
    )


def _paged(
    q, k, v, cu_q, longest_q, cu_k, used, table, descales, out, return_lse, *, mask, **how
) -> Any:
    if used is None:
        if cu_k is None:
            raise TypeError("cu_seqlens_k and seqused_k are None; one must say how many keys exist")
        used = cu_k.diff()
    longest = _shared.longest_of("max_seqlen_q", longest_q)
    place = _cache.Place(k, v, used, table=table, cu_q=cu_q, longest_q=longest)
    rotation = _cache.Rotation(None, None, False)
    return _cache.attend(
        q, place, (None, None), rotation, mask, descales, out=out, return_lse=return_lse, **how
    )


def _padded_keys(k: Tensor, v: Tensor, seqused_k: Tensor | None) -> tuple:
    """As packed ones: every sequence has room for all rows."""
    if seqused_k is None:
        raise TypeError("cu_seqlens_k and seqused_k are None; one of them must say where keys are")
    if k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"k is {shown(k)}; without cu_seqlens_k it must be [batch, seqlen_k, heads_k, head_dim]"
        )
    bounds = _shared.dense_bounds(k, k.shape[1])
    return k.flatten(0, 1), v.flatten(0, 1), bounds
