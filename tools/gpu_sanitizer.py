#!/usr/bin/env python3
"""Runs the GPU kernels under compute-sanitizer: memcheck, initcheck, racecheck and synccheck.

    python tools/gpu_sanitizer.py [--backend hopper,ampere] [--tools racecheck] [--only PATTERN]
        [--parts fp8,variants] [--jobs 8]     # one process a tool, backend and part; 8 at a time
    python tools/gpu_sanitizer.py --suite 20     # a twentieth of the GPU tests, under memcheck
    python tools/gpu_sanitizer.py --run --guard  # no tool: tensors end where mapped memory ends

Each tool runs small cases of every kind of kernel: the 16-bit forward, the FP8 forward and its
quantiser, both backward schedules, with sums in any order and deterministic; and those of
gpu_sanitizer_cases.py: variants, masks, expressions, places of keys, the FP8 backward, caches.
Every way through a kernel is taken: ragged tiles, causal and window masks, packed sequences, rows
and keys that nobody sees, shared key heads, and once more tiles than the GPU has multiprocessors,
so that blocks take a second one. torch's caching allocator is off: inside its blocks no tool sees
where a tensor ends.

One line a tool; exit status 1 when a tool found something: then the cases that it complained of,
its first words about each, and the end of its output. --record adds the results to a file, by
default docs/gpu-sanitizer.json, which the page docs/gpu-verification.md shows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import gpu_sanitizer_cases
import guarded_memory
import pantile
import racecheck_known
import torch
import verification
from pantile import _direct

DEVICE = "cuda"
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
BACKENDS = ("hopper", "ampere")
# Of the cases, by their labels: each is a process of its own.
PARTS = {
    "plain": r"^(bfloat16|float32) ",
    "fp8": r"^fp8",
    "variants": r"^(variant|outputs) ",
    "places": r"^(ranges|pages) ",
    "caches": r"^cache ",
}
FOUND = 99  # exit status of a tool that found something
MORE_WORDS = {
    "memcheck": ["--padding", "64"],  # bytes between allocations
    # Every hazard with its threads, for racecheck_known.py.
    "racecheck": [
        *("--racecheck-report", "hazard"),
        *("--print-limit", "1000000"),
        *("--show-backtrace", "no"),
    ],
}
FIRST_CASES, FIRST_CHARACTERS, LAST_CHARACTERS = 8, 3000, 3000  # of what a tool says
RECORD = verification.ROOT / "docs" / verification.SANITIZER


@dataclass(frozen=True)
class Shape:
    rows: int
    keys: int
    heads: int
    heads_k: int
    arguments: dict = field(default_factory=dict)
    batch: int = 1
    lengths: tuple = ()  # of packed sequences: pairs


SHAPES = {
    "full": Shape(130, 150, 2, 1),
    "causal": Shape(150, 130, 2, 2, {"causal": True}),
    "window": Shape(40, 200, 1, 1, {"window": (33, 12)}),
    "no-keys": Shape(300, 40, 3, 1, {"causal": True}, 2),  # whole tiles of rows see nothing
    "few-keys": Shape(233, 3, 6, 3, {"window": (40, 10)}, 2),
    "packed": Shape(
        0, 0, 2, 1, {"causal": True}, lengths=((65, 64), (0, 5), (1, 0), (130, 200), (200, 77))
    ),
    "many-tiles": Shape(200, 140, 8, 2, {"causal": True}, 26),  # 416 tiles of 128 rows
}
DIMS = {
    ("hopper", "bfloat16"): (
        *((d, d) for d in (64, 80, 96, 128, 192, 256)),
        *((192, 128), (64, 128), (192, 256), (256, 64), (57, 40)),
    ),
    ("ampere", "bfloat16"): (*((d, d) for d in (32, 64, 96, 128, 192, 256)), (192, 128), (64, 256)),
    ("ampere", "float32"): ((64, 64), (128, 128), (256, 256)),
}
FP8_DIMS = {"hopper": (64, 96, 128, 192, 256), "ampere": (64, 96, 128)}


def _draw(shape: Shape, head_dim: int, head_dim_v: int, dtype):
    """(q, k, v, arguments) on the GPU, from the host: no other kernel writes them."""
    if shape.lengths:
        totals = [sum(pair[side] for pair in shape.lengths) for side in (0, 1)]
        leading = [(total,) for total in totals]
    else:
        leading = [(shape.batch, shape.rows), (shape.batch, shape.keys)]
    sizes = [(*leading[0], shape.heads, head_dim)]
    sizes += [(*leading[1], shape.heads_k, d) for d in (head_dim, head_dim_v)]
    tensors = [torch.randn(size) for size in sizes]
    tensors[1][..., ::2, :] += 2  # a mean: the Hopper backward takes other steps for such keys
    tensors = [x.to(dtype).to(DEVICE) for x in tensors]
    lengths = ()
    for side in (0, 1) if shape.lengths else ():
        bounds = torch.tensor([0, *(pair[side] for pair in shape.lengths)]).cumsum(0)
        lengths += (bounds.to(torch.int32).to(DEVICE),)
    longest = tuple(max(pair[side] for pair in shape.lengths) for side in (0, 1) if shape.lengths)
    return tensors, (*lengths, *longest)


def _attend(tensors, packing, shape: Shape, **more):
    call = pantile.varlen_attention if packing else pantile.attention
    return call(*tensors, *packing, **shape.arguments, **more)


def _both_passes(backend, dtype, dims, shape, precision="auto") -> Callable[[], None]:
    def run() -> None:
        options = pantile.Options(backend=backend, float32_precision=precision)
        tensors, packing = _draw(shape, *dims, getattr(torch, dtype))
        _attend(tensors, packing, shape, options=options)  # without LSE
        leaves = [x.requires_grad_() for x in tensors]
        grad_o = torch.randn(*leaves[0].shape[:-1], dims[1]).to(leaves[0].dtype).to(DEVICE)
        for deterministic in (False, True):
            more = {"deterministic": deterministic, "options": options, "return_lse": True}
            o, lse = _attend(leaves, packing, shape, **more)
            grad_lse = torch.ones(lse.shape).to(DEVICE)
            torch.autograd.grad((o, lse), leaves, (grad_o, grad_lse))

    return run


def _fp8(dim: int, shape: Shape, exp: str, backend: str = "hopper") -> Callable[[], None]:
    def run() -> None:
        options = pantile.Options(backend=backend, fp8_exp=exp)
        tensors, packing = _draw(shape, dim, dim, torch.bfloat16)
        for smooth_k in (False, True):
            operands = pantile.quantize(*tensors, *packing, smooth_k=smooth_k, options=options)
            pantile.attention(operands, return_lse=True, options=options, **shape.arguments)

    return run


def fp8_exps(backend: str) -> tuple[str, ...]:
    """Those that this build has kernels for."""
    mixed = backend == "hopper" and pantile.build_info()["experiments"]
    return ("code", "mixed", "exp2") if mixed else ("code", "exp2")


def cases(backend: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """(label, what to run) of every case of a backend."""
    for (owner, dtype), all_dims in DIMS.items():
        if owner != backend:
            continue
        for dims in all_dims:
            for name, shape in SHAPES.items():
                for precision in ("highest", "tf32") if dtype == "float32" else ("auto",):
                    label = f"{dtype} d{dims[0]}x{dims[1]} {name} {precision}"
                    yield label, _both_passes(backend, dtype, dims, shape, precision)
    for dim in FP8_DIMS.get(backend, ()):
        for name, shape in SHAPES.items():
            for exp in fp8_exps(backend) if name == "no-keys" else ("code",):
                yield f"fp8 d{dim} {name} {exp}", _fp8(dim, shape, exp, backend)
    yield from gpu_sanitizer_cases.cases(backend, DEVICE)


def count_outputs_as_written() -> None:
    """initcheck does not see what TMA writes, and the backward reads O: new outputs are set to zero
    first. Workspaces are not."""
    made = _direct._new_outputs

    def written(*arguments):
        o, lse = made(*arguments)
        return o.zero_(), lse

    _direct._new_outputs = written


def run_cases(backend: str, parts: list[str], only: str) -> None:
    torch.manual_seed(0)
    for label, run in cases(backend):
        if re.search(only, label) and any(re.search(PARTS[part], label) for part in parts):
            print("case", label, flush=True)
            run()
            torch.cuda.synchronize()
            print("ran", label, flush=True)


# ---- under a tool


COMPLAINT = r"=+ +(?!COMPUTE-SANITIZER|\w+ SUMMARY)\S"


def complaints(text: str) -> dict[str, str]:
    """What a tool said between the beginning of a case and that of the next, by the case's label:
    a kernel's errors come before its case has synchronised. A process that dies names its case."""
    found = {}
    parts = re.split(r"^case (.*)\n", text, flags=re.M)
    for label, said in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line for line in said.splitlines() if re.match(COMPLAINT, line)]
        if lines or f"ran {label}\n" not in said:
            found[label] = "\n".join(lines) or "it did not end"
    return found


