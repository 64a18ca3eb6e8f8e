"""Attention over several GPUs: pantile.distributed beside its peers, and against one GPU.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out results.jsonl

First correctness: O, LSE and gradients against one GPU, at several lengths. Then speed: every rank
runs the same step, between barriers; a time is that of the slowest rank, the median of several. The
baseline is the whole sequence on one GPU, divided by the number of GPUs: what they would need
if they had no need to talk. Peers, where installed: torch's ``context_parallel``, ring-flash-attn
(zigzag; its flash_attn is torch's FA2) and yunchang (Ulysses).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import sys
import time
import types

import pantile
import pantile.distributed as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F

HEADS_Q, HEADS_K, DIM = 64, 8, 128
WARM_UP, REPEATS = 2, 7
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
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def whole_tensors(tokens: int) -> list[torch.Tensor]:
    heads = HEADS_Q, HEADS_K, HEADS_K, HEADS_Q
    return [normal(tokens, h, DIM, seed=i) for i, h in enumerate(heads)]


def documents(tokens: int, seed: int = 1) -> list[int]:
    """Lognormal lengths, median 2048, at most a fourth of the pack."""
    law, bounds = random.Random(seed), [0]
    while bounds[-1] < tokens:
        length = max(int(law.lognormvariate(math.log(2048), 1.0)), 16)
        bounds.append(min(bounds[-1] + min(length, tokens // 4), tokens))
    return bounds


def on_one_gpu(tensors, bounds, deterministic=False):
    """(forward, operands) of the whole sequence here."""
    q, k, v = (x.requires_grad_() for x in tensors)
    named = {"causal": True, "return_lse": True, "deterministic": deterministic}
    if len(bounds) == 2:
        return lambda: pantile.attention(q[None], k[None], v[None], **named), (q, k, v)
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
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
    single = [o.detach().view(-1, HEADS_Q, DIM), lse.detach().view(HEADS_Q, -1)]
    single += [x.grad for x in leaves]
    plan = plan_of(bounds)
    index = plan.index.cuda()
    q, k, v = (x[index].requires_grad_() for x in operands)
    o, lse = pd.attention(q, k, v, plan=plan, return_lse=True, **named)
    o.backward(grad_o[index])
    ours = [o.detach(), lse.detach(), q.grad, k.grad, v.grad]
    line = {"check": name, "tokens": bounds[-1], "documents": len(bounds) - 1}
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
    x = torch.tensor([milliseconds], device="cuda")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


def timed(forward, leaves, grad_o, alone: bool = False) -> tuple[float, float]:
    """Medians of (forward, backward) in ms, of the slowest rank unless ``alone``."""
    times = []
    for i in range(WARM_UP + REPEATS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        if not alone:
            dist.barrier()
        torch.cuda.synchronize()
        marks[0].record()
        answer = forward()
        marks[1].record()
        o = answer[0] if isinstance(answer, tuple) else answer
        torch.autograd.grad(o, leaves, grad_o.view_as(o))
        marks[2].record()
        torch.cuda.synchronize()
        pair = marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])
        if i >= WARM_UP:
            times.append(pair if alone else tuple(map(slowest, pair)))
    half = len(times) // 2
    return tuple(sorted(column)[half] for column in zip(*times, strict=True))


def speed(bounds: list[int], emit) -> None:
    *operands, grad_o = whole_tensors(bounds[-1])
    size = dist.get_world_size()
    flops = 4 * pairs_of(bounds) * HEADS_Q * DIM / size
    cell = {"tokens": bounds[-1] // size, "documents": len(bounds) - 1}

    def line(name: str, times, base=None, **more) -> None:
        fields = {"forward_ms": times[0], "backward_ms": times[1]}
        rates = {"forward": flops / times[0] / 1e9, "backward": 2.5 * flops / times[1] / 1e9}
        if base:
            more["share of one GPU"] = [base[0] / times[0], base[1] / times[1]]
        emit({"speed": name, **cell, **fields, "tflops": rates, **more})

    forward, leaves = on_one_gpu([x.clone() for x in operands], bounds)
    base = timed(forward, leaves, grad_o, alone=True)
    base = tuple(slowest(x) / size for x in base)
    line("one GPU / ranks", base)
    layouts = ("auto", "zigzag") if len(bounds) > 2 else ("auto",)
    for layout in layouts:
        plan = plan_of(bounds, layout=layout)
        index = plan.index.cuda()
        q, k, v = (x[index].requires_grad_() for x in operands)
        for name, named in METHODS.items():
            if layout != "auto" and name != "exchange":
                continue

            def step(named=named, plan=plan, q=q, k=k, v=v):
                return pd.attention(q, k, v, plan=plan, **named)

            times = timed(step, (q, k, v), grad_o[index])
            line(name, times, base, layout=plan.layout, imbalance=plan.imbalance)
    for name, make in PEERS.items():
        try:
            step, leaves, grad = make(operands, grad_o, bounds)
        except Exception as error:
            emit({"speed": name, **cell, "unavailable": f"{type(error).__name__}: {error}"[:160]})
            continue
        try:
            line(name, timed(step, leaves, grad), base)
        except Exception as error:
            emit({"speed": name, **cell, "failed": f"{type(error).__name__}: {error}"[:160]})
        while _OPEN:
            _OPEN.pop().__exit__(None, None, None)


# ---- peers


def _zigzag(x: torch.Tensor) -> torch.Tensor:
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = x.chunk(2 * size)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]))[None].contiguous()


def _one_sequence(bounds: list[int]) -> None:
    if len(bounds) != 2:
        raise ValueError("serves one sequence")


def torch_peer(operands, grad_o, bounds):
    """torch's context parallelism, inside of its context."""
    from torch.distributed.tensor.experimental import context_parallel

    _one_sequence(bounds)
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    ratio = HEADS_Q // HEADS_K  # its ring knows no groups of heads
    heads = [
        x.repeat_interleave(1 if x.shape[1] == HEADS_Q else ratio, 1).transpose(0, 1)[None]
        for x in (*operands, grad_o)
    ]
    heads = [x.detach().contiguous() for x in heads]
    context = context_parallel(
        mesh, buffers=heads, buffer_seq_dims=[2] * 4, no_restore_buffers=set(heads)
    )

    def step():
        return F.scaled_dot_product_attention(*heads[:3], is_causal=True)

    context.__enter__()
    _OPEN.append(context)
    leaves = tuple(x.requires_grad_() for x in heads[:3])
    return step, leaves, heads[3]


