"""Other implementations, each as a function that gives a Contender or the reason why there is none.

torch's backends are always tried. FlashAttention-3 is looked for in the shared library that the
environment variable FA3_SO names (its torch operator, forward) and DEW3_SO (its JAX custom call,
backward); cuDNN's FP8 attention needs the package nvidia-cudnn-frontend."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pantile.bench.cases import Case
from pantile.bench.measure import Contender, on_cpu, repeat

FP8 = torch.float8_e4m3fn
MOST_SCORE_BYTES = 8 * 2**30  # of the score matrix, for peers that store it


@dataclass
class Problem:
    """A case with its tensors, [batch, seq, heads, dim] or packed [total, heads, dim]."""

    case: Case
    what: str  # forward, backward, or forward+backward
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_o: torch.Tensor
    cu_seqlens: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def leaves(self) -> list[torch.Tensor]:
        """Fresh leaves of autograd."""
        return [x.detach().requires_grad_(self.differentiates) for x in (self.q, self.k, self.v)]

    def leaves_for_torch(self) -> list[torch.Tensor]:
        """[batch, heads, seq, dim]: views on a GPU, whose kernels take any strides, and contiguous
        on the CPU, where torch is faster with them."""
        views = [x.detach().transpose(1, 2) for x in (self.q, self.k, self.v)]
        if self.q.device.type == "cpu":
            views = [x.contiguous() for x in views]
        return [x.requires_grad_(self.differentiates) for x in views]

    @property
    def differentiates(self) -> bool:
        return self.what != "forward"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def contender(
    name: str,
    problem: Problem,
    call: Callable[[], object],
    answer: Callable[[], tuple] | None = None,
) -> Contender:
    if problem.q.device.type == "cpu":
        return on_cpu(name, call, answer)
    return Contender(name, repeat(call), answer=answer)


def heads_second(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, dim], torch's own layout, as [batch, seq, heads, dim]."""
    return x.transpose(1, 2)


def pass_of(what: str, forward, leaves, grad_o) -> Callable[[], tuple]:
    """`forward()` without a graph, its backward with one that is kept, or both together."""
    o = forward() if what == "backward" else None

    def call() -> tuple:
        if what == "forward":
            with torch.no_grad():
                return (forward(),)
        if o is None:
            return torch.autograd.grad(forward(), leaves, grad_o)
        return torch.autograd.grad(o, leaves, grad_o, retain_graph=True)

    return call


def differentiable(name: str, problem: Problem, forward, leaves, layout=None) -> Contender:
    """Times a pass. ``layout`` brings tensors into the layout of the problem and back."""
    layout = layout or (lambda x: x)
    call = pass_of(problem.what, forward, leaves, layout(problem.grad_o))
    call()
    return contender(name, problem, call, lambda: tuple(layout(x) for x in call()))


# ---- torch


SDPA = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN (torch)",
    SDPBackend.FLASH_ATTENTION: "FA2 (torch)",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient (torch)",
    SDPBackend.MATH: "math (torch)",
}


def _sdpa_lacks(problem: Problem) -> str | None:
    if problem.case.lengths is not None:
        return "packed sequences are not offered by scaled_dot_product_attention"
    if problem.case.window_left is not None:
        return "windows are not offered by scaled_dot_product_attention"
    if problem.dtype == FP8:
        return "FP8 is not offered by scaled_dot_product_attention"
    return None


def _score_bytes(problem: Problem) -> float:
    case = problem.case
    return float(case.batch) * case.heads_q * case.seqlen**2 * problem.q.element_size()


def torch_sdpa(name: str, backend: SDPBackend | None, problem: Problem) -> Contender | str:
    """scaled_dot_product_attention, held to one backend; None leaves torch its choice."""
    if (reason := _sdpa_lacks(problem)) is not None:
        return reason
    if backend == SDPBackend.MATH and _score_bytes(problem) > MOST_SCORE_BYTES:
        return f"its score matrix would take {_score_bytes(problem) / 2**30:.0f} GiB"
    case, leaves = problem.case, problem.leaves_for_torch()
    options = {"is_causal": case.causal, "enable_gqa": case.heads_q != case.heads_k}
    allowed = backend or list(SDPA)

    def forward():
        with sdpa_kernel(allowed):
            return F.scaled_dot_product_attention(*leaves, **options)

    try:
        return differentiable(name, problem, forward, leaves, heads_second)
    except RuntimeError as error:
        return first_line(error)


