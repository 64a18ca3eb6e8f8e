"""The arguments of packed calls, as fields of a call."""

from __future__ import annotations

from pantile._arguments import check_rows, length
from pantile._schema import LENGTHS


def _longest(name: str, value: object, in_range: bool) -> int:
    """max_seqlen_q or max_seqlen_k of packed tensors: it cannot be left out."""
    if value is None:
        raise TypeError(f"{name} is missing; it must be the length of the longest sequence")
    return length(name, value, in_range=in_range)


def packed_fields(q, k, lengths: tuple, longest: tuple, in_range: bool) -> tuple:
    """The fields pantile._schema.PACKING, from those of LENGTHS and the two max_seqlen."""
    placed = lengths[4] is not None or lengths[6] is not None  # by k_begin or block_table
    for name, value in zip(LENGTHS[: 1 if placed else 2], lengths, strict=False):
        if value is None:
            raise TypeError(f"{name} is None; it must be an int32 tensor of batch + 1 offsets")
    longest = (
        _longest("max_seqlen_q", longest[0], in_range),
        _longest("max_seqlen_k", longest[1], in_range),
    )
    if getattr(q, "is_meta", False):
        check_rows("q", q, lengths[0], longest[0])
        if lengths[1] is not None:
            check_rows("k", k, lengths[1], longest[1])
    return (*lengths, *longest)
