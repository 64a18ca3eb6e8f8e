#!/usr/bin/env python3
"""How far every backend and its peers are from float64: RMSE, largest and relative error.

    python tools/accuracy.py                                 # CPU, small lengths, a table
    python tools/accuracy.py --device cuda --out benchmarks/results/h200_accuracy.jsonl
    python tools/accuracy.py --only gradients --device cuda  # K and V with a common part
    python tools/accuracy.py --only modes --device cuda      # every softmax, to 131,072 keys
    python tools/accuracy.py --golden                        # rewrite tests/golden/accuracy.json,
    python tools/accuracy.py --golden --device cuda          # and its GPU sections

Inputs are drawn on the CPU from a fixed seed, so every machine sees the same ones. The laws:

    normal   N(0, 1)
    outlier  N(0, 1) + N(0, 100) * Bernoulli(0.001), the law of FlashAttention-3's FP8 table
    shifted  V has mean 1: a biased accumulator shows
    peaked   Q eight times as large: nearly one-hot rows

for the softmax modes of the Ampere forward (`--only modes`, without LSE, which would choose the
vector softmax; docs/design/flashattention-t.md):

    growing  keys in the order in which they are visited bring ever larger scores
    uniform  Q a thousandth, V of mean 1: all weights nearly equal, sums of one sign

and for gradients: K and V offset by 3; channel means of K of 3 sigma, V of mean 1; the same with
outliers in Q, K and V. Ours is there also as it would be without the low bits of O.

`--golden` stores the RMSE that tests/python/test_accuracy.py holds the code to: no figure may grow
by more than 25 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from unittest import mock

import pantile
import torch
from accuracy_cases import (
    DTYPES,
    GRADIENT_LAWS,
    LAWS,
    MODE_LAWS,
    Case,
    Tensors,
    draw,
    errors,
    exact,
)
from accuracy_fp8 import FP8_METHODS, fp8_pantile
from pantile import reference
from pantile.bench import harness, peers
from pantile.experimental import SoftmaxOptions
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden/accuracy.json"
WORSE = 1.25
ISAS = ("baseline", "avx2", "avx512")
BACKWARD = ("dq", "dk", "dv")
MOST_TEXTBOOK = 8192**2  # scores of a head that implementations may store
# Of the Ampere forward; all but the first four need a build with PANTILE_EXPERIMENTS.
SOFTMAXES: dict[str, dict] = {
    "auto": {},
    "vector": {"softmax": "vector"},
    "vector, always": {"softmax": "vector", "rescale_threshold": 0},
    "tensor": {"softmax": "tensor"},
    "share 1/4": {"softmax": "tensor", "tensor_share": 0.25},
    "share 1/2": {"softmax": "tensor", "tensor_share": 0.5},
    "share 1/2 rows": {"softmax": "tensor", "tensor_share": 0.5, "tensor_split": "rows"},
    "share 1": {"softmax": "tensor", "tensor_share": 1},
    "surrogate": {"softmax": "tensor", "softmax_mode": "surrogate"},
    "fast_scale": {"softmax": "tensor", "softmax_mode": "fast_scale"},
}


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
        options = pantile.Options(backend=backend)
        o, lse = pantile.attention(q, k, v, causal=case.causal, return_lse=True, options=options)
        return {"o": o, "lse": lse}

    return _with_gradients(case, inputs, backward, forward)


def run_rounded(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """Ours as it was when delta came from the 16-bit O."""
    with mock.patch("pantile._direct.keeps_low", return_value=False):
        return run_pantile("auto", case, inputs, backward)


def run_sdpa(backend, case: Case, inputs: Tensors, backward: bool) -> Tensors:
    def forward(*leaves):
        with sdpa_kernel(backend):
            o = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in leaves), is_causal=case.causal
            )
        return {"o": o.transpose(1, 2)}

    return _with_gradients(case, inputs, backward, forward)


def run_textbook(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    """Every step in the case's dtype, as a program of framework operations does it."""
    if case.length * (case.queries or case.length) > MOST_TEXTBOOK:
        raise RuntimeError("the score matrix is too large")

    def forward(q, k, v):
        o, lse = reference.attention(q, k, v, causal=case.causal, dtype=None)
        return {"o": o, "lse": lse}

    return _with_gradients(case, inputs, backward, forward)


