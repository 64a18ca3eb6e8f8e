"""``attention`` over the ranks of a plan: arguments, the choice of a method, its steps."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from pantile import _C
from pantile._arguments import choice, flag, integer, optional_scale, shown
from pantile._attention import attention as _attention
from pantile._options import DEFAULT_OPTIONS, Options, resolve_options
from pantile._varlen import varlen_attention as _varlen_attention
from pantile.distributed._exchange import Job, KeyExchange
from pantile.distributed._heads import HeadSplit, Side, ToHeads, ToRows, local_calls
from pantile.distributed._local import Settings
from pantile.distributed._plan import Plan, plan
from pantile.distributed._ring import Ring, RingJob
from pantile.distributed._transfer import Pending

if TYPE_CHECKING:
    from pantile._types import Window

Tensor = torch.Tensor

METHODS = ("auto", "gather", "exchange", "heads", "ring")
# Keys and values of so many bytes, of all ranks, are one transfer: more overlap less, fewer leave
# the GPU short of work in each of the calls.
_GROUP_BYTES = 1 << 26
# An exchange of needed rows is chosen where it delivers less than this part of an all-gather.
_NEEDED_FRACTION = 0.8
# The transfers of `heads` are not hidden behind the attention, those of keys are.
_HEADS_ADVANTAGE = 4


def chosen_method(plan: Plan, method: str, heads_q: int, heads_k: int) -> str:
    """What ``auto`` stands for: the same on all ranks."""
    if method != "auto":
        return method
    if plan.heads.size > 1 or plan.keys.size == 1:
        return "exchange" if plan.needed_fraction < _NEEDED_FRACTION else "gather"
    part = min(plan.needed_fraction, 1.0) if plan.needed_fraction < _NEEDED_FRACTION else 1.0
    moved_keys = 2 * part * heads_k * plan.keys.size
    if plan.keys.size <= heads_k and _HEADS_ADVANTAGE * 2 * (heads_q + heads_k) < moved_keys:
        return "heads"
    return "exchange" if part < 1.0 else "gather"


def head_groups(
    plan: Plan, k: Tensor, v: Tensor, gathers: bool, wanted: int | None
) -> list[tuple[int, int]]:
    """Ranges of key heads that are exchanged at a time."""
    heads = k.shape[2]
    if wanted is None:
        width = (k.shape[3] + v.shape[3]) * k.element_size()
        total = plan.bounds[-1] * k.shape[0] * heads * width
        part = 1.0 if gathers else min(plan.needed_fraction, 1.0)  # the same on all ranks
        wanted = -(-int(part * total) // _GROUP_BYTES)
    count = max(min(wanted, heads), 1)
    return [(heads * i // count, heads * (i + 1) // count) for i in range(count)]


class _Request:
    """One call of :func:`attention`, its arguments resolved."""

    def __init__(self, plan: Plan, method: str, settings: Settings, return_lse: bool) -> None:
        self.plan, self.method, self.settings = plan, method, settings
        self.return_lse = return_lse
        self.groups: int | None = None
        self.keep_keys = False
        self.prefetched: Prefetched | None = None

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """(o, lse or None) of local ``[batch, rows, heads, dim]``."""
        plan = self.plan.by_heads if self.method == "heads" else self.plan
        if plan.heads.size == 1:
            return self._attend(plan, q, k, v)
        split = HeadSplit.of(q.shape[2], k.shape[2], plan.heads.size)
        sides = _side(plan, q, split.queries), _side(plan, q, split.keys)
        whole_q, whole_k, whole_v = (
            ToHeads.apply(x.movedim(1, 0), side).movedim(0, 1)
            for x, side in ((q, sides[0]), (k, sides[1]), (v, sides[1]))
        )
        rank = plan.heads.rank
        ratio = q.shape[2] // k.shape[2]
        parts = []
        for queries, keys in local_calls(split.queries[rank], split.keys[rank], ratio):
            some_q = whole_q[:, :, slice(*queries)]
            some_k, some_v = (x[:, :, slice(*keys)] for x in (whole_k, whole_v))
            parts.append(self._attend(plan, some_q, some_k, some_v))
        o, lse = _joined_heads(parts, whole_q, whole_k, whole_v, self.return_lse)
        o = ToRows.apply(o.movedim(1, 0), sides[0]).movedim(0, 1)
        if lse is not None:
            rows = lse.permute(2, 0, 1)[..., None]
            lse = ToRows.apply(rows, sides[0])[..., 0].permute(1, 2, 0)
        return o, lse

    def _attend(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of all heads that this rank has, on the rows of its share."""
        if plan.keys.size == 1:
            return self._alone(plan, q, k, v)
        if self.method == "ring":
            settings = self.settings._replace(exact_lse=True)
            job: Any = RingJob(plan.share, plan.keys.group, settings, self.return_lse)
            answer = Ring.apply(q, k, v, job)
        else:
            gathers = self.method == "gather"
            parts = plan.local(q.device, q.shape[0])
            groups = _groups(plan, k, v, gathers, self.groups)
            if self.prefetched is not None:
                self.prefetched.check_way(plan, gathers)
                groups = self.prefetched.groups
            # On GPUs float32 is not summed as integers.
            exact = self.settings.deterministic and not (q.is_cuda and q.dtype is torch.float32)
            job = Job(
                *(parts, plan.keys.group, gathers, groups, self.settings),
                *(self.keep_keys, self.return_lse),
                plan.documents(q.device, q.shape[0]) if exact else None,
            )
            if self.prefetched is not None:
                job.first = self.prefetched.take()
            answer = KeyExchange.apply(q, k, v, job)
        return answer if self.return_lse else (answer, None)

    def _alone(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """All rows are here: the call of one process."""
        named: dict[str, Any] = {
            "window": tuple(plan.mask),
            "scale": self.settings.scale,
            "return_lse": self.return_lse,
            "deterministic": self.settings.deterministic,
            "options": self.settings.options,
        }
        batch, rows = q.shape[:2]
        if not plan.packed:
            answer = _attention(q, k, v, **named)
        else:
            longest = max(b - a for a, b in pairwise(plan.bounds))
            inner = [i * rows + b for i in range(batch) for b in plan.bounds[1:]]
            bounds = torch.tensor([0, *inner], dtype=torch.int32, device=q.device)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            answer = _varlen_attention(*flat, bounds, bounds, longest, longest, **named)
        o, lse = answer if self.return_lse else (answer, None)
        if plan.packed:
            o = o.unflatten(0, (batch, rows))
            lse = None if lse is None else lse.unflatten(1, (batch, rows)).transpose(0, 1)
        return o, lse


def _side(plan: Plan, x: Tensor, heads: list[tuple[int, int]]) -> Side:
    rows = [sum(run.stop - run.start for run in runs) for runs in plan.runs_of_share]
    order = inverse = None
    if plan.head_order is not None:
        order = plan.head_order.to(x.device)
        inverse = torch.argsort(order)
    return Side(plan.heads.group, plan.heads.rank, rows, heads, order, inverse)


def _joined_heads(
    parts: list, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if parts:
        lse = torch.cat([lse for _, lse in parts], 1) if return_lse else None
        return torch.cat([o for o, _ in parts], 2), lse
    # A rank without heads takes part in the transfers of the backward, too.
    link = q.sum() + k.sum() + v.sum()
    o = q.new_zeros((*q.shape[:2], 0, v.shape[-1])) + link
    return o, (q.new_zeros((q.shape[0], 0, q.shape[1])).float() + link) if return_lse else None


class Prefetched:
    """Keys of the first step on their way, of :func:`prefetch`; good for one call."""

    def __init__(
        self, plan: Plan, k: Tensor, v: Tensor, gathers: bool, groups: list[tuple[int, int]]
    ) -> None:
        self._plan, self._gathers, self.groups = plan, gathers, groups
        self.sources: list[tuple[Tensor, int]] = []  # of the caller, with their versions
        settings = Settings(None, DEFAULT_OPTIONS, False, False)
        parts = plan.local(k.device, k.shape[0])
        job = Job(parts, plan.keys.group, gathers, groups, settings, False, False)
        with torch.no_grad():
            self._pending: Pending | None = job.start(k, v, 0)

    def check_sources(self, k: Tensor, v: Tensor) -> None:
        if self._pending is None:
            raise ValueError("prefetched has served a call; it must be that of a new prefetch")
        for name, x, (source, version) in zip(("k", "v"), (k, v), self.sources, strict=True):
            same = x.data_ptr() == source.data_ptr() and x.shape == source.shape
            if not same or x.stride() != source.stride() or x._version != version:
                raise ValueError(f"{name} is not the tensor that was prefetched, or has changed")

    def check_way(self, plan: Plan, gathers: bool) -> None:
        if plan is not self._plan or gathers != self._gathers:
            raise ValueError("prefetched belongs to another plan or method than this call")

    def take(self) -> Pending | None:
        pending, self._pending = self._pending, None
        return pending


def _checked_plan(plan_: Any, mesh: Any, causal: bool, window: Any, q: Any) -> Plan:
    if plan_ is None:
        return _dense_plan(mesh, causal, window, q)
    if not isinstance(plan_, Plan):
        raise TypeError(f"plan is {shown(plan_)}; it must be a pantile.distributed.Plan")
    if mesh is not None or causal is not False or window is not None:
        raise TypeError("mesh, causal and window belong to the plan; leave them out beside it")
    if plan_.keys.group is None and plan_.ranks > 1:
        raise ValueError("plan was made with ranks and rank, to look at; it does not communicate")
    return plan_


_dense_plans: dict[Any, Plan] = {}


def _dense_plan(mesh: Any, causal: bool, window: Any, q: Tensor) -> Plan:
    """Of a dense sequence of which every rank has as many tokens as this one."""
    rows = q.shape[-3] if q.ndim in (3, 4) else 0
    key = mesh, rows, causal, window if window is None else tuple(window)
    if key not in _dense_plans:
        one = plan(mesh, seqlen=0)
        _dense_plans[key] = plan(mesh, seqlen=rows * one.ranks, causal=causal, window=window)
    return _dense_plans[key]


def _check_tensors(plan: Plan, q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {shown(x)}; it must be a torch.Tensor")
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            raise ValueError(
                f"{name} has {x.ndim} dimensions; it must have 3, [tokens, heads, dim], or 4, "
                "[batch, tokens, heads, dim], as q has"
            )
        if x.shape[-3] != plan.tokens:
            raise ValueError(
                f"{name} has {x.shape[-3]} tokens; the plan has {plan.tokens} on rank {plan.rank}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}; it must be as q, {q.dtype} on {q.device}"
            )
        if x.shape[:-3] != q.shape[:-3]:
            raise ValueError(f"{name} has batch {x.shape[0]}; q has {q.shape[0]}")
    heads_q, heads_k = q.shape[-2], k.shape[-2]
    if v.shape[-2] != heads_k:
        raise ValueError(f"v has {v.shape[-2]} heads; it must have those of k, {heads_k}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dim {k.shape[-1]}; it must be that of q, {q.shape[-1]}")
    if heads_k == 0 or heads_q % heads_k:
        raise ValueError(f"q has {heads_q} heads; they must be a multiple of those of k, {heads_k}")


def _settings(scale, options, deterministic, return_lse) -> Settings:
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    if options.fp8 or options.output_dtype is not None:
        name = "fp8" if options.fp8 else "output_dtype"
        raise ValueError(f"options.{name} is set; attention over several ranks does not take it")
    scale = None if scale is None else optional_scale(scale)
    deterministic = flag("deterministic", deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return Settings(scale, options, deterministic, flag("return_lse", return_lse))


def _under_autocast(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in (q, *others))


def _refuse_transforms(*tensors: Tensor) -> None:
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        raise _C.UnsupportedError(
            "attention over several ranks does not run under torch.func (vmap, grad, jvp); "
            "q, k and v take a batch: [batch, tokens, heads, dim]"
        )


def _is_dtensor(x: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    mesh: Any = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    method: str = ...,
    head_groups: int | None = ...,
    keep_keys: bool = ...,
    prefetched: Prefetched | None = ...,
    options: Options | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = ...,
    mesh: Any = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    method: str = ...,
    head_groups: int | None = ...,
    keep_keys: bool = ...,
    prefetched: Prefetched | None = ...,
    options: Options | None = ...,
) -> tuple[Tensor, Tensor]: ...
@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan | None = None,
    mesh: Any = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    method: str = "auto",
    head_groups: int | None = None,
    keep_keys: bool = False,
    prefetched: Prefetched | None = None,
    options: Options | None = None,
) -> Any:
    """:func:`pantile.attention` of a sequence whose rows lie on several ranks.

    Every rank calls it with its rows, in the order of the plan, and the same other arguments, and
    so does the backward: a collective call. With ``gather``, ``exchange`` and ``heads``, o and lse
    have the bits of one process.

    Args:
        q: ``[tokens, heads_q, head_dim]`` or ``[batch, tokens, heads_q, head_dim]``, ``tokens`` as
            :attr:`Plan.tokens` says; or a DTensor sharded along the tokens, like k and v.
        k, v: the same with ``heads_k``; the head dim of v may be another.
        plan: of :func:`pantile.distributed.plan`; its mask is the mask of the call.
        mesh, causal, window: in place of a plan, for dense sequences of which all ranks hold
            equally many tokens, in the order of ``plan(mesh, seqlen=.., causal=..)``.
        scale, options: as in :func:`pantile.attention`, without ``fp8`` and ``output_dtype``.
        return_lse: also return the log-sum-exp of each row's scores.
        deterministic: bit-equal gradients for equal inputs on equally many ranks.
        method: ``"gather"``: every rank receives all keys; ``"exchange"``: those that its queries
            see; ``"heads"``: all rows of some heads (Ulysses); ``"ring"``: the keys of one rank at
            a time; ``"auto"``: what moves the least. On a mesh of two dimensions: how keys are
            exchanged along the first.
        head_groups: in how many steps keys are exchanged and attended with; default by size.
        keep_keys: keep the received keys for the backward instead of exchanging them again.
        prefetched: of :func:`prefetch` of this k and v.

    Returns:
        o, in the form of q; with ``return_lse`` the pair (o, lse), lse float32 ``[heads_q,
        tokens]`` or ``[batch, heads_q, tokens]``. Both are differentiable once.

    Raises:
        As :func:`pantile.attention`. RuntimeError where a rank of the group is lost, within the
        timeout of the group.
    """
    if _is_dtensor(q) or _is_dtensor(k) or _is_dtensor(v):
        from pantile.distributed._dtensor import attention_of_dtensors

        named = {name: value for name, value in locals().items() if name in _PASSED}
        return attention_of_dtensors(attention, q, k, v, return_lse, named)
    plan = _checked_plan(plan, mesh, causal, window, q)
    _check_tensors(plan, q, k, v)
    choice("method", method, METHODS)
    if method == "heads" and plan.heads.size > 1:
        raise ValueError("method is 'heads' on a mesh of two dimensions; it must say how keys move")
    request = _Request(
        *(plan, chosen_method(plan, method, q.shape[-2], k.shape[-2])),
        *(_settings(scale, options, deterministic, return_lse), return_lse),
    )
    if head_groups is not None and integer("head_groups", head_groups) < 1:
        raise ValueError(f"head_groups is {shown(head_groups)}; it must be 1 or more")
    request.groups, request.keep_keys = head_groups, flag("keep_keys", keep_keys)
    if prefetched is not None:
        if not isinstance(prefetched, Prefetched):
            raise TypeError(f"prefetched is {shown(prefetched)}; it must come from prefetch()")
        if plan.heads.size > 1 or request.method not in ("gather", "exchange"):
            raise ValueError(f"prefetched is set; method {request.method!r} here does not use it")
        prefetched.check_sources(k, v)
        request.prefetched = prefetched
    if plan.ranks > 1:
        _refuse_transforms(q, k, v)
    batched = q.ndim == 4
    q, k, v = _under_autocast(q, k, v)
    o, lse = request.run(*((x if batched else x[None]) for x in (q, k, v)))
    o = o if batched else o[0]
    if not return_lse:
        return o
    return o, (lse if batched else lse[0])


_PASSED = (
    *("plan", "mesh", "causal", "window", "scale", "deterministic", "method", "head_groups"),
    *("keep_keys", "prefetched", "options", "return_lse"),
)


def prefetch(
    k: Tensor,
    v: Tensor,
    *,
    plan: Plan,
    method: str = "auto",
    head_groups: int | None = None,
    heads_q: int | None = None,
) -> Prefetched:
    """Starts the transfer of the first keys, to call before q is made (its projection, rotary).

    Args:
        k, v, plan, method, head_groups: as :func:`attention` will get them.
        heads_q: of q, for the choice of ``"auto"``; default those of k.

    Returns:
        What :func:`attention` takes as ``prefetched``, once, with the unchanged k and v.
    """
    choice("method", method, METHODS)
    method = chosen_method(plan, method, heads_q or k.shape[-2], k.shape[-2])
    if plan.heads.size > 1 or plan.keys.size == 1 or method not in ("gather", "exchange"):
        raise ValueError(f"method is {method!r} here; prefetch serves 'gather' and 'exchange'")
    _check_tensors(plan, k, k, v)
    sources = [(x, x._version) for x in (k, v)]
    k, v = (x if x.ndim == 4 else x[None] for x in _under_autocast(k, v))
    gathers = method == "gather"
    ready = Prefetched(plan, k, v, gathers, _groups(plan, k, v, gathers, head_groups))
    ready.sources = sources
    return ready


_groups = head_groups  # attention has an argument of that name
