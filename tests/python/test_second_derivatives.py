"""Second derivatives and forward mode, of every call that is differentiable: right against float64,
or refused by name. A zero in their place would be a wrong gradient that nobody notices."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any, NamedTuple

import pantile
import pantile.compat
import pantile.sdpa
import pytest
import torch
from pantile import reference
from pantile._schema import Call
from pantile.compat import flash_attn as fa2
from pantile.compat import flash_attn_3 as fa3
from pantile.compat import vllm
from pantile.integrations import transformers
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

pantile.load_torch()

BATCH, ROWS, KEYS, HEADS, HEADS_K, DIM = 2, 6, 7, 4, 2, 16
OPTIONS = {mode: pantile.Options(fp8=True, fp8_backward=mode) for mode in ("bf16", "recompute")}
WIDE = pantile.Options(output_dtype="float32")
TORCH = pantile.Options(backend="torch")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense_operands() -> dict[str, torch.Tensor]:
    shapes = (BATCH, ROWS, HEADS, DIM), *[(BATCH, KEYS, HEADS_K, DIM)] * 2
    return {name: normal(*s, seed=i) for i, (name, s) in enumerate(zip("qkv", shapes, strict=True))}


def packed_operands() -> dict[str, torch.Tensor]:
    return {name: x.flatten(0, 1) for name, x in dense_operands().items()}


def heads_first() -> dict[str, torch.Tensor]:
    """As torch's attention takes them, which has one key head a query head on this road."""
    q, *_ = dense_operands().values()
    return {name: normal(*q.shape, seed=i).transpose(1, 2) for i, name in enumerate("qkv")}


def textbook(q, k, v):
    return reference.attention(q, k, v, dtype=torch.float64)[0]


def partial_results() -> dict[str, torch.Tensor]:
    """O and LSE of two parts of the keys."""
    shapes = {"o": (BATCH, ROWS, HEADS, DIM), "lse": (BATCH, HEADS, ROWS)}
    return {
        f"{name}{part}": normal(*shape, seed=len(part) + len(name))
        for part in ("", "_2")
        for name, shape in shapes.items()
    }


def halves(parts) -> list[tuple]:
    return [(parts["o"], parts["lse"]), (parts["o_2"], parts["lse_2"])]


def merged(o, lse, o_2, lse_2):
    """(o, lse) of both halves."""
    weight = torch.sigmoid(lse - lse_2).transpose(1, 2)[..., None]
    return weight * o + (1 - weight) * o_2, torch.logaddexp(lse, lse_2)


LENGTHS = (ints(0, ROWS, 2 * ROWS), ints(0, KEYS, 2 * KEYS), ROWS, KEYS)

SEEN = normal(BATCH, 1, ROWS, KEYS) > -1


class Door(NamedTuple):
    """``call`` of ``operands`` by name; ``learned`` are further tensors that it differentiates.
    ``exact``: the same by operators of torch, for doors that may have a second derivative.
    ``theirs``: torch's own formulas answer, and may refuse in torch's words."""

    call: Any
    operands: Any = dense_operands
    learned: Any = None
    exact: Any = None
    theirs: bool = False


