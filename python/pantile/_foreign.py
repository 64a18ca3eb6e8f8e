"""Answers to arguments that other libraries have: their name here, or that it is not supported.

Of torch's scaled_dot_product_attention and FlexAttention, flash-attn 2 and 3, xFormers, FlashInfer
and cuDNN, from their documentation.
"""

from __future__ import annotations

import difflib
from typing import NoReturn

_NOT_SUPPORTED = "it is not supported; leave it out"
_PADDING = "it is not supported; pack the sequences for varlen_attention, or give it seqused_k"
_OPTIONS = "choose with options=pantile.Options({})"
_WINDOW = "use window, where None or -1 lifts a side"
_CACHE = (
    "use pantile.decode with a pantile.KVCache, or give the keys as k and v, and their number in "
    "seqused_k of varlen_attention"
)
_PAGED = "use varlen_attention, or pantile.decode with a pantile.KVCache of pages"
_ROTARY = "apply it to q and k first; pantile.decode and pantile.append have rotary"

# Arguments of attention() and varlen_attention() elsewhere.
_ANSWERS = {
    # masks
    "is_causal": "use causal, which is aligned to the bottom right",
    "causal_mask": "use causal",
    "attn_mask": "a bool mask is mask, a float one bias",
    "mask_mod": "use mask, with a bool tensor",
    "block_mask": "use mask, with pantile.BlockMask",
    "key_padding_mask": _PADDING,
    "padding_mask": _PADDING,
    "window_size": _WINDOW,
    "window_left": _WINDOW,
    "window_right": _WINDOW,
    "sliding_window": _WINDOW,
    "attention_chunk": _NOT_SUPPORTED,
    # scores
    "softmax_scale": "use scale",
    "sm_scale": "use scale",
    "attn_scale": "use scale",
    "scaling": "use scale",
    "score_mod": _NOT_SUPPORTED,
    "attn_bias": "use bias",
    "alibi_slopes": "use alibi",
    "logits_soft_cap": "use softcap",
    "learnable_sink": "use sinks, in float32",
    "s_aux": "use sinks, in float32",
    "dropout_p": "use dropout",
    "p": "use dropout",
    # operands
    "query": "use q",
    "key": "use k",
    "value": "use v",
    "qkv": "give q, k and v one by one; views of one tensor are taken without a copy",
    "kv": "give k and v one by one; views of one tensor are taken without a copy",
    "qv": _NOT_SUPPORTED,
    "enable_gqa": "leave it out; q may have a multiple of the heads of k",
    "pack_gqa": _NOT_SUPPORTED,
    "kv_layout": "leave it out; tensors are [batch, sequence, heads, head_dim], of any strides",
    "qkv_layout": "leave it out; tensors are [batch, sequence, heads, head_dim], of any strides",
    "tensor_layout": "leave it out; tensors are [batch, sequence, heads, head_dim], of any strides",
    "q_descale": "use pantile.fp8.quantize, with descale_q",
    "k_descale": "use pantile.fp8.quantize, with descale_k",
    "v_descale": "use pantile.fp8.quantize, with descale_v",
    "descale_q": "use pantile.fp8.quantize",
    "descale_k": "use pantile.fp8.quantize",
    "descale_v": "use pantile.fp8.quantize",
    # sequences and caches
    "cu_seqlens": "use varlen_attention, with cu_seqlens_q and cu_seqlens_k",
    "max_seqlen": "use varlen_attention, with max_seqlen_q and max_seqlen_k",
    "cu_seqlens_q": "use varlen_attention",
    "cu_seqlens_k": "use varlen_attention",
    "max_seqlen_q": "use varlen_attention",
    "max_seqlen_k": "use varlen_attention",
    "seqused_q": "use varlen_attention",
    "seqused_k": "use varlen_attention",
    "cu_seqlens_kv": "use cu_seqlens_k",
    "max_seqlen_kv": "use max_seqlen_k",
    "cache_seqlens": "use seqused_k of varlen_attention",
    "k_cache": _CACHE,
    "v_cache": _CACHE,
    "k_begin": "use varlen_attention",
    "mask_shift": "use varlen_attention",
    "block_table": _PAGED,
    "page_table": _PAGED,
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "rotary_interleaved": _ROTARY,
    # results
    "return_attn_probs": "use return_lse; probabilities are never stored",
    "return_softmax": "use return_lse; probabilities are never stored",
    "return_softmax_lse": "use return_lse",
    "return_aux": "use return_lse or return_max_logit",
    "need_weights": "use return_lse; probabilities are never stored",
    "out": "attention and varlen_attention have it; leave it out",
    # how it is computed
    "num_splits": _OPTIONS.format("num_splits=..."),
    "sm_margin": _NOT_SUPPORTED,
    "op": _OPTIONS.format("backend=..."),
    "backend": _OPTIONS.format("backend=..."),
    "fp8": _OPTIONS.format("fp8=True"),
    "checked": _OPTIONS.format("checked=True"),
    "output_dtype": _OPTIONS.format('output_dtype="float32"'),
    "softmax": _OPTIONS.format("softmax=..."),
    "kernel_options": "choose with options",
}


def refuse(function: str, extra: tuple, keywords: dict, known: tuple[str, ...]) -> NoReturn:
    """Raises for arguments that ``function`` does not have: too many by position, or keywords.

    ``known``: its own arguments that are given by name.
    """
    if extra:
        raise TypeError(
            f"{function}() takes no more arguments by position; give {', '.join(known)} by name"
        )
    name = next(iter(keywords))
    answer = None if name in known else _ANSWERS.get(name)
    if answer is None:
        near = difflib.get_close_matches(name, known, 1)
        answer = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
    raise TypeError(f"{function}() has no argument {name}: {answer}")
