"""The doors of pantile.compat over a key-value cache, against the textbook in float64."""

from __future__ import annotations

import inspect

import pantile
import pytest
import torch
from pantile import reference
from pantile.compat import _cache, vllm
from pantile.compat import flash_attn as fa2
from pantile.compat import flash_attn_3 as fa3

HEADS, HEADS_K, DIM = 4, 2, 32
ROTARY = 16
FP8 = torch.float8_e4m3fn
FA2_ARGUMENTS = [
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size"),
    *("softcap", "rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"),
]
FA3_ARGUMENTS = [
    *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale", "softmax_scale"),
    *("causal", "window_size", "attention_chunk", "softcap", "rotary_interleaved"),
    *("scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse"),
]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """Slots of 3 sequences, dense or in pages, and what a call with them must find."""

    def __init__(self, paged=False, slots=48, page=16, batch=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.generator, self.batch, self.slots, self.page = generator, batch, slots, page
        rows = (2 * batch * slots // page, page) if paged else (batch + 2, slots)
        self.k, self.v = (self.random(*rows, HEADS_K, DIM) for _ in range(2))
        self.table = None
        if paged:
            order = torch.randperm(rows[0], generator=generator).int()
            self.table = order[: batch * slots // page].view(batch, -1)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def dense(self, index=None):
        """[batch, slots, heads, dim] of k and of v, copied."""
        rows = range(self.batch) if index is None else index.tolist()
        if self.table is None:
            return [x[list(rows)].clone() for x in (self.k, self.v)]
        tables = self.table[list(rows)].long()
        return [x[tables].flatten(1, 2) for x in (self.k, self.v)]


def angles(rows):
    angle = torch.rand(rows, ROTARY // 2, generator=torch.Generator().manual_seed(5)) * 6.28
    return angle.cos(), angle.sin()


def turned(x, positions, cos, sin, interleaved):
    """One row [heads, dim] after the other, by complex numbers."""
    x = x.double().clone()
    turns = torch.complex(cos.double(), sin.double())
    for i, at in enumerate(positions):
        head = x[i, :, :ROTARY]
        a, b = (head[:, ::2], head[:, 1::2]) if interleaved else head.chunk(2, -1)
        z = torch.complex(a, b) * turns[at]
        pair = torch.stack((z.real, z.imag), -1 if interleaved else 1)
        x[i, :, :ROTARY] = pair.flatten(1)
    return x


def attended(q, k, v, leftpad=0, **how):
    """o [rows, heads, dim] and lse of one sequence whose keys are k[leftpad:]."""
    wide = [x.double()[None] for x in (q, k[leftpad:], v[leftpad:])]
    o, lse = reference.attention(*wide, **how, dtype=torch.float64)
    return o[0], lse[0]


def close(found, expected, tolerance=2e-5):
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_arguments_have_the_order_of_the_originals():
    assert list(inspect.signature(fa2.flash_attn_with_kvcache).parameters) == FA2_ARGUMENTS
    threes = list(inspect.signature(fa3.flash_attn_with_kvcache).parameters)
    assert threes == [*FA3_ARGUMENTS, "s_aux"]


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"causal": True, "window_size": (9, 0)}, {"causal": True, "window": (9, 0)}),
        ({"window_size": torch.tensor([5, 3])}, {"window": (5, 3)}),
        ({"softcap": 2.0, "softmax_scale": 0.3}, {"softcap": 2.0, "scale": 0.3}),
        ({"alibi_slopes": torch.rand(3, HEADS), "causal": True}, "alibi"),
    ],
    ids=["plain", "causal", "causal_window", "window", "softcap", "alibi"],
)
def test_fa2_with_new_keys_equals_float64(rows, paged, theirs, ours):
    cache = Cache(paged, slots=96)
    lengths = ints(7, 0, 26)
    q = cache.random(3, rows, HEADS, DIM)
    new = min(rows, 40)
    k, v = (cache.random(3, new, HEADS_K, DIM) for _ in range(2))
    index = ints(2, 0, 1)
    expected_k, expected_v = cache.dense(index)
    for b in range(3):
        at = slice(int(lengths[b]), int(lengths[b]) + new)
        expected_k[b, at], expected_v[b, at] = k[b], v[b]
    o, lse = fa2.flash_attn_with_kvcache(
        *(q, cache.k, cache.v, k, v),
        cache_seqlens=lengths,
        cache_batch_idx=index,
        block_table=cache.table,
        num_splits=3,
        return_softmax_lse=True,
        **theirs,
    )
    for mine, other in zip(cache.dense(index), (expected_k, expected_v), strict=True):
        assert torch.equal(mine, other)
    for b in range(3):
        n = int(lengths[b]) + new
        how = {"alibi": theirs["alibi_slopes"][b], "causal": True} if ours == "alibi" else ours
        expected, expected_lse = attended(q[b], expected_k[b, :n], expected_v[b, :n], **how)
        close(o[b], expected)
        close(lse[b], expected_lse)


