"""pantile.explain and pantile.compile: what a call would do, and its kernels made ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pantile import _C
from pantile._arguments import check_flags, flag, shown
from pantile._attention import (
    DENSE,
    PACKED_BY_NAME,
    _engine,
    _fp8_ops,
    _require_torch,
    _variant_engine,
    make_call,
    packing_of,
    refuse_places_in_fp8,
    torch_serves,
)
from pantile._explain import (
    Explanation,
    PassExplanation,
    explain_call,
    explain_fp8_call,
    wanted_gradients,
)
from pantile._expressions import Score
from pantile._foreign import refuse
from pantile._options import (
    DEFAULT_OPTIONS,
    FP8_FORMAT,
    Options,
    extras_of,
    refuse_extras,
    resolve_options,
)
from pantile._schema import PACKING
from pantile._variants import Dropout, refuse_in_fp8, resolve_variant

if TYPE_CHECKING:
    from pantile._types import Array, Lengths, Window


def require_no_lengths(lengths: tuple, longest: tuple) -> None:
    """Of dense tensors: what belongs to packed ones must be left out."""
    for name, value in zip(PACKING[2:], (*lengths[2:], *longest), strict=True):
        if value is not None:
            raise ValueError(
                f"{name} is {shown(value)}; lengths need cu_seqlens_q and cu_seqlens_k, or must be "
                "left out"
            )


def _describe(q, k, v, lengths: tuple, longest: tuple, mask: tuple, options: Options, lse: bool):
    """Engine, operands and call of dense or packed tensors; ``mask``: causal, window, scale."""
    if lengths[0] is None and lengths[1] is None:
        require_no_lengths(lengths, longest)
        packing = DENSE
    else:
        packing = packing_of(q, k, lengths, longest)
    call = make_call(packing, *mask, options, lse)
    engine = _engine(q)
    operands = engine.prepare(q, k, v, lengths)
    return engine, operands, engine.final_call(q, call)


def _variant_of(engine, q, change: tuple):
    """``change``: softcap, alibi, bias, sinks, dropout, mask, score."""
    resolved = resolve_variant(*change)
    return None if resolved is None else _variant_engine(engine).explained_variant(resolved[0], q)


def explain_torch(q, call, change, options: Options, asked: tuple) -> Explanation | None:
    """Of a call that torch's own attention serves; None: the table of kernels does."""
    reason = ""
    try:
        if not torch_serves(q, call, change, options, asked):
            return None
    except _C.UnsupportedError as error:
        reason = str(error)
    kernel = None if reason else "torch.nn.functional.scaled_dot_product_attention"
    both = PassExplanation(kernel, 0, 0, 0, 0, "", (), reason, ())
    return Explanation(both, both)


def explain(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *extra: Any,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
    k_begin: Lengths | None = None,
    mask_shift: Lengths | None = None,
    block_table: Lengths | None = None,
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
    verbose: bool = False,
    **foreign: Any,
) -> Explanation:
    """What :func:`attention` (or, with ``cu_seqlens``, :func:`varlen_attention`) would do.

    Takes the arguments of those calls, runs nothing, and answers with a printable object: the
    kernel of each pass, its tiles and workspace, the copies made first, and a line for each
    backend that says why it does not serve. With ``verbose`` it prints one for each row of the
    kernel table; ``rows`` of each pass holds them in any case.

    Raises:
        TypeError, ValueError: as the call itself would. What no kernel serves raises nothing here:
        the answer says why.
    """
    if extra or foreign:
        refuse("explain", extra, foreign, (*PACKED_BY_NAME, "verbose"))
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    check_flags(return_lse, return_max_logit, deterministic)
    flag("verbose", verbose)
    lengths = (
        *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        *(k_begin, mask_shift, block_table),
    )
    longest = (max_seqlen_q, max_seqlen_k)
    engine, operands, call = _describe(
        q, k, v, lengths, longest, (causal, window, scale), options, return_lse
    )
    change = (softcap, alibi, bias, sinks, dropout, mask, score)
    asked = return_lse, return_max_logit, deterministic
    if options.backend == "torch" and (answer := explain_torch(q, call, change, options, asked)):
        return answer
    if not options.fp8:
        extras = extras_of(return_max_logit, options)
        variant = _variant_of(engine, q, change)
        return explain_call(operands, call, deterministic, extras, verbose, variant)
    refuse_in_fp8(change)
    refuse_places_in_fp8(call)
    refuse_extras(return_max_logit, options)
    _require_torch(engine)
    rounded = _fp8_ops().like_backward(operands)
    fp8 = (*FP8_FORMAT, options.fp8_exp)
    mode = options.fp8_backward
    saved = _fp8_ops().saved_bytes(operands, call, FP8_FORMAT, mode != "recompute")
    how = mode, deterministic, verbose
    return explain_fp8_call(operands, rounded, call, fp8, how, saved)


def compile(  # noqa: A001 (read as pantile.compile)
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *extra: Any,
    seqused_q: Lengths | None = None,
    seqused_k: Lengths | None = None,
    k_begin: Lengths | None = None,
    mask_shift: Lengths | None = None,
    block_table: Lengths | None = None,
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
    backward: bool = True,
    **foreign: Any,
) -> None:
    """Compiles or loads the kernels that a call would compile or load at its first time.

    Takes the arguments of :func:`attention` (or, with ``cu_seqlens``, :func:`varlen_attention`),
    launches nothing and reads no tensor. Call it before a CUDA graph is captured, or before a
    server takes requests. Calls with softcap, alibi, bias or dropout need it; the kernels of all
    others are in the library. Lengths, strides and values do not matter: only dtype, head dims,
    the kind of mask, which of those arguments are given, and which gradients are wanted.

    Args:
        backward: also the backward, with the gradients of the tensors that require them.

    Raises:
        TypeError, ValueError, pantile.UnsupportedError: as the call itself would.
        RuntimeError: there is no compiler, or it failed; the message says where it was looked for.
    """
    if extra or foreign:
        refuse("compile", extra, foreign, (*PACKED_BY_NAME, "backward"))
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    check_flags(return_lse, return_max_logit, deterministic)
    flag("backward", backward)
    lengths = (
        *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        *(k_begin, mask_shift, block_table),
    )
    longest = (max_seqlen_q, max_seqlen_k)
    engine, operands, call = _describe(
        q, k, v, lengths, longest, (causal, window, scale), options, return_lse
    )
    change = (softcap, alibi, bias, sinks, dropout, mask, score)
    asked = return_lse, return_max_logit, deterministic
    if options.backend == "torch" and torch_serves(q, call, change, options, asked):
        return  # torch compiles nothing beforehand
    if options.fp8:
        refuse_in_fp8(change)
        refuse_places_in_fp8(call)
        return
    max_logit, output_f32 = extras_of(return_max_logit, options) or (False, False)
    variant = _variant_of(engine, q, change)
    gradients = wanted_gradients(variant)
    _C.compile_call(
        *operands, call, deterministic, max_logit, output_f32, variant, gradients, backward
    )
