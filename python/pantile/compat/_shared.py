"""What the FlashAttention doors share: their arguments as pantile takes them, or a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pantile import _C
from pantile._arguments import integer, is_symbolic, real, shown
from pantile._expressions import Mask
from pantile._options import DEFAULT_OPTIONS
from pantile._schema import OPTIONS, Call, bind
from pantile._variants import Dropout, dropout_mask

if TYPE_CHECKING:
    from collections.abc import Iterable

Tensor = torch.Tensor

CACHE = "this function serves no key-value cache; use flash_attn_with_kvcache"
PAGED = "this function serves no pages; use block_table of pantile.varlen_attention"


def bound_call(packing: dict, scale: float | None, left: int, right: int) -> _C.Call:
    """For the bindings, with the default options; LSE is that of the unrounded weights."""
    fields = {name: x for name, x in packing.items() if x is not None}
    options = dict(zip(OPTIONS, DEFAULT_OPTIONS.call_fields[1], strict=True))
    return bind(Call(**fields, **options, scale=scale, window_left=left, window_right=right))


def refuse(name: str, value: object, answer: str, absent: Any = None) -> None:
    """Raises unless ``value`` is the one that says nothing."""
    if value is absent or (absent is not None and type(value) is type(absent) and value == absent):
        return
    raise _C.UnsupportedError(f"{name} is {shown(value)}; {answer}")


def refuse_all(values: dict[str, object], answer: str) -> None:
    for name, value in values.items():
        refuse(name, value, answer)


def refuse_operator_options(query: Any, alibi: Any, block_table: Any, seqused_k: Any) -> None:
    """What torch's operator has and pantile does not serve through it. ``num_splits`` is a hint."""
    refuse("block_table", block_table, PAGED)
    # Its gradient formula does not get them: the gradients would be those of another function.
    refuse("alibi_slopes", alibi, "use alibi of pantile.attention")
    if seqused_k is not None and torch.is_grad_enabled() and query.requires_grad:
        raise _C.UnsupportedError(
            "seqused_k is given and query requires a gradient; torch's formula of the gradient "
            "does not know it, use pantile.varlen_attention"
        )


def window_of(window_size: Any) -> tuple[int, int] | None:
    """FlashAttention's pair, where any negative number lifts a side; None: no window."""
    if window_size is None:
        return None
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size is {shown(window_size)}; it must be a pair (left, right) or None"
        ) from None
    bounds = [_bound(f"window_size[{i}]", x) for i, x in enumerate((left, right))]
    return None if bounds == [-1, -1] else (bounds[0], bounds[1])


def _bound(name: str, value: Any) -> int:
    if value is None:
        return -1
    if is_symbolic(value):
        return value
    return max(integer(name, value, "an integer"), -1)


