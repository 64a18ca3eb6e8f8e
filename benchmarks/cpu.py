"""The CPU backend against torch's scaled_dot_product_attention, in one process and interleaved.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --isa avx2 --same-isa --dtypes bfloat16 --passes forward
    python benchmarks/cpu.py --lengths 512,4096 --heads 16 --json build/cpu.jsonl

Ratios are torch's time over ours, of medians. Every line with a bar says whether it is met; the
exit status is 1 when one is not. torch gets its tensors as it likes them, [batch, heads, seq, dim]
and contiguous, ours are [batch, seq, heads, dim]."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time

# (pass, dtype) -> (ratio that the project promises at B1 H8 S2048, on AVX2)
BARS = {
    ("forward", "float32"): (1.15, None),
    ("forward", "bfloat16"): (1.8, 1.2),
    ("forward+backward", "float32"): (1.2, None),
    ("forward+backward", "bfloat16"): (1.3, None),
}
PROMISED = {"batch": 1, "heads_q": 8, "heads_k": 8, "seqlen": 2048}
# What holds torch to an instruction set: its own kernels, oneDNN and MKL.
TORCH_ISA = {
    "baseline": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    p.add_argument("--isa", choices=list(TORCH_ISA), help="at most this instruction set for ours")
    p.add_argument("--same-isa", action="store_true", help="hold torch to --isa too")
    p.add_argument("--passes", type=words, default=["forward", "forward+backward"])
    p.add_argument("--dtypes", type=words, default=["float32", "bfloat16"])
    p.add_argument("--head-dims", type=numbers, default=[64, 128])
    p.add_argument("--masks", type=words, default=["full", "causal"])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--heads-k", type=int, help="key/value heads; default: as --heads")
    p.add_argument("--lengths", type=numbers, default=[2048])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", type=pathlib.Path, help="write one JSON object a line here")
    arguments = p.parse_args()
    if arguments.same_isa and arguments.isa is None:
        p.error("--same-isa needs --isa")
    return arguments


def hold_to(isa: str, torch_too: bool) -> None:
    """Both libraries read these when they are loaded."""
    os.environ["PANTILE_CPU_ISA"] = isa
    if torch_too:
        names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
        os.environ.update(zip(names, TORCH_ISA[isa], strict=True))


def bar_of(row: dict, isa: str) -> float | None:
    if any(row[name] != value for name, value in PROMISED.items()):
        return None
    if (row["pass"], row["dtype"]) not in BARS or row["head_dim"] not in (64, 128):
        return None
    full, on_avx2 = BARS[row["pass"], row["dtype"]]
    return {"baseline": None, "avx2": on_avx2}.get(isa, full)


def judge(row: dict, isa: str) -> None:
    """Adds the ratio to torch, the bar, and whether it is met; prints the line."""
    results = row["results"]["back_to_back"]
    ratio = results["torch"]["ms"] / results["pantile"]["ms"]
    bar = bar_of(row, isa)
    row |= {"ratio": round(ratio, 4), "bar": bar, "met": None if bar is None else ratio >= bar}
    heads = f"H{row['heads_q']}/{row['heads_k']}"
    text = f"B{row['batch']} {heads} S{row['seqlen']} {' '.join(row['case'].split()[:2])}"
    speeds = "".join(
        f"{results[n]['ms']:8.2f} ms {results[n]['tflops'] * 1e3:4.0f}"
        for n in ("pantile", "torch")
    )
    verdict = "" if bar is None else f"{bar:.2f} {'met' if row['met'] else 'MISSED'}"
    print(
        f"{row['pass']:<18}{row['dtype']:<10}{text:<34}{speeds}{ratio:7.2f}  {verdict}", flush=True
    )


def main() -> None:
    arguments = parse()
    if arguments.isa is not None:
        hold_to(arguments.isa, arguments.same_isa)
    import torch
    from pantile.bench import cases, sweep

    torch.set_num_threads(arguments.threads)
    heads_k = arguments.heads_k or arguments.heads
    shape = (arguments.batch, arguments.heads)
    chosen = [
        dataclasses.replace(case, heads_k=heads_k)
        for case in cases.small_grid(
            *shape, arguments.head_dims, arguments.lengths, arguments.masks
        )
    ]
    setups = [
        sweep.Setup("cpu", "cpu", dtype, ("torch",), arguments.rounds) for dtype in arguments.dtypes
    ]
    run = sweep.header(setups[0])
    print(
        f"{run['cpu']}, {run['isa']}, {run['threads']} threads, torch {run['torch']} "
        f"({run['torch_isa']}), commit {run['commit']}"
    )
    times = f"{'pantile':>16}{'torch':>16}{'ratio':>7}  bar"
    print(f"{'pass':<18}{'dtype':<10}{'shape':<34}{times}")

    def show(row: dict) -> None:
        judge(row, run["isa"])

    lines = [run]
    started = time.perf_counter()
    for setup in setups:
        lines += sweep.run(chosen, arguments.passes, setup, show)[1:]
    run["seconds"] = round(time.perf_counter() - started, 1)
    print("columns: median time and GFLOP/s; backward 2.5 times the forward's work, causal half")
    if arguments.json is not None:
        sweep.write(arguments.json, [line for line in lines if line["kind"] != "summary"])
        print(f"wrote {arguments.json}")
    rows = [line for line in lines if line["kind"] == "timing"]
    missed = sum(row["met"] is False for row in rows)
    if missed:
        sys.exit(f"{missed} of {len(rows)} lines miss their bar")


if __name__ == "__main__":
    main()
