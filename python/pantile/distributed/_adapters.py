"""Doors for training frameworks: torch's context parallelism, torchtitan, Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pantile._arguments import choice, shown
from pantile._masks import window_bounds
from pantile._options import Options
from pantile.distributed import _layout
from pantile.distributed._attention import METHODS, attention
from pantile.distributed._layout import Mask, merged
from pantile.distributed._plan import Group, Plan, _bounds_of, plan

Tensor = torch.Tensor


def load_balancer(plan: Plan) -> Any:
    """See :meth:`Plan.load_balancer`."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer

        base: Any = _load_balancer._LoadBalancer
    except (ImportError, AttributeError):  # private, and younger than torch 2.6
        base = object
    counts = {_layout.rows_of(runs) for runs in plan.runs}
    if len(counts) > 1:
        raise ValueError(
            f"the plan gives ranks {min(counts)} to {max(counts)} tokens; "
            "torch's context parallelism cuts equal shares: choose lengths that divide"
        )

    class PlanLoadBalancer(base):
        """The order of a plan, rank after rank."""

        def _generate_indices(self, restore: bool = False) -> Tensor:
            order = plan.order
            order = torch.argsort(order) if restore else order
            return order.to(torch.int32)[None]

    return PlanLoadBalancer()


class AttentionModule(torch.nn.Module):
    """The attention of a layer across ranks, as torchtitan calls it; see
    :func:`attention_module`."""

    def __init__(self, mesh: Any, plan: Plan | None, method: str, causal: bool) -> None:
        super().__init__()
        self.mesh, self.plan, self.method, self.causal = mesh, plan, method, causal

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool | None = None,
    ) -> Tensor:
        """q ``[batch, heads, tokens, dim]``, k and v with key heads; o like q."""
        if q.shape[1] != k.shape[1] and not enable_gqa:
            raise ValueError(
                f"q has {q.shape[1]} heads and k {k.shape[1]}; enable_gqa must be True then"
            )
        causal = self.causal if self.plan is None else self.plan.mask == Mask(-1, 0)
        if is_causal is not None and is_causal is not causal:
            raise ValueError(f"is_causal is {is_causal}; this module attends with causal={causal}")
        where: dict[str, Any] = {"plan": self.plan}
        if self.plan is None:
            where = {"mesh": self.mesh, "causal": self.causal}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, scale=scale, method=self.method, **where).transpose(1, 2)


def attention_module(
    mesh: Any = None, *, plan: Plan | None = None, method: str = "auto", causal: bool = True
) -> AttentionModule:
    """A module in place of torchtitan's attention: ``module(q, k, v, scale=.., enable_gqa=..)``.

    Tensors are ``[batch, heads, tokens, dim]``, the tokens those of this rank.

    Args:
        mesh: as in :func:`plan`; for dense sequences in the order of its zig-zag, which is that of
            torch's default load balancer.
        plan: in place of it; may be exchanged for each batch: ``module.plan = ..``.
        method, causal: as in :func:`attention`.
    """
    return AttentionModule(mesh, plan, choice("method", method, METHODS), causal)


# ---- Megatron and TransformerEngine: their names, their order of tokens

_COMM_TYPES = {"p2p": "ring", "a2a": "heads", "all_gather": "gather", "a2a+p2p": "ring"}
_FORMATS = ("sbhd", "bshd", "thd")
_MASK_TYPES = ("causal", "padding_causal", "no_mask")
_plans: dict[Any, Plan] = {}


def _megatron_plan(groups: list, bounds: tuple, packed: bool, mask: Mask) -> Plan:
    """Of ranks that hold the parts r and 2 P - 1 - r of 2 P of every document; ``groups``: of those
    that exchange keys, or (of those that split heads, of those that exchange keys)."""
    keys = Group.of(groups[-1])
    heads = Group.of(groups[0]) if len(groups) == 2 else Group(None, 1, 0)
    runs = _layout.te_zigzag(bounds, keys.size * heads.size)
    parts = [runs[i * heads.size : (i + 1) * heads.size] for i in range(keys.size)]
    shares = [merged(run for part in some for run in part) for some in parts]
    made = Plan(bounds, packed, mask, "te_zigzag", shares, keys, heads)
    made.runs = runs
    return made


def core_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cp_group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    cp_comm_type: str = "all_gather",
    qkv_format: str = "sbhd",
    attn_mask_type: str = "causal",
    window_size: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_q_padded: Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    options: Options | None = None,
) -> Tensor:
    """Attention across ranks by the names of Megatron and TransformerEngine.

    Rank r of P holds the parts r and 2 P - 1 - r of 2 P of each sequence or document, as
    ``get_batch_on_this_cp_rank`` cuts them; lengths are multiples of 2 P.

    Args:
        query, key, value: local rows, in ``qkv_format``: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        cp_group: the process group; for ``"a2a+p2p"`` two of them, (heads, keys).
        cp_comm_type: ``"p2p"``: ring; ``"a2a"``: heads; ``"all_gather"``: gather; ``"a2a+p2p"``:
            heads inside, ring outside.
        attn_mask_type: ``"causal"``, ``"padding_causal"`` or ``"no_mask"``.
        window_size: (left, right), -1 unbounded.
        cu_seqlens_q: of ``"thd"``: offsets of the whole documents, on the host.
        cu_seqlens_q_padded: of documents with padding at their ends, if there is any: causal only,
            so that no token sees it.
        softmax_scale, deterministic, options: as in :func:`attention`.

    Returns:
        o in the format of query, heads and dim as one dimension.
    """
    choice("cp_comm_type", cp_comm_type, tuple(_COMM_TYPES))
    choice("qkv_format", qkv_format, _FORMATS)
    choice("attn_mask_type", attn_mask_type, _MASK_TYPES)
    groups = list(cp_group) if isinstance(cp_group, Sequence) else [cp_group]
    wanted = 2 if cp_comm_type == "a2a+p2p" else 1
    if len(groups) != wanted:
        raise ValueError(
            f"cp_group has {len(groups)} groups; cp_comm_type {cp_comm_type!r} needs {wanted}"
        )
    causal = attn_mask_type != "no_mask"
    mask = Mask(*window_bounds(causal, window_size))
    packed = qkv_format == "thd"
    if packed == (cu_seqlens_q is None):
        raise TypeError(f"cu_seqlens_q is {shown(cu_seqlens_q)}; 'thd', and only it, needs offsets")
    if packed:
        offsets = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        if cu_seqlens_q_padded is not None and mask.right != 0:
            raise ValueError("cu_seqlens_q_padded is set; without a causal mask, padding is seen")
        bounds = _bounds_of(None, offsets)
    else:
        ranks = 1
        for group in groups:
            ranks *= dist.get_world_size(group)
        bounds = 0, query.shape[0 if qkv_format == "sbhd" else 1] * ranks
    identity = (*(id(group) for group in groups), bounds, packed, mask)
    if identity not in _plans:
        while len(_plans) >= 64:  # documents differ from batch to batch
            _plans.pop(next(iter(_plans)))
        _plans[identity] = _megatron_plan(groups, bounds, packed, mask)
    tensors = [query, key, value]
    if qkv_format == "sbhd":
        tensors = [x.transpose(0, 1) for x in tensors]
    o = attention(
        *tensors,
        plan=_plans[identity],
        method=_COMM_TYPES[cp_comm_type],
        scale=softmax_scale,
        deterministic=deterministic,
        options=options,
    ).flatten(-2)
    return o.transpose(0, 1).contiguous() if qkv_format == "sbhd" else o


__all__ = ["AttentionModule", "attention_module", "core_attention", "load_balancer", "plan"]
