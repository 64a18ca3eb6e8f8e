"""Variants where plain attention is benchmarked: at least three tiles for each multiprocessor, on
memory that holds NaN, 1e30 and Inf, with guards around what is written, and every element compared.

The CPU runs the same tests in the small, which shows that they can be passed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pantile
import pytest
import torch
from pantile import reference
from regime import (
    SHAPES,
    TILES_PER_MULTIPROCESSOR,
    Shape,
    build,
    multiprocessors,
    random_gradients,
    tile_count,
)
from support import (
    NAMES,
    Case,
    Part,
    Target,
    Textbooks,
    assert_nothing_where_nothing_is_seen,
    assert_right,
    dirty_runs,
    gradients,
    parts,
)

pytestmark = pytest.mark.large
LEARNED = ("alibi", "bias", "sinks")
# Of a part of the textbook, which holds up to two dozen matrices of so many float64 or int64 (the
# mask of dropout) at a time, while other workers share the GPU.
MOST_SCORES = 2**24
LONG_TAIL_HEADS = 4  # of 4097 x 4097 scores each; 16, as in test_large.py, make groups of 8
SINGLE = ("softcap", "alibi", "bias", "sinks", "dropout")
# Every variant in every shape, by turns with every mask; all at once; unequal head dims.
CASES = [
    *(
        (names, shape.name, mask, dims)
        for turn, names in enumerate([(n,) for n in SINGLE] + [("softcap", "alibi", "dropout")])
        for number, shape in enumerate(SHAPES)
        for dims in [(128, 128) if (turn + number) % 2 else (64, 64)]
        for mask in [("causal", "window", "full")[(turn + number) % 3]]
    ),
    (("softcap", "alibi", "sinks", "dropout"), "square", "causal", (128, 128)),
    (("alibi", "dropout"), "more-queries", "causal", (57, 40)),
    (("softcap", "sinks"), "fewer-queries", "full", (96, 128)),
    (("alibi",), "long-tail", "causal", (128, 64)),
]


def variant_of(names: tuple[str, ...], case: Case) -> dict[str, Any]:
    """Arguments of attention() in the sizes of the case."""
    device, heads = case.q.device, case.q.shape[-2]
    generator = torch.Generator(device).manual_seed(5)
    batch = case.lengths[0].shape[0] - 1 if case.lengths else case.q.shape[0]
    rows, keys = case.longest if case.lengths else (case.q.shape[1], case.k.shape[1])

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    values = {
        "softcap": lambda: 2.5,
        "alibi": lambda: 0.05 * normal(batch, heads).abs(),
        "bias": lambda: normal(1, heads, rows, keys).to(case.q.dtype),
        "sinks": lambda: normal(heads),
        "dropout": lambda: pantile.Dropout(0.3, seed=7),
    }
    return {name: values[name]() for name in names}


def of_part(variant: dict[str, Any], case: Case, part: Part) -> tuple[dict, dict[str, tuple]]:
    """The variant of some sequences and heads, and which part of each tensor it is."""
    first = part.sequence
    sequences = slice(first, first + 1) if part.packed else part.q[0]
    heads = part.q[1] if part.packed else part.q[2]
    rows, keys = (
        slice(0, x[part.q if x is case.q else part.k].shape[0 if part.packed else 1])
        for x in (case.q, case.k)
    )
    places = {
        "alibi": (sequences, heads),
        "bias": (slice(None), heads, rows, keys),
        "sinks": (heads,),
    }
    chosen = {}
    for name, value in variant.items():
        if name == "dropout":
            chosen[name] = dataclasses.replace(
                value, batch_offset=sequences.start, head_offset=heads.start
            )
        else:
            chosen[name] = value[places[name]] if name in places else value
    return chosen, places


def textbooks(case: Case, variant: dict[str, Any], grads: tuple) -> Textbooks:
    """o, lse, dq, dk, dv and the gradients of what is learned, in float64 and in q's dtype."""
    arguments = {k: v for k, v in case.arguments.items() if not k.startswith("seqused")}
    learned = [name for name in LEARNED if name in variant]
    q, k, v = case.operands
    o_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3])
    found = []
    for dtype in (torch.float64, q.dtype):
        lse_dtype = torch.float32 if dtype.itemsize < 4 else dtype
        found.append(
            [
                q.new_zeros(o_shape, dtype=dtype),
                q.new_full(lse_shape, -torch.inf, dtype=lse_dtype),
                *(torch.zeros_like(x, dtype=dtype) for x in (q, k, v)),
                *(torch.zeros_like(variant[name], dtype=torch.float64) for name in learned),
            ]
        )
    scales = [0.0] * 5
    for part in parts(case, MOST_SCORES):
        own, places = of_part(variant, case, part)
        operands = [part.of(x, at) for x, at in ((q, part.q), (k, part.k), (v, part.k))]
        if operands[0].numel() == 0:
            continue
        at = (part.q, part.lse, part.q, part.k, part.k)
        for results, dtype in zip(found, (torch.float64, q.dtype), strict=True):
            pieces = gradients(
                lambda *x, own=own: reference.attention(
                    *x[:3],
                    **arguments,
                    **{**own, **dict(zip(learned, x[3:], strict=True))},
                    dtype=None,
                ),
                [*(x.to(dtype) for x in operands), *(own[name].to(dtype) for name in learned)],
                part.of(grads[0], part.q),
                part.of(grads[1], part.lse),
            )
            for whole, index, piece in zip(results, at, pieces, strict=False):
                whole[index] = piece[0] if part.packed else piece
            for whole, name, piece in zip(results[5:], learned, pieces[5:], strict=True):
                whole[places[name]] += piece
        if q.dtype is torch.float32:
            sizes = reference.rounding_scales(
                lambda *x, own=own: reference.attention(*x, **arguments, **own),
                *operands,
                part.of(grads[0], part.q),
            )
            scales = [max(pair) for pair in zip(scales, sizes, strict=True)]
    return Textbooks(*found, scales)


