"""Worlds of processes on gloo for test_distributed.py: one is started for many cases.

Every rank makes the whole problem from a seed, attends to it alone, and compares its rows of both
results, so that nothing but verdicts leaves a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass

import pantile
import pantile.distributed as pd
import pantile.integrations.dtensor
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

SECONDS = 240  # within which a world must have answered
TIMEOUT = 60  # of a collective call


@dataclass(frozen=True)
class Case:
    method: str = "gather"
    lengths: tuple[int, ...] = (200,)  # of documents; one: a dense sequence
    packed: bool = False
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    layout: str = "auto"
    batch: int | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: str = "float32"
    mesh: tuple[int, int] | None = None
    options: tuple[tuple[str, object], ...] = ()  # more arguments of the call

    @property
    def name(self) -> str:
        shown = {k: v for k, v in vars(self).items() if v != getattr(Case(), k)}
        text = "-".join(f"{k}={v}" for k, v in shown.items()) or "plain"
        return text.replace(" ", "")


def whole_tensors(case: Case, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v, grad_o and grad_lse of the whole sequence, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    tokens, lead = sum(case.lengths), () if case.batch is None else (case.batch,)
    heads_q, heads_k = case.heads
    dtype = getattr(torch, case.dtype)

    def normal(*shape, dtype=dtype):
        return torch.randn(*lead, *shape, generator=generator).to(dtype)

    return [
        normal(tokens, heads_q, case.dims[0]),
        normal(tokens, heads_k, case.dims[0]),
        normal(tokens, heads_k, case.dims[1]),
        normal(tokens, heads_q, case.dims[1]),
        normal(heads_q, tokens, dtype=torch.float32),
    ]


def bounds_of(case: Case) -> list[int]:
    bounds = [0]
    for length in case.lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def alone(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """o, lse, dq, dk, dv by the calls of one process."""
    *operands, grad_o, grad_lse = tensors
    q, k, v = (x.clone().requires_grad_() for x in operands)
    named = {"causal": case.causal, "window": case.window, "return_lse": True}
    if case.packed:
        bounds = torch.tensor(bounds_of(case), dtype=torch.int32)
        longest = max(case.lengths)
        entries = [(q, k, v)] if case.batch is None else list(zip(q, k, v, strict=True))
        answers = [
            pantile.varlen_attention(*x, bounds, bounds, longest, longest, **named) for x in entries
        ]
        o, lse = (torch.stack(x) for x in zip(*answers, strict=True))
        if case.batch is None:
            o, lse = o[0], lse[0]
    elif case.batch is None:
        o, lse = (x[0] for x in pantile.attention(q[None], k[None], v[None], **named))
    else:
        o, lse = pantile.attention(q, k, v, **named)
    torch.autograd.backward((o, lse), (grad_o, grad_lse))
    return [o.detach(), lse.detach(), q.grad, k.grad, v.grad]


def exact(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float64, through the matrices."""
    *operands, grad_o, grad_lse = (x.double() for x in tensors)
    q, k, v = (x.clone().requires_grad_() for x in operands)
    ratio = case.heads[0] // case.heads[1]
    i, j = torch.arange(sum(case.lengths))[:, None], torch.arange(sum(case.lengths))
    document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    hidden = document[:, None] != document
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    hidden |= torch.zeros_like(hidden) if left is None else j < i - left
    hidden |= torch.zeros_like(hidden) if right is None else j > i + right
    keys, values = (x.repeat_interleave(ratio, -2) for x in (k, v))
    scores = torch.einsum("...ihd,...jhd->...hij", q, keys) * case.dims[0] ** -0.5
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    o = torch.einsum("...hij,...jhd->...ihd", scores.softmax(-1), values)
    torch.autograd.backward((o, lse), (grad_o, grad_lse))
    return [o.detach(), lse.detach(), q.grad, k.grad, v.grad]


def make_plan(case: Case, mesh=None, **named) -> pd.Plan:
    lengths = {"cu_seqlens": bounds_of(case)} if case.packed else {"seqlen": sum(case.lengths)}
    given = {"causal": case.causal, "window": case.window, "layout": case.layout, **named}
    return pd.plan(mesh, **lengths, **given)


