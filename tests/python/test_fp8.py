"""FP8: the format bit for bit, the attention against exact arithmetic, the contract, gradients."""

from __future__ import annotations

import functools
import math

import fp8_format
import pantile
import pantile.reference
import pytest
import torch
from pantile._schema import LENGTHS, Call
from support import DTYPES, Target, assert_same_bits, fp8_exps, run_python

EXPS = ("code", "mixed", "exp2")
E4M3 = torch.float8_e4m3fn
# RMS error on the outlier law at 4096 keys, full mask, default options
# (docs/experiments/fp8.md): how much of it may be the kernel's own, against exact arithmetic on the
# same operands.
OWN_ERROR = {"code": 1.12, "mixed": 1.09, "exp2": 1.07}


def fp8(target: Target, exp: str = "code", **extra) -> pantile.Options:
    return pantile.Options(backend=target.backend, fp8=True, fp8_exp=exp, **extra)


def normal(*shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def outlier_law(*shape: int, seed: int = 0) -> torch.Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), the FA3 paper's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    hit = torch.rand(shape, generator=generator) < 0.001
    return (x + hit * 10.0 * torch.randn(shape, generator=generator)).bfloat16()


def operands(
    batch=1, rows=200, keys=300, heads=2, heads_k=None, head_dim=64, head_dim_v=None, **kind
):
    heads_k = heads if heads_k is None else heads_k
    return (
        normal(batch, rows, heads, head_dim, seed=1, **kind),
        normal(batch, keys, heads_k, head_dim, seed=2, **kind),
        normal(batch, keys, heads_k, head_dim_v or head_dim, seed=3, **kind),
    )


def on(target: Target, tensors) -> tuple:
    return tuple(x.to(target.device) for x in tensors)


def require(target: Target, tensors, **call) -> None:
    """Skips, with the reason, what a GPU backend does not serve. The CPU serves everything."""
    plan = pantile.explain(*tensors, options=fp8(target), **call)
    for one in (plan.quantize, plan.forward):
        if one.kernel is None:
            assert target.device != "cpu", one.reason
            pytest.skip(f"{target.backend}: {one.reason}")


def require_format(target: Target, block: int, block_q: int) -> None:
    if target.device != "cpu" and (block, block_q) != (128, 128):
        q, k, v = on(target, operands())
        try:
            made = pantile.quantize(q, k, v, block=block, block_q=block_q, options=target.options)
            pantile.attention(made, options=target.options)
        except pantile.UnsupportedError as error:
            pytest.skip(str(error))


