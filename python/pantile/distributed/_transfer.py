"""Moves rows of keys and values to the ranks that need them, and gradients back to their owners.

Rows are the first dimension of every buffer: ``[rows, batch, heads, head_dim + head_dim_v]``, K and
V side by side. A transfer is started, and waited for when its rows are used; nothing waits on the
host where the group runs on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """Rows that are on their way."""

    def __init__(self, rows: Tensor, work: Any, sent: Tensor) -> None:
        self._rows, self._work, self._sent = rows, work, sent

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._sent = None
        return self._rows


def exchange(rows: Tensor, send_rows: list[int], receive_rows: list[int], group: Any) -> Pending:
    """``send_rows[r]`` rows go to rank r, in order; ``receive_rows[r]`` come from it."""
    received = rows.new_empty((sum(receive_rows), *rows.shape[1:]))
    work = dist.all_to_all_single(
        received, rows.contiguous(), receive_rows, send_rows, group=group, async_op=True
    )
    return Pending(received, work, rows)


def gather(rows: Tensor, most_rows: int, size: int, group: Any) -> Pending:
    """The rows of every rank, ``most_rows`` places for each; the places that one lacks hold
    anything."""
    if len(rows) < most_rows:
        padded = rows.new_empty((most_rows, *rows.shape[1:]))
        padded[: len(rows)] = rows
        padded[len(rows) :].zero_()  # what is sent is defined
        rows = padded
    received = rows.new_empty((size * most_rows, *rows.shape[1:]))
    work = _all_gather(received, rows.contiguous(), group=group, async_op=True)
    return Pending(received, work, rows)


def sum_rows(
    target: Tensor, source: Tensor, steps: list[tuple[Tensor, Tensor]], dim: int = 0
) -> None:
    """``target[to] = sum(source[from])`` along ``dim`` over the (from, to) of every step, in order.

    Steps as :func:`pantile.distributed._share.levels` makes them: the targets of a step ascend and
    are among those of the step before. Targets of no step become 0.
    """
    if not steps or len(steps[0][1]) < target.shape[dim]:
        target.zero_()
    for i, (chosen, to) in enumerate(steps):
        part = source.index_select(dim, chosen)
        if i == 0 and len(to) == target.shape[dim]:
            target.copy_(part)
        else:
            target.index_add_(dim, to, part.to(target.dtype))
