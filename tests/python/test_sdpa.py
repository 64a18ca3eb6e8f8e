"""pantile as torch's implementation of flash attention, on the CPU and on CUDA devices.

On the CPU the operators of CUDA are registered too, so that their kernels, torch's formulas of the
gradient and the strides that torch's fake kernels promise are tested without a GPU.
"""

from __future__ import annotations

import subprocess
import sys

import pantile
import pantile.sdpa
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None
aten = torch.ops.aten
attention_registry = torch.nn.attention
has_registry = hasattr(attention_registry, "register_flash_attention_impl")
needs_varlen = pytest.mark.skipif(varlen is None, reason="this torch has no varlen_attn")
needs_registry = pytest.mark.skipif(not has_registry, reason="this torch has no registry")
needs_whole_calls = pytest.mark.skipif(
    not pantile.sdpa.WHOLE_CALLS, reason="this torch does not tell which calls are plain"
)
FORWARD = aten._scaled_dot_product_flash_attention


@pytest.fixture
def calls(monkeypatch):
    """Served by pantile; what is counted: forwards and backwards."""
    counts = {"forward": 0, "backward": 0}

    def counting(name, function):
        def call(*arguments, **named):
            answer = function(*arguments, **named)
            counts[name] += answer is not None  # a whole call that does not serve says None
            return answer

        return call

    for name, functions in (
        ("forward", ["run_forward", "whole_forward"]),
        ("backward", ["run_backward", "run_variant_backward", "whole_backward"]),
    ):
        for function in functions:
            monkeypatch.setattr(
                pantile.sdpa, function, counting(name, getattr(pantile.sdpa, function))
            )
    with pantile.sdpa.register(cpu=True):
        yield counts


def layouts(name, batch, heads, rows, dim, dtype=torch.float32, device="cpu", seed=0):
    """[batch, heads, rows, dim] in different orders of memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, rows, dim, generator=generator).to(device, dtype)
    if name == "heads_outside":
        return x
    if name == "rows_outside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if name == "slice":
        wide = x.new_zeros(batch, rows, 3, heads, dim)
        wide[:, :, 1] = x.transpose(1, 2)
        return wide[:, :, 1].transpose(1, 2)
    assert name == "batch_inside"
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def operands(layout="rows_outside", batch=2, heads=4, heads_k=4, rows=37, keys=37, dim=32, **how):
    q = layouts(layout, batch, heads, rows, dim, seed=1, **how)
    k, v = (layouts(layout, batch, heads_k, keys, dim, seed=s, **how) for s in (2, 3))
    return [x.requires_grad_() for x in (q, k, v)]


def expected_of(q, k, v, mask=None, scale=None, kept=None, rate=0.0):
    """(o, gradients by a given seed function) in float64; mask: True is visible, or a bias."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ wide_k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        hidden = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask.double()
    weights = scores.softmax(-1).nan_to_num()
    if kept is not None:
        weights = weights * kept / (1 - rate)
    return weights @ wide_v, (q, k, v)


def compare(o, ours, expected, theirs, tolerance=1e-4):
    torch.testing.assert_close(o.double(), expected, atol=tolerance / 10, rtol=tolerance / 10)
    seed = torch.randn(o.shape, generator=torch.Generator().manual_seed(8)).to(o)
    mine = torch.autograd.grad(o, ours, seed)
    other = torch.autograd.grad(expected, theirs, seed.double())
    for x, y in zip(mine, other, strict=True):
        torch.testing.assert_close(x.double(), y, atol=tolerance, rtol=tolerance)


def bottom_right(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def top_left(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).tril()


# ---- scaled_dot_product_attention on the CPU


@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice", "batch_inside"])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_served(calls, layout, causal):
    q, k, v = operands(layout)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2)
    expected, wide = expected_of(q, k, v, top_left(37, 37) if causal else None, 0.2)
    compare(o, (q, k, v), expected, wide)
    assert calls == {"forward": 1, "backward": 1}


@pytest.mark.parametrize(("rows", "keys"), [(20, 45), (45, 20)])
def test_causal_on_the_cpu_is_aligned_to_the_top_left(calls, rows, keys):
    q, k, v = operands(rows=rows, keys=keys)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected, wide = expected_of(q, k, v, top_left(rows, keys))
    compare(o, (q, k, v), expected, wide)
    assert calls["forward"] == 1


