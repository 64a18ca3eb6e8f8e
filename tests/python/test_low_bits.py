"""The low bits of a 16-bit output: kept for the backward on every way through torch, and right."""

from __future__ import annotations

import pantile
import pantile.reference
import pytest
import torch
from pantile import _C, _direct
from pantile._schema import Call
from support import assert_same_bits, bits, gradients
from test_changes import Picky
from torch.utils.checkpoint import checkpoint

pantile.load_torch()

HALVES = [torch.bfloat16, torch.float16]
SHIFT = {torch.bfloat16: 8, torch.float16: 5}
GRADS = ("dq", "dk", "dv")
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


def operands(dtype=torch.bfloat16, rows=130, keys=150, dim=64, offset=3.0):
    """K and V with a common offset: what O's rounding costs does not average out then."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, h, dim) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    return [x.to(dtype) for x in (q, k + offset, v + offset)]


def leaves_of(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def grad_of(o):
    return (3.0 * torch.arange(o.numel(), dtype=torch.float32)).sin().reshape(o.shape)


def loss(*tensors, **call):
    o = pantile.attention(*tensors, causal=True, **call)
    return (o.float() * grad_of(o)).sum()


def gradients_of(function, tensors):
    leaves = leaves_of(tensors)
    return torch.autograd.grad(function(*leaves), leaves)


# ---- of an output in float32


def hard_numbers(dtype) -> torch.Tensor:
    """Both signs of: all magnitudes, subnormals, zero, ties, neighbours of ties, the ends."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator)
    near = torch.randn(100_000, generator=generator)
    ties = torch.randn(1000, generator=generator).to(dtype).float().view(torch.int32)
    step = 1 << SHIFT[dtype]
    around = torch.cat([ties + n for n in (-128 * step, 128 * step, -129 * step, 1, -1, 0, step)])
    around = torch.cat([around + n for n in (-1, 0, 1, step // 2, step // 2 - 1)])
    special = torch.tensor([0.0, torch.inf, torch.nan, 1.0, 2.0, 65504.0, 65519.9, 65520.0, 3.4e38])
    numbers = [wide.to(torch.int32).view(torch.float32), near, around.view(torch.float32), special]
    numbers = torch.cat(numbers)
    return torch.cat([numbers, -numbers])


@halves
def test_split_output(dtype):
    """The rounded output, and the nearest number of steps from it to the exact one."""
    exact = hard_numbers(dtype)
    rounded, low = _direct.split_output(exact, dtype)
    assert low.dtype is torch.int8
    assert torch.equal(bits(rounded), bits(exact.to(dtype)))
    finite = rounded.isfinite() & (rounded != 0.0)
    assert finite.sum() > 100_000
    assert not low[~finite].any()
    exact, rounded, low = exact[finite], rounded[finite], low[finite].long()
    step = 1 << SHIFT[dtype]
    distance = exact.view(torch.int32).long() - rounded.float().view(torch.int32).long()
    steps = torch.div(2 * distance + step, 2 * step, rounding_mode="floor")
    assert torch.equal(low, steps.clamp(-128, 127))
    if dtype is torch.bfloat16:  # no subnormal is further away than its neighbours
        assert (distance - low * step).abs().max() <= step


@halves
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_kernels_write_what_the_float32_output_says(dtype, packed):
    q, k, v = operands(dtype, dim=72)
    call = Call(window_right=0)
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 60, 260], [0, 100, 300])]
        call = Call(*lengths, max_seqlen_q=200, max_seqlen_k=200, window_right=0)
    settings = (*call, False, False)
    op = torch.ops.pantile.forward_extra
    o, lse, o_low, _ = op(q, k, v, *settings, True, False, False)
    exact, exact_lse, derived_low, _ = op(q, k, v, *settings, True, False, True)
    assert torch.equal(lse, exact_lse)
    rounded, low = _direct.split_output(exact, dtype)
    assert o_low.dtype is torch.int8
    assert o_low.any()
    for found in (o_low, derived_low):
        assert torch.equal(found, low)
    assert torch.equal(o, rounded)
    assert torch.equal(torch.ops.pantile.forward(q, k, v, *settings, True)[2], low)