def run_softmax(backend: str, name: str, case: Case, inputs: Tensors, _backward: bool) -> Tensors:
    """O of a call that returns no LSE."""
    q, k, v = (inputs[n].to(DTYPES[case.dtype]) for n in ("q", "k", "v"))
    softmax = SoftmaxOptions(**{"softmax": "auto", "tensor_share": None, **SOFTMAXES[name]})
    options = pantile.Options(backend=backend, softmax=softmax)
    return {"o": pantile.attention(q, k, v, causal=case.causal, options=options)}


def run_fa3(case: Case, inputs: Tensors, backward: bool) -> Tensors:
    q, k, v = (inputs[n].to(DTYPES[case.dtype]) for n in ("q", "k", "v"))
    settings = {"softmax_scale": case.head_dim**-0.5, "is_causal": case.causal}
    return {"o": peers.fa3_operators().fwd(q, k, v, **settings)[0]}


Method = Callable[[Case, Tensors, bool], Tensors]


def implementations(device: str, rounded: bool = False) -> dict[str, Method]:
    if device == "cpu":
        return {
            "pantile cpu": partial(run_pantile, "cpu"),
            "torch": partial(run_sdpa, SDPBackend.FLASH_ATTENTION),
            "textbook": run_textbook,
        }
    return {
        "pantile hopper": partial(run_pantile, "hopper"),
        "pantile ampere": partial(run_pantile, "ampere"),
        **({"pantile, O rounded": run_rounded} if rounded else {"FA3": run_fa3}),
        "cuDNN (torch)": partial(run_sdpa, SDPBackend.CUDNN_ATTENTION),
        "FA2 (torch)": partial(run_sdpa, SDPBackend.FLASH_ATTENTION),
        "textbook": run_textbook,
    }


def modes(device: str) -> dict[str, Method]:
    """Each softmax that a backend has; the CPU has one."""
    backend, names = ("ampere", SOFTMAXES) if device == "cuda" else ("cpu", ("auto", "vector"))
    methods = {f"pantile {backend}, {x}": partial(run_softmax, backend, x) for x in names}
    return methods | {"textbook": run_textbook}


# ---- rows


def measure_case(
    case: Case, device: str, backward: bool, methods: dict[str, Method], kind: str = "accuracy"
) -> Iterator[dict]:
    inputs = draw(case, device)
    truth = exact(case, inputs, backward)
    for name, function in methods.items():
        row = {"kind": kind, "device": device, "implementation": name, **asdict(case)}
        row |= {"absent": None, "errors": {}}
        try:
            row["errors"] = errors(function(case, inputs, backward), truth)
        except Exception as error:  # peers raise types of their own; each is named in its row
            row["absent"] = peers.first_line(error)
        yield row


def measure_fp8(case: Case, device: str) -> Iterator[dict]:
    def method(function) -> Method:
        return lambda case, inputs, _backward: {"o": function(case, inputs)}

    methods = {name: method(function) for name, function in FP8_METHODS.items()}
    return measure_case(case, device, False, methods, "accuracy_fp8")


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


def gradient_cases(device: str) -> list[Case]:
    lengths = (512, 1024, 2048, 4096) if device == "cuda" else (512,)
    laws = ("normal", *GRADIENT_LAWS)
    every = itertools.product(laws, lengths, ("bf16", "f16"), ("full", "causal"))
    return [Case(dtype, 128, mask, n, law, 4) for law, n, dtype, mask in every]


def mode_cases(device: str) -> list[Case]:
    """Long rows of a few queries, which the textbook can store, and causal ones of all queries."""
    if device == "cpu":
        return [Case("bf16", 64, "full", 1024, law, queries=64) for law in MODE_LAWS]
    lengths = ((1024, 0), (8192, 0), (32768, 512), (131072, 512))
    dims = itertools.product(lengths, MODE_LAWS, (64, 128), ("f16", "bf16"))
    full = [Case(d, n, "full", length, law, 1, queries=q) for (length, q), law, n, d in dims]
    every = itertools.product((1024, 8192, 131072), MODE_LAWS, (64, 128), ("f16", "bf16"))
    return full + [Case(d, n, "causal", length, law, 1) for length, law, n, d in every]


