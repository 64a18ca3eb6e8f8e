"""The FP8 kernels of the GPU families: bit-equal quantising, attention within reach of exact
arithmetic on the same operands, and the contract's cases where FP8 could break it."""

from __future__ import annotations

import math

import pantile
import pytest
import torch
from pantile import Options, reference
from support import Target, fp8_exps

pytestmark = pytest.mark.gpu

DIMS = (64, 96, 128, 192, 256, 80)
MAIN_DIMS = (64, 128, 256)
EXPS = ("code", "mixed", "exp2")
FAMILIES = ("hopper", "ampere")


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request):
    """The name of a backend. Kernels of mma.sync run from compute capability 8.9 on, also on Hopper
    in a build with PANTILE_AMPERE_ON_HOPPER."""
    capability = torch.cuda.get_device_capability()
    if request.param == "hopper" and capability != (9, 0):
        pytest.skip("the FP8 kernels of Hopper need compute capability 9.0")
    if capability < (8, 9):
        pytest.skip("FP8 kernels need compute capability 8.9")
    dims = [
        row["head_dim"]
        for row in pantile.kernels()
        if row["backend"] == request.param
        and row["compiled"]
        and (row["dtype"], row["pass"]) == ("e4m3", "forward")
    ]
    if not dims:
        pytest.skip("not compiled into this build")
    if request.node.callspec.params.get("dim", 0) > max(dims):
        pytest.skip(f"{request.param} has FP8 up to head dim {max(dims)}")
    return request.param


@pytest.fixture
def here(family):
    return Options(backend=family)


def exps(family: str) -> tuple[str, ...]:
    return fp8_exps(Target(family, "cuda"))


def options_of(family: str, exp: str) -> Options:
    if exp not in exps(family):
        pytest.skip(f"{family} has no fp8_exp {exp}")
    return Options(backend=family, fp8_exp=exp)


def draw(*shape, seed=0, outliers=False, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if outliers:
        hit = torch.rand(*shape, generator=generator) < 1e-3
        x = x + hit * 10 * torch.randn(*shape, generator=generator)
    return x.to(dtype)


def inputs(rows, keys, dim, batch=2, heads=4, heads_k=2, **law):
    return [
        draw(batch, n, h, dim, seed=seed, **law)
        for seed, (n, h) in enumerate(((rows, heads), (keys, heads_k), (keys, heads_k)))
    ]


def assert_same_operands(gpu, cpu) -> None:
    """All but nonfinite_v, which is written for some blocks only; NaN tests show that."""
    for name in ("codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", "q_dot_mean", "mean_k"):
        a, b = getattr(gpu, name).cpu(), getattr(cpu, name)
        if name == "q_dot_mean":
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            same = a.view(torch.uint8) == b.view(torch.uint8)
            assert same.all(), f"{name}: {(~same).sum().item()} of {same.numel()} bytes differ"


# ---- the quantiser


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "settings",
    [{}, {"smooth_k": False}, {"hadamard": False}, {"block_q": 1}, {"block_q": 64}],
    ids=["default", "unsmoothed", "unrotated", "by-token", "by-64"],
)
def test_quantisers_agree_bit_for_bit(here, dim, dtype, settings):
    # Whole blocks: the rest of a block's scales and dot products is not written.
    q, k, v = inputs(256, 384, dim, outliers=True, dtype=dtype)
    cpu = pantile.quantize(q, k, v, **settings)
    gpu = pantile.quantize(q.cuda(), k.cuda(), v.cuda(), **settings, options=here)
    assert_same_operands(gpu, cpu)


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_quantisers_agree_on_special_numbers(here, dim):
    q, k, v = inputs(256, 256, dim)
    special = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-38, 0.0])
    for seed, x in enumerate((q, k, v)):
        at = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:40]
        x.view(-1)[at] = special.repeat(6)[:40].to(x.dtype)
        x[:, :128, 0] = 0.0  # blocks of zeros
    cpu = pantile.quantize(q, k, v, smooth_k=False)
    gpu = pantile.quantize(q.cuda(), k.cuda(), v.cuda(), smooth_k=False, options=here)
    assert_same_operands(gpu, cpu)


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_quantisers_agree_on_views(here, dim):
    """Strides that are not those of a contiguous tensor."""
    wide = [torch.cat([x, x + 1], -1)[..., :dim] for x in inputs(256, 256, dim)]
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(256, 256, dim)]
    for q, k, v in (wide, swapped):
        cpu = pantile.quantize(q, k, v)
        gpu = pantile.quantize(q.cuda(), k.cuda(), v.cuda(), options=here)
        assert_same_operands(gpu, cpu)


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_quantisers_agree_on_fp8_inputs(here, dim):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(256, 256, dim))
    scales = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)) + 0.5 for i in range(3)]
    names = ("descale_q", "descale_k", "descale_v")
    cpu = pantile.quantize(q, k, v, **dict(zip(names, scales, strict=True)))
    on_gpu = {n: s.cuda() for n, s in zip(names, scales, strict=True)}
    gpu = pantile.quantize(q.cuda(), k.cuda(), v.cuda(), **on_gpu, options=here)
    assert_same_operands(gpu, cpu)


