"""FlashAttention-T: every softmax mode of the Ampere forward against the vector mode that rescales
always, and against FlashAttention-2 and 3, in one process (docs/flashattention-t.md).

    python benchmarks/flashattention_t.py --out benchmarks/results/flashattention_t.jsonl

Three reports, each with --skip to leave it out (its part of an existing file then stays):
  timing    TFLOP/s of each mode, its ratio to the baseline, and the ratio that the cycle model
            (softmax_cycles.py) predicts for this GPU
  counters  use of the tensor, FMA, ALU and MUFU pipes, of issue slots, DRAM and L2, bank conflicts;
            the vector interval ratio is the share of active cycles in which the tensor pipe idles
  stages    the same kernels with one stage of the softmax left out: what that stage costs beyond
            what the products hide (tests/gpu/softmax_stages.cu; needs nvcc and this tree)"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import counters
import pantile
import softmax_cycles
import torch
import utilisation
from pantile.bench import cases, measure, peers, sweep

BASELINE, AUTO = "vector, always", "auto"
MODES = {
    BASELINE: {"softmax": "vector", "rescale_threshold": 0},
    AUTO: {},
    "vector": {"softmax": "vector"},
    "tensor": {"softmax": "tensor"},
    "share 1/4": {"softmax": "tensor", "tensor_share": 0.25},
    "share 1/2": {"softmax": "tensor", "tensor_share": 0.5},
    "share 1/2 rows": {"softmax": "tensor", "tensor_share": 0.5, "tensor_split": "rows"},
    "share 1": {"softmax": "tensor", "tensor_share": 1},
    "surrogate": {"softmax": "tensor", "softmax_mode": "surrogate"},
    "fast_scale": {"softmax": "tensor", "softmax_mode": "fast_scale"},
}
HIDDEN, TOKENS = 2048, 16384
ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORTS = ("timing", "counters", "stages")
COUNTED = (64, 128)
COUNTED_LENGTH = 4096


def make_case(head_dim: int, length: int, causal: bool) -> cases.Case:
    heads = HIDDEN // head_dim
    mask = "causal" if causal else "full"
    batch = max(1, TOKENS // length)
    return cases.Case(f"d{head_dim} {length} {mask}", batch, heads, heads, head_dim, length, causal)


def forward_of(problem: peers.Problem, mode: str):
    softmax = pantile.experimental.SoftmaxOptions(**MODES[mode])
    options = pantile.Options(backend="ampere", softmax=softmax)
    operands = (problem.q, problem.k, problem.v)
    causal = problem.case.causal
    return lambda: pantile.attention(*operands, causal=causal, options=options)


# ---- timing


def time_case(case: cases.Case, dtype: str, arguments: argparse.Namespace) -> dict:
    setup = sweep.Setup("cuda", "ampere", dtype, ())
    problem = sweep.make_problem(case, "forward", setup)
    running, absent = [], {}
    for mode in MODES:
        running.append(peers.contender(mode, problem, forward_of(problem, mode)))
    for name in arguments.peers:
        made = peers.GPU_PEERS[name](name, problem)
        if isinstance(made, str):
            absent[name] = made
        else:
            running.append(made)
    measure.interleave(running, rounds=arguments.rounds, round_ms=arguments.round_ms)
    base = running[0].median()
    flops = case.flops("forward")
    return {
        "kind": "softmax_timing",
        "case": case.name,
        "dtype": dtype,
        "head_dim": case.head_dim,
        "seqlen": case.seqlen,
        "causal": case.causal,
        "tflops": {c.name: round(flops / c.median() / 1e9, 1) for c in running},
        "ratio": {c.name: round(base / c.median(), 3) for c in running},
        "absent": absent,
    }


def time_all(arguments: argparse.Namespace) -> list[dict]:
    rows = []
    chip = next((c for n, c in softmax_cycles.CHIPS.items() if n in arguments.gpu), None)
    for head_dim in arguments.head_dims:
        if chip is not None:
            modes = [m for m in MODES if m in softmax_cycles.MODES]
            model = {m: round(softmax_cycles.predicted_ratio(chip, head_dim, m), 3) for m in modes}
            rows.append({"kind": "softmax_model", "head_dim": head_dim, "ratio": model})
            print(f"d{head_dim} model: " + ", ".join(f"{m} {r:.2f}" for m, r in model.items()))
        for dtype in arguments.dtypes:
            for length in arguments.lengths:
                for causal in (False, True):
                    row = time_case(make_case(head_dim, length, causal), dtype, arguments)
                    cells = ", ".join(
                        f"{m} {row['tflops'][m]:.0f} ({r:.2f})" for m, r in row["ratio"].items()
                    )
                    print(f"{row['case']} {dtype}: {cells}", flush=True)
                    rows.append(row)
    return rows


# ---- counters


def make_counted(name: str):
    mode, head_dim, mask = name.split("|")
    case = make_case(int(head_dim), COUNTED_LENGTH, mask == "causal")
    setup = sweep.Setup("cuda", "ampere", "bfloat16", ())
    return forward_of(sweep.make_problem(case, "forward", setup), mode)


def count_all() -> list[dict]:
    names = []
    for head_dim in COUNTED:
        names += [f"{mode}|{head_dim}|full" for mode in MODES if mode != "tensor"]  # it is auto
        names += [f"{mode}|{head_dim}|causal" for mode in (BASELINE, AUTO, "vector")]
    try:
        found, absent = counters.collect(names, utilisation.METRICS)
    except counters.CounterError as error:
        print(f"no counters: {error}")
        return [{"kind": "softmax_counters", "absent": str(error)}]
    rows, baseline = [], 0.0
    for name, launches in found.items():
        mode, head_dim, mask = name.split("|")
        row = utilisation.row_of(f"{mode}|forward|bfloat16|{head_dim}|{mask}", launches)
        idle = 100 - row["percent"]["tensor"]
        baseline = idle if mode == BASELINE else baseline
        row |= {"kind": "softmax_counters", "tensor_idle": round(idle, 1)}
        row["idle_ratio"] = round(baseline / idle, 3)
        print(f"{name}: {row['percent']}, idle {idle:.1f} ({row['idle_ratio']:.2f}x lower)")
        rows.append(row)
    return [
        *rows,
        *({"kind": "softmax_counters", "absent": f"{n}: {r}"} for n, r in absent.items()),
    ]


# ---- stages


def run_stages(program: pathlib.Path) -> list[dict]:
    answer = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return [read_stage(line) for line in answer.splitlines()]


def time_stages(program: pathlib.Path | None) -> list[dict]:
    if program is not None:
        return run_stages(program)
    if shutil.which("nvcc") is None or not (ROOT / "cuda").is_dir():
        return [{"kind": "softmax_stages", "absent": "needs nvcc and the source tree"}]
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        built = pathlib.Path(folder) / "stages"
        sources = ("tests/gpu/softmax_stages.cu", "cuda/backend.cc", "cpp/host/status.cc")
        command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-O3", "-DPANTILE_STATIC"]
        command += ["-arch", f"sm_{major}{minor}", "-Icpp", "-Icpp/include", "-Icuda"]
        subprocess.run([*command, "-o", str(built), *sources], cwd=ROOT, check=True)
        return run_stages(built)


def read_stage(line: str) -> dict:
    """head dim, mask, unit, stage left out, milliseconds, share of the whole kernel's time."""
    head_dim, mask, unit, stage, ms, share = line.split(",")
    print(f"d{head_dim} {mask} {unit} without {stage}: {ms} ms, {float(share):+.1%}")
    return {
        "kind": "softmax_stages",
        "head_dim": int(head_dim),
        "mask": mask,
        "unit": unit,
        "without": stage,
        "ms": float(ms),
        "share": float(share),
    }


