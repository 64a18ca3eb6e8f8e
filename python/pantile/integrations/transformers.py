"""pantile as an attention implementation of Hugging Face transformers.

    import pantile.integrations.transformers

    pantile.integrations.transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="pantile")

Two functions are registered under the name: attention, and the mask that goes with it. Without the
second one transformers would hand over no mask at all, and padded batches would be silently wrong.

Served: causal and bidirectional attention, grouped heads, dropout, softcap (Gemma 2), sinks
(GPT-OSS), sliding windows, position bias (T5), padding, packed sequences (by ``position_ids`` that
start again, or by ``cu_seq_lens_q`` and ``cu_seq_lens_k``), dynamic and static caches. A mask that
is none of these arrives as a bool tensor and is served as one. What is not served is refused by
name.
"""

from __future__ import annotations

from typing import Any

import torch

from pantile import _C
from pantile._arguments import shown
from pantile._attention import attention
from pantile._mask_forms import Documents
from pantile._varlen import varlen_attention
from pantile.compat.bert_padding import pad_input, unpad_input

Tensor = torch.Tensor

__all__ = ["attention_forward", "attention_mask", "register"]

NAME = "pantile"
_MODULE = "transformers.masking_utils"
_AND = "and_masks.<locals>.and_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
# By positions in a sequence, which differ by 1 from token to token: as by indices.
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_ALL = "bidirectional_mask_function"
# Masks that attention_forward makes from its keywords.
_KNOWN = (
    "causal_mask_function",
    _ALL,
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    _PACKED,
)
# Keywords of other implementations that would change the result.
_REFUSED = {
    "block_table": "paged keys are not served yet",
    "cache": "continuous batching takes the implementations of transformers only",
    "head_mask": "use attn_implementation='eager'",
    "layer_head_mask": "use attn_implementation='eager'",
    "output_attentions": "weights are never stored; use attn_implementation='eager'",
    "sinks": "give them as s_aux",
}
_MISSING: Any = object()


# ---- the mask


def _closure(function: Any) -> dict:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))


def _leaves(mask_function: Any) -> list | None:
    """The known masks of which ``mask_function`` is the intersection; None: it is another one."""
    name = getattr(mask_function, "__qualname__", "")
    if getattr(mask_function, "__module__", "") != _MODULE:
        return None
    if name in _KNOWN:
        return [mask_function]
    if name == _REMAPPED:
        return _leaves(_closure(mask_function)["mask_function"])
    if name != _AND:
        return None
    leaves = []
    for part in _closure(mask_function)["mask_functions"]:
        found = _leaves(part)
        if found is None:
            return None
        leaves += found
    return leaves


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Tensor | None:
    """The mask of one forward pass, as :func:`attention_forward` takes it.

    None where nothing but the keywords of the attention says what is visible; bool ``[batch,
    keys]``, False for padding; int32 ``[batch, keys]``, the sequence that a token of a packed batch
    belongs to; or bool ``[batch, 1, queries, keys]`` of any other mask.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    compiling = torch.compiler.is_compiling()
    leaves = None if compiling else _leaves(mask_function)
    # A static cache has keys after the last query, and counts them in a tensor.
    ends_together = (
        not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    )
    if leaves and not ends_together and any(x.__qualname__ != _ALL for x in leaves):
        leaves = None
    if leaves is None:
        # A mask that is left out for sdpa is aligned to the top left there.
        skip = rest.pop("allow_is_causal_skip", False) and q_length == kv_length
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=skip and compiling,
            allow_is_bidirectional_skip=rest.pop("allow_is_bidirectional_skip", False)
            and compiling,
            **rest,
        )
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        return None if bool(attention_mask.all()) else attention_mask
    for leaf in leaves:
        if leaf.__qualname__ == _PACKED:
            ids = _closure(leaf)["packed_sequence_mask"]
            return ids.expand(batch_size, -1).to(torch.int32)
    return None


# ---- attention


def _refuse_keywords(keywords: dict) -> None:
    for name, answer in _REFUSED.items():
        value = keywords.get(name)
        if value is not None and value is not False:
            raise _C.UnsupportedError(f"{name} is {shown(value)}; {answer}")


def _window(module: Any, sliding_window: Any, causal: bool, keys: int) -> tuple[int, int] | None:
    """A window of transformers counts the query itself."""
    if sliding_window is _MISSING:
        config = getattr(module, "config", None)
        types = getattr(config, "layer_types", None)
        layer = getattr(module, "layer_idx", None)
        expected = getattr(config, "sliding_window", None)
        slides = types and layer is not None and types[layer] == "sliding_attention"
        if slides and expected is not None and keys > expected:
            raise _C.UnsupportedError(
                f"sliding_window is missing; layer {layer} of {type(module).__name__} has a window "
                f"of {expected}, which it must give"
            )
        return None
    if sliding_window is None:
        return None
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _starts_again(position_ids: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """int32 [1, seqlen]: of which sequence each token is, where one row holds several."""
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return None
    rows = q.shape[1]
    if q.shape[0] != 1 or rows == 1 or k.shape[1] != rows or position_ids.shape != (1, rows):
        return None
    ids = (position_ids == position_ids.min()).cumsum(-1, dtype=torch.int32)
    if torch.compiler.is_compiling():
        return ids
    # Read from the device once for all layers.
    known = getattr(position_ids, "_pantile_packed", None)
    if known is None or known[0] != position_ids._version:
        straight = torch.arange(rows, device=q.device) + position_ids[0, 0]
        known = (position_ids._version, not torch.equal(position_ids[0], straight))
        position_ids._pantile_packed = known  # type: ignore[attr-defined]
    return ids if known[1] else None


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _MISSING,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, called by models of transformers.

    Args:
        module: the layer, which says whether it is causal.
        query, key, value: ``[batch, heads, seqlen, head_dim]``; fewer heads of key and value.
        attention_mask: of :func:`attention_mask`, or a bool or float mask of four dimensions.
        dropout, scaling, softcap: of :func:`pantile.attention`.
        sliding_window: how many keys a query sees to each side, itself included.
        s_aux: sinks ``[heads]``.
        position_bias: added to the scores.
        position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: where the sequences
            of a packed batch of one row start.

    Returns:
        (output ``[batch, seqlen, heads, head_dim_v]``, None).

    Raises:
        pantile.UnsupportedError: a keyword asks for what is not served.
    """
    _refuse_keywords(keywords)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    change: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "dropout": dropout or None,
        "bias": position_bias,
    }
    if attention_mask is not None and attention_mask.ndim == 4:
        return _masked(q, k, v, attention_mask, change), None
    change["causal"] = bool(causal)
    change["window"] = _window(module, sliding_window, bool(causal), k.shape[1])
    if cu_seq_lens_q is not None:
        longest = _longest(max_length_q, cu_seq_lens_q), _longest(max_length_k, cu_seq_lens_k)
        return _packed(q, k, v, (cu_seq_lens_q, cu_seq_lens_k, *longest), change), None
    if attention_mask is None:
        ids = _starts_again(position_ids, q, k)
        if ids is None:
            return attention(q, k, v, **change), None
        attention_mask = ids
    if attention_mask.dtype is torch.bool:
        return _padded(q, k, v, attention_mask, change), None
    return _documents(q, k, v, attention_mask, change), None


