"""Every entry of the kernel table where it is benchmarked: at least three tiles for each
multiprocessor, so that blocks take a second and a third one, claim them, and go round their rings.

The same tests run on the rows of the CPU, in the small, which shows that they can be passed. Each
call runs on memory that holds NaN, 1e30 and Inf, with guards around what it writes, and every
element is compared with the textbook, worked out for a few heads at a time.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace

import pantile
import pytest
import torch
from fp8_format import ROWS as BLOCK_ROWS
from fp8_format import dequantize
from regime import (
    MASKS,
    SHAPES,
    SHRINK,
    TILES_PER_MULTIPROCESSOR,
    Shape,
    build,
    multiprocessors,
    random_gradients,
    tile_count,
)
from support import (
    DTYPES,
    HERE,
    NAMES,
    Case,
    Target,
    assert_nothing_where_nothing_is_seen,
    assert_right,
    block_rms,
    dirty_runs,
    on_dirty_memory,
    operator_call,
    rounded_output,
    textbooks,
)

pantile.load_torch()
pytestmark = pytest.mark.large


def is_host(entry: dict) -> bool:
    return entry["backend"] == "cpu"


def target_of(entry: dict) -> Target:
    return Target(entry["backend"], "cpu" if is_host(entry) else "cuda")


def dims_of(entry: dict) -> tuple[int, int]:
    if is_host(entry):
        return (24, 16) if entry["dtype"] != "e4m3" else (64, 64)
    return entry["head_dim"], entry["head_dim_v"]


def masks_of(entry: dict) -> tuple[str, ...]:
    return MASKS if entry["mask"] == "any" else (entry["mask"],)


def explained(case: Case, entry: dict, **options) -> pantile.PassExplanation:
    own = pantile.Options(backend=entry["backend"], fp8=entry["dtype"] == "e4m3")
    return getattr(case.explain(options=own, **options), entry["pass"])


def regime_case(entry: dict, shape: Shape, mask: str, dtype: torch.dtype | None = None) -> Case:
    """The case of as many sequences as give each multiprocessor three tiles of this entry."""
    target = target_of(entry)
    shape = shape.small() if target.device == "cpu" else shape
    dtype = DTYPES.get(entry["dtype"], torch.bfloat16) if dtype is None else dtype
    wanted = TILES_PER_MULTIPROCESSOR * multiprocessors(target)
    one, two = (build(shape, mask, dims_of(entry), dtype, target.device, n) for n in (1, 2))
    plan = explained(one, entry)
    assert plan.kernel == entry["name"], "\n".join(plan.lines(entry["name"]))
    tile = plan.tile_k if entry["pass"] == "backward" else plan.tile_q
    first, second = (tile_count(x, entry["pass"], tile) for x in (one, two))
    repeats = 1 + max(0, -(-(wanted - first) // (second - first)))
    case = (
        two if repeats == 2 else build(shape, mask, dims_of(entry), dtype, target.device, repeats)
    )
    assert tile_count(case, entry["pass"], tile) >= wanted
    return case


# ---- forward and backward rows of 16 and 32 bits


def regimes(pass_: str, dtypes: tuple[str, ...]) -> list:
    """A parameter for each entry, shape and mask."""
    found = []
    for entry in pantile.kernels():
        if entry["pass"] != pass_ or entry["dtype"] not in dtypes:
            continue
        if entry["backend"] == "reference" or (is_host(entry) and entry["dtype"] == "f16"):
            continue  # the oracle; the host's other types show that these tests can be passed
        marks = [] if is_host(entry) else [pytest.mark.gpu]
        for shape in SHAPES:
            for mask in masks_of(entry):
                name = f"{entry['name']}-{shape.name}" + (
                    f"-{mask}" if entry["mask"] == "any" else ""
                )
                found.append(pytest.param(entry, shape, mask, id=name, marks=marks))
    return found


def require_compiled(entry: dict, record_property) -> None:
    record_property("kernel", entry["name"])
    if not entry["compiled"]:
        pytest.skip("not compiled into this build")


@pytest.mark.parametrize(("entry", "shape", "mask"), regimes("forward", tuple(DTYPES)))
def test_forward(entry, shape, mask, record_property):
    require_compiled(entry, record_property)
    target = target_of(entry)
    case = regime_case(entry, shape, mask)
    o, lse = on_dirty_memory(
        lambda: case.ours(*case.operands, options=target.options), target.device
    )
    truth = textbooks(case)
    assert_right([o, lse], truth, case.q.dtype)
    assert_nothing_where_nothing_is_seen(o, lse, truth.exact[1])


@pytest.mark.parametrize(("entry", "shape", "mask"), regimes("forward", ("f16", "bf16")))
def test_forward_keeps_low_bits(entry, shape, mask, record_property):
    """What training asks for: the same O, and o_low as the unrounded O of the same kernel says."""
    require_compiled(entry, record_property)
    target = target_of(entry)
    case = regime_case(entry, shape, mask)
    call = operator_call(case, target.backend)
    run = torch.ops.pantile.forward_extra
    whole, lse, _, _ = run(*case.operands, *call, False, False, False, False, True)
    expected, expected_low = rounded_output(whole, case.q.dtype)
    specified = ~torch.isneginf(lse).transpose(-1, -2).unsqueeze(-1) & (expected != 0.0)

    def training_forward():
        o, lse, o_low = torch.ops.pantile.forward(*case.operands, *call, False, False, True)
        return o, lse, o_low[specified]

    o, low_lse, o_low = on_dirty_memory(training_forward, target.device)
    assert torch.equal(o, expected)
    assert torch.equal(low_lse, lse)
    assert torch.equal(o_low, expected_low[specified])


def with_means(case: Case) -> Case:
    """Keys of every second head with a mean: the backward takes other steps for them."""
    k = case.k.clone()
    k[..., ::2, :] += 1.5
    return replace(case, k=k)


def backward_alone(case: Case, target: Target, truth, grads, deterministic: bool):
    """(dq, dk, dv) from O and LSE as a forward would have rounded them."""
    o, o_low = rounded_output(truth.exact[0], case.q.dtype)
    lse = truth.exact[1].float().contiguous()
    call = operator_call(case, target.backend)
    return lambda: torch.ops.pantile.backward(
        grads[0], grads[1], *case.operands, o, o_low, lse, *call, deterministic
    )


@pytest.mark.parametrize(("entry", "shape", "mask"), regimes("backward", tuple(DTYPES)))
def test_backward(entry, shape, mask, record_property):
    """Once with sums in any order, and once deterministic, whose bits depend on nothing."""
    require_compiled(entry, record_property)
    target = target_of(entry)
    case = with_means(regime_case(entry, shape, mask))
    grads = random_gradients(case)
    truth = textbooks(case, *grads)
    gradients_of = replace(
        truth, exact=truth.exact[2:], textbook=truth.textbook[2:], scales=truth.scales[2:]
    )
    dead_rows = torch.isneginf(truth.exact[1]).transpose(-1, -2)
    runs = dirty_runs(backward_alone(case, target, truth, grads, False), target.device)
    if explained(case, entry, deterministic=True).kernel == entry["name"]:
        again = backward_alone(case, target, truth, grads, True)
        runs.append(on_dirty_memory(again, target.device))
    for number, found in enumerate(runs):
        assert_right(found, gradients_of, case.q.dtype, NAMES[2:], run=number)
        assert not found[0][dead_rows].any()


# Of the Hopper forward: (head_dim, head_dim_v) and mask -> (tile_q, tile_k) that must be met.
WIDE, NARROW = (192, 128), (128, 128)
FORWARD_TILES = {
    (64, 64): {"full": {WIDE}, "causal": {WIDE, NARROW}, "window": {WIDE, NARROW}},
    (80, 80): {"full": {NARROW, (128, 160)}},
    (96, 96): {"full": {NARROW, (128, 160)}},
    (192, 192): {mask: {(128, 96)} for mask in MASKS},
    (256, 256): {mask: {(128, 64)} for mask in MASKS},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("mask", MASKS)
def test_every_tile_of_the_hopper_forward_is_met(dims, mask):
    """By the shapes above: a tile that serves some lengths only must not go untested."""
    entries = [
        entry
        for entry in pantile.kernels()
        if entry["name"].startswith("hopper_forward_bf16")
        and (entry["head_dim"], entry["head_dim_v"], entry["mask"]) == (*dims, mask)
    ]
    assert len(entries) == 1
    if torch.cuda.get_device_capability() != (9, 0) or not entries[0]["compiled"]:
        pytest.skip("needs compute capability 9.0 and a build for it")
    plans = [
        explained(build(shape, mask, dims, torch.bfloat16, "cuda", 1), entries[0])
        for shape in SHAPES
    ]
    met = {(plan.tile_q, plan.tile_k) for plan in plans}
    assert met == FORWARD_TILES.get(dims, {}).get(mask, {NARROW})


# ---- FP8

LSE_ERROR = 0.4  # nats, of rows that see one key: 3 standard deviations of 0.04 and a code
OWN_ERROR = 0.065  # of the kernel beside exact arithmetic on its operands
BLOCK_ERROR = 0.3  # of 64 rows of a head beside attention that quantises nothing


def sampled_sequences(case: Case) -> list[int]:
    count = case.lengths[0].shape[0] - 1 if case.lengths else case.q.shape[0]
    return sorted({0, count // 2, count - 1})


def exact_on_operands(operands: pantile.Quantized, batch: int, arguments: dict) -> torch.Tensor:
    """O of one dense sequence by float64 arithmetic on its codes and scales."""
    q, k, v = (x[None].to(operands.codes_q.device) for x in dequantize(operands, batch))
    scale = operands.shape_q[3] ** -0.5
    return pantile.reference.attention(q, k, v, **arguments, scale=scale)[0][0]


def check_fp8(case: Case, backend: str, exp: str = "code") -> None:
    """Every element beside float64 attention on q, k and v; of some sequences also beside exact
    arithmetic on the operands, which tells the kernel's errors from those of the format."""
    device = case.q.device.type
    arguments = {k: v for k, v in case.arguments.items() if not k.startswith("seqused")}
    used = {k: v for k, v in case.arguments.items() if k.startswith("seqused")}
    options = pantile.Options(backend=backend, fp8_exp=exp)

    def quantize():
        return pantile.quantize(
            *case.operands, *case.lengths, *case.longest, **used, options=options
        )

    def run():
        return pantile.attention(quantize(), **arguments, return_lse=True, options=options)

    o, lse = on_dirty_memory(run, device)
    truth = textbooks(case)
    assert_nothing_where_nothing_is_seen(o, lse, truth.exact[1])
    assert o.isfinite().all()
    seen = truth.exact[1].isfinite()
    assert (lse.double() - truth.exact[1])[seen].abs().max() < LSE_ERROR
    error, size = block_rms(o.double() - truth.exact[0]), block_rms(truth.exact[0])
    wrong = error > BLOCK_ERROR * size
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} blocks of 64 rows are off by more than "
        f"{BLOCK_ERROR:.0%}, first {wrong.nonzero()[0].tolist()}"
    )
    if case.lengths:
        return
    operands = quantize()
    for batch in sampled_sequences(case):
        expected = exact_on_operands(operands, batch, arguments)
        own = (o[batch].double() - expected).square().mean().sqrt()
        assert own <= OWN_ERROR * expected.square().mean().sqrt() + 1e-30


