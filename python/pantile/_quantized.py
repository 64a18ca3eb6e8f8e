"""FP8 operands: what quantize() answers and attention() takes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pantile._types import Tensor


@dataclass(frozen=True, eq=False)
class Quantized:
    """Q, K and V as e4m3 codes with scales, made by :func:`pantile.quantize`.

    Rows are kept in blocks of 128 of one sequence each; ``docs/design/fp8.md`` describes the forms.
    A code times its scale is the number it stands for.
    """

    codes_q: Tensor  # float8_e4m3fn [heads_q, rows, head_dim rounded up to 16]
    codes_k: Tensor  # float8_e4m3fn [heads_k, rows, head_dim rounded up to 16]
    codes_v: Tensor  # float8_e4m3fn [heads_k, blocks, head_dim_v, 128]
    scale_q: Tensor  # float32 [heads_q, scales]
    scale_kv: Tensor  # float32 [heads_k, scales, 2]
    nonfinite_v: (
        Tensor  # int32 [heads_k, blocks, head_dim_v, 4]; read where a scale of V is negative
    )
    q_dot_mean: Tensor  # float32 [heads_q, rows]; empty without K smoothing
    mean_k: Tensor  # float32 [batch, heads_k, head_dim]; empty without K smoothing
    shape_q: tuple[int, ...]  # of q
    shape_k: tuple[int, ...]  # of k
    block_q: int
    block_k: int
    hadamard: bool
    smooth_k: bool
    dtype: torch.dtype  # of the attention's output
    lengths: tuple[Any, ...] = (None,) * 7  # pantile._schema.LENGTHS of a call
    longest: tuple[int, int] = (0, 0)  # max_seqlen_q, max_seqlen_k
    # q, k and v where they require a gradient: the backward works on them, not on the codes.
    source: tuple[Any, ...] = field(default=(None, None, None), repr=False)
    versions: tuple[int, ...] = field(
        default=(), repr=False
    )  # of those tensors, when they were quantised

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the operator ``pantile::quantize``."""
        return (
            self.codes_q,
            self.codes_k,
            self.codes_v,
            self.scale_q,
            self.scale_kv,
            self.nonfinite_v,
            self.q_dot_mean,
            self.mean_k,
        )

    def __repr__(self) -> str:
        return (
            f"Quantized(q {list(self.shape_q)}, k {list(self.shape_k)}, blocks of {self.block_q} "
            f"and {self.block_k}, hadamard={self.hadamard}, smooth_k={self.smooth_k}, "
            f"on {self.codes_q.device})"
        )
