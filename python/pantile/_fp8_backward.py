"""The torch operator ``pantile::fp8_backward``: the backward of FP8 attention in FP8.

Of ``Options(fp8_backward="full")``, see _fp8_gradient.py. The gradients of a rotated q and k stay
rotated; in any case those of q are multiplied by the balance of the rotation and those of k divided
by it, which keeps the rotated ones as large as those of q and k.
"""

from __future__ import annotations

import torch
from torch.utils import flop_counter

from pantile import _C, _fake, _ops
from pantile._fast_path import is_plain, present
from pantile._flops import visible_pairs_of_call
from pantile._fp8_numbers import check_forms, follow_threads
from pantile._schema import FP8_BACKWARD, bind
from pantile._torch_private import below_autograd

Tensor = torch.Tensor

_library = torch.library.Library("pantile", "FRAGMENT")
_library.define(FP8_BACKWARD.schema, tags=(torch.Tag.pt2_compliant_tag,))
fp8_backward_op = torch.ops.pantile.fp8_backward.default


def _operands_of(a) -> tuple:
    """As the bindings take all operands; those that no backward reads are left out."""
    return a.codes_q, a.codes_k, a.codes_v, a.scale_q, a.scale_kv, None, a.q_dot_mean, None


def _new_gradients(a) -> tuple:
    dense = (a.batch,) if a.call.cu_seqlens_q is None else ()
    heads_q, heads_k = a.codes_q.shape[0], a.codes_k.shape[0]
    shapes = (
        (a.rows, heads_q, a.head_dim),
        (a.keys, heads_k, a.head_dim),
        (a.keys, heads_k, a.codes_v.shape[2]),
    )
    return tuple(a.o.new_empty((*dense, *shape)) for shape in shapes)


def run_fp8_backward(*arguments):
    """Of operands and outputs that belong to one forward."""
    a = FP8_BACKWARD.split(arguments)
    follow_threads()
    grads = _new_gradients(a)
    grad_lse = None if a.grad_lse is None else a.grad_lse.contiguous()
    _C.backward_fp8(
        *(_operands_of(a), a.grad_o.contiguous(), grad_lse, a.o, a.lse, grads, a.head_dim, a.keys),
        *(bind(a.call), a.block_q, a.block_k, a.smooth_k, a.deterministic),
    )
    return grads


def require_kernel(a, o: Tensor, lse: Tensor) -> None:
    """Raises before the forward what the backward would raise for want of a kernel. ``a``: the
    arguments of fp8_forward, ``o`` and ``lse``: its outputs."""
    if not all(map(is_plain, (a.codes_q, o))):
        return  # a traced program: the operator's fake kernel says so
    _C.backward_fp8(
        *(_operands_of(a), o, None, o, lse, None, a.head_dim, a.keys, bind(a.call)),
        *(a.block_q, a.block_k, a.smooth_k, a.deterministic),
    )


_READ = ("codes_q", "codes_k", "codes_v", "scale_q", "scale_kv")


def _check(a) -> None:
    check_forms(a, _READ, a.smooth_k)
    like_lse = (*a.o.shape[:-3], a.o.shape[-2], a.o.shape[-3])
    for name, x, dtype, shape in (
        ("grad_o", a.grad_o, a.o.dtype, a.o.shape),
        ("lse", a.lse, torch.float32, like_lse),
        ("grad_lse", a.grad_lse, torch.float32, like_lse),
    ):
        if x is not None:
            _fake.require_dtype(name, x, dtype)
            _fake.require_shape(name, *_fake.known_shapes(x.shape, shape))


def _fp8_backward_kernel(*arguments):
    _check(FP8_BACKWARD.split(arguments))
    return run_fp8_backward(*arguments)


@torch.library.register_fake("pantile::fp8_backward", lib=_library)
def _fake_fp8_backward(*arguments):
    a = FP8_BACKWARD.split(arguments)
    _check(a)
    grads = _new_gradients(a)

    def check(*arguments, **_):
        flags = a.block_q, a.block_k, a.smooth_k, a.deterministic
        found = _C.explain_backward_fp8(*arguments, *flags)
        if found["kernel"] is None:
            raise _C.UnsupportedError(found["reason"])

    if a.o.device.type == "cpu":
        _fake.checked_call(check, *grads, a.call)
    return grads


_Fp8Gradient = _ops.gradient_function(fp8_backward_op)


def _fp8_backward_autograd(*arguments):
    if _ops.differentiates(present(arguments[: FP8_BACKWARD.operand_count])):
        return _ops.apply(_Fp8Gradient, *arguments)
    with below_autograd():
        return fp8_backward_op(*arguments)


def _vmap_fp8_backward(info, in_dims, *args):
    return _ops.mapped_in_a_loop(fp8_backward_op, info, in_dims, *args)


for _key in ("CPU", "CUDA"):
    _library.impl("fp8_backward", _fp8_backward_kernel, _key)
_library.impl("fp8_backward", _fp8_backward_autograd, "Autograd")
torch.library.register_vmap("pantile::fp8_backward", _vmap_fp8_backward, lib=_library)


@flop_counter.register_flop_formula(torch.ops.pantile.fp8_backward, get_raw=True)
def _fp8_backward_flops(*arguments, out_val=None, **_) -> int:
    a = FP8_BACKWARD.split(arguments)
    pairs = visible_pairs_of_call(a.batch, a.rows, a.keys, a.call)
    return 2 * a.codes_q.shape[0] * pairs * (3 * a.head_dim + 2 * a.codes_v.shape[2])
