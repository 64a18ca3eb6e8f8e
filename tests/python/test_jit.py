"""Kernels compiled at run time, as far as a machine without a GPU shows it: the command, where
NVRTC is looked for, and that plain calls load nothing. The rest is in tests/jit (C++)."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pantile
import pytest
from pantile import _C, _jit
from pantile import __main__ as command_line
from pantile._explain import RunTimeKernel

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

ATTENTION = """
[[attention]]
backend = "hopper"
dtype = "bf16"
head_dim = 128
mask = "causal"
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
        ("", "lists no [[attention]] and no [[kernel]]"),
        ("kernel = 3", "must have tables [[attention]] and [[kernel]] only"),
        ("[[kernels]]", "must have tables [[attention]] and [[kernel]] only"),
        ("[[kernel", "is not TOML"),
        (KERNEL.replace("arch = 90", ""), "kernel 1 lacks ['arch']; it may have ['arch', 'entry'"),
        (KERNEL + "more = 1", "kernel 1 has ['more']; it may have ['arch', 'entry'"),
        (KERNEL.replace("arch = 90", "arch = '90'"), "arch is '90'; it must be int"),
        (KERNEL.replace("arch = 90", "arch = true"), "arch is True; it must be int"),
        ("[[attention]]", "attention 1 lacks ['backend', 'dtype', 'head_dim', 'mask']"),
        (ATTENTION + "softcaps = true", "attention 1 has ['softcaps']"),
        (ATTENTION + "softcap = 30.0", "softcap is 30.0; it must be bool"),
        (ATTENTION + "alibi = 1", "alibi is 1; it must be bool"),
        (ATTENTION + "passes = ['both']", "passes has 'both'; it must have forward, backward"),
        (
            ATTENTION + "gradients = ['softcap']",
            "gradients has 'softcap'; it must have alibi, bias",
        ),
        (ATTENTION + "gradients = ['bias']", "gradients has 'bias', but bias is not given"),
        (ATTENTION.replace("bf16", "int8"), "dtype is 'int8'; it must be one of bf16, f16, f32"),
        (ATTENTION.replace("hopper", "cpu"), "backend is 'cpu'; it must be one of hopper, ampere"),
        (ATTENTION.replace("causal", "none"), "mask is 'none'; it must be one of full, causal"),
        (ATTENTION + "bias = 'bf16'", "bias is 'bf16'; it must be one of none, f32, as q"),
        (ATTENTION + "heads_k = 3", "heads_k is 3"),
    ],
)
def test_lists_are_checked(text, expected, tmp_path, capsys):
    arguments = ["compile", "--list", str(listed(tmp_path, text)), "-o", str(tmp_path / "out")]
    assert command_line.main(arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


HAS_CUDA = pantile.build_info()["cuda"]


@needs_nvrtc
@pytest.mark.skipif(not HAS_CUDA, reason="a build without CUDA has no plans for GPUs")
def test_kernels_of_variants_are_compiled(tmp_path, capsys):
    text = ATTENTION + "softcap = true\nalibi = true\ngradients = ['alibi']\npasses = ['forward']"
    out = tmp_path / "out"
    assert (
        command_line.main(["compile", "--list", str(listed(tmp_path, text)), "-o", str(out)]) == 0
    )
    assert len(list(out.iterdir())) == 1
    assert "hopper_forward_bf16_d128_causal softcap+alibi" in capsys.readouterr().out


def test_what_the_library_has_is_told(tmp_path, capsys):
    arguments = ["compile", "--list", str(listed(tmp_path, ATTENTION)), "-o", str(tmp_path / "out")]
    assert command_line.main(arguments) == 2
    expected = "the library has all kernels" if HAS_CUDA else "this build has no CUDA"
    assert expected in capsys.readouterr().err


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


def operands(dtype=np.float32) -> tuple:
    return tuple(np.ones((1, 8, 2, 16), dtype) for _ in range(3))


def test_compile_needs_nothing_for_the_cpu(monkeypatch):
    monkeypatch.setenv("PANTILE_JIT", "off")  # an attempt to compile would be an error
    assert pantile.compile(*operands(), causal=True) is None
    assert pantile.compile(*operands(), softcap=20.0, backward=False) is None


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"backward": 1}, TypeError, "backward is 1"),
        ({"verbose": True}, TypeError, "verbose"),
        ({"max_seqlen_q": 8}, ValueError, "max_seqlen_q is 8"),
        ({"options": pantile.Options(backend="hopper")}, pantile.UnsupportedError, "hopper"),
    ],
)
def test_compile_refuses_what_the_call_would(arguments, error, expected):
    with pytest.raises(error, match=expected):
        pantile.compile(*operands(), **arguments)


def test_compile_looks_at_both_passes():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.ones(1, 8, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    alibi = torch.ones(2, requires_grad=True)
    assert pantile.compile(q, k, v, causal=True, alibi=alibi) is None
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    packed = q[0], k[0], v[0]
    assert pantile.compile(*packed, lengths, lengths, 8, 8, dropout=0.1) is None


def test_explain_says_where_kernels_come_from():
    known = RunTimeKernel("row softcap", "disk: /k.kernel", False, 168, 8, "C7515")
    assert known.line() == (
        "  compiled at run time: row softcap: disk: /k.kernel, 168 registers, 8 bytes of spills, "
        "advisory C7515"
    )
    unknown = RunTimeKernel("row softcap", "not compiled yet", False, 0, 0, "")
    assert unknown.line().endswith("not compiled yet; the first call does that, or pantile.compile")
    q = np.ones((1, 4, 1, 8), np.float32)
    plan = pantile.explain(q, q, q, softcap=2.0)
    assert plan.forward.compiled == plan.backward.compiled == ()  # the CPU needs no compiler
    shown = dataclasses.replace(plan.forward, compiled=(known,)).lines("forward")
    assert known.line() in shown
