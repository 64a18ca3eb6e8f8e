"""pantile.distributed: worlds of processes on gloo against one process, and the planner."""

from __future__ import annotations

import itertools
import math
import random
import re

import pantile
import pantile.distributed as pd
import pytest
import torch
from distributed_world import (
    Case,
    check_case,
    check_dead_peer,
    check_dense_call,
    check_dtensors,
    check_hidden_poison,
    check_megatron,
    check_modules,
    check_plan_calls,
    check_repeats,
    check_second_derivatives,
    check_training,
    check_wrappers,
    run_worlds,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pantile.distributed import _layout, plan
from pantile.distributed._layout import Mask, piece_of
from pantile.distributed._ring import steps_with
from pantile.distributed._share import Share

DOCUMENTS = {"lengths": (1, 7, 137, 0, 300, 55), "packed": True}
BOTH = {"causal": False, "window": (40, 9)}

CASES = {
    2: [
        Case("gather"),
        Case("exchange", **DOCUMENTS, options=(("keep_keys", True), ("head_groups", 2))),
        Case("gather", batch=2, heads=(6, 2), dims=(16, 24), options=(("head_groups", 2),)),
        Case("heads", batch=2, heads=(6, 2), dims=(24, 16)),
        Case("ring", **DOCUMENTS),
        Case("auto", causal=False),
        Case("gather", heads=(8, 1), dtype="bfloat16", options=(("deterministic", True),)),
        Case("ring", heads=(8, 1), dtype="bfloat16"),
    ],
    3: [
        Case("gather", **DOCUMENTS, **BOTH),
        Case("exchange", lengths=(900,), **BOTH, batch=2),
        Case("exchange", lengths=(600, 200, 100), packed=True, batch=2, layout="documents"),
        Case("gather", lengths=(2,)),
        Case("ring", lengths=(2,)),
        Case("ring", **BOTH, batch=2, dims=(16, 24)),
        Case("heads", **DOCUMENTS, heads=(6, 2)),
        Case("heads", heads=(8, 1), dtype="bfloat16"),
        Case("exchange", window=(30, None)),
        Case("gather", causal=False, window=(None, 13)),
    ],
    4: [
        Case("exchange", mesh=(2, 2), **DOCUMENTS),
        Case("gather", mesh=(2, 2), batch=2, heads=(6, 2)),
        Case("ring", mesh=(2, 2)),
        Case("heads", heads=(3, 1)),
        Case("auto", heads=(8, 2), **DOCUMENTS, dtype="bfloat16"),
    ],
    8: [
        Case("exchange", lengths=(300,), heads=(4, 1), dtype="bfloat16"),
        Case("heads", lengths=(60,), heads=(6, 2)),
    ],
}
OTHERS = [
    (2, check_repeats, Case("exchange", **DOCUMENTS)),
    (3, check_repeats, Case("ring", lengths=(150,))),
    (2, check_hidden_poison, Case("gather", lengths=(70, 80, 90), packed=True)),
    (3, check_plan_calls, Case(lengths=(70, 81), packed=True)),
    (2, check_dense_call, Case()),
    (2, check_training, Case("auto")),
    (2, check_megatron, Case(lengths=(48, 96, 16), heads=(4, 2))),
    (4, check_megatron, Case(lengths=(48, 96, 16), heads=(4, 2))),
    (2, check_modules, Case()),
    (2, check_dtensors, Case(batch=2)),
    (2, check_wrappers, Case()),
    (2, check_second_derivatives, Case(lengths=(40, 24), packed=True)),
    (2, check_dead_peer, Case("exchange")),
]
ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def verdicts():
    """Of everything that needs processes, run once."""
    worlds = [(size, check_case, cases) for size, cases in CASES.items()]
    worlds += [(size, check, [case]) for size, check, case in OTHERS]
    answers = run_worlds(worlds)
    keys = [*ALL, *((size, check.__name__) for size, check, _ in OTHERS)]
    return dict(zip(keys, itertools.chain.from_iterable(answers), strict=True))


@pytest.mark.parametrize(("size", "case"), ALL, ids=lambda x: getattr(x, "name", str(x)))
def test_agrees_with_one_process(verdicts, size, case):
    assert verdicts[size, case] is None, verdicts[size, case]


@pytest.mark.parametrize(
    ("size", "check"), [(size, check.__name__) for size, check, _ in OTHERS[:-1]]
)
def test_world(verdicts, size, check):
    assert verdicts[size, check] is None, verdicts[size, check]


def test_dead_peer_raises(verdicts):
    assert verdicts[2, "check_dead_peer"] == "rank 1: no answer"


# ---- the planner: no processes


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


LAYOUT = st.sampled_from(["contiguous", "zigzag", "documents"])


@given(packs(), masks(), st.integers(1, 5), LAYOUT, st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_pieces_compute_every_visible_pair_once(bounds, mask, ranks, layout, chunk):
    _, shares = _layout.make(bounds, ranks, mask, layout, chunk, 0.02)
    counts = torch.zeros(bounds[-1], bounds[-1], dtype=torch.int32)
    for runs in shares:
        for run in runs:
            p = piece_of(run, bounds, mask)
            keys = p.last_key - p.first_key
            add_window(counts, p.start, p.stop - p.start, p.first_key, keys, p.left, p.right)
    assert torch.equal(counts, visible(bounds, mask).int())


@given(packs(4, 40), masks(), st.integers(1, 4), LAYOUT, st.integers(1, 16))
@settings(max_examples=25, deadline=None)
def test_ring_steps_compute_every_visible_pair_once(bounds, mask, ranks, layout, chunk):
    _, shares = _layout.make(bounds, ranks, mask, layout, chunk, 0.02)
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


@given(packs(), masks(), st.integers(1, 5), LAYOUT)
@settings(max_examples=25, deadline=None)
def test_exchange_delivers_the_keys_of_every_piece(bounds, mask, ranks, layout):
    _, shares = _layout.make(bounds, ranks, mask, layout, None, 0.02)
    worlds = [Share(shares, r, bounds, mask) for r in range(ranks)]
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


@given(packs(20, 300), st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_documents_have_equal_tokens(bounds, ranks):
    for layout in ("documents", "contiguous", "zigzag"):
        _, shares = _layout.make(bounds, ranks, Mask(-1, 0), layout, None, 0.02)
        held = sorted(t for runs in shares for run in runs for t in range(run.start, run.stop))
        assert held == list(range(bounds[-1]))
        rows = [_layout.rows_of(runs) for runs in shares]
        if layout == "documents":
            assert max(rows) - min(rows) <= 1


def law_pack(ranks: int, share: int, seed: int) -> list[int]:
    """Lengths lognormal, median 2048, at most a fourth of the pack."""
    law, bounds, total = random.Random(seed), [0], ranks * share
    while bounds[-1] < total:
        length = max(int(law.lognormvariate(math.log(2048), 1.5)), 16)
        bounds.append(min(bounds[-1] + min(length, total // 4), total))
    return bounds


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_documents_are_balanced(ranks):
    received = []
    for seed in range(5):
        bounds = law_pack(ranks, 8192, seed)
        one = plan(cu_seqlens=bounds, causal=True, layout="documents", ranks=ranks, rank=0)
        assert one.imbalance <= 1.03
        received.append(one.needed_fraction)
    if ranks == 64:  # of the worst rank; a pack of few long documents needs more
        assert sorted(received)[2] <= 0.35
        assert max(received) <= 0.5


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
        ({"seqlen": 8, "chunk": 0}, "chunk is 0"),
        ({"seqlen": 8, "rank": 2}, "rank is 2"),
    ],
)
def test_plan_refuses(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        plan(**{"ranks": 2, "rank": 0, **arguments})


def one_rank_plan(**named):
    """Of a world of one, which needs no process group."""
    return plan(**{"seqlen": 8, "causal": True, "ranks": 1, "rank": 0, **named})


def tensors(tokens=8, heads_q=4, heads_k=2, dim=16):
    return [torch.randn(tokens, h, dim) for h in (heads_q, heads_k, heads_k)]


def test_one_rank_is_one_process():
    q, k, v = tensors()
    whole = pantile.attention(q[None], k[None], v[None], causal=True)[0]
    assert torch.equal(pd.attention(q, k, v, plan=one_rank_plan()), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": 3}, "plan is 3"),
        ({"causal": True}, "belong to the plan"),
        ({"plan": plan(seqlen=16, ranks=2, rank=0)}, "does not communicate"),
        ({"method": "striped"}, "method is 'striped'"),
        ({"head_groups": 0}, "head_groups is 0"),
        ({"deterministic": 1}, "deterministic is 1"),
        ({"scale": "a"}, "scale is 'a'"),
        ({"prefetched": 5}, "prefetched is 5"),
        ({"options": pantile.Options(fp8=True)}, "options.fp8 is set"),
        ({"options": pantile.Options(output_dtype="float32")}, "options.output_dtype is set"),
        ({"q": torch.randn(7, 4, 16)}, "q has 7 tokens; the plan has 8 on rank 0"),
        ({"k": torch.randn(8, 3, 16), "v": torch.randn(8, 3, 16)}, "q has 4 heads"),
        ({"v": torch.randn(8, 1, 16)}, "v has 1 heads"),
        ({"k": torch.randn(8, 2, 24)}, "k has head dim 24"),
        ({"k": torch.randn(8, 2, 16).bfloat16()}, "k is torch.bfloat16"),
        ({"q": "text"}, "q is 'text'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_attention_refuses(change, message):
    q, k, v = tensors()
    arguments = {"q": q, "k": k, "v": v, "plan": one_rank_plan(), **change}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        pd.attention(**arguments)


def test_te_zigzag_needs_lengths_that_divide():
    assert plan(cu_seqlens=[0, 8, 24], layout="te_zigzag", ranks=2, rank=0).tokens == 12
    with pytest.raises(ValueError, match="document 1 has 6 tokens"):
        plan(cu_seqlens=[0, 8, 14], layout="te_zigzag", ranks=2, rank=0)


def test_load_balancer_needs_equal_shares():
    with pytest.raises(ValueError, match="equal shares"):
        plan(seqlen=7, causal=True, ranks=2, rank=0).load_balancer()
