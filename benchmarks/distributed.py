"""Attention over several GPUs: pantile.distributed beside its peers, and against one GPU.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/distributed.py --out /tmp/dry.jsonl --heads 4/2 \\
        --head-dim 16 --tokens 256 --check 256      # a dry run on CPUs

First correctness: O, LSE and gradients against one GPU, at several lengths. Then speed: every rank
runs the same step, between barriers; a time is that of the slowest rank, the median of several. The
baseline is the whole sequence on one GPU, divided by the number of GPUs: what they would need
if they had no need to talk. Peers, where installed: torch's ``context_parallel`` by all-gather and
by all-to-all, ring-flash-attn (zigzag, also of documents; its flash_attn is torch's FA2) and
yunchang (Ulysses). A peer that hangs ends a run, so that each has one of its own:

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out ours.jsonl --parts ours
    torchrun --nproc-per-node 2 benchmarks/distributed.py --out ring.jsonl --parts ring-flash-attn
    python benchmarks/distributed.py --out results.jsonl --join ours.jsonl ring.jsonl

The last lines compare with the bars of the project.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence

import pantile
import pantile.distributed as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pantile.bench import figures, harness

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass
class Config:
    heads_q: int = 64
    heads_k: int = 8
    dim: int = 128
    warm_up: int = 2
    repeats: int = 9


CONFIG = Config()
METHODS = {
    "gather": {"method": "gather"},
    "gather, 1 group": {"method": "gather", "head_groups": 1},
    "gather, 4 groups": {"method": "gather", "head_groups": 4},
    "exchange": {"method": "exchange"},
    "heads": {"method": "heads"},
    "ring": {"method": "ring"},
    "gather, deterministic": {"method": "gather", "deterministic": True},
}


def normal(*shape, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)


def whole_tensors(tokens: int) -> list[torch.Tensor]:
    heads = CONFIG.heads_q, CONFIG.heads_k, CONFIG.heads_k, CONFIG.heads_q
    return [normal(tokens, h, CONFIG.dim, seed=i) for i, h in enumerate(heads)]


def documents(tokens: int, seed: int = 1) -> list[int]:
    """Lognormal lengths, median 2048 (of 8192 tokens or more), at most a fourth of the pack; all
    are multiples of 8, because peers cut documents into equal parts."""
    law, bounds = random.Random(seed), [0]
    median = min(2048, max(tokens // 16, 16))
    while bounds[-1] < tokens:
        length = max(int(law.lognormvariate(math.log(median), 1.0)), 16) // 8 * 8
        bounds.append(min(bounds[-1] + min(length, max(tokens // 4 // 8 * 8, 8)), tokens))
    return bounds


def on_one_gpu(tensors, bounds, deterministic=False):
    """(forward, operands) of the whole sequence here."""
    q, k, v = (x.requires_grad_() for x in tensors)
    named = {"causal": True, "return_lse": True, "deterministic": deterministic}
    if len(bounds) == 2:
        return lambda: pantile.attention(q[None], k[None], v[None], **named), (q, k, v)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    packing = offsets, offsets, longest, longest
    return lambda: pantile.varlen_attention(q, k, v, *packing, **named), (q, k, v)


def pairs_of(bounds: list[int]) -> int:
    return sum((b - a) * (b - a + 1) // 2 for a, b in itertools.pairwise(bounds))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def plan_of(bounds: list[int], **named) -> pd.Plan:
    given = {"seqlen": bounds[1]} if len(bounds) == 2 else {"cu_seqlens": bounds}
    return pd.plan(**given, causal=True, **named)


def check(bounds: list[int], name: str, named: dict) -> dict:
    """Bits of O and LSE, and errors of gradients, beside those of one GPU."""
    *operands, grad_o = whole_tensors(bounds[-1])
    deterministic = bool(named.get("deterministic"))
    forward, leaves = on_one_gpu([x.clone() for x in operands], bounds, deterministic)
    o, lse = forward()
    o.backward(grad_o.view_as(o))
    single = [
        o.detach().view(-1, CONFIG.heads_q, CONFIG.dim),
        lse.detach().view(CONFIG.heads_q, -1),
    ]
    single += [x.grad for x in leaves]
    plan = plan_of(bounds)
    index = plan.index.to(DEVICE)
    q, k, v = (x[index].requires_grad_() for x in operands)
    o, lse = pd.attention(q, k, v, plan=plan, return_lse=True, **named)
    o.backward(grad_o[index])
    ours = [o.detach(), lse.detach(), q.grad, k.grad, v.grad]
    line = {"kind": "check", "check": name, "tokens": bounds[-1], "documents": len(bounds) - 1}
    for field, mine, whole in zip(("o", "lse", "dq", "dk", "dv"), ours, single, strict=True):
        his = whole.index_select(1 if field == "lse" else 0, index)
        line[field] = [bool(torch.equal(mine, his)), relative(mine, his)]
    if bounds[-1] <= 8192:  # against float32
        truth_forward, leaves = on_one_gpu([x.float() for x in operands], bounds)
        o, _ = truth_forward()
        o.backward(grad_o.float().view_as(o))
        for field, mine, whole, leaf in zip(
            ("dq", "dk", "dv"), ours[2:], single[2:], leaves, strict=True
        ):
            truth = leaf.grad[index]
            line[f"{field} error"] = [relative(mine, truth), relative(whole[index], truth)]
    return line


def slowest(milliseconds: float) -> float:
    x = torch.tensor([milliseconds], device=DEVICE)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


class Clock:
    """Times on the stream of the GPU, or of the host."""

    def __init__(self) -> None:
        self._events: list = []

    def mark(self) -> None:
        if DEVICE == "cpu":
            self._events.append(1e3 * time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def milliseconds(self) -> list[float]:
        if DEVICE == "cpu":
            return [b - a for a, b in itertools.pairwise(self._events)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]


def timed(forward, leaves, grad_o, alone: bool = False) -> tuple[float, float]:
    """Medians of (forward, backward) in ms, of the slowest rank unless ``alone``."""
    times = []
    for i in range(CONFIG.warm_up + CONFIG.repeats):
        if not alone:
            dist.barrier()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        clock = Clock()
        clock.mark()
        answer = forward()
        clock.mark()
        o = answer[0] if isinstance(answer, tuple) else answer
        torch.autograd.grad(o, leaves, grad_o.view_as(o))
        clock.mark()
        pair = clock.milliseconds()
        if i >= CONFIG.warm_up:
            times.append(pair if alone else [slowest(x) for x in pair])
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def speed(bounds: list[int], parts: Sequence[str]) -> Iterator[dict]:
    *operands, grad_o = whole_tensors(bounds[-1])
    size = dist.get_world_size()
    flops = 4 * pairs_of(bounds) * CONFIG.heads_q * CONFIG.dim / size
    cell = {"kind": "speed", "tokens": bounds[-1] // size, "documents": len(bounds) - 1}

    def line(name: str, times, base=None, **more) -> dict:
        fields = {"forward_ms": times[0], "backward_ms": times[1]}
        rates = {"forward": flops / times[0] / 1e9, "backward": 2.5 * flops / times[1] / 1e9}
        if base:
            more["share"] = [base[0] / times[0], base[1] / times[1]]  # of one GPU
        return {"speed": name, **cell, **fields, "tflops": rates, **more}

    forward, leaves = on_one_gpu([x.clone() for x in operands], bounds)
    base = timed(forward, leaves, grad_o, alone=True)
    base = tuple(slowest(x) / size for x in base)
    yield line("one GPU / ranks", base)
    layouts = ("auto", "zigzag", "te_zigzag") if len(bounds) > 2 else ("auto",)
    for layout in layouts if "ours" in parts else ():
        plan = plan_of(bounds, layout=layout)
        index = plan.index.to(DEVICE)
        q, k, v = (x[index].requires_grad_() for x in operands)
        for name, named in METHODS.items():
            if layout != "auto" and name != "exchange":
                continue

            def step(named=named, plan=plan, q=q, k=k, v=v):
                return pd.attention(q, k, v, plan=plan, **named)

            times = timed(step, (q, k, v), grad_o[index])
            name = name if layout == "auto" else f"{name}, {layout}"
            more = {"imbalance": plan.imbalance, "received": plan.needed_fraction}
            yield line(name, times, base, layout=plan.layout, **more)
    for name, make in PEERS.items():
        if name not in parts:
            continue
        try:
            step, leaves, grad = make(operands, grad_o, bounds)
            found = line(f"peer: {name}", timed(step, leaves, grad), base)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:160]
            found = {"speed": f"peer: {name}", **cell, "unavailable": text}
        yield found
        while _OPEN:
            _OPEN.pop().__exit__(None, None, None)


def host_times() -> Iterator[dict]:
    """Microseconds of the host for a call of tensors, and of DTensors sharded by heads."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))
    tensors = [normal(1, 64, h, CONFIG.dim, seed=h) for h in (CONFIG.heads_q, CONFIG.heads_k)]
    spread = [distribute_tensor(x, mesh, [Shard(2)]) for x in tensors]
    local = [x.to_local() for x in spread]
    found = {}
    for name, (q, k) in (("tensors", local), ("dtensors", spread)):
        times = []
        for i in range(220):
            start = time.perf_counter()
            pantile.attention(q, k, k, causal=True)
            times.append(time.perf_counter() - start)
            if DEVICE == "cuda" and i % 20 == 0:
                torch.cuda.synchronize()
        found[name] = 1e6 * statistics.median(times[20:])
    with CommDebugMode() as counts:
        pantile.attention(*spread, spread[1], causal=True)
    yield {"kind": "host_us", "host_us": found, "collectives": counts.get_total_counts()}


