"""Ulysses: ranks exchange rows of all heads for all rows of some heads, and back.

Head counts need not divide by the ranks: rank r has the query heads from ``heads_q * r / ranks`` to
``heads_q * (r + 1) / ranks``, and the key heads that these attend with. A key head that several
ranks need goes to each of them, and its gradients are added in float32, in the order of ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pantile import _ops

Tensor = torch.Tensor
Range = tuple[int, int]


class HeadSplit(NamedTuple):
    """Of each rank of a group."""

    queries: list[Range]
    keys: list[Range]

    @staticmethod
    def of(heads_q: int, heads_k: int, ranks: int) -> HeadSplit:
        ratio = heads_q // heads_k
        queries = [(heads_q * r // ranks, heads_q * (r + 1) // ranks) for r in range(ranks)]
        keys = [(a // ratio, -(-b // ratio)) if b > a else (0, 0) for a, b in queries]
        return HeadSplit(queries, keys)


def local_calls(queries: Range, keys: Range, ratio: int) -> list[tuple[Range, Range]]:
    """Ranges of local query and key heads of equal group size, which a call can serve: one if the
    rank's query heads fall evenly on its key heads, otherwise one a key head."""
    (first_q, last_q), (first_k, last_k) = queries, keys
    if first_q == last_q:
        return []
    parts = []
    for head in range(first_k, last_k):
        a, b = max(head * ratio, first_q), min((head + 1) * ratio, last_q)
        parts.append(((a - first_q, b - first_q), (head - first_k, head - first_k + 1)))
    if len({b - a for (a, b), _ in parts}) == 1:
        return [((0, last_q - first_q), (0, last_k - first_k))]
    return parts


class Side(NamedTuple):
    """One side of the exchange: who has which rows and heads."""

    group: Any
    rank: int
    rows: list[int]  # of each rank
    heads: list[Range]  # of each rank
    order: Tensor | None  # of the rows, rank after rank: ascending
    inverse: Tensor | None


def _send(parts: list[Tensor], sizes: list[int], like: Tensor, group: Any) -> list[Tensor]:
    """Part r goes to rank r; ``sizes``: numbers of elements that come from each."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    received = like.new_empty(sum(sizes))
    sent = [part.numel() for part in parts]
    dist.all_to_all_single(received, flat, sizes, sent, group=group)
    return list(received.split(sizes))


def _to_heads(x: Tensor, side: Side) -> Tensor:
    """``[rows of this rank, batch, all heads, dim]`` to ``[all rows, batch, my heads, dim]``."""
    _, batch, _, dim = x.shape
    first, last = side.heads[side.rank]
    parts = [x[:, :, a:b] for a, b in side.heads]
    sizes = [rows * batch * (last - first) * dim for rows in side.rows]
    whole = torch.cat(_send(parts, sizes, x, side.group))
    whole = whole.view(sum(side.rows), batch, last - first, dim)
    return whole if side.order is None else whole.index_select(0, side.order)


def _to_rows(x: Tensor, side: Side) -> list[Tensor]:
    """Back: ``[rows of this rank, batch, heads of rank r, dim]`` of every rank r."""
    _, batch, _, dim = x.shape
    if side.inverse is not None:
        x = x.index_select(0, side.inverse)
    mine = side.rows[side.rank]
    sizes = [mine * batch * (b - a) * dim for a, b in side.heads]
    received = _send(list(x.split(side.rows)), sizes, x, side.group)
    return [
        part.view(mine, batch, b - a, dim)
        for part, (a, b) in zip(received, side.heads, strict=True)
    ]


def _sum_of_heads(parts: list[Tensor], side: Side, heads: int) -> Tensor:
    """[rows, batch, heads, dim]; heads of several ranks are added, in the order of ranks."""
    if sum(b - a for a, b in side.heads) == heads:
        return torch.cat(parts, 2)
    rows, batch, _, dim = parts[0].shape
    total = torch.zeros(rows, batch, heads, dim, dtype=torch.float32, device=parts[0].device)
    for part, (a, b) in zip(parts, side.heads, strict=True):
        total[:, :, a:b] += part
    return total.to(parts[0].dtype)


class ToHeads(torch.autograd.Function):
    """``[rows of this rank, batch, heads, dim]`` to ``[all rows, batch, heads of this rank, dim]``,
    rows ascending."""

    @staticmethod
    def forward(ctx, x: Tensor, side: Side):
        ctx.side, ctx.heads = side, x.shape[2]
        return _to_heads(x, side)

    @staticmethod
    @_ops.first_derivatives_only
    def backward(ctx, grad):
        return _sum_of_heads(_to_rows(grad, ctx.side), ctx.side, ctx.heads), None


class ToRows(torch.autograd.Function):
    """The way back, of query heads, each of which one rank has."""

    @staticmethod
    def forward(ctx, x: Tensor, side: Side):
        ctx.side = side
        return torch.cat(_to_rows(x, side), 2)

    @staticmethod
    @_ops.first_derivatives_only
    def backward(ctx, grad):
        return _to_heads(grad, ctx.side), None
