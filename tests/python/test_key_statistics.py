"""Statistics of keys from outside: a deterministic backward of some rows, with the keys that these
see, has the bits of dQ that the backward of the whole sequence has. Ranks of
pantile.distributed in one process."""

from __future__ import annotations

import itertools

import pantile
import pytest
import torch
from pantile._direct import key_statistics, run_backward, run_forward
from pantile._schema import bind
from pantile.distributed._local import Settings, make_call
from pantile.distributed._statistics import sample_places
from support import Target

pantile.load_torch()

KEYS, HEADS_Q, HEADS_K = 1536, 4, 2
CUTS = (0, 256, 400, 1024, KEYS)  # of rows; 400 is a multiple of 16, not of a tile
DIMS = [(128, 128), (64, 64), (64, 128), (192, 128), (256, 256), (20, 36)]
CASES = ("plain", "last key loud", "mean of keys")


def call_of(target: Target, rows: list[int], keys: list[int], window):
    def offsets(lengths):
        sums = torch.tensor([0, *lengths]).cumsum(0)
        return sums.to(device=target.device, dtype=torch.int32)

    settings = Settings(None, target.options, True, True)
    return bind(make_call(settings, offsets(rows), offsets(keys), max(rows), max(keys), window))


def tensors(target: Target, dims, dtype, case: str):
    torch.manual_seed(3)
    q, k, v, grad_o = (
        torch.randn(KEYS, heads, dim, device=target.device)
        for heads, dim in (
            *((HEADS_Q, dims[0]), (HEADS_K, dims[0])),
            *((HEADS_K, dims[1]), (HEADS_Q, dims[1])),
        )
    )
    if case == "last key loud":  # twice in K and V, so that the unit of every row changes by it
        k[-1] *= 6.0
        v[-1] *= 6.0
    elif case == "mean of keys":
        k[:, :, : dims[0] // 2] += 3.0
        k[: KEYS // 2, 0, 0] -= 2.0  # of some keys another one
    return [x.to(dtype) for x in (q, k, v, grad_o)]


def skip_what_is_not_served(target: Target) -> None:
    if target.backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if target.device != "cpu" and target.gpu_dtype.itemsize == 4:
        pytest.skip("float32 is not summed as integers on GPUs")


def dtype_of(target: Target, dtype):
    return torch.float32 if target.device == "cpu" and dtype is torch.float16 else dtype


def united(target: Target, k, v):
    """As the ranks make it: bounds of parts, and the mean of keys that lie on several of them."""
    full = (-1, -1)
    lengths = [b - a for a, b in itertools.pairwise(CUTS)]
    parts = key_statistics(k, v, call_of(target, lengths, lengths, full))
    places = torch.tensor(sample_places(KEYS, k.shape[-1]), device=k.device)
    count = [len(places)]
    samples = k[places]
    whole = key_statistics(samples, samples, call_of(target, count, count, full))
    whole[:, :, :2] = parts[:, :, :2].amax(0)
    whole[:, :, 2:6] = parts[:, :, 2:6].sum(0)
    return whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_parts_have_the_bits_of_the_whole(target: Target, dims, case, dtype):
    skip_what_is_not_served(target)
    if target.device == "cpu" and (target.backend == "reference" or max(dims) > 64):
        pytest.skip("a CPU has no unit of dQ: some cases show that it takes what is given")
    dtype = dtype_of(target, dtype)
    q, k, v, grad_o = tensors(target, dims, dtype, case)
    causal = (-1, 0)
    call = call_of(target, [KEYS], [KEYS], causal)
    o, lse, o_low, _ = run_forward(q, k, v, call, False, True, None, True)
    saved = o_low if o_low is not None and o_low.shape[0] else None
    grad_q = run_backward(grad_o, None, q, k, v, o, saved, lse, call, True)[0]
    statistics = united(target, k, v)
    assert torch.equal(statistics, key_statistics(k, v, call_of(target, [KEYS], [KEYS], (-1, -1))))
    others_differ = False
    for a, b in itertools.pairwise(CUTS):
        part_call = call_of(target, [b - a], [b], causal)
        operands = (
            *(grad_o[a:b], None, q[a:b], k[:b], v[:b], o[a:b]),
            *(None if saved is None else saved[a:b], lse[:, a:b].contiguous(), part_call, True),
        )
        part = run_backward(*operands, key_statistics=statistics)
        assert torch.equal(part[0], grad_q[a:b]), f"rows {a} to {b}"
        own = run_backward(*operands)
        others_differ |= not torch.equal(own[0], grad_q[a:b])
        for given, alone in zip(part[1:], own[1:], strict=True):
            assert torch.equal(given, alone)  # dK and dV have no unit
    if case == "last key loud" and target.device != "cpu":
        assert others_differ  # what is given matters


def test_statistics_of_every_sequence(target: Target):
    """Maxima, counts and sums of exponents, by the textbook."""
    skip_what_is_not_served(target)
    dtype = dtype_of(target, torch.bfloat16)
    _, k, v, _ = tensors(target, (64, 96), dtype, "plain")
    k[5] = 0.0
    lengths = [7, 0, 300, KEYS - 307]
    found = key_statistics(k, v, call_of(target, lengths, lengths, (-1, -1))).cpu()
    assert found.shape == (4, HEADS_K, 8 + 64)
    first = 0
    for i, length in enumerate(lengths):
        some_k, some_v = (x[first : first + length].double().cpu() for x in (k, v))
        first += length
        largest, norm = some_k.abs().amax(-1), some_v.norm(dim=-1)
        maxima = found[i, :, :2].view(torch.float32).double()
        zero = torch.zeros(1, HEADS_K, dtype=torch.float64)
        torch.testing.assert_close(maxima[:, 0], torch.cat((largest, zero)).amax(0))
        torch.testing.assert_close(maxima[:, 1], torch.cat((norm, zero)).amax(0))
        for column, numbers in ((2, largest), (3, norm)):
            assert torch.equal(found[i, :, column], (numbers != 0).sum(0).int())
            exponents = torch.where(numbers != 0, numbers, 1.0).log2().floor().sum(0)
            assert torch.equal(found[i, :, column + 2], exponents.int())
        assert not found[i, :, 6].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.float(), "key_statistics has dtype float32; it must be int32"),
        (lambda x: x[..., :-1].contiguous(), "key_statistics has shape"),
        (lambda x: x.transpose(0, 1), "key_statistics has shape"),
        (lambda x: x.expand(2, -1, -1)[:1].mT.contiguous().mT, "it must be contiguous"),
    ],
)
def test_refuses(change, message):
    target = Target("cpu", "cpu")
    q, k, v, grad_o = tensors(target, (16, 16), torch.float32, "plain")
    call = call_of(target, [KEYS], [KEYS], (-1, -1))
    o, lse, _, _ = run_forward(q, k, v, call, False, True, None, False)
    statistics = change(key_statistics(k, v, call))
    with pytest.raises((TypeError, ValueError), match=message):
        run_backward(*(grad_o, None, q, k, v, o, None, lse, call, True), key_statistics=statistics)


def test_needs_deterministic():
    target = Target("cpu", "cpu")
    q, k, v, grad_o = tensors(target, (16, 16), torch.float32, "plain")
    call = call_of(target, [KEYS], [KEYS], (-1, -1))
    o, lse, _, _ = run_forward(q, k, v, call, False, True, None, False)
    with pytest.raises(ValueError, match="must be own unless deterministic is true"):
        run_backward(
            *(grad_o, None, q, k, v, o, None, lse, call, False),
            key_statistics=key_statistics(k, v, call),
        )
