"""Masks beside the window (blocks, documents, prefixes, bool tensors and what & and | make of them)
against the textbook in float64."""

from __future__ import annotations

import operator

import pantile
import pytest
import torch
import torch._dynamo.testing
from pantile._mask_forms import CombinableMask, CombinedMask, compiled_mask
from support import Target, assert_same_bits, dense, packed
from test_variants import arguments_of, assert_right, attend, serves

FORMS = ("blocks", "blocks_by_head", "blocks_of_64", "documents", "elements", "keys", "prefix")
COMBINED = ("blocks and documents", "documents or prefix", "elements and prefix or blocks")
MASKS = FORMS + COMBINED


def mask_of(name: str, case, target: Target, seed: int = 3):
    """Some queries see nothing, some tiles are hidden, some shown whole."""
    for word, combine in ((" or ", operator.or_), (" and ", operator.and_)):
        if word in name:
            left, right = (mask_of(x, case, target, seed) for x in name.split(word))
            return (
                combine(left, right) if isinstance(left, CombinableMask) else combine(right, left)
            )
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
    if name == "prefix":
        lengths = torch.randint(0, keys + 1, (batch,), generator=generator)
        return pantile.Prefix(lengths.to(torch.int32).to(target.device))
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
        (
            lambda: pantile.Prefix(torch.zeros(3, dtype=torch.int32)),
            ValueError,
            r"^prefixes has shape \[3\]; it must be \[2\] or \[1\]",
        ),
        (
            lambda: pantile.Prefix(torch.zeros(2)),
            TypeError,
            r"^lengths is .*; it must be an int32 tensor",
        ),
        (
            lambda: pantile.Prefix(torch.zeros(2, dtype=torch.int32)) & torch.ones(37, 45),
            TypeError,
            r"^a side of & is .*; it must be a bool tensor, a pantile.BlockMask, a",
        ),
        (
            lambda: (
                pantile.Prefix(torch.zeros(2, dtype=torch.int32))
                | pantile.Prefix(torch.zeros(2, dtype=torch.int32))
            ),
            ValueError,
            r"^mask has two masks of the form Prefix; it must have one$",
        ),
    ],
)
def test_refusals(make, error, message):
    case = dense(Target("cpu", "cpu"))
    with pytest.raises(error, match=message):
        pantile.attention(*case.operands, mask=make())


@pytest.mark.parametrize(
    ("make", "forms", "clauses"),
    [
        (lambda b, e, d, p: b, "b", 0),
        (lambda b, e, d, p: b & d, "bd", 0),
        (lambda b, e, d, p: b | d, "bd", 0x41),
        (lambda b, e, d, p: d & p | e, "dep", 0xC2),
        (lambda b, e, d, p: (b | d) & (p | e), "bdep", 0xC963),
        (lambda b, e, d, p: b | b & d, "b", 0),
        (lambda b, e, d, p: (b | d) & b, "b", 0),
    ],
)
def test_clauses(make, forms, clauses):
    """Each is a set of forms, as bits of four; none holds another one."""
    blocks = pantile.BlockMask(torch.ones(1, 1, dtype=torch.bool))
    documents = pantile.Documents(torch.ones(3, dtype=torch.int32))
    prefix = pantile.Prefix(torch.ones(1, dtype=torch.int32))
    elements = torch.ones(3, 3, dtype=torch.bool)
    (mask, ids, _, tensor, lengths), (block, found) = compiled_mask(
        make(blocks, elements, documents, prefix)
    )
    assert found == clauses
    for name, x in zip("edbp", (mask, ids, tensor, lengths), strict=True):
        assert (x is not None) == (name in forms)
    assert block == (128 if "b" in forms else 0)


def test_numpy_arrays():
    case = dense(Target("cpu", "cpu"), rows=140, keys=140)
    for name in MASKS:
        mask = mask_of(name, case, Target("cpu", "cpu"))
        expected = pantile.attention(*case.operands, mask=mask)
        o = pantile.attention(*(x.numpy() for x in case.operands), mask=as_numpy(mask))
        assert torch.equal(torch.from_numpy(o), expected)


def as_numpy(mask):
    if isinstance(mask, CombinedMask):
        left, right = as_numpy(mask.left), as_numpy(mask.right)
        return left & right if mask.operator == "&" else left | right
    if isinstance(mask, pantile.BlockMask):
        return pantile.BlockMask(mask.blocks.numpy(), mask.block)
    if isinstance(mask, pantile.Documents):
        return pantile.Documents(mask.ids.numpy(), mask.key_ids.numpy())
    if isinstance(mask, pantile.Prefix):
        return pantile.Prefix(mask.lengths.numpy())
    return mask.numpy()