@pytest.mark.parametrize("door", [fa2, fa3])
@pytest.mark.parametrize("alibi", [False, True])
def test_left_padding_and_numbers_of_keys(door, alibi):
    if alibi and door is fa3:
        return
    cache = Cache()
    q = cache.random(3, 2, HEADS, DIM)
    slopes = torch.rand(HEADS)
    named = {"alibi_slopes": slopes} if alibi else {}
    o = door.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=40, cache_leftpad=ints(0, 5, 39), causal=True, **named
    )
    how = {"alibi": slopes} if alibi else {}
    for b, leftpad in enumerate((0, 5, 39)):
        k, v = (x[b, :40] for x in (cache.k, cache.v))
        close(o[b], attended(q[b], k, v, leftpad, causal=True, **how)[0])
    whole = door.flash_attn_with_kvcache(q, cache.k[:3], cache.v[:3])
    for b in range(3):
        close(whole[b], attended(q[b], cache.k[b], cache.v[b])[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize(
    ("rows", "mask", "moves"),
    [
        (3, {"causal": True}, True),
        (3, {"window_size": (9, 9)}, True),
        (3, {}, False),
        (3, {"window_size": (200, 200)}, False),
        (1, {}, False),
        (68, {"causal": True}, True),
    ],
    ids=["causal", "window", "plain", "wide_window", "one", "many"],
)
def test_fa2_rotary_positions(interleaved, leftpad, rows, mask, moves):
    cache = Cache(slots=96)
    cos, sin = angles(128)
    lengths, pads = ints(7, 4, 26), ints(3, 0, 11) if leftpad else None
    q = cache.random(3, rows, HEADS, DIM)
    k, v = (cache.random(3, rows, HEADS_K, DIM) for _ in range(2))
    expected_k, expected_v = (x.double() for x in cache.dense())
    o = fa2.flash_attn_with_kvcache(
        *(q, cache.k, cache.v, k, v, cos, sin, lengths, None, pads),
        rotary_interleaved=interleaved,
        **mask,
    )
    for b in range(3):
        n = int(lengths[b])
        slots = range(n, n + rows)
        expected_k[b, n : n + rows] = turned(k[b], slots, cos, sin, interleaved)
        expected_v[b, n : n + rows] = v[b]
        mine = turned(q[b], slots if moves else [n] * rows, cos, sin, interleaved)
        window = mask.get("window_size")
        expected, _ = attended(
            *(mine, expected_k[b, : n + rows], expected_v[b, : n + rows]),
            int(pads[b]) if leftpad else 0,
            causal=mask.get("causal", False),
            window=window,
        )
        close(o[b], expected)
    close(cache.k[:3], expected_k)


@pytest.mark.parametrize("rows", [(2, 1, 4), (3, 70, 0)])
@pytest.mark.parametrize("by", ["cache", "rotary_seqlens", "nothing"])
def test_fa3_packed_queries_and_new_keys(rows, by):
    cache = Cache(paged=True, slots=96)
    cos, sin = angles(128)
    lengths, starts = ints(7, 4, 26), ints(3, 1, 20)
    news = (2, 3, 1)
    bounds_q, bounds_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (rows, news))
    q = cache.random(sum(rows), HEADS, DIM)
    k, v = (cache.random(sum(news), HEADS_K, DIM) for _ in range(2))
    sinks = cache.random(HEADS)
    expected_k, expected_v = (x.double() for x in cache.dense())
    rotary = {} if by == "nothing" else {"rotary_cos": cos, "rotary_sin": sin}
    if by == "rotary_seqlens":
        rotary["rotary_seqlens"] = starts
    o, lse = fa3.flash_attn_with_kvcache(
        *(q, cache.k, cache.v, k, v),
        cache_seqlens=lengths,
        page_table=cache.table,
        cu_seqlens_q=bounds_q,
        cu_seqlens_k_new=bounds_k,
        max_seqlen_q=max(rows),
        causal=True,
        rotary_interleaved=False,
        return_softmax_lse=True,
        s_aux=sinks,
        **rotary,
    )
    for b in range(3):
        of_q, of_k = (slice(*x[b : b + 2].tolist()) for x in (bounds_q, bounds_k))
        n, mine, new = int(lengths[b]), q[of_q], k[of_k].double()
        first = int(starts[b]) if by == "rotary_seqlens" else n
        if by != "nothing":
            new = turned(new, range(first, first + news[b]), cos, sin, False)
            mine = turned(mine, range(first, first + rows[b]), cos, sin, False)
        end = n + news[b]
        expected_k[b, n:end], expected_v[b, n:end] = new, v[of_k]
        if rows[b]:
            expected, expected_lse = attended(
                *(mine, expected_k[b, :end], expected_v[b, :end]), causal=True, sinks=sinks
            )
            close(o[of_q], expected)
            close(lse[:, of_q], expected_lse)
    close(cache.dense()[0], expected_k)


@pytest.mark.parametrize("codes", [False, True])
def test_fa3_descales(codes):
    cache = Cache(paged=True)
    k_cache, v_cache = cache.k.to(FP8), cache.v.to(FP8)
    k_descale, v_descale, q_descale = (torch.rand(3, HEADS_K) + 0.5 for _ in range(3))
    q = cache.random(3, 2, HEADS, DIM).to(torch.bfloat16)
    k, v = (cache.random(3, 2, HEADS_K, DIM).to(torch.bfloat16) for _ in range(2))
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    if codes:
        q, k, v = (x.to(FP8) for x in (q, k, v))
        descales["q_descale"] = q_descale
    o = fa3.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v), cache_seqlens=30, page_table=cache.table, causal=True,
        **descales,
    )  # fmt: skip
    assert o.dtype is torch.bfloat16
    table = cache.table.long()
    keys, values = (x[table].flatten(1, 2)[:, :32] for x in (k_cache, v_cache))
    for x, new, descale in ((keys, k, k_descale), (values, v, v_descale)):
        if codes:
            assert torch.equal(x[:, 30:].float(), new.float())
        else:
            wide = x[:, 30:].double() * descale[:, None, :, None].double()
            torch.testing.assert_close(wide, new.double(), atol=0.01, rtol=1 / 16)
    for b in range(3):
        k_b = keys[b].double() * k_descale[b, :, None].double()
        v_b = values[b].double() * v_descale[b, :, None].double()
        q_b = q[b].double()
        if codes:
            q_b = q_b * q_descale[b].double().repeat_interleave(2)[:, None]
        expected, _ = attended(q_b, k_b, v_b, causal=True)
        close(o[b], expected, 2e-2)


