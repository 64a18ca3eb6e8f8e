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
    either = pantile.attention(q, k, v, return_lse=flag)
    assert_type(either, torch.Tensor | tuple[torch.Tensor, ...])


def arrays(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any]) -> None:
    assert_type(pantile.attention(q, k, k), np.ndarray[Any, Any])
    o, lse = pantile.attention(q, k, k, return_lse=True)
    merged, _ = pantile.merge_attention([(o, lse), (o, lse)])
    assert_type(merged, np.ndarray[Any, Any])


def packed(q: torch.Tensor, k: torch.Tensor, bounds: torch.Tensor) -> None:
    assert_type(pantile.varlen_attention(q, k, k, bounds, bounds, 7, 7), torch.Tensor)
    o, lse = pantile.varlen_attention(
        q, k, k, bounds, bounds, 7, 7, seqused_k=bounds, return_lse=True
    )
    assert_type(o, torch.Tensor)
    assert_type(lse, torch.Tensor)


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


def options(q: torch.Tensor) -> None:
    softmax = pantile.experimental.SoftmaxOptions(softmax="tensor", tensor_share=0.5)
    chosen = pantile.Options(backend="ampere", softmax=softmax, output_dtype=torch.float32)
    plan = pantile.explain(q, q, q, options=chosen, verbose=True)
    assert_type(plan, pantile.Explanation)
    assert_type(plan.forward.kernel, str | None)
    assert_type(plan.forward.rows[0].reason, str)


def mistakes(q: torch.Tensor, a: np.ndarray[Any, Any], bounds: torch.Tensor) -> None:
    pantile.attention(q, q)  # error: no v
    pantile.attention(q, q, a)  # error: two libraries
    pantile.attention(q, q, q, True)  # error: causal by position
    pantile.attention(q, q, q, is_causal=True)  # error: another library's name
    pantile.attention(q, q, q, window=4)  # error: one number
    pantile.varlen_attention(q, q, q, bounds, bounds)  # error: no longest lengths
    pantile.Options(backend="tpu")  # error: no such backend
    pantile.Options(tensor_share=0.5)  # error: an experimental option
    pantile.fp8.attention(q)  # error: not quantized
