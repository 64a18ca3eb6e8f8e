"""Gradients of FP8 attention that belong to its forward: fp8_backward="bf16" (docs/fp8.md)."""

from __future__ import annotations

import json

import fp8_format
import fp8_gradient_error as errors
import pantile
import pytest
import torch
from pantile._schema import LENGTHS, Call
from support import DTYPES, Target

NAMES = ("dq", "dk", "dv")


def fp8(target: Target, backward: str = "bf16", **extra) -> pantile.Options:
    return pantile.Options(backend=target.backend, fp8=True, fp8_backward=backward, **extra)


def normal(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(target, batch=2, rows=150, keys=200, heads=4, heads_k=2, dim=64, dim_v=None, **kind):
    tensors = (
        normal(batch, rows, heads, dim, seed=1, **kind),
        normal(batch, keys, heads_k, dim, seed=2, **kind),
        normal(batch, keys, heads_k, dim_v or dim, seed=3, **kind),
    )
    return tuple(x.to(target.device) for x in tensors)


def require(target: Target, tensors, **call) -> None:
    plan = pantile.explain(*tensors, options=fp8(target), **call)
    for one in (plan.quantize, plan.forward, plan.dequantize, plan.backward):
        if one.kernel is None:
            assert target.device != "cpu", one.reason
            pytest.skip(f"{target.backend}: {one.reason}")


def quantized(target: Target, *arguments, **format_) -> pantile.Quantized:
    """Skips where the backend has no quantiser."""
    try:
        return pantile.fp8.quantize(*arguments, **format_, options=target.options)
    except pantile.UnsupportedError as error:
        if target.device == "cpu":
            raise
        pytest.skip(f"{target.backend}: {error}")


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return errors.relative(found.detach().cpu(), truth.cpu())


# ---- dequantize


def unrotated(made: pantile.Quantized, batch: int) -> tuple:
    """The dense operands' numbers of one sequence in float64, k less its mean."""
    q, k, v = fp8_format.dequantize(made, batch)
    if made.hadamard:
        q = fp8_format.unrotate(q) / fp8_format.group_of(made.shape_q[-1])
        k = fp8_format.unrotate(k)
    return q, k, v


FORMATS = [
    {},
    {"hadamard": False, "smooth_k": False},
    {"block": 64, "block_q": 1},
]


@pytest.mark.parametrize("format_", FORMATS, ids=["default", "plain", "fine"])
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 64), ("f16", 96), ("f32", 128), ("bf16", 256)])
def test_dequantize_gives_codes_times_scales(target, dtype, dim, format_):
    tensors = operands(target, dim=dim, dtype=DTYPES[dtype])
    made = quantized(target, *tensors, **format_)
    found = pantile.fp8.dequantize(
        made, dtype=torch.float32, keep_mean=False, options=target.options
    )
    for batch in range(2):
        for name, x, truth in zip("qkv", found, unrotated(made, batch), strict=True):
            one = x[batch].cpu().double()
            torch.testing.assert_close(one, truth, rtol=1e-5, atol=1e-5, msg=name)
    rounded = pantile.fp8.dequantize(made, keep_mean=False, options=target.options)
    for x, whole in zip(rounded, found, strict=True):
        assert x.dtype is made.dtype
        assert torch.equal(x, whole.to(made.dtype))
    whole = pantile.fp8.dequantize(made, dtype=torch.float32, options=target.options)
    for name, x, given in zip("qkv", whole, tensors, strict=True):
        assert relative(x, given.double()) < 0.04, name


def test_dequantize_packed(target):
    """Sequences of 0, 130, 128 and 1 rows come back where they were; unused rows are not read."""
    lengths = (0, 130, 128, 1)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = (x[0] for x in operands(target, 1, 259, 259))
    packing = (cu.to(target.device), cu.to(target.device), 130, 130)
    made = quantized(target, q, k, v, *packing)
    found = pantile.fp8.dequantize(made, dtype=torch.float32, options=target.options)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if begin == end:
            continue
        parts = [x[None, begin:end] for x in (q, k, v)]
        one = pantile.fp8.quantize(*parts, options=target.options)
        alone = pantile.fp8.dequantize(one, dtype=torch.float32, options=target.options)
        for x, y in zip(found, alone, strict=True):
            assert torch.equal(x[begin:end], y[0])


