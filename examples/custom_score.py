"""Scores and masks of your own: what they look like, that they are right, and what they cost.

    python examples/custom_score.py                 # on the CPU in seconds, or on a GPU
    python examples/custom_score.py --picture score.png

Each is one expression. The picture shows the change of the score, with hidden pairs left white, for
every query (down) and key (across); without matplotlib, or without --picture, it is drawn in
characters. Then: the error against textbook attention in float64, forward and backward, and the
time against plain attention.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pantile
import torch

SHADES = " .:-=+*#%@"


@dataclass
class Recipe:
    """``textbook``: the same score in torch, from s, h, i and j, and the tensors by name."""

    name: str
    score: str | None = None
    mask: str | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    textbook: Callable[..., torch.Tensor] | None = None
    visible: Callable[..., torch.Tensor] | None = None


def t5_buckets(length: int, buckets: int = 32, largest: int = 128) -> torch.Tensor:
    """Bucket of each distance j - i from 1 - length to length - 1, as T5 has them, both ways: half
    of the buckets for each sign, half of those for one distance each, the others logarithmic."""
    distance = torch.arange(1 - length, length)
    half = buckets // 2
    exact = half // 2
    away = distance.abs()
    ratio = torch.log(away.clamp(min=1) / exact) / math.log(largest / exact)
    far = (exact + ratio * (half - exact)).long().clamp(max=half - 1)
    return (torch.where(away < exact, away, far) + half * (distance > 0)).int()


def recipes(heads: int, length: int, device: str) -> list[Recipe]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    slope = (2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)).to(device)
    gain = 1.0 + 0.2 * normal(heads)
    table = normal(32, heads)
    bucket = t5_buckets(length).to(device)
    n = length - 1
    return [
        Recipe(
            "ALiBi",
            "s + slope[h] * (j - i)",
            "j <= i",
            {"slope": slope},
            lambda s, h, i, j, slope: s + slope[h] * (j - i),
            lambda h, i, j: j <= i,
        ),
        Recipe(
            "T5 buckets",
            f"s + table[bucket[j - i + {n}], h]",
            None,
            {"table": table, "bucket": bucket},
            lambda s, h, i, j, table, bucket: s + table[bucket[j - i + n].long(), h],
        ),
        Recipe(
            "head scales",
            "s * gain[h]",
            None,
            {"gain": gain},
            lambda s, h, i, j, gain: s * gain[h],
        ),
        Recipe(
            "softcap, dilated",
            "20 * tanh(s / 20)",
            "i - j < 16 or (i - j) % 16 == h",
            {},
            lambda s, h, i, j: 20 * torch.tanh(s / 20),
            lambda h, i, j: (i - j < 16) | ((i - j) % 16 == h),
        ),
    ]


def grids(heads: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = torch.arange(heads, device=device)[:, None, None]
    i = torch.arange(length, device=device)[None, :, None]
    j = torch.arange(length, device=device)[None, None, :]
    return h, i, j


def change_of(recipe: Recipe, heads: int, length: int, device: str) -> torch.Tensor:
    """What becomes of a score of 1, NaN where the pair is hidden: [heads, length, length]."""
    h, i, j = grids(heads, length, device)
    s = torch.ones(heads, length, length, device=device)
    if recipe.textbook is not None:
        s = recipe.textbook(s, h, i, j, **recipe.tensors).expand_as(s)
    if recipe.visible is not None:
        s = s.masked_fill(~recipe.visible(h, i, j), torch.nan)
    return s.cpu()


def draw(recipe: Recipe, heads: int, device: str, size: int = 24) -> None:
    """Head 1, in characters."""
    length = recipe.tensors["bucket"].shape[0] // 2 + 1 if "bucket" in recipe.tensors else 96
    s = change_of(recipe, heads, length, device)[1]
    s = s[:: max(length // size, 1), :: max(length // size, 1)]
    low, high = float(s.nan_to_num(math.inf).min()), float(s.nan_to_num(-math.inf).max())
    where = f" where {recipe.mask}" if recipe.mask else ""
    print(f"\n{recipe.name}: {recipe.score or 's'}{where}")
    for row in s.tolist():
        shades = (
            " " if math.isnan(x) else SHADES[1 + int(8.99 * (x - low) / max(high - low, 1e-9))]
            for x in row
        )
        print("  " + "".join(2 * shade for shade in shades))


def textbook(
    recipe: Recipe, inputs: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    q, k, v = inputs
    heads, length = q.shape[2], q.shape[1]
    h, i, j = grids(heads, length, str(q.device))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if recipe.textbook is not None:
        s = recipe.textbook(s, h, i, j, **tensors)
    if recipe.visible is not None:
        s = s.masked_fill(~recipe.visible(h, i, j), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)


def call(
    recipe: Recipe, inputs: list[torch.Tensor], tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    q, k, v = inputs
    score = None if recipe.score is None else pantile.Score(recipe.score, **tensors)
    mask = None if recipe.mask is None else pantile.Mask(recipe.mask)
    o: torch.Tensor = pantile.attention(q, k, v, score=score, mask=mask)
    return o


def learned(recipe: Recipe, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The tensors, those of real numbers as leaves."""
    return {
        name: x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in recipe.tensors.items()
    }


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


