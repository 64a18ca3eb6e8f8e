"""tools/accuracy.py: its exact answer and figures, and the golden file."""

from __future__ import annotations

import accuracy
import accuracy_cases
import accuracy_fp8
import pantile
import pytest
import torch
from pantile import reference
from pantile.bench import check

CASE = accuracy_cases.Case("bf16", 16, "causal", 70, "outlier")


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_exact_answer_is_the_textbook_in_double(mask, monkeypatch):
    monkeypatch.setattr(check, "CHUNK_SCORES", 32 * 2 * 70)  # chunks of 32 rows, the last ragged
    case = accuracy_cases.Case("f32", 16, mask, 70, "normal")
    inputs = accuracy_cases.draw(case, "cpu")
    found = accuracy_cases.exact(case, inputs, backward=True)
    leaves = [inputs[n].double().requires_grad_() for n in ("q", "k", "v")]
    o, lse = reference.attention(*leaves, causal=case.causal)
    gradients = torch.autograd.grad(o, leaves, inputs["grad_o"].double())
    for name, truth in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True):
        assert reference.error(found[name], truth) < 1e-12, name


def test_inputs_are_exact_in_the_dtype_and_repeat():
    inputs = accuracy_cases.draw(CASE, "cpu")
    for name, x in inputs.items():
        assert torch.equal(x, x.bfloat16().float())
        assert torch.equal(x, accuracy_cases.draw(CASE, "cpu")[name])
    large = accuracy_cases.draw(accuracy_cases.Case("f32", 64, "full", 500, "outlier"), "cpu")
    assert (large["q"].abs() > 7).float().mean().item() == pytest.approx(5e-4, abs=3e-4)
    assert large["grad_o"].abs().max() < 7


def test_laws_of_gradients_have_a_common_part():
    for law in accuracy_cases.GRADIENT_LAWS:
        inputs = accuracy_cases.draw(accuracy_cases.Case("f32", 64, "full", 500, law), "cpu")
        k, v = inputs["k"], inputs["v"]
        means = k.mean(1).abs()
        expected, size = (3.0, 3.0) if law == "offset 3" else (3 * k.std(1).mean().item(), 1.0)
        assert means.mean().item() == pytest.approx(expected, rel=0.1), law
        assert v.mean().item() == pytest.approx(size, abs=0.1), law
        assert abs(inputs["q"].mean().item()) < 0.05, law


def test_laws_of_the_softmax_modes():
    drawn = {
        law: accuracy_cases.draw(accuracy_cases.Case("f32", 64, "full", 512, law), "cpu")
        for law in ("growing", "uniform")
    }
    for law, inputs in drawn.items():
        q, k = (inputs[name].transpose(1, 2) for name in ("q", "k"))
        scores = q @ k.transpose(-1, -2) / 8
        if law == "growing":  # of the first query, from the last key to the first
            first = scores[0, 0, 0].flip(0)
            assert first[-64:].mean() > first[:64].mean() + 20
            assert (first.cummax(0).values.diff() > 0).sum() > 30
        else:
            assert scores.abs().max() < 0.01
            assert abs(inputs["v"].mean().item() - 1) < 0.05


def test_modes_are_measured_without_an_lse():
    """Every mode that there is, of few queries at the end; the CPU has one softmax."""
    (case, *_) = accuracy.mode_cases("cpu")
    rows = list(accuracy.measure_case(case, "cpu", False, accuracy.modes("cpu"), "accuracy_modes"))
    found = {row["implementation"]: row for row in rows}
    assert list(found) == ["pantile cpu, auto", "pantile cpu, vector", "textbook"]
    assert all(row["absent"] is None and row["queries"] == 64 for row in rows), rows
    assert set(found["pantile cpu, auto"]["errors"]) == {"o"}
    ours, textbook = (
        found[name]["errors"]["o"]["rmse"] for name in ("pantile cpu, auto", "textbook")
    )
    assert 0 < ours < 2 * textbook
    assert set(accuracy.modes("cuda")) > {"pantile ampere, tensor", "pantile ampere, surrogate"}
    cases = accuracy.mode_cases("cuda")
    assert max(case.length for case in cases) == 131072
    assert {case.law for case in cases} == set(accuracy_cases.MODE_LAWS)
    assert not any(case.queries for case in cases if case.causal)  # exact() has no such mask


def test_gradients_of_a_common_part_need_the_low_bits():
    """The sum of dS over the keys is 0; rounding O to 16 bits would leave an offset times K."""
    case = accuracy_cases.Case("bf16", 32, "full", 256, "offset 3")
    methods = {"ours": accuracy.implementations("cpu")["pantile cpu"]}
    (row,) = accuracy.measure_case(case, "cpu", True, methods)
    assert 0 < row["errors"]["dq"]["relative"] < 0.05


