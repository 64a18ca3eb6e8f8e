"""Options of a call, and the environment variables that set their defaults."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pantile._arguments import choice, dtype_name, flag, shown
from pantile._C import UnsupportedError
from pantile._schema import OPTIONS
from pantile.experimental import DEFAULT_UNIT, SOFTMAX_UNITS, SoftmaxOptions

if TYPE_CHECKING:
    import torch

BACKENDS = ("auto", "hopper", "ampere", "cpu", "reference", "torch")
FP8_EXPS = ("code", "mixed", "exp2")
FP8_BACKWARDS = ("bf16", "full", "recompute")
FLOAT32_PRECISIONS = ("auto", "highest", "tf32")
_LOG_LEVELS = ("debug", "info", "warning")


class _PreferredBackend(str):
    """A backend that the environment chose: it gives way where it does not serve a call."""

    __slots__ = ()


def _backend_of_environment() -> str:
    name = "PANTILE_BACKEND"
    backend = choice(f"environment variable {name}", os.environ.get(name, "auto"), BACKENDS)
    # A plain string for auto: torch.compile traces no other default.
    return backend if backend == "auto" else _PreferredBackend(backend)


# Read once, when pantile is imported.
_DEFAULT_BACKEND: Any = _backend_of_environment()


_MOST_SPLITS = 256


def _check_splits(num_splits: object, fp8: bool) -> None:
    allowed = f"an int from 1 to {_MOST_SPLITS}, or auto"
    if type(num_splits) is str and num_splits == "auto":
        return
    if type(num_splits) is not int:
        raise TypeError(f"num_splits is {shown(num_splits)}; it must be {allowed}")
    if not 1 <= num_splits <= _MOST_SPLITS:
        raise ValueError(f"num_splits is {shown(num_splits)}; it must be {allowed}")
    if fp8 and num_splits > 1:
        raise ValueError(f"num_splits is {num_splits}; FP8 attention has no parts, it must be 1")


_SOFTMAX_NAMES = {field.name for field in dataclasses.fields(SoftmaxOptions)}
_MOVED = _SOFTMAX_NAMES - {"softmax"}  # Options had them


@dataclass(frozen=True)
class Options:
    """What a caller may choose beyond the mathematics.

    backend: ``"auto"`` takes the first kernel of the table that accepts; a family name
        (``"hopper"``, ``"ampere"``, ``"cpu"``) restricts the search to it; ``"reference"`` is the
        textbook algorithm in double precision on the CPU; ``"torch"`` is
        ``torch.nn.functional.scaled_dot_product_attention``, for what it serves, as a way back.
        Default: ``PANTILE_BACKEND``, or auto. What the environment chose holds for the calls that
        this backend serves; others are as with auto. What the code chose is never replaced.
    float32_precision: how GPU kernels multiply float32 matrices. ``"tf32"`` rounds operands to 11
        bits of mantissa, ``"highest"`` has the error of float32. ``"auto"`` asks
        ``torch.get_float32_matmul_precision()`` when the kernel runs, the backward's too:
        "highest" is that, "high" and "medium" are tf32. The CPU ignores it.
    checked: read ``cu_seqlens`` and ``seqused`` before launching and refuse wrong contents. On a
        GPU that waits for the device; on the CPU the contents are always checked.
    fp8: quantise q, k and v and attend in FP8, as :func:`pantile.fp8.attention` of
        :func:`pantile.fp8.quantize` does (docs/fp8.md).
    fp8_exp: how FP8 turns scores into weights: ``"code"`` computes the e4m3 code of a weight
        straight from its score, an approximation to e4m3's own precision and the fastest;
        ``"exp2"`` rounds the true exponential; ``"mixed"`` does each for half of them.
    fp8_backward: what the backward of FP8 attention works on. ``"bf16"``: on what the codes stand
        for, with the O and LSE of the FP8 forward; the gradients carry the rounding of FP8.
        ``"full"``: on the codes themselves, with all five products in FP8, for which dO, P and dS
        become FP8 as well. It needs blocks of 128, and on Hopper equal head dims to 128.
        ``"recompute"``: on q, k and v as they came, for which it runs a 16-bit forward again; the
        gradients are those of the unquantised attention (docs/fp8.md).
    num_splits: into how many parts the keys are cut, for few queries over many keys: parts are
        attended to by blocks (CPU: threads) of their own, and merged in ascending order by a last
        kernel, so that equal calls have equal bits. 1 to 256; 1 does not cut, and ``"auto"`` takes
        what a model of the time predicts to be fastest, often 1. The number of parts changes the
        rounding of o. It serves 16-bit and float32 attention, dense and packed, with full, causal
        and window masks, softcap, sinks and key ranges; other calls are refused by name, or not cut
        with ``"auto"``. The backward is the same with any number.
    output_dtype: ``None`` gives o the dtype of q. ``"float32"`` (or ``torch.float32``) gives it as
        accumulated: normalised like any output, but not rounded to 16 bits. For partial results
        over parts of the keys, which :func:`pantile.merge_attention` joins.
    softmax: where the softmax of the forward runs: ``"vector"`` units, partly on ``"tensor"``
        cores (FlashAttention-T, docs/design/flashattention-t.md), or ``"auto"``, whatever
        measured fastest. A tensor softmax gives the LSE of the weights as they were rounded for the
        product with V; ``auto`` takes none where the LSE is returned. Default:
        ``PANTILE_SOFTMAX``, or auto. What the environment chose holds for the calls that a kernel
        serves that way; others are as with auto. What else can be chosen about it is in
        :class:`pantile.experimental.SoftmaxOptions`, which is taken here too.

    Raises:
        TypeError, ValueError: a value is wrong; the message names the option, its value and what is
        allowed.
    """

    backend: Literal["auto", "hopper", "ampere", "cpu", "reference", "torch"] = _DEFAULT_BACKEND
    float32_precision: Literal["auto", "highest", "tf32"] = "auto"
    checked: bool = False
    fp8: bool = False
    fp8_exp: Literal["code", "mixed", "exp2"] = "code"
    fp8_backward: Literal["bf16", "full", "recompute"] = "recompute"
    num_splits: int | Literal["auto"] = 1
    output_dtype: torch.dtype | type | Literal["float32"] | None = None
    softmax: Literal["auto", "vector", "tensor"] | SoftmaxOptions = DEFAULT_UNIT

    def __post_init__(self) -> None:
        choice("backend", self.backend, BACKENDS)
        choice("float32_precision", self.float32_precision, FLOAT32_PRECISIONS)
        choice("fp8_exp", self.fp8_exp, FP8_EXPS)
        choice("fp8_backward", self.fp8_backward, FP8_BACKWARDS)
        for name in ("checked", "fp8"):
            flag(name, getattr(self, name))
        _check_splits(self.num_splits, self.fp8)
        if self.output_dtype is not None and not self.output_f32:
            text = shown(self.output_dtype)
            raise ValueError(f"output_dtype is {text}; it must be None or float32")
        if isinstance(self.softmax, dict) and set(self.softmax) == _SOFTMAX_NAMES:
            # dataclasses.asdict makes it of a SoftmaxOptions.
            object.__setattr__(self, "softmax", SoftmaxOptions(**self.softmax))
        # The fields pantile._schema.OPTIONS of a call, by whether it returns its LSE. No field of
        # this class: Options(**dataclasses.asdict(options)) makes an equal one.
        fields = tuple(self._call_fields(exact) for exact in (False, True))
        object.__setattr__(self, "call_fields", fields)

    if TYPE_CHECKING:

        @property
        def call_fields(self) -> Any: ...

    @property
    def backend_preferred(self) -> bool:
        """Whether only the environment asks for the backend."""
        return isinstance(self.backend, _PreferredBackend)

    @property
    def output_f32(self) -> bool:
        return dtype_name(self.output_dtype) == "float32"

    def _call_fields(self, exact_lse: bool) -> tuple:
        softmax = self.softmax
        if not isinstance(softmax, SoftmaxOptions):
            choice("softmax", softmax, SOFTMAX_UNITS)
            softmax = SoftmaxOptions(softmax)
        values = {
            # The torch backend has no row in the table of kernels: what comes there prefers it.
            "backend": "auto" if self.backend == "torch" else str(self.backend),
            "backend_preferred": self.backend_preferred,
            "float32_precision": self.float32_precision,
            "num_splits": self.num_splits if isinstance(self.num_splits, int) else 0,
            **softmax._fields_of_call(),
            "exact_lse": exact_lse,
        }
        return tuple(values[name] for name in OPTIONS)


def _refusing_moved_names(init):
    """Options.__init__, which says where options that it had once are now."""

    @functools.wraps(init)
    def checked_init(self, *values, **named) -> None:
        for name in named:
            if name in _MOVED:
                raise TypeError(
                    f"{name} is an option of pantile.experimental.SoftmaxOptions; use "
                    f"pantile.Options(softmax=pantile.experimental.SoftmaxOptions({name}=...))"
                )
        init(self, *values, **named)

    return checked_init


Options.__init__ = _refusing_moved_names(Options.__init__)  # type: ignore[method-assign]


def quantize_backend(backend: str, preferred: bool, device: str) -> str:
    """The backend for the quantiser of tensors on ``device``: one that only the environment
    prefers gives way where it has none."""
    if not preferred:
        if backend == "torch":
            raise UnsupportedError("options.backend is torch: torch has no quantiser")
        return backend
    there = ("hopper",) if device == "cuda" else ("cpu", "reference")
    return str(backend) if backend in there else "auto"


DEFAULT_OPTIONS = Options()
# What Options(fp8=True) makes of its inputs: rows to a scale in Q, keys to a scale, Hadamard
# rotation, K smoothing.
FP8_FORMAT = (128, 128, True, True)


def resolve_options(options: object) -> Options:
    if isinstance(options, Options):
        return options
    raise TypeError(f"options is {shown(options)}; it must be a pantile.Options or None")


def extras_of(return_max_logit: bool, options: Options) -> tuple[bool, bool] | None:
    """(max_logit, output_f32), or None when neither is wanted."""
    if return_max_logit or options.output_dtype is not None:
        return return_max_logit, options.output_f32
    return None


def refuse_extras(return_max_logit: bool, options: Options) -> None:
    if return_max_logit:
        raise ValueError("return_max_logit is True; FP8 attention does not give the largest logit")
    if options.output_dtype is not None:
        raise ValueError("output_dtype is float32; FP8 attention gives o in 16 bits only")


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
