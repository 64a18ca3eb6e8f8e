#!/usr/bin/env python3
"""How far every backend and its peers are from float64: RMSE, largest and relative error.

    python tools/accuracy.py                                 # CPU, small lengths, a table
    python tools/accuracy.py --device cuda --out benchmarks/results/h200_accuracy.jsonl
    python tools/accuracy.py --golden                        # rewrite tests/golden/accuracy.json,
    python tools/accuracy.py --golden --device cuda          # and its GPU sections

Inputs are drawn on the CPU from a fixed seed, so every machine sees the same ones. The laws:

    normal   N(0, 1)
    outlier  N(0, 1) + N(0, 100) * Bernoulli(0.001), the law of FlashAttention-3's FP8 table
    shifted  V has mean 1: a biased accumulator shows
    peaked   Q eight times as large: nearly one-hot rows

`--golden` stores the RMSE that tests/python/test_accuracy.py holds the code to: no figure may grow
by more than 25 %.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pantile
import torch
from pantile.bench import measure
from pantile.bench.peers import FP8

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/accuracy.json"
WORSE = 1.25
ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")
LAWS = ("normal", "outlier", "shifted", "peaked")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FORWARD, BACKWARD = ("o", "lse"), ("dq", "dk", "dv")
ROW_CHUNK = 1024  # rows of float64 scores that exist at a time
MOST_TEXTBOOK = 8192  # longest sequence for implementations that store the scores


@dataclass(frozen=True)
class Case:
    dtype: str
    head_dim: int
    mask: str  # full or causal
    length: int
    law: str
    heads: int = 2
    batch: int = 1

    @property
    def key(self) -> str:
        return f"{self.dtype} d{self.head_dim} {self.mask} {self.length} {self.law}"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


Tensors = dict[str, torch.Tensor]


# ---- inputs and the exact answer


@functools.lru_cache(maxsize=1)  # cases that differ in type and mask follow each other
def _drawn(shape: tuple[int, ...], law: str) -> Tensors:
    generator = torch.Generator().manual_seed(20)
    found = {}
    for name in ("q", "k", "v", "grad_o"):
        x = torch.randn(shape, generator=generator)
        if law == "outlier" and name != "grad_o":
            large = torch.randn(shape, generator=generator) * 10
            x = x + large * (torch.rand(shape, generator=generator) < 1e-3)
        if law == "shifted" and name == "v":
            x = x + 1
        if law == "peaked" and name == "q":
            x = x * 8
        found[name] = x
    return found


def draw(case: Case, device: str) -> Tensors:
    """q, k, v, grad_o as float32 that are exact in the case's dtype, [batch, seq, heads, dim]."""
    shape = (case.batch, case.length, case.heads, case.head_dim)
    drawn = _drawn(shape, case.law)
    return {name: x.to(device).to(DTYPES[case.dtype]).float() for name, x in drawn.items()}


