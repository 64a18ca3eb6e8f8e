"""Attention where keys travel in a ring: for lengths at which a share of all keys does not fit.

Step s attends with the keys of rank ``r - s`` while those of the next step are on their way. Parts
of O are float32 and are joined by their LSE. In the backward the gradients of keys travel with the
keys, in float32, and arrive where they belong after the last step. With the LSE and the row term of
the whole row each step's contribution is exact: nothing is differentiated through the joins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pantile import _ops
from pantile._masks import UNBOUNDED
from pantile.distributed._local import Settings, make_call
from pantile.distributed._share import Share

Tensor = torch.Tensor


class Step(NamedTuple):
    """Queries of this rank against keys of another: a dense call."""

    rows: tuple[int, int]
    keys: tuple[int, int]  # of the rows of the other rank
    left: int
    right: int


def _visible(run, other, mask) -> Step | None:
    """Of two runs of one document: what of ``other`` the queries of ``run`` see; rows relative to
    the starts of the runs. Queries that see nothing of it are left out, so that the window bounds
    of the call are never negative."""
    start, stop, first, last = run.start, run.stop, other.start, other.stop
    if mask.right != UNBOUNDED:
        start = max(start, first - mask.right)
        last = min(last, stop + mask.right)
    if mask.left != UNBOUNDED:
        stop = min(stop, last + mask.left)
        first = max(first, start - mask.left)
    if start >= stop or first >= last:
        return None
    extra = last - stop  # as in piece_of; below 0 where the keys end before the queries
    left = UNBOUNDED if mask.left == UNBOUNDED else mask.left + extra
    right = UNBOUNDED if mask.right == UNBOUNDED else mask.right - extra
    if right >= stop - start - 1:
        right = UNBOUNDED  # hides nothing, and the full mask has the faster kernel
    if left >= last - first - 1:
        left = UNBOUNDED
    return Step(
        (start - run.start, stop - run.start),
        (first - other.start, last - other.start),
        left,
        right,
    )


def _starts(runs) -> list[int]:
    starts, row = [], 0
    for run in runs:
        starts.append(row)
        row += run.stop - run.start
    return starts


def steps_with(share: Share, other: int) -> list[Step]:
    if other not in share.ring_steps:
        share.ring_steps[other] = _make_steps(share, other)
    return share.ring_steps[other]


def _make_steps(share: Share, other: int) -> list[Step]:
    mine, theirs = share.shares[share.mine], share.shares[other]
    steps = []
    for run, row in zip(mine, _starts(mine), strict=True):
        for source, key in zip(theirs, _starts(theirs), strict=True):
            step = _visible(run, source, share.mask) if run.document == source.document else None
            if step is not None:
                rows = step.rows[0] + row, step.rows[1] + row
                keys = step.keys[0] + key, step.keys[1] + key
                steps.append(step._replace(rows=rows, keys=keys))
    return steps


def merge_into(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> None:
    """Joins a part into o ``[batch, rows, heads, dim]`` and lse ``[batch, heads, rows]``, float32.

    ``o += w (part - o)`` with ``w = exp(part_lse - lse_of_both)`` cannot overflow. A row without
    keys in the part stays as it is.
    """
    both = torch.logaddexp(lse, part_lse)
    weight = torch.exp(part_lse - both).masked_fill_(part_lse == -torch.inf, 0.0)
    o.lerp_(part_o, weight.transpose(1, 2)[..., None])
    lse.copy_(both)


class _Turn:
    """What is under way between neighbours of the ring: one tensor to the next rank, one from the
    one before."""

    def __init__(self, tensor: Tensor, shape: tuple, share: Share, group: Any, tag: int) -> None:
        rank, size = share.mine, share.count
        self.received = tensor.new_empty(shape)
        to, source = (rank + 1) % size, (rank - 1) % size
        if group is not None and group is not dist.group.WORLD:
            to, source = (dist.get_global_rank(group, r) for r in (to, source))
        works = [
            dist.P2POp(operation, x, peer, group, tag)
            for operation, x, peer in (
                (dist.isend, tensor, to),
                (dist.irecv, self.received, source),
            )
            if x.numel()  # a rank may have no rows, which both sides know
        ]
        self._works = dist.batch_isend_irecv(works) if works else []
        self._sent = tensor

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        self._sent = None
        return self.received


class RingJob(NamedTuple):
    share: Share
    group: Any
    settings: Settings
    wants_lse: bool

    def source(self, step: int) -> int:
        return (self.share.mine - step) % self.share.count

    def turn(self, tensor: Tensor, step: int, tag: int = 0) -> _Turn:
        """Sends what belongs to the source of ``step``; receives that of the step after it."""
        rows = self.share.rows[self.source(step + 1)]
        return _Turn(tensor, (rows, *tensor.shape[1:]), self.share, self.group, tag)


def _dense(x: Tensor, part: tuple[int, int]) -> Tensor:
    return x[:, part[0] : part[1]]


class Ring(torch.autograd.Function):
    """As :class:`pantile.distributed._exchange.KeyExchange`."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, job: RingJob):
        batch, rows, heads, head_dim = q.shape
        o = q.new_zeros((batch, rows, heads, v.shape[-1]), dtype=torch.float32)
        lse = q.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32)
        held = torch.cat((k, v), -1).movedim(1, 0).contiguous()
        for s in range(job.share.count):
            turn = job.turn(held, s) if s + 1 < job.share.count else None
            keys = held.movedim(0, 1)
            for step in steps_with(job.share, job.source(s)):
                call = make_call(job.settings, None, None, 0, 0, (step.left, step.right))
                part = _dense(keys, step.keys)
                part_o, part_lse, _, _ = _ops._dispatch(
                    *(_dense(q, step.rows), part[..., :head_dim], part[..., head_dim:], call),
                    *(job.settings.deterministic, False, False, (False, True)),
                )
                where = slice(*step.rows)
                whole_lse = lse[:, :, where].contiguous()
                merge_into(o[:, where], whole_lse, part_o, part_lse)
                lse[:, :, where] = whole_lse
            held = turn.wait() if turn else held
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return (o.to(q.dtype), lse) if job.wants_lse else o.to(q.dtype)

    @staticmethod
    @_ops.first_derivatives_only
    def backward(ctx, grad_o, grad_lse=None):
        job, share = ctx.job, ctx.job.share
        q, k, v, o, lse = ctx.saved_tensors
        if grad_o is None and grad_lse is None:
            return None, None, None, None
        grad_o = torch.zeros_like(o, dtype=q.dtype) if grad_o is None else grad_o
        # dS = P (dO V^T - delta + dLSE), of the whole row: an O of zeros has a delta of zero, and
        # what is given for dLSE is the rest.
        row_term = -(grad_o.float() * o).sum(-1).transpose(1, 2)
        if grad_lse is not None:
            row_term = row_term + grad_lse
        row_term = row_term.masked_fill(lse == -torch.inf, 0.0)
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        held = torch.cat((k, v), -1).movedim(1, 0).contiguous()
        wide = q.device.type == "cpu"  # as in Local.backward
        if wide:
            q, grad_o = q.float(), grad_o.float()
        nothing = torch.zeros_like(grad_o)
        grads = torch.zeros_like(held, dtype=torch.float32)
        turn = grads_turn = None
        for s in range(share.count):
            turn = job.turn(held, s) if s + 1 < share.count else None
            keys, head_dim = held.movedim(0, 1), q.shape[-1]
            keys = keys.float() if wide else keys
            fresh = []
            for step in steps_with(share, job.source(s)):
                where, part = slice(*step.rows), _dense(keys, step.keys)
                call = make_call(job.settings, None, None, 0, 0, (step.left, step.right))
                dq, dk, dv = _ops.backward_op(
                    *(_dense(grad_o, step.rows), row_term[:, :, where].contiguous()),
                    *(_dense(q, step.rows), part[..., :head_dim], part[..., head_dim:]),
                    *(_dense(nothing, step.rows), None, lse[:, :, where].contiguous(), *call),
                    job.settings.deterministic,
                )
                grad_q[:, where] += dq
                fresh.append((step.keys, dk, dv))
            if grads_turn is not None:  # gradients follow the keys one step behind
                grads = grads_turn.wait()
            for (a, b), dk, dv in fresh:
                grads[a:b, ..., :head_dim] += dk.movedim(1, 0)
                grads[a:b, ..., head_dim:] += dv.movedim(1, 0)
            if share.count > 1:
                grads_turn = job.turn(grads, s, 1)
            held = turn.wait() if turn else held
        grads = (grads_turn.wait() if grads_turn else grads).movedim(0, 1)
        return (
            *(grad_q.to(k.dtype), grads[..., :head_dim].to(k.dtype).contiguous()),
            *(grads[..., head_dim:].to(v.dtype).contiguous(), None),
        )
