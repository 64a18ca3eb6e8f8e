"""Textbook attention in plain torch: what every kernel is measured against.

It stores the whole score matrix, so it is for tests, checks and reading, not for long sequences.
"""

from __future__ import annotations

import torch

from pantile._masks import UNBOUNDED, window_bounds


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


def _attend(q, k, v, mask, scale):
    """[.., rows, dim] x [.., keys, dim], all in the dtype of q. Dead rows give 0 and -inf."""
    scores = (q @ k.transpose(-1, -2)) * scale
    alive = mask.any(-1, keepdim=True)
    # A dead row gets finite scores first: its softmax would be NaN, and so would its gradient.
    scores = scores.masked_fill(~mask & alive, -torch.inf).masked_fill(~alive, 0.0)
    weights = torch.softmax(scores, -1) * alive
    lse = torch.logsumexp(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
    return weights @ v, lse.masked_fill(~alive.squeeze(-1), -torch.inf)


def attention(q, k, v, *, causal=False, window=None, scale=None, dtype=torch.float64):
    """(o, lse) of :func:`pantile.attention`, computed in ``dtype``; None keeps the dtype of q.

    Standard attention as in Vaswani et al. (2017), section 3.2.1: S = Q K^T, P = softmax(S),
    O = P V, with S and P stored. Differentiable by autograd, any number of times.
    """
    dtype = q.dtype if dtype is None else dtype
    left, right = window_bounds(causal, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # [batch, heads, seq, dim]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = visible(q.shape[2], k.shape[2], left, right, q.device)
    if k.shape[2] == 0:
        o = q.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * q.sum()
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
    else:
        o, lse = _attend(q, k, v, mask, scale)
    return o.transpose(1, 2), lse


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
            dtype=dtype,
        )
        # Not in place into a slice that autograd saved: index_copy keeps the graph simple.
        index = torch.arange(at_q.start, at_q.stop, device=q.device)
        o = o.index_copy(0, index, part[0])
        lse = lse.index_copy(1, index, part_lse[0].to(lse_dtype))
    return o, lse


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities agree, NaN anywhere is infinitely wrong."""
    if result.numel() == 0:
        return 0.0
    result, exact = result.detach().double(), exact.detach().double()
    difference = torch.where(result == exact, 0.0, (result - exact).abs())
    return float(torch.nan_to_num(difference, nan=torch.inf, posinf=torch.inf).max())


def rounding_scales(call, q, k, v, grad_o, scale=None) -> tuple[float, float, float, float]:
    """Sizes of the terms that o, dq, dk and dv add up, which float32 rounds one by one.

    A gradient may be tiny, or 0, because such terms cancel: with a single visible key
    dP - rowsum(dO * O) is 0, but both are rounded. Weights are recomputed from LSE, so their
    relative error grows with its size. ``call(q, k, v)`` is one of the functions above in float64.
    """
    q, k, v, grad_o = (x.detach().double() for x in (q, k, v, grad_o))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.numel() == 0 or k.numel() == 0:
        return 0.0, 0.0, 0.0, 0.0
    # Cauchy: |dP| and |rowsum(dO * O)| are at most |dO| |V|.
    change = abs(scale) * grad_o.norm(dim=-1, keepdim=True) * v.norm(dim=-1).max()
    seen_keys, lse = call(q, k, k.abs())
    keys, values = torch.zeros_like(k, requires_grad=True), torch.zeros_like(v, requires_grad=True)
    (terms_k,) = torch.autograd.grad(call(q, k, keys)[0], keys, change * q.abs())
    (terms_v,) = torch.autograd.grad(call(q, k, values)[0], values, grad_o.abs())
    weights = 1 + float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0
    terms = (v.abs(), change * seen_keys, terms_k, terms_v)
    return tuple(weights * float(x.max()) for x in terms)


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