# ---- peers


def _zigzag(x: torch.Tensor) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = x.chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))[None].contiguous()


def _one_sequence(bounds: list[int]) -> None:
    if len(bounds) != 2:
        raise ValueError("serves one sequence")


def _torch_peer(rotate: str):
    """torch's context parallelism, inside of its context."""

    def make(operands, grad_o, bounds):
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        _one_sequence(bounds)
        set_rotate_method(rotate)
        mesh = dist.device_mesh.init_device_mesh(DEVICE, (dist.get_world_size(),))
        ratio = CONFIG.heads_q // CONFIG.heads_k  # its ring knows no groups of heads
        heads = [
            x.repeat_interleave(1 if x.shape[1] == CONFIG.heads_q else ratio, 1).transpose(0, 1)
            for x in (*operands, grad_o)
        ]
        heads = [x[None].detach().contiguous() for x in heads]
        context = context_parallel(
            mesh, buffers=heads, buffer_seq_dims=[2] * 4, no_restore_buffers=set(heads)
        )
        context.__enter__()
        _OPEN.append(context)
        leaves = tuple(x.requires_grad_() for x in heads[:3])

        def step():
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

        return step, leaves, heads[3]

    return make


_OPEN: list = []


def _flash_forward(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal):
    """(o, lse) of FA2 as torch ships it. On a CPU, for a dry run, of pantile."""
    if DEVICE == "cuda":
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu_q, cu_k, longest_q, longest_k, 0.0, causal, False), scale=scale
        )
        return o, lse
    named = {"causal": causal, "scale": scale, "return_lse": True}
    if cu_q is None:
        return pantile.attention(q, k, v, **named)
    cu_q, cu_k = cu_q.int(), cu_k.int()
    return pantile.varlen_attention(q, k, v, cu_q, cu_k, longest_q, longest_k, **named)


