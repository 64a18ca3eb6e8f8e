"""Research options: how the softmax of FlashAttention-T is laid out, see
docs/design/flashattention-t.md.

They exist to measure and to reproduce. Names, values and what they do may change in any release.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from pantile._arguments import choice, real, shown

__all__ = ["SoftmaxOptions"]

SOFTMAX_UNITS = ("auto", "vector", "tensor")
SOFTMAX_MODES = ("exact", "surrogate", "fast_scale")
TENSOR_SHARES = (0.0, 0.25, 0.5, 1.0)
TENSOR_SPLITS = ("keys", "rows")
_SHARES_TEXT = ", ".join(f"{share:g}" for share in TENSOR_SHARES)


class _PreferredUnit(str):
    """A softmax unit that the environment chose: it gives way where no kernel has it."""

    __slots__ = ()


class _PreferredShare(float):
    """A tensor share that the environment chose: not for calls without a tensor softmax."""

    __slots__ = ()


def _unit_of_environment() -> str:
    name = "PANTILE_SOFTMAX"
    unit = choice(f"environment variable {name}", os.environ.get(name, "auto"), SOFTMAX_UNITS)
    # A plain string for auto: torch.compile traces no other default.
    return unit if unit == "auto" else _PreferredUnit(unit)


def _share_of_environment() -> float | None:
    name = "PANTILE_TENSOR_SHARE"
    text = os.environ.get(name, "auto")
    if text == "auto":
        return None
    for share in TENSOR_SHARES:
        if text in (f"{share:g}", f"{share}"):
            return _PreferredShare(share)
    rule = f"it must be one of {_SHARES_TEXT}, or auto"
    raise ValueError(f"environment variable {name} is {text!r}; {rule}")


def _check_share(name: str, value: object) -> None:
    if value is None:
        return
    rule = f"one of {_SHARES_TEXT}, or None for the table"
    if real(name, value, rule) not in TENSOR_SHARES:
        raise ValueError(f"{name} is {shown(value)}; it must be {rule}")


# Read once, when pantile is imported.
DEFAULT_UNIT: Any = _unit_of_environment()
_DEFAULT_SHARE = _share_of_environment()


@dataclass(frozen=True)
class SoftmaxOptions:
    """The softmax of the forward, for ``pantile.Options(softmax=SoftmaxOptions(...))``.

    softmax: where it runs: on ``"vector"`` units, partly on ``"tensor"`` cores, or ``"auto"``, what
        measured fastest. A tensor softmax gives the LSE of the weights as they were rounded for the
        product with V; ``auto`` takes none where the LSE is returned. Default: ``PANTILE_SOFTMAX``,
        or auto. What the environment chose holds for the calls that a kernel serves that way;
        others are as with auto.
    tensor_share: share of the scores that tensor products scale: 0, 0.25, 0.5, 1, or None for the
        table's. More than 0 needs ``softmax="tensor"``. Default: ``PANTILE_TENSOR_SHARE``, or None;
        calls without a tensor softmax do not read the variable.
    tensor_split: whether that share is taken by ``"keys"`` or, at 0.5, by ``"rows"``.
    softmax_mode: ``"exact"``; ``"surrogate"``, one reference for 16 rows as in the paper, except
        for rows that it would cost their accuracy; ``"fast_scale"``, the scale folded into Q,
        which is rounded once more. The latter two need ``softmax="tensor"``.
    rescale_threshold: how much a row's maximum may grow, as a power of two, before its output is
        rescaled: 0 (after every key tile) to 15. GPUs only.
    p_max_offset: the largest weight of a row is 2 to this power before it is rounded; with
        ``rescale_threshold`` at most 15. 0 is the backend's choice: 1, but 2 to the power of 7 in
        float16 rows of more than 16,384 keys on Ampere kernels. GPUs only.
    min_exponent_log2: how far below a shared reference a row's maximum may lie, as a power of two:
        -126 to 0. float16 never uses more than -10.

    Raises:
        TypeError, ValueError: a value is wrong. What does not go together is refused by the call.
    """

    softmax: Literal["auto", "vector", "tensor"] = DEFAULT_UNIT
    tensor_share: float | None = _DEFAULT_SHARE
    tensor_split: Literal["keys", "rows"] = "keys"
    softmax_mode: Literal["exact", "surrogate", "fast_scale"] = "exact"
    rescale_threshold: float = 8.0
    p_max_offset: float = 0.0
    min_exponent_log2: float = -100.0

    def __post_init__(self) -> None:
        choice("softmax", self.softmax, SOFTMAX_UNITS)
        _check_share("tensor_share", self.tensor_share)
        choice("tensor_split", self.tensor_split, TENSOR_SPLITS)
        choice("softmax_mode", self.softmax_mode, SOFTMAX_MODES)
        for name in ("rescale_threshold", "p_max_offset", "min_exponent_log2"):
            real(name, getattr(self, name))

    def _fields_of_call(self) -> dict[str, object]:
        """Of pantile._schema.OPTIONS those that the softmax decides."""
        share = self._share
        return {
            "softmax": str(self.softmax),
            "softmax_preferred": self._gives_way,
            "softmax_mode": self.softmax_mode,
            "tensor_share": None if share is None else float(share),
            "tensor_split": self.tensor_split,
            "rescale_threshold": float(self.rescale_threshold),
            "p_max_offset": float(self.p_max_offset),
            "min_exponent_log2": float(self.min_exponent_log2),
        }

    @property
    def _share(self) -> float | None:
        """The tensor share, unless only the environment speaks of one and the call has no use."""
        chosen_for_it = self.softmax == "tensor" and self.softmax_mode == "exact"
        if isinstance(self.tensor_share, _PreferredShare) and not chosen_for_it:
            return None
        return self.tensor_share

    @property
    def _gives_way(self) -> bool:
        """Whether only the environment asks for this unit: no other option of the call needs it."""
        return (
            isinstance(self.softmax, _PreferredUnit)
            and self.softmax != "auto"
            and (self.tensor_share is None or isinstance(self.tensor_share, _PreferredShare))
            and self.tensor_split == "keys"
            and self.softmax_mode == "exact"
        )
