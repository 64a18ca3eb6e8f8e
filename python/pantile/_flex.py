"""A door with the arguments of torch's ``flex_attention``, for the masks that pantile has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pantile import _C
from pantile._arguments import flag, shown
from pantile._attention import attention
from pantile._mask_forms import BlockMask, Documents

if TYPE_CHECKING:
    from pantile._types import Mask, Tensor, Window

_SCORE_MOD = (
    "functions of scores are not traced; use softcap, alibi, bias or sinks of pantile.attention"
)


@dataclass(frozen=True, eq=False)
class FlexMask:
    """What a query sees, for :func:`flex_attention`, in place of torch's ``create_block_mask``.

    causal: up to its own position, aligned to the bottom right: of as many queries as keys the
        mask ``q_idx >= kv_idx``.
    window: ``(left, right)`` as in :func:`pantile.attention`.
    mask: a bool tensor, a :class:`pantile.BlockMask` or a :class:`pantile.Documents`, whose ids say
        which document a token belongs to.

    A key is visible when all three show it.
    """

    causal: bool = False
    window: Window | None = None
    mask: Mask | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: FlexMask | BlockMask | Documents | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
) -> Any:
    """Attention with the arguments and the layout of ``torch.nn.attention.flex_attention``.

    Args:
        query, key, value: ``[batch, heads, seqlen, head_dim]``.
        score_mod: refused: functions of scores are not traced.
        block_mask: a :class:`FlexMask`, or one of the masks that it holds. A mask that torch's
            ``create_block_mask`` made is refused.
        scale: default ``head_dim ** -0.5``.
        enable_gqa: key and value may have fewer heads.
        return_lse: also return the log-sum-exp ``[batch, heads, seqlen]``.
        kernel_options: of torch's kernels; without effect.

    Returns:
        out ``[batch, heads, seqlen, head_dim_v]``, or the pair (out, lse).

    Raises:
        pantile.UnsupportedError: ``score_mod`` is given, or torch made the mask.
    """
    flag("enable_gqa", enable_gqa)
    if score_mod is not None:
        raise _C.UnsupportedError(f"score_mod is {shown(score_mod)}; {_SCORE_MOD}")
    if block_mask is None:
        block_mask = FlexMask()
    elif isinstance(block_mask, BlockMask | Documents):
        block_mask = FlexMask(mask=block_mask)
    elif not isinstance(block_mask, FlexMask):
        raise _C.UnsupportedError(
            f"block_mask is a {type(block_mask).__name__}; it must be a pantile.FlexMask, "
            "pantile.BlockMask or pantile.Documents: functions of indices are not traced"
        )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa is False; query has {query.shape[1]} heads and key {key.shape[1]}, which "
            "needs enable_gqa=True"
        )
    answer = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        causal=block_mask.causal,
        window=block_mask.window,
        mask=block_mask.mask,
        scale=scale,
        return_lse=return_lse,
    )
    if not return_lse:
        return answer.transpose(1, 2)
    o, lse = answer
    return o.transpose(1, 2), lse