def _flash_backward(
    grad_o, q, k, v, o, lse, cu_q, cu_k, longest_q, longest_k, targets, scale, causal
):
    """On a CPU, for a dry run, zeros."""
    if DEVICE == "cpu":
        for target in targets:
            target.zero_()
        return
    nothing = torch.zeros(2, dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        *(grad_o, q, k, v, o, lse, cu_q, cu_k, longest_q, longest_k, 0.0, causal),
        *(nothing, nothing[:0]),
        scale=scale,
    )
    for target, grad in zip(targets, grads, strict=True):
        target.copy_(grad)


def _shim_flash_attn() -> None:
    """A flash_attn of torch's FA2, for packages that want its private functions."""
    if "flash_attn" in sys.modules:
        return

    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1,
                window_size_right=-1, softcap=0.0, alibi_slopes=None,
                return_softmax=False):  # fmt: skip
        sizes = None, None, q.shape[1], k.shape[1]
        return *_flash_forward(q, k, v, *sizes, softmax_scale, causal), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                 window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                 deterministic=False, rng_state=None):  # fmt: skip
        sizes = None, None, q.shape[1], k.shape[1]
        _flash_backward(
            dout, q, k, v, out, softmax_lse, *sizes, (dq, dk, dv), softmax_scale, causal
        )

    def varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                       softmax_scale, causal, window_size_left=-1, window_size_right=-1,
                       softcap=0.0, alibi_slopes=None, return_softmax=False):  # fmt: skip
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return *_flash_forward(q, k, v, *sizes, softmax_scale, causal), None, None

    def varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
                        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                        deterministic=False, rng_state=None):  # fmt: skip
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        _flash_backward(
            dout, q, k, v, out, softmax_lse, *sizes, (dq, dk, dv), softmax_scale, causal
        )

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    interface._flash_attn_varlen_forward = varlen_forward
    interface._flash_attn_varlen_backward = varlen_backward
    package = types.ModuleType("flash_attn")
    package.flash_attn_interface = interface
    sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def _without_adapters(name: str) -> None:
    """The package as a bare folder: its __init__ imports transformers."""
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = package