@pytest.mark.parametrize("kind", ["bool", "float", "shared", "flat"])
def test_masks_on_the_cpu(calls, kind):
    q, k, v = operands(rows=20, keys=45)
    generator = torch.Generator().manual_seed(5)
    mask = torch.randn(2, 4, 20, 45, generator=generator)
    if kind == "bool":
        mask = mask > 0
    elif kind == "shared":
        mask = mask[:1, :1] > 0
    elif kind == "flat":
        mask = mask[0, 0]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected, wide = expected_of(q, k, v, mask)
    compare(o, (q, k, v), expected, wide)
    assert calls == {"forward": 1, "backward": 1}


def test_a_row_that_sees_nothing_is_zero(calls):
    q, k, v = operands(rows=3, keys=5)
    mask = torch.ones(2, 4, 3, 5, dtype=torch.bool)
    mask[:, :, 1] = False
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not o[:, :, 1].any()
    assert calls["forward"] == 1


# ---- the operators of CUDA: values, gradients by torch's formulas, strides


@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice", "batch_inside"])
@pytest.mark.parametrize(
    ("heads_k", "keys", "causal"), [(4, 37, True), (2, 50, True), (1, 50, False)]
)
def test_flash_operator(calls, layout, heads_k, keys, causal):
    q, k, v = operands(layout, heads_k=heads_k, keys=keys)
    o, lse, cum_q, cum_k, max_q, max_k, *_ = FORWARD(q, k, v, 0.0, causal, scale=0.3)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 37, keys)
    mask = bottom_right(37, keys) if causal else None
    expected, wide = expected_of(q, k, v, mask, 0.3)
    compare(o, (q, k, v), expected, wide)
    assert lse.shape == (2, 4, 37)
    assert calls == {"forward": 1, "backward": 1}


def on_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def strides(outputs):
    return [x.stride() if isinstance(x, torch.Tensor) else x for x in outputs]


@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice", "batch_inside"])
@pytest.mark.parametrize("dim", [32, 40])
def test_outputs_have_the_strides_that_are_traced(calls, layout, dim):
    q, k, v = (x.detach() for x in operands(layout, heads_k=2, dim=dim))
    meta = [on_meta(x) for x in (q, k, v)]
    outputs, promised = FORWARD(q, k, v), FORWARD(*meta)
    assert strides(outputs) == strides(promised)
    assert [x.dtype for x in outputs[6:]] == [x.dtype for x in promised[6:]]
    assert [x.shape for x in outputs[6:]] == [x.shape for x in promised[6:]]
    backward = aten._scaled_dot_product_flash_attention_backward
    rest = (None, None, 37, 37, 0.0, False)
    o, lse = outputs[:2]
    grads = backward(o, q, k, v, o, lse, *rest, *outputs[6:8])
    theirs = backward(promised[0], *meta, promised[0], promised[1], *rest, *promised[6:8])
    assert strides(grads) == strides(theirs)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    flash = aten._flash_attention_forward
    rest = (None, None, 37, 37, 0.0, False, False)
    promised = flash(*(x.transpose(1, 2) for x in meta), *rest)
    assert strides(flash(*rows, *rest)) == strides(promised)


@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice", "batch_inside"])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_no_output_is_copied(calls, layout, p):
    q, k, v = (x.detach() for x in operands(layout))
    backward = aten._scaled_dot_product_flash_attention_backward
    with torch.profiler.profile() as profile:
        o, lse, *_, seed, unused, _ = FORWARD(q, k, v, p, True)
        backward(o, q, k, v, o, lse, None, None, 37, 37, p, True, seed, unused)
    names = {event.key for event in profile.key_averages()}
    assert "aten::empty_like" in names
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous"}


def test_outputs_of_the_cpu_operator_have_the_strides_that_are_traced(calls):
    op = aten._scaled_dot_product_flash_attention_for_cpu
    for layout in ("heads_outside", "rows_outside", "slice"):
        q, k, v = (x.detach() for x in operands(layout))
        meta = [on_meta(x) for x in (q, k, v)]
        outputs, promised = op(q, k, v), op(*meta)
        assert strides(outputs) == strides(promised)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = backward(outputs[0], q, k, v, *outputs, 0.0, False)
        theirs = backward(promised[0], *meta, *promised, 0.0, False)
        assert strides(grads) == strides(theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.25, 0.22, 0.001])
