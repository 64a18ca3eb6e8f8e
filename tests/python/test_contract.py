"""The numerical contract (docs/numerics.md): one test a promise, the same on every backend."""

from __future__ import annotations

import itertools
import os
import threading

import pantile
import pytest
import torch
from pantile._schema import bind
from support import (
    NAMES,
    Target,
    assert_same_bits,
    bits,
    check_both,
    check_forward,
    dense,
    gradients,
    operator_call,
    packed,
    require_kernel,
)

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def default_dtype(target: Target) -> torch.dtype:
    return target.default_dtype


def everything(case, target: Target, operands=None, grad_seed: int = 1):
    """o, lse and, where a backward kernel exists, the gradients for a fixed dO."""
    operands = case.operands if operands is None else operands
    require_kernel(case, target)
    if case.explain(options=target.options).backward.kernel is None:
        return list(case.ours(*operands, options=target.options))
    generator = torch.Generator().manual_seed(grad_seed)
    o, lse = case.ours(*(x.detach() for x in operands), options=target.options)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, o.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(o.device)
    return gradients(lambda *x: case.ours(*x, options=target.options), operands, grad_o, grad_lse)


def assert_unchanged(first, second) -> None:
    assert_same_bits(first, second, NAMES[: len(first)])


# ---- rows that see nothing, keys that nobody sees


@pytest.mark.parametrize("rows", [80, 400])
def test_dead_rows(target, rows):
    """More rows than keys and causal: the first rows, and whole tiles of them, see nothing."""
    case = dense(target, default_dtype(target), batch=1, rows=rows, keys=45, causal=True)
    o, lse, *grads = check_both(case, target)
    dead = rows - 45
    assert not o[:, :dead].any()
    assert torch.isneginf(lse[:, :, :dead]).all()
    assert torch.isfinite(lse[:, :, dead:]).all()
    if grads:
        assert not grads[0][:, :dead].any()


def test_unseen_keys_have_zero_gradients(target):
    """Fewer rows than keys and a short window: the first keys are never seen."""
    case = dense(target, default_dtype(target), rows=20, keys=160, window=(7, 0))
    results = everything(case, target)
    if len(results) == 2:
        pytest.skip(f"{target.backend} has no backward kernel for this")
    unseen = 160 - 20 - 7
    for gradient in results[3:]:
        assert not gradient[:, :unseen].any()
        assert gradient[:, unseen:].any()


# ---- NaN and infinity


@pytest.mark.parametrize("bad", BAD)
def test_poison_in_masked_keys(target, bad):
    case = dense(target, default_dtype(target), rows=20, keys=160, window=(7, 0))
    require_kernel(case, target)
    unseen = 160 - 20 - 7
    clean = everything(case, target)
    poisoned = [x.clone() for x in case.operands]
    for x in poisoned[1:]:
        x[:, :unseen] = BAD[bad]
    assert_unchanged(clean, everything(case, target, poisoned))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("length", [1, 31, 63, 64, 65, 127, 130])
def test_poison_around_a_view(target, bad, length):
    """The tensors are cut out of a larger, poisoned buffer: padding on every side."""
    case = dense(target, default_dtype(target), rows=length, keys=length + 2, causal=True)
    require_kernel(case, target)

    def embed(x: torch.Tensor, fill: float) -> torch.Tensor:
        shape = [size + 16 for size in x.shape]
        buffer = torch.full(shape, fill, dtype=x.dtype, device=x.device)
        view = buffer[tuple(slice(8, 8 + size) for size in x.shape)]
        return view.copy_(x)

    clean = everything(case, target, [embed(x, 0.0) for x in case.operands])
    poisoned = everything(case, target, [embed(x, BAD[bad]) for x in case.operands])
    assert_unchanged(clean, poisoned)


@pytest.mark.parametrize("bad", BAD)
def test_poison_in_neighbouring_sequences(target, bad):
    """What one packed sequence holds does not reach another."""
    case = packed(target, [33, 40, 70], [50, 31, 66], default_dtype(target), causal=True)
    require_kernel(case, target)
    clean = everything(case, target)
    poisoned = [x.clone() for x in case.operands]
    poisoned[0][33:73] = BAD[bad]
    poisoned[1][50:81] = BAD[bad]
    poisoned[2][50:81] = BAD[bad]
    changed = everything(case, target, poisoned)
    keep_q = [i for i in range(143) if not 33 <= i < 73]
    keep_k = [i for i in range(147) if not 50 <= i < 81]
    for name, a, b in zip(NAMES, clean, changed, strict=False):
        if name == "lse":
            a, b = a[:, keep_q], b[:, keep_q]
        else:
            keep = keep_q if name in ("o", "dq") else keep_k
            a, b = a[keep], b[keep]
        assert torch.equal(bits(a), bits(b)), f"{name} differs"


