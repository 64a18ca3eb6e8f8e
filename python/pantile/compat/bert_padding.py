"""Padded batches to packed sequences and back, under the names of ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch

from pantile.compat._shared import Tensor

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of x."""
    return x.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Removes the padding; waits for the device to know how many tokens there are.

    Args:
        hidden_states: ``[batch, seqlen, ...]``.
        attention_mask: bool or integer ``[batch, seqlen]``, 1 where a token is.
        unused_mask: the same, 1 where memory is kept for a token that does not exist.

    Returns:
        (tokens ``[total, ...]``, their indices in the flattened batch, cu_seqlens int32, length of
        the longest sequence, seqused int32 ``[batch]``).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(lengths.max()) if lengths.numel() else 0,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """``[batch, seqlen, ...]`` with the tokens at ``indices``, zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
