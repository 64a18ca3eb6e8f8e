"""Inputs that no GPU kernel takes as they are: odd head dims, scales that are not positive."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile import _C, _direct
from support import GPU_DTYPE, Target, check_both, dense, gradients, packed, require_kernel

SCALES = [0.0, -0.3]


class Picky:
    """Bindings that demand what GPU kernels do, and count the calls that got through."""

    def __init__(self) -> None:
        self.runs = 0

    def __getattr__(self, name: str):
        return getattr(_C, name)

    def _demand(self, q, v, scale) -> int:
        odd = q.shape[-1] % 8 or v.shape[-1] % 8
        folds = scale is not None and scale <= 0
        return (_direct.PAD_HEAD_DIMS if odd else 0) | (_direct.FOLD_SCALE if folds else 0)

    def forward(self, q, k, v, *rest):
        bits = self._demand(q, v, rest[4].scale)
        self.runs += not bits
        return bits or _C.forward(q, k, v, *rest)

    def backward(self, grad_o, grad_lse, q, k, v, *rest):
        bits = self._demand(q, v, rest[6].scale)
        self.runs += not bits
        return bits or _C.backward(grad_o, grad_lse, q, k, v, *rest)


@pytest.fixture
def picky(monkeypatch) -> Picky:
    bindings = Picky()
    monkeypatch.setattr(_direct, "_C", bindings)
    return bindings


HOST = Target("cpu", "cpu")


def cases():
    yield "odd", dense(HOST, head_dim=13, head_dim_v=21, causal=True)
    yield "odd v", dense(HOST, head_dim=16, head_dim_v=21)
    yield "packed", packed(HOST, [5, 0, 9], [7, 3, 12], head_dim=13, causal=True)
    for scale in SCALES:
        yield f"scale {scale}", dense(HOST, head_dim=16, causal=True, scale=scale)
        yield f"odd, scale {scale}", dense(HOST, head_dim=13, window=(9, 2), scale=scale)


@pytest.mark.parametrize(
    ("name", "case"), list(cases()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_changed_copies_give_the_same(picky, name, case):
    changed = gradients(case.ours, case.operands, torch.ones(case.q.shape[:-1] + case.v.shape[-1:]))
    assert picky.runs == 2, name
    with pytest.MonkeyPatch.context() as undo:
        undo.setattr(_direct, "_C", _C)
        plain = gradients(case.ours, case.operands, torch.ones_like(changed[0]))
    for first, second in zip(changed, plain, strict=True):
        assert first.is_contiguous()
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_extras_of_changed_copies(picky):
    case = dense(HOST, torch.bfloat16, head_dim=13, head_dim_v=21, scale=-0.3)
    options = pantile.Options(output_dtype="float32")
    found = case.ours(*case.operands, return_max_logit=True, options=options)
    with pytest.MonkeyPatch.context() as undo:
        undo.setattr(_direct, "_C", _C)
        plain = case.ours(*case.operands, return_max_logit=True, options=options)
    for first, second in zip(found, plain, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


# ---- on every backend, against float64


def default_dtype(target: Target) -> torch.dtype:
    return torch.float32 if target.device == "cpu" else GPU_DTYPE


@pytest.mark.parametrize("dims", [(1, 1), (20, 20), (63, 65), (100, 36), (121, 121)], ids=str)
def test_any_head_dim(target, dims):
    for arguments in ({}, {"causal": True}, {"window": (30, 4)}):
        case = dense(target, default_dtype(target), 1, 70, 133, 2, 1, *dims, **arguments)
        check_both(case, target, with_lse=True)
    check_both(
        packed(target, [40, 0, 70], [50, 9, 66], default_dtype(target), head_dim=20, causal=True),
        target,
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_any_scale(target, scale, head_dim):
    for arguments in ({}, {"causal": True}, {"window": (30, 4)}):
        case = dense(
            target, default_dtype(target), 1, 70, 133, 2, 1, head_dim, scale=scale, **arguments
        )
        check_both(case, target)


@pytest.mark.gpu
def test_explain_states_the_copies(target):
    if target.device == "cpu":
        pytest.skip("the CPU takes everything as it is")
    case = dense(target, GPU_DTYPE, head_dim=60)
    require_kernel(case, target)
    plan = case.explain(options=target.options)
    assert plan.forward.pads_head_dims
    assert not plan.forward.folds_scale
    assert "padded to multiples of 8" in str(plan)
    case = dense(target, GPU_DTYPE, scale=-1.0)
    plan = case.explain(options=target.options)
    assert plan.forward.folds_scale == (target.backend == "hopper")
