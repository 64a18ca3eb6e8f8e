"""The FP8 backward, Options(fp8_backward="full"): all five products of e4m3 numbers."""

from __future__ import annotations

import fp8_format
import fp8_gradient_error as errors
import pantile
import pytest
import torch
from pantile._schema import LENGTHS, Call
from support import Target
from test_fp8_backward import NAMES, fp8, leaves, normal, operands, relative, unrotated

STEP_ROWS, STEP_KEYS, SCALED_KEYS = 64, 128, 16
E4M3_MAX = 448.0


def full(target: Target, **extra) -> pantile.Options:
    return fp8(target, "full", **extra)


def require(target: Target, tensors, **call) -> None:
    plan = pantile.explain(*tensors, options=full(target), **call)
    for one in (plan.quantize, plan.forward, plan.backward):
        if one.kernel is None:
            assert target.backend != "cpu", one.reason
            pytest.skip(f"{target.backend}: {one.reason}")


# ---- the algebra a second time, in float64 with the same roundings


def rounded(x: torch.Tensor, limit: float = E4M3_MAX) -> torch.Tensor:
    """Through e4m3 with one scale."""
    scale = fp8_format.power_scale(x, limit)
    return errors.to_e4m3((x / scale).clamp(-limit, limit).float()).double() * scale


def gradient_numbers(grad_o: torch.Tensor) -> torch.Tensor:
    """dO [heads, rows, dim] as the kernels take it."""
    limit = 16.0 if grad_o.shape[-1] <= 128 else 15.0
    blocks = grad_o.double().split(fp8_format.ROWS, 1)
    return torch.cat([torch.stack([rounded(x, limit) for x in block]) for block in blocks], 1)


def steps_of(rows: int, keys: int):
    for row in range(0, rows, STEP_ROWS):
        for key in range(0, keys, STEP_KEYS):
            yield slice(row, row + STEP_ROWS), slice(key, key + STEP_KEYS)