# ---- attention


def relative_error(o, expected) -> float:
    o, expected = o.double().cpu(), expected.double().cpu()
    return ((o - expected).square().sum() / expected.square().sum().clamp_min(1e-300)).sqrt().item()


def exact(quantized_cpu, **arguments):
    """Exact arithmetic on the quantised operands."""
    options = Options(backend="reference")
    return pantile.attention(quantized_cpu, return_lse=True, options=options, **arguments)


# By how much one weight can be off, in nats. LSE is the log of a sum of weights, so by no more;
# rows that see few keys come near. "exp2": e4m3 rounds 17/16 to 1. A code is rounded by half of
# 1/8 octave, on a piecewise linear log2 that lies up to 0.46/8 octaves low. To both: fp16 scores
# (2^-11 of ten octaves) and the FP8 adder (2^-11).
LSE_BOUND = {
    "exp2": math.log(17 / 16) + 0.006,
    "mixed": (0.5 + 0.46) / 8 * math.log(2) + 0.006,
    "code": (0.5 + 0.46) / 8 * math.log(2) + 0.006,
}
# Over all rows these errors nearly cancel; an offset of a twentieth of an octave does not.
LSE_RMS_BOUND = 0.02


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("exp", EXPS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"causal": True}, {"window": (90, 0)}, {"window": (40, 70)}],
    ids=["full", "causal", "left-window", "window"],
)
def test_attention_is_near_exact_arithmetic_on_its_operands(family, here, dim, exp, arguments):
    for rows, keys in ((300, 300), (65, 517), (260, 100), (1, 129)):
        q, k, v = inputs(rows, keys, dim)
        o, lse = pantile.attention(
            pantile.quantize(q.cuda(), k.cuda(), v.cuda(), options=here),
            return_lse=True,
            options=options_of(family, exp),
            **arguments,
        )
        o_exact, lse_exact = exact(pantile.quantize(q, k, v), **arguments)
        assert relative_error(o, o_exact) < 0.06
        torch.testing.assert_close(lse.cpu(), lse_exact, rtol=0, atol=LSE_BOUND[exp])
        seen = lse_exact.isfinite()
        assert (lse.cpu() - lse_exact)[seen].square().mean().sqrt() < LSE_RMS_BOUND


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_packed_sequences_equal_single_ones(here, dim):
    """Bit for bit: no sequence sees its neighbours, whatever their lengths."""
    lengths_q, lengths_k = [200, 0, 129, 64, 1], [77, 33, 0, 300, 128]
    bounds = [
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        for x in (lengths_q, lengths_k)
    ]
    q = draw(sum(lengths_q), 4, dim, seed=0).cuda()
    k, v = (draw(sum(lengths_k), 2, dim, seed=s).cuda() for s in (1, 2))
    packed = pantile.quantize(q, k, v, *bounds, max(lengths_q), max(lengths_k), options=here)
    for causal in (False, True):
        o, lse = pantile.attention(packed, causal=causal, return_lse=True, options=here)
        assert not o.isnan().any()
        for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            rows = slice(bounds[0][b].item(), bounds[0][b].item() + m)
            keys = slice(bounds[1][b].item(), bounds[1][b].item() + n)
            if m == 0:
                continue
            one, lse_one = pantile.attention(
                pantile.quantize(q[None, rows], k[None, keys], v[None, keys], options=here),
                causal=causal,
                return_lse=True,
                options=here,
            )
            assert torch.equal(o[rows], one[0])
            assert torch.equal(lse[:, rows], lse_one[0])


