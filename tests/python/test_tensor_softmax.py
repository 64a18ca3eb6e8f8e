"""Softmax on tensor cores (docs/design/flashattention-t.md): every mode of the Ampere forward."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile.experimental import SoftmaxOptions
from support import Target, assert_within_bound, bits, dense, gradients, packed

pantile.load_torch()
pytestmark = [pytest.mark.gpu, pytest.mark.ampere]

GPU = Target("ampere", "cuda")
MODES = {
    "vector": {"softmax": "vector"},
    "vector_always": {"softmax": "vector", "rescale_threshold": 0},
    "tensor": {"softmax": "tensor"},
    "tensor_always": {"softmax": "tensor", "rescale_threshold": 0},
    "tensor_offset": {"softmax": "tensor", "rescale_threshold": 4, "p_max_offset": 6},
    "quarter": {"softmax": "tensor", "tensor_share": 0.25},
    "half": {"softmax": "tensor", "tensor_share": 0.5},
    "half_rows": {"softmax": "tensor", "tensor_share": 0.5, "tensor_split": "rows"},
    "full": {"softmax": "tensor", "tensor_share": 1},
    "surrogate": {"softmax": "tensor", "softmax_mode": "surrogate"},
    "surrogate_near": {"softmax": "tensor", "softmax_mode": "surrogate", "min_exponent_log2": -3},
    "fast_scale": {"softmax": "tensor", "softmax_mode": "fast_scale"},
    "fast_scale_offset": {"softmax": "tensor", "softmax_mode": "fast_scale", "p_max_offset": 5},
}
EXACT = [name for name in MODES if not name.startswith(("surrogate", "fast"))]
# Modes in which no row's bits depend on its neighbours; the others need PANTILE_EXPERIMENTS.
ROW_BY_ROW = ("vector", "vector_always", "tensor", "tensor_always", "tensor_offset")
TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one rounding, relative


def options(mode: str) -> pantile.Options:
    return pantile.Options(backend="ampere", softmax=SoftmaxOptions(**MODES[mode]))


@pytest.fixture(
    params=[
        name if name in ROW_BY_ROW else pytest.param(name, marks=pytest.mark.experiments)
        for name in MODES
    ]
)
def mode(request):
    return request.param


@pytest.fixture(params=TYPES)
def dtype(request):
    return TYPES[request.param]


@pytest.fixture(params=[64, 128])
def head_dim(request):
    return request.param


def outliers(x: torch.Tensor, variance: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rare = torch.rand(x.shape, generator=generator) < 1e-3
    more = torch.randn(x.shape, generator=generator) * rare * variance**0.5
    return (x.float().cpu() + more).to(x.device, x.dtype)


def law_normal(case):
    return case


def law_outliers(case):
    for i, name in enumerate("qkv"):
        setattr(case, name, outliers(getattr(case, name), 100.0, i))
    return case


def law_uneven_rows(case):
    """In each tile of 16 rows one whose logits are 10^3 times those of its neighbours."""
    row = torch.arange(case.q.shape[1], device=case.q.device)
    case.q = case.q * torch.where(row % 16 == 5, 30.0, 0.03).to(case.q)[None, :, None, None]
    return case


def law_growing(case):
    """Keys are visited from the last to the first: each tile brings new maxima."""
    keys = case.k.shape[1]
    size = 6 * (1 - torch.arange(keys, device=case.k.device) / keys)
    direction = torch.sign(case.q[:, :1, :1]).mean(0, keepdim=True)
    case.k = (direction * size[None, :, None, None]).expand_as(case.k).to(case.k.dtype) + case.k / 8
    return case


LAWS = {
    "normal": law_normal,
    "outliers": law_outliers,
    "uneven": law_uneven_rows,
    "growing": law_growing,
}


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("law", "causal"),
    [
        ("normal", True),
        ("outliers", False),
        ("uneven", True),
        ("uneven", False),
        ("growing", False),
    ],
)
def test_output_is_as_accurate_as_the_textbook(mode, dtype, head_dim, law, causal):
    """Within the contract in the modes that promise it; never beyond 4x the textbook's error."""
    case = LAWS[law](dense(GPU, dtype, 1, 333, 517, 2, 1, head_dim, causal=causal))
    plan = case.explain(options=options(mode)).forward
    assert plan.softmax.startswith(MODES[mode]["softmax"]), str(plan)
    o = case.ours(*case.operands, options=options(mode))[0]
    exact, _ = case.expected(*case.operands, torch.float64)
    textbook, _ = case.expected(*case.operands, None)
    assert torch.isfinite(o).all()
    factor = 2 if mode in EXACT else 4
    floor = torch.finfo(dtype).eps * rms(exact)
    assert rms(o - exact) <= factor * rms(textbook - exact) + floor
    if mode in ROW_BY_ROW:
        assert_within_bound([o], [textbook], [exact], case, torch.zeros_like(exact))


