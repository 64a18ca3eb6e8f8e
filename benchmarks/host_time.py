"""Host time of tiny calls, microseconds: a forward without gradient, a forward that autograd
records, and forward and backward, of pantile and of torch's scaled_dot_product_attention, with
autograd's threads and without.

    python benchmarks/host_time.py --out build/host_time.jsonl

On a GPU the device is waited for after each round only, so that calls overlap with it: what a loop
takes is the larger of host time and device time. Shapes are small enough for the first.
Bars on an H200: recorded 16, forward and backward 45."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pantile
import torch
from pantile.bench import harness

SHAPES = {"cpu": (1, 1, 1, 64), "cuda": (1, 128, 8, 64)}  # [batch, seq, heads, dim]
BARS = {"recorded": 16.0, "forward+backward": 45.0}


def calls_of(device: str) -> dict[str, dict[str, Callable[[], object]]]:
    """kind -> contender -> call."""
    q, k, v, grad = (
        torch.randn(SHAPES[device], device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    ours = tuple(x.clone().requires_grad_() for x in (q, k, v))
    theirs = tuple(x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def pantile_call(*tensors):
        return pantile.attention(*tensors, causal=True)

    def torch_call(*tensors):
        return sdpa(*tensors, is_causal=True)

    found: dict[str, dict[str, Callable[[], object]]] = {}
    contenders = {
        "pantile": (pantile_call, ours, grad),
        "torch": (torch_call, theirs, grad.transpose(1, 2)),
    }
    for name, (call, tensors, seed) in contenders.items():
        plain = tuple(x.detach() for x in tensors)
        kinds = {
            "no gradient": lambda call=call, plain=plain: call(*plain),
            "recorded": lambda call=call, tensors=tensors: call(*tensors),
            "forward+backward": lambda call=call, tensors=tensors, seed=seed: torch.autograd.grad(
                call(*tensors), tensors, seed
            ),
        }
        for kind, one in kinds.items():
            found.setdefault(kind, {})[name] = one
    return found


def microseconds(
    calls: dict[str, Callable[[], object]], device: str, rounds: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Least and median of rounds of ``repeats`` calls, the contenders in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for number in range(rounds + 1):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds = time.perf_counter() - start
            wait()
            if number:  # the first one warms up
                taken[name].append(seconds / repeats * 1e6)
    return {
        name: {"least": round(min(found), 2), "median": round(sorted(found)[len(found) // 2], 2)}
        for name, found in taken.items()
    }


def lines_of(device: str, rounds: int, repeats: int) -> Iterator[dict]:
    yield harness.header(device, shape=SHAPES[device], rounds=rounds, repeats=repeats)
    for threads in (True, False):
        with torch.autograd.set_multithreading_enabled(threads):
            for kind, calls in calls_of(device).items():
                found = microseconds(calls, device, rounds, repeats)
                line = {"kind": "host_time", "call": kind, "autograd_threads": threads} | found
                bar = BARS.get(kind) if device == "cuda" else None
                yield line | {"bar": bar, "met": bar and found["pantile"]["median"] <= bar}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    if given.device not in SHAPES:
        parser.error(f"--device is {given.device!r}; allowed: {', '.join(SHAPES)}")
    torch.manual_seed(0)
    harness.emit(given.out, lines_of(given.device, given.rounds, given.repeats))


if __name__ == "__main__":
    main()
