"""The rotation of FP8 operands, and their rows in the order of sequences, in torch operations.

The forms are those of ``cpp/include/pantile/quantize.h``. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pantile._fast_path import is_compiling, is_plain

Tensor = torch.Tensor

ROWS = 128  # of a block
_LARGEST_GROUP = 256
# The signs of the rotation (cpp/core/hadamard.h): bit c % 32 of word c / 32, for channel c.
_SIGN_WORDS = (
    *(0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834),
    *(0x2545F491, 0x4F6CDD1D, 0xBF58476D, 0x94D049BB),
)


# ---- the rotation


def hadamard_group(head_dim: int) -> int:
    """Channels that are rotated together."""
    return min(head_dim & -head_dim, _LARGEST_GROUP)


def rotation_balance(head_dim: int) -> int:
    """By what rotated q is divided and k multiplied (core::rotation_balance)."""
    return 1 << (hadamard_group(head_dim).bit_length() - 1) // 2


def _make_rotation(like: Tensor, head_dim: int, factor: float) -> Tensor:
    """[head_dim, head_dim]: H D of each group on the diagonal, times a power of two. One matrix: a
    product by groups would be one of three rows of 32 for each row of head dim 96. Of scalars and
    operations on the device alone, so that nothing is copied to it."""
    group = hadamard_group(head_dim)
    channel = torch.arange(head_dim, device=like.device)
    bits = channel[:, None] & channel & (group - 1)
    for shift in (4, 2, 1):
        bits = bits ^ bits >> shift  # at last bit 0 is the parity of eight bits
    bit = torch.arange(32, device=like.device)
    words = range((head_dim + 31) // 32)
    signs = torch.cat([_SIGN_WORDS[word % len(_SIGN_WORDS)] >> bit for word in words]) & 1
    odd = (bits & 1) ^ signs[:head_dim]
    together = channel[:, None] // group == channel // group
    matrix = torch.where(odd == 1, -factor, factor)
    return torch.where(together, matrix, 0.0).to(like.dtype)


_rotations: dict[tuple, Tensor] = {}


def _rotation(like: Tensor, head_dim: int, factor: float) -> Tensor:
    """Kept from call to call, but not what belongs to a traced program or a captured graph."""
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_compiling() or not is_plain(like) or capturing:
        return _make_rotation(like, head_dim, factor)
    key = like.device, like.dtype, head_dim, factor
    if key not in _rotations:
        with torch.no_grad():
            _rotations[key] = _make_rotation(like, head_dim, factor)
    return _rotations[key]


def rotate_back(x: Tensor, head_dim: int, factor: float) -> Tensor:
    """[..., head_dim] rotated back, without the division by the group, times a power of two."""
    return x @ _rotation(x, head_dim, factor)


# ---- rows


class Sequences(NamedTuple):
    """Of one side: rows of each dense sequence, or bounds and rows of all packed ones."""

    batch: int
    rows: int
    cu_seqlens: Tensor | None


def blocks_of(side: Sequences) -> int:
    """Blocks of one head."""
    if side.cu_seqlens is not None:
        return side.rows // ROWS + side.batch
    return side.batch * ((side.rows + ROWS - 1) // ROWS)


def sequence_of(row: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Of packed rows. Those behind the last sequence count as rows of it."""
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
    return sequence.clamp_(max=max(cu_seqlens.shape[0] - 2, 0))


def _packed_rows(side: Sequences, cu_seqlens: Tensor) -> Tensor:
    """For each packed row the row of the operands that holds it."""
    row = torch.arange(side.rows, device=cu_seqlens.device)
    sequence = sequence_of(row, cu_seqlens)
    first = cu_seqlens.long()[sequence]
    block = first // ROWS + sequence
    return (block * ROWS + row - first).clamp_(max=ROWS * blocks_of(side) - 1)


def in_sequences(x: Tensor, side: Sequences) -> Tensor:
    """[heads, rows of the operands, ...] as [batch, rows, heads, ...], packed [rows, heads, ...].

    Dense tensors come back as views.
    """
    if side.cu_seqlens is not None:
        return x.index_select(1, _packed_rows(side, side.cu_seqlens)).movedim(0, 1)
    rows = blocks_of(side) // side.batch * ROWS if side.batch else 0
    return x.reshape(x.shape[0], side.batch, rows, *x.shape[2:])[:, :, : side.rows].movedim(0, 2)


def means_of_rows(mean_k: Tensor, heads: int, rows: int, cu_seqlens: Tensor | None) -> Tensor:
    """The mean of K that belongs to each row: [batch, 1, heads, dim], packed [rows, heads, dim].

    ``heads``: of K, or of Q, whose heads share those of K in groups.
    """
    means = mean_k.repeat_interleave(heads // max(mean_k.shape[1], 1), 1)
    if cu_seqlens is None:
        return means[:, None]
    row = torch.arange(rows, device=mean_k.device)
    return means.index_select(0, sequence_of(row, cu_seqlens))


def nonfinite_values(words: Tensor, scales: Tensor) -> Tensor:
    """bool [heads, rows of the operands, head_dim_v]: where v was NaN or infinite.

    ``words``: bits by key, which are written only in blocks whose scales ``[heads, blocks * n]``
    are negative.
    """
    bit = torch.arange(32, device=words.device, dtype=torch.int32)
    found = (words[..., None] >> bit & 1).bool().flatten(3)  # [heads, blocks, head_dim_v, 128]
    each = scales.shape[1] // max(words.shape[1], 1)
    flagged = torch.signbit(scales[:, :: max(each, 1)])
    return (found & flagged[:, :, None, None]).transpose(2, 3).flatten(1, 2)
