"""The doors of pantile.compat: FlashAttention's own functions, their names, order and layouts.

Results are compared with the textbook in float64 (pantile.reference) or with explicit sums.
"""

from __future__ import annotations

import inspect
import subprocess
import sys

import pantile
import pantile.compat
import pytest
import torch
from pantile import reference
from pantile.compat import flash_attn as fa2
from pantile.compat import flash_attn_3 as fa3
from pantile.compat import vllm
from pantile.compat.bert_padding import pad_input, unpad_input

FA2_TAIL = [
    *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
    *("deterministic", "return_attn_probs"),
]
FA3_DESCALES = ["q_descale", "k_descale", "v_descale"]
FA3_TAIL = [
    *("window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic"),
    *("sm_margin", "return_attn_probs"),
]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


def operands(batch=2, rows=37, keys=45, heads=4, heads_k=2, dim=32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, rows, heads, dim), *[(batch, keys, heads_k, dim)] * 2]
    return [torch.randn(s, generator=generator).requires_grad_(grad) for s in shapes]


def packed_operands(lengths_q=(5, 31, 0, 12), lengths_k=(9, 31, 4, 20), heads=4, heads_k=2):
    q, k, v = (x[0] for x in operands(1, sum(lengths_q), sum(lengths_k), heads, heads_k, seed=3))
    bounds = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    return (q, k, v), (*bounds, max(lengths_q), max(lengths_k))


def check_gradients(o, operands_of_o, expected, operands_of_expected, tolerance=1e-4):
    seed = torch.randn_like(o)
    ours = torch.autograd.grad(o, operands_of_o, seed)
    theirs = torch.autograd.grad(expected, operands_of_expected, seed.to(expected.dtype))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=tolerance, rtol=tolerance)


# ---- signatures: callers give arguments by position


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (fa2.flash_attn_func, ["q", "k", "v", *FA2_TAIL]),
        (fa2.flash_attn_kvpacked_func, ["q", "kv", *FA2_TAIL]),
        (fa2.flash_attn_qkvpacked_func, ["qkv", *FA2_TAIL]),
        (fa2.flash_attn_varlen_func, ["q", "k", "v", *LENGTHS, *FA2_TAIL, "block_table"]),
        (fa2.flash_attn_varlen_kvpacked_func, ["q", "kv", *LENGTHS, *FA2_TAIL]),
        (fa2.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen", *FA2_TAIL]),
        (
            fa3.flash_attn_func,
            ["q", "k", "v", "softmax_scale", "causal", "qv", *FA3_DESCALES, *FA3_TAIL],
        ),
        (
            fa3.flash_attn_varlen_func,
            [
                *("q", "k", "v", *LENGTHS, "seqused_q", "seqused_k", "softmax_scale", "causal"),
                *("qv", *FA3_DESCALES, *FA3_TAIL),
            ],
        ),
        (fa3.flash_attn_combine, ["out_partial", "lse_partial", "out", "out_dtype"]),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_arguments_have_the_order_of_the_originals(function, names):
    assert list(inspect.signature(function).parameters) == names


# ---- FlashAttention-2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"window_size": (5, 3)}, {"window": (5, 3)}),
        ({"window_size": torch.tensor([5, 3]), "causal": True}, {"window": (5, 3), "causal": True}),
        ({"window_size": (-1, 4)}, {"window": (None, 4)}),
        ({"softcap": 2.0, "softmax_scale": 0.3}, {"softcap": 2.0, "scale": 0.3}),
        ({"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, "alibi"),
        ({"deterministic": True}, {}),
    ],
    ids=str,
)
def test_fa2_dense_equals_float64(theirs, ours):
    q, k, v = operands(grad=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if ours == "alibi":
        ours = {"alibi": theirs["alibi_slopes"]}
    expected, lse = reference.attention(*wide, **ours, dtype=torch.float64)
    o = fa2.flash_attn_func(q, k, v, **theirs)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    again, found_lse, weights = fa2.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)
    assert weights.numel() == 0
    check_gradients(again, (q, k, v), expected, wide)


def test_fa2_fourth_argument_is_dropout_and_fa3_fourth_is_the_scale():
    q, k, v = operands()
    torch.manual_seed(4)
    dropped = fa2.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(4)
    assert torch.equal(dropped, pantile.attention(q, k, v, dropout=0.5))
    assert torch.equal(fa3.flash_attn_func(q, k, v, 0.5), pantile.attention(q, k, v, scale=0.5))


def test_fa2_packed_tensors_are_read_in_place():
    q, k, v = operands(rows=45, heads_k=4)
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    kv = torch.stack([k, v], 2)
    expected = fa2.flash_attn_func(q, k, v, causal=True)
    o = fa2.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(o, expected)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, causal=True), expected)
    o.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv.detach(), causal=True), expected)
    together = torch.cat([q, k, v], 2)
    o = fa3.flash_attn_qkvpacked_func(together, causal=True, num_heads_q=4)
    assert torch.equal(o, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_fa2_varlen_equals_float64(causal):
    (q, k, v), lengths = packed_operands()
    wide = [x.double() for x in (q, k, v)]
    expected, lse = reference.varlen_attention(
        *wide, *lengths[:2], causal=causal, dtype=torch.float64
    )
    o, found_lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, *lengths, causal=causal, return_attn_probs=True
    )
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)
    kv = torch.stack([k, v], 1)
    assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=causal), o)
    used = torch.diff(lengths[1])
    threes = fa3.flash_attn_varlen_func(q, k, v, *lengths, None, used, causal=causal)
    assert torch.equal(threes, o)