DOORS: dict[str, Door] = {
    "attention": Door(pantile.attention),
    "lse": Door(lambda q, k, v: pantile.attention(q, k, v, return_lse=True)),
    "max_logit": Door(lambda q, k, v: pantile.attention(q, k, v, return_max_logit=True)[0]),
    "float32_output": Door(lambda q, k, v: pantile.attention(q, k, v, options=WIDE)),
    "varlen": Door(lambda q, k, v: pantile.varlen_attention(q, k, v, *LENGTHS), packed_operands),
    "ranges": Door(
        lambda q, k, v: pantile.varlen_attention(
            *(q, k, v, LENGTHS[0], None, ROWS, KEYS),
            k_begin=ints(0, 5),
            seqused_k=ints(7, 6),
            mask_shift=ints(1, 2),
            causal=True,
        ),
        packed_operands,
    ),
    "operator": Door(
        lambda q, k, v: torch.ops.pantile.forward(q, k, v, *Call(), False, False, False)[:2]
    ),
    "extra_operator": Door(
        lambda q, k, v: torch.ops.pantile.forward_extra(
            q, k, v, *Call(), False, False, True, True, True
        )[:2]
    ),
    # ---- variants
    "softcap": Door(lambda q, k, v: pantile.attention(q, k, v, softcap=2.0)),
    "dropout": Door(
        lambda q, k, v: pantile.attention(q, k, v, dropout=pantile.Dropout(0.3, seed=5))
    ),
    "mask": Door(lambda q, k, v: pantile.attention(q, k, v, mask=SEEN)),
    "documents": Door(
        lambda q, k, v: pantile.attention(
            q, k, v, mask=pantile.Documents(ints(*[0] * 3, *[1] * 3), ints(*[0] * 4, *[1] * 3))
        )
    ),
    "mask_expression": Door(
        lambda q, k, v: pantile.attention(q, k, v, mask=pantile.Mask("(i + j) % 3 != 1"))
    ),
    "alibi": Door(
        lambda q, k, v, alibi: pantile.attention(q, k, v, alibi=alibi),
        learned=lambda: {"alibi": normal(HEADS, seed=4)},
    ),
    "bias": Door(
        lambda q, k, v, bias: pantile.attention(q, k, v, bias=bias),
        learned=lambda: {"bias": normal(1, HEADS, ROWS, KEYS, seed=4)},
    ),
    "sinks": Door(
        lambda q, k, v, sinks: pantile.attention(q, k, v, sinks=sinks),
        learned=lambda: {"sinks": normal(HEADS, seed=4)},
    ),
    "score_expression": Door(
        lambda q, k, v, slope: pantile.attention(
            q, k, v, score=pantile.Score("s + slope[h] * abs(i - j)", slope=slope)
        ),
        learned=lambda: {"slope": normal(HEADS, seed=4)},
    ),
    "varlen_softcap": Door(
        lambda q, k, v: pantile.varlen_attention(q, k, v, *LENGTHS, softcap=2.0), packed_operands
    ),
    # ---- FlashAttention's functions
    "fa2": Door(lambda q, k, v: fa2.flash_attn_func(q, k, v, causal=True)),
    "fa2_probs": Door(
        lambda q, k, v: fa2.flash_attn_func(
            q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, True
        )[:2]
    ),
    "fa2_kvpacked": Door(
        lambda q, k, v: fa2.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), softcap=3.0)
    ),
    "fa2_varlen": Door(
        lambda q, k, v: fa2.flash_attn_varlen_func(q, k, v, *LENGTHS), packed_operands
    ),
    "fa3": Door(lambda q, k, v: fa3.flash_attn_func(q, k, v, return_attn_probs=True)),
    "fa3_varlen": Door(
        lambda q, k, v: fa3.flash_attn_varlen_func(q, k, v, *LENGTHS), packed_operands
    ),
    "vllm": Door(
        lambda q, k, v: vllm.flash_attn_varlen_func(
            *(q, k, v, ROWS, LENGTHS[0], KEYS, LENGTHS[1]), causal=True
        ),
        packed_operands,
    ),
    # ---- torch's and transformers' doors
    "flex_attention": Door(
        lambda q, k, v: pantile.flex_attention(q, k, v, return_lse=True), heads_first
    ),
    "transformers": Door(
        lambda q, k, v: transformers.attention_forward(
            torch.nn.Module(), q, k, v, None, is_causal=False
        )[0],
        heads_first,
    ),
    "sdpa": Door(
        lambda q, k, v: scaled_dot_product_attention(q, k, v),
        heads_first,
        exact=lambda *x: textbook(*(y.transpose(1, 2) for y in x)).transpose(1, 2),
        theirs=True,
    ),
    "torch_backend": Door(
        lambda q, k, v: pantile.attention(q, k, v, options=TORCH), exact=textbook, theirs=True
    ),
    # ---- what is made of torch's operators
    "merge": Door(
        lambda **parts: pantile.merge_attention(halves(parts)), partial_results, exact=merged
    ),
    "fa3_combine": Door(
        lambda **parts: fa3.flash_attn_combine(
            torch.stack((parts["o"], parts["o_2"])),
            torch.stack((parts["lse"], parts["lse_2"])).transpose(-1, -2),
        )[0],
        partial_results,
        exact=lambda **parts: merged(**parts)[0],
    ),
}
for _mode, _options in OPTIONS.items():
    DOORS |= {
        f"fp8_{_mode}": Door(
            lambda q, k, v, options=_options: pantile.attention(
                q, k, v, options=options, return_lse=True
            )
        ),
        f"fp8_{_mode}_varlen": Door(
            lambda q, k, v, options=_options: pantile.varlen_attention(
                q, k, v, *LENGTHS, options=options
            ),
            packed_operands,
        ),
        f"quantized_{_mode}": Door(
            lambda q, k, v, options=_options: pantile.attention(
                pantile.quantize(q, k, v), options=options
            )
        ),
        f"quantized_{_mode}_varlen": Door(
            lambda q, k, v, options=_options: pantile.varlen_attention(
                pantile.quantize(q, k, v, *LENGTHS), options=options
            ),
            packed_operands,
        ),
    }