def chunk_of(attention_chunk: Any) -> int:
    """0: no chunks."""
    chunk = integer("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"attention_chunk is {shown(attention_chunk)}; it must be 0 or more")
    return chunk


def chunk_mask(chunk: int, shift: Tensor, padding: Tensor | None = None) -> Mask:
    """Keys of the chunk of a query, of which ``shift`` [batch] or [1] says its place less its
    number: keys less queries of the sequence. ``padding``: slots before its first key.

    The numbers are captured, so that all have one compiled kernel, which divides once a query."""
    size = torch.full((1,), chunk, dtype=torch.int32, device=shift.device)
    at = "0" if shift.shape[0] == 1 else "b"
    if padding is None:
        text = f"first = (i + shift[{at}]) // n[0] * n[0]; j >= first and j < first + n[0]"
        return Mask(text, n=size, shift=shift.int())
    text = (
        f"first = (i + shift[{at}] - pad[b]) // n[0] * n[0] + pad[b]; "
        "j >= max(first, pad[b]) and j < first + n[0]"
    )
    return Mask(text, n=size, shift=shift.int(), pad=padding)


def chunk_window(chunk: int, window: tuple[int, int] | None) -> tuple[int, int]:
    """No key of a query's chunk is further away: kernels visit fewer tiles."""
    left, right = (-1, -1) if window is None else window
    return tuple(chunk - 1 if side < 0 else min(side, chunk - 1) for side in (left, right))


def softcap_of(softcap: Any) -> float | None:
    """0 means none there."""
    if softcap is None:
        return None
    value = real("softcap", softcap)
    return None if value == 0.0 else value


def longest_of(name: str, value: Any) -> Any:
    """A number; FlashAttention also takes a tensor of one element, or NumPy's."""
    return value if is_symbolic(value) or value is None else integer(name, value)


def dropout_of(dropout_p: Any, q: Any, wants_seed: bool) -> Dropout | None:
    """With a seed that can be asked again where the caller wants to see the mask."""
    p = real("dropout_p", dropout_p)
    if p == 0.0:
        return None
    seed = None
    if wants_seed:
        seed = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return Dropout(p, seed=seed)


def parts(name: str, x: Any, axis: int, count: int) -> tuple:
    """The tensors of a packed qkv or kv, as views."""
    rank = axis + 3
    if not isinstance(x, Tensor) or x.ndim != rank or x.shape[axis] != count:
        shape = ", ".join(["batch", "seqlen"][2 - axis :]) if axis == 2 else "total"
        raise ValueError(f"{name} is {shown(x)}; it must be [{shape}, {count}, heads, head_dim]")
    return x.unbind(axis)


def written_to(out: Any, result: Tensor, name: str = "out") -> Tensor:
    """``result``, in ``out`` if the caller has one. One copy: kernels allocate their output."""
    if out is None:
        return result
    if not isinstance(out, Tensor) or out.shape != result.shape:
        raise ValueError(f"{name} is {shown(out)}; it must have the shape {list(result.shape)}")
    if out.device != result.device or out.dtype is not result.dtype:
        raise ValueError(
            f"{name} has dtype {out.dtype} on {out.device}; it must have {result.dtype} on "
            f"{result.device}"
        )
    if torch.is_grad_enabled() and result.requires_grad:
        raise ValueError(f"{name} is given; a call that autograd records must make its output")
    return out.copy_(result)


def dense_bounds(x: Tensor, rows: int) -> Tensor:
    """cu_seqlens of ``x.shape[0]`` sequences of ``rows`` each."""
    batch = x.shape[0]
    return torch.arange(0, batch + 1, dtype=torch.int32, device=x.device) * rows


# ---- S_dmask


def signed_weights(
    q: Tensor,
    k: Tensor,
    drop: Dropout,
    *,
    scale: float | None,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    lengths: Iterable[tuple[int, int, int, int]] | None = None,
    longest: tuple[int, int] | None = None,
) -> Tensor:
    """S_dmask: ``exp(score - largest score of the row)``, negative where dropout removed it.

    Quadratic in memory, for tests. ``lengths``: (first query, queries, first key, keys) of packed
    sequences, which share one padded answer.
    """
    if lengths is None:
        batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
        pieces = [(q[b], k[b]) for b in range(batch)]
    else:
        pieces = [(q[i : i + m], k[j : j + n]) for i, m, j, n in lengths]
        batch, (rows, keys) = len(pieces), longest or (0, 0)
    heads = q.shape[-2]
    kept = dropout_mask(drop, batch, heads, rows, keys, device=q.device)
    answer = torch.zeros(batch, heads, rows, keys, dtype=q.dtype, device=q.device)
    for b, (qb, kb) in enumerate(pieces):
        slopes = None if alibi is None else (alibi if alibi.ndim == 1 else alibi[b])
        weights = _weights(qb, kb, scale, causal, window, softcap, slopes).to(q.dtype)
        m, n = qb.shape[0], kb.shape[0]
        answer[b, :, :m, :n] = torch.where(kept[b, :, :m, :n], weights, -weights)
    return answer


def _weights(q, k, scale, causal, window, softcap, slopes) -> Tensor:
    """[heads, queries, keys] of one sequence, in float32, the largest of each row 1."""
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, 1).float()
    scores = torch.einsum("ihd,jhd->hij", q.float(), keys)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    m, n = scores.shape[1:]
    distance = torch.arange(n, device=q.device) - torch.arange(n - m, n, device=q.device)[:, None]
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * distance.abs()
    left, right = window or (-1, -1)
    right = 0 if causal else right
    visible = torch.ones(m, n, dtype=torch.bool, device=q.device)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    scores = scores.masked_fill(~visible, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if n else scores.new_zeros(*scores.shape[:2], 1)
    return torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))


def sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[int, int, int, int]]:
    """Waits for the device."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return [
        (i, starts_q[b + 1] - i, starts_k[b], starts_k[b + 1] - starts_k[b])
        for b, i in enumerate(starts_q[:-1])
    ]
