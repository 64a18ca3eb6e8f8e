"""tools/gpu_sanitizer.py: which kernels its cases reach, and what it makes of a tool's output."""

from __future__ import annotations

import json
import re

import gpu_sanitizer
import gpu_sanitizer_cases
import pantile
import pytest
import racecheck_known
import torch
from pantile import _direct

PASSES = ("forward", "backward")  # the cases of which follow the kernel table


def labels(backend: str) -> list[str]:
    return [label for label, _ in gpu_sanitizer.cases(backend)]


@pytest.mark.parametrize("backend", gpu_sanitizer.BACKENDS)
def test_every_head_dim_of_the_kernel_table_is_met(backend):
    found = labels(backend)
    assert len(set(found)) == len(found)
    for row in pantile.kernels():
        if row["backend"] != backend or row["pass"] not in PASSES or row["dtype"] == "f16":
            continue
        dtype = {"bf16": "bfloat16", "f32": "float32", "e4m3": "fp8"}[row["dtype"]]
        dims = f"d{row['head_dim']}" + ("" if dtype == "fp8" else f"x{row['head_dim_v']}")
        for name in gpu_sanitizer.SHAPES:
            assert any(x.startswith(f"{dtype} {dims} {name} ") for x in found), row["name"]


@pytest.mark.parametrize("name", gpu_sanitizer.SHAPES)
def test_the_cases_run(name, monkeypatch):
    """On the CPU: what a case calls, and with what."""
    monkeypatch.setattr(gpu_sanitizer, "DEVICE", "cpu")
    shape = gpu_sanitizer.SHAPES[name]
    shape = gpu_sanitizer.Shape(**vars(shape) | {"batch": min(shape.batch, 2)})
    gpu_sanitizer._both_passes("cpu", "bfloat16", (24, 40), shape)()
    gpu_sanitizer._fp8(32, shape, "code", "cpu")()


MORE_PASSES = {"decode": "cache", "append": "cache", "quantize": "fp8"}  # labels of other passes


@pytest.mark.parametrize("backend", gpu_sanitizer.BACKENDS)
def test_every_pass_of_the_kernel_table_has_a_case(backend):
    """append and the 8-bit caches by the cases of decode, which append first."""
    found = labels(backend)
    for row in pantile.kernels():
        if row["backend"] != backend or row["pass"] in PASSES or row["dtype"] == "f16":
            continue
        word = MORE_PASSES[row["pass"]]  # a new pass needs a case, and its word here
        dims = f"d{row['head_dim']}x{row['head_dim_v']}"
        wanted = f"{word} {dims} " if row["pass"] == "decode" else f"{word} "
        assert any(label.startswith(wanted) for label in found), row["name"]


@pytest.mark.parametrize("backend", gpu_sanitizer.BACKENDS)
def test_every_case_is_in_one_part(backend):
    for label in labels(backend):
        parts = [p for p, pattern in gpu_sanitizer.PARTS.items() if re.search(pattern, label)]
        assert len(parts) == 1, label


def test_parts_are_processes_of_their_own(monkeypatch):
    """Side by side; none for a part without cases."""
    ran = []

    def under(tool, what, words, count):
        ran.append((tool, what, words[words.index("--parts") + 1], "--written" in words))
        return {"tool": tool, "what": what}

    monkeypatch.setattr(gpu_sanitizer, "under", under)
    monkeypatch.setitem(gpu_sanitizer.FP8_DIMS, "ampere", ())
    tools, backends, parts = ("racecheck", "initcheck"), ("hopper", "ampere"), ("fp8", "caches")
    found = gpu_sanitizer.check_cases(tools, backends, parts, "d64", 3)
    whats = [
        "hopper kernels, fp8, d64",
        "hopper kernels, caches, d64",
        "ampere kernels, caches, d64",
    ]
    expected = [(tool, what) for tool in tools for what in whats]
    assert [(x["tool"], x["what"]) for x in found] == expected
    assert sorted(ran) == sorted(
        (tool, what, what.split(", ")[1], tool == "initcheck") for tool, what in expected
    )