# ---- ways to a second derivative, and to a first one in forward mode


def total(outputs) -> torch.Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(x.square().sum() for x in outputs)


def loss_of(call, operands, first: str, second: str):
    """A number of two of the operands."""

    def loss(x, y):
        changed = {first: x + y, second: x + y} if first == second else {first: x, second: y}
        return total(call(**{**operands, **changed}))

    return loss


def at(operands, first: str, second: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the loss is differentiated; of one operand x + y."""
    x, y = operands[first], operands[second]
    return (0.25 * x, 0.75 * y) if first == second else (x, y)


def of_gradient(loss, x, y):
    """A number of the gradient by x, as a function of y."""
    return torch.func.grad(loss)(x, y).square().sum()


def grad_of_grad(loss, x, y):
    return torch.func.grad(functools.partial(of_gradient, loss, x))(y)


def jvp_of_grad(loss, x, y):
    return torch.func.jvp(functools.partial(of_gradient, loss, x), (y,), (torch.ones_like(y),))[1]


def jacrev_of_grad(loss, x, y):
    return torch.func.jacrev(functools.partial(of_gradient, loss, x))(y)


def vmap_of_grad_of_grad(loss, x, y):
    return torch.vmap(functools.partial(grad_of_grad, loss, x))(torch.stack((y, -y)))


def grad_of_vmap_of_grad(loss, x, y):
    def mapped(many):
        return torch.vmap(torch.func.grad(loss), (None, 0))(x, many).square().sum()

    return torch.func.grad(mapped)(torch.stack((y, -y)))


def hessian(loss, x, y):
    return torch.func.hessian(lambda s: loss(s * x, s * y))(x.new_ones(()))


def double_backward(loss, x, y):
    """Autograd without transforms."""
    x, y = (t.clone().requires_grad_() for t in (x, y))
    (grad,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), y)[0]


def backward_of_grad(loss, x, y):
    """Autograd around a transform."""
    y = y.clone().requires_grad_()
    return torch.autograd.grad(of_gradient(loss, x, y), y)[0]


def forward_mode(loss, x, y):
    return torch.func.jvp(functools.partial(loss, x), (y,), (torch.ones_like(y),))[1]


def forward_mode_without_transforms(loss, x, y):
    with forward_ad.dual_level():
        value = loss(x, forward_ad.make_dual(y, torch.ones_like(y)))
        tangent = forward_ad.unpack_dual(value).tangent
        return torch.zeros_like(value) if tangent is None else tangent


EVERY_PAIR = (grad_of_grad, jvp_of_grad, double_backward, forward_mode)
ONE_PAIR = (
    *(jacrev_of_grad, vmap_of_grad_of_grad, grad_of_vmap_of_grad, hessian),
    *(backward_of_grad, forward_mode_without_transforms),
)
REFUSALS = "second derivatives of attention|forward-mode derivatives"
# How torch words it: of a backward, of forward mode, of two levels of either.
THEIRS = "is not implemented|Trying to use forward AD|does not support it"


def check(door: Door, way, operands, first: str, second: str) -> None:
    """Refused by name, or right."""
    where = f"{way.__name__} by {first} and {second}"
    refusal = None
    try:
        found = way(loss_of(door.call, operands, first, second), *at(operands, first, second))
    except (RuntimeError, NotImplementedError) as error:  # of which UnsupportedError is one
        refusal = error
    if refusal is not None:
        ours = isinstance(refusal, pantile.UnsupportedError)
        assert ours or door.theirs, f"{where}: {refusal!r}"
        assert re.search(REFUSALS if ours else THEIRS, str(refusal)), where
        return
    assert door.exact is not None, f"{where} is answered, and there is nothing to compare it with"
    wide = {name: x.double() for name, x in operands.items()}
    exact = way(loss_of(door.exact, wide, first, second), *at(wide, first, second))
    assert exact.abs().max() > 0.0, where
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < 1e-4, f"{where}: off by {error:.1e}"


@pytest.fixture
def served(request):
    """torch's operators by pantile, for the door that is made of them."""
    if request.getfixturevalue("name") != "sdpa":
        yield
        return
    with pantile.sdpa.register(cpu=True):
        yield


@pytest.mark.parametrize("name", DOORS)
def test_first_derivatives_exist(name, served):
    """Otherwise the others would be refused for another reason."""
    door = DOORS[name]
    operands = {**door.operands(), **(door.learned() if door.learned else {})}
    for leaf in operands:
        grad = torch.func.grad(lambda x, leaf=leaf: total(door.call(**{**operands, leaf: x})))
        assert grad(operands[leaf]).abs().max() > 0.0, leaf


@pytest.mark.parametrize("way", [*EVERY_PAIR, *ONE_PAIR], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", DOORS)
def test_second_derivatives(name, way, served):
    door = DOORS[name]
    operands = {**door.operands(), **(door.learned() if door.learned else {})}
    leaves = list(operands)
    pairs = itertools.product(leaves, leaves) if way in EVERY_PAIR else [(leaves[0], leaves[-1])]
    for first, second in pairs:
        check(door, way, operands, first, second)


# ---- calls without any derivative


def cache_of(k, v) -> pantile.KVCache:
    return pantile.KVCache(k, v, block_table=ints(0, 1, 2, 3).view(2, 2))


def decoded(q, k, v):
    return pantile.decode(q, cache_of(k, v), ints(20, 17))


def appended(rows, k, v):
    cache = cache_of(k.clone(), v.clone())
    pantile.append(cache, rows[:, :, :2], rows[:, :, 2:], ints(20, 17))
    return cache.k


@pytest.mark.parametrize(("name", "call"), [("decode", decoded), ("append", appended)])
def test_inference_is_refused_by_name(name, call):
    """Of what is differentiated; plain tensors beside it are served."""
    q, k, v = normal(2, 1, 4, 16), normal(4, 16, 2, 16, seed=1), normal(4, 16, 2, 16, seed=2)
    expected = call(q, k, v)

    def function(x):
        return call(x, k, v)

    with pytest.raises(pantile.UnsupportedError, match=f"pantile.{name} has no backward"):
        torch.func.grad(lambda x: function(x).sum())(q)
    with pytest.raises(pantile.UnsupportedError, match=f"pantile.{name} has no backward"):
        function(q.clone().requires_grad_())
    with pytest.raises(pantile.UnsupportedError, match=f"pantile.{name} has no forward-mode"):
        torch.func.jvp(function, (q,), (torch.ones_like(q),))
    with forward_ad.dual_level():
        with pytest.raises(pantile.UnsupportedError, match=f"pantile.{name} has no forward-mode"):
            function(forward_ad.make_dual(q, torch.ones_like(q)))
        assert torch.equal(function(q), expected)