# ---- the golden file: {section: {case: {result: RMSE}}}. A section is a GPU backend or an
# instruction set of the CPU backend.

Section = dict[str, dict[str, float]]


def section(backend: str) -> Section:
    device = "cpu" if backend == "cpu" else "cuda"
    found = {}
    for case in golden_cases(device):
        method = {backend: implementations(device)[f"pantile {backend}"]}
        (row,) = measure_case(case, device, True, method)
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
        rmse = errors({"o": o}, exact(case, inputs, False))["o"]["rmse"]
        found[case.key.replace("bf16", "fp8")] = {"o": rmse}
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


def golden() -> dict[str, Section]:
    return json.loads(GOLDEN.read_text())


def write_golden(device: str, path: pathlib.Path) -> None:
    """Writes the sections of a device that this machine can measure, and the others as they are."""
    sections = golden() if GOLDEN.exists() else {}
    if device == "cpu":
        measured = {f"cpu {isa}": cpu_section(isa) for isa in ISAS}
    else:
        served = {row["backend"] for row in pantile.kernels() if row["compiled"]}
        measured = {name: section(name) for name in ("hopper", "ampere") if name in served}
    sections |= {name: rows for name, rows in measured.items() if rows is not None}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(sections, indent=1) + "\n")
    print(f"{path.name}: wrote {', '.join(n for n, rows in measured.items() if rows)}")


def worse(found: Section, stored: Section) -> list[str]:
    """What grew by more than 25 %, and what only one side has."""
    problems = [f"{key}: not in the golden file" for key in found if key not in stored]
    for key, figures_of in stored.items():
        if key not in found:
            problems.append(f"{key}: in the golden file, but not measured")
            continue
        for name, before in figures_of.items():
            now = found[key].get(name, math.nan)
            if not now <= WORSE * before:
                problems.append(f"{key}: RMSE of {name} is {now:.3g}, golden {before:.3g}")
    return problems


# ---- the command


def shown(row: dict) -> str:
    if row["kind"] == "run":
        return "RMSE/largest error of each result against float64"
    label = f"{row['dtype']} d{row['head_dim']} {row['mask']} {row['length']} {row['law']}"
    texts = (f"{n} {e['rmse']:.2e}/{e['max']:.1e}" for n, e in row["errors"].items())
    text = f"absent: {row['absent'][:60]}" if row["absent"] else "  ".join(texts)
    return f"{label:<32}{row['implementation']:<46}{text}"


def rows_of(chosen: argparse.Namespace) -> Iterator[dict]:
    """The lines of the results file."""
    device = chosen.device
    yield harness.header(device)
    if chosen.only in ("all", "fp8"):
        for case in fp8_cases(device):
            yield from measure_fp8(case, device)
    every = {
        "all": cases_of,
        "rows": cases_of,
        "gradients": gradient_cases,
        "fp8": lambda _: [],
        "modes": mode_cases,
    }
    of_modes = chosen.only == "modes"
    methods = implementations(device, rounded=chosen.only == "gradients")
    if of_modes:
        methods = modes(device)
    backward = not (chosen.forward_only or of_modes)
    kind = "accuracy_modes" if of_modes else "accuracy"
    for case in every[chosen.only](device):
        if re.search(chosen.match, case.key):
            yield from measure_case(case, device, backward, methods, kind)


def main() -> None:
    p = harness.parser(__doc__)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument(
        "--golden",
        action="store_true",
        help="rewrite the golden file, or write it to --out, and stop",
    )
    p.add_argument("--section", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--forward-only", action="store_true")
    p.add_argument("--only", choices=["all", "fp8", "rows", "gradients", "modes"], default="all")
    text = "only rows whose case, such as 'bf16 d128 causal', matches this regular expression"
    p.add_argument("--match", default="", help=text)
    chosen = p.parse_args()
    if chosen.section:
        print(json.dumps({"isa": pantile.devices()[0]["isa"], "rows": section("cpu")}))
        return
    if chosen.device == "cuda":
        harness.require_gpu()
    if chosen.golden:
        write_golden(chosen.device, chosen.out or GOLDEN)
    else:
        harness.emit(chosen.out, rows_of(chosen), shown)


if __name__ == "__main__":
    main()