def test_dropout_shows_its_mask_and_uses_it_again(calls, causal, p):
    """Kept weights are divided by 1 - p, as torch defines it; 0.22 is 56/256 here, 0.001 none."""
    q, k, v = operands(heads_k=2, rows=60, keys=60)
    torch.manual_seed(3)
    o, *_, rng_state, _, signed = FORWARD(q, k, v, p, causal, True)
    kept = signed >= 0
    share = 0.5 if causal else 1.0  # weights that a mask hides count as kept
    assert abs((1 - kept.double().mean()) - share * pantile.Dropout(p).rate) < 0.03
    mask = bottom_right(60, 60) if causal else None
    expected, wide = expected_of(q, k, v, mask, kept=kept, rate=p)
    compare(o, (q, k, v), expected, wide)
    seed = rng_state.view(torch.int64)
    again = pantile.attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        causal=causal,
        dropout=pantile.Dropout(p, seed=seed),
    )
    factor = (1 - pantile.Dropout(p).rate) / (1 - p)
    torch.testing.assert_close(factor * again.transpose(1, 2), o, atol=1e-5, rtol=1e-5)
    torch.manual_seed(3)
    assert torch.equal(FORWARD(q, k, v, p, causal)[0], o)
    if pantile.Dropout(p).rate:
        assert not torch.equal(FORWARD(q, k, v, p, causal)[0], o)


def packed(lengths, heads, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(lengths), heads, dim, generator=generator).requires_grad_()
    return rows, torch.tensor([0, *lengths]).cumsum(0).int()


@needs_varlen
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (3, 2)])
def test_varlen_attn(calls, window):
    (q, bounds), (k, keys), (v, _) = (
        packed((5, 31, 12), 4, seed=1),
        packed((9, 31, 20), 4, seed=2),
        packed((9, 31, 20), 4, seed=3),
    )
    o, lse = varlen.varlen_attn(
        *(q, k, v, bounds, keys, 31, 31),
        window_size=window,
        return_aux=varlen.AuxRequest(lse=True),
    )
    expected, theirs = pantile.varlen_attention(
        *(x.detach() for x in (q, k, v)),
        *(bounds, keys, 31, 31),
        window=window,
        return_lse=True,
    )
    assert torch.equal(o, expected)
    assert torch.equal(lse, theirs)
    for b in range(3):
        rows, columns = (slice(*x[b : b + 2].tolist()) for x in (bounds, keys))
        m, n = rows.stop - rows.start, columns.stop - columns.start
        distance = torch.arange(n) - torch.arange(n - m, n)[:, None]
        left, right = (n if x < 0 else x for x in window)
        mask = (distance >= -left) & (distance <= right)
        pieces = [x[i].transpose(0, 1)[None] for x, i in ((q, rows), (k, columns), (v, columns))]
        wide, leaves = expected_of(*pieces, mask)
        seed = torch.randn(m, 4, 32, dtype=torch.float64)
        grads = torch.autograd.grad(o[rows], (q, k, v), seed.float(), retain_graph=True)
        others = torch.autograd.grad(wide, leaves, seed.transpose(0, 1)[None])
        for mine, other, i in zip(grads, others, (rows, columns, columns), strict=True):
            torch.testing.assert_close(
                mine[i].double(), other[0].transpose(0, 1), atol=1e-4, rtol=1e-4
            )


@needs_varlen
def test_varlen_attn_with_used_keys_and_an_output(calls):
    (q, bounds), (k, keys) = packed((5, 31, 12), 4, seed=1), packed((9, 31, 20), 4, seed=2)
    q, k = q.detach(), k.detach()
    used = torch.tensor([4, 31, 9], dtype=torch.int32)
    expected = pantile.varlen_attention(q, k, k, bounds, keys, 31, 31, seqused_k=used)
    o = varlen.varlen_attn(q, k, k, bounds, keys, 31, 31, seqused_k=used, num_splits=1)
    assert torch.equal(o, expected)
    if hasattr(varlen, "varlen_attn_out"):
        out = torch.full_like(q, torch.nan)
        varlen.varlen_attn_out(out, q, k, k, bounds, keys, 31, 31, seqused_k=used)
        assert torch.equal(out, expected)


