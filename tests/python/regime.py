"""Cases as large as those that are benchmarked: at least three tiles for each multiprocessor, so
that blocks take a second and a third one, claim them, and go round their rings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from support import Case, Target

TILES_PER_MULTIPROCESSOR = 3


@dataclass(frozen=True)
class Shape:
    """Lengths, heads and windows; the batch follows from the tiles of the entry that is tested."""

    name: str
    rows: int = 0
    keys: int = 0
    heads: int = 4
    heads_k: int = 4
    window: tuple[int, int] = (33, 12)
    packed: bool = False

    def small(self) -> Shape:
        """For the CPU."""
        return replace(
            self,
            rows=-(-self.rows // SHRINK),
            keys=-(-self.keys // SHRINK),
            heads=self.heads // min(self.heads_k, 2),
            heads_k=self.heads_k // min(self.heads_k, 2),
            window=(self.window[0] // 8, self.window[1] // 8),
        )


SHAPES = (
    Shape("square", 2305, 2305, window=(700, 100)),
    Shape("more-queries", 1665, 300, heads=2, heads_k=1, window=(40, 10)),
    Shape("fewer-queries", 300, 2305, heads=16, heads_k=2, window=(1000, 0)),
    Shape("long-tail", heads=16, heads_k=2, window=(100, 30), packed=True),
)
# A batch whose longest sequence is many times the others. The pairs come as often as it takes.
LONGEST = (4097, 4097)
OTHERS = ((0, 5), (1, 0), (129, 700), (700, 129), (64, 64), (333, 1000), (1000, 333), (2, 2))

MASKS = ("full", "causal", "window")
SHRINK = 24  # lengths on the CPU


def mask_arguments(mask: str, shape: Shape) -> dict:
    return {"full": {}, "causal": {"causal": True}, "window": {"window": shape.window}}[mask]


def multiprocessors(target: Target) -> int:
    if target.device == "cpu":
        return 1
    return torch.cuda.get_device_properties(0).multi_processor_count


def _random(shape: tuple, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    return x.to(dtype)


def _bounds(lengths, device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).to(device, torch.int32)


def build(
    shape: Shape, mask: str, dims: tuple[int, int], dtype: torch.dtype, device: str, repeats: int
) -> Case:
    """``repeats``: the batch, or how often OTHERS come in a packed batch. Packed and full: a part
    of each sequence is unused, and holds NaN."""
    arguments = mask_arguments(mask, shape)
    if not shape.packed:
        sizes = [(repeats, shape.rows, shape.heads, dims[0])]
        sizes += [(repeats, shape.keys, shape.heads_k, d) for d in dims]
        return Case(*(_random(s, dtype, device, i) for i, s in enumerate(sizes)), arguments)
    divisor = SHRINK if device == "cpu" else 1
    pairs = [*OTHERS * repeats, LONGEST, *OTHERS[:3]]
    lengths = [[-(-pair[side] // divisor) for pair in pairs] for side in (0, 1)]
    totals = [sum(x) for x in lengths]
    q = _random((totals[0], shape.heads, dims[0]), dtype, device, 0)
    k, v = (
        _random((totals[1], shape.heads_k, d), dtype, device, 1 + i) for i, d in enumerate(dims)
    )
    bounds = tuple(_bounds(x, device) for x in lengths)
    if mask == "full":
        for name, side, tensors in (("q", 0, (q,)), ("k", 1, (k, v))):
            used = torch.tensor([n - n // 5 for n in lengths[side]], dtype=torch.int32)
            arguments[f"seqused_{name}"] = used.to(device)
            begins = bounds[side].tolist()
            for b, n in enumerate(used.tolist()):
                for x in tensors:
                    x[begins[b] + n : begins[b + 1]] = math.nan
    return Case(q, k, v, arguments, bounds, tuple(max(x) for x in lengths))


def tile_count(case: Case, pass_: str, tile: int) -> int:
    """Tiles of the pass: of queries of every head, or of keys of every key head."""
    backward = pass_ == "backward"
    x = case.k if backward else case.q
    tile = max(tile, 1)
    if case.lengths:
        lengths = case.lengths[1 if backward else 0].diff()
        return int((-(-lengths // tile)).sum()) * x.shape[-2]
    return x.shape[0] * x.shape[2] * -(-x.shape[1] // tile)


def random_gradients(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(dO, dLSE)."""
    device, q, v = case.q.device.type, case.q, case.v
    o_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return (
        _random(o_shape, q.dtype, device, 3),
        _random(lse_shape, torch.float32, device, 4),
    )