def test_lse_is_that_of_the_rounded_weights(dtype, head_dim):
    """The error is bounded by that of one rounding, also where all weights round the same way."""
    for scale in (None, 1e-3, 0.0):
        case = dense(GPU, dtype, 1, 130, 300, 2, 2, head_dim, scale=scale)
        _, exact = case.expected(*case.operands, torch.float64)
        for mode, allowed in (("vector", 0.0), ("tensor", EPSILON[dtype])):
            _, lse = case.ours(*case.operands, options=options(mode))
            assert float((lse - exact).abs().max()) <= allowed + 2e-5


def test_automatic_choice_depends_on_whether_lse_is_returned(dtype, head_dim):
    case = dense(GPU, dtype, head_dim=head_dim)
    # By generation: cuda/ampere/forward/softmax_choice.h.
    capability = torch.cuda.get_device_capability()
    faster = "tensor" if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else "vector"
    plan = case.explain(options=GPU.options).forward
    assert plan.softmax.startswith(faster)
    source = "; chosen: measured on sm_90" if capability == (9, 0) else "; chosen: model of sm_"
    assert source in plan.softmax
    plan = case.explain(options=GPU.options, return_lse=True).forward
    assert plan.softmax.startswith("vector")
    o = pantile.attention(*case.operands, options=GPU.options)
    forced = pantile.attention(*case.operands, options=options(faster))
    assert torch.equal(bits(o), bits(forced))
    assert case.explain(options=GPU.options, window=(9, 0)).forward.softmax.startswith("vector")


@pytest.mark.parametrize("return_lse", [False, True], ids=["o", "lse"])
@pytest.mark.parametrize("unit", ["auto", "vector", "tensor"])
@pytest.mark.parametrize("size", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_both_passes_in_every_tile(dtype, size, unit, return_lse, causal):
    """What a call of the user runs, without and with the LSE, in the tiles that this GPU takes:
    test_other_gpus.py runs it with those of smaller ones."""
    case = dense(GPU, dtype, 2, 200, 333, 4, 2, size, causal=causal)
    chosen = pantile.Options(backend="ampere", softmax=unit)
    plan = case.explain(options=chosen)
    if unit == "tensor" and size > 128:  # of 64 and 128, which serve smaller ones
        assert plan.forward.kernel is None
        pytest.skip("no tensor softmax for this head dim")
    grad_o = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(9)).to(case.q)

    def ours(q, k, v):
        extra = {"options": chosen, "causal": causal}
        if return_lse:
            return pantile.attention(q, k, v, return_lse=True, **extra)
        o = pantile.attention(q, k, v, **extra)
        return o, o.new_zeros(0)

    o, lse, *grads = gradients(ours, case.operands, grad_o)
    exact, textbook = (
        gradients(lambda *x, to=to: case.expected(*x, to), case.operands, grad_o)
        for to in (torch.float64, None)
    )
    seen = slice(None) if return_lse and unit != "tensor" else slice(0, 1)
    assert_within_bound([o, lse][seen], textbook[seen], exact[seen], case, grad_o)
    # The LSE of rounded weights, which the backward then takes, costs gradients up to 5 %.
    for name, ours_, near, truth in zip("qkv", grads, textbook[2:], exact[2:], strict=True):
        floor = torch.finfo(dtype).eps * rms(truth)
        assert rms(ours_ - truth) <= 2 * rms(near - truth) + floor, f"d{name}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_sequences_and_rows_without_keys(mode, dtype, head_dim, causal):
    case = packed(
        GPU, [65, 0, 1, 128, 30, 40], [64, 5, 0, 129, 200, 17], dtype, head_dim=head_dim,
        causal=causal,
    )  # fmt: skip
    o, lse = case.ours(*case.operands, options=options(mode))
    exact, exact_lse = case.expected(*case.operands, torch.float64)
    textbook, _ = case.expected(*case.operands, None)
    empty = exact_lse == -torch.inf
    assert empty.any()
    assert (lse[empty] == -torch.inf).all()
    assert (o.transpose(0, 1)[empty] == 0).all()
    floor = torch.finfo(dtype).eps * rms(exact)
    assert rms(o - exact) <= 4 * rms(textbook - exact) + floor