# ---- host time: by what a call does, which cannot flicker


def forbid(*_, **__):
    raise AssertionError("a plain call took the way through Python")


@needs_whole_calls
@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice"])
def test_plain_calls_are_one_call_of_the_bindings(calls, monkeypatch, layout):
    monkeypatch.setattr(pantile.sdpa, "run_forward", forbid)
    monkeypatch.setattr(pantile.sdpa, "run_backward", forbid)
    q, k, v = operands(layout, heads_k=2)
    o = FORWARD(q, k, v, 0.0, True)[0]
    compare(o, (q, k, v), *expected_of(q, k, v, top_left(37, 37)))
    assert calls == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("dim", [36, 40])
def test_what_is_not_plain_is_served_by_the_long_way(calls, dim):
    """A last stride of 2, a head dim that is padded, and an expanded gradient."""
    q, k, v = operands(dim=2 * dim)
    q, k, v = (x.detach()[..., ::2].requires_grad_() for x in (q, k, v))
    o = FORWARD(q, k, v, 0.0, True)[0]
    expected, wide = expected_of(q, k, v, top_left(37, 37))
    compare(o, (q, k, v), expected, wide)
    o = FORWARD(*(x.contiguous() for x in (q, k, v)), 0.0, True)[0]
    found = torch.autograd.grad(o.sum(), (q, k, v))
    expected, wide = expected_of(q, k, v, top_left(37, 37))
    others = torch.autograd.grad(expected.sum(), wide)
    for x, y in zip(found, others, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-4, rtol=1e-4)
    assert calls == {"forward": 2, "backward": 2}


def test_philox_outputs_of_two_calls_share_no_memory(calls):
    """Compiled programs may write to what is dead."""
    x = operands()[0].detach()
    first, second = FORWARD(x, x, x), FORWARD(x, x, x)
    places = {y.data_ptr() for y in (*first[6:8], *second[6:8])}
    assert len(places) == 4


# ---- the function itself


@pytest.fixture
def function():
    """torch's function, which the provider's stands for, and how often that was asked."""
    torch_function, asked = F.scaled_dot_product_attention, []

    def counting(*arguments, **named):
        asked.append(named)
        return torch_function(*arguments, **named)

    F.scaled_dot_product_attention = counting
    try:
        with pantile.sdpa.register(cpu=True, function=True):
            yield asked
        assert F.scaled_dot_product_attention is counting
    finally:
        F.scaled_dot_product_attention = torch_function


@needs_whole_calls
@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice", "batch_inside"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_function_serves_plain_calls(function, layout, causal, scale):
    q, k, v = (x.detach() for x in operands(layout))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    assert not function
    expected, _ = expected_of(q, k, v, top_left(37, 37) if causal else None, scale)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    assert o.stride() == torch.empty_like(q).stride()


@needs_whole_calls
@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({}, {"attn_mask": torch.ones(37, 37, dtype=torch.bool)}),
        ({"heads_k": 2}, {"enable_gqa": True}),
        ({"keys": 50}, {"is_causal": True}),
        ({"dim": 264}, {}),
    ],
    ids=["mask", "gqa", "top_left", "wide"],
)
def test_function_leaves_the_rest_to_torch(function, sizes, named):
    q, k, v = (x.detach() for x in operands(**sizes))
    o = F.scaled_dot_product_attention(q, k, v, **named)
    mask = top_left(37, k.shape[2]) if "is_causal" in named else None
    expected, _ = expected_of(q, k, v, mask)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    assert len(function) == 1


@needs_whole_calls
def test_function_sees_what_torch_watches(function):
    q, k, v = operands()
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    compare(o, (q, k, v), *expected_of(q, k, v, top_left(37, 37)))
    q, k, v = (x.detach() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype is torch.bfloat16
    torch.vmap(F.scaled_dot_product_attention)(*(x[None] for x in (q, k, v)))
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert len(function) == 5
    compiled = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager"
    )
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), expected, atol=1e-6, rtol=1e-6)


