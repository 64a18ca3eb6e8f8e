"""Train a byte-level GPT on packed documents with context parallelism, beside one process.

Every topic that ``help()`` prints is a document. A step packs documents into one long sequence;
``pantile.distributed`` spreads its tokens over the ranks, balanced in tokens and in work, and every
layer attends across ranks. The same run in one process must give the same losses.

    python examples/train_long.py                        # 2 processes: gloo on CPUs, NCCL on GPUs
    python examples/train_long.py --ranks 4 --tokens 8192 --method exchange
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

import pantile
import pantile.distributed as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

VOCABULARY = 256  # bytes
LONGEST = 16384  # positions in a document
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    tokens: int  # of a step
    steps: int
    layers: int
    width: int
    heads: int
    key_heads: int
    method: str
    seed: int


class Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.heads, self.key_heads = run.heads, run.key_heads
        self.dim = run.width // run.heads
        self.norm_1 = nn.LayerNorm(run.width)
        self.qkv = nn.Linear(run.width, (run.heads + 2 * run.key_heads) * self.dim, bias=False)
        self.out = nn.Linear(run.width, run.width, bias=False)
        self.norm_2 = nn.LayerNorm(run.width)
        self.up = nn.Linear(run.width, 4 * run.width)
        self.down = nn.Linear(4 * run.width, run.width)

    def forward(self, x, attend):
        parts = self.heads, self.key_heads, self.key_heads
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.dim)).split(parts, -2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LongGPT(nn.Module):
    """Its only operation across tokens is ``attend``: all others work on any rows."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, run.width)
        self.position = nn.Embedding(LONGEST, run.width)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.norm = nn.LayerNorm(run.width)
        self.head = nn.Linear(run.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, positions, attend):
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def documents() -> list[Tensor]:
    from pydoc_data.topics import topics

    texts = (topics[name].encode() for name in sorted(topics))
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts]


def packed(
    texts: list[Tensor], tokens: int, generator: torch.Generator
) -> tuple[Tensor, list[int]]:
    """(tokens + 1 bytes of whole documents, the last one cut; offsets of ``tokens`` of them)."""
    parts, bounds = [], [0]
    while bounds[-1] < tokens:
        text = texts[int(torch.randint(len(texts), (1,), generator=generator))][:LONGEST]
        text = text[: tokens - bounds[-1]]
        parts.append(text)
        bounds.append(bounds[-1] + len(text))
    return torch.cat(parts), bounds


def next_bytes(tokens: Tensor, bounds: list[int]) -> Tensor:
    """Labels; -100 at the last byte of a document, which has no successor."""
    labels = torch.cat((tokens[1:], tokens[:1]))
    labels[torch.tensor(bounds[1:]) - 1] = -100
    return labels


def alone(bounds: list[int], device: torch.device) -> tuple[Attend, Tensor]:
    """(attention of packed documents in one process, positions in them)."""
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    packing = offsets, offsets, longest, longest
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
    return lambda q, k, v: pantile.varlen_attention(q, k, v, *packing, causal=True), positions


def across_ranks(plan: pd.Plan, method: str) -> Attend:
    return lambda q, k, v: pd.attention(q, k, v, plan=plan, method=method)


def train(run: Run, ranks: int, device: torch.device) -> list[float]:
    """Losses of the steps; on every rank the same."""
    torch.manual_seed(run.seed)
    model = LongGPT(run).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    batches, texts, losses = torch.Generator().manual_seed(run.seed), documents(), []
    for _ in range(run.steps):
        tokens, bounds = packed(texts, run.tokens, batches)
        labels = next_bytes(tokens, bounds)
        count = int((labels >= 0).sum())
        if ranks == 1:
            attend, positions = alone(bounds, device)
        else:
            plan = pd.plan(cu_seqlens=bounds, causal=True)
            tokens, labels = plan.shard(tokens, labels)
            attend, positions = across_ranks(plan, run.method), plan.positions
        logits = model(tokens.to(device), positions.to(device), attend)
        loss = F.cross_entropy(logits.float(), labels.to(device), reduction="sum") / count
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        total = loss.detach().clone()
        if ranks > 1:  # a loss and a gradient are sums over tokens, and so over ranks
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total.item())
    return losses


def on_gpus(ranks: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def worker(rank: int, ranks: int, run: Run, folder: str) -> None:
    on_gpu = on_gpus(ranks)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // ranks, 1))
    if ranks > 1:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(minutes=5),
        )
    losses = train(run, ranks, device)
    if rank == 0:
        pathlib.Path(folder, f"{ranks}.json").write_text(json.dumps(losses))
    if ranks > 1:
        dist.destroy_process_group()


def losses_of(ranks: int, run: Run) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, (ranks, run, folder), nprocs=ranks)
        losses: list[float] = json.loads(pathlib.Path(folder, f"{ranks}.json").read_text())
        return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument(
        "--method", default="auto", choices=("auto", "gather", "exchange", "heads", "ring")
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the losses")
    given = parser.parse_args()
    fields = {k: v for k, v in vars(given).items() if k not in ("ranks", "out")}
    run = Run(**fields)
    one, several = losses_of(1, run), losses_of(given.ranks, run)
    print(f"{'step':>5} {'1 process':>10} {f'{given.ranks} processes':>12}")
    for step, pair in enumerate(zip(one, several, strict=True)):
        print(f"{step:5} {pair[0]:10.5f} {pair[1]:12.5f}")
    largest = max(abs(a - b) for a, b in zip(one, several, strict=True))
    print(f"largest difference {largest:.2e}; {one[0]:.3f} -> {one[-1]:.3f}")
    if given.out:
        given.out.write_text(json.dumps({"run": asdict(run), "one": one, "several": several}))


if __name__ == "__main__":
    main()
