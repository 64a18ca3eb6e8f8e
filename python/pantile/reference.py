"""Attention in plain torch: the textbook, and the algorithms that led from it to the kernels.

:func:`attention` stores the whole score matrix and is what every kernel is measured against.
:func:`lazy_softmax`, :func:`flash1` and :func:`flash2` walk over tiles in the order of their papers
and count what a GPU would move through HBM; they share no code with the kernels. All are for tests,
checks and reading, not for speed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pantile._mask_forms import BlockMask, CombinedMask, Documents, Prefix
from pantile._masks import UNBOUNDED, window_bounds
from pantile._variants import dropout_mask


def visible(seqlen_q: int, seqlen_k: int, left: int, right: int, device=None) -> torch.Tensor:
    """Boolean [seqlen_q, seqlen_k]: which keys a row sees, aligned bottom-right."""
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left != UNBOUNDED:
        mask &= key >= position - left
    if right != UNBOUNDED:
        mask &= key <= position + right
    return mask


@dataclass(frozen=True)
class _Change:
    """What a variant changes, of one batch: tensors in the dtype of the computation."""

    softcap: float | None = None
    alibi: torch.Tensor | None = None  # [batch | 1, heads]
    bias: torch.Tensor | None = None  # broadcasts to the scores
    sinks: torch.Tensor | None = None  # [heads]
    kept: torch.Tensor | None = None  # what each weight is multiplied with

    def of_scores(self, scores):
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi is not None:
            rows, keys = scores.shape[-2:]
            position = torch.arange(rows, device=scores.device)[:, None] + (keys - rows)
            distance = (position - torch.arange(keys, device=scores.device)).abs()
            scores = scores - self.alibi[..., None, None] * distance
        return scores if self.bias is None else scores + self.bias


def _attend_with_sinks(scores, v, mask, change):
    """The sink is one more key, of value 0."""
    scores = scores.masked_fill(~mask, -torch.inf)
    sinks = change.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., :-1]
    lse = torch.logsumexp(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
    weights = weights if change.kept is None else weights * change.kept
    return weights @ v, lse


def _attend(q, k, v, mask, scale, change):
    """[.., rows, dim] x [.., keys, dim], all in the dtype of q. Dead rows give 0 and -inf."""
    scores = change.of_scores((q @ k.transpose(-1, -2)) * scale)
    if change.sinks is not None:
        return _attend_with_sinks(scores, v, mask, change)
    alive = mask.any(-1, keepdim=True)
    # A dead row gets finite scores first: its softmax would be NaN, and so would its gradient.
    scores = scores.masked_fill(~mask & alive, -torch.inf).masked_fill(~alive, 0.0)
    weights = torch.softmax(scores, -1) * alive
    lse = torch.logsumexp(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
    weights = weights if change.kept is None else weights * change.kept
    return weights @ v, lse.masked_fill(~alive.squeeze(-1), -torch.inf)


def shown(mask, rows, keys):
    """The bool tensor of ``mask`` of :func:`pantile.attention`, [batch | 1, heads | 1, rows, keys];
    its blocks are cut to the lengths."""
    if isinstance(mask, BlockMask):
        blocks = mask.blocks.repeat_interleave(mask.block, -2).repeat_interleave(mask.block, -1)
        return blocks[..., :rows, :keys]
    if isinstance(mask, Documents):
        ids = mask.ids.reshape(-1, mask.ids.shape[-1])
        key_ids = ids if mask.key_ids is None else mask.key_ids.reshape(-1, mask.key_ids.shape[-1])
        return (ids[:, :rows, None] == key_ids[:, None, :keys])[:, None]
    if isinstance(mask, Prefix):
        row = torch.arange(rows, device=mask.lengths.device)[:, None]
        key = torch.arange(keys, device=mask.lengths.device)
        return (key < mask.lengths[:, None, None, None]) | (key <= row + keys - rows)
    if isinstance(mask, CombinedMask):
        left, right = (shown(x, rows, keys) for x in (mask.left, mask.right))
        return left & right if mask.operator == "&" else left | right
    return mask[..., :rows, :keys]


def _kept(dropout, batch, heads, rows, keys, dtype, device):
    if dropout is None:
        return None
    mask = dropout_mask(dropout, batch, heads, rows, keys, device=device)
    return mask.to(dtype) / (1.0 - dropout.rate)


def _nothing(q, v, sinks):
    """Of a call without keys."""
    o = q.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * q.sum()
    if sinks is not None:
        return o, sinks[:, None].expand(q.shape[:-1])
    return o, torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi=None,
    bias=None,
    sinks=None,
    dropout=None,
    mask=None,
    dtype=torch.float64,
):
    """(o, lse) of :func:`pantile.attention`, computed in ``dtype``; None keeps the dtype of q.

    Standard attention as in Vaswani et al. (2017), section 3.2.1: S = Q K^T, P = softmax(S),
    O = P V, with S and P stored. Differentiable by autograd, any number of times. ``dropout`` is a
    :class:`pantile.Dropout` with a seed.
    """
    dtype = q.dtype if dtype is None else dtype
    left, right = window_bounds(causal, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [batch, heads, seq, dim]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    seen = visible(q.shape[2], k.shape[2], left, right, q.device)
    if mask is not None:
        seen = seen & shown(mask, q.shape[2], k.shape[2])
    alibi, bias, sinks = (None if x is None else x.to(dtype) for x in (alibi, bias, sinks))
    if k.shape[2] == 0:
        o, lse = _nothing(q, v, sinks)
    else:
        if alibi is not None and alibi.ndim == 1:
            alibi = alibi[None]
        kept = _kept(dropout, *q.shape[:3], k.shape[2], dtype, q.device)
        o, lse = _attend(q, k, v, seen, scale, _Change(softcap, alibi, bias, sinks, kept))
    return o.transpose(1, 2), lse


def _bias_of_sequence(bias, b, rows, keys):
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.ndim)]
    batch = b if bias.shape[0] > 1 else 0
    return bias[batch : batch + 1, :, : max(rows, 1), :keys]


def _mask_of_sequence(mask, b, rows, keys):
    if mask is None:
        return None
    mask = shown(mask, max(rows, 1), keys)
    return mask[b : b + 1] if mask.ndim == 4 and mask.shape[0] > 1 else mask


def _dropout_of_sequence(dropout, b):
    """The mask counts sequences, and each is computed alone."""
    return dropout and dataclasses.replace(dropout, batch_offset=dropout.batch_offset + b)


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    seqused_q=None,
    seqused_k=None,
    causal=False,
    window=None,
    scale=None,
    softcap=None,
    alibi=None,
    bias=None,
    sinks=None,
    dropout=None,
    mask=None,
    dtype=torch.float64,
):
    """(o, lse) of :func:`pantile.varlen_attention`: one sequence after the other."""
    out_dtype = q.dtype if dtype is None else dtype
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=out_dtype, device=q.device)
    lse_dtype = torch.float32 if out_dtype.itemsize < 4 else out_dtype
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype, device=q.device)
    for b in range(len(bounds_q) - 1):
        rows = bounds_q[b + 1] - bounds_q[b] if seqused_q is None else int(seqused_q[b])
        keys = bounds_k[b + 1] - bounds_k[b] if seqused_k is None else int(seqused_k[b])
        at_q = slice(bounds_q[b], bounds_q[b] + rows)
        at_k = slice(bounds_k[b], bounds_k[b] + keys)
        part, part_lse = attention(
            q[None, at_q],
            k[None, at_k],
            v[None, at_k],
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            alibi=alibi[b] if alibi is not None and alibi.ndim == 2 else alibi,
            bias=_bias_of_sequence(bias, b, rows, keys),
            sinks=sinks,
            dropout=_dropout_of_sequence(dropout, b),
            mask=_mask_of_sequence(mask, b, rows, keys),
            dtype=dtype,
        )
        # Not in place into a slice that autograd saved: index_copy keeps the graph simple.
        index = torch.arange(at_q.start, at_q.stop, device=q.device)
        o = o.index_copy(0, index, part[0])
        lse = lse.index_copy(1, index, part_lse[0].to(lse_dtype))
    return o, lse


# ---- the algorithms between the textbook and the kernels


@dataclass
class Hbm:
    """Counts what is read from and written to the large memory, in bytes of the stored types."""

    element_bytes: int = 2
    statistic_bytes: int = 4  # row_max, row_sum, LSE
    read_bytes: int = 0
    written_bytes: int = 0

    def read(self, *tensors: torch.Tensor) -> None:
        self.read_bytes += sum(x.numel() for x in tensors) * self.element_bytes

    def write(self, *tensors: torch.Tensor) -> None:
        self.written_bytes += sum(x.numel() for x in tensors) * self.element_bytes

    def read_statistics(self, *tensors: torch.Tensor) -> None:
        self.read_bytes += sum(x.numel() for x in tensors) * self.statistic_bytes

    def write_statistics(self, *tensors: torch.Tensor) -> None:
        self.written_bytes += sum(x.numel() for x in tensors) * self.statistic_bytes


class _Tiles:
    """The operands of a call, cut into tiles: [batch, heads, tile, dim]."""

    def __init__(self, q, k, v, tile_q, tile_k, causal, window, scale, dtype) -> None:
        for name, tile in (("tile_q", tile_q), ("tile_k", tile_k)):
            if tile < 1:
                raise ValueError(f"{name} is {tile}; it must be at least 1")
        self.dtype = q.dtype if dtype is None else dtype
        left, right = window_bounds(causal, window)
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.q, k, v = (x.to(self.dtype).transpose(1, 2) for x in (q, k, v))
        group = self.q.shape[1] // k.shape[1] if k.shape[1] else 1
        self.k, self.v = (x.repeat_interleave(group, 1) for x in (k, v))
        self.mask = visible(self.q.shape[2], self.k.shape[2], left, right, q.device)
        self.row_tiles = self._cut(self.q.shape[2], tile_q)
        self.key_tiles = self._cut(self.k.shape[2], tile_k)

    @staticmethod
    def _cut(length: int, tile: int) -> list[slice]:
        return [slice(b, min(b + tile, length)) for b in range(0, length, tile)]

    def sees(self, rows: slice, keys: slice) -> bool:
        return bool(self.mask[rows, keys].any())

    def scores(self, rows: slice, keys: slice) -> torch.Tensor:
        s = self.q[:, :, rows] @ self.k[:, :, keys].transpose(-1, -2) * self.scale
        return s.masked_fill(~self.mask[rows, keys], -torch.inf)

    def empty(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(O, row_sum, row_max) of rows that have met no key."""
        lead = (*self.q.shape[:2], rows)
        o = self.q.new_zeros(*lead, self.v.shape[-1])
        return o, self.q.new_zeros(lead), torch.full_like(o[..., 0], -torch.inf)


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    """What to subtract before exp: rows without a visible key have no maximum."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def _lse(row_sum: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    return torch.where(row_sum > 0, _finite(row_max) + row_sum.log(), -torch.inf)


def _over(o: torch.Tensor, row_sum: torch.Tensor) -> torch.Tensor:
    return o / row_sum.masked_fill(row_sum == 0, 1.0).unsqueeze(-1)


def lazy_softmax(
    q,
    k,
    v,
    *,
    tile_q=1024,
    tile_k=4096,
    causal=False,
    window=None,
    scale=None,
    dtype=torch.float64,
    hbm=None,
):
    """(o, lse) by Rabe and Staats, *Self-attention does not need O(n^2) memory* (2021), figure 1.

    For a chunk of rows, every chunk of keys gives a summary (maximum, sum, unnormalised output);
    only then are the summaries combined. As a program of framework operations it stores S and P of
    one pair of chunks, and the summaries of a chunk of rows, in HBM.
    """
    t = _Tiles(q, k, v, tile_q, tile_k, causal, window, scale, dtype)
    hbm = Hbm() if hbm is None else hbm
    outputs, lses = [], []
    for rows in t.row_tiles:
        summaries = [t.empty(rows.stop - rows.start)]
        for keys in (keys for keys in t.key_tiles if t.sees(rows, keys)):
            s = t.scores(rows, keys)
            hbm.read(t.q[:, :, rows], t.k[:, :, keys])
            hbm.write(s)
            row_max = s.amax(-1)
            p = torch.exp(s - _finite(row_max).unsqueeze(-1))
            hbm.read(s)
            hbm.write(p)
            summaries.append((p @ t.v[:, :, keys], p.sum(-1), row_max))
            hbm.read(p, t.v[:, :, keys])
            hbm.write(summaries[-1][0])
            hbm.write_statistics(*summaries[-1][1:])
        o, row_sum, row_max = (torch.stack(x) for x in zip(*summaries, strict=True))
        hbm.read(o[1:])
        hbm.read_statistics(row_sum[1:], row_max[1:])
        highest = row_max.amax(0)
        factor = torch.exp(row_max - _finite(highest))
        total = (row_sum * factor).sum(0)
        outputs.append(_over((o * factor.unsqueeze(-1)).sum(0), total))
        lses.append(_lse(total, highest))
        hbm.write(outputs[-1])
        hbm.write_statistics(lses[-1])
    return _joined(t, outputs, lses)


def flash1(
    q,
    k,
    v,
    *,
    tile_q=64,
    tile_k=64,
    causal=False,
    window=None,
    scale=None,
    dtype=torch.float64,
    hbm=None,
):
    """(o, lse) by Dao et al., *FlashAttention* (2022), algorithm 1: keys outside, rows inside.

    O stays normalised, and O, row_sum and row_max go through HBM once for every tile of keys.
    """
    t = _Tiles(q, k, v, tile_q, tile_k, causal, window, scale, dtype)
    hbm = Hbm() if hbm is None else hbm
    state = [t.empty(rows.stop - rows.start) for rows in t.row_tiles]
    for o, row_sum, row_max in state:
        hbm.write(o)
        hbm.write_statistics(row_sum, row_max)
    for keys in t.key_tiles:
        hbm.read(t.k[:, :, keys], t.v[:, :, keys])
        for i, rows in enumerate(t.row_tiles):
            if not t.sees(rows, keys):
                continue
            o, row_sum, row_max = state[i]
            hbm.read(t.q[:, :, rows], o)
            hbm.read_statistics(row_sum, row_max)
            s = t.scores(rows, keys)
            tile_max = s.amax(-1)
            p = torch.exp(s - _finite(tile_max).unsqueeze(-1))
            raised = torch.maximum(row_max, tile_max)
            old = row_sum * torch.exp(row_max - _finite(raised))
            factor = torch.exp(tile_max - _finite(raised))
            new_sum = old + factor * p.sum(-1)
            update = factor.unsqueeze(-1) * (p @ t.v[:, :, keys])
            state[i] = (_over(old.unsqueeze(-1) * o + update, new_sum), new_sum, raised)
            hbm.write(state[i][0])
            hbm.write_statistics(*state[i][1:])
    return _joined(t, [x[0] for x in state], [_lse(*x[1:]) for x in state])


def flash2(
    q,
    k,
    v,
    *,
    tile_q=128,
    tile_k=128,
    causal=False,
    window=None,
    scale=None,
    dtype=torch.float64,
    hbm=None,
):
    """(o, lse) by Dao, *FlashAttention-2* (2023), algorithm 1: rows outside, keys inside.

    O is divided once, at the end; of the statistics only LSE is kept.
    """
    t = _Tiles(q, k, v, tile_q, tile_k, causal, window, scale, dtype)
    hbm = Hbm() if hbm is None else hbm
    outputs, lses = [], []
    for rows in t.row_tiles:
        hbm.read(t.q[:, :, rows])
        o, row_sum, row_max = t.empty(rows.stop - rows.start)
        for keys in (keys for keys in t.key_tiles if t.sees(rows, keys)):
            hbm.read(t.k[:, :, keys], t.v[:, :, keys])
            s = t.scores(rows, keys)
            raised = torch.maximum(row_max, s.amax(-1))
            factor = torch.exp(row_max - _finite(raised))
            p = torch.exp(s - _finite(raised).unsqueeze(-1))
            row_sum = row_sum * factor + p.sum(-1)
            o = o * factor.unsqueeze(-1) + p @ t.v[:, :, keys]
            row_max = raised
        outputs.append(_over(o, row_sum))
        lses.append(_lse(row_sum, row_max))
        hbm.write(outputs[-1])
        hbm.write_statistics(lses[-1])
    return _joined(t, outputs, lses)


def _joined(t: _Tiles, outputs: list, lses: list) -> tuple[torch.Tensor, torch.Tensor]:
    if not outputs:
        o, row_sum, _ = t.empty(0)
        return o.transpose(1, 2), row_sum
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(lses, 2)


# ---- error and what is allowed of it


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities agree, NaN anywhere is infinitely wrong."""
    if result.numel() == 0:
        return 0.0
    result, exact = result.detach().double(), exact.detach().double()
    difference = torch.where(result == exact, 0.0, (result - exact).abs())
    return float(torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf).max())


