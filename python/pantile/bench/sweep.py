"""Cases times contenders: a table against the best peer of each case, and JSON lines.

Every script in benchmarks/ and ``python -m pantile bench`` end up here. A results file holds one
object a line: a "run" (commit, device, versions, clocks and power during the run), a "timing" for
each case and pass with every contender and the reason of each absent one, and a "summary" for each
pass and cache state.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import pantile
from pantile.bench import cases, check, measure, peers
from pantile.bench.cases import Case
from pantile.bench.measure import Contender
from pantile.bench.peers import FP8, Problem

OURS = "pantile"
DETERMINISTIC = "pantile, deterministic"  # the backward that gives equal bits every time
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8": FP8,
}


@dataclass(frozen=True)
class Setup:
    device: str  # cuda or cpu
    backend: str  # of pantile.Options
    dtype: str  # a key of DTYPES
    peers: tuple[str, ...]
    rounds: int = 5
    round_ms: float = 12.0
    flushed: bool = False
    deterministic: bool = False  # time our deterministic backward as well


# ---- one case


def _draw(case: Case, heads: int, setup: Setup) -> torch.Tensor:
    rows = (case.batch, case.seqlen) if case.lengths is None else (sum(case.lengths),)
    dtype = DTYPES[setup.dtype]
    if dtype == FP8:
        return torch.randn(*rows, heads, case.head_dim, device=setup.device).to(FP8)
    return torch.randn(*rows, heads, case.head_dim, device=setup.device, dtype=dtype)


def make_problem(case: Case, what: str, setup: Setup) -> Problem:
    q, k, v = (_draw(case, h, setup) for h in (case.heads_q, case.heads_k, case.heads_k))
    grad_o = torch.randn(q.shape, device=setup.device).to(
        torch.bfloat16 if q.dtype == FP8 else q.dtype
    )
    cu_seqlens = None
    if case.lengths is not None:
        ends = torch.tensor(case.lengths).cumsum(0)
        cu_seqlens = torch.cat([torch.zeros(1), ends]).to(setup.device, torch.int32)
    return Problem(case, what, q, k, v, grad_o, cu_seqlens)


# FP8: other exponentials, the quantiser in every call, and the same call on bfloat16.
FP8_VARIANTS = tuple(f"{OURS}, {what}" for what in ("mixed", "exp2", "quantising", "bfloat16"))


def ours_fp8(name: str, problem: Problem, backend: str) -> Contender | str:
    """Block-scaled, rotated, smoothed operands. But for two of the variants, what quantising costs
    is not in the time, as for peers."""
    if problem.cu_seqlens is not None:
        return "packed FP8 sequences are not measured"
    if problem.differentiates:
        return "FP8 backward is not measured"
    variant = name.removeprefix(f"{OURS}, ")
    exp = variant if variant in ("mixed", "exp2") else "code"
    keywords = {
        "causal": problem.case.causal,
        "options": pantile.Options(backend=backend, fp8_exp=exp),
    }
    if problem.case.window_left is not None:
        keywords["window"] = (problem.case.window_left, 0)
    source = [x.bfloat16() for x in (problem.q, problem.k, problem.v)]
    quantized = pantile.quantize(*source)
    call = {
        "bfloat16": lambda: pantile.attention(*source, **keywords),
        "quantising": lambda: pantile.attention(pantile.quantize(*source), **keywords),
    }.get(variant, lambda: pantile.attention(quantized, **keywords))
    call()
    return peers.contender(name, problem, call, lambda: (call(),))


def ours(problem: Problem, backend: str, deterministic: bool = False) -> Contender | str:
    case = problem.case
    name = DETERMINISTIC if deterministic else OURS
    keywords = {"causal": case.causal, "options": pantile.Options(backend=backend)}
    keywords["deterministic"] = deterministic
    if case.window_left is not None:
        keywords["window"] = (case.window_left, 0)
    leaves = problem.leaves() if problem.dtype != FP8 else []

    def forward():
        if problem.cu_seqlens is None:
            return pantile.attention(*leaves, **keywords)
        bounds = problem.cu_seqlens
        longest = case.seqlen
        return pantile.varlen_attention(*leaves, bounds, bounds, longest, longest, **keywords)

    try:
        if problem.dtype == FP8:
            return ours_fp8(name, problem, backend)
        return peers.differentiable(name, problem, forward, leaves, problem.grad_o)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return peers.first_line(error)


def _figures(contender: Contender, flops: float) -> dict:
    return {
        "ms": round(contender.median(), 5),
        "ms_p20": round(contender.percentile(0.2), 5),
        "ms_p80": round(contender.percentile(0.8), 5),
        "tflops": float(f"{flops / contender.median() / 1e9:.4g}"),
    }


def measure_case(case: Case, what: str, setup: Setup) -> dict:
    """One line of the results file: every contender's milliseconds and TFLOP/s."""
    problem = make_problem(case, what, setup)
    known = peers.of_device(setup.device)
    candidates: dict[str, Contender | str] = {OURS: ours(problem, setup.backend)}
    if setup.deterministic and what == "backward":
        candidates[DETERMINISTIC] = ours(problem, setup.backend, deterministic=True)
    if problem.dtype == FP8 and what == "forward":
        for name in FP8_VARIANTS:
            try:
                candidates[name] = ours_fp8(name, problem, setup.backend)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                candidates[name] = peers.first_line(error)
    for name in setup.peers:
        candidates[name] = known[name](name, problem)
    judge = check.Judge(problem)
    wrong = {}
    for name, candidate in candidates.items():
        if isinstance(candidate, Contender) and (reason := judge.wrong(candidate)):
            wrong[name] = candidates[name] = reason
    running = [c for c in candidates.values() if isinstance(c, Contender)]
    row = {
        "kind": "timing",
        "case": case.name,
        "pass": what,
        "dtype": setup.dtype,
        "float32_precision": torch.get_float32_matmul_precision(),
        **{k: v for k, v in asdict(case).items() if k not in ("name", "lengths")},
        "absent": {n: c for n, c in candidates.items() if isinstance(c, str)},
        "wrong": list(wrong),
        "results": {},
    }
    for flushed in (False, True) if setup.flushed else (False,):
        measure.interleave(running, rounds=setup.rounds, round_ms=setup.round_ms, flushed=flushed)
        key = "flushed" if flushed else "back_to_back"
        row["results"][key] = {c.name: _figures(c, case.flops(what)) for c in running}
    return row


