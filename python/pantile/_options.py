"""Options of a call, and the environment variables that set their defaults."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

BACKENDS = ("auto", "hopper", "ampere", "cpu", "reference")
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
    checked: read ``cu_seqlens`` and ``seqused`` before launching and refuse wrong contents. On a
        GPU that waits for the device; on the CPU the contents are always checked.
    """

    backend: str = _DEFAULT_BACKEND
    checked: bool = False

    def __post_init__(self) -> None:
        _choice("backend", self.backend, BACKENDS)
        if not isinstance(self.checked, bool):
            raise TypeError(f"checked is {self.checked!r}; it must be True or False")


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
