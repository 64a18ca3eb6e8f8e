"""Keys that do not lie one sequence after the other: ranges of rows, a shift of the mask for each
sequence, pages. Compared with the textbook in float64 over gathered keys."""

from __future__ import annotations

import itertools

import numpy as np
import pantile
import pytest
import torch
from pantile import reference
from support import Target, bits

POISON = float("nan")


def default_dtype(target: Target) -> torch.dtype:
    return torch.float32 if target.device == "cpu" else torch.bfloat16


def ints(values, target: Target) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=target.device)


def offsets(lengths, target: Target) -> torch.Tensor:
    return ints([0, *np.cumsum(lengths).tolist()], target)


def require(target: Target, *arguments, **keywords) -> None:
    if target.backend == "reference" and not keywords.get("causal"):
        pytest.skip("the reference is slow, and has one way for all masks")
    plan = pantile.explain(*arguments, **keywords, options=target.options).forward
    if plan.kernel is None:
        assert target.device != "cpu", plan.reason
        pytest.skip(f"{target.backend}: {plan.reason}")


def bound_mask(rows, keys, shift, causal, window, device):
    """Bool [rows, keys]."""
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    position = torch.arange(rows, device=device)[:, None] + (
        keys - rows if shift is None else shift
    )
    key = torch.arange(keys, device=device)[None]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        mask &= key >= position - left
    if right is not None:
        mask &= key <= position + right
    return mask


def textbook(q, keys_of, lengths_q, shifts, dtype, causal=False, window=None, **arguments):
    """(o, lse) packed; ``keys_of(b)``: (k, v) of sequence b, gathered."""
    outputs, sums, start = [], [], 0
    for b, rows in enumerate(lengths_q):
        k, v = keys_of(b)
        shift = None if shifts is None else shifts[b]
        mask = bound_mask(rows, len(k), shift, causal, window, q.device)
        o, lse = reference.attention(
            *(x[None] for x in (q[start : start + rows], k, v)), mask=mask, **arguments, dtype=dtype
        )
        outputs.append(o[0])
        sums.append(lse[0])
        start += rows
    return torch.cat(outputs), torch.cat(sums, 1)


def check(results, exact, rounded, dtype):
    """Twice the textbook's error in the same dtype, and exact zeros where nothing is seen."""
    for name, result, true, near in zip(("o", "lse"), results, exact, rounded, strict=True):
        kind = torch.float32 if name == "lse" else dtype
        assert result.shape == true.shape
        assert not result.isnan().any()
        error = reference.error(result, true)
        bound = reference.bound(near, true, kind, 1.0)
        assert error <= bound, f"{name}: error {error:.3e} above bound {bound:.3e}"
    dead = torch.isneginf(exact[1])
    assert torch.equal(torch.isneginf(results[1]), dead)
    assert not results[0][dead.transpose(0, 1)].any()


def operands(target, rows, keys, head_dim=64, heads=4, heads_k=2, seed=0, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, head_dim), (keys, heads_k, head_dim), (keys, heads_k, head_dim)]
    dtype = dtype or default_dtype(target)
    return [torch.randn(s, generator=generator).to(target.device, dtype) for s in shapes]


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (30, 5)},
    "left": {"window": (17, None)},
}