def exact(q, k, v, rows=None, causal=False, window=None, scale=None):
    """(o, lse) in float64 of the given query rows of dense tensors; worked out on the GPU if there
    is one, answered on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.detach().to(device).double() for x in (q, k, v))
    rows = (torch.arange(q.shape[1]) if rows is None else rows).to(device)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(k.shape[1], device=device) - (rows[:, None] + k.shape[1] - q.shape[1])
    left, right = window or (None, None)
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).cpu(), lse.cpu()


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


# ---- the quantiser, bit for bit


def assert_operands(made: pantile.Quantized, tensors, lengths=None) -> None:
    """Every specified bit of the operands of ``tensors``, against the format written in torch."""
    q, k, v = (x.detach().cpu() for x in tensors)
    if q.dtype is not E4M3:
        q, k, v = (x.float() for x in (q, k, v))
    if lengths is None:
        sequences = [(q[b], k[b], v[b], None, None) for b in range(q.shape[0])]
        starts = [[b * -(-x.shape[1] // 128) for b in range(x.shape[0])] for x in (q, k)]
    else:
        cu_q, cu_k = (x.tolist() for x in lengths[:2])
        spans = list(zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False))
        sequences = [(q[a:b], k[c:d], v[c:d], a, c) for a, b, c, d in spans]
        starts = [[x // 128 + b for b, x in enumerate(cu[:-1])] for cu in (cu_q, cu_k)]
    group = q.shape[-2] // k.shape[-2]
    head_dim = q.shape[-1]
    limit = 16.0 if head_dim <= 128 else 15.0
    factor = float(fp8_format.group_of(head_dim)) if made.hadamard else 1.0
    for b, (rows, keys, values, *_) in enumerate(sequences):
        first_q, first_k = starts[0][b], starts[1][b]
        for head in range(k.shape[-2]):
            kept = keys[:, head]
            if made.smooth_k:
                mean = fp8_format.channel_mean(kept)
                assert torch.equal(made.mean_k[b, head].cpu(), mean)
                kept = kept - mean
            kept = fp8_format.rotate(kept) if made.hadamard else kept
            codes, scales = fp8_format.head_codes(kept, limit, made.block_k, 1.0)
            assert_codes(made.codes_k[head], first_k * 128, codes)
            assert_scales(made.scale_kv[head, :, 0], first_k * 128 // made.block_k, scales)
            codes, scales, bad = fp8_format.head_values(values[:, head], made.block_k)
            assert_codes(made.codes_v[head], first_k, codes)
            assert_scales(made.scale_kv[head, :, 1], first_k * 128 // made.block_k, scales)
            for block in bad.flatten(1).any(1).nonzero().flatten().tolist():
                words = made.nonfinite_v[head, first_k + block].cpu()
                found = words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
                assert torch.equal(found.flatten(1).bool(), bad[block])
        for head in range(q.shape[-2]):
            kept = rows[:, head]
            if made.smooth_k:
                dots = (kept.double() @ made.mean_k[b, head // group].cpu().double()).float()
                found = made.q_dot_mean[head, first_q * 128 :][: len(kept)].cpu()
                torch.testing.assert_close(found, dots, rtol=1e-4, atol=1e-4, equal_nan=True)
            kept = fp8_format.rotate(kept) if made.hadamard else kept
            codes, scales = fp8_format.head_codes(kept, limit, made.block_q, factor)
            assert_codes(made.codes_q[head], first_q * 128, codes)
            assert_scales(made.scale_q[head], first_q * 128 // made.block_q, scales)


def assert_codes(found: torch.Tensor, first: int, expected: torch.Tensor) -> None:
    part = found.view(torch.uint8)[first : first + len(expected)].cpu()
    assert part.shape == expected.shape
    wrong = (part != expected).nonzero()
    assert not len(wrong), f"{len(wrong)} codes differ, first at {wrong[0].tolist()}"


def assert_scales(found: torch.Tensor, first: int, expected: torch.Tensor) -> None:
    """NaN in ``expected``: a block without a row, whose scale is not written."""
    part = found[first : first + len(expected)].cpu()
    specified = ~expected.isnan()
    assert torch.equal(part[specified], expected[specified])


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("bf16", 64),
        ("f16", 96),
        ("f32", 128),
        ("bf16", 192),
        ("f16", 256),
        ("bf16", 256),
        ("f32", 40),
    ],
)
def test_quantiser_bits(target, dtype, head_dim):
    tensors = on(target, operands(2, 200, 300, 2, 1, head_dim, dtype=DTYPES[dtype]))
    require(target, tensors)
    for flags in ({}, {"hadamard": False, "smooth_k": False}):
        assert_operands(pantile.quantize(*tensors, options=target.options, **flags), tensors)


@pytest.mark.parametrize(("block", "block_q"), [(64, 64), (128, 1), (64, 1), (128, 64)])
def test_quantiser_bits_of_block_sizes(target, block, block_q):
    require_format(target, block, block_q)
    tensors = on(target, operands(1, 130, 193))
    made = pantile.quantize(*tensors, block=block, block_q=block_q, options=target.options)
    assert_operands(made, tensors)


def packed_lengths(target: Target, *lists) -> tuple:
    return tuple(
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32).to(target.device)
        for x in lists
    )


def test_quantiser_bits_packed(target):
    lengths_q, lengths_k = [130, 0, 1, 128], [64, 300, 0, 129]
    tensors = on(target, (x[0] for x in operands(1, sum(lengths_q), sum(lengths_k), 4, 2)))
    lengths = packed_lengths(target, lengths_q, lengths_k)
    call = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True))
    call |= {"max_seqlen_q": 130, "max_seqlen_k": 300}
    require(target, tensors, **call)
    assert_operands(pantile.quantize(*tensors, **call, options=target.options), tensors, lengths)


def test_quantiser_bits_of_views(target):
    """Gaps between rows, heads before rows, an odd offset."""
    q, k, v = on(target, operands(2, 150, 170, 4, 2))
    require(target, (q, k, v))
    views = (
        torch.nn.functional.pad(q, (8, 8))[..., 8:-8],
        k.transpose(1, 2).contiguous().transpose(1, 2),
        torch.nn.functional.pad(v, (1, 0))[..., 1:],
    )
    assert_operands(pantile.quantize(*views, options=target.options), (q, k, v))


def test_quantiser_bits_of_hard_blocks(target):
    """Zeros, one huge outlier, subnormals, the largest floats, NaN and Inf."""
    q, k, v = operands(1, 260, 390, 2, 2, 64, dtype=torch.float32)
    for x in (q, k, v):
        x[0, :128, 0] = 0.0
        x[0, :128, 1] *= 1e-42
        x[0, 130, 0, 3] = 3e38
        x[0, 140, 1] = 3.4e38
        x[0, 150, 1] = -3.4e38
        x[0, 258, 0, 5] = math.inf
        x[0, 259, 1, 7] = math.nan
    tensors = on(target, (q, k, v))
    require(target, tensors)
    for flags in ({}, {"hadamard": False, "smooth_k": False}):
        made = pantile.quantize(*tensors, options=target.options, **flags)
        assert_operands(made, tensors)


def test_operands_stand_for_their_inputs():
    """The decoded operands are the inputs to within half a step of e4m3, the rotation undone."""
    q, k, v = operands(2, 200, 300, 2, head_dim=96)
    made = pantile.quantize(q, k, v)
    for b in range(2):
        own_q, own_k, own_v = fp8_format.dequantize(made, b)
        group = fp8_format.group_of(96)
        own_q = fp8_format.unrotate(own_q / group)
        own_k = fp8_format.unrotate(own_k) + made.mean_k[b].double()
        for own, x in ((own_q, q[b]), (own_k, k[b]), (own_v, v[b])):
            assert rms(own - x.double()) < 0.04 * rms(x)


# ---- the attention


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
}


def relative(o, truth) -> float:
    return rms(o.cpu().double() - truth) / max(rms(truth), 1e-30)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("head_dim", "exp"),
    [
        *((d, e) for d in (64, 128) for e in EXPS),
        (256, "code"),
        (96, "code"),
        (192, "exp2"),
        (40, "code"),
    ],
)
def test_attention_is_near_exact_arithmetic(target, head_dim, exp, mask):
    """On the same operands, what remains is the rounding of P."""
    tensors = on(target, operands(2, 200, 333, 2, 1, head_dim))
    require(target, tensors, **MASKS[mask])
    made = pantile.quantize(*tensors, options=target.options)
    options = fp8(target, exp)
    o, lse = pantile.attention(made, **MASKS[mask], return_lse=True, options=options)
    host = pantile.quantize(*(x.cpu() for x in tensors))
    textbook = pantile.Options(backend="reference")
    o_ideal, lse_ideal = pantile.attention(host, **MASKS[mask], return_lse=True, options=textbook)
    assert relative(o, o_ideal.double()) < (2e-2 if target.backend == "reference" else 6.5e-2)
    assert (lse.cpu() - lse_ideal).abs().max() < 4e-2
    truth, _ = exact(*tensors, **MASKS[mask])
    assert relative(o, truth) < 0.09


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (65, 17), (128, 128), (333, 1111), (300, 900)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_ragged_shapes(target, rows, keys, causal):
    tensors = on(target, operands(1, rows, keys, 2, 1, 128))
    require(target, tensors)
    o, lse = pantile.attention(*tensors, causal=causal, return_lse=True, options=fp8(target))
    truth, lse_truth = exact(*tensors, causal=causal)
    assert relative(o, truth) < 0.12
    dead = max(rows - keys, 0) if causal else 0
    assert not o[:, :dead].any()
    assert torch.isneginf(lse[..., :dead]).all()
    assert (lse[..., dead:].cpu() - lse_truth[..., dead:]).abs().max() < 0.25


@pytest.mark.parametrize(("block", "block_q"), [(64, 64), (128, 1), (64, 1)])
def test_attention_of_block_sizes(target, block, block_q):
    require_format(target, block, block_q)
    tensors = on(target, operands(1, 300, 500, 2, 2, 64))
    truth, _ = exact(*tensors, causal=True)
    made = pantile.quantize(*tensors, block=block, block_q=block_q, options=target.options)
    assert relative(pantile.attention(made, causal=True, options=target.options), truth) < 0.09


def test_attention_packed_equals_dense(target):
    """Each sequence of a packed call gives the bits that it gives alone."""
    lengths_q, lengths_k = [130, 1, 200], [300, 77, 200]
    tensors = on(target, (x[0] for x in operands(1, sum(lengths_q), sum(lengths_k), 4, 2, 64)))
    lengths = packed_lengths(target, lengths_q, lengths_k)
    call = {"causal": True, "return_lse": True, "options": fp8(target)}
    require(target, (x[None] for x in tensors))
    o, lse = pantile.varlen_attention(*tensors, *lengths, 200, 300, **call)
    for b in range(3):
        (a, z), (c, d) = (x[b : b + 2].tolist() for x in lengths)
        alone = (tensors[0][None, a:z], *(x[None, c:d] for x in tensors[1:]))
        o_alone, lse_alone = pantile.attention(*alone, **call)
        assert_same_bits((o[a:z], lse[:, a:z]), (o_alone[0], lse_alone[0]), ("o", "lse"))


def test_quantized_is_accepted_by_both_calls(target):
    tensors = on(target, (x[0] for x in operands(1, 60, 70)))
    lengths = packed_lengths(target, [60], [70])
    require(target, (x[None] for x in tensors))
    made = pantile.quantize(*tensors, *lengths, 60, 70, options=target.options)
    first = pantile.attention(made, options=target.options)
    second = pantile.varlen_attention(made, options=target.options)
    assert_same_bits((first,), (second,), ("o",))
    assert first.shape == (60, 2, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_equal_quantize(target, dtype):
    """Options(fp8=True) is attention(quantize()); o has the dtype of q."""
    tensors = on(target, operands(dtype=DTYPES[dtype]))
    require(target, tensors)
    made = pantile.quantize(*tensors, options=target.options)
    first = pantile.attention(made, scale=0.2, options=fp8(target))
    second = pantile.attention(*tensors, scale=0.2, options=fp8(target))
    assert second.dtype is DTYPES[dtype]
    assert first.dtype is (torch.float16 if dtype == "f16" else torch.bfloat16)
    assert torch.equal(first.to(second.dtype), second)


def test_repeats_bit_for_bit(target):
    tensors = on(target, operands(2, 300, 400, 4, 2, 128))
    require(target, tensors)
    call = {"causal": True, "return_lse": True, "options": fp8(target)}
    first = pantile.attention(*tensors, **call)
    for _ in range(5):
        assert_same_bits(first, pantile.attention(*tensors, **call), ("o", "lse"))


def test_threads_do_not_matter():
    source = """
        import sys, torch, pantile, hashlib
        torch.set_num_threads(int(sys.argv[1]))
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 300, 4, 64) for _ in range(3))
        o, lse = pantile.attention(q, k, v, return_lse=True, options=pantile.Options(fp8=True))
        print(hashlib.sha256(o.numpy().tobytes() + lse.numpy().tobytes()).hexdigest())
    """
    assert run_python(source, "1") == run_python(source, "2")


def ideal(made: pantile.Quantized, rows: torch.Tensor) -> torch.Tensor:
    """O of the given rows by exact arithmetic on dense operands, full mask."""
    scale = made.shape_q[3] ** -0.5
    found = []
    for b in range(made.shape_q[0]):
        q, k, v = (x[None] for x in fp8_format.dequantize(made, b))
        found.append(exact(q[:, rows], k, v, scale=scale)[0])
    return torch.cat(found)


# ---- accuracy: the outlier law, offsets, long rows, sinks


@functools.lru_cache(maxsize=3)
def outliers(head_dim: int) -> tuple:
    """(q, k, v), some rows, their O, and the error of exact arithmetic on the operands with and
    without rotation: the same for all targets."""
    tensors = [outlier_law(2, 4096, 4, head_dim, seed=10 * head_dim + i) for i in range(3)]
    rows = torch.arange(0, 4096, 16)
    truth, _ = exact(*tensors, rows=rows)
    made = pantile.quantize(*tensors), pantile.quantize(*tensors, hadamard=False)
    return tensors, rows, truth, *(rms(ideal(x, rows) - truth) for x in made)


@pytest.mark.parametrize(("head_dim", "bar"), [(64, 1.5e-2), (128, 9.0e-3), (256, 7.4e-3)])
def test_outlier_law(target, head_dim, bar):
    """4096 keys, B2 H4. The bar is that of the issue plus what draws differ by (8 %)."""
    tensors, rows, truth, floor, plain = outliers(head_dim)
    placed = on(target, tensors)
    require(target, placed)
    errors = {}
    for exp in fp8_exps(target):
        o = pantile.attention(*placed, options=fp8(target, exp))
        errors[exp] = rms(o[:, rows].cpu().double() - truth)
    assert floor < 1.08 * bar
    assert plain > 1.5 * floor
    for exp, error in errors.items():
        assert error < 1.08 * bar, exp
        assert error < OWN_ERROR[exp] * floor, f"{exp}: {error:.3e}, ideal {floor:.3e}"


@functools.lru_cache(maxsize=4)
def long_keys(law: str, keys: int) -> tuple:
    """(q, k, v), the truth, and the error of exact arithmetic on the operands relative to the RMS
    of the truth: the same for all ways to compute exponentials."""
    q, k, v = (normal(1, n, 1, 128, seed=i) for i, n in enumerate((128, keys, keys)))
    if law == "values with a mean":
        v = v + 1.0
    elif law == "sink":
        q = (q + 4.0).bfloat16()
        k = (0.3 * k.float()).bfloat16()
        k[0, 777] = 10.0 * 128**0.5 / (4.0 * 128)
    truth, _ = exact(q, k, v)
    floor = ideal(pantile.quantize(q, k, v), torch.arange(128)) if law == "sink" else truth
    return (q, k, v), truth, rms(floor - truth) / rms(truth)


def error_of_long_keys(target, law: str, keys: int, **call) -> float:
    """Relative to the RMS of the truth."""
    tensors, truth, _ = long_keys(law, keys)
    tensors = on(target, tensors)
    require(target, tensors)
    return relative(pantile.attention(*tensors, options=fp8(target, **call)), truth)


@pytest.mark.parametrize("keys", [4096, 16384, 131072])
def test_values_with_a_mean(target, keys):
    """One level of accumulation in an FP8 tensor core is up to 18 % off here."""
    if target.backend == "reference" and keys > 4096:
        pytest.skip("the reference does not accumulate in FP8")
    assert error_of_long_keys(target, "values with a mean", keys) < 1e-2


@pytest.mark.parametrize("exp", EXPS)
def test_error_does_not_grow_with_length(target, exp):
    """Zero-mean V at 4k and 128k keys, against the truth in units of its own size."""
    if target.backend == "reference":
        pytest.skip("the reference does not accumulate in FP8")
    short, long = (error_of_long_keys(target, "normal", n, exp=exp) for n in (4096, 131072))
    assert long < 1.1 * short


@pytest.mark.parametrize("exp", EXPS)
def test_sink_among_many_keys(target, exp):
    """One key 10 nats above the rest of 128k: the weights of the others lie below e4m3's range."""
    if target.backend == "reference":
        pytest.skip("the reference does not round P")
    error = error_of_long_keys(target, "sink", 131072, exp=exp)
    assert error < 1.1 * long_keys("sink", 131072)[2]


