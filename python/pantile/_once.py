"""What a process has once, although pantile may be imported twice.

A program may remove pantile from ``sys.modules`` and import it again, to read the environment
anew. Operators can be registered with torch only once, and belong to the compiled module, whose
types and exceptions they use. A second import therefore takes these modules over from the first.
"""

from __future__ import annotations

import sys

# Those that register something with torch, and those whose types their answers have.
MODULES = (
    *("_C", "_schema", "_quantized", "_torch_private", "_runtime", "_direct", "_fast_path"),
    *("_ops", "_fp8_numbers", "_fp8_backward", "_fp8_gradient", "_fp8_ops", "_variants"),
    *("_variant_ops", "_expressions", "_mask_forms", "_out", "_kv_ops", "_watch", "_shadow"),
)
ATTRIBUTE = "_modules_of_pantile"  # of torch.ops.pantile, which lives as long as the operators


def _namespace() -> dict:
    """That of torch.ops.pantile; empty without torch or before the operators are registered."""
    ops = getattr(sys.modules.get("torch"), "ops", None)  # None while torch is being imported
    operators = None if ops is None else vars(ops).get("pantile")
    return {} if operators is None else vars(operators)


def _take_over() -> None:
    """Puts the modules of an earlier import back."""
    for name, module in _namespace().get(ATTRIBUTE, {}).items():
        sys.modules[name] = module
        setattr(sys.modules["pantile"], name.rpartition(".")[2], module)


_take_over()  # before anything else of pantile is imported