def test_fa2_varlen_qkvpacked():
    (q, k, v), _ = packed_operands((5, 31, 12), (5, 31, 12), heads_k=4)
    bounds = torch.tensor([0, 5, 36, 48], dtype=torch.int32)
    o = fa2.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), bounds, 31, causal=True)
    expected = pantile.varlen_attention(q, k, v, bounds, bounds, 31, 31, causal=True)
    assert torch.equal(o, expected)


# ---- dropout: S_dmask shows what was kept, with the weights of the softmax


def weights_of(signed):
    size = signed.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(1e-30)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"causal": True}, {"window_size": (7, 2)}, {"alibi_slopes": torch.full((4,), 0.2)}],
    ids=lambda x: next(iter(x), "plain"),
)
def test_s_dmask_reproduces_the_output(arguments):
    q, k, v = operands(rows=60, keys=70)
    o, _, signed = fa2.flash_attn_func(q, k, v, 0.17, **arguments, return_attn_probs=True)
    assert signed.shape == (2, 4, 60, 70)
    rate = pantile.Dropout(0.17).rate
    kept = torch.where(signed < 0, 0.0, weights_of(signed)).double() / (1 - rate)
    values = v.double().repeat_interleave(2, 2)
    expected = torch.einsum("bhij,bjhd->bihd", kept, values)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    assert signed.abs().amax(-1).eq(1.0).all()
    seen = signed != 0
    assert abs((signed < 0).sum() / seen.sum() - rate) < 0.03


def test_s_dmask_of_packed_sequences():
    (q, k, v), lengths = packed_operands()
    o, _, signed = fa2.flash_attn_varlen_func(
        q, k, v, *lengths, 0.3, causal=True, return_attn_probs=True
    )
    assert signed.shape == (4, 4, 31, 31)
    rate = pantile.Dropout(0.3).rate
    for b in range(4):
        rows, keys = (slice(*bounds[b : b + 2].tolist()) for bounds in lengths[:2])
        m, n = rows.stop - rows.start, keys.stop - keys.start
        kept = torch.where(signed[b] < 0, 0.0, weights_of(signed[b])) / (1 - rate)
        expected = torch.einsum("hij,jhd->ihd", kept[:, :m, :n], v[keys].repeat_interleave(2, 1))
        torch.testing.assert_close(o[rows], expected, atol=1e-5, rtol=1e-5)
        assert not signed[b, :, m:].any()
        assert not signed[b, :, :, n:].any()


def test_dropout_has_gradients_of_its_own_mask():
    q, k, v = operands(grad=True)
    o, _, signed = fa2.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", wide[0], wide[1].repeat_interleave(2, 2)) * 32**-0.5
    kept = scores.softmax(-1) * (signed >= 0) / 0.75  # 0.25 is 64/256
    expected = torch.einsum("bhij,bjhd->bihd", kept, wide[2].repeat_interleave(2, 2))
    check_gradients(o, (q, k, v), expected, wide)


# ---- FlashAttention-3


