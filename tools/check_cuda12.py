#!/usr/bin/env python3
"""Compiles one hopper kernel with CUDA 12.8, to prove that the sources still build with it.

PyPI's CUDA 12 packages hold no nvcc program; they hold its compiler as a library, NVRTC, and its
headers. NVRTC compiles the device code of the row down to machine code, and the host compiler
checks the files that call CUDA against the CUDA 12.8 headers.

usage: check_cuda12.py FOLDER, where `pip install --target FOLDER` put nvidia-cuda-nvrtc-cu12,
nvidia-cuda-runtime-cu12 and nvidia-cuda-nvcc-cu12
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDES = ("cuda", "cpp", "cpp/include")
STANDARD_HEADERS = "cpp/jit/standard"  # what device code uses of them: NVRTC has none
KERNEL = (
    "pantile::hopper::forward_kernel<"
    "pantile::hopper::ForwardVariant<128, 128, pantile::MaskKind::causal, false>, "
    "pantile::DType::bf16>"
)
SOURCE = '#include "hopper/forward/kernel.cuh"\n'


def compile_kernel(packages: pathlib.Path) -> bytes:
    folder = packages / "nvidia"
    nvrtc = ctypes.CDLL(str(folder / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        code = getattr(nvrtc, name)(*arguments)
        if code == 0:
            return
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        reason = nvrtc.nvrtcGetErrorString(code).decode()
        raise SystemExit(f"{name}: {reason}\n{log.value.decode()}")

    def strings(values: list[str]) -> ctypes.Array:
        return (ctypes.c_char_p * len(values))(*(v.encode() for v in values))

    call("nvrtcCreateProgram", ctypes.byref(program), SOURCE.encode(), b"kernel.cu", 0, None, None)
    call("nvrtcAddNameExpression", program, KERNEL.encode())
    options = ["--gpu-architecture=sm_90a", "--std=c++20", "--device-as-default-execution-space"]
    options += ["-DPANTILE_STATIC", *(f"-I{ROOT}/{name}" for name in (*INCLUDES, STANDARD_HEADERS))]
    call("nvrtcCompileProgram", program, len(options), strings(options))
    size = ctypes.c_size_t()
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, cubin)
    return cubin.raw


def check_host(packages: pathlib.Path) -> None:
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fsyntax-only", "-Wall", "-Werror"]
    command += [f"-I{ROOT}/{folder}" for folder in INCLUDES]
    for package in ("cuda_runtime", "cuda_nvcc"):
        command += ["-isystem", f"{packages}/nvidia/{package}/include"]
    for file in ("cuda/backend.cc", "cpp/jit/load_cuda.cc"):
        subprocess.run([*command, f"{ROOT}/{file}"], check=True)


def main() -> int:
    packages = pathlib.Path(sys.argv[1])
    cubin = compile_kernel(packages)
    if not cubin.startswith(b"\x7fELF") or b"forward_kernel" not in cubin:
        raise SystemExit("NVRTC gave no machine code of the kernel")
    check_host(packages)
    print(f"CUDA 12.8: {len(cubin)} bytes of machine code for {KERNEL}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
