"""pantile.flex_attention: functions of scores and masks against a textbook in float64, which calls
the same functions, and against torch's own flex_attention."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile import _flex_masks, _flex_trace

flex = pytest.importorskip("torch.nn.attention.flex_attention")
BATCH, HEADS, ROWS, KEYS, DIM = 2, 4, 30, 30, 16
IDS = torch.tensor([[0] * 9 + [1] * 4 + [2] * 17, [5] * 20 + [4] * 10])
CHECKER = torch.tensor([[[[True]]]])


def tables() -> dict[str, torch.Tensor]:
    """What functions capture, in float64; those of real numbers get gradients."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "slope": 0.1 * normal(HEADS),
        "rel": normal(HEADS, 2 * KEYS),
        "table": normal(32, HEADS),
        "bias": normal(BATCH, HEADS, ROWS, KEYS),
        "gain": 1 + 0.2 * normal(()),
        "bucket": (torch.arange(2 * KEYS) - KEYS).abs().clamp(max=31),
    }


# Of the captured tensors, which the tests make in float32 and in float64.
SCORES = {
    "softcap": lambda t: lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "alibi": lambda t: lambda s, b, h, q, k: s + t["slope"][h] * (k - q),
    "relative": lambda t: lambda s, b, h, q, k: s + t["rel"][h, q - k + KEYS],
    "near": lambda t: lambda s, b, h, q, k: s + t["rel"][h, (q - k).abs().clamp(max=9)],
    "buckets": lambda t: lambda s, b, h, q, k: s + t["table"][t["bucket"][k - q + KEYS], h],
    "bias": lambda t: lambda s, b, h, q, k: s + t["bias"][b, h, q, k],
    "gain": lambda t: lambda s, b, h, q, k: t["gain"] * s,
    "of tensors": lambda t: lambda s, b, h, q, k: s - torch.exp(t["slope"])[h] * (q - k).abs(),
    "from the end": lambda t: lambda s, b, h, q, k: s + t["rel"][h, q - k],
    "causal": lambda t: lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "documents": lambda t: (
        lambda s, b, h, q, k: torch.where(IDS[b, q] == IDS[b, k], s, float("-inf"))
    ),
    "everything": lambda t: (
        lambda s, b, h, q, k: (
            torch.maximum(s, torch.sigmoid(s)) ** 2 / (1 + s.square())
            + torch.log1p((q - k).abs().float())
            + torch.where((q // 3 + k) % 2 == 0, torch.exp2(s * 0.1), torch.sqrt(1 + s.abs()))
            - ((q > k) | (b == 1)).float() * torch.minimum(s, 1.0 - s)
            + torch.clamp(s, min=-1.0, max=2.0).masked_fill(~(q < 5), 0.5)
            + torch.relu(s) * (h + 1.0) ** -1
        )
    ),
}


def causal(b, h, q, k):
    return q >= k


def document(b, h, q, k):
    return IDS[b, q] == IDS[b, k]


def window(b, h, q, k):
    return (q - k <= 5) & (k - q <= 2)


def strict(b, h, q, k):
    return q > k - 1


def prefix(b, h, q, k):
    return (k < 7) | (q >= k)


def stripes(b, h, q, k):
    return (q + k) % 3 != h % 3


def blocks(b, h, q, k):
    return (q // 64 + k // 64) % 2 == 0


MASKS = {
    "causal": [causal],
    "strict": [strict],
    "window": [window],
    "window and causal": [window, causal],
    "documents": [document],
    "causal documents": [causal, document],
    "prefix": [prefix],
    "stripes": [stripes],
    "causal stripes": [causal, stripes],
    "documents in a prefix": [document, prefix],
}


def operands(rows=ROWS, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, rows, DIM), (BATCH, 2, keys, DIM), (BATCH, 2, keys, DIM)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def textbook(q, k, v, score_mod=None, mask_mods=()):
    """(o, lse) of functions that are called with all pairs at once."""
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    axes = [torch.arange(n) for n in scores.shape]
    pair = [x.reshape([-1 if i == at else 1 for i in range(4)]) for at, x in enumerate(axes)]
    if score_mod is not None:
        scores = score_mod(scores, *pair)
    for mask_mod in mask_mods:
        scores = scores.masked_fill(~mask_mod(*pair).expand(scores.shape), -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return weights @ v.repeat_interleave(2, 1), scores.logsumexp(-1)


def check(ours, score_mod=None, mask_mods=(), score=None, captured=(), rows=ROWS, keys=KEYS):
    """Outputs and gradients of ``ours``: its block mask. ``captured``: (leaf, leaf in float64)."""
    q, k, v = operands(rows, keys)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, rows_lse = textbook(*wide, score_mod, mask_mods)
    o, lse = pantile.flex_attention(
        q, k, v, score, block_mask=ours, enable_gqa=True, return_lse=True, scale=0.3
    )
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), rows_lse, atol=1e-5, rtol=1e-5)
    seed = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad(o, (q, k, v, *(x for x, _ in captured)), seed)
    others = torch.autograd.grad(expected, (*wide, *(x for _, x in captured)), seed.double())
    for mine, other in zip(grads, others, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name):
    wide = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in tables().items()}
    narrow = {
        n: x.detach().float().requires_grad_() if x.is_floating_point() else x
        for n, x in wide.items()
    }
    probe = textbook(*(x.double() for x in operands()), SCORES[name](wide))[0]
    used = torch.autograd.grad(
        probe.sum(), [x for x in wide.values() if x.requires_grad], allow_unused=True
    )
    names = [n for n, x in wide.items() if x.requires_grad]
    captured = [
        (narrow[n], wide[n]) for n, grad in zip(names, used, strict=True) if grad is not None
    ]
    check(None, SCORES[name](wide), score=SCORES[name](narrow), captured=captured)


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_torch(name):
    mask_mods = MASKS[name]
    made = flex.create_block_mask(
        flex.and_masks(*mask_mods), BATCH, HEADS, ROWS, KEYS, device="cpu"
    )
    check(made, None, mask_mods)


@pytest.mark.parametrize(("rows", "keys"), [(140, 300), (300, 140)])
@pytest.mark.parametrize("name", ["causal", "window", "prefix", "stripes"])
def test_masks_of_other_lengths(name, rows, keys):
    """Indices count from the start, which is not the alignment of pantile.attention."""
    made = flex.create_block_mask(
        flex.and_masks(*MASKS[name]), None, None, rows, keys, device="cpu", BLOCK_SIZE=64
    )
    check(made, None, MASKS[name], rows=rows, keys=keys)


def test_score_and_mask_together():
    slope = tables()["slope"]
    mine, wide = slope.float().requires_grad_(), slope.requires_grad_()
    made = flex.create_block_mask(stripes, None, HEADS, ROWS, KEYS, device="cpu")
    check(
        made,
        lambda s, b, h, q, k: torch.tanh(s) + wide[h] * (q - k),
        [stripes],
        lambda s, b, h, q, k: torch.tanh(s) + mine[h] * (q - k),
        [(mine, wide)],
    )


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("mask_mod", [None, causal, stripes])
def test_listed_blocks_are_the_mask(size, mask_mod):
    """A mask may list fewer blocks than its function shows."""
    rows = keys = 300
    count = -(-rows // size)
    generator = torch.Generator().manual_seed(1)
    listed = torch.rand(1, 2, count, count, generator=generator) < 0.6
    listed[..., 0] = True
    numbers = listed.sum(-1).int()
    order = torch.argsort(~listed, dim=-1, stable=True).int()
    made = flex.BlockMask.from_kv_blocks(
        numbers.repeat_interleave(2, 1),
        order.repeat_interleave(2, 1),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(rows, keys),
    )
    whole = listed.repeat_interleave(2, 1)

    def in_lists(b, h, q, k):
        return whole[b * 0, h, q // size, k // size]

    check(made, None, [in_lists, *([] if mask_mod is None else [mask_mod])], rows=300, keys=300)


@pytest.mark.parametrize("name", ["softcap", "alibi", "relative", "buckets", "causal"])
def test_equals_torch(monkeypatch, name):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in tables().items()}
    q, k, v = (x.detach() for x in operands())
    made = flex.create_block_mask(document, BATCH, None, ROWS, KEYS, device="cpu")
    arguments = (q, k, v, SCORES[name](narrow), made)
    named = {"enable_gqa": True, "return_lse": True}
    expected, expected_lse = flex.flex_attention(*arguments, **named)
    o, lse = pantile.flex_attention(*arguments, **named)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


# ---- masks of pantile, and what is found in functions


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, []),
        (pantile.FlexMask(causal=True), [causal]),
        (pantile.FlexMask(window=(5, 2)), [window]),
        (pantile.Documents(IDS.int()), [document]),
        (pantile.FlexMask(causal=True, mask=pantile.Documents(IDS.int())), [causal, document]),
        (pantile.BlockMask(CHECKER, 64), [blocks]),
        (pantile.Mask("(i + j) % 3 != h % 3"), [stripes]),
    ],
    ids=["none", "causal", "window", "documents", "causal_documents", "blocks", "expression"],
)
def test_masks_of_pantile(ours, theirs):
    check(ours, None, theirs)


