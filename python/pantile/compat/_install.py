"""Puts the doors where other libraries' names are looked for, and takes them away again."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from pantile._arguments import choice, flag

# Which module of pantile's answers which import; None: a package that only holds the others.
_MODULES = {
    "flash_attn": {
        "flash_attn": "pantile.compat.flash_attn",
        "flash_attn.flash_attn_interface": "pantile.compat.flash_attn",
        "flash_attn.bert_padding": "pantile.compat.bert_padding",
    },
    "flash_attn_interface": {"flash_attn_interface": "pantile.compat.flash_attn_3"},
}
# Names with an underscore that programs use all the same.
_PRIVATE: dict[str, dict[str, tuple[str, ...] | None]] = {
    "flash_attn.flash_attn_interface": {
        "pantile.compat.flash_attn": ("_get_block_size_n",),
        "pantile.compat._passes": None,  # what it exports
    }
}


class Installation:
    """What :func:`install` did; a context that undoes it at its end."""

    def __init__(self) -> None:
        self._before: dict[str, ModuleType | None] = {}
        self._operators: Any = None

    def _put(self, name: str, module: ModuleType) -> None:
        self._before[name] = sys.modules.get(name)
        sys.modules[name] = module

    def remove(self) -> None:
        """Gives the names back to whoever had them. Names that a program imported stay with it."""
        for name, module in self._before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        self._before = {}
        if self._operators is not None:
            self._operators.remove()
            self._operators = None

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _answer(name: str, source: str) -> ModuleType:
    """A module of that name with the functions of ``source``."""
    ours = importlib.import_module(source)
    module = ModuleType(name, ours.__doc__)
    for attribute in ours.__all__:
        setattr(module, attribute, getattr(ours, attribute))
    for other, attributes in _PRIVATE.get(name, {}).items():
        home = importlib.import_module(other)
        for attribute in attributes or home.__all__:
            setattr(module, attribute, getattr(home, attribute))
    module.__all__ = list(ours.__all__)  # type: ignore[attr-defined]
    module.__pantile__ = True  # type: ignore[attr-defined]
    if hasattr(ours, "__version__"):
        module.__version__ = ours.__version__  # type: ignore[attr-defined]
    spec = importlib.machinery.ModuleSpec(name, None, is_package="." not in name)
    module.__spec__ = spec
    if "." not in name:
        module.__path__ = []
    return module


def install(
    names: str | tuple[str, ...] = ("flash_attn", "flash_attn_interface"),
    *,
    replace: bool = False,
    operators: bool = False,
) -> Installation:
    """Makes ``import flash_attn`` and ``import flash_attn_interface`` find pantile.

    Only the running program is changed, in ``sys.modules``; code that imported the functions of
    another library before keeps them. Metadata of a distribution is not pretended: libraries that
    ask for the version of an installed package called flash-attn do not find one.

    Args:
        names: one of ``"flash_attn"`` and ``"flash_attn_interface"``, or both.
        replace: take the name also where another module has been imported under it.
        operators: also define ``torch.ops.flash_attn_3.fwd``, ``bwd``, ``fwd_combine`` and
            ``get_scheduler_metadata``, which torch's provider "FA3" and xformers call.

    Returns:
        :class:`Installation`, whose ``remove()`` undoes it; usable in a ``with`` statement.

    Raises:
        RuntimeError: another module or operator has the name.
    """
    flag("replace", replace)
    flag("operators", operators)
    wanted: dict[str, str] = {}
    for name in (names,) if isinstance(names, str) else names:
        wanted |= _MODULES[choice("names", name, tuple(_MODULES))]
    for name in wanted:
        present = sys.modules.get(name)
        if present is not None and not hasattr(present, "__pantile__") and not replace:
            raise RuntimeError(
                f"{name} is imported already, from {getattr(present, '__file__', None)}; install "
                "before it is imported, or with replace=True"
            )
    installation = Installation()
    if operators:
        from pantile.compat._operators import Registration

        installation._operators = Registration()
    for name, source in wanted.items():
        module = _answer(name, source)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        installation._put(name, module)
    return installation
