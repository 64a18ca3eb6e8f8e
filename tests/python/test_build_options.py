"""What a build may leave out (cmake/build_options.cmake), and which tests are skipped then."""

from __future__ import annotations

import os
import pathlib
import select
import subprocess
import sys
from types import SimpleNamespace

import conftest
import pantile
import pytest
import torch
from support import Target, fp8_exps

AMPERE = Target("ampere", "cuda")
AMPERE_F32 = Target("ampere", "cuda", torch.float32)
ROW = {"backend": "ampere", "dtype": "bf16", "name": "a row"}


def item(*markers: str, **parameters) -> SimpleNamespace:
    made = SimpleNamespace(get_closest_marker=lambda name: name if name in markers else None)
    if parameters:
        made.callspec = SimpleNamespace(params=parameters)
    return made


@pytest.mark.parametrize(
    ("made", "on_hopper", "elsewhere"),
    [
        (item(), [], []),
        (item("ampere"), ["ampere_on_hopper"], []),
        (item(target=AMPERE), ["ampere_on_hopper"], []),
        (item(target=AMPERE_F32), [], []),
        (item(row=ROW), ["ampere_on_hopper"], []),
        (item(row={**ROW, "dtype": "f32"}), [], []),
        (item(backend="ampere", name="64x128"), ["ampere_on_hopper"], []),
        (item("ampere", "experiments"), ["experiments", "ampere_on_hopper"], ["experiments"]),
        (item(exp="mixed", target=Target("hopper", "cuda")), ["experiments"], ["experiments"]),
        (item(exp="exp2"), [], []),
    ],
)
def test_what_a_test_on_a_gpu_needs(made, on_hopper, elsewhere, monkeypatch):
    for capability, expected in (((9, 0), on_hopper), ((8, 0), elsewhere)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda answer=capability: answer)
        assert conftest.needed_build_options(made) == expected


def test_the_build_says_what_it_has():
    info = pantile.build_info()
    assert isinstance(info["experiments"], bool)
    assert isinstance(info["ampere_on_hopper"], bool)


def test_exponentials_of_a_backend():
    assert fp8_exps(Target("reference", "cpu")) == ()
    assert fp8_exps(Target("cpu", "cpu")) == ("code", "mixed", "exp2")
    assert ("mixed" in fp8_exps(Target("hopper", "cuda"))) == pantile.build_info()["experiments"]
    assert fp8_exps(Target("ampere", "cuda")) == ("code", "exp2")


def test_large_tests_share_memory(tmp_path):
    """As many at a time as there are shares, among processes; one that dies frees its share."""
    script = (
        "import conftest, os, sys\n"
        "print('ready', flush=True)\n"
        "with conftest.share_of_memory(2, sys.argv[1]):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read(1) or os._exit(1)\n"
        "print('out', flush=True)\n"
    )

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=pathlib.Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    leaves, dies = start(), start()
    for process in (leaves, dies):
        assert process.stdout.readline() == b"ready\n"
        assert process.stdout.readline() == b"in\n"
    third = start()
    assert third.stdout.readline() == b"ready\n"
    assert not select.select([third.stdout], [], [], 0.5)[0], "three at a time with two shares"
    dies.kill()
    assert third.stdout.readline() == b"in\n"
    for process in (leaves, third):
        out, _ = process.communicate(b".")
        assert out == b"out\n"
    dies.wait()
