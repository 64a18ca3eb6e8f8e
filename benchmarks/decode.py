"""Decode over a KV cache beside FlashAttention-3, FlashInfer, FlashMLA and torch's SDPA, whichever
are installed.

    python benchmarks/decode.py --out benchmarks/results/h200_decode.jsonl
    python benchmarks/decode.py --grid short          # a few cells
    python benchmarks/decode.py --grid bars           # those that have a bar, in a minute

Microseconds of one step and TB/s of keys and values, counted once. Every contender has its calls in
a CUDA graph and is timed by replays, interleaved in one process. The L2 is cold: a graph cycles
through as many caches as hold 200 MB and more. Peers are taken at the best of their settings, which
the line names: FA3 over num_splits and pages, FlashInfer with its plan outside of the clock
(`FlashInfer`) and, by the host's clock, inside (`FlashInfer, plan + run`). SDPA (its flash and its
cuDNN backend) takes dense caches of equal lengths only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator

import pantile
import torch
from pantile.bench import cases, harness
from pantile.bench.measure import Contender, captured, repeat

COLD_BYTES = 200 * 10**6
MOST_BYTES = 24 * 10**9  # of one cache
MOST_CACHES = 64
FA3_SPLITS = (0, 1, 2, 4, 8, 16, 32)  # 0: its own rule
LATENT_SCALE = 192**-0.5
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
INT8_SCALE = 0.02


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    keys: int
    heads_q: int = 32
    heads_k: int = 8
    page: int = 64  # 0: dense
    head_dim: int = 128
    head_dim_v: int = 128
    format: str = "bf16"
    lengths: str = "equal"  # or ragged: uniform in 0..2 keys; or one long: half the keys in one
    queries: int = 1
    prefix: int = 0  # keys that all sequences share, whole pages

    @property
    def latent(self) -> bool:
        return self.head_dim == 576

    @property
    def scale(self) -> float:
        return LATENT_SCALE if self.latent else self.head_dim**-0.5

    def row_bytes(self) -> int:
        """Of one key and value of all heads, scales included."""
        width = self.head_dim if self.latent else self.head_dim + self.head_dim_v
        scales = 0 if self.format == "bf16" else 4 if self.latent else 8
        return self.heads_k * (width * DTYPES[self.format].itemsize + scales)

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
    """Of [[decode.GRID]] in the catalogue, as far as a cache fits."""
    for lists in cases.CATALOGUE["decode"][grid]:
        for values in itertools.product(*lists.values()):
            named = dict(zip(lists, values, strict=True))
            for pair, (first, second) in (
                ("size", ("batch", "keys")),
                ("heads", ("heads_q", "heads_k")),
            ):
                if pair in named:
                    named[first], named[second] = named.pop(pair)
            cell = Cell(**named)
            if cell.batch * cell.keys * cell.row_bytes() <= MOST_BYTES:
                yield cell


class Inputs:
    """As many caches of a cell as make the L2 cold, each with queries of its own."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.used = cell.used()
        shared = cell.prefix * (cell.batch - 1)  # counted once
        self.bytes = (sum(self.used) - shared) * cell.row_bytes()
        self.count = min(max(1, -(-COLD_BYTES // max(self.bytes, 1))), MOST_CACHES)
        self.lengths = torch.tensor(self.used, dtype=torch.int32, device="cuda")
        self.sets = [(self._queries(), self._cache()) for _ in range(self.count)]

    def _queries(self) -> torch.Tensor:
        shape = (self.cell.batch, self.cell.queries, self.cell.heads_q, self.cell.head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def _cache(self) -> pantile.KVCache:
        cell = self.cell
        form = {"head_dim_v": cell.head_dim_v, "device": "cuda", "latent": cell.latent}
        form["dtype"] = DTYPES[cell.format]
        heads = (cell.heads_k, cell.head_dim)
        if cell.page:
            table = self._block_table()
            pages = sum(-(-length // cell.page) for length in self.used)
            cache = pantile.KVCache.paged(pages, cell.page, *heads, block_table=table, **form)
        else:
            cache = pantile.KVCache.dense(cell.batch, max(self.used), *heads, **form)
        for x in (cache.k, cache.v):
            if x is not None:
                fill(x)
        for scale in (cache.scale_k, cache.scale_v):
            if scale is not None:
                scale.fill_(INT8_SCALE if cell.format == "int8" else 1.0)
        return cache

    def _block_table(self) -> torch.Tensor:
        """Pages at random places of the pool."""
        needed = [-(-length // self.cell.page) for length in self.used]
        names = torch.randperm(sum(needed), device="cuda", dtype=torch.int32)
        table = torch.zeros(self.cell.batch, max(needed), dtype=torch.int32, device="cuda")
        for row, part in enumerate(names.split(needed)):
            table[row, : len(part)] = part
        shared = self.cell.prefix // self.cell.page if self.cell.prefix else 0
        table[:, :shared] = table[0, :shared].clone()
        return table

    def graphed(self, name: str, call: Callable, *more, **keywords) -> Contender:
        """``call(q, cache, ...)`` of every set."""
        calls = [functools.partial(call, q, cache, *more, **keywords) for q, cache in self.sets]
        return graphed(name, calls)


def fill(x: torch.Tensor) -> None:
    """Random numbers, a block at a time."""
    for block in x.split(max(1, 2**26 // max(x[0].numel(), 1))):
        values = torch.randn(block.shape, device="cuda")
        block.copy_((values * 40).clamp(-127, 127) if x.dtype is torch.int8 else values)


def graphed(name: str, calls: list[Callable[[], object]]) -> Contender:
    """Replays of a graph with one call for each set of inputs."""

    def once() -> None:
        for call in calls:
            call()

    return Contender(name, repeat(captured(once, torch.cuda.Stream()).replay))


def ours(inputs: Inputs, split: str, scheduled: bool) -> Contender:
    calls = []
    for q, cache in inputs.sets:
        arguments = {"split": split, "causal": True, "scale": inputs.cell.scale}
        if scheduled:
            arguments["schedule"] = pantile.decode_schedule(q, cache, inputs.lengths, split=split)
        calls.append(functools.partial(pantile.decode, q, cache, inputs.lengths, **arguments))
    name = "pantile" if split == "auto" else f"pantile, {split}"
    return graphed(name + (", schedule apart" if scheduled else ""), calls)


def shared_prefix(inputs: Inputs) -> Contender | str:
    cell = inputs.cell
    if cell.prefix == 0:
        return "the sequences share no keys"
    members = torch.tensor([0, cell.batch], dtype=torch.int32, device="cuda")
    arguments = {
        "cu_members": members,
        "max_members": cell.batch,
        "prefix_lengths": torch.tensor([cell.prefix], dtype=torch.int32, device="cuda"),
        "scale": cell.scale,
    }
    return inputs.graphed(
        "pantile, shared prefix",
        lambda q, cache: pantile.decode_shared_prefix(q, cache, inputs.lengths, **arguments),
    )


# ---- peers: contenders, or the reason why there are none


def first_module(*names: str):
    """The first that is installed; its ImportError says which was looked for last."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(names[-1])


def fa3(inputs: Inputs) -> list[Contender] | str:
    if inputs.cell.latent or inputs.cell.format != "bf16":
        return "measured in bf16 and up to head dim 256 only"
    module = first_module("tokenspeed_fa3.flash_attn_interface", "flash_attn_interface")

    def call(q, cache, splits: int) -> object:
        return module.flash_attn_with_kvcache(
            *(q, cache.k, cache.v),
            cache_seqlens=inputs.lengths,
            page_table=cache.block_table,
            causal=True,
            num_splits=splits,
        )

    names = {splits: f"FA3, {splits} splits" if splits else "FA3" for splits in FA3_SPLITS}
    return [inputs.graphed(name, call, splits) for splits, name in names.items()]


def flashinfer_plan(module, inputs: Inputs, q, cache) -> tuple[Callable, Callable]:
    """(plan, run) of FlashInfer's wrapper over one cache."""
    cell = inputs.cell
    needed = (inputs.lengths + cell.page - 1) // cell.page
    bounds = torch.zeros(cell.batch + 1, dtype=torch.int32, device="cuda")
    bounds[1:] = needed.cumsum(0)
    columns = torch.arange(cache.block_table.shape[1], device="cuda")
    names = cache.block_table[columns[None] < needed[:, None]]
    last = (inputs.lengths - 1) % cell.page + 1
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=bounds.clone(),
        paged_kv_indices_buffer=names.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    shape = (cell.heads_q, cell.heads_k, cell.head_dim, cell.page)
    plan = functools.partial(wrapper.plan, bounds, names, last, *shape, data_type=torch.bfloat16)
    plan()
    return plan, functools.partial(wrapper.run, q[:, 0], (cache.k, cache.v))


def flashinfer(inputs: Inputs) -> list[Contender] | str:
    cell = inputs.cell
    if cell.latent or cell.format != "bf16" or cell.queries > 1 or not cell.page:
        return "measured in bf16, with pages and one query only"
    module = first_module("flashinfer")
    pairs = [flashinfer_plan(module, inputs, q, cache) for q, cache in inputs.sets]

    def both() -> None:
        for plan, run in pairs:
            plan()
            run()

    alone = graphed("FlashInfer", [run for _, run in pairs])
    return [alone, Contender("FlashInfer, plan + run", repeat(both), wall=True)]


def flash_mla(inputs: Inputs) -> list[Contender] | str:
    cell = inputs.cell
    if not cell.latent or cell.format != "bf16" or cell.page != 64:
        return "measured with a latent cache in bf16 and pages of 64 only"
    module = first_module("sgl_flash_mla", "tokenspeed_flashmla", "flash_mla")
    rows = cell.queries * cell.heads_q // cell.heads_k
    schedule = module.get_mla_metadata(inputs.lengths, rows, cell.heads_k)

    def call(q, cache) -> object:
        where = (cache.block_table, inputs.lengths, cell.head_dim_v, *schedule)
        return module.flash_mla_with_kvcache(
            q, cache.k, *where, softmax_scale=LATENT_SCALE, causal=True
        )

    return [inputs.graphed("FlashMLA", call)]


def sdpa(name: str, backend: str, inputs: Inputs) -> list[Contender] | str:
    cell = inputs.cell
    plain = cell.format == "bf16" and not cell.latent and cell.queries == 1
    if not plain or cell.page or cell.lengths != "equal":
        return "measured in bf16, dense, with equal lengths and one query only"
    chosen = torch.nn.attention.SDPBackend[backend]

    def call(q, cache) -> object:
        with torch.nn.attention.sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, cache.k, cache.v)), enable_gqa=True
            )

    return [inputs.graphed(name, call)]


PEERS = {
    "FA3": fa3,
    "FlashInfer": flashinfer,
    "FlashMLA": flash_mla,
    "SDPA": functools.partial(sdpa, "SDPA", "FLASH_ATTENTION"),
    "cuDNN": functools.partial(sdpa, "cuDNN", "CUDNN_ATTENTION"),
}


# ---- lines

NOT_BEST = ("pantile, invariant", "pantile, shared", "FlashInfer, plan")


def error_of(inputs: Inputs) -> float:
    """Relative, of the first sequence's last query against float32 attention."""
    q, cache = inputs.sets[0]
    cell, length = inputs.cell, inputs.used[0]
    o = pantile.decode(q, cache, inputs.lengths, scale=cell.scale)
    at = cache.block_table[0].long() if cell.page else torch.zeros(1, dtype=torch.long).cuda()

    def rows(x, factor):
        picked = x.view(torch.int8)[at].view(x.dtype).float()
        picked = picked if factor is None else picked * factor[at].unsqueeze(-1)
        return picked.flatten(0, 1)[:length]

    k = rows(cache.k, cache.scale_k)
    v = k[..., : cell.head_dim_v] if cell.latent else rows(cache.v, cache.scale_v)
    query = q[0, -1].float().unflatten(0, (cell.heads_k, -1))
    weights = torch.softmax(torch.einsum("hgd,jhd->hgj", query, k) * cell.scale, -1)
    exact = torch.einsum("hgj,jhd->hgd", weights, v).flatten(0, 1)
    return float((o[0, -1].float() - exact).norm() / exact.norm())


def best_of(us: dict[str, float]) -> dict[str, dict]:
    """The best setting of each implementation: not ours with other bits or a prefix that it is
    told, nor FlashInfer with the work of its host."""
    best = {}
    for name in ("pantile", *PEERS):
        own = {n: t for n, t in us.items() if n == name or n.startswith(f"{name}, ")}
        for other in [n for n in own if n.startswith(NOT_BEST)]:
            del own[other]
        if own:
            setting = min(own, key=own.__getitem__)
            best[name] = {"setting": setting, "us": own[setting]}
    return best


def line_of(cell: Cell) -> dict:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    inputs = Inputs(cell)
    absent: dict[str, str] = {}
    mine = {
        f"pantile, {split}{', schedule apart' if scheduled else ''}": functools.partial(
            ours, inputs, split, scheduled
        )
        for split in ("auto", "invariant")
        for scheduled in (False, True)
    }
    mine["pantile, shared prefix"] = functools.partial(shared_prefix, inputs)
    running = harness.running(mine, absent, harness.OURS_REFUSES)
    theirs = {name: functools.partial(peer, inputs) for name, peer in PEERS.items()}
    running += harness.running(theirs, absent)
    ms = harness.medians(running)
    us = {name: round(t * 1e3 / inputs.count, 3) for name, t in ms.items()}
    best = best_of(us)
    line = {"kind": "timing", **dataclasses.asdict(cell), "mb": round(inputs.bytes / 1e6, 3)}
    line |= {"caches": inputs.count, "us": us, "best": best, "absent": absent}
    flop = 2 * sum(inputs.used) * cell.queries * cell.heads_q * (cell.head_dim + cell.head_dim_v)
    line["tflop_s"] = {n: round(flop / t * 1e-6, 2) for n, t in us.items() if t > 0}
    line["tb_s"] = {n: round(inputs.bytes / t * 1e-6, 4) for n, t in us.items() if t > 0}
    if "pantile" in best:
        line["error"] = error_of(inputs)
        peers = [best[name]["us"] for name in PEERS if name in best]
        line["ahead_of_best_peer"] = harness.quotient(
            min(peers, default=None), best["pantile"]["us"]
        )
    return line


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--grid", default="full", choices=("full", "short", "bars"))
    given = parser.parse_args()
    harness.require_gpu()
    with torch.inference_mode():
        lines = (line_of(cell) for cell in cells(given.grid))
        harness.emit(given.out, itertools.chain([harness.header()], lines))


if __name__ == "__main__":
    main()
