"""Attention into a tensor of the caller, and gradients into tensors of the caller: any strides that
do not overlap, nothing beside the elements touched."""

from __future__ import annotations

import itertools

import numpy as np
import pantile
import pytest
import torch
from pantile import _direct
from pantile._attention import load_torch
from pantile._schema import NO_VARIANT, VARIANT_TENSOR_COUNT, Call, bind
from support import bits, dense, packed, require_kernel

GUARD = 7.25  # exact in every dtype


def laid_out(shape, order, dtype, device, gap=0):
    """(view of ``shape`` whose axes lie in memory in ``order``, all of the memory): ``gap``
    elements follow each row of the last axis, and as many rows each axis further out. The memory
    holds GUARD."""
    *leading, dim = shape
    sizes = [leading[axis] + (2 if gap else 0) for axis in order] + [dim + gap]
    memory = torch.full(sizes, GUARD, dtype=dtype, device=device)
    view = memory[(*(slice(0, leading[axis]) for axis in order), slice(0, dim))]
    inverse = [order.index(axis) for axis in range(len(leading))]
    return view.permute(*inverse, len(leading)), memory


def check_guards(view, memory):
    """Only the elements of the view may have changed."""
    kept = view.clone()
    view.fill_(GUARD)
    assert (memory == GUARD).all()
    view.copy_(kept)


def default_dtype(target):
    return torch.float32 if target.device == "cpu" else torch.bfloat16


def attend(case, target, **extra):
    options = target.exact_options()
    arguments = {**case.arguments, "options": options, **extra}
    if case.lengths:
        return pantile.varlen_attention(*case.operands, *case.lengths, *case.longest, **arguments)
    return pantile.attention(*case.operands, **arguments)


def check_forward(case, target, order, dtype, gap):
    if target.backend == "reference" and order == tuple(sorted(order)):
        pytest.skip("the reference is slow, and has one way for all strides")
    require_kernel(case, target)
    expected, lse = attend(case, target, return_lse=True)
    if dtype is not expected.dtype:
        options = target.exact_options(output_dtype="float32")
        expected = attend(case, target, options=options)
    out, memory = laid_out(expected.shape, order, dtype, expected.device, gap)
    answer = attend(case, target, out=out, return_lse=True)
    assert answer[0] is out
    assert torch.equal(bits(out.contiguous()), bits(expected))
    assert torch.equal(bits(answer[1]), bits(lse))
    check_guards(out, memory)
    out.fill_(GUARD)
    assert attend(case, target, out=out) is out
    assert torch.equal(bits(out.contiguous()), bits(expected))
    check_guards(out, memory)


