"""The simulators of pantile.reference against the textbook, and their traffic against the model."""

from __future__ import annotations

import pytest
import torch
from pantile import io_model, reference

ALGORITHMS = {
    "lazy_softmax": reference.lazy_softmax,
    "flash1": reference.flash1,
    "flash2": reference.flash2,
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "dead rows": {"window": (2, -1), "causal": True},
}


def draw(rows: int, keys: int, heads: int = 4, heads_k: int = 2, dim: int = 8):
    shapes = [(2, rows, heads, dim), (2, keys, heads_k, dim), (2, keys, heads_k, dim + 3)]
    return [torch.randn(shape, dtype=torch.float64) * 3 for shape in shapes]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(37, 37), (16, 41), (41, 16), (1, 7), (0, 5)])
def test_agrees_with_the_textbook(name, mask, lengths):
    q, k, v = draw(*lengths)
    o, lse = ALGORITHMS[name](q, k, v, tile_q=16, tile_k=8, **MASKS[mask])
    exact, exact_lse = reference.attention(q, k, v, **MASKS[mask])
    assert o.shape == exact.shape
    assert reference.error(o, exact) < 1e-12
    assert reference.error(lse, exact_lse) < 1e-12


@pytest.mark.parametrize("name", ALGORITHMS)
def test_is_differentiable(name):
    q, k, v = (x.requires_grad_() for x in draw(9, 11))
    o, _ = ALGORITHMS[name](q, k, v, tile_q=4, tile_k=4, causal=True)
    exact, _ = reference.attention(q, k, v, causal=True)
    for a, b in zip(
        torch.autograd.grad(o.square().sum(), (q, k, v)),
        torch.autograd.grad(exact.square().sum(), (q, k, v)),
        strict=True,
    ):
        assert reference.error(a, b) < 1e-9


@pytest.mark.parametrize("name", ALGORITHMS)
def test_refuses_an_empty_tile(name):
    with pytest.raises(ValueError, match="tile_k is 0; it must be at least 1"):
        ALGORITHMS[name](*draw(3, 3), tile_k=0)


# ---- traffic