@pytest.mark.parametrize("dim", MAIN_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("exp", EXPS)
def test_nan_reaches_the_rows_that_attend_to_it_and_no_other(family, dim, causal, which, exp):
    rows, key = 300, 200
    tensors = {n: x[:1].cuda() for n, x in zip("qkv", inputs(rows, rows, dim), strict=True)}
    options = options_of(family, exp)

    def run():
        quantized = pantile.quantize(*tensors.values(), smooth_k=False, options=options)
        return pantile.attention(quantized, causal=causal, return_lse=True, options=options)

    bad = tensors[which]
    if which == "v":
        bad[0, key, 0, 5] = 0
    else:
        bad[0, key, 0] = 0  # a row of NaN does not count for its block's scale
    o_clean, lse_clean = run()
    bad[0, key, 0, 5] = math.nan if which != "v" else math.inf
    o, lse = run()
    hit = torch.zeros_like(o, dtype=torch.bool)
    first = key if causal and which != "q" else 0
    heads = slice(0, 1) if which == "q" else slice(0, 2)
    if which == "q":
        hit[0, key, heads] = True
    elif which == "k":
        hit[0, first:, heads] = True
    else:
        hit[0, first:, heads, 5] = True
    assert torch.equal(o.isnan(), hit)
    assert torch.equal(o[~hit], o_clean[~hit])
    lse_hit = hit.any(-1).transpose(1, 2) if which != "v" else torch.zeros_like(lse) > 0
    assert torch.equal(lse.isnan(), lse_hit)
    assert torch.equal(lse[~lse_hit], lse_clean[~lse_hit])


@pytest.mark.parametrize("dim", MAIN_DIMS)
@pytest.mark.parametrize("size", [1e3, 1e5, 1e30, 3e38])
def test_saturation_makes_no_nan(family, dim, size):
    q, k, v = (x.cuda() for x in inputs(512, 512, dim))
    q[:, 300, 0, 3] = k[:, 140, 0, 7] = v[:, 260, 0, 9] = size
    k[:, :128] = v[:, :128] = 0.0
    for exp in exps(family):
        options = options_of(family, exp)
        o, lse = pantile.attention(pantile.quantize(q, k, v), return_lse=True, options=options)
        assert not o.isnan().any()
        assert not lse.isnan().any()


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_rows_without_keys(here, dim):
    q, k, v = (x.cuda() for x in inputs(300, 40, dim))
    o, lse = pantile.attention(
        pantile.quantize(q, k, v), causal=True, return_lse=True, options=here
    )
    assert (o[:, :260] == 0).all()
    assert (lse[..., :260] == -math.inf).all()
    assert lse[..., 260:].isfinite().all()
    o, lse = pantile.attention(
        pantile.quantize(q, k[:, :0], v[:, :0]), return_lse=True, options=here
    )
    assert (o == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_values_with_a_mean_keep_their_mean(family, here, dim):
    """The adder of FP8 products loses bits; one level of accumulation is 18 % off here."""
    q, k, v = (x[:1, :, :1].cuda() for x in inputs(256, 16384, dim, heads=1, heads_k=1))
    v = v + 1
    expected, _ = reference.attention(q, k, v, dtype=torch.float64)
    for exp in exps(family):
        options = options_of(family, exp)
        o = pantile.attention(pantile.quantize(q, k, v), options=options)
        assert relative_error(o, expected) < 1e-2


@pytest.mark.parametrize("dim", MAIN_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_equal_inputs_give_equal_bits(here, dim, causal):
    q, k, v = (x.cuda() for x in inputs(900, 900, dim))
    quantized = pantile.quantize(q, k, v)
    first = pantile.attention(quantized, causal=causal, options=here)
    for _ in range(20):
        assert torch.equal(pantile.attention(quantized, causal=causal, options=here), first)


@pytest.mark.undisturbed
@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_attention_waits_for_the_quantiser(here, dim):
    """The attention kernel starts while the quantiser drains and must not run ahead of it."""
    inputs_of = [[x.cuda() for x in inputs(512, 512, dim, outliers=i % 2 == 1)] for i in range(4)]
    alone = []
    for q, k, v in inputs_of:
        quantized = pantile.quantize(q, k, v, options=here)
        torch.cuda.synchronize()
        alone.append(pantile.attention(quantized, options=here))
    for _ in range(5):
        for (q, k, v), expected in zip(inputs_of, alone, strict=True):
            assert torch.equal(
                pantile.attention(pantile.quantize(q, k, v, options=here), options=here), expected
            )


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_float16_output(here, dim):
    q, k, v = (x.cuda() for x in inputs(300, 300, dim, dtype=torch.float16))
    o = pantile.attention(pantile.quantize(q, k, v), options=here)
    assert o.dtype == torch.float16
    half = pantile.attention(q, k, v)
    assert relative_error(o, half) < 0.12


@pytest.mark.parametrize("dim", MAIN_DIMS)
def test_smoothing_makes_up_for_channel_offsets(here, dim):
    """K with a mean of 10 in every channel, as real models have it in some."""
    q, k, v = (x[:1].cuda() for x in inputs(512, 1024, dim))
    shifted = k + 10
    expected, lse_expected = reference.attention(q, k, v, dtype=torch.float64)
    shifted_expected, lse_shifted = reference.attention(q, shifted, v, dtype=torch.float64)

    def error(k, expected, lse_expected):
        o, lse = pantile.attention(
            pantile.quantize(q, k, v, smooth_k=True), return_lse=True, options=here
        )
        assert (lse - lse_expected).abs().max() < 0.3
        return relative_error(o, expected)

    # bf16 keeps fewer bits of a number near 10 than of one near 1: that share is not FP8's.
    plain = error(k, expected, lse_expected)
    assert error(shifted, shifted_expected, lse_shifted) < 1.2 * plain
