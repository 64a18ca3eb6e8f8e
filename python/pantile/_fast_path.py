"""Plain eager calls: a way around the dispatcher that does the same work.

It is taken only when nothing of torch can be watching: ordinary dense tensors, no mode, transform,
tracer, autocast or profiler. That question is asked through private names of torch. Where one of
them is missing, no call counts as plain, and every call goes through the dispatcher.
"""

from __future__ import annotations

import torch

from pantile import _C, _torch_private
from pantile._direct import THREADS_FOLLOW
from pantile._options import log
from pantile._torch_private import find, in_forward_mode, in_transform, key_set

Tensor = torch.Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Dispatch keys of ordinary tensors, and of those made in inference mode: not sparse, nested, lazily
# negated, fake, wrapped by a transform or on another device.
_PLAIN_KEYS = {
    *(key_set(d, "ADInplaceOrView", f"Autograd{d}", f"Autocast{d}") for d in ("CPU", "CUDA")),
    *(key_set(d, f"Autocast{d}") for d in ("CPU", "CUDA")),
}
_keys_of = find("torch._C._dispatch_keys")
_is_excluded = find("torch._C._dispatch_tls_is_dispatch_key_excluded")
_AUTOGRAD_KEYS = {
    on_gpu: _torch_private.dispatch_key(f"Autograd{device}")
    for on_gpu, device in ((False, "CPU"), (True, "CUDA"))
}
# Functions of torch; true: something watches, so that the dispatcher must be met.
WATCHERS = (
    in_transform,
    find("torch._C._len_torch_dispatch_stack"),
    find("torch._C._len_torch_function_stack"),
    find("torch._C._is_any_autocast_enabled"),
    find("torch.autograd._profiler_enabled"),
    find("torch._C._get_tracing_state"),
    in_forward_mode,
)
is_compiling = torch.compiler.is_compiling
grad_enabled = torch.is_grad_enabled

# Whether torch can tell that nothing watches.
AVAILABLE = not _torch_private.missing
if not AVAILABLE:
    log.warning(
        "torch %s has no %s: plain eager calls take the slower way through the dispatcher",
        torch.__version__,
        ", ".join(_torch_private.missing),
    )
# For the whole calls of the bindings (plain_calls.h). Where C++ cannot read torch's thread count,
# run_forward must pass it on.
WHOLE_CALLS = AVAILABLE and THREADS_FOLLOW


def make_outputs_by(empty_like) -> None:
    """What the whole calls of the bindings make outputs with, beside all else that they ask."""
    if WHOLE_CALLS:
        _C.set_plain(
            torch.nn.Parameter,
            grad_enabled,
            _is_excluded,
            tuple(_AUTOGRAD_KEYS.values()),
            WATCHERS,
            empty_like,
            torch.float32,
            torch.int8,
            torch.contiguous_format,
        )


make_outputs_by(torch.empty_like)


def is_plain(x: Tensor) -> bool:
    """An ordinary dense tensor whose memory holds its values, as far as torch tells."""
    return AVAILABLE and type(x) in _PLAIN_TYPES and _keys_of(x).raw_repr() in _PLAIN_KEYS


def present(tensors) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


def takes_short_cut(tensors: tuple[Tensor, ...]) -> bool:
    """Ordinary dense tensors, and no mode, transform, tracer, autocast or profiler at work.

    ``tensors`` are all that the bindings would read: what is lazily negated, lazily zero, a
    subclass or wrapped is made ordinary by the dispatcher and by nothing else.
    """
    return not is_compiling() and nothing_watches(tensors)


def nothing_watches(tensors: tuple[Tensor, ...]) -> bool:
    """The same of a call that is known not to be compiled."""
    if not AVAILABLE:
        return False
    for x in tensors:
        if type(x) not in _PLAIN_TYPES or _keys_of(x).raw_repr() not in _PLAIN_KEYS:
            return False
    for watches in WATCHERS:  # noqa: SIM110 (a generator costs as much as the calls)
        if watches():
            return False
    return True


def records(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd wants to know; not inside another operator's kernel, below autograd. Of
    tensors that take the short cut."""
    if grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return not _is_excluded(_AUTOGRAD_KEYS[q.is_cuda])
    return False


def records_any(tensors: tuple[Tensor, ...]) -> bool:
    """The same of any tensors, of which the first says where they are."""
    if grad_enabled() and any(x.requires_grad for x in tensors):
        return not _is_excluded(_AUTOGRAD_KEYS[tensors[0].is_cuda])
    return False