@needs_whole_calls
def test_function_of_the_cpu_needs_cpu():
    x = operands()[0].detach()
    before = F.scaled_dot_product_attention
    with pantile.sdpa.register(function=True):
        assert F.scaled_dot_product_attention is not before
        expected = before(x, x, x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
        provider = pantile.sdpa.register(cpu=True)
        assert F.scaled_dot_product_attention is before
        provider.remove()
    assert F.scaled_dot_product_attention is before
    with pytest.raises(TypeError, match="function is 1"):
        pantile.sdpa.register(function=1)


def test_function_is_refused_where_no_call_is_known_to_be_plain(monkeypatch):
    monkeypatch.setattr(pantile.sdpa, "WHOLE_CALLS", False)
    before = F.scaled_dot_product_attention
    with pytest.raises(pantile.UnsupportedError, match="function is True"):
        pantile.sdpa.register(function=True)
    assert F.scaled_dot_product_attention is before


# ---- tracing


@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside"])
def test_compiled(calls, layout):
    def function(q, k, v):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o + FORWARD(q, k, v, 0.0, True)[0]

    q, k, v = operands(layout)
    o = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
    expected, wide = expected_of(q, k, v, top_left(37, 37))
    compare(o, (q, k, v), 2 * expected, wide)
    assert calls == {"forward": 2, "backward": 2}


# ---- registration


def test_importing_registers_nothing():
    program = (
        "import torch, pantile, pantile.sdpa\n"
        "find = getattr(torch.nn.attention, 'list_flash_attention_impls', list)\n"
        "assert 'pantile' not in find()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_remove_gives_torch_its_kernels_back():
    q, k, v = (x.detach() for x in operands())
    before = F.scaled_dot_product_attention(q, k, v)
    provider = pantile.sdpa.register(cpu=True)
    assert torch.ops.aten._flash_attention_forward is not None
    FORWARD(q, k, v)
    provider.remove()
    provider.remove()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), before)
    with pytest.raises(NotImplementedError):
        FORWARD(q, k, v)


@needs_registry
def test_registry():
    assert pantile.sdpa.register(activate=False, cpu=True) is None
    assert "pantile" in attention_registry.list_flash_attention_impls()
    assert attention_registry.current_flash_attention_impl() is None
    q, k, v = (x.detach() for x in operands())
    for _ in range(2):
        attention_registry.activate_flash_attention_impl("pantile")
        assert attention_registry.current_flash_attention_impl() == "pantile"
        FORWARD(q, k, v)
    attention_registry.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        FORWARD(q, k, v)
    with pantile.sdpa.register(cpu=True):
        assert attention_registry.current_flash_attention_impl() == "pantile"
        pantile.sdpa.register(cpu=True)
        FORWARD(q, k, v)
    pantile.sdpa.register().remove()
    assert attention_registry.current_flash_attention_impl() is None


def test_without_a_registry(monkeypatch):
    monkeypatch.setattr(pantile.sdpa, "_registry", lambda: None)
    q, k, v = (x.detach() for x in operands())
    with pantile.sdpa.register(cpu=True):
        FORWARD(q, k, v)
    with pytest.raises(NotImplementedError):
        FORWARD(q, k, v)
    with pytest.raises(pantile.UnsupportedError, match="activate is False"):
        pantile.sdpa.register(activate=False)


# ---- refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_table", torch.zeros(1, 1, dtype=torch.int32)),
        ("alibi_slopes", torch.zeros(4)),
        ("seqused_k", torch.ones(2, dtype=torch.int32)),
    ],
)
def test_refusals_name_the_argument(calls, name, value):
    rows = [x.transpose(1, 2) for x in operands()]
    with pytest.raises(pantile.UnsupportedError, match=name):
        aten._flash_attention_forward(*rows, None, None, 37, 37, 0.0, False, False, **{name: value})


def test_gradients_that_would_not_know_of_used_keys_are_refused(calls):
    (q, bounds), (k, keys) = packed((5, 31), 4, seed=1), packed((9, 31), 4, seed=2)
    used = torch.tensor([4, 31], dtype=torch.int32)
    arguments = (q, k, k, bounds, keys, 31, 31, 0.0, False, False)
    with pytest.raises(pantile.UnsupportedError, match="seqused_k"):
        aten._flash_attention_forward(*arguments, seqused_k=used)
    with torch.no_grad():
        aten._flash_attention_forward(*arguments, seqused_k=used)