def found_in(mask_mod, rows=ROWS, keys=KEYS):
    made = flex.create_block_mask(mask_mod, BATCH, None, rows, keys, device="cpu")
    return _flex_masks.masks_of(made, BATCH, rows, keys)


def test_what_kernels_know_is_found():
    """It runs without compiling a mask, and skips tiles."""
    assert found_in(causal) == found_in(strict) == (None, 0, None)
    assert found_in(window) == (5, 2, None)
    assert found_in(flex.and_masks(window, causal)) == (5, 0, None)
    assert found_in(lambda b, h, q, k: k - q < 3) == (None, 2, None)
    assert found_in(lambda b, h, q, k: ~(k - q >= 3)).right is None
    assert isinstance(found_in(causal, 30, 50).mask, pantile.Mask)
    assert found_in(causal, 50, 30) == (None, 20, None)
    assert found_in(lambda b, h, q, k: q + 20 >= k, 30, 50) == (None, 0, None)
    left, right, mask = found_in(flex.and_masks(causal, document))
    assert (left, right) == (None, 0)
    assert isinstance(mask.left, pantile.Documents)
    assert isinstance(found_in(stripes).mask, pantile.Mask)
    assert isinstance(found_in(flex.and_masks(document, stripes)).mask, pantile.Mask)


