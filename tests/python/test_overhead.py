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
@pytest.mark.parametrize("packed", [False, True], ids=["contiguous", "views of one tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_each_pass_of_a_plain_call_is_one_call_of_the_bindings(monkeypatch, packed, dtype):
    """And has the bits of the longer way."""
    if packed:
        leaves = torch.randn(2, 9, 3, 4, 64).to(dtype).unbind(2)
    else:
        leaves = [torch.randn(2, 9, heads, 64).to(dtype) for heads in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    grad_o = torch.randn(2, 9, 4, 64).to(dtype)

    def results(**options):
        o = pantile.attention(*leaves, causal=True, **options)
        return o.detach(), *torch.autograd.grad(o, leaves, grad_o)

    expected = results(window=(8, None))  # shows what causal shows
    for name in ("attention", "run_forward", "run_backward", "_gradients"):
        monkeypatch.setattr(_ops, name, forbid)
    found = results()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert all(x.is_contiguous() for x in found)
    with torch.no_grad():
        assert torch.equal(pantile.attention(*leaves, causal=True), expected[0])
    plain = [x.detach() for x in leaves]
    assert torch.equal(pantile.attention(*plain, causal=True), expected[0])
    with pytest.raises(AssertionError, match="dispatcher"):
        pantile.attention(*leaves, scale=0.2)


def test_what_a_whole_call_does_not_serve_goes_the_longer_way(monkeypatch):
    """Gradients that no kernel reads as they are, saved tensors that came back otherwise, and
    watchers who came after the forward."""
    leaves = [torch.randn(1, 8, 2, 64).bfloat16().requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(
        pantile.attention(*leaves), leaves, torch.ones(1, 8, 2, 64).bfloat16()
    )
    took = []
    real = _ops.run_backward
    monkeypatch.setattr(_ops, "run_backward", lambda *a: took.append(1) or real(*a))

    def check(o, grad_o):
        before = len(took)
        grads = torch.autograd.grad(o, leaves, grad_o)
        assert len(took) == before + 1
        assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))

    one = torch.ones(()).bfloat16()
    check(pantile.attention(*leaves), one.expand(1, 8, 2, 64))
    strided = torch.ones(1, 8, 2, 128).bfloat16()[..., ::2]
    check(pantile.attention(*leaves), strided)

    def unpack(x):  # not contiguous
        return torch.stack([x, x], -1)[..., 0]

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        check(pantile.attention(*leaves), torch.ones(1, 8, 2, 64).bfloat16())
    o = pantile.attention(*leaves)
    with pantile.shadow(rate=1.0) as watch:
        check(o, torch.ones(1, 8, 2, 64).bfloat16())
    assert watch.report.backward_calls == 1


def test_a_gradient_that_is_not_plain_meets_the_operator():
    leaves = operands(True)
    o = pantile.attention(*leaves)
    grad_o = torch.randn(o.shape)
    expected = torch.autograd.grad(o, leaves, grad_o, retain_graph=True)
    minus = torch.complex(torch.zeros(o.shape), -grad_o).conj().imag  # lazily negated
    assert minus.is_neg()
    found = torch.autograd.grad(o, leaves, minus, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    grads = torch.autograd.grad(o, leaves, grad_o, create_graph=True)
    with pytest.raises(pantile.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(grads[0].sum(), leaves)


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
