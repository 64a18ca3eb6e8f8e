"""Names of types for annotations. Only type checkers import this: neither torch nor NumPy is needed
to run."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy
import torch
from typing_extensions import TypedDict

from pantile._expressions import Mask as MaskExpression
from pantile._expressions import Score
from pantile._mask_forms import CombinableMask
from pantile._options import Options
from pantile._variants import Dropout

Tensor: TypeAlias = torch.Tensor
NumpyArray: TypeAlias = numpy.ndarray[Any, Any]
# q, k, v and the outputs are of one library.
Array = TypeVar("Array", torch.Tensor, numpy.ndarray[Any, Any])
Lengths: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any]  # int32
Window: TypeAlias = tuple[int | None, int | None]
Split: TypeAlias = Literal["auto", "invariant"] | int
Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos, sin
Mask: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any] | CombinableMask | MaskExpression


# Arguments by name, which all overloads of a public call have.


class QuantizedChoices(TypedDict, total=False):
    causal: bool
    window: Window | None
    scale: float | None
    deterministic: bool
    options: Options | None


class Choices(QuantizedChoices, Generic[Array], total=False):
    softcap: float | None
    alibi: Array | None
    bias: Array | None
    sinks: Array | None
    dropout: float | Dropout | None
    mask: Mask | None
    score: Score | None
    out: Array | None


class PackedChoices(Choices[Array], total=False):
    seqused_q: Lengths | None
    seqused_k: Lengths | None
    k_begin: Lengths | None
    mask_shift: Lengths | None
    block_table: Lengths | None


class DecodeChoices(TypedDict, total=False):
    k_new: Tensor | None
    v_new: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    cu_seqlens_new: Tensor | None
    max_seqlen_new: int | None
    block_table: Tensor | None
    cache_index: Tensor | None
    leftpad: Tensor | None
    rotary: Rotary | None
    rotary_interleaved: bool
    causal: bool
    window: Window | None
    tree_mask: Tensor | None
    sinks: Tensor | None
    softcap: float | None
    scale: float | None
    split: Split
    schedule: Tensor | None
    options: Options | None
