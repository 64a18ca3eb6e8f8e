"""attention() and varlen_attention() against float64: shapes, masks, head dims, gradients, LSE."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile import reference
from support import DTYPES, Target, check_both, check_forward, dense, packed, require_kernel

MASKS = [
    {},
    {"causal": True},
    {"window": (10, 0)},
    {"window": (0, 0)},
    {"window": (None, 3)},
    {"window": (5, None)},
    {"window": (16, 7), "causal": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arguments", MASKS, ids=str)
def test_masks(target, dtype, arguments):
    check_both(dense(target, DTYPES[dtype], **arguments), target, with_lse=True)


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (6, 2)}], ids=str)
@pytest.mark.parametrize(
    ("rows", "keys"), [(1, 1), (1, 200), (200, 1), (65, 63), (63, 65), (128, 128), (17, 130)]
)
def test_lengths(target, rows, keys, arguments):
    dtype = target.default_dtype
    check_both(dense(target, dtype, rows=rows, keys=keys, **arguments), target)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        *((n, n) for n in (1, 8, 40, 72, 80, 96, 128, 256)),
        *((3, 5), (16, 24), (192, 128), (64, 512), (512, 33)),
    ],
)
def test_head_dims(target, head_dim, head_dim_v):
    dtype = target.default_dtype
    case = dense(target, dtype, batch=1, rows=33, keys=29, head_dim=head_dim, head_dim_v=head_dim_v)
    check_both(case, target)


@pytest.mark.parametrize(("heads", "heads_k"), [(1, 1), (6, 6), (6, 3), (8, 1)])
def test_grouped_heads(target, heads, heads_k):
    dtype = torch.float16 if target.device == "cpu" else torch.bfloat16
    check_both(dense(target, dtype, heads=heads, heads_k=heads_k, causal=True), target)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 3, 1e-3])
def test_scale(target, scale):
    dtype = target.default_dtype
    check_both(dense(target, dtype, scale=scale), target)


def test_default_scale(target):
    dtype = target.default_dtype
    case = dense(target, dtype)
    require_kernel(case, target)
    default = pantile.attention(*case.operands, options=target.options)
    given = pantile.attention(*case.operands, scale=64**-0.5, options=target.options)
    assert torch.equal(default, given)


@pytest.mark.parametrize("arguments", MASKS[:5], ids=str)
def test_packed(target, arguments):
    dtype = target.default_dtype
    case = packed(target, [3, 0, 70, 1], [5, 4, 66, 0], dtype, **arguments)
    check_both(case, target, with_lse=True)


def test_packed_equals_each_sequence_alone(target):
    """Row i of a batch is the same row alone, bit for bit."""
    dtype = target.default_dtype
    lengths = [40, 1, 65]
    case = packed(target, lengths, lengths, dtype, causal=True)
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone, alone_lse = pantile.attention(
            *(x[None, part] for x in case.operands),
            causal=True,
            return_lse=True,
            options=target.options,
        )
        assert torch.equal(o[part], alone[0])
        assert torch.equal(lse[:, part], alone_lse[0])
        start += length


@pytest.mark.parametrize("arguments", [{}, {"causal": True}], ids=str)
def test_seqused(target, arguments):
    """Rows past seqused are 0 and -inf, and neither give nor take gradients."""
    dtype = target.default_dtype
    case = packed(target, [20, 30, 5], [25, 40, 6], dtype, **arguments)
    used = {
        "seqused_q": torch.tensor([13, 0, 5], dtype=torch.int32, device=target.device),
        "seqused_k": torch.tensor([25, 17, 0], dtype=torch.int32, device=target.device),
    }
    case.arguments = {**arguments, **used}
    o, lse, *grads = check_both(case, target, with_lse=False)
    unused = torch.ones(55, dtype=torch.bool)
    unused[:13] = False  # sequence 0 has 13 rows; 1 has none; 2 has rows but no keys
    assert not o[unused].any()
    assert torch.isneginf(lse[:, unused]).all()
    if grads:
        dq, dk, dv = grads
        assert not dq[unused].any()
        for gradient in (dk, dv):
            assert not gradient[25 + 17 :].any()


def test_window_larger_than_the_sequence_is_full(target):
    dtype = target.default_dtype
    case = dense(target, dtype)
    require_kernel(case, target)
    full = pantile.attention(*case.operands, options=target.options)
    for window in ((1000, 1000), (-1, -1), (None, None), (2**40, 2**40)):
        wide = pantile.attention(*case.operands, window=window, options=target.options)
        torch.testing.assert_close(wide, full, rtol=0, atol=2e-2 if dtype.itemsize == 2 else 1e-6)


def test_causal_is_window_right_zero(target):
    dtype = target.default_dtype
    case = dense(target, dtype)
    require_kernel(case, target)
    causal = pantile.attention(*case.operands, causal=True, options=target.options)
    for arguments in (
        {"window": (None, 0)},
        {"window": (None, 5), "causal": True},
        {"window": (-1, 0), "causal": True},
    ):
        same = pantile.attention(*case.operands, **arguments, options=target.options)
        assert torch.equal(causal, same)


def brute_force_mask(rows: int, keys: int, left: int, right: int) -> torch.Tensor:
    """The sentence of the contract, one pair at a time."""
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        position = i + keys - rows
        for j in range(keys):
            after_left = left == -1 or j >= position - left
            before_right = right == -1 or j <= position + right
            mask[i, j] = after_left and before_right
    return mask


BOUNDS = (-1, 0, 1, 3, 100)


def test_reference_mask_is_the_contract():
    for rows in range(6):
        for keys in range(6):
            for left in BOUNDS:
                for right in BOUNDS:
                    expected = brute_force_mask(rows, keys, left, right)
                    assert torch.equal(reference.visible(rows, keys, left, right), expected)


def test_visible_pairs_counts_the_mask():
    from pantile._masks import visible_pairs

    for rows in range(9):
        for keys in range(9):
            for left in BOUNDS:
                for right in BOUNDS:
                    count = int(reference.visible(rows, keys, left, right).sum())
                    assert visible_pairs(rows, keys, left, right) == count


def test_kernels_see_exactly_the_mask(target):
    """V of one-hot keys shows which keys a row saw; scores 0 make the weights 1 / count."""
    if target.device != "cpu":
        pytest.skip("head_dim_v follows the number of keys; host kernels take any")
    for rows, keys in ((1, 9), (9, 1), (7, 12), (12, 7)):
        v = torch.eye(keys).reshape(1, keys, 1, keys)
        q, k = torch.zeros(1, rows, 1, 4), torch.zeros(1, keys, 1, 4)
        for left in BOUNDS:
            for right in BOUNDS:
                o = pantile.attention(q, k, v, window=(left, right), options=target.options)
                seen = o[0, :, 0, :] > 0
                assert torch.equal(seen, brute_force_mask(rows, keys, left, right))


def test_lse_alone_is_differentiable():
    """The loss uses only LSE: dO does not exist."""
    target = Target("cpu", "cpu")
    case = dense(target, causal=True)
    leaves = [x.clone().requires_grad_() for x in case.operands]
    doubles = [x.double().requires_grad_() for x in case.operands]
    _, lse = case.ours(*leaves)
    _, exact = case.expected(*doubles, torch.float64)
    found = torch.autograd.grad(lse.sin().sum(), leaves)
    expected = torch.autograd.grad(exact.sin().sum(), doubles, allow_unused=True)
    assert expected[2] is None
    assert not found[2].any()
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_gradient_is_the_slope():
    """Central differences in float32 along a random direction: independent of any reference."""
    target = Target("cpu", "cpu")
    case = dense(target, batch=1, rows=9, keys=11, head_dim=16, window=(4, 1))
    leaves = [x.clone().requires_grad_() for x in case.operands]
    generator = torch.Generator().manual_seed(3)
    direction = [torch.randn(x.shape, generator=generator) for x in leaves]

    def loss(operands):
        o, lse = case.ours(*operands)
        return (o.double() ** 2).sum() + lse[lse.isfinite()].double().sin().sum()

    slope = sum(
        (g * d).sum()
        for g, d in zip(torch.autograd.grad(loss(leaves), leaves), direction, strict=True)
    )
    step = 1e-2
    ends = [
        loss([x.detach() + sign * step * d for x, d in zip(leaves, direction, strict=True)])
        for sign in (1, -1)
    ]
    assert abs((ends[0] - ends[1]) / (2 * step) - slope) < 1e-2 * max(1.0, abs(slope))


def test_only_some_inputs_need_gradients():
    target = Target("cpu", "cpu")
    case = dense(target)
    grads = []
    for needs in (
        (True, True, True),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ):
        leaves = [
            x.clone().requires_grad_(need) for x, need in zip(case.operands, needs, strict=True)
        ]
        pantile.attention(*leaves).sum().backward()
        grads.append([x.grad for x in leaves])
    for needs, found in enumerate(grads[1:]):
        for index, gradient in enumerate(found):
            if index == needs:
                assert torch.equal(gradient, grads[0][index])
            else:
                assert gradient is None


def test_output_is_contiguous_and_fresh(target):
    dtype = target.default_dtype
    case = dense(target, dtype)
    require_kernel(case, target)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.operands]
    o, lse = case.ours(*transposed, options=target.options)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert not o.requires_grad


def test_forward_only_without_lse_is_the_same(target):
    dtype = target.default_dtype
    case = dense(target, dtype, causal=True)
    require_kernel(case, target)
    o, _ = case.ours(*case.operands, options=target.options)
    alone = pantile.attention(*case.operands, causal=True, options=target.exact_options())
    assert torch.equal(o, alone)


def test_many_keys_against_float64():
    """Long rows: the running sum is rescaled many times."""
    target = Target("cpu", "cpu")
    case = dense(target, torch.bfloat16, batch=1, rows=8, keys=5000, heads=2, heads_k=1)
    growing = torch.linspace(0.1, 4.0, 5000).reshape(1, -1, 1, 1)
    case.k = (case.k * growing).to(torch.bfloat16)
    check_forward(case, target)