@pytest.mark.parametrize("bad", BAD)
def test_poison_past_seqused(target, bad):
    case = packed(target, [40, 70], [50, 66], default_dtype(target), causal=True)
    used_q, used_k = [17, 65], [33, 64]
    case.arguments["seqused_q"] = torch.tensor(used_q, dtype=torch.int32, device=target.device)
    case.arguments["seqused_k"] = torch.tensor(used_k, dtype=torch.int32, device=target.device)
    require_kernel(case, target)
    clean = everything(case, target)
    poisoned = [x.clone() for x in case.operands]
    poisoned[0][17:40] = poisoned[0][40 + 65 :] = BAD[bad]
    for x in poisoned[1:]:
        x[33:50] = x[50 + 64 :] = BAD[bad]
    assert_unchanged(clean, everything(case, target, poisoned))


@pytest.mark.parametrize("output_dtype", [None, torch.float32], ids=str)
def test_unused_rows_are_written(target, output_dtype):
    """By the kernels themselves, into outputs that hold something else: C++ callers rely on it."""
    dtype = default_dtype(target)
    case = packed(target, [40, 0, 170], [50, 3, 66], dtype, causal=True)
    used = [
        torch.tensor(x, dtype=torch.int32, device=target.device) for x in ([17, 0, 130], [33, 2, 0])
    ]
    case.arguments |= {"seqused_q": used[0], "seqused_k": used[1]}
    require_kernel(case, target)
    call = bind(operator_call(case, target.backend))
    o = torch.full(case.q.shape, 7.0, dtype=output_dtype or dtype, device=target.device)
    lse = torch.full((4, 210), 7.0, device=target.device)
    assert pantile._C.forward(*case.operands, o, lse, None, None, call) == 0
    unused_q, unused_k = torch.ones(210, dtype=torch.bool), torch.ones(119, dtype=torch.bool)
    unused_q[:17] = unused_q[40 : 40 + 130] = False
    unused_k[:33] = unused_k[50:52] = False
    assert not o[unused_q].any()
    assert torch.isneginf(lse[:, unused_q]).all()
    assert o[:17].any()
    if output_dtype is not None or case.explain(options=target.options).backward.kernel is None:
        return
    grads = [torch.full_like(x, 7.0) for x in case.operands]
    inputs = torch.ones_like(o), None, *case.operands, o, None, lse
    assert pantile._C.backward(*inputs, *grads, call, False) == 0
    for gradient, unused in zip(grads, (unused_q, unused_k, unused_k), strict=True):
        assert not gradient[unused].any()
        assert gradient[:17].any()


def test_attended_nan_reaches_its_rows_and_no_other(target):
    case = dense(target, default_dtype(target), batch=1, rows=90, keys=90, causal=True)
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    key = 41
    for index in (1, 2):  # k, v
        poisoned = [x.clone() for x in case.operands]
        poisoned[index][0, key, 1] = float("nan")  # key head 1 serves query heads 2 and 3
        bad_o, bad_lse = case.ours(*poisoned, options=target.options)
        assert bad_o[0, key:, 2:].isnan().all()
        assert torch.equal(bits(bad_o[0, :key]), bits(o[0, :key]))
        assert torch.equal(bits(bad_o[0, :, :2]), bits(o[0, :, :2]))
        if index == 1:
            assert bad_lse[0, 2:, key:].isnan().all()
        assert torch.equal(bits(bad_lse[0, :, :key]), bits(lse[0, :, :key]))
    poisoned = [x.clone() for x in case.operands]
    poisoned[0][0, 5, 0] = float("nan")
    bad_o, _ = case.ours(*poisoned, options=target.options)
    assert bad_o[0, 5, 0].isnan().all()
    bad_o[0, 5, 0] = o[0, 5, 0]
    assert torch.equal(bits(bad_o), bits(o))


def test_attended_infinity_in_v(target):
    case = dense(target, default_dtype(target), batch=1, rows=12, keys=12, causal=True)
    require_kernel(case, target)
    case.v[0, 4, 0, 3] = float("inf")
    o, _ = case.ours(*case.operands, options=target.options)
    reached = o[0, 4:, :2, 3]
    if target.backend == "ampere" and case.v.dtype is torch.float32:
        assert not torch.isfinite(reached).any()  # inf splits into inf and NaN
    else:
        assert torch.isposinf(reached).all()
    assert torch.isfinite(o[0, :4]).all()
    assert torch.isfinite(o[0, :, 2:]).all()