def _longest(length: Any, bounds: Tensor) -> int:
    return int(bounds.diff().max() if length is None else length)


def _masked(q, k, v, mask: Tensor, change: dict) -> Tensor:
    """Any mask, which knows about causality and window: bool, or added to the scores."""
    mask = mask[..., : k.shape[1]]
    if mask.dtype is torch.bool:
        return attention(q, k, v, mask=mask, **change)
    bias = mask if change["bias"] is None else mask + change["bias"]
    return attention(q, k, v, **{**change, "bias": bias})


def _packed(q, k, v, lengths: tuple, change: dict) -> Tensor:
    """Sequences in one row."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return varlen_attention(*flat, *lengths, **change).unflatten(0, q.shape[:2])


def _documents(q, k, v, ids: Tensor, change: dict) -> Tensor:
    if q.shape[0] == 1 and change["bias"] is None and not torch.compiler.is_compiling():
        known = getattr(ids, "_pantile_lengths", None)
        if known is None:
            counts = ids[0].unique_consecutive(return_counts=True)[1]
            bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
            known = (bounds, int(counts.max()))
            ids._pantile_lengths = known  # type: ignore[attr-defined]
        bounds, longest = known
        return _packed(q, k, v, (bounds, bounds, longest, longest), change)
    return attention(q, k, v, mask=Documents(ids), **change)


def _padded(q, k, v, keep: Tensor, change: dict) -> Tensor:
    """``keep``: bool [batch, keys]; a static cache may hold more keys than it knows."""
    if keep.shape[1] < k.shape[1]:
        k, v = k[:, : keep.shape[1]], v[:, : keep.shape[1]]
    bias = change["bias"]
    if bias is not None:
        hidden = ~keep[:, None, None, :]
        return attention(q, k, v, **{**change, "bias": bias.masked_fill(hidden, -torch.inf)})
    if torch.compiler.is_compiling():  # the number of tokens would be read
        return attention(q, k, v, mask=keep[:, None, None, :], **change)
    keys, indices, bounds_k, longest_k, _ = unpad_input(k, keep)
    values = v.flatten(0, 1).index_select(0, indices)
    rows, length = q.shape[:2]
    if not change["causal"] and change["window"] is None:
        # Every query sees the same keys. Of cross attention the mask says nothing about queries.
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=q.device) * length
        lengths = (bounds, bounds_k, length, longest_k)
        return varlen_attention(q.flatten(0, 1), keys, values, *lengths, **change).view(
            *q.shape[:3], v.shape[-1]
        )
    # The queries are the last tokens.
    queries, at, bounds, longest, _ = unpad_input(q, keep[:, -length:])
    lengths = (bounds, bounds_k, longest, longest_k)
    return pad_input(varlen_attention(queries, keys, values, *lengths, **change), at, rows, length)


def register(name: str = NAME) -> None:
    """Registers attention and mask with transformers, as ``attn_implementation=name``.

    Args:
        name: without the word "flash", which transformers takes for kernels of its own.

    Raises:
        ImportError: transformers is not installed.
        pantile.UnsupportedError: its version is too old.
    """
    if not isinstance(name, str) or not name or "flash" in name.lower():
        raise ValueError(f"name is {shown(name)}; it must be a name without 'flash' in it")
    import inspect

    import transformers

    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

        known = inspect.signature(masking_utils.sdpa_mask).parameters
    except ImportError:
        known = {}  # type: ignore[assignment]
    if "q_length" not in known or "q_offset" not in known:
        raise _C.UnsupportedError(
            f"transformers is {transformers.__version__}; it must be 5.0 or newer"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