def test_captured_tensors_are_captured_once():
    slope = torch.rand(HEADS)
    score = _flex_masks.score_of(lambda s, b, h, q, k: s + slope[h] * q - slope[h] * k)
    assert score.tensors == {"t0": slope}
    assert score.text.count("t0[h]") == 1
    rel = torch.rand(HEADS, 40)
    whole = _flex_masks.score_of(lambda s, b, h, q, k: s + rel[h, q])
    assert _flex_masks.score_of(lambda s, b, h, q, k: s + rel[h][q]).text == whole.text
    ids = torch.zeros(4, dtype=torch.int64)
    first = _flex_masks.score_of(lambda s, b, h, q, k: s + ids[h]).tensors["t0"]
    assert first.dtype is torch.int32
    assert _flex_masks.score_of(lambda s, b, h, q, k: s + ids[h]).tensors["t0"] is first
    ids += 1
    assert _flex_masks.score_of(lambda s, b, h, q, k: s + ids[h]).tensors["t0"][0] == 1


# ---- refusals

TABLE = torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, h, q, k: torch.sin(s), "sin is not traced"),
        (lambda s, b, h, q, k: torch.floor(s), "floor is not traced"),
        (lambda s, b, h, q, k: s.cumsum(0), "cumsum is not traced"),
        (lambda s, b, h, q, k: torch.add(s, 1, alpha=2), "add with alpha is not traced"),
        (lambda s, b, h, q, k: torch.div(s, 2, rounding_mode="trunc"), "rounding_mode 'trunc'"),
        (lambda s, b, h, q, k: s**2.5, "pow with the exponent 2.5"),
        (lambda s, b, h, q, k: 2.0**s, "pow with an exponent that hangs on the pair"),
        (lambda s, b, h, q, k: s // 2, "// of real numbers"),
        (lambda s, b, h, q, k: s if q >= k else -s, "a condition depends on the pair"),
        (lambda s, b, h, q, k: s + int(q), "used as a number of Python"),
        (lambda s, b, h, q, k: s + TABLE[h], "1 axes of a captured tensor"),
        (lambda s, b, h, q, k: s + TABLE[h, :], "is indexed with slice"),
        (lambda s, b, h, q, k: s + TABLE, r"a tensor of shape \[4, 8\] stands beside"),
        (lambda s, b, h, q, k: s + TABLE[h, s], "an index is a real number"),
        (lambda s, b, h, q, k: s + TABLE.double()[h, 0], "dtype float64"),
        (lambda s, b, h, q, k: s.half(), "half is not traced"),
        (lambda s, b, h, q, k: s.to(torch.bfloat16), "conversion to bfloat16"),
        (lambda s, b, h, q, k: s.long(), "converted to int32 is a real number"),
        (lambda s, b, h, q, k: s + float("nan"), "the number nan"),
        (lambda s, b, h, q, k: s + q * 2**40, "integers have 32 bits"),
        (lambda s, b, h, q, k: torch.where(s, s, s), "the condition of where is a number"),
        (lambda s, b, h, q, k: s + "x", "may use numbers and tensors"),
    ],
)
def test_what_is_not_traced_is_named(function, message):
    x = torch.randn(1, 4, 8, 16)
    with pytest.raises(pantile.UnsupportedError, match=f"score_mod cannot be traced: .*{message}"):
        pantile.flex_attention(x, x, x, function)