def test_many_rows_go_to_the_forward_kernels(monkeypatch):
    cache = Cache(paged=True, slots=96)
    called = []
    for name in ("decode", "varlen_attention"):
        own = getattr(_cache, name)
        spy = lambda *a, own=own, name=name, **n: called.append(name) or own(*a, **n)  # noqa: E731
        monkeypatch.setattr(_cache, name, spy)
    for rows in (64, 65):
        q = cache.random(3, rows, HEADS, DIM)
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=90, block_table=cache.table)
    assert called == ["decode", "varlen_attention"]
    strided = torch.randn(3, 96, HEADS_K, 2, DIM).transpose(0, 1).contiguous().transpose(0, 1)
    fa2.flash_attn_with_kvcache(q, *strided.unbind(3))
    assert called.pop() == "decode"
    with pytest.raises(pantile.UnsupportedError, match="k_cache has strides"):
        fa2.flash_attn_with_kvcache(q, *strided.unbind(3), alibi_slopes=torch.ones(HEADS))


# ---- pages of the packed functions


@pytest.mark.parametrize("change", ["plain", "alibi"])
def test_fa2_varlen_reads_pages(change):
    cache = Cache(paged=True)
    keys, rows = (9, 48, 20), (5, 31, 12)
    bounds_q, bounds_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys))
    q = cache.random(sum(rows), HEADS, DIM)
    slopes = torch.rand(HEADS)
    o, lse, weights = fa2.flash_attn_varlen_func(
        *(q, cache.k, cache.v, bounds_q, bounds_k, 31, 48),
        causal=True,
        alibi_slopes=slopes if change == "alibi" else None,
        return_attn_probs=True,
        block_table=cache.table,
    )
    assert weights.numel() == 0
    k, v = cache.dense()
    how = {"alibi": slopes} if change == "alibi" else {}
    for b in range(3):
        of = slice(*bounds_q[b : b + 2].tolist())
        n = keys[b]
        expected, expected_lse = attended(q[of], k[b, :n], v[b, :n], causal=True, **how)
        close(o[of], expected)
        close(lse[:, of], expected_lse)


