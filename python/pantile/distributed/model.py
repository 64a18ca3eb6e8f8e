"""A model of attention over many GPUs: bytes, times and efficiency of each method.

    python -m pantile.distributed.model --gpus 1024 --heads 64/8 --tokens 8192
    python -m pantile.distributed.model --gpus 4096 --heads 64/8 --tokens 8192 --replay

Assumptions, all of them arguments: kernel rates by length as measured on one H200 (bf16, head dim
128, causal), 380 GB/s a GPU inside a node, 45 GB/s a network card, of which each GPU has one; an
all-gather uses all cards of a node. No congestion, and no multiprocessors lost to transfers. The
efficiency is against one GPU that runs its share at its rate for 16k tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

# TFLOP/s by keys, one H200: DESIGN table, bf16 causal head dim 128.
FORWARD_RATES = {1024: 480.0, 4096: 693.0, 16384: 788.0}
BACKWARD_RATES = {1024: 361.0, 4096: 589.0, 16384: 650.0}
GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class Machine:
    """What transfers and kernels cost."""

    node: int = 8  # GPUs
    link: float = 380 * GIGA  # bytes a second of a GPU inside its node
    card: float = 45 * GIGA  # of a network card, one a GPU
    link_latency: float = 8e-6  # seconds of a collective call
    card_latency: float = 18e-6
    launch: float = 6e-6  # of a call of a kernel


@dataclasses.dataclass(frozen=True)
class Shape:
    gpus: int
    tokens: int  # of a GPU
    heads_q: int
    heads_k: int
    head_dim: int = 128
    element: int = 2  # bytes of K and V; gradients of keys are 4

    @property
    def total(self) -> int:
        return self.gpus * self.tokens

    @property
    def flops(self) -> float:
        """Of the causal forward, of one GPU."""
        return 2.0 * self.tokens * self.total * self.head_dim * self.heads_q


@dataclasses.dataclass(frozen=True)
class Estimate:
    method: str
    forward_bytes: float  # that a GPU receives
    backward_bytes: float
    forward_seconds: float
    backward_seconds: float
    forward_efficiency: float
    backward_efficiency: float
    groups: int  # of key heads


def rate(rates: dict[int, float], keys: float) -> float:
    """FLOP/s at a length: between the measured ones linear in its logarithm."""
    lengths = sorted(rates)
    keys = min(max(keys, lengths[0]), lengths[-1])
    for a, b in itertools.pairwise(lengths):
        if keys <= b:
            part = math.log(keys / a) / math.log(b / a)
            return 1e12 * (rates[a] + part * (rates[b] - rates[a]))
    return 1e12 * rates[lengths[-1]]


def stages(count: int, transfer: float, attention: float) -> float:
    """Seconds of ``count`` transfers, each with its attention, double buffered."""
    return transfer + (count - 1) * max(transfer, attention) + attention


def _collective_bandwidth(shape: Shape, machine: Machine) -> tuple[float, float]:
    """(bytes a second, latency) of a gather of all ranks."""
    if shape.gpus <= machine.node:
        return machine.link, machine.link_latency
    return min(machine.card * machine.node, machine.link), machine.card_latency


def _pair_bandwidth(gpus: int, machine: Machine) -> tuple[float, float]:
    """Of an exchange in which every rank sends something else to every other."""
    if gpus <= machine.node:
        return machine.link, machine.link_latency
    return machine.card, machine.card_latency


def _keys_estimate(
    shape: Shape, machine: Machine, name: str, received: float, bandwidth: float, latency: float
) -> Estimate:
    """Methods that bring ``received`` rows of keys to a rank, in groups of key heads."""
    row = 2 * shape.heads_k * shape.head_dim
    forward_bytes, backward_bytes = received * row * shape.element, received * row * 4.0
    best = None
    for groups in range(1, shape.heads_k + 1):
        fast = rate(FORWARD_RATES, shape.total), rate(BACKWARD_RATES, shape.total)
        attention = shape.flops / fast[0] / groups + machine.launch
        gradient = 2.5 * shape.flops / fast[1] / groups + 3 * machine.launch
        keys = forward_bytes / groups / bandwidth + latency
        both = keys + backward_bytes / groups / bandwidth + latency
        seconds = stages(groups, keys, attention), stages(groups, both, gradient)
        if best is None or sum(seconds) < sum(best[1]):
            best = groups, seconds
    groups, seconds = best
    total = forward_bytes, forward_bytes + backward_bytes
    return _estimate(shape, name, total, seconds, groups)


def _estimate(shape: Shape, name: str, moved, seconds, groups: int = 1) -> Estimate:
    ideal = (
        shape.flops / rate(FORWARD_RATES, 16384),
        2.5 * shape.flops / rate(BACKWARD_RATES, 16384),
    )
    return Estimate(
        *(name, moved[0], moved[1], seconds[0], seconds[1]),
        *(ideal[0] / seconds[0], ideal[1] / seconds[1], groups),
    )


def gather(shape: Shape, machine: Machine) -> Estimate:
    bandwidth, latency = _collective_bandwidth(shape, machine)
    received = float(shape.total - shape.tokens)
    return _keys_estimate(shape, machine, "gather", received, bandwidth, latency)


def exchange(shape: Shape, machine: Machine, needed: float = 1.0) -> Estimate:
    """``needed``: the part of an all-gather that a rank's queries see."""
    bandwidth, latency = _pair_bandwidth(shape.gpus, machine)
    received = needed * (shape.total - shape.tokens)
    return _keys_estimate(shape, machine, "exchange", received, bandwidth, latency)