_OPEN: list = []


def _shim_flash_attn() -> None:
    """A flash_attn of torch's FA2, for packages that want its private functions."""
    if "flash_attn" in sys.modules:
        return

    def forward(q, k, v, dropout_p, softmax_scale, causal, *_, **__):
        o, lse, state, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False),
            scale=softmax_scale,
        )
        return o, lse, None, state

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                 *_, **__):  # fmt: skip
        nothing = torch.zeros(2, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            *(dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], dropout_p),
            *(causal, nothing, nothing[:0]),
            scale=softmax_scale,
        )
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = None
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
    _one_sequence(bounds)
    _shim_flash_attn()
    _without_adapters("ring_flash_attn")
    from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func

    leaves = tuple(_zigzag(x).requires_grad_() for x in operands)
    return (lambda: zigzag_ring_flash_attn_func(*leaves, causal=True)), leaves, _zigzag(grad_o)


def yunchang_peer(operands, grad_o, bounds):
    _one_sequence(bounds)
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    rank, size, ratio = dist.get_rank(), dist.get_world_size(), HEADS_Q // HEADS_K
    leaves = tuple(
        x.chunk(size)[rank].repeat_interleave(1 if x.shape[1] == HEADS_Q else ratio, 1)[None]
        .contiguous().requires_grad_()
        for x in operands
    )  # fmt: skip
    module = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_FLASH)
    return (lambda: module(*leaves, causal=True)), leaves, grad_o.chunk(size)[rank][None]


PEERS = {
    "yunchang Ulysses": yunchang_peer,  # first: it would take the stand-in for flash_attn
    "ring-flash-attn zigzag": ring_flash_peer,
    "torch context_parallel": torch_peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768], help="of a rank")
    parser.add_argument("--check", type=int, nargs="*", default=[4096, 16384, 65536])
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if arguments.no_peers:
        PEERS.clear()
    started = time.perf_counter()
    with arguments.out.open("w") if dist.get_rank() == 0 else open(os.devnull, "w") as out:

        def emit(line: dict) -> None:
            line["ranks"], line["at_s"] = dist.get_world_size(), time.perf_counter() - started
            out.write(json.dumps(line) + "\n")
            out.flush()
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)

        if dist.get_rank() == 0:
            emit({"device": torch.cuda.get_device_name(), "build": pantile.build_info(),
                  "torch": torch.__version__})  # fmt: skip
        for tokens in arguments.check:
            for bounds in ([0, tokens], documents(tokens)):
                for name, named in METHODS.items():
                    if "group" not in name:
                        emit(check(bounds, name, named))
        size = dist.get_world_size()
        for tokens in arguments.tokens:
            speed(documents(tokens * size), emit)
        for tokens in sorted(arguments.tokens, reverse=True):
            speed([0, tokens * size], emit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
