"""torch's flash attention operators of FP8 operands, for pantile.sdpa: forward only."""

from __future__ import annotations

import torch

from pantile import _C, fp8
from pantile._sdpa_outputs import in_strides_of
from pantile.compat import _shared


def _quantized(q, k, v, descales, packing: dict, dropout_p, causal, window, scale):
    if dropout_p != 0.0:
        raise _C.UnsupportedError(f"dropout_p is {dropout_p}; with FP8 operands it must be 0")
    names = ("descale_q", "descale_k", "descale_v")
    operands = fp8.quantize(q, k, v, **packing, **dict(zip(names, descales, strict=True)))
    o, lse = fp8.attention(operands, causal=causal, window=window, scale=scale, return_lse=True)
    state = (
        torch.empty(2, dtype=torch.uint64, device=q.device),
        torch.empty((), dtype=torch.uint64, device=q.device),
        torch.empty(0, dtype=o.dtype, device=q.device),
    )
    return o, lse, *state


def sdpa_quantized(
    query,
    key,
    value,
    q_descale,
    k_descale,
    v_descale,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    rows = (x.transpose(1, 2) for x in (query, key, value))
    descales = (q_descale, k_descale, v_descale)
    o, lse, *state = _quantized(*rows, descales, {}, dropout_p, is_causal, None, scale)
    out = in_strides_of(query.to(o.dtype), o.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], *state


def flash_quantized(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    q_descale,
    k_descale,
    v_descale,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
):
    _shared.refuse_operator_options(query, alibi_slopes, None, None)
    packing = {}
    if cum_seq_q is not None:
        packing = {
            "cu_seqlens_q": cum_seq_q,
            "cu_seqlens_k": cum_seq_k,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
            "seqused_k": seqused_k,
        }
    elif seqused_k is not None:
        raise _C.UnsupportedError("seqused_k is given without cum_seq_q; give both or none")
    window = _shared.window_of((window_size_left, window_size_right))
    descales = (q_descale, k_descale, v_descale)
    return _quantized(query, key, value, descales, packing, dropout_p, is_causal, window, scale)