def test_fp8_is_refused_where_torch_has_no_operators(monkeypatch):
    monkeypatch.setattr(pantile.sdpa, "_QUANTIZED", {})
    with pytest.raises(pantile.UnsupportedError, match="fp8 is True"):
        pantile.sdpa.register(fp8=True)
    with pytest.raises(TypeError, match="cpu is 1"):
        pantile.sdpa.register(cpu=1)


# ---- FP8


@pytest.mark.skipif("quantized" not in FORWARD.overloads(), reason="this torch has no FP8 overload")
def test_fp8_operands():
    codes = [x.detach().to(torch.float8_e4m3fn) for x in operands(dim=64)]
    descales = [torch.full((2, 4), x) for x in (0.5, 1.5, 2.0)]
    with pantile.sdpa.register(cpu=True, fp8=True):
        o, lse, *_ = FORWARD.quantized(*codes, *descales, 0.0, True)
    wide = [x.double() * d[0, 0].double() for x, d in zip(codes, descales, strict=True)]
    expected, _ = expected_of(*wide, top_left(37, 37))
    assert o.dtype is torch.bfloat16
    assert lse.shape == (2, 4, 37)
    error = (o.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06


# ---- on a GPU


def gpu_operands(layout="rows_outside", dtype=torch.bfloat16, **sizes):
    return operands(layout, dtype=dtype, device="cuda", **{"rows": 200, "keys": 200, **sizes})


@pytest.fixture
def on_gpu(calls):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield calls


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside", "slice"])
@pytest.mark.parametrize(("causal", "dim"), [(False, 64), (True, 128), (True, 36)])
def test_gpu_sdpa(on_gpu, layout, causal, dim):
    q, k, v = gpu_operands(layout, dim=dim)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    mask = top_left(200, 200).cuda() if causal else None
    expected, wide = expected_of(q, k, v, mask)
    compare(o, (q, k, v), expected, wide, 5e-2)
    assert on_gpu == {"forward": 1, "backward": 1}


@pytest.mark.gpu
def test_gpu_grouped_heads_and_lower_right(on_gpu):
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = gpu_operands(heads_k=2, keys=300, dim=64)
    o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    compare(o, (q, k, v), *expected_of(q, k, v), 5e-2)
    q, k, v = gpu_operands(keys=300, dim=64)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(200, 300))
    compare(o, (q, k, v), *expected_of(q, k, v, bottom_right(200, 300).cuda()), 5e-2)
    assert on_gpu == {"forward": 2, "backward": 2}


@pytest.mark.gpu
def test_gpu_dropout(on_gpu):
    q, k, v = gpu_operands(dim=64)
    o, *_, signed = FORWARD(q, k, v, 0.25, True, True)
    mask = top_left(200, 200).cuda()
    expected, wide = expected_of(q, k, v, mask, kept=signed >= 0, rate=0.25)
    compare(o, (q, k, v), expected, wide, 5e-2)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward()
    assert on_gpu == {"forward": 2, "backward": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["heads_outside", "rows_outside"])
def test_gpu_inductor(on_gpu, layout):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2.0

    q, k, v = gpu_operands(layout, dim=64)
    o = torch.compile(function, fullgraph=True)(q, k, v)
    expected, wide = expected_of(q, k, v, top_left(200, 200).cuda())
    compare(o, (q, k, v), 2 * expected, wide, 1e-1)
    assert on_gpu["forward"] >= 1


@pytest.mark.gpu
def test_gpu_nested_tensors(on_gpu):
    lengths = (50, 7, 130)
    parts = [
        [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in lengths]
        for _ in range(3)
    ]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged, requires_grad=True) for x in parts]
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in nested), is_causal=True)
    for b, piece in enumerate(o.transpose(1, 2).unbind()):
        single = [x[b].transpose(0, 1)[None] for x in parts]
        expected, _ = expected_of(*single, top_left(lengths[b], lengths[b]).cuda())
        torch.testing.assert_close(
            piece.double(), expected[0].transpose(0, 1), atol=2e-2, rtol=2e-2
        )
    o.values().sum().backward()
    assert nested[0].grad is not None
    assert on_gpu == {"forward": 1, "backward": 1}


@pytest.mark.gpu
def test_gpu_deterministic(on_gpu):
    q, k, v = gpu_operands(dim=64, rows=1000, keys=1000, heads_k=2)
    seed = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(
                F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (q, k, v), seed
            )
            for _ in range(5)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))
    assert on_gpu["backward"] == 5
