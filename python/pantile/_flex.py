"""A door with the arguments of torch's ``flex_attention``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pantile import _C
from pantile._arguments import flag, shown
from pantile._attention import attention
from pantile._expressions import Mask
from pantile._mask_forms import CombinableMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from pantile._expressions import Score
    from pantile._types import Mask as AnyMask
    from pantile._types import Tensor, Window


class TorchBlockMask(Protocol):
    """What torch's ``create_block_mask`` makes."""

    mask_mod: Any
    kv_num_blocks: Any


# Of torch's kernels. What changes results is not among them.
_KERNEL_OPTIONS = (
    *("num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2"),
    *("BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
    *("FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu"),
    "BACKEND",
)


@dataclass(frozen=True, eq=False)
class FlexMask:
    """What a query sees, for :func:`flex_attention`, in place of torch's ``create_block_mask``:
    nothing is made for each length.

    causal: up to its own position, aligned to the bottom right: of as many queries as keys the
        mask ``q_idx >= kv_idx``.
    window: ``(left, right)`` as in :func:`pantile.attention`.
    mask: a bool tensor, a :class:`pantile.BlockMask` or a :class:`pantile.Documents`, whose ids say
        which document a token belongs to.

    A key is visible when all three show it.
    """

    causal: bool = False
    window: Window | None = None
    mask: AnyMask | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | Score | None = None,
    block_mask: FlexMask | CombinableMask | Mask | TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention with the arguments and the layout of ``torch.nn.attention.flex_attention``.

    ``score_mod`` and the ``mask_mod`` of a mask are called once and traced; a later call of the
    same function calls it again unless only the values of captured tensors can have changed:
    arithmetic, comparisons, ``torch.where``, ``tanh``, ``exp``, ``log``, ``sqrt``, ``abs``,
    ``clamp``, ``minimum``, ``maximum`` and what is made of them, and captured tensors that are
    indexed by numbers. What torch computes of tensors alone may be anything. Gradients reach
    captured real tensors. An operation that is not traced is refused by its name.

    Args:
        query, key, value: ``[batch, heads, seqlen, head_dim]``.
        score_mod: ``f(score, b, h, q_idx, kv_idx)``, or a :class:`pantile.Score`.
        block_mask: what torch's ``create_block_mask`` makes; or a :class:`FlexMask`, or one of the
            masks that it holds. Masks that kernels know (causal, windows, documents) are found in
            the function of torch's mask.
        scale: default ``head_dim ** -0.5``.
        enable_gqa: key and value may have fewer heads.
        return_lse: also return the log-sum-exp ``[batch, heads, seqlen]``.
        kernel_options: of torch's kernels; without effect.
        return_aux: torch's ``AuxRequest``; ``lse`` is served.

    Returns:
        out ``[batch, heads, seqlen, head_dim_v]``, or the pair (out, lse), or with ``return_aux``
        the pair (out, ``AuxOutput``).

    Raises:
        pantile.UnsupportedError: a function cannot be traced; the message names the operation.
    """
    flag("enable_gqa", enable_gqa)
    if kernel_options is not None:
        from pantile._flex_masks import refuse_kernel_options

        refuse_kernel_options(kernel_options, _KERNEL_OPTIONS)
    wants_lse = _wants_lse(return_lse, return_aux)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa is False; query has {query.shape[1]} heads and key {key.shape[1]}, which "
            "needs enable_gqa=True"
        )
    causal, window, mask = _visible(block_mask, query, key)
    score = None
    if score_mod is not None:
        from pantile._flex_masks import score_of

        score = score_of(score_mod)
    answer = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        causal=causal,
        window=window,
        mask=mask,
        score=score,
        scale=scale,
        return_lse=wants_lse,
    )
    o, lse = answer if wants_lse else (answer, None)
    o = o.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return o, AuxOutput(lse=lse, max_scores=None)
    return (o, lse) if return_lse else o


def _wants_lse(return_lse: bool, return_aux: Any) -> bool:
    if return_aux is None:
        return return_lse
    if return_lse:
        raise ValueError("return_lse and return_aux are both set; give one of them")
    if return_aux.max_scores:
        raise _C.UnsupportedError(
            "return_aux asks for max_scores; use return_max_logit of pantile.attention, of a head"
        )
    return return_aux.lse


def _visible(block_mask: Any, query: Tensor, key: Tensor) -> tuple[bool, Any, Any]:
    """causal, window and mask of pantile.attention."""
    if block_mask is None:
        return False, None, None
    if isinstance(block_mask, FlexMask):
        return block_mask.causal, block_mask.window, block_mask.mask
    if isinstance(block_mask, CombinableMask | Mask):
        return False, None, block_mask
    if not hasattr(block_mask, "mask_mod") or not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask is {shown(block_mask)}; it must be a BlockMask of torch, a "
            "pantile.FlexMask, or a mask that it holds"
        )
    from pantile._flex_masks import masks_of

    left, right, mask = masks_of(block_mask, query.shape[0], query.shape[2], key.shape[2])
    return False, (left, right), mask
