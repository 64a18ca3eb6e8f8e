"""The record of a cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pantile._arguments import choice, flag, integer, shown

if TYPE_CHECKING:
    import torch

    from pantile._types import Tensor

_LAYOUTS = ("NHD", "HND")
_SCALES = ("tensor", "head", "token")


def tensor(name: str, x: object, allowed: str = "a torch.Tensor") -> Any:
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {shown(x)}; it must be {allowed}")
    return x


def optional_tensor(name: str, x: object) -> Any:
    return None if x is None else tensor(name, x, "a torch.Tensor or None")


@dataclass(frozen=True, eq=False)
class KVCache:
    """A cache of keys and values: a record of tensors, which are not copied.

    k: ``[pages, page_size, heads_k, head_dim]`` (layout ``"NHD"``) or
        ``[pages, heads_k, page_size, head_dim]`` (``"HND"``). A dense cache has a row for each
        sequence in place of pages. Any strides with dense last axis: K and V may be views of one
        tensor.
    v: the same with ``head_dim_v``; ``None``: V is the first ``head_dim_v`` channels of k (a latent
        cache, see :func:`pantile.mla_decode`).
    layout: ``"NHD"`` or ``"HND"``, the order of the axes of k, v and scales of tokens.
    scale_k, scale_v: of caches in ``float8_e4m3fn`` or ``int8``; a code times its scale is the
        number. float32, of any strides: one number, ``[heads_k]``, ``[batch, heads_k]`` (the
        sequences of the call), or one a slot and head, in the shape of k without its last axis.
        ``int8`` needs the last form. :func:`pantile.append` writes scales of tokens and reads the
        others.
    block_table: int32 ``[sequences, pages of each]``, taken where a call gives none.
    head_dim_v: of a latent cache; else the last axis of v.
    pages: whether k holds pages, so that calls need a block_table.

    Raises:
        TypeError, ValueError: a field is wrong; the message names it, its value and what is
        allowed.
    """

    k: Tensor
    v: Tensor | None
    layout: Literal["NHD", "HND"] = "NHD"
    scale_k: Tensor | None = None
    scale_v: Tensor | None = None
    block_table: Tensor | None = None
    head_dim_v: int | None = None
    pages: bool = False

    def __post_init__(self) -> None:
        tensor("k", self.k)
        for name in ("v", "scale_k", "scale_v", "block_table"):
            optional_tensor(name, getattr(self, name))
        choice("layout", self.layout, _LAYOUTS)
        flag("pages", self.pages)
        if self.k.ndim != 4:
            raise ValueError(f"k has {self.k.ndim} dimensions; it must have 4")
        if self.head_dim_v is not None:
            integer("head_dim_v", self.head_dim_v)
        if self.v is None:
            if self.head_dim_v is None:
                raise ValueError("head_dim_v is None; a cache without v needs it")
        else:
            if self.v.ndim != 4:
                raise ValueError(f"v has {self.v.ndim} dimensions; it must have 4")
            if self.head_dim_v not in (None, self.v.shape[-1]):
                raise ValueError(
                    f"head_dim_v is {shown(self.head_dim_v)}; it must be None or the last axis of "
                    f"v, {self.v.shape[-1]}"
                )
            object.__setattr__(self, "head_dim_v", self.v.shape[-1])

    @property
    def slots(self) -> int:
        """Of a page, or of a sequence of a dense cache."""
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def heads_k(self) -> int:
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @classmethod
    def paged(
        cls,
        pages: int,
        page_size: int,
        heads_k: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: Literal["NHD", "HND"] = "NHD",
        scales: Literal["tensor", "head", "token"] | None = None,
        latent: bool = False,
        block_table: Tensor | None = None,
    ) -> KVCache:
        """A cache of pages, its memory uninitialised: what no sequence has written is never read.

        Args:
            pages, page_size: how many, and the slots of each, from 1 on.
            dtype: of the numbers, or ``float8_e4m3fn`` or ``int8``. Default: torch's.
            scales: of 8-bit dtypes: ``"token"`` (the default), written by append, or ``"head"`` and
                ``"tensor"``, which hold 1 until the caller sets them.
            latent: without v: V is the first ``head_dim_v`` channels of k.
        """
        sizes = _positive(pages=pages, page_size=page_size)
        return cls._make(
            sizes, heads_k, head_dim, head_dim_v, dtype, device, layout, scales, latent,
            block_table, True,
        )  # fmt: skip

    @classmethod
    def dense(
        cls,
        batch: int,
        max_seqlen: int,
        heads_k: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: Literal["NHD", "HND"] = "NHD",
        scales: Literal["tensor", "head", "token"] | None = None,
        latent: bool = False,
    ) -> KVCache:
        """A cache with ``max_seqlen`` slots for each of ``batch`` sequences; as :meth:`paged`."""
        sizes = _positive(batch=batch, max_seqlen=max_seqlen)
        return cls._make(
            sizes, heads_k, head_dim, head_dim_v, dtype, device, layout, scales, latent, None,
            False,
        )  # fmt: skip

    @classmethod
    def _make(
        cls, sizes, heads_k, head_dim, head_dim_v, dtype, device, layout, scales, latent,
        block_table, pages,
    ):  # fmt: skip
        import torch

        choice("layout", layout, _LAYOUTS)
        flag("latent", latent)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        blocks, slots = sizes
        heads_k, head_dim = _positive(heads_k=heads_k, head_dim=head_dim)
        head_dim_v = head_dim if head_dim_v is None else integer("head_dim_v", head_dim_v)
        rows = (blocks, slots, heads_k) if layout == "NHD" else (blocks, heads_k, slots)
        k = torch.empty((*rows, head_dim), dtype=dtype, device=device)
        v = None if latent else torch.empty((*rows, head_dim_v), dtype=dtype, device=device)
        coded = dtype in (torch.float8_e4m3fn, torch.int8)
        if scales is not None:
            choice("scales", scales, _SCALES)
            if not coded:
                raise ValueError(f"scales is {scales!r}; it must be None for a cache in {dtype}")
            if dtype is torch.int8 and scales != "token":
                raise ValueError(f"scales is {scales!r}; it must be 'token' for a cache in int8")
        scale_k = scale_v = None
        if coded:
            kind = scales or "token"
            # Scales of tokens: the slots of a head lie side by side, as a kernel reads them.
            slots_last = (blocks, heads_k, slots)
            shape = slots_last if kind == "token" else (heads_k,) if kind == "head" else ()
            scale_k = torch.ones(shape, dtype=torch.float32, device=device)
            scale_v = None if latent else torch.ones_like(scale_k)
            if kind == "token" and layout == "NHD":
                scale_k = scale_k.transpose(1, 2)
                scale_v = None if latent else scale_v.transpose(1, 2)
        return cls(k, v, layout, scale_k, scale_v, block_table, head_dim_v, pages)


def _positive(**sizes: object) -> tuple[int, ...]:
    found = []
    for name, value in sizes.items():
        number = integer(name, value)
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be 1 or more")
        found.append(number)
    return tuple(found)
