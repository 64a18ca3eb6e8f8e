"""Other implementations, each as a function that gives a Contender or the reason why there is none.

torch's backends are always tried. FlashAttention-3 is looked for in the shared library that the
environment variable FA3_SO names (its torch operator, forward) and DEW3_SO (its JAX custom call,
backward)."""

from __future__ import annotations

import ctypes
import functools
import os

import torch
import torch.nn.functional as F
from cases import Case
from measure import Contender
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCH_BACKENDS = {
    "FA2 (torch)": SDPBackend.FLASH_ATTENTION,
    "cuDNN (torch)": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient (torch)": SDPBackend.EFFICIENT_ATTENTION,
}


def repeat(call):
    def loop(n: int):
        for _ in range(n):
            call()

    return loop


def torch_sdpa(name: str, case: Case, what: str, q, k, v, grad_o) -> Contender | str:
    if case.lengths is not None:
        return "packed sequences are not offered by scaled_dot_product_attention"
    if case.window_left is not None:
        return "windows are not offered by scaled_dot_product_attention"
    backend = TORCH_BACKENDS[name]
    q, k, v = (x.detach().transpose(1, 2).requires_grad_(what == "backward") for x in (q, k, v))
    options = {"is_causal": case.causal, "enable_gqa": case.heads_q != case.heads_k}

    def forward():
        return F.scaled_dot_product_attention(q, k, v, **options)

    try:
        with sdpa_kernel(backend):
            o = forward()
            if what == "backward":
                grad = grad_o.transpose(1, 2)
                torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)
                return Contender(
                    name, repeat(lambda: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True))
                )
    except RuntimeError as error:
        return str(error).splitlines()[0]

    def loop(n: int):
        with sdpa_kernel(backend), torch.no_grad():
            for _ in range(n):
                forward()

    return Contender(name, loop)


@functools.cache
def _fa3_ops():
    torch.ops.load_library(os.environ["FA3_SO"])
    return torch.ops.flash_attn_3


def fa3_forward(case: Case, q, k, v, cu_seqlens) -> Contender | str:
    if "FA3_SO" not in os.environ:
        return "FA3_SO is not set"
    keywords = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
    if case.window_left is not None:
        keywords |= {
            "window_size_left": case.window_left,
            "window_size_right": 0,
            "is_causal": False,
        }
    if cu_seqlens is not None:
        keywords |= {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": case.seqlen,
            "max_seqlen_k": case.seqlen,
        }
    try:
        forward = _fa3_ops().fwd
        forward(q, k, v, **keywords)
    except (RuntimeError, OSError) as error:
        return str(error).splitlines()[0]
    return Contender("FA3", repeat(lambda: forward(q, k, v, **keywords)))


@functools.cache
def _fa3_jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    library = ctypes.cdll.LoadLibrary(os.environ["DEW3_SO"])
    for name in ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd"):
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA"
        )
    return jax


def fa3_backward(case: Case) -> Contender | str:
    """Runs on tensors of its own (random, same law), on JAX's stream."""
    if "DEW3_SO" not in os.environ:
        return "DEW3_SO is not set"
    if case.lengths is not None:
        return "the JAX build has no packed sequences"
    try:
        jax = _fa3_jax()
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    import numpy as np

    jnp = jax.numpy
    shape_q = (case.batch, case.seqlen, case.heads_q, case.head_dim)
    shape_k = (case.batch, case.seqlen, case.heads_k, case.head_dim)
    left = -1 if case.window_left is None else case.window_left
    attributes = {
        "softmax_scale": np.float64(case.head_dim**-0.5),
        "is_causal": case.causal and case.window_left is None,
        "window_size_left": np.int64(left),
        "window_size_right": np.int64(-1 if case.window_left is None else 0),
    }
    like = jax.ShapeDtypeStruct
    lse_shape = (case.batch, case.heads_q, case.seqlen)
    scratch = like(
        (case.heads_q * (case.batch * case.seqlen + 128 * (case.batch + 1)),), jnp.float32
    )

    @jax.jit
    def forward(q, k, v):
        results = (
            like(shape_q, q.dtype),
            like(lse_shape, jnp.float32),
            like((1, 1, 1, 1), jnp.float32),
            like((1, 1, 1), jnp.float32),
        )
        return jax.ffi.ffi_call("dew_flash3_mha_fwd", results)(q, k, v, **attributes)[:2]

    @jax.jit
    def backward(g, q, k, v, o, lse):
        results = (
            like(shape_q, q.dtype),
            like(shape_k, q.dtype),
            like(shape_k, q.dtype),
            scratch,
            scratch,
        )
        call = jax.ffi.ffi_call("dew_flash3_mha_bwd", results)
        return call(g, q, k, v, o, lse, **attributes)[:3]

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (shape_q, shape_k, shape_k, shape_q)
    q, k, v, g = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    last = []
    try:
        o, lse = forward(q, k, v)
        last[:] = backward(g, q, k, v, o, lse)
        jax.block_until_ready(last)
    except Exception as error:  # jaxlib raises its own, unexported types
        return str(error).splitlines()[0]

    def loop(n: int):
        for _ in range(n):
            last[:] = backward(g, q, k, v, o, lse)

    return Contender("FA3", loop, wall=True, wait=lambda: jax.block_until_ready(last))
