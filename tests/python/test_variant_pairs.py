"""Every variant with every other one, forward and backward, against a textbook in float64 that is
differentiated by autograd; and each of them through what torch does with an operator."""

from __future__ import annotations

import functools
import itertools
import math

import pantile
import pytest
import torch
from pantile.reference import shown
from support import Target, dense
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CPU = Target("cpu", "cpu")
BATCH, HEADS = 2, 2
SIZES = {"cpu": (21, 70), "cuda": (150, 270)}  # rows and keys: two blocks of 64 at least

# What stands in for a mask or a score is one of these; a call has one of each.
MASKS = ("blocks", "documents", "prefix", "elements", "condition")
SCORES = ("affine", "gain", "curved", "buckets")
VARIANTS = ("softcap", "alibi", "bias", "shared_bias", "sinks", "dropout", *MASKS, *SCORES)
ALONE = ({"bias", "shared_bias"}, set(MASKS), set(SCORES))  # at most one of each
PAIRS = [
    pair
    for pair in itertools.combinations(VARIANTS, 2)
    if not any(set(pair) <= group for group in ALONE)
]
# By name: the text, the same in torch.
TEXTS = {
    "affine": (
        "s + w[h] * min(abs(i - j), 20)",
        lambda s, h, i, j, w, t: s + w[h] * (i - j).abs().clamp(max=20),
    ),
    "gain": ("s * (1 + w[h])", lambda s, h, i, j, w, t: s * (1 + w[h])),
    "curved": (
        "tanh(s * (1 + w[h])) * 2 + t[h, min(abs(i - j), 7)]",
        lambda s, h, i, j, w, t: torch.tanh(s * (1 + w[h])) * 2 + t[h, (i - j).abs().clamp(max=7)],
    ),
    "buckets": (
        "s + t[h, min(abs(i - j) // 9, 7)]",
        lambda s, h, i, j, w, t: s + t[h, torch.clamp((i - j).abs() // 9, max=7)],
    ),
}


def drawn(device: str) -> dict[str, torch.Tensor]:
    """All that the variants take; those that are learned are float32."""
    rows, keys = SIZES[device]
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {
        "alibi": 0.1 * normal(HEADS).abs(),
        "bias": normal(BATCH, HEADS, rows, keys),
        "shared_bias": normal(1, 1, rows, keys),
        "sinks": normal(HEADS),
        "w": 0.2 * normal(HEADS),
        "t": normal(HEADS, 8),
        "blocks": (torch.arange(-(-rows // 64))[:, None] + torch.arange(-(-keys // 64))) % 2 == 0,
        "documents": torch.arange(keys).div(30, rounding_mode="floor").to(torch.int32)[None],
        "prefix": torch.tensor([keys // 2, 11], dtype=torch.int32),
        "elements": torch.rand(BATCH, 1, rows, keys, generator=generator) < 0.6,
    }
    return {name: x.to(device) for name, x in tensors.items()}


def names_learned(names) -> list[str]:
    """Of drawn(), what the variants learn."""
    found = [n for n in names if n in ("alibi", "bias", "shared_bias", "sinks")]
    texts = " ".join(TEXTS[n][0] for n in names if n in TEXTS)
    return found + [n for n in ("w", "t") if f"{n}[" in texts]


def keywords(names, tensors) -> dict:
    """Of attention()."""
    given: dict = {}
    for name in names:
        if name == "softcap":
            given["softcap"] = 2.5
        elif name == "dropout":
            given["dropout"] = pantile.Dropout(0.3, seed=7)
        elif name in ("alibi", "sinks"):
            given[name] = tensors[name]
        elif name.endswith("bias"):
            given["bias"] = tensors[name]
        elif name == "condition":
            given["mask"] = pantile.Mask("(i + 2 * j) % 5 != 0 or i == j")
        elif name == "blocks":
            given["mask"] = pantile.BlockMask(tensors[name], block=64)
        elif name == "documents":
            given["mask"] = pantile.Documents(
                tensors[name][:, : tensors["elements"].shape[-2]], tensors[name]
            )
        elif name == "prefix":
            given["mask"] = pantile.Prefix(tensors[name])
        elif name == "elements":
            given["mask"] = tensors[name]
        else:
            text = TEXTS[name][0]
            captured = {n: tensors[n] for n in ("w", "t") if f"{n}[" in text}
            given["score"] = pantile.Score(text, **captured)
    return given


def textbook(operands, names, tensors):
    """(o, lse) in the dtype of the operands, in the order of docs/variants.md."""
    q, k, v = operands
    rows, keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    h = torch.arange(HEADS, device=q.device)[:, None, None]
    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)[None, :]
    if "softcap" in names:
        s = 2.5 * torch.tanh(s / 2.5)
    if "alibi" in names:
        s = s - tensors["alibi"][:, None, None] * (i + keys - rows - j).abs()
    for bias in {"bias", "shared_bias"} & set(names):
        s = s + tensors[bias]
    for name in names:
        if name in TEXTS:
            s = TEXTS[name][1](s, h, i, j, tensors["w"], tensors["t"])
    seen = torch.ones(BATCH, HEADS, rows, keys, dtype=torch.bool, device=q.device)
    for name in set(MASKS) & set(names):
        if name == "condition":
            seen = seen & (((i + 2 * j) % 5 != 0) | (i == j))
        else:
            seen = seen & shown(keywords((name,), tensors)["mask"], rows, keys)
    sink = tensors["sinks"][:, None, None] if "sinks" in names else None
    s = s.masked_fill(~seen, -torch.inf)
    columns = s if sink is None else torch.cat([s, sink.expand(BATCH, -1, rows, 1)], -1)
    lse = torch.logsumexp(columns, -1)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    weights = torch.where(seen, torch.exp(s - finite[..., None]), 0)
    if "dropout" in names:
        dropout = pantile.Dropout(0.3, seed=7)
        kept = pantile.dropout_mask(dropout, BATCH, HEADS, rows, keys).to(q.device)
        weights = weights * kept / (1 - dropout.rate)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def results(call, operands, tensors, learned) -> dict[str, torch.Tensor]:
    """o, lse and the gradients of the operands and of what is learned."""
    operands = [x.detach().requires_grad_() for x in operands]
    tensors = {n: x.detach().requires_grad_(n in learned) for n, x in tensors.items()}
    o, lse = call(operands, tensors)
    generator = torch.Generator().manual_seed(3)
    grad_o, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (o, lse))
    grad_lse = grad_lse.masked_fill(lse.detach() == -torch.inf, 0)
    leaves = [*operands, *(tensors[n] for n in learned)]
    grads = torch.autograd.grad((o, lse), leaves, (grad_o, grad_lse))
    return dict(zip(("o", "lse", "q", "k", "v", *learned), (o, lse, *grads), strict=True))


def case_of(target: Target):
    rows, keys = SIZES[target.device]
    head_dim = 16 if target.device == "cpu" else 64
    return dense(target, target.default_dtype, BATCH, rows, keys, HEADS, 1, head_dim)


def assert_pair(target: Target, names) -> None:
    case, tensors, learned = case_of(target), drawn(target.device), names_learned(names)
    asked = {n: x.clone().requires_grad_(n in learned) for n, x in tensors.items()}
    plan = case.explain(options=target.options, **keywords(names, asked))
    for found in (plan.forward, plan.backward):
        if found.kernel is None:
            assert target.device != "cpu", found.reason
            pytest.skip(found.reason[:200])

    def ours(operands, values):
        return case.ours(*operands, options=target.options, **keywords(names, values))

    def book(dtype):
        def convert(x):
            return x.to(dtype) if x.is_floating_point() else x

        return results(
            lambda operands, values: textbook(operands, names, values),
            [x.to(dtype) for x in case.operands],
            {n: convert(x) for n, x in tensors.items()},
            learned,
        )

    found, exact = results(ours, case.operands, tensors, learned), book(torch.float64)
    coarse = book(case.q.dtype)
    for name, x in found.items():
        truth = exact[name].detach()
        hidden = truth == -torch.inf
        assert torch.equal(x.detach() == -torch.inf, hidden), name
        size = math.sqrt(truth.numel())

        def norm(y, hidden=hidden, size=size):
            return float(y.detach().double().masked_fill(hidden, 0).norm()) / size

        error = norm(x.detach().double() - truth.masked_fill(hidden, 0))
        allowed = 2 * norm(coarse[name].detach().double() - truth.masked_fill(hidden, 0))
        terms = 64.0 if name in learned else 8.0  # sums over a whole call, rounded term by term
        floor = torch.finfo(x.dtype).eps * norm(truth)
        floor += torch.finfo(torch.float32).eps * terms * (1 + norm(truth))
        assert error <= allowed + floor, f"{name}: {error:.2e} > {allowed:.2e} + {floor:.2e}"


@pytest.mark.parametrize("names", [(n,) for n in VARIANTS] + PAIRS, ids="+".join)
def test_pairs(target, names):
    assert_pair(target, names)


# ---- torch

# One of those that differ in their numbers only.
EACH = tuple(n for n in VARIANTS if n not in ("shared_bias", "affine", "gain", "buckets"))


def loss(o: torch.Tensor) -> torch.Tensor:
    return o.float().square().sum()


def attend(names, given, leaves):
    """o; the first of ``leaves`` are Q, K and V, the others what is learned."""
    learned = dict(zip(names_learned(names), leaves[3:], strict=True))
    return pantile.attention(*leaves[:3], **keywords(names, {**given, **learned}))


def leaves_of(names, given) -> list[torch.Tensor]:
    found = [*case_of(CPU).operands, *(given[n] for n in names_learned(names))]
    return [x.clone().requires_grad_() for x in found]


def gradients(function, leaves) -> tuple[torch.Tensor, ...]:
    o = function(*leaves)
    return (o.detach(), *torch.autograd.grad(loss(o), leaves))


@pytest.mark.parametrize("name", EACH)
def test_compile_and_checkpoint(name):
    given = drawn("cpu")
    leaves = leaves_of((name,), given)

    def call(*x):
        return attend((name,), given, x)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = gradients(call, leaves)
    again = functools.partial(checkpoint, call, use_reentrant=False)
    for other in (compiled, again):
        for a, b in zip(gradients(other, leaves), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", EACH)
def test_vmap_and_autocast(name):
    given = drawn("cpu")
    operands = [torch.stack([x, -x]) for x in case_of(CPU).operands]

    def call(*x):
        return attend((name,), given, (*x, *(given[n] for n in names_learned((name,)))))

    mapped = torch.vmap(call)(*operands)
    for entry, *one in zip(mapped, *operands, strict=True):
        assert torch.equal(entry, call(*one))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = call(*case_of(CPU).operands)
    assert low.dtype is torch.bfloat16
    assert torch.equal(low, call(*(x.bfloat16() for x in case_of(CPU).operands)))


class Module(torch.nn.Module):
    """Attention with one variant, whose tensors are buffers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kept = list(drawn("cpu"))
        for key, x in drawn("cpu").items():
            self.register_buffer(key, x)

    def forward(self, q, k, v):
        given = {key: getattr(self, key) for key in self.kept}
        return pantile.attention(q, k, v, **keywords((self.name,), given))


@pytest.mark.parametrize("name", EACH)
def test_export(name):
    module, operands = Module(name), case_of(CPU).operands
    exported = torch.export.export(module, operands)
    called = [str(n.target) for n in exported.graph.nodes if "pantile" in str(n.target)]
    assert called, exported.graph
    assert torch.equal(exported.module()(*operands), module(*operands))


class _Calls(TorchDispatchMode):
    """Keeps the arguments of pantile's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple] = []

    def __torch_dispatch__(self, op, types, arguments=(), named=None):
        if op.namespace == "pantile":
            self.found.append((op, arguments, named or {}))
        return op(*arguments, **(named or {}))


@pytest.mark.parametrize("name", EACH)
def test_opcheck(name):
    """Of the operator that the call goes through, with the arguments that it gets."""
    pantile.load_torch()
    given = drawn("cpu")
    leaves = leaves_of((name,), given)
    with _Calls() as calls, torch.no_grad():
        attend((name,), given, leaves)
    assert [op.name() for op, _, _ in calls.found] == ["pantile::forward_variant"]
    op, arguments, named = calls.found[0]
    copies = [
        x.detach().clone().requires_grad_(x.is_floating_point())
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    torch.library.opcheck(op, tuple(copies), named)
