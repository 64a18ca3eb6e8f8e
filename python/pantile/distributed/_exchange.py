"""Attention where the keys come to the queries: ``gather`` and ``exchange``.

K and V of a few key heads at a time, double buffered:

    start 0 | start 1, wait 0, attend 0 | start 2, wait 1, attend 1 | ..

A rank receives all keys (``gather``, an all-gather) or those that its queries see (``exchange``, an
all-to-all), puts them in the order of its pieces, and attends in one packed call. A query meets the
key tiles that it meets in one process, in the same order: O and LSE have the bits of one process.

The backward receives the keys again. Gradients of keys are added in float32: first those of this
rank, then, by the owner, those of all ranks in their order, so that equal inputs give equal sums.
"""

from __future__ import annotations

from typing import Any

import torch

from pantile import _ops
from pantile.distributed._local import Local, Near, Settings
from pantile.distributed._statistics import Documents
from pantile.distributed._transfer import Pending, exchange, gather, sum_rows

Tensor = torch.Tensor


class Job:
    """One call: where its keys come from and how its heads are grouped."""

    def __init__(
        self,
        parts: tuple[Near | None, Local],
        group: Any,
        gathers: bool,
        head_groups: list[tuple[int, int]],
        settings: Settings,
        keep_keys: bool,
        wants_lse: bool,
        documents: Documents | None = None,
    ) -> None:
        self.near, self.local = parts
        self.share, self.group, self.gathers = self.local.share, group, gathers
        self.head_groups, self.settings = head_groups, settings
        self.keep_keys, self.wants_lse = keep_keys, wants_lse
        self.documents = documents  # in deterministic mode
        self.first: Pending | None = None  # of a prefetch

    def statistics(self, k: Tensor, v: Tensor) -> Tensor | None:
        """Of the keys of whole documents, where kernels need them."""
        if self.documents is None:
            return None
        return self.documents.exchange(k, v)

    def statistics_of(
        self, table: Tensor | None, local: Local, heads: slice | None = None
    ) -> list[Tensor]:
        """Of each call of ``local``, of some key heads."""
        if table is None or self.documents is None:
            return []
        some = table if heads is None else table[:, heads]
        return [some.index_select(0, index) for index in self.documents.of_calls(local)]

    def start(self, k: Tensor, v: Tensor, i: int) -> Pending:
        """Keys and values of head group ``i`` of ``[batch, rows, heads, dim]``."""
        heads = slice(*self.head_groups[i])
        some = k[:, :, heads], v[:, :, heads]
        if self.gathers:
            rows = torch.cat(some, -1).movedim(1, 0)
            return gather(rows, self.share.most_rows, self.share.count, self.group)
        index = self.local.send_index()
        if self.near is None:  # each row goes somewhere, as a rule: one copy of both
            rows = torch.cat(some, -1).movedim(1, 0).index_select(0, index)
        else:
            rows = torch.cat([x.index_select(1, index) for x in some], -1).movedim(1, 0)
        return exchange(rows, self.share.send_rows, self.share.receive_rows, self.group)

    def key_list(self, received: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """K and V ``[batch * key_count, heads, dim]``, as the packed calls read them."""
        rows = received.flatten(0, 1).index_select(0, self.local.key_index(self.gathers))
        return rows[..., :head_dim], rows[..., head_dim:]

    def give_back(self, grads: Tensor) -> Pending:
        return exchange(grads, self.share.receive_rows, self.share.send_rows, self.group)


class KeyExchange(torch.autograd.Function):
    """(o, lse) of local q ``[batch, rows, heads_q, dim]`` and k, v ``[batch, rows, heads_k, ..]``.

    lse is ``[batch, heads_q, rows]``.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, job: Job):
        batch, rows, heads_q, head_dim = q.shape
        ratio = heads_q // k.shape[2]
        flat_q, near = q.flatten(0, 1), job.near
        keep_low = any(ctx.needs_input_grad)
        kept, lows, outputs, near_lows = [], [], [], []
        pending = job.first or job.start(k, v, 0)
        if near is not None:  # while the keys of the others are on their way
            flat = flat_q, k.flatten(0, 1), v.flatten(0, 1)
            near_o, near_lse, near_lows = near.forward(*flat, job.settings, keep_low)
            flat_q = flat_q.index_select(0, near.far_rows)
        for i, (first, last) in enumerate(job.head_groups):
            following = job.start(k, v, i + 1) if i + 1 < len(job.head_groups) else None
            keys, values = job.key_list(pending.wait(), head_dim)
            part = flat_q[:, first * ratio : last * ratio]
            o, lse, low = job.local.forward(part, keys, values, job.settings, keep_low)
            outputs.append((o, lse))
            lows += low
            if job.keep_keys:
                kept += [keys, values]
            pending = following
        o = _joined([o for o, _ in outputs], 1)
        lse = _joined([lse for _, lse in outputs], 0)
        if near is not None:
            o = near_o.index_copy_(0, near.far_rows, o)
            lse = near_lse.index_copy_(1, near.far_rows, lse)
        ctx.save_for_backward(q, k, v, o, lse, *near_lows, *lows, *kept)
        ctx.job, ctx.low_count = job, len(near_lows) + len(lows)
        ctx.set_materialize_grads(False)
        o = o.view(batch, rows, heads_q, v.shape[-1])
        if not job.wants_lse:
            return o
        return o, lse.view(heads_q, batch, rows).transpose(0, 1).contiguous()

    @staticmethod
    @_ops.first_derivatives_only
    def backward(ctx, grad_o, grad_lse=None):
        job = ctx.job
        q, k, v, o, lse, *saved = ctx.saved_tensors
        if grad_o is None and grad_lse is None:
            return None, None, None, None
        lows, kept = saved[: ctx.low_count], saved[ctx.low_count :]
        heads_q, head_dim = q.shape[2:]
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o.flatten(0, 1)
        if grad_lse is not None:
            grad_lse = grad_lse.transpose(0, 1).flatten(1)
        flat_q, ratio = q.flatten(0, 1), heads_q // k.shape[2]
        per_group, near = len(job.local.calls), job.near
        grads_q = []
        pending = None if kept else job.start(k, v, 0)
        table = job.statistics(k, v)
        if near is None:
            owned = _Owned(job, k, v)
        else:
            near_grad_q, *grads = near.backward(
                *(grad_o, grad_lse, flat_q, k.flatten(0, 1), v.flatten(0, 1), o),
                *(lows[:1], lse, job.settings, job.statistics_of(table, near)),
            )
            owned, lows = _Added(job, *(x.unflatten(0, k.shape[:2]) for x in grads)), lows[1:]
            flat_q, o, grad_o = (x.index_select(0, near.far_rows) for x in (flat_q, o, grad_o))
            lse = lse.index_select(1, near.far_rows)
            grad_lse = None if grad_lse is None else grad_lse.index_select(1, near.far_rows)
        for i, (first, last) in enumerate(job.head_groups):
            if kept:
                keys, values = kept[2 * i : 2 * i + 2]
            else:
                more = i + 1 < len(job.head_groups)
                following = job.start(k, v, i + 1) if more else None
                keys, values = job.key_list(pending.wait(), head_dim)
                pending = following
            heads = slice(first * ratio, last * ratio)
            grad_q, grad_k, grad_v = job.local.backward(
                *(grad_o[:, heads], None if grad_lse is None else grad_lse[heads]),
                *(flat_q[:, heads], keys, values, o[:, heads]),
                *(lows[i * per_group : (i + 1) * per_group], lse[heads], job.settings),
                job.statistics_of(table, job.local, slice(first, last)),
            )
            grads_q.append(grad_q)
            owned.add(i, job.give_back(job.local.received_gradients(grad_k, grad_v)))
        grad_k, grad_v = owned.finish()
        grad_q = _joined(grads_q, 1)
        if near is not None:
            grad_q = near_grad_q.index_copy_(0, near.far_rows, grad_q)
        grads = grad_q.view(q.shape), grad_k, grad_v
        return *(x.to(leaf.dtype) for x, leaf in zip(grads, (q, k, v), strict=True)), None


class _Owned:
    """Gradients of this rank's keys, as they come back, one head group behind."""

    def __init__(self, job: Job, k: Tensor, v: Tensor) -> None:
        self._job, self._head_dim = job, k.shape[-1]
        self._grad_k = k.new_empty(k.shape)
        self._grad_v = v.new_empty(v.shape)
        self._pending: tuple[int, Pending] | None = None

    def add(self, i: int, pending: Pending) -> None:
        self._take()
        self._pending = i, pending

    def _take(self) -> None:
        if self._pending is None:
            return
        i, pending = self._pending
        self._pending = None
        self._put(pending.wait(), slice(*self._job.head_groups[i]))

    def _put(self, parts: Tensor, heads: slice) -> None:
        total = parts.new_empty((self._grad_k.shape[1], *parts.shape[1:]))
        sum_rows(total, parts, self._job.local.steps("owner_levels"))
        total = total.movedim(0, 1)
        self._grad_k[:, :, heads] = total[..., : self._head_dim]
        self._grad_v[:, :, heads] = total[..., self._head_dim :]

    def finish(self) -> tuple[Tensor, Tensor]:
        self._take()
        return self._grad_k, self._grad_v


class _Added(_Owned):
    """The same where this rank has made a part of them with its own queries."""

    def __init__(self, job: Job, grad_k: Tensor, grad_v: Tensor) -> None:
        self._job, self._head_dim = job, grad_k.shape[-1]
        self._grad_k, self._grad_v = grad_k, grad_v
        self._pending = None

    def _put(self, parts: Tensor, heads: slice) -> None:
        rows = self._job.local.touched_rows()
        if not len(rows):
            return
        total = parts.new_empty((len(rows), *parts.shape[1:]))
        sum_rows(total, parts, self._job.local.steps("touched_levels"))
        total = total.movedim(0, 1)
        split = self._head_dim
        for grad, more in ((self._grad_k, total[..., :split]), (self._grad_v, total[..., split:])):
            some = grad[:, :, heads]
            some.index_copy_(1, rows, (some.index_select(1, rows) + more).to(some.dtype))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