@functools.cache
def compiled_flex():
    from torch.nn.attention import flex_attention

    return torch.compile(flex_attention.flex_attention, dynamic=False), flex_attention


def flex(name: str, problem: Problem) -> Contender | str:
    case = problem.case
    if case.lengths is not None:
        return "packed sequences are not measured with FlexAttention"
    if problem.dtype == FP8:
        return "FlexAttention has no FP8"
    if problem.q.device.type == "cpu":
        return "FlexAttention is measured on GPUs only"
    leaves = problem.leaves_for_torch()
    left = case.window_left

    def shows(_batch, _head, row, key):
        seen = key <= row
        return seen if left is None else seen & (key >= row - left)

    try:
        attend, module = compiled_flex()
        torch._dynamo.reset()  # one graph a case, or the limit of recompilations ends in eager mode
        mask = None
        if case.causal or left is not None:
            mask = module.create_block_mask(
                shows, None, None, case.seqlen, case.seqlen, device=problem.q.device
            )
        grouped = case.heads_q != case.heads_k

        def forward():
            return attend(*leaves, block_mask=mask, enable_gqa=grouped)

        return differentiable(name, problem, forward, leaves, heads_second)
    except Exception as error:  # the compiler raises types of its own
        return first_line(error)


# ---- FlashAttention-3


@functools.cache
def fa3_operators():
    if "FA3_SO" not in os.environ:
        raise RuntimeError("FA3_SO is not set")
    torch.ops.load_library(os.environ["FA3_SO"])
    return torch.ops.flash_attn_3


def fa3_forward(name: str, problem: Problem) -> Contender | str:
    case, bounds = problem.case, problem.cu_seqlens
    windowed = case.window_left is not None
    keywords = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal and not windowed}
    if windowed:
        keywords |= {"window_size_left": case.window_left, "window_size_right": 0}
    if bounds is not None:
        keywords |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        keywords |= {"max_seqlen_q": case.seqlen, "max_seqlen_k": case.seqlen}
    if problem.dtype == FP8:
        scales = torch.ones(case.batch, case.heads_k, device=problem.q.device)
        keywords |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), scales)
    try:
        forward = fa3_operators().fwd

        def call() -> tuple:
            found = forward(problem.q, problem.k, problem.v, **keywords)
            return (found if isinstance(found, torch.Tensor) else found[0],)

        call()
    except (RuntimeError, OSError) as error:
        return first_line(error)
    return Contender(name, repeat(call), answer=call)


@functools.cache
def _fa3_jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    library = ctypes.cdll.LoadLibrary(os.environ["DEW3_SO"])
    for name in ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd"):
        target = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, target, platform="CUDA")
    return jax