# ---- all


def read_reports(path: pathlib.Path) -> dict[str, list[dict]]:
    """What an earlier run left in the file: a report that is skipped now is kept."""
    found: dict[str, list[dict]] = {}
    report = ""
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        report = row.get("report", report)
        found.setdefault(report, []).append(row)
    return found


def names_of(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = pathlib.Path("benchmarks/results/flashattention_t.jsonl")
    parser.add_argument("--out", type=pathlib.Path, default=out)
    parser.add_argument("--head-dims", type=names_of, default=["64", "128"])
    parser.add_argument("--lengths", type=names_of, default=["1024", "4096", "16384"])
    parser.add_argument("--dtypes", type=names_of, default=["float16", "bfloat16"])
    parser.add_argument("--peers", type=names_of, default=["FA2 (torch)", "FA3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=12.0)
    parser.add_argument("--stages", type=pathlib.Path, help="softmax_stages.cu, built already")
    parser.add_argument("--skip", action="append", default=[], choices=REPORTS)
    arguments = parser.parse_args()
    arguments.head_dims = [int(x) for x in arguments.head_dims]
    arguments.lengths = [int(x) for x in arguments.lengths]
    return arguments


def main() -> None:
    if counters.is_child():
        counters.run_cases(make_counted)
        return
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("these are modes of a CUDA kernel, and there is no CUDA GPU")
    pantile.load_torch()
    arguments.gpu = torch.cuda.get_device_name()
    reports = {
        "timing": lambda: time_all(arguments),
        "counters": count_all,
        "stages": lambda: time_stages(arguments.stages),
    }
    found = read_reports(arguments.out)
    for report, run in reports.items():
        if report not in arguments.skip:
            header = {
                "kind": "run",
                "report": report,
                "commit": measure.commit(),
                "gpu": arguments.gpu,
                "state_before": measure.gpu_state(),
            }
            found[report] = [header, *run()]
            sweep.write(arguments.out, [row for rows in found.values() for row in rows])
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
