"""Scores and masks of the user's own (pantile.Score, pantile.Mask): against a textbook in float64
that is differentiated by autograd, and against Python's evaluation of the same text."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pantile
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import Target, dense, packed
from torch.utils.checkpoint import checkpoint

CPU = Target("cpu", "cpu")


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.detach(), expected.detach())


def lengths(target: Target, rows: int, keys: int) -> dict[str, int]:
    """Fewer on the CPU, and for the reference, which evaluates one pair at a time."""
    part = {"reference": 3, "cpu": 2}.get(target.backend, 1)
    return {"rows": rows // part, "keys": keys // part}


def tensors_of(
    device, heads: int = 4, batch: int = 2, length: int = 512, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Of as many heads, sequences, and rows or keys at most, as the indices of SCORES reach."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    found = {
        "slope": 0.1 * normal(heads),
        "gain": 1 + 0.2 * normal(batch, heads),
        "rel": normal(heads, 64),
        "table": normal(32, heads),
        "bucket": (torch.arange(256) - 128).abs().clamp(max=31).to(torch.int32),
        "row": normal(batch, length),
        "key": normal(length).to(torch.bfloat16),
        "flag": torch.rand(length, generator=generator) < 0.5,
    }
    return {name: x.to(device) for name, x in found.items()}


def sizes_of(case) -> dict[str, int]:
    """What tensors_of() needs to know of a case."""
    batch = case.lengths[0].shape[0] - 1 if case.lengths else case.q.shape[0]
    sides = case.longest or (case.q.shape[1], case.k.shape[1])
    return {"heads": case.q.shape[-2], "batch": max(batch, 2), "length": max(512, *sides)}


# By name: the text, the same in torch, the tensors, and whether GPUs have their gradients.
SCORES = {
    "softcap": ("5 * tanh(s / 5)", lambda s, b, h, i, j: 5 * torch.tanh(s / 5), ()),
    "alibi": (
        "s + slope[h] * (j - i)",
        lambda s, b, h, i, j, slope: s + slope[h] * (j - i),
        ("slope",),
    ),
    "distance": (
        "s - slope[h] * abs(i - j)",
        lambda s, b, h, i, j, slope: s - slope[h] * (i - j).abs(),
        ("slope",),
    ),
    "relative": (
        "s + rel[h, min(max(i - j, 0), 63)]",
        lambda s, b, h, i, j, rel: s + rel[h, (i - j).clamp(0, 63)],
        ("rel",),
    ),
    "buckets": (
        "s + table[bucket[min(max(j - i, -128), 127) + 128], h]",
        lambda s, b, h, i, j, table, bucket: (
            s + table[bucket[(j - i).clamp(-128, 127) + 128].long(), h]
        ),
        ("table", "bucket"),
    ),
    "gain": ("s * gain[b, h]", lambda s, b, h, i, j, gain: s * gain[b, h], ("gain",)),
    "rows and keys": (
        "s + row[b, i] * 0.3 - (key[j] if flag[j] and i % 3 != 1 else 0.25)",
        lambda s, b, h, i, j, row, key, flag: (
            s + row[b, i] * 0.3 - torch.where(flag[j] & (i % 3 != 1), key[j], 0.25)
        ),
        ("row", "key", "flag"),
    ),
    "everything": (
        "d = i - j; w = exp(-abs(d) / 16); t = tanh(s * gain[b, h]) + log(1 + abs(s)) / 3; "
        "where(d // 5 % 2 == 0, max(t, w), min(t, sqrt(2 + w))) + slope[h] * d / (1 + w)",
        lambda s, b, h, i, j, gain, slope: (
            lambda d, w, t: (
                torch.where(
                    d // 5 % 2 == 0, torch.maximum(t, w), torch.minimum(t, torch.sqrt(2 + w))
                )
                + slope[h] * d / (1 + w)
            )
        )(
            i - j,
            torch.exp(-(i - j).abs() / 16),
            torch.tanh(s * gain[b, h]) + torch.log(1 + s.abs()) / 3,
        ),
        ("gain", "slope"),
    ),
}
MASKS = {
    "stripes": ("(i + j) % 3 != h % 3", lambda b, h, i, j: (i + j) % 3 != h % 3, ()),
    "sinks": (
        "i - j < width[h] or j < 4",
        lambda b, h, i, j, width: (i - j < width[h]) | (j < 4),
        ("width",),
    ),
}


def widths(device, heads: int = 4) -> torch.Tensor:
    some = itertools.islice(itertools.cycle((5, 40, 200, 3)), heads)
    return torch.tensor(list(some), dtype=torch.int32, device=device)


def textbook(operands, case, score, mask, tensors):
    """(o, lse) in the dtype of the operands, one sequence after the other."""
    q, k, v = operands
    causal = case.arguments.get("causal", False)
    if not case.lengths:
        parts = [(q[b], k[b], v[b]) for b in range(q.shape[0])]
    else:
        ends = [x.tolist() for x in case.lengths]
        parts = [
            (q[a:e], k[c:f], v[c:f])
            for a, e, c, f in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False)
        ]
    outputs, logs = [], []
    for b, (qs, ks, vs) in enumerate(parts):
        group = qs.shape[1] // ks.shape[1]
        ks, vs = ks.repeat_interleave(group, 1), vs.repeat_interleave(group, 1)
        s = torch.einsum("ihd,jhd->hij", qs, ks) * qs.shape[-1] ** -0.5
        h = torch.arange(s.shape[0], device=q.device)[:, None, None]
        i = torch.arange(s.shape[1], device=q.device)[None, :, None]
        j = torch.arange(s.shape[2], device=q.device)[None, None, :]
        if score is not None:
            s = score(s, b, h, i, j, **tensors).to(qs.dtype)  # i and j alone make float32
        shown = torch.ones_like(s, dtype=torch.bool)
        if causal:
            shown = shown & (j <= i + s.shape[2] - s.shape[1])
        if mask is not None:
            shown = shown & mask(b, h, i, j)
        s = s.masked_fill(~shown, -torch.inf)
        lse = torch.logsumexp(s, -1)
        finite = lse.masked_fill(lse == -torch.inf, 0)
        weights = torch.where(shown, torch.exp(s - finite[..., None]), 0)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, vs))
        logs.append(lse)
    if case.lengths:
        return torch.cat(outputs), torch.cat(logs, -1)
    return torch.stack(outputs), torch.stack(logs)


def results(case, call, operands, tensors, wanted):
    """o, lse and the gradients of the operands and the wanted tensors."""
    operands = [x.detach().requires_grad_() for x in operands]
    tensors = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors.items()}
    o, lse = call(operands, tensors)
    generator = torch.Generator().manual_seed(3)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype).to(o.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(o.device, lse.dtype)
    grad_lse = grad_lse.masked_fill(lse.detach() == -torch.inf, 0)
    leaves = [*operands, *(tensors[n] for n in wanted)]
    grads = torch.autograd.grad((o, lse), leaves, (grad_o, grad_lse))
    return dict(zip(("o", "lse", "q", "k", "v", *wanted), (o, lse, *grads), strict=True))


def check(case, target, score=None, mask=None, wants=True):
    """Against float64, with the error of the textbook in the same dtype as the measure."""
    text, function, names = SCORES[score] if score else (None, None, ())
    sizes = sizes_of(case)
    tensors = {n: tensors_of(target.device, **sizes)[n] for n in names}
    wanted = [n for n in names if wants and tensors[n].is_floating_point()]
    extra = {}
    shows = None
    if mask is not None:
        condition, shows, captured = MASKS[mask]
        given = {"width": widths(target.device, sizes["heads"])} if captured else {}
        extra["mask"] = pantile.Mask(condition, **given)
        shows = (lambda f: lambda b, h, i, j: f(b, h, i, j, **given))(shows)

    def ours(operands, values):
        if text is not None:
            extra["score"] = pantile.Score(text, **values)
        return case.ours(*operands, options=target.options, **extra)

    learned = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors.items()}
    plan = {**extra, **({"score": pantile.Score(text, **learned)} if text else {})}
    explained = case.explain(options=target.options, **plan)
    for found in (explained.forward, explained.backward):
        if found.kernel is None:
            pytest.skip(found.reason[:300])
    found = results(case, ours, case.operands, tensors, wanted)

    def book(dtype):
        def convert(x):
            return x.to(dtype) if x.is_floating_point() else x

        return results(
            case,
            lambda operands, values: textbook(operands, case, function, shows, values),
            [x.to(dtype) for x in case.operands],
            {n: convert(x) for n, x in tensors.items()},
            wanted,
        )

    exact = book(torch.float64)
    # In float32 with the operands and results of the case's dtype: what 16 bits cost a textbook
    # that rounds each matrix is more than that.
    coarse = book(case.q.dtype)
    for name, x in found.items():
        truth = exact[name].detach()
        hidden = truth == -torch.inf
        assert torch.equal(x.detach() == -torch.inf, hidden), name
        size = max(math.sqrt(truth.numel()), 1.0)

        def norm(y, hidden=hidden, size=size):
            return y.double().masked_fill(hidden, 0).norm() / size

        truth_size = norm(truth)
        error = norm(x.detach().double() - truth.masked_fill(hidden, 0))
        allowed = 2 * norm(coarse[name].detach().double() - truth)
        eps = torch.finfo(x.dtype).eps
        terms = 64.0 if name in wanted else 8.0
        floor = eps * truth_size + torch.finfo(torch.float32).eps * terms * (1 + truth_size)
        assert error <= allowed + floor, f"{name}: {error:.2e} > {allowed:.2e} + {floor:.2e}"


# ---- every expression, forward and backward


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_dense(target, score, causal):
    check(
        dense(target, target.default_dtype, **lengths(target, 101, 130), causal=causal),
        target,
        score,
    )


@pytest.mark.parametrize("score", SCORES)
def test_packed(target, score):
    """Ragged lengths, a sequence without keys and one without rows."""
    long = lengths(target, 150, 131)
    rows, keys = [37, 0, long["rows"]], [45, 20, long["keys"]]
    if {"gain", "row"} & set(SCORES[score][2]):  # which are of two sequences
        rows, keys = rows[::2], keys[::2]
    case = packed(target, rows, keys, target.default_dtype, causal=True)
    check(case, target, score)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("score", ["softcap", "alibi", "relative"])
def test_sixteen_bits(target, dtype, head_dim, score):
    case = dense(target, dtype, **lengths(target, 200, 300), head_dim=head_dim, causal=True)
    check(case, target, score)


@pytest.mark.parametrize("score", [None, "alibi", "softcap"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(target, mask, score):
    case = dense(target, target.default_dtype, **lengths(target, 130, 150), causal=mask == "sinks")
    check(case, target, score, mask, wants=False)


def test_mask_of_nothing(target):
    """Rows that see no key: o = 0, lse = -inf, gradients 0. Hidden NaN changes nothing."""
    case = dense(target, target.default_dtype, rows=70, keys=90)
    mask = pantile.Mask("i % 4 != 0 and j != 5")
    plan = case.explain(mask=mask, options=target.options)
    if plan.backward.kernel is None:
        pytest.skip(plan.backward.reason[:300])
    q, k, v = (x.clone().requires_grad_() for x in case.operands)
    o, lse = case.ours(q, k, v, mask=mask, options=target.options)
    assert (o[:, ::4] == 0).all()
    assert (lse[..., ::4] == -torch.inf).all()
    (grad,) = torch.autograd.grad(o.float().sum(), q)
    assert (grad[:, ::4] == 0).all()
    with torch.no_grad():
        k[:, 5], v[:, 5] = torch.nan, torch.inf
        assert_same_bits(case.ours(q, k, v, mask=mask, options=target.options)[0], o)


# ---- text and function are one


def test_function_is_its_text():
    case = dense(CPU, causal=True)
    rel = torch.randn(4, 64)
    text = pantile.Score("5 * tanh(s / 5) + rel[h, min(i - j, 63)]", rel=rel)

    def function(s, b, h, i, j, rel):
        return 5 * torch.tanh(s / 5) + rel[h, (i - j).minimum(63)]

    o = pantile.attention(*case.operands, causal=True, score=text)
    assert_same_bits(
        pantile.attention(*case.operands, causal=True, score=pantile.Score(function, rel=rel)), o
    )
    methods = pantile.Score(
        lambda s, b, h, i, j, rel: (s / 5).tanh() * 5 + rel[h, (i - j).clamp(max=63)], rel=rel
    )
    o = pantile.attention(*case.operands, causal=True, score=methods)
    assert torch.allclose(o, pantile.attention(*case.operands, causal=True, score=text))
    mask = pantile.Mask(lambda b, h, i, j: ~((i % 2 == 0) & (np.minimum(j, 3) == 3)) | (h > 1))
    same = pantile.Mask("not (i % 2 == 0 and min(j, 3) == 3) or h > 1")
    assert_same_bits(
        pantile.attention(*case.operands, mask=mask), pantile.attention(*case.operands, mask=same)
    )


def test_traced_branches_say_what_to_use():
    with pytest.raises(TypeError, match=r"a condition depends on the pair.*use where"):
        pantile.Score(lambda s, b, h, i, j: s if i > j else -s)
    with pytest.raises(TypeError, match="softmax cannot be traced; a score or mask may use"):
        pantile.Score(lambda s, b, h, i, j: torch.softmax(s, -1))
    with pytest.raises(TypeError, match="stands in the function; it may use its arguments"):
        pantile.Score(lambda s, b, h, i, j: s + torch.zeros(4))


# ---- random expressions, against Python


class Random:
    """A random expression: text in our language, and Python's for NumPy."""

    def __init__(self, draw):
        self._draw = draw

    def pick(self, *choices):
        return self._draw(st.sampled_from(choices))

    def whole(self, depth: int) -> str:
        if depth == 0:
            return self.pick("b", "h", "i", "j", "3", "7", "t[h, j]")
        kind = self.pick("+", "-", "*", "//", "%", "min", "max", "abs", "where")
        a, c = self.whole(depth - 1), self.whole(depth - 1)
        if kind in ("min", "max"):
            return f"{kind}({a}, {c})"
        if kind == "abs":
            return f"abs({a})"
        if kind == "where":
            return f"where({self.condition(depth - 1)}, {a}, {c})"
        if kind == "*":  # stays within 32 bits
            return f"({a} % 50) * ({c} % 50)"
        return f"({a} {kind} {c})"

    def condition(self, depth: int) -> str:
        kind = self.pick("<", "<=", "==", "!=", ">", ">=", "and", "or", "not")
        if depth > 0 and kind in ("and", "or"):
            return f"({self.condition(depth - 1)} {kind} {self.condition(depth - 1)})"
        if depth > 0 and kind == "not":
            return f"(not {self.condition(depth - 1)})"
        sign = kind if kind[0] in "<>=!" else "<"
        return f"({self.whole(max(depth - 1, 0))} {sign} {self.whole(max(depth - 1, 0))})"

    def real(self, depth: int) -> str:
        if depth == 0:
            return self.pick("s", "w[h, i]", "0.5", "2.25", "s")
        kind = self.pick(
            "+", "-", "*", "/", "min", "max", "tanh", "exp", "sqrt", "log", "where", "int"
        )
        a = self.real(depth - 1)
        if kind in ("tanh", "exp"):
            return f"{kind}(tanh({a}))"
        if kind == "sqrt":
            return f"sqrt(1 + abs({a}))"
        if kind == "log":
            return f"log(1 + abs({a}))"
        if kind == "int":
            return f"({a} + {self.whole(depth - 1)} / 64)"
        c = self.real(depth - 1)
        if kind in ("min", "max"):
            return f"{kind}({a}, {c})"
        if kind == "where":
            return f"({a} if {self.condition(depth - 1)} else {c})"
        if kind == "/":
            return f"({a} / (1 + abs({c})))"
        return f"({a} {kind} {c})"


