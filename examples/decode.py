"""Time of one decode step against the length of the sequences, for caches of several formats.

    python examples/decode.py                       # on the GPU if there is one, else on the CPU
    python examples/decode.py --batch 8 --longest 65536 --plot decode.png

Each sequence has its keys in pages, in random order. Prints microseconds and the bytes of keys and
values that were read for each second, checks the last length against the textbook in float64 on the
first sequence, and plots the speed.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import pantile
import torch
from tqdm import tqdm

HEADS_Q, HEADS_K, HEAD_DIM, PAGE = 32, 8, 128, 64
FORMATS = {"16 bits": None, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
REPEATS = 7


def make_cache(batch: int, longest: int, coded: torch.dtype | None, device: str, dtype):
    """Pages of random keys and values, appended as a prompt would be."""
    columns = -(-longest // PAGE)
    names = torch.randperm(batch * columns).reshape(batch, columns).to(device, torch.int32)
    cache = pantile.KVCache.paged(
        batch * columns, PAGE, HEADS_K, HEAD_DIM, dtype=coded or dtype, device=device,
        block_table=names,
    )  # fmt: skip
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    for start in range(0, longest, 4096):
        count = min(4096, longest - start)
        k, v = (
            torch.randn(batch, count, HEADS_K, HEAD_DIM, device=device, dtype=dtype)
            for _ in range(2)
        )
        pantile.append(cache, k, v, lengths)
        lengths += count
    return cache


def seconds(call, device: str) -> float:
    """Median of one call. On a GPU calls are replayed from a graph: the host is not measured."""
    if device == "cpu":
        call()
        taken = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    taken = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e4)
    return statistics.median(taken)


def error(q: torch.Tensor, o: torch.Tensor, cache: pantile.KVCache, length: int) -> float:
    """Largest difference from float64, of the first sequence."""
    assert cache.v is not None
    assert cache.block_table is not None
    pages = cache.block_table[0].long()
    k, v = (x.view(torch.int8)[pages].view(x.dtype).double() for x in (cache.k, cache.v))
    if cache.scale_k is not None and cache.scale_v is not None:
        k *= cache.scale_k[pages].double().unsqueeze(-1)
        v *= cache.scale_v[pages].double().unsqueeze(-1)
    k, v = (x.flatten(0, 1)[:length] for x in (k, v))
    rows = q[0, 0].double().reshape(HEADS_K, -1, HEAD_DIM)
    weights = torch.softmax(torch.einsum("hgd,jhd->hgj", rows, k) * HEAD_DIM**-0.5, -1)
    exact = torch.einsum("hgj,jhd->hgd", weights, v).reshape(HEADS_Q, HEAD_DIM)
    return float((o[0, 0].double() - exact).abs().max())


def measure(arguments, device: str, dtype: torch.dtype) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    lengths = [1 << n for n in range(8, arguments.longest.bit_length())]
    progress = tqdm(total=len(FORMATS) * len(lengths), unit="length")
    for name, coded in FORMATS.items():
        cache = make_cache(arguments.batch, arguments.longest, coded, device, dtype)
        q = torch.randn(arguments.batch, 1, HEADS_Q, HEAD_DIM, device=device, dtype=dtype)
        used = torch.zeros(arguments.batch, dtype=torch.int32, device=device)

        def step(q=q, cache=cache, used=used):
            return pantile.decode(q, cache, used, split=arguments.split)

        for length in lengths:
            used.fill_(length)
            try:
                took = seconds(step, device)
            except pantile.UnsupportedError as refusal:
                progress.write(f"{name:<8} {refusal}")
                progress.update(len(lengths))
                break
            read = 2 * arguments.batch * length * HEADS_K * HEAD_DIM * cache.k.element_size()
            found.setdefault(name, []).append((length, read / took * 1e-12))
            progress.write(
                f"{name:<8} {length:7d} keys {took * 1e6:10.1f} us {read / took * 1e-12:8.4f} TB/s"
            )
            progress.update()
        else:
            progress.write(f"{name:<8} largest error {error(q, step(), cache, length):.1e}")
    progress.close()
    return found


def plot(found: dict[str, list[tuple[int, float]]], title: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in found.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("keys of a sequence")
    axes.set_ylabel("TB/s of keys and values")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--longest", type=int, help="keys; default: 4096, on a GPU 65536")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--split", default="auto", choices=("auto", "invariant"))
    parser.add_argument("--plot", type=pathlib.Path, help="a file for the plot")
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.longest = arguments.longest or (65536 if device == "cuda" else 4096)
    torch.manual_seed(0)
    with torch.inference_mode():
        found = measure(arguments, device, torch.bfloat16)
    if arguments.plot and found:
        title = f"decode, {arguments.batch} sequences, heads {HEADS_Q}/{HEADS_K}, {device}"
        plot(found, title, arguments.plot)
        print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    main()
