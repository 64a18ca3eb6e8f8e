"""Options of a call, and the environment variables that set their defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from pantile._arguments import choice, dtype_name, flag, real, shown
from pantile._schema import OPTIONS

BACKENDS = ("auto", "hopper", "ampere", "cpu", "reference")
FP8_EXPS = ("code", "mixed", "exp2")
FLOAT32_PRECISIONS = ("auto", "highest", "tf32")
SOFTMAX_UNITS = ("auto", "vector", "tensor")
SOFTMAX_MODES = ("exact", "surrogate", "fast_scale")
TENSOR_SHARES = (0.0, 0.25, 0.5, 1.0)
_SHARES_TEXT = ", ".join(f"{share:g}" for share in TENSOR_SHARES)
TENSOR_SPLITS = ("keys", "rows")
_LOG_LEVELS = ("debug", "info", "warning")


class _PreferredUnit(str):
    """A softmax unit that the environment chose: it gives way where no kernel has it."""

    __slots__ = ()


class _PreferredShare(float):
    """A tensor share that the environment chose: not for calls without a tensor softmax."""

    __slots__ = ()


def _of_environment(name: str, allowed: tuple[str, ...]) -> str:
    return choice(f"environment variable {name}", os.environ.get(name, "auto"), allowed)


# Read once, when pantile is imported.
_DEFAULT_BACKEND = _of_environment("PANTILE_BACKEND", BACKENDS)
_DEFAULT_SOFTMAX = _of_environment("PANTILE_SOFTMAX", SOFTMAX_UNITS)
if _DEFAULT_SOFTMAX != "auto":  # a plain string otherwise: torch.compile traces no other default
    _DEFAULT_SOFTMAX = _PreferredUnit(_DEFAULT_SOFTMAX)


def _tensor_share(name: str, value: object) -> float | None:
    if value is None:
        return None
    rule = f"one of {_SHARES_TEXT}, or None for the table"
    share = real(name, value, rule)
    if share not in TENSOR_SHARES:
        raise ValueError(f"{name} is {shown(value)}; it must be {rule}")
    return share


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


_DEFAULT_TENSOR_SHARE = _share_of_environment()


@dataclass(frozen=True)
class Options:
    """What a caller may choose beyond the mathematics.

    backend: ``"auto"`` takes the first kernel of the table that accepts; a family name
        (``"hopper"``, ``"ampere"``, ``"cpu"``) restricts the search to it; ``"reference"`` is the
        textbook algorithm in double precision on the CPU. Default: ``PANTILE_BACKEND``, or auto.
    fp8: quantise q, k and v and attend in FP8, as ``attention(quantize(q, k, v))`` does; gradients
        are those of the unquantised attention (docs/fp8.md).
    fp8_exp: how FP8 turns scores into weights: ``"code"`` computes the e4m3 code of a weight
        straight from its score, an approximation to e4m3's own precision and the fastest;
        ``"exp2"`` rounds the true exponential; ``"mixed"`` does each for half of them.
    output_dtype: ``None`` gives o the dtype of q. ``"float32"`` (or ``torch.float32``) gives it as
        accumulated: normalised like any output, but not rounded to 16 bits. For partial results
        over parts of the keys, which :func:`pantile.merge_attention` joins.
    float32_precision: how GPU kernels multiply float32 matrices. ``"tf32"`` rounds operands to 11
        bits of mantissa, ``"highest"`` has the error of float32. ``"auto"`` asks
        ``torch.get_float32_matmul_precision()`` when the kernel runs, the backward's too:
        "highest" is that, "high" and "medium" are tf32. The CPU ignores it.
    checked: read ``cu_seqlens`` and ``seqused`` before launching and refuse wrong contents. On a
        GPU that waits for the device; on the CPU the contents are always checked.
    softmax: where the softmax of the forward runs: ``"vector"`` units, partly on ``"tensor"``
        cores (FlashAttention-T, docs/flashattention-t.md), or ``"auto"``, whatever measured
        fastest. A tensor softmax gives the LSE of the weights as they were rounded for the
        product with V; ``auto`` takes none where the LSE is returned. Default:
        ``PANTILE_SOFTMAX``, or auto. What the environment chose holds for the calls that a kernel
        serves that way; others are as with auto.
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
        ``rescale_threshold`` at most 15. GPUs only.
    min_exponent_log2: how far below a shared reference a row's maximum may lie, as a power of two:
        -126 to 0. float16 never uses more than -10.
    """

    backend: str = _DEFAULT_BACKEND
    float32_precision: str = "auto"
    checked: bool = False
    fp8: bool = False
    fp8_exp: str = "code"
    output_dtype: object = None
    softmax: str = _DEFAULT_SOFTMAX
    tensor_share: float | None = _DEFAULT_TENSOR_SHARE
    tensor_split: str = "keys"
    softmax_mode: str = "exact"
    rescale_threshold: float = 8.0
    p_max_offset: float = 0.0
    min_exponent_log2: float = -100.0

    def __post_init__(self) -> None:
        choice("backend", self.backend, BACKENDS)
        choice("float32_precision", self.float32_precision, FLOAT32_PRECISIONS)
        choice("fp8_exp", self.fp8_exp, FP8_EXPS)
        for name in ("checked", "fp8"):
            flag(name, getattr(self, name))
        if self.output_dtype is not None and not self.output_f32:
            text = shown(self.output_dtype)
            raise ValueError(f"output_dtype is {text}; it must be None or float32")
        choice("softmax", self.softmax, SOFTMAX_UNITS)
        _tensor_share("tensor_share", self.tensor_share)
        choice("tensor_split", self.tensor_split, TENSOR_SPLITS)
        choice("softmax_mode", self.softmax_mode, SOFTMAX_MODES)
        for name in ("rescale_threshold", "p_max_offset", "min_exponent_log2"):
            real(name, getattr(self, name))
        # The fields pantile._schema.OPTIONS of a call, by whether it returns its LSE. No field of
        # this class: Options(**dataclasses.asdict(options)) makes an equal one.
        fields = tuple(self._call_fields(exact) for exact in (False, True))
        object.__setattr__(self, "call_fields", fields)

    @property
    def output_f32(self) -> bool:
        return dtype_name(self.output_dtype) == "float32"

    @property
    def _share(self) -> float | None:
        """The tensor share, unless only the environment speaks of one and the call has no use."""
        chosen_for_it = self.softmax == "tensor" and self.softmax_mode == "exact"
        if isinstance(self.tensor_share, _PreferredShare) and not chosen_for_it:
            return None
        return self.tensor_share

    @property
    def _softmax_gives_way(self) -> bool:
        """Whether only the environment asks for this unit: no other option of the call needs it."""
        return (
            isinstance(self.softmax, _PreferredUnit)
            and self.softmax != "auto"
            and (self.tensor_share is None or isinstance(self.tensor_share, _PreferredShare))
            and self.tensor_split == "keys"
            and self.softmax_mode == "exact"
        )

    def _call_fields(self, exact_lse: bool) -> tuple:
        share = self._share
        values = {
            "backend": self.backend,
            "float32_precision": self.float32_precision,
            "softmax": str(self.softmax),
            "softmax_preferred": self._softmax_gives_way,
            "softmax_mode": self.softmax_mode,
            "tensor_share": None if share is None else float(share),
            "tensor_split": self.tensor_split,
            "rescale_threshold": float(self.rescale_threshold),
            "p_max_offset": float(self.p_max_offset),
            "min_exponent_log2": float(self.min_exponent_log2),
            "exact_lse": exact_lse,
        }
        return tuple(values[name] for name in OPTIONS)


DEFAULT_OPTIONS = Options()


def resolve_options(options: object) -> Options:
    if isinstance(options, Options):
        return options
    raise TypeError(f"options is {shown(options)}; it must be a pantile.Options or None")


log = logging.getLogger("pantile")


def configure_logging() -> bool:
    """``PANTILE_LOG=debug|info|warning`` sends the logger to stderr; True when plans are wanted."""
    level = os.environ.get("PANTILE_LOG", "")
    if level:
        choice("environment variable PANTILE_LOG", level, _LOG_LEVELS)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pantile: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
    return log.isEnabledFor(logging.INFO) and bool(level)