def exact(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """The textbook in float64, a chunk of rows at a time: memory stays linear in the length."""
    q, k, v, g = (inputs[n].double().transpose(1, 2) for n in ("q", "k", "v", "grad_o"))
    scale = case.head_dim**-0.5
    o, lse, dq = torch.empty_like(q), torch.empty_like(q[..., 0]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    position = torch.arange(case.length, device=q.device)
    for begin in range(0, case.length, ROW_CHUNK):
        rows = slice(begin, min(begin + ROW_CHUNK, case.length))
        seen = slice(0, rows.stop if case.causal else case.length)
        keys, values = k[:, :, seen], v[:, :, seen]
        p = q[:, :, rows] @ keys.transpose(-1, -2) * scale
        if case.causal:
            p.masked_fill_(position[seen][None, :] > position[rows][:, None], -math.inf)
        lse[:, :, rows] = torch.logsumexp(p, -1)
        p = p.sub_(lse[:, :, rows, None]).exp_()
        o[:, :, rows] = p @ values
        if backward:
            dv[:, :, seen] += p.transpose(-1, -2) @ g[:, :, rows]
            ds = g[:, :, rows] @ values.transpose(-1, -2)
            ds.sub_((g[:, :, rows] * o[:, :, rows]).sum(-1, keepdim=True)).mul_(p)
            dq[:, :, rows] = ds @ keys * scale
            dk[:, :, seen] += ds.transpose(-1, -2) @ q[:, :, rows] * scale
    answer = {"o": o.transpose(1, 2), "lse": lse}
    if backward:
        answer |= {n: x.transpose(1, 2) for n, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    return answer


def errors(found: Tensors, truth: Tensors) -> dict[str, dict[str, float]]:
    """RMSE, largest error, and RMSE over the root mean square of the exact result."""
    result = {}
    for name, value in found.items():
        difference = value.double() - truth[name]
        rmse = difference.square().mean().sqrt().item()
        size = truth[name].square().mean().sqrt().item()
        result[name] = {
            "rmse": float(f"{rmse:.4g}"),
            "max": float(f"{difference.abs().max().item():.4g}"),
            "relative": float(f"{rmse / size:.4g}"),
        }
    return result


# ---- implementations: each gives its results, or raises what it raises


def _with_gradients(case: Case, inputs: Tensors, backward: bool, forward) -> Tensors:
    names = ("q", "k", "v")
    leaves = [inputs[n].to(DTYPES[case.dtype]).requires_grad_(backward) for n in names]
    found = forward(*leaves)
    if backward:
        grad_o = inputs["grad_o"].to(DTYPES[case.dtype])
        gradients = torch.autograd.grad(found["o"], leaves, grad_o)
        found |= dict(zip(BACKWARD, gradients, strict=True))
    return {name: x.detach() for name, x in found.items()}


def run_pantile(backend: str, case: Case, inputs: Tensors, backward: bool) -> Tensors:
    def forward(q, k, v):
        o, lse = pantile.attention(
            q, k, v, causal=case.causal, return_lse=True, options=pantile.Options(backend=backend)
        )
        return {"o": o, "lse": lse}

    return _with_gradients(case, inputs, backward, forward)


def run_sdpa(backend, case: Case, inputs: Tensors, backward: bool) -> Tensors:
    from torch.nn.attention import sdpa_kernel

    def forward(*leaves):
        with sdpa_kernel(backend):
            o = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in leaves), is_causal=case.causal
            )
        return {"o": o.transpose(1, 2)}

    return _with_gradients(case, inputs, backward, forward)


def run_textbook(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """Every step in the case's dtype, as a program of framework operations does it."""
    from pantile import reference

    if case.length > MOST_TEXTBOOK:
        raise RuntimeError("the score matrix is too large")

    def forward(q, k, v):
        o, lse = reference.attention(q, k, v, causal=case.causal, dtype=None)
        return {"o": o, "lse": lse}

    return _with_gradients(case, inputs, backward, forward)


def run_fa3(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    from pantile.bench import peers

    q, k, v = (inputs[n].to(DTYPES[case.dtype]) for n in ("q", "k", "v"))
    forward = peers.fa3_operators().fwd
    o = forward(q, k, v, softmax_scale=case.head_dim**-0.5, is_causal=case.causal)[0]
    return {"o": o}


def implementations(device: str) -> dict:
    """name -> function of (case, inputs, backward)."""
    from torch.nn.attention import SDPBackend

    def ours(backend: str):
        return lambda *words: run_pantile(backend, *words)

    def sdpa(backend: SDPBackend):
        return lambda *words: run_sdpa(backend, *words)

    if device == "cpu":
        return {
            "pantile cpu": ours("cpu"),
            "torch": sdpa(SDPBackend.FLASH_ATTENTION),
            "textbook": run_textbook,
        }
    return {
        "pantile hopper": ours("hopper"),
        "pantile ampere": ours("ampere"),
        "FA3": run_fa3,
        "cuDNN (torch)": sdpa(SDPBackend.CUDNN_ATTENTION),
        "FA2 (torch)": sdpa(SDPBackend.FLASH_ATTENTION),
        "textbook": run_textbook,
    }


# ---- FP8: the table of the FlashAttention-3 paper


def scales_of(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """amax / 448, for each (batch, block of rows, head); one of all when `block` is None."""
    if block is None:
        return (x.abs().amax() / 448).expand(x.shape[0], 1, x.shape[2])
    rows = -(-x.shape[1] // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * block - x.shape[1]))
    return padded.unflatten(1, (rows, block)).abs().amax((2, 4)) / 448


def through_fp8(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """x rounded to e4m3 with the scales of :func:`scales_of`, back in its own dtype."""
    scales = scales_of(x, block).clamp_min(1e-30)
    rows = scales.repeat_interleave(block, 1)[:, : x.shape[1]] if block else scales
    rows = rows.unsqueeze(-1)
    return (x / rows).to(FP8).to(x.dtype) * rows


def hadamard(dim: int, device) -> torch.Tensor:
    """Orthogonal, with random signs: spreads an outlier over the whole head dim."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(7)) * 2 - 1
    return (h * signs / dim**0.5).to(device)


def emulated_fp8(case: Case, inputs: Tensors, block: int | None, rotate: bool) -> torch.Tensor:
    """Exact arithmetic on inputs that went through e4m3: what the format alone costs."""
    q, k, v = (inputs[n].double() for n in ("q", "k", "v"))
    if rotate:
        turn = hadamard(case.head_dim, q.device)
        q, k = q @ turn, k @ turn
    rounded = {n: through_fp8(x, block) for n, x in (("q", q), ("k", k), ("v", v))}
    return exact(case, rounded | {"grad_o": inputs["grad_o"]}, False)["o"]


def fp8_baseline(case: Case, inputs: Tensors) -> torch.Tensor:
    """The textbook with one scale per tensor, also for P, as the paper's baseline."""
    q, k, v = (through_fp8(inputs[n].float(), None).transpose(1, 2) for n in ("q", "k", "v"))
    s = q @ k.transpose(-1, -2) * case.head_dim**-0.5
    if case.causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    p = (torch.softmax(s, -1) * 448).to(FP8).float() / 448
    return (p @ v).transpose(1, 2)


def fp8_fa3(case: Case, inputs: Tensors) -> torch.Tensor:
    """One scale per batch and head, the finest that FlashAttention-3 takes."""
    from pantile.bench import peers

    operands, scales = [], {}
    for name in ("q", "k", "v"):
        x = inputs[name]
        scale = (x.abs().amax((1, 3)) / 448).contiguous()
        operands.append((x / scale[:, None, :, None]).to(FP8))
        scales[f"{name}_descale"] = scale
    forward = peers.fa3_operators().fwd
    settings = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
    return forward(*operands, **settings, **scales)[0]


def fp8_cudnn(case: Case, inputs: Tensors) -> torch.Tensor:
    """One scale per tensor, also for O, which comes back in e4m3."""
    from pantile.bench import cases, cudnn_fp8
    from pantile.bench.peers import Problem

    operands, scales = [], {}
    for name in ("q", "k", "v"):
        scale = inputs[name].abs().amax() / 448
        operands.append((inputs[name] / scale).to(FP8))
        scales[f"descale_{name}"] = scale.reshape(1, 1, 1, 1)
    largest = inputs["v"].abs().amax()
    one = torch.ones(1, 1, 1, 1, device=largest.device)
    scales |= {"scale_s": one * 448, "descale_s": one / 448}
    scales["scale_o"] = (448 / largest).reshape(1, 1, 1, 1)
    shape = (case.batch, case.heads, case.heads, case.head_dim, case.length, case.causal)
    problem = Problem(
        cases.Case(case.key, *shape), "forward", *operands, inputs["grad_o"].bfloat16(), None
    )
    return cudnn_fp8.forward(problem, scales).float() * (largest / 448)


def fp8_pantile(
    case: Case, inputs: Tensors, exp: str = "code", backend: str = "auto", **settings
) -> torch.Tensor:
    options = pantile.Options(backend=backend, fp8_exp=exp)
    operands = pantile.quantize(
        *(inputs[n].to(DTYPES[case.dtype]) for n in ("q", "k", "v")), options=options, **settings
    )
    return pantile.attention(operands, causal=case.causal, options=options)


FP8_METHODS = {
    "baseline, per-tensor scales": fp8_baseline,
    "FA3, per-head scales": fp8_fa3,
    "cuDNN, per-tensor scales": fp8_cudnn,
    "pantile, block scales, Hadamard, K smoothing": fp8_pantile,
    "pantile, the same with exact weights": lambda c, i: fp8_pantile(c, i, exp="exp2"),
    "pantile without Hadamard": lambda c, i: fp8_pantile(c, i, hadamard=False),
    "pantile without K smoothing": lambda c, i: fp8_pantile(c, i, smooth_k=False),
    "exact arithmetic, per-tensor scales": lambda c, i: emulated_fp8(c, i, None, False),
    "exact arithmetic, blocks of 128": lambda c, i: emulated_fp8(c, i, 128, False),
    "exact arithmetic, blocks of 128 and Hadamard": lambda c, i: emulated_fp8(c, i, 128, True),
}


# ---- rows


def _row(device: str, name: str, case: Case) -> dict:
    row = {"kind": "accuracy", "device": device, "implementation": name, **asdict(case)}
    return row | {"absent": None, "errors": {}}


def measure_case(case: Case, device: str, backward: bool, only=None) -> Iterator[dict]:
    inputs = draw(case, device)
    truth = exact(case, inputs, backward)
    for name, function in implementations(device).items():
        if only is not None and name not in only:
            continue
        row = _row(device, name, case)
        try:
            row["errors"] = errors(function(case, inputs, backward), truth)
        except Exception as error:  # peers raise types of their own; each is named in its row
            row["absent"] = (str(error).splitlines() or [repr(error)])[0]
        yield row


def measure_fp8(case: Case, device: str) -> Iterator[dict]:
    inputs = draw(case, device)
    truth = exact(case, inputs, False)
    for name, function in FP8_METHODS.items():
        row = _row(device, name, case) | {"kind": "accuracy_fp8"}
        try:
            row["errors"] = errors({"o": function(case, inputs)}, truth)
        except Exception as error:  # as above
            row["absent"] = (str(error).splitlines() or [repr(error)])[0]
        yield row


def golden_cases(device: str = "cpu") -> list[Case]:
    return [
        Case(dtype, head_dim, mask, 200, law)
        for dtype in (DTYPES if device == "cpu" else ("f16", "bf16"))
        for head_dim, mask in ((64, "full"), (128, "causal"))
        for law in LAWS
    ]


def cases_of(device: str) -> list[Case]:
    """Every dtype, mask and law at one length, then lengths under the normal law."""
    if device == "cpu":
        return golden_cases() + [
            Case(d, 64, "causal", n, "normal") for d in DTYPES for n in (1024,)
        ]
    laws = [
        Case(dtype, head_dim, mask, 4096, law, heads=4)
        for head_dim in (64, 128, 256)
        for law in (LAWS if head_dim < 256 else ("outlier",))
        for dtype in ("f16", "bf16")
        for mask in ("full", "causal")
    ]
    lengths = [
        Case(dtype, 128, mask, length, "normal", heads=1)
        for length in (1024, 16384, 65536, 131072)
        for dtype in ("f16", "bf16")
        for mask in ("full", "causal")
    ]
    return laws + lengths


def fp8_cases(device: str) -> list[Case]:
    length = 4096 if device == "cuda" else 512
    dims = (64, 128, 256) if device == "cuda" else (64,)
    return [Case("f32", d, m, length, "outlier", 4) for d in dims for m in ("full", "causal")]


# ---- the golden file: {section: {case: {result: RMSE}}}. A section is a GPU backend or an
# instruction set of the CPU backend: with avx512_bf16 P is rounded, with the others it is not.

Section = dict[str, dict[str, float]]


def section(backend: str) -> Section:
    device = "cpu" if backend == "cpu" else "cuda"
    found = {}
    for case in golden_cases(device):
        (row,) = measure_case(case, device, True, only={f"pantile {backend}"})
        if row["absent"]:
            raise RuntimeError(f"{case.key}: {row['absent']}")
        found[case.key] = {name: e["rmse"] for name, e in row["errors"].items()}
    return found | fp8_part(backend, device)


def fp8_part(backend: str, device: str) -> Section:
    """The FP8 forward on the bf16 cases; nothing where no kernel serves it."""
    found = {}
    for case in (case for case in golden_cases(device) if case.dtype == "bf16"):
        inputs = draw(case, device)
        try:
            o = fp8_pantile(case, inputs, backend=backend)
        except pantile.UnsupportedError:
            return {}
        figures = errors({"o": o}, exact(case, inputs, False))["o"]
        found[case.key.replace("bf16", "fp8")] = {"o": figures["rmse"]}
    return found


def cpu_section(isa: str) -> Section | None:
    """In a process that is held to an instruction set; None where the processor lacks it."""
    done = subprocess.run(
        [sys.executable, __file__, "--section"],
        env=os.environ | {"PANTILE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    return answer["rows"] if answer["isa"] == isa else None


def print_section() -> None:
    print(json.dumps({"isa": pantile.devices()[0]["isa"], "rows": section("cpu")}))


def golden() -> dict[str, Section]:
    return json.loads(GOLDEN.read_text())


def write_golden(device: str) -> None:
    """Rewrites the sections of a device that this machine can measure and keeps the others."""
    sections = golden() if GOLDEN.exists() else {}
    if device == "cpu":
        measured = {f"cpu {isa}": cpu_section(isa) for isa in ISAS}
    else:
        served = {row["backend"] for row in pantile.kernels() if row["compiled"]}
        measured = {name: section(name) for name in ("hopper", "ampere") if name in served}
    sections |= {name: rows for name, rows in measured.items() if rows is not None}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(sections, indent=1) + "\n")
    print(f"{GOLDEN.name}: wrote {', '.join(n for n, rows in measured.items() if rows)}")


def worse(found: Section, stored: Section) -> list[str]:
    """What grew by more than 25 %, and what only one side has."""
    problems = [f"{key}: not in the golden file" for key in found if key not in stored]
    for key, figures in stored.items():
        if key not in found:
            problems.append(f"{key}: in the golden file, but not measured")
            continue
        for name, before in figures.items():
            now = found[key].get(name, math.nan)
            if not now <= WORSE * before:
                problems.append(f"{key}: RMSE of {name} is {now:.3g}, golden {before:.3g}")
    return problems


# ---- the command


def print_row(row: dict) -> None:
    label = f"{row['dtype']} d{row['head_dim']} {row['mask']} {row['length']} {row['law']}"
    if row["absent"]:
        print(f"{label:<32}{row['implementation']:<46}absent: {row['absent'][:60]}", flush=True)
        return
    figures = "  ".join(f"{n} {e['rmse']:.2e}/{e['max']:.1e}" for n, e in row["errors"].items())
    print(f"{label:<32}{row['implementation']:<46}{figures}", flush=True)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--out", type=pathlib.Path, help="write one JSON object a line here")
    p.add_argument("--golden", action="store_true", help="rewrite the golden file and stop")
    p.add_argument("--section", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--forward-only", action="store_true")
    p.add_argument("--only", choices=["all", "fp8", "rows"], default="all")
    return p.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.section:
        print_section()
        return
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no CUDA device")
    if arguments.golden:
        write_golden(device)
        return
    print("RMSE/largest error of each result against float64")
    report(measured_rows(arguments), arguments.out, device)


def measured_rows(arguments: argparse.Namespace) -> Iterator[dict]:
    device = arguments.device
    if arguments.only != "rows":
        for case in fp8_cases(device):
            yield from measure_fp8(case, device)
    if arguments.only != "fp8":
        for case in cases_of(device):
            yield from measure_case(case, device, not arguments.forward_only)


def report(rows: Iterator[dict], out: pathlib.Path | None, device: str) -> None:
    """Prints and writes each row as it comes, so that a long run that ends early leaves a file."""
    header = {
        "kind": "run",
        "commit": measure.commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    with contextlib.ExitStack() as stack:
        file = None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(out.open("w"))
            file.write(json.dumps(header) + "\n")
        for row in rows:
            print_row(row)
            if file is not None:
                file.write(json.dumps(row) + "\n")
                file.flush()
    if out is not None:
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
