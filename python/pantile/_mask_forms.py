"""Masks beside ``causal`` and ``window``: the forms that the kernels know, and what ``&`` and ``|``
make of them.

A mask is compiled to clauses, as cpp/include/pantile/variant.h has them: a pair is visible where
all forms of some clause show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pantile._arguments import dtype_name, integer, shown

_FORM_BITS = 4  # of a clause
_FORMS = ("blocks", "elements", "documents", "prefix")  # in the order of their bits
_NAMES = {
    "blocks": "BlockMask",
    "elements": "bool tensor",
    "documents": "Documents",
    "prefix": "Prefix",
}
_ALLOWED = (
    "a bool tensor, a pantile.BlockMask, a pantile.Documents, a pantile.Prefix, these combined "
    "with & and |"
)


def _is_bool(x: Any) -> bool:
    return dtype_name(getattr(x, "dtype", None)) == "bool"


def _int32(name: str, value: Any) -> None:
    if dtype_name(getattr(value, "dtype", None)) != "int32":
        raise TypeError(f"{name} is {shown(value)}; it must be an int32 tensor")


class CombinableMask:
    """What :class:`BlockMask`, :class:`Documents`, :class:`Prefix` and their combinations have in
    common: ``a & b`` shows what both show, ``a | b`` what one of them shows.

    The right side may be a bool tensor; the left one is a mask of these classes. A combination has
    each of the four forms once at most: two bool tensors are combined by torch before.
    """

    __array_ufunc__ = None  # NumPy arrays leave the operators to this class

    def __and__(self, other: Any) -> CombinableMask:
        return _combined("&", self, other)

    def __or__(self, other: Any) -> CombinableMask:
        return _combined("|", self, other)

    def __rand__(self, other: Any) -> CombinableMask:
        return _combined("&", other, self)

    def __ror__(self, other: Any) -> CombinableMask:
        return _combined("|", other, self)


def _combined(operator: str, left: Any, right: Any) -> CombinableMask:
    for side in (left, right):
        if not isinstance(side, CombinableMask) and not _is_bool(side):
            raise TypeError(f"a side of {operator} is {shown(side)}; it must be {_ALLOWED}")
    return CombinedMask(operator, left, right)


@dataclass(frozen=True, eq=False)
class CombinedMask(CombinableMask):
    """``left & right`` or ``left | right``."""

    operator: str
    left: Any
    right: Any


@dataclass(frozen=True, eq=False)
class BlockMask(CombinableMask):
    """A mask of blocks: block (i, j) is visible, or none of its pairs is.

    blocks: bool ``[batch, heads_q, ceil(seqlen_q / block), ceil(seqlen_k / block)]``; the first two
        may be 1 or left out. Blocks that are False are neither read nor multiplied.
    block: queries and keys of a block: 64 or 128.

    It combines with ``causal`` and ``window``: a pair is visible when all show it.
    """

    blocks: Any
    block: int = 128

    def __post_init__(self) -> None:
        if not _is_bool(self.blocks):
            raise TypeError(f"blocks is {shown(self.blocks)}; it must be a bool tensor")
        block = integer("block", self.block)
        if block not in (64, 128):
            raise ValueError(f"block is {shown(block)}; it must be 64 or 128")
        object.__setattr__(self, "block", block)


@dataclass(frozen=True, eq=False)
class Documents(CombinableMask):
    """A mask of documents: a query sees the keys that have its id. Ids come in any order.

    ids: int32 ``[batch, seqlen_q]`` or ``[seqlen_q]``, of queries.
    key_ids: of keys, ``[batch, seqlen_k]`` or ``[seqlen_k]``; ``None``: ids.

    It combines with ``causal`` and ``window``: a pair is visible when all show it.
    """

    ids: Any
    key_ids: Any = None

    def __post_init__(self) -> None:
        _int32("ids", self.ids)
        if self.key_ids is not None:
            _int32("key_ids", self.key_ids)


@dataclass(frozen=True, eq=False)
class Prefix(CombinableMask):
    """The mask of a prefix-LM: query i sees the keys j of the prefix, j < lengths[b], and those up
    to its own position, j <= i + Sk - Sq.

    lengths: int32 ``[batch]`` or ``[1]``; on the device of q, which no call waits for.

    It stands for itself: with ``causal=True`` beside it nothing of the prefix is left.
    """

    lengths: Any

    def __post_init__(self) -> None:
        _int32("lengths", self.lengths)


def _form_of(mask: Any) -> str:
    if isinstance(mask, BlockMask):
        return "blocks"
    if isinstance(mask, Documents):
        return "documents"
    if isinstance(mask, Prefix):
        return "prefix"
    if _is_bool(mask):
        return "elements"
    raise TypeError(
        f"mask is {shown(mask)}; it must be {_ALLOWED}, a pantile.Mask or None; what is added to "
        "scores is bias"
    )


def _without_larger(clauses: list[int]) -> list[int]:
    """A clause that holds all forms of another one shows nothing more."""
    kept: list[int] = []
    for clause in sorted(set(clauses), key=lambda x: (x.bit_count(), x)):
        if not any(clause & other == other for other in kept):
            kept.append(clause)
    return kept


def _clauses_of(mask: Any, found: dict[str, Any]) -> list[int]:
    """Sets of forms, as bits; ``found`` gets the mask of each form."""
    if isinstance(mask, CombinedMask):
        left, right = _clauses_of(mask.left, found), _clauses_of(mask.right, found)
        both = [a | b for a in left for b in right] if mask.operator == "&" else [*left, *right]
        return _without_larger(both)
    form = _form_of(mask)
    if found.setdefault(form, mask) is not mask:
        cure = "; combine them with & or | of torch" if form == "elements" else ""
        raise ValueError(f"mask has two masks of the form {_NAMES[form]}; it must have one{cure}")
    return [1 << _FORMS.index(form)]


def compiled_mask(mask: Any) -> tuple[tuple, tuple[int, int]]:
    """((mask, query_ids, key_ids, block_mask, prefixes), (mask_block, mask_clauses))."""
    if mask is None:
        return (None,) * 5, (0, 0)
    found: dict[str, Any] = {}
    clauses = _clauses_of(mask, found)
    used = 0
    for clause in clauses:
        used |= clause
    found = {form: x for form, x in found.items() if used >> _FORMS.index(form) & 1}
    blocks, documents = found.get("blocks"), found.get("documents")
    ids = key_ids = None
    if documents is not None:
        ids = documents.ids
        key_ids = ids if documents.key_ids is None else documents.key_ids
    prefix = found.get("prefix")
    tensors = (
        found.get("elements"),
        ids,
        key_ids,
        None if blocks is None else blocks.blocks,
        None if prefix is None else prefix.lengths,
    )
    bits = 0
    if len(clauses) > 1:
        for place, clause in enumerate(clauses):
            bits |= clause << (_FORM_BITS * place)
    return tensors, (0 if blocks is None else blocks.block, bits)
