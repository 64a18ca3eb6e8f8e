"""Operators whose outputs selective activation checkpointing should keep."""

from __future__ import annotations

from typing import Any


def checkpoint_save_ops() -> set[Any]:
    """The attention forwards and the FP8 quantiser, for selective activation checkpointing.

    Their outputs (o, lse and the low bits of o) cost about ``3 * head_dim + 4`` bytes a query and
    head in 16 bits and save the whole forward in the recomputation::

        policy = lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op in save else CheckpointPolicy.PREFER_RECOMPUTE
        )
        context = functools.partial(create_selective_checkpoint_contexts, policy)

    Returns:
        A set of operator overloads of torch, to be joined with the program's own.
    """
    import torch

    from pantile._attention import load_torch

    load_torch()
    names = ("forward", "forward_extra", "forward_variant", "fp8_forward", "quantize")
    return {getattr(torch.ops.pantile, name).default for name in names}
