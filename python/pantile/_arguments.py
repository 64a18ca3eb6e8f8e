"""Numbers, flags and names that callers give: checked before they are converted.

Conversions have words of their own (``OverflowError: int too large to convert to float``), which
name no argument. Everything here answers with the converted value, or with an error that names the
argument, its value and what is allowed.
"""

from __future__ import annotations

import numbers
import operator
import sys

MAX_SEQLEN = 2**29 - 1  # the longest sequence that the library takes (cpp/host/validate.cc)
_MOST_CHARACTERS = 80
_MOST_BITS = 256  # of an integer that is printed


def shown(value: object) -> str:
    """``value`` for a message: short, and never an error of its own."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        shape = getattr(value, "shape", ())
        if len(shape) > 0:
            dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
            return f"a {type(value).__name__} of shape {list(shape)} and dtype {dtype}"
        text = repr(value)
    except Exception:  # whatever a class of the caller does
        return f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def is_boolean(value: object) -> bool:
    """Also those of NumPy and torch, which count as 0 and 1 otherwise."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def flag(name: str, value: object, allowed: str = "True or False") -> bool:
    if value is not True and value is not False:
        raise TypeError(f"{name} is {shown(value)}; it must be {allowed}")
    return value


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:  # an array compares by element
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}")
    return value


def integer(name: str, value: object, allowed: str = "an integer") -> int:
    """Of Python, of NumPy, or an integer tensor of one element, which waits for its device."""
    if type(value) is int:
        return value
    index = None
    if not is_boolean(value):
        try:
            index = operator.index(value)
        except Exception:  # what the class of the caller says: of the element count, of the dtype
            index = None
    if index is None:
        raise TypeError(f"{name} is {shown(value)}; it must be {allowed}")
    return index


def dtype_name(value: object) -> str:
    """Of a dtype of torch or NumPy, a NumPy scalar type, or its name; empty for anything else."""
    if isinstance(value, str):
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return value.__name__
    for library in (sys.modules.get("torch"), sys.modules.get("numpy")):
        if library is not None and isinstance(value, library.dtype):
            return str(value).removeprefix("torch.")
    return ""


def is_symbolic(value: object) -> bool:
    """A number that torch.compile traces: it has a value only when the graph runs."""
    return type(value).__name__ in ("SymInt", "SymFloat")


def length(name: str, value: object, in_range: bool = True) -> int:
    if is_symbolic(value):
        return value
    value = integer(name, value)
    if in_range and not 0 <= value <= MAX_SEQLEN:
        raise ValueError(f"{name} is {shown(value)}; it must be from 0 to {MAX_SEQLEN}")
    return value


def real(name: str, value: object, allowed: str = "a real number") -> float:
    if type(value) is float:
        return value
    if is_boolean(value) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {shown(value)}; it must be {allowed}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is {shown(value)}; it must be finite") from None
    except Exception:
        raise TypeError(f"{name} is {shown(value)}; it must be {allowed}") from None


def check_rows(which: str, x, cu_seqlens, longest: int) -> None:
    """That sequences of at most ``longest`` rows can fill x: total_rule of validate.cc, which
    tensors without memory do not reach."""
    if getattr(x, "ndim", 0) != 3 or getattr(cu_seqlens, "ndim", 0) != 1:
        return  # refused elsewhere
    total, batch = x.shape[0], cu_seqlens.shape[0] - 1
    symbolic = any(is_symbolic(n) for n in (total, batch, longest))
    if not symbolic and batch > 0 and total > batch * longest:
        raise ValueError(
            f"max_seqlen_{which} is {longest}; with batch {batch} and total_{which} {total} it "
            f"must be at least {-(-total // batch)}"
        )


def optional_scale(scale: object) -> float | None:
    if scale is None or is_symbolic(scale):
        return scale
    return real("scale", scale, "a real number or None")


def check_flags(return_lse: object, return_max_logit: object, deterministic: object) -> None:
    flag("return_lse", return_lse)
    flag("return_max_logit", return_max_logit)
    flag("deterministic", deterministic)