def test_smoothing_removes_channel_offsets(target):
    """Means of 10 in K, as in real models."""
    q, k, v = (normal(2, 2048, 2, 128, seed=i, dtype=torch.float32) for i in range(3))
    offset = 10.0 * normal(2, 128, seed=9, dtype=torch.float32).sign()
    plain, shifted, rough = [], [], []
    rows = torch.arange(0, 2048, 8)
    if target.backend == "reference":
        pytest.skip("slow, and no different: the quantiser is that of the CPU")
    for offsets, smooth, errors in (
        (0.0, True, plain),
        (offset, True, shifted),
        (offset, False, rough),
    ):
        tensors = q, k + offsets, v
        truth, lse_truth = exact(*tensors, rows=rows)
        placed = on(target, tensors)
        require(target, placed)
        made = pantile.quantize(*placed, smooth_k=smooth, options=target.options)
        o, lse = pantile.attention(made, return_lse=True, options=target.options)
        errors += [rms(o[:, rows].cpu() - truth), rms(lse[..., rows].cpu() - lse_truth)]
    assert shifted[0] < 1.2 * plain[0]
    assert shifted[1] < 1.2 * plain[1] + 1e-3
    assert rough[0] > 3.0 * plain[0]


# ---- the contract


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "heads"), [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)]
)
def test_nothing_to_do(target, batch, rows, keys, heads):
    tensors = on(target, operands(batch, rows, keys, heads, heads))
    require(target, tensors)
    o, lse = pantile.attention(*tensors, return_lse=True, options=fp8(target))
    assert o.shape == (batch, rows, heads, 64)
    assert lse.shape == (batch, heads, rows)
    assert not o.any()
    assert torch.isneginf(lse).all()


