"""FLOPs of the operators, for torch's counter: two products forward; five backward, of which the
recomputed scores are one."""

from __future__ import annotations

from pantile._fast_path import is_plain, present
from pantile._masks import visible_pairs


def visible_pairs_of_call(batch, rows, keys, call) -> int:
    """(query row, key) pairs of one head that the mask lets through, over the batch.

    ``batch``, ``rows`` and ``keys`` are those of dense tensors. Packed sequences are counted by
    their lengths; where these have no contents that can be read (fake, meta and wrapped tensors),
    as if all were the longest.
    """
    placed = call.cu_seqlens_q is not None and call.cu_seqlens_k is None  # ranges or pages
    keys_of = call.seqused_k if placed else call.cu_seqlens_k
    window = call.window_left, call.window_right
    if call.cu_seqlens_q is None:
        return batch * visible_pairs(rows, keys, *window)
    sequences = call.cu_seqlens_q.shape[0] - 1
    if not all(is_plain(x) for x in present((call.cu_seqlens_q, keys_of, call.mask_shift))):
        return sequences * visible_pairs(call.max_seqlen_q, call.max_seqlen_k, *window)
    lengths_q = call.cu_seqlens_q.diff().tolist()
    lengths_k = (keys_of if placed else keys_of.diff()).tolist()
    shifts = [None] * sequences if call.mask_shift is None else call.mask_shift.tolist()
    lengths = zip(lengths_q, lengths_k, shifts, strict=True)
    return sum(visible_pairs(sq, sk, *window, shift) for sq, sk, shift in lengths)


def _pairs(a) -> int:
    """Over batch and query heads."""
    batch, rows, keys = a.q.shape[0], a.q.shape[1], a.k.shape[1]
    return a.q.shape[-2] * visible_pairs_of_call(batch, rows, keys, a.call)


def forward_flops(signature):
    def formula(*arguments, out_val=None, **_) -> int:
        a = signature.split(arguments)
        return 2 * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])

    return formula


def backward_flops(signature):
    def formula(*arguments, out_val=None, **_) -> int:
        a = signature.split(arguments)
        return 2 * _pairs(a) * (3 * a.q.shape[-1] + 2 * a.v.shape[-1])

    return formula
