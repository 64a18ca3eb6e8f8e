"""Names of torch that torch does not promise to keep. Nothing else in pantile imports one.

Each is looked up once. A name that is only about speed may be missing: :func:`find` answers None
and the caller takes the public way. A name without which the operators cannot work is required, and
its absence is one clear error instead of an AttributeError from the middle of an import.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

missing: list[str] = []  # what this torch does not have of it, in the order of the questions


def _look_up(path: str) -> Any:
    """The object at a dotted path that starts with a module; LookupError if there is none."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for name in names[count:]:
            found = getattr(found, name, None)
        if found is not None:
            return found
        break
    raise LookupError(path)


def _miss(path: str) -> None:
    if path not in missing:
        missing.append(path)


def find(path: str) -> Any:
    """The object, or None if this torch does not have it."""
    try:
        return _look_up(path)
    except LookupError:
        _miss(path)
        return None


def look_up_feature(path: str) -> Any:
    """The same of a name that only one feature needs, which refuses then; it is not `missing`."""
    try:
        return _look_up(path)
    except LookupError:
        return None


def require(path: str) -> Any:
    try:
        return _look_up(path)
    except LookupError:
        raise ImportError(
            f"pantile needs {path}, which torch {torch.__version__} does not have; use a torch "
            "that pantile was tested with"
        ) from None


# ---- the operators: redispatch below autograd

below_autograd = require("torch._C._AutoDispatchBelowAutograd")

# ---- torch.func: whether a transform is active, and the form of autograd.Function for one level.
# Without one of these names plain tensors are differentiated as ever; inside a transform torch
# refuses the Function by name.

_transforms = (
    find("torch._C._are_functorch_transforms_active"),
    find("torch._functorch.autograd_function.enable_single_level_autograd_function"),
    find("torch.autograd.forward_ad._set_fwd_grad_enabled"),
)
KNOWS_TRANSFORMS = None not in _transforms


def _never() -> bool:
    return False


in_transform, single_level_function, set_forward_grad = (
    _transforms if KNOWS_TRANSFORMS else (_never, None, None)
)

# ---- dispatch keys, and what the public functions for them would be

_key_set = find("torch._C.DispatchKeySet")
_exclude = find("torch._C._ExcludeDispatchKeyGuard")


def dispatch_key(name: str) -> Any:
    return find(f"torch._C.DispatchKey.{name}")


def key_set(*names: str) -> int | None:
    """The bits of a set of dispatch keys; None when torch does not say."""
    keys = [dispatch_key(name) for name in names]
    if _key_set is None or None in keys:
        return None
    together = _key_set(keys[0])
    for key in keys[1:]:
        together = together | _key_set(key)
    if not hasattr(together, "raw_repr"):
        _miss("torch._C.DispatchKeySet.raw_repr")
        return None
    return together.raw_repr()


def without_autocast(device_type: str, name: str) -> Any:
    """A function that makes a context in which autocast's dispatch key ``name`` is skipped."""
    key = dispatch_key(name)
    if None in (_key_set, _exclude, key):
        return lambda: torch.autocast(device_type, enabled=False)
    keys = _key_set(key)
    return lambda: _exclude(keys)


# ---- FP8 operands in torch's scaled_dot_product_attention

allow_fp8_attention = look_up_feature("torch._C._set_sdp_use_fa3")

# ---- forward mode

_forward_ad = importlib.import_module("torch.autograd.forward_ad")
KNOWS_FORWARD_MODE = hasattr(_forward_ad, "_current_level")
if not KNOWS_FORWARD_MODE:
    _miss("torch.autograd.forward_ad._current_level")


def in_forward_mode() -> bool:
    """Whether a dual level is open. A module attribute, read anew: torch assigns it."""
    return _forward_ad._current_level >= 0
