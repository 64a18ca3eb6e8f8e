"""What each unit of the GPU does during the main kernel of our calls and of peers', and of every
softmax of the Ampere forward.

    FA3_SO=... python benchmarks/utilisation.py --out benchmarks/results/h200_utilisation.jsonl

Needs ncu with the right to read counters. Of each call the longest kernel is shown. Percentages are
of the unit's peak: pipes and issue slots while a multiprocessor is active, DRAM and L2 over the
kernel's time. Bank conflicts are the share of shared-memory wavefronts that only a conflict made
necessary."""

from __future__ import annotations

import counters
import torch
from pantile.bench import cases, peers, sweep

ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
# column -> metric
PERCENT = {
    "tensor": f"sm__pipe_tensor_cycles_active.{ACTIVE}",
    "FMA": f"sm__inst_executed_pipe_fma.{ACTIVE}",
    "ALU": f"sm__inst_executed_pipe_alu.{ACTIVE}",
    "MUFU": f"sm__inst_executed_pipe_xu.{ACTIVE}",
    "issue": f"sm__inst_issued.{ACTIVE}",
    "shared": f"l1tex__data_pipe_lsu_wavefronts.{ELAPSED}",
    "L2": f"lts__t_sectors.{ELAPSED}",
    "DRAM": f"dram__throughput.{ELAPSED}",
}
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CYCLES, TIME = "sm__cycles_elapsed.avg", "gpu__time_duration.sum"
METRICS = [*PERCENT.values(), CONFLICTS, WAVEFRONTS, CYCLES, TIME]

LENGTH = 4096
OURS, GEMM = "pantile", "cuBLAS, 8192^3"


def case_names() -> list[str]:
    """Implementation | pass | dtype | head dim | mask."""
    found = [f"{GEMM}|forward|bfloat16|8192|full"]
    grid = [(64, "full"), (128, "full"), (128, "causal"), (256, "full")]
    for name in (OURS, "FA3"):
        found += [f"{name}|forward|bfloat16|{d}|{mask}" for d, mask in grid]
    found += [f"{name}|forward|bfloat16|128|full" for name in ("cuDNN (torch)", "FA2 (torch)")]
    found += [f"{OURS}|backward|bfloat16|{d}|full" for d in (64, 128, 256)]
    found += [f"{n}|backward|bfloat16|128|full" for n in ("cuDNN (torch)", "FA2 (torch)")]
    found += [f"{name}|forward|float8|128|full" for name in (OURS, "FA3")]
    softmax = [f"{OURS}, {variant}" for variant in sweep.SOFTMAX_VARIANTS]
    return found + [f"{name}|forward|bfloat16|{d}|full" for name in softmax for d in (64, 128)]


def make(name: str):
    """The call of a case, or why there is none."""
    implementation, what, dtype, head_dim, mask = name.split("|")
    if implementation == GEMM:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        return lambda: a @ a
    d = int(head_dim)
    heads = 2048 // d
    case = cases.Case(name, 16384 // LENGTH, heads, heads, d, LENGTH, mask == "causal")
    problem = sweep.make_problem(case, what, sweep.Setup("cuda", "auto", dtype, ()))
    if implementation.startswith(OURS):
        backend = "auto" if implementation == OURS else "ampere"
        made = sweep.ours(problem, backend, implementation)
    else:
        made = peers.GPU_PEERS[implementation](implementation, problem)
    return made if isinstance(made, str) else lambda: made.call(1)


def row_of(name: str, launches: list[dict]) -> dict:
    implementation, what, dtype, head_dim, mask = name.split("|")
    longest = max(launches, key=lambda launch: launch[TIME] or 0.0)
    conflicts = None
    if longest[WAVEFRONTS] and longest[CONFLICTS] is not None:
        conflicts = round(longest[CONFLICTS] / longest[WAVEFRONTS], 5)
    short = {"bfloat16": "bf16", "float8": "FP8"}[dtype]
    gemm = implementation == GEMM
    return {
        "kind": "utilisation",
        "implementation": implementation,
        "case": short if gemm else f"{short} {what} d{head_dim} {mask}",
        "kernel": longest["kernel"][:120],
        "percent": {
            column: None if longest[metric] is None else round(longest[metric], 1)
            for column, metric in PERCENT.items()
        },
        "bank_conflicts": conflicts,
        "ghz": round(longest[CYCLES] / longest[TIME], 3),
        "us": round(longest[TIME] / 1e3, 1),
    }


def rows_of(found: dict[str, list[dict]]) -> list[dict]:
    return [row_of(name, launches) for name, launches in found.items()]


if __name__ == "__main__":
    counters.report(__doc__, case_names(), METRICS, make, rows_of, "utilisation.jsonl")
