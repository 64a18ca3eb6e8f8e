"""pantile below torch's modes and transforms: plain and FP8 calls are held to the same tests.

Each test runs the plain call and the FP8 call, dense and packed, because each of these ways through
the code was once forgotten by tests of another.
"""

from __future__ import annotations

import functools
import itertools

import pantile
import pytest
import torch
from pantile._schema import Call
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

pantile.load_torch()

OPTIONS = {"plain": pantile.Options(), "fp8": pantile.Options(fp8=True)}
SECOND = "second derivatives of attention are not implemented"
FORWARD_MODE = "forward-mode derivatives"
LENGTHS = ([0, 20, 70], [0, 30, 90])  # every row sees a key

kinds = pytest.mark.parametrize("kind", OPTIONS)
layouts = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


def operands(packed=False, grad=False, dtype=torch.float32, batch=2, loud=1.0):
    torch.manual_seed(7)
    shapes = [(70, 4, 16), (90, 2, 16), (90, 2, 16)]
    if not packed:
        shapes = [(batch, *shape) for shape in shapes]
    return [(loud * torch.randn(s)).to(dtype).requires_grad_(grad) for s in shapes]


def lengths():
    return [torch.tensor(x, dtype=torch.int32) for x in LENGTHS]


def attend(kind, packed, q, k, v, **extra):
    extra = {"causal": True, "options": OPTIONS[kind], **extra}
    if packed:
        return pantile.varlen_attention(q, k, v, *lengths(), 50, 60, **extra)
    return pantile.attention(q, k, v, **extra)


def weights_like(o):
    return (3.0 * torch.arange(o.numel(), dtype=torch.float32)).sin().reshape(o.shape)


def total(kind, packed, *tensors):
    """A loss that uses o and the LSE."""
    o, lse = attend(kind, packed, *tensors, return_lse=True)
    return (o.float() * weights_like(o)).sum() + lse.sin().sum()


def gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def assert_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


# ---- what the bindings read is what it stands for


