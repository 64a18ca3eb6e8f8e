"""The cost of a call. Times are printed, not judged: what is judged cannot flicker."""

from __future__ import annotations

import timeit

import pantile
import torch
from pantile import _C, _ops


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


def test_equal_problems_are_planned_once():
    plans = []
    _C.set_plan_log(plans.append)
    try:
        q, k, v = (torch.randn(1, n, 3, 24) for n in (11, 17, 17))  # in no other test
        for _ in range(3):
            pantile.attention(q, k, v)
            pantile.attention(q.clone(), k.clone(), v.clone())
        pantile.attention(q, k, v, causal=True)
    finally:
        _C.set_plan_log(None)
    assert len(plans) == 2


def test_print_the_times(capsys):
    arguments = operands(False)
    leaves = operands(True)
    gradient = torch.randn_like(arguments[0])

    def best(function) -> float:
        return min(timeit.repeat(function, number=50, repeat=20)) / 50 * 1e6

    forward = best(lambda: pantile.attention(*arguments))
    both = best(lambda: torch.autograd.grad(pantile.attention(*leaves), leaves, gradient))
    with capsys.disabled():
        print(f"\n[1, 8, 8, 64] float32: forward {forward:.1f} us, with backward {both:.1f} us")
    assert forward < 1e4
    assert both < 1e4