def fa3_backward(name: str, problem: Problem) -> Contender | str:
    """Runs on tensors of its own (random, same law), on JAX's stream."""
    case = problem.case
    if "DEW3_SO" not in os.environ:
        return "DEW3_SO is not set"
    if case.lengths is not None:
        return "the JAX build has no packed sequences"
    if problem.dtype == FP8:
        return "FlashAttention-3 has no FP8 backward"
    try:
        jax = _fa3_jax()
    except (ImportError, OSError) as error:
        return first_line(error)
    import numpy as np

    jnp = jax.numpy
    element = {torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16}[problem.dtype]
    shape_q = (case.batch, case.seqlen, case.heads_q, case.head_dim)
    shape_k = (case.batch, case.seqlen, case.heads_k, case.head_dim)
    windowed = case.window_left is not None
    attributes = {
        "softmax_scale": np.float64(case.head_dim**-0.5),
        "is_causal": case.causal and not windowed,
        "window_size_left": np.int64(-1 if case.window_left is None else case.window_left),
        "window_size_right": np.int64(0 if windowed else -1),
    }
    like, f32 = jax.ShapeDtypeStruct, jnp.float32
    lse_shape = (case.batch, case.heads_q, case.seqlen)
    scratch = like((case.heads_q * (case.batch * case.seqlen + 128 * (case.batch + 1)),), f32)

    @jax.jit
    def forward(q, k, v):
        results = (like(shape_q, q.dtype), like(lse_shape, f32))
        results += (like((1, 1, 1, 1), f32), like((1, 1, 1), f32))
        return jax.ffi.ffi_call("dew_flash3_mha_fwd", results)(q, k, v, **attributes)[:2]

    @jax.jit
    def backward(g, q, k, v, o, lse):
        gradients = tuple(like(shape, q.dtype) for shape in (shape_q, shape_k, shape_k))
        call = jax.ffi.ffi_call("dew_flash3_mha_bwd", (*gradients, scratch, scratch))
        return call(g, q, k, v, o, lse, **attributes)[:3]

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (shape_q, shape_k, shape_k, shape_q)
    made = zip(keys, shapes, strict=True)
    q, k, v, g = (jax.random.normal(key, shape, element) for key, shape in made)
    last: list = []
    try:
        o, lse = forward(q, k, v)
        last[:] = backward(g, q, k, v, o, lse)
        jax.block_until_ready(last)
    except Exception as error:  # jaxlib raises its own, unexported types
        return first_line(error)

    def loop(n: int):
        for _ in range(n):
            last[:] = backward(g, q, k, v, o, lse)

    def in_torch(arrays) -> tuple:
        jax.block_until_ready(arrays)
        return tuple(torch.utils.dlpack.from_dlpack(x) for x in arrays)

    return Contender(
        name,
        loop,
        wall=True,
        wait=lambda: jax.block_until_ready(last),
        answer=lambda: in_torch(backward(g, q, k, v, o, lse)),
        inputs=lambda: in_torch((q, k, v, g)),
    )


def fa3(name: str, problem: Problem) -> Contender | str:
    if problem.what == "forward+backward":
        return "its forward and backward are parts of different libraries"
    return (fa3_forward if problem.what == "forward" else fa3_backward)(name, problem)


def cudnn_fp8(name: str, problem: Problem) -> Contender | str:
    from pantile.bench import cudnn_fp8 as module

    return module.contender(name, problem)


# ---- the list


def versions() -> dict[str, str]:
    """What the peers are that torch does not bring: the hash of a library, or a release."""
    found = {}
    for name in ("FA3_SO", "DEW3_SO"):
        if name in os.environ and os.path.exists(os.environ[name]):
            digest = hashlib.sha256(pathlib.Path(os.environ[name]).read_bytes()).hexdigest()
            found[name] = f"sha256 {digest[:12]}"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["nvidia-cudnn-frontend"] = importlib.metadata.version("nvidia-cudnn-frontend")
    return found


Peer = Callable[[str, Problem], "Contender | str"]


def _sdpa(backend: SDPBackend | None) -> Peer:
    return lambda name, problem: torch_sdpa(name, backend, problem)


GPU_PEERS: dict[str, Peer] = {
    "FA3": fa3,
    **{name: _sdpa(backend) for backend, name in SDPA.items()},
    "FlexAttention (torch)": flex,
    "cuDNN FP8": cudnn_fp8,
}
CPU_PEERS: dict[str, Peer] = {
    "torch": _sdpa(None),
    "math (torch)": _sdpa(SDPBackend.MATH),
}


def of_device(device: str) -> dict[str, Peer]:
    return GPU_PEERS if device == "cuda" else CPU_PEERS


def chosen(text: str, device: str) -> list[str]:
    """Peers named in a comma-separated list; `all` is every one; none for an empty list."""
    known = of_device(device)
    names = list(known) if text == "all" else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(f"peer {name!r} is not known; there are: {', '.join(known)}")
    return names
