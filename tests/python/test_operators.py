"""pantile inside torch: operators, compile, export, autocast, checkpointing, transforms, FLOPs."""

from __future__ import annotations

import functools

import pantile
import pytest
import torch
from pantile._schema import Call
from support import assert_same_bits
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

pantile.load_torch()  # imported before torch, so the operators are not registered yet
forward_op = torch.ops.pantile.forward.default
backward_op = torch.ops.pantile.backward.default

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASKS = {"full": (-1, -1), "causal": (-1, 0), "window": (3, 1)}


def operands(grad=True, rows=6, keys=9, heads_k=2, dtype=torch.float32, device="cpu"):
    if device == "cuda":
        dtype = torch.bfloat16  # what GPU kernels serve
    dim = 64 if device == "cuda" else 8
    shapes = ((2, rows, 4, dim), (2, keys, heads_k, dim), (2, keys, heads_k, dim))
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=grad) for s in shapes]


def packed_operands(grad=True):
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 6], [0, 5, 9])]
    shapes = ((6, 4, 8), (9, 2, 8), (9, 2, 8))
    return [torch.randn(s, requires_grad=grad) for s in shapes], lengths


def leaves_of(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_equal_gradients(function, other, tensors):
    """Two functions of the same leaves have the same value and the same gradients."""
    results = []
    for f in (function, other):
        leaves = leaves_of(tensors)
        value = f(*leaves)
        value.square().sum().backward()
        results.append([value, *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# ---- opcheck: schema, fake kernels, autograd registration, AOT dispatch


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_forward(mask, grad):
    left, right = MASKS[mask]
    call = Call(window_left=left, window_right=right)
    torch.library.opcheck(forward_op, (*operands(grad), *call, False, False, False))


def test_opcheck_forward_packed():
    tensors, lengths = packed_operands()
    used = torch.tensor([1, 4], dtype=torch.int32)
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True))
    packing |= {"max_seqlen_q": 4, "max_seqlen_k": 5}
    for seqused in ({}, {"seqused_q": used, "seqused_k": used}):
        call = Call(**packing, **seqused, scale=0.3, window_right=0)
        torch.library.opcheck(forward_op, (*tensors, *call, False, True, False))


@pytest.mark.parametrize("with_lse", [True, False])
def test_opcheck_backward(with_lse):
    settings = Call(window_right=0)
    q, k, v = operands(False)
    o, lse, _ = forward_op(q, k, v, *settings, False, False, False)
    grad_lse = torch.randn_like(lse) if with_lse else None
    torch.library.opcheck(
        backward_op, (torch.randn_like(o), grad_lse, q, k, v, o, None, lse, *settings, False)
    )


def test_opcheck_backward_packed():
    (q, k, v), lengths = packed_operands(False)
    settings = Call(*lengths, max_seqlen_q=4, max_seqlen_k=5, window_left=2, window_right=0)
    o, lse, _ = forward_op(q, k, v, *settings, False, False, False)
    torch.library.opcheck(
        backward_op, (torch.randn_like(o), None, q, k, v, o, None, lse, *settings, True)
    )


def test_short_cut_equals_operator():
    """The short cut around the dispatcher and the operator give the same bits."""
    tensors = operands(dtype=torch.bfloat16)
    for causal in (False, True):
        results = []
        for watched in (False, True):
            leaves = leaves_of(tensors)
            with torch.autograd.profiler.profile(enabled=watched):
                o, lse = pantile.attention(*leaves, causal=causal, return_lse=True)
                grads = torch.autograd.grad(o.float().sum() + lse.sum(), leaves)
            results.append([o, lse, *grads])
        assert_same_bits(*results)


def test_plain_call_equals_operator():
    """So does the single call of the bindings that serves plain calls."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = operands(False, dtype=dtype)
        for causal in (False, True):
            with torch.autograd.profiler.profile():
                expected = pantile.attention(*tensors, causal=causal)
            assert torch.equal(pantile.attention(*tensors, causal=causal), expected)


# ---- compile and export


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def masked(q, k, v):
    return pantile.attention(q * 2.0, k, v, causal=True, window=(3, None), scale=0.2).sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_full_graph(fresh_dynamo, dynamic, device):
    compiled = torch.compile(masked, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (6, 11, 5):
        tensors = operands(False, rows=rows, device=device)
        torch.testing.assert_close(compiled(*tensors), masked(*tensors))
        if device == "cpu":
            assert_equal_gradients(compiled, masked, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compile_inductor(fresh_dynamo, device):
    compiled = torch.compile(masked, fullgraph=True, dynamic=True)
    for rows in (6, 11):
        tensors = operands(False, rows=rows, device=device)
        torch.testing.assert_close(compiled(*tensors), masked(*tensors), rtol=1e-2, atol=1e-2)
        if device == "cpu":
            assert_equal_gradients(compiled, masked, tensors)


def test_compile_packed_with_lse(fresh_dynamo):
    tensors, lengths = packed_operands(False)

    def function(q, k, v, longest):
        o, lse = pantile.varlen_attention(
            q, k, v, *lengths, longest, 5, causal=True, return_lse=True, deterministic=True
        )
        return o.sum(-1).T + lse

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for longest in (4, 6):
        assert_equal_gradients(
            functools.partial(compiled, longest=longest),
            functools.partial(function, longest=longest),
            tensors,
        )


def test_compile_is_one_graph_node(fresh_dynamo):
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(lambda *x: pantile.attention(*x), fullgraph=True, backend=backend)(
        *operands(False)
    )
    assert [target for target in seen if "pantile" in str(target)] == [forward_op]


def test_options_in_a_compiled_graph(fresh_dynamo):
    options = pantile.Options(backend="reference")
    tensors = operands(False)
    compiled = torch.compile(pantile.attention, fullgraph=True, backend="eager")
    expected = pantile.attention(*tensors, options=options)
    assert torch.equal(compiled(*tensors, options=options), expected)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return pantile.attention(q, k, v, causal=True)

    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        Layer(), tuple(operands(False)), dynamic_shapes=({1: length}, None, None), strict=strict
    )
    assert forward_op in [node.target for node in program.graph.nodes]
    other = operands(False, rows=13)
    torch.testing.assert_close(program.module()(*other), pantile.attention(*other, causal=True))


def test_jit_trace_records_the_operator():
    traced = torch.jit.trace(
        lambda *x: pantile.attention(*x), tuple(operands(False)), check_trace=False
    )
    assert "pantile::forward" in str(traced.graph)


def test_compiled_autograd():
    tensors = operands()
    plain = leaves_of(tensors)
    pantile.attention(*plain, causal=True).square().sum().backward()
    loss = pantile.attention(*tensors, causal=True).square().sum()
    with torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    ):
        loss.backward()
    for a, b in zip(tensors, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---- autocast


def test_autocast_takes_the_autocast_dtype():
    for dtype in (torch.bfloat16, torch.float16):
        leaves = operands()
        with torch.autocast("cpu", dtype=dtype):
            o = pantile.attention(*leaves)
            compiled = torch.compile(pantile.attention, fullgraph=True, backend="aot_eager")
            assert compiled(*leaves).dtype == dtype
        assert o.dtype == dtype
        o.float().sum().backward()
        assert {x.grad.dtype for x in leaves} == {torch.float32}
        cast = [x.detach().to(dtype) for x in leaves]
        assert torch.equal(o, pantile.attention(*cast))


def test_autocast_mixed_inputs_and_backward_inside():
    q, k, v = operands()
    half = k.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pantile.attention(q, half, v).float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16


def test_autocast_leaves_float64_to_the_error():
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="q has dtype float64"),
    ):
        pantile.attention(*(x.double() for x in operands()))


# ---- checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    def function(*x):
        return pantile.attention(*x, causal=True)

    assert_equal_gradients(
        lambda *x: checkpoint(function, *x, use_reentrant=reentrant), function, operands()
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpoint_keeps_the_output(compiled, fresh_dynamo):
    calls = []

    def policy(context, op, *_, **__):
        calls.append(op)
        save = op is forward_op
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*x):
        return pantile.attention(*x, causal=True).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def wrapped(*x):
        return checkpoint(block, *x, use_reentrant=False, context_fn=contexts)

    function = torch.compile(wrapped, fullgraph=True, backend="aot_eager") if compiled else wrapped
    assert_equal_gradients(function, block, operands())
    assert forward_op in calls


# ---- torch.func


def loss(q, k, v):
    return pantile.attention(q, k, v, causal=True).square().sum()


def test_func_grad():
    tensors = operands(False)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    leaves = leaves_of(tensors)
    loss(*leaves).backward()
    for a, b in zip(found, leaves, strict=True):
        torch.testing.assert_close(a, b.grad)


def test_func_grad_through_lse():
    tensors = operands(False)

    def total(q, k, v):
        o, lse = pantile.attention(q, k, v, return_lse=True)
        return o.sum() + lse.sin().sum()

    found = torch.func.grad(total, argnums=(0, 1, 2))(*tensors)
    leaves = leaves_of(tensors)
    total(*leaves).backward()
    for a, b in zip(found, leaves, strict=True):
        torch.testing.assert_close(a, b.grad)


def test_vmap_and_its_compositions():
    stacked = [torch.stack([x, 0.5 * x, 2.0 * x]) for x in operands(False)]
    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    mapped = torch.vmap(grad)(*stacked)
    outer = torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), argnums=(0, 1, 2))(*stacked)
    for i in range(3):
        for a, b, c in zip(mapped, outer, grad(*(x[i] for x in stacked)), strict=True):
            torch.testing.assert_close(a[i], c)
            torch.testing.assert_close(b[i], c)


def test_vmap_over_some_arguments_and_other_dims():
    q, k, v = operands(False)
    many_q = torch.stack([q, -q])
    many_k = torch.stack([k, 3 * k], 2)
    mapped = torch.vmap(lambda a, b: pantile.attention(a, b, v), in_dims=(0, 2))(many_q, many_k)
    for i in range(2):
        expected = pantile.attention(many_q[i], many_k[:, :, i], v)
        torch.testing.assert_close(mapped[i], expected)


def test_vmap_packed():
    tensors, lengths = packed_operands(False)
    stacked = [torch.stack([x, 2 * x]) for x in tensors]

    def function(q, k, v):
        return pantile.varlen_attention(q, k, v, *lengths, 4, 5).square().sum()

    mapped = torch.vmap(torch.func.grad(function))(*stacked)
    for i in range(2):
        torch.testing.assert_close(mapped[i], torch.func.grad(function)(*(x[i] for x in stacked)))


# ---- derivatives that do not exist are refused by name


SECOND = "second derivatives of attention are not implemented"
FORWARD_MODE = "forward-mode derivatives"


def test_double_backward():
    leaves = operands()
    o = pantile.attention(*leaves)
    (grad,) = torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        grad.sum().backward()


def test_double_backward_through_the_operator():
    leaves = operands()
    with torch.autograd.profiler.profile():
        o = pantile.attention(*leaves)
        (grad,) = torch.autograd.grad(o.sum(), leaves[:1], create_graph=True)
        with pytest.raises(pantile.UnsupportedError, match=SECOND):
            grad.sum().backward()


def test_double_backward_in_transforms():
    q, k, v = operands(False)
    first = torch.func.grad(lambda x: pantile.attention(x, k, v).square().sum())
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        torch.func.grad(lambda x: first(x).sum())(q)


def test_forward_mode():
    q, k, v = operands(False)
    with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
        torch.func.jvp(lambda x: pantile.attention(x, k, v), (q,), (q,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
            pantile.attention(dual, k, v)
        assert torch.equal(pantile.attention(q, k, v), pantile.attention(q, k, v))


# ---- what else torch may hand over


def test_meta_and_fake_tensors():
    meta = [x.to("meta") for x in operands(False)]
    o, lse = pantile.attention(*meta, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 6, 4, 8), (2, 4, 6))
    assert o.device.type == "meta"
    with torch._subclasses.FakeTensorMode():
        leaves = operands()
        pantile.attention(*leaves).sum().backward()
        assert leaves[1].grad.shape == (2, 9, 2, 8)


def test_parameters_and_subclasses():
    class Tagged(torch.Tensor):
        pass

    q, k, v = operands(False)
    expected = pantile.attention(q, k, v)
    assert torch.equal(pantile.attention(torch.nn.Parameter(q), k, v), expected)
    assert torch.equal(pantile.attention(q.as_subclass(Tagged), k, v), expected)


def test_lazily_negated_views():
    complex_q = torch.randn(2, 6, 4, 8, dtype=torch.complex64)
    q = complex_q.conj().imag
    assert q.is_neg()
    _, k, v = operands(False)
    expected = pantile.attention(-complex_q.imag, k, v)
    assert torch.equal(pantile.attention(q, k, v), expected)
    contiguous = torch._neg_view(complex_q.imag.contiguous())
    assert contiguous.is_neg()
    assert contiguous.is_contiguous()
    assert torch.equal(pantile.attention(contiguous, k, v), expected)


def test_tensors_of_lazy_zeros():
    _, k, v = operands(False)
    zeros = torch._efficientzerotensor(2, 6, 4, 8)
    assert torch.equal(
        pantile.attention(zeros, k, v), pantile.attention(torch.zeros(2, 6, 4, 8), k, v)
    )


def test_inference_mode():
    tensors = operands(False)
    with torch.inference_mode():
        o = pantile.attention(*tensors)
        assert o.is_inference()
        inner = [x * 1 for x in tensors]
    assert torch.equal(o, pantile.attention(*inner))


def test_no_grad_keeps_no_graph():
    leaves = operands()
    with torch.no_grad():
        assert not pantile.attention(*leaves).requires_grad
    assert pantile.attention(*leaves).requires_grad


def test_in_place_change_of_saved_tensors_is_noticed():
    q, k, v = operands()
    scaled = k * 1.0
    o = pantile.attention(q, scaled, v)
    with torch.no_grad():
        scaled.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_saved_tensor_hooks_see_the_tensors():
    shapes = []

    def pack(x):
        shapes.append(tuple(x.shape))
        return x

    leaves = operands()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = pantile.attention(*leaves)
    o.sum().backward()
    assert shapes == [(2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 6, 4, 8), (2, 4, 6)]


def test_custom_op_that_calls_attention():
    """Below another operator's autograd key nothing must be recorded."""

    @torch.library.custom_op("pantile_test::twice", mutates_args=())
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return 2 * pantile.attention(q, k, v)

    leaves = operands()
    o = twice(*leaves)
    assert torch.equal(o, 2 * pantile.attention(*leaves))


# ---- profiler and FLOPs


def test_profiler_shows_the_operators():
    with torch.profiler.profile() as profile:
        pantile.attention(*operands()).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"pantile::forward", "pantile::backward"} <= names