def rounding_scales(call, q, k, v, grad_o, scale=None) -> tuple[float, ...]:
    """Sizes of the terms that o, lse, dq, dk and dv add up, which float32 rounds one by one.

    A gradient may be tiny, or 0, because such terms cancel: with a single visible key
    dP - rowsum(dO * O) is 0, but both are rounded. Weights are recomputed from LSE, so their
    relative error grows with its size. A score is a sum itself. ``call(q, k, v)`` is one of the
    functions above in float64.
    """
    q, k, v, grad_o = (x.detach().double() for x in (q, k, v, grad_o))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.numel() == 0 or k.numel() == 0:
        return 0.0, 1.0, 0.0, 0.0, 0.0
    # Cauchy: |dP| and |rowsum(dO * O)| are at most |dO| |V|, scores |scale| |Q| |K|.
    change = abs(scale) * grad_o.norm(dim=-1, keepdim=True) * v.norm(dim=-1).max()
    seen_keys, lse = call(q, k, k.abs())
    keys, values = torch.zeros_like(k, requires_grad=True), torch.zeros_like(v, requires_grad=True)
    (terms_k,) = torch.autograd.grad(call(q, k, keys)[0], keys, change * q.abs())
    (terms_v,) = torch.autograd.grad(call(q, k, values)[0], values, grad_o.abs())
    weights = 1 + float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0
    terms = (v.abs(), change * seen_keys, terms_k, terms_v)
    scale_o, *scales = (weights * float(x.max()) for x in terms)
    scores = abs(scale) * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    return scale_o, 1.0 + float(scores), *scales


def bound(
    textbook: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, scale: float = 0.0
) -> float:
    """What the contract allows: twice the error of the textbook in ``dtype``, plus a floor.

    The floor is two roundings to ``dtype`` at the largest result, and two to float32 at ``scale``,
    the size of the terms that were summed (see :func:`rounding_scales`).
    """
    finite = exact.detach().double()
    finite = finite[finite.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    floor = torch.finfo(dtype).eps * largest + torch.finfo(torch.float32).eps * scale
    return 2 * error(textbook, exact) + floor
