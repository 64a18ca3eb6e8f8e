"""Ties the bindings to the torch that is loaded: tensors, streams, workspaces and threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from pantile import _C

_OLDEST_TORCH = (2, 6)

# DLPack's (code, bits) of the dtypes a caller may hand over by mistake or on purpose.
_DTYPES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
_DEVICES = {"cpu": 1, "cuda": 2}


# ---- torch before 2.11, which has no DLPack exchange table


def describe(tensor: torch.Tensor) -> tuple:
    """Address, device type and index, dtype code and bits, shape, strides, in DLPack's numbers."""
    code, bits = _DTYPES[tensor.dtype]
    device = tensor.device
    return (
        tensor.data_ptr(),
        _DEVICES[device.type],
        device.index or 0,
        code,
        bits,
        tuple(tensor.shape),
        tensor.stride(),
    )


def current_stream(device_index: int) -> int:
    return torch.cuda.current_stream(device_index).cuda_stream


# ---- CUDA workspaces


class _Block:
    """Scratch memory of one thread, device, stream and pass."""

    def __init__(self, device: torch.device | str, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        self.zero_bytes = size  # a prefix that is known to be zero


class WorkspaceLender:
    """Lends a kernel the scratch memory that its plan asks for.

    Runs on one stream follow each other, so they share a block; runs on different streams, or
    launched by different threads, may interleave, so they do not. A plan's first ``zeroed`` bytes
    must be zero and are left zero, which spares clearing them before every launch.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def lend(self, device: torch.device | str, key: tuple, size: int, zeroed: int) -> torch.Tensor:
        blocks = self._local.__dict__
        block = blocks.get(key)
        if block is None or block.tensor.numel() < size:
            block = blocks[key] = None  # freed first, or the peak would hold both
            block = blocks[key] = _Block(device, size)
        if block.zero_bytes < zeroed:
            block.tensor[:zeroed].zero_()
            block.zero_bytes = zeroed
        if size > zeroed:
            block.zero_bytes = zeroed  # what lies behind will be written over
        if _C.checks_workspaces():
            self._check(block, key, zeroed)
        return block.tensor

    def _check(self, block: _Block, key: tuple, zeroed: int) -> None:
        """Checked mode, before a run."""
        try:
            require_zeros(block.tensor, key[-1], zeroed, "before")
        except RuntimeError:
            del self._local.__dict__[key]
            raise
        if _fill is not None and block.tensor.numel() > zeroed:
            _fill(block.tensor[zeroed:])
            block.zero_bytes = zeroed

    def forget(self, block: torch.Tensor) -> None:
        """Lends this block no more."""
        blocks = self._local.__dict__
        for key in [key for key, lent in blocks.items() if lent and lent.tensor is block]:
            del blocks[key]


_lender = WorkspaceLender()


# ---- checked mode: PANTILE_CHECK_WORKSPACE=1, or the tests. What a plan says about the zeros of
# its workspace is verified before and after each run, which waits for the GPU twice.

_fill: Callable[[torch.Tensor], None] | None = None  # tests: what to do to the rest of a block


def require_zeros(block: torch.Tensor, pass_: str, zeroed: int, when: str) -> None:
    """Raises when one of the first ``zeroed`` bytes is not zero; ``when``: before or after."""
    if zeroed == 0 or not block[:zeroed].any():
        return
    wrong = block[:zeroed].count_nonzero().item()
    raise RuntimeError(
        f"workspace of the {pass_} pass: {wrong} of the first {zeroed} bytes are not zero {when} "
        "the run; every run must leave them zero"
    )


def check_after_run(block: torch.Tensor, pass_: str, zeroed: int) -> None:
    """Called by the bindings in checked mode."""
    try:
        require_zeros(block, pass_, zeroed, "after")
    except RuntimeError:
        _lender.forget(block)
        raise


@contextlib.contextmanager
def checked_workspaces(fill: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
    """Checked mode while the block lasts. ``fill`` is called with the part of each CUDA block that
    may hold anything, before each run."""
    global _fill
    before = _C.checks_workspaces(), _fill
    _C.check_workspaces(True)
    _fill = fill
    try:
        yield
    finally:
        _C.check_workspaces(before[0])
        _fill = before[1]


is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or (lambda: False)


def lend_workspace(
    device_index: int, stream: int, pass_: str, size: int, zeroed: int, capturing: bool
):
    device = torch.device("cuda", device_index)
    if capturing:
        # The block belongs to the graph: its clearing is captured and its memory replayed.
        block = torch.empty(size, dtype=torch.uint8, device=device)
        if zeroed > 0:
            block[:zeroed].zero_()
        return block
    return _lender.lend(device, (device_index, stream, pass_), size, zeroed)


# ---- CPU threads


def _libtorch_address(name: str) -> int:
    """Address of a C function of libtorch_cpu, or 0 when this torch does not export it."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    prefix = "" if sys.platform == "win32" else "lib"
    path = os.path.join(os.path.dirname(torch.__file__), "lib", f"{prefix}torch_cpu.{suffix}")
    try:
        function = getattr(ctypes.CDLL(path), name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def thread_count() -> int:
    """torch's intra-op threads, for torch versions whose count C++ cannot read."""
    return torch.get_num_threads()


def install() -> bool:
    """Hands everything to the bindings. True when C++ follows torch's thread count by itself."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(f"pantile needs torch 2.6 or newer; this is torch {torch.__version__}")
    threads = _libtorch_address("torch_get_num_threads")
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    _C.set_torch(
        torch.Tensor, exchange, describe, current_stream, lend_workspace, is_capturing, threads
    )
    parallel_for = _libtorch_address("torch_parallel_for")
    if parallel_for:
        _C.set_parallel_for(parallel_for)
        if hasattr(os, "register_at_fork"):
            # OpenMP, which torch's loop stands on, hangs in the child of a process that used it.
            os.register_at_fork(after_in_child=lambda: _C.set_parallel_for(0))
    return bool(threads)
