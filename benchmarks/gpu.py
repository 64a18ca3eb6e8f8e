"""What hopper.py and ampere.py share: run cases, print a table against the best peer of each cell,
write JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Callable
from dataclasses import asdict

import cases
import measure
import pantile
import peers
import torch
from cases import Case
from measure import Contender

OURS = "pantile"


def packed(case: Case, heads: int, dtype) -> torch.Tensor:
    return torch.randn(sum(case.lengths), heads, case.head_dim, device="cuda", dtype=dtype)


def tensors(case: Case, dtype):
    if case.lengths is not None:
        q, k, v = (packed(case, h, dtype) for h in (case.heads_q, case.heads_k, case.heads_k))
        ends = torch.tensor(case.lengths).cumsum(0)
        cu_seqlens = torch.cat([torch.zeros(1), ends]).to("cuda", torch.int32)
        return q, k, v, torch.randn_like(q), cu_seqlens
    q, k, v = (
        torch.randn(case.batch, case.seqlen, h, case.head_dim, device="cuda", dtype=dtype)
        for h in (case.heads_q, case.heads_k, case.heads_k)
    )
    return q, k, v, torch.randn_like(q), None


def ours(case: Case, what: str, q, k, v, grad_o, cu_seqlens, options) -> Contender | str:
    keywords = {"causal": case.causal, "options": options}
    if case.window_left is not None:
        keywords["window"] = (case.window_left, 0)
    q, k, v = (x.detach().requires_grad_(what == "backward") for x in (q, k, v))

    def forward():
        if cu_seqlens is None:
            return pantile.attention(q, k, v, **keywords)
        return pantile.varlen_attention(
            q, k, v, cu_seqlens, cu_seqlens, case.seqlen, case.seqlen, **keywords
        )

    try:
        o = forward()
        if what == "backward":
            torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    if what == "forward":
        return Contender(OURS, peers.repeat(forward))
    return Contender(
        OURS, peers.repeat(lambda: torch.autograd.grad(o, (q, k, v), grad_o, retain_graph=True))
    )


def measure_case(case: Case, what: str, dtype, backend: str, wanted: list[str], arguments) -> dict:
    """One line of the results file: every contender's milliseconds and TFLOP/s."""
    q, k, v, grad_o, cu_seqlens = tensors(case, dtype)
    candidates: dict[str, Contender | str] = {
        OURS: ours(case, what, q, k, v, grad_o, cu_seqlens, pantile.Options(backend=backend))
    }
    for name in peers.TORCH_BACKENDS:
        if name in wanted:
            candidates[name] = peers.torch_sdpa(name, case, what, q, k, v, grad_o)
    if "FA3" in wanted:
        candidates["FA3"] = (
            peers.fa3_forward(case, q, k, v, cu_seqlens)
            if what == "forward"
            else peers.fa3_backward(case)
        )
    running = [c for c in candidates.values() if isinstance(c, Contender)]
    row = {
        "kind": "timing",
        "case": case.name,
        "pass": what,
        "dtype": str(dtype).removeprefix("torch."),
        **{k: v for k, v in asdict(case).items() if k not in ("name", "lengths")},
        "absent": {n: c for n, c in candidates.items() if isinstance(c, str)},
        "results": {},
    }
    for flushed in (False, True) if arguments.flushed else (False,):
        measure.interleave(
            running, rounds=arguments.rounds, round_ms=arguments.round_ms, flushed=flushed
        )
        key = "flushed" if flushed else "back_to_back"
        row["results"][key] = {
            c.name: {
                "ms": round(c.median(), 5),
                "ms_p20": round(c.percentile(0.2), 5),
                "ms_p80": round(c.percentile(0.8), 5),
                "tflops": round(case.flops(what) / c.median() / 1e9, 1),
            }
            for c in running
        }
    return row


