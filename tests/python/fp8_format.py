"""The FP8 format of docs/design/fp8.md written a second time, in torch, for the tests: what the
quantisers must produce bit for bit, and what the operands stand for."""

from __future__ import annotations

import math

import torch

ROWS = 128
SIGN_WORDS = (
    0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834, 0x2545F491, 0x4F6CDD1D, 0xBF58476D, 0x94D049BB,
)  # fmt: skip


def group_of(head_dim: int) -> int:
    return min(head_dim & -head_dim, 256)


def signs(head_dim: int) -> torch.Tensor:
    return torch.tensor(
        [-1.0 if SIGN_WORDS[c // 32 % 8] >> (c % 32) & 1 else 1.0 for c in range(head_dim)]
    )


def rotate(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_dim]: signs, 1 / group, then sums over distances 1, 2, 4, ..."""
    head_dim = x.shape[-1]
    group = group_of(head_dim)
    x = x * (signs(head_dim) / group)
    distance = 1
    while distance < group:
        pairs = x.reshape(*x.shape[:-1], head_dim // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).reshape(x.shape)
        distance *= 2
    return x


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """The inverse of rotate, in float64."""
    head_dim = y.shape[-1]
    group = group_of(head_dim)
    x = y.double()
    distance = 1
    while distance < group:
        pairs = x.reshape(*x.shape[:-1], head_dim // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).reshape(x.shape)
        distance *= 2
    return x * signs(head_dim).double()


def fold(sums: torch.Tensor) -> torch.Tensor:
    """Sum over the first axis by halves."""
    while sums.shape[0] > 1:
        half = sums.shape[0] // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def channel_mean(k: torch.Tensor) -> torch.Tensor:
    """float32 [keys, dim] -> [dim], in the order of core/blocked.h."""
    keys, dim = k.shape
    if keys == 0:
        return torch.zeros(dim)
    k = torch.where(k.isfinite(), k, torch.zeros(()))
    blocks = -(-keys // ROWS)
    k = torch.cat((k, torch.zeros(blocks * ROWS - keys, dim))).reshape(blocks, 8, 16, dim)
    rows = torch.zeros(blocks, 16, dim)
    for step in range(8):
        rows = rows + k[:, step]
    partial = fold(rows.transpose(0, 1))
    sums = torch.zeros(32, dim)
    for begin in range(0, blocks, 32):
        part = partial[begin : begin + 32]
        sums[: len(part)] += part
    mean = fold(sums) / float(keys)
    return torch.where(mean.isfinite(), mean, torch.zeros(()))


def power_scale(x: torch.Tensor, limit: float) -> float:
    """The smallest power of two that brings the largest finite magnitude to the limit, at most the
    largest that may be multiplied by the limit; beyond it numbers saturate."""
    largest = 2.0 ** (127 - math.floor(math.log2(limit)))
    finite = x[x.isfinite()].abs()
    amax = finite.max().item() if finite.numel() else 0.0
    if amax == 0.0:
        return 1.0
    scale = 2.0**-60
    while amax / scale > limit and scale < largest:  # exact in double
        scale *= 2.0
    return scale


def encode(x: torch.Tensor, scale: float, limit: float) -> torch.Tensor:
    """uint8 codes of x / scale; what is not finite becomes 0x7f."""
    scaled = (x.double() / scale).clamp(-limit, limit).float()
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isfinite(), codes, torch.tensor(0x7F, dtype=torch.uint8))


def value_column(key: int) -> int:
    return key // 16 * 16 + key % 8 // 2 * 4 + key // 8 % 2 * 2 + key % 2


COLUMNS = torch.tensor([value_column(key) for key in range(ROWS)])


def head_codes(x: torch.Tensor, limit: float, scale_rows: int, factor: float):
    """Codes [blocks * 128, dim rounded up to 16] and scales of the rows of one head."""
    rows, dim = x.shape
    blocks = -(-rows // ROWS)
    codes = torch.zeros(blocks * ROWS, -(-dim // 16) * 16, dtype=torch.uint8)
    scales = torch.full((blocks * ROWS // scale_rows,), float("nan"))  # NaN: not specified
    for begin in range(0, rows, scale_rows):
        part = x[begin : begin + scale_rows]
        scale = power_scale(part, limit)
        codes[begin : begin + len(part), :dim] = encode(part, scale, limit)
        scales[begin // scale_rows] = min(scale * factor, 2.0**127)
    return codes, scales


def head_values(v: torch.Tensor, scale_rows: int):
    """Codes [blocks, dim, 128], scales and the bits of what is not finite, of one head of V."""
    rows, dim = v.shape
    blocks = -(-rows // ROWS)
    codes = torch.zeros(blocks, ROWS, dim, dtype=torch.uint8)
    scales = torch.full((blocks * ROWS // scale_rows,), float("nan"))
    bad = torch.zeros(blocks * ROWS, dim, dtype=torch.bool)
    for begin in range(0, rows, scale_rows):
        part = v[begin : begin + scale_rows]
        scale = power_scale(part, 448.0)
        coded = torch.where(part.isfinite(), encode(part, scale, 448.0), torch.zeros(()).byte())
        block, first = begin // ROWS, begin % ROWS
        codes[block, first : first + len(part)] = coded
        empty = not part[part.isfinite()].any()  # 0 for a block of zeros: it has no scale
        scales[begin // scale_rows] = 0.0 if empty else scale
        bad[begin : begin + len(part)] = ~part.isfinite()
    bad = bad.reshape(blocks, ROWS, dim)
    flagged = bad.flatten(1).any(1).repeat_interleave(ROWS // scale_rows)
    placed = torch.empty(blocks, ROWS, dim, dtype=torch.uint8)
    placed[:, COLUMNS] = codes
    return placed.transpose(1, 2), torch.where(flagged, -scales, scales), bad.transpose(1, 2)


def codes_as_numbers(codes: torch.Tensor) -> torch.Tensor:
    return codes.cpu().view(torch.float8_e4m3fn).double()


def dequantize(operands, batch: int):
    """(q, k, v) in float64 that sequence ``batch`` of dense operands stands for, each [rows, heads,
    dim]; q and k as they are kept, rotated; q carries the factor of the rotation."""
    rows, keys = operands.shape_q[1], operands.shape_k[1]
    head_dim = operands.shape_q[3]
    found = []
    for codes, scales, length, block in (
        (operands.codes_q, operands.scale_q, rows, operands.block_q),
        (operands.codes_k, operands.scale_kv[..., 0], keys, operands.block_k),
    ):
        first = batch * -(-length // ROWS) * ROWS
        numbers = codes_as_numbers(codes)[:, first : first + length, :head_dim]
        scale = scales.cpu().double().repeat_interleave(block, 1)[:, first : first + length]
        found.append((numbers * scale[..., None]).transpose(0, 1))
    blocks = -(-keys // ROWS)
    numbers = codes_as_numbers(operands.codes_v)[:, batch * blocks : (batch + 1) * blocks]
    numbers = numbers.transpose(2, 3)[:, :, COLUMNS].flatten(1, 2)[:, :keys]
    first = batch * blocks * ROWS
    scale = operands.scale_kv[..., 1].cpu().double().abs()
    scale = scale.repeat_interleave(operands.block_k, 1)[:, first : first + keys]
    found.append((numbers * scale[..., None]).transpose(0, 1))
    return found