def require_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the FP8 kernels need compute capability 9.0")


@pytest.mark.parametrize(("entry", "shape", "mask"), regimes("forward", ("e4m3",)))
def test_fp8_forward(entry, shape, mask, record_property):
    require_compiled(entry, record_property)
    case = regime_case(entry, shape, mask)
    check_fp8(case, entry["backend"])


@pytest.mark.gpu
@pytest.mark.parametrize("exp", ["mixed", "exp2"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_fp8_exponentials(head_dim, exp):
    require_hopper()
    shape = Shape("grouped", 1665, 700, heads=8, heads_k=1)
    case = build(shape, "causal", (head_dim, head_dim), torch.bfloat16, "cuda", 6)
    check_fp8(case, "hopper", exp)


# Where the FP8 forward gave NaN, Inf or garbage: tiles of rows that see no key before and after
# others. (batch, heads, heads_k, rows, keys, mask)
FEW_KEYS = {
    "causal 640x128": (9, 6, 1, 640, 128, "causal"),
    "window 640x128": (9, 6, 1, 640, 128, "window"),
    "causal 129x1": (16, 16, 16, 129, 1, "causal"),
    "one batch": (1, 6, 1, 640, 128, "causal"),
    "many tiles": (32, 8, 8, 2305, 128, "causal"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", FEW_KEYS)
def test_fp8_tiles_that_see_no_key(head_dim, name):
    require_hopper()
    batch, heads, heads_k, rows, keys, mask = FEW_KEYS[name]
    shape = Shape(name, rows, keys, heads, heads_k, window=(40, 10))
    case = build(shape, mask, (head_dim, head_dim), torch.bfloat16, "cuda", batch)
    check_fp8(case, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_calls_after_an_fp8_call_without_keys_are_right(head_dim):
    """State that such a call left behind made later ones wrong."""
    require_hopper()
    square = Shape("square", 512, 512, heads=8, heads_k=8)
    few = Shape("few", 640, 128, heads=6, heads_k=1)
    dims = (head_dim, head_dim)
    usual, odd = (
        build(shape, "causal", dims, torch.bfloat16, "cuda", batch)
        for shape, batch in ((square, 9), (few, 9))
    )
    options = pantile.Options(backend="hopper")

    def run(case: Case):
        operands = pantile.quantize(*case.operands)
        return pantile.attention(operands, causal=True, return_lse=True, options=options)

    before = [*run(usual), *run(odd)]
    for _ in range(5):
        after = [*run(odd), *run(usual)]
        for first, second in zip(before, [*after[2:], *after[:2]], strict=True):
            assert torch.equal(first, second)


# ---- the quantiser


def specified(lengths, rows_of_a_scale: int, device) -> torch.Tensor:
    """Of the scales of one head of a dense tensor: those whose rows are not all beyond the end."""
    found = []
    for length in lengths:
        blocks = -(-length // BLOCK_ROWS)
        begins = torch.arange(0, blocks * BLOCK_ROWS, rows_of_a_scale, device=device)
        found.append(begins < length)
    return torch.cat(found)


def quantize_rows() -> list:
    return [
        pytest.param(entry, id=entry["name"], marks=[] if is_host(entry) else [pytest.mark.gpu])
        for entry in pantile.kernels()
        if entry["pass"] == "quantize" and entry["backend"] != "reference"
    ]


@pytest.mark.parametrize("entry", quantize_rows())
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smooth"])
def test_quantize(entry, head_dim, smooth_k, record_property):
    """Bit for bit what the CPU makes of it, whatever memory held before. Codes beyond the end of a
    sequence are specified (zero), scales and dot products are not."""
    require_compiled(entry, record_property)
    target = target_of(entry)
    if target.device == "cuda":
        require_hopper()
    dtype = DTYPES.get(entry["dtype"], torch.float8_e4m3fn)
    if smooth_k and dtype is torch.float8_e4m3fn:
        pytest.skip("codes are not smoothed")
    if head_dim > entry["head_dim"] > 0:
        pytest.skip("the entry serves smaller head dims")
    shape = Shape("quantize", 2305, 1793, heads=8, heads_k=4)
    shape = shape.small() if target.device == "cpu" else shape
    case = build(shape, "full", (head_dim, head_dim), torch.float32, target.device, 3)
    operands = [x.to(dtype) for x in case.operands]
    chosen = {"smooth_k": smooth_k, "options": target.options}
    seen = [specified([n] * 3, BLOCK_ROWS, target.device) for n in (shape.rows, shape.keys)]
    rows = specified([shape.rows] * 3, 1, target.device)

    def run():
        made = pantile.quantize(*operands, **chosen)
        assert made.scale_q.shape[1] == seen[0].shape[0]
        means = (made.q_dot_mean[:, rows], made.mean_k) if smooth_k else ()
        scales = made.scale_q[:, seen[0]], made.scale_kv[:, seen[1]]
        return made.codes_q, made.codes_k, made.codes_v, *scales, *means

    found = on_dirty_memory(run, target.device)
    host = pantile.quantize(
        *(x.cpu() for x in operands), smooth_k=smooth_k, options=pantile.Options(backend="cpu")
    )
    expected = [host.codes_q, host.codes_k, host.codes_v, host.scale_q, host.scale_kv]
    expected[3] = expected[3][:, seen[0].cpu()]
    expected[4] = expected[4][:, seen[1].cpu()]
    for name, ours, theirs in zip(("q", "k", "v"), found[:3], expected[:3], strict=True):
        differ = (ours.cpu().view(torch.uint8) != theirs.view(torch.uint8)).sum().item()
        assert differ == 0, f"codes of {name}: {differ} of {theirs.numel()} differ"
    for name, ours, theirs in zip(("scale_q", "scale_kv"), found[3:5], expected[3:], strict=True):
        assert torch.equal(ours.cpu(), theirs), name
    if smooth_k:
        dots = host.q_dot_mean[:, rows.cpu()]
        torch.testing.assert_close(found[5].cpu(), dots, rtol=1e-4, atol=1e-4)
        assert torch.equal(found[6].cpu(), host.mean_k)


# ---- unequal and odd head dims: in a process of their own, because a kernel that leaves its memory
# takes the process's CUDA context with it

# (head_dim, head_dim_v, rows, keys, heads, heads_k, batch, mask)
UNEQUAL = {
    "192x256 few keys": (192, 256, 233, 3, 21, 3, 2, "full"),
    "192x256 few keys causal": (192, 256, 233, 3, 21, 3, 2, "causal"),
    "192x256 window": (192, 256, 700, 100, 8, 8, 4, "window"),
    "192x256": (192, 256, 2305, 2305, 4, 4, 5, "causal"),
    "64x256": (64, 256, 1024, 1024, 8, 8, 4, "full"),
    "64x256 grouped": (64, 256, 1665, 700, 16, 2, 4, "causal"),
    "64x256 long": (64, 256, 4224, 4224, 2, 2, 1, "full"),
    "64x128": (64, 128, 2305, 2305, 8, 8, 3, "causal"),
    "128x192": (128, 192, 1000, 1665, 8, 1, 5, "window"),
    "8x256": (8, 256, 640, 640, 8, 2, 8, "full"),
    "128x64": (128, 64, 2305, 2305, 8, 2, 3, "causal"),
    "192x128": (192, 128, 2305, 1000, 8, 1, 4, "full"),
    "256x128": (256, 128, 1665, 2305, 4, 4, 5, "causal"),
    "256x64": (256, 64, 300, 2305, 16, 2, 5, "window"),
    "72x72": (72, 72, 1100, 1100, 6, 3, 8, "causal"),
    "57x40": (57, 40, 1100, 700, 6, 3, 8, "window"),
    "1x3": (1, 3, 1100, 700, 6, 3, 8, "full"),
    "255x129": (255, 129, 700, 700, 6, 6, 5, "causal"),
}
BACKENDS = ("hopper", "ampere")


def check_unequal(name: str, backend: str, device: str, dtype: str = "bf16") -> None:
    """Forward and backward through autograd, deterministic and not, within the contract."""
    head_dim, head_dim_v, rows, keys, heads, heads_k, batch, mask = UNEQUAL[name]
    shape = Shape(name, rows, keys, heads, heads_k, window=(100, 40))
    if device == "cpu":
        shape, batch = replace(shape, rows=-(-rows // SHRINK), keys=-(-keys // SHRINK)), 2
    case = build(shape, mask, (head_dim, head_dim_v), DTYPES[dtype], device, batch)
    grads = random_gradients(case)
    truth = textbooks(case, *grads)
    options = pantile.Options(backend=backend)
    deterministic = False

    def run():
        leaves = [x.detach().requires_grad_() for x in case.operands]
        o, lse = case.ours(*leaves, options=options, deterministic=deterministic)
        found = torch.autograd.grad((o, lse), leaves, grads)
        return [o.detach(), lse.detach(), *found]

    runs = dirty_runs(run, device)
    plan = case.explain(options=options, deterministic=True)
    if plan.backward.kernel is not None:
        deterministic = True
        runs.append(on_dirty_memory(run, device))
    for number, found in enumerate(runs):
        assert_right(found, truth, case.q.dtype, run=number)


def _check_all_unequal(backend: str, device: str, names: list[str]) -> None:
    """One line of JSON for each case: its name, and what was wrong with it."""
    for name in names:
        print(json.dumps([name, None]), flush=True)
        try:
            check_unequal(name, backend, device)
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps([name, problem]), flush=True)
        if device == "cuda" and problem:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return  # nothing works in this process any more


@functools.cache
def unequal_results(backend: str, device: str) -> dict[str, str]:
    """What was wrong with each case; "" is right. A case may end its process."""
    results: dict[str, str] = {}
    while missing := [name for name in UNEQUAL if name not in results]:
        source = (
            f"import sys; sys.path.insert(0, {HERE!r}); import test_large; "
            f"test_large._check_all_unequal({backend!r}, {device!r}, {missing!r})"
        )
        child = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=600, check=False
        )
        answers = [json.loads(x) for x in child.stdout.splitlines() if x.startswith('["')]
        ended = f"its process ended with {child.returncode}: {child.stderr[-800:]}"
        found = {name: ended if problem is None else problem for name, problem in answers}
        results |= found or {missing[0]: ended}
    return results


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize(
    "backend", ["cpu", *(pytest.param(b, marks=pytest.mark.gpu) for b in BACKENDS)]
)
def test_unequal_and_odd_head_dims(backend, name):
    device = "cpu" if backend == "cpu" else "cuda"
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if device == "cuda" and not any(
        r["compiled"] for r in pantile.kernels() if r["backend"] == backend
    ):
        pytest.skip("not compiled into this build")
    assert unequal_results(backend, device)[name] == ""
