"""The planner of pantile.distributed: who holds what, what is computed and sent. No processes."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pantile.distributed import _layout, plan
from pantile.distributed._documents import documents
from pantile.distributed._layout import Mask, Work, is_alone, piece_of
from pantile.distributed._ring import steps_with
from pantile.distributed._share import Share
from pantile.distributed._traffic import Needs, level


def packs(most_documents=6, longest=60):
    return st.lists(st.integers(0, longest), min_size=1, max_size=most_documents).map(
        lambda lengths: [0, *itertools.accumulate(lengths)]
    )


def masks():
    side = st.integers(-1, 30)
    return st.one_of(st.just(Mask(-1, 0)), st.builds(Mask, side, side))


def visible(bounds, mask) -> torch.Tensor:
    tokens = torch.arange(bounds[-1])
    document = torch.bucketize(tokens, torch.tensor(bounds[1:]), right=True)
    far = tokens - tokens[:, None]
    seen = document[:, None] == document
    if mask.left >= 0:
        seen &= far >= -mask.left
    if mask.right >= 0:
        seen &= far <= mask.right
    return seen


def add_window(counts, first_row, rows, first_key, keys, left, right) -> None:
    """What a call with these bounds computes."""
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    counts[first_row : first_row + rows, first_key : first_key + keys] += seen.int()


LAYOUT = st.sampled_from(["contiguous", "zigzag", "documents", "scattered"])


def laid_out(bounds, mask, ranks, layout, chunk=5):
    """``scattered``: chunks dealt at random; the transfers and pieces serve every layout."""
    if layout != "scattered":
        return _layout.make(bounds, ranks, mask, layout, 0.02)[1]
    held, law = [[] for _ in range(ranks)], random.Random(bounds[-1])
    for start in range(0, bounds[-1], chunk):
        runs = _layout.cut(start, min(start + chunk, bounds[-1]), bounds)
        held[law.randrange(ranks)] += runs
    return [_layout.merged(runs) for runs in held]


@given(packs(), masks(), st.integers(1, 5), LAYOUT, st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_pieces_compute_every_visible_pair_once(bounds, mask, ranks, layout, chunk):
    shares = laid_out(bounds, mask, ranks, layout, chunk)
    work = Work(bounds, mask)
    counts = torch.zeros(bounds[-1], bounds[-1], dtype=torch.int32)
    for runs in shares:
        for run in runs:
            p = piece_of(run, bounds, mask)
            keys = p.last_key - p.first_key
            add_window(counts, p.start, p.stop - p.start, p.first_key, keys, p.left, p.right)
            assert work.of_run(run) == int(counts[p.start : p.stop].sum())
    assert torch.equal(counts, visible(bounds, mask).int())


@given(packs(4, 40), masks(), st.integers(1, 4), LAYOUT, st.integers(1, 16))
@settings(max_examples=25, deadline=None)
def test_ring_steps_compute_every_visible_pair_once(bounds, mask, ranks, layout, chunk):
    shares = laid_out(bounds, mask, ranks, layout, chunk)
    counts = torch.zeros(bounds[-1], bounds[-1], dtype=torch.int32)
    for mine, other in itertools.product(range(ranks), repeat=2):
        # Rows of shares are put at their tokens: a step stays inside a run of either.
        rows, keys = (
            torch.tensor([t for run in shares[r] for t in range(run.start, run.stop)])
            for r in (mine, other)
        )
        for step in steps_with(Share(shares, mine, bounds, mask), other):
            q, k = rows[slice(*step.rows)], keys[slice(*step.keys)]
            assert q[-1] - q[0] == len(q) - 1
            assert k[-1] - k[0] == len(k) - 1
            add_window(counts, int(q[0]), len(q), int(k[0]), len(k), step.left, step.right)
    assert torch.equal(counts, visible(bounds, mask).int())


@given(packs(), masks(), st.integers(1, 5), LAYOUT, st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=25, deadline=None)
def test_exchange_delivers_the_keys_of_every_piece(bounds, mask, ranks, layout, split):
    """Also where some ranks attend with runs that see their own keys alone by themselves."""
    shares = laid_out(bounds, mask, ranks, layout)

    def share_of(r):
        far = [run for run in shares[r] if not is_alone(run, bounds, mask)]
        return Share(shares, r, bounds, mask, far if split[r] else None)

    worlds = [share_of(r) for r in range(ranks)]
    tokens = [
        torch.tensor([t for run in runs for t in range(run.start, run.stop)], dtype=torch.int64)
        for runs in shares
    ]
    for share in worlds:
        parts, whole = [], []
        for r, other in enumerate(worlds):
            assert other.send_rows[share.mine] == share.receive_rows[r]
            sent = tokens[r][other.send_index].split(other.send_rows)[share.mine]
            parts.append(sent)
            whole.append(torch.nn.functional.pad(tokens[r], (0, share.most_rows - len(tokens[r]))))
        wanted = [t for p in share.pieces for t in range(p.first_key, p.last_key)]
        assert torch.cat(parts)[share.needed_index].tolist() == wanted
        assert torch.cat(whole)[share.gathered_index].tolist() == wanted
        sums = torch.zeros(sum(share.receive_rows), dtype=torch.int64)
        for source, target in share.key_levels:
            assert len(target.unique()) == len(target)
            sums[target] += source * 0 + 1
        assert sums.sum() == share.key_count
        found = torch.zeros(share.rows[share.mine], dtype=torch.int64)
        expected = found.clone().index_add_(0, share.send_index, torch.ones_like(share.send_index))
        for source, target in share.touched_levels:
            found[share.touched_rows[target]] += source * 0 + 1
        assert torch.equal(found, expected)


@given(packs(), masks(), st.integers(1, 5), LAYOUT)
@settings(max_examples=25, deadline=None)
def test_lone_runs_see_their_own_keys_alone(bounds, mask, ranks, layout):
    shown = visible(bounds, mask)
    for run in (run for runs in laid_out(bounds, mask, ranks, layout) for run in runs):
        seen = shown[run.start : run.stop].any(0).nonzero().flatten()
        inside = len(seen) == 0 or (seen[0] >= run.start and seen[-1] < run.stop)
        # A window may see its keys alone and still be cut where one process starts a tile.
        assert inside or not is_alone(run, bounds, mask)
        if mask == Mask(-1, 0):
            assert is_alone(run, bounds, mask) == (run.start == bounds[run.document])


def test_lone_runs_are_apart_where_they_have_the_work():
    packed = plan(cu_seqlens=[0, 300, 500, 1000], causal=True, ranks=2, rank=0)
    near, far = packed.local(torch.device("cpu"), 2)
    assert near is not None
    others, row = [], 0
    for run in packed.shares[0]:
        count = run.stop - run.start
        if not is_alone(run, packed.bounds, packed.mask):
            others += range(row, row + count)
        row += count
    assert 0 < len(others) < row
    assert near.far_rows.tolist() == others + [row + i for i in others]
    assert far.rows == len(others)
    dense = plan(seqlen=1024, causal=True, ranks=2, rank=0)
    assert dense.local(torch.device("cpu"), 1)[0] is None  # an eighth of its work
    assert dense.exchanged.pieces == dense.share.pieces


@given(packs(20, 300), masks(), st.integers(1, 9), st.sampled_from([0.0, 0.02, 0.2]))
@settings(max_examples=40, deadline=None)
def test_documents_have_equal_tokens_and_work(bounds, mask, ranks, slack):
    """For masks of every kind: the exchange of tokens does not rely on a rising density."""
    shares = documents(bounds, ranks, mask, slack)
    held = sorted(t for runs in shares for run in runs for t in range(run.start, run.stop))
    assert held == list(range(bounds[-1]))
    assert all(0 <= run.document < len(bounds) - 1 for runs in shares for run in runs)
    rows = [_layout.rows_of(runs) for runs in shares]
    assert max(rows) - min(rows) <= 1
    work = Work(bounds, mask)
    works = [work.of_runs(runs) for runs in shares]
    # Work comes in tokens: the last one that moves, and the one that some ranks have more.
    densest = int(visible(bounds, mask).sum(1).max()) if bounds[-1] else 0
    assert max(works) <= (1.0 + slack) * sum(works) / ranks + 2 * densest


def law_pack(ranks: int, share: int, seed: int, sigma: float = 1.5) -> list[int]:
    """Lengths lognormal, median 2048, at most a fourth of the pack."""
    law, bounds, total = random.Random(seed), [0], ranks * share
    while bounds[-1] < total:
        length = max(int(law.lognormvariate(math.log(2048), sigma)), 16)
        bounds.append(min(bounds[-1] + min(length, total // 4), total))
    return bounds


def law_plan(ranks, share, seed, sigma):
    bounds = law_pack(ranks, share, seed, sigma)
    return plan(cu_seqlens=bounds, causal=True, layout="documents", ranks=ranks, rank=0)


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(("ranks", "worst"), [(2, 0.56), (8, 0.5), (64, 0.35)])
def test_documents_are_balanced(ranks, worst, sigma):
    """``worst``: part of an all-gather that the rank with the most of it receives."""
    for seed in range(8):
        one = law_plan(ranks, 8192, seed, sigma)
        assert one.imbalance <= 1.02
        assert one.needed_fraction <= worst
        # Who holds the last token of the longest document needs all keys before it.
        longest = max(b - a for a, b in itertools.pairwise(one.bounds))
        least = (longest - one.tokens) / (one.bounds[-1] - one.tokens)
        assert one.needed_fraction >= least


@pytest.mark.parametrize("sigma", [1.0, 1.5, 2.0])
def test_ranks_send_as_little_as_they_receive(sigma):
    """Of 64 ranks none sends more than 0.35 of an all-gather, and planning takes a part of a
    second."""
    for seed in range(8):
        bounds = law_pack(64, 8192, seed, sigma)
        started = time.process_time()
        shares = documents(bounds, 64, Mask(-1, 0), 0.02)
        assert time.process_time() - started < 3.0  # at most 0.5
        needs, others = Needs(shares, bounds, Mask(-1, 0)), bounds[-1] - 8192
        assert max(needs.sent) <= 0.35 * others
        assert max(needs.received) <= 0.35 * others
        assert _layout.imbalance(shares, bounds, Mask(-1, 0)) <= 1.02


@given(packs(), masks(), st.integers(1, 5), LAYOUT)
@settings(max_examples=25, deadline=None)
def test_needs_are_those_of_the_exchange(bounds, mask, ranks, layout):
    shares = laid_out(bounds, mask, ranks, layout)
    needs = Needs(shares, bounds, mask)
    for r in range(ranks):
        share = Share(shares, r, bounds, mask)
        assert needs.received[r] == sum(share.receive_rows) - share.receive_rows[r]
        assert needs.sent[r] == sum(share.send_rows) - share.send_rows[r]


@given(packs(20, 300), masks(), st.integers(1, 9), LAYOUT)
@settings(max_examples=25, deadline=None)
def test_levelling_keeps_tokens_and_work(bounds, mask, ranks, layout):
    """From every layout, also from those whose work is not balanced."""
    work = Work(bounds, mask)
    before = [list(runs) for runs in laid_out(bounds, mask, ranks, layout)]
    after = level(work, before, 0.02)
    held = sorted(t for runs in after for run in runs for t in range(run.start, run.stop))
    assert held == list(range(bounds[-1]))
    assert list(map(_layout.rows_of, after)) == list(map(_layout.rows_of, before))
    most = [max(map(work.of_runs, shares)) for shares in (before, after)]
    assert most[1] <= max(most[0], 1.02 * sum(map(work.of_runs, before)) / ranks)


LAYOUTS_OF = [
    (
        ([0, 40, 40, 64], 2, Mask(-1, 0)),
        [((0, 28, 0), (36, 40, 0)), ((28, 36, 0), (40, 64, 2))],
    ),
    (
        ([0, 700, 800, 1000, 1024], 4, Mask(-1, 0)),
        [
            ((0, 138, 0), (606, 696, 0), (700, 704, 1), (1000, 1024, 3)),
            ((176, 276, 0), (547, 606, 0), (859, 956, 2)),
            ((138, 176, 0), (388, 506, 0), (696, 700, 0), (704, 800, 1)),
            ((276, 388, 0), (506, 547, 0), (800, 859, 2), (956, 1000, 2)),
        ],
    ),
    (
        ([0, 300, 1000], 3, Mask(-1, -1)),
        [
            ((0, 102, 0), (768, 1000, 1)),
            ((102, 203, 0), (536, 768, 1)),
            ((203, 300, 0), (300, 536, 1)),
        ],
    ),
    (
        ([0, 512, 600, 900], 3, Mask(100, 20)),
        [
            ((0, 1, 0), (212, 423, 0), (512, 600, 1)),
            ((1, 212, 0), (423, 512, 0)),
            ((600, 900, 2),),
        ],
    ),
]


@pytest.mark.parametrize(("given", "expected"), LAYOUTS_OF)
def test_layouts_do_not_change(given, expected):
    """Data that was laid out by one version is read by the next; a change of this is meant."""
    shares = documents(*given, slack=0.02)
    assert [tuple(map(tuple, runs)) for runs in shares] == expected


def test_auto_layouts():
    assert plan(seqlen=1024, causal=True, ranks=4, rank=0).layout == "zigzag"
    assert plan(seqlen=1024, ranks=4, rank=0).layout == "contiguous"
    one = plan(seqlen=1000, causal=True, ranks=3, rank=1)
    assert one.runs[1][0].start > 0
    assert one.tokens == len(one.index) == len(one.positions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"seqlen": -1}, "seqlen is -1"),
        ({"cu_seqlens": [1, 2]}, "must start with 0"),
        ({"cu_seqlens": [0, 5, 3]}, "never decrease"),
        ({"seqlen": 8, "layout": "striped"}, "layout is 'striped'"),
        ({"seqlen": 8, "slack": -0.1}, "slack is -0.1"),
        ({"seqlen": 8, "rank": 2}, "rank is 2"),
    ],
)
def test_plan_refuses(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plan(**{"ranks": 2, "rank": 0, **arguments})


def test_te_zigzag_needs_lengths_that_divide():
    assert plan(cu_seqlens=[0, 8, 24], layout="te_zigzag", ranks=2, rank=0).tokens == 12
    with pytest.raises(ValueError, match="document 1 has 6 tokens"):
        plan(cu_seqlens=[0, 8, 14], layout="te_zigzag", ranks=2, rank=0)


def test_load_balancer_needs_equal_shares():
    with pytest.raises(ValueError, match="equal shares"):
        plan(seqlen=7, causal=True, ranks=2, rank=0).load_balancer()
