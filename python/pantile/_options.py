"""Options of a call, and the environment variables that set their defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

BACKENDS = ("auto", "hopper", "ampere", "cpu", "reference")
FP8_EXPS = ("code", "mixed", "exp2")
_FLOAT32 = ("float32", "torch.float32", "<class 'numpy.float32'>")
FLOAT32_PRECISIONS = ("auto", "highest", "tf32")
_LOG_LEVELS = ("debug", "info", "warning")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


# Read once, when pantile is imported.
_DEFAULT_BACKEND = _choice(
    "environment variable PANTILE_BACKEND", os.environ.get("PANTILE_BACKEND", "auto"), BACKENDS
)


@dataclass(frozen=True)
class Options:
    """What a caller may choose beyond the mathematics.

    backend: ``"auto"`` takes the first kernel of the table that accepts; a family name
        (``"hopper"``, ``"ampere"``, ``"cpu"``) restricts the search to it; ``"reference"`` is the
        textbook algorithm in double precision on the CPU. Default: ``PANTILE_BACKEND``, or auto.
    fp8: quantise q, k and v and attend in FP8, as ``attention(quantize(q, k, v))`` does; gradients
        are those of the unquantised attention, taken at the FP8 forward's output (docs/fp8.md).
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
    """

    backend: str = _DEFAULT_BACKEND
    float32_precision: str = "auto"
    checked: bool = False
    fp8: bool = False
    fp8_exp: str = "code"
    output_dtype: object = None

    def __post_init__(self) -> None:
        _choice("backend", self.backend, BACKENDS)
        _choice("float32_precision", self.float32_precision, FLOAT32_PRECISIONS)
        _choice("fp8_exp", self.fp8_exp, FP8_EXPS)
        for name in ("checked", "fp8"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.output_dtype is not None and not self.output_f32:
            raise ValueError(f"output_dtype is {self.output_dtype!r}; it must be None or float32")

    @property
    def output_f32(self) -> bool:
        return self.output_dtype is not None and str(self.output_dtype) in _FLOAT32

    @property
    def backend_setting(self) -> str:
        """The operators' setting ``backend``, with the precision of float32 if one is asked for."""
        if self.float32_precision == "auto":
            return self.backend
        return f"{self.backend}:{self.float32_precision}"


DEFAULT_OPTIONS = Options()


def resolve_options(options: object) -> Options:
    if isinstance(options, Options):
        return options
    raise TypeError(f"options is {options!r}; it must be a pantile.Options or None")


log = logging.getLogger("pantile")


def configure_logging() -> bool:
    """``PANTILE_LOG=debug|info|warning`` sends the logger to stderr; True when plans are wanted."""
    level = os.environ.get("PANTILE_LOG", "")
    if level:
        _choice("environment variable PANTILE_LOG", level, _LOG_LEVELS)
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("pantile: %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
    return log.isEnabledFor(logging.INFO) and bool(level)
