"""pantile as torch's flash attention: ``torch.nn.functional.scaled_dot_product_attention``.

    import pantile.sdpa

    pantile.sdpa.register()          # from here on; .remove() of what it returns undoes it

With torch's registry of flash attention implementations, pantile is the one called ``"pantile"``;
older versions of torch get the same kernels directly. docs/integrations.md says which calls reach a
flash attention implementation at all: on Hopper, cuDNN comes first.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

from pantile import _C, _torch_private, fp8
from pantile._arguments import flag, shown
from pantile._direct import run_backward, run_forward
from pantile._masks import window_bounds
from pantile._schema import Variant
from pantile._sdpa_outputs import by_rows, gradients, in_strides_of, new_place
from pantile._variant_ops import ONLY_OPERANDS, explained_variant
from pantile._variant_ops import _run_backward as run_variant_backward
from pantile._variants import Dropout, resolve_variant
from pantile.compat import _shared

Tensor = torch.Tensor

__all__ = ["Provider", "register"]

NAME = "pantile"
_SEED_LIMIT = 2**63 - 1
_ELSEWHERE = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) serves it"


@functools.lru_cache(maxsize=1024)
def _dense_call(scale: float | None, left: int, right: int) -> _C.Call:
    return _shared.bound_call({}, scale, left, right)


# ---- dropout: rng_state is the seed of pantile.Dropout


def _torch_scale(v: Tensor, p: float) -> tuple[Tensor, float]:
    """v times what makes kept weights larger by 1 / (1 - p), and that factor. pantile's own scale
    is the inverse of the true rate, which is p rounded to a multiple of 1/256; torch defines its
    operators, their reference and their tests by p."""
    factor = (1.0 - Dropout(p).rate) / (1.0 - p)
    return (v if factor == 1.0 else v * factor), factor


def _dropout(p: float, seed: Tensor, q: Tensor) -> Variant | None:
    resolved = resolve_variant(dropout=Dropout(p, seed=seed))
    if resolved is None:  # p rounds to 0
        return None
    return explained_variant(resolved[0]._replace(dropout_seed=seed), q)


def _new_seed(q: Tensor) -> Tensor:
    return torch.randint(0, _SEED_LIMIT, (2,), dtype=torch.int64, device=q.device)


def _signed(q: Tensor, k: Tensor, p: float, seed: Tensor, call: _C.Call) -> Tensor:
    """debug_attn_mask: the weights, scaled to a largest of 1 a row, negative where removed."""
    window = (call.window_left, call.window_right)
    return _shared.signed_weights(
        q, k, Dropout(p, seed=seed), scale=call.scale, causal=False, window=window
    )


def _forward(q, k, v, call, dropout_p: float, return_debug_mask: bool, out: Tensor | None):
    """(o, lse, rng_state, unused, debug_attn_mask) of [batch, seq, heads, dim] or packed rows. o is
    ``out``, if that is given."""
    device = q.device
    variant = None
    if dropout_p > 0.0:
        seed = _new_seed(q)
        variant = _dropout(dropout_p, seed, q)
        v, _ = _torch_scale(v, dropout_p)
        rng_state = seed.view(torch.uint64)
    else:  # nobody reads it
        rng_state = torch.empty(2, dtype=torch.uint64, device=device)
    o, lse, _, _ = run_forward(q, k, v, call, False, True, None, False, variant, out)
    if return_debug_mask and dropout_p > 0.0:
        if call.packed:
            raise _C.UnsupportedError(
                "return_debug_mask is True; packed sequences have no debug mask here, leave it out"
            )
        debug_mask = _signed(q, k, dropout_p, seed, call)
    else:
        debug_mask = torch.empty(0, dtype=q.dtype, device=device)
    return o, lse, rng_state, torch.empty((), dtype=torch.uint64, device=device), debug_mask


def _backward(
    grad_out, q, k, v, out, lse, call, dropout_p: float, rng_state: Tensor, into: tuple | None
):
    if dropout_p == 0.0:
        return run_backward(grad_out, None, q, k, v, out, None, lse, call, False, (), into)
    variant = _dropout(dropout_p, rng_state.view(torch.int64), q)
    v, factor = _torch_scale(v, dropout_p)
    tensors = (grad_out, None, q, k, v, out, None, lse)
    if variant is None:  # p rounds to 0
        grads = run_backward(*tensors, call, False, (), into)
    else:
        grads = run_variant_backward(*tensors, variant, call, False, ONLY_OPERANDS, into)[:3]
    if factor != 1.0:
        grads[2].mul_(factor)
    return grads


# ---- aten::_scaled_dot_product_flash_attention: [batch, heads, seq, dim]


def _scale_and_causal(scale, is_causal) -> _C.Call:
    return _dense_call(scale, -1, 0 if is_causal else -1)


def _sdpa_forward(
    query,
    key,
    value,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    call = _scale_and_causal(scale, is_causal)
    place = new_place(query, (*query.shape[:-1], value.shape[-1]))
    o, lse, *state = _forward(q, k, v, call, dropout_p, return_debug_mask, by_rows(place))
    out = in_strides_of(query, o.transpose(1, 2)) if place is None else place
    return out, lse, None, None, query.shape[2], key.shape[2], *state


def _sdpa_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    tensors = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
    call = _scale_and_causal(scale, is_causal)
    return gradients(
        (query, key, value),
        by_rows,
        lambda into: _backward(*tensors, logsumexp, call, dropout_p, philox_seed, into),
    )


# ---- aten::_flash_attention: [batch, seq, heads, dim], or packed


def _call_of(
    query, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale, left, right, seqused_k=None
) -> _C.Call:
    window = (-1 if left is None else left, -1 if right is None else right)
    left, right = window_bounds(is_causal, _shared.window_of(window))
    if cum_seq_q is None:
        if cum_seq_k is not None or seqused_k is not None:
            name = "seqused_k" if cum_seq_k is None else "cum_seq_k"
            raise _C.UnsupportedError(f"{name} is given without cum_seq_q; give both or none")
        return _dense_call(scale, left, right)
    if cum_seq_k is None:
        raise _C.UnsupportedError("cum_seq_k is None; with cum_seq_q it must be given")
    packing = {
        "cu_seqlens_q": cum_seq_q,
        "cu_seqlens_k": cum_seq_k,
        "seqused_k": seqused_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
    }
    return _shared.bound_call(packing, scale, left, right)


def _refuse_options(query, alibi_slopes, block_table, seqused_k) -> None:
    """What the operator has and pantile does not serve through it. ``num_splits`` is a hint."""
    _shared.refuse("block_table", block_table, _shared.PAGED)
    # Its gradient formula does not get them: the gradients would be those of another function.
    _shared.refuse("alibi_slopes", alibi_slopes, "use alibi of pantile.attention")
    if seqused_k is not None and torch.is_grad_enabled() and query.requires_grad:
        raise _C.UnsupportedError(
            "seqused_k is given and query requires a gradient; torch's formula of the gradient "
            "does not know it, use pantile.varlen_attention"
        )


def _flash_forward(
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
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
    _into=None,
):
    _refuse_options(query, alibi_slopes, block_table, seqused_k)
    call = _call_of(
        *(query, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale),
        *(window_size_left, window_size_right, seqused_k),
    )
    place = new_place(query, (*query.shape[:-1], value.shape[-1])) if _into is None else _into
    o, *others = _forward(query, key, value, call, dropout_p, return_debug_mask, place)
    return in_strides_of(query, o) if place is None else o, *others


def _flash_forward_into(
    out,
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
    **named,
):
    if dropout_p != 0.0:
        raise _C.UnsupportedError(
            f"dropout_p is {dropout_p}; with an output of its own it must be 0"
        )
    shape = (*query.shape[:-1], value.shape[-1])
    if out.shape != shape or out.dtype is not query.dtype:
        raise ValueError(f"out is {shown(out)}; it must be {query.dtype} of shape {list(shape)}")
    into = out if out.stride(-1) == 1 else None
    o, lse, *_ = _flash_forward(
        *(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k),
        *(0.0, is_causal, return_debug_mask),
        _into=into,
        **named,
    )
    if into is None:
        out.copy_(o)
    return lse


def _flash_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    call = _call_of(
        *(query, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale),
        *(window_size_left, window_size_right),
    )
    tensors = (grad_out, query, key, value, out, logsumexp)
    return gradients(
        (query, key, value),
        lambda x: x,
        lambda into: _backward(*tensors, call, dropout_p, rng_state, into),
    )


# ---- the same of FP8 operands: forward only


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


def _sdpa_quantized(
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


def _flash_quantized(
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
    _refuse_options(query, alibi_slopes, None, None)
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


# ---- aten::_scaled_dot_product_flash_attention_for_cpu: top-left causal, masks


class _CpuCall:
    """Its arguments as pantile takes them. A causal mask is aligned to the top left here: of more
    keys than queries nobody sees the last ones, and fewer keys move the bound."""

    def __init__(self, query, key, value, dropout_p, is_causal, attn_mask, scale) -> None:
        if dropout_p != 0.0:
            raise _C.UnsupportedError(f"dropout_p is {dropout_p}; on the CPU {_ELSEWHERE}")
        rows, keys = query.shape[2], key.shape[2]
        self.hidden_keys = max(keys - rows, 0) if is_causal else 0
        self.keys = keys - self.hidden_keys
        right = max(rows - keys, 0) if is_causal else -1
        self.q = query.transpose(1, 2)
        self.k = key[:, :, : self.keys].transpose(1, 2)
        self.v = value[:, :, : self.keys].transpose(1, 2)
        self.call = _dense_call(scale, -1, right)
        self.variant = None
        if attn_mask is not None:
            self.variant = self._masked(attn_mask)

    def _masked(self, attn_mask: Tensor) -> Variant:
        if attn_mask.ndim not in (2, 4):
            raise _C.UnsupportedError(
                f"attn_mask is {shown(attn_mask)}; it must have 2 or 4 dimensions"
            )
        if self.hidden_keys and attn_mask.shape[-1] > 1:
            attn_mask = attn_mask[..., : self.keys]
        mask = attn_mask if attn_mask.dtype is torch.bool else None
        bias = attn_mask if mask is None else None
        resolved = resolve_variant(bias=bias, mask=mask)
        assert resolved is not None
        return explained_variant(resolved[0], self.q)

    def padded(self, grad: Tensor) -> Tensor:
        """[batch, heads, keys, dim], zero for keys that nobody sees."""
        if self.hidden_keys:
            grad = torch.nn.functional.pad(grad, (0, 0, 0, 0, 0, self.hidden_keys))
        return grad.transpose(1, 2)


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    c = _CpuCall(query, key, value, dropout_p, is_causal, attn_mask, scale)
    like_query, lseby_rows = _cpu_layouts()
    place = new_place(query, (*query.shape[:-1], value.shape[-1])) if like_query else None
    o, lse, _, _ = run_forward(
        c.q, c.k, c.v, c.call, False, True, None, False, c.variant, by_rows(place)
    )
    out = o.transpose(1, 2)
    if like_query and place is None:
        out = in_strides_of(query, out)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2) if lseby_rows else lse


@functools.cache
def _cpu_layouts() -> tuple[bool, bool]:
    """How this torch traces the operator: whether the output has the strides of the query, and the
    LSE those of [batch, seq, heads]."""
    q = torch.empty(2, 3, 5, 8, device="meta")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, q, q)
    return out.is_contiguous(), not lse.is_contiguous()


def _cpu_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    dropout_p,
    is_causal,
    *,
    attn_mask=None,
    scale=None,
):
    c = _CpuCall(query, key, value, dropout_p, is_causal, attn_mask, scale)
    o, grad_o = out.transpose(1, 2), grad_out.transpose(1, 2)
    if c.variant is None:
        grads = run_backward(grad_o, None, c.q, c.k, c.v, o, None, logsumexp, c.call, False)
    else:
        tensors = (grad_o, None, c.q, c.k, c.v, o, None, logsumexp.contiguous())
        grads = run_variant_backward(*tensors, c.variant, c.call, False, ONLY_OPERANDS)
    grad_q, grad_k, grad_v = grads[:3]
    return grad_q.transpose(1, 2), c.padded(grad_k), c.padded(grad_v)


# ---- registration

_FLASH = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
}
_QUANTIZED = {
    "_scaled_dot_product_flash_attention.quantized": _sdpa_quantized,
    "_flash_attention_forward.quantized": _flash_quantized,
}
_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}


def _exists(name: str) -> bool:
    operator, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, operator, None)
    return packet is not None and (overload or "default") in packet.overloads()


def _registry() -> Any:
    """torch.nn.attention if it has a registry of implementations."""
    module = importlib.import_module("torch.nn.attention")
    return module if hasattr(module, "register_flash_attention_impl") else None


class Provider:
    """The kernels while they are registered."""

    def __init__(self, cpu: bool, fp8: bool) -> None:
        self._libraries: list[Any] = []
        self._allows_fp8 = False
        kernels = {name: f for name, f in _FLASH.items() if _exists(name)}
        quantized = {name: f for name, f in _QUANTIZED.items() if _exists(name)}
        if fp8:
            if not quantized or _torch_private.allow_fp8_attention is None:
                raise _C.UnsupportedError(
                    f"fp8 is True; torch {torch.__version__} has no operators for FP8 operands"
                )
            _torch_private.allow_fp8_attention(True)
            self._allows_fp8 = True
        kernels |= quantized
        self._implement("CUDA", kernels)
        if cpu:
            self._implement("CPU", kernels | {n: f for n, f in _CPU.items() if _exists(n)})

    def _implement(self, key: str, kernels: dict) -> None:
        library = torch.library.Library("aten", "IMPL", key)
        self._libraries.append(library)
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)

    def remove(self) -> None:
        """torch's own kernels are back."""
        if not self._libraries:
            return
        libraries, self._libraries = self._libraries, []
        for library in libraries:
            library._destroy()
        if self._allows_fp8:
            _torch_private.allow_fp8_attention(False)
        registry = sys.modules.get("torch.nn.attention._registry")
        active = getattr(registry, "_FLASH_ATTENTION_ACTIVE", None)
        if active is not None and active[1] is self:
            registry._FLASH_ATTENTION_ACTIVE = None  # type: ignore[union-attr]

    def __enter__(self) -> Provider:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_active: Provider | None = None


