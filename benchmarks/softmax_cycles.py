"""Clocks of one key tile on one scheduler, by instruction counts: what each softmax mode of the
Ampere forward should bring on a GPU (docs/experiments/flashattention-t.md).

A warp owns 32 rows; a tile has 64 keys. The tensor pipe is taken as busy for all of its work, and a
share of the vector pipes' clocks as not hidden behind it. That share is the only free number: it is
fitted to one measured speed of a chip and then serves every mode."""

from __future__ import annotations

from dataclasses import dataclass

KEYS, ROWS, LANES = 64, 32, 32


@dataclass(frozen=True)
class Chip:
    """Clocks that a warp instruction keeps its pipe of one scheduler busy."""

    name: str
    product16: float  # mma.m16n8k16, 16-bit operands
    product_tf32: float  # mma.m16n8k8
    fma: float  # FFMA, FADD, FMUL
    compare: float  # FMNMX
    exp2: float
    convert: float  # two floats to one register
    tflops: float  # of mma.sync, 16-bit, as far as it can be reached
    exposed: float  # share of vector clocks that nothing hides


# H200: rates measured; `exposed` fitted to the vector mode that rescales always,
# head dim 128. A100: rates from NVIDIA's tables; `exposed` fitted to FlashAttention-2's published
# 227 TFLOP/s at head dim 128. No A100 was measured.
H200 = Chip("H200", 6.4, 6.2, 1, 2, 8, 2, 620, 1.26)
A100 = Chip("A100", 8, 8, 2, 2, 8, 2, 312, 0.63)
CHIPS = {chip.name: chip for chip in (A100, H200)}

# Chips that nobody measured, by what their row of cuda/ampere/forward/softmax_choice.h rests on:
# 1024, 512 or 256 16-bit products a clock and multiprocessor of NVIDIA's tables, FP32 on all lanes.
# GeForce cards halve the products that add in FP32. `exposed`: the range of the fitted chips.
MODELLED = {
    (8, 0): [A100],
    (8, 6): [Chip("A40", 16, 16, 1, 2, 8, 2, 0, x) for x in (0.63, 1.26)]
    + [Chip("RTX 3090", 32, 32, 1, 2, 8, 2, 0, x) for x in (0.63, 1.26)],
    (8, 7): [Chip("Orin", 8, 8, 1, 2, 8, 2, 0, 0.63)],
    (8, 9): [Chip("L40", 16, 16, 1, 2, 8, 2, 0, x) for x in (0.63, 1.26)]
    + [Chip("RTX 4090", 32, 32, 1, 2, 8, 2, 0, x) for x in (0.63, 1.26)],
    (9, 0): [H200],
    (12, 0): [Chip("RTX 5090", 32, 32, 1, 2, 8, 2, 0, x) for x in (0.63, 1.26)],
}

# mode -> (rescale always, row sum on tensor cores, share scaled on tensor cores, scale in Q)
MODES = {
    "vector, always": (True, False, 0.0, False),
    "vector": (False, False, 0.0, False),
    "tensor": (False, True, 0.0, False),
    "share 1/4": (False, True, 0.25, False),
    "share 1/2": (False, True, 0.5, False),
    "share 1": (False, True, 1.0, False),
    "fast_scale": (False, True, 0.0, True),
}


def clocks(chip: Chip, head_dim: int, mode: str) -> float:
    always, sums, share, fast = MODES[mode]
    scores = ROWS * KEYS // LANES  # of a lane
    outputs = ROWS * head_dim // LANES
    products = 2 * (ROWS // 16) * (KEYS // 8) * (head_dim // 16)
    tensor = products * chip.product16
    vector = scores * (chip.exp2 + chip.compare) + scores / 2 * chip.convert
    if sums:
        tensor += ROWS // 16 * KEYS // 16 * chip.product16
    else:
        vector += scores * chip.fma
    if not fast:
        tensor += share * (ROWS // 16) * (KEYS // 8) * chip.product_tf32
        vector += (1 - share) * scores * chip.fma
    if always:
        vector += outputs * chip.fma
    return tensor + chip.exposed * vector


def predicted_ratio(chip: Chip, head_dim: int, mode: str) -> float:
    """Speed against the vector mode that rescales always."""
    return clocks(chip, head_dim, "vector, always") / clocks(chip, head_dim, mode)
