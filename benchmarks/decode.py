"""Decode over a KV cache beside FlashAttention-3, FlashInfer and FlashMLA, whichever are installed.

    python benchmarks/decode.py --out benchmarks/results/h200_decode.jsonl
    python benchmarks/decode.py --grid short          # a few cells

Microseconds of one step and TB/s of keys and values, counted once. Every contender has its calls in
a CUDA graph and is timed by replays, interleaved in one process. The L2 is cold: a graph cycles
through as many caches as hold 200 MB and more. Peers are taken at the best of their settings, which
the line names: FA3 over num_splits and pages, FlashInfer with its plan outside of the clock
(`FlashInfer`) and, by the host's clock, inside (`FlashInfer, plan + run`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator

import pantile
import torch
from pantile.bench import measure
from pantile.bench.measure import Contender

COLD_BYTES = 200 * 10**6
MOST_BYTES = 24 * 10**9  # of one cache
FA3_MODULES = ("tokenspeed_fa3.flash_attn_interface", "flash_attn_interface")
FLASH_MLA_MODULES = ("sgl_flash_mla", "tokenspeed_flashmla", "flash_mla")
FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32)  # 0: its own rule
SPLITS = ("auto", "invariant")


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    keys: int
    heads_q: int
    heads_k: int
    page: int  # 0: dense
    head_dim: int = 128
    head_dim_v: int = 128
    format: str = "bf16"
    lengths: str = "equal"  # or ragged: uniform in 0..2 keys; or one long: half the keys in one
    queries: int = 1

    @property
    def latent(self) -> bool:
        return self.head_dim == 576

    @property
    def element_bytes(self) -> int:
        return 2 if self.format == "bf16" else 1

    def row_bytes(self) -> int:
        """Of one key and value of all heads, scales included."""
        width = self.head_dim if self.latent else self.head_dim + self.head_dim_v
        scales = 0 if self.format == "bf16" else 4 if self.latent else 8
        return self.heads_k * (width * self.element_bytes + scales)

    def used(self) -> list[int]:
        if self.lengths == "ragged":
            generator = torch.Generator().manual_seed(5)
            draws = torch.randint(0, 2 * self.keys + 1, (self.batch,), generator=generator)
            draws = (draws * (self.batch * self.keys / max(int(draws.sum()), 1))).long()
            return draws.tolist()
        if self.lengths == "one long":
            rest = self.batch * self.keys // 2 // max(self.batch - 1, 1)
            return [self.batch * self.keys - rest * (self.batch - 1), *[rest] * (self.batch - 1)]
        return [self.keys] * self.batch


def cells(grid: str) -> Iterator[Cell]:
    heads = ((32, 8), (64, 8), (32, 32), (8, 1))
    if grid == "short":
        for batch, keys in ((1, 1024), (1, 8192), (1, 65536), (32, 4096), (128, 1024)):
            yield Cell(batch, keys, 32, 8, 64)
        for format_ in ("e4m3", "int8"):
            yield Cell(32, 4096, 32, 8, 64, format=format_)
        yield Cell(32, 4096, 32, 8, 64, lengths="ragged")
        yield Cell(32, 4096, 32, 8, 64, lengths="one long")
        yield Cell(128, 4096, 128, 1, 64, 576, 512)
        return
    for batch in (1, 8, 32, 128):
        for keys in (1024, 4096, 16384, 65536, 262144):
            for heads_q, heads_k in heads:
                for page in (0, 16, 64):
                    cell = Cell(batch, keys, heads_q, heads_k, page)
                    if batch * keys * cell.row_bytes() <= MOST_BYTES:
                        yield cell
    for format_ in ("e4m3", "int8"):
        for batch, keys in ((1, 65536), (8, 16384), (32, 4096), (128, 4096)):
            yield Cell(batch, keys, 32, 8, 64, format=format_)
    for lengths in ("ragged", "one long"):
        for page in (0, 64):
            yield Cell(32, 8192, 32, 8, page, lengths=lengths)
    for page in (1, 8):
        yield Cell(32, 4096, 32, 8, page)
    for queries in (2, 4, 8):
        yield Cell(8, 32768, 64, 8, 64, queries=queries)
    for heads_q, keys in ((16, 4096), (128, 4096), (128, 32768)):
        yield Cell(128 if keys < 32768 else 32, keys, heads_q, 1, 64, 576, 512)


class Inputs:
    """As many caches of a cell as make the L2 cold, each with queries of its own."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.used = cell.used()
        bytes_ = sum(self.used) * cell.row_bytes()
        self.count = max(1, -(-COLD_BYTES // max(bytes_, 1)))
        self.count = min(self.count, 64)
        self.bytes = bytes_
        self.lengths = torch.tensor(self.used, dtype=torch.int32, device="cuda")
        self.sets = [self._make() for _ in range(self.count)]

    def _make(self):
        cell = self.cell
        most = max(self.used)
        form = {
            "head_dim_v": cell.head_dim_v,
            "device": "cuda",
            "latent": cell.latent,
            "dtype": {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}[
                cell.format
            ],
        }
        if cell.page:
            columns = -(-most // cell.page)
            needed = [-(-length // cell.page) for length in self.used]
            names = torch.randperm(sum(needed), device="cuda", dtype=torch.int32)
            table = torch.zeros(cell.batch, columns, dtype=torch.int32, device="cuda")
            start = 0
            for row, count in enumerate(needed):
                table[row, :count] = names[start : start + count]
                start += count
            pages = sum(needed)
            cache = pantile.KVCache.paged(
                pages, cell.page, cell.heads_k, cell.head_dim, block_table=table, **form
            )
        else:
            cache = pantile.KVCache.dense(cell.batch, most, cell.heads_k, cell.head_dim, **form)
        for x, scale in ((cache.k, cache.scale_k), (cache.v, cache.scale_v)):
            if x is None:
                continue
            fill(x)
            if scale is not None:
                scale.fill_(0.02 if cell.format == "int8" else 1.0)
        q = torch.randn(
            (cell.batch, cell.queries, cell.heads_q, cell.head_dim),
            device="cuda",
            dtype=torch.bfloat16,
        )
        return q, cache


def fill(x: torch.Tensor) -> None:
    """Random numbers, a block at a time."""
    for block in x.split(max(1, 2**26 // max(x[0].numel(), 1))):
        values = torch.randn(block.shape, device="cuda")
        block.copy_((values * 40).clamp(-127, 127) if x.dtype is torch.int8 else values)


def graphed(name: str, calls: list[Callable[[], object]]) -> Contender:
    """Replays of a graph with one call for each set of inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()

    def replay(n: int) -> None:
        for _ in range(n):
            graph.replay()

    return Contender(name, replay)


def ours(inputs: Inputs, split: str, scheduled: bool) -> Contender:
    calls = []
    for q, cache in inputs.sets:
        arguments = {"split": split, "causal": True}
        if inputs.cell.latent:
            arguments["scale"] = 192**-0.5
        if scheduled:
            arguments["schedule"] = pantile.decode_schedule(q, cache, inputs.lengths, split=split)
        calls.append(functools.partial(pantile.decode, q, cache, inputs.lengths, **arguments))
    name = "pantile" if split == "auto" else f"pantile, {split}"
    return graphed(name + (", schedule apart" if scheduled else ""), calls)


# ---- peers: contenders, or the reason why there are none


def first_module(names: tuple[str, ...]):
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def fa3(inputs: Inputs) -> list[Contender] | str:
    module = first_module(FA3_MODULES)
    cell = inputs.cell
    if module is None:
        return "FA3 is not installed"
    if cell.latent or cell.format != "bf16":
        return "measured in bf16 and up to head dim 256 only"
    found = []
    for splits in FA3_SPLITS:
        calls = [
            functools.partial(
                module.flash_attn_with_kvcache,
                q,
                cache.k,
                cache.v,
                cache_seqlens=inputs.lengths,
                page_table=cache.block_table,
                causal=True,
                num_splits=splits,
            )
            for q, cache in inputs.sets
        ]
        found.append(graphed(f"FA3, {splits} splits" if splits else "FA3", calls))
    return found


def flashinfer(inputs: Inputs) -> list[Contender] | str:
    module = first_module(("flashinfer",))
    cell = inputs.cell
    if module is None:
        return "FlashInfer is not installed"
    if cell.latent or cell.format != "bf16" or cell.queries > 1 or not cell.page:
        return "measured in bf16, with pages and one query only"
    calls, plans = [], []
    for q, cache in inputs.sets:
        needed = (inputs.lengths + cell.page - 1) // cell.page
        bounds = torch.zeros(cell.batch + 1, dtype=torch.int32, device="cuda")
        bounds[1:] = needed.cumsum(0)
        columns = torch.arange(cache.block_table.shape[1], device="cuda")
        names = cache.block_table[columns[None] < needed[:, None]]
        last = (inputs.lengths - 1) % cell.page + 1
        space = torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            space,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=bounds.clone(),
            paged_kv_indices_buffer=names.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        plan = functools.partial(
            wrapper.plan,
            bounds,
            names,
            last,
            cell.heads_q,
            cell.heads_k,
            cell.head_dim,
            cell.page,
            data_type=torch.bfloat16,
        )
        plan()
        plans.append(plan)
        calls.append(functools.partial(wrapper.run, q[:, 0], (cache.k, cache.v)))

    def both(n: int) -> None:
        for _ in range(n):
            for plan, call in zip(plans, calls, strict=True):
                plan()
                call()

    return [graphed("FlashInfer", calls), Contender("FlashInfer, plan + run", both, wall=True)]


def flash_mla(inputs: Inputs) -> list[Contender] | str:
    cell = inputs.cell
    if not cell.latent or cell.format != "bf16" or cell.page != 64:
        return "measured with a latent cache in bf16 and pages of 64 only"
    module = first_module(FLASH_MLA_MODULES)
    if module is None:
        return "FlashMLA is not installed"
    metadata, splits = module.get_mla_metadata(
        inputs.lengths, cell.queries * cell.heads_q // cell.heads_k, cell.heads_k
    )
    calls = [
        functools.partial(
            module.flash_mla_with_kvcache,
            q,
            cache.k,
            cache.block_table,
            inputs.lengths,
            cell.head_dim_v,
            metadata,
            splits,
            softmax_scale=192**-0.5,
            causal=True,
        )
        for q, cache in inputs.sets
    ]
    return [graphed("FlashMLA", calls)]


PEERS = {"FA3": fa3, "FlashInfer": flashinfer, "FlashMLA": flash_mla}


# ---- lines


def error_of(inputs: Inputs) -> float:
    """Relative, of the first sequence's last query against float32 attention."""
    q, cache = inputs.sets[0]
    cell, length = inputs.cell, inputs.used[0]
    scale = 192**-0.5 if cell.latent else cell.head_dim**-0.5
    o = pantile.decode(q, cache, inputs.lengths, scale=scale)
    at = cache.block_table[0].long() if cell.page else torch.zeros(1, dtype=torch.long).cuda()

    def rows(x, factor):
        picked = x.view(torch.int8)[at].view(x.dtype).float()
        picked = picked if factor is None else picked * factor[at].unsqueeze(-1)
        return picked.flatten(0, 1)[:length]

    k = rows(cache.k, cache.scale_k)
    v = k[..., : cell.head_dim_v] if cell.latent else rows(cache.v, cache.scale_v)
    group = cell.heads_q // cell.heads_k
    query = q[0, -1].float().reshape(cell.heads_k, group, -1)
    weights = torch.softmax(torch.einsum("hgd,jhd->hgj", query, k) * scale, -1)
    exact = torch.einsum("hgj,jhd->hgd", weights, v).reshape(cell.heads_q, -1)
    return float((o[0, -1].float() - exact).norm() / exact.norm())


def contenders_of(inputs: Inputs, absent: dict[str, str]) -> list[Contender]:
    running = []
    for split in SPLITS:
        for scheduled in (False, True):
            try:
                running.append(ours(inputs, split, scheduled))
            except (pantile.UnsupportedError, RuntimeError) as refusal:
                absent[f"pantile, {split}"] = str(refusal).splitlines()[0]
    for name, peer in PEERS.items():
        try:
            found = peer(inputs)
        except Exception as error:  # a peer's refusals have types of their own
            found = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        if isinstance(found, str):
            absent[name] = found
        else:
            running += found
    return running


def line_of(cell: Cell) -> dict:
    torch.manual_seed(0)
    inputs = Inputs(cell)
    absent: dict[str, str] = {}
    running = contenders_of(inputs, absent)
    measure.interleave(running, rounds=5, round_ms=8.0)
    us = {c.name: round(c.median() * 1e3 / inputs.count, 3) for c in running}
    best = {}
    for name in ("pantile", *PEERS):
        # Not ours with other bits, nor FlashInfer with its host's work.
        own = {
            n: t
            for n, t in us.items()
            if (n == name or n.startswith(f"{name}, "))
            and not n.startswith(("pantile, invariant", "FlashInfer, plan"))
        }
        if own:
            setting = min(own, key=own.__getitem__)
            best[name] = {"setting": setting, "us": own[setting]}
    line = {
        "kind": "timing",
        **dataclasses.asdict(cell),
        "mb": round(inputs.bytes / 1e6, 3),
        "caches": inputs.count,
        "us": us,
        "tb_s": {n: round(inputs.bytes / t * 1e-6, 4) for n, t in us.items() if t > 0},
        "best": best,
        "absent": absent,
    }
    if "pantile" in best:
        line["error"] = error_of(inputs)
        peers = [best[name]["us"] for name in PEERS if name in best]
        line["ahead_of_best_peer"] = round(min(peers) / best["pantile"]["us"], 3) if peers else None
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--grid", default="full", choices=("full", "short"))
    given = parser.parse_args()
    lines = [
        {
            "kind": "run",
            "commit": measure.commit(),
            "commands": [measure.command()],
            "torch": torch.__version__,
            "state_before": measure.gpu_state(),
        }
    ]
    with torch.inference_mode():
        for cell in cells(given.grid):
            line = line_of(cell)
            print(json.dumps(line), flush=True)
            lines.append(line)
            torch.cuda.empty_cache()
    if given.out:
        given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