def assert_learned(name: str, found, textbook, exact) -> None:
    """Sums of a whole call, of which many terms cancel: by their root mean square error."""
    error, allowed = ((x.double() - exact).square().mean().sqrt() for x in (found, textbook))
    size = exact.square().mean().sqrt()
    floor = torch.finfo(found.dtype).eps * size + 64 * torch.finfo(torch.float32).eps * (1 + size)
    assert error <= 2 * allowed + floor, f"d{name}: {error:.2e} > 2 x {allowed:.2e} + {floor:.2e}"


def regime_case(target: Target, shape: Shape, mask: str, dims, names) -> tuple[Case, dict]:
    """As many sequences as give each multiprocessor three tiles of both passes."""
    dtype = target.default_dtype
    if target.device == "cpu":
        shape, dims = shape.small(), (24, 16)
    elif shape.packed:
        shape = dataclasses.replace(shape, heads=LONG_TAIL_HEADS)
    wanted = TILES_PER_MULTIPROCESSOR * multiprocessors(target)
    repeats = 1
    while True:
        case = build(shape, mask, dims, dtype, target.device, repeats)
        variant = variant_of(names, case)
        wants = {
            n: x.detach().clone().requires_grad_() if n in LEARNED else x
            for n, x in variant.items()
        }
        plan = case.explain(options=target.options, **wants)
        for one in (plan.forward, plan.backward):
            if one.kernel is None:
                pytest.skip(f"{target.backend}: {one.reason}"[:200])
        counts = [
            tile_count(case, "forward", plan.forward.tile_q),
            tile_count(case, "backward", plan.backward.tile_k),
        ]
        if min(counts) >= wanted:
            return case, variant
        repeats = max(repeats + 1, repeats * wanted // max(min(counts), 1))


@pytest.mark.parametrize(
    ("names", "shape", "mask", "dims"),
    CASES,
    ids=["-".join(("+".join(n), s, m, f"{d[0]}x{d[1]}")) for n, s, m, d in CASES],
)
def test_variant(target, names, shape, mask, dims):
    if target.backend == "reference":
        pytest.skip("that is what the results are compared with")
    if target.device == "cpu" and shape in ("square", "fewer-queries"):
        pytest.skip("the other shapes show that the tests can be passed")
    if target.backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case, variant = regime_case(
        target, next(s for s in SHAPES if s.name == shape), mask, dims, names
    )
    learned = [name for name in LEARNED if name in variant]
    grads = random_gradients(case)
    truth = textbooks(case, variant, grads)
    if target.device != "cpu":
        torch.cuda.empty_cache()  # other workers share the GPU

    def run():
        leaves = [x.detach().requires_grad_() for x in case.operands]
        own = {n: variant[n].detach().clone().requires_grad_() for n in learned}
        o, lse = case.ours(*leaves, options=target.options, **{**variant, **own})
        # A row without keys has no LSE but its sink's.
        grad_lse = grads[1].masked_fill(torch.isneginf(lse.detach()), 0.0)
        found = torch.autograd.grad((o, lse), [*leaves, *own.values()], (grads[0], grad_lse))
        return [o.detach(), lse.detach(), *found]

    for number, found in enumerate(dirty_runs(run, target.device)):
        assert_right(
            found[:5],
            Textbooks(truth.exact[:5], truth.textbook[:5], truth.scales),
            case.q.dtype,
            NAMES,
            run=number,
        )
        if "sinks" not in variant:
            assert_nothing_where_nothing_is_seen(found[0], found[1], truth.exact[1], found[2])
        for name, *three in zip(
            learned, found[5:], truth.textbook[5:], truth.exact[5:], strict=True
        ):
            assert_learned(name, *three)