def test_every_argument_that_changes_attention_has_a_case():
    """The names are those of the library: a new one needs a case."""
    found = set()
    for name in gpu_sanitizer_cases.SERVED["hopper"]:
        found |= set(gpu_sanitizer_cases.CHANGES[name]("cpu"))
    assert found == set(pantile._variants.NAMES)


@pytest.mark.parametrize(
    ("label", "run"),
    [
        case
        for case in gpu_sanitizer_cases.cases("hopper", "cpu")
        if any(f" {dims}" in case[0] for dims in ("d64", "d64x64", "d576x512"))
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_further_cases_run(label, run, monkeypatch):
    """On the CPU: what a case calls, and with what."""
    options = pantile.Options

    def on_the_cpu(backend, **more):
        return options(backend="cpu", **more)

    monkeypatch.setattr(gpu_sanitizer_cases.pantile, "Options", on_the_cpu)
    run()


CLEAN = "ran a\nran b\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "status", "ran", "ok"),
    [(CLEAN, 0, 2, True), (CLEAN, 99, 2, False), (CLEAN, 0, 0, False), ("ran a\n", 0, 1, False)],
    ids=["clean", "errors", "no case", "no summary"],
)
def test_only_a_clean_run_of_something_is_a_success(text, status, ran, ok):
    found = gpu_sanitizer.result_of("memcheck", "hopper kernels", text, status, ran, 1.5)
    assert found["ok"] is ok


WRONG = """========= COMPUTE-SANITIZER
case variant a
ran variant a
case variant b
========= Invalid __global__ read of size 4 bytes
=========     at pantile_variant+0x10
=========
========= Invalid __global__ read of size 4 bytes
ran variant b
case variant c
Traceback
========= Target application returned an error
========= ERROR SUMMARY: 932 errors
"""


def test_the_wrong_cases_are_named_with_the_first_errors():
    found = gpu_sanitizer.complaints(WRONG)
    assert list(found) == ["variant b", "variant c"]
    assert found["variant b"].splitlines()[0].endswith("Invalid __global__ read of size 4 bytes")
    assert gpu_sanitizer.complaints(CLEAN.replace("ran a", "case a\nran a")) == {}
    many = WRONG + "x" * 9000
    said = gpu_sanitizer.excerpts(many)
    assert said.startswith("wrong: variant b\n========= Invalid __global__ read")
    assert said.endswith("x" * gpu_sanitizer.LAST_CHARACTERS)
    assert len(said) < len(many)
    of_tests = WRONG.replace("case variant", "test") + "x" * 9000
    assert gpu_sanitizer.excerpts(of_tests).startswith("========= Invalid __global__ read")


PAIRED = (
    "void pantile::hopper::backward_paired<pantile::hopper::PairedConfig<(pantile::DType)2,"
    " (int)64, (int)64>, (pantile::MaskKind)1, (pantile::hopper::SumKind)1>("
    "pantile::hopper::BackwardMaps, pantile::hopper::BackwardParams)"
)


def hazards(*found: tuple, kind: str = "WAR", kernel: str = PAIRED) -> str:
    """racecheck's text about (reading thread, writing thread)."""
    text = "========= COMPUTE-SANITIZER\ncase a\n"
    for read, write in found:
        text += (
            f"========= Error: Potential {kind} hazard detected at __shared__ 0x34e08 "
            "in block (4,0,0) :\n"
            f"=========     Read Thread ({read},0,0) at {kernel}+0x8240\n"
            f"=========     Write Thread ({write},0,0) at {kernel}+0x18b10\n"
            "=========     Current Value : 0, Incoming Value : ?\n========= \n"
        )
    count = len(found)
    text += "ran a\n========= RACECHECK SUMMARY: "
    return text + f"{count} hazards displayed ({count} errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        (hazards((131, 0), (135, 0)), True),
        (hazards((131, 0), (128, 0)), False),  # lane 0 itself
        (hazards((131, 32)), False),  # not the loader
        (hazards((3, 0)), False),  # of the loader's own warp
        (hazards((131, 0), kind="RAW"), False),
        (hazards((131, 0), kernel=PAIRED.replace("SumKind)1", "SumKind)0")), False),
        (hazards((131, 0), kernel="pantile_variant"), True),
        (hazards((131, 0), kernel="pantile::decode::kernel<"), False),
        (hazards((131, 0)).replace("(1 errors", "(2 errors"), False),  # one is not shown
        (hazards(), False),  # an error, but no hazard
    ],
    ids=lambda x: "" if isinstance(x, str) else str(x),
)
def test_known_hazards_of_racecheck(text, ok):
    """By kernel, kind and threads; every other one fails, and so do those that are not shown."""
    found = gpu_sanitizer.result_of("racecheck", "x", text, gpu_sanitizer.FOUND, 1, 1.5)
    assert found["ok"] is ok, found
    assert gpu_sanitizer.result_of("racecheck", "x", text, 1, 1, 1.5)["ok"] is False
    assert (
        gpu_sanitizer.result_of("memcheck", "x", text, gpu_sanitizer.FOUND, 1, 1.5)["ok"] is False
    )