def check(recipe: Recipe, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Relative errors: of o, and the largest of a gradient."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    ours, theirs = learned(recipe), learned(recipe, torch.float64)
    o, truth = call(recipe, leaves, ours), textbook(recipe, exact, theirs)
    wanted = [name for name, x in ours.items() if x.requires_grad]
    grads = torch.autograd.grad(o.float().square().sum(), [*leaves, *(ours[n] for n in wanted)])
    truths = torch.autograd.grad(truth.square().sum(), [*exact, *(theirs[n] for n in wanted)])
    return relative(o, truth), max(map(relative, grads, truths))


def seconds(run: Callable[[], object], device: str, repeats: int = 3) -> float:
    run()
    best = math.inf
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def picture(path: str, all_recipes: list[Recipe], heads: int, length: int, device: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(all_recipes), figsize=(3.2 * len(all_recipes), 3.4))
    for axis, recipe in zip(axes, all_recipes, strict=True):
        axis.imshow(change_of(recipe, heads, length, device)[1], cmap="viridis")
        axis.set_title(recipe.name)
        axis.set_xlabel("key")
    axes[0].set_ylabel("query")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"{path}: written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=0, help="default: 256, on a GPU 4096")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--picture", help="a file for the picture, by matplotlib")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    length = options.length or (4096 if device == "cuda" else 256)
    heads, shown = options.heads, 96
    if options.picture:
        picture(options.picture, recipes(heads, shown, device), heads, shown, device)
    else:
        for recipe in recipes(heads, shown, device):
            draw(recipe, heads, device)

    generator = torch.Generator().manual_seed(1)
    shape = (1, length, heads, options.head_dim)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    checked = [x[:, : min(length, 512)] for x in inputs]
    print(f"\n{device}, {dtype}, {heads} heads, {length} queries and keys")
    print(f"{'':18} {'error of o':>12} {'of gradients':>13} {'time / plain':>13}")
    plain = seconds(lambda: pantile.attention(*inputs), device)
    both = zip(
        recipes(heads, min(length, 512), device), recipes(heads, length, device), strict=True
    )
    for recipe, timed in both:
        try:
            errors = check(recipe, checked)
        except pantile.UnsupportedError as refusal:
            print(f"{recipe.name:18} {str(refusal).splitlines()[0]}")
            continue

        def run(timed: Recipe = timed) -> torch.Tensor:
            return call(timed, inputs, timed.tensors)

        ratio = seconds(run, device) / plain
        print(f"{recipe.name:18} {errors[0]:12.1e} {errors[1]:13.1e} {ratio:13.2f}")


if __name__ == "__main__":
    main()
