"""Ranges, pages, caches and expressions where their own files do not go: more tiles than the device
has multiprocessors or threads, unequal and odd head dims, torch.vmap and autocast."""

from __future__ import annotations

import functools
import operator

import pantile
import pytest
import test_decode
import test_expressions
import torch
from support import Target, assert_same_bits, bits, dense, packed
from test_key_places import bound_mask, check, ints, offsets, paged, require, textbook

CPU = Target("cpu", "cpu")
DIMS = [(57, 40), (64, 128), (3, 5)]  # odd, larger, tiny


def places(target: Target, kind: str, sequences: int = 4, dims=(64, 64), stretch: int = 1):
    """(q, k, v, arguments, keywords, keys of each sequence) of ranges or of pages: some sequences
    have no rows, some no keys."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(70, 90), (0, 20), (9, 0), (133, 160)] * (sequences // 4)
    rows, keys = ([n * stretch for n in side] for side in zip(*lengths, strict=True))
    heads_k = 2
    q = torch.randn(sum(rows), 4, dims[0], generator=generator)
    q = q.to(target.device, target.default_dtype)
    if kind == "pages":
        k, _, table, first = paged(target, keys, 16, dims[0], dtype=q.dtype)
        v, _, same, second = paged(target, keys, 16, dims[1], dtype=q.dtype)
        assert torch.equal(table, same)
        of = [(a[0], b[0]) for a, b in zip(first, second, strict=True)]
        where = {"block_table": table}
    else:
        total = 40 + max(keys)
        k, v = (
            torch.randn(total, heads_k, d, generator=generator).to(q.device, q.dtype) for d in dims
        )
        begins = [3 * b % 40 for b in range(len(keys))]
        of = [(k[a : a + n], v[a : a + n]) for a, n in zip(begins, keys, strict=True)]
        where = {"k_begin": ints(begins, target)}
    where["seqused_k"] = ints(keys, target)
    where["mask_shift"] = ints([n - m + 1 for m, n in zip(rows, keys, strict=True)], target)
    return q, k, v, (offsets(rows, target), None, max(rows), max(keys)), where, (rows, of)


def run(found, target: Target, **more):
    q, k, v, arguments, where, _ = found
    more = {"causal": True, "options": target.options, **more}
    return pantile.varlen_attention(q, k, v, *arguments, **where, **more)


def compare(target: Target, found) -> None:
    q, k, v, arguments, where, (rows, of) = found
    require(target, q, k, v, *arguments, **where, causal=True)
    shifts = where["mask_shift"].tolist()
    exact, rounded = (
        textbook(q, lambda b: of[b], rows, shifts, dtype, causal=True)
        for dtype in (torch.float64, q.dtype)
    )
    check(run(found, target, return_lse=True), exact, rounded, q.dtype)


kinds = pytest.mark.parametrize("kind", ["ranges", "pages"])


@kinds
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_unequal_head_dims_of_places(target, kind, dims):
    compare(target, places(target, kind, dims=dims))


@kinds
def test_more_tiles_of_places_than_the_device_holds(target, kind):
    """On a GPU every multiprocessor takes a third tile; on the CPU threads share what is there."""
    if target.backend == "reference":
        pytest.skip("it has no tiles")
    sequences = 8 if target.device == "cpu" else 160
    compare(target, places(target, kind, sequences))


@kinds
def test_bits_of_places_do_not_depend_on_threads(kind):
    found = places(CPU, kind, 8)
    results = []
    for threads in (1, 4):
        with threads_of(threads):
            results.append(run(found, CPU, return_lse=True))
    for other in results[1:]:
        assert_same_bits(results[0], other, ("o", "lse"))


class threads_of:  # noqa: N801
    """A number of threads for the CPU backend, while it lasts."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["softcap", "everything"])
def test_unequal_head_dims_of_scores(target, name, dims):
    sizes = test_expressions.lengths(target, 70, 90)
    form = {"head_dim": dims[0], "head_dim_v": dims[1], "causal": True}
    test_expressions.check(dense(target, target.default_dtype, **sizes, **form), target, name)


