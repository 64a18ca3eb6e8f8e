"""How many bytes attention moves through HBM, and what that allows: an IO and roofline model.

The counts follow the papers' analysis (FlashAttention, section 3.2; FlashAttention-2, section 3.1)
but are exact to the tile, so that the simulators of :mod:`pantile.reference` must agree to the
byte, and they know what the L2 keeps, so that a GPU's DRAM counters must agree within 15 %
(``benchmarks/io_check.py``). Nothing here needs torch or a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STATISTIC_BYTES = 4  # LSE, row_max, row_sum, delta: fp32


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures (docs/sources.md). Dense tensor-core rates, boost clock."""

    name: str
    multiprocessors: int
    clock_ghz: float
    tflops_16bit: float
    tflops_fp8: float | None
    hbm_tbps: float
    hbm_gb: int
    l2_mib: int
    shared_kib: int  # of a multiprocessor
    exp_per_clock: int = 16  # exp2 of one multiprocessor (four special function units of 4)


GPUS = {
    "A100": Gpu("A100 SXM 80 GB", 108, 1.41, 312.0, None, 2.039, 80, 40, 164),
    "H100": Gpu("H100 SXM", 132, 1.83, 989.4, 1978.9, 3.35, 80, 50, 228),
    "H200": Gpu("H200 SXM", 132, 1.83, 989.4, 1978.9, 4.8, 141, 50, 228),
}


