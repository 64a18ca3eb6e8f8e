"""``plan``: which rank holds which tokens of a batch, on which groups of processes."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pantile._arguments import MAX_SEQLEN, choice, integer, shown
from pantile._masks import window_bounds
from pantile.distributed import _layout
from pantile.distributed._layout import LAYOUTS, Mask, Run
from pantile.distributed._local import Local, Near
from pantile.distributed._share import Share, ranges_to_rows
from pantile.distributed._statistics import Documents

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from pantile._types import Window

Tensor = torch.Tensor

# Runs that see their own keys alone are attended with apart where they have this part of the work.
_LEAST_NEAR = 0.25


class Group:
    """A process group, or what stands for one where nothing is sent (``group`` None)."""

    def __init__(self, group: Any, size: int, rank: int) -> None:
        self.group, self.size, self.rank = group, size, rank

    @staticmethod
    def of(group: Any) -> Group:
        return Group(group, dist.get_world_size(group), dist.get_rank(group))


def _groups_of(mesh: Any) -> tuple[Group, Group]:
    """(of those that exchange keys, of those that split the heads)."""
    alone = Group(None, 1, 0)
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "mesh is None and torch.distributed is not initialised; "
                "call torch.distributed.init_process_group, or give ranks and rank"
            )
        return Group.of(dist.group.WORLD), alone
    if isinstance(mesh, dist.ProcessGroup):
        return Group.of(mesh), alone
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise TypeError(
            f"mesh is {shown(mesh)}; it must be a DeviceMesh, a ProcessGroup or None for all ranks"
        )
    if mesh.ndim == 1:
        return Group.of(mesh.get_group()), alone
    if mesh.ndim == 2:
        return Group.of(mesh.get_group(0)), Group.of(mesh.get_group(1))
    raise ValueError(f"mesh has {mesh.ndim} dimensions; it must have 1 or 2: (keys, heads)")


def _bounds_of(seqlen: object, cu_seqlens: object) -> tuple[int, ...]:
    if (seqlen is None) == (cu_seqlens is None):
        both = "both given" if seqlen is not None else "both missing"
        raise TypeError(f"seqlen and cu_seqlens are {both}; exactly one must be given")
    if seqlen is not None:
        length = integer("seqlen", seqlen)
        if not 0 <= length <= MAX_SEQLEN:
            raise ValueError(f"seqlen is {length}; it must be from 0 to {MAX_SEQLEN}")
        return 0, length
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"cu_seqlens is on {cu_seqlens.device}; it must be on the host, a list or a CPU "
                "tensor: a plan is made without waiting for a device"
            )
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, str):
        raise TypeError(f"cu_seqlens is {shown(cu_seqlens)}; it must be a list or a CPU tensor")
    bounds = tuple(integer("an element of cu_seqlens", x) for x in cu_seqlens)
    if len(bounds) < 1 or bounds[0] != 0:
        raise ValueError(f"cu_seqlens is {shown(bounds)}; it must start with 0")
    if any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens is {shown(bounds)}; it must never decrease")
    if bounds[-1] > MAX_SEQLEN:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}; at most {MAX_SEQLEN} tokens")
    return bounds if len(bounds) > 1 else (0, 0)


class Plan:
    """How the tokens of a batch lie on the ranks; made by :func:`plan`.

    Attributes:
        layout: ``"contiguous"``, ``"zigzag"`` or ``"documents"``.
        ranks, rank: how many there are, and this one.
        runs: of each rank, the ranges ``(start, stop, document)`` of tokens that it holds, in the
            order of its rows.
        tokens: how many rows this rank holds.
        imbalance: pairs of query and key of the slowest rank, over the mean.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        packed: bool,
        mask: Mask,
        layout: str,
        shares: list[tuple[Run, ...]],
        keys: Group,
        heads: Group,
    ) -> None:
        self.bounds, self.packed, self.mask, self.layout = bounds, packed, mask, layout
        self.shares = shares  # one a member of `keys`
        self.keys, self.heads = keys, heads
        self.ranks = keys.size * heads.size
        self.rank = keys.rank * heads.size + heads.rank
        self._locals: dict[tuple[torch.device, int], tuple[Near | None, Local]] = {}
        self._documents: dict[tuple[torch.device, int], Documents] = {}

    def __repr__(self) -> str:
        return (
            f"Plan({self.layout}, {self.bounds[-1]} tokens, {len(self.bounds) - 1} documents, "
            f"rank {self.rank} of {self.ranks})"
        )

    @functools.cached_property
    def runs(self) -> list[tuple[Run, ...]]:
        if self.heads.size == 1:
            return self.shares
        return [part for share in self.shares for part in _split(share, self.heads.size)]

    @functools.cached_property
    def tokens(self) -> int:
        return _layout.rows_of(self.runs[self.rank])

    @functools.cached_property
    def imbalance(self) -> float:
        return _layout.imbalance(self.shares, self.bounds, self.mask)

    @functools.cached_property
    def share(self) -> Share:
        """What is computed where keys are exchanged."""
        return Share(self.shares, self.keys.rank, self.bounds, self.mask)

    @functools.cached_property
    def _alone(self) -> list[bool]:
        """Of each run of the share: whether it is attended with apart from the others, because its
        queries see keys of the run alone; so where these runs have a good part of the work."""
        runs = self.shares[self.keys.rank]
        alone = [_layout.is_alone(run, self.bounds, self.mask) for run in runs]
        work = _layout.Work(self.bounds, self.mask)
        near = work.of_runs(run for run, is_near in zip(runs, alone, strict=True) if is_near)
        if near < _LEAST_NEAR * work.of_runs(runs) or not any(alone):
            return [False] * len(runs)
        return alone

    @functools.cached_property
    def exchanged(self) -> Share:
        """What is computed with keys of others, where the runs for which that holds are apart."""
        runs = self.shares[self.keys.rank]
        far = [run for run, is_near in zip(runs, self._alone, strict=True) if not is_near]
        return Share(self.shares, self.keys.rank, self.bounds, self.mask, far)

    @functools.cached_property
    def by_heads(self) -> Plan:
        """The same rows on the same ranks, which split the heads and exchange no keys."""
        whole = _layout.contiguous(self.bounds, 1)
        alone = Group(None, 1, 0)
        other = Plan(self.bounds, self.packed, self.mask, self.layout, whole, alone, self.keys)
        other.runs = self.shares
        return other

    @functools.cached_property
    def needed_fraction(self) -> float:
        """Keys that an exchange delivers, of those that an all-gather does; of the share with the
        most."""
        most = 0.0
        for runs in self.shares:
            needed = _layout.needed_keys(runs, self.bounds, self.mask).values()
            own = _layout.rows_of(runs)
            count = sum(last - first for ranges in needed for first, last in ranges)
            most = max(most, (count - own) / max(self.bounds[-1] - own, 1))
        return most

    def local(self, device: torch.device, batch: int) -> tuple[Near | None, Local]:
        """What the share computes with keys of its own alone, and the rest, with their index arrays
        on ``device``."""
        if (device, batch) not in self._locals:
            near = None
            if any(self._alone):
                runs = self.shares[self.keys.rank]
                near = Near(runs, self._alone, self.mask, device, batch)
            self._locals[device, batch] = near, Local(self.exchanged, device, batch)
        return self._locals[device, batch]

    def documents(self, device: torch.device, batch: int) -> Documents:
        """What the ranks tell each other of the keys of documents, in deterministic mode."""
        if (device, batch) not in self._documents:
            made = Documents(self.share, self.keys.group, device, batch)
            self._documents[device, batch] = made
        return self._documents[device, batch]

    @functools.cached_property
    def index(self) -> Tensor:
        """int64 ``[tokens]``: global positions of this rank's rows."""
        return self._index_of(self.rank)

    def _index_of(self, rank: int) -> Tensor:
        return ranges_to_rows((run.start, run.stop) for run in self.runs[rank])

    @functools.cached_property
    def order(self) -> Tensor:
        """int64: global positions of all rows, rank after rank."""
        return ranges_to_rows((run.start, run.stop) for runs in self.runs for run in runs)

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 ``[tokens]``: positions of this rank's rows in their documents, for RoPE."""
        parts = self.runs[self.rank]
        return ranges_to_rows(
            (run.start - self.bounds[run.document], run.stop - self.bounds[run.document])
            for run in parts
        )

    @functools.cached_property
    def head_order(self) -> Tensor | None:
        """Of the rows that the ranks of one share hold, rank after rank: ascending; None: as they
        are."""
        return _ascending(self.runs_of_share)

    @property
    def runs_of_share(self) -> list[tuple[Run, ...]]:
        first = self.keys.rank * self.heads.size
        return self.runs[first : first + self.heads.size]

    def _sequence_dim(self, x: Tensor, dim: int | None) -> int:
        if dim is None:
            return 0 if self.packed or x.ndim == 1 else 1
        return dim

    def shard(self, *tensors: Tensor, dim: int | None = None) -> Any:
        """This rank's rows of whole tensors.

        Args:
            tensors: each with all tokens along ``dim``, equal on all ranks.
            dim: default 0 for packed documents and tensors of one dimension, otherwise 1.

        Returns:
            The local tensor, or a tuple of them. Differentiable.
        """
        local = []
        for i, x in enumerate(tensors):
            axis = self._sequence_dim(x, dim)
            if x.shape[axis] != self.bounds[-1]:
                raise ValueError(
                    f"tensors[{i}] has {x.shape[axis]} tokens along dimension {axis}; "
                    f"the plan has {self.bounds[-1]}"
                )
            local.append(x.index_select(axis, self.index.to(x.device)))
        return local[0] if len(local) == 1 else tuple(local)

    def unshard(self, x: Tensor, *, dim: int | None = None) -> Tensor:
        """The whole tensor of local ones, on every rank: a collective call, without gradient."""
        axis = self._sequence_dim(x, dim)
        if x.shape[axis] != self.tokens:
            raise ValueError(
                f"x has {x.shape[axis]} tokens along dimension {axis}; this rank has {self.tokens}"
            )
        rows = x.detach().movedim(axis, 0)
        counts = [_layout.rows_of(runs) for runs in self.runs]
        first = self.keys.rank * self.heads.size
        rows = _all_rows(rows, counts[first : first + self.heads.size], self.heads)
        whole = [
            sum(counts[i * self.heads.size : (i + 1) * self.heads.size])
            for i in range(self.keys.size)
        ]
        rows = _all_rows(rows, whole, self.keys)
        result = torch.empty_like(rows)
        result[self.order.to(rows.device)] = rows
        return result.movedim(0, axis)

    def check(self) -> None:
        """Raises where the ranks have made different plans: a collective call."""
        text = repr((self.bounds, self.mask, self.layout, self.shares))
        mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        for group in (self.heads, self.keys):
            if group.size == 1:
                continue
            device = "cuda" if dist.get_backend(group.group) == "nccl" else "cpu"
            own = torch.tensor([mine], dtype=torch.int64, device=device)
            parts = [torch.empty_like(own) for _ in range(group.size)]
            dist.all_gather(parts, own, group=group.group)
            different = [i for i, part in enumerate(parts) if int(part) != mine]
            if different:
                raise RuntimeError(
                    f"ranks {different} of the group have another plan than rank {group.rank}; "
                    "all ranks must give pantile.distributed.plan the same arguments"
                )

    def load_balancer(self) -> Any:
        """The permutation of this plan as torch's ``_context_parallel_shard`` takes it.

        torch cuts equal shares, so the ranks must hold equally many tokens.
        """
        from pantile.distributed._adapters import load_balancer

        return load_balancer(self)


