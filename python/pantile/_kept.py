"""Imported once the operators are registered: keeps their modules for another import (_once.py)"""

import sys

import torch

from pantile import _fp8_ops, _kv_ops, _ops, _out, _variant_ops  # noqa: F401 (all must be there)
from pantile._once import ATTRIBUTE, MODULES

setattr(
    torch.ops.pantile,
    ATTRIBUTE,
    {f"pantile.{name}": sys.modules[f"pantile.{name}"] for name in MODULES},
)