def count_flops(function) -> dict:
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


def test_flops():
    """Full: 4 B H Sq Sk D forward and 2.5 times that backward. Masked: only visible pairs."""
    leaves = operands(rows=7, keys=9)
    full = count_flops(lambda: pantile.attention(*leaves).sum().backward())
    products = 2 * 4 * 7 * 9 * 8
    assert full == {"pantile.forward": 4 * products, "pantile.backward": 10 * products}
    square = operands(False, rows=8, keys=8)
    causal = count_flops(lambda: pantile.attention(*square, causal=True))
    assert causal == {"pantile.forward": 4 * 2 * 4 * 8 * (8 * 9 // 2)}


def test_flops_packed():
    tensors, lengths = packed_operands(False)
    found = count_flops(lambda: pantile.varlen_attention(*tensors, *lengths, 4, 5))
    assert found == {"pantile.forward": 4 * 4 * 8 * (2 * 5 + 4 * 4)}


# ---- determinism


def test_torch_deterministic_mode_reaches_the_kernel(monkeypatch):
    asked = []

    def spy(name):
        real = getattr(pantile._C, name)

        def call(*arguments):
            asked.append(arguments[-1])
            return real(*arguments)

        monkeypatch.setattr(pantile._C, name, call)

    spy("backward")
    spy("gradients")
    leaves = operands()
    gradient = torch.randn(leaves[0].shape)
    pantile.attention(*leaves).backward(gradient)
    pantile.attention(*leaves, deterministic=True).backward(gradient)
    torch.use_deterministic_algorithms(True)
    try:
        pantile.attention(*leaves).backward(gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


# ---- CUDA graphs, streams and devices


@pytest.mark.gpu
def test_cuda_graph():
    tensors = operands(False, rows=300, keys=300, device="cuda")
    static = [x.clone() for x in tensors]
    pantile.attention(*static, causal=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = pantile.attention(*static, causal=True)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = [torch.randn_like(x) for x in static]
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, pantile.attention(*fresh, causal=True))


@pytest.mark.gpu
@pytest.mark.undisturbed
def test_side_stream_waits_for_its_own_producers():
    tensors = operands(False, rows=500, keys=500, device="cuda")
    expected = pantile.attention(*(2 * x for x in tensors))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # cycles
        o = pantile.attention(*(2 * x for x in tensors))
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.gpu
def test_other_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = [x.to("cuda:1") for x in operands(False, device="cuda")]
    expected = pantile.attention(*(x.to("cuda:0") for x in tensors))
    assert torch.cuda.current_device() == 0
    o = pantile.attention(*tensors)
    assert o.device == tensors[0].device
    assert torch.cuda.current_device() == 0
    assert torch.equal(o.to("cuda:0"), expected)