def test_unused_rows_and_keys(target):
    """seqused: what lies behind is neither read nor counted; its rows are empty."""
    q, k, v = (x[0] for x in operands(1, 300, 300, 2, 2, 64))
    lengths = packed_lengths(target, [150, 150], [150, 150])
    used = torch.tensor([140, 3], dtype=torch.int32, device=target.device)
    call = {"seqused_q": used, "seqused_k": used, "return_lse": True, "options": fp8(target)}
    require(target, on(target, (x[None] for x in (q, k, v))))
    results = []
    for poison in (None, math.nan, math.inf, 1e30):
        tensors = [x.clone() for x in (q, k, v)]
        if poison is not None:
            for x in tensors:
                x[140:150] = poison
                x[153:] = poison
        results.append(pantile.varlen_attention(*on(target, tensors), *lengths, 150, 150, **call))
    for other in results[1:]:
        assert_same_bits(results[0], other, ("o", "lse"))
    o, lse = results[0]
    assert not o[140:150].any()
    assert torch.isneginf(lse[:, 153:]).all()
    alone = on(target, (x[None, :140] for x in (q, k, v)))
    o_alone = pantile.attention(*alone, options=fp8(target))
    assert torch.equal(o[:140], o_alone[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("exp", EXPS)
def test_not_finite_reaches_exactly_those_that_attend(target, bad, exp):
    tensors = [x.clone() for x in operands(1, 300, 300, 2, 2, 64)]
    require(target, on(target, tensors))
    call = {"causal": True, "return_lse": True, "options": fp8(target, exp)}
    clean, _ = pantile.attention(*on(target, tensors), **call)
    for which, row, channel in ((0, 150, 5), (1, 170, 7), (2, 200, 9)):
        changed = [x.clone() for x in tensors]
        changed[which][0, row, 1, channel] = bad
        o, lse = pantile.attention(*on(target, changed), **call)
        reached = o.isnan().cpu()
        expected = torch.zeros_like(reached)
        if which == 0:
            expected[0, row, 1] = True
        elif which == 1:
            expected[0, row:, 1] = True
        else:
            expected[0, row:, 1, channel] = True
        assert torch.equal(reached, expected), "qkv"[which]
        assert torch.equal(o[:, :, 0], clean[:, :, 0])  # the other head keeps its bits
        assert torch.equal(lse.isnan().cpu()[0, 1], expected[0, :, 1].all(-1))


def test_large_numbers_saturate(target):
    """No finite input gives NaN; all-zero blocks and a huge outlier in a block are harmless."""
    q, k, v = (x.float() for x in operands(1, 256, 256, 2, 2, 64))
    require(target, on(target, (q, k, v)))
    cases = [[x.clone() for x in (q, k, v)] for _ in range(4)]
    for x in cases[0]:
        x.zero_()
    cases[1][2][0, 77, 0, 5] = 3e38
    for x in cases[2][:2]:
        x[0, 140] *= 1e15
    for x in cases[3][:2]:
        x[:] = 3e38
    for tensors in cases:
        o, lse = pantile.attention(*on(target, tensors), return_lse=True, options=fp8(target))
        assert o.isfinite().all()
        assert not lse.isnan().any()
    o = pantile.attention(*on(target, cases[0]), options=fp8(target))
    assert not o.any()
    truth, _ = exact(q, k, v)
    o = pantile.attention(*on(target, cases[1]), options=fp8(target))
    others = [c for c in range(64) if c != 5]
    assert relative(o[:, :, 1], truth[:, :, 1]) < 0.09  # another head
    assert o[:, :, 0, 5].abs().min() > 1e34
    assert o[:, :, 0, others].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0])
