"""The public calls: arguments are brought into the form of the operators here, and nowhere else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, overload

from pantile import _C
from pantile._arguments import check_flags, optional_scale
from pantile._expressions import Score
from pantile._foreign import refuse
from pantile._masks import window_bounds
from pantile._options import (
    DEFAULT_OPTIONS,
    FP8_FORMAT,
    Options,
    extras_of,
    refuse_extras,
    resolve_options,
)
from pantile._packing import packed_fields
from pantile._quantized import Quantized
from pantile._schema import LENGTHS, Call
from pantile._variants import NAMES as VARIANT_NAMES
from pantile._variants import Dropout, refuse_in_fp8, resolve_variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pantile._types import Array, Choices, QuantizedChoices, Tensor, Window

# pantile._ops once torch has been seen; importing pantile does not import torch.
_torch_ops = None
_tensor_type = None  # torch.Tensor then, of calls that may take the short way


def _is_compiling() -> bool:  # torch's function of that name, then
    return False


def load_torch() -> None:
    """Registers the torch operators, if the program has imported torch."""
    global _torch_ops, _tensor_type, _is_compiling
    if _torch_ops is None and sys.modules.get("torch") is not None:  # None: its import is barred
        from pantile import (  # noqa: F401 (operators)
            _fp8_ops,
            _kept,
            _kv_ops,
            _ops,
            _out,
            _variant_ops,
        )

        _torch_ops, _is_compiling = _ops, _ops.is_compiling
        if DEFAULT_OPTIONS.backend != "torch":
            _tensor_type = _ops.Tensor


def _engine(q: object) -> Any:
    """The module that serves q: pantile._ops for torch tensors, pantile._numpy for arrays."""
    if _torch_ops is None:
        load_torch()
    if _torch_ops is not None and isinstance(q, _torch_ops.Tensor):
        return _torch_ops
    if sys.modules.get("numpy") is not None:
        from pantile import _numpy

        if isinstance(q, _numpy.np.ndarray):
            return _numpy
    raise TypeError(f"q is a {type(q).__name__}; it must be a torch.Tensor or a numpy.ndarray")


def _variant_engine(engine: Any) -> Any:
    if engine is _torch_ops:
        from pantile import _variant_ops as engine  # beside _ops
    return engine


def run(q, k, v, call, options: Options, deterministic, return_lse, return_max_logit, change, out):
    """By the operator that serves the call. ``change``: the values of VARIANT_NAMES."""
    if options.backend == "torch":
        asked = return_lse, return_max_logit, deterministic
        if torch_serves(q, call, change, options, asked, out):
            return _torch_backend().attention(q, k, v, call, change)
    flags = deterministic, options.checked, return_lse
    if out is not None:
        return _run_into(out, q, k, v, call, options, flags, return_max_logit, change)
    if type(q) is Quantized:
        if k is not None or v is not None:
            raise TypeError("k and v are set; they must be left out when q is pantile.Quantized")
        refuse_extras(return_max_logit, options)
        refuse_in_fp8(change)
        return _fp8_ops().attention(q, call, (options.fp8_exp, options.fp8_backward), *flags)
    engine = _engine(q)
    if not options.fp8:
        extras = extras_of(return_max_logit, options)
        variant = resolve_variant(*change)
        if variant is None:
            return engine.attention(q, k, v, call, *flags, extras)
        return _variant_engine(engine).variant_attention(q, k, v, call, *variant, *flags, extras)
    refuse_extras(return_max_logit, options)
    refuse_in_fp8(change)
    refuse_places_in_fp8(call)
    _require_torch(engine)
    how = options.fp8_exp, options.fp8_backward
    return _fp8_ops().quantized_attention(q, k, v, call, FP8_FORMAT, how, *flags)


def _torch_backend() -> Any:
    from pantile import _torch_backend

    return _torch_backend


def torch_serves(q, call, change: tuple, options: Options, asked: tuple, out=None) -> bool:
    """Whether torch's own attention does it: or an error says why not, if the code asked for it.
    Where only the environment did, the table of kernels serves the rest. ``asked``: return_lse,
    return_max_logit and deterministic."""
    if _torch_ops is None or not isinstance(q, _torch_ops.Tensor):
        if options.backend_preferred:
            return False
        name = type(q).__name__
        raise TypeError(f"q is a {name}; with options.backend torch it must be a torch.Tensor")
    if options.backend_preferred:
        return _torch_backend().serves(call, change, options, asked, out)
    _torch_backend().require_served(call, change, options, asked, out)
    return True


def refuse_places_in_fp8(call) -> None:
    for name in LENGTHS[4:]:
        if getattr(call, name) is not None:
            raise ValueError(f"{name} is given; FP8 attention does not serve it")


def _run_into(out, q, k, v, call, options: Options, flags: tuple, return_max_logit, change):
    """The same, where o goes to ``out``."""
    if type(q) is Quantized or options.fp8:
        raise ValueError("out is given; FP8 attention does not write into a tensor of the caller")
    engine = _engine(q)
    extras = extras_of(return_max_logit, options)
    variant = resolve_variant(*change) or (None, None)
    if engine is _torch_ops:
        from pantile import _out

        return _out.attention(q, k, v, out, call, *variant, *flags[1:], extras)
    return engine.attention_into(q, k, v, out, call, *variant, *flags, extras)


def _fp8_ops() -> Any:
    from pantile import _fp8_ops

    return _fp8_ops


def _require_torch(engine: Any) -> None:
    if engine is not _torch_ops:
        raise TypeError("q is a numpy.ndarray; FP8 needs a torch.Tensor")


DENSE = ((None,) * len(LENGTHS)) + (0, 0)  # the packing of a call without one


def make_call(packing: tuple, causal, window, scale, options: Options, return_lse: bool):
    """The call of the bindings. Of a program that is being traced, or whose numbers are symbols:
    one in Python, which the operators take."""
    if _torch_ops is None:
        load_torch()  # for _is_compiling
    left, right = window_bounds(causal, window)
    scale = None if scale is None else optional_scale(scale)
    options = options.call_fields[1 if return_lse else 0]  # torch 2.11 traces no bool as index
    if _is_compiling() or not (
        type(left) is type(right) is int
        and (scale is None or type(scale) is float)
        and (packing is DENSE or type(packing[-2]) is type(packing[-1]) is int)
    ):
        return Call(*packing, scale, left, right, *options)
    return _C.Call(*packing, scale, left, right, *options)


# Of calls that say no more than `causal`, which go a shorter way.
_PLAIN_CALLS = {
    causal: _C.Call(*DENSE, None, *window_bounds(causal, None), *DEFAULT_OPTIONS.call_fields[0])
    for causal in (False, True)
}


_BY_NAME = (
    *("causal", "window", "scale", *VARIANT_NAMES),
    *("return_lse", "return_max_logit", "deterministic", "options"),
)
PACKED_BY_NAME = (*LENGTHS[2:], *_BY_NAME)


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **choices: Unpack[Choices[Array]],
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **choices: Unpack[Choices[Array]],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **choices: Unpack[Choices[Array]],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **choices: Unpack[Choices[Array]],
) -> tuple[Array, Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **choices: Unpack[Choices[Array]],
) -> Array | tuple[Array, ...]: ...
@overload
def attention(
    q: Quantized, *, return_lse: Literal[False] = ..., **choices: Unpack[QuantizedChoices]
) -> Tensor: ...
@overload
def attention(
    q: Quantized, *, return_lse: Literal[True], **choices: Unpack[QuantizedChoices]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Quantized, *, return_lse: bool, **choices: Unpack[QuantizedChoices]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *extra: Any,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout: float | Dropout | None = None,
    mask: Any = None,
    score: Score | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    options: Options | None = None,
    out: Any = None,
    **foreign: Any,
) -> Any:
    """Exact attention, ``softmax(Q K^T * scale + mask) V``, without storing the score matrix.

    Algorithm: FlashAttention-2 (Dao 2023, sections 3.1 and 3.2), with the online softmax of
    Milakov and Gimelshein (2018).

    Args:
        q: ``[batch, seqlen_q, heads_q, head_dim]``; float32, float16 or bfloat16; a torch tensor
            on the CPU or a CUDA device, or a NumPy array (CPU, forward only). Or FP8 operands,
            alone, as :func:`pantile.fp8.attention` takes them.
        k: ``[batch, seqlen_k, heads_k, head_dim]``, dtype and device of q. ``heads_q`` must be a
            multiple of ``heads_k``: query head h attends with key head ``h // (heads_q //
            heads_k)`` (grouped-query attention).
        v: ``[batch, seqlen_k, heads_k, head_dim_v]``; head dims are 1 to 512 and may differ.
        causal: a row sees keys up to its own position, aligned bottom-right: row i of
            ``seqlen_q`` sees keys j <= i + seqlen_k - seqlen_q.
        window: ``(left, right)``: a row sees keys from ``left`` before to ``right`` after its
            position, both ends included; ``None`` or -1 lifts a side. Combines with ``causal``.
        scale: multiplies the scores; default ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay.
        alibi: slopes, float32 ``[heads_q]`` or ``[batch, heads_q]``: the score of query i and key j
            loses ``slope * |i + seqlen_k - seqlen_q - j|``, after the softcap. Differentiable.
        bias: added to the scores after that, ``[batch, heads_q, seqlen_q, seqlen_k]`` or what
            broadcasts to it, best with axes of size 1; float32 or the dtype of q. Differentiable.
        sinks: float32 ``[heads_q]``: a score of each head, not scaled, for a key without a value;
            the weights of a row sum to less than 1, and lse contains it. Differentiable.
        dropout: a probability or a :class:`pantile.Dropout`: removes weights after the softmax.
        mask: a bool tensor that broadcasts to ``[batch, heads_q, seqlen_q, seqlen_k]``, True where
            a query sees a key, a :class:`pantile.BlockMask`, :class:`pantile.Documents` or
            :class:`pantile.Prefix`, these combined with ``&`` and ``|``, or a
            :class:`pantile.Mask`.
        score: a :class:`pantile.Score`, a function of the scores after softcap, alibi and bias.
        return_lse: also return the log-sum-exp of each row's scores.
        return_max_logit: also return the largest scaled score of each head.
        deterministic: bit-equal gradients for equal inputs; also on when
            ``torch.use_deterministic_algorithms`` is.
        options: see :class:`pantile.Options`.
        out: a tensor that o is written to, and that is returned as o: of the shape of o, the dtype
            of q or float32, any strides that do not overlap and are 1 along the last axis. Nothing
            between its rows is touched. It must share no element with q, k and v. The call has no
            gradient.

    Returns:
        o: ``[batch, seqlen_q, heads_q, head_dim_v]``, contiguous, dtype of q unless
        ``options.output_dtype`` says otherwise; or ``out``. With ``return_lse`` the pair (o, lse),
        lse float32, natural logarithm, ``[batch, heads_q, seqlen_q]``. Both are differentiable
        once. A row that sees no key has o = 0, lse = -inf and zero gradients. With
        ``return_max_logit`` the last
        element is max_logit, float32 ``[batch, heads_q]``, not differentiable: -inf where no row
        sees a key, NaN where some row's lse is.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and the rule.
        pantile.UnsupportedError: valid, but no compiled kernel serves it; says why each refused.
        RuntimeError: the device or the build lacks what is needed, or CUDA failed.
    """
    if extra or foreign:
        refuse("attention", extra, foreign, (*_BY_NAME, "out"))
    if (
        options is window is scale is softcap is alibi is bias is out is None
        and sinks is dropout is mask is score is None
        and return_lse is return_max_logit is deterministic is False
        and type(causal) is bool
        and not _is_compiling()
    ):
        if type(q) is _tensor_type:
            return _torch_ops.plain_attention(q, k, v, _PLAIN_CALLS[causal])
        if _tensor_type is not None and _torch_ops.is_dtensor(q):
            o = _torch_ops.plain_sharded_attention(q, k, v, _PLAIN_CALLS[causal])
            if o is not None:
                return o
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    check_flags(return_lse, return_max_logit, deterministic)
    call = make_call(DENSE, causal, window, scale, options, return_lse)
    change = softcap, alibi, bias, sinks, dropout, mask, score
    return run(q, k, v, call, options, deterministic, return_lse, return_max_logit, change, out)


def packing_of(q, k, lengths: tuple, longest: tuple) -> tuple:
    return packed_fields(q, k, lengths, longest, in_range=not _is_compiling())  # else when it runs
