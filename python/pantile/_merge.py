"""Joins attention over parts of the keys into attention over all of them."""

from __future__ import annotations


def _spread(weights, o):
    """[.., heads, rows] as [.., rows, heads, 1], to multiply o with."""
    return weights.transpose(-1, -2).unsqueeze(-1).to(o.dtype)


def merge_attention(partials, *, dtype=None):
    """Attention over all keys from attention over disjoint parts of them (context parallelism).

    With ``lse = log(sum(exp(lse_i)))`` the output is ``sum(exp(lse_i - lse) * o_i)``: exact up to
    float32 rounding when the parts come with ``Options(output_dtype="float32")``. Differentiable,
    also through each lse, so that gradients reach the keys of every part.

    Args:
        partials: pairs (o, lse) as :func:`pantile.attention` or :func:`pantile.varlen_attention`
            return them with ``return_lse``, all of one shape: the same queries, different keys.
            With a causal mask every part must be given the mask that is its own.
        dtype: of the merged o; default that of the first o.

    Returns:
        (o, lse), lse float32. A row that attends to nothing in any part has o = 0, lse = -inf.
    """
    import torch

    partials = [tuple(part) for part in partials]
    if not partials:
        raise ValueError("partials is empty; it must hold at least one pair (o, lse)")
    first_o, first_lse = partials[0]
    for i, (o, lse) in enumerate(partials):
        if o.shape != first_o.shape or lse.shape != first_lse.shape:
            raise ValueError(
                f"partials[{i}] has shapes {tuple(o.shape)} and {tuple(lse.shape)}; they must be "
                f"those of partials[0], {tuple(first_o.shape)} and {tuple(first_lse.shape)}"
            )
    expected = (*first_o.shape[:-3], first_o.shape[-2], first_o.shape[-3])
    if first_lse.shape != expected:
        raise ValueError(
            f"lse has shape {tuple(first_lse.shape)}; for o of shape {tuple(first_o.shape)} it "
            f"must be {tuple(expected)}"
        )
    lses = torch.stack([lse.float() for _, lse in partials])
    # Subtracting a maximum of -inf, and the logarithm of 0, would give NaN gradients.
    largest = lses.detach().amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = torch.exp(lses - largest)
    total = weights.sum(0)
    nothing = total == 0.0
    total = torch.where(nothing, 1.0, total)
    outputs = [o.float() for o, _ in partials]
    merged = sum(_spread(w, o) * o for w, o in zip(weights, outputs, strict=True))
    merged = merged / _spread(total, merged)
    lse = torch.where(nothing, -torch.inf, largest + torch.log(total))
    return merged.to(first_o.dtype if dtype is None else dtype), lse
