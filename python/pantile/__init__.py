"""pantile: exact attention by streaming tiles, from a laptop CPU to an H100.

    import torch, pantile
    o = pantile.attention(q, k, v, causal=True)      # [batch, seq, heads, dim], differentiable

Import torch first, or call :func:`load_torch` after importing it, if the operators
``torch.ops.pantile`` are needed before the first call. Without torch, NumPy arrays work.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pantile import (
    _once,  # noqa: F401 (first: it decides which modules the others get)
    experimental,
    fp8,
)
from pantile._attention import attention, load_torch
from pantile._autotune import Autotuned, autotune, clear_autotuned
from pantile._autotune import load as _load_autotuned
from pantile._C import UnsupportedError, __version__
from pantile._checkpoint import checkpoint_save_ops
from pantile._explain import Explanation, PassExplanation, Verdict
from pantile._explain_calls import compile, explain  # noqa: A004
from pantile._expressions import Mask, Score
from pantile._flex import FlexMask, flex_attention
from pantile._fp8 import quantize
from pantile._info import build_info, cuda_reason, devices, kernels
from pantile._jit import install as _install_jit
from pantile._kv import append, decode, decode_schedule, mla_decode
from pantile._kv_cache import KVCache
from pantile._kv_explain import DecodeExplanation, explain_decode
from pantile._kv_prefix import decode_shared_prefix
from pantile._mask_forms import BlockMask, Documents, Prefix
from pantile._merge import merge_attention
from pantile._options import Options, configure_logging
from pantile._quantized import Quantized
from pantile._shadow import ShadowError, ShadowReport, shadow
from pantile._variants import Dropout, dropout_mask
from pantile._varlen import varlen_attention

if TYPE_CHECKING:
    from pantile import compat, integrations, sdpa  # noqa: F401

__all__ = [
    "Autotuned",
    "BlockMask",
    "DecodeExplanation",
    "Documents",
    "Dropout",
    "Explanation",
    "FlexMask",
    "KVCache",
    "Mask",
    "Options",
    "PassExplanation",
    "Prefix",
    "Quantized",
    "Score",
    "ShadowError",
    "ShadowReport",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "append",
    "attention",
    "autotune",
    "build_info",
    "checkpoint_save_ops",
    "clear_autotuned",
    "compile",
    "cuda_reason",
    "decode",
    "decode_schedule",
    "decode_shared_prefix",
    "devices",
    "dropout_mask",
    "experimental",
    "explain",
    "explain_decode",
    "flex_attention",
    "fp8",
    "kernels",
    "load_torch",
    "merge_attention",
    "mla_decode",
    "quantize",
    "shadow",
    "varlen_attention",
]

UnsupportedError.__module__ = "pantile"
UnsupportedError.__doc__ = "A valid request that no compiled kernel serves; the message says why."

# Doors to other libraries: imported when they are named, for they import torch.
_DOORS = ("compat", "integrations", "sdpa")


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return importlib.import_module(f"pantile.{name}")
    raise AttributeError(f"module 'pantile' has no attribute {name!r}")


load_torch()
_install_jit()
_load_autotuned()
if configure_logging():
    from pantile import _C, _options

    _C.set_plan_log(_options.log.info)