# ---- when they are kept


def saved_of(tensors, **call):
    saved = []

    def pack(x):
        saved.append((x.dtype, tuple(x.shape)))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        pantile.attention(*tensors, **call)
    return saved


@halves
@pytest.mark.parametrize("watched", [False, True], ids=["short_cut", "operator"])
def test_kept_where_a_16_bit_call_is_recorded(dtype, watched):
    tensors = operands(dtype)
    with torch.autograd.profiler.profile(enabled=watched):
        assert (torch.int8, (2, 130, 4, 64)) in saved_of(leaves_of(tensors))
        assert not saved_of(tensors)
        floats = saved_of(leaves_of([x.float() for x in tensors]))
        assert {name for name, _ in floats} == {torch.float32}
        # The float32 output holds them already.
        wide = saved_of(leaves_of(tensors), options=pantile.Options(output_dtype="float32"))
        assert {name for name, _ in wide} == {dtype, torch.float32}


@pytest.mark.parametrize("grad", [False, True])
def test_not_written_without_need(monkeypatch, grad):
    written = []
    real = _C.forward

    def spy(*arguments):
        written.append(arguments[5] is not None)
        return real(*arguments)

    monkeypatch.setattr(_direct._C, "forward", spy)
    tensors = operands()
    tensors = leaves_of(tensors) if grad else tensors
    pantile.attention(*tensors, return_lse=True)
    with torch.no_grad():
        pantile.attention(*tensors, return_lse=True)
    with torch.autograd.profiler.profile():
        pantile.attention(*tensors)
    assert written == [grad, False, grad]


@pytest.mark.parametrize("keep_low", [False, True])
def test_the_operator_returns_what_it_is_asked_for(keep_low):
    """Whether autograd keeps them for itself or not."""
    settings = (*Call(window_right=0), False, False, keep_low)
    for tensors in (operands(), leaves_of(operands())):
        _, _, o_low = torch.ops.pantile.forward(*tensors, *settings)
        assert o_low.shape == ((2 if keep_low else 0), 130, 4, 64)
        assert not o_low.requires_grad
    floats = [x.float() for x in operands()]
    assert torch.ops.pantile.forward(*floats, *settings)[2].shape == (0, 130, 4, 64)


@pytest.mark.parametrize("keep_low", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad, keep_low):
    tensors = operands(rows=6, keys=9, dim=8)
    tensors = leaves_of(tensors) if grad else tensors
    settings = Call(window_right=0)
    torch.library.opcheck(
        torch.ops.pantile.forward.default, (*tensors, *settings, False, False, keep_low)
    )
    torch.library.opcheck(
        torch.ops.pantile.forward_extra.default,
        (*tensors, *settings, False, False, keep_low, True, grad),
    )
    if not grad:
        o, lse, o_low = torch.ops.pantile.forward(*tensors, *settings, False, False, True)
        torch.library.opcheck(
            torch.ops.pantile.backward.default,
            (torch.randn_like(o), None, *tensors, o, o_low, lse, *settings, False),
        )


# ---- one gradient on all ways


@halves
def test_every_way_gives_the_gradient_of_the_short_cut(dtype):
    tensors = operands(dtype)
    expected = gradients_of(loss, tensors)
    with torch.autograd.profiler.profile():
        assert_same_bits(gradients_of(loss, tensors), expected, GRADS)
    argnums = {"argnums": (0, 1, 2)}
    assert_same_bits(torch.func.grad(loss, **argnums)(*tensors), expected, GRADS)
    many = [torch.stack([x, x]) for x in tensors]
    mapped = torch.vmap(torch.func.grad(loss, **argnums))(*many)
    assert_same_bits([x[1] for x in mapped], expected, GRADS)
    reentered = gradients_of(lambda *x: checkpoint(loss, *x, use_reentrant=False), tensors)
    assert_same_bits(reentered, expected, GRADS)

    def wide_loss(*x):
        return loss(*x, options=pantile.Options(output_dtype="float32"))

    wide = gradients_of(wide_loss, tensors)
    assert_same_bits(torch.func.grad(wide_loss, **argnums)(*tensors), wide, GRADS)
    mapped = torch.vmap(torch.func.grad(wide_loss, **argnums))(*many)
    assert_same_bits([x[1] for x in mapped], wide, GRADS)
    # dO is rounded to 16 bits there, after the product with its weights.
    for a, b in zip(wide, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients_of(compiled, tensors), expected, GRADS)
    compiled = torch.compile(wide_loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients_of(compiled, tensors), wide, GRADS)
    torch._dynamo.reset()