def heads(shape: Shape, machine: Machine) -> Estimate:
    """Ulysses: nothing is hidden. Key heads are replicated where they are fewer than ranks."""
    bandwidth, latency = _pair_bandwidth(shape.gpus, machine)
    others = (shape.gpus - 1) / shape.gpus
    keys = max(shape.heads_k, shape.gpus)
    moved = others * shape.tokens * shape.head_dim * shape.element * 2.0 * (shape.heads_q + keys)
    fast = rate(FORWARD_RATES, shape.total), rate(BACKWARD_RATES, shape.total)
    forward = shape.flops / fast[0] + machine.launch + moved / bandwidth + 4 * latency
    backward = 2.5 * shape.flops / fast[1] + 3 * machine.launch + moved / bandwidth + 4 * latency
    return _estimate(shape, "heads", (moved, moved), (forward, backward))


def ring(shape: Shape, machine: Machine) -> Estimate:
    bandwidth, latency = _pair_bandwidth(shape.gpus, machine)
    row = 2 * shape.heads_k * shape.head_dim
    turn = shape.tokens * row * shape.element
    fast = rate(FORWARD_RATES, shape.tokens), rate(BACKWARD_RATES, shape.tokens)
    step = shape.flops / shape.gpus / fast[0] + 2 * machine.launch
    grad_step = 2.5 * shape.flops / shape.gpus / fast[1] + 4 * machine.launch
    move = turn / bandwidth + latency
    grad_move = move + shape.tokens * row * 4.0 / bandwidth + latency
    seconds = (
        step + (shape.gpus - 1) * max(step, move),
        grad_step + (shape.gpus - 1) * max(grad_step, grad_move) + (grad_move - move),
    )
    turns = shape.gpus - 1
    moved = turns * turn, turns * turn + shape.gpus * shape.tokens * row * 4.0
    return _estimate(shape, "ring", moved, seconds)


def hybrid(shape: Shape, machine: Machine) -> Estimate | None:
    """Heads inside a node, a gather of keys between nodes: each GPU the keys of its heads."""
    inner, nodes = machine.node, shape.gpus // machine.node
    if nodes < 2 or shape.gpus % inner or shape.heads_q % inner:
        return None
    keys = max(shape.heads_k, inner)
    outside = Shape(
        nodes, shape.tokens * inner, shape.heads_q // inner, keys // inner, shape.head_dim
    )
    between = _keys_estimate(
        *(outside, machine, "hybrid", float(outside.total - outside.tokens)),
        *(machine.card, machine.card_latency),
    )
    inside = (inner - 1) / inner * shape.tokens * shape.head_dim * shape.element
    inside *= 2.0 * (shape.heads_q + keys)
    extra = inside / machine.link + 4 * machine.link_latency
    seconds = between.forward_seconds + extra, between.backward_seconds + extra
    moved = between.forward_bytes + inside, between.backward_bytes + inside
    return _estimate(shape, "hybrid", moved, seconds, between.groups)


def estimates(shape: Shape, machine: Machine | None = None, needed: float = 1.0) -> list[Estimate]:
    machine = machine or Machine()
    found = [gather(shape, machine), exchange(shape, machine, needed), ring(shape, machine)]
    if shape.gpus <= shape.heads_q:
        found.append(heads(shape, machine))
    both = hybrid(shape, machine)
    return found if both is None else [*found, both]


# ---- packed documents