def _activate(cpu: bool, fp8: bool) -> Provider:
    global _active
    if _active is not None:
        _active.remove()
    _active = Provider(cpu, fp8)
    return _active


def register(*, activate: bool = True, cpu: bool = False, fp8: bool = False) -> Provider | None:
    """Makes pantile torch's implementation of flash attention.

    It then serves what torch gives to flash attention on CUDA devices:
    ``scaled_dot_product_attention`` with ``SDPBackend.FLASH_ATTENTION``, ``varlen_attn``,
    nested tensors and ``causal_lower_right``, with gradients, dropout and ``torch.compile``.

    Args:
        activate: start at once. Otherwise
            ``torch.nn.attention.activate_flash_attention_impl("pantile")`` does, where torch has
            it.
        cpu: serve it on the CPU, too, where torch's own operator takes masks as well.
        fp8: take float8_e4m3fn operands with descales, for inference.

    Returns:
        :class:`Provider`, whose ``remove()`` gives torch's own kernels back, or None with
        ``activate=False``. A second call replaces the first.

    Raises:
        pantile.UnsupportedError: this torch lacks what an argument asks for.
    """
    for name, value in (("activate", activate), ("cpu", cpu), ("fp8", fp8)):
        flag(name, value)
    start = functools.partial(_activate, cpu, fp8)
    registry = _registry()
    if registry is None:
        if not activate:
            raise _C.UnsupportedError(
                f"activate is False; torch {torch.__version__} has no registry to activate from"
            )
        return start()
    registry.register_flash_attention_impl(NAME, register_fn=start)
    if not activate:
        return None
    registry.activate_flash_attention_impl(NAME)
    return _active