def emulated(made, o, lse, grad_o, visible, grad_lse=None) -> list[torch.Tensor]:
    """Gradients of dense attention; ``visible``: bool [rows, keys]."""
    scale = made.shape_q[-1] ** -0.5
    group = made.shape_q[2] // made.shape_k[2]
    found = []
    for batch in range(made.shape_q[0]):
        q, k, v = (x.transpose(0, 1) for x in unrotated(made, batch))
        grad = gradient_numbers(grad_o[batch].transpose(0, 1).cpu())
        out = o[batch].transpose(0, 1).cpu().double()
        rows, keys = q.shape[1], k.shape[1]
        first = batch * -(-rows // 128) * 128
        base = lse[batch].cpu().double()
        if made.smooth_k:
            base = base - scale * made.q_dot_mean[:, first : first + rows].cpu().double()
        delta = (grad * out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse[batch].cpu().double()
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for head in range(q.shape[0]):
            own = head // group
            scores = (scale * q[head] @ k[own].mT - base[head, :, None]).exp()
            weights = torch.where(visible, scores, 0.0)
            dS = weights * (grad[head] @ v[own].mT - delta[head, :, None])
            for row, key in steps_of(rows, keys):
                parts = (256.0 * weights[row, key]).half().double().split(SCALED_KEYS, 1)
                p8 = torch.cat([rounded(x) for x in parts], 1) / 256.0
                ds8 = rounded(dS[row, key].bfloat16().double())
                dv[own, key] += p8.mT @ grad[head, row]
                dk[own, key] += scale * ds8.mT @ q[head, row]
                dq[head, row] += scale * ds8 @ k[own, key]
        found.append([x.transpose(0, 1) for x in (dq, dk, dv)])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def visible_pairs(rows: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
    shown = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        shown &= distance >= -left
    if right is not None:
        shown &= distance <= right
    return shown


CASES = {
    "d64 full": ({"dim": 64}, {}, torch.bfloat16),
    "d128 causal": ({"dim": 128, "heads": 2, "heads_k": 1}, {"causal": True}, torch.float16),
    "d96 window": ({"dim": 96, "batch": 1}, {"window": (70, 3)}, torch.bfloat16),
    "d256 causal": (
        {"dim": 256, "batch": 1, "heads": 2, "heads_k": 2},
        {"causal": True},
        torch.bfloat16,
    ),
    "d40 dv24": ({"dim": 40, "dim_v": 24, "batch": 1}, {"causal": True}, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_same_roundings(target, case):
    """Off by the rounding of the output and by codes that fall on the other side: scores
    are rounded to fp16 here and not there. One rounding to e4m3 too many or too few is 2.7 %."""
    sizes, call, dtype = CASES[case]
    tensors = operands(target, **sizes, dtype=dtype)
    require(target, tensors, **call)
    dim_v = tensors[2].shape[-1]
    grad_o = normal(*tensors[0].shape[:3], dim_v, seed=4, dtype=dtype).to(target.device)
    given = leaves(tensors)
    o, lse = pantile.attention(*given, **call, return_lse=True, options=full(target))
    found = torch.autograd.grad(o, given, grad_o)
    made = pantile.fp8.quantize(*tensors, options=target.options)
    left, right = call.get("window", (None, 0 if call.get("causal") else None))
    shown = visible_pairs(150, 200, left, right)
    half = o.detach().to(made.dtype)  # as the backward has it
    truth = emulated(made, half, lse.detach(), grad_o.to(made.dtype), shown)
    for name, x, expected, tensor in zip(NAMES, found, truth, tensors, strict=True):
        assert x.dtype is tensor.dtype
        assert relative(x, expected) < 1.2e-2, name


def test_gradient_of_lse(target):
    q, k, v = operands(target, 1)
    k = k + 4.0 * normal(1, 1, 2, 64, seed=9).to(target.device)
    require(target, (q, k, v))
    grad_lse = normal(1, 4, 150, seed=5, dtype=torch.float32).to(target.device)
    exact = [x.cpu().double().requires_grad_() for x in (q, k)]
    keys = exact[1].repeat_interleave(2, 2)
    truth_lse = (torch.einsum("bqhd,bkhd->bhqk", exact[0], keys) / 8.0).logsumexp(-1)
    truth = torch.autograd.grad(truth_lse, exact, grad_lse.cpu().double())
    given = leaves((q, k, v))
    _, lse = pantile.attention(*given, return_lse=True, options=full(target))
    found = torch.autograd.grad(lse, given, grad_lse)
    for name, x, expected in zip(NAMES, found, truth, strict=False):
        assert relative(x, expected) < 0.08, name
    assert not found[2].any()


# ---- errors against float64

# dQ, dK and dV at most, 1.05 of what the emulation of tools/fp8_gradient_error.py has in 8 heads of
# this length, and on GPUs 1.1, whose FP8 products are summed with fewer bits. Unpaired forms are
# off by 20 % and more where means are.
BARS = {
    "normal": (0.071, 0.071, 0.052),
    "outlier": (0.080, 0.084, 0.059),
    "mean": (0.083, 0.084, 0.059),
    "sharp": (0.135, 0.138, 0.084),
    "rows": (0.080, 0.080, 0.059),
}


@pytest.mark.parametrize("law", BARS)
def test_errors_by_law(target, law):
    inputs = errors.draw(law, 512, 2, 128, 0)
    tensors = [x.to(target.device) for x in inputs]
    require(target, tensors[:3], causal=True)
    reference, *_ = errors.exact_gradients(*inputs, True)
    given = leaves(tensors[:3])
    o = pantile.attention(*given, causal=True, options=full(target))
    found = torch.autograd.grad(o, given, tensors[3])
    for name, x, bar in zip(NAMES, found, BARS[law], strict=True):
        error = relative(errors.heads_first(x), getattr(reference, name))
        assert error < bar * (1.05 if target.device == "cuda" else 1.0), f"{name}: {error}"


@pytest.mark.parametrize("exponent", [-40, 20])
def test_scales_follow_the_size_of_gradients(target, exponent):
    """dO times a power of two gives the gradients times it, bit for bit: no range is lost."""
    tensors = operands(target, 1)
    require(target, tensors)
    grad_o = normal(1, 150, 4, 64, seed=4).to(target.device)
    found = []
    for factor in (1.0, 2.0**exponent):
        given = leaves(tensors)
        o = pantile.attention(*given, deterministic=True, options=full(target))
        found.append(torch.autograd.grad(o, given, grad_o * factor))
    for name, x, y in zip(NAMES, *found, strict=True):
        assert torch.equal(x * 2.0**exponent, y), name


def test_long_flat_rows_keep_their_weights(target):
    """P of 1/4096 would be lost with one scale for all lengths; dV must not be biased either."""
    q, k, _v = (normal(1, n, 1, 64, seed=n) for n in (64, 4096, 4096))
    tensors = [x.to(target.device) for x in (0.01 * q, k, normal(1, 4096, 1, 64, seed=7) + 1.0)]
    require(target, tensors)
    grad_o = (normal(1, 64, 1, 64, seed=4) + 1.0).to(target.device)
    exact = [x.cpu().double().requires_grad_() for x in tensors]
    scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], exact[1]) / 8.0
    truth_o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), exact[2])
    truth = torch.autograd.grad(truth_o, exact, grad_o.cpu().double())
    given = leaves(tensors)
    o = pantile.attention(*given, options=full(target))
    found = torch.autograd.grad(o, given, grad_o)
    assert relative(found[2], truth[2]) < 0.05
    assert found[2].float().mean().item() == pytest.approx(truth[2].mean().item(), rel=0.01)
    assert relative(found[1], truth[1]) < 0.15  # dP is nearly delta: differences of e4m3 numbers


@pytest.mark.parametrize("dim", [64, 128])
def test_codes_of_the_gradient_come_back_as_dv(target, dim):
    """Where each query sees one key, P is 1 and dV is dO as it was quantised, bit for bit."""
    rows = 300
    tensors = operands(target, 1, rows, rows, 2, 2, dim)
    require(target, tensors, window=(0, 0))
    grad_o = normal(1, rows, 2, dim, seed=4) * torch.exp(2.0 * normal(1, rows, 2, 1, seed=5))
    given = leaves(tensors)
    options = full(target, fp8_exp="exp2")
    o = pantile.attention(*given, window=(0, 0), options=options)
    found = torch.autograd.grad(o, given, grad_o.to(target.device))
    expected = gradient_numbers(grad_o[0].transpose(0, 1)).transpose(0, 1)
    assert torch.equal(found[2][0].cpu().double(), expected)


# ---- rows and sequences


def test_packed_gradients_are_those_of_single_sequences(target):
    lengths = (70, 0, 200, 33)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = [x[0] for x in operands(target, 1, 303, 303)]
    require(target, [x[None] for x in packed], causal=True)
    grad_o = normal(303, 4, 64, seed=4).to(target.device)
    given = leaves(packed)
    packing = (cu.to(target.device), cu.to(target.device), 200, 200)
    same = {"causal": True, "deterministic": True, "options": full(target)}
    o = pantile.varlen_attention(*given, *packing, **same)
    found = torch.autograd.grad(o, given, grad_o)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        if begin == end:
            continue
        alone = leaves([x[None, begin:end] for x in packed])
        o = pantile.attention(*alone, **same)
        expected = torch.autograd.grad(o, alone, grad_o[None, begin:end])
        for name, x, y in zip(NAMES, found, expected, strict=True):
            assert torch.equal(x[begin:end], y[0]), name


def test_unused_rows_have_no_gradient(target):
    """seqused: rows past it are not read, and their gradients are 0."""
    packed = [x[0] for x in operands(target, 1, 200, 200)]
    require(target, [x[None] for x in packed])
    cu, used = ([0, 150, 200], [100, 0])
    cu, used = (torch.tensor(x, dtype=torch.int32, device=target.device) for x in (cu, used))
    for x in packed:
        x[100:] = torch.nan
    given = leaves(packed)
    o = pantile.varlen_attention(
        *given, cu, cu, 150, 150, seqused_q=used, seqused_k=used, options=full(target)
    )
    grad_o = normal(200, 4, 64, seed=4).to(target.device)
    grad_o[100:] = torch.nan
    grads = torch.autograd.grad(o, given, grad_o)
    for x in grads:
        assert x[:100].isfinite().all()
        assert x[:100].any()
        assert not x[100:].any()


def test_rows_without_keys_have_no_gradient(target):
    q, k, v = operands(target, 1, 100, 40)
    require(target, (q, k, v), causal=True)
    given = leaves((q, k, v))
    o = pantile.attention(*given, causal=True, options=full(target))
    grads = torch.autograd.grad(o, given, torch.ones_like(o))
    assert not grads[0][0, :60].any()
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("name", ["q", "k", "v", "grad_o"])
def test_nan_reaches_what_attends_to_it(target, name):
    """And nothing that the mask keeps from it."""
    q, k, v = operands(target, 1, 150, 150, 1, 1)
    grad_o = normal(1, 150, 1, 64, seed=4).to(target.device)
    require(target, (q, k, v), causal=True)
    given = dict(zip(("q", "k", "v", "grad_o"), (q, k, v, grad_o), strict=True))
    given[name][0, 70, 0, 5] = torch.nan
    q, k, v = leaves((given["q"], given["k"], given["v"]))
    o = pantile.attention(q, k, v, causal=True, options=full(target))
    dq, dk, dv = (
        x[0, :, 0].isnan().any(-1) for x in torch.autograd.grad(o, (q, k, v), given["grad_o"])
    )
    row = torch.zeros(150, dtype=torch.bool, device=target.device)
    row[70] = True
    before = torch.arange(150, device=target.device) <= 70  # keys that query 70 sees
    after = ~before | row  # queries that see key 70
    if name in ("q", "grad_o"):
        assert torch.equal(dq, row)
        assert torch.equal(dk, before)
        assert torch.equal(dv, before)
    else:
        # Of the queries that see the key, and so of all keys that those see.
        assert torch.equal(dq, after)
        assert dk.all()
        assert torch.equal(dv, torch.full_like(dv, name == "k"))


def test_deterministic_runs_agree(target):
    tensors = operands(target, 2, 260, 300)
    require(target, tensors, causal=True)
    grad_o = normal(2, 260, 4, 64, seed=4).to(target.device)
    found = []
    for _ in range(3):
        given = leaves(tensors)
        o = pantile.attention(*given, causal=True, deterministic=True, options=full(target))
        found.append(torch.autograd.grad(o, given, grad_o))
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True))


