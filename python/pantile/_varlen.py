"""The public call for packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from pantile._arguments import check_flags
from pantile._attention import DENSE, PACKED_BY_NAME, make_call, packing_of, run
from pantile._foreign import refuse
from pantile._options import DEFAULT_OPTIONS, Options, resolve_options
from pantile._quantized import Quantized

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pantile._expressions import Score
    from pantile._types import Array, Lengths, PackedChoices, QuantizedChoices, Tensor, Window
    from pantile._variants import Dropout


@overload
def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **choices: Unpack[PackedChoices[Array]],
) -> Array: ...
@overload
def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **choices: Unpack[PackedChoices[Array]],
) -> tuple[Array, Array]: ...
@overload
def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **choices: Unpack[PackedChoices[Array]],
) -> tuple[Array, Array]: ...
@overload
def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **choices: Unpack[PackedChoices[Array]],
) -> tuple[Array, Array, Array]: ...
@overload
def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Lengths,
    cu_seqlens_k: Lengths | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = ...,
    return_max_logit: bool = ...,
    **choices: Unpack[PackedChoices[Array]],
) -> Array | tuple[Array, ...]: ...
@overload
def varlen_attention(
    q: Quantized, *, return_lse: Literal[False] = ..., **choices: Unpack[QuantizedChoices]
) -> Tensor: ...
@overload
def varlen_attention(
    q: Quantized, *, return_lse: Literal[True], **choices: Unpack[QuantizedChoices]
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    q: Quantized, *, return_lse: bool, **choices: Unpack[QuantizedChoices]
) -> Tensor | tuple[Tensor, Tensor]: ...
def varlen_attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *extra: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    mask_shift: Any = None,
    block_table: Any = None,
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
    """:func:`attention` over sequences of different lengths, packed one after the other.

    Args:
        q: ``[total_q, heads_q, head_dim]``; or FP8 operands, alone, which know their sequences.
        k, v: ``[total_k, heads_k, head_dim]`` and ``[total_k, heads_k, head_dim_v]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]`` on the device of q: sequence b holds rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. They start at 0, never decrease and end at
            the total. Their contents are checked on the CPU, and on a GPU when
            ``options.checked`` asks for it.
        max_seqlen_q, max_seqlen_k: no sequence is longer than these: what lies beyond them is not
            computed on a GPU. Neither has a default.
        seqused_q, seqused_k: int32 ``[batch]``: only the first ``seqused[b]`` rows of sequence b
            exist. The others give o = 0 and lse = -inf, and take no part in anything.
        k_begin: int32 ``[batch]``: the keys of sequence b are the rows of k and v from
            ``k_begin[b]`` to ``k_begin[b] + seqused_k[b]``, in place of ``cu_seqlens_k``, which is
            None then. Ranges may overlap and leave rows out: gradients of rows that several
            sequences see are summed. ``seqused_k`` is needed.
        mask_shift: int32 ``[batch]``: query i of sequence b sits at key position ``i +
            mask_shift[b]``, in place of ``i + keys - queries``; causal, window and alibi count from
            there. For parts of a longer sequence.
        block_table: int32 ``[batch, max_pages]``: k and v are pages, ``[pages, page_size, heads_k,
            head_dim]``, and key j of sequence b is slot ``j % page_size`` of page ``block_table[b,
            j // page_size]``. ``seqused_k`` gives the number of keys; ``cu_seqlens_k`` is None.
            Entries behind a sequence's last page are not read, and slots behind its last key take
            no part, whatever they hold. Strides of pages, slots and heads are free. No copy of k
            or v is ever made, and the backward is not served.
        causal, window, scale, return_lse, return_max_logit, deterministic, options, out: as in
            :func:`attention`; the mask is aligned to the bottom right of each sequence.
        softcap, alibi, bias, sinks, dropout, mask, score: as in :func:`attention`; rows and keys
            count from the start of their sequence, so that bias and mask broadcast to ``[batch,
            heads_q, max_seqlen_q, max_seqlen_k]``.

    Returns:
        o: ``[total_q, heads_q, head_dim_v]``; with ``return_lse`` also lse ``[heads_q, total_q]``,
        with ``return_max_logit`` also max_logit ``[batch, heads_q]``, of each sequence.

    Raises:
        As :func:`attention`.
    """
    if extra or foreign:
        refuse("varlen_attention", extra, foreign, (*PACKED_BY_NAME, "out"))
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    check_flags(return_lse, return_max_logit, deterministic)
    lengths = (
        *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        *(k_begin, mask_shift, block_table),
    )
    longest = (max_seqlen_q, max_seqlen_k)
    if type(q) is not Quantized:
        packing = packing_of(q, k, lengths, longest)
    elif any(x is not None for x in (*lengths, *longest)):
        raise TypeError("q is pantile.Quantized, which knows its sequences; leave theirs out")
    else:
        packing = DENSE  # not read
    call = make_call(packing, causal, window, scale, options, return_lse)
    change = softcap, alibi, bias, sinks, dropout, mask, score
    return run(q, k, v, call, options, deterministic, return_lse, return_max_logit, change, out)