@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 70, 3)])
@pytest.mark.parametrize("lengths", ["seqused_k", "cu_seqlens_k"])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.1, 0.2, 0.3, 0.4])])
def test_vllm_reads_pages(rows, lengths, slopes):
    cache = Cache(paged=True, slots=96)
    keys = (9, 90, 20)
    bounds = torch.tensor([0, *rows]).cumsum(0).int()
    q, sinks = cache.random(sum(rows), HEADS, DIM), cache.random(HEADS)
    out = torch.full_like(q, torch.nan)
    named = {"seqused_k": ints(*keys)}
    if lengths == "cu_seqlens_k":
        named = {lengths: torch.tensor([0, *keys]).cumsum(0).int()}
    answer, lse = vllm.flash_attn_varlen_func(
        *(q, cache.k, cache.v, max(rows), bounds, 90),
        causal=True,
        window_size=[40, 0],
        block_table=cache.table,
        return_softmax_lse=True,
        out=out,
        s_aux=sinks,
        alibi_slopes=slopes,
        **named,
    )
    assert answer is out
    k, v = cache.dense()
    how = {"causal": True, "window": (40, 0), "sinks": sinks, "alibi": slopes}
    for b in range(3):
        of, n = slice(*bounds[b : b + 2].tolist()), keys[b]
        expected, expected_lse = attended(q[of], k[b, :n], v[b, :n], **how)
        close(out[of], expected)
        close(lse[:, of], expected_lse)


def test_vllm_decodes_codes():
    cache = Cache(paged=True)
    codes = [x.to(FP8) for x in (cache.random(3, HEADS, DIM), cache.k, cache.v)]
    descale = torch.tensor(2.0).expand(3, HEADS_K)
    named = {f"{name}_descale": descale for name in "qkv"}
    out = torch.empty(3, HEADS, DIM, dtype=torch.bfloat16)
    vllm.flash_attn_varlen_func(
        *(*codes, 1, ints(0, 1, 2, 3), 48), seqused_k=ints(48, 3, 20), block_table=cache.table,
        out=out, **named,
    )  # fmt: skip
    k, v = (x[cache.table.long()].flatten(1, 2).double() * 2.0 for x in codes[1:])
    for b, n in enumerate((48, 3, 20)):
        close(
            out[b : b + 1], attended(codes[0][b : b + 1].double() * 2.0, k[b, :n], v[b, :n])[0], 0.1
        )


# ---- chunks, and codes that are rotated


