"""What type checkers infer of the public calls. Checked by mypy and pyright, never run.

``tests/python/test_types.py`` does that, and checks that each line marked ``error`` is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pantile
import torch
from typing_extensions import assert_type


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flag: bool) -> None:
    assert_type(pantile.attention(q, k, v), torch.Tensor)
    assert_type(pantile.attention(q, k, v, causal=True, window=(4, None)), torch.Tensor)
    o, lse = pantile.attention(q, k, v, return_lse=True)
    assert_type(o, torch.Tensor)
    assert_type(lse, torch.Tensor)
    assert_type(
        pantile.attention(q, k, v, return_max_logit=True), tuple[torch.Tensor, torch.Tensor]
    )
    assert_type(
        pantile.attention(q, k, v, return_lse=True, return_max_logit=True),
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    )
    assert_type(pantile.attention(q, k, v, out=q), torch.Tensor)
    either = pantile.attention(q, k, v, return_lse=flag)
    assert_type(either, torch.Tensor | tuple[torch.Tensor, ...])


def arrays(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any]) -> None:
    assert_type(pantile.attention(q, k, k), np.ndarray[Any, Any])
    o, lse = pantile.attention(q, k, k, return_lse=True)
    merged, _ = pantile.merge_attention([(o, lse), (o, lse)])
    assert_type(merged, np.ndarray[Any, Any])


def packed(q: torch.Tensor, k: torch.Tensor, bounds: torch.Tensor) -> None:
    assert_type(pantile.varlen_attention(q, k, k, bounds, bounds, 7, 7), torch.Tensor)
    assert_type(
        pantile.varlen_attention(q, k, k, bounds, None, 7, 7, seqused_k=bounds, block_table=k),
        torch.Tensor,
    )
    assert_type(pantile.varlen_attention(q, k, k, bounds, bounds, 7, 7, out=q), torch.Tensor)
    o, lse = pantile.varlen_attention(
        q, k, k, bounds, bounds, 7, 7, seqused_k=bounds, return_lse=True
    )
    assert_type(o, torch.Tensor)
    assert_type(lse, torch.Tensor)


def variants(
    q: torch.Tensor, slopes: torch.Tensor, ids: torch.Tensor, a: np.ndarray[Any, Any]
) -> None:
    dropout = pantile.Dropout(0.1, seed=7)
    o = pantile.attention(
        q, q, q, softcap=30.0, alibi=slopes, sinks=slopes, bias=q, dropout=dropout
    )
    assert_type(o, torch.Tensor)
    assert_type(pantile.attention(q, q, q, dropout=0.1, mask=ids > 0), torch.Tensor)
    mask = pantile.Documents(ids)
    assert_type(
        pantile.attention(q, q, q, mask=mask, return_lse=True), tuple[torch.Tensor, torch.Tensor]
    )
    blocks = pantile.BlockMask(ids > 0, block=128)
    assert_type(pantile.varlen_attention(q, q, q, ids, ids, 7, 7, mask=blocks), torch.Tensor)
    assert_type(pantile.dropout_mask(dropout, 1, 2, 3, 4), torch.Tensor)
    score = pantile.Score("s + table[h, i - j]", table=slopes)
    traced = pantile.Score(lambda s, b, h, i, j, w: s * w[h], w=slopes)
    either = pantile.Prefix(ids) | pantile.Documents(ids) & blocks
    assert_type(pantile.attention(q, q, q, score=score, mask=either), torch.Tensor)
    condition = pantile.Mask("i - j < 8 or j < 4")
    assert_type(
        pantile.varlen_attention(q, q, q, ids, ids, 7, 7, score=traced, mask=condition),
        torch.Tensor,
    )
    plan = pantile.explain(q, q, q, score=score, mask=condition)
    assert_type([kernel.origin for kernel in plan.forward.compiled], list[str])


def eight_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    operands = pantile.fp8.quantize(q, k, v, block=64, descale_q=None)
    assert_type(operands, pantile.Quantized)
    assert_type(operands.codes_q, torch.Tensor)
    assert_type(pantile.fp8.attention(operands, causal=True), torch.Tensor)
    o, lse = pantile.fp8.attention(operands, return_lse=True)
    assert_type(
        pantile.fp8.dequantize(operands, dtype=torch.float32, keep_mean=False),
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    )
    pantile.Options(fp8=True, fp8_backward="recompute")
    assert_type(lse, torch.Tensor)
    assert_type(pantile.attention(operands), torch.Tensor)
    assert_type(pantile.varlen_attention(operands, scale=0.5), torch.Tensor)
    assert_type(o, torch.Tensor)


def cached(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> None:
    cache = pantile.KVCache.paged(8, 16, 2, 64, dtype=torch.int8, scales="token")
    assert_type(cache, pantile.KVCache)
    assert_type(cache.scale_k, torch.Tensor | None)
    assert_type(pantile.decode(q, cache, lengths, split=512), torch.Tensor)
    o, lse = pantile.decode(q, cache, lengths, k_new=k, v_new=k, rotary=(k, k), return_lse=True)
    assert_type(o, torch.Tensor)
    assert_type(lse, torch.Tensor)
    assert_type(pantile.decode_schedule(q, cache, lengths, split="invariant"), torch.Tensor)
    pantile.append(cache, k, k, lengths)
    plan = pantile.explain_decode(q, cache, lengths)
    assert_type(plan.decode.kernel, str | None)


def options(q: torch.Tensor) -> None:
    softmax = pantile.experimental.SoftmaxOptions(softmax="tensor", tensor_share=0.5)
    chosen = pantile.Options(backend="ampere", softmax=softmax, output_dtype=torch.float32)
    plan = pantile.explain(q, q, q, options=chosen, verbose=True)
    assert_type(plan, pantile.Explanation)
    assert_type(plan.forward.kernel, str | None)
    assert_type(plan.forward.rows[0].reason, str)


def doors(q: torch.Tensor, ids: torch.Tensor) -> None:
    mask = pantile.FlexMask(causal=True, window=(4, None), mask=pantile.Documents(ids))
    pantile.flex_attention(q, q, q, block_mask=mask, enable_gqa=True)
    assert_type(pantile.checkpoint_save_ops(), set[Any])
    with pantile.compat.install("flash_attn", operators=True) as installed:
        assert_type(installed, pantile.compat.Installation)
    provider = pantile.sdpa.register(cpu=True)
    assert_type(provider, pantile.sdpa.Provider | None)


def mistakes(q: torch.Tensor, a: np.ndarray[Any, Any], bounds: torch.Tensor) -> None:
    pantile.attention(q, q)  # error: no v
    pantile.attention(q, q, a)  # error: two libraries
    pantile.attention(q, q, q, True)  # error: causal by position
    pantile.attention(q, q, q, is_causal=True)  # error: another library's name
    pantile.attention(q, q, q, window=4)  # error: one number
    pantile.attention(q, q, q, alibi=a)  # error: two libraries
    pantile.attention(q, q, q, dropout="0.1")  # error: not a number
    pantile.attention(q, q, q, score="s + j")  # error: a text, no Score
    pantile.attention(q, q, q, seqused_k=q)  # error: of packed tensors
    pantile.varlen_attention(q, q, q, bounds, bounds)  # error: no longest lengths
    pantile.Options(backend="tpu")  # error: no such backend
    pantile.Options(tensor_share=0.5)  # error: an experimental option
    pantile.flex_attention(q, q, q, block_mask=a)  # error: an array
    pantile.sdpa.register("pantile")  # error: by position
    pantile.fp8.attention(q)  # error: not quantized
    pantile.decode(q, q, bounds)  # error: no cache
    pantile.KVCache(q, q, layout="DHN")  # error: no such layout
