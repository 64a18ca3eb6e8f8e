"""What changes plain attention: softcap, ALiBi, bias, sinks and dropout, alone and in pairs.

Everything is compared with the textbook in float64, written in torch and differentiated by
autograd (pantile.reference). Backends that do not serve a variant refuse it by name, and skip.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pantile
import pytest
import torch
from pantile import reference
from pantile._schema import VARIANT_TENSOR_COUNT, Call, Variant
from support import Target, assert_same_bits, dense, packed
from torch.utils.checkpoint import checkpoint

VARIANTS = ("softcap", "alibi", "alibi_by_batch", "bias", "shared_bias", "sinks", "dropout")
PAIRS = [
    pair
    for pair in itertools.combinations(VARIANTS, 2)
    if pair not in (("alibi", "alibi_by_batch"), ("bias", "shared_bias"))
]
LEARNED = ("alibi", "bias", "sinks")


def arguments_of(names, case, target: Target, seed: int = 5) -> dict:
    """Of attention(), in the sizes of the case; the bias in the dtype of q or in float32."""
    generator = torch.Generator().manual_seed(seed)
    heads = case.q.shape[-2]
    if case.lengths:
        batch, (rows, keys) = case.lengths[0].shape[0] - 1, case.longest
    else:
        batch, rows, keys = case.q.shape[0], case.q.shape[1], case.k.shape[1]

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(target.device, dtype)

    given: dict = {}
    for name in names:
        if name == "softcap":
            given["softcap"] = 2.5
        elif name == "alibi":
            given["alibi"] = 0.1 * normal(heads).abs()
        elif name == "alibi_by_batch":
            given["alibi"] = 0.1 * normal(batch, heads)
        elif name == "bias":
            given["bias"] = normal(batch, heads, rows, keys)
        elif name == "shared_bias":
            given["bias"] = normal(1, 1, rows, keys, dtype=case.q.dtype)
        elif name == "sinks":
            given["sinks"] = normal(heads)
        elif name == "dropout":
            given["dropout"] = pantile.Dropout(0.3, seed=7)
    return given


def serves(case, target: Target, given: dict, gradients: bool) -> None:
    """Skips with the reason of a backend that refuses."""
    given = {
        name: x.detach().requires_grad_(gradients) if name in LEARNED else x
        for name, x in given.items()
    }
    plan = case.explain(options=target.options, **given)
    for found in (plan.forward, plan.backward)[: 2 if gradients else 1]:
        if found.kernel is None:
            pytest.skip(found.reason[:200])


def attend(call, case, given: dict, dtype=None, seed: int = 3):
    """(o, lse, gradients of q, k, v and of the learned tensors by name) of ``call``."""
    convert = (lambda x: x.detach().clone()) if dtype is None else lambda x: x.detach().to(dtype)
    operands = [convert(x).requires_grad_() for x in case.operands]
    learned = {n: convert(x).requires_grad_() for n, x in given.items() if n in LEARNED}
    o, lse = call(*operands, **{**given, **learned})
    generator = torch.Generator().manual_seed(seed)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype).to(o.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(o.device, lse.dtype)
    grad_lse = grad_lse.masked_fill(lse.detach() == -torch.inf, 0)
    leaves = [*operands, *learned.values()]
    grads = torch.autograd.grad((o, lse), leaves, (grad_o, grad_lse))
    names = ("q", "k", "v", *learned)
    return {"o": o, "lse": lse, **dict(zip(names, grads, strict=True))}


def assert_right(case, target: Target, given: dict) -> dict:
    """Against float64, with the error of the textbook in the same dtype as the measure."""
    ours = attend(lambda *x, **g: case.ours(*x, options=target.options, **g), case, given)

    def textbook(dtype):
        return lambda *x, **g: dataclasses.replace(
            case, arguments={**case.arguments, **g}
        ).expected(*x, dtype)

    exact = attend(textbook(torch.float64), case, given, torch.float64)
    coarse = attend(textbook(None), case, given)

    def error_of_few(name):
        """Of the textbook, over four gradients: that of one may be small by luck."""
        squares = []
        for seed in (3, 4, 5, 6):
            true = attend(textbook(torch.float64), case, given, torch.float64, seed)[name]
            rounded = attend(textbook(None), case, given, seed=seed)[name]
            squares.append((rounded.detach().double() - true.detach()).square().mean())
        return torch.stack(squares).mean().sqrt()

    for name, result in ours.items():
        assert result.dtype is coarse[name].dtype or name == "lse"
        found, truth = result.detach().double(), exact[name].detach()
        hidden = truth == -torch.inf
        assert torch.equal(found == -torch.inf, hidden), name
        found, truth = found.masked_fill(hidden, 0), truth.masked_fill(hidden, 0)
        error = (found - truth).norm() / max(math.sqrt(truth.numel()), 1.0)
        book = coarse[name].detach().double().masked_fill(hidden, 0)
        allowed = 2 * (book - truth).norm() / max(math.sqrt(truth.numel()), 1.0)
        size = truth.norm() / max(math.sqrt(truth.numel()), 1.0)
        eps = torch.finfo(result.dtype).eps
        # Sums over a whole call, of which many terms cancel, are rounded term by term.
        terms = 64.0 if name in ("alibi", "sinks") else 8.0
        floor = eps * size + torch.finfo(torch.float32).eps * terms * (1 + size)
        if error > allowed + floor and name in LEARNED and truth.numel() <= 8:
            allowed = max(allowed, 2 * error_of_few(name))
        assert error <= allowed + floor, f"{name}: {error:.2e} > {allowed:.2e} + {floor:.2e}"
    return ours


# ---- every variant and every pair


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("names", [(n,) for n in VARIANTS] + PAIRS, ids="+".join)
def test_dense(target, names, causal):
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=32, causal=causal)
    given = arguments_of(names, case, target)
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("names", [(n,) for n in VARIANTS] + PAIRS, ids="+".join)
def test_packed(target, names):
    """Ragged lengths, a sequence without keys, one without rows, and a window."""
    case = packed(
        target, [37, 0, 50, 9], [45, 20, 31, 0], target.default_dtype, head_dim=32, window=(20, 3)
    )
    given = arguments_of(names, case, target)
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "names", [*((n,) for n in VARIANTS), VARIANTS[:2] + VARIANTS[3::2]], ids="+".join
)
def test_sixteen_bits(target, dtype, head_dim, names):
    """More rows than keys, so that some see none; several tiles of every backend."""
    case = dense(
        target,
        dtype,
        batch=1,
        rows=300,
        keys=270,
        heads=2,
        heads_k=1,
        head_dim=head_dim,
        causal=True,
    )
    given = arguments_of(names, case, target)
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 83), (2, 1, 70, 83), (83,), (4, 70, 83), (2, 4, 1, 83)]
)
def test_bias_shapes(target, shape):
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=32)
    generator = torch.Generator().manual_seed(1)
    given = {"bias": torch.randn(shape, generator=generator).to(target.device)}
    serves(case, target, given, True)
    assert assert_right(case, target, given)["bias"].shape == shape


def test_bias_strides(target):
    """Transposed, expanded and cut out of a larger tensor: the same bits, and gradients."""
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=32)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 4, 70, 83, generator=generator).to(target.device)
    serves(case, target, {"bias": whole}, True)
    expected = attend(
        lambda *x, **g: case.ours(*x, options=target.options, **g), case, {"bias": whole}
    )

    def run(bias):
        o, lse = case.ours(*case.operands, options=target.options, bias=bias)
        return o, lse

    views = {
        "transposed": whole.transpose(2, 3).contiguous().transpose(2, 3),
        "cut": torch.nn.functional.pad(whole, (3, 5, 1, 1))[:, :, 1:-1, 3:-5],
    }
    for bias in views.values():
        assert torch.equal(bias, whole)
        assert_same_bits(run(bias), (expected["o"], expected["lse"]), ("o", "lse"))
    row = whole[:1, :1].clone()
    expanded = row.expand(2, 4, 70, 83).detach().requires_grad_()
    small = row.clone().requires_grad_()
    grad_o = torch.randn(case.q.shape, generator=generator).to(case.q)
    of_expanded = torch.autograd.grad(run(expanded)[0], expanded, grad_o)[0]
    of_small = torch.autograd.grad(run(small)[0], small, grad_o)[0]
    torch.testing.assert_close(
        of_expanded.sum((0, 1), keepdim=True), of_small, rtol=1e-4, atol=1e-4
    )


def test_minus_infinity_in_the_bias_hides(target):
    """As a mask does, also whole rows."""
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=32, causal=True)
    serves(case, target, {"bias": torch.zeros(1, 1, 1, 83, device=target.device)}, False)
    hidden = torch.rand(70, 83, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[5] = hidden[40] = True
    bias = torch.zeros(70, 83).masked_fill(hidden, -torch.inf).to(target.device)
    o, lse = case.ours(*case.operands, options=target.options, bias=bias)
    assert not o[:, [5, 40]].any()
    assert torch.isneginf(lse[:, :, [5, 40]]).all()
    for row in (3, 69):
        seen = ~hidden[row] & (torch.arange(83) <= row + 13)
        scores = case.q[0, row, 0].double() @ case.k[0, :, 0].double().T / math.sqrt(32)
        truth = torch.logsumexp(scores[seen.to(target.device)], 0)
        assert abs(float(lse[0, 0, row]) - float(truth)) < 1e-2


def test_sinks_of_rows_without_keys(target):
    """O = 0, LSE = the sink, and its gradient is that of the LSE."""
    case = dense(target, target.default_dtype, batch=1, rows=80, keys=20, head_dim=32, causal=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf], device=target.device)
    serves(case, target, {"sinks": sinks}, True)
    sinks.requires_grad_()
    o, lse = case.ours(*case.operands, options=target.options, sinks=sinks)
    assert not o[:, :60].any()
    assert torch.equal(lse[0, :, :60], sinks.detach()[:, None].expand(4, 60))
    plain = case.ours(*case.operands, options=target.options)
    assert_same_bits((o[:, 60:, 3],), (plain[0][:, 60:, 3],), ("o",))
    (gradient,) = torch.autograd.grad(lse[0, :3, :60].sum(), sinks)
    torch.testing.assert_close(gradient, torch.tensor([60.0, 60, 60, 0], device=target.device))


def test_largest_logit_is_of_changed_scores(target):
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=32)
    given = {"softcap": 0.25, "sinks": torch.full((4,), 9.0, device=target.device)}
    serves(case, target, given, False)
    _, _, largest = case.ours(
        *case.operands, options=target.options, return_max_logit=True, **given
    )
    assert (largest <= 0.25).all()
    assert (largest > 0.2).all()


# ---- nothing asked, nothing changed


def test_neutral_values_are_plain(target):
    case = dense(target, target.default_dtype)
    serves(case, target, {}, False)
    plain = case.ours(*case.operands, options=target.options)
    for given in ({"softcap": None}, {"softcap": 0.0}, {"dropout": 0.0}, {"dropout": 0.001}):
        assert_same_bits(
            case.ours(*case.operands, options=target.options, **given), plain, ("o", "lse")
        )


def test_p_of_zero_draws_nothing():
    case = dense(Target("cpu", "cpu"))
    state = torch.get_rng_state()
    case.ours(*case.operands, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    case.ours(*case.operands, dropout=0.5)
    assert not torch.equal(torch.get_rng_state(), state)


# ---- the mask of dropout


def mask_of(case, target: Target, dropout, **extra) -> torch.Tensor:
    """Which weights a backend keeps, seen in its output: q = 0, and v picks one key a column."""
    batch, rows, heads, _ = case.q.shape
    keys = case.k.shape[1]
    found = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    width = 64
    for first in range(0, keys, width):
        v = torch.zeros(batch, keys, case.k.shape[2], width, device=target.device)
        for column in range(min(width, keys - first)):
            v[:, first + column, :, column] = 1.0
        o = pantile.attention(
            torch.zeros_like(case.q),
            case.k,
            v.to(case.q.dtype),
            dropout=dropout,
            options=target.options,
            **extra,
        )
        part = (o != 0).permute(0, 2, 1, 3)[..., : min(width, keys - first)]
        found[..., first : first + width] = part.cpu()
    return found


OFFSETS = {"batch_offset": 3, "head_offset": 5, "query_offset": 21, "key_offset": 1003}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("offsets", [{}, OFFSETS], ids=["whole", "offsets"])
def test_mask_is_the_documented_one(target, p, offsets):
    case = dense(target, target.default_dtype, rows=75, keys=141, head_dim=64)
    dropout = pantile.Dropout(p, seed=torch.tensor([11, 2**62 + 5]).to(target.device), **offsets)
    serves(case, target, {"dropout": dropout}, False)
    expected = pantile.dropout_mask(dropout, 2, 4, 75, 141).cpu()
    assert torch.equal(mask_of(case, target, dropout), expected)
    share = 1.0 - float(expected.double().mean())
    assert abs(share - dropout.rate) < 5 * math.sqrt(0.25 / expected.numel())


def test_mask_does_not_depend_on_the_layout(target):
    """Heads one by one, sequences one by one and packed, rows and keys in parts: one mask."""
    case = dense(target, target.default_dtype, rows=75, keys=141, head_dim=64)
    dropout = pantile.Dropout(0.4, seed=3)
    serves(case, target, {"dropout": dropout}, False)
    whole = case.ours(*case.operands, options=target.options, dropout=dropout)
    q, k, v = case.operands
    for head in range(4):
        of_head = dataclasses.replace(dropout, head_offset=head)
        kv = slice(head // 2, head // 2 + 1)
        o = pantile.attention(
            q[:, :, head : head + 1],
            k[:, :, kv],
            v[:, :, kv],
            dropout=of_head,
            options=target.exact_options(),
        )
        torch.testing.assert_close(o, whole[0][:, :, head : head + 1])
    cu_q, cu_k = (
        torch.tensor([0, n, 2 * n], dtype=torch.int32, device=q.device) for n in (75, 141)
    )
    o = pantile.varlen_attention(
        *(x.flatten(0, 1) for x in case.operands),
        cu_q,
        cu_k,
        75,
        141,
        dropout=dropout,
        options=target.options,
    )
    torch.testing.assert_close(o.unflatten(0, (2, 75)), whole[0])
    part = dataclasses.replace(dropout, query_offset=32)
    o = pantile.attention(q[:, 32:], k, v, dropout=part, options=target.options)
    torch.testing.assert_close(o, whole[0][:, 32:])
    parts = [
        pantile.attention(
            q,
            k[:, keys],
            v[:, keys],
            return_lse=True,
            options=target.options,
            dropout=dataclasses.replace(dropout, key_offset=keys.start),
        )
        for keys in (slice(0, 48), slice(48, 141))
    ]
    o, lse = pantile.merge_attention(parts)
    torch.testing.assert_close(o, whole[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole[1])


def test_backends_have_one_mask(target):
    """That of the reference, and so of all."""
    case = dense(target, target.default_dtype, rows=75, keys=141, head_dim=64)
    dropout = pantile.Dropout(0.3, seed=99)
    serves(case, target, {"dropout": dropout}, False)
    on_cpu = dense(Target("reference", "cpu"), torch.float32, rows=75, keys=141, head_dim=64)
    assert torch.equal(
        mask_of(case, target, dropout),
        mask_of(on_cpu, Target("reference", "cpu"), dropout),
    )


def test_expectation_is_that_without_dropout():
    q, k, v = (
        torch.randn(1, 64, 2, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    plain = pantile.attention(q, k, v)
    torch.manual_seed(0)
    mean = sum(pantile.attention(q, k, v, dropout=0.1) for _ in range(400)) / 400
    spread = math.sqrt(pantile.Dropout(0.1).rate / (1 - pantile.Dropout(0.1).rate) / 400)
    assert float((mean - plain).abs().mean()) < spread * float(v.norm(dim=1).mean()) / 8


def test_rate():
    assert pantile.Dropout(0.1).rate == 26 / 256
    assert pantile.Dropout(0.0).rate == 0.0
    assert pantile.Dropout(0.995).rate == 255 / 256
    for wrong in (-0.1, 255.5 / 256, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"^p is .*; it must be from 0 to below 255.5 / 256"):
            pantile.Dropout(wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pantile.Dropout(0.1).p = 0.2


def test_mask_needs_a_seed():
    with pytest.raises(ValueError, match=r"^dropout has no seed"):
        pantile.dropout_mask(pantile.Dropout(0.1), 1, 1, 2, 2)
    pair = (torch.tensor([4, 9]), 0.5)
    expected = pantile.dropout_mask(pantile.Dropout(0.5, seed=pair[0]), 2, 3, 20, 33)
    assert torch.equal(pantile.dropout_mask(pair, 2, 3, 20, 33), expected)
    array = pantile.dropout_mask((np.array([4, 9]), 0.5), 2, 3, 20, 33)
    assert isinstance(array, np.ndarray)
    assert (torch.from_numpy(array) == expected).all()


# ---- torch


def loss(o, lse):
    return o.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()


def everything(case, target: Target, dropout=None) -> dict:
    names = ("softcap", "alibi", "shared_bias", "sinks")
    return {**arguments_of(names, case, target), "dropout": dropout}


def learned_of(given: dict) -> dict:
    return {n: x.clone().requires_grad_() for n, x in given.items() if n in LEARNED}


def test_seed_follows_the_generator(target):
    case = dense(target, target.default_dtype, head_dim=32)
    serves(case, target, {"dropout": pantile.Dropout(0.3)}, False)
    torch.manual_seed(4)
    first = case.ours(*case.operands, options=target.options, dropout=0.3)
    second = case.ours(*case.operands, options=target.options, dropout=0.3)
    torch.manual_seed(4)
    again = case.ours(*case.operands, options=target.options, dropout=0.3)
    assert_same_bits(first, again, ("o", "lse"))
    assert not torch.equal(first[0], second[0])


def test_checkpointing(target):
    """The forward that is run again draws the seed of the first."""
    case = dense(target, target.default_dtype, head_dim=32)
    given = everything(case, target, pantile.Dropout(0.3))
    serves(case, target, given, True)

    def run(checkpointed):
        operands = [x.clone().requires_grad_() for x in case.operands]
        learned = learned_of(given)

        def call(*x):
            return case.ours(*x, options=target.options, **{**given, **learned})

        torch.manual_seed(8)
        outputs = (
            checkpoint(call, *operands, use_reentrant=False) if checkpointed else call(*operands)
        )
        return torch.autograd.grad(loss(*outputs), [*operands, *learned.values()])

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(target, dynamic):
    case = dense(target, target.default_dtype, head_dim=32)
    given = everything(case, target, pantile.Dropout(0.3, seed=12))
    serves(case, target, given, True)

    def call(q, k, v, alibi, bias, sinks):
        more = {**given, "alibi": alibi, "bias": bias, "sinks": sinks}
        return loss(*case.ours(q, k, v, options=target.options, **more))

    def run(function):
        operands = [x.clone().requires_grad_() for x in case.operands]
        learned = learned_of(given)
        leaves = [*operands, *(learned[n] for n in LEARNED)]
        value = function(*leaves)
        return value.detach(), *torch.autograd.grad(value, leaves)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(run(compiled), run(call), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_dropout_draws_a_seed(target):
    case = dense(target, target.default_dtype, head_dim=32)
    serves(case, target, {"dropout": pantile.Dropout(0.3)}, False)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: pantile.attention(q, k, v, dropout=0.3, options=target.options),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.manual_seed(1)
    first, second = compiled(*case.operands), compiled(*case.operands)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(compiled(*case.operands), first)


def test_vmap(target):
    case = dense(target, target.default_dtype, batch=6, head_dim=32)
    given = everything(case, target, pantile.Dropout(0.3, seed=12))
    serves(case, target, given, False)
    operands = [x.unflatten(0, (3, 2)) for x in case.operands]
    slopes = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).to(target.device)

    def call(q, k, v, alibi):
        return pantile.attention(q, k, v, options=target.options, **{**given, "alibi": alibi})

    mapped = torch.func.vmap(call)(*operands, slopes)
    for i in range(3):
        assert torch.equal(mapped[i], call(*(x[i] for x in operands), slopes[i]))
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(lambda q, k, v: pantile.attention(q, k, v, dropout=0.5))(*operands)


def test_func_grad(target):
    case = dense(target, target.default_dtype, head_dim=32)
    given = everything(case, target, pantile.Dropout(0.3, seed=12))
    serves(case, target, given, True)
    expected = attend(lambda *x, **g: case.ours(*x, options=target.options, **g), case, given)
    del expected

    def call(sinks, bias):
        more = {**given, "sinks": sinks, "bias": bias}
        return loss(*case.ours(*case.operands, options=target.options, **more))

    found = torch.func.grad(call, argnums=(0, 1))(given["sinks"], given["bias"])
    leaves = [given["sinks"].clone().requires_grad_(), given["bias"].clone().requires_grad_()]
    for a, b in zip(found, torch.autograd.grad(call(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_autocast(target):
    case = dense(target, torch.float32, head_dim=32)
    given = everything(case, target)
    low = dense(target, torch.bfloat16, head_dim=32)
    serves(low, target, {**given, "bias": given["bias"].bfloat16()}, False)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        o, lse = case.ours(*case.operands, options=target.options, **given)
    assert o.dtype is torch.bfloat16
    expected = low.ours(*(x.bfloat16() for x in case.operands), options=target.options, **given)
    assert_same_bits((o, lse), expected, ("o", "lse"))


def test_opcheck():
    pantile.load_torch()
    case = dense(Target("cpu", "cpu"), head_dim=32)
    given = everything(case, Target("cpu", "cpu"))
    learned = learned_of(given)
    operands = [x.clone().requires_grad_() for x in case.operands]
    variant = Variant(
        **learned,
        dropout_seed=torch.tensor([3, 4]),
        block_mask=torch.tensor([[[[True]]]]),
        mask_block=128,
        softcap=2.5,
        dropout=77,
    )
    tensors, numbers = variant[:VARIANT_TENSOR_COUNT], variant[VARIANT_TENSOR_COUNT:]
    flags = (False, False, False, False, False)
    torch.library.opcheck(
        torch.ops.pantile.forward_variant.default,
        (*operands, *tensors, *Call(backend="cpu"), *numbers, *flags),
    )


def test_second_derivatives_are_refused(target):
    case = dense(target, target.default_dtype, head_dim=32)
    sinks = torch.zeros(4, device=target.device)
    serves(case, target, {"sinks": sinks}, True)
    sinks.requires_grad_()
    _, lse = case.ours(*case.operands, options=target.options, sinks=sinks)
    (gradient,) = torch.autograd.grad(lse.sum(), sinks, create_graph=True)
    with pytest.raises(pantile.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(gradient.sum(), sinks)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_differences(seed):
    """Of the double reference, by central differences along a random direction."""
    target = Target("reference", "cpu")
    case = dense(
        target, torch.float32, batch=1, rows=9, keys=11, head_dim=8, causal=True, seed=seed
    )
    given = everything(case, target, pantile.Dropout(0.3, seed=seed))
    leaves = [x.clone().requires_grad_() for x in case.operands] + list(learned_of(given).values())
    names = [n for n in given if n in LEARNED]
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(x.shape, generator=generator) for x in leaves]

    def value(step):
        x = [(a.detach() + step * d) for a, d in zip(leaves, directions, strict=True)]
        more = {**given, **dict(zip(names, x[3:], strict=True))}
        o, lse = reference.attention(*x[:3], causal=True, **more)
        return float(loss(o, lse))

    def slope():
        more = {**given, **dict(zip(names, leaves[3:], strict=True))}
        grads = torch.autograd.grad(
            loss(*case.ours(*leaves[:3], options=target.options, **more)), leaves
        )
        return float(sum((g * d).sum() for g, d in zip(grads, directions, strict=True)))

    step = 1e-3
    numeric = (value(step) - value(-step)) / (2 * step)
    assert abs(slope() - numeric) < 2e-3 * (1 + abs(numeric))


# ---- the same bits every time


def test_deterministic(target):
    """Also the gradients of tensors that heads, sequences and rows share."""
    case = dense(target, target.default_dtype, rows=200, keys=210, head_dim=32, causal=True)
    given = everything(case, target, pantile.Dropout(0.3, seed=12))
    serves(case, target, given, True)

    def run(threads):
        torch.set_num_threads(threads)
        options = {"options": target.options, "deterministic": True}
        call = functools.partial(case.ours, **options)
        return attend(call, case, given)

    before = torch.get_num_threads()
    try:
        first = run(1)
        for threads in (2, 3):
            for name, x in run(threads).items():
                assert torch.equal(x, first[name]), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "shape", [(1, 1, 70, 83), (1, 4, 70, 83), (2, 1, 70, 83), (2, 4, 70, 83), (2, 4, 1, 83)]
)
def test_deterministic_bias(target, shape):
    """Its gradient has the same bits every time, whatever axes share an element."""
    case = dense(target, target.default_dtype, rows=70, keys=83, head_dim=64)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(shape, generator=generator).to(target.device, target.default_dtype)
    given = {"bias": bias}
    call = functools.partial(case.ours, options=target.options, deterministic=True)
    serves(case, target, {**given, "deterministic": True}, True)
    expected = assert_right(case, target, given)["bias"].double()
    first = attend(call, case, given)["bias"]
    error = (first.double() - expected).norm() / expected.norm()
    assert error < 4 * torch.finfo(bias.dtype).eps
    for _ in range(3):
        assert torch.equal(attend(call, case, given)["bias"], first)


# ---- NumPy


def test_numpy_arrays():
    case = dense(Target("cpu", "cpu"))
    given = everything(case, Target("cpu", "cpu"), pantile.Dropout(0.3, seed=12))
    expected = case.ours(*case.operands, **given)
    arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    o, lse = pantile.attention(*(x.numpy() for x in case.operands), return_lse=True, **arrays)
    assert_same_bits((torch.from_numpy(o), torch.from_numpy(lse)), expected, ("o", "lse"))
    o = pantile.attention(*(x.numpy() for x in case.operands), dropout=0.5)
    assert o.shape == case.q.shape


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"softcap": -1.0}, ValueError, "^softcap is -1.0; it must be finite, and positive"),
        ({"softcap": "2"}, TypeError, "^softcap is '2'; it must be a number or None"),
        ({"alibi": torch.zeros(3)}, ValueError, r"^alibi has shape \[3\]; it must be \[4\]"),
        (
            {"alibi": torch.zeros(3, 4)},
            ValueError,
            r"^alibi has shape \[3, 4\]; it must be \[2, 4\]",
        ),
        (
            {"alibi": torch.zeros(4).half()},
            TypeError,
            "^alibi has dtype float16; it must be float32",
        ),
        ({"sinks": torch.zeros(2, 4)}, ValueError, r"^sinks has shape \[2, 4\]; it must be \[4\]"),
        ({"sinks": torch.zeros(4).bfloat16()}, TypeError, "^sinks has dtype bfloat16"),
        (
            {"bias": torch.zeros(3, 45)},
            ValueError,
            r"^bias has shape \[1, 1, 3, 45\]; it must be \[2, 4, 37, 45\], of which the first",
        ),
        (
            {"bias": torch.zeros(45).half()},
            TypeError,
            "^bias has dtype float16; it must be float32 or the dtype of q, float32",
        ),
        ({"dropout": 1.0}, ValueError, "^dropout is 1.0; it must be from 0 to below 255.5 / 256"),
        (
            {"dropout": pantile.Dropout(0.5, seed=1, key_offset=2**32 - 1)},
            ValueError,
            "^key_offset is 4294967295; it must be from 0 to 4294967251",
        ),
    ],
    ids=lambda x: "" if not isinstance(x, dict) else next(iter(x)),
)
def test_refusals(given, error, message):
    case = dense(Target("cpu", "cpu"))
    with pytest.raises(error, match=message):
        pantile.attention(*case.operands, **given)
    with pytest.raises(error, match=message):
        pantile.explain(*case.operands, **given)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    if not isinstance(given.get("dropout"), pantile.Dropout):
        with pytest.raises(error, match=message):
            pantile.attention(*(x.to("meta") for x in case.operands), **meta)


@pytest.mark.parametrize("name", ["softcap", "alibi", "bias", "sinks", "dropout"])
def test_fp8_refuses_by_name(name):
    case = dense(Target("cpu", "cpu"))
    value = {"softcap": 1.0, "dropout": 0.5}.get(name, torch.zeros(4))
    with pytest.raises(ValueError, match=f"^{name} is .*; FP8 attention does not serve it"):
        pantile.attention(*case.operands, options=pantile.Options(fp8=True), **{name: value})
    with pytest.raises(ValueError, match=f"^{name} is .*; FP8 attention does not serve it"):
        pantile.attention(pantile.quantize(*case.operands), **{name: value})


@pytest.mark.parametrize("names", [("alibi", "sinks", "dropout"), ("shared_bias", "sinks")])
def test_nothing_to_attend_to(target, names):
    """No batch, no rows, no keys: outputs and gradients of the right shape, the latter 0."""
    for batch, rows, keys in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        case = dense(target, target.default_dtype, batch=batch, rows=rows, keys=keys, head_dim=32)
        given = arguments_of(names, case, target)
        serves(case, target, given, True)
        found = attend(lambda *x, c=case, **g: c.ours(*x, options=target.options, **g), case, given)
        assert found["o"].shape == (batch, rows, 4, 32)
        assert not found["o"].any()
        for name in given.keys() & {"alibi", "bias"}:
            assert found[name].shape == given[name].shape
            assert not found[name].any()
        if keys:
            assert not found["sinks"].any()