@pytest.mark.parametrize("gap", [0, 16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_dense_output_in_every_order(target, order, gap):
    """Each order of batch, sequence and heads; the second is torch's [b, h, s, d]."""
    case = dense(target, default_dtype(target), 3, 137, 150, 4, 2, 64, causal=True)
    check_forward(case, target, order, case.q.dtype, gap)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("used", [False, True])
def test_packed_output(target, order, used):
    lengths = [70, 0, 133, 9]
    case = packed(target, lengths, [90, 5, 66, 0], default_dtype(target), head_dim=64, causal=True)
    if used:
        case.arguments["seqused_q"] = torch.tensor([33, 0, 133, 2], dtype=torch.int32).to(
            target.device
        )
    check_forward(case, target, order, case.q.dtype, 8)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_float32_output(target, order):
    """``out`` in float32: as with output_dtype."""
    dtype = torch.float16 if target.device == "cpu" else torch.bfloat16
    case = dense(target, dtype, 2, 70, 90, 4, 2, 64, window=(40, 3))
    gap = 8 if target.backend == "ampere" else 4  # elements between rows: 32 or 16 bytes
    check_forward(case, target, order, torch.float32, gap)


@pytest.mark.parametrize("head_dim", [61, 128])
def test_head_dims(target, head_dim):
    """One that kernels must pad, and one of two panels."""
    case = dense(target, default_dtype(target), 2, 130, 140, 4, 2, head_dim)
    check_forward(case, target, (0, 2, 1), case.q.dtype, 0)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_some_kernels_fold_into_q(target, scale):
    case = dense(target, default_dtype(target), 1, 60, 70, 2, 1, 64, scale=scale, causal=True)
    check_forward(case, target, (0, 2, 1), case.q.dtype, 0)


def test_nonfinite_values_are_repaired_in_place(target):
    """Keys that only some queries of a tile see hold NaN: a kernel may store O twice."""
    case = dense(target, default_dtype(target), 1, 300, 300, 2, 1, 64, causal=True)
    case.v[0, 200, 0] = float("nan")
    check_forward(case, target, (0, 2, 1), case.q.dtype, 8)


def test_variant(target):
    """Of the features that are in every kernel; others are compiled."""
    case = dense(target, default_dtype(target), 2, 70, 90, 4, 2, 64)
    case.arguments["sinks"] = torch.randn(4, device=target.device)
    require_kernel(case, target)
    out, memory = laid_out(case.q.shape, (0, 2, 1), case.q.dtype, target.device, 8)
    options = target.exact_options()
    expected = pantile.attention(*case.operands, **case.arguments, options=options)
    pantile.attention(*case.operands, **case.arguments, options=options, out=out)
    assert torch.equal(bits(out.contiguous()), bits(expected))
    check_guards(out, memory)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_gradients_in_every_order(target, order, deterministic, packing):
    """dQ, dK and dV where the caller wants them."""
    if target.backend == "reference" and (deterministic or order != (0, 2, 1)):
        pytest.skip("the reference is slow, and has one way for all strides")
    dtype = default_dtype(target)
    if packing:
        case = packed(target, [70, 0, 133], [90, 5, 66], dtype, head_dim=64, causal=True)
        order = tuple(axis for axis in order if axis < 2)
    else:
        case = dense(target, dtype, 2, 137, 150, 4, 2, 64, causal=True)
    require_kernel(case, target, backward=True)
    o, lse = attend(case, target, return_lse=True)
    grad_o = torch.randn_like(o)
    lengths = (*(case.lengths or (None, None)), None, None, *(case.longest or (0, 0)))
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    fields = dict(zip((*names, "max_seqlen_q", "max_seqlen_k"), lengths, strict=True))
    call = bind(Call(**fields, window_right=0, backend=target.backend))
    tensors = (grad_o, None, *case.operands, o, None, lse, call, deterministic)
    expected = _direct.run_backward(*tensors)
    views = [laid_out(x.shape, order, dtype, x.device, 8) for x in case.operands]
    found = _direct.run_backward(*tensors, into=tuple(view for view, _ in views))
    for name, (view, memory), grad, right in zip("qkv", views, found, expected, strict=True):
        assert grad is view
        if deterministic or target.device == "cpu":
            assert torch.equal(bits(view.contiguous()), bits(right)), name
        else:
            torch.testing.assert_close(view, right, rtol=2**-6, atol=2**-7)
        check_guards(view, memory)


# ---- what is refused


def refusals():
    q = torch.randn(2, 8, 4, 16)
    k = torch.randn(2, 9, 2, 16)
    fresh = torch.empty_like(q)
    wide = torch.empty(2, 8, 4, 32)
    leaf = q.clone().requires_grad_()
    return {
        "numpy": (q, k, np.empty((2, 8, 4, 16)), TypeError, "out is a ndarray; it must be a torch"),
        "dtype": (q, k, fresh.half(), TypeError, "out has dtype float16; it must have the dtype"),
        "shape": (q, k, fresh[:1], ValueError, r"out has shape \[1, 8, 4, 16\]; it must be"),
        "device": (q, k, fresh.to("meta"), ValueError, "out is on meta; it must be on the device"),
        "sparse": (q, k, wide[..., ::2], ValueError, r"out has strides .*it is written"),
        "overlap": (q, k, fresh[:, :, :1].expand(-1, -1, 4, -1), ValueError, "elements overlap"),
        "itself": (q, k, q, ValueError, "out begins where q does"),
        "gradient": (leaf, k, fresh, pantile.UnsupportedError, "out is given, and autograd"),
        "own gradient": (q, k, fresh.clone().requires_grad_(), pantile.UnsupportedError, "autogr"),
    }


@pytest.mark.parametrize("name", refusals())
def test_refusals(name):
    q, k, out, error, message = refusals()[name]
    before = None if name in ("numpy", "device") else out.detach().clone()
    with pytest.raises(error, match=message):
        pantile.attention(q, k, k, out=out)
    if before is not None:
        torch.testing.assert_close(out.detach(), before, rtol=0, atol=0, equal_nan=True)


def test_output_dtype_and_out_must_agree():
    q = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16)
    options = pantile.Options(output_dtype="float32")
    with pytest.raises(ValueError, match="output_dtype is float32, and out has dtype bfloat16"):
        pantile.attention(q, q, q, out=torch.empty_like(q), options=options)
    out = torch.empty_like(q, dtype=torch.float32)
    assert pantile.attention(q, q, q, out=out, options=options) is out


def test_fp8_has_no_out():
    q = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="FP8 attention does not write"):
        pantile.attention(q, q, q, out=torch.empty_like(q), options=pantile.Options(fp8=True))


