"""Kernels compiled at run time, as far as a machine without a GPU shows it: the command, where
NVRTC is looked for, and that plain calls load nothing. The rest is in tests/jit (C++)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pantile import _C, _jit
from pantile import __main__ as command_line

KERNEL = """
[[kernel]]
name = "a kernel"
source = '''
#include "core/softmax_state.h"
extern "C" __global__ void fill(float* to) { to[threadIdx.x] = pantile::core::kInfinity; }
'''
entry = "fill"
arch = 90
"""

needs_nvrtc = pytest.mark.skipif(
    not _C.find_nvrtc()[0], reason="no NVRTC >= 12.9: pip install nvidia-cuda-nvrtc"
)


def listed(folder: Path, text: str) -> Path:
    path = folder / "list.toml"
    path.write_text(text)
    return path


@needs_nvrtc
def test_compile_writes_a_kernel(tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        command_line.main(["compile", "--list", str(listed(tmp_path, KERNEL)), "-o", str(out)]) == 0
    )
    (file,) = out.iterdir()
    assert file.suffix == ".kernel"
    assert file.read_bytes().startswith(b"pantile kernel 1\n")
    assert b"\x7fELF" in file.read_bytes()
    assert "a kernel" in capsys.readouterr().out


@needs_nvrtc
def test_errors_of_the_source_are_shown(tmp_path, capsys, caplog):
    text = KERNEL.replace("kInfinity", "kNothing")
    with caplog.at_level(logging.WARNING, logger="pantile"):
        status = command_line.main(["compile", "--list", str(listed(tmp_path, text)), "-o", "x"])
    assert status == 2
    assert "kernel.cu(2): error: " in capsys.readouterr().err
    assert "kNothing" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "lists no [[kernel]]"),
        ("kernel = 3", "it must have tables [[kernel]] only"),
        ("[[kernels]]", "it must have tables [[kernel]] only"),
        ("[[kernel", "is not TOML"),
        (KERNEL.replace("arch = 90", ""), "it must have ['arch', 'entry', 'name', 'source']"),
        (KERNEL.replace("arch = 90", "arch = '90'"), "arch is '90'; it must be int"),
        (KERNEL.replace("arch = 90", "arch = true"), "arch is True; it must be int"),
    ],
)
def test_lists_are_checked(text, expected, tmp_path, capsys):
    arguments = ["compile", "--list", str(listed(tmp_path, text)), "-o", str(tmp_path / "out")]
    assert command_line.main(arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_nvrtc
def test_the_architecture_is_checked():
    with pytest.raises(ValueError, match="arch 75; it must be 80 or 90"):
        _C.compile_kernel("name", "source", "entry", 75, "unused")


def test_a_missing_file_is_told(tmp_path, capsys):
    missing = tmp_path / "missing.toml"
    assert command_line.main(["compile", "--list", str(missing), "-o", "unused"]) == 2
    assert str(missing) in capsys.readouterr().err


def test_folders_of_packages(tmp_path, monkeypatch):
    for place in ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "with:colon" / "nvidia/cu13/lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "with:colon"), str(tmp_path)])
    assert _jit.nvrtc_folders() == [
        str(tmp_path / "nvidia/cu13/lib"),
        str(tmp_path / "nvidia/cuda_nvrtc/lib"),
    ]


def run_python(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def test_without_a_compiler_the_reason_is_told(tmp_path):
    source = "from pantile import _jit; print(_jit.describe_nvrtc())"
    missing = str(tmp_path / "libnvrtc.so.13")
    text = run_python(source, PANTILE_NVRTC=missing)
    assert text.startswith(f"no NVRTC >= 12.9 found (looked in PANTILE_NVRTC={missing}; ")
    assert "pip install" in text


def test_plain_calls_load_no_compiler(tmp_path):
    source = """
import numpy as np, pantile
x = np.ones((1, 8, 1, 16), np.float32)
pantile.attention(x, x, x, causal=True)
maps = open("/proc/self/maps").read()
print("nvrtc" in maps)
"""
    # PANTILE_JIT with an unknown value is an error as soon as anything looks at it.
    environment = {"PANTILE_JIT": "nonsense", "PANTILE_CACHE": str(tmp_path / "cache")}
    assert run_python(source, **environment) == "False\n"
    assert not (tmp_path / "cache").exists()