SHAPES = [(64, 64), (70, 70), (33, 70), (70, 33), (5, 300)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("tiles", [(16, 16), (32, 8), (8, 32), (100, 100)])
def test_the_model_counts_what_the_simulators_move(lengths, tiles, causal):
    rows, keys = lengths
    q, k, v = (torch.randn(1, n, 3, 8) for n in (rows, keys, keys))
    shape = io_model.Shape(rows, keys, 8, heads=3, causal=causal)
    for simulate, model in (
        (reference.flash1, io_model.flash1_forward),
        (reference.flash2, io_model.flash2_forward),
    ):
        hbm = reference.Hbm()
        simulate(q, k, v, tile_q=tiles[0], tile_k=tiles[1], causal=causal, hbm=hbm)
        assert model(shape, *tiles) == io_model.Traffic(hbm.read_bytes, hbm.written_bytes)


def test_the_order_of_loops_is_what_saves_traffic():
    """At equal tiles: lazy softmax moves the N x N matrices, FlashAttention-1 does not, and
    FlashAttention-2 drops the trips of O as well."""
    q, k, v = (torch.randn(1, 512, 1, 16) for _ in range(3))
    moved = {}
    for name, algorithm in ALGORITHMS.items():
        hbm = reference.Hbm()
        algorithm(q, k, v, tile_q=64, tile_k=64, hbm=hbm)
        moved[name] = hbm.read_bytes + hbm.written_bytes
    textbook = io_model.textbook_forward(io_model.Shape(512, 512, 16)).bytes
    assert moved["flash2"] < moved["flash1"] < textbook <= moved["lazy_softmax"]


def test_flash1_traffic_falls_with_on_chip_memory_as_the_paper_says():
    """O(N^2 d^2 / M): twice the on-chip memory, half the traffic, as long as it dominates."""
    shape = io_model.Shape(65536, 65536, 128)
    moved = [
        io_model.flash1_forward(shape, *io_model.paper_tiles(128, kib * 1024)).bytes
        for kib in (64, 128, 256)
    ]
    assert moved[0] / moved[1] == pytest.approx(2, rel=0.02)
    assert moved[1] / moved[2] == pytest.approx(2, rel=0.02)


def test_keys_come_once_while_they_fit_the_l2():
    gpu = io_model.GPUS["H200"]
    for length in (2048, 4096, 8192):
        assert io_model.key_passes(io_model.Shape(length, length, 128, heads=64), 128, gpu) == 1.0


def test_every_wave_streams_keys_that_do_not_fit():
    gpu = io_model.GPUS["H200"]
    shape = io_model.Shape(2**18, 2**18, 128)
    waves = -(-(2**18 // 128) // gpu.multiprocessors)
    assert io_model.key_passes(shape, 128, gpu) == waves
    causal = io_model.Shape(2**18, 2**18, 128, causal=True)
    assert io_model.key_passes(causal, 128, gpu) == pytest.approx(waves / 2, rel=0.01)


def test_between_the_two_a_part_of_the_keys_is_found():
    """Two heads in a wave after one, and an L2 that holds 1.5: half of the keys are still there."""
    capacity = 1.5
    assert io_model._hit_share(1, 2, 1.0, capacity) == 0.5
    assert io_model._hit_share(2, 1, 1.0, capacity) == 0.5
    assert io_model._hit_share(1, 1, 1.0, capacity) == 1.0
    assert io_model._hit_share(2, 2, 1.0, capacity) == 0.0
    middle = io_model.Shape(32768, 32768, 128, heads=16)
    assert 1.5 < io_model.key_passes(middle, 128, io_model.GPUS["H200"]) < 2.5


def test_grouped_heads_share_their_keys():
    gpu = io_model.GPUS["H200"]
    grouped = io_model.Shape(4096, 4096, 128, heads=64, heads_k=16)
    assert io_model.key_passes(grouped, 128, gpu) == 1.0
    assert io_model.pantile_forward(grouped, 128, gpu).read_bytes == (
        grouped.rows_bytes + 2 * grouped.keys_bytes
    )
    assert grouped.keys_bytes == grouped.rows_bytes / 4


def test_one_tile_moves_everything_once():
    shape = io_model.Shape(64, 64, 32, heads=2)
    once = io_model.flash2_forward(shape, 64, 64)
    assert once.read_bytes == 3 * shape.rows_bytes
    assert once.written_bytes == shape.rows_bytes + shape.statistics_bytes
    assert io_model.pantile_forward(shape, 64, io_model.GPUS["A100"]) == once


def test_roofline():
    gpu = io_model.GPUS["H200"]
    assert io_model.ridge(gpu) == pytest.approx(206, abs=1)
    shape = io_model.Shape(16384, 16384, 128, heads=16)
    fused = io_model.roofline(gpu, shape, io_model.pantile_forward(shape, 128, gpu))
    stored = io_model.roofline(gpu, shape, io_model.textbook_forward(shape))
    assert (fused.slowest, stored.slowest) == ("tensor", "memory")
    assert fused.milliseconds == pytest.approx(shape.flops() / 989.4e9)
    assert stored.memory_ms > 3 * fused.milliseconds
    # Head dim 64: a multiprocessor's 16 exponentials a clock take as long as its products.
    narrow = io_model.roofline(gpu, io_model.Shape(1, 1, 64), io_model.Traffic(0, 0))
    assert narrow.exp_ms == pytest.approx(narrow.tensor_ms, rel=0.01)


def test_fp8_is_refused_where_there_is_none():
    shape = io_model.Shape(64, 64, 64, element_bytes=1)
    with pytest.raises(ValueError, match="A100 SXM 80 GB; it has no FP8"):
        io_model.roofline(io_model.GPUS["A100"], shape, io_model.Traffic(0, 0))


def test_peak_memory_is_quadratic_and_linear():
    def growth(function) -> float:
        small, large = (function(io_model.Shape(n, n, 64), True) for n in (2**17, 2**18))
        return large / small

    assert growth(io_model.textbook_peak_bytes) == pytest.approx(4, rel=0.01)
    assert growth(io_model.pantile_peak_bytes) == 2