def test_scales(target, scale):
    tensors = on(target, operands(1, 100, 200))
    require(target, tensors)
    o, lse = pantile.attention(*tensors, scale=scale, return_lse=True, options=fp8(target))
    truth, lse_truth = exact(*tensors, scale=scale)
    assert relative(o, truth) < 0.25
    assert (lse.cpu() - lse_truth).abs().max() < 0.04 * max(1.0, lse_truth.abs().max())


# ---- ready FP8 tensors


def ready(x: torch.Tensor, per_head: bool):
    """(codes, descale) as users of other libraries have them: [batch, heads] or one for all."""
    amax = x.float().abs().amax((1, 3)) if per_head else x.float().abs().max().reshape(1)
    descale = amax / 448.0
    shaped = descale[:, None, :, None] if per_head else descale
    return (x.float() / shaped).clamp(-448, 448).to(E4M3), descale


@pytest.mark.parametrize("per_head", [True, False])
def test_ready_tensors(target, per_head):
    q, k, v = operands(2, 200, 300, 4, 4, 128)
    (q8, dq), (k8, dk), (v8, dv) = (ready(x, per_head) for x in (q, k, v))
    placed = on(target, (q8, k8, v8))
    scales = {"descale_q": dq, "descale_k": dk, "descale_v": dv}
    scales = {name: x.to(target.device) for name, x in scales.items()}
    require(target, on(target, (q, k, v)))
    made = pantile.quantize(*placed, **scales, options=target.options)
    assert not made.hadamard
    assert not made.smooth_k
    o = pantile.attention(made, causal=True, options=target.options)
    shapes = [x[:, None, :, None] if per_head else x for x in (dq, dk, dv)]
    numbers = [x.float() * s for x, s in zip((q8, k8, v8), shapes, strict=True)]
    truth, _ = exact(*numbers, causal=True)
    assert relative(o, truth) < 6e-2