def test_fa3_returns_the_lse_and_takes_hints():
    q, k, v = operands()
    expected, lse = pantile.attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
    o, found = fa3.flash_attn_func(
        *(q, k, v, None, True),
        softcap=3.0,
        num_splits=7,
        pack_gqa=True,
        sm_margin=4,
        return_attn_probs=True,
    )
    assert torch.equal(o, expected)
    assert torch.equal(found, lse)


@pytest.mark.parametrize("packed", [False, True])
def test_fa3_fp8_multiplies_by_the_descales(packed):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in operands(rows=45, dim=64))
    descales = [
        torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in (1, 2, 3)
    ]
    wide = [
        x.double() * d.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, d in zip((q, k, v), descales, strict=True)
    ]
    expected, lse = reference.attention(*wide, causal=True, dtype=torch.float64)
    named = dict(zip(FA3_DESCALES, descales, strict=True))
    if packed:
        bounds = torch.tensor([0, 45, 90], dtype=torch.int32)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        o, found = fa3.flash_attn_varlen_func(
            *flat, *(bounds, bounds, 45, 45), causal=True, **named, return_attn_probs=True
        )
        o, found = o.view(2, 45, 4, 64), found.view(4, 2, 45).transpose(0, 1)
    else:
        o, found = fa3.flash_attn_func(q, k, v, causal=True, **named, return_attn_probs=True)
    assert o.dtype is torch.bfloat16
    # Weights are e4m3, steps of 1/16, and their sum is what was summed.
    torch.testing.assert_close(found.double(), lse, atol=1 / 16, rtol=0.0)
    error = (o.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06  # of weights in e4m3


def test_fa3_codes_that_require_a_gradient_have_none():
    q, k, v = (x.to(torch.float8_e4m3fn).requires_grad_() for x in operands(dim=64))
    assert not fa3.flash_attn_func(q, k, v).requires_grad


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fa3_combine(dtype):
    generator = torch.Generator().manual_seed(9)
    parts = torch.randn(6, 3, 4, 17, 8, generator=generator).transpose(2, 3)[:5]
    lse = torch.randn(5, 3, 8, 17, generator=generator).transpose(-1, -2)[..., :4]
    lse[2:, :1] = -torch.inf
    out, found = fa3.flash_attn_combine(parts, lse, out_dtype=dtype)
    expected_lse = lse.double().logsumexp(0)
    weights = (lse.double() - expected_lse).exp()
    expected = (weights[..., None] * parts.double()).sum(0)
    torch.testing.assert_close(found.double(), expected_lse, atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype is None else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    given = torch.empty_like(out)
    assert fa3.flash_attn_combine(parts, lse, given, dtype)[0] is given
    assert torch.equal(given, out)


# ---- vLLM


def test_vllm_takes_padded_keys_sinks_and_out():
    q = torch.randn(9, 4, 32)
    k, v = torch.randn(2, 3, 20, 2, 32)
    sinks = torch.randn(4)
    bounds = torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    used = torch.tensor([7, 20, 11], dtype=torch.int32)
    out = torch.full((9, 4, 32), torch.nan)
    answer, lse = vllm.flash_attn_varlen_func(
        *(q, k, v, 6, bounds, 20),
        seqused_k=used,
        causal=True,
        window_size=[5, 0],
        s_aux=sinks,
        out=out,
        return_softmax_lse=True,
        fa_version=3,
        num_splits=2,
    )
    assert answer is out
    for b in range(3):
        rows = slice(*bounds[b : b + 2].tolist())
        n = int(used[b])
        wide = [x.double()[None] for x in (q[rows], k[b, :n], v[b, :n])]
        expected, expected_lse = reference.attention(
            *wide, causal=True, window=(5, 0), sinks=sinks, dtype=torch.float64
        )
        torch.testing.assert_close(out[rows].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse[0], atol=1e-5, rtol=1e-5)


def test_vllm_takes_expanded_descales():
    q, k, v = (x[0].to(torch.float8_e4m3fn) for x in operands(1, 45, 45, dim=64))
    bounds = torch.tensor([0, 45], dtype=torch.int32)
    descales = {name: torch.tensor(2.0).expand(1, 2) for name in FA3_DESCALES}
    o = vllm.flash_attn_varlen_func(q, k, v, 45, bounds, 45, bounds, causal=True, **descales)
    wide = [2.0 * x.double()[None] for x in (q, k, v)]
    expected, _ = reference.attention(*wide, causal=True, dtype=torch.float64)
    error = (o.double() - expected[0]).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.06


def test_out_of_a_wrong_form_is_refused():
    q, k, v = (x[0] for x in operands(1, 45, 45))
    bounds = torch.tensor([0, 45], dtype=torch.int32)
    for out, words in ((torch.empty(44, 4, 32), "shape"), (torch.empty(45, 4, 32).half(), "dtype")):
        with pytest.raises((TypeError, ValueError), match=f"out .*{words}"):
            vllm.flash_attn_varlen_func(q, k, v, 45, bounds, 45, bounds, out=out)
    q.requires_grad_()
    with pytest.raises(pantile.UnsupportedError, match="out is given"):
        vllm.flash_attn_varlen_func(q, k, v, 45, bounds, 45, bounds, out=torch.empty(45, 4, 32))


# ---- what is not served is refused by name

SOMETHING = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (fa3.flash_attn_func, "qv", SOMETHING),
        (fa3.flash_attn_varlen_func, "qv", SOMETHING),
        (vllm.flash_attn_varlen_func, "q_v", SOMETHING),
        (vllm.flash_attn_varlen_func, "cp_tot_seqused_k", SOMETHING),
        (vllm.flash_attn_varlen_func, "cp_world_size", 2),
        (vllm.flash_attn_varlen_func, "return_attn_probs", True),
    ],
)
def test_refusals_name_the_argument(function, name, value):
    q, k, v = (x[0] for x in operands(1, 45, 45))
    bounds = torch.tensor([0, 45], dtype=torch.int32)
    if function is vllm.flash_attn_varlen_func:
        arguments = (q, k, v, 45, bounds, 45, bounds)
    elif "varlen" in function.__name__:
        arguments = (q, k, v, bounds, bounds, 45, 45)
    else:
        arguments = operands()
    with pytest.raises(pantile.UnsupportedError, match=f"^{name} is "):
        function(*arguments, **{name: value})