def test_dequantize_tells_what_was_not_finite(target):
    q, k, v = operands(target, 1, 40, 140, 2, 2)
    q[0, 3, 1, 5], k[0, 139, 0, 0], v[0, 130, 1, 7], v[0, 2, 1, 63] = (
        *(torch.nan, torch.inf, -torch.inf, torch.nan),
    )
    made = quantized(target, q, k, v)
    found = pantile.fp8.dequantize(made, options=target.options)
    expected = [torch.zeros_like(x, dtype=torch.bool) for x in (q, k, v)]
    expected[0][0, 3, 1] = expected[1][0, 139, 0] = True  # the rotation spreads them
    expected[2][0, 130, 1, 7] = expected[2][0, 2, 1, 63] = True
    for x, lost in zip(found, expected, strict=True):
        assert torch.equal(x.isnan(), lost)


# ---- gradients


def paired_gradients(made, o, lse, grad_o, causal: bool) -> list[torch.Tensor]:
    """The algebra in float64: scores and V of the codes, O and LSE of the forward."""
    grads = []
    group = made.shape_q[2] // made.shape_k[2]
    scale = made.shape_q[-1] ** -0.5
    for batch in range(made.shape_q[0]):
        q, k, v = (x.transpose(0, 1) for x in unrotated(made, batch))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        rows, keys = q.shape[1], k.shape[1]
        first = batch * -(-rows // 128) * 128
        shift = scale * made.q_dot_mean[:, first : first + rows].cpu().double()
        scores = scale * q @ k.mT - (lse[batch].cpu().double() - shift)[..., None]
        if causal:
            hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.exp()
        grad, out = (x[batch].transpose(0, 1).cpu().double() for x in (grad_o, o))
        dS = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
        found = scale * dS @ k, scale * dS.mT @ q, weights.mT @ grad
        dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in found[1:])
        grads.append([x.transpose(0, 1) for x in (found[0], dk, dv)])
    return [torch.stack(parts) for parts in zip(*grads, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim", "dim_v"), [("bf16", 64, 64), ("f16", 128, 128), ("f32", 40, 24)]
)
def test_gradients_are_those_of_the_codes(target, dtype, dim, dim_v, causal):
    """Off by what 16-bit products round and no more."""
    tensors = operands(target, dim=dim, dim_v=dim_v, dtype=DTYPES[dtype])
    require(target, tensors, causal=causal)
    grad_o = normal(2, 150, 4, dim_v, seed=4, dtype=DTYPES[dtype]).to(target.device)
    q, k, v = leaves(tensors)
    o, lse = pantile.attention(q, k, v, causal=causal, return_lse=True, options=fp8(target))
    found = torch.autograd.grad(o, (q, k, v), grad_o)
    made = pantile.fp8.quantize(*tensors, options=target.options)
    truth = paired_gradients(made, o.detach(), lse.detach(), grad_o, causal)
    for name, x, expected, given in zip(NAMES, found, truth, tensors, strict=True):
        assert x.dtype is given.dtype
        assert relative(x, expected) < (4e-3 if dtype == "bf16" or dtype == "f32" else 1e-3), name


def test_packed_gradients_are_those_of_single_sequences(target):
    lengths = (70, 0, 200, 33)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = [x[0] for x in operands(target, 1, 303, 303)]
    require(target, [x[None] for x in packed], causal=True)
    grad_o = normal(303, 4, 64, seed=4).to(target.device)
    q, k, v = leaves(packed)
    packing = (cu.to(target.device), cu.to(target.device), 200, 200)
    o = pantile.varlen_attention(
        q, k, v, *packing, causal=True, deterministic=True, options=fp8(target)
    )
    found = torch.autograd.grad(o, (q, k, v), grad_o)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if begin == end:
            continue
        alone = leaves([x[None, begin:end] for x in packed])
        o = pantile.attention(*alone, causal=True, deterministic=True, options=fp8(target))
        expected = torch.autograd.grad(o, alone, grad_o[None, begin:end])
        for name, x, y in zip(NAMES, found, expected, strict=True):
            torch.testing.assert_close(x[begin:end], y[0], msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_of_lse_knows_the_mean_of_k(target, packed):
    """LSE holds q . mean(K); without its part dq would have none of the mean."""
    q, k, v = operands(target, 1)
    k = k + 4.0 * normal(1, 1, 2, 64, seed=9).to(target.device)
    require(target, (q, k, v))
    grad_lse = normal(1, 4, 150, seed=5, dtype=torch.float32).to(target.device)
    exact = [x.cpu().double().requires_grad_() for x in (q, k)]
    keys = exact[1].repeat_interleave(2, 2)
    truth_lse = (torch.einsum("bqhd,bkhd->bhqk", exact[0], keys) / 8.0).logsumexp(-1)
    truth = torch.autograd.grad(truth_lse, exact, grad_lse.cpu().double())
    options = fp8(target)
    if packed:
        given = leaves([x[0] for x in (q, k, v)])
        cu = [torch.tensor([0, n], dtype=torch.int32, device=target.device) for n in (150, 200)]
        _, lse = pantile.varlen_attention(*given, *cu, 150, 200, return_lse=True, options=options)
        found = torch.autograd.grad(lse, given[:2], grad_lse[0])
        found = [x[None] for x in found]
    else:
        given = leaves((q, k, v))
        _, lse = pantile.attention(*given, return_lse=True, options=options)
        found = torch.autograd.grad(lse, given[:2], grad_lse)
    for name, x, expected in zip(NAMES, found, truth, strict=False):
        assert relative(x, expected) < 0.06, name


def test_rows_without_keys_have_no_gradient(target):
    q, k, v = operands(target, 1, 100, 40)
    require(target, (q, k, v), causal=True)
    given = leaves((q, k, v))
    o = pantile.attention(*given, causal=True, options=fp8(target))
    grads = torch.autograd.grad(o, given, torch.ones_like(o))
    assert not grads[0][0, :60].any()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("size", [1e-30, 1e3])
def test_sizes_of_gradients(target, size):
    """dO is not in FP8: its size does not matter to the relative error."""
    tensors = operands(target, 1)
    require(target, tensors)
    grad_o = normal(1, 150, 4, 64, seed=4).to(target.device)
    found = []
    for factor in (1.0, size):
        given = leaves(tensors)
        o = pantile.attention(*given, options=fp8(target))
        found.append(torch.autograd.grad(o, given, (grad_o.float() * factor).bfloat16()))
    for name, x, y in zip(NAMES, *found, strict=True):
        assert relative(y.double() / size, x.double()) < 1e-2, name


# ---- errors by law


def golden_cases() -> dict:
    return json.loads(errors.GOLDEN.read_text())


@pytest.mark.parametrize("case", golden_cases())
def test_errors_are_those_of_the_golden_file(case):
    """Within 1.25x, by law, mask and variant; also the emulation of an FP8 backward."""
    law, mask, length = case.split()
    names = errors.GOLDEN_VARIANTS
    found = errors.measure(names, law, mask == "causal", int(length), heads=2, seeds=1)
    for variant, expected in golden_cases()[case].items():
        for key, value in expected.items():
            if value is not None:
                assert found[variant][key] < 1.25 * value, (variant, key)


@pytest.mark.parametrize("law", errors.LAWS)
def test_leak_is_small_because_the_operands_belong_together(law):
    """Row sums of dS; with another delta or another V they are several times as large."""
    unpaired = "all, delta of the exact O"
    found = errors.measure(
        ("paired, products in bf16", "all, paired", unpaired), law, True, 256, heads=2, seeds=1
    )
    assert found["paired, products in bf16"]["leak"] < 0.04
    assert found["all, paired"]["leak"] < 0.045
    if law == "mean":
        assert found[unpaired]["leak"] > 2.0 * found["all, paired"]["leak"]


def test_emulation_agrees_with_the_library():
    """Of the paired form with products in bf16, the library's CPU backend is the second maker."""
    names = ("paired, products in bf16", 'Options(fp8_backward="bf16")')
    found = errors.measure(names, "outlier", True, 300, heads=2, seeds=1)
    for key in NAMES:
        assert found[names[1]][key] == pytest.approx(found[names[0]][key], rel=0.02), key


# ---- torch


@pytest.mark.parametrize("backward", ["bf16", "full", "recompute"])
def test_saved_bytes_are_those_that_explain_tells(backward):
    """q, k and v are not kept beside their codes."""
    options = pantile.Options(fp8=True, fp8_backward=backward)
    tensors = leaves([normal(1, 256, 2, 64, seed=i) for i in range(3)])
    kept = {}

    def note(x):
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        o = pantile.attention(*tensors, causal=True, options=options)
    plan = pantile.explain(*tensors, causal=True, options=options)
    assert sum(kept.values()) == plan.saved_bytes
    assert f"saved for the backward: {plan.saved_bytes} bytes" in str(plan)
    assert ("dequantize: cpu_quantize_bf16" in str(plan)) == (backward == "bf16")
    assert any(x.data_ptr() in kept for x in tensors) == (backward == "recompute")
    assert (o.data_ptr() in kept) == (backward != "recompute")
    assert ("cpu_backward_e4m3" in str(plan)) == (backward == "full")


def test_opcheck():
    q, k, v = (normal(1, n, h, 64, seed=n) for n, h in ((128, 2), (256, 1), (256, 1)))
    none = (None,) * 3
    lengths = (None,) * len(LENGTHS)
    made = torch.ops.pantile.quantize(q, k, v, *none, *lengths, 0, 0, 128, 128, True, True, "auto")
    checks = ("test_autograd_registration", "test_faketensor")
    numbers = (*lengths, 0, 0, 1, 128, 256, 64, torch.bfloat16, 128, 128, True, True, "auto")
    torch.library.opcheck(torch.ops.pantile.dequantize, (*made[:5], *numbers), test_utils=checks)
    torch.library.opcheck(
        torch.ops.pantile.fp8_forward,
        (
            *(*leaves((q, k, v)), *made, *Call(window_right=0), 1, 128, 256, 64, torch.bfloat16),
            *(128, 128, True, True, "code", "bf16", False, False),
        ),
        test_utils=(*checks, "test_aot_dispatch_dynamic"),
    )


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    options = pantile.Options(fp8=True, fp8_backward="bf16")

    def step(q, k, v):
        return pantile.attention(q * 2.0, k, v, causal=True, options=options).float().sin().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (60, 70):
        shapes = (1, rows, 2, 64), (1, 130, 1, 64), (1, 130, 1, 64)
        results = []
        for function in (step, compiled):
            given = leaves([normal(*shape, seed=i) for i, shape in enumerate(shapes)])
            results.append(torch.autograd.grad(function(*given), given))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_vmap_of_grad():
    options = pantile.Options(fp8=True, fp8_backward="bf16")
    q, k, v = (normal(3, 1, 40, 2, 64, seed=i) for i in range(3))

    def loss(q, k, v):
        return pantile.attention(q, k, v, causal=True, options=options).float().square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    for i in range(3):
        given = leaves((q[i], k[i], v[i]))
        for x, y in zip(mapped, torch.autograd.grad(loss(*given), given), strict=True):
            assert torch.equal(x[i], y)


def test_short_training_runs_follow_each_other():
    """A two-layer net learns to copy by attention, as fast with either backward."""
    losses = {}
    for backward in ("recompute", "bf16", "full"):
        torch.manual_seed(0)
        options = pantile.Options(fp8=True, fp8_backward=backward)
        inner, outer = torch.nn.Linear(32, 3 * 64), torch.nn.Linear(64, 32)
        optimizer = torch.optim.Adam([*inner.parameters(), *outer.parameters()], lr=3e-3)
        data = normal(8, 48, 32, seed=7, dtype=torch.float32)
        for _ in range(40):
            x = data + 0.0
            q, k, v = inner(x).view(8, 48, 3, 1, 64).unbind(2)
            o = pantile.attention(q, k, v, options=options).flatten(2)
            loss = (outer(o) - x.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[backward] = loss.item()
    assert losses["bf16"] < 0.3 * data.mean(1).square().mean().item()
    assert losses["bf16"] == pytest.approx(losses["recompute"], rel=0.2)
    assert losses["full"] == pytest.approx(losses["recompute"], rel=0.2)


# ---- bad input


def bad_input_cases() -> dict:
    made = pantile.fp8.quantize(*(normal(1, 5, 1, 64, seed=i) for i in range(3)))
    return {
        "option": (
            lambda: pantile.Options(fp8_backward="outputs"),
            ValueError,
            "fp8_backward is 'outputs'; it must be one of bf16, full, recompute",
        ),
        "operands": (
            lambda: pantile.fp8.dequantize(torch.ones(2)),
            TypeError,
            "operands is a Tensor of shape [2] and dtype float32; it must be what "
            "pantile.fp8.quantize(q, k, v) returns",
        ),
        "dtype": (
            lambda: pantile.fp8.dequantize(made, dtype=torch.float64),
            ValueError,
            "dtype is torch.float64; it must be one of float32, float16, bfloat16, or None",
        ),
        "keep_mean": (
            lambda: pantile.fp8.dequantize(made, keep_mean=2),
            TypeError,
            "keep_mean is 2; it must be True or False",
        ),
    }


BAD_INPUT = bad_input_cases()


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    run, error, message = BAD_INPUT[case]
    with pytest.raises(error) as caught:
        run()
    assert str(caught.value) == message
