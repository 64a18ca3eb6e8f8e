"""Every row of the kernel table. Parametrized over the table, so that no row is without a test."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import (
    DTYPES,
    Target,
    assert_same_bits,
    backward_inputs,
    check_backward,
    check_forward,
    dense,
    packed,
    run_backward,
)

pantile.load_torch()

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


def row_lengths(row: dict, *lengths: tuple[int, int]) -> list[tuple[int, int]]:
    """Queries and keys to try. The reference has no tiles and is slow: a quarter of them."""
    divisor = 4 if row["backend"] == "reference" else 1
    return [(-(-queries // divisor), -(-keys // divisor)) for queries, keys in lengths]


def chosen(row: dict, case, target: Target, **extra) -> pantile.PassExplanation:
    return getattr(case.explain(options=target.options, **extra), row["pass"])


def check_row(row: dict, case, target: Target) -> None:
    """The case runs on exactly this row, within the contract. A backward row is tried alone: the
    table may have no forward row of its family for the same problem."""
    plan = chosen(row, case, target)
    assert plan.kernel == row["name"], "\n".join(plan.lines(row["name"]))
    if row["pass"] == "forward":
        check_forward(case, target)
    else:
        check_backward(case, target, with_lse=True)
        check_backward(case, target, with_lse=False)


@pytest.fixture
def compiled_row(row, record_property):
    record_property("kernel", row["name"])
    if not row["compiled"]:
        pytest.skip("not compiled into this build")
    return row


def row_case(row: dict, rows: int, keys: int, arguments: dict, dims=None, batch: int = 2):
    head_dim, head_dim_v = dims or row_dims(row)[0]
    return dense(
        row_target(row),
        DTYPES[row["dtype"]],
        batch=batch,
        rows=rows,
        keys=keys,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        **arguments,
    )


def test_row_is_within_bound(compiled_row):
    for dims in row_dims(compiled_row):
        for arguments in row_masks(compiled_row):
            for rows, keys in row_lengths(compiled_row, (131, 131), (70, 259), (2, 77)):
                case = row_case(compiled_row, rows, keys, arguments, dims)
                check_row(compiled_row, case, row_target(compiled_row))


def test_row_serves_the_largest_head_dim(compiled_row):
    dims = compiled_row["head_dim"], compiled_row["head_dim_v"]
    case = row_case(compiled_row, 40, 45, row_masks(compiled_row)[0], dims, batch=1)
    check_row(compiled_row, case, row_target(compiled_row))


def test_row_serves_smaller_head_dims(compiled_row):
    """Columns that are only padding in the tile. Another row may be nearer; then it is tested."""
    dims = compiled_row["head_dim"] - 8, compiled_row["head_dim_v"] - 8
    case = row_case(compiled_row, 40, 45, row_masks(compiled_row)[0], dims, batch=1)
    plan = chosen(compiled_row, case, row_target(compiled_row))
    if plan.kernel != compiled_row["name"]:
        pytest.skip(f"{plan.kernel or plan.reason}")
    check_row(compiled_row, case, row_target(compiled_row))


@pytest.mark.parametrize("outliers", [False, True], ids=["ramp", "outliers"])
def test_row_with_moving_maxima(compiled_row, outliers):
    """Along the keys the scores of every other row rise by far more than rounding or a lazy maximum
    forgives, those of the others fall: whichever way a kernel walks, some maxima grow each step.
    Or they jump at single keys, so that no part of a step tells of the rest."""
    if compiled_row["pass"] != "forward":
        pytest.skip("a matter of the forward")
    for arguments in row_masks(compiled_row):
        case = row_case(compiled_row, *row_lengths(compiled_row, (150, 700))[0], arguments)
        sign = torch.ones(case.q.shape[1], 1, dtype=case.q.dtype, device=case.q.device)
        sign[::2] = -1
        case.q[..., 0] = sign
        heights = torch.linspace(0, 100, case.k.shape[1], dtype=torch.float64)
        if outliers:
            heights = 100.0 * (torch.arange(case.k.shape[1]) % 97 == 37)
        case.k[..., 0] = (heights * case.q.shape[-1] ** 0.5).to(case.k)[:, None]
        check_forward(case, row_target(compiled_row))


def test_row_packed_sequences(compiled_row):
    """Lengths around tile edges, empty sequences on either side."""
    target = row_target(compiled_row)
    head_dim, head_dim_v = row_dims(compiled_row)[0]
    for arguments in row_masks(compiled_row):
        case = packed(
            target,
            [65, 0, 1, 128, 30],
            [64, 5, 0, 129, 200],
            DTYPES[compiled_row["dtype"]],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            **arguments,
        )
        plan = chosen(compiled_row, case, target)
        if plan.kernel is None:
            pytest.skip(plan.reason)
        check_row(compiled_row, case, target)


def test_row_repeats_bit_for_bit(compiled_row):
    """Equal inputs give equal bits, with deterministic=True for the backward."""
    target = row_target(compiled_row)
    lengths = row_lengths(compiled_row, (150, 170))[0]
    case = row_case(compiled_row, *lengths, row_masks(compiled_row)[0])
    plan = chosen(compiled_row, case, target, deterministic=True)
    if plan.kernel is None:
        pytest.skip(plan.reason)
    if compiled_row["pass"] == "forward":
        runs = [case.ours(*case.operands, options=target.options) for _ in range(5)]
    else:
        inputs = backward_inputs(case, with_lse=True)
        runs = [run_backward(case, target, inputs, deterministic=True) for _ in range(5)]
    for run in runs[1:]:
        assert_same_bits(runs[0], run, range(len(run)))


def test_table_is_complete():
    """The host rows serve every dtype in both passes; names are unique."""
    table = pantile.kernels()
    assert len({row["name"] for row in table}) == len(table)
    for backend in ("cpu", "reference"):
        for pass_ in ("forward", "backward"):
            found = {
                row["dtype"] for row in table if row["backend"] == backend and row["pass"] == pass_
            }
            assert found - {"e4m3"} == set(DTYPES)
