"""Whole models with the attention exchanged: training steps of GPT shapes and the prefill of a
Llama shape, in tokens per second and model FLOP utilisation (MFU).

    python benchmarks/models.py --out benchmarks/results/h200_models.jsonl
    python benchmarks/models.py --only gpt-1.3b-32k,llama-8b-prefill-128k
    python benchmarks/models.py --device cpu --only tiny-gpt,tiny-llama       # a check, seconds

All contenders run one model with the same weights. A training step is forward, backward and fused
AdamW on random tokens; weights, gradients and the optimizer's moments are bfloat16, without
autocast. A prefill is a forward without gradient that gives the logits of the last token; it keeps
no cache. A shape with `of_layers` has the layers of a larger model, but fewer of them: its time is
that of the layers measured, and of no more.

A step counts 6 N + 12 L d S / 2 FLOP per token: N parameters that are factors of products (no
table that is only looked up), L layers, d = heads x head dim, S tokens of context, of which a
causal mask shows half. Recomputation by activation checkpointing does not count. A prefill counts
a third of that, and the head for one token. MFU is the rate of these over --peak.

Before it is timed, a contender's result is compared with that of pantile at the same weights: the
gradient of the first layer's projection, or the logits. One that differs is left out and named.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pantile
import torch
import torch.nn.functional as F
from pantile.bench import harness, measure, peers
from pantile.bench.figures import OURS
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

PEAK = 989.4  # TFLOP/s, bf16 of an H100 SXM or H200, dense
LEAST_COSINE = 0.99  # of results in bf16: equal mathematics gives 0.999 and more
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal, [batch, seq, heads, dim]


@dataclass(frozen=True)
class Shape:
    task: str  # training or prefill
    layers: int
    width: int
    heads: int
    context: int  # tokens
    batch: int = 1
    vocabulary: int = 50304
    heads_k: int = 0  # 0: as many as heads
    hidden: int = 0  # of the gated feed-forward of a Llama; 0: a GPT
    of_layers: int = 0  # of the model that the layers are of; 0: it is whole

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


GPT_110M = {"task": "training", "layers": 8, "width": 1024, "heads": 8, "vocabulary": 256}
GPT_1_3B = {"task": "training", "layers": 24, "width": 2048, "heads": 16}
LLAMA_8B = {"task": "prefill", "layers": 4, "of_layers": 32, "width": 4096, "heads": 32}
LLAMA_8B |= {"heads_k": 8, "hidden": 14336, "vocabulary": 128256}
TINY = {"layers": 2, "width": 64, "heads": 4, "context": 48, "vocabulary": 128}
SHAPES: dict[str, Shape] = {
    "gpt-110m-8k": Shape(**GPT_110M, context=8192, batch=4),
    "gpt-110m-32k": Shape(**GPT_110M, context=32768),
    "gpt-1.3b-8k": Shape(**GPT_1_3B, context=8192, batch=2),
    "gpt-1.3b-32k": Shape(**GPT_1_3B, context=32768),
    "llama-8b-prefill-128k": Shape(**LLAMA_8B, context=131072),
}
CHECKS = {
    "tiny-gpt": Shape("training", **TINY, batch=2),
    "tiny-llama": Shape("prefill", **TINY, heads_k=2, hidden=96, of_layers=4),
}


# ---- attention


def attend_pantile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pantile.attention(q, k, v, causal=True)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2)


class FlashAttention3(torch.autograd.Function):
    """Its operators, with the backward that its package for torch does not register."""

    @staticmethod
    def forward(ctx, q, k, v):
        scale = q.shape[-1] ** -0.5
        o, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, is_causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, grad_o):
        q, k, v, o, lse = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        named = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True}
        backward = torch.ops.flash_attn_3.bwd
        backward(grad_o.contiguous(), q, k, v, o, lse, *grads, **named)
        return tuple(grads)


def fa3(shape: Shape) -> Attend | str:
    operators = peers.fa3_operators()
    if shape.task == "training" and not hasattr(operators, "bwd"):
        return "the library has no operator flash_attn_3::bwd, which a training step needs"
    return FlashAttention3.apply


def sdpa(backend: SDPBackend, shape: Shape) -> Attend | str:
    # The scores, their exponentials and a mask, of every layer where they wait for the backward.
    layers = shape.layers if shape.task == "training" else 1
    scores = 3 * 2.0 * layers * shape.batch * shape.heads * shape.context**2
    if backend is SDPBackend.MATH and scores > peers.MOST_SCORE_BYTES:
        return f"its scores would take {scores / 2**30:.0f} GiB"
    return functools.partial(attend_sdpa, backend=backend)


ATTENTION: dict[str, Callable[[Shape], Attend | str]] = {
    OURS: lambda shape: attend_pantile,
    "FA3": fa3,
    **{
        peers.SDPA[backend]: functools.partial(sdpa, backend)
        for backend in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.MATH,
        )
    },
}


# ---- models: pre-norm decoders


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, gated = shape, shape.hidden > 0
        norm = functools.partial(nn.RMSNorm if gated else nn.LayerNorm, shape.width)
        self.norm_1, self.norm_2 = norm(), norm()
        self.heads = shape.heads, shape.heads_k or shape.heads
        columns = (self.heads[0] + 2 * self.heads[1]) * shape.head_dim
        self.qkv = nn.Linear(shape.width, columns, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        hidden = shape.hidden or 4 * shape.width
        self.up = nn.Linear(shape.width, hidden * (1 + gated), bias=not gated)
        self.down = nn.Linear(hidden, shape.width, bias=not gated)

    def forward(self, x: Tensor, attend: Attend, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        heads, heads_k = self.heads
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.shape.head_dim))
        q, k, v = qkv.split((heads, heads_k, heads_k), 2)  # views: nobody copies them first
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        x = x + self.out(attend(q, k, v).flatten(2))
        inner = self.up(self.norm_2(x))
        if self.shape.hidden:
            gate, inner = inner.chunk(2, -1)
            return x + self.down(F.silu(gate) * inner)
        return x + self.down(F.gelu(inner))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = None if shape.hidden else nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.hidden else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        rates = 500000.0 ** -torch.linspace(0, 1, shape.head_dim // 2 + 1)[:-1]
        angles = torch.arange(shape.context)[:, None, None] * rates  # [seq, 1, dim / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, attend: Attend, recompute: bool = False) -> Tensor:
        x = self.embed(tokens)
        turn = (self.cos, self.sin) if self.position is None else None
        if self.position is not None:
            x = x + self.position.weight
        for block in self.blocks:
            run = functools.partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = run(x, attend, turn)
        if self.shape.task == "prefill":
            x = x[:, -1:]
        return self.head(self.norm(x))


def flops(shape: Shape, model: Decoder) -> float:
    """Of a step or a prefill, as the text above counts them."""
    tables = [model.embed, *([] if model.position is None else [model.position])]
    used = sum(p.numel() for p in model.parameters()) - sum(t.weight.numel() for t in tables)
    tokens = float(shape.batch * shape.context)
    attention = 12 * shape.layers * shape.width * shape.context / 2
    if shape.task == "training":
        return tokens * (6 * used + attention)
    head = model.head.weight.numel()
    return tokens * (2 * (used - head) + attention / 3) + 2.0 * shape.batch * head


# ---- measurement


class Bench:
    """One model, and what each contender does with it."""

    def __init__(self, shape: Shape, device: str, recompute: bool) -> None:
        torch.manual_seed(0)
        self.shape, self.device, self.recompute = shape, device, recompute
        with torch.device(device):
            self.model = Decoder(shape).to(torch.bfloat16)
            self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context + 1))
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=on_gpu)
        self.expected: Tensor | None = None
        self.cosines: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    def forward(self, attend: Attend) -> Tensor:
        return self.model(self.tokens[:, :-1], attend, self.recompute)

    def result(self, attend: Attend) -> Tensor:
        """The gradient of a weight, or logits; changes no weight."""
        if self.shape.task == "prefill":
            with torch.no_grad():
                return self.forward(attend)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.forward(attend).float().flatten(0, 1)
        F.cross_entropy(logits, self.tokens[:, 1:].flatten()).backward()
        first: Any = self.model.blocks[0]
        return first.qkv.weight.grad

    def run(self, attend: Attend) -> None:
        self.result(attend)
        if self.shape.task == "training":
            self.optimizer.step()

    def contender(self, name: str) -> measure.Contender | str:
        attend = ATTENTION[name](self.shape)
        if isinstance(attend, str):
            return attend
        on_gpu = self.device == "cuda"
        try:
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            found = self.result(attend).float().flatten()
            if on_gpu:
                self.peak_bytes[name] = torch.cuda.max_memory_allocated()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        if self.expected is None:
            self.expected = found
        cosine = F.cosine_similarity(found, self.expected, dim=0).item()
        self.cosines[name] = round(cosine, 5)
        if not cosine >= LEAST_COSINE:
            return f"its result has cosine {cosine:.4f} to that of the first contender"
        call = functools.partial(self.run, attend)
        if on_gpu:
            return measure.Contender(name, measure.repeat(call))
        return measure.on_cpu(name, call)


def record(name: str, shape: Shape, given: argparse.Namespace) -> dict:
    bench = Bench(shape, given.device, given.recompute)
    absent: dict[str, str] = {}
    makers = {other: functools.partial(bench.contender, other) for other in given.attention}
    found = harness.running(makers, absent)
    times = harness.medians(found, given.rounds, round_ms=given.round_ms)
    count, tokens = flops(shape, bench.model), shape.batch * shape.context
    line: dict = {"kind": "model", "shape": name, **asdict(shape), "head_dim": shape.head_dim}
    line |= {"parameters": sum(p.numel() for p in bench.model.parameters())}
    line |= {"weights": "bfloat16", "recompute": given.recompute, "flops": count}
    line |= {"peak_tflops": given.peak, "step_ms": times, "absent": absent}
    line["tokens_per_second"] = {n: round(tokens / ms * 1e3, 1) for n, ms in times.items()}
    line["mfu"] = {n: round(count / ms / given.peak / 1e9, 4) for n, ms in times.items()}
    return line | {"cosine": bench.cosines, "peak_bytes": bench.peak_bytes}


def records(given: argparse.Namespace) -> Iterator[dict]:
    for name in given.only:
        yield record(name, (SHAPES | CHECKS)[name], given)
        if given.device == "cuda":
            torch.cuda.empty_cache()


def shown(line: dict) -> str:
    if line["kind"] != "model":
        return ""
    rates, mfu = line["tokens_per_second"], line["mfu"]
    texts = [
        f"{n} {ms:.1f} ms, {rates[n]:,.0f} tokens/s, MFU {mfu[n]:.1%}"
        for n, ms in line["step_ms"].items()
    ]
    texts += [f"{n} absent: {why}" for n, why in line["absent"].items()]
    return f"{line['shape']}\n  " + "\n  ".join(texts)


def main() -> None:
    parser = harness.parser(__doc__)
    text = f"shapes (default: those of a GPU): {', '.join(SHAPES | CHECKS)}"
    parser.add_argument("--only", type=harness.words, default=list(SHAPES), help=text)
    parser.add_argument("--attention", type=harness.words, default=list(ATTENTION))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=200.0, help="of a contender's round")
    parser.add_argument("--peak", type=float, default=PEAK, help="TFLOP/s (default %(default)s)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    given = parser.parse_args()
    for option, words, known in (
        ("--only", given.only, SHAPES | CHECKS),
        ("--attention", given.attention, ATTENTION),
    ):
        for word in words:
            if word not in known:
                parser.error(f"{option} {word!r} is not one of {', '.join(known)}")
    if given.device == "cuda":
        harness.require_gpu()
    head = harness.header(given.device, peers=peers.versions())
    harness.emit(given.out, itertools.chain([head], records(given)), shown)


if __name__ == "__main__":
    main()
