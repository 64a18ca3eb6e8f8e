"""What a forward call returns beyond o and lse: the largest logit, o in float32, merged parts."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile._masks import window_bounds
from pantile._schema import Call
from pantile.reference import visible
from support import Target, bits, dense, packed, require_kernel

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
}


def default_dtype(target: Target) -> torch.dtype:
    return torch.float32 if target.device == "cpu" else torch.bfloat16


def sequences(case):
    """(rows of q, rows of k, keys' mask) of every sequence of a dense or packed case."""
    bounds = window_bounds(case.arguments.get("causal", False), case.arguments.get("window"))
    if not case.lengths:
        mask = visible(case.q.shape[1], case.k.shape[1], *bounds, case.q.device)
        return [(q, k, mask) for q, k in zip(case.q, case.k, strict=True)]
    found = []
    starts = [x.tolist() for x in case.lengths]
    for b in range(len(starts[0]) - 1):
        parts = []
        for name, x, cu in zip("qk", (case.q, case.k), starts, strict=True):
            used = case.arguments.get(f"seqused_{name}")
            length = cu[b + 1] - cu[b] if used is None else int(used[b])
            parts.append(x[cu[b] : cu[b] + length])
        mask = visible(len(parts[0]), len(parts[1]), *bounds, case.q.device)
        found.append((*parts, mask))
    return found


def expected_max_logit(case) -> torch.Tensor:
    """[batch, heads] in float64."""
    answers = []
    scale = case.arguments.get("scale")
    scale = case.q.shape[-1] ** -0.5 if scale is None else scale
    for q, k, mask in sequences(case):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
        scores = scores.masked_fill(~mask, -torch.inf).flatten(1)
        if scores.shape[1] == 0:
            scores = torch.full((q.shape[1], 1), -torch.inf, device=q.device).double()
        answers.append(scores.amax(1))
    return torch.stack(answers)


def call(case, target: Target, *operands, output_dtype=None, **extra):
    options = target.exact_options(output_dtype=output_dtype)
    arguments = {**case.arguments, **extra, "options": options}
    operands = operands or case.operands
    if case.lengths:
        return pantile.varlen_attention(*operands, *case.lengths, *case.longest, **arguments)
    return pantile.attention(*operands, **arguments)


def check_max_logit(case, target: Target) -> None:
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    with_it = call(case, target, return_lse=True, return_max_logit=True)
    expected = expected_max_logit(case)
    assert with_it[2].shape == expected.shape
    assert with_it[2].dtype is torch.float32
    torch.testing.assert_close(with_it[2].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(with_it[0], o, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(with_it[1], lse, rtol=1e-5, atol=1e-5)
    alone = call(case, target, return_max_logit=True)
    assert torch.equal(alone[1], with_it[2])
    assert torch.equal(bits(alone[0]), bits(with_it[0]))


# ---- the largest logit


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_max_logit(target, mask, head_dim):
    """Long enough that a running maximum which is only raised now and then would show."""
    case = dense(target, default_dtype(target), 1, 140, 517, 2, 1, head_dim, **MASKS[mask])
    case.k *= torch.linspace(2.0, 0.25, 517, device=case.k.device)[None, :, None, None].to(
        case.k.dtype
    )  # the largest scores come last in the kernels' order, a little larger each time
    check_max_logit(case, target)


def test_max_logit_of_packed_sequences(target):
    """One entry a sequence: also of those without rows or without keys."""
    case = packed(
        target, [40, 0, 130, 7], [50, 9, 66, 0], default_dtype(target), head_dim=64, causal=True
    )
    check_max_logit(case, target)
    for name, used in (("seqused_q", [17, 0, 129, 3]), ("seqused_k", [33, 2, 0, 0])):
        case.arguments[name] = torch.tensor(used, dtype=torch.int32, device=target.device)
        check_max_logit(case, target)


def test_max_logit_is_of_the_rows_alone(target):
    """Rows past the end of a sequence, which lie in the same tile, do not count."""
    case = packed(target, [3, 70], [40, 40], default_dtype(target), head_dim=64)
    case.q[3:] *= 100.0
    check_max_logit(case, target)


@pytest.mark.parametrize("scale", [0.0, -0.25, 3.0])
def test_max_logit_of_any_scale(target, scale):
    case = dense(target, default_dtype(target), causal=True, scale=scale)
    check_max_logit(case, target)


def test_max_logit_is_negative_when_all_scores_are(target):
    case = dense(target, default_dtype(target), rows=200, keys=200)
    case.q, case.k = case.q.abs() + 0.1, -case.k.abs() - 0.1
    check_max_logit(case, target)
    assert (call(case, target, return_max_logit=True)[1] < 0).all()


def test_max_logit_without_rows_or_keys(target):
    for rows, keys in ((0, 5), (5, 0)):
        case = dense(target, default_dtype(target), rows=rows, keys=keys)
        require_kernel(case, target)
        max_logit = call(case, target, return_max_logit=True)[1]
        assert max_logit.shape == (2, 4)
        assert torch.isneginf(max_logit).all()


def test_max_logit_of_nan(target):
    case = dense(target, default_dtype(target), rows=150, keys=150, causal=True)
    require_kernel(case, target)
    case.q[1, 130, 2] = float("nan")
    max_logit = call(case, target, return_max_logit=True)[1]
    assert max_logit[1, 2].isnan()
    assert max_logit.isnan().sum() == 1


def test_max_logit_has_no_gradient(target):
    case = dense(target, default_dtype(target))
    require_kernel(case, target, backward=True)
    leaves = [x.requires_grad_() for x in case.operands]
    o, max_logit = call(case, target, *leaves, return_max_logit=True)
    assert not max_logit.requires_grad
    with_it = torch.autograd.grad(o.sum(), leaves)
    plain = torch.autograd.grad(call(case, target, *leaves).sum(), leaves)
    for first, second in zip(with_it, plain, strict=True):
        torch.testing.assert_close(first, second, rtol=2**-7, atol=2**-8)


# ---- o in float32


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_output_is_the_output_before_rounding(target, dtype, mask, dims):
    head_dim, head_dim_v = dims
    case = dense(target, dtype, 1, 150, 333, 2, 1, head_dim, head_dim_v, **MASKS[mask])
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    exact, exact_lse = call(case, target, return_lse=True, output_dtype="float32")
    assert exact.dtype is torch.float32
    if target.backend == "reference":  # rounds from double to both
        torch.testing.assert_close(exact.to(dtype), o, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(exact.to(dtype), o)
    assert not torch.equal(exact, o.float())
    assert torch.equal(exact_lse, lse)


def test_float32_output_of_packed_sequences(target):
    case = packed(target, [40, 0, 130, 7], [50, 9, 66, 0], torch.bfloat16, head_dim=64, causal=True)
    require_kernel(case, target)
    o, _ = case.ours(*case.operands, options=target.options)
    exact = call(case, target, output_dtype=torch.float32)
    assert torch.equal(exact.to(torch.bfloat16), o)
    case.arguments["seqused_q"] = torch.tensor(
        [17, 0, 129, 3], dtype=torch.int32, device=target.device
    )
    o, _ = case.ours(*case.operands, options=target.options)
    exact = call(case, target, output_dtype=torch.float32)
    assert torch.equal(exact.to(torch.bfloat16), o)
    assert not exact[17:40].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_float32_output_keeps_what_is_not_attended_out(target, bad):
    case = dense(target, torch.bfloat16, batch=1, rows=200, keys=200, causal=True)
    require_kernel(case, target)
    case.v[0, 77, 1, 5] = bad
    o, _ = case.ours(*case.operands, options=target.options)
    exact = call(case, target, output_dtype="float32")
    assert torch.isfinite(exact[0, :77]).all()
    assert torch.isfinite(exact[0, :, :2]).all()
    assert not torch.isfinite(exact[0, 77:, 2:, 5]).any()
    torch.testing.assert_close(exact.to(o.dtype), o, rtol=2**-7, atol=0.0, equal_nan=True)


def test_other_output_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"output_dtype is torch\.float16; it must be None or"):
        pantile.Options(output_dtype=torch.float16)


# ---- merging parts


def split(case, parts: int):
    """The keys in `parts` pieces, the last one shorter."""
    size = -(-case.k.shape[1] // parts)
    return list(zip(case.k.split(size, 1), case.v.split(size, 1), strict=True))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merged_parts_are_the_whole(target, parts):
    case = dense(target, default_dtype(target), rows=130, keys=333)
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    partials = [
        call(case, target, case.q, k, v, return_lse=True, output_dtype="float32")
        for k, v in split(case, parts)
    ]
    merged, merged_lse = pantile.merge_attention(partials, dtype=case.q.dtype)
    assert merged.dtype is case.q.dtype
    tolerance = 1e-5 if case.q.dtype is torch.float32 else 2**-8
    torch.testing.assert_close(merged, o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_gradients_through_a_merge(target):
    case = dense(target, default_dtype(target), rows=60, keys=150)
    require_kernel(case, target, backward=True)
    generator = torch.Generator().manual_seed(3)
    leaves = [x.requires_grad_() for x in case.operands]
    o, lse = case.ours(*leaves, options=target.options)
    grads = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in (o, lse)]
    expected = torch.autograd.grad((o, lse), leaves, grads)
    partials = [
        call(case, target, case.q, k, v, return_lse=True, output_dtype="float32")
        for k, v in split(case, 3)
    ]
    merged = pantile.merge_attention(partials, dtype=case.q.dtype)
    found = torch.autograd.grad(merged, leaves, grads)
    tolerance = 1e-4 if case.q.dtype is torch.float32 else 3e-2
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def test_merge_of_rows_that_see_nothing():
    o = torch.zeros(1, 3, 2, 4, requires_grad=True)
    lse = torch.full((1, 2, 3), -torch.inf, requires_grad=True)
    other = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    merged, merged_lse = pantile.merge_attention([(o, lse), (o, lse)])
    assert not merged.any()
    assert torch.isneginf(merged_lse).all()
    for gradient in torch.autograd.grad(merged.sum() + merged_lse.sum(), (o, lse)):
        assert not gradient.isnan().any()
    merged, merged_lse = pantile.merge_attention([(o, lse), other])
    torch.testing.assert_close(merged, other[0])
    torch.testing.assert_close(merged_lse, other[1])


def test_merge_refuses_what_does_not_fit():
    o, lse = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="partials is empty"):
        pantile.merge_attention([])
    with pytest.raises(ValueError, match=r"partials\[1\] has shapes"):
        pantile.merge_attention([(o, lse), (o, lse[:, :1])])
    with pytest.raises(ValueError, match="lse has shape"):
        pantile.merge_attention([(o, lse.transpose(1, 2))])


# ---- by the operator


SETTINGS = Call(window_right=0)


@pytest.mark.parametrize("extras", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad, extras):
    q, k, v = (torch.randn(2, 6, n, 8, requires_grad=grad) for n in (4, 2, 2))
    arguments = (q, k, v, *SETTINGS, False, False, False, *extras)
    torch.library.opcheck(torch.ops.pantile.forward_extra.default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    q, k, v = (torch.randn(2, 6, n, 8, requires_grad=True) for n in (4, 2, 2))
    options = pantile.Options(output_dtype="float32")

    def function(q, k, v):
        return pantile.attention(q, k, v, return_lse=True, return_max_logit=True, options=options)

    found = torch.compile(function, fullgraph=True, backend=backend)(q, k, v)
    expected = function(q, k, v)
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(first, second)
    assert not found[2].requires_grad
    for first, second in zip(
        torch.autograd.grad(found[0].sum(), (q, k, v)),
        torch.autograd.grad(expected[0].sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(first, second)


def test_transforms():
    q, k, v = (torch.randn(3, 2, 6, 2, 8) for _ in range(3))

    def function(q, k, v):
        return pantile.attention(q, k, v, return_max_logit=True)

    found = torch.vmap(function)(q, k, v)
    for i in range(3):
        for first, second in zip(function(q[i], k[i], v[i]), found, strict=True):
            torch.testing.assert_close(first, second[i])
    gradient = torch.func.grad(lambda q: function(q, k[0], v[0])[0].sum())(q[0])
    leaf = q[0].clone().requires_grad_()
    function(leaf, k[0], v[0])[0].sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


def test_numpy():
    arrays = [torch.randn(2, 6, n, 8) for n in (4, 2, 2)]
    options = pantile.Options(output_dtype="float32")
    halves = [x.half() for x in arrays]
    expected = pantile.attention(*halves, return_max_logit=True, options=options)
    found = pantile.attention(*(x.numpy() for x in halves), return_max_logit=True, options=options)
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(torch.from_numpy(first), second)
