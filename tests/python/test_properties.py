"""Properties that hold for any shape, mask and length (hypothesis)."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import NAMES, Case, Target, assert_same_bits, check_both, dense, gradients, packed

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

CPU = Target("cpu", "cpu")
settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)

bounds = st.one_of(st.none(), st.just(-1), st.integers(0, 200))
masks = st.fixed_dictionaries({"causal": st.booleans(), "window": st.tuples(bounds, bounds)})
lengths = st.one_of(st.integers(0, 12), st.integers(13, 150))
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@st.composite
def dense_cases(draw) -> Case:
    heads_k = draw(st.integers(1, 3))
    return dense(
        CPU,
        draw(dtypes),
        batch=draw(st.integers(0, 2)),
        rows=draw(lengths),
        keys=draw(lengths),
        heads=heads_k * draw(st.integers(1, 3)),
        heads_k=heads_k,
        head_dim=draw(st.integers(1, 70)),
        head_dim_v=draw(st.integers(1, 70)),
        seed=draw(st.integers(0, 1000)),
        **draw(masks),
    )


@st.composite
def packed_cases(draw) -> Case:
    count = draw(st.integers(0, 5))
    length = st.one_of(st.integers(0, 5), st.integers(6, 90))
    short = st.lists(length, min_size=count, max_size=count)
    return packed(CPU, draw(short), draw(short), draw(dtypes), head_dim=24, **draw(masks))


@settings
@hypothesis.given(dense_cases(), st.booleans())
def test_dense_is_within_the_bound(case, with_lse):
    check_both(case, CPU, with_lse)


@settings
@hypothesis.given(packed_cases(), st.booleans())
def test_packed_is_within_the_bound(case, with_lse):
    check_both(case, CPU, with_lse)


@settings
@hypothesis.given(dense_cases())
def test_weights_are_a_mean(case):
    """With V = 1 every row that sees a key gives 1, and every other row 0."""
    case.v = torch.ones_like(case.v)
    o, lse = case.ours(*case.operands)
    alive = lse.isfinite().transpose(1, 2)[..., None]
    torch.testing.assert_close(o, alive.expand(o.shape).to(o.dtype), rtol=0, atol=8e-3)


@settings
@hypothesis.given(dense_cases(), st.randoms(use_true_random=False))
def test_batch_and_heads_are_independent(case, random):
    """Permuting sequences permutes the results, bit for bit."""
    order = list(range(case.q.shape[0]))
    random.shuffle(order)
    o, lse = case.ours(*case.operands)
    permuted = case.ours(*(x[order] for x in case.operands))
    assert_same_bits((o[order], lse[order]), permuted, NAMES[:2])


@settings
@hypothesis.given(dense_cases())
def test_dense_equals_packed(case):
    """A batch of equal lengths gives the same bits when it is packed."""
    batch, rows, keys = case.q.shape[0], case.q.shape[1], case.k.shape[1]
    cu_seqlens = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (rows, keys)]

    def as_packed(q, k, v):
        o, lse = pantile.varlen_attention(
            *(x.flatten(0, 1) for x in (q, k, v)),
            *cu_seqlens,
            rows,
            keys,
            return_lse=True,
            **case.arguments,
        )
        heads = lse.shape[0]
        return o.unflatten(0, (batch, rows)), lse.reshape(heads, batch, rows).transpose(0, 1)

    generator = torch.Generator().manual_seed(0)
    grad_o = torch.randn(*case.q.shape[:-1], case.v.shape[-1], generator=generator)
    grad_o = grad_o.to(case.q.dtype)
    assert_same_bits(
        gradients(case.ours, case.operands, grad_o), gradients(as_packed, case.operands, grad_o)
    )


@settings
@hypothesis.given(dense_cases(), st.integers(1, 40))
def test_keys_beyond_the_window_do_not_matter(case, extra):
    """Keys put in front change nothing when a left bound keeps them out of sight."""
    rows, keys = case.q.shape[1], case.k.shape[1]
    hypothesis.assume(rows and keys)
    left = keys - 1 if rows == 1 else 0
    case.arguments = {"window": (left, 0)}
    alive = min(rows, keys - left) if rows > 1 else 1
    o, _ = case.ours(*case.operands)
    k, v = (
        torch.cat([torch.full_like(x[:, :1], float("nan")).expand(-1, extra, -1, -1), x], 1)
        for x in (case.k, case.v)
    )
    longer, _ = case.ours(case.q, k, v)
    assert torch.equal(o[:, rows - alive :], longer[:, rows - alive :])