@pytest.mark.parametrize(("rows", "keys", "chunk"), [(45, 45, 16), (20, 50, 16), (50, 20, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks(rows, keys, chunk, causal):
    q, k, v = operands(1, rows, keys)
    o = fa3.flash_attn_func(q, k, v, causal=causal, attention_chunk=chunk)
    at = torch.arange(rows)[:, None] + keys - rows
    seen = torch.div(at, chunk, rounding_mode="floor") == torch.arange(keys) // chunk
    expected = pantile.attention(q, k, v, causal=causal, mask=seen)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    bounds, starts = (torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys))
    packed = fa3.flash_attn_varlen_func(
        *(q[0], k[0], v[0], bounds, starts, rows, keys), causal=causal, attention_chunk=chunk
    )
    torch.testing.assert_close(packed, expected[0], atol=1e-5, rtol=1e-5)


def test_chunks_of_codes_are_refused():
    codes = [x.to(torch.float8_e4m3fn) for x in operands(dim=64)]
    with pytest.raises(pantile.UnsupportedError, match="attention_chunk is 8"):
        fa3.flash_attn_func(*codes, attention_chunk=8)


def test_wrong_values_name_their_argument():
    q, k, v = operands()
    with pytest.raises(ValueError, match="q_descale"):
        fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))
    with pytest.raises(TypeError, match="window_size"):
        fa2.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        fa2.flash_attn_func(q, k, v, 1.5)
    with pytest.raises(ValueError, match="qkv"):
        fa2.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match="softcap"):
        fa2.flash_attn_func(q, k, v, softcap=-1.0)
    codes = [x.to(torch.float8_e4m3fn) for x in operands(dim=64)]
    with pytest.raises(pantile.UnsupportedError, match="softcap"):
        fa3.flash_attn_func(*codes, softcap=2.0)
    with pytest.raises(TypeError):
        fa2.flash_attn_func(q, k, v, qv=None)


# ---- bert_padding


def test_padding_there_and_back():
    x = torch.randn(3, 10, 4, requires_grad=True)
    mask = torch.arange(10) < torch.tensor([[10], [3], [7]])
    tokens, indices, bounds, longest, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask])
    assert bounds.tolist() == [0, 10, 13, 20]
    assert bounds.dtype is used.dtype is torch.int32
    assert longest == 10
    assert used.tolist() == [10, 3, 7]
    back = pad_input(tokens, indices, 3, 10)
    assert torch.equal(back, x.masked_fill(~mask[..., None], 0.0))
    back.sum().backward()
    assert torch.equal(x.grad[..., 0], mask.float())
    unused = torch.zeros(3, 10, dtype=torch.bool)
    unused[1, 3:5] = True
    _, _, bounds, longest, used = unpad_input(x, mask, unused)
    assert bounds.tolist() == [0, 10, 15, 22]
    assert used.tolist() == [10, 3, 7]


