"""Every row of the kernel table. Parametrized over the table, so that no row is without a test."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import DTYPES, Target, assert_same_bits, check_both, check_forward, dense, packed

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (33, 12)}}


def row_target(row: dict) -> Target:
    return Target(row["backend"], "cpu" if row["backend"] in ("cpu", "reference") else "cuda")


def row_masks(row: dict) -> list[dict]:
    return list(MASKS.values()) if row["mask"] == "any" else [MASKS[row["mask"]]]


def row_dims(row: dict) -> list[tuple[int, int]]:
    """Head dims to try: what the row is made for; the host rows take any."""
    if row["backend"] in ("cpu", "reference"):
        return [(64, 64), (40, 72), (1, 3)]
    return [(row["head_dim"], row["head_dim_v"])]


def check_row(row: dict, case, target: Target) -> None:
    """The case runs on exactly this row, within the contract."""
    plan = case.explain(options=target.options)
    chosen = getattr(plan, row["pass"])
    assert chosen.kernel == row["name"], f"{row['name']} expected:\n{plan}"
    if row["pass"] == "forward":
        check_forward(case, target)
    else:
        check_both(case, target, with_lse=True)


@pytest.fixture
def compiled_row(row, record_property):
    record_property("kernel", row["name"])
    if not row["compiled"]:
        pytest.skip("not compiled into this build")
    return row


def test_row_is_within_bound(compiled_row):
    target = row_target(compiled_row)
    dtype = DTYPES[compiled_row["dtype"]]
    for head_dim, head_dim_v in row_dims(compiled_row):
        for arguments in row_masks(compiled_row):
            for rows, keys in ((131, 131), (70, 259), (1, 77)):
                case = dense(
                    target,
                    dtype,
                    rows=rows,
                    keys=keys,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    **arguments,
                )
                check_row(compiled_row, case, target)


def test_row_serves_the_largest_head_dim(compiled_row):
    target = row_target(compiled_row)
    case = dense(
        target,
        DTYPES[compiled_row["dtype"]],
        batch=1,
        rows=19,
        keys=21,
        head_dim=compiled_row["head_dim"],
        head_dim_v=compiled_row["head_dim_v"],
        **row_masks(compiled_row)[0],
    )
    check_row(compiled_row, case, target)


def test_row_packed_sequences(compiled_row):
    """Lengths around tile edges, empty sequences on either side."""
    target = row_target(compiled_row)
    for arguments in row_masks(compiled_row):
        case = packed(
            target,
            [65, 0, 1, 128, 30],
            [64, 5, 0, 129, 200],
            DTYPES[compiled_row["dtype"]],
            head_dim=min(compiled_row["head_dim"], 128),
            **arguments,
        )
        plan = case.explain(options=target.options)
        if getattr(plan, compiled_row["pass"]).kernel is None:
            pytest.skip(getattr(plan, compiled_row["pass"]).reason)
        check_both(case, target)


def test_row_repeats_bit_for_bit(compiled_row):
    """Equal inputs give equal bits, with deterministic=True for the backward."""
    target = row_target(compiled_row)
    head_dim, head_dim_v = row_dims(compiled_row)[0]
    case = dense(
        target,
        DTYPES[compiled_row["dtype"]],
        rows=150,
        keys=170,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        **row_masks(compiled_row)[0],
    )
    if compiled_row["pass"] == "forward":
        runs = [case.ours(*case.operands, options=target.options) for _ in range(5)]
    else:
        runs = []
        for _ in range(5):
            leaves = [x.detach().requires_grad_() for x in case.operands]
            o, lse = case.ours(*leaves, options=target.options, deterministic=True)
            runs.append([o, lse, *torch.autograd.grad((o * o).sum(), leaves)])
    for run in runs[1:]:
        assert_same_bits(runs[0], run, ("o", "lse", "dq", "dk", "dv")[: len(run)])


def test_table_is_complete():
    """The host rows serve every dtype in both passes; names are unique."""
    table = pantile.kernels()
    assert len({row["name"] for row in table}) == len(table)
    for backend in ("cpu", "reference"):
        for pass_ in ("forward", "backward"):
            found = {
                row["dtype"] for row in table if row["backend"] == backend and row["pass"] == pass_
            }
            assert found == set(DTYPES)