# ---- on a GPU: more tiles than multiprocessors, so that blocks claim tiles one after the other


def holes(case, target: Target) -> pantile.BlockMask:
    """Blocks with rows and columns that are empty: at the begin, in the middle and at the end."""
    rows, keys = (-(-x.shape[1] // 128) for x in (case.q, case.k))
    generator = torch.Generator().manual_seed(4)
    blocks = torch.rand(case.q.shape[2], rows, keys, generator=generator) < 0.4
    blocks[0, :3] = False
    blocks[1, -2:] = False
    blocks[2, rows // 2] = False
    blocks[3] = False
    blocks[:, :, 5] = False
    blocks[4:, :, -1] = False
    return pantile.BlockMask(blocks.to(target.device))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [{}, {"causal": True}, {"window": (700, 100)}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["holes", "documents", "elements", "documents or prefix"])
def test_many_tiles(name, dims, window):
    target = Target("hopper", "cuda")
    sizes = {"rows": 2305, "keys": 2177, "heads": 12, "heads_k": 4}
    case = dense(target, torch.bfloat16, 2, **sizes, head_dim=dims[0], head_dim_v=dims[1], **window)
    given = {"mask": holes(case, target) if name == "holes" else mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_many_packed_tiles(name):
    """A long sequence among short ones, some without queries or keys."""
    target = Target("hopper", "cuda")
    pairs = [(4097, 4097), *[(0, 5), (1, 0), (129, 700), (700, 129), (64, 64), (333, 1000)] * 4]
    case = packed(target, *(list(x) for x in zip(*pairs, strict=True)), torch.bfloat16, causal=True)
    given = {"mask": mask_of(name, case, target)}
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names", [("softcap",), ("alibi",), ("dropout",), ("sinks",), ("bias",)], ids="+".join
)
@pytest.mark.parametrize("name", ["holes", "documents", "elements"])
def test_many_tiles_with_variants(name, names):
    """Rows without keys among them: with a sink their LSE is the sink's."""
    target = Target("hopper", "cuda")
    sizes = {"rows": 1700, "keys": 1700, "heads": 8, "heads_k": 2, "head_dim": 128}
    case = dense(target, torch.bfloat16, 2, **sizes, causal=True)
    given = {"mask": holes(case, target) if name == "holes" else mask_of(name, case, target)}
    given |= arguments_of(names, case, target)
    serves(case, target, given, True)
    assert_right(case, target, given)


@pytest.mark.gpu
@pytest.mark.undisturbed
def test_lengths_and_values_compile_nothing_again():
    """Neither torch.compile nor NVRTC: the capture of a graph would fail where a kernel is new."""
    target = Target("hopper", "cuda")

    def call(q, k, v, ids):
        return pantile.attention(q, k, v, causal=True, mask=pantile.Documents(ids))

    def inputs(length):
        case = dense(target, torch.bfloat16, 1, length, length, head_dim=128)
        return *case.operands, torch.arange(length, device="cuda", dtype=torch.int32) // 100

    serves(dense(target, torch.bfloat16), target, {}, False)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    compiled(*inputs(300))
    frames = counter.frame_count
    for length in (500, 1031, 129):
        given = inputs(length)
        torch.testing.assert_close(compiled(*given), call(*given), rtol=0, atol=0)
    assert counter.frame_count == frames
    given = inputs(700)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(*given)
    for ids in (given[3].clone(), given[3] // 3, given[3].flip(0)):
        given[3].copy_(ids)
        graph.replay()
        torch.testing.assert_close(o, call(*given), rtol=0, atol=0)


@pytest.mark.gpu
def test_autocast():
    target = Target("hopper", "cuda")
    case = dense(target, torch.float32, rows=300, keys=300, head_dim=64)
    mask = mask_of("blocks", case, target)
    half = [x.to(torch.bfloat16) for x in case.operands]
    serves(dense(target, torch.bfloat16, rows=300, keys=300), target, {"mask": mask}, False)
    with torch.autocast("cuda", torch.bfloat16):
        o = pantile.attention(*case.operands, mask=mask, options=target.options)
    assert torch.equal(o, pantile.attention(*half, mask=mask, options=target.options))
