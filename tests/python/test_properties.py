"""Properties that hold for any shape, mask and length (hypothesis)."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import NAMES, Case, Target, assert_same_bits, check_both, dense, gradients, packed

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

CPU = Target("cpu", "cpu")
HOPPER, AMPERE = (Target(backend, "cuda") for backend in ("hopper", "ampere"))
AMPERE_F32 = Target("ampere", "cuda", torch.float32)
EXAMPLES = {"cpu": 60, "cuda": 25}


def settings(device: str) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=EXAMPLES[device],
        deadline=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # the GPU's first call
    )


bounds = st.one_of(st.none(), st.just(-1), st.integers(0, 200))
masks = st.fixed_dictionaries({"causal": st.booleans(), "window": st.tuples(bounds, bounds)})
short_lengths = st.one_of(st.integers(0, 12), st.integers(13, 150))
# Around the edges of tiles too: of 64, 80, 96, 128, 160 and 192.
edges = st.builds(
    lambda tile, count, off: max(tile * count + off, 0),
    st.sampled_from([64, 80, 96, 128, 160, 192]),
    st.integers(1, 5),
    st.integers(-2, 2),
)
LENGTHS = {"cpu": short_lengths, "cuda": st.one_of(short_lengths, edges)}
HEAD_DIMS = {
    "cpu": st.integers(1, 70),
    "cuda": st.one_of(st.integers(1, 256), st.sampled_from([32, 64, 80, 96, 128, 192, 256])),
}


def dtypes(target: Target) -> st.SearchStrategy:
    if target.device == "cpu":
        return st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
    if target.gpu_dtype is torch.float32:
        return st.just(torch.float32)
    return st.sampled_from([torch.float16, torch.bfloat16])


@st.composite
def dense_cases(draw, target: Target = CPU) -> Case:
    heads_k = draw(st.integers(1, 3))
    device = target.device
    return dense(
        target,
        draw(dtypes(target)),
        batch=draw(st.integers(0, 2)),
        rows=draw(LENGTHS[device]),
        keys=draw(LENGTHS[device]),
        heads=heads_k * draw(st.integers(1, 3 if device == "cpu" else 8)),
        heads_k=heads_k,
        head_dim=draw(HEAD_DIMS[device]),
        head_dim_v=draw(HEAD_DIMS[device]),
        seed=draw(st.integers(0, 1000)),
        **draw(masks),
    )


@st.composite
def packed_cases(draw, target: Target = CPU) -> Case:
    count = draw(st.integers(0, 5))
    length = st.one_of(st.integers(0, 5), st.integers(6, 90))
    if target.device == "cuda":
        length = st.one_of(length, edges)
    short = st.lists(length, min_size=count, max_size=count)
    head_dim = 24 if target.device == "cpu" else draw(HEAD_DIMS["cuda"])
    dtype = draw(dtypes(target))
    return packed(target, draw(short), draw(short), dtype, head_dim=head_dim, **draw(masks))


@pytest.fixture(
    params=[
        pytest.param(CPU, id="cpu"),
        pytest.param(HOPPER, id="hopper", marks=pytest.mark.gpu),
        pytest.param(AMPERE, id="ampere", marks=pytest.mark.gpu),
        pytest.param(AMPERE_F32, id="ampere_f32", marks=pytest.mark.gpu),
    ]
)
def place(request) -> Target:
    """Where a property is tried."""
    target = request.param
    if target.device == "cuda":
        usual = dense(target, target.gpu_dtype)
        plan = usual.explain(options=target.options)
        if plan.forward.kernel is None:
            pytest.skip(f"{target.backend}: {plan.forward.reason}")
    return target


def for_all(target: Target, *strategies):
    """Runs the decorated function at once, with examples of the strategies that a kernel serves."""

    def run(check) -> None:
        @settings(target.device)
        @hypothesis.given(st.tuples(*strategies))
        def one(drawn) -> None:
            case = drawn[0]
            plan = case.explain(options=target.options)
            hypothesis.assume(plan.forward.kernel is not None)
            check(*drawn)

        one()

    return run


@pytest.mark.parametrize("cases", [dense_cases, packed_cases], ids=["dense", "packed"])
def test_error_is_within_the_bound(place, cases):
    """And hypothesis looks for the examples that come nearest to it."""

    @for_all(place, cases(place), st.booleans())
    def _(case, with_lse):
        check_both(case, place, with_lse)
        hypothesis.target(case.largest_share, label="error over bound")


def test_weights_are_a_mean(place):
    """With V = 1 every row that sees a key gives 1, and every other row 0."""

    @for_all(place, dense_cases(place))
    def _(case):
        case.v = torch.ones_like(case.v)
        o, lse = case.ours(*case.operands, options=place.options)
        alive = lse.isfinite().transpose(1, 2)[..., None]
        torch.testing.assert_close(o, alive.expand(o.shape).to(o.dtype), rtol=0, atol=8e-3)


def test_batch_and_heads_are_independent(place):
    """Permuting sequences permutes the results, bit for bit."""

    @for_all(place, dense_cases(place), st.randoms(use_true_random=False))
    def _(case, random):
        order = list(range(case.q.shape[0]))
        random.shuffle(order)
        o, lse = case.ours(*case.operands, options=place.options)
        permuted = case.ours(*(x[order] for x in case.operands), options=place.options)
        assert_same_bits((o[order], lse[order]), permuted, NAMES[:2])


# Bits that depend on where tiles begin: promised on the CPU only.


@settings("cpu")
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


@settings("cpu")
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