def rows_of(plan: pd.Plan, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of o, lse, dq, dk, dv or of q, k, v, grad_o, with lse in its layout."""
    return [x.index_select(-1 if is_lse(x, tensors) else -3, plan.index) for x in tensors]


def is_lse(x: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return x.ndim < max(y.ndim for y in others)


def distributed(case: Case, plan: pd.Plan, tensors, **more) -> list[torch.Tensor]:
    """This rank's rows of o, lse, dq, dk, dv by all ranks together."""
    *operands, grad_o, grad_lse = rows_of(plan, tensors)
    q, k, v = (x.clone().requires_grad_() for x in operands)
    named = {"method": case.method, "return_lse": True, **dict(case.options), **more}
    o, lse = pd.attention(q, k, v, plan=plan, **named)
    torch.autograd.backward((o, lse), (grad_o, grad_lse))
    return [o.detach(), lse.detach(), q.grad, k.grad, v.grad]


NAMES = ("o", "lse", "dq", "dk", "dv")


def errors(parts, truth) -> torch.Tensor:
    """Squared error and squared size of each, over all ranks: [5, 2]."""
    sums = []
    for part, true in zip(parts, truth, strict=True):
        real = true.isfinite()
        if part.shape != true.shape:  # said before
            part = true = true.new_zeros(1)
            real = true.isfinite()
        part, true = part.double()[real], true[real]
        sums.append(torch.stack([(part - true).square().sum(), true.square().sum()]))
    sums = torch.stack(sums)
    dist.all_reduce(sums)
    return sums


def check_case(case: Case) -> str | None:
    """What is wrong, or nothing."""
    mesh = None
    if case.mesh is not None:
        mesh = dist.device_mesh.init_device_mesh("cpu", case.mesh, mesh_dim_names=("keys", "heads"))
    plan = make_plan(case, mesh)
    tensors = whole_tensors(case)
    single, truth = alone(case, tensors), exact(case, tensors)
    ours = distributed(case, plan, tensors)
    local_single, local_truth = rows_of(plan, single), rows_of(plan, truth)
    wrong = []
    for name, mine, his in zip(NAMES, ours, local_single, strict=True):
        if mine.shape != his.shape or mine.dtype != his.dtype:
            wrong.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, not {tuple(his.shape)}")
        elif case.method != "ring" and name in ("o", "lse", "dq") and not torch.equal(mine, his):
            wrong.append(f"{name}: {int((mine != his).sum())} of {mine.numel()} bits differ")
        elif not torch.equal(mine.isfinite(), his.isfinite()):
            wrong.append(f"{name}: finite elsewhere than in one process")
    error, allowed = errors(ours, local_truth), errors(local_single, local_truth)
    floor = {"float32": 1e-6, "bfloat16": 1e-4}[case.dtype]
    for name, (e, size), (a, _) in zip(NAMES, error.tolist(), allowed.tolist(), strict=True):
        # A key head that several ranks attend with: each of them rounds its part of the gradient.
        replicas = case.method == "heads" and case.heads[1] < dist.get_world_size()
        most = max((1.6 if replicas else 1.1) * a**0.5, floor * size**0.5)
        if not e**0.5 <= most:
            wrong.append(f"{name}: error {(e / max(size, 1e-30)) ** 0.5:.2e}, of one process "
                         f"{(a / max(size, 1e-30)) ** 0.5:.2e}")  # fmt: skip
    return "; ".join(wrong) or None


def check_repeats(case: Case) -> str | None:
    """Late ranks, and memory that held garbage, change no bit."""
    plan, tensors = make_plan(case), whole_tensors(case)
    first = distributed(case, plan, tensors)
    for i in range(200 if sum(case.lengths) < 50 else 6):
        if i < 6:
            time.sleep(0.02 * ((dist.get_rank() * 7 + i * 5) % 3))
        garbage = [torch.full((n,), float("nan")) for n in (1000, 5000, 20000) for _ in range(4)]
        del garbage
        again = distributed(case, plan, tensors)
        for name, a, b in zip(NAMES, first, again, strict=True):
            if not torch.equal(a, b):
                return f"{name} of run {i} differs"
    return None


def check_hidden_poison(case: Case) -> str | None:
    """NaN in keys of one document reaches no query of another, though they are received."""
    plan, tensors = make_plan(case), whole_tensors(case)
    clean = distributed(case, plan, tensors)
    first, last = bounds_of(case)[1:3]
    for x in tensors[:3]:
        x[first:last] = float("nan")
    dirty = distributed(case, plan, tensors)
    others = (plan.index < first) | (plan.index >= last)
    for name, a, b in zip(NAMES, clean, dirty, strict=True):
        dim = a.ndim - 1 if name == "lse" else 0
        chosen = others.nonzero().flatten()
        if not torch.equal(a.index_select(dim, chosen), b.index_select(dim, chosen)):
            return f"{name} of other documents changed"
    return None


def random_cases():
    """Laws of documents, masks, heads, layouts and methods."""
    side = st.one_of(st.none(), st.integers(0, 80))
    return st.builds(
        Case,
        method=st.sampled_from(("gather", "gather", "exchange", "heads", "ring")),
        lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(sum).map(tuple),
        packed=st.just(True),
        causal=st.booleans(),
        window=st.one_of(st.none(), st.tuples(side, side)),
        layout=st.sampled_from(("auto", "contiguous", "zigzag", "documents")),
        heads=st.sampled_from(((4, 2), (8, 1), (6, 2), (3, 3))),
        dims=st.sampled_from(((16, 16), (16, 24), (24, 8))),
        dtype=st.sampled_from(("float32", "bfloat16")),
        options=st.sampled_from(
            ((("deterministic", True),), (("deterministic", True), ("keep_keys", True)))
        ),
    )


def check_random(_: Case) -> str | None:
    """``check_case`` of cases that the first rank draws, and makes smaller where one fails."""

    def verdict_of(drawn: Case | None) -> str | None:
        sent = [drawn]
        dist.broadcast_object_list(sent)
        if sent[0] is None:
            return None
        verdicts = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, check_case(sent[0]))
        said = [f"rank {r}: {v}" for r, v in enumerate(verdicts) if v]
        return f"{sent[0].name}: {'; '.join(said)}" if said else "agrees"

    if dist.get_rank():
        while verdict_of(None):
            pass
        return None
    failures = []

    @given(random_cases())
    @settings(max_examples=30, derandomize=True, database=None, deadline=None)
    def each(drawn: Case) -> None:
        verdict = verdict_of(drawn)
        if verdict != "agrees":
            failures.append(verdict)
        assert verdict == "agrees"

    try:
        each()
    except AssertionError:
        return failures[-1]
    finally:
        verdict_of(None)
    return None


