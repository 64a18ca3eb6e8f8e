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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pantile import _C, _torch_private
from pantile._arguments import flag, shown
from pantile._direct import run_backward, run_forward
from pantile._fast_path import WHOLE_CALLS
from pantile._masks import window_bounds
from pantile._schema import Variant
from pantile._sdpa_fp8 import flash_quantized, sdpa_quantized
from pantile._sdpa_function import call_of_scale, dense_call, plain_function
from pantile._sdpa_outputs import by_rows, gradients, in_strides_of, new_place
from pantile._variant_ops import ONLY_OPERANDS, explained_variant
from pantile._variant_ops import _run_backward as run_variant_backward
from pantile._variants import Dropout, resolve_variant
from pantile.compat import _shared

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

__all__ = ["Provider", "register"]

NAME = "pantile"
_SEED_LIMIT = 2**63 - 1
_ELSEWHERE = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) serves it"


def _not_served(*_: Any) -> None:
    return None


# Of the bindings, which make the outputs, too: None where a call needs more than the kernel.
whole_forward, whole_backward = (
    (_C.sdpa_forward, _C.sdpa_backward) if WHOLE_CALLS else (_not_served, _not_served)
)


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


@functools.lru_cache(maxsize=64)
def _state_of(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):
        return (
            torch.empty(2, dtype=torch.uint64, device=device),
            torch.empty((), dtype=torch.uint64, device=device),
            torch.empty(0, dtype=dtype, device=device),
        )


def _no_state(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask of a call without dropout. Nobody reads the first two,
    but compiled programs may write to their memory once they are dead."""
    rng_state, unused, nothing = _state_of(q.device, q.dtype)
    return torch.empty_like(rng_state), torch.empty_like(unused), nothing


def _forward(q, k, v, call, dropout_p: float, return_debug_mask: bool, out: Tensor | None):
    """(o, lse, rng_state, unused, debug_attn_mask) of [batch, seq, heads, dim] or packed rows. o is
    ``out``, if that is given."""
    if dropout_p == 0.0:
        o, lse, _, _ = run_forward(q, k, v, call, False, True, None, False, None, out)
        return o, lse, *_no_state(q)
    seed = _new_seed(q)
    variant = _dropout(dropout_p, seed, q)
    scaled_v, _ = _torch_scale(v, dropout_p)
    o, lse, _, _ = run_forward(q, k, scaled_v, call, False, True, None, False, variant, out)
    _, unused, debug_mask = _no_state(q)
    if return_debug_mask:
        if call.packed:
            raise _C.UnsupportedError(
                "return_debug_mask is True; packed sequences have no debug mask here, leave it out"
            )
        debug_mask = _signed(q, k, dropout_p, seed, call)
    return o, lse, seed.view(torch.uint64), unused, debug_mask


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
    call = call_of_scale(scale, is_causal)
    if dropout_p == 0.0:
        served = whole_forward(query, key, value, call)
        if served is not None:
            return *served, None, None, query.size(2), key.size(2), *_no_state(query)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
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
    call = call_of_scale(scale, is_causal)
    if dropout_p == 0.0:
        deterministic = torch.are_deterministic_algorithms_enabled()
        tensors = grad_out, query, key, value, out, logsumexp
        served = whole_backward(*tensors, call, deterministic)
        if served is not None:
            return served
    tensors = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
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
        return dense_call(scale, left, right)
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
    _shared.refuse_operator_options(query, alibi_slopes, block_table, seqused_k)
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
        self.call = dense_call(scale, -1, right)
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
    like_query, lse_by_rows = _cpu_layouts()
    plain = like_query and attn_mask is None and dropout_p == 0.0
    if plain and (not is_causal or query.size(2) == key.size(2)):
        served = whole_forward(query, key, value, call_of_scale(scale, is_causal))
        if served is not None:
            out, lse = served
            return out, _by_rows_inside(lse) if lse_by_rows else lse
    c = _CpuCall(query, key, value, dropout_p, is_causal, attn_mask, scale)
    place = new_place(query, (*query.shape[:-1], value.shape[-1])) if like_query else None
    o, lse, _, _ = run_forward(
        c.q, c.k, c.v, c.call, False, True, None, False, c.variant, by_rows(place)
    )
    out = o.transpose(1, 2)
    if like_query and place is None:
        out = in_strides_of(query, out)
    return out, _by_rows_inside(lse) if lse_by_rows else lse


def _by_rows_inside(lse: Tensor) -> Tensor:
    """[batch, heads, seq] with the strides of [batch, seq, heads]."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


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
    "_scaled_dot_product_flash_attention.quantized": sdpa_quantized,
    "_flash_attention_forward.quantized": flash_quantized,
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

    def __init__(self, cpu: bool, fp8: bool, function: bool) -> None:
        self._libraries: list[Any] = []
        self._function: Callable[..., Tensor] | None = None
        self._allows_fp8 = False
        if function and not WHOLE_CALLS:
            raise _C.UnsupportedError(
                f"function is True; torch {torch.__version__} does not tell which calls are plain"
            )
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
        if function:
            self._torch_function = F.scaled_dot_product_attention
            self._function = F.scaled_dot_product_attention = plain_function(
                self._torch_function, cpu
            )

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
        if self._function is not None and F.scaled_dot_product_attention is self._function:
            F.scaled_dot_product_attention = self._torch_function
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


def _activate(cpu: bool, fp8: bool, function: bool) -> Provider:
    global _active
    if _active is not None:
        _active.remove()
    _active = Provider(cpu, fp8, function)
    return _active


def register(
    *, activate: bool = True, cpu: bool = False, fp8: bool = False, function: bool = False
) -> Provider | None:
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
        function: also put a function of pantile in the place of
            ``torch.nn.functional.scaled_dot_product_attention``. It gives eager calls without
            gradient, mask, dropout and grouped heads to the kernel while flash attention is
            enabled, whatever else torch would prefer, and all others to torch. Names that were
            imported before keep torch's function.

    Returns:
        :class:`Provider`, whose ``remove()`` gives torch's own kernels back, or None with
        ``activate=False``. A second call replaces the first.

    Raises:
        pantile.UnsupportedError: this torch lacks what an argument asks for.
    """
    given = {"activate": activate, "cpu": cpu, "fp8": fp8, "function": function}
    for name, value in given.items():
        flag(name, value)
    start = functools.partial(_activate, cpu, fp8, function)
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
