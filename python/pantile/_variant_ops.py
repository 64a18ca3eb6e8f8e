"""The torch operators ``pantile::forward_variant`` and ``pantile::backward_variant``.

They are those of _ops.py with what changes plain attention (_variants.py), and with gradients of
the tensors that do. Plain calls do not come here.
"""

from __future__ import annotations

import torch
from torch.utils import flop_counter

from pantile import _C, _fake, _torch_private
from pantile._direct import (
    keeps_low,
    no_low,
    readable_variant,
    run_backward,
    run_forward,
    split_output,
)
from pantile._fast_path import (
    is_compiling,
    nothing_watches,
    present,
    records_any,
    takes_short_cut,
)
from pantile._flops import backward_flops, forward_flops
from pantile._ops import (
    _chosen,
    _library,
    _no_forward_mode,
    _or_empty,
    apply,
    differentiates,
    gradient_function,
    lower,
    mapped_in_a_loop,
    new_fake_extra,
    prepare,
)
from pantile._schema import (
    BACKWARD_VARIANT,
    CAPTURED,
    FORWARD_VARIANT,
    LENGTHS,
    NO_LENGTHS,
    VARIANT_TENSOR_COUNT,
    VARIANT_TENSOR_NAMES,
    Call,
    Variant,
    bind,
    lengths_of,
    variant_of,
)
from pantile._torch_private import below_autograd
from pantile._variants import seed_numbers

Tensor = torch.Tensor

_TENSORS = VARIANT_TENSOR_NAMES
_COUNT = VARIANT_TENSOR_COUNT
_WANTED = ("alibi", "sinks", "bias")  # in the order of their gradients
_FIRST_CAPTURED = _TENSORS.index(CAPTURED[0])
_MAX_SEED = 2**63 - 1

for _signature in (FORWARD_VARIANT, BACKWARD_VARIANT):
    _library.define(_signature.schema, tags=(torch.Tag.pt2_compliant_tag,))
forward_op = torch.ops.pantile.forward_variant.default
backward_op = torch.ops.pantile.backward_variant.default


# ---- kernels


def _gradient_shape(bias: Tensor) -> tuple:
    """As the kernels write it: 1 along an axis of stride 0."""
    return tuple(
        1 if axis < 3 and (size == 1 or stride == 0) else size
        for axis, (size, stride) in enumerate(zip(bias.shape, bias.stride(), strict=True))
    )