# Sequences: rows, first key, keys, shift. Ranges overlap, repeat, leave rows out and go backwards;
# shifts lie before, within and behind the keys.
RANGES = [(70, 100, 190, 40), (0, 0, 50, 0), (133, 40, 260, 0), (9, 20, 0, 3), (40, 5, 33, -20)]
RANGES += [(64, 100, 190, 126), (50, 250, 50, 300), (33, 0, 300, 150)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ranges(target, mask, shifted, head_dim):
    if target.backend == "reference" and head_dim != 64:
        pytest.skip("the reference is slow, and has one way for all head dims")
    rows, begins, lengths, shifts = map(list, zip(*RANGES, strict=True))
    q, k, v = operands(target, sum(rows), 300, head_dim)
    arguments = dict(MASKS[mask])
    places = {"k_begin": ints(begins, target), "seqused_k": ints(lengths, target)}
    if shifted:
        places["mask_shift"] = ints(shifts, target)
    lengths_of = (offsets(rows, target), None, max(rows), max(lengths))
    require(target, q, k, v, *lengths_of, **places, **arguments)
    results = pantile.varlen_attention(
        *(q, k, v, *lengths_of), **places, **arguments, return_lse=True, options=target.options
    )

    def keys_of(b):
        at = slice(begins[b], begins[b] + lengths[b])
        return k[at], v[at]

    exact, rounded = (
        textbook(q, keys_of, rows, shifts if shifted else None, dtype, **arguments)
        for dtype in (torch.float64, q.dtype)
    )
    check(results, exact, rounded, q.dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_shift_of_sequences_that_follow_each_other(target, mask):
    """With cu_seqlens_k; and the shift of the bottom right gives the bits of no shift."""
    rows, lengths, shifts = [70, 1, 133, 9], [90, 40, 66, 0], [3, 39, -20, 5]
    q, k, v = operands(target, sum(rows), sum(lengths))
    bounds = (offsets(rows, target), offsets(lengths, target), max(rows), max(lengths))
    shift = ints(shifts, target)
    require(target, q, k, v, *bounds, mask_shift=shift, **MASKS[mask])
    options = target.exact_options()
    keywords = {**MASKS[mask], "return_lse": True, "options": options}
    results = pantile.varlen_attention(q, k, v, *bounds, mask_shift=shift, **keywords)
    starts = [0, *np.cumsum(lengths).tolist()]

    def keys_of(b):
        at = slice(starts[b], starts[b + 1])
        return k[at], v[at]

    exact, rounded = (
        textbook(q, keys_of, rows, shifts, dtype, **MASKS[mask]) for dtype in (None, q.dtype)
    )
    exact = textbook(q, keys_of, rows, shifts, torch.float64, **MASKS[mask])
    check(results, exact, rounded, q.dtype)
    corner = ints([b - a for a, b in zip(rows, lengths, strict=True)], target)
    plain = pantile.varlen_attention(q, k, v, *bounds, **keywords)
    same = pantile.varlen_attention(q, k, v, *bounds, mask_shift=corner, **keywords)
    if target.device == "cpu":
        assert torch.equal(bits(plain[0]), bits(same[0]))
    torch.testing.assert_close(plain[0], same[0], rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(plain[1], same[1], rtol=1e-5, atol=1e-5)


def test_values_outside_the_ranges_do_not_matter(target):
    q, k, v = operands(target, 100, 400)
    lengths_of = (offsets([60, 40], target), None, 60, 150)
    places = {"k_begin": ints([37, 200], target), "seqused_k": ints([150, 77], target)}
    require(target, q, k, v, *lengths_of, **places, causal=True)
    keywords = {**places, "causal": True, "options": target.options}
    expected = pantile.varlen_attention(q, k, v, *lengths_of, **keywords)
    used = torch.zeros(400, dtype=torch.bool)
    used[37:187] = used[200:277] = True
    for x in (k, v):
        x[~used.to(x.device)] = POISON
    assert torch.equal(
        bits(pantile.varlen_attention(q, k, v, *lengths_of, **keywords)), bits(expected)
    )


def test_nonfinite_values_within_a_range(target):
    """A key that some queries see and others do not."""
    q, k, v = operands(target, 200, 400)
    lengths_of = (offsets([200], target), None, 200, 300)
    places = {"k_begin": ints([50], target), "seqused_k": ints([300], target)}
    places["mask_shift"] = ints([20], target)
    require(target, q, k, v, *lengths_of, **places, causal=True)
    v[50 + 90, 0] = float("inf")
    o = pantile.varlen_attention(
        *(q, k, v, *lengths_of), **places, causal=True, options=target.options
    )
    assert o[:70].isfinite().all()  # query i sees keys up to i + 20
    assert o[70:, :2].isinf().all()
    assert o[70:, 2:].isfinite().all()


# ---- gradients


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_ranges(target, mask, shifted):
    """Rows of k and v that several sequences see sum their gradients; others have none."""
    cases = [case for case in RANGES if case[0] < 100]
    rows, begins, lengths, shifts = map(list, zip(*cases, strict=True))
    tensors = operands(target, sum(rows), 320)
    places = {"k_begin": ints(begins, target), "seqused_k": ints(lengths, target)}
    if shifted:
        places["mask_shift"] = ints(shifts, target)
    bounds = (offsets(rows, target), None, max(rows), max(lengths))
    if target.backend == "reference" and mask != "causal":
        pytest.skip("the reference is slow, and has one way for all masks")
    plan = pantile.explain(*tensors, *bounds, **places, **MASKS[mask], options=target.options)
    if plan.backward.kernel is None:
        assert target.device != "cpu"
        pytest.skip(plan.backward.reason)
    grad_o, grad_lse = torch.randn_like(tensors[0]), torch.randn(4, sum(rows), device=target.device)

    def gradients(function):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        o, lse = function(*leaves)
        lse = lse.masked_fill(torch.isneginf(lse), 0.0)
        return torch.autograd.grad((o, lse), leaves, (grad_o.to(o.dtype), grad_lse.to(lse.dtype)))

    def of_textbook(dtype):
        def function(q, k, v):
            def keys_of(b):
                at = slice(begins[b], begins[b] + lengths[b])
                return k[at], v[at]

            return textbook(q, keys_of, rows, shifts if shifted else None, dtype, **MASKS[mask])

        return gradients(function)

    found = gradients(
        lambda q, k, v: pantile.varlen_attention(
            *(q, k, v, *bounds), **places, **MASKS[mask], return_lse=True, options=target.options
        )
    )
    for name, grad, exact in zip("qkv", found, of_textbook(torch.float64), strict=True):
        assert not grad.isnan().any(), name
        torch.testing.assert_close(
            grad.double(), exact.double(), rtol=1e-4, atol=1e-5 * float(exact.abs().max()), msg=name
        )
    assert not found[1][300:].any()
    assert not found[2][300:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_shared_keys_are_rounded_once(dtype):
    """Two sequences with the same keys: dK is the rounded sum, not a sum of rounded parts."""
    target = Target("cpu", "cpu")
    q, k, v = operands(target, 128, 64, dtype=dtype)
    grad_o = torch.randn_like(q)
    bounds = (offsets([64, 64], target), None, 64, 64)
    places = {"k_begin": ints([0, 0], target), "seqused_k": ints([64, 64], target)}
    found = {}
    for name in ("cpu", "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        o = pantile.varlen_attention(
            *leaves, *bounds, **places, options=pantile.Options(backend=name)
        )
        found[name] = torch.autograd.grad(o, leaves, grad_o)
    for ours, right in zip(found["cpu"], found["reference"], strict=True):
        torch.testing.assert_close(
            ours.float(), right.float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-2
        )
    again = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = pantile.varlen_attention(*again, *bounds, **places, options=target.options)
    for first, second in zip(found["cpu"], torch.autograd.grad(o, again, grad_o), strict=True):
        assert torch.equal(bits(first), bits(second))


# ---- pages


def paged(target, lengths, page_size, head_dim=64, heads_k=2, dtype=None, seed=0, layout="NHD"):
    """(k pages, v pages, block_table, [(k, v) of each sequence]): shuffled pages, every slot and
    every page that is not used poisoned, entries behind the last page out of range."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=generator)
    width = max([*counts, 1]) + 2
    table = torch.full((len(lengths), width + 3), 2**30, dtype=torch.int32)
    shape = (total, page_size, heads_k, head_dim)
    if layout == "HND":
        shape = (total, heads_k, page_size, head_dim)
    dtype = dtype or default_dtype(target)
    caches = [torch.full(shape, POISON, dtype=dtype) for _ in range(2)]
    views = [x.transpose(1, 2) if layout == "HND" else x for x in caches]
    sequences, next_page = [], 0
    for b, n in enumerate(lengths):
        pair = [torch.randn(n, heads_k, head_dim, generator=generator).to(dtype) for _ in range(2)]
        sequences.append([x.to(target.device) for x in pair])
        for i in range(counts[b]):
            page = int(order[next_page])
            next_page += 1
            table[b, i] = page
            part = slice(i * page_size, min((i + 1) * page_size, n))
            for view, x in zip(views, pair, strict=True):
                view[page, : part.stop - part.start] = x[part]
    caches = [x.to(target.device) for x in caches]
    views = [x.transpose(1, 2) if layout == "HND" else x for x in caches]
    return *views, table.to(target.device)[:, :width], sequences


PAGES = {"cpu": [1, 5, 16, 256], "cuda": [1, 16, 48, 64, 256, 400]}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("which", range(6))
def test_pages(target, which, mask, layout):
    sizes = PAGES[target.device]
    if which >= len(sizes):
        pytest.skip("fewer page sizes on the CPU")
    rows, lengths = [70, 1, 133, 9, 0, 200], [90, 400, 257, 0, 50, 193]
    k, v, table, sequences = paged(target, lengths, sizes[which], layout=layout)
    q = operands(target, sum(rows), 1)[0]
    used = ints(lengths, target)
    bounds = (offsets(rows, target), None, max(rows), max(lengths))
    places = {"seqused_k": used, "block_table": table}
    require(target, q, k, v, *bounds, **places, **MASKS[mask])
    results = pantile.varlen_attention(
        *(q, k, v, *bounds), **places, **MASKS[mask], return_lse=True, options=target.options
    )
    exact, rounded = (
        textbook(q, lambda b: sequences[b], rows, None, dtype, **MASKS[mask])
        for dtype in (torch.float64, q.dtype)
    )
    check(results, exact, rounded, q.dtype)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 192, 256])
def test_pages_of_head_dims(target, head_dim):
    rows, lengths = [130, 40], [513, 100]
    k, v, table, sequences = paged(target, lengths, 32, head_dim)
    q = operands(target, sum(rows), 1, head_dim)[0]
    bounds = (offsets(rows, target), None, max(rows), max(lengths))
    places = {"seqused_k": ints(lengths, target), "block_table": table}
    require(target, q, k, v, *bounds, **places, causal=True)
    results = pantile.varlen_attention(
        *(q, k, v, *bounds), **places, causal=True, return_lse=True, options=target.options
    )
    exact, rounded = (
        textbook(q, lambda b: sequences[b], rows, None, dtype, causal=True)
        for dtype in (torch.float64, q.dtype)
    )
    check(results, exact, rounded, q.dtype)


def test_chunked_prefill_has_the_bits_of_the_whole(target):
    """Queries in chunks, each against the pages written so far: the bits of one call over all."""
    length, chunk = 300, 64
    k, v, table, sequences = paged(target, [length], 16)
    q = operands(target, length, 1)[0]
    options = target.exact_options()
    places = {"seqused_k": ints([length], target), "block_table": table}
    bounds = (offsets([length], target), None, length, length)
    require(target, q, k, v, *bounds, **places, causal=True)
    whole = pantile.varlen_attention(q, k, v, *bounds, **places, causal=True, options=options)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        part = pantile.varlen_attention(
            *(q[start:end], k, v, offsets([end - start], target), None, end - start, length),
            seqused_k=ints([end], target),
            block_table=table,
            causal=True,
            options=options,
        )
        torch.testing.assert_close(part, whole[start:end], rtol=2**-6, atol=2**-7)
    exact = textbook(q, lambda b: sequences[b], [length], None, torch.float64, causal=True)[0]
    torch.testing.assert_close(whole.double(), exact, rtol=2**-5, atol=2**-6)


def test_pages_with_shift_and_nonfinite_values(target):
    """A page that some queries see and others do not, with a shift of the mask."""
    k, v, table, _ = paged(target, [300], 16)
    q = operands(target, 200, 1)[0]
    places = {"seqused_k": ints([300], target), "block_table": table}
    places["mask_shift"] = ints([20], target)
    bounds = (offsets([200], target), None, 200, 300)
    require(target, q, k, v, *bounds, **places, causal=True)
    v[int(table[0, 90 // 16]), 90 % 16, 0] = float("inf")
    o = pantile.varlen_attention(q, k, v, *bounds, **places, causal=True, options=target.options)
    assert o[:70].isfinite().all()
    assert o[70:, :2].isinf().all()
    assert o[70:, 2:].isfinite().all()


def test_backward_of_pages_is_refused(target):
    k, v, table, _ = paged(target, [40], 16)
    q = operands(target, 40, 1)[0].requires_grad_()
    bounds = (offsets([40], target), None, 40, 40)
    places = {"seqused_k": ints([40], target), "block_table": table}
    require(target, q.detach(), k, v, *bounds, **places)
    o = pantile.varlen_attention(q, k, v, *bounds, **places, options=target.options)
    with pytest.raises(
        pantile.UnsupportedError, match=r"does not serve keys in pages \(block_table\)"
    ):
        o.sum().backward()


@pytest.mark.gpu
def test_pages_that_hopper_does_not_take_go_to_ampere():
    """Named in the explanation."""
    target = Target("auto", "cuda")
    k, v, table, sequences = paged(target, [70], 5)
    q = operands(target, 33, 1)[0]
    bounds = (offsets([33], target), None, 33, 70)
    places = {"seqused_k": ints([70], target), "block_table": table}
    plan = pantile.explain(q, k, v, *bounds, **places, causal=True)
    assert plan.forward.kernel.startswith("ampere_forward_bf16_d64")
    assert "needs page_size to be a multiple of 16, it is 5" in str(plan)
    o = pantile.varlen_attention(q, k, v, *bounds, **places, causal=True)
    exact = textbook(q, lambda b: sequences[b], [33], None, torch.float64, causal=True)[0]
    torch.testing.assert_close(o.double(), exact, rtol=2**-5, atol=2**-6)


# ---- variants, merged parts, torch's machinery


@pytest.mark.parametrize("name", ["softcap", "alibi", "sinks"])
def test_variants_over_pages_with_a_shift(target, name):
    rows, lengths, shifts = [60, 33], [200, 90], [100, 20]
    k, v, table, sequences = paged(target, lengths, 16)
    q = operands(target, sum(rows), 1)[0]
    value = {
        "softcap": 2.0,
        "alibi": torch.rand(4, device=target.device),
        "sinks": torch.randn(4, device=target.device),
    }[name]
    bounds = (offsets(rows, target), None, max(rows), max(lengths))
    places = {"seqused_k": ints(lengths, target), "block_table": table}
    places["mask_shift"] = ints(shifts, target)
    require(target, q, k, v, *bounds, **places, causal=True, **{name: value})
    o = pantile.varlen_attention(
        *(q, k, v, *bounds), **places, causal=True, options=target.options, **{name: value}
    )
    if name == "alibi":  # the textbook counts from the bottom right: as a bias instead
        parts, start = [], 0
        for b, n in enumerate(rows):
            position = torch.arange(n, device=q.device)[:, None] + shifts[b]
            distance = (position - torch.arange(lengths[b], device=q.device)).abs()
            bias = -value[:, None, None].double() * distance
            parts.append(
                textbook(
                    q[start : start + n],
                    lambda _, b=b: sequences[b],
                    [n],
                    [shifts[b]],
                    torch.float64,
                    causal=True,
                    bias=bias[None],
                )[0]
            )
            start += n
        exact = torch.cat(parts)
    else:
        exact = textbook(
            *(q, lambda b: sequences[b], rows, shifts, torch.float64), causal=True, **{name: value}
        )[0]
    torch.testing.assert_close(o.double(), exact, rtol=2**-5, atol=2**-6)


def test_parts_of_the_keys_in_one_call_merge(target):
    """Each sequence's keys cut in three: three sequences with the same queries, key ranges, shifts
    and an o in float32, in one call; merged by their LSE in a fixed order."""
    rows, keys = 100, 330
    q, k, v = operands(target, rows, keys)
    cuts = [0, 110, 200, 330]
    begins, sizes = cuts[:-1], [b - a for a, b in itertools.pairwise(cuts)]
    shifts = [keys - rows - begin for begin in begins]
    places = {
        "k_begin": ints(begins, target),
        "seqused_k": ints(sizes, target),
        "mask_shift": ints(shifts, target),
    }
    bounds = (offsets([rows] * 3, target), None, rows, max(sizes))
    options = target.exact_options(output_dtype="float32")
    thrice = q.repeat(3, 1, 1)
    require(target, thrice, k, v, *bounds, **places, causal=True)
    o, lse = pantile.varlen_attention(
        *(thrice, k, v, *bounds), **places, causal=True, return_lse=True, options=options
    )
    assert o.dtype is torch.float32
    o, lse = o.unflatten(0, (3, rows)), lse.unflatten(1, (3, rows))
    merged, merged_lse = pantile.merge_attention([(o[i], lse[:, i]) for i in range(3)])
    exact, exact_lse = textbook(q, lambda _: (k, v), [rows], None, torch.float64, causal=True)
    torch.testing.assert_close(merged.double(), exact, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(merged_lse.double(), exact_lse, rtol=1e-4, atol=1e-4)


def test_out_of_ranges_and_pages():
    target = Target("cpu", "cpu")
    k, v, table, _ = paged(target, [70], 16)
    q = operands(target, 33, 1)[0]
    arguments = (q, k, v, offsets([33], target), None, 33, 70)
    places = {"seqused_k": ints([70], target), "block_table": table}
    out = torch.empty(4, 33, 64).transpose(0, 1)
    pantile.varlen_attention(*arguments, **places, out=out)
    assert torch.equal(out, pantile.varlen_attention(*arguments, **places))


def test_traced_and_mapped_calls():
    """The operator, a graph, and the formula of FLOPs."""
    target = Target("cpu", "cpu")
    k, v, table, _ = paged(target, [70, 20], 16)
    q = operands(target, 50, 1)[0]
    bounds, used = offsets([33, 17], target), ints([70, 20], target)

    def call(q, k, v, bounds, used, table):
        return pantile.varlen_attention(
            *(q, k, v, bounds, None, 33, 70), seqused_k=used, block_table=table, causal=True
        )

    expected = call(q, k, v, bounds, used, table)
    graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(q, k, v, bounds, used, table), expected)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        call(q, k, v, bounds, used, table)
    pairs = sum(
        int(bound_mask(n, m, None, True, None, "cpu").sum()) for n, m in ((33, 70), (17, 20))
    )
    assert counter.get_total_flops() == 4 * pairs * 64 * 4
    begins, shift = ints([3, 0], target), ints([5, 1], target)
    flat = k.reshape(-1, *k.shape[2:]).nan_to_num()

    def ranged(q, k, begins, used, shift):
        return pantile.varlen_attention(
            *(q, k, k, bounds, None, 33, 70),
            seqused_k=used,
            k_begin=begins,
            mask_shift=shift,
            causal=True,
        )

    graph = torch.compile(ranged, backend="aot_eager", fullgraph=True)
    expected = ranged(q, flat, begins, used, shift)
    assert torch.equal(graph(q, flat, begins, used, shift), expected)
    grads = []
    for function in (ranged, graph):
        leaf = flat.clone().requires_grad_()
        grads.append(torch.autograd.grad(function(q, leaf, begins, used, shift).sum(), leaf)[0])
    assert torch.equal(*grads)


def test_numpy():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((33, 4, 16), dtype=np.float32)
    k = rng.standard_normal((6, 8, 2, 16), dtype=np.float32)
    table = np.array([[3, 1, 5, 0]], dtype=np.int32)
    bounds, used = np.array([0, 33], dtype=np.int32), np.array([29], dtype=np.int32)
    o = pantile.varlen_attention(
        *(q, k, k, bounds, None, 33, 32), seqused_k=used, block_table=table, causal=True
    )
    keys = k[table[0]].reshape(-1, 2, 16)[:29]
    expected = pantile.attention(q[None], keys[None], keys[None], causal=True)[0]
    assert np.allclose(o, expected, atol=1e-6)


# ---- what is refused


def refusals():
    target = Target("cpu", "cpu")
    k, v, table, _ = paged(target, [70, 20], 16)
    q = operands(target, 50, 1)[0]
    used = ints([70, 20], target)
    flat = torch.randn(100, 2, 64)
    pages = {"k": k, "v": v, "seqused_k": used, "block_table": table}
    ranges = {"k": flat, "v": flat, "seqused_k": used, "k_begin": ints([0, 5], target)}
    bad_page, behind = table.clone(), table.clone()
    bad_page[1, 1] = len(k)
    behind[:, -1] = -7  # never read
    return {
        "no lengths": ({**pages, "seqused_k": None}, ValueError, "seqused_k is None; with block_t"),
        "no range lengths": ({**ranges, "seqused_k": None}, ValueError, "seqused_k is None; with"),
        "both": ({**pages, "k_begin": used}, ValueError, "k_begin and block_table are both set"),
        "offsets": (
            {**pages, "cu_seqlens_k": offsets([70, 20], target)},
            ValueError,
            "cu_seqlens_k is set",
        ),
        "rank": ({**pages, "k": flat}, ValueError, r"k has 3 dimensions; it must have 4: \[pages"),
        "table dtype": (
            {**pages, "block_table": table.long()},
            TypeError,
            "block_table has dtype int64",
        ),
        "table rows": (
            {**pages, "block_table": table[:1]},
            ValueError,
            "block_table has 1 rows; it",
        ),
        "table rank": (
            {**pages, "block_table": table[0]},
            ValueError,
            "block_table has 1 dimensions",
        ),
        "table stride": (
            {**pages, "block_table": table.t().contiguous().t()},
            ValueError,
            "has stride 2",
        ),
        "short table": (
            {**pages, "block_table": table[:, :3]},
            ValueError,
            r"max_pages \* page_size, 3 \* 16",
        ),
        "page": (
            {**pages, "block_table": bad_page},
            ValueError,
            r"block_table\[1\]\[1\] is \d+; it must be",
        ),
        "length": (
            {**pages, "seqused_k": ints([71, 20], target)},
            ValueError,
            r"seqused_k\[0\] is 71",
        ),
        "page dims": ({**pages, "v": v[:, :8]}, ValueError, "v has page size 8; it must be 16"),
        "dim stride": (
            {**pages, "k": k.transpose(1, 3).contiguous().transpose(1, 3)},
            ValueError,
            "k has strides",
        ),
        "range": (
            {**ranges, "k_begin": ints([31, 5], target)},
            ValueError,
            r"k_begin\[0\] is 31 with 70 keys",
        ),
        "negative": (
            {**ranges, "k_begin": ints([-1, 5], target)},
            ValueError,
            r"k_begin\[0\] is -1",
        ),
        "begins": (
            {**ranges, "k_begin": ints([0], target)},
            ValueError,
            "k_begin has 1 entries; it must",
        ),
        "shift": (
            {**ranges, "mask_shift": ints([0, 2**30], target)},
            ValueError,
            r"mask_shift\[1\] is 1073741824",
        ),
        "fp8": (
            {**ranges, "options": pantile.Options(fp8=True)},
            ValueError,
            "k_begin is given; FP8",
        ),
    }, (q, behind, pages)


@pytest.mark.parametrize("name", refusals()[0])
def test_refusals(name):
    (cases, (q, _, _)) = refusals()
    given, error, message = cases[name]
    given = {"cu_seqlens_k": None, **given}
    k, v = given.pop("k"), given.pop("v")
    bounds = offsets([33, 17], Target("cpu", "cpu"))
    with pytest.raises(error, match=message):
        pantile.varlen_attention(
            q, k, v, bounds, given.pop("cu_seqlens_k"), 33, max_seqlen_k=70, **given
        )


def test_entries_behind_the_last_page_are_not_read():
    _, (q, behind, pages) = refusals()
    bounds = offsets([33, 17], Target("cpu", "cpu"))
    arguments = (q, pages["k"], pages["v"], bounds, None, 33, 70)
    places = {"seqused_k": pages["seqused_k"]}
    expected = pantile.varlen_attention(*arguments, **places, block_table=pages["block_table"])
    assert torch.equal(pantile.varlen_attention(*arguments, **places, block_table=behind), expected)


def test_attention_says_where_they_are():
    q = torch.randn(1, 4, 2, 16)
    for name in ("k_begin", "mask_shift", "block_table"):
        with pytest.raises(TypeError, match=f"no argument {name}: use varlen_attention"):
            pantile.attention(q, q, q, **{name: None})
