"""In place of torch.nn.functional.scaled_dot_product_attention: plain calls without the dispatcher,
for pantile.sdpa."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pantile import _C
from pantile._fast_path import is_compiling
from pantile.compat import _shared

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

_flash_enabled = torch.backends.cuda.flash_sdp_enabled


@functools.lru_cache(maxsize=1024)
def dense_call(scale: float | None, left: int, right: int) -> _C.Call:
    return _shared.bound_call({}, scale, left, right)


def call_of_scale(scale, is_causal) -> _C.Call:
    return dense_call(scale, -1, 0 if is_causal else -1)


def plain_function(
    torch_function: Callable[..., Tensor], serves_cpu: bool
) -> Callable[..., Tensor]:
    """In place of torch's. Eager calls without gradient, mask and dropout go to the kernel while
    flash attention is enabled; all others are torch's, whose operators pantile serves."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if (
            not is_compiling()
            and attn_mask is None
            and dropout_p == 0.0
            and enable_gqa is False
            and type(is_causal) is bool
            and (scale is None or type(scale) is float)
            and type(query) is Tensor
            and (query.is_cuda or serves_cpu)
            and _flash_enabled()
        ):
            o = _C.sdpa(query, key, value, call_of_scale(scale, is_causal))
            if o is not None:
                return o
        return torch_function(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    scaled_dot_product_attention.__doc__ = torch_function.__doc__
    return scaled_dot_product_attention
