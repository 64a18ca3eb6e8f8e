"""pantile: exact attention by streaming tiles, from a laptop CPU to an H100.

    import torch, pantile
    o = pantile.attention(q, k, v, causal=True)      # [batch, seq, heads, dim], differentiable

Import torch first, or call :func:`load_torch` after importing it, if the operators
``torch.ops.pantile`` are needed before the first call. Without torch, NumPy arrays work.
"""

from pantile import (
    _once,  # noqa: F401 (first: it decides which modules the others get)
    experimental,
    fp8,
)
from pantile._attention import attention, load_torch, varlen_attention
from pantile._C import UnsupportedError, __version__
from pantile._explain import Explanation, PassExplanation, Verdict
from pantile._explain_calls import compile, explain  # noqa: A004
from pantile._fp8 import quantize
from pantile._info import build_info, cuda_reason, devices, kernels
from pantile._jit import install as _install_jit
from pantile._mask_forms import BlockMask, Documents, Mask, Prefix
from pantile._merge import merge_attention
from pantile._options import Options, configure_logging
from pantile._quantized import Quantized
from pantile._variants import Dropout, dropout_mask

__all__ = [
    "BlockMask",
    "Documents",
    "Dropout",
    "Explanation",
    "Mask",
    "Options",
    "PassExplanation",
    "Prefix",
    "Quantized",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "attention",
    "build_info",
    "compile",
    "cuda_reason",
    "devices",
    "dropout_mask",
    "experimental",
    "explain",
    "fp8",
    "kernels",
    "load_torch",
    "merge_attention",
    "quantize",
    "varlen_attention",
]

UnsupportedError.__module__ = "pantile"
UnsupportedError.__doc__ = "A valid request that no compiled kernel serves; the message says why."

load_torch()
_install_jit()
if configure_logging():
    from pantile import _C, _options

    _C.set_plan_log(_options.log.info)