def python_value(text: str, names: dict):
    """The text as Python, on NumPy arrays of float64 and int64."""
    import ast

    tree = ast.parse(text, mode="eval")

    class Rewrite(ast.NodeTransformer):
        def visit_BoolOp(self, node):
            self.generic_visit(node)
            name = "both" if isinstance(node.op, ast.And) else "either"
            return ast.Call(ast.Name(name, ast.Load()), node.values, [])

        def visit_UnaryOp(self, node):
            self.generic_visit(node)
            if isinstance(node.op, ast.Not):
                return ast.Call(ast.Name("negate", ast.Load()), [node.operand], [])
            return node

        def visit_IfExp(self, node):
            self.generic_visit(node)
            args = [node.test, node.body, node.orelse]
            return ast.Call(ast.Name("where", ast.Load()), args, [])

        def visit_BinOp(self, node):
            self.generic_visit(node)
            if isinstance(node.op, ast.FloorDiv | ast.Mod):
                name = "floordiv" if isinstance(node.op, ast.FloorDiv) else "mod"
                return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])
            return node

    tree = ast.fix_missing_locations(Rewrite().visit(tree))

    def floordiv(a, b):
        return np.where(b == 0, 0, a // np.where(b == 0, 1, b))

    def mod(a, b):
        return np.where(b == 0, 0, a % np.where(b == 0, 1, b))

    functions = {
        **{name: getattr(np, name) for name in ("exp", "log", "tanh", "sqrt", "abs", "where")},
        "min": np.minimum,
        "max": np.maximum,
        "both": np.logical_and,
        "either": np.logical_or,
        "negate": np.logical_not,
        "floordiv": floordiv,
        "mod": mod,
    }
    return eval(compile(tree, "text", "eval"), {**functions, **names})


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_expressions(data):
    """One key is shown to each row, so that LSE is its score: value, and derivatives by dLSE."""
    text = Random(data.draw).real(data.draw(st.integers(1, 4)))
    generator = torch.Generator().manual_seed(0)
    batch, heads, rows, keys, dim = 2, 3, 29, 11, 8
    q = torch.randn(batch, rows, heads, dim, generator=generator)
    k = torch.randn(batch, keys, heads, dim, generator=generator)
    w = torch.randn(heads, rows, generator=generator)
    t = torch.randint(-9, 9, (heads, keys), generator=generator, dtype=torch.int32)
    one = pantile.Mask("(i * 5 + h) % 11 == j")
    b, h, i = np.ogrid[:batch, :heads, :rows]
    j = (i * 5 + h) % 11
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * dim**-0.5
    s = s.numpy()[b, h, i, j]
    names = {"b": b, "h": h, "i": i, "j": j, "w": w.double().numpy(), "t": t.long().numpy()}
    truth = np.broadcast_to(python_value(text, {**names, "s": s}), s.shape)
    slope = (
        python_value(text, {**names, "s": s + 1e-6}) - python_value(text, {**names, "s": s - 1e-6})
    ) / 2e-6
    for backend in ("cpu", "reference"):
        leaf = w.clone().requires_grad_()
        row = q.clone().requires_grad_()
        score = pantile.Score(text, w=leaf, t=t)
        options = pantile.Options(backend=backend)
        _, lse = pantile.attention(
            row, k, k, score=score, mask=one, return_lse=True, options=options
        )
        size = 1 + np.abs(truth)
        assert (np.abs(lse.detach().numpy() - truth) <= 1e-4 * size).all(), text
        lse.sum().backward()
        at = torch.from_numpy(np.broadcast_to(j, s.shape).copy())
        picked = k.permute(0, 2, 1, 3).gather(2, at[..., None].expand(-1, -1, -1, dim)).double()
        expected = torch.from_numpy(np.broadcast_to(slope, s.shape).copy())[..., None] * picked
        expected = expected.permute(0, 2, 1, 3) * dim**-0.5
        difference = (row.grad.double() - expected).abs()
        # Differences of a kinked function are those of neither side.
        kinked = (difference > 1e-3 * (1 + expected.abs())).double().mean()
        assert kinked < 0.02, text


def test_equal_functions_share_a_kernel():
    """Programs are compiled once for a function, however it is written."""
    from pantile import _C

    assert "score" in _C.VARIANT_FIELDS
    case = dense(CPU)
    for text in ("s * 2 + 1", "1 + 2 * s", "x = s; x * 2.0 + (3 - 2)"):
        o = pantile.attention(*case.operands, score=pantile.Score(text))
        plain = pantile.attention(*case.operands, scale=2 * 64**-0.5)
        assert torch.allclose(o, plain, atol=1e-6)


# ---- indices


def test_indices_are_moved_into_the_tensor(target):
    """At hidden pairs, too: a table as small as it can be, beside memory that holds NaN."""
    case = dense(target, target.default_dtype, rows=70, keys=90, causal=True)
    memory = torch.full((40,), torch.nan, device=target.device)
    memory[20] = 0.75
    table = memory[20:21]
    score = pantile.Score("s + table[i * 1000 - j * 77]", table=table)
    plan = case.explain(score=score, options=target.options)
    if plan.forward.kernel is None:
        pytest.skip(plan.forward.reason[:300])
    o, lse = case.ours(*case.operands, score=score, options=target.options)
    plain, plain_lse = case.ours(*case.operands, options=target.options)
    assert torch.allclose(o.float(), plain.float(), atol=2e-2 if o.dtype != torch.float32 else 1e-5)
    assert torch.allclose(lse, plain_lse + 0.75, atol=2e-5)


def test_captured_strides():
    case = dense(CPU, causal=True)
    rel = torch.randn(64, 4)
    one = pantile.Score("s + rel[h, min(i - j, 63)]", rel=rel.t())
    two = pantile.Score("s + rel[h, min(i - j, 63)]", rel=rel.t().contiguous())
    assert_same_bits(
        pantile.attention(*case.operands, causal=True, score=one),
        pantile.attention(*case.operands, causal=True, score=two),
    )
    leaf = torch.randn(4, requires_grad=True)
    o = pantile.attention(
        *case.operands,
        causal=True,
        score=pantile.Score("s + a[h, j]", a=leaf[:, None].expand(4, 45)),
    )
    o.square().sum().backward()
    assert leaf.grad.shape == (4,)


# ---- torch


def loss(o):
    return o.float().square().sum()


def test_compile():
    case = dense(CPU, causal=True)
    slope = torch.rand(4, requires_grad=True)
    score = pantile.Score("s + slope[h] * (j - i)", slope=slope)
    mask = pantile.Mask("i - j < 30")

    def call(q, k, v):
        return pantile.attention(q, k, v, causal=True, score=score, mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(call(*case.operands)), slope)
    found = torch.autograd.grad(loss(compiled(*case.operands)), slope)
    assert_same_bits(found[0], expected[0])


def test_opcheck():
    q, k, v = (x[:, :9].clone().requires_grad_() for x in dense(CPU).operands)
    slope = torch.rand(4, requires_grad=True)
    from pantile._schema import CALL_FIELDS, VARIANT, VARIANT_TENSOR_COUNT

    values = {
        "captured0": slope,
        "score": "s + a[h] * (j - i)",
        "captured_names": "a",
        "mask_expression": "j <= i + 3",
    }
    neutral = {"score": "", "mask_expression": "", "captured_names": "", "softcap": 0.0}
    variant = [
        values.get(name, None if n < VARIANT_TENSOR_COUNT else neutral.get(name, 0))
        for n, name in enumerate(VARIANT)
    ]
    fields = [field.default for field in CALL_FIELDS]
    arguments = (
        *(q, k, v, *variant[:VARIANT_TENSOR_COUNT], *fields, *variant[VARIANT_TENSOR_COUNT:]),
        *(False, False, True, False, False),
    )
    torch.library.opcheck(torch.ops.pantile.forward_variant.default, arguments)


def test_checkpoint_vmap_autocast():
    case = dense(CPU, causal=True)
    slope = torch.rand(4, requires_grad=True)

    def call(q, k, v, slope):
        score = pantile.Score("s + slope[h] * (j - i)", slope=slope)
        return pantile.attention(q, k, v, causal=True, score=score)

    expected = torch.autograd.grad(loss(call(*case.operands, slope)), slope)
    again = checkpoint(call, *case.operands, slope, use_reentrant=False)
    assert_same_bits(torch.autograd.grad(loss(again), slope)[0], expected[0])
    slopes = torch.rand(3, 4)
    mapped = torch.vmap(lambda x: call(*case.operands, x))(slopes)
    for one, x in zip(mapped, slopes, strict=True):
        assert_same_bits(one, call(*case.operands, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*case.operands, slope).dtype is torch.bfloat16


def test_second_derivatives_are_refused():
    case = dense(CPU)
    slope = torch.rand(4, requires_grad=True)
    o = pantile.attention(*case.operands, score=pantile.Score("s + slope[h] * j", slope=slope))
    (grad,) = torch.autograd.grad(loss(o), slope, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        grad.sum().backward()


def test_deterministic_gradients_do_not_depend_on_threads():
    case = dense(CPU, rows=150, keys=150, heads=4, causal=True)
    rel = torch.randn(4, 64, requires_grad=True)

    def gradient():
        score = pantile.Score("s + rel[h, min(i - j, 63)]", rel=rel)
        return torch.autograd.grad(loss(case.ours(*case.operands, score=score)[0]), rel)[0]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradient()
        torch.set_num_threads(4)
        assert_same_bits(gradient(), one)
    finally:
        torch.set_num_threads(before)


def test_numpy_arrays():
    case = dense(CPU, causal=True)
    arrays = [x.numpy() for x in case.operands]
    rel = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    text = "s + rel[h, min(i - j, 63)]"
    o = pantile.attention(*arrays, causal=True, score=pantile.Score(text, rel=rel))
    expected = pantile.attention(
        *case.operands, causal=True, score=pantile.Score(text, rel=torch.from_numpy(rel))
    )
    assert_same_bits(torch.from_numpy(o), expected)


def test_without_torch():
    program = (
        "import numpy, pantile, sys; q = numpy.ones((1, 4, 1, 8), numpy.float32); "
        "s = pantile.Score(lambda s, b, h, i, j: numpy.where(i > j, s, -s)); "
        "print(pantile.attention(q, q, q, score=s, mask=pantile.Mask('j <= i')).shape, "
        "'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["(1,", "4,", "1,", "8)", "False"], run.stderr


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("s +", 3, "cannot use the end of the text"),
        ("s.real", 1, "cannot use '.'"),
        ("__import__('os')", 0, "'__import__' is not known; allowed: s, b, h, i, j, rel"),
        ("asm(1)", 0, "'asm' is not known"),
        ("s if s else 1", 5, "a number stands where a condition must be"),
        ("s + (i < j)", 4, "a condition stands where a number must be"),
        ("s + rel[h]", 8, "'rel' has 2 axes, and 1 indices are given"),
        ("s + rel[h, s]", 11, "an index must be an integer"),
        ("rel + s", 4, "'rel' is a tensor; it needs 2 indices"),
        ("max(s)", 4, "max takes 2 arguments, 1 are given"),
        ("s // 2", 0, "an operand of // or % must be an integer"),
        ("i[0]", 1, "only captured tensors can be indexed"),
        ("i < j", 0, "it is a condition; a score must be a number"),
        ("s + 99999999999", 4, "99999999999 has more than 32 bits"),
        ("x = i; x + y", 11, "'y' is not known"),
        ("rel = 3; s", 0, "'rel' is a captured tensor"),
        ("(" * 200 + "s" + ")" * 200, 100, "it is nested too deeply"),
        ("s; i", 1, "cannot use ';'"),
    ],
    ids=range(18),
)
def test_errors_name_the_column(text, column, message):
    with pytest.raises(ValueError, match=r"^score is ") as found:
        pantile.Score(text, rel=torch.zeros(2, 2))
    assert f"at column {column}, " in str(found.value)
    assert message in str(found.value)


def test_refusals():
    case = dense(CPU)
    with pytest.raises(TypeError, match=r"^score is 's'; it must be a pantile.Score or None"):
        pantile.attention(*case.operands, score="s")
    with pytest.raises(TypeError, match=r"^score is 3; it must be a text or a function"):
        pantile.Score(3)
    with pytest.raises(TypeError, match=r"^rel is .*; it must be a tensor of float32, float16"):
        pantile.Score("s", rel=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^a captured tensor is called 'j'"):
        pantile.Score("s", j=torch.zeros(3))
    with pytest.raises(ValueError, match=r"^7 tensors are captured; at most 6"):
        pantile.Score("s", **{f"x{n}": torch.zeros(1) for n in range(7)})
    with pytest.raises(ValueError, match=r"^mask is .*it is a number; a mask must be a condition"):
        pantile.Mask("i - j")
    learned = pantile.Mask("w[j] > 0", w=torch.zeros(9, requires_grad=True))
    with pytest.raises(ValueError, match=r"^mask captures w, which requires a gradient"):
        pantile.attention(*case.operands, mask=learned)
    with pytest.raises(ValueError, match=r"^score has .*different operations; at most 256"):
        pantile.Score("s + " + " + ".join(f"exp(s + {n}.5)" for n in range(130)))
    with pytest.raises(ValueError, match=r"^score is .*; FP8 attention does not serve it"):
        pantile.attention(
            *case.operands, score=pantile.Score("2 * s"), options=pantile.Options(fp8=True)
        )
