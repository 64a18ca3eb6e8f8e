"""pantile.distributed: worlds of processes on gloo against one process."""

from __future__ import annotations

import itertools
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
    check_random,
    check_repeats,
    check_second_derivatives,
    check_silent_peer,
    check_statistics,
    check_training,
    check_transforms,
    check_two_plans,
    check_wrappers,
    run_worlds,
)
from pantile.distributed import plan

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
        Case("exchange", heads=(8, 8), dims=(24, 16), lengths=(90, 40), packed=True),
    ],
    3: [
        Case("gather", **DOCUMENTS, **BOTH),
        Case("exchange", lengths=(900,), **BOTH, batch=2),
        Case("exchange", lengths=(600, 200, 100), packed=True, batch=2, layout="documents"),
        Case("gather", lengths=(2,)),
        Case("exchange", lengths=(2,)),
        Case("heads", lengths=(2,), heads=(2, 1)),
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
        Case("gather", **DOCUMENTS, dtype="bfloat16", options=(("deterministic", True),)),
        Case("heads", lengths=(60,), heads=(6, 2)),
    ],
}
SKEWED = {"lengths": (1, 7, 900, 0, 300, 55), "packed": True, "dtype": "bfloat16"}
OTHERS = [
    (2, check_statistics, Case("exchange", **SKEWED)),
    (2, check_statistics, Case("gather", lengths=(300,), batch=2, dims=(24, 16))),
    (3, check_statistics, Case("exchange", **SKEWED, batch=2)),
    (3, check_statistics, Case("gather", **DOCUMENTS, **BOTH)),
    (4, check_statistics, Case("gather", **SKEWED)),
    (8, check_statistics, Case("exchange", **SKEWED, heads=(8, 2))),
    (8, check_statistics, Case("gather", lengths=(400,), dtype="bfloat16")),
    (2, check_repeats, Case("exchange", **DOCUMENTS)),
    (3, check_repeats, Case("ring", lengths=(150,))),
    (2, check_repeats, Case("gather", lengths=(12, 20), packed=True, heads=(2, 1))),
    (2, check_random, Case()),
    (3, check_random, Case("auto")),
    (2, check_two_plans, Case("exchange", **DOCUMENTS)),
    (2, check_silent_peer, Case(lengths=(32,))),
    (2, check_transforms, Case(lengths=(32,))),
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
NAMES = [(size, f"{check.__name__} {case.name}") for size, check, case in OTHERS]
ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def verdicts():
    """Of everything that needs processes, run once."""
    worlds = [(size, check_case, cases) for size, cases in CASES.items()]
    worlds += [(size, check, [case]) for size, check, case in OTHERS]
    answers = run_worlds(worlds)
    keys = [*ALL, *NAMES]
    return dict(zip(keys, itertools.chain.from_iterable(answers), strict=True))


@pytest.mark.parametrize(("size", "case"), ALL, ids=lambda x: getattr(x, "name", str(x)))
def test_agrees_with_one_process(verdicts, size, case):
    assert verdicts[size, case] is None, verdicts[size, case]


@pytest.mark.parametrize(("size", "check"), NAMES[:-1])
def test_world(verdicts, size, check):
    assert verdicts[size, check] is None, verdicts[size, check]


def test_dead_peer_raises(verdicts):
    assert verdicts[NAMES[-1]] == "rank 1: no answer"


# ---- one rank: no processes


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