def test_autocast_and_fp8_give_it_too():
    tensors = operands()
    expected = gradients_of(loss, tensors)
    fp8 = gradients_of(lambda *x: loss(*x, options=pantile.Options(fp8=True)), tensors)
    assert_same_bits(fp8, expected, GRADS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients_of(loss, [x.float() for x in tensors])
    for a, b in zip(cast, expected, strict=True):
        assert torch.equal(a, b.float())


def test_jacobian_of_one_sequence():
    """The low bits are expanded along the mapped dimension, which the bindings do not take."""
    q, k, v = (x[:1] for x in operands(rows=20, keys=30))

    def few(x):
        return pantile.attention(x, k, v)[0, :2, 0, :2].float().flatten()

    found = torch.func.jacrev(few)(q)
    leaf = q.clone().requires_grad_()
    for row, output in zip(found, few(leaf), strict=True):
        (expected,) = torch.autograd.grad(output, leaf, retain_graph=True)
        assert torch.equal(row, expected)


@pytest.mark.parametrize("form", ["strided", "unaligned"])
def test_low_bits_in_another_layout(form):
    q, k, v = operands()
    settings = Call(window_right=0)
    o, lse, o_low = torch.ops.pantile.forward(q, k, v, *settings, False, False, True)
    if form == "strided":
        other = torch.stack([o_low, o_low], -1)[..., 0]
    else:
        other = torch.empty(o_low.numel() + 1, dtype=torch.int8)[1:].view(o_low.shape)
        other.copy_(o_low)
    grad_o = grad_of(o).to(o.dtype)
    results = [
        torch.ops.pantile.backward(grad_o, None, q, k, v, o, low, lse, *settings, False)
        for low in (o_low, other, None)
    ]
    assert_same_bits(results[0], results[1], GRADS)
    assert not torch.equal(results[0][0], results[2][0])  # they do matter


# ---- what they are for


@halves
@pytest.mark.parametrize("wide", [False, True], ids=["o in 16 bits", "o in float32"])
def test_common_offset(dtype, wide):
    """dQ and dK against float64 and the textbook in the same dtype."""
    torch.manual_seed(11)
    q, k, v = (torch.randn(1, 256, 2, 128) for _ in range(3))
    tensors = [x.to(dtype) for x in (q, k + 3.0, v + 3.0)]
    grad_o = torch.randn(1, 256, 2, 128).to(dtype)
    options = pantile.Options(output_dtype="float32" if wide else None)

    def ours(*x):
        return pantile.attention(*x, return_lse=True, options=options)

    found = gradients(ours, tensors, grad_o)
    textbook = gradients(pantile.reference.attention, tensors, grad_o)
    exact = gradients(pantile.reference.attention, [x.double() for x in tensors], grad_o.double())
    for i, name in ((2, "dq"), (3, "dk"), (4, "dv")):
        errors = [pantile.reference.error(x[i], exact[i]) for x in (found, textbook)]
        assert errors[0] <= 2.0 * errors[1], (name, errors)


def test_low_bits_of_padded_copies(monkeypatch):
    """Head dims that a kernel wants padded: the low bits are padded and cut with o."""
    seen = []

    class Demanding(Picky):
        def backward(self, *arguments):
            seen.append(arguments[6].shape)
            return super().backward(*arguments)

    tensors = operands(rows=20, keys=30, dim=13)
    tensors[2] = torch.cat([tensors[2], tensors[2][..., :8]], -1)
    expected = gradients_of(loss, tensors)
    monkeypatch.setattr(_direct, "_C", Demanding())
    for a, b in zip(gradients_of(loss, tensors), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
    assert seen == [(2, 20, 4, 21), (2, 20, 4, 24)]