def excerpts(text: str) -> str:
    """The cases that a tool complained of, the beginning of each complaint, and the end of all."""
    found = complaints(text)
    shown = [f"wrong: {label}\n{said[:FIRST_CHARACTERS]}" for label, said in found.items()]
    shown[FIRST_CASES:] = [f"wrong: {label}" for label in list(found)[FIRST_CASES:]]
    first = None if found else re.search("^" + COMPLAINT, text, re.M)  # of tests, not of cases
    if first:
        shown.append(text[first.start() :][:FIRST_CHARACTERS])
    return "\n".join([*shown, "...", text[-LAST_CHARACTERS:]])


def result_of(tool: str, what: str, text: str, status: int, ran: int, seconds: float) -> dict:
    """What a tool found. No case, or no summary, is no success."""
    summary = (re.findall(r"=+ (\w+ SUMMARY: .*)", text) or [""])[-1]
    ok = status == 0 and ran > 0 and bool(summary)
    if tool == "racecheck" and status == FOUND and ran > 0:
        report = racecheck_known.read(text)
        ok = report.complete and report.known > 0 and not report.others
        summary += f"; known: {report.known}, others: {report.others.total()}"
    found = {"tool": tool, "what": what, "cases": ran, "summary": summary, "ok": ok}
    return found | {"seconds": round(seconds)}