def test_error_figures():
    truth = {"o": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    found = accuracy_cases.errors({"o": torch.tensor([3.0, 3.0])}, truth)["o"]
    assert found == {"rmse": 0.7071, "max": 1.0, "relative": 0.2}


def test_every_implementation_of_this_machine_is_close():
    rows = list(accuracy.measure_case(CASE, "cpu", True, accuracy.implementations("cpu")))
    assert [row["implementation"] for row in rows] == list(accuracy.implementations("cpu"))
    for row in rows:
        assert row["absent"] is None
        for name in ("o", "dq", "dk", "dv"):
            assert 0 < row["errors"][name]["relative"] < 0.02, (row["implementation"], name)


def test_an_implementation_that_fails_is_named():
    case = accuracy_cases.Case("bf16", 16, "causal", 70, "normal")
    (row,) = accuracy.measure_case(case, "cpu", True, {"textbook": accuracy.run_textbook})
    assert row["absent"] is None
    rows = accuracy.measure_fp8(accuracy_cases.Case("f32", 16, "full", 40, "outlier"), "cpu")
    absent = {row["implementation"]: row["absent"] for row in rows}
    assert absent["FA3, per-head scales"]
    assert absent["pantile, block scales, Hadamard, K smoothing"] is None


def test_our_fp8_is_as_good_as_the_format_allows():
    case = accuracy_cases.Case("f32", 64, "full", 256, "outlier", heads=4)
    rows = {row["implementation"]: row["errors"] for row in accuracy.measure_fp8(case, "cpu")}
    rmse = {name: e["o"]["rmse"] for name, e in rows.items() if e}
    ours = rmse["pantile, block scales, Hadamard, K smoothing"]
    assert ours < 1.25 * rmse["exact arithmetic, blocks of 128 and Hadamard"]
    assert ours < 0.8 * rmse["baseline, per-tensor scales"]
    assert ours < 0.8 * rmse["pantile without Hadamard"]


# ---- FP8 emulation


def test_block_scales_fill_the_format():
    x = torch.randn(2, 300, 3, 8)
    scales = accuracy_fp8.scales_of(x, 128)
    assert scales.shape == (2, 3, 3)
    blocks = [x[:, 0:128], x[:, 128:256], x[:, 256:]]
    for i, block in enumerate(blocks):
        assert torch.equal(scales[:, i], block.abs().amax((1, 3)) / 448)
    assert accuracy_fp8.scales_of(x, None).shape == (2, 1, 3)
    error = (accuracy_fp8.through_fp8(x, 128) - x).abs() / x.abs().clamp_min(1e-2)
    assert error.max() < 2**-4 + 1e-6  # e4m3 keeps three bits after the leading one


def test_rotation_helps_against_outliers():
    case = accuracy_cases.Case("f32", 64, "full", 256, "outlier", heads=4)
    rows = {row["implementation"]: row["errors"] for row in accuracy.measure_fp8(case, "cpu")}
    rmse = {name: e["o"]["rmse"] for name, e in rows.items() if e}
    ideal = "exact arithmetic, "
    assert rmse[f"{ideal}blocks of 128 and Hadamard"] < 0.8 * rmse[f"{ideal}blocks of 128"]
    # Rounding to e4m3 is relative, so that finer scales alone change little.
    assert rmse[f"{ideal}blocks of 128"] < 1.5 * rmse[f"{ideal}per-tensor scales"]
    turn = accuracy_fp8.hadamard(64, "cpu")
    assert torch.allclose(turn @ turn.T, torch.eye(64, dtype=torch.float64))


# ---- the golden file


def test_worse_is_more_than_a_quarter():
    stored = {"a": {"o": 1.0, "dq": 2.0}}
    assert accuracy.worse({"a": {"o": 1.25, "dq": 0.1}}, stored) == []
    assert accuracy.worse({"a": {"o": 1.26, "dq": 2.0}}, stored) == [
        "a: RMSE of o is 1.26, golden 1"
    ]
    assert len(accuracy.worse({"a": {"o": float("nan"), "dq": 2.0}}, stored)) == 1
    assert accuracy.worse({"b": {}}, stored) == [
        "b: not in the golden file",
        "a: in the golden file, but not measured",
    ]


@pytest.mark.parametrize("isa", sorted({"avx2", pantile.devices()[0]["isa"]}))
def test_no_figure_of_the_cpu_is_worse_than_golden(isa):
    found = accuracy.cpu_section(isa)
    if found is None:
        pytest.skip(f"this processor has no {isa}")
    assert accuracy.worse(found, accuracy.golden()[f"cpu {isa}"]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "ampere"])
def test_no_figure_of_the_gpu_is_worse_than_golden(backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    if backend not in accuracy.golden():
        pytest.skip(f"no section {backend}: tools/accuracy.py --golden --device cuda writes it")
    assert accuracy.worse(accuracy.section(backend), accuracy.golden()[backend]) == []


def test_a_softmax_that_is_off_by_a_hundredth_is_caught(monkeypatch):
    real = pantile.attention

    def wrong(q, *kv, **words):
        if kv:  # not FP8 operands
            words["scale"] = 1.01 * q.shape[-1] ** -0.5
        return real(q, *kv, **words)

    stored = accuracy.section("cpu")
    monkeypatch.setattr(pantile, "attention", wrong)
    assert len(accuracy.worse(accuracy.section("cpu"), stored)) > len(accuracy.golden_cases())
