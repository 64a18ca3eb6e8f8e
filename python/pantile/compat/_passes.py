"""The passes of FlashAttention-2 one by one, below autograd: names that start with an underscore
there, which ring attention and others call. Gradients are written to the tensors that are given."""

from __future__ import annotations

from typing import Any

import torch

from pantile import _direct
from pantile._schema import Variant
from pantile._variant_ops import ONLY_OPERANDS, explained_variant
from pantile._variant_ops import _run_backward as run_variant_backward
from pantile._variants import resolve_variant
from pantile.compat import _shared
from pantile.compat._operators import call_of
from pantile.compat._shared import Tensor

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]


def _variant(q: Tensor, softcap: Any, alibi: Any, dropout_p: Any, seed: Any) -> Variant | None:
    drop = _shared.dropout_of(dropout_p, q, False)
    resolved = resolve_variant(_shared.softcap_of(softcap), alibi, dropout=drop)
    if resolved is None:
        return None
    variant, chosen = resolved
    if chosen is not None:
        variant = variant._replace(dropout_seed=seed)
    return explained_variant(variant, q)


def _new_seed(q: Tensor, dropout_p: Any) -> Tensor:
    if dropout_p:
        return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return torch.empty(2, dtype=torch.int64, device=q.device)


def _forward(q, k, v, packing, dropout_p, scale, causal, window, softcap, alibi, return_softmax):
    with torch.no_grad():
        seed = _new_seed(q, dropout_p)
        variant = _variant(q, softcap, alibi, dropout_p, seed)
        call = call_of(packing, scale, causal, window)
        o, lse, _, _ = _direct.run_forward(q, k, v, call, False, True, None, False, variant)
        weights = q.new_empty(0)
        if return_softmax and dropout_p:
            lengths = longest = None
            if packing:
                bounds = packing["cu_seqlens_q"], packing["cu_seqlens_k"]
                lengths = _shared.sequences(*bounds)
                longest = packing["max_seqlen_q"], packing["max_seqlen_k"]
            weights = _shared.signed_weights(
                *(q, k, _shared.Dropout(dropout_p, seed=seed)),
                scale=scale,
                causal=causal,
                window=_shared.window_of(window),
                softcap=_shared.softcap_of(softcap),
                alibi=alibi,
                lengths=lengths,
                longest=longest,
            )
    return o, lse, weights, seed


def _backward(dout, q, k, v, out, lse, places, packing, how, deterministic, seed) -> Tensor:
    """softmax_d: rowsum(dO * O), in the layout of the LSE."""
    dropout_p, scale, causal, window, softcap, alibi = how
    with torch.no_grad():
        if dropout_p and seed is None:
            raise ValueError("rng_state is None; with dropout it must be that of the forward")
        variant = _variant(q, softcap, alibi, dropout_p, seed)
        call = call_of(packing, scale, causal, window)
        tensors = (dout, None, q, k, v, out, None, lse)
        if variant is None:
            grads = _direct.run_backward(*tensors, call, deterministic)
        else:
            grads = run_variant_backward(*tensors, variant, call, deterministic, ONLY_OPERANDS)[:3]
        for name, place, grad in zip(("dq", "dk", "dv"), places, grads, strict=True):
            if place is not None:
                _shared.written_to(place, grad, name)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state); rng_state is the seed of pantile.Dropout."""
    window = (window_size_left, window_size_right)
    how = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    return _forward(q, k, v, {}, *how, return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """softmax_d; the gradients are in dq, dk and dv."""
    window = (window_size_left, window_size_right)
    how = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    places = (dq, dk, dv)
    return _backward(dout, q, k, v, out, softmax_lse, places, {}, how, deterministic, rng_state)


def _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=None) -> dict:
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": _shared.longest_of("max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": _shared.longest_of("max_seqlen_k", max_seqlen_k),
        "seqused_k": seqused_k,
    }


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`_flash_attn_forward`. ``zero_tensors`` asks for what always is: rows
    of no sequence are zero."""
    _shared.refuse("block_table", block_table, _shared.PAGED)
    _shared.refuse("leftpad_k", leftpad_k, _shared.CACHE)
    window = (window_size_left, window_size_right)
    how = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    return _forward(q, k, v, packing, *how, return_softmax)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As :func:`_flash_attn_backward`."""
    window = (window_size_left, window_size_right)
    how = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    places = (dq, dk, dv)
    return _backward(
        dout, q, k, v, out, softmax_lse, places, packing, how, deterministic, rng_state
    )


# Registered with torch there; here the functions themselves.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