def in_chunks(q, k, v, chunk, leftpad=0, causal=True):
    """o and lse of one sequence in float64."""
    q, k, v = q.double(), k[leftpad:].double(), v[leftpad:].double()
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    seen = torch.div(at, chunk, rounding_mode="floor") == key // chunk
    scores = scores.masked_fill(~(seen & (key <= at) if causal else seen), -torch.inf)
    o = torch.einsum("hij,jhd->ihd", scores.softmax(-1).nan_to_num(), v.repeat_interleave(group, 1))
    return o, scores.logsumexp(-1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rows", "chunk", "causal"), [(1, 8, True), (5, 16, False), (70, 20, True)]
)
@pytest.mark.parametrize("codes", [False, True])
def test_chunks_over_a_cache(paged, padded, rows, chunk, causal, codes):
    cache = Cache(paged, slots=96)
    lengths, new = ints(9, 5, 26), min(rows, 40)
    pads = ints(3, 0, 7) if padded else None
    q = cache.random(3, rows, HEADS, DIM)
    k, v = (cache.random(3, new, HEADS_K, DIM) for _ in range(2))
    named = {}
    tolerance = 2e-5
    if codes:
        q, k, v, cache.k, cache.v = (x.to(FP8) for x in (q, k, v, cache.k, cache.v))
        named = {"k_descale": torch.full((3, HEADS_K), 0.5), "v_descale": torch.full((3, 2), 2.0)}
        tolerance = 2e-2
    if not codes or rows == 5:  # packed queries, too
        packed = {"cu_seqlens_q": ints(0, rows, 2 * rows, 3 * rows), "max_seqlen_q": rows}
    else:
        packed = {}
    o, lse = fa3.flash_attn_with_kvcache(
        *(q.flatten(0, 1) if packed else q, cache.k, cache.v, k, v),
        cache_seqlens=lengths,
        cache_leftpad=pads,
        page_table=cache.table,
        causal=causal,
        attention_chunk=chunk,
        rotary_seqlens=lengths,  # without a rotation
        return_softmax_lse=True,
        **packed,
        **named,
    )
    if packed:
        o, lse = o.unflatten(0, (3, rows)), lse.unflatten(1, (3, rows)).transpose(0, 1)
    wide_k, wide_v = (x.float() for x in (cache.k, cache.v))
    cache.k, cache.v = wide_k * (0.5 if codes else 1.0), wide_v * (2.0 if codes else 1.0)
    all_k, all_v = cache.dense()
    for b in range(3):
        n = int(lengths[b]) + new
        pad = 0 if pads is None else int(pads[b])
        expected = in_chunks(q[b].float(), all_k[b, :n], all_v[b, :n], chunk, pad, causal)
        close(o[b], expected[0], tolerance)
        close(lse[b], expected[1], 2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_codes_are_rotated(causal, interleaved):
    """In float32; new keys are rounded to codes once, queries to 16 bits."""
    cache = Cache()
    q, k, v = (cache.random(3, 2, h, DIM).to(FP8) for h in (HEADS, HEADS_K, HEADS_K))
    cache.k, cache.v = cache.k.to(FP8), cache.v.to(FP8)
    cos, sin = angles(48)
    before = cache.k.clone()
    o = fa3.flash_attn_with_kvcache(
        *(q, cache.k, cache.v, k, v),
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=ints(4, 0, 30),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    assert torch.equal(cache.v[0, 4:6].float(), v[0].float())
    for b, n in enumerate((4, 0, 30)):
        at = [n, n + 1] if causal else [n, n]
        keys = turned(k[b].float(), [n, n + 1], cos, sin, interleaved).to(torch.bfloat16)
        stored = cache.k[b].float()
        close(stored[n : n + 2], keys.double(), 0.13)  # half a step of e4m3 up to 4
        assert torch.equal(stored[:n], before[b, :n].float())
        turned_q = turned(q[b].float(), at, cos, sin, interleaved)
        expected, _ = attended(
            turned_q, stored[: n + 2], cache.v[b, : n + 2].float(), causal=causal
        )
        close(o[b], expected, 2e-2)


# ---- head dims that kernels for GPUs do not read in place


def narrow_call(door, device, paged, rows, dim=27, codes=False, **change):
    """(o, lse, the cache afterwards): rows of `dim` channels, new keys, a rotation."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        x = torch.randn(shape, generator=generator)
        return x.to(device, FP8 if codes else torch.float32 if device == "cpu" else torch.bfloat16)

    new = min(rows, 9)
    shape = (36, 8) if paged else (3, 96)
    q, k_cache, v_cache = random(3, rows, HEADS, dim), *(random(*shape, 2, dim) for _ in "kv")
    named = {"k": random(3, new, 2, dim), "v": random(3, new, 2, dim)}
    named["cache_seqlens"] = ints(20, 0, 61).to(device)
    if not codes:
        named |= zip(("rotary_cos", "rotary_sin"), (x.to(q) for x in angles(96)), strict=True)
    if paged:
        table = torch.randperm(36, generator=generator).int().view(3, 12).to(device)
        named["page_table" if door is fa3 else "block_table"] = table
    named |= {"causal": True, "return_softmax_lse": True, **change}
    o, lse = door.flash_attn_with_kvcache(q, k_cache, v_cache, **named)
    return o, lse, k_cache.float(), v_cache.float()


NARROW = [
    (fa2, 1, {}),
    (fa2, 9, {"softcap": 2.0, "window_size": (30, -1)}),
    (fa2, 70, {}),
    (fa2, 9, {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])}),
    (fa3, 9, {"attention_chunk": 7}),
    (fa3, 3, {"codes": True, "k_descale": torch.full((3, HEADS_K), 0.5)}),
]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("door", "rows", "change"), NARROW, ids=str)
def test_columns_of_zeros_change_nothing(monkeypatch, paged, door, rows, change):
    """As on a GPU, whose kernels read 16 bytes at a time, here on the CPU, which takes any."""
    expected = narrow_call(door, "cpu", paged, rows, **change)
    widths = []
    own = _cache._padded
    monkeypatch.setattr(_cache, "_columns", lambda *_: 16)
    monkeypatch.setattr(_cache, "_padded", lambda x, n: widths.append(x.shape[-1]) or own(x, n))
    found = narrow_call(door, "cpu", paged, rows, **change)
    assert widths == [27, 27, 27]
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("door", "rows", "change"), NARROW, ids=str)
def test_narrow_rows_on_a_gpu(paged, door, rows, change):
    """Against the CPU on the same operands: head dim 59 of FlashAttention's own tests."""
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    found = narrow_call(door, "cuda", paged, rows, 59, **moved)
    expected = narrow_call(door, "cpu", paged, rows, 59, **change)
    for mine, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine.cpu().float(), other.float(), atol=0.06, rtol=0.06)
    for mine, other in zip(found[2:], expected[2:], strict=True):  # rounded once more
        torch.testing.assert_close(mine.cpu(), other, atol=0.05, rtol=2**-6)


# ---- refusals come before anything is written


def test_refusals_write_nothing():
    cache = Cache()
    q = cache.random(3, 2, HEADS, DIM)
    k, v = (cache.random(3, 2, HEADS_K, DIM) for _ in range(2))
    cos, sin = angles(96)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    before = cache.k.clone()
    calls = [
        (fa3, {"qv": q}, pantile.UnsupportedError, "^qv is"),
        (fa3, {"attention_chunk": -1}, ValueError, "^attention_chunk is"),
        (fa3, {"k_descale": torch.ones(3, 2)}, ValueError, "^k_descale is"),
        (fa2, {"cache_seqlens": None}, ValueError, "^cache_seqlens is None"),
        (fa2, {"rotary_cos": cos}, ValueError, "^rotary_sin is None"),
        (fa2, {"rotary_cos": cos[:40], "rotary_sin": sin}, ValueError, "^rotary_cos is"),
        (fa2, {"k": None, "v": None, **rotary}, ValueError, "without k"),
        (fa2, {"k": k.clone().requires_grad_()}, pantile.UnsupportedError, "^k requires grad"),
        (fa2, {"window_size": 3}, TypeError, "^window_size is"),
        (fa2, {"softcap": -1.0}, ValueError, "softcap"),
        (fa2, {"cache_seqlens": torch.tensor([1, 2, 3])}, (TypeError, ValueError), "lengths"),
    ]
    for door, change, error, words in calls:
        with pytest.raises(error, match=words):
            door.flash_attn_with_kvcache(
                q, cache.k, cache.v, **({"k": k, "v": v, "cache_seqlens": 3} | change)
            )
        assert torch.equal(cache.k, before), change
    with pytest.raises(pantile.UnsupportedError, match="return_attn_probs is True"):
        fa2.flash_attn_varlen_func(
            *(q[0], cache.k, cache.v, ints(0, 2), ints(0, 48), 2, 48, 0.5),
            return_attn_probs=True,
            block_table=ints(0).view(1, 1),
        )