def _own_elements(bias: Tensor) -> Tensor:
    """An expanded axis gets a gradient for each of its elements, so that it is made one of them."""
    expanded = any(
        size > 1 and stride == 0 for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    return bias.contiguous() if expanded else bias


# Of a caller that wants the gradients of q, k and v only.
ONLY_OPERANDS = (False, False, False, 0)


def _run_backward(
    grad_o, grad_lse, q, k, v, o, o_low, lse, variant, call, deterministic, wants, into=None
):
    """Of q, k, v, _WANTED and CAPTURED; None for those of the variant's that are not wanted.
    ``into``: as of run_backward."""
    variant = readable_variant(variant)
    *wants, bits = wants
    if wants[2]:
        variant = variant._replace(bias=_own_elements(variant.bias))
    shapes = (
        None if variant.alibi is None else variant.alibi.shape,
        None if variant.sinks is None else variant.sinks.shape,
        None if variant.bias is None else _gradient_shape(variant.bias),
    )
    gradients = [
        q.new_empty(shape, dtype=torch.float32) if wanted else None
        for shape, wanted in zip(shapes, wants, strict=True)
    ]
    captured = tuple(
        q.new_empty(getattr(variant, name).shape, dtype=torch.float32) if bits >> i & 1 else None
        for i, name in enumerate(CAPTURED)
    )
    changes = (variant, *gradients, captured if bits else None)
    grads = run_backward(
        grad_o, grad_lse, q, k, v, o, o_low, lse, call, deterministic, changes, into
    )
    if gradients[2] is not None:
        gradients[2] = gradients[2].to(variant.bias.dtype)
    rounded = (
        None if x is None else x.to(getattr(variant, name).dtype)
        for name, x in zip(CAPTURED, captured, strict=True)
    )
    return *grads, *gradients, *rounded


def _forward_kernel(*arguments):
    a = FORWARD_VARIANT.split(arguments)
    variant = readable_variant(variant_of(a))
    extras = a.max_logit, a.output_f32
    o, lse, o_low, max_logit = run_forward(
        a.q, a.k, a.v, bind(a.call), a.checked, True, extras, a.keep_low, variant
    )
    return o, lse, no_low(a.q, a.v) if o_low is None else o_low, _or_empty(max_logit, a.q)


def _wants_of(a) -> tuple[bool, bool, bool, int]:
    return a.wants_alibi, a.wants_sinks, a.wants_bias, a.wants_captured


def _not_wanted(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _backward_kernel(*arguments):
    a = BACKWARD_VARIANT.split(arguments)
    grads = _run_backward(
        *arguments[:8], variant_of(a), bind(a.call), a.deterministic, _wants_of(a)
    )
    return tuple(_not_wanted(a.q) if x is None else x for x in grads)


for _key in ("CPU", "CUDA"):
    _library.impl("forward_variant", _forward_kernel, _key)
    _library.impl("backward_variant", _backward_kernel, _key)


# ---- fake kernels


@torch.library.register_fake("pantile::forward_variant", lib=_library)
def _fake_forward(*arguments):
    a = FORWARD_VARIANT.split(arguments)
    _fake.check_forward(a.q, a.k, a.v, a.call, a.max_logit, a.output_f32, variant_of(a))
    return new_fake_extra(a)


@torch.library.register_fake("pantile::backward_variant", lib=_library)
def _fake_backward(*arguments):
    a = BACKWARD_VARIANT.split(arguments)
    variant = variant_of(a)
    _fake.check_backward(*arguments[:8], a.call, variant)
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(x, memory_format=contiguous) for x in (a.q, a.k, a.v)]
    *wants, bits = _wants_of(a)
    wants += [bool(bits >> i & 1) for i in range(len(CAPTURED))]
    for name, wanted in zip((*_WANTED, *CAPTURED), wants, strict=True):
        x = getattr(variant, name)
        grads.append(x.new_empty(x.shape) if wanted else _not_wanted(a.q))
    return tuple(grads)


# ---- autograd


class _VariantAttention(torch.autograd.Function):
    """First derivatives. ``how`` is (call, numbers of the variant, deterministic, checked, direct,
    wants, extras), as in _ops._Attention."""

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        *tensors, how, grad_mode = rest
        call, numbers, deterministic, checked, direct, (wants_lse, wants_low), extras = how
        variant = Variant(*tensors, *numbers)
        keep_low = wants_low or not extras[1]
        if direct:
            o, lse, o_low, max_logit = run_forward(
                q, k, v, call, checked, True, extras, keep_low, readable_variant(variant)
            )
        else:
            with lower(grad_mode):
                o, lse, o_low, max_logit = _dispatch(
                    q, k, v, call, variant, deterministic, checked, keep_low, extras
                )
        saved_low = o_low if keeps_low(q, o.dtype is q.dtype) else None
        tensors = (q, k, v, o, saved_low, lse, *tensors)
        if call.cu_seqlens_q is None:
            ctx.save_for_backward(*tensors)
        else:
            ctx.save_for_backward(*tensors, *lengths_of(call))
            call = call._replace(**NO_LENGTHS)
        ctx.how = (call, tuple(call), numbers, deterministic, direct, wants_lse)
        ctx.set_materialize_grads(False)
        whole = [
            x for x, wanted in ((o_low, wants_low), (max_logit, max_logit is not None)) if wanted
        ]
        ctx.mark_non_differentiable(*whole)
        return (o, lse, *whole) if wants_lse else (o, *whole)

    @staticmethod
    def backward(ctx, grad_o, *grads):
        call, fields, numbers, deterministic, direct, wants_lse = ctx.how
        grad_lse = grads[0] if wants_lse else None
        if grad_o is None and grad_lse is None:
            return (None,) * (3 + _COUNT + 2)
        q, k, v, o, o_low, lse, *others = ctx.saved_tensors
        variant = Variant(*others[:_COUNT], *numbers)
        lengths = others[_COUNT:]
        if is_compiling():
            call = Call(*fields)
        if lengths:
            call = call._replace(**dict(zip(LENGTHS, lengths, strict=True)))
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        if o.dtype is not q.dtype:
            o, o_low = split_output(o, q.dtype)
            grad_o = grad_o.to(q.dtype)
        needs = ctx.needs_input_grad[3 : 3 + _COUNT]
        bits = sum(1 << i for i in range(len(CAPTURED)) if needs[_FIRST_CAPTURED + i])
        wants = (*needs[: len(_WANTED)], bits)
        operands = (grad_o, q, k, v, o, lse)
        others = (grad_lse, o_low, *others)
        tensors = (grad_o, grad_lse, q, k, v, o, o_low, lse)
        if (
            direct
            and not torch.is_grad_enabled()
            and takes_short_cut((*operands, *present(others)))
        ):
            results = _run_backward(*tensors, variant, call, deterministic, wants)
        else:
            results = backward_op(
                *tensors, *variant[:_COUNT], *call, *variant[_COUNT:], deterministic, *wants
            )
        grads = dict(zip((*_WANTED, *CAPTURED), results[3:], strict=True))
        answer = [
            grads[name].reshape(x.shape) if wanted else None
            for name, x, wanted in zip(_TENSORS, variant, needs, strict=False)
        ]
        return *results[:3], *answer, None, None

    jvp = staticmethod(_no_forward_mode)


def _dispatch(q, k, v, call, variant, deterministic, checked, keep_low, extras):
    """(o, lse, o_low, max_logit or None) by the operator."""
    flags = (deterministic, checked, keep_low, *extras)
    *outputs, max_logit = forward_op(q, k, v, *variant[:_COUNT], *call, *variant[_COUNT:], *flags)
    return *outputs, max_logit if extras[0] else None


_VariantGradient = gradient_function(backward_op)


def _forward_autograd(*arguments):
    count = FORWARD_VARIANT.operand_count
    if not differentiates(x for x in present(arguments[:count]) if x.is_floating_point()):
        with below_autograd():
            return forward_op(*arguments)
    a = FORWARD_VARIANT.split(arguments)
    variant = variant_of(a)
    keep_low = keeps_low(a.q, a.keep_low)
    extras = a.max_logit, a.output_f32
    how = (
        a.call,
        tuple(variant[_COUNT:]),
        a.deterministic,
        a.checked,
        False,
        (True, keep_low),
        extras,
    )
    o, lse, *others = apply(_VariantAttention, a.q, a.k, a.v, *variant[:_COUNT], how)
    o_low = others.pop(0) if keep_low else no_low(a.q, a.v)
    return o, lse, o_low, _or_empty(others[0] if others else None, a.q)


def _backward_autograd(*arguments):
    tensors = present(arguments[: BACKWARD_VARIANT.operand_count])
    if differentiates(x for x in tensors if x.is_floating_point()):
        return apply(_VariantGradient, *arguments)
    with below_autograd():
        return backward_op(*arguments)


_library.impl("forward_variant", _forward_autograd, "Autograd")
_library.impl("backward_variant", _backward_autograd, "Autograd")


# ---- autocast, vmap, FLOPs


def _register_autocast(device_type: str, key: str) -> None:
    without_autocast = _torch_private.without_autocast(device_type, key)

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        castable = x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if castable else x

    def call(q, k, v, alibi, sinks, bias, *rest):
        dtype = torch.get_autocast_dtype(device_type)
        if bias is not None and bias.dtype is not torch.float32:
            bias = cast(bias, dtype)
        with without_autocast():
            return forward_op(*(cast(x, dtype) for x in (q, k, v)), alibi, sinks, bias, *rest)

    _library.impl("forward_variant", call, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# One call for each entry: with the same seed all have the same mask, as one by one.


def _vmap_forward(info, in_dims, *args):
    return mapped_in_a_loop(forward_op, info, in_dims, *args)


def _vmap_backward(info, in_dims, *args):
    return mapped_in_a_loop(backward_op, info, in_dims, *args)


torch.library.register_vmap("pantile::forward_variant", _vmap_forward, lib=_library)
torch.library.register_vmap("pantile::backward_variant", _vmap_backward, lib=_library)

for _op, _formula in (
    (torch.ops.pantile.forward_variant, forward_flops(FORWARD_VARIANT)),
    (torch.ops.pantile.backward_variant, backward_flops(BACKWARD_VARIANT)),
):
    flop_counter.register_flop_formula(_op, get_raw=True)(_formula)


# ---- calls


def _seed_of(dropout, q: Tensor) -> Tensor:
    """int64 [2] on the device of q. Drawn by an operator of torch: its generator, graphs and
    checkpoints know about it."""
    seed = dropout.seed
    if seed is None:
        return torch.randint(0, _MAX_SEED, (2,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        return seed
    # Fills, which a graph may capture; a copy from the host it may not.
    halves = [torch.full((1,), n, dtype=torch.int64, device=q.device) for n in seed_numbers(seed)]
    return torch.cat(halves)


def _checked(variant: Variant, q: Tensor) -> Variant:
    """After the checks that no kernel could make."""
    for name, x in zip(_TENSORS, variant, strict=False):
        if x is not None:
            _fake.check_operand(name, x, q)
    return variant


def _in_front(x, rank: int):
    """``x`` with axes of size 1 in front, which are shared."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return x
    return x[(None,) * (rank - x.ndim)] if 0 < x.ndim < rank else x


def _with_all_axes(variant: Variant) -> Variant:
    return variant._replace(
        bias=_in_front(variant.bias, 4),
        mask=_in_front(variant.mask, 4),
        query_ids=_in_front(variant.query_ids, 2),
        key_ids=_in_front(variant.key_ids, 2),
        block_mask=_in_front(variant.block_mask, 4),
    )


def explained_variant(variant: Variant, q: Tensor) -> Variant:
    return readable_variant(_with_all_axes(_checked(variant, q)))


def seeded_variant(variant: Variant, dropout, q: Tensor) -> Variant:
    """As the operators take it. ``dropout`` asks for a seed, or is None."""
    if dropout is not None:
        variant = variant._replace(dropout_seed=_seed_of(dropout, q))
    return _with_all_axes(variant)


def variant_attention(q, k, v, call, variant, dropout, deterministic, checked, return_lse, extras):
    """As _ops.attention. ``dropout`` asks for a seed, or is None."""
    extras = extras or (False, False)
    variant = seeded_variant(variant, dropout, q)
    tensors = variant[:_COUNT]
    if type(call) is _C.Call and nothing_watches(
        (q, k, v, *present(tensors), *present(lengths_of(call)))
    ):
        if records_any((q, k, v, *present(tensors))):
            return _recorded(q, k, v, call, variant, deterministic, checked, return_lse, extras)
        o, lse, _, max_logit = run_forward(
            q, k, v, call, checked, return_lse, extras, False, readable_variant(variant)
        )
        return _chosen(o, lse, max_logit, return_lse)
    if not is_compiling():
        prepare(q, k, v, lengths_of(call))
        _checked(variant, q)
    o, lse, _, max_logit = _dispatch(q, k, v, call, variant, deterministic, checked, False, extras)
    return _chosen(o, lse, max_logit, return_lse)


def _recorded(q, k, v, call, variant, deterministic, checked, return_lse, extras):
    """A plain eager call that autograd records."""
    how = (call, tuple(variant[_COUNT:]), deterministic, checked, True, (return_lse, False), extras)
    answer = apply(_VariantAttention, q, k, v, *variant[:_COUNT], how)
    return answer if len(answer) > 1 else answer[0]