def ring_flash_peer(operands, grad_o, bounds):
    """Zig-zag over the sequence, or in every document."""
    _shim_flash_attn()
    _without_adapters("ring_flash_attn")
    if len(bounds) == 2:
        from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func

        leaves = tuple(_zigzag(x).requires_grad_() for x in operands)
        return (lambda: zigzag_ring_flash_attn_func(*leaves, causal=True)), leaves, _zigzag(grad_o)
    from ring_flash_attn.zigzag_ring_flash_attn_varlen import zigzag_ring_flash_attn_varlen_func

    index = plan_of(bounds, layout="te_zigzag").index.to(DEVICE)
    leaves = tuple(x[index].requires_grad_() for x in operands)
    parts = [b // dist.get_world_size() for b in bounds]
    offsets = torch.tensor(parts, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in itertools.pairwise(parts))

    def step():
        return zigzag_ring_flash_attn_varlen_func(*leaves, offsets, longest, causal=True)

    return step, leaves, grad_o[index]


def yunchang_peer(operands, grad_o, bounds):
    _one_sequence(bounds)
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    rank, size = dist.get_rank(), dist.get_world_size()
    ratio = CONFIG.heads_q // CONFIG.heads_k
    leaves = tuple(
        x.chunk(size)[rank].repeat_interleave(1 if x.shape[1] == CONFIG.heads_q else ratio, 1)[None]
        .contiguous().requires_grad_()
        for x in operands
    )  # fmt: skip
    kernel = AttnType.TORCH_FLASH if DEVICE == "cuda" else AttnType.TORCH_EFFICIENT
    module = UlyssesAttention(dist.group.WORLD, attn_type=kernel)
    return (lambda: module(*leaves, causal=True)), leaves, grad_o.chunk(size)[rank][None]


PEERS = {
    "yunchang": yunchang_peer,  # first: it would take the stand-in for flash_attn
    "ring-flash-attn": ring_flash_peer,
    "torch-allgather": _torch_peer("allgather"),
    "torch-alltoall": _torch_peer("alltoall"),
}
PARTS = ("ours", *PEERS)
SERVE_DOCUMENTS = {"ours", "ring-flash-attn"}


# ---- the bars


def _step_ms(line: dict) -> float:
    return line["forward_ms"] + line["backward_ms"]


def _best(lines: list[dict], peers: bool, deterministic: bool = False) -> dict | None:
    """The fastest line of forward and backward together."""
    some = [
        line
        for line in lines
        if "share" in line
        and line["speed"].startswith("peer") == peers
        and ("deterministic" in line["speed"]) == deterministic
        and "zigzag" not in (() if peers else line["speed"])
    ]
    return min(some, key=_step_ms, default=None)


def bars(lines: list[dict]) -> list[dict]:
    """What was asked for and what was measured, by cell."""
    speeds = [line for line in lines if "speed" in line]
    found = []

    def bar(cell: dict, name: str, value: float | None, least: float) -> None:
        met = None if value is None else value >= least
        line = {"kind": "bar", "bar": name, **cell, "value": value, "least": least}
        found.append(line | {"met": met})

    for tokens, several in sorted({(x["tokens"], x["documents"] > 1) for x in speeds}):
        cell = {"tokens": tokens, "packed": several}
        some = [x for x in speeds if (x["tokens"], x["documents"] > 1) == (tokens, several)]
        ours, peer = _best(some, peers=False), _best(some, peers=True)
        if ours is None:
            continue
        shares = (0.85, 0.88) if several else (0.93, 0.95) if tokens >= 32768 else (0.88, 0.92)
        for name, value, least in zip(("forward", "backward"), ours["share"], shares, strict=True):
            bar({**cell, "method": ours["speed"]}, f"share of one GPU, {name}", value, least)
        faster = _step_ms(peer) / _step_ms(ours) if peer else None
        against = {**cell, "peer": peer["speed"] if peer else None}
        bar(against, "faster than the best peer", faster, 1.3 if several else 1.05)
        plain = next((x for x in some if x["speed"] == "gather"), None)
        strict = next((x for x in some if x["speed"] == "gather, deterministic"), None)
        if plain and strict:
            bar(cell, "deterministic, speed left", _step_ms(plain) / _step_ms(strict), 1 / 1.08)
    for line in lines:
        if "host_us" in line:
            extra = line["host_us"]["dtensors"] - line["host_us"]["tensors"]
            bar({}, "DTensor, less than 15 us more: left", 15.0 - extra, 0.0)
            bar({}, "DTensor, no collectives", -float(line["collectives"]), 0.0)
        if line.get("check") in ("gather", "gather, deterministic"):
            cell = {"tokens": line["tokens"], "documents": line["documents"]}
            names = ("o", "lse", "dq") if "deterministic" in line["check"] else ("o", "lse")
            equal = all(line[name][0] for name in names)
            bar(cell, f"{line['check']}: bits of {', '.join(names)}", float(equal), 1.0)
    return found


def _heads(text: str) -> tuple[int, int]:
    return tuple(map(int, text.split("/", 1)))


def _arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="of a rank")
    parser.add_argument("--check", type=int, nargs="*", default=[4096, 16384, 65536])
    parser.add_argument("--heads", type=_heads, default=(64, 8), help="queries/keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after so many")
    parser.add_argument("--join", type=pathlib.Path, nargs="*", help="results of other runs")
    return parser.parse_args()