def test_threads_do_not_matter():
    tensors = [normal(1, 300, heads, 64, seed=i) for i, heads in enumerate((4, 2, 2))]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            given = leaves(tensors)
            o = pantile.attention(*given, causal=True, options=fp8(Target("cpu", "cpu"), "full"))
            found.append(torch.autograd.grad(o, given, torch.ones_like(o)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


# ---- torch

CPU_FULL = pantile.Options(fp8=True, fp8_backward="full")


def test_opcheck():
    q, k, v = (normal(1, n, h, 64, seed=n) for n, h in ((128, 2), (256, 1), (256, 1)))
    none = (None,) * 3
    lengths = (None,) * len(LENGTHS)
    made = torch.ops.pantile.quantize(q, k, v, *none, *lengths, 0, 0, 128, 128, True, True, "auto")
    call = Call(window_right=0)
    shape = (1, 128, 256, 64)
    forward = (*call, *shape, torch.bfloat16, 128, 128, True, True, "code", "full", False, False)
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.pantile.fp8_forward,
        (*leaves((q, k, v)), *made, *forward),
        test_utils=(*checks, "test_aot_dispatch_dynamic"),
    )
    o, lse = torch.ops.pantile.fp8_forward(None, None, None, *made, *forward)
    torch.library.opcheck(
        torch.ops.pantile.fp8_backward,
        (
            *(torch.ones_like(o), torch.ones_like(lse), *made[:5], made[6], o, lse, *call, *shape),
            *(128, 128, True, False),
        ),
        test_utils=checks,
    )


def test_compiles_in_one_graph():
    torch._dynamo.reset()

    def step(q, k, v):
        return pantile.attention(q * 2.0, k, v, causal=True, options=CPU_FULL).float().sin().sum()

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
    q, k, v = (normal(3, 1, 40, 2, 64, seed=i) for i in range(3))

    def loss(q, k, v):
        return pantile.attention(q, k, v, causal=True, options=CPU_FULL).float().square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    for i in range(3):
        given = leaves((q[i], k[i], v[i]))
        for x, y in zip(mapped, torch.autograd.grad(loss(*given), given), strict=True):
            assert torch.equal(x[i], y)


def test_autocast_gives_gradients_in_float32():
    given = leaves([normal(1, 70, 2, 64, seed=i, dtype=torch.float32) for i in range(3)])
    with torch.autocast("cpu", torch.bfloat16):
        o = pantile.attention(*given, causal=True, options=CPU_FULL)
    assert o.dtype is torch.bfloat16
    found = torch.autograd.grad(o, given, torch.ones_like(o))
    rounded_inputs = leaves([x.detach().bfloat16() for x in given])
    o = pantile.attention(*rounded_inputs, causal=True, options=CPU_FULL)
    expected = torch.autograd.grad(o, rounded_inputs, torch.ones_like(o))
    for x, y in zip(found, expected, strict=True):
        assert x.dtype is torch.float32
        assert torch.equal(x, y.float())


def test_second_derivatives_are_refused():
    given = leaves([normal(1, 40, 1, 64, seed=i) for i in range(3)])
    o = pantile.attention(*given, options=CPU_FULL)
    (dq,) = torch.autograd.grad(o.float().square().sum(), given[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.float().sum().backward()


# ---- what is refused


def test_other_blocks_are_refused_before_the_forward():
    given = leaves([normal(1, 40, 1, 64, seed=i) for i in range(3)])
    for changes, text in (
        ({"block": 64, "block_q": 128}, "forward.fp8.block_k is 64; it must be 128"),
        ({"block_q": 1}, "forward.fp8.block_q is 1; it must be 128"),
    ):
        made = pantile.fp8.quantize(*given, **changes)
        with pytest.raises(ValueError, match=text):
            pantile.fp8.attention(made, options=CPU_FULL)
        pantile.fp8.attention(pantile.fp8.quantize(*[x.detach() for x in given], **changes))


def test_backends_without_a_kernel_refuse_it_before_the_forward():
    given = leaves([normal(1, 40, 1, 64, seed=i) for i in range(3)])
    options = pantile.Options(backend="reference", fp8=True, fp8_backward="full")
    with pytest.raises(pantile.UnsupportedError, match=r"no backward kernel .* reference: "):
        pantile.attention(*given, options=options)
    with torch.no_grad():
        pantile.attention(*given, options=options)
    plan = pantile.explain(*given, options=options)
    assert plan.backward.kernel is None
    assert plan.forward.kernel is not None


def test_explain_names_the_kernel():
    given = [normal(1, 40, 1, 64, seed=i) for i in range(3)]
    plan = pantile.explain(*given, options=CPU_FULL)
    assert plan.backward.kernel == "cpu_backward_e4m3"
    assert plan.dequantize is None
    assert (plan.backward.tile_q, plan.backward.tile_k) == (STEP_ROWS, STEP_KEYS)
