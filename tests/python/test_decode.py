"""Decode and append over a cache, against the textbook in float64 over gathered keys.

Every slot that no sequence uses, and every page that none names, holds NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

import pantile
import pytest
import torch
from pantile import KVCache
from support import Target

E4M3 = torch.float8_e4m3fn
POISON = {torch.int8: 127, E4M3: float("nan")}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype is b.dtype
    assert torch.equal(*(x.contiguous().view(torch.int8) for x in (a, b)))


def poison(x: torch.Tensor) -> None:
    x.copy_(torch.full_like(x, 0.0, dtype=torch.float32).add(POISON.get(x.dtype, math.nan)))


@dataclass
class Case:
    """A cache, its sequences, and the queries of a step."""

    q: torch.Tensor
    cache: KVCache
    lengths: torch.Tensor
    arguments: dict = field(default_factory=dict)

    def decode(self, target: Target, **extra):
        options = pantile.Options(backend=target.backend, checked=True)
        arguments = {**self.arguments, "options": options, **extra}
        try:
            return pantile.decode(self.q, self.cache, self.lengths, **arguments)
        except pantile.UnsupportedError as refusal:
            if target.device == "cpu":
                raise
            pytest.skip(str(refusal))


def make(
    target: Target,
    lengths: list[int],
    *,
    queries: int = 1,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    page: int | None = 16,
    layout: str = "NHD",
    dtype: torch.dtype | None = None,
    coded: torch.dtype | None = None,
    scales: str | None = None,
    latent: bool = False,
    leftpad: list[int] | None = None,
    index: list[int] | None = None,
    room: int = 0,
    seed: int = 0,
    **arguments,
) -> Case:
    """Sequences of these lengths with random keys; ``room``: slots for more."""
    generator = torch.Generator().manual_seed(seed)
    dtype = target.default_dtype if dtype is None else dtype
    device = target.device
    most = max([*lengths, 1]) + room
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    form = {
        "head_dim_v": head_dim_v,
        "dtype": coded or dtype,
        "device": device,
        "layout": layout,
        "scales": scales,
        "latent": latent,
    }
    rows = list(range(len(lengths))) if index is None else index
    row_count = max([*rows, 0]) + 1
    table = None
    if page is None:
        cache = KVCache.dense(row_count, most, heads_k, head_dim, **form)
    else:
        columns = -(-most // page)
        pages = row_count * columns + 3
        names = torch.randperm(pages, generator=generator)[: row_count * columns]
        table = names.reshape(row_count, columns).to(device, torch.int32)
        cache = KVCache.paged(pages, page, heads_k, head_dim, block_table=table, **form)
    for x in (cache.k, cache.v, cache.scale_k, cache.scale_v):
        if x is not None and not (x.dtype is torch.float32 and x.ndim < 3):
            poison(x)
    case = Case(
        torch.randn(len(lengths), queries, heads, head_dim, generator=generator).to(device, dtype),
        cache,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        dict(arguments),
    )
    if leftpad is not None:
        case.arguments["leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
    if index is not None:
        case.arguments["cache_index"] = torch.tensor(index, dtype=torch.int32, device=device)
    pads = leftpad or [0] * len(lengths)
    for row, length, pad in zip(rows, lengths, pads, strict=True):
        fill_row(case, row, pad, length, generator)
    if table is not None and room == 0:
        unused_pages_are_unnamed(case, rows, lengths, pads)
    return case


def fill_row(case: Case, row: int, begin: int, end: int, generator) -> None:
    if end <= begin:
        return
    place = at(case.cache, row, range(begin, end))
    for x, scale in ((case.cache.k, case.cache.scale_k), (case.cache.v, case.cache.scale_v)):
        if x is None:
            continue
        shape = (end - begin, case.cache.heads_k, x.shape[-1])
        values = torch.randn(shape, generator=generator)
        if x.dtype is torch.int8:
            values = (values * 40).clamp(-127, 127).round()
        if x.dtype is E4M3:  # index_put has no kernel for it
            x.view(torch.int8)[place] = values.to(E4M3).view(torch.int8).to(x.device)
        else:
            x[place] = values.to(x.device, x.dtype)
        if scale is not None and scale.ndim == 3:
            size = 0.03 if x.dtype is torch.int8 else 1.0
            factor = size * (0.1 + torch.rand(shape[:2], generator=generator))
            scale[place] = factor.to(x.device)


def unused_pages_are_unnamed(case: Case, rows, lengths, pads) -> None:
    """Entries of the table that no key needs name no page."""
    table, page = case.cache.block_table, case.cache.slots
    needed = torch.zeros_like(table, dtype=torch.bool)
    for row, length, pad in zip(rows, lengths, pads, strict=True):
        if length > pad:
            needed[row, pad // page : -(-length // page)] = True
    table[~needed] = -(2**31)


def at(cache: KVCache, row: int, slots) -> tuple:
    """Index of slots, of all heads, into k, v or a scale of tokens: [slots, heads_k, ...]."""
    slots = torch.tensor(list(slots), dtype=torch.long, device=cache.k.device)
    blocks = torch.full_like(slots, row)
    if cache.block_table is not None:
        blocks = cache.block_table[row, slots // cache.slots].long()
        slots = slots % cache.slots
    return (blocks, slots) if cache.layout == "NHD" else (blocks, slice(None), slots)


def wide(x: torch.Tensor) -> torch.Tensor:
    """As 64-bit floats in host memory."""
    return x.float().double().cpu()


def taken(x: torch.Tensor, place: tuple) -> torch.Tensor:
    return x.view(torch.int8)[place].view(E4M3) if x.dtype is E4M3 else x[place]


def numbers(case: Case, batch: int, which: str, begin: int, end: int) -> torch.Tensor:
    """float64 [end - begin, heads_k, dim] of the slots of sequence ``batch``."""
    cache = case.cache
    x, scale = getattr(cache, which), getattr(cache, f"scale_{which}")
    index = case.arguments.get("cache_index")
    row = batch if index is None else int(index[batch])
    if end <= begin:
        return torch.zeros(0, cache.heads_k, x.shape[-1], dtype=torch.float64)
    place = at(cache, row, range(begin, end))
    rows = wide(taken(x, place))
    if scale is None:
        return rows
    if scale.ndim == 3:
        return rows * wide(scale[place]).unsqueeze(-1)
    of_batch = scale[batch] if scale.ndim == 2 else scale.expand(cache.heads_k)
    return rows * wide(of_batch).reshape(1, -1, 1)


def expected(case: Case, added: int = 0, q: torch.Tensor | None = None):
    """(o, lse) of the textbook in float64, of dense queries."""
    q = case.q if q is None else q
    a = case.arguments
    batch, queries, heads, head_dim = q.shape
    o = torch.zeros(batch, queries, heads, case.cache.head_dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    scale = a.get("scale") or head_dim**-0.5
    left, right = a.get("window") or (None, None)
    causal = a.get("causal", True)
    for b in range(batch):
        keys = int(case.lengths[b]) + added
        pad = int(a["leftpad"][b]) if "leftpad" in a else 0
        k = numbers(case, b, "k", pad, keys)
        v = k[..., : case.cache.head_dim_v]
        v = v if case.cache.v is None else numbers(case, b, "v", pad, keys)
        j, i = torch.arange(pad, keys)[None], torch.arange(queries)[:, None]
        position = keys - queries + i
        seen = torch.ones(queries, keys - pad, dtype=torch.bool)
        if a.get("tree_mask") is not None:
            draft = j - (keys - queries)
            bits = a["tree_mask"][b].cpu()[:, None] >> draft.clamp(0, 63) & 1
            seen &= (draft < 0) | (bits == 1)
        elif causal:
            seen &= j <= position
        if left is not None:
            seen &= j >= position - left
        if right is not None and not causal:
            seen &= j <= position + right
        group = heads // case.cache.heads_k
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = scale * torch.einsum("ihd,jhd->hij", wide(q[b]), k)
        if a.get("softcap"):
            scores = a["softcap"] * torch.tanh(scores / a["softcap"])
        scores = scores.masked_fill(~seen, -math.inf)
        sinks = a["sinks"] if "sinks" in a else torch.full((heads,), -math.inf)
        sinks = wide(sinks).reshape(-1, 1, 1).expand(-1, queries, 1)
        lse[b] = torch.logsumexp(torch.cat((scores, sinks), -1), -1)
        weights = torch.exp(scores - lse[b].clamp(min=-1e300)[..., None])
        o[b] = torch.einsum("hij,jhd->ihd", weights, v)
    return o, lse


def assert_right(case: Case, target: Target, added: int = 0, q=None, **extra) -> None:
    o, lse = case.decode(target, return_lse=True, **extra)
    want_o, want_lse = expected(case, added, q)
    close(o, want_o)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=3e-6, atol=2e-5)


def close(o: torch.Tensor, want: torch.Tensor, share: float = 1.0) -> None:
    """Rounding of o, and of sums in float32; GPUs round weights to the dtype of q as well."""
    step = torch.finfo(o.dtype).eps
    weights = step if o.is_cuda else 0.0
    magnitude = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(
        o.double().cpu(), want, rtol=share * step, atol=share * (1e-5 + 2 * weights * magnitude)
    )


LENGTHS = [0, 1, 63, 64, 65, 130]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [None, 1, 8, 64, 256])
def test_pages_and_layouts(target, page, layout):
    assert_right(make(target, LENGTHS, page=page, layout=layout), target)


@pytest.mark.parametrize(
    ("heads", "heads_k", "head_dim", "head_dim_v"),
    [
        (1, 1, 64, 64),
        (7, 7, 80, 80),
        (6, 2, 96, 96),
        (14, 2, 128, 128),
        (16, 1, 192, 128),
        (8, 8, 256, 256),
        (3, 1, 40, 24),
        (2, 1, 33, 17),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_heads_and_dims(target, heads, heads_k, head_dim, head_dim_v, dtype):
    assert_right(
        make(
            target,
            [5, 70],
            heads=heads,
            heads_k=heads_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
        ),
        target,
    )


@pytest.mark.parametrize("queries", [2, 5, 16, 33, 64])
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": False}, {"window": (20, 0)}, {"causal": False, "window": (7, 3)}],
    ids=str,
)
def test_queries_and_masks(target, queries, mask):
    assert_right(make(target, [0, 3, 90, 129], queries=queries, **mask), target)


@pytest.mark.parametrize("split", ["auto", "invariant", 64, 512])
def test_variants_and_splits(target, split):
    sinks = torch.tensor([0.5, -3.0, 4.0, -math.inf], device=target.device)
    case = make(target, [0, 40, 700, 300], queries=3, softcap=3.0, sinks=sinks, scale=0.3)
    assert_right(case, target, split=split)


@pytest.mark.parametrize("page", [None, 8])
def test_leftpad_and_cache_index(target, page):
    case = make(
        target, [30, 90, 17, 90], leftpad=[4, 33, 17, 0], index=[2, 5, 0, 3], page=page, queries=2
    )
    assert_right(case, target)


def test_rows_of_the_cache_may_be_shared(target):
    case = make(target, [50, 70])
    case.arguments["cache_index"] = torch.tensor(
        [1, 0, 1, 1], dtype=torch.int32, device=target.device
    )
    case.q = torch.randn(4, 1, 4, 64).to(case.q)
    case.lengths = torch.tensor([70, 50, 12, 70], dtype=torch.int32, device=target.device)
    assert_right(case, target)


def test_packed_queries(target):
    """Ragged numbers of queries, one of them 0."""
    counts = [3, 0, 1, 20]
    whole = make(target, [40, 9, 0, 77], queries=20)
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    packed = torch.cat([whole.q[b, :n] for b, n in enumerate(counts)])
    options = pantile.Options(backend=target.backend, checked=True)
    case = Case(packed, whole.cache, whole.lengths)
    o, lse = case.decode(
        target,
        cu_seqlens_q=bounds.to(target.device),
        max_seqlen_q=20,
        return_lse=True,
        options=options,
    )
    for b, n in enumerate(counts):
        alone = Case(
            whole.q[b : b + 1, :n],
            whole.cache,
            whole.lengths[b : b + 1],
            {"cache_index": torch.tensor([b], dtype=torch.int32, device=target.device)},
        )
        want_o, want_lse = expected(alone)
        part = slice(int(bounds[b]), int(bounds[b + 1]))
        close(o[part], want_o[0])
        torch.testing.assert_close(lse[:, part].double().cpu(), want_lse[0], rtol=3e-6, atol=2e-5)


def test_nothing_to_do(target):
    for lengths, queries, heads in (([], 1, 4), ([5, 6], 0, 4), ([0, 0], 2, 4)):
        case = make(target, lengths, queries=queries, heads=heads)
        o, lse = case.decode(target, return_lse=True)
        assert o.shape == (len(lengths), queries, heads, 64)
        assert (o == 0).all()
        assert (lse == -math.inf).all()


def test_output_in_float32(target):
    case = make(target, [33, 60], dtype=torch.float16)
    rounded = case.decode(target)
    exact = case.decode(
        target, options=pantile.Options(backend=target.backend, output_dtype="float32")
    )
    assert exact.dtype is torch.float32
    if target.device == "cpu":
        close(exact, expected(case)[0])
    same_bits(exact.half(), rounded)


# ---- tree masks


@pytest.mark.parametrize("queries", [1, 7, 64])
def test_tree_masks(target, queries):
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**63), 2**63 - 1, (3, queries), generator=generator)
    bits[0, queries // 2] = 0
    case = make(target, [0, queries, 150], queries=queries, tree_mask=bits.to(target.device))
    assert_right(case, target)


def test_hidden_draft_tokens_may_hold_nan(target):
    bits = torch.tensor([[0b001, 0b011, 0b101]], device=target.device)
    case = make(target, [80], queries=3, tree_mask=bits)
    before = case.decode(target)
    for x in (case.cache.k, case.cache.v):
        x[at(case.cache, 0, [78])] = math.nan  # draft token 1, which query 1 sees
    after = case.decode(target)
    same_bits(after[:, [0, 2]], before[:, [0, 2]])
    assert after[:, 1].isnan().all()


def test_a_chain_is_causal(target):
    queries = 9
    bits = torch.tensor([[(1 << (i + 1)) - 1 for i in range(queries)]] * 2, device=target.device)
    case = make(target, [20, 75], queries=queries)
    same_bits(case.decode(target, tree_mask=bits), case.decode(target))


# ---- splits and bits


def alone(case: Case, b: int) -> Case:
    index = torch.tensor([b], dtype=torch.int32, device=case.q.device)
    return Case(case.q[b : b + 1], case.cache, case.lengths[b : b + 1], {"cache_index": index})


@pytest.mark.parametrize("split", ["invariant", 128])
def test_bits_do_not_depend_on_the_batch(target, split):
    lengths = [0, 64, 255, 256, 257, 1000, 5000]
    case = make(target, lengths, heads=4, heads_k=1)
    whole = case.decode(target, split=split)
    generator = torch.Generator().manual_seed(2)
    for b in range(len(lengths)):
        same_bits(alone(case, b).decode(target, split=split)[0], whole[b])
    for _ in range(6):
        order = torch.randperm(len(lengths), generator=generator)[: 1 + int(len(lengths) // 1.5)]
        order = order.to(case.q.device)
        part = Case(
            case.q[order], case.cache, case.lengths[order], {"cache_index": order.to(torch.int32)}
        )
        same_bits(part.decode(target, split=split), whole[order])


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_threads(threads):
    """One sequence is cut for threads, a batch is not."""
    target = Target("cpu", "cpu")
    case = make(target, [9000], heads=2, heads_k=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = [case.decode(target, split=split) for split in ("invariant", 512)]
        torch.set_num_threads(7)
        others = [case.decode(target, split=split) for split in ("invariant", 512)]
    finally:
        torch.set_num_threads(before)
    for a, b in zip(found, others, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("split", [64, 192])
def test_prefill_gives_the_bits_of_decodes(target, split):
    """Queries in one call, and one after the other."""
    queries = 70
    case = make(target, [330], queries=queries, heads=4, heads_k=2)
    whole = case.decode(target, split=split)
    for i in (0, 1, 5, 31, 32, 33, 68, 69):
        step = Case(case.q[:, i : i + 1], case.cache, case.lengths - (queries - 1 - i))
        same_bits(step.decode(target, split=split)[:, 0], whole[:, i])


def test_repeats_have_equal_bits(target):
    case = make(target, [3000, 100])
    first = case.decode(target)
    for _ in range(20):
        same_bits(case.decode(target), first)


@pytest.mark.parametrize("split", ["auto", "invariant", 256])
def test_schedules(target, split):
    case = make(target, [10, 900, 0])
    options = pantile.Options(backend=target.backend)
    try:
        schedule = pantile.decode_schedule(
            case.q, case.cache, case.lengths, split=split, options=options
        )
    except pantile.UnsupportedError as refusal:
        if target.device == "cpu":
            raise
        pytest.skip(str(refusal))
    assert schedule.dtype is torch.int32
    plain = case.decode(target, split=split)
    same_bits(case.decode(target, split=split, schedule=schedule), plain)
    with pytest.raises(ValueError, match=r"schedule has .* entries; it must have"):
        case.decode(target, split=split, schedule=schedule.new_zeros(schedule.numel() + 1))


def test_a_schedule_of_other_lengths_is_refused_on_the_cpu():
    target = Target("cpu", "cpu")
    case = make(target, [9000, 300], split="invariant", heads=1, heads_k=1)
    schedule = pantile.decode_schedule(case.q, case.cache, case.lengths, split="invariant")
    case.lengths[0] = 100
    with pytest.raises(ValueError, match=r"schedule\[0\] is 1024; for these lengths it is 256"):
        case.decode(target, schedule=schedule)


# ---- 8-bit caches


@pytest.mark.parametrize("scales", ["tensor", "head", "batch and head", "token"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_e4m3_caches(target, scales, layout):
    case = make(
        target,
        [0, 40, 130],
        queries=2,
        coded=E4M3,
        layout=layout,
        scales="head" if scales == "batch and head" else scales,
    )
    if scales != "token":
        shape = {"tensor": (), "head": (2,), "batch and head": (3, 2)}[scales]
        factors = [torch.rand(shape, device=target.device) + 0.2 for _ in range(2)]
        case.cache = dataclasses.replace(case.cache, scale_k=factors[0], scale_v=factors[1])
    assert_right(case, target)


def test_e4m3_without_scales(target):
    case = make(target, [70], coded=E4M3, scales="tensor")
    case.cache = dataclasses.replace(case.cache, scale_k=None, scale_v=None)
    assert_right(case, target)


@pytest.mark.parametrize("page", [None, 1, 16])
def test_int8_caches(target, page):
    assert_right(make(target, [1, 40, 130], queries=3, coded=torch.int8, page=page), target)


def test_scales_inside_of_the_slots(target):
    """As engines keep them: 64 codes and a float32 side by side, of K and V."""
    case = make(target, [20, 75], coded=torch.int8)
    pages, page, heads, dim = case.cache.k.shape
    raw = torch.zeros(pages, page, heads, dim + 4, dtype=torch.int8, device=target.device)
    parts = []
    for codes, scale in (
        (case.cache.k, case.cache.scale_k),
        (case.cache.v, case.cache.scale_v),
    ):
        inline = raw.clone()
        inline[..., :dim] = codes
        inline[..., dim:] = scale.contiguous().unsqueeze(-1).view(torch.int8)
        floats = inline.view(torch.float32)[..., dim // 4]
        parts.append((inline[..., :dim], floats))
    want = case.decode(target)
    case.cache = KVCache(
        parts[0][0],
        parts[1][0],
        scale_k=parts[0][1],
        scale_v=parts[1][1],
        block_table=case.cache.block_table,
    )
    same_bits(case.decode(target), want)


# ---- append


def new_rows(case: Case, count: int, seed: int = 9):
    generator = torch.Generator().manual_seed(seed)
    batch, cache = case.lengths.shape[0], case.cache
    dims = (cache.head_dim, cache.head_dim_v)
    return [
        torch.randn(batch, count, cache.heads_k, d, generator=generator).to(case.q) for d in dims
    ]


def rotated(x: torch.Tensor, positions, cos, sin, interleaved: bool) -> torch.Tensor:
    """float64 x [batch, n, heads, dim] by position [batch, n]."""
    half = cos.shape[1]
    c, s = (t.double().cpu()[positions][:, :, None] for t in (cos, sin))
    y = x.double().cpu().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = y[..., first].clone(), y[..., second].clone()
    y[..., first] = a * c - b * s
    y[..., second] = a * s + b * c
    return y


def rotary_table(target: Target, positions: int, dim: int, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] * 10000 ** (-torch.arange(dim // 2) / (dim / 2))
    return angles.cos().to(target.device, dtype), angles.sin().to(target.device, dtype)


def snapshot(case: Case):
    cache = case.cache
    return [None if x is None else x.clone() for x in (cache.k, cache.v)]


def run_append(target: Target, case: Case, k_new, v_new, **arguments) -> None:
    options = pantile.Options(backend=target.backend)
    try:
        pantile.append(case.cache, k_new, v_new, case.lengths, options=options, **arguments)
    except pantile.UnsupportedError as refusal:
        if target.device == "cpu":
            raise
        pytest.skip(str(refusal))


def only_changed(before, after, cache: KVCache, slots: dict[int, range]) -> None:
    """That nothing outside of these slots (row -> slots) has changed a bit."""
    for old, new in zip(before, after, strict=True):
        if old is None:
            continue
        old = old.clone()
        for row, numbers_ in slots.items():
            place = at(cache, row, numbers_)
            old.view(torch.int8)[place] = new.view(torch.int8)[place]
        same_bits(old.view(torch.int8), new.view(torch.int8))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("page", "layout"), [(None, "NHD"), (1, "HND"), (8, "NHD"), (64, "HND")])
def test_append(target, page, layout, interleaved):
    """Across borders of pages, with positions that leftpad shifts."""
    case = make(
        target,
        [0, 5, 63, 30],
        leftpad=[0, 2, 0, 9],
        index=[1, 3, 0, 2],
        page=page,
        layout=layout,
        room=80,
    )
    k_new, v_new = new_rows(case, 5)
    table = rotary_table(target, 80, 48)
    before = snapshot(case)
    given = {x: case.arguments[x] for x in ("leftpad", "cache_index")}
    run_append(target, case, k_new, v_new, rotary=table, rotary_interleaved=interleaved, **given)
    starts = case.lengths.cpu()
    positions = (starts - case.arguments["leftpad"].cpu())[:, None] + torch.arange(5)
    want = rotated(k_new, positions, *table, interleaved)
    changed = {}
    for b, row in enumerate(case.arguments["cache_index"].tolist()):
        start = int(starts[b])
        changed[row] = range(start, start + 5)
        torch.testing.assert_close(
            numbers(case, b, "k", start, start + 5),
            want[b],
            rtol=torch.finfo(case.q.dtype).eps,
            atol=1e-6,
        )
        assert torch.equal(numbers(case, b, "v", start, start + 5), v_new[b].double().cpu())
    only_changed(before, snapshot(case), case.cache, changed)


def test_append_of_ragged_keys(target):
    counts = [4, 0, 17]
    case = make(target, [3, 8, 60], page=8, room=40)
    rows = [torch.cat([x[b, :n] for b, n in enumerate(counts)]) for x in new_rows(case, 17)]
    bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    before = snapshot(case)
    run_append(target, case, *rows, cu_seqlens_new=bounds.to(target.device), max_seqlen_new=17)
    for b, n in enumerate(counts):
        start = int(case.lengths[b])
        part = slice(int(bounds[b]), int(bounds[b + 1]))
        for which, x in zip("kv", rows, strict=True):
            assert torch.equal(numbers(case, b, which, start, start + n), x[part].double().cpu())
    changed = {
        b: range(int(case.lengths[b]), int(case.lengths[b]) + n) for b, n in enumerate(counts)
    }
    only_changed(before, snapshot(case), case.cache, changed)


def test_append_never_leaves_the_table(target):
    """Slots past the end: refused on the CPU and in checked mode, dropped otherwise."""
    case = make(target, [15, 30], page=16)  # tables of two pages
    case.cache.block_table.copy_(torch.tensor([[4, 1], [0, 6]]))
    rows = new_rows(case, 4)
    before = snapshot(case)
    checked = pantile.Options(backend=target.backend, checked=True)
    with pytest.raises(ValueError, match=r"lengths\[1\] is 30 and 4 keys are new; .* at most 32"):
        pantile.append(case.cache, *rows, case.lengths, options=checked)
    only_changed(before, snapshot(case), case.cache, {})
    if target.device == "cuda":
        case.cache.block_table[0, 1] = case.cache.k.shape[0]  # no page
        run_append(target, case, *rows)
        only_changed(before, snapshot(case), case.cache, {0: range(15, 16), 1: range(30, 32)})


@pytest.mark.parametrize(
    ("coded", "scales"), [(E4M3, "tensor"), (E4M3, "head"), (E4M3, "token"), (torch.int8, "token")]
)
def test_append_quantises(target, coded, scales):
    case = make(target, [3, 16], coded=coded, scales=scales, page=8, room=20)
    rows = new_rows(case, 6)
    rows[0][0, 2] = 0  # a scale of 0
    rows[1][1, 3] *= 1e4  # saturates where the scale is given
    for scale, factor in ((case.cache.scale_k, 0.01), (case.cache.scale_v, 0.02)):
        if scales != "token":
            scale.mul_(factor)
    run_append(target, case, *rows)
    top = 448.0 if coded is E4M3 else 127.0
    for b, which in itertools.product(range(2), "kv"):
        x = rows["kv".index(which)][b].float().cpu()
        start = int(case.lengths[b])
        place = at(case.cache, b, range(start, start + 6))
        codes = taken(getattr(case.cache, which), place).float().cpu()
        scale = getattr(case.cache, f"scale_{which}")
        if scales == "token":
            want_scale = x.abs().amax(-1) / top
            torch.testing.assert_close(scale[place].cpu(), want_scale, rtol=0, atol=0)
        else:
            want_scale = scale.cpu().expand(2).expand(6, 2)
        scaled = torch.where(want_scale[..., None] > 0, x / want_scale[..., None], 0.0)
        want = scaled.round() if coded is torch.int8 else scaled.clamp(-top, top).to(E4M3).float()
        assert torch.equal(codes, want)


@pytest.mark.parametrize("coded", [E4M3, torch.int8])
def test_nan_that_is_appended_propagates(target, coded):
    case = make(target, [3, 9], coded=coded, scales="token", page=8, room=20)
    k_new, v_new = new_rows(case, 1)
    v_new[0, 0, 1, 7] = math.inf
    o = case.decode(target, k_new=k_new, v_new=v_new)
    assert o[0, :, 2:].isnan().all()
    assert not o[0, :, :2].isnan().any()
    assert not o[1].isnan().any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step(target, interleaved, dtype):
    """Append, rotation of both and decode in one call."""
    case = make(target, [0, 7, 40], page=8, room=30, dtype=dtype, queries=3)
    rows = new_rows(case, 3)
    table = rotary_table(target, 64, 64, dtype if interleaved else torch.float32)
    lengths = case.lengths.clone()
    step = {"rotary": table, "rotary_interleaved": interleaved}
    o, lse = case.decode(target, k_new=rows[0], v_new=rows[1], return_lse=True, **step)
    assert torch.equal(case.lengths, lengths)
    positions = lengths.cpu()[:, None] + torch.arange(3)
    q = rotated(case.q, positions, *table, interleaved).to(dtype).to(case.q.device)
    want_o, want_lse = expected(case, 3, q)
    close(o, want_o, 3.0)
    torch.testing.assert_close(
        lse.double().cpu(),
        want_lse,
        rtol=1e-3 if dtype is torch.bfloat16 else 1e-5,
        atol=2e-2 if dtype is torch.bfloat16 else 2e-5,
    )


def test_only_q_is_rotated_without_new_keys(target):
    case = make(target, [9, 40], queries=2)
    table = rotary_table(target, 64, 64)
    o = case.decode(target, rotary=table)
    positions = case.lengths.cpu()[:, None] + torch.arange(2)
    q = rotated(case.q, positions, *table, False).to(case.q)
    close(o, expected(case, 0, q)[0], 3.0)


# ---- MLA


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_the_slots_of_a_head_lie_side_by_side(layout):
    cache = KVCache.paged(3, 16, 4, 64, dtype=torch.int8, layout=layout)
    for scale, codes in ((cache.scale_k, cache.k), (cache.scale_v, cache.v)):
        assert scale.shape == codes.shape[:-1]
        assert scale.stride(1 if layout == "NHD" else 2) == 1
        assert scale.min() == scale.max() == 1.0


@pytest.mark.parametrize("heads", [16, 3])
@pytest.mark.parametrize("coded", [None, E4M3, torch.int8])
def test_mla(target, heads, coded):
    form = {"coded": coded, "scales": "token"} if coded else {}
    case = make(
        target,
        [0, 33, 200],
        heads=heads,
        heads_k=1,
        head_dim=576,
        head_dim_v=512,
        latent=True,
        queries=2,
        room=8,
        scale=192**-0.5,
        **form,
    )
    q = case.q.split((512, 64), -1)
    options = pantile.Options(backend=target.backend)
    try:
        o, lse = pantile.mla_decode(
            *q, case.cache, case.lengths, scale=192**-0.5, return_lse=True, options=options
        )
    except pantile.UnsupportedError as refusal:
        if target.device == "cpu":
            raise
        pytest.skip(str(refusal))
    want_o, want_lse = expected(case)
    close(o, want_o)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=3e-6, atol=2e-5)
    generator = torch.Generator().manual_seed(8)
    new = [torch.randn(3, 2, d, generator=generator).to(case.q) for d in (512, 64)]
    table = rotary_table(target, 220, 64)
    pantile.mla_decode(
        *q,
        case.cache,
        case.lengths,
        scale=192**-0.5,
        latent_new=new[0],
        rope_new=new[1],
        rotary=table,
        options=options,
    )
    if coded is None:
        positions = case.lengths.cpu()[:, None] + torch.arange(2)
        rope = rotated(new[1].unsqueeze(2), positions, *table, False)[:, :, 0]
        for b in range(3):
            start = int(case.lengths[b])
            found = numbers(case, b, "k", start, start + 2)[:, 0]
            assert torch.equal(found[:, :512], new[0][b].double().cpu())
            torch.testing.assert_close(found[:, 512:], rope[b], rtol=8e-3, atol=1e-5)


# ---- a prefix that sequences share


@pytest.mark.parametrize("queries", [1, 3])
def test_shared_prefixes(target, queries):
    """Groups of 3, 1, 0 and 2 sequences; the third has no prefix, the last one that ends a page."""
    bounds, prefixes, page = [0, 3, 4, 4, 6], [37, 20, 0, 64], 16
    lengths = [60, 41, 37 + queries, 25, 64 + queries, 130]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=target.device)
    case = make(target, lengths, queries=queries, page=page, sinks=sinks, softcap=9.0, room=1)
    table = case.cache.block_table
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        for member in range(first + 1, last):  # the shared slots of a page that is cut are copies
            whole, rest = divmod(prefixes[group], page)
            table[member, :whole] = table[first, :whole]
            for x in (case.cache.k, case.cache.v):
                x[table[member, whole].long(), :rest] = x[table[first, whole].long(), :rest]
    want_o, want_lse = expected(case)
    arrays = [torch.tensor(x, dtype=torch.int32, device=target.device) for x in (bounds, prefixes)]
    options = pantile.Options(backend=target.backend)
    try:
        o, lse = pantile.decode_shared_prefix(
            case.q,
            case.cache,
            case.lengths,
            cu_members=arrays[0],
            max_members=3,
            prefix_lengths=arrays[1],
            return_lse=True,
            options=options,
            **case.arguments,
        )
    except pantile.UnsupportedError as refusal:
        if target.device == "cpu":
            raise
        pytest.skip(str(refusal))
    assert o.dtype is case.q.dtype
    close(o, want_o, 2.0)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=3e-6, atol=2e-5)


def test_a_shared_prefix_needs_pages():
    case = make(Target("cpu", "cpu"), [5, 5], page=None)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table is None; a shared prefix needs"):
        pantile.decode_shared_prefix(
            case.q,
            case.cache,
            case.lengths,
            cu_members=bounds,
            max_members=2,
            prefix_lengths=bounds[:1],
        )


# ---- explanations


@pytest.mark.parametrize(
    ("split", "text"),
    [("auto", "device is used best"), ("invariant", "own length"), (128, "128 keys")],
)
def test_explanations_name_the_kernel_and_the_split(split, text):
    case = make(Target("cpu", "cpu"), [5, 90], coded=E4M3)
    plan = pantile.explain_decode(case.q, case.cache, case.lengths, split=split)
    assert plan.decode.kernel == "cpu_decode_f32"
    assert text in plan.split
    assert plan.schedule_ints == 2
    report = str(plan)
    for part in ("decode: cpu_decode_f32, tile 32 x 64", text, "reference"):
        assert part in report
    rows = [row["name"] for row in pantile.kernels() if row["pass"] == "decode"]
    assert [row.kernel for row in plan.decode.rows] == rows
    refused = pantile.explain_decode(
        case.q, case.cache, case.lengths, options=pantile.Options(backend="hopper")
    )
    assert refused.decode.kernel is None
    assert "hopper" in refused.decode.reason


# ---- torch


def test_compiled_graphs_append_and_decode():
    target = Target("cpu", "cpu")
    case = make(target, [3, 20], room=20)
    rows = new_rows(case, 1)
    table = rotary_table(target, 64, 64)

    def step(q, k, v, lengths):
        return pantile.decode(q, case.cache, lengths, k_new=k, v_new=v, rotary=table)

    before = snapshot(case)
    want = step(case.q, *rows, case.lengths)
    written = snapshot(case)
    for x, old in zip((case.cache.k, case.cache.v), before, strict=True):
        x.copy_(old)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same_bits(compiled(case.q, *rows, case.lengths), want)
    for a, b in zip(snapshot(case), written, strict=True):
        same_bits(a.view(torch.int32), b.view(torch.int32))


def test_tensors_without_memory_have_the_right_shapes():
    cache = KVCache.paged(
        4,
        16,
        2,
        64,
        dtype=torch.bfloat16,
        device="meta",
        block_table=torch.zeros(3, 2, dtype=torch.int32, device="meta"),
    )
    q = torch.empty(3, 2, 4, 64, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    o, lse = pantile.decode(q, cache, lengths, return_lse=True)
    assert o.shape == (3, 2, 4, 64)
    assert o.dtype is torch.bfloat16
    assert lse.shape == (3, 4, 2)


def test_gradients_are_refused():
    case = make(Target("cpu", "cpu"), [5])
    case.q.requires_grad_()
    with pytest.raises(pantile.UnsupportedError, match=r"decode has no backward.*no_grad"):
        case.decode(Target("cpu", "cpu"))
    with torch.no_grad():
        case.decode(Target("cpu", "cpu"))


def test_the_cache_counts_its_versions():
    case = make(Target("cpu", "cpu"), [5], room=9)
    before = case.cache.k._version
    pantile.append(case.cache, *new_rows(case, 1), case.lengths)
    assert case.cache.k._version > before


# ---- errors: the argument, its value, what is allowed; nothing is written

WRONG = {
    "q is a list": ({"q": [1]}, TypeError, r"q is \[1\]; it must be a torch.Tensor"),
    "cache": ({"cache": 3}, TypeError, "cache is 3; it must be a pantile.KVCache"),
    "lengths": ({"lengths": [4, 4]}, TypeError, "lengths is .* it must be an int32 torch.Tensor"),
    "lengths of int64": (
        {"lengths": torch.tensor([4, 4])},
        TypeError,
        "lengths has dtype int64; it must be int32",
    ),
    "too long": (
        {"lengths": torch.tensor([4, 99], dtype=torch.int32)},
        ValueError,
        r"lengths\[1\] is 99 and 0 keys are new; .* at most 48",
    ),
    "batch": ({"lengths": torch.tensor([4], dtype=torch.int32)}, ValueError, "q has batch size 2"),
    "rank": ({"q": torch.zeros(2, 4, 64)}, ValueError, "q has 3 dimensions; it must have 4"),
    "head_dim": ({"q": torch.zeros(2, 1, 4, 32)}, ValueError, "q has head_dim 32; it must be 64"),
    "heads": (
        {"q": torch.zeros(2, 1, 3, 64)},
        ValueError,
        "heads_q is 3 and heads_k is 2; heads_q must be a positive multiple",
    ),
    "dtype": (
        {"q": torch.zeros(2, 1, 4, 64, dtype=torch.float16)},
        TypeError,
        "cache.k has dtype float32; it must be the dtype of q, float16",
    ),
    "table": (
        {"block_table": torch.zeros(2, 3)},
        TypeError,
        "block_table has dtype float32; it must be int32",
    ),
    "page": (
        {"block_table": torch.full((2, 3), 77, dtype=torch.int32)},
        ValueError,
        r"block_table\[0, 0\] is 77; sequence 0 uses that page, so it must be from 0 to",
    ),
    "index": (
        {"cache_index": torch.tensor([0, 2], dtype=torch.int32)},
        ValueError,
        r"cache_index\[1\] is 2; it must be from 0 to 1",
    ),
    "leftpad": (
        {"leftpad": torch.tensor([0, 41], dtype=torch.int32)},
        ValueError,
        r"leftpad\[1\] is 41; it must be from 0 to 40",
    ),
    "split": ({"split": "some"}, ValueError, "split is 'some'; it must be one of auto, invariant"),
    "split of 100": ({"split": 100}, ValueError, "split is 100; it must be .* multiple of 64"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be positive"),
    "scale": ({"scale": math.inf}, ValueError, "scale is inf; it must be finite"),
    "tree": (
        {"tree_mask": torch.zeros(2, 2, dtype=torch.int64)},
        ValueError,
        r"tree_mask has shape \[2, 2\]; it must be \[2, 1\]",
    ),
    "tree and window": (
        {"tree_mask": torch.zeros(2, 1, dtype=torch.int64), "window": (3, 0)},
        ValueError,
        "window_left is 3; with a tree mask it must be -1",
    ),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \[3\]; it must be \[4\]"),
    "v_new": ({"v_new": torch.zeros(2, 1, 2, 64)}, ValueError, "v_new is set; it needs k_new"),
    "rotary": ({"rotary": torch.zeros(2)}, TypeError, "rotary is .* it must be a pair"),
    "max_seqlen_q": ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is 3; it must be None unless"),
    "fp8": (
        {"options": pantile.Options(fp8=True)},
        ValueError,
        "options.fp8 is True; an FP8 cache",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    change, error, message = WRONG[name]
    case = make(Target("cpu", "cpu"), [4, 40])
    arguments = {"q": case.q, "cache": case.cache, "lengths": case.lengths, **change}
    with pytest.raises(error, match=message):
        pantile.decode(**arguments)


WRONG_CACHES = {
    "layout": ({"layout": "DHN"}, ValueError, "layout is 'DHN'; it must be one of NHD, HND"),
    "scales": ({"scales": "token"}, ValueError, "scales is 'token'; it must be None for a cache"),
    "int8": (
        {"scales": "head", "dtype": torch.int8},
        ValueError,
        "scales is 'head'; it must be 'token' for a cache in int8",
    ),
    "pages": ({"pages": 0}, ValueError, "pages is 0; it must be 1 or more"),
}


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_wrong_caches_are_named(name):
    change, error, message = WRONG_CACHES[name]
    form = {"pages": 2, "page_size": 16, "heads_k": 1, "head_dim": 64, **change}
    with pytest.raises(error, match=message):
        KVCache.paged(**form)


def test_a_cache_of_pages_needs_a_table():
    cache = KVCache.paged(4, 16, 2, 64)
    lengths = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table is None; a cache of pages needs one"):
        pantile.decode(torch.zeros(1, 1, 2, 64), cache, lengths)


def test_wrong_new_keys_are_named():
    case = make(Target("cpu", "cpu"), [4, 4], room=9)
    k_new, v_new = new_rows(case, 2)
    for arguments, message in (
        ((k_new, None), "v_new is None; the cache has a v"),
        ((k_new[..., :32], v_new), "k_new has head_dim 32; it must be 64"),
        ((k_new, v_new[:, :1]), r"v_new has shape \[2, 1, 2, 64\]; it must be \[2, 2, 2, 64\]"),
        ((k_new[:1], v_new[:1]), "k_new has batch size 1; it must be 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pantile.append(case.cache, *arguments, case.lengths)
    with pytest.raises(ValueError, match="rotary_dim is 96; it must be even and from 0 to"):
        pantile.append(
            case.cache, k_new, v_new, case.lengths, rotary=rotary_table(Target("cpu", "cpu"), 9, 96)
        )


# ---- GPU only


@pytest.mark.gpu
def test_a_graph_captured_short_is_replayed_long():
    target = Target("auto", "cuda")
    case = make(target, [1, 1], room=6000, page=64, head_dim=128, heads=8)
    generator = torch.Generator().manual_seed(3)
    case.decode(target)  # compiles and lends
    lengths = case.lengths
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    plain = pantile.Options(checked=False)
    with torch.cuda.stream(stream):
        pantile.decode(case.q, case.cache, lengths, options=plain)
        with torch.cuda.graph(graph, stream=stream):
            o = pantile.decode(case.q, case.cache, lengths, options=plain)
    for b, length in enumerate((5000, 3)):
        fill_row(case, b, 0, length, generator)
    lengths.copy_(torch.tensor([5000, 3], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    close(o, expected(case)[0])


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    target = Target("auto", "cuda")
    pages, page = 17000, 64
    cache = KVCache.paged(
        pages,
        page,
        8,
        256,
        dtype=torch.bfloat16,
        device="cuda",
        block_table=torch.tensor([[pages - 1, 0]], dtype=torch.int32, device="cuda"),
    )
    assert cache.k.numel() > 2**31
    poison(cache.k[1 : pages - 1])
    poison(cache.v[1 : pages - 1])
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    case = Case(torch.randn(1, 1, 8, 256, device="cuda", dtype=torch.bfloat16), cache, lengths)
    fill_row(case, 0, 0, 100, torch.Generator().manual_seed(1))
    assert_right(case, target)