def joined(files: Sequence[pathlib.Path]) -> list[dict]:
    """The lines of several runs, without their bars, and the bars of all."""
    lines = [line for file in files if file.exists() for line in figures.read(file)]
    lines = [line for line in lines if line["kind"] != "bar"]
    return [*lines, *bars(lines)]


def started() -> None:
    if DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def cells_of(arguments: argparse.Namespace) -> list[Callable[[], Iterable[dict]]]:
    """The shortest checks come first, then all speeds, then the other checks."""
    checks, timings, size = [], [], dist.get_world_size()
    for tokens in arguments.check if "ours" in arguments.parts else ():
        for bounds in ([0, tokens], documents(tokens)):
            for name, named in METHODS.items():
                if "group" not in name:
                    checks.append(lambda b=bounds, n=name, m=named: [check(b, n, m)])
    for tokens in sorted(arguments.tokens, reverse=True):
        for bounds in ([0, tokens * size], documents(tokens * size)):
            if len(bounds) == 2 or SERVE_DOCUMENTS.intersection(arguments.parts):
                timings.append(lambda b=bounds: speed(b, arguments.parts))
    if "ours" in arguments.parts:
        timings.append(host_times)
    few = 2 * sum("group" not in name for name in METHODS)
    return checks[:few] + timings + checks[few:]


def lines_of(arguments: argparse.Namespace) -> Iterator[dict]:
    start, lines = time.perf_counter(), []
    more = {"config": dataclasses.asdict(CONFIG), "build": pantile.build_info()}
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    yield harness.header(DEVICE, gpu=name, ranks=dist.get_world_size(), **more)
    for cell in cells_of(arguments):
        if slowest(time.perf_counter() - start) > arguments.seconds:
            yield {"kind": "stopped", "stopped": f"after {arguments.seconds} s"}
            break
        for line in cell():
            at = {"ranks": dist.get_world_size(), "at_s": time.perf_counter() - start}
            lines.append(line | at)
            yield lines[-1]
    yield from bars(lines)


def main() -> None:
    arguments = _arguments()
    if arguments.join is not None:

        def shown(line: dict) -> str:
            return json.dumps(line) if line["kind"] == "bar" else ""

        harness.emit(arguments.out, joined(arguments.join), shown)
        return
    CONFIG.heads_q, CONFIG.heads_k = arguments.heads
    CONFIG.dim, CONFIG.repeats = arguments.head_dim, arguments.repeats
    started()
    if dist.get_rank() == 0:
        harness.emit(arguments.out, lines_of(arguments))
    else:
        collections.deque(lines_of(arguments), maxlen=0)  # the same work, and nothing said
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