# ---- install


def test_importing_pantile_installs_nothing():
    program = (
        "import sys, torch, pantile, pantile.compat, pantile.compat.flash_attn_3\n"
        "assert not [n for n in sys.modules if n.startswith(('flash_attn', 'vllm'))]\n"
        "assert not torch._C._dispatch_has_kernel('flash_attn_3::fwd')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_install_and_remove():
    with pantile.compat.install():
        import flash_attn
        import flash_attn_interface
        from flash_attn.bert_padding import unpad_input as theirs
        from flash_attn.flash_attn_interface import flash_attn_func

        assert flash_attn.flash_attn_func is fa2.flash_attn_func is flash_attn_func
        assert flash_attn.bert_padding.unpad_input is unpad_input is theirs
        assert flash_attn_interface.flash_attn_func is fa3.flash_attn_func
        assert importlib_finds("flash_attn")
    assert not [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]
    assert not importlib_finds("flash_attn")


def importlib_finds(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_install_leaves_other_modules_alone(monkeypatch):
    import types

    other = types.ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", other)
    with pytest.raises(RuntimeError, match="flash_attn_interface is imported already"):
        pantile.compat.install("flash_attn_interface")
    with pytest.raises(RuntimeError, match="flash_attn_interface is imported already"):
        pantile.compat.install(operators=True)
    assert "flash_attn" not in sys.modules
    assert not torch._C._dispatch_has_kernel("flash_attn_3::fwd")
    with pantile.compat.install("flash_attn_interface", replace=True):
        assert sys.modules["flash_attn_interface"] is not other
    assert sys.modules["flash_attn_interface"] is other
    with pytest.raises(ValueError, match="names is 'flash_attn_4'"):
        pantile.compat.install("flash_attn_4")


# ---- the passes one by one


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "change",
    [{}, {"softcap": 2.0}, {"alibi_slopes": torch.full((4,), 0.2)}, {"dropout_p": 0.25}],
    ids=lambda x: next(iter(x), "plain"),
)
def test_passes_equal_the_differentiable_call(packed, change):
    p, softcap = change.get("dropout_p", 0.0), change.get("softcap", 0.0)
    alibi = change.get("alibi_slopes")
    if packed:
        tensors, lengths = packed_operands()
    else:
        tensors, lengths = operands(), ()
    prefix = "_flash_attn_varlen_" if packed else "_flash_attn_"
    with pantile.compat.install("flash_attn"):
        from flash_attn import flash_attn_interface

        forward = getattr(flash_attn_interface, f"{prefix}forward")
        backward = getattr(flash_attn_interface, f"{prefix}backward")
    how = (p, 0.3, True, 7, -1, softcap, alibi)
    out, lse, signed, rng_state = forward(*tensors, *lengths, *how, p > 0)
    leaves = [x.clone().requires_grad_() for x in tensors]
    named = {"causal": True, "window": (7, None), "scale": 0.3, "softcap": softcap or None}
    named |= {"alibi": alibi, "dropout": pantile.Dropout(p, seed=rng_state) if p else None}
    call = pantile.varlen_attention if packed else pantile.attention
    expected, expected_lse = call(*leaves, *lengths, return_lse=True, **named)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (signed.numel() > 0) == (p > 0)
    seed = torch.randn_like(out)
    places = [torch.full_like(x, torch.nan) for x in tensors]
    places[1] = None
    delta = backward(seed, *tensors, out, lse, *places, *lengths, *how, False, rng_state=rng_state)
    torch.testing.assert_close(delta, (seed * out).sum(-1).transpose(-1, -2))
    grads = torch.autograd.grad(expected, leaves, seed)
    for mine, other in ((places[0], grads[0]), (places[2], grads[2])):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_passes_refuse_by_name():
    from pantile.compat import _passes

    tensors, lengths = packed_operands()
    for name in ("block_table", "leftpad_k"):
        with pytest.raises(pantile.UnsupportedError, match=f"^{name} is "):
            _passes._flash_attn_varlen_forward(
                *tensors, *lengths, 0.0, None, False, **{name: SOMETHING}
            )
    o = torch.zeros_like(tensors[0])
    lse = torch.zeros(4, o.shape[0])
    with pytest.raises(ValueError, match="rng_state is None"):
        _passes._flash_attn_varlen_backward(
            *(o, *tensors, o, lse, None, None, None, *lengths),
            *(0.5, None, False, -1, -1, 0.0, None, False),
        )


# ---- torch.ops.flash_attn_3


def test_operators_stay_without_the_answer_of_install():
    program = (
        "import gc, torch, pantile.compat\n"
        "pantile.compat.install(operators=True)\n"
        "gc.collect()\n"
        "q = torch.randn(1, 9, 2, 8)\n"
        "torch.ops.flash_attn_3.fwd(q, q, q)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def flash_attn_3_operators():
    with pantile.compat.install("flash_attn_interface", operators=True):
        yield torch.ops.flash_attn_3
    assert not torch._C._dispatch_has_kernel("flash_attn_3::fwd")


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_operators_forward_and_backward(flash_attn_3_operators, softcap):
    q, k, v = operands()
    change = {"causal": True, "window": (9, None), "softcap": softcap or None}
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse = reference.attention(*wide, **change, dtype=torch.float64)
    given = torch.full_like(q, torch.nan)
    arguments = {"is_causal": True, "window_size_left": 9, "softcap": softcap}
    out, found, *_ = flash_attn_3_operators.fwd(q, k, v, out=given, **arguments)
    assert out.data_ptr() == given.data_ptr()
    torch.testing.assert_close(given.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), lse, atol=1e-5, rtol=1e-5)
    seed = torch.randn_like(q)
    places = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    flash_attn_3_operators.bwd(seed, q, k, v, out, found, *places, **arguments)
    for mine, other in zip(places, torch.autograd.grad(expected, wide, seed.double()), strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-4, rtol=1e-4)


def test_operators_take_dense_tensors_with_lengths(flash_attn_3_operators):
    q, k, v = operands()
    used = torch.tensor([45, 17], dtype=torch.int32)
    out, lse, *_ = flash_attn_3_operators.fwd(q, k, v, seqused_k=used, is_causal=True)
    seed = torch.randn_like(q)
    grads = flash_attn_3_operators.bwd(seed, q, k, v, out, lse, seqused_k=used, is_causal=True)[:3]
    for b in range(2):
        n = int(used[b])
        wide = [x.double()[None].requires_grad_() for x in (q[b], k[b, :n], v[b, :n])]
        expected, expected_lse = reference.attention(*wide, causal=True, dtype=torch.float64)
        torch.testing.assert_close(out[b].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[b].double(), expected_lse[0], atol=1e-5, rtol=1e-5)
        theirs = torch.autograd.grad(expected, wide, seed[b].double()[None])
        for mine, other, length in zip(grads, theirs, (37, n, n), strict=True):
            torch.testing.assert_close(mine[b, :length].double(), other[0], atol=1e-4, rtol=1e-4)
            assert not mine[b, length:].any()


def test_operators_refuse_by_name(flash_attn_3_operators):
    q, k, v = operands()
    for name in ("k_new", "page_table", "leftpad_k", "rotary_cos", "q_v", "kv_batch_idx"):
        with pytest.raises(pantile.UnsupportedError, match=f"^{name} is "):
            flash_attn_3_operators.fwd(q, k, v, **{name: SOMETHING})
    with pytest.raises(RuntimeError, match="defined already"):
        pantile.compat.install(operators=True)


def test_operators_are_traced(flash_attn_3_operators):
    def function(q, k, v):
        return flash_attn_3_operators.fwd(q, k, v, is_causal=True)[0] * 2.0

    q, k, v = operands()
    # "eager": AOTAutograd refuses schemas whose outputs alias arguments, whoever registers them.
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), function(q, k, v))


def test_doors_are_compiled_without_a_break():
    def function(q, k, v):
        return fa2.flash_attn_func(q, k, v, causal=True, softcap=3.0) + fa3.flash_attn_func(
            q, k, v, window_size=(4, 4)
        )

    q, k, v = operands(grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    seed = torch.randn(q.shape)
    ours = torch.autograd.grad(compiled(q, k, v), (q, k, v), seed)
    theirs = torch.autograd.grad(function(q, k, v), (q, k, v), seed)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