def under(tool: str, what: str, words: list[str], count: Callable[[str], int]) -> dict:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    command += MORE_WORDS.get(tool, [])
    command += ["--target-processes", "all", sys.executable, *words]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=verification.ROOT, capture_output=True, text=True, check=False
    )
    text, seconds = done.stdout + done.stderr, time.monotonic() - started
    found = result_of(tool, what, text, done.returncode, count(text), seconds)
    summary = found["summary"] or "no summary"
    print(f"{tool}, {what}: {found['cases']} cases, {summary}, {seconds:.0f} s", flush=True)
    if not found["ok"]:
        print(excerpts(racecheck_known.read(text).text), flush=True)
    return found


def written(tool: str) -> list[str]:
    return ["--written"] if tool == "initcheck" else []


def cases_run(text: str) -> int:
    return len(re.findall(r"^ran ", text, re.M))


def tests_run(text: str) -> int:
    """Of the last line of pytest: tests that passed or failed."""
    lines = re.findall(r"^=*\s?(\d+ \w+(?:, \d+ \w+)* in [\d.]+s)", text, re.M)
    return sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed)", lines[-1] if lines else ""))


def record(results: list[dict], path: pathlib.Path) -> None:
    """Adds the results to those of the same build; drops those of another one."""
    facts = verification.facts()
    kept = []
    if path.exists():
        earlier = json.loads(path.read_text())
        if all(earlier["facts"][name] == facts[name] for name in verification.SAME):
            new = {(x["tool"], x["what"]) for x in results}
            kept = [x for x in earlier["results"] if (x["tool"], x["what"]) not in new]
    verification.write_json(path, {"facts": facts, "results": [*kept, *results]})


def check_cases(tools, backends, parts, only: str, jobs: int) -> list[dict]:
    """Of every tool, backend and part that has cases, ``jobs`` processes at a time."""

    def check(which: tuple[str, str, str]) -> dict:
        tool, backend, part = which
        words = [__file__, "--run", "--only", only, "--backend", backend, "--parts", part]
        what = f"{backend} kernels, {part}" + (f", {only}" if only else "")
        return under(tool, what, [*words, *written(tool)], cases_run)

    wanted = [
        (tool, backend, part)
        for tool, backend, part in itertools.product(tools, backends, parts)
        if any(re.search(PARTS[part], label) for label, _ in cases(backend))
    ]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(check, wanted))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--backend", default="hopper", help="comma-separated: hopper, ampere")
    parser.add_argument("--only", default="", help="regular expression of case labels")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--suite", type=int, metavar="N", help="every N-th GPU test, by its name")
    text = f"add to this file (default: docs/{RECORD.name})"
    kept = {"type": pathlib.Path, "nargs": "?", "const": RECORD, "metavar": "PATH"}
    parser.add_argument("--record", help=text, **kept)
    parser.add_argument("--run", action="store_true", help="the cases alone, without a tool")
    parser.add_argument("--guard", action="store_true", help="with --run: guarded_memory.py")
    parser.add_argument("--written", action="store_true", help="outputs count as written")
    parser.add_argument("--list", action="store_true", help="labels of the cases")
    chosen = parser.parse_args()
    backends, tools = chosen.backend.split(","), chosen.tools.split(",")
    parts = chosen.parts.split(",")
    for name, words, known in (
        *(("--backend", backends, BACKENDS), ("--tools", tools, TOOLS)),
        ("--parts", parts, tuple(PARTS)),
    ):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"{name}: {unknown[0]!r} is none of {', '.join(known)}")
    if chosen.guard and not chosen.run:
        parser.error("--guard: needs --run")
    if chosen.list:
        print("\n".join(f"{b} {label}" for b in backends for label, _ in cases(b)))
        return 0
    if chosen.run:
        if chosen.written:
            count_outputs_as_written()
        with guarded_memory.guarded_tensors() if chosen.guard else contextlib.nullcontext():
            for backend in backends:
                run_cases(backend, parts, chosen.only)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        return 2
    if chosen.suite is not None:
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow"]
        words.append(f"--sample={chosen.suite}")
        results = [under("memcheck", f"1 / {chosen.suite} of the tests", words, tests_run)]
    else:
        results = check_cases(tools, backends, parts, chosen.only, chosen.jobs)
    if chosen.record:
        record(results, chosen.record)
    return int(not all(found["ok"] for found in results))


if __name__ == "__main__":
    sys.exit(main())