class Wrapped(torch.Tensor):
    """A tensor without memory of its own; operators work on `inner`."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, _, arguments=(), keywords=None):
        def inner_of(x):
            return x.inner if isinstance(x, Wrapped) else x

        tree_map = torch.utils._pytree.tree_map
        return function(*tree_map(inner_of, arguments), **tree_map(inner_of, keywords or {}))


def negated(x):
    """x, by a view that negates memory."""
    return torch._neg_view(x.detach().neg())


DISGUISES = {"negated": negated, "wrapped": Wrapped}


@pytest.mark.parametrize("disguise", DISGUISES)
@layouts
@kinds
def test_saved_tensors_may_come_back_in_any_form(kind, packed, disguise):
    expected = gradients(functools.partial(total, kind, packed), operands(packed))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), DISGUISES[disguise]):
        found = gradients(functools.partial(total, kind, packed), operands(packed))
    assert_close(found, expected)


@pytest.mark.parametrize("which", range(7))
def test_each_saved_tensor_is_looked_at(which):
    """One at a time: q, k, v, o, lse, cu_seqlens_q and cu_seqlens_k of a packed call."""
    function = functools.partial(total, "plain", True)
    expected = gradients(function, operands(True))
    leaves = operands(True, grad=True)
    loss = attend("plain", True, *leaves, return_lse=True)
    count = itertools.count()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (next(count), x.detach()),
        lambda pair: negated(pair[1]) if pair[0] == which else pair[1],
    ):
        loss = attend("plain", True, *leaves, return_lse=True)
    assert next(count) > which
    o, lse = loss
    found = torch.autograd.grad((o * weights_like(o)).sum() + lse.sin().sum(), leaves)
    assert_close(found, expected)


@layouts
@kinds
def test_gradients_may_come_in_any_form(kind, packed):
    leaves = operands(packed, grad=True)
    outputs = attend(kind, packed, *leaves, return_lse=True)
    grads = [weights_like(x).to(x.dtype) for x in outputs]
    expected = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    for i, disguise in itertools.product(range(2), DISGUISES.values()):
        given = [disguise(g) if i == j else g for j, g in enumerate(grads)]
        assert_close(torch.autograd.grad(outputs, leaves, given, retain_graph=True), expected)
    for i in range(2):
        zeros = [torch.zeros_like(g) if i == j else g for j, g in enumerate(grads)]
        lazy = [
            torch._efficientzerotensor(g.shape, dtype=g.dtype) if i == j else g
            for j, g in enumerate(grads)
        ]
        expected = torch.autograd.grad(outputs, leaves, zeros, retain_graph=True)
        assert_close(torch.autograd.grad(outputs, leaves, lazy, retain_graph=True), expected)


def test_gradient_of_the_lse_through_a_conjugate():
    def loss(*tensors, conjugate):
        lse = attend("plain", False, *tensors, return_lse=True)[1]
        z = torch.complex(torch.ones_like(lse), lse)
        return (z.conj() if conjugate else torch.complex(z.real, -z.imag)).imag.sum()

    found, expected = (
        gradients(functools.partial(loss, conjugate=conjugate), operands())
        for conjugate in (True, False)
    )
    assert_close(found, expected)


@kinds
def test_batched_gradients(kind):
    leaves = operands(grad=True)
    outputs = attend(kind, False, *leaves, return_lse=True)
    many = [torch.stack([weights_like(x).to(x.dtype), torch.ones_like(x)]) for x in outputs]
    found = torch.autograd.grad(outputs, leaves, many, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        one = torch.autograd.grad(outputs, leaves, [x[i] for x in many], retain_graph=True)
        assert_close([x[i] for x in found], one)


@kinds
def test_lazily_negated_lengths(kind):
    tensors = operands(True)
    expected = attend(kind, True, *tensors)
    found = pantile.varlen_attention(
        *tensors, *(negated(x) for x in lengths()), 50, 60, causal=True, options=OPTIONS[kind]
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v"])
def test_lazily_negated_descales(name):
    codes = [x.to(torch.float8_e4m3fn) for x in operands(dtype=torch.bfloat16)]
    descale = torch.full((2, 2), 0.5)
    expected = pantile.attention(pantile.quantize(*codes, **{name: descale}))
    found = pantile.attention(pantile.quantize(*codes, **{name: negated(descale)}))
    assert torch.equal(found, expected)


# ---- torch.func


def stacked(packed=False, dtype=torch.float32):
    return [torch.stack([x, 0.5 * x, -x]) for x in operands(packed, dtype=dtype)]


@layouts
@kinds
def test_transforms(kind, packed):
    """grad, vjp, vmap of grad, grad of vmap, jacrev, against autograd one by one."""
    function = functools.partial(total, kind, packed)
    grad = torch.func.grad(function, argnums=(0, 1, 2))
    tensors = operands(packed)
    expected = gradients(function, tensors)
    assert_close(grad(*tensors), expected)
    assert_close(torch.func.vjp(function, *tensors)[1](torch.tensor(1.0)), expected)
    many = stacked(packed)
    mapped = torch.vmap(grad)(*many)
    outer = torch.func.grad(lambda *x: torch.vmap(function)(*x).sum(), argnums=(0, 1, 2))(*many)
    for i in range(3):
        one = gradients(function, [x[i] for x in many])
        assert_close([x[i] for x in mapped], one)
        assert_close([x[i] for x in outer], one)
    values = torch.vmap(function)(*many)
    for i in range(3):
        torch.testing.assert_close(values[i], function(*(x[i] for x in many)))


@pytest.mark.parametrize("batch", [1, 2])
@kinds
def test_jacobian(kind, batch):
    """Of a few numbers; a mapped gradient meets an o without that dimension, whose batch has then
    stride 0 when it is 1."""
    q, k, v = operands(batch=batch)

    def numbers(*tensors):
        return attend(kind, False, *tensors)[:, :3, 0, :2].float().flatten()

    found = torch.func.jacrev(numbers, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    outputs = numbers(*leaves)
    for i, output in enumerate(outputs):
        expected = torch.autograd.grad(output, leaves, retain_graph=True)
        assert_close([x[i] for x in found], expected)


@kinds
def test_vmap_over_some_operands(kind):
    q, k, v = operands()
    many_k = torch.stack([k, 3 * k], 2)
    found = torch.vmap(lambda x: attend(kind, False, q, x, v), in_dims=2)(many_k)
    for i in range(2):
        torch.testing.assert_close(found[i], attend(kind, False, q, many_k[:, :, i], v))


def operator_call(q, k, v):
    settings = Call(window_right=0)
    return torch.ops.pantile.forward(q, k, v, *settings, False, False, False)[0]


def extra_operator_call(q, k, v):
    settings = Call(window_right=0)
    return torch.ops.pantile.forward_extra(q, k, v, *settings, False, False, True, True, True)[0]


@pytest.mark.parametrize("call", [operator_call, extra_operator_call])
def test_operators_inside_transforms(call):
    def loss(*tensors):
        o = call(*tensors)
        return (o * weights_like(o)).sum()

    expected = gradients(loss, operands())
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(*operands()), expected)
    many = stacked()
    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*many)
    for i in range(3):
        assert_close([x[i] for x in mapped], gradients(loss, [x[i] for x in many]))


def test_backward_operator_inside_transforms():
    """It has no derivative, and says so; without one it runs."""
    q, k, v = operands()
    settings = Call(window_right=0)
    o, lse, _ = torch.ops.pantile.forward(q, k, v, *settings, False, False, False)

    def backward(x):
        grads = torch.ops.pantile.backward(
            weights_like(o), None, x, k, v, o, None, lse, *settings, False
        )
        return sum(g.sum() for g in grads)

    assert torch.vmap(backward)(torch.stack([q, q])).shape == (2,)
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        torch.func.grad(backward)(q)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **extra):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **extra)


@layouts
@kinds
def test_compiled_gradient(kind, packed, fresh_dynamo):
    """torch.compile(torch.func.grad(f)) and of vmap(grad(f))."""
    lists = lengths()

    def function(*tensors):
        extra = {"causal": True, "options": OPTIONS[kind]}
        if packed:
            o = pantile.varlen_attention(*tensors, *lists, 50, 60, **extra)
        else:
            o = pantile.attention(*tensors, **extra)
        return o.float().sin().sum()

    grad = torch.func.grad(function, argnums=(0, 1, 2))
    tensors = operands(packed)
    assert_close(compiled(grad)(*tensors), gradients(function, tensors))
    many = stacked(packed)
    mapped = compiled(torch.vmap(grad))(*many)
    for i in range(3):
        assert_close([x[i] for x in mapped], gradients(function, [x[i] for x in many]))


@kinds
def test_gradient_of_a_compiled_function(kind, fresh_dynamo):
    def function(*tensors):
        return attend(kind, False, *tensors).float().sin().sum()

    found = torch.func.grad(torch.compile(function, backend="aot_eager"), argnums=(0, 1, 2))(
        *operands()
    )
    assert_close(found, gradients(function, operands()))


@kinds
def test_gradient_of_an_exported_module(kind):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(kind, False, q, k, v).float().sin().sum()

    module = torch.export.export(Layer(), tuple(operands())).module()
    expected = gradients(Layer(), operands())
    assert_close(gradients(module, operands()), expected)
    assert_close(torch.func.grad(module, argnums=(0, 1, 2))(*operands()), expected)


# ---- autocast


@kinds
def test_transforms_under_autocast(kind):
    """With loud inputs a gradient shows whether LSE and saved operands are of one rounding."""
    tensors = operands(loud=6.0)

    def loss(*x):
        o = attend(kind, False, *x)
        assert o.dtype is torch.bfloat16
        return (o.float() * weights_like(o)).sum()

    argnums = {"argnums": (0, 1, 2)}
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(loss, tensors)
        assert_close(torch.func.grad(loss, **argnums)(*tensors), expected)
        assert_close(torch.func.vjp(loss, *tensors)[1](torch.tensor(1.0)), expected)
        jacobian = torch.func.jacrev(lambda *x: torch.stack([loss(*x)]), **argnums)(*tensors)
        assert_close([x[0] for x in jacobian], expected)
        many = [torch.stack([x, x]) for x in tensors]
        mapped = torch.vmap(torch.func.grad(loss, **argnums))(*many)
        assert_close([x[1] for x in mapped], expected)
    assert {x.dtype for x in expected} == {torch.float32}


# ---- derivatives that do not exist are refused by name


@pytest.mark.parametrize("watched", [False, True], ids=["short_cut", "operator"])
@layouts
@kinds
def test_gradient_penalty(kind, packed, watched):
    leaves = operands(packed, grad=True)
    with torch.autograd.profiler.profile(enabled=watched):
        loss = attend(kind, packed, *leaves).float().square().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        with pytest.raises(pantile.UnsupportedError, match=SECOND):
            penalty.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_penalty_of_a_float32_output(dtype):
    leaves = operands(grad=True, dtype=dtype)
    o = attend("plain", False, *leaves, options=pantile.Options(output_dtype="float32"))
    (grad,) = torch.autograd.grad(o.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        grad.float().square().sum().backward()


@kinds
def test_second_derivative_in_transforms(kind):
    q, k, v = operands()
    first = torch.func.grad(lambda x: attend(kind, False, x, k, v).float().square().sum())
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        torch.func.grad(lambda x: first(x).sum())(q)
    with pytest.raises(pantile.UnsupportedError, match=SECOND):
        torch.func.jacrev(lambda x: first(x).sum())(q)
    with pytest.raises(pantile.UnsupportedError, match=r"derivatives"):
        torch.func.hessian(lambda x: attend(kind, False, x * q, k, v).float().sum())(q.new_ones(()))


@layouts
@kinds
def test_forward_mode(kind, packed):
    q, k, v = operands(packed)
    for at, tangent_of in (("q", (q, k, v)), ("v", (v, q, k))):
        x, *_ = tangent_of

        def function(x, at=at):
            return attend(kind, packed, *((x, k, v) if at == "q" else (q, k, x)))

        with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
        with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
            torch.func.jacfwd(function)(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
                function(dual)
            assert torch.equal(function(x), function(x))


def test_forward_mode_between_quantize_and_attention():
    q, k, v = operands()
    with forward_ad.dual_level():
        made = pantile.quantize(forward_ad.make_dual(q, q), k, v)
        with pytest.raises(pantile.UnsupportedError, match=FORWARD_MODE):
            pantile.attention(made)


# ---- in-place changes


INPLACE = "modified by an inplace operation"


@kinds
@pytest.mark.parametrize("which", range(3))
def test_change_after_attention(kind, which):
    leaves = operands(grad=True)
    inputs = [x * 1.0 for x in leaves]
    o = attend(kind, False, *inputs)
    with torch.no_grad():
        inputs[which].mul_(2.0)
    with pytest.raises(RuntimeError, match=INPLACE):
        o.float().sum().backward()


@layouts
@pytest.mark.parametrize("which", range(3))
def test_change_after_attention_that_saved_codes(packed, which):
    """The backward of fp8_backward="bf16" reads codes, which the change does not reach: gradients
    are those of the values that were quantised, bit for bit."""
    options = pantile.Options(fp8=True, fp8_backward="bf16")
    found = []
    for factor in (1.0, 2.0):
        leaves = operands(packed, grad=True)
        inputs = [x * 1.0 for x in leaves]
        o, lse = attend("fp8", packed, *inputs, return_lse=True, options=options)
        with torch.no_grad():
            inputs[which].mul_(factor)
        loss = (o * weights_like(o)).sum() + lse.sin().sum()
        found.append(torch.autograd.grad(loss, leaves))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", "mean_k"])
def test_change_of_saved_codes(name):
    made = pantile.quantize(*operands(grad=True))
    o = pantile.attention(made, options=pantile.Options(fp8_backward="bf16"))
    getattr(made, name).zero_()
    with pytest.raises(RuntimeError, match=INPLACE):
        o.float().sum().backward()


@layouts
@pytest.mark.parametrize("which", range(3))
def test_change_between_quantize_and_attention(packed, which):
    leaves = operands(packed, grad=True)
    inputs = [x * 1.0 for x in leaves]
    made = pantile.quantize(*inputs, *((*lengths(), 50, 60) if packed else ()))
    before = pantile.attention(made)
    with torch.no_grad():
        inputs[which].mul_(2.0)
    o = pantile.attention(made)
    assert torch.equal(o, before)  # the codes did not change
    with pytest.raises(RuntimeError, match=INPLACE):
        o.float().sum().backward()
    with torch.no_grad():
        assert torch.equal(pantile.attention(made), before)


def test_change_between_quantize_and_attention_in_a_transform():
    q, k, v = operands()

    def loss(x):
        x = x * 1.0
        made = pantile.quantize(x, k, v)
        x.mul_(2.0)
        return pantile.attention(made).float().sum()

    with pytest.raises(RuntimeError, match=INPLACE):
        torch.func.grad(loss)(q)


# ---- FLOPs, and the partitioner that asks for them


def flops(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@layouts
def test_flops_of_both_kinds(packed):
    counts = [flops(lambda kind=kind: attend(kind, packed, *operands(packed))) for kind in OPTIONS]
    assert counts[0] == counts[1] > 0


@layouts
@kinds
def test_flops_of_tensors_without_contents(kind, packed):
    """Sequences count as if all were the longest."""
    with torch._subclasses.FakeTensorMode() as mode:
        tensors = [mode.from_tensor(x) for x in operands(packed)]
        call = functools.partial(attend, kind, packed, *tensors)
        found = flops(call)
    rows, keys = (50, 60) if packed else (70, 90)
    pairs = sum(min(max(i + 1 + keys - rows, 0), keys) for i in range(rows))
    assert found == 4 * 2 * 4 * pairs * 16


@kinds
def test_compile_with_a_memory_budget(kind, fresh_dynamo):
    """The partitioner weighs operators by their FLOPs; activations outweigh the inputs here."""
    (cu_seqlens, _), options = lengths(), OPTIONS[kind]

    def function(x):
        for _ in range(3):
            x = x.sin()
            tensors = (x, x[..., :2, :] * 1.5, x[..., 2:, :])
            x = pantile.varlen_attention(*tensors, cu_seqlens, cu_seqlens, 50, 50, options=options)
        return x.float().sin().sum()

    tensors = operands(packed=True)[:1]
    expected = gradients(function, tensors)
    with torch._functorch.config.patch(activation_memory_budget=0.4):
        found = gradients(compiled(function), tensors)
    assert_close(found, expected)
