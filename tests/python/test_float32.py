"""float32 on GPUs: what torch's precision setting and the option choose, and how exact it is."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile import reference
from support import NAMES, Target, assert_within_bound, dense, gradients

pytestmark = pytest.mark.gpu

TARGET = Target("ampere", "cuda", torch.float32)
SETTINGS = {"highest": "highest", "high": "tf32", "medium": "tf32"}


@pytest.fixture(autouse=True)
def torch_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def run(case, precision: str, grad_o):
    options = pantile.Options(backend="ampere", float32_precision=precision)
    return gradients(lambda *x: case.ours(*x, options=options), case.operands, grad_o)


def exact(case, grad_o):
    operands = [x.double() for x in case.operands]
    return gradients(lambda *x: case.expected(*x, None), operands, grad_o)


def errors(results, expected) -> list[float]:
    return [reference.error(x, y) for x, y in zip(results, expected, strict=True)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_auto_is_what_torch_says(setting):
    """Same bits as the option that torch's setting stands for, in both passes."""
    case = dense(TARGET, torch.float32, rows=70, keys=90)
    grad_o = torch.randn_like(case.q)
    asked = run(case, SETTINGS[setting], grad_o)
    torch.set_float32_matmul_precision(setting)
    for x, y in zip(run(case, "auto", grad_o), asked, strict=True):
        assert torch.equal(x, y)


def test_explain_follows_the_setting():
    case = dense(TARGET, torch.float32)
    tiles = []
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        tiles.append(case.explain(options=TARGET.options).forward.tile_q)
    assert tiles == [64, 128]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_highest_has_the_error_of_float32(head_dim, causal):
    """Long rows of values with a mean: sums that drift would show. TF32 alone is far off."""
    torch.set_float32_matmul_precision("highest")
    case = dense(
        TARGET, batch=1, rows=1500, keys=1500, heads=2, heads_k=1, head_dim=head_dim, causal=causal
    )
    case.v = case.v + 1.0
    grad_o = torch.randn_like(case.q) + 0.5
    truth = exact(case, grad_o)
    textbook = gradients(lambda *x: case.expected(*x, None), case.operands, grad_o)
    highest, tf32 = (run(case, p, grad_o) for p in ("highest", "tf32"))
    assert_within_bound(highest, textbook, truth, case, grad_o)
    for name, ours, rounded in zip(NAMES, errors(highest, truth), errors(tf32, truth), strict=True):
        assert rounded > 20 * ours, f"{name}: tf32 {rounded:.1e} is no worse than {ours:.1e}"


def test_tf32_has_the_error_of_tf32():
    """Eleven bits of mantissa in every operand."""
    case = dense(TARGET, batch=1, rows=300, keys=400)
    grad_o = torch.randn_like(case.q)
    for name, error in zip(
        ("o", "lse", "dq", "dk", "dv"),
        errors(run(case, "tf32", grad_o), exact(case, grad_o)),
        strict=True,
    ):
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_backward_is_always_deterministic():
    case = dense(TARGET, batch=1, rows=500, keys=600, causal=True)
    grad_o = torch.randn_like(case.q)
    first = run(case, "highest", grad_o)
    for _ in range(10):
        for x, y in zip(run(case, "highest", grad_o), first, strict=True):
            assert torch.equal(x, y)