def test_refusals():
    x = torch.randn(1, 2, 8, 16)
    made = flex.create_block_mask(causal, None, None, 8, 8, device="cpu")
    for mask in (made, pantile.FlexMask(causal=True)):
        with pytest.raises(ValueError, match="enable_gqa is False"):
            pantile.flex_attention(torch.randn(1, 4, 8, 16), x, x, block_mask=mask)
    with pytest.raises(ValueError, match="block_mask is of 8 queries and 8 keys"):
        pantile.flex_attention(x[:, :, :5], x, x, block_mask=made)
    rounded = flex.create_block_mask(causal, None, None, 8, 8, device="cpu")
    rounded.mask_mod = lambda b, h, q, k: torch.round(q * 1.0) >= k
    with pytest.raises(pantile.UnsupportedError, match="mask_mod cannot be traced: round"):
        pantile.flex_attention(x, x, x, block_mask=rounded)
    with pytest.raises(TypeError, match="score_mod gives a condition"):
        pantile.flex_attention(x, x, x, lambda s, b, h, q, k: q >= k)
    with pytest.raises(TypeError, match="score_mod is 3"):
        pantile.flex_attention(x, x, x, 3)
    with pytest.raises(TypeError, match="block_mask is 3"):
        pantile.flex_attention(x, x, x, block_mask=3)
    with pytest.raises(TypeError, match="enable_gqa is 1"):
        pantile.flex_attention(x, x, x, enable_gqa=1)
    with pytest.raises(IndexError, match="index 9 is out of"):
        pantile.flex_attention(x, x, x, lambda s, b, h, q, k: s + TABLE[h, 9])
    wide = torch.tensor([2**40] * 2)
    with pytest.raises(ValueError, match="must fit into int32"):
        pantile.flex_attention(x, x, x, lambda s, b, h, q, k: s + wide[h])
    pantile.flex_attention(x, x, x, kernel_options={"BLOCK_M": 64, "fwd_num_stages": 2})
    with pytest.raises(pantile.UnsupportedError, match="kernel_options has 'SPARSE'"):
        pantile.flex_attention(x, x, x, kernel_options={"SPARSE": 1})


@pytest.mark.skipif(not hasattr(flex, "AuxRequest"), reason="this torch has no AuxRequest")
def test_aux_outputs():
    x = torch.randn(1, 2, 8, 16)
    o, aux = pantile.flex_attention(x, x, x, return_aux=flex.AuxRequest(lse=True))
    expected, lse = pantile.flex_attention(x, x, x, return_lse=True)
    assert torch.equal(o, expected)
    assert torch.equal(aux.lse, lse)
    assert aux.max_scores is None
    with pytest.raises(pantile.UnsupportedError, match="max_scores"):
        pantile.flex_attention(x, x, x, return_aux=flex.AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="return_lse and return_aux"):
        pantile.flex_attention(x, x, x, return_lse=True, return_aux=flex.AuxRequest(lse=True))


def test_every_sign_is_one_of_the_language():
    """The texts of the tracer are parsed by the library, with the kinds that it assumes."""
    for name in _flex_trace._UNARY:
        score = _flex_masks.score_of(
            lambda s, b, h, q, k, name=name: (
                s + getattr(q >= k if "not" in name or name == "invert" else q, name)() * 1.0
            )
        )
        assert score.text