@pytest.mark.parametrize("dims", DIMS[:1], ids=str)
@pytest.mark.parametrize("name", test_expressions.MASKS)
def test_unequal_head_dims_of_masks(target, name, dims):
    part = 4 if target.backend == "reference" else 1
    rows, keys = [37 // part, 0, 90 // part], [45 // part, 20, 70 // part]
    form = {"head_dim": dims[0], "head_dim_v": dims[1]}
    case = packed(target, rows, keys, target.default_dtype, **form)
    test_expressions.check(case, target, mask=name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi", "relative"])
def test_more_tiles_of_scores_than_multiprocessors(name):
    target = Target("hopper", "cuda")
    case = dense(target, torch.bfloat16, batch=8, rows=1100, keys=1300, heads=8, causal=True)
    test_expressions.check(case, target, name)


# ---- masks and scores beside places of keys

SCORES = {
    "relative": (
        "s + slope[h] * abs(i - j)",
        lambda s, h, i, j, slope: s + slope[h] * (i - j).abs(),
    ),
    "tanh": (
        "3 * tanh(s / 3) + slope[h] * j",
        lambda s, h, i, j, slope: 3 * (s / 3).tanh() + slope[h] * j,
    ),
}
# What a mask of each kind shows of sequence b: bool, to be broadcast to [heads, rows, keys].
# `at`: the key position of each query.
SHOWS = {
    "chunks": lambda m, b, h, i, j, at: j // 24 == at // 24,
    "stripes": lambda m, b, h, i, j, at: (i + j) % 3 != h % 3,
    "blocks": lambda m, b, h, i, j, at: m["blocks"][b, 0, i // 128, j // 128],
    "documents": lambda m, b, h, i, j, at: m["query_ids"][b, i] == m["key_ids"][b, j],
    "prefix": lambda m, b, h, i, j, at: (j < m["prefix"][b]) | (j <= at),
    "elements": lambda m, b, h, i, j, at: m["elements"][b, h, i, j],
}


def mask_tensors(target: Target, batch: int, rows: int, keys: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def whole(high, *shape):
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    found = {
        "blocks": whole(2, batch, 1, -(-rows // 128), -(-keys // 128)).bool(),
        "query_ids": torch.arange(rows) // 50 + whole(2, batch, rows),
        "key_ids": torch.arange(keys) // 50 + whole(2, batch, keys),
        "prefix": whole(keys, batch),
        "elements": whole(2, batch, 4, rows, keys).bool(),
        "slope": torch.randn(4, generator=generator) / 8,
    }
    found["elements"][:, :, : rows // 3, : keys // 2] = True
    return {n: (x.int() if "ids" in n else x).to(target.device) for n, x in found.items()}


def mask_of(name: str, tensors: dict, shift: torch.Tensor):
    if " or " in name:
        return functools.reduce(
            operator.or_, (mask_of(x, tensors, shift) for x in name.split(" or "))
        )
    return {
        "chunks": lambda: pantile.Mask("(i + shift[b]) // 24 == j // 24", shift=shift),
        "stripes": lambda: pantile.Mask("(i + j) % 3 != h % 3"),
        "blocks": lambda: pantile.BlockMask(tensors["blocks"]),
        "documents": lambda: pantile.Documents(tensors["query_ids"], tensors["key_ids"]),
        "prefix": lambda: pantile.Prefix(tensors["prefix"]),
        "elements": lambda: tensors["elements"],
    }[name]()


def masked_textbook(found, mask, score, window, softcap, tensors, dtype):
    """(o, lse) packed, over the keys that a sequence has, wherever they lie."""
    q, _, _, _, where, (rows, of) = found
    shifts = where["mask_shift"].tolist()
    outputs, logs, start = [], [], 0
    for b, (count, (k, v)) in enumerate(zip(rows, of, strict=True)):
        qs = q[start : start + count].to(dtype)
        ks, vs = (x.to(dtype).repeat_interleave(2, 1) for x in (k, v))
        start += count
        s = torch.einsum("ihd,jhd->hij", qs, ks) * q.shape[-1] ** -0.5
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        h, i, j = (
            torch.arange(n, device=q.device).view([-1 if axis == a else 1 for a in range(3)])
            for axis, n in enumerate(s.shape)
        )
        if score is not None:
            s = SCORES[score][1](s, h, i, j, tensors["slope"].to(dtype))
        shown = bound_mask(
            count, len(k), shifts[b], window.get("causal"), window.get("window"), q.device
        )
        if mask is not None:
            parts = [SHOWS[x](tensors, b, h, i, j, i + shifts[b]) for x in mask.split(" or ")]
            shown = shown & functools.reduce(operator.or_, parts)
        s = s.masked_fill(~shown, -torch.inf)
        lse = torch.logsumexp(s, -1) if len(k) else s.new_full(s.shape[:2], -torch.inf)
        weights = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        outputs.append(torch.einsum("hij,jhd->ihd", weights, vs))
        logs.append(lse)
    return torch.cat(outputs), torch.cat(logs, -1)


BESIDE = [
    ("chunks", None, {"causal": True}, None),
    ("chunks", None, {"window": (23, 23)}, 5.0),
    ("stripes", "relative", {}, None),
    (None, "tanh", {"causal": True}, None),
    ("blocks", None, {"causal": True}, None),
    ("documents", "relative", {"window": (90, 9)}, None),
    ("prefix", None, {}, 5.0),
    ("elements", None, {}, None),
    ("documents or prefix", "tanh", {}, None),
]


@kinds
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(("mask", "score", "window", "softcap"), BESIDE, ids=str)
def test_masks_and_scores_of_places(target, kind, dims, mask, score, window, softcap):
    if target.backend == "reference" and (dims != (64, 64) or kind != "pages" or mask != "prefix"):
        pytest.skip("the reference is slow, and takes pairs one by one")
    if target.device == "cpu" and dims != (64, 64):
        pytest.skip("one way for all head dims")
    found = places(target, kind, 4, dims, stretch=1 if target.device == "cpu" else 3)
    q, k, v, arguments, where, _ = found
    tensors = mask_tensors(target, 4, arguments[2], arguments[3])
    given = {**window}
    if mask is not None:
        given["mask"] = mask_of(mask, tensors, where["mask_shift"])
    if score is not None:
        given["score"] = pantile.Score(SCORES[score][0], slope=tensors["slope"])
    if softcap is not None:
        given["softcap"] = softcap
    plan = pantile.explain(q, k, v, *arguments, **where, **given, options=target.options)
    if plan.forward.kernel is None:
        assert target.device != "cpu", plan.forward.reason
        pytest.skip(plan.forward.reason[:300])
    result = pantile.varlen_attention(
        *(q, k, v, *arguments), **where, **given, return_lse=True, options=target.options
    )
    exact, rounded = (
        masked_textbook(found, mask, score, window, softcap, tensors, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    check(result, exact, rounded, q.dtype)


@kinds
def test_nonfinite_values_behind_a_mask_of_places(target, kind):
    """A value that the mask shows to some queries only: the others stay finite."""
    found = places(target, kind)
    q, k, v, arguments, where, (rows, _) = found
    if target.backend == "reference":
        pytest.skip("the reference is slow")
    given = {"mask": pantile.Mask("i % 2 == 0 or j > 40"), "options": target.options}
    plan = pantile.explain(q, k, v, *arguments, **where, **given)
    if plan.forward.kernel is None:
        pytest.skip(plan.forward.reason[:300])
    if kind == "pages":
        v[int(where["block_table"][3, 2]), 5, 0] = float("inf")  # key 37
    else:
        v[int(where["k_begin"][3]) + 37, 0] = float("inf")
    o = pantile.varlen_attention(q, k, v, *arguments, **where, **given)[sum(rows[:3]) :]
    assert o[0::2, :2].isinf().all()
    assert o[1::2].isfinite().all()
    assert o[0::2, 2:].isfinite().all()


# ---- torch.vmap, autocast


@kinds
def test_vmap_of_places(kind):
    """Over queries, keys and lengths: as one by one; gradients too, where there are some."""
    q, k, v, arguments, where, _ = places(CPU, kind)
    fewer = {**where, "seqused_k": where["seqused_k"] // 2}

    def call(q, k, v, used):
        return pantile.varlen_attention(
            *(q, k, v, *arguments), **{**where, "seqused_k": used}, causal=True
        )

    many = [torch.stack(x) for x in ((q, -q), (k, 2 * k), (v, v + 1))]
    used = torch.stack([where["seqused_k"], fewer["seqused_k"]])
    for found, *one in zip(torch.vmap(call)(*many, used), *many, used, strict=True):
        assert torch.equal(bits(found), bits(call(*one)))
    shared = torch.vmap(call, (0, None, None, None))(many[0], k, v, used[0])
    assert torch.equal(bits(shared[1]), bits(call(many[0][1], k, v, used[0])))
    if kind == "pages":
        return

    def loss(*x):
        return call(*x, used[0]).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*many)
    for i in range(2):
        leaves = [x[i].clone().requires_grad_() for x in many]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for grads, one in zip(mapped, expected, strict=True):
            torch.testing.assert_close(grads[i], one)


@kinds
def test_autocast_of_places(kind):
    """Operands take the autocast dtype, as in attention()."""
    found = places(CPU, kind)
    expected = run(tuple(x.bfloat16() for x in found[:3]) + found[3:], CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bits(run(found, CPU)), bits(expected))


def cache_case(**more):
    return test_decode.make(CPU, [20, 0, 37], room=4, **more)


def test_vmap_of_decode():
    case = cache_case(queries=2)
    many = torch.stack([case.q, -case.q])
    decode = functools.partial(pantile.decode, cache=case.cache, lengths=case.lengths)
    found = torch.vmap(lambda q: decode(q, return_lse=True))(many)
    for i in range(2):
        for one, expected in zip(found, decode(many[i], return_lse=True), strict=True):
            assert torch.equal(bits(one[i]), bits(expected))
    fewer = torch.stack([case.lengths, case.lengths // 2])
    mapped = torch.vmap(lambda n: pantile.decode(case.q, case.cache, n))(fewer)
    assert torch.equal(mapped[1], pantile.decode(case.q, case.cache, fewer[1]))
    with pytest.raises(pantile.UnsupportedError, match=r"decode_schedule has no torch\.vmap"):
        torch.vmap(lambda q: pantile.decode_schedule(q, case.cache, case.lengths))(many)


def test_vmap_of_append():
    """Each entry with a cache of its own; into one that they share it is refused."""
    case = cache_case()
    cache, rows = case.cache, test_decode.new_rows(case, 2)
    many = [torch.stack([x, 3 * x]) for x in rows]

    def write(k_new, v_new, k, v):
        own = pantile.KVCache(k, v, block_table=cache.block_table)
        pantile.append(own, k_new, v_new, case.lengths)
        return k_new

    caches = [torch.stack([x, x]) for x in (cache.k, cache.v)]
    torch.vmap(write)(*many, *caches)
    for i in range(2):
        own = [x.clone() for x in (cache.k, cache.v)]
        write(*(x[i] for x in many), *own)
        for x, expected in zip(caches, own, strict=True):
            assert torch.equal(bits(x[i]), bits(expected))
    before = cache.k.clone()
    with pytest.raises(pantile.UnsupportedError, match=r"writes to cache\.k, which torch\.vmap"):
        torch.vmap(lambda k, v: write(k, v, cache.k, cache.v))(*many)
    assert torch.equal(bits(cache.k), bits(before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_caches_as_they_are(dtype):
    """The cache has a dtype of its own, and queries and new rows have that one: nothing is cast,
    and a query of another dtype is refused by name, before anything is written."""
    case = cache_case(dtype=dtype)
    rows = test_decode.new_rows(case, 1)
    before = [x.clone() for x in (case.cache.k, case.cache.v)]
    expected = case.decode(CPU, k_new=rows[0], v_new=rows[1])
    written = [x.clone() for x in (case.cache.k, case.cache.v)]
    for x, old in zip((case.cache.k, case.cache.v), before, strict=True):
        x.copy_(old)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="it must be the dtype of"):
            case.decode(CPU, k_new=rows[0].to(other), v_new=rows[1].to(other))
        assert torch.equal(bits(case.cache.k), bits(before[0]))
        assert torch.equal(case.decode(CPU, k_new=rows[0], v_new=rows[1]), expected)
    for x, new in zip((case.cache.k, case.cache.v), written, strict=True):
        assert torch.equal(bits(x), bits(new))