def check_statistics(case: Case) -> str | None:
    """Every call of a deterministic backward is given what one process finds out about the keys of
    whole documents, and the sums of what it is given have the bits of one process."""
    from pantile._direct import key_statistics
    from pantile._schema import bind
    from pantile.distributed import _statistics
    from pantile.distributed._local import Settings, make_call

    plan, tensors = make_plan(case), whole_tensors(case)
    batch = case.batch or 1
    keys = [x if case.batch else x[None] for x in tensors[1:3]]
    bounds = plan.bounds
    lengths = torch.tensor([i * bounds[-1] + b for i in range(batch) for b in bounds[1:]])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths)).int()
    options = pantile.Options()
    settings = Settings(None, options, True, False)
    call = bind(make_call(settings, offsets, offsets, max(case.lengths), max(case.lengths),
                          (-1, -1)))  # fmt: skip
    whole = key_statistics(*(x.flatten(0, 1) for x in keys), call)
    whole = whole.unflatten(0, (batch, len(bounds) - 1))
    mine = [plan.shard(x, dim=1) for x in keys]
    documents = plan.documents(torch.device("cpu"), batch)
    table = documents.exchange(*mine)
    for local in plan.local(torch.device("cpu"), batch):
        if local is None:
            continue
        placed = zip(local.calls, documents.of_calls(local), strict=True)
        for i, (one, index) in enumerate(placed):
            found = table.index_select(0, index)
            entries = range(batch) if local.together == batch else [i // len(local.sequences)]
            part = i % len(local.sequences)
            first = sum(local.sequences[:part])
            names = local.documents[first : first + local.sequences[part]]
            expected = torch.stack([whole[b, d] for b in entries for d in names])
            if len(one.call[0]) - 1 != len(found):
                return f"{len(found)} rows for {len(one.call[0]) - 1} sequences"
            if not torch.equal(found, expected):
                return f"statistics of documents {names} differ"
    if plan.ranks > 1 and max(case.lengths) > plan.tokens and not documents.split:
        return "no document is split"
    for document in documents.split:  # the keys of means, as one process samples them
        first, last = bounds[document : document + 2]
        places = _statistics.sample_places(last - first, case.dims[0])
        if not all(0 <= place < last - first for place in places):
            return f"samples {places} of {last - first} keys"
    given = dataclasses.replace(case, options=(("deterministic", True),))
    ours, single = distributed(given, plan, tensors), alone(case, tensors)
    if not torch.equal(ours[2], rows_of(plan, single)[2]):
        return "dq differs from that of one process"
    return None


def check_two_plans(case: Case) -> str | None:
    """Two calls in one group whose forwards and backwards are nested, of different methods."""
    halves = dataclasses.replace(case, lengths=case.lengths[::-1], method="heads")
    pairs = [(c, make_plan(c), whole_tensors(c, seed)) for seed, c in enumerate((case, halves))]
    expected = [distributed(*pair) for pair in pairs]
    leaves, outputs = [], []
    for each, plan, tensors in pairs:
        q, k, v = (x.clone().requires_grad_() for x in rows_of(plan, tensors)[:3])
        leaves.append((q, k, v))
        outputs.append(pd.attention(q, k, v, plan=plan, method=each.method, return_lse=True))
    for (_, plan, tensors), (o, lse) in zip(pairs, outputs, strict=True):  # the older one first
        grad_o, grad_lse = rows_of(plan, tensors)[3:]
        torch.autograd.backward((o, lse), (grad_o, grad_lse))
    for (o, lse), mine, his in zip(outputs, leaves, expected, strict=True):
        found = [o, lse, *(x.grad for x in mine)]
        for name, a, b in zip(NAMES, found, his, strict=True):
            if not torch.equal(a, b):
                return f"{name} differs from that of a call alone"
    return None


def check_silent_peer(case: Case) -> str | None:
    """A rank that is alive and does not come: an error within the timeout of the group."""
    methods = "gather", "exchange", "heads", "ring"
    timeout = datetime.timedelta(seconds=1)
    groups = [dist.new_group(timeout=timeout) for _ in methods]
    wrong = []
    for method, group in zip(methods if dist.get_rank() == 0 else (), groups, strict=False):
        plan = make_plan(case, group)
        q, k, v = (plan.shard(x, dim=0) for x in whole_tensors(case)[:3])
        started = time.monotonic()
        try:
            pd.attention(q, k, v, plan=plan, method=method)
            wrong.append(f"{method}: no error")
        except RuntimeError:
            if time.monotonic() - started > 20:  # of a machine with other work
                wrong.append(f"{method}: an error after {time.monotonic() - started:.0f} s")
    dist.barrier()
    return "; ".join(wrong) or None


def check_transforms(case: Case) -> str | None:
    plan = make_plan(case)
    q, k, v = (plan.shard(x, dim=0)[None] for x in whole_tensors(case)[:3])

    def call(q, k, v):
        return pd.attention(q, k, v, plan=plan)

    transforms = {
        "vmap": lambda: torch.vmap(call)(q, k, v),
        "grad": lambda: torch.func.grad(lambda q: call(q, k[0], v[0]).sum())(q[0]),
    }
    for name, run in transforms.items():
        try:
            run()
            return f"{name} passes"
        except NotImplementedError as error:
            if "torch.func" not in str(error):
                return f"{name}: {error}"
    return None


def check_plan_calls(case: Case) -> str | None:
    """shard, unshard, prefetch, check, dense calls without a plan."""
    plan, tensors = make_plan(case), whole_tensors(case)
    plan.check()
    q, k, v = (plan.shard(x, dim=0) for x in tensors[:3])
    if not torch.equal(plan.unshard(q, dim=0), tensors[0]):
        return "unshard(shard(x)) is not x"
    if not torch.equal(plan.index, plan.shard(torch.arange(sum(case.lengths)))):
        return "index is not what shard takes"
    ready = pd.prefetch(k, v, plan=plan, method="gather")
    o = pd.attention(q, k, v, plan=plan, method="gather", prefetched=ready)
    if not torch.equal(o, pd.attention(q, k, v, plan=plan, method="gather")):
        return "prefetched keys give another o"
    try:
        pd.attention(q, k, v, plan=plan, method="gather", prefetched=ready)
        return "prefetched keys serve a second call"
    except ValueError:
        pass
    with torch.autocast("cpu", torch.bfloat16):
        ready = pd.prefetch(k, v, plan=plan, method="exchange")
        o = pd.attention(q, k, v, plan=plan, method="exchange", prefetched=ready)
    cast = (x.bfloat16() for x in (q, k, v))
    if not torch.equal(o, pd.attention(*cast, plan=plan)):
        return "autocast gives another o than bfloat16"
    mine = make_plan(case, causal=dist.get_rank() == 0)
    try:
        mine.check()
        return "check passes different plans"
    except RuntimeError:
        return None


def check_dense_call(case: Case) -> str | None:
    plan = pd.plan(seqlen=sum(case.lengths), causal=True)
    q, k, v = (plan.shard(x, dim=0) for x in whole_tensors(case)[:3])
    same = torch.equal(pd.attention(q, k, v, causal=True), pd.attention(q, k, v, plan=plan))
    return None if same else "a call without a plan differs"


def check_training(case: Case) -> str | None:
    """examples/train_long.py: the losses of one process."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "train_long.py"
    spec = importlib.util.spec_from_file_location("train_long", path)
    sys.modules["train_long"] = example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run = example.Run(500, 3, 1, 32, 2, 1, case.method, seed=1)
    cpu = torch.device("cpu")
    one, several = example.train(run, 1, cpu), example.train(run, dist.get_world_size(), cpu)
    if max(abs(a - b) for a, b in zip(one, several, strict=True)) > 1e-5 or one[-1] >= one[0]:
        return f"{several}, of one process {one}"
    return None


def _close(name: str, ours: torch.Tensor, his: torch.Tensor) -> str | None:
    if ours.shape != his.shape:
        return f"{name}: {tuple(ours.shape)}, not {tuple(his.shape)}"
    return None if torch.equal(ours, his) else f"{name}: other bits than in one process"


def check_megatron(case: Case) -> str | None:
    """core_attention in the order of Megatron's loader, in its formats."""
    size, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = whole_tensors(case)[:3]
    tokens = sum(case.lengths)

    def mine(x, bounds):
        parts = []
        for a, b in itertools.pairwise(bounds):
            chunks = x[a:b].chunk(2 * size)
            parts += [chunks[rank], chunks[2 * size - 1 - rank]]
        return torch.cat(parts)

    bounds = [0, *itertools.accumulate(case.lengths)]
    packing = torch.tensor(bounds, dtype=torch.int32)
    whole = pantile.attention(q[None], k[None], v[None], causal=True)[0]
    by_document = pantile.varlen_attention(
        *(q, k, v, packing, packing, max(case.lengths), max(case.lengths)), causal=True
    )
    world = dist.group.WORLD
    for kind in ("all_gather", "a2a"):
        sbhd = [mine(x, [0, tokens])[:, None] for x in (q, k, v)]
        o = pd.core_attention(*sbhd, cp_group=world, cp_comm_type=kind)
        wrong = _close(f"sbhd {kind}", o, mine(whole, [0, tokens]).flatten(1)[:, None])
        thd = [mine(x, bounds) for x in (q, k, v)]
        o = pd.core_attention(
            *thd, cp_group=world, cp_comm_type=kind, qkv_format="thd", cu_seqlens_q=bounds
        )
        wrong = wrong or _close(f"thd {kind}", o, mine(by_document, bounds).flatten(1))
        if wrong:
            return wrong
    if size == 4:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
        groups = [mesh.get_group(1), mesh.get_group(0)]
        bshd = [mine(x, [0, tokens])[None] for x in (q, k, v)]
        named = {"cp_group": groups, "cp_comm_type": "a2a+p2p", "qkv_format": "bshd"}
        o = pd.core_attention(*bshd, **named)
        torch.testing.assert_close(o[0], mine(whole, [0, tokens]).flatten(1))
    try:
        pd.core_attention(*sbhd, cp_group=world, cp_comm_type="nvshmem")
        return "an unknown cp_comm_type passes"
    except ValueError:
        return None


def check_modules(case: Case) -> str | None:
    """torchtitan's call, and the order of torch's own load balancer."""
    q, k, v = whole_tensors(case)[:3]
    plan = make_plan(case)
    whole = pantile.attention(q[None], k[None], v[None], causal=True)
    by_heads = [plan.shard(x[None]).transpose(1, 2) for x in (q, k, v)]
    o = pd.attention_module()(*by_heads, enable_gqa=True)
    wrong = _close("module", o, plan.shard(whole).transpose(1, 2))
    o = pd.attention_module(plan=plan, method="exchange")(*by_heads, enable_gqa=True)
    wrong = wrong or _close("module of a plan", o, plan.shard(whole).transpose(1, 2))
    balancer = plan.load_balancer()
    order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
    if not torch.equal(order[0][back[0].long()].long(), torch.arange(sum(case.lengths))):
        return "restore does not restore"
    private = module_or_none("torch.distributed.tensor.experimental._context_parallel")
    if private is None:  # torch before 2.10
        return wrong
    theirs = private._HeadTailLoadBalancer(sum(case.lengths), dist.get_world_size(), "cpu")
    if not torch.equal(order, theirs._generate_indices().to(order.dtype)):
        return "another order than torch's head-tail balancer"
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    (local,) = private._context_parallel_shard(mesh, [q[None]], [1], balancer)
    return wrong or _close("torch's shard", local, plan.shard(q[None]))


def module_or_none(name: str):
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return None


def check_dtensors(case: Case) -> str | None:
    """Sharded by tokens: attention across ranks. By batch or heads: no transfer at all."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    q, k, v, grad_o, _ = whole_tensors(case)
    plan = make_plan(case)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole, lse = pantile.attention(*leaves, causal=True, return_lse=True)
    whole.backward(grad_o)
    locals_ = [plan.shard(x).requires_grad_() for x in (q, k, v)]
    given = [DTensor.from_local(x, mesh, [Shard(1)]) for x in locals_]
    o, ours_lse = pd.attention(*given, plan=plan, method="gather", return_lse=True)
    if o.placements != (Shard(1),) or ours_lse.placements != (Shard(2),):
        return f"placements {o.placements}, {ours_lse.placements}"
    if o.shape != whole.shape or ours_lse.shape != lse.shape:
        return f"shapes {tuple(o.shape)}, {tuple(ours_lse.shape)}"
    wrong = _close("o", o.to_local(), plan.shard(whole))
    o.to_local().backward(plan.shard(grad_o))
    wrong = wrong or _close("dq", locals_[0].grad, plan.shard(leaves[0].grad))
    try:
        pd.attention(*(distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)), plan=plan)
        return "tensors sharded by batch pass"
    except ValueError:
        pass
    for _ in range(2):  # the second call does nothing
        pantile.integrations.dtensor.register()
    for dim in (0, 2):
        spread = [distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)]
        grad = distribute_tensor(grad_o, mesh, [Shard(dim)])
        with CommDebugMode() as counts:
            o = pantile.attention(*spread, causal=True)
            o.backward(grad)
        if counts.get_total_counts():
            return f"Shard({dim}): {counts.get_total_counts()} collectives"
        if o.placements != (Shard(dim),) or spread[1].grad.placements != (Shard(dim),):
            return f"Shard({dim}) becomes {o.placements}"
        pairs = ((o, whole), (spread[0].grad, leaves[0].grad), (spread[1].grad, leaves[1].grad))
        for ours, his in pairs:
            wrong = wrong or _close(f"Shard({dim})", ours.full_tensor(), his)
    rows = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    return wrong or _close("Shard(1)", pantile.attention(*rows, causal=True).full_tensor(), whole)


class Layer(torch.nn.Module):
    """A projection and attention across ranks."""

    def __init__(self, plan: pd.Plan) -> None:
        super().__init__()
        self.plan, self.qkv = plan, torch.nn.Linear(32, 8 * 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split((4, 2, 2), -2)
        return pd.attention(q, k, v, plan=self.plan)


def check_wrappers(case: Case) -> str | None:
    """Checkpointing, torch.compile and FSDP2 around attention across ranks change no gradient."""
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    plan = make_plan(case)
    generator = torch.Generator().manual_seed(3)
    x = plan.shard(torch.randn(sum(case.lengths), 32, generator=generator), dim=0)

    def gradient(wrap) -> torch.Tensor:
        torch.manual_seed(1)
        layer = Layer(plan)
        wrap(layer)(x.clone().requires_grad_()).square().sum().backward()
        grad = layer.qkv.weight.grad
        if not hasattr(grad, "full_tensor"):
            dist.all_reduce(grad)
            return grad / dist.get_world_size()
        return grad.full_tensor()

    plain = gradient(lambda layer: layer)
    wrappers = {
        "checkpoint": lambda layer: lambda y: checkpoint(layer, y, use_reentrant=False),
        "compile": lambda layer: torch.compile(layer, backend="eager"),
        "fully_shard": fully_shard,
    }
    for name, wrap in wrappers.items():
        error = float((gradient(wrap) - plain).norm() / plain.norm())
        if error > 1e-6:
            return f"{name}: gradient is off by {error:.1e}"
    return None


def check_second_derivatives(case: Case) -> str | None:
    """A gradient penalty is refused on every way, whichever gradient it takes; a gradient that
    could be differentiated is the plain one."""
    plan, tensors = make_plan(case), whole_tensors(case)
    for method in ("gather", "exchange", "heads", "ring"):
        for which in range(3):
            leaves = [plan.shard(x, dim=0).requires_grad_() for x in tensors[:3]]
            loss = pd.attention(*leaves, plan=plan, method=method).square().sum()
            plain = torch.autograd.grad(loss, leaves, retain_graph=True)
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            if not all(map(torch.equal, plain, grads)):
                return f"{method}: create_graph=True changes a gradient"
            try:
                grads[which].square().sum().backward()
                return f"{method}: the gradient of {'qkv'[which]} has a derivative"
            except pantile.UnsupportedError as refusal:
                if "second derivatives of attention" not in str(refusal):
                    return f"{method}: {refusal}"
    return None


def check_dead_peer(case: Case) -> str | None:
    plan, tensors = make_plan(case), whole_tensors(case)
    q, k, v = (plan.shard(x, dim=0) for x in tensors[:3])
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        pd.attention(q, k, v, plan=plan, method=case.method)
    except RuntimeError:
        return None
    return "no error"


def _rank_main(rank: int, size: int, folder: str, check, cases) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        *("gloo", f"file://{folder}/store"),
        rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    with open(f"{folder}/{rank}", "wb") as answers:
        for case in cases:
            try:
                verdict = check(case)
            except Exception:
                verdict = traceback.format_exc(limit=-3)
            pickle.dump(verdict, answers)
            answers.flush()
    dist.destroy_process_group()


def _verdicts(path: str, count: int) -> list[str | None]:
    found = []
    with contextlib.suppress(EOFError, FileNotFoundError), open(path, "rb") as file:
        while True:
            found.append(pickle.load(file))
    return found + ["no answer"] * (count - len(found))


def _world(size: int, check, cases: list) -> list[str | None]:
    with tempfile.TemporaryDirectory() as folder:
        forked = multiprocessing.get_context("fork")
        arguments = size, folder, check, cases
        ranks = [forked.Process(target=_rank_main, args=(r, *arguments)) for r in range(size)]
        for process in ranks:
            process.start()
        until = time.monotonic() + SECONDS
        for process in ranks:
            process.join(timeout=max(until - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
        verdicts = [_verdicts(f"{folder}/{r}", len(cases)) for r in range(size)]
    return [
        "\n".join(f"rank {r}: {v}" for r, v in enumerate(answers) if v) or None
        for answers in zip(*verdicts, strict=True)
    ]


def run_worlds(worlds: list[tuple[int, object, list]]) -> list[list[str | None]]:
    """Of each (ranks, check, cases): for each case what any rank found wrong.

    In a fresh interpreter, whose children are forked before it has threads.
    """
    command = [sys.executable, "-c", "import distributed_world as w; w._main()"]
    path = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        input=pickle.dumps(worlds),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        timeout=(SECONDS + 30) * len(worlds),
        check=True,
    )
    return pickle.loads(done.stdout)


def _main() -> None:
    answers = [_world(*world) for world in pickle.load(sys.stdin.buffer)]
    sys.stdout.buffer.write(pickle.dumps(answers))
