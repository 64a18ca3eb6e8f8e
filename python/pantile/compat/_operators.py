"""The operators ``torch.ops.flash_attn_3``, on request, by their schemas on top of pantile.

torch's provider "FA3", xformers and others call this pair instead of the Python functions.
"""

from __future__ import annotations

from typing import Any

import torch

from pantile import _C, _direct
from pantile._arguments import shown
from pantile._masks import window_bounds
from pantile._schema import Variant
from pantile._variant_ops import ONLY_OPERANDS
from pantile._variant_ops import _run_backward as run_variant_backward
from pantile.compat import _shared, flash_attn_3
from pantile.compat._shared import Tensor

FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0., "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0., "
    "bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
COMBINE = (
    "fwd_combine(Tensor out_partial, Tensor lse_partial, Tensor(out!)? out=None, "
    "ScalarType? out_dtype=None) -> (Tensor(out!), Tensor)"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? leftpad_k=None, int? page_size=None, "
    "int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)


_CHUNK = "the operator does not serve it, the functions of pantile.compat.flash_attn_3 do"


def _nothing(q: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=q.device)


def _forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    q_v=None,
    out=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    is_rotary_interleaved=False,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    _shared.refuse_all(
        {
            "k_new": k_new,
            "v_new": v_new,
            "cu_seqlens_k_new": cu_seqlens_k_new,
            "kv_batch_idx": kv_batch_idx,
            "leftpad_k": leftpad_k,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "seqlens_rotary": seqlens_rotary,
        },
        _shared.CACHE,
    )
    _shared.refuse("page_table", page_table, _shared.PAGED)
    _shared.refuse("q_v", q_v, flash_attn_3._QV)
    _shared.refuse("attention_chunk", attention_chunk, _CHUNK, absent=0)
    packing, rows = _packing(
        q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    )
    packed_q, packed_k, packed_v = rows(q), rows(k), rows(v)
    o, lse = flash_attn_3.attend(
        *(packed_q, packed_k, packed_v, packing, (q_descale, k_descale, v_descale)),
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        deterministic=False,
        return_lse=True,
    )
    if packing and q.ndim == 4:
        o, lse = o.view(*q.shape[:-1], -1), _dense_lse(lse, q)
    return _shared.written_to(out, o), lse, _nothing(q), _nothing(q)


def _dense_lse(lse: Tensor, q: Tensor) -> Tensor:
    """[heads, batch * rows] as [batch, heads, rows]."""
    return lse.view(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1).contiguous()


def _packing(q, k, cu_q, cu_k, used_q, used_k, longest_q, longest_k):
    """Arguments of varlen_attention, and how rows get there; nothing for a dense call.

    Queries and keys may each be dense; where one of them has lengths, both are packed.
    """
    if cu_q is None and cu_k is None and used_q is None and used_k is None:
        return {}, lambda x: x
    answer: dict[str, Any] = {"seqused_q": used_q, "seqused_k": used_k}
    for name, x, bounds, longest in (("q", q, cu_q, longest_q), ("k", k, cu_k, longest_k)):
        if bounds is None:
            if x.ndim != 4:
                raise ValueError(
                    f"{name} is {shown(x)}; without cu_seqlens_{name} it must have 4 dimensions"
                )
            bounds, longest = _shared.dense_bounds(x, x.shape[1]), x.shape[1]
        answer[f"cu_seqlens_{name}"] = bounds
        answer[f"max_seqlen_{name}"] = longest
    return answer, lambda x: x.flatten(0, 1) if x.ndim == 4 else x


def _backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq=None,
    dk=None,
    dv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    if q.dtype is torch.float8_e4m3fn:
        raise _C.UnsupportedError("q has dtype float8_e4m3fn; the backward takes 16-bit operands")
    packing, rows = _packing(
        q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    )
    call = call_of(packing, softmax_scale, is_causal, (window_size_left, window_size_right))
    lse = softmax_lse
    if packing and q.ndim == 4:
        lse = softmax_lse.transpose(0, 1).reshape(q.shape[2], -1)
    tensors = (rows(dout), None, rows(q), rows(k), rows(v), rows(out), None, lse.contiguous())
    cap = _shared.softcap_of(softcap)
    if cap is None:
        grads = _direct.run_backward(*tensors, call, deterministic)
    else:
        variant = Variant(softcap=cap)
        grads = run_variant_backward(*tensors, variant, call, deterministic, ONLY_OPERANDS)[:3]
    shapes = (q, k, v)
    grads = [g.view(x.shape) for g, x in zip(grads, shapes, strict=True)]
    places = (("dq", dq), ("dk", dk), ("dv", dv))
    grads = [
        g if place is None else _shared.written_to(place, g, name)
        for g, (name, place) in zip(grads, places, strict=True)
    ]
    return *grads, *(_nothing(q) for _ in range(5))


def call_of(packing: dict, scale, causal: bool, window_size) -> _C.Call:
    """For the bindings."""
    bounds = window_bounds(bool(causal), _shared.window_of(window_size))
    return _shared.bound_call(packing, scale, *bounds)


def _metadata(*arguments, **named):
    seqused_k = arguments[8] if len(arguments) > 8 else named["seqused_k"]
    return torch.empty(0, dtype=torch.int32, device=seqused_k.device)


def _combine(out_partial, lse_partial, out=None, out_dtype=None):
    return flash_attn_3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


# ---- fake kernels


def _fake_forward(q, k, v, *rest, **named):
    names = ("k_new", "v_new", "q_v", "out", "cu_seqlens_q")
    named = {**dict(zip(names, rest, strict=False)), **named}
    out, bounds = named.get("out"), named.get("cu_seqlens_q")
    dtype = torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype
    if out is None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    shape = (q.shape[0], q.shape[2], q.shape[1]) if bounds is None else (q.shape[1], q.shape[0])
    empty = q.new_empty((0,), dtype=torch.float32)
    return out, q.new_empty(shape, dtype=torch.float32), empty, torch.empty_like(empty)


def _fake_backward(dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, *_, **__):
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if given is None else given
        for x, given in ((q, dq), (k, dk), (v, dv))
    ]
    return *grads, *(q.new_empty((0,), dtype=torch.float32) for _ in range(5))


_registered: set = set()  # torch takes operators away with the object that defined them


class Registration:
    """The operators while they are registered."""

    def __init__(self) -> None:
        taken = [
            name
            for name in ("fwd", "bwd", "fwd_combine", "get_scheduler_metadata")
            if _is_defined(f"flash_attn_3::{name}")
        ]
        if taken:
            raise RuntimeError(
                f"torch.ops.flash_attn_3.{taken[0]} is defined already, by FlashAttention-3 or an "
                "earlier call; it must not be"
            )
        library = torch.library.Library("flash_attn_3", "FRAGMENT")
        for schema, kernel in (
            (FORWARD, _forward),
            (BACKWARD, _backward),
            (COMBINE, _combine),
            (METADATA, _metadata),
        ):
            library.define(schema)
            name = schema.partition("(")[0]
            for key in ("CPU", "CUDA"):
                library.impl(name, kernel, key)
        torch.library.register_fake("flash_attn_3::fwd", _fake_forward, lib=library)
        torch.library.register_fake("flash_attn_3::bwd", _fake_backward, lib=library)
        self._library: Any = library
        _registered.add(self)

    def remove(self) -> None:
        """Takes the operators away."""
        if self._library is not None:
            self._library._destroy()
            self._library = None
            _registered.discard(self)


def _is_defined(name: str) -> bool:
    return torch._C._dispatch_has_kernel(name)
