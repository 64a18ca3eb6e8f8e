"""What this build, this machine and the kernel table offer."""

from __future__ import annotations

import json
import sys

from pantile import _C


def build_info() -> dict:
    """What was compiled: version, compiler, whether CUDA is in and if not why, architectures."""
    return json.loads(_C.build_info())


def devices() -> list[dict]:
    """The CPU and every CUDA device of this machine, each a dict of its properties."""
    return _C.devices()[0]


def cuda_reason() -> str:
    """Why there is no CUDA device, in the driver's or the build's words; empty if there is one."""
    return _C.devices()[1]


def kernels() -> list[dict]:
    """The kernel table, in the order in which its rows are tried."""
    return _C.kernels()


def tensor_path() -> str:
    """How tensors reach C++ in this process."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "NumPy arrays (torch is not imported)"
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return "DLPack exchange table"
    return "tensor attributes (torch before 2.11)"
