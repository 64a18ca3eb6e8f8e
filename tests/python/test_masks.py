"""Masks beside the window: blocks, documents and bool tensors, against the textbook in float64."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import Target, assert_same_bits, dense, packed
from test_variants import arguments_of, assert_right, attend, serves

MASKS = ("blocks", "blocks_by_head", "blocks_of_64", "documents", "elements", "keys")


def mask_of(name: str, case, target: Target, seed: int = 3):
    """Some queries see nothing, some tiles are hidden, some shown whole."""
    generator = torch.Generator().manual_seed(seed)
    heads = case.q.shape[-2]
    if case.lengths:
        batch, (rows, keys) = case.lengths[0].shape[0] - 1, case.longest
    else:
        batch, rows, keys = case.q.shape[0], case.q.shape[1], case.k.shape[1]

    def coin(*shape):
        return (torch.rand(*shape, generator=generator) < 0.5).to(target.device)

    def blocks(block, *lead):
        return pantile.BlockMask(coin(*lead, -(-rows // block), -(-keys // block)), block)

    if name == "blocks":
        return blocks(128, batch, 1)
    if name == "blocks_by_head":
        return blocks(128, heads)
    if name == "blocks_of_64":
        return blocks(64, batch, heads)
    if name == "documents":
        ids = [
            (torch.arange(length) // 90 + torch.randint(0, 2, (batch, length), generator=generator))
            .to(torch.int32)
            .to(target.device)
            for length in (rows, keys)
        ]
        return pantile.Documents(*ids)
    if name == "keys":
        return coin(batch, 1, 1, keys)
    elements = coin(batch, heads, rows, keys)
    elements[:, :, rows // 2] = False
    elements[:, :, : rows // 3, : keys // 2] = True
    return elements


@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window": (150, 20)}], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_dense(target, name, window):
    case = dense(
        target, target.default_dtype, rows=270, keys=330, heads=2, heads_k=1, head_dim=16, **window
    )
    given = {"mask": mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("name", MASKS)
def test_packed(target, name):
    """Indices count from the start of a sequence."""
    case = packed(
        target, [150, 0, 65, 9], [140, 20, 200, 0], target.default_dtype, head_dim=16, causal=True
    )
    given = {"mask": mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_sixteen_bits(target, dtype, name):
    case = dense(target, dtype, batch=1, rows=300, keys=270, heads=2, head_dim=64, causal=True)
    given = {"mask": mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("name", MASKS)
def test_with_all_variants(target, name):
    case = dense(target, target.default_dtype, rows=170, keys=140, heads=2, head_dim=16)
    names = ("softcap", "alibi", "shared_bias", "sinks", "dropout")
    given = {**arguments_of(names, case, target), "mask": mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("name", ["blocks", "documents", "elements"])
def test_hidden_values_change_nothing(target, name, bad):
    """NaN and infinity in keys and values that the mask hides from every query."""
    case = dense(target, target.default_dtype, rows=200, keys=260, heads=2, head_dim=16)
    if name == "blocks":
        blocks = torch.ones(2, 3, dtype=torch.bool, device=target.device)
        blocks[:, 1] = False
        mask, hidden = pantile.BlockMask(blocks), slice(128, 256)
    elif name == "documents":
        ids = torch.zeros(260, dtype=torch.int32, device=target.device)
        ids[100:150] = 7
        mask, hidden = pantile.Documents(torch.zeros_like(ids[:200]), ids), slice(100, 150)
    else:
        mask = torch.ones(200, 260, dtype=torch.bool, device=target.device)
        mask[:, 3:50:2] = False
        hidden = slice(3, 50, 2)
    given = {"mask": mask}
    serves(case, target, given, True)

    def call(*x, **g):
        return case.ours(*x, options=target.options, **g)

    clean = attend(call, case, given)
    assert not clean["k"][:, hidden].any()
    assert not clean["v"][:, hidden].any()
    case.k[:, hidden] = bad
    case.v[:, hidden] = bad
    poisoned = attend(call, case, given)
    assert_same_bits(tuple(clean.values()), tuple(poisoned.values()), tuple(clean))


def test_a_mask_of_the_window_is_the_window(target):
    case = dense(target, target.default_dtype, rows=200, keys=200, head_dim=32)
    mask = torch.ones(200, 200, dtype=torch.bool, device=target.device).tril()
    serves(case, target, {"mask": mask}, False)
    masked = case.ours(*case.operands, options=target.options, mask=mask)
    causal = case.ours(*case.operands, options=target.options, causal=True)
    for a, b in zip(masked, causal, strict=True):
        torch.testing.assert_close(a, b)
    everything = case.ours(*case.operands, options=target.options, mask=torch.ones_like(mask))
    plain = case.ours(*case.operands, options=target.options)
    for a, b in zip(everything, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_and_vmap(target):
    case = dense(target, target.default_dtype, rows=140, keys=140, head_dim=16)
    serves(case, target, {"mask": mask_of("blocks", case, target)}, True)
    for name in ("blocks", "documents", "elements"):
        mask = mask_of(name, case, target)

        def call(q, k, v, mask=mask):
            return pantile.attention(q, k, v, mask=mask, options=target.options)

        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*case.operands), call(*case.operands))
    mask = mask_of("keys", case, target)[0, 0, 0]

    def one(q, k, v):
        return pantile.attention(q[None], k[None], v[None], mask=mask, options=target.options)[0]

    mapped = torch.func.vmap(one)(*case.operands)
    whole = pantile.attention(*case.operands, mask=mask, options=target.options)
    torch.testing.assert_close(mapped, whole)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.ones(37, 45), TypeError, r"^mask is .*; it must be a bool tensor, a"),
        (
            lambda: torch.ones(36, 45, dtype=torch.bool),
            ValueError,
            r"^mask has shape \[1, 1, 36, 45\]; it must be \[2, 4, 37, 45\], of which the first",
        ),
        (
            lambda: pantile.BlockMask(torch.ones(2, 1, dtype=torch.bool)),
            ValueError,
            r"^mask has shape \[1, 1, 2, 1\]; it must be \[2, 4, 1, 1\], of which the first",
        ),
        (
            lambda: pantile.BlockMask(torch.ones(1, 1, dtype=torch.bool), 96),
            ValueError,
            r"^block is 96; it must be 64 or 128",
        ),
        (
            lambda: pantile.BlockMask(torch.ones(1, 1)),
            TypeError,
            r"^blocks is .*; it must be a bool tensor",
        ),
        (
            lambda: pantile.Documents(torch.zeros(2, 37, dtype=torch.int32)),
            ValueError,
            r"^key_ids has shape \[2, 37\]; it must be \[2, 45\], of which the first may be 1",
        ),
        (
            lambda: pantile.Documents(torch.zeros(2, 37)),
            TypeError,
            r"^ids is .*; it must be an int32 tensor",
        ),
    ],
)
def test_refusals(make, error, message):
    case = dense(Target("cpu", "cpu"))
    with pytest.raises(error, match=message):
        pantile.attention(*case.operands, mask=make())


def test_numpy_arrays():
    case = dense(Target("cpu", "cpu"), rows=140, keys=140)
    for name in MASKS:
        mask = mask_of(name, case, Target("cpu", "cpu"))
        expected = pantile.attention(*case.operands, mask=mask)
        if isinstance(mask, pantile.BlockMask):
            mask = pantile.BlockMask(mask.blocks.numpy(), mask.block)
        elif isinstance(mask, pantile.Documents):
            mask = pantile.Documents(mask.ids.numpy(), mask.key_ids.numpy())
        else:
            mask = mask.numpy()
        o = pantile.attention(*(x.numpy() for x in case.operands), mask=mask)
        assert torch.equal(torch.from_numpy(o), expected)
