"""Options(num_splits=...): keys in parts that are attended to apart and merged. Compared with the
textbook in float64, with the bound of every other call, and with the same call in one part."""

from __future__ import annotations

import dataclasses

import pantile
import pytest
import torch
from pantile import reference
from support import bits

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 0)},
    "both": {"window": (90, 15)},
}
GPU = {"hopper", "ampere"}


def options(target, num_splits, **more):
    return pantile.Options(backend=target.backend, num_splits=num_splits, **more)


def served(target, *arguments, **keywords):
    """Skips what a GPU backend has no kernel for, here: masks of other rows, other machines."""
    plan = pantile.explain(*arguments, **keywords).forward
    if plan.kernel is None:
        assert target.backend in GPU, plan.reason
        pytest.skip(f"{target.backend}: {plan.reason}")
    return plan


def tensors(target, rows, keys, batch=1, heads=4, heads_k=2, head_dim=64, dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or target.default_dtype
    shapes = [(batch, rows, heads, head_dim), *[(batch, keys, heads_k, head_dim)] * 2]
    return [torch.randn(s, generator=generator).to(target.device, dtype) for s in shapes]


def compare(results, q, k, v, dtype, **arguments):
    exact = reference.attention(q, k, v, **arguments, dtype=torch.float64)
    near = reference.attention(q, k, v, **arguments, dtype=None)
    dead = torch.isneginf(exact[1])
    for name, result, true, rounded in zip(("o", "lse"), results, exact, near, strict=True):
        kind = torch.float32 if name == "lse" else dtype
        assert not result.isnan().any()
        error = reference.error(result, true)
        bound = reference.bound(rounded, true, kind, 1.0)
        assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"
    assert torch.equal(torch.isneginf(results[1]), dead)
    assert not results[0].transpose(1, 2)[dead].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_splits", [2, 5, 64])
@pytest.mark.parametrize("shape", [(70, 1111), (1, 700), (130, 60)], ids=str)
def test_against_the_textbook(target, mask, num_splits, shape):
    q, k, v = tensors(target, *shape, batch=2)
    if mask == "window" and target.backend == "reference":
        pytest.skip("the reference is slow, and has one way for all windows")
    chosen = options(target, num_splits)
    served(target, q, k, v, **MASKS[mask], options=chosen)
    results = pantile.attention(q, k, v, **MASKS[mask], return_lse=True, options=chosen)
    compare(results, q, k, v, q.dtype, **MASKS[mask])
    again = pantile.attention(q, k, v, **MASKS[mask], return_lse=True, options=chosen)
    for first, second in zip(results, again, strict=True):
        assert torch.equal(bits(first), bits(second))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("output_dtype", [None, "float32"])
def test_types_and_head_dims(target, head_dim, name, output_dtype):
    if target.backend == "reference" and head_dim != 64:
        pytest.skip("the reference is slow, and has one way for all head dims")
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[name]
    q, k, v = tensors(target, 80, 900, head_dim=head_dim, dtype=dtype)
    chosen = options(target, 4, output_dtype=output_dtype)
    served(target, q, k, v, causal=True, options=chosen)
    results = pantile.attention(q, k, v, causal=True, return_lse=True, options=chosen)
    assert results[0].dtype == (torch.float32 if output_dtype else dtype)
    compare(results, q, k, v, dtype, causal=True)


def test_one_part_has_the_bits_of_no_option(target):
    q, k, v = tensors(target, 90, 600)
    for mask in MASKS.values():
        plain = pantile.Options(backend=target.backend)
        served(target, q, k, v, **mask, options=plain)
        expected = pantile.attention(q, k, v, **mask, return_lse=True, options=plain)
        found = pantile.attention(q, k, v, **mask, return_lse=True, options=options(target, 1))
        for first, second in zip(expected, found, strict=True):
            assert torch.equal(bits(first), bits(second))


def _ints(values, target):
    return torch.tensor(values, device=target.device, dtype=torch.int32)


def _lengths(lengths, target):
    return _ints([sum(lengths[:n]) for n in range(len(lengths) + 1)], target)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(target, mask, used):
    """With sequences that have no queries, no keys, neither, or more queries than keys."""
    rows, keys = [70, 0, 33, 1, 40, 0, 90], [500, 40, 0, 333, 20, 0, 200]
    generator = torch.Generator().manual_seed(1)
    dtype = target.default_dtype
    q = torch.randn(sum(rows), 4, 64, generator=generator).to(target.device, dtype)
    k, v = (
        torch.randn(sum(keys), 2, 64, generator=generator).to(target.device, dtype)
        for _ in range(2)
    )
    lengths = (_lengths(rows, target), _lengths(keys, target), max(rows), max(keys))
    arguments = dict(MASKS[mask])
    if used:
        arguments["seqused_q"] = torch.tensor([50, 0, 33, 1, 0, 0, 90]).to(
            target.device, torch.int32
        )
        arguments["seqused_k"] = torch.tensor([480, 40, 0, 1, 20, 0, 0]).to(
            target.device, torch.int32
        )
    chosen = options(target, 3)
    served(target, q, k, v, *lengths, **arguments, options=chosen)
    whole = pantile.varlen_attention(
        *(q, k, v, *lengths), **arguments, return_lse=True, options=options(target, 1)
    )
    if used:  # what no key uses must not be read
        for b, count in enumerate(arguments["seqused_k"].tolist()):
            begin, end = sum(keys[:b]) + count, sum(keys[: b + 1])
            k[begin:end] = float("nan")
            v[begin:end] = float("nan")
    found = pantile.varlen_attention(
        *(q, k, v, *lengths), **arguments, return_lse=True, options=chosen
    )
    dead = torch.isneginf(whole[1])
    assert torch.equal(torch.isneginf(found[1]), dead)
    assert not found[0].transpose(0, 1)[dead].any()
    unit = torch.finfo(dtype).eps
    assert not found[0].isnan().any()
    assert (found[0].float() - whole[0].float()).abs().max() <= 4 * unit + 1e-5
    assert (found[1] - whole[1])[~dead].abs().max() <= 1e-3


def test_ranges_and_shifts(target):
    q, k, v = (x[0] for x in tensors(target, 100, 400))
    place = {
        "k_begin": _ints([30, 0], target),
        "seqused_k": _ints([350, 90], target),
    }
    lengths = (_lengths([60, 40], target), None, 60, 350)
    for more in ({}, {"mask_shift": _ints([100, 10], target)}):
        arguments = {**place, **more, "causal": True, "return_lse": True}
        served(
            target,
            *(q, k, v, *lengths),
            **{key: x for key, x in arguments.items() if key != "return_lse"},
            options=options(target, 4),
        )
        whole = pantile.varlen_attention(
            *(q, k, v, *lengths), **arguments, options=options(target, 1)
        )
        cut = pantile.varlen_attention(
            *(q, k, v, *lengths), **arguments, options=options(target, 4)
        )
        unit = torch.finfo(q.dtype).eps
        assert (cut[0].float() - whole[0].float()).abs().max() <= 4 * unit + 1e-5
        assert torch.equal(torch.isneginf(cut[1]), torch.isneginf(whole[1]))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sinks_softcap_and_the_largest_logit(target, mask):
    q, k, v = tensors(target, 70, 60 if mask == "causal" else 500)  # rows without keys, too
    sinks = torch.tensor([0.5, -2.0, 3.0, -float("inf")], device=target.device)
    for extra in ({"sinks": sinks}, {"softcap": 3.0}, {"sinks": sinks, "softcap": 3.0}):
        arguments = {**MASKS[mask], **extra}
        served(target, q, k, v, **arguments, options=options(target, 4))
        results = [
            pantile.attention(
                *(q, k, v),
                **arguments,
                return_lse=True,
                return_max_logit=True,
                options=options(target, n),
            )
            for n in (1, 4)
        ]
        unit = torch.finfo(q.dtype).eps
        whole, cut = results
        assert (whole[0].float() - cut[0].float()).abs().max() <= 4 * unit + 1e-5
        alive = ~torch.isneginf(whole[1])
        assert torch.equal(alive, ~torch.isneginf(cut[1]))
        assert (whole[1] - cut[1])[alive].abs().max() <= 1e-3
        assert (whole[2] - cut[2]).abs().max() <= 1e-3


def test_nan_stays_where_it_is_seen(target):
    q, k, v = tensors(target, 66, 640)
    served(target, q, k, v, causal=True, options=options(target, 4))
    clean = pantile.attention(q, k, v, causal=True, return_lse=True, options=options(target, 4))
    # Keys that only the last rows see: the tail's. A value in one column, a key in all.
    v[0, -3, 0, 5] = float("nan")
    found = pantile.attention(q, k, v, causal=True, return_lse=True, options=options(target, 4))
    touched = torch.zeros_like(clean[0], dtype=torch.bool)
    touched[0, -3:, :2, 5] = True
    assert torch.equal(found[0].isnan(), touched)
    assert torch.equal(found[0][~touched], clean[0][~touched])
    assert torch.equal(bits(found[1]), bits(clean[1]))
    # A key of the prefix, which all rows see.
    k[0, 100, 1] = float("nan")
    found = pantile.attention(q, k, v, causal=True, return_lse=True, options=options(target, 4))
    assert found[0][:, :, 2:].isnan().all()
    assert found[1][:, 2:].isnan().all()
    assert torch.equal(found[0].isnan()[:, :, :2], touched[:, :, :2])


def test_any_strides_of_the_output(target):
    q, k, v = tensors(target, 40, 300)
    whole = pantile.attention(q, k, v, options=options(target, 4))
    served(target, q, k, v, options=options(target, 4))
    for out in (
        torch.full((1, 4, 40, 64), 7.0).to(q).transpose(1, 2),
        torch.full((1, 40, 4, 80), 7.0).to(q)[..., :64],
    ):
        result = pantile.attention(q, k, v, out=out, options=options(target, 4))
        assert result.data_ptr() == out.data_ptr()
        assert torch.equal(out, whole)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_gradients(target, mask, name):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[name]
    operands = tensors(target, 64, 500, dtype=dtype)
    served(target, *operands, **MASKS[mask], options=options(target, 5))
    gradients, exact = [], [x.double().requires_grad_() for x in operands]
    generator = torch.Generator().manual_seed(3)
    grad_o = torch.randn(operands[0].shape, generator=generator).to(operands[0])
    for n in (1, 5):
        leaves = [x.clone().requires_grad_() for x in operands]
        o = pantile.attention(*leaves, **MASKS[mask], options=options(target, n))
        o.backward(grad_o)
        gradients.append([x.grad for x in leaves])
    reference.attention(*exact, **MASKS[mask])[0].backward(grad_o.double())
    for whole, cut, true in zip(*gradients, (x.grad for x in exact), strict=True):
        scale = true.abs().max()
        errors = [((x.double() - true).abs().max() / scale).item() for x in (whole, cut)]
        assert errors[1] <= 1.5 * errors[0] + 4e-6, errors


def test_low_bits_are_those_of_the_merged_output(target):
    """What the backward gets beside a rounded O: 8 more bits of it."""
    from pantile._schema import Call

    q, k, v = tensors(target, 60, 500, dtype=torch.bfloat16)
    served(target, q, k, v, options=options(target, 4))
    fields = options(target, 4).call_fields[1]
    call = Call()._replace(**dict(zip(Call._fields[-len(fields) :], fields, strict=True)))
    o, _, low = torch.ops.pantile.forward(q, k, v, *call, False, False, True)
    full = pantile.attention(q, k, v, options=options(target, 4, output_dtype="float32"))
    near = o.float()
    steps = low.reshape(o.shape).int() << 8
    whole = (near.view(torch.int32) + steps).view(torch.float32)
    assert torch.equal(o, full.bfloat16())
    assert ((whole - full).abs() <= full.abs() * 2**-14).all()
    assert (near - full).abs().max() > 16 * (whole - full).abs().max()


def test_compiled_vmapped_and_autocast(target):
    q, k, v = tensors(target, 33, 400)
    chosen = options(target, 3)
    served(target, q, k, v, causal=True, options=chosen)
    expected = pantile.attention(q, k, v, causal=True, options=chosen)

    def attend(q, k, v):
        return pantile.attention(q, k, v, causal=True, options=chosen)

    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(found, expected)
    stacked = [torch.stack([x, x]) for x in (q, k, v)]
    mapped = torch.vmap(attend)(*stacked)
    assert torch.equal(mapped[1], expected)
    with torch.autocast(target.device, torch.bfloat16):
        assert attend(*(x.float() for x in (q, k, v))).dtype == torch.bfloat16


def test_explain_names_the_parts(target):
    q, k, v = tensors(target, 64, 3000)
    plan = served(target, q, k, v, causal=True, options=options(target, 6))
    text = "\n".join(plan.lines("forward"))
    assert "splits of the keys: 6, at multiples of" in text
    assert "of them 5 before the diagonal" in text
    assert pantile.explain(q, k, v, options=options(target, 1)).forward.splits == ""
    full = pantile.explain(q, k, v, options=options(target, 6)).forward
    assert full.splits.startswith("6, ")
    assert full.splits.endswith("as asked for")


@pytest.mark.parametrize("value", [0, -1, 257, 1.0, "4", None, True])
def test_wrong_numbers(value):
    with pytest.raises((TypeError, ValueError), match=r"num_splits is .*; it must be"):
        pantile.Options(num_splits=value)


def test_options_of_fp8():
    with pytest.raises(ValueError, match="num_splits is 4; FP8 attention has no parts"):
        pantile.Options(fp8=True, num_splits=4)
    assert pantile.Options(fp8=True, num_splits="auto").num_splits == "auto"
    again = pantile.Options(**dataclasses.asdict(pantile.Options(num_splits=7)))
    assert again == pantile.Options(num_splits=7)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"alibi": torch.ones(4)}, "ALiBi"),
        ({"bias": torch.zeros(1, 1, 20, 300)}, "a bias"),
        ({"dropout": pantile.Dropout(0.1, seed=1)}, "dropout"),
        ({"mask": pantile.Prefix(torch.tensor([3], dtype=torch.int32))}, "a prefix mask"),
        ({"mask": torch.ones(20, 300, dtype=torch.bool)}, "a mask of elements"),
        ({"score": pantile.Score("s * 0.5")}, "a score expression"),
        ({"mask": pantile.Mask("j < 100")}, "a mask expression"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_by_name(arguments, name):
    q, k, v = torch.randn(1, 20, 4, 32), torch.randn(1, 300, 4, 32), torch.randn(1, 300, 4, 32)
    with pytest.raises(pantile.UnsupportedError, match=f"num_splits is 3; .*{name}"):
        pantile.attention(q, k, v, **arguments, options=pantile.Options(num_splits=3))
    # Left to the plan the keys stay whole.
    whole = pantile.attention(q, k, v, **arguments)
    found = pantile.attention(q, k, v, **arguments, options=pantile.Options(num_splits="auto"))
    assert torch.equal(whole, found)


def test_pages_are_refused_by_name():
    k = torch.randn(8, 16, 2, 32)
    table = torch.arange(8, dtype=torch.int32).reshape(1, 8)
    lengths = torch.tensor([0, 20], dtype=torch.int32), None, 20, 128
    with pytest.raises(pantile.UnsupportedError, match="keys in pages"):
        pantile.varlen_attention(
            *(torch.randn(20, 2, 32), k, k, *lengths),
            seqused_k=torch.tensor([120], dtype=torch.int32),
            block_table=table,
            options=pantile.Options(num_splits=2),
        )


def test_the_model_cuts_on_a_cpu_of_many_cores():
    """Few heads and few rows: fewer items than threads."""
    before = torch.get_num_threads()
    q, k, v = torch.randn(1, 48, 1, 64), torch.randn(1, 60000, 1, 64), torch.randn(1, 60000, 1, 64)
    chosen = pantile.Options(backend="cpu", num_splits="auto")
    try:
        torch.set_num_threads(32)
        plan = pantile.explain(q, k, v, options=chosen).forward
        assert 8 <= int(plan.splits.split(",")[0]) <= 64
        assert plan.splits.endswith("chosen by the model of the time")
        torch.set_num_threads(1)
        assert pantile.explain(q, k, v, options=chosen).forward.splits == ""
    finally:
        torch.set_num_threads(before)


def test_torch_has_no_parts():
    q = torch.randn(1, 8, 2, 32)
    with pytest.raises(pantile.UnsupportedError, match="num_splits is 2"):
        pantile.attention(q, q, q, options=pantile.Options(backend="torch", num_splits=2))


def test_plain_numpy_arrays():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 20, 2, 32), (1, 300, 2, 32), (1, 300, 2, 32)]
    operands = [torch.randn(shape, generator=generator).numpy() for shape in shapes]
    whole = pantile.attention(*operands)
    cut = pantile.attention(*operands, options=pantile.Options(num_splits=4))
    assert abs(whole - cut).max() < 1e-5
