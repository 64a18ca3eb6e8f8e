"""Outputs and gradients of pantile.sdpa, in the strides that torch traces."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def in_strides_of(like: Tensor, x: Tensor) -> Tensor:
    """``x`` in the strides of ``torch.empty_like(like)``, which compiled programs count on."""
    if x.stride() == like.stride() or x.shape != like.shape:
        return x
    place = torch.empty_like(like)
    return x if x.stride() == place.stride() else place.copy_(x)


def new_place(like: Tensor, rows: tuple) -> Tensor | None:
    """Memory for an output in those strides, so that nothing is copied; None: kernels, whose last
    stride is 1, cannot write there."""
    if like.shape != rows:
        return None
    place = torch.empty_like(like)
    return place if place.stride(-1) == 1 or place.shape[-1] <= 1 else None


def by_rows(x: Tensor | None) -> Tensor | None:
    """[batch, heads, seq, dim] as [batch, seq, heads, dim]."""
    return None if x is None else x.transpose(1, 2)


def gradients(likes: tuple, as_rows: Any, run: Any) -> tuple:
    """The gradients of ``likes``, in strides like theirs. ``run``: of places as rows, or None."""
    places = tuple(new_place(x, x.shape) for x in likes)
    if all(x is not None for x in places):
        run(tuple(as_rows(x) for x in places))
        return places
    return tuple(in_strides_of(x, as_rows(grad)) for x, grad in zip(likes, run(None), strict=True))
