"""The cost of a call: by what it does, which cannot flicker."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile import _C, _fast_path, _ops


def operands(grad: bool):
    return [torch.randn(1, 8, 8, 64, requires_grad=grad) for _ in range(3)]


def forbid(*_, **__):
    raise AssertionError("a plain eager call went through the dispatcher")


def test_plain_calls_skip_the_dispatcher(monkeypatch):
    monkeypatch.setattr(_ops, "forward_op", forbid)
    monkeypatch.setattr(_ops, "backward_op", forbid)
    leaves = operands(True)
    pantile.attention(*leaves, causal=True).sum().backward()
    with torch.no_grad():
        pantile.attention(*leaves)
    with torch.inference_mode():
        pantile.attention(*(x.detach() for x in leaves))


@pytest.mark.skipif(
    not _fast_path.THREADS_FOLLOW, reason="C++ cannot read this torch's thread count"
)
def test_plain_calls_without_gradient_are_one_call_of_the_bindings(monkeypatch):
    monkeypatch.setattr(_ops, "attention", forbid)
    for causal in (False, True):
        pantile.attention(*operands(False), causal=causal)
    with torch.no_grad():
        pantile.attention(*operands(True))
    with pytest.raises(AssertionError, match="dispatcher"):
        pantile.attention(*operands(True))


@pytest.fixture
def plans():
    """Lines of the plan log, one for each plan that is made."""
    lines: list[str] = []
    _C.set_plan_log(lines.append)
    yield lines
    _C.set_plan_log(None)


def test_equal_problems_are_planned_once(plans):
    q, k, v = (torch.randn(1, n, 3, 24) for n in (11, 17, 17))  # in no other test
    for _ in range(3):
        pantile.attention(q, k, v)
        pantile.attention(q.clone(), k.clone(), v.clone())
    pantile.attention(q, k, v, causal=True)
    assert len(plans) == 2


def test_whatever_changes_a_plan_makes_a_new_one(plans):
    """A remembered plan must never serve another problem."""
    q, k, v = (torch.randn(2, n, 4, 28) for n in (13, 19, 19))  # in no other test
    wide = torch.randn(2, 13, 4, 56)[..., :28]
    variants = {
        "plain": lambda: pantile.attention(q, k, v),
        "dtype": lambda: pantile.attention(q.half(), k.half(), v.half()),
        "batch": lambda: pantile.attention(q[:1], k[:1], v[:1]),
        "rows": lambda: pantile.attention(q[:, :12].contiguous(), k, v),
        "keys": lambda: pantile.attention(q, k[:, :18].contiguous(), v[:, :18].contiguous()),
        "heads": lambda: pantile.attention(q, k[:, :, :2].contiguous(), v[:, :, :2].contiguous()),
        "head_dim_v": lambda: pantile.attention(q, k, v[..., :24].contiguous()),
        "strides": lambda: pantile.attention(wide, k, v),
        "alignment": lambda: pantile.attention(torch.randn(q.numel() + 1)[1:].view(q.shape), k, v),
        "left": lambda: pantile.attention(q, k, v, window=(3, None)),
        "right": lambda: pantile.attention(q, k, v, window=(None, 3)),
        "scale": lambda: pantile.attention(q, k, v, scale=0.5),
        "lse": lambda: pantile.attention(q, k, v, return_lse=True),
        "backend": lambda: pantile.attention(q, k, v, options=pantile.Options("reference")),
    }
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (13, 19)]
    used = torch.tensor([7, 8], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    for name, seqused in (
        ("packed", {}),
        ("seqused_q", {"seqused_q": used}),
        ("seqused_k", {"seqused_k": used}),
        ("seqused", {"seqused_q": used, "seqused_k": used}),
    ):
        variants[name] = lambda seqused=seqused: pantile.varlen_attention(
            *flat, *bounds, 13, 19, **seqused
        )
    variants["longest_q"] = lambda: pantile.varlen_attention(*flat, *bounds, 14, 19)
    variants["longest_k"] = lambda: pantile.varlen_attention(*flat, *bounds, 13, 20)
    for name, variant in variants.items():
        before = len(plans)
        variant()
        assert len(plans) == before + 1, f"{name} took the plan of another problem"


def test_backward_plans_are_their_own(plans):
    leaves = [torch.randn(1, n, 2, 20, requires_grad=True) for n in (15, 16, 16)]
    o, lse = pantile.attention(*leaves, return_lse=True)
    grads = torch.randn(o.shape), torch.randn(lse.shape)
    for _ in range(2):
        torch.autograd.grad(o, leaves, grads[0], retain_graph=True)
        torch.autograd.grad((o, lse), leaves, grads, retain_graph=True)
        torch.autograd.grad(pantile.attention(*leaves, deterministic=True), leaves, grads[0])
    assert sum("backward" in line for line in plans) == 3
