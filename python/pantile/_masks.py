"""Masks as the kernels take them: two window bounds, with -1 for an unbounded side."""

from __future__ import annotations

from pantile._arguments import MAX_SEQLEN, integer, is_symbolic, shown

UNBOUNDED = -1


def _bound(name: str, value: object) -> int:
    if value is None:
        return UNBOUNDED
    if not is_symbolic(value):
        value = integer(name, value, "an integer or None")
    if value < UNBOUNDED:
        raise ValueError(
            f"{name} is {shown(value)}; it must be 0 or more, or -1 or None for unbounded"
        )
    return MAX_SEQLEN if value > MAX_SEQLEN else value  # no sequence reaches further


def window_bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right) of ``causal`` and ``window`` together.

    Row i of Sq sees the keys j of Sk with i + Sk - Sq - left <= j <= i + Sk - Sq + right. Causal is
    right = 0, and combines with a window by the smaller bound.
    """
    if causal is not False and causal is not True:
        raise TypeError(f"causal is {shown(causal)}; it must be True or False")
    if window is None:
        return UNBOUNDED, 0 if causal else UNBOUNDED
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {shown(window)}; it must be a pair (left, right) or None")
    left = _bound("window[0]", window[0])
    right = _bound("window[1]", window[1])
    return left, 0 if causal else right


def _clamped_sum(rows: int, start: int, limit: int) -> int:
    """Sum of min(max(start + i, 0), limit) over i = 0 .. rows - 1."""
    below = min(max(-start, 0), rows)  # rows whose term is 0
    first_full = min(max(limit - start, below), rows)  # from here on the term is `limit`
    ramp = first_full - below
    return ramp * (start + below) + ramp * (ramp - 1) // 2 + (rows - first_full) * limit


def visible_pairs(
    seqlen_q: int, seqlen_k: int, left: int, right: int, shift: int | None = None
) -> int:
    """How many (row, key) pairs the mask lets through. Row i sits at key i + ``shift``; None: the
    last row at the last key."""
    if shift is None:
        shift = seqlen_k - seqlen_q
    if right == UNBOUNDED:
        ends = seqlen_q * seqlen_k
    else:
        ends = _clamped_sum(seqlen_q, shift + right + 1, seqlen_k)
    begins = 0 if left == UNBOUNDED else _clamped_sum(seqlen_q, shift - left, seqlen_k)
    return ends - begins
