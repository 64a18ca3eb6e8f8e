"""GPU memory with nothing behind it: a tensor that ends where mapped addresses end, so that a
kernel that reads or writes past it stops with an illegal access, without a tool.

    with guarded_tensors():      # what x.to("cuda") copies from the CPU is such a tensor
        ...

CUDA Driver API, "Virtual Memory Management": addresses are reserved for one granule more than is
mapped. A tensor's first byte is aligned to 16 bytes, as kernels may want, so that up to 15 bytes
behind one of another size are mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

ALIGN_BYTES = 16
_PINNED, _DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0  # of cuda.h


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Array:
    """Bytes for torch.as_tensor()."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _call(name: str, *arguments) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


def mapped_end(count: int) -> int:
    """The address behind ``count`` bytes or more of new memory, at which nothing is mapped. They
    are never freed: for a process that ends soon."""
    device = torch.cuda.current_device()
    torch.cuda.current_stream().synchronize()  # the context exists
    properties = _Properties(type=_PINNED, location=_Location(_DEVICE, device))
    granule, address, handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    _call(
        "cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(properties), _MINIMUM
    )
    size = -(-max(count, 1) // granule.value) * granule.value
    zero, whole = ctypes.c_uint64(0), ctypes.c_size_t(size)
    reserved = ctypes.c_size_t(size + granule.value)
    _call("cuMemAddressReserve", ctypes.byref(address), reserved, ctypes.c_size_t(0), zero, zero)
    _call("cuMemCreate", ctypes.byref(handle), whole, ctypes.byref(properties), zero)
    _call("cuMemMap", address, whole, ctypes.c_size_t(0), handle, zero)
    access = _Access(_Location(_DEVICE, device), _READ_AND_WRITE)
    _call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
    return address.value + size


def guarded(x: torch.Tensor, missing: int = 0) -> torch.Tensor:
    """A contiguous copy of ``x``, of which the last ``missing`` bytes, a multiple of 16, lie behind
    what is mapped."""
    count = x.numel() * x.element_size()
    room = -(-count // ALIGN_BYTES) * ALIGN_BYTES - missing
    raw = torch.as_tensor(_Array(mapped_end(room) - room, count), device=x.device)
    found = raw.view(x.dtype).view(x.shape)
    return found if missing else found.copy_(x)


@contextlib.contextmanager
def guarded_tensors() -> Iterator[None]:
    """Tensors of the CPU that ``to()`` copies to the GPU end where mapped memory ends."""
    plain = torch.Tensor.to

    def to(self, *arguments, **keywords):
        moved = plain(self, *arguments, **keywords)
        if self.is_cuda or not moved.is_cuda or moved.numel() == 0 or moved.requires_grad:
            return moved
        return guarded(moved)

    torch.Tensor.to = to
    try:
        yield
    finally:
        torch.Tensor.to = plain