def test_ready_tensors_of_groups(target):
    """The descale of Q belongs to its key head; numbers serve too."""
    q, k, v = operands(1, 100, 100, 4, 2, 64)
    codes = [x.to(E4M3) for x in (q, k, v)]
    dq = torch.tensor([[0.5, 2.0]])
    require(target, on(target, (q, k, v)))
    made = pantile.quantize(
        *on(target, codes), descale_q=dq.to(target.device), descale_v=3.0, options=target.options
    )
    o = pantile.attention(made, options=target.options)
    q_real = codes[0].float() * dq.repeat_interleave(2, 1)[:, None, :, None]
    truth, _ = exact(q_real, codes[1].float(), 3.0 * codes[2].float())
    assert relative(o, truth) < 6e-2


# ---- gradients


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def require_backward(target: Target, tensors, **call) -> None:
    require(target, tensors, **call)
    plan = pantile.explain(*tensors, options=fp8(target), **call)
    if plan.backward.kernel is None:
        pytest.skip(plan.backward.reason)


def exact_gradients(tensors, grad_o, **call):
    group = tensors[0].shape[2] // tensors[1].shape[2]
    doubles = leaves([x.cpu().double() for x in tensors])
    q, k, v = doubles[0], *(x.repeat_interleave(group, 2) for x in doubles[1:])
    o, _ = pantile.reference.attention(q, k, v, **call, dtype=torch.float64)
    return torch.autograd.grad(o, doubles, grad_o.cpu().double())


def test_gradient_is_that_of_the_unquantised_attention(target):
    """Bit for bit that of q, k and v in 16 bits, of o and of the LSE."""
    tensors = on(target, operands(2, 150, 200, 4, 2, 64))
    require_backward(target, tensors, causal=True)
    generator = torch.Generator().manual_seed(5)
    grad_o = torch.randn(2, 150, 4, 64, generator=generator).bfloat16().to(target.device)
    grad_lse = torch.randn(2, 4, 150, generator=generator).to(target.device)

    def gradients(options, quantised=False):
        q, k, v = leaves(tensors)
        given = (pantile.quantize(q, k, v, options=options),) if quantised else (q, k, v)
        o, lse = pantile.attention(*given, causal=True, return_lse=True, options=options)
        return torch.autograd.grad((o, lse), (q, k, v), (grad_o, grad_lse))

    plain = gradients(target.options)
    recomputed = fp8(target, fp8_backward="recompute")
    assert_same_bits(gradients(recomputed), plain, ("dq", "dk", "dv"))
    assert_same_bits(gradients(recomputed, quantised=True), plain, ("dq", "dk", "dv"))


