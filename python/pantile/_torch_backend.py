"""``Options(backend="torch")``: torch's own attention, as a way back that is always there.

``torch.nn.functional.scaled_dot_product_attention`` of whatever torch chooses (flash, cuDNN,
memory-efficient, plain), with its gradients. What it does not serve is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pantile import _C, _watch
from pantile._arguments import shown
from pantile._masks import UNBOUNDED
from pantile._schema import LENGTHS
from pantile._variants import Dropout, resolve_variant

if TYPE_CHECKING:
    from pantile._options import Options


def _refuse(text: str) -> None:
    raise _C.UnsupportedError(f"options.backend is torch: {text}")


def require_served(call: Any, change: tuple, options: Options, asked: tuple, out: Any) -> None:
    """Raises where torch has no such attention. ``change``: the values of
    pantile._variants.NAMES; ``asked``: return_lse, return_max_logit, deterministic."""
    if out is not None:
        _refuse("out is given; torch returns a tensor of its own")
    for name in LENGTHS[4:]:
        if getattr(call, name) is not None:
            _refuse(f"{name} is given; torch has none")
    softcap, alibi, bias, sinks, dropout, mask, score = change
    resolve_variant(*change)  # for its errors
    for name, value in (
        *(("softcap", softcap or None), ("alibi", alibi)),
        *(("sinks", sinks), ("score", score)),
    ):
        if value is not None:
            _refuse(f"{name} is {shown(value)}; torch has none, it must be None")
    left, right = call.window_left, call.window_right
    if left != UNBOUNDED or right > 0:
        _refuse(f"window is {(left, right)}; torch has none but causal")
    if mask is not None and not isinstance(mask, torch.Tensor):
        _refuse(f"mask is a pantile.{type(mask).__name__}; torch takes a bool tensor")
    if mask is not None and bias is not None:
        _refuse("mask and bias are set; torch takes one of them")
    packed = call.cu_seqlens_q is not None
    if (mask is not None or bias is not None) and (right == 0 or packed):
        name = "bias" if mask is None else "mask"
        beside = "varlen_attention" if packed else "causal"
        _refuse(f"{name} is set; torch takes none with {beside}")
    _require_torch_dropout(dropout)
    _require_torch_options(options, *asked)


def _require_torch_dropout(dropout: Any) -> None:
    if not isinstance(dropout, Dropout):
        return
    if dropout.seed is not None:
        _refuse("dropout has a seed; torch draws from its generator, seed must be None")
    for name in ("batch_offset", "head_offset", "query_offset", "key_offset"):
        if getattr(dropout, name) != 0:
            _refuse(f"{name} of dropout is {shown(getattr(dropout, name))}; it must be 0")


def _require_torch_options(options: Options, return_lse, return_max_logit, deterministic) -> None:
    for name, value in (("return_lse", return_lse), ("return_max_logit", return_max_logit)):
        if value:
            _refuse(f"{name} is True; torch does not give it")
    if options.output_dtype is not None:
        _refuse("output_dtype is float32; torch gives o the dtype of q")
    if options.fp8:
        _refuse("fp8 is True; torch has no FP8 attention")
    if options.float32_precision != "auto":
        _refuse(f"float32_precision is {options.float32_precision}; torch's setting decides, auto")
    if options.num_splits not in (1, "auto"):
        _refuse(f"num_splits is {options.num_splits}; torch does not cut the keys, it must be 1")
    if options.softmax != "auto" and type(options.softmax) is str:
        _refuse(f"softmax is {options.softmax}; torch has no choice, it must be auto")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        _refuse("deterministic is True; torch decides by torch.use_deterministic_algorithms")


def serves(*arguments: Any) -> bool:
    """Whether :func:`require_served` has no objection."""
    try:
        require_served(*arguments)
    except _C.UnsupportedError:
        return False
    return True


def _check_shapes(q: Any, k: Any, v: Any, rank: int) -> None:
    axes = "[batch, seqlen, heads, head_dim]" if rank == 4 else "[total, heads, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {shown(x)}; it must be a torch.Tensor")
        if x.ndim != rank:
            raise ValueError(f"{name} has {x.ndim} dimensions; it must be {axes}")
    heads, heads_k = q.shape[-2], k.shape[-2]
    if heads_k == 0 or heads % heads_k != 0:
        raise ValueError(f"heads_q is {heads}; it must be a multiple of heads_k, {heads_k}")


def _attend(q, k, v, causal: bool, scale, dropout_p: float, attn_mask):
    """Of [batch, heads, seqlen, head_dim]. A row without keys gives 0."""
    rows, keys = q.shape[2], k.shape[2]
    if rows == 0 or keys == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + 0 * (q.sum() + k.sum() + v.sum())
    unseen = rows - keys if causal and rows > keys else 0
    if causal and keys > rows:  # torch aligns is_causal to the top left
        from torch.nn.attention.bias import causal_lower_right

        attn_mask, causal = causal_lower_right(rows, keys), False
    o = scaled_dot_product_attention(
        q[:, :, unseen:],
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return torch.nn.functional.pad(o, (0, 0, unseen, 0)) if unseen else o


def _rate(dropout: Any) -> float:
    if dropout is None:
        return 0.0
    return (dropout if isinstance(dropout, Dropout) else Dropout(dropout)).rate


def attention(q, k, v, call: Any, change: tuple):
    """As :func:`pantile.attention` and :func:`pantile.varlen_attention`, of a call that
    :func:`require_served` lets through."""
    if not torch.compiler.is_compiling() and _watch.watchers:
        _watch.skip("backend torch")
    if call.cu_seqlens_q is not None:
        return _packed(q, k, v, call, change)
    _check_shapes(q, k, v, 4)
    _, _, bias, _, dropout, mask, _ = change
    seen = bias if mask is None else mask
    if seen is not None:
        seen = seen[(None,) * (4 - seen.ndim)]
        if bias is not None:
            seen = seen.to(q.dtype)
    operands = (x.transpose(1, 2) for x in (q, k, v))
    o = _attend(*operands, call.window_right == 0, call.scale, _rate(dropout), seen)
    if mask is not None:
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o.transpose(1, 2).contiguous()


def _packed(q, k, v, call: Any, change: tuple):
    """Sequence by sequence: it reads the lengths, for which a GPU is waited for."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
    _check_shapes(q, k, v, 3)
    begins_q, begins_k = (x.tolist() for x in lengths[:2])
    used_q, used_k = (None if x is None else x.tolist() for x in lengths[2:])
    parts = []
    for b in range(len(begins_q) - 1):
        rows = begins_q[b + 1] - begins_q[b]
        present = rows if used_q is None else used_q[b]
        last = begins_k[b + 1] if used_k is None else begins_k[b] + used_k[b]
        rows_b = slice(begins_q[b], begins_q[b] + present)
        keys_b = slice(begins_k[b], last)
        sequence = q[rows_b], k[keys_b], v[keys_b]
        o = _attend(
            *(x.transpose(0, 1)[None] for x in sequence),
            call.window_right == 0,
            call.scale,
            _rate(change[4]),
            None,
        )
        parts.append(torch.nn.functional.pad(o[0].transpose(0, 1), (0, 0, 0, 0, 0, rows - present)))
    return torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[2])
