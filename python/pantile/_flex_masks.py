"""What ``score_mod`` and ``block_mask`` of torch's ``flex_attention`` are here.

A mask function is compared with what kernels know as such: causal, windows and documents skip tiles
and compile less. Any other becomes a :class:`pantile.Mask`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pantile import _C
from pantile._arguments import shown
from pantile._expressions import Mask, Score
from pantile._flex_kept import trace
from pantile._flex_trace import Tape, Value
from pantile._mask_forms import BlockMask, Documents

Tensor = torch.Tensor

_PAIR = ("b", "h", "i", "j")
_MOST_CHECKED = 2**26  # blocks of a mask of torch that are compared with a window


class Masks(NamedTuple):
    """Of pantile.attention: a window in its terms, and the mask."""

    left: int | None = None
    right: int | None = None
    mask: Any = None


def score_of(score_mod: Any) -> Score | None:
    if isinstance(score_mod, Score):
        return score_mod
    if not callable(score_mod):
        raise TypeError(f"score_mod is {shown(score_mod)}; it must be a function or pantile.Score")
    traced = trace(score_mod, ("s", *_PAIR), "t", "score_mod")
    value = traced.trace.value
    if value.kind == "bool":
        raise TypeError("score_mod gives a condition; it must give a number")
    return None if value.text == "s" else Score(traced.trace.text, **traced.captured())


# ---- masks that kernels know


def _conditions(value: Value) -> list[Value]:
    """The sides of ``a & b & c``."""
    if value.op != "&":
        return [value]
    return [x for side in value.args for x in _conditions(side)]


def _linear(x: Value) -> dict[str, int] | None:
    """i - j + 3 as {"i": 1, "j": -1, "": 3}."""
    if x.op == "constant" and x.kind == "int":
        return {"": x.args[0]}
    if x.op == "input" and x.kind == "int":
        return {x.text: 1}
    if x.op in ("+", "-"):
        sides = [_linear(side) for side in x.args]
        if None in sides:
            return None
        a, b = sides
        sign = 1 if x.op == "+" else -1
        return {k: a.get(k, 0) + sign * b.get(k, 0) for k in {*a, *b}}  # type: ignore[union-attr]
    if x.op == "negative":
        inner = _linear(x.args[0])
        return None if inner is None else {k: -n for k, n in inner.items()}
    return None


def _bound(x: Value) -> tuple[str, int] | None:
    """("right", n) of ``j <= i + n``, ("left", n) of ``j >= i - n``."""
    if x.op not in ("<", "<=", ">", ">="):
        return None
    sides = [_linear(side) for side in x.args]
    if None in sides:
        return None
    small, large = sides if x.op in ("<", "<=") else sides[::-1]
    small, large = dict(small or {}), dict(large or {})
    gap = {k: large.get(k, 0) - small.get(k, 0) for k in {*large, *small}}
    slack = gap.pop("", 0) - (x.op in ("<", ">"))
    gap = {k: n for k, n in gap.items() if n}
    if gap == {"i": 1, "j": -1}:
        return "right", slack
    return ("left", slack) if gap == {"i": -1, "j": 1} else None


def _ids(x: Value, axis: str, length: int, batch: int) -> Tensor | None:
    """The ids of ``ids[b, i]`` or ``ids[i]``, of as many as there are."""
    if x.op != "read" or x.kind != "int":
        return None
    name, *places = x.args
    table = x.tape.tensors[name]
    at = [place.text for place in places]
    if at == [axis] and table.shape == (length,):
        return table
    return table if at == ["b", axis] and table.shape == (batch, length) else None


def _documents(x: Value, batch: int, rows: int, keys: int) -> Documents | None:
    if x.op != "==":
        return None
    for q, k in (x.args, x.args[::-1]):
        ids, key_ids = _ids(q, "i", rows, batch), _ids(k, "j", keys, batch)
        if ids is not None and key_ids is not None and ids.ndim == key_ids.ndim:
            return Documents(ids, key_ids)
    return None


def _masks_of(value: Value, batch: int, rows: int, keys: int) -> tuple[Masks, list[Value]]:
    """What kernels know of it, and the conditions that are left."""
    bounds: dict[str, int | None] = {"left": None, "right": None}
    documents, left = None, []
    shift = keys - rows  # windows of pantile are aligned to the bottom right
    for condition in _conditions(value):
        if condition.op == "constant" and condition.args == (True,):
            continue
        bound = _bound(condition)
        if bound is not None:
            side, n = bound
            n += shift if side == "left" else -shift
            if n >= 0:
                known = bounds[side]
                bounds[side] = n if known is None else min(known, n)
                continue
        found = None if documents is not None else _documents(condition, batch, rows, keys)
        if found is None:
            left.append(condition)
        else:
            documents = (found, condition)
    if documents is not None and left:  # kernels combine no mask of tensors with an expression
        left.append(documents[1])
        documents = None
    mask = None if documents is None else documents[0]
    return Masks(bounds["left"], bounds["right"], mask), left


# ---- the lists of blocks of a mask of torch

_followed = WeakIdKeyDictionary()  # BlockMask of torch: {window: whether it hides nothing more}


def _hides_no_more(block_mask: Any, left: int | None, right: int | None) -> bool:
    """Whether the lists have all blocks in which a window shows a pair. Waits for a GPU, once."""
    known = _followed.setdefault(block_mask, {})
    if (left, right) not in known:
        rows, keys = block_mask.seq_lengths
        block_q, block_k = block_mask.BLOCK_SIZE
        dense = block_mask.to_dense().bool()
        shift = keys - rows
        first_q = torch.arange(dense.shape[-2], device=dense.device)[:, None] * block_q
        first_k = torch.arange(dense.shape[-1], device=dense.device)[None] * block_k
        last_q = (first_q + block_q).clamp(max=rows) - 1
        last_k = (first_k + block_k).clamp(max=keys) - 1
        shown = torch.ones(dense.shape[-2:], dtype=torch.bool, device=dense.device)
        if right is not None:
            shown &= first_k <= last_q + shift + right
        if left is not None:
            shown &= last_k >= first_q + shift - left
        known[left, right] = not bool((shown & ~dense).any())
    return known[left, right]


_dense = WeakIdKeyDictionary()  # BlockMask of torch: (versions of its lists, _blocks() of it)
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _blocks(block_mask: Any) -> tuple[Tensor, tuple[int, int]]:
    """bool [batch, heads, blocks of queries, blocks of keys], and the size of a block. Made once
    for each mask, and again when torch has changed its lists."""
    lists = [getattr(block_mask, name) for name in _LISTS]
    versions = [None if x is None else (id(x), x._version) for x in lists]
    known, made = _dense.get(block_mask, (None, None))
    if made is None or known != versions:
        dense = block_mask.to_dense().bool()
        if dense.ndim < 4:
            dense = dense[(None,) * (4 - dense.ndim)]
        made = dense, tuple(block_mask.BLOCK_SIZE)
        _dense[block_mask] = (versions, made)
    return made


def _block_mask_of(dense: Tensor, size: tuple[int, int], rows: int, keys: int) -> BlockMask | None:
    """In blocks of 64 or 128, if these divide it."""
    for block in (128, 64):
        if size[0] % block == 0 and size[1] % block == 0:
            for axis, length in ((-2, rows), (-1, keys)):
                dense = dense.repeat_interleave(size[axis] // block, axis)
                dense = dense.narrow(axis, 0, -(-length // block))
            return BlockMask(dense, block)
    return None


def _listed(tape: Tape, dense: Tensor, size: tuple[int, int]) -> str:
    """The condition that the block of a pair is in the lists."""
    name = tape.table(dense)
    batch, heads = ("0" if n == 1 else axis for n, axis in zip(dense.shape[:2], "bh", strict=True))
    return f"{name}[{batch}, {heads}, i // {size[0]}, j // {size[1]}]"


def masks_of(block_mask: Any, batch: int, rows: int, keys: int) -> Masks:
    """Of torch's BlockMask: pairs of the listed blocks that its function shows."""
    size = tuple(block_mask.BLOCK_SIZE)
    if min(size) >= 2**20:  # torch's mask of a call without one
        dense = None
    else:
        if tuple(block_mask.seq_lengths) != (rows, keys):
            raise ValueError(
                f"block_mask is of {block_mask.seq_lengths[0]} queries and "
                f"{block_mask.seq_lengths[1]} keys; the call has {rows} and {keys}"
            )
        dense, size = _blocks(block_mask)
    value = trace(block_mask.mask_mod, _PAIR, "m", "mask_mod").value()
    if value.kind != "bool":
        raise TypeError("mask_mod gives a number; it must give a condition")
    masks, left = _masks_of(value, batch, rows, keys)
    if not left:
        if dense is None or (
            masks.mask is None
            and dense[0, 0].numel() <= _MOST_CHECKED
            and _hides_no_more(block_mask, masks.left, masks.right)
        ):
            return masks
        blocks = _block_mask_of(dense, size, rows, keys)
        if blocks is not None:
            return masks._replace(mask=blocks if masks.mask is None else masks.mask & blocks)
        left = [value]
    tape = value.tape
    conditions = [x.text for x in left]
    if dense is not None:
        conditions.append(_listed(tape, dense, size))
    text = "; ".join([*tape.lines, " & ".join(f"({x})" for x in conditions)])
    return masks._replace(mask=Mask(text, **tape.tensors))


def refuse_kernel_options(options: Any, known: tuple[str, ...]) -> None:
    """They tune torch's kernels; a name that torch does not have is an error, as it is there."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options is {shown(options)}; it must be a dict or None")
    for name in options:
        bare = str(name).removeprefix("fwd_").removeprefix("bwd_")
        if bare not in known:
            raise _C.UnsupportedError(
                f"kernel_options has {name!r}; pantile knows {', '.join(known)}, all without effect"
            )