def _split(share: Sequence[Run], parts: int) -> list[tuple[Run, ...]]:
    """The rows of a share in ``parts`` nearly equal pieces, in their order."""
    total = _layout.rows_of(share)
    pieces: list[tuple[Run, ...]] = []
    runs, used = list(share), 0
    for i in range(parts):
        want = (i + 1) * total // parts - used
        used += want
        piece = []
        while want > 0:
            run = runs.pop(0)
            rows = min(want, run.stop - run.start)
            piece.append(run._replace(stop=run.start + rows))
            if rows < run.stop - run.start:
                runs.insert(0, run._replace(start=run.start + rows))
            want -= rows
        pieces.append(tuple(piece))
    return pieces


def _ascending(parts: Sequence[Sequence[Run]]) -> Tensor | None:
    held = ranges_to_rows((run.start, run.stop) for runs in parts for run in runs)
    if len(held) < 2 or bool((held[1:] > held[:-1]).all()):
        return None
    return torch.argsort(held)


def _all_rows(rows: Tensor, counts: list[int], group: Group) -> Tensor:
    """Of every rank of the group, one after the other; counts may differ."""
    if group.size == 1:
        return rows.contiguous()
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group.group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def plan(
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    layout: str = "auto",
    slack: float = 0.02,
    ranks: int | None = None,
    rank: int | None = None,
) -> Plan:
    """Distributes the tokens of a batch over the ranks of a mesh: context parallelism.

    Every rank must call it with the same arguments; nothing is sent. The same plan serves all
    layers, forward and backward.

    Args:
        mesh: a DeviceMesh of one dimension, a ProcessGroup, or None for all ranks. A mesh of two
            dimensions, (keys, heads): ranks along the second split the heads (Ulysses), those along
            the first exchange keys.
        seqlen: tokens of one dense sequence, for tensors ``[batch, seqlen, ..]``.
        cu_seqlens: for packed documents: offsets ``[documents + 1]``, a list or a CPU tensor.
        causal, window: the mask, as in :func:`pantile.attention`.
        layout: ``"contiguous"``; ``"zigzag"``: an early and a late part a rank; ``"documents"``:
            ranges of documents, balanced in tokens and work; ``"auto"``: the first of them that is
            balanced. ``"te_zigzag"``: zigzag in every document, whose length must be a multiple of
            twice the ranks; the order of TransformerEngine and Megatron.
        slack: by how much the work of a rank may exceed the mean, as a part of it.
        ranks, rank: in place of a mesh: the plan of one of ``ranks``, to look at it; such a plan
            does not communicate.

    Returns:
        A :class:`Plan`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and the rule.
    """
    bounds = _bounds_of(seqlen, cu_seqlens)
    mask = Mask(*window_bounds(causal, window))
    choice("layout", layout, LAYOUTS)
    if not isinstance(slack, int | float) or not math.isfinite(slack) or slack < 0:
        raise ValueError(f"slack is {shown(slack)}; it must be a number of 0 or more")
    if ranks is None and rank is None:
        keys, heads = _groups_of(mesh)
    elif mesh is not None or ranks is None or rank is None:
        raise TypeError("ranks and rank stand for a mesh; give both of them, and no mesh")
    else:
        if not 0 <= integer("rank", rank) < integer("ranks", ranks):
            raise ValueError(f"rank is {rank}; it must be from 0 to ranks - 1, {ranks - 1}")
        keys, heads = Group(None, ranks, rank), Group(None, 1, 0)
    layout, shares = _layout.make(bounds, keys.size, mask, layout, slack)
    return Plan(bounds, cu_seqlens is not None, mask, layout, shares, keys, heads)