def test_known_hazards_are_no_complaints():
    report = racecheck_known.read(hazards((131, 0), (128, 0), (135, 0)))
    assert (report.known, report.others.total(), report.complete) == (2, 1, True)
    (said,) = gpu_sanitizer.complaints(report.text).values()
    assert "Thread (128,0,0)" in said
    assert "Thread (131,0,0)" not in said


def test_tests_are_counted_by_the_last_line_of_pytest():
    text = "....s\nSKIPPED [3] x: 9 passed\n12 passed, 3 skipped, 2 failed in 8.51s\n" + CLEAN
    assert gpu_sanitizer.tests_run(text) == 14
    bar = "===== 7 passed, 1 warning in 61.20s (0:01:01) =====\n========= ERROR SUMMARY: 0 errors"
    assert gpu_sanitizer.tests_run(bar) == 7
    assert gpu_sanitizer.tests_run("3 skipped in 1.00s") == 0
    assert gpu_sanitizer.tests_run("") == 0


def test_results_of_one_build_add_up(tmp_path, monkeypatch):
    path = tmp_path / "sanitizer.json"
    monkeypatch.setattr(gpu_sanitizer, "RECORD", path)
    facts = dict.fromkeys(gpu_sanitizer.verification.SAME, "x")
    monkeypatch.setattr(gpu_sanitizer.verification, "facts", lambda: dict(facts))

    def tools() -> list:
        return [(x["tool"], x["ok"]) for x in json.loads(path.read_text())["results"]]

    gpu_sanitizer.record([{"tool": "memcheck", "what": "a", "ok": False}], gpu_sanitizer.RECORD)
    gpu_sanitizer.record([{"tool": "racecheck", "what": "a", "ok": True}], gpu_sanitizer.RECORD)
    assert tools() == [("memcheck", False), ("racecheck", True)]
    gpu_sanitizer.record([{"tool": "memcheck", "what": "a", "ok": True}], gpu_sanitizer.RECORD)
    assert tools() == [("racecheck", True), ("memcheck", True)]
    facts["library"] = "y"
    gpu_sanitizer.record([{"tool": "synccheck", "what": "a", "ok": True}], gpu_sanitizer.RECORD)
    assert tools() == [("synccheck", True)]


def test_outputs_count_as_written_for_initcheck(monkeypatch):
    """It does not see what TMA writes."""
    made = torch.full((2, 3), torch.nan), None
    monkeypatch.setattr(_direct, "_new_outputs", lambda *_: made)
    gpu_sanitizer.count_outputs_as_written()
    assert not _direct._new_outputs()[0].any()
    assert gpu_sanitizer.written("initcheck") == ["--written"]
    assert gpu_sanitizer.written("memcheck") == []