@dataclass(frozen=True)
class Shape:
    """One attention call; every head has its own keys (grouped heads: see `heads_k`)."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    heads: int = 1  # batch x query heads
    heads_k: int = 0  # batch x key heads; 0 means as many as heads
    element_bytes: int = 2
    causal: bool = False

    @property
    def key_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def rows_bytes(self) -> int:
        """Of Q, of O, and of their gradients."""
        return self.heads * self.seqlen_q * self.head_dim * self.element_bytes

    @property
    def keys_bytes(self) -> int:
        """Of K, of V, and of their gradients."""
        return self.key_heads * self.seqlen_k * self.head_dim * self.element_bytes

    @property
    def scores_bytes(self) -> int:
        """Of S or P, when they are stored."""
        return self.heads * self.seqlen_q * self.seqlen_k * self.element_bytes

    @property
    def statistics_bytes(self) -> int:
        """Of one fp32 figure a row."""
        return self.heads * self.seqlen_q * STATISTIC_BYTES

    def flops(self, what: str = "forward") -> float:
        """As the papers count: 4 N^2 d forward, 2.5 times that backward, half when causal."""
        square = 4.0 * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim
        return square * (0.5 if self.causal else 1.0) * {"forward": 1.0, "backward": 2.5}[what]


@dataclass(frozen=True)
class Traffic:
    read_bytes: float
    written_bytes: float

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes


# ---- tiles


def _tiles(length: int, tile: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, tile):
        yield begin, min(begin + tile, length)


def keys_seen(shape: Shape, row_end: int) -> int:
    """Keys up to the last one that a row before `row_end` sees."""
    if not shape.causal:
        return shape.seqlen_k
    return max(0, min(shape.seqlen_k, row_end + shape.seqlen_k - shape.seqlen_q))


def _round_up(value: int, tile: int) -> int:
    return -(-value // tile) * tile


def keys_visited(shape: Shape, tile_q: int, tile_k: int) -> int:
    """Keys that all row tiles of one head visit together, whole tiles of keys at a time."""
    return sum(
        min(shape.seqlen_k, _round_up(keys_seen(shape, end), tile_k))
        for _, end in _tiles(shape.seqlen_q, tile_q)
    )


def rows_visited(shape: Shape, tile_q: int, tile_k: int) -> int:
    """Rows that all key tiles of one head meet together, whole tiles of rows at a time."""
    total = 0
    for begin, end in _tiles(shape.seqlen_q, tile_q):
        total += (end - begin) * -(-keys_seen(shape, end) // tile_k)
    return total


def paper_tiles(head_dim: int, on_chip_bytes: int, element_bytes: int = 2) -> tuple[int, int]:
    """(tile_q, tile_k) of FlashAttention, algorithm 1: four tiles share the on-chip memory."""
    tile_k = max(1, on_chip_bytes // element_bytes // (4 * head_dim))
    return min(tile_k, head_dim), tile_k


# ---- forward


def textbook_forward(shape: Shape) -> Traffic:
    """Three kernels: S = Q K^T, P = softmax(S), O = P V, with S and P stored in full."""
    read = shape.rows_bytes + 2 * shape.keys_bytes + 2 * shape.scores_bytes
    return Traffic(read, 2 * shape.scores_bytes + shape.rows_bytes)


def flash1_forward(shape: Shape, tile_q: int, tile_k: int) -> Traffic:
    """Keys outside, rows inside: K and V once; Q, O, row_max and row_sum once a tile of keys."""
    row_bytes = shape.head_dim * shape.element_bytes
    rows = shape.heads * rows_visited(shape, tile_q, tile_k)
    inner_read = rows * (2 * row_bytes + 2 * STATISTIC_BYTES)
    inner_write = rows * (row_bytes + 2 * STATISTIC_BYTES)
    cleared = shape.rows_bytes + 2 * shape.statistics_bytes
    return Traffic(2 * shape.keys_bytes + inner_read, cleared + inner_write)


def flash2_forward(shape: Shape, tile_q: int, tile_k: int) -> Traffic:
    """Rows outside, keys inside: Q, O and LSE once; K and V once a tile of rows."""
    visited = shape.heads * keys_visited(shape, tile_q, tile_k)
    keys = 2 * visited * shape.head_dim * shape.element_bytes
    return Traffic(shape.rows_bytes + keys, shape.rows_bytes + shape.statistics_bytes)


def _hit_share(before: int, now: int, keys_bytes: float, capacity: float) -> float:
    """Share of a head's keys that a wave finds in the L2 from the wave before.

    Between two uses of a key at position p of its head lie the rest of the earlier wave's `before`
    heads and the first p of this wave's `now`: ((1 - p) before + p now) heads of other data.
    """
    first, last = before * keys_bytes, now * keys_bytes
    if max(first, last) <= capacity:
        return 1.0
    if min(first, last) > capacity:
        return 0.0
    crossing = (capacity - first) / (last - first)
    return crossing if first < last else 1 - crossing


def key_passes(shape: Shape, tile_q: int, gpu: Gpu) -> float:
    """How often K and V come out of HBM, when each multiprocessor holds one tile of rows.

    Tiles are handed out head by head, a wave of them at a time; the blocks of a wave walk over the
    keys together. A head that the wave before met too is found in the L2 as far as what was read in
    between fits. Of the L2 that is half: each of its two partitions keeps its own copy of what both
    halves of the chip read.
    """
    tiles_of_head = -(-shape.seqlen_q // tile_q) * (shape.heads // shape.key_heads)
    tiles = tiles_of_head * shape.key_heads
    keys_of_head = 2 * shape.keys_bytes / shape.key_heads
    capacity = gpu.l2_mib * 2**20 / 2
    passes, before = 0.0, range(0)
    for begin in range(0, tiles, gpu.multiprocessors):
        end = min(begin + gpu.multiprocessors, tiles)
        heads = range(begin // tiles_of_head, (end - 1) // tiles_of_head + 1)
        shared = len(set(before) & set(heads))
        hit = _hit_share(len(before), len(heads), keys_of_head, capacity) if shared else 0.0
        passes += len(heads) - shared * hit
        before = heads
    visited = keys_visited(shape, tile_q, 1) / (-(-shape.seqlen_q // tile_q) * shape.seqlen_k)
    return max(1.0, passes / shape.key_heads * visited)


def pantile_forward(shape: Shape, tile_q: int, gpu: Gpu) -> Traffic:
    """FlashAttention-2 order with the L2 in between."""
    keys = 2 * shape.keys_bytes * key_passes(shape, tile_q, gpu)
    return Traffic(shape.rows_bytes + keys, shape.rows_bytes + shape.statistics_bytes)


# ---- backward


def textbook_backward(shape: Shape) -> Traffic:
    """Five products and the softmax's derivative, each a kernel, with P kept from the forward and
    dP and dS stored: dV = P^T dO, dP = dO V^T, dS from P and dP, dQ = dS K, dK = dS^T Q."""
    rows, keys, scores = shape.rows_bytes, shape.keys_bytes, shape.scores_bytes
    read = (scores + rows) + (rows + keys) + 2 * scores + (scores + keys) + (scores + rows)
    return Traffic(read, keys + scores + scores + rows + keys)


def pantile_backward(shape: Shape) -> Traffic:
    """Row terms first, then tiles of keys outside and rows inside, with dQ summed in fp32.

    A lower bound that holds while the rows of the heads in flight fit the L2: prepare reads O, dO
    and LSE, writes two row terms and clears the sum of dQ; the main kernel reads Q, K, V, dO and
    the terms, writes dK and dV, and its additions leave the L2 once; finish reads the sum and
    writes dQ.
    """
    rows, keys, statistics = shape.rows_bytes, shape.keys_bytes, shape.statistics_bytes
    sums = shape.heads * shape.seqlen_q * shape.head_dim * 4
    read = (2 * rows + statistics) + (2 * rows + 2 * keys + 2 * statistics + sums) + sums
    return Traffic(read, (2 * statistics + sums) + (2 * keys + sums) + rows)


# ---- roofline


@dataclass(frozen=True)
class Bound:
    """Milliseconds that each unit needs at its full rate, alone."""

    tensor_ms: float
    memory_ms: float
    exp_ms: float

    @property
    def slowest(self) -> str:
        times = {"tensor": self.tensor_ms, "memory": self.memory_ms, "exp": self.exp_ms}
        return max(times, key=times.get)

    @property
    def milliseconds(self) -> float:
        return max(self.tensor_ms, self.memory_ms, self.exp_ms)


def roofline(gpu: Gpu, shape: Shape, traffic: Traffic, what: str = "forward") -> Bound:
    """The tensor cores', the memory's and the exponentials' own time for one pass."""
    flops = shape.flops(what)
    rate = gpu.tflops_16bit if shape.element_bytes > 1 else gpu.tflops_fp8
    if rate is None:
        raise ValueError(f"gpu is {gpu.name}; it has no FP8 tensor cores")
    exponentials = flops / {"forward": 1.0, "backward": 2.5}[what] / (4 * shape.head_dim)
    exp_rate = gpu.multiprocessors * gpu.exp_per_clock * gpu.clock_ghz * 1e9
    return Bound(
        flops / (rate * 1e9),
        traffic.bytes / (gpu.hbm_tbps * 1e9),
        exponentials / exp_rate * 1e3,
    )


def ridge(gpu: Gpu) -> float:
    """FLOP per byte from which on the tensor cores, not the memory, are the limit (16 bit)."""
    return gpu.tflops_16bit / gpu.hbm_tbps


# ---- memory that must exist


def textbook_peak_bytes(shape: Shape, training: bool) -> int:
    """Inputs, output and the N x N matrices alive together: S and P in the forward; P, dP and dS
    beside all inputs and gradients in a training step."""
    operands = 2 * shape.rows_bytes + 2 * shape.keys_bytes
    if not training:
        return operands + 2 * shape.scores_bytes
    return 2 * operands + 3 * shape.scores_bytes


def pantile_peak_bytes(shape: Shape, training: bool) -> int:
    """Inputs, outputs and fp32 row figures; in a training step gradients, the fp32 sum of dQ and
    two row terms as well. Linear in the lengths."""
    operands = 2 * shape.rows_bytes + 2 * shape.keys_bytes
    if not training:
        return operands + shape.statistics_bytes
    sums = shape.heads * shape.seqlen_q * shape.head_dim * 4
    return 2 * operands + 3 * shape.statistics_bytes + sums