def test_rows_of_any_alignment():
    """CPUs take any alignment."""
    q = torch.randn(2, 8, 4, 16)
    memory = torch.full((2, 8, 4, 19), GUARD)
    out = memory[..., 1:17]
    pantile.attention(q, q, q, out=out)
    assert torch.equal(out, pantile.attention(q, q, q))
    check_guards(out, memory)


@pytest.mark.gpu
def test_gpu_kernels_store_16_bytes():
    """They refuse by name what they cannot store so, and write nothing."""
    q = torch.randn(2, 8, 4, 64, dtype=torch.bfloat16, device="cuda")
    memory = torch.full((2, 8, 4, 68), GUARD, dtype=q.dtype, device="cuda")
    with pytest.raises(pantile.UnsupportedError, match=r"hopper: o.*stride along"):
        pantile.attention(q, q, q, out=memory[..., :64])
    assert (memory == GUARD).all()


# ---- torch's machinery


def test_operator_and_graph():
    """The operator under a dispatch mode, and in a compiled graph that mutates its argument."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 16)
    expected, lse = pantile.attention(q, k, k, causal=True, return_lse=True)
    seen = []
    out = torch.empty_like(q)
    with Names():
        o, found = pantile.attention(q, k, k, causal=True, return_lse=True, out=out)
    assert o is out
    assert "pantile.forward_out.default" in seen
    assert torch.equal(out, expected)
    assert torch.equal(found, lse)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(q, k, out):
        pantile.attention(q, k, k, causal=True, out=out)
        return out * 2

    out, _ = laid_out(q.shape, (0, 2, 1), q.dtype, q.device)
    with torch.no_grad():
        assert torch.equal(graph(q, k, out), 2 * expected)
    assert torch.equal(out, expected)


def test_schema():
    q, k = torch.randn(1, 5, 2, 16), torch.randn(1, 6, 2, 16)
    tensors, numbers = NO_VARIANT[:VARIANT_TENSOR_COUNT], NO_VARIANT[VARIANT_TENSOR_COUNT:]
    arguments = (q, k, k, torch.empty_like(q), *tensors, *Call(), *numbers, False, True)
    load_torch()
    op = torch.ops.pantile.forward_out.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_numpy():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 4, 16), dtype=np.float32)
    memory = np.full((2, 4, 8, 20), GUARD, dtype=np.float32)
    out = memory[..., :16].transpose(0, 2, 1, 3)
    expected, lse = pantile.attention(q, q, q, return_lse=True)
    answer = pantile.attention(q, q, q, return_lse=True, out=out)
    assert answer[0] is out
    assert np.array_equal(out, expected)
    assert np.array_equal(answer[1], lse)
    assert (memory[..., 16:] == GUARD).all()
    out = np.empty_like(q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        pantile.attention(q, q, q, out=out)
    with pytest.raises(TypeError, match="out has dtype float64"):
        pantile.attention(q, q, q, out=np.empty(q.shape))