# ---- what the numbers say


def is_peer(name: str) -> bool:
    """Our variants are named "pantile, ...": they are no peers."""
    return not name.startswith(OURS)


def ratio(results: dict) -> tuple[float, str]:
    """Our speed over the best peer's, and that peer's name; NaN without either."""
    others = {n: r["ms"] for n, r in results.items() if is_peer(n)}
    if OURS not in results or not others:
        return math.nan, "-"
    best = min(others, key=others.get)
    return others[best] / results[OURS]["ms"], best


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


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
            worst, name = min(values)
            lines.append(
                {
                    "kind": "summary",
                    "pass": what,
                    "state": key,
                    "cells": len(values),
                    "geometric_mean": round(geometric_mean([v for v, _ in values]), 4),
                    "worst": round(worst, 4),
                    "worst_case": name,
                    "below_one": sum(v < 1 for v, _ in values),
                }
            )
    return lines


def header(setup: Setup) -> dict:
    line = {
        "kind": "run",
        "commit": measure.commit(),
        "commands": [measure.command()],
        "torch": torch.__version__,
        "backend": setup.backend,
    }
    if setup.device == "cuda":
        return line | {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "peers": peers.versions(),
            "state_before": measure.gpu_state(),
        }
    cpu = next(device for device in pantile.devices() if device["type"] == "cpu")
    return line | {
        "cpu": cpu["name"],
        "isa": cpu["isa"],
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def run(
    chosen: list[Case], passes: list[str], setup: Setup, show: Callable[[dict], None]
) -> list[dict]:
    """Every line of the results file; `show` is called with each timing as it is made."""
    torch.manual_seed(0)
    first = header(setup)
    rows = []
    started = time.perf_counter()
    with measure.Monitor() as monitor:
        for what in passes:
            for case in chosen:
                rows.append(measure_case(case, what, setup))
                show(rows[-1])
    first["seconds"] = round(time.perf_counter() - started, 1)
    if setup.device == "cuda":
        first["during"] = monitor.summary
        first["state_after"] = measure.gpu_state()
    return [first, *rows, *summarise(rows)]


def write(path: pathlib.Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def joined(earlier: list[dict], lines: list[dict]) -> list[dict]:
    """The lines of one results file for two runs of the same build, one after the other."""
    rows = [line for line in [*earlier, *lines] if line["kind"] == "timing"]
    both = (earlier[0], lines[0])
    first = earlier[0] | {
        "commands": [command for run in both for command in run.get("commands", [])],
        "seconds": round(sum(run.get("seconds", 0.0) for run in both), 1),
    }
    return [first, *rows, *summarise(rows)]


# ---- what the scripts in benchmarks/ share


def print_row(row: dict, wanted: tuple[str, ...]) -> None:
    for key, results in row["results"].items():
        value, best = ratio(results)
        columns = "".join(
            f"{results[n]['tflops']:>8.0f}" if n in results else f"{'-':>8}"
            for n in [OURS, *wanted]
        )
        state = "" if key == "back_to_back" else " flushed"
        if OURS in results and DETERMINISTIC in results:
            share = results[OURS]["ms"] / results[DETERMINISTIC]["ms"]
            state += f", deterministic {results[DETERMINISTIC]['tflops']:.0f} ({share:.3f})"
        for name in FP8_VARIANTS:
            if name in results:
                state += f" {name.removeprefix(OURS + ', ')} {results[name]['tflops']:.0f}"
        print(f"{row['case']:<26}{row['pass']:<10}{columns}{value:>8.3f}  {best}{state}")
    for name, reason in row["absent"].items():
        print(f"{'':<36}{name}: {reason[:110]}")
    sys.stdout.flush()


def summary_text(line: dict) -> str:
    return (
        f"{line['pass']}, {line['state']}: geometric mean {line['geometric_mean']:.3f} of "
        f"the best peer over {line['cells']} cells, worst {line['worst']:.3f} "
        f"({line['worst_case']}), {line['below_one']} below 1"
    )


def parser(doc: str, wanted: list[str], out: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--passes", default="forward,backward")
    p.add_argument("--head-dims", default="", help="comma-separated; default: the catalogue's")
    p.add_argument("--lengths", default="", help="comma-separated; default: the catalogue's")
    p.add_argument("--masks", default="full,causal")
    p.add_argument("--dtype", default="bfloat16", choices=[*DTYPES])
    p.add_argument(
        "--float32-precision",
        default="highest",
        choices=["highest", "high", "medium"],
        help="torch's setting; it matters to float32",
    )
    p.add_argument(
        "--peers", default=",".join(wanted), help=f"all, or of: {', '.join(peers.GPU_PEERS)}"
    )
    p.add_argument("--no-special", action="store_true", help="only the grid")
    p.add_argument("--only-special", action="store_true", help="GQA, window, varlen, odd dims")
    p.add_argument("--flushed", action="store_true", help="time with a flushed L2 as well")
    p.add_argument(
        "--deterministic", action="store_true", help="time our deterministic backward as well"
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--round-ms", type=float, default=12.0)
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results") / out)
    p.add_argument("--append", action="store_true", help="keep the timings that --out holds")
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
    try:
        wanted = tuple(peers.chosen(arguments.peers, "cuda"))
    except ValueError as error:
        sys.exit(str(error))
    torch.set_float32_matmul_precision(arguments.float32_precision)
    setup = Setup(
        device="cuda",
        backend=backend,
        dtype=arguments.dtype,
        peers=wanted,
        rounds=arguments.rounds,
        round_ms=arguments.round_ms,
        flushed=arguments.flushed,
        deterministic=arguments.deterministic,
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {measure.commit()}")
    print(
        f"{'case':<26}{'pass':<10}"
        + "".join(f"{n[:7]:>8}" for n in [OURS, *wanted])
        + f"{'ratio':>8}  best peer   (TFLOP/s)"
    )
    lines = run(chosen, arguments.passes.split(","), setup, lambda row: print_row(row, wanted))
    for line in lines:
        if line["kind"] == "summary":
            print(summary_text(line))
    if arguments.append and arguments.out.exists():
        earlier = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        lines = joined(earlier, lines)
    write(arguments.out, lines)
    print(f"wrote {arguments.out}")
