"""The shapes that the benchmarks time, in the small, against float64: one catalogue for both."""

from __future__ import annotations

import pytest
import torch
from pantile.bench import cases
from support import check_both, dense, packed


def catalogue() -> list[cases.Case]:
    """Each head dim and mask of the grid once, the special cases, the packed batch."""
    return [*cases.grid(lengths=[4096]), *cases.special(), cases.varlen()]


@pytest.mark.parametrize("case", catalogue(), ids=lambda case: case.name)
def test_is_right(target, case):
    chosen = cases.small(case, longest=100)
    dtype = torch.float32 if target.device == "cpu" else torch.bfloat16
    arguments = {"causal": chosen.causal}
    if chosen.window_left is not None:
        arguments["window"] = (chosen.window_left, 0)
    shape = {
        "heads": chosen.heads_q,
        "heads_k": chosen.heads_k,
        "head_dim": chosen.head_dim,
    }
    if chosen.lengths is None:
        rows = {"batch": chosen.batch, "rows": chosen.seqlen, "keys": chosen.seqlen}
        check_both(dense(target, dtype, **rows, **shape, **arguments), target)
    else:
        lengths = list(chosen.lengths)
        check_both(packed(target, lengths, lengths, dtype, **shape, **arguments), target)


def test_small_cases_keep_what_makes_them_special():
    for case in catalogue():
        small = cases.small(case)
        assert small.seqlen <= 200
        assert small.heads_q // small.heads_k == case.heads_q // case.heads_k
        assert (small.head_dim, small.causal) == (case.head_dim, case.causal)
        if case.window_left is not None:
            assert 0 < small.window_left < small.seqlen
        if case.lengths is not None:
            assert small.batch == len(small.lengths)
            assert max(small.lengths) == small.seqlen
            assert min(small.lengths) < 5