def test_small_head_dims_negative_scale_and_repeats(mode, dtype):
    case = dense(GPU, dtype, 2, 70, 150, 4, 2, 40, scale=-0.2)
    first = case.ours(*case.operands, options=options(mode))
    again = case.ours(*case.operands, options=options(mode))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))
    exact, _ = case.expected(*case.operands, torch.float64)
    textbook, _ = case.expected(*case.operands, None)
    floor = torch.finfo(dtype).eps * rms(exact)
    assert rms(first[0] - exact) <= 4 * rms(textbook - exact) + floor


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_only_rows_that_attend_to_it(mode, dtype, value):
    """In K at a key that the first rows do not see, and in Q of one row."""
    case = dense(GPU, dtype, 1, 200, 200, 2, 2, 64, causal=True)
    clean = case.ours(*case.operands, options=options(mode))[0]
    case.k[0, 100, 0, 3] = value
    spoiled = case.ours(*case.operands, options=options(mode))[0]
    assert torch.equal(bits(spoiled[:, :, 1]), bits(clean[:, :, 1]))  # another head
    before = spoiled[:, :100]
    if mode in ROW_BY_ROW:
        assert torch.equal(bits(before), bits(clean[:, :100]))
    assert rms(before.double() - clean[:, :100].double()) < 4 * torch.finfo(dtype).eps
    case.k[0, 100, 0, 3] = 0.0
    case.q[0, 150, 1, 5] = value
    spoiled = case.ours(*case.operands, options=options(mode))[0]
    rows = [row for row in range(200) if row != 150]
    assert torch.isfinite(spoiled[:, rows]).all()
    assert not torch.isfinite(spoiled[0, 150, 1]).all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_do_not_notice(dtype, head_dim, causal):
    """The LSE of the rounded weights in the backward: gradients stay within the contract."""
    for law in LAWS.values():
        case = law(dense(GPU, dtype, 1, 190, 260, 2, 1, head_dim, causal=causal))
        grad_o = torch.randn(case.q.shape, device="cuda").to(dtype)
        call = {"options": options("tensor")}
        found = gradients(lambda *x, c=case, k=call: c.ours(*x, **k), case.operands, grad_o)
        doubles = [x.double() for x in case.operands]
        exact = gradients(lambda *x, c=case: c.expected(*x, None), doubles, grad_o)
        textbook = gradients(lambda *x, c=case: c.expected(*x, None), case.operands, grad_o)
        found[1] = exact[1]  # its bound is another test's
        assert_within_bound(found, textbook, exact, case, grad_o)


@pytest.mark.experiments
def test_compiled_graphs_carry_the_choice():
    case = dense(GPU, torch.bfloat16, 1, 64, 96, 2, 2, 64)
    chosen = options("half")

    def call(q, k, v):
        return pantile.attention(q, k, v, options=chosen)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(bits(compiled(*case.operands)), bits(call(*case.operands)))