def document_lengths(
    total: int, seed: int = 0, median: int = 2048, sigma: float = 1.5
) -> list[int]:
    """Offsets of a pack: lognormal lengths, at most a fourth of it."""
    law, bounds = random.Random(seed), [0]
    while bounds[-1] < total:
        length = max(int(law.lognormvariate(math.log(median), sigma)), 16)
        bounds.append(min(bounds[-1] + min(length, max(total // 4, 1)), total))
    return bounds


def replay_documents(shape: Shape, machine: Machine | None = None, seed: int = 0) -> dict[str, Any]:
    """Plans a pack for all GPUs and replays its forward: ``exchange`` between nodes, heads split
    inside of them; by ``exchange`` alone where the GPUs are one node."""
    from pantile.distributed import _layout, _replay

    machine = machine or Machine()
    whole_nodes = shape.gpus > machine.node and shape.gpus % machine.node == 0
    inner = machine.node if whole_nodes else 1
    bounds, mask = document_lengths(shape.total, seed), _layout.Mask(-1, 0)
    started = time.process_time()
    _, shares = _layout.make(bounds, shape.gpus // inner, mask, "documents", 0.02)
    plan_seconds = time.process_time() - started
    link, link_latency = machine.link, machine.link_latency
    outside = (machine.card, machine.card_latency) if inner > 1 else _pair_bandwidth(
        shape.gpus, machine
    )  # fmt: skip
    keys = max(shape.heads_k, inner) // inner  # key heads of a GPU
    row = shape.head_dim * shape.element
    fast = rate(FORWARD_RATES, shape.total / (len(bounds) - 1))
    received = _replay.received_rows(shares, bounds, mask)
    programs = _replay.exchange_programs(
        *(shares, bounds, mask, received),
        inner=inner,
        groups=min(4, keys),
        costs=_replay.Costs(
            pair=4.0 * shape.head_dim * shape.heads_q / inner / fast,
            row=2 * keys * row / outside[0],
            latency=outside[1],
            split=link_latency + shape.tokens * shape.heads_q * row / link,
        ),
    )
    outcome = _replay.replay(programs)
    most = max(sum(rows.values()) for rows in received)
    return {
        "ranks": len(programs),
        "documents": len(bounds) - 1,
        "plan_seconds": plan_seconds,
        "imbalance": _layout.imbalance(shares, bounds, mask),
        "received": most / max(shape.total - shape.total // len(shares), 1),
        "seconds": outcome.seconds,
        "busy": outcome.busy,
        "waiting_on_a_cycle": len(outcome.waiting),
    }


# ---- the command


def table(shape: Shape, found: Sequence[Estimate]) -> str:
    head = (
        f"{shape.gpus} GPUs, {shape.tokens} tokens each ({shape.total:,} in all), heads "
        f"{shape.heads_q}/{shape.heads_k}, head dim {shape.head_dim}, causal\n\n"
        f"{'method':10} {'received MB':>20} {'ms':>20} {'efficiency':>16} groups\n"
    )
    lines = [
        f"{e.method:10} {e.forward_bytes / 1e6:9.0f} /{e.backward_bytes / 1e6:9.0f} "
        f"{e.forward_seconds * 1e3:9.2f} /{e.backward_seconds * 1e3:9.2f} "
        f"{e.forward_efficiency:7.2f} /{e.backward_efficiency:7.2f} {e.groups:6d}"
        for e in found
    ]
    return head + "\n".join(lines) + "\n\nforward / backward"


def plot(shape: Shape, machine: Machine, path: str) -> None:
    """Efficiency of the forward by number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = [2**i for i in range(1, max(shape.gpus, 2).bit_length())]
    curves: dict[str, list[tuple[int, float]]] = {}
    for gpus in sizes:
        for e in estimates(dataclasses.replace(shape, gpus=gpus), machine):
            curves.setdefault(e.method, []).append((gpus, e.forward_efficiency))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency of the forward")
    axes.set_title(f"{shape.tokens} tokens a GPU, heads {shape.heads_q}/{shape.heads_k}")
    axes.set_ylim(0, 1.1)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _heads_argument(text: str) -> tuple[int, int]:
    queries, _, keys = text.partition("/")
    try:
        pair = int(queries), int(keys or queries)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair like 64/8") from None
    if pair[1] < 1 or pair[0] % pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: query heads are a multiple of key heads")
    return pair


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 or more")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pantile.distributed.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=_positive, required=True)
    parser.add_argument("--heads", type=_heads_argument, default=(64, 8), help="queries/keys")
    parser.add_argument("--tokens", type=_positive, default=8192, help="of a GPU")
    parser.add_argument("--head-dim", type=_positive, default=128)
    parser.add_argument("--node", type=_positive, default=8, help="GPUs of a node")
    parser.add_argument("--link", type=float, default=380.0, help="GB/s inside a node")
    parser.add_argument("--card", type=float, default=45.0, help="GB/s of a network card")
    parser.add_argument("--needed", type=float, default=1.0,
                        help="part of an all-gather that an exchange moves")  # fmt: skip
    parser.add_argument("--replay", action="store_true",
                        help="plan and replay a pack of documents on all GPUs")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help="efficiency by number of GPUs")
    given = parser.parse_args(arguments)
    shape = Shape(given.gpus, given.tokens, *given.heads, given.head_dim)
    machine = Machine(node=given.node, link=given.link * GIGA, card=given.card * GIGA)
    found = estimates(shape, machine, given.needed)
    replayed = replay_documents(shape, machine) if given.replay else None
    if given.json:
        print(json.dumps({"methods": [dataclasses.asdict(e) for e in found], "replay": replayed}))
    else:
        print(table(shape, found))
        if replayed is not None:
            print("\nA pack of documents by exchange, replayed:")
            for name, value in replayed.items():
                print(f"  {name.replace('_', ' '):20} {value}")
    if given.plot:
        plot(shape, machine, given.plot)
    return 1 if replayed is not None and replayed["waiting_on_a_cycle"] else 0


if __name__ == "__main__":
    sys.exit(main())
