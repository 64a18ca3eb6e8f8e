"""Names of types for annotations. Only type checkers import this: neither torch nor NumPy is needed
to run."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy
import torch

from pantile import _mask_forms

Tensor: TypeAlias = torch.Tensor
NumpyArray: TypeAlias = numpy.ndarray[Any, Any]
# q, k, v and the outputs are of one library.
Array = TypeVar("Array", torch.Tensor, numpy.ndarray[Any, Any])
Lengths: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any]  # int32
Window: TypeAlias = tuple[int | None, int | None]
Mask: TypeAlias = torch.Tensor | numpy.ndarray[Any, Any] | _mask_forms.Mask
