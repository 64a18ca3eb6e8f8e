"""Traces of pantile.flex_attention that are kept: a kept one is what a new one would be."""

from __future__ import annotations

import functools
import random

import pantile
import pytest
import torch
from pantile import _flex_kept, _flex_masks, _flex_trace

flex = pytest.importorskip("torch.nn.attention.flex_attention")
HEADS = 4
INPUTS = ("s", "b", "h", "i", "j")
NUMBER = 3.0


@pytest.fixture
def traced(monkeypatch):
    """How often functions are traced."""
    calls = []
    original = _flex_trace.trace

    def counted(function, *args):
        calls.append(function)
        return original(function, *args)

    monkeypatch.setattr(_flex_trace, "trace", counted)
    _flex_kept._traces.clear()
    return calls


def alibi(slope):
    return lambda s, b, h, q, k: s + slope[h] * (k - q)


def scaled(number):
    return lambda s, b, h, q, k: s * number


def same_as_new(function):
    """The score of a function, which must be what tracing it now gives."""
    score = _flex_masks.score_of(function)
    value = _flex_trace.trace(function, INPUTS, "t", "score_mod")
    assert score.text == _flex_trace.text_of(value.tape, value)
    assert list(score.tensors) == list(value.tape.tensors)
    for name, x in value.tape.tensors.items():
        torch.testing.assert_close(score.tensors[name], x)
    return score


def test_a_trace_serves_other_tensors(traced):
    first, second = torch.rand(HEADS), torch.rand(HEADS)
    assert _flex_masks.score_of(alibi(first)).tensors["t0"] is first
    assert _flex_masks.score_of(alibi(second)).tensors["t0"] is second
    assert len(traced) == 1
    assert not any(v.value.tape.tensors or v.value.tape.names for v in _flex_kept._traces.values())


def test_gradients_reach_the_tensor_of_the_call(traced):
    x = torch.randn(1, HEADS, 12, 16)
    for _ in range(2):
        slope = torch.rand(HEADS, requires_grad=True)
        pantile.flex_attention(x, x, x, alibi(slope)).sum().backward()
        assert slope.grad is not None
        assert float(slope.grad.abs().sum()) > 0
    assert len(traced) == 1


def test_what_a_trace_hangs_on(traced):
    """Each of these is a trace of its own."""
    slope = torch.rand(HEADS)
    functions = [
        *(alibi(x) for x in (slope, torch.rand(HEADS + 1), torch.rand(HEADS).half())),
        alibi(torch.rand(HEADS, requires_grad=True)),
        alibi(torch.ones(HEADS, dtype=torch.int64)),
        *(scaled(x) for x in (1, 1.0, True, 2.0, -0.0, 0.0)),
        lambda s, b, h, q, k, n=2.0: s * n,
        lambda s, b, h, q, k, n=5.0: s * n,
    ]
    for function in functions:
        same_as_new(function)
    assert len(traced) == 2 * len(functions)
    for function in functions:
        _flex_masks.score_of(function)
    assert len(traced) == 2 * len(functions)


def test_one_tensor_twice_is_not_two(traced):
    def both(x, y):
        return lambda s, b, h, q, k: s + x[h] * q - y[h] * k

    x, y = torch.rand(HEADS), torch.rand(HEADS)
    assert list(same_as_new(both(x, x)).tensors) == ["t0"]
    assert list(same_as_new(both(x, y)).tensors) == ["t0", "t1"]
    assert _flex_masks.score_of(both(y, y)).tensors["t0"] is y


def times(s):
    return s * NUMBER


def times_plus_one(s):
    return s * (1 + NUMBER)


def test_globals_and_helpers_are_compared(traced, monkeypatch):
    helper = times

    def function(s, b, h, q, k):
        return helper(s) + 1

    assert "3.0" in same_as_new(function).text
    _flex_masks.score_of(function)
    assert len(traced) == 2
    monkeypatch.setitem(globals(), "NUMBER", 7.0)
    assert "7.0" in same_as_new(function).text

    helper = times_plus_one
    assert "8.0" in same_as_new(function).text


def test_the_int32_copy_follows_its_tensor(traced):
    ids = torch.zeros(HEADS, dtype=torch.int64)

    def function(s, b, h, q, k):
        return s + ids[h]

    for step in range(3):
        assert int(same_as_new(function).tensors["t0"][0]) == step
        ids += 1


class Holder:
    number = 2.0

    def __call__(self, s, b, h, q, k):
        return s * self.number

    def method(self, s, b, h, q, k):
        return s * self.number


SLOPE = torch.rand(HEADS)
ONE = torch.ones(())
TABLE = {"x": SLOPE}
HOLDER = Holder()
COUNT = [0]


def counts(s, b, h, q, k):
    COUNT[0] += 1
    return s * COUNT[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + SLOPE.exp()[h],
        lambda s, b, h, q, k: s + (SLOPE * 2)[h],
        lambda s, b, h, q, k: s * float(SLOPE[0]),
        lambda s, b, h, q, k: s * SLOPE[1].item(),
        lambda s, b, h, q, k: s * ONE,
        lambda s, b, h, q, k: s + TABLE["x"][h],
        lambda s, b, h, q, k: s * HOLDER.number,
        lambda s, b, h, q, k: s * random.random(),
        lambda s, b, h, q, k: s * torch.rand(()).item(),
        lambda s, b, h, q, k: s * (lambda x: x)(2.0),
        functools.partial(lambda s, b, h, q, k, n: s * n, n=2.0),
        HOLDER,
        HOLDER.method,
        counts,
    ],
)
def test_what_cannot_be_compared_is_traced_each_time(traced, function):
    _flex_masks.score_of(function)
    _flex_masks.score_of(function)
    assert len(traced) == 2
    assert not _flex_kept._traces


def test_values_that_change_are_seen(traced):
    """Of the functions above those whose answers change with what they read."""
    x = torch.randn(1, HEADS, 8, 16)
    slope = torch.rand(HEADS)

    def function(s, b, h, q, k):
        return s + slope.exp()[h] * (k - q)

    before = pantile.flex_attention(x, x, x, function)
    slope.mul_(3)
    after = pantile.flex_attention(x, x, x, function)
    assert not torch.allclose(before, after)
    again = pantile.flex_attention(x, x, x, alibi(slope.exp()))
    torch.testing.assert_close(after, again)


def test_masks_are_kept_with_their_lists(traced):
    ids = torch.tensor([[0] * 100 + [1] * 28])

    def document(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (q >= k)

    made = flex.create_block_mask(document, 1, None, 128, 128, device="cpu")
    first = _flex_masks.masks_of(made, 1, 128, 128)
    blocks = _flex_masks._dense[made][1][0]
    second = _flex_masks.masks_of(made, 1, 128, 128)
    assert len(traced) == 1
    assert first[:2] == second[:2] == (None, 0)
    assert _flex_masks._dense[made][1][0] is blocks
    made.kv_num_blocks.zero_()
    made.full_kv_num_blocks.zero_()
    _flex_masks.masks_of(made, 1, 128, 128)
    assert not _flex_masks._dense[made][1][0].any()


def test_there_is_a_limit(traced, monkeypatch):
    monkeypatch.setattr(_flex_kept, "_MOST_KEPT", 4)
    for number in range(9):
        _flex_masks.score_of(scaled(float(number)))
        assert len(_flex_kept._traces) <= 4
