"""Kernels read and write nothing behind the tensors of a call: the cases of tools/gpu_sanitizer.py
with tensors that end where mapped memory ends. In other processes: a fault ends a context."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pantile
import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
SECONDS = 300
# Variants with tensors, in both schedules of the backward; places of keys; caches of each kind.
ONLY = (
    r"^variant d(128x128|192x128) (alibi|bias|sinks|elements|documents|prefix|score-expression)$"
    r"|^ranges d64x64|^pages d64 |^cache d128x128 |^fp8-backward d64 |^bfloat16 d192x128 packed"
)

pytestmark = pytest.mark.gpu


def python(*words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), *sys.path])}
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize("missing", [0, 16])
def test_reading_behind_the_tensor_faults(missing):
    done = python(
        "-c",
        "import torch, guarded_memory\n"
        f"x = guarded_memory.guarded(torch.ones(8, device='cuda'), {missing})\n"
        "print('sum', x.sum().item())",
    )
    assert (done.returncode == 0) is (missing == 0), done.stderr[-2000:]
    assert ("sum 8.0" in done.stdout) is (missing == 0)
    assert ("illegal memory access" in done.stderr) is (missing != 0), done.stderr[-2000:]


@pytest.mark.parametrize("backend", ["hopper", pytest.param("ampere", marks=pytest.mark.ampere)])
def test_nothing_behind_a_tensor_is_touched(backend):
    if not any(row["backend"] == backend for row in pantile.kernels()):
        pytest.skip(f"no {backend} kernels in this build")
    script = str(TOOLS / "gpu_sanitizer.py")
    words = ["--run", "--guard", "--backend", backend, "--only", ONLY]
    wanted = python(script, "--list", "--backend", backend).stdout.splitlines()
    wanted = [x for x in wanted if re.search(ONLY, x.removeprefix(f"{backend} "))]
    done = python(script, *words)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    assert len(re.findall(r"^ran ", done.stdout, re.M)) == len(wanted) > 5
