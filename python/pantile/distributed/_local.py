"""The attention of one share by the kernels of one device: packed calls over its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from pantile import _C, _ops
from pantile._direct import _LOW_SHIFT, no_low, run_backward, run_forward
from pantile._fast_path import present, takes_short_cut
from pantile._options import Options
from pantile._schema import OPTIONS, Call, bind, lengths_of
from pantile.distributed._layout import Mask, Run, rows_of
from pantile.distributed._share import Call as PackedCall
from pantile.distributed._share import Share, ranges_to_rows
from pantile.distributed._transfer import sum_rows

Tensor = torch.Tensor
Steps = list[tuple[Tensor, Tensor]]


class Settings(NamedTuple):
    """Of a call, the same on all ranks."""

    scale: float | None
    options: Options
    deterministic: bool
    exact_lse: bool  # of fp32 weights: the caller or a merge reads it


def make_call(
    settings: Settings,
    cu_seqlens_q,
    cu_seqlens_k,
    longest_q: int,
    longest_k: int,
    window,
    seqused_q=None,
) -> Call:
    fields = settings.options.call_fields[1 if settings.exact_lse else 0]
    return Call(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        scale=settings.scale,
        window_left=window[0],
        window_right=window[1],
        **dict(zip(OPTIONS, fields, strict=True)),
    )


def _widened(o: Tensor, lows: list[Tensor], rows: list[tuple[int, int]]) -> Tensor:
    """o before it was rounded to 16 bits, as far as its low bits tell (cpp/core/low_bits.h)."""
    exact = o.float()
    known = (exact != 0.0) & exact.isfinite()
    bits = exact.view(torch.int32)
    for o_low, (first, last) in zip(lows, rows, strict=True):
        steps = o_low.to(torch.int32) << _LOW_SHIFT[o.dtype]
        bits[first:last] += steps.masked_fill_(~known[first:last], 0)
    return exact


def _longest(bounds: list[int]) -> int:
    return max(b - a for a, b in pairwise(bounds))


class _Placed(NamedTuple):
    rows: tuple[int, int]  # of [batch * rows]
    keys: tuple[int, int]  # of [batch * key_count]
    call: tuple  # of make_call, after the settings


class Local:
    """The calls and index arrays of a share for one device and batch size."""

    def __init__(self, share: Share, device: torch.device, batch: int) -> None:
        self.share, self.device, self.batch = share, device, batch
        self.rows, self.key_count = rows_of(share.queries), share.key_count
        # Of one window: all entries of the batch in one call.
        self.together = together = batch if len(share.calls) == 1 else 1
        self.documents = [run.document for run in share.queries]  # of all pieces
        self.sequences = [len(call.cu_seqlens_q) - 1 for call in share.calls]  # of an entry
        self.calls = [
            self._place(call, first, together)
            for first in range(0, batch, together)
            for call in share.calls
        ]
        self._last: tuple[Settings, list[_C.Call]] | None = None
        self._steps: dict[str, Steps] = {}
        self._index: dict[str, Tensor] = {}

    def _place(self, call: PackedCall, first: int, count: int) -> _Placed:
        def placed(part: tuple[int, int], length: int) -> tuple[int, int]:
            return first * length + part[0], (first + count - 1) * length + part[1]

        def repeated(bounds: list[int]) -> list[int]:
            return [0] + [i * bounds[-1] + b for i in range(count) for b in bounds[1:]]

        packing = [
            torch.tensor(repeated(bounds), dtype=torch.int32, device=self.device)
            for bounds in (call.cu_seqlens_q, call.cu_seqlens_k)
        ]
        longest = _longest(call.cu_seqlens_q), _longest(call.cu_seqlens_k)
        window = call.left, call.right
        return _Placed(
            placed(call.rows, self.rows),
            placed(call.keys, self.key_count),
            (*packing, *longest, window),
        )

    def key_index(self, gathered: bool) -> Tensor:
        """[batch * key_count]: rows of a received buffer ``[rows * batch]``."""
        name = "gathered_index" if gathered else "needed_index"
        if name not in self._index:
            index = getattr(self.share, name)
            entries = torch.arange(self.batch)[:, None]
            self._index[name] = (index * self.batch + entries).flatten().to(self.device)
        return self._index[name]

    def send_index(self) -> Tensor:
        if "send" not in self._index:
            self._index["send"] = self.share.send_index.to(self.device)
        return self._index["send"]

    def touched_rows(self) -> Tensor:
        if "touched" not in self._index:
            self._index["touched"] = self.share.touched_rows.to(self.device)
        return self._index["touched"]

    def steps(self, name: str) -> Steps:
        """``key_levels``, ``owner_levels`` or ``touched_levels`` of the share."""
        if name not in self._steps:
            found = getattr(self.share, name)
            self._steps[name] = [(a.to(self.device), b.to(self.device)) for a, b in found]
        return self._steps[name]

    def _bound(self, settings: Settings) -> list[_C.Call]:
        """The calls as the bindings take them; those of the last settings are kept."""
        if self._last is None or self._last[0] != settings:
            calls = [bind(make_call(settings, *placed.call)) for placed in self.calls]
            self._last = settings, calls
        return self._last[1]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, settings: Settings, keep_low: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(o, lse, o_low of each call) of q ``[batch * rows, ..]`` and keys ``[batch * key_count,
        ..]``."""
        outputs, lows = [], []
        for placed, call in zip(self.calls, self._bound(settings), strict=True):
            rows, keys = slice(*placed.rows), slice(*placed.keys)
            operands = q[rows], k[keys], v[keys]
            if takes_short_cut((*operands, *present(lengths_of(call)))):
                o, lse, o_low, _ = run_forward(*operands, call, False, True, None, keep_low)
                o_low = no_low(q, v) if o_low is None else o_low
            else:
                o, lse, o_low, _ = _ops._dispatch(
                    *operands, call, settings.deterministic, False, keep_low, None
                )
            outputs.append((o, lse))
            lows.append(o_low)
        if not outputs:  # no rows
            o = q.new_empty((*q.shape[:2], v.shape[-1]))
            return o, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), lows
        if len(outputs) == 1:
            return *outputs[0], lows
        return torch.cat([o for o, _ in outputs]), torch.cat([x for _, x in outputs], 1), lows

    def backward(
        self, grad_o, grad_lse, q, k, v, o, lows, lse, settings: Settings,
        statistics: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(grad_q, grad_k, grad_v) of what :meth:`forward` computed. ``statistics``: of the keys of
        each call's documents, in deterministic mode.

        Float32 on the CPU, so that sums over ranks have the error of one process. GPU kernels write
        16 bits, of sums in float32: each rank's part is rounded once.
        """
        if q.dtype is not torch.float32 and q.device.type == "cpu":
            # What the kernels do with 16-bit operands, and o and o_low together.
            o = _widened(o, lows, [placed.rows for placed in self.calls])
            q, k, v, grad_o = (x.float() for x in (q, k, v, grad_o))
            lows = [o_low.new_empty(0) for o_low in lows]
        grads = []
        bound = zip(self.calls, self._bound(settings), lows, strict=True)
        for i, (placed, call, o_low) in enumerate(bound):
            rows, keys = slice(*placed.rows), slice(*placed.keys)
            operands = (
                *(grad_o[rows], None if grad_lse is None else grad_lse[:, rows]),
                *(q[rows], k[keys], v[keys], o[rows]),
                *(o_low if o_low.shape[0] else None, lse[:, rows]),
            )
            if statistics:  # no operator has an argument for them
                given = {"key_statistics": statistics[i]}
                grads.append(run_backward(*operands, call, True, **given))
            elif takes_short_cut((*present(operands), *present(lengths_of(call)))):
                grads.append(run_backward(*operands, call, settings.deterministic))
            else:
                grads.append(_ops.backward_op(*operands, *call, settings.deterministic))
        if not grads:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if len(grads) == 1:
            return grads[0]
        return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))

    def received_gradients(self, grad_k: Tensor, grad_v: Tensor) -> Tensor:
        """float32 ``[received rows, batch, heads, head_dim + head_dim_v]``: those of the key list,
        added up where several pieces share a key."""
        rows = sum(self.share.receive_rows)
        head_dim, total = grad_k.shape[-1], grad_k.shape[-1] + grad_v.shape[-1]
        shape = (self.batch, rows, grad_k.shape[1], total)
        grads = torch.empty(shape, dtype=torch.float32, device=self.device)
        steps = self.steps("key_levels")
        for part, grad in ((grads[..., :head_dim], grad_k), (grads[..., head_dim:], grad_v)):
            sum_rows(part, grad.unflatten(0, (self.batch, self.key_count)), steps, 1)
        return grads.movedim(1, 0).contiguous()


class Near(Local):
    """Runs of a share that see their own keys alone (:func:`_layout.is_alone`): one call on the
    local tensors as they lie, in which the other runs have no queries."""

    def __init__(
        self, runs: Sequence[Run], alone: Sequence[bool], mask: Mask, device: torch.device,
        batch: int,
    ) -> None:  # fmt: skip
        lengths = [run.stop - run.start for run in runs]
        self.device, self.batch, self.rows = device, batch, sum(lengths)
        self.key_count = self.rows
        self._last = None
        self.together, self.documents = batch, [run.document for run in runs]
        self.sequences = [len(runs)]
        places = list(pairwise(accumulate(lengths, initial=0)))
        others = [place for place, is_near in zip(places, alone, strict=True) if not is_near]
        entries = torch.arange(batch)[:, None] * self.rows
        # Of [batch * rows]: the rows of the other runs.
        self.far_rows = (ranges_to_rows(others) + entries).flatten().to(device)
        offsets = [0, *(i * self.rows + stop for i in range(batch) for _, stop in places)]
        used = [n if is_near else 0 for n, is_near in zip(lengths, alone, strict=True)]
        cu_seqlens, seqused = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (offsets, used * batch)
        )
        longest = max(lengths)
        call = cu_seqlens, cu_seqlens, longest, longest, (mask.left, mask.right)
        whole = 0, batch * self.rows
        # Without other runs the call is an ordinary one.
        self.calls = [_Placed(whole, whole, (*call, seqused) if others else call)]