@pytest.mark.parametrize("loud", [1.0, 30.0])
def test_the_backwards_probabilities_sum_to_one(target, loud):
    """With dO = 1, dV of a single row of q is P, whatever FP8 makes of large scores."""
    q, k, v = operands(1, 1, 400, 1, 1, 64)
    q = (loud * q.float()).bfloat16()
    require_backward(target, on(target, (q, k, v)))
    placed = leaves(on(target, (q, k, v)))
    o = pantile.attention(*placed, options=fp8(target, fp8_backward="recompute"))
    (grad_v,) = torch.autograd.grad(o, placed[2], torch.ones_like(o))
    scores = (q.double() * 64**-0.5).flatten(1) @ k[0, :, 0].double().T
    torch.testing.assert_close(
        grad_v[0, :, 0, 0].cpu().double(), scores.softmax(1)[0], rtol=2e-2, atol=1e-4
    )
    assert grad_v[0, :, 0, 0].double().sum().item() == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_gradient_error_on_the_outlier_law(target, head_dim, causal):
    """At most 3x the bf16 backward's error."""
    tensors = [outlier_law(1, 640, 2, head_dim, seed=30 + i) for i in range(3)]
    placed = on(target, tensors)
    require_backward(target, placed, causal=causal)
    grad_o = normal(1, 640, 2, head_dim, seed=40)
    truths = exact_gradients(tensors, grad_o, causal=causal)
    errors = []
    for options in (target.options, fp8(target, fp8_backward="recompute")):
        q, k, v = leaves(placed)
        o = pantile.attention(q, k, v, causal=causal, options=options)
        grads = torch.autograd.grad(o, (q, k, v), grad_o.to(target.device))
        errors.append([relative(g, t) for g, t in zip(grads, truths, strict=True)])
    for name, plain, quantized in zip(("dq", "dk", "dv"), *errors, strict=True):
        assert quantized < 3.0 * plain, name


def test_gradients_keep_their_dtype():
    for dtype in DTYPES.values():
        q, k, v = leaves(operands(1, 40, 50, dtype=dtype))
        o = pantile.attention(q, k, v, options=pantile.Options(fp8=True))
        o.sum().backward()
        assert {x.grad.dtype for x in (q, k, v)} == {dtype}


def test_no_gradient_is_kept_without_need():
    tensors = operands()
    assert pantile.quantize(*tensors).source == (None, None, None)
    q, k, v = leaves(tensors)
    assert pantile.quantize(q, k, v).source[0] is q
    with torch.no_grad():
        assert pantile.quantize(q, k, v).source == (None, None, None)
        assert not pantile.attention(q, k, v, options=pantile.Options(fp8=True)).requires_grad


# ---- torch


def test_opcheck():
    q, k, v = operands(1, 128, 256, 2, 1, 64)
    none = (None,) * 3
    lengths = (None,) * len(LENGTHS)
    arguments = (q, k, v, *none, *lengths, 0, 0, 128, 128, True, True, "auto")
    # test_schema multiplies what operators return, which torch does not do with float8_e4m3fn, and
    # test_aot_dispatch_dynamic compares memory that is not specified.
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.pantile.quantize, arguments, test_utils=checks)
    made = torch.ops.pantile.quantize(*arguments)
    for source in ((None, None, None), tuple(leaves((q, k, v)))):
        torch.library.opcheck(
            torch.ops.pantile.fp8_forward,
            (
                *(*source, *made, *Call(window_right=0)),
                *(1, 128, 256, 64, torch.bfloat16, 128, 128, True, True, "code", "recompute"),
                *(False, False),
            ),
            test_utils=(*checks, "test_aot_dispatch_dynamic"),
        )


def test_short_cut_equals_operators():
    """The short cut around the dispatcher and the operators give the same bits."""
    tensors = operands(2, 100, 130, 4, 2)
    results = []
    for watched in (False, True):
        with torch.autograd.profiler.profile(enabled=watched):
            results.append(
                pantile.attention(*tensors, return_lse=True, options=pantile.Options(fp8=True))
            )
    assert_same_bits(*results, ("o", "lse"))


def test_compiles_in_one_graph():
    torch._dynamo.reset()

    def step(q, k, v):
        o = pantile.attention(q * 2.0, k, v, causal=True, options=pantile.Options(fp8=True))
        return o.float().sin().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (60, 70):
        results = []
        for function in (step, compiled):
            tensors = leaves(operands(1, rows, 130, 2, 1))
            results.append(torch.autograd.grad(function(*tensors), tensors))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_autocast_casts_first():
    tensors = operands(dtype=torch.float32)
    options = pantile.Options(fp8=True)
    with torch.autocast("cpu", torch.bfloat16):
        o = pantile.attention(*tensors, options=options)
    expected = pantile.attention(*(x.bfloat16() for x in tensors), options=options)
    assert o.dtype is torch.bfloat16
    assert torch.equal(o, expected)


