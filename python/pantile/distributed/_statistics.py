"""What a deterministic backward must know of keys that lie on several ranks.

GPUs add dQ up as integers, whose unit comes from the largest key and value of a sequence, and take
the mean of some of its keys away where it is large (``KeyStatistics`` of the core). A rank attends
with a part of a document. So the ranks exchange the bounds of their parts, which unite, and those
keys of which the mean is taken; every call then is given the statistics of whole documents, and dQ
has the bits of one process.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from pantile._direct import key_statistics
from pantile._options import DEFAULT_OPTIONS
from pantile._schema import bind
from pantile.distributed._layout import Mask, Run
from pantile.distributed._local import Local, Settings, make_call
from pantile.distributed._share import Share, levels

Tensor = torch.Tensor

_MAXIMA, _BOUNDS = 2, 6  # of a row of statistics: larger ones, then sums; the mean behind 7
_UNBOUNDED = Mask(-1, -1)


def sample_places(keys: int, head_dim: int) -> list[int]:
    """The keys of which a mean is taken: ``key_sample`` of cpp/core/integer_unit.h."""
    samples = 64 if head_dim <= 128 else 32
    return [(2 * i + 1) * keys // (2 * samples) for i in range(samples)]


class Documents:
    """The statistics of the documents of a share, for one device and batch size."""

    def __init__(self, share: Share, group: Any, device: torch.device, batch: int) -> None:
        self.group, self.device, self.batch = group, device, batch
        self.bounds = share.bounds
        self.runs: list[Run] = list(share.shares[share.mine])
        holders: dict[int, set[int]] = {}
        for rank, runs in enumerate(share.shares):
            for run in runs:
                holders.setdefault(run.document, set()).add(rank)
        # Equal on all ranks: those of which several have a part.
        self.split = sorted(document for document, ranks in holders.items() if len(ranks) > 1)
        self._number = {document: i for i, document in enumerate(self.split)}
        lengths = [run.stop - run.start for run in self.runs]
        self.rows = list(accumulate(lengths, initial=0))
        self._longest = max(lengths, default=0)
        self._packing = self._cu_seqlens(lengths * batch)
        mine = [i for i, run in enumerate(self.runs) if run.document in self._number]
        numbers = torch.tensor(
            [self._number[self.runs[i].document] for i in mine], dtype=torch.int64
        )
        # Which runs unite in which document, step by step.
        self._steps = [
            (torch.tensor(mine, dtype=torch.int64)[a].to(device), b.to(device))
            for a, b in levels(numbers)
        ]
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}
        self._sample_packing: dict[int, Tensor] = {}
        self._of_calls: dict[Local, list[Tensor]] = {}

    def _cu_seqlens(self, lengths: list[int]) -> Tensor:
        offsets = [0, *accumulate(lengths)]
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    def index_of(self, documents: list[int]) -> Tensor:
        """``[batch, documents]``: rows of what :meth:`exchange` returns."""
        whole = {run.document: len(self.split) + i for i, run in enumerate(self.runs)}
        rows = torch.tensor(
            [self._number.get(d, whole.get(d, 0)) for d in documents], dtype=torch.int64
        )
        rows = rows * self.batch + torch.arange(self.batch)[:, None]
        return rows.to(self.device)

    def _places(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """Samples that this rank has, of [split documents * samples], and their local rows."""
        if head_dim not in self._samples:
            targets, sources = [], []
            for i, document in enumerate(self.split):
                first = self.bounds[document]
                places = sample_places(self.bounds[document + 1] - first, head_dim)
                for run, row in zip(self.runs, self.rows, strict=False):
                    if run.document != document:
                        continue
                    for j, place in enumerate(places):
                        if run.start <= first + place < run.stop:
                            targets.append(i * len(places) + j)
                            sources.append(row + first + place - run.start)
            self._samples[head_dim] = tuple(
                torch.tensor(x, dtype=torch.int64, device=self.device) for x in (targets, sources)
            )
        return self._samples[head_dim]

    def _of(self, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        settings = Settings(None, DEFAULT_OPTIONS, True, False)
        call = make_call(settings, cu_seqlens, cu_seqlens, longest, longest, _UNBOUNDED)
        return key_statistics(k, v, bind(call))

    def exchange(self, k: Tensor, v: Tensor) -> Tensor:
        """int32 ``[(split documents + runs) * batch, heads_k, 8 + head_dim]`` of k, v ``[batch,
        rows, heads_k, ..]``: a collective call, if any document is split."""
        heads, head_dim = k.shape[2:]
        if self.runs:
            of_runs = self._of(k.flatten(0, 1), v.flatten(0, 1), self._packing, self._longest)
            of_runs = of_runs.unflatten(0, (self.batch, len(self.runs))).transpose(0, 1)
        else:
            shape = (0, self.batch, heads, _BOUNDS + 2 + head_dim)
            of_runs = torch.empty(shape, dtype=torch.int32, device=self.device)
        if not self.split:
            return of_runs.flatten(0, 1)
        table = of_runs.new_zeros((len(self.split), *of_runs.shape[1:]))
        for sources, targets in self._steps:
            found, more = table[targets, ..., :_BOUNDS], of_runs[sources, ..., :_BOUNDS]
            maxima = torch.maximum(found[..., :_MAXIMA], more[..., :_MAXIMA])
            table[targets, ..., :_BOUNDS] = torch.cat(
                (maxima, found[..., _MAXIMA:] + more[..., _MAXIMA:]), -1
            )
        # Each key of a sample is on one rank, and 0 on the others: sums of bytes.
        count = len(sample_places(1, head_dim))
        samples = k.new_zeros((len(self.split) * count, self.batch, heads, head_dim))
        targets, sources = self._places(head_dim)
        samples[targets] = k.index_select(1, sources).transpose(0, 1)
        maxima = table[..., :_MAXIMA].contiguous()
        sums = table[..., _MAXIMA:_BOUNDS].contiguous()
        works = [
            dist.all_reduce(maxima, dist.ReduceOp.MAX, self.group, async_op=True),
            dist.all_reduce(sums, dist.ReduceOp.SUM, self.group, async_op=True),
            dist.all_reduce(
                samples.view(torch.uint8), dist.ReduceOp.SUM, self.group, async_op=True
            ),
        ]
        for work in works:
            work.wait()
        table[..., :_MAXIMA], table[..., _MAXIMA:_BOUNDS] = maxima, sums
        samples = samples.unflatten(0, (len(self.split), count)).transpose(1, 2).flatten(0, 2)
        if count not in self._sample_packing:
            lengths = [count] * (len(self.split) * self.batch)
            self._sample_packing[count] = self._cu_seqlens(lengths)
        means = self._of(samples, samples, self._sample_packing[count], count)
        table[..., _BOUNDS + 1 :] = means.view_as(table)[..., _BOUNDS + 1 :]
        return torch.cat((table, of_runs)).flatten(0, 1)

    def of_calls(self, local: Local) -> list[Tensor]:
        """Of each call of ``local``: the rows of what :meth:`exchange` returns, one a sequence."""
        if local not in self._of_calls:
            found, at = [], 0
            for count in local.sequences:
                found.append(self.index_of(local.documents[at : at + count]))
                at += count
            self._of_calls[local] = [
                index[first : first + local.together].flatten()
                for first in range(0, self.batch, local.together)
                for index in found
            ]
        return self._of_calls[local]