# ---- zero sizes


@pytest.mark.parametrize("shape", list(itertools.product((0, 2), (0, 3), (0, 5), (0, 4))), ids=str)
def test_zero_sizes(target, shape):
    batch, rows, keys, heads = shape
    if all(shape):
        pytest.skip("nothing is zero")
    case = dense(
        target, default_dtype(target), batch, rows, keys, heads, heads_k=heads // 2, head_dim=64
    )
    leaves = [x.requires_grad_() for x in case.operands]
    require_kernel(case, target)
    o, lse = case.ours(*leaves, options=target.options)
    assert o.shape == (batch, rows, heads, 64)
    assert lse.shape == (batch, heads, rows)
    assert not o.any()
    assert torch.isneginf(lse).all()
    if case.explain(options=target.options).backward.kernel is None:
        return
    grads = torch.autograd.grad(o.sum(), leaves)
    for gradient, leaf in zip(grads, leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("empty_q", list(itertools.product((False, True), repeat=4)), ids=str)
def test_every_subset_of_empty_sequences(target, empty_q):
    lengths = [17, 64, 1, 33]
    lengths_q = [0 if e else n for e, n in zip(empty_q, lengths, strict=True)]
    for empty_k in ((False,) * 4, (True, False, False, True), (True,) * 4, empty_q):
        lengths_k = [0 if e else n + 3 for e, n in zip(empty_k, lengths, strict=True)]
        case = packed(target, lengths_q, lengths_k, default_dtype(target), head_dim=64, causal=True)
        check_both(case, target)


def test_no_sequences(target):
    case = packed(target, [], [], default_dtype(target))
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    assert o.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


# ---- scores far from 0


LENGTHS = [*range(1, 34), 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 257]


@pytest.mark.parametrize("score", [-200.0, 200.0])
def test_extreme_lse_gives_finite_gradients(target, score):
    """A tail key must not count as a score of 0: exp(0 - LSE) would overflow."""
    for length in LENGTHS:
        case = dense(
            target, default_dtype(target), batch=1, rows=length, keys=length, heads=1, heads_k=1
        )
        case.arguments["scale"] = 1.0
        case.q = torch.full_like(case.q, score / 64) + 0.01 * case.q
        case.k = torch.ones_like(case.k)
        require_kernel(case, target)
        for x in everything(case, target):
            assert torch.isfinite(x).all(), f"length {length}"


def test_shifted_scores_change_nothing_much(target):
    """Softmax does not feel a constant added to all scores of a row; LSE moves by it."""
    case = dense(target, default_dtype(target), batch=1, rows=40, keys=70, heads_k=4)
    case.arguments["scale"] = 1.0
    case.q[..., 0] = 1.0
    case.k[..., 0] = 0.0
    require_kernel(case, target)
    o, lse = case.ours(*case.operands, options=target.options)
    case.k[..., 0] = 64.0
    shifted, shifted_lse = case.ours(*case.operands, options=target.options)
    tolerance = 1e-4 if case.q.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(shifted, o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(shifted_lse - 64.0, lse, rtol=1e-4, atol=1e-3)


# ---- layouts


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in different memory."""
    batch, rows, heads, dim = x.shape
    wide = torch.randn(batch, rows, heads * 2, dim, device=x.device).to(x.dtype)
    offset = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    sparse = torch.empty(batch, rows, heads, 2 * dim, dtype=x.dtype, device=x.device)[..., ::2]
    return {
        "bhsd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "sbhd": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice_of_heads": wide[:, :, heads:].copy_(x),
        "unaligned": offset.copy_(x),
        "dim_stride_2": sparse.copy_(x),
        "dim_first": x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    }


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_layouts(target, layout):
    case = dense(target, default_dtype(target), rows=50, keys=61, causal=True)
    require_kernel(case, target)
    plain = everything(case, target)
    views = [layouts(x)[layout] for x in case.operands]
    assert_unchanged(plain, everything(case, target, views))
    for index in range(3):  # and one at a time, so that mixed layouts meet
        mixed = list(case.operands)
        mixed[index] = views[index]
        assert_unchanged(plain, everything(case, target, mixed))


def test_packed_projection_slices(target):
    """q, k and v are slices of one tensor, as a fused projection makes them."""
    dtype = default_dtype(target)
    case = dense(target, dtype, rows=40, keys=40, heads_k=4, causal=True)
    require_kernel(case, target)
    fused = torch.stack(case.operands, 2).contiguous().requires_grad_()
    plain = everything(case, target)
    assert_unchanged(plain, everything(case, target, fused.detach().unbind(2)))
    o = pantile.attention(*fused.unbind(2), causal=True, options=target.options)
    if case.explain(options=target.options).backward.kernel:
        o.sum().backward()
        assert fused.grad.shape == fused.shape


def test_expanded_inputs_and_gradients(target):
    """Stride 0: one key head seen by many, and dO of a plain sum()."""
    dtype = default_dtype(target)
    case = dense(target, dtype, rows=30, keys=41, heads_k=1)
    require_kernel(case, target)
    one = [case.q, case.k.expand(-1, -1, 4, -1), case.v.expand(-1, -1, 4, -1)]
    copied = [x.contiguous() for x in one]
    for x, y in zip(
        case.ours(*one, options=target.options),
        case.ours(*copied, options=target.options),
        strict=True,
    ):
        assert torch.equal(x, y)
    if case.explain(options=target.options).backward.kernel is None:
        return
    grads = []
    for gradient in (torch.ones(()).expand(case.q.shape), torch.ones(case.q.shape)):
        leaves = [x.detach().requires_grad_() for x in case.operands]
        o, _ = case.ours(*leaves, options=target.options)
        o.backward(gradient.to(target.device, dtype))
        grads.append([x.grad for x in leaves])
    assert_same_bits(*grads, NAMES[2:])


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
def test_layouts_of_the_output_gradient(target, layout):
    case = dense(target, default_dtype(target), rows=50, keys=61, causal=True)
    require_kernel(case, target, backward=True)
    generator = torch.Generator().manual_seed(2)
    grad_o = torch.randn(case.q.shape, generator=generator).to(target.device, case.q.dtype)
    grads = []
    for gradient in (grad_o, layouts(grad_o)[layout]):
        leaves = [x.detach().requires_grad_() for x in case.operands]
        o, _ = case.ours(*leaves, options=target.options, deterministic=True)
        o.backward(gradient)
        grads.append([x.grad for x in leaves])
    assert_same_bits(*grads, NAMES[2:])


def test_packed_sequences_of_a_fused_projection(target):
    """[total, 3, heads, dim]: what a varlen training step hands over."""
    dtype = default_dtype(target)
    case = packed(target, [40, 0, 70], [40, 0, 70], dtype, heads=4, heads_k=4, causal=True)
    require_kernel(case, target)
    fused = torch.stack(case.operands, 1).contiguous()
    assert_unchanged(everything(case, target), everything(case, target, fused.unbind(1)))


def test_odd_strides_of_the_lse_gradient(target):
    case = dense(target, default_dtype(target), rows=30, keys=41)
    require_kernel(case, target, backward=True)
    grads = []
    for contiguous in (True, False):
        leaves = [x.detach().requires_grad_() for x in case.operands]
        _, lse = case.ours(*leaves, options=target.options)
        gradient = torch.arange(lse.shape[2], dtype=torch.float32, device=lse.device)
        gradient = gradient.expand(lse.shape)
        lse.backward(gradient.contiguous() if contiguous else gradient)
        grads.append([x.grad for x in leaves])
    assert_same_bits(*grads, NAMES[2:])


# ---- large numbers


@pytest.mark.parametrize("axis", range(3), ids=["batch", "seq", "head"])
def test_strides_above_2_31(target, axis):
    """Neighbours along one axis lie 2^31 elements apart. Untouched memory costs nothing."""
    dtype = torch.float16 if target.device == "cpu" else torch.bfloat16
    case = dense(target, dtype, batch=2, rows=2, keys=2, heads=2, heads_k=2)
    require_kernel(case, target)
    far = 2**31 + 64
    try:
        storage = torch.empty(far + 1024, dtype=dtype, device=target.device)
    except RuntimeError:
        pytest.skip("no address space for 4 GiB")
    plain = everything(case, target)
    strides = [256, 128, 64, 1]
    strides[axis] = far
    for index, x in enumerate(case.operands):
        mixed = list(case.operands)
        mixed[index] = storage.as_strided(x.shape, strides).copy_(x)
        assert_unchanged(plain, everything(case, target, mixed))


def test_batch_times_heads_above_65535(target):
    case = dense(
        target, default_dtype(target), batch=70_001, rows=1, keys=2, heads=1, heads_k=1, head_dim=64
    )
    if target.device == "cpu":
        check_forward(case, target)  # the backward of the textbook takes minutes
    else:
        check_both(case, target)


@pytest.mark.gpu
def test_more_than_2_31_elements(target):
    if target.device == "cpu":
        pytest.skip("needs 17 GiB and a GPU's speed")
    batch, rows = 270_000, 64
    shape = (batch, rows, 2, 64)  # 2.2e9 elements each
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    assert q.numel() > 2**31
    arguments = {"causal": True, "return_lse": True, "options": target.options}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = pantile.attention(*leaves, **arguments, deterministic=True)
    grads = torch.autograd.grad(o, leaves, torch.ones((), device="cuda").bfloat16().expand(shape))
    for part in (slice(0, 2), slice(batch // 2, batch // 2 + 2), slice(batch - 2, batch)):
        some = [x.detach()[part].clone().requires_grad_() for x in leaves]
        alone, alone_lse = pantile.attention(*some, **arguments, deterministic=True)
        assert torch.equal(o[part], alone)
        assert torch.equal(lse[part], alone_lse)
        for whole, piece in zip(grads, torch.autograd.grad(alone.sum(), some), strict=True):
            assert torch.equal(whole[part], piece)


# ---- sums over the group


def test_grouped_gradients_are_summed_in_float32(target):
    """64 query heads share one key head: rounding each share to bf16 would show."""
    case = dense(target, torch.bfloat16, batch=1, rows=16, keys=16, heads=64, heads_k=1)
    require_kernel(case, target, backward=True)
    case.q = case.q[:, :, :1].expand(-1, -1, 64, -1).contiguous()  # equal shares
    single = dense(target, torch.bfloat16, batch=1, rows=16, keys=16, heads=1, heads_k=1)
    single.q, single.k, single.v = case.q[:, :, :1].contiguous(), case.k, case.v
    grads = []
    for one in (case, single):
        leaves = [x.detach().requires_grad_() for x in one.operands]
        o, _ = one.ours(*leaves, options=target.options)
        grads.append(torch.autograd.grad(o.float().square().sum(), leaves)[1:])
    for many, alone in zip(*grads, strict=True):
        # A sum of 64 equal shares in fp32, rounded once, is 64 times the share before its rounding.
        torch.testing.assert_close(many.float(), 64 * alone.float(), rtol=2**-7, atol=1e-3)


# ---- determinism


def test_deterministic_and_independent_of_threads(target):
    if target.device != "cpu":
        pytest.skip("threads are a matter of the CPU")
    case = dense(target, torch.bfloat16, batch=2, rows=300, keys=300, causal=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(everything(case, target))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_unchanged(results[0], other)


def test_concurrent_callers_do_not_disturb_each_other(target):
    if target.device != "cpu":
        pytest.skip("see test_streams")
    cases = [dense(target, seed=seed, rows=90 + seed, causal=True) for seed in range(4)]
    expected = [everything(case, target) for case in cases]
    found: list = [None] * len(cases)

    def work(index: int) -> None:
        for _ in range(5):
            found[index] = everything(cases[index], target)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for first, second in zip(expected, found, strict=True):
        assert_unchanged(first, second)


@pytest.mark.gpu
@pytest.mark.undisturbed
@pytest.mark.parametrize("head_dims", [(d, d) for d in (64, 96, 128, 192, 256)] + [(192, 128)])
def test_streams(target, head_dims):
    """1000 runs, bit-equal, while other streams run the same kernels on other data."""
    if target.device == "cpu":
        pytest.skip("streams are a matter of the GPU")
    runs = int(os.environ.get("PANTILE_REPEATS", "1000"))
    cases = [
        dense(
            target,
            torch.bfloat16,
            rows=500,
            keys=500,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            seed=s,
            causal=True,
        )
        for s in range(3)
    ]
    require_kernel(cases[0], target)
    plan = cases[0].explain(options=target.options, deterministic=True)
    backward = plan.backward.kernel is not None

    def once(case):
        leaves = [x.detach().requires_grad_(backward) for x in case.operands]
        o, lse = case.ours(*leaves, options=target.options, deterministic=backward)
        grads = torch.autograd.grad((o * o).sum(), leaves) if backward else ()
        return [o, lse, *grads]

    expected = [once(case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(max(runs // len(cases), 1)):
        results = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(once(case))
        torch.cuda.synchronize()
        for first, second in zip(expected, results, strict=True):
            assert_unchanged(first, second)
