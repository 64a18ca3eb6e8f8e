"""The low bits of a 16-bit output, through the bindings: what is refused, what is written, and that
plans with and without them are different plans."""

import pantile
import pytest
import torch
from pantile import _C
from pantile._schema import Call, bind

CALL = bind(Call(window_right=0))
SHIFTS = {torch.bfloat16: 8, torch.float16: 5}


def made(dtype=torch.bfloat16, shape=(2, 70, 2, 64)):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def outputs(q):
    return torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])


@pytest.mark.parametrize("dtype", list(SHIFTS), ids=str)
def test_low_bits_are_those_of_the_float_output(dtype):
    q, k, v = made(dtype)
    o, lse = outputs(q)
    low = torch.full(q.shape, 85, dtype=torch.int8)
    assert _C.forward(q, k, v, o, lse, low, None, CALL) == 0
    exact = torch.empty(q.shape)
    assert _C.forward(q, k, v, exact, lse, None, None, CALL) == 0
    distance = exact.view(torch.int32) - o.float().view(torch.int32)
    shift = SHIFTS[dtype]
    steps = distance + (1 << shift - 1) >> shift
    assert torch.equal(low, steps.clamp(-128, 127).to(torch.int8))
    assert low.float().std() > 50  # they are not all the same


def test_gradients_take_them():
    q, k, v = made()
    k, v = k + 3, v + 3
    o, lse = outputs(q)
    low = torch.empty(q.shape, dtype=torch.int8)
    _C.forward(q, k, v, o, lse, low, None, CALL)
    grad_o = torch.randn(o.shape).to(o.dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    pantile.reference.attention(*exact, causal=True)[0].backward(grad_o.double())
    errors = []
    for given in (None, low):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        assert _C.backward(grad_o, None, q, k, v, o, given, lse, *grads, CALL, False) == 0
        error = (grads[0].double() - exact[0].grad).norm() / exact[0].grad.norm()
        errors.append(error.item())
    assert errors[1] < 0.004 < 0.03 < errors[0]


def test_plans_are_kept_apart():
    """A plan that was made for one kind of call must not be found for the other."""
    q, k, v = made()
    o, lse = outputs(q)
    low = torch.empty(q.shape, dtype=torch.int8)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    seen = []
    _C.set_plan_log(seen.append)
    try:
        for given in (None, low, None, low):
            assert _C.forward(q, k, v, o, lse, given, None, CALL) == 0
            inputs = torch.ones_like(o), None, q, k, v, o, given, lse
            assert _C.backward(*inputs, *grads, CALL, False) == 0
    finally:
        _C.set_plan_log(None)
    assert all("o_low" in line for line in seen[2:])
    explained = _C.explain(q, k, v, CALL, False, o_low=True)
    assert [row["o_low"] for row in explained] == [True, True]
    assert [row["o_low"] for row in _C.explain(q, k, v, CALL, False)] == [False, False]


BAD = {
    "dtype": (lambda x: x.to(torch.uint8), TypeError, "o_low has dtype uint8; it must be int8"),
    "shape": (lambda x: x[..., :32].contiguous(), ValueError, r"o_low has shape \[2, 70, 2, 32\]"),
    "rank": (lambda x: x[0], ValueError, "o_low has shape"),
    "stride": (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        ValueError,
        r"o_low has strides \[8960, 64, 4480, 1\]; it must be contiguous",
    ),
    "address": (
        lambda x: torch.empty(x.numel() + 8, dtype=torch.int8)[8:].view(x.shape),
        ValueError,
        "o_low is at 0x.*; its address must be a multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("kind", list(BAD))
def test_a_wrong_one_is_refused_by_name(kind):
    spoil, error, message = BAD[kind]
    q, k, v = made()
    o, lse = outputs(q)
    low = spoil(torch.zeros(q.shape, dtype=torch.int8))
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    o.fill_(7.0)
    with pytest.raises(error, match=message):
        _C.forward(q, k, v, o, lse, low, None, CALL)
    assert (o == 7).all()
    with pytest.raises(error, match=message):
        _C.backward(torch.ones_like(o), None, q, k, v, o, low, lse, *grads, CALL, False)
    assert all((x == 7).all() for x in grads)


def test_other_outputs_have_none():
    q, k, v = made(torch.float32)
    o, lse = outputs(q)
    low = torch.zeros(q.shape, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"wants_o_low is true; .* unless dtype is f16 or bf16"):
        _C.forward(q, k, v, o, lse, low, None, CALL)
    q, k, v = made()
    with pytest.raises(ValueError, match=r"wants_o_low is true; .* when output_f32 is true"):
        _C.forward(q, k, v, o, lse, low, None, CALL)