def ratio(results: dict) -> tuple[float, str]:
    """Our speed over the best peer's, and that peer's name; NaN without either."""
    others = {n: r["ms"] for n, r in results.items() if n != OURS}
    if OURS not in results or not others:
        return math.nan, "-"
    best = min(others, key=others.get)
    return others[best] / results[OURS]["ms"], best


def print_row(row: dict, wanted: list[str]) -> None:
    for key, results in row["results"].items():
        value, best = ratio(results)
        columns = "".join(
            f"{results[n]['tflops']:>8.0f}" if n in results else f"{'-':>8}"
            for n in [OURS, *wanted]
        )
        state = "" if key == "back_to_back" else " flushed"
        print(f"{row['case']:<26}{row['pass']:<10}{columns}{value:>8.3f}  {best}{state}")
    for name, reason in row["absent"].items():
        print(f"{'':<36}{name}: {reason[:110]}")
    sys.stdout.flush()


def summarise(rows: list[dict]) -> list[dict]:
    """Geometric mean and worst cell of the ratio to the best peer, per pass and cache state."""
    lines = []
    keys = {(r["pass"], k) for r in rows for k in r["results"]}
    for what, key in sorted(keys):
        values = [
            (ratio(r["results"][key])[0], r["case"])
            for r in rows
            if r["pass"] == what and key in r["results"]
        ]
        values = [v for v in values if not math.isnan(v[0])]
        if values:
            mean = math.exp(sum(math.log(v) for v, _ in values) / len(values))
            worst, name = min(values)
            lines.append(
                {
                    "kind": "summary",
                    "pass": what,
                    "state": key,
                    "cells": len(values),
                    "geometric_mean": round(mean, 4),
                    "worst": round(worst, 4),
                    "worst_case": name,
                    "below_one": sum(v < 1 for v, _ in values),
                }
            )
    return lines


def parser(doc: str, wanted: list[str], out: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--passes", default="forward,backward")
    p.add_argument("--head-dims", default="", help="comma-separated; default: the catalogue's")
    p.add_argument("--lengths", default="", help="comma-separated; default: the catalogue's")
    p.add_argument("--masks", default="full,causal")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    p.add_argument("--peers", default=",".join(wanted))
    p.add_argument("--no-special", action="store_true", help="only the grid")
    p.add_argument("--only-special", action="store_true", help="GQA, window, varlen, odd dims")
    p.add_argument("--flushed", action="store_true", help="time with a flushed L2 as well")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--round-ms", type=float, default=12.0)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results") / out)
    return p


def main(arguments, backend: str, extra: Callable[[], list[Case]]) -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; benchmarks/cpu.py measures the CPU backend")
    numbers = {
        "head_dims": [int(x) for x in arguments.head_dims.split(",") if x],
        "lengths": [int(x) for x in arguments.lengths.split(",") if x],
    }
    chosen = (
        [] if arguments.only_special else cases.grid(**numbers, masks=arguments.masks.split(","))
    )
    if not arguments.no_special:
        chosen += extra()
    wanted = [n for n in arguments.peers.split(",") if n]
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    header = {
        "kind": "run",
        "commit": measure.commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "backend": backend,
        "state_before": measure.gpu_state(),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {header['commit']}")
    print(
        f"{'case':<26}{'pass':<10}"
        + "".join(f"{n[:7]:>8}" for n in [OURS, *wanted])
        + f"{'ratio':>8}  best peer   (TFLOP/s)"
    )
    rows = []
    for what in arguments.passes.split(","):
        for case in chosen:
            row = measure_case(case, what, dtype, backend, wanted, arguments)
            print_row(row, wanted)
            rows.append(row)
    header["state_after"] = measure.gpu_state()
    summary = summarise(rows)
    for line in summary:
        print(
            f"{line['pass']}, {line['state']}: geometric mean {line['geometric_mean']:.3f} of "
            f"the best peer over {line['cells']} cells, worst {line['worst']:.3f} "
            f"({line['worst_case']}), {line['below_one']} below 1"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(r) + "\n" for r in [header, *rows, *summary]))
    print(f"wrote {arguments.out}")
