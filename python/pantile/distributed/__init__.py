"""Attention over several GPUs or processes: context parallelism on torch.distributed.

    import pantile.distributed as pd
    plan = pd.plan(mesh, cu_seqlens=offsets, causal=True)
    x, labels = plan.shard(tokens, labels)             # this rank's rows; plan.positions for RoPE
    o = pd.attention(q, k, v, plan=plan)               # local rows in, local rows out

See docs/distributed.md.
"""

from pantile._attention import load_torch

load_torch()

from pantile.distributed._adapters import (  # noqa: E402
    AttentionModule,
    attention_module,
    core_attention,
)
from pantile.distributed._attention import Prefetched, attention, prefetch  # noqa: E402
from pantile.distributed._plan import Plan, plan  # noqa: E402

__all__ = [
    "AttentionModule",
    "Plan",
    "Prefetched",
    "attention",
    "attention_module",
    "core_attention",
    "plan",
    "prefetch",
]