def test_flops_are_those_of_the_plain_forward():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for options in (pantile.Options(), pantile.Options(fp8=True)):
        with FlopCounterMode(display=False) as counter:
            pantile.attention(*operands(2, 100, 100), causal=True, options=options)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_explain_shows_three_passes():
    tensors = operands()
    text = str(pantile.explain(*tensors, options=pantile.Options(fp8=True)))
    assert "quantize: cpu_quantize_bf16" in text
    assert "forward: cpu_forward_e4m3" in text
    assert "backward: cpu_backward_bf16" in text
    floats = pantile.explain(*(x.float() for x in tensors), options=pantile.Options(fp8=True))
    assert floats.quantize.kernel == "cpu_quantize_f32"
    assert floats.backward.kernel == "cpu_backward_bf16"
    assert pantile.explain(*tensors).quantize is None


# ---- bad input


def bad_input_cases() -> dict:
    q, k, v = operands(2, 20, 30, 4, 2, 64)
    codes = [x.to(E4M3) for x in (q, k, v)]
    made = pantile.quantize(q, k, v)

    def quantize(*tensors, **call):
        return lambda: pantile.quantize(*(tensors or (q, k, v)), **call)

    return {
        "block": (quantize(block=32), ValueError, "block is 32; it must be one of 64, 128"),
        "block_q": (quantize(block_q=2), ValueError, "block_q is 2; it must be one of 1, 64, 128"),
        "block type": (quantize(block="x"), TypeError, "block is 'x'; it must be an integer"),
        "hadamard": (
            quantize(hadamard=1),
            TypeError,
            "hadamard is 1; it must be True, False or None",
        ),
        "codes with hadamard": (
            quantize(*codes, hadamard=True),
            ValueError,
            "hadamard is true; it must be false for inputs of dtype e4m3",
        ),
        "codes with smoothing": (
            quantize(*codes, smooth_k=True),
            ValueError,
            "forward.fp8.smooth_k is true; it must be false for inputs of dtype e4m3",
        ),
        "descale without codes": (
            quantize(descale_k=2.0),
            ValueError,
            "descale_k is set; it must be None for q of dtype torch.bfloat16",
        ),
        "descale shape": (
            quantize(*codes, descale_q=torch.ones(2, 4)),
            ValueError,
            "descale_q has shape [2, 4]; it must be [2, 2], one number for each sequence and key "
            "head, or hold one number",
        ),
        "descale dtype": (
            quantize(*codes, descale_v=torch.ones(2, 2).double()),
            TypeError,
            "descale_v has dtype torch.float64; it must be float32",
        ),
        "descale value": (
            quantize(*codes, descale_v=-1.0),
            ValueError,
            "descale_v is -1.0; it must be positive and finite",
        ),
        "rank": (quantize(q[0], k, v), ValueError, "q has 3 dimensions; it must have 4"),
        "mixed dtypes": (
            quantize(q, k.float(), v),
            TypeError,
            "k has dtype float32; it must have the dtype of q, bfloat16",
        ),
        "one cu_seqlens": (
            quantize(cu_seqlens_q=torch.zeros(1)),
            TypeError,
            "cu_seqlens_k is None; both must be int32 tensors of batch + 1 offsets, or None",
        ),
        "codes in attention": (
            lambda: pantile.attention(*codes, options=pantile.Options(fp8=True)),
            TypeError,
            "q has dtype float8_e4m3fn; pantile.quantize takes it, with descales",
        ),
        "operands with k": (
            lambda: pantile.attention(made, k, v),
            TypeError,
            "k and v are set; they must be left out when q is pantile.Quantized",
        ),
        "operands with cu_seqlens": (
            lambda: pantile.varlen_attention(made, cu_seqlens_q=torch.zeros(1)),
            TypeError,
            "q is pantile.Quantized, which knows its sequences; leave theirs out",
        ),
        "negative scale": (
            lambda: pantile.attention(made, scale=-1.0),
            ValueError,
            "scale is -1; with FP8 operands it must be 0 or more",
        ),
        "fp8": (
            lambda: pantile.Options(fp8="yes"),
            TypeError,
            "fp8 is 'yes'; it must be True or False",
        ),
        "fp8_exp": (
            lambda: pantile.Options(fp8_exp="fast"),
            ValueError,
            "fp8_exp is 'fast'; it must be one of code, mixed, exp2",
        ),
        "numpy": (
            lambda: pantile.attention(
                *(x.float().numpy() for x in (q, k, v)), options=pantile.Options(fp8=True)
            ),
            TypeError,
            "q is a numpy.ndarray; FP8 needs a torch.Tensor",
        ),
    }


BAD_INPUT = bad_input_cases()


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    run, error, message = BAD_INPUT[case]
    with pytest.raises(error) as caught:
        run()
    assert str(caught.value) == message


def test_head_dims_above_256_are_refused_by_name():
    with pytest.raises(pantile.UnsupportedError, match="serves head dims up to 256 and 256"):
        pantile.quantize(*operands(1, 5, 5, head_dim=264))
