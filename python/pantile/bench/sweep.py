"""A case times its contenders: one line of a results file.

A results file holds one object a line: a "run" (commit, device, versions, clocks and power during
the run), a "timing" for each case and pass with every contender and the reason of each absent one,
and a "summary" for each pass and cache state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import pantile
from pantile.bench import check, figures, harness, measure, peers
from pantile.bench.cases import Case
from pantile.bench.figures import OURS
from pantile.bench.measure import Contender
from pantile.bench.peers import FP8, Problem
from pantile.experimental import SoftmaxOptions

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
    graphs: bool = False  # time replays of a captured call as well
    deterministic: bool = False  # time our deterministic backward as well
    softmax: bool = False  # time every softmax of the Ampere forward as well


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


# Our variants: what is timed beside ours, by what `pantile bench` is asked for.
FP8_VARIANTS = ("mixed", "exp2", "quantising", "bfloat16")
SOFTMAX_VARIANTS: dict[str, dict] = {  # of the Ampere forward (docs/design/flashattention-t.md)
    "vector, always": {"softmax": "vector", "rescale_threshold": 0},
    "vector": {"softmax": "vector"},
    "tensor": {"softmax": "tensor"},
    "share 1/4": {"softmax": "tensor", "tensor_share": 0.25},
    "share 1/2": {"softmax": "tensor", "tensor_share": 0.5},
    "share 1/2 rows": {"softmax": "tensor", "tensor_share": 0.5, "tensor_split": "rows"},
    "share 1": {"softmax": "tensor", "tensor_share": 1},
    "surrogate": {"softmax": "tensor", "softmax_mode": "surrogate"},
    "fast_scale": {"softmax": "tensor", "softmax_mode": "fast_scale"},
}


def options_of(**chosen: Any) -> pantile.Options:
    """From words of the command line, which Options checks."""
    return pantile.Options(**chosen)


def ours_fp8(name: str, problem: Problem, backend: str, keywords: dict) -> Contender | str:
    """Block-scaled, rotated, smoothed operands. But for two of the variants (other exponentials,
    the quantiser in every call, the same call on bfloat16), what quantising costs is not in the
    time, as for peers."""
    if problem.cu_seqlens is not None:
        return "packed FP8 sequences are not measured"
    if problem.differentiates:
        return "FP8 backward is not measured"
    variant = name.removeprefix(f"{OURS}, ")
    exp = variant if variant in ("mixed", "exp2") else "code"
    keywords |= {"options": options_of(backend=backend, fp8_exp=exp)}
    q, k, v = (x.bfloat16() for x in (problem.q, problem.k, problem.v))
    quantized = pantile.quantize(q, k, v)
    call = {
        "bfloat16": lambda: pantile.attention(q, k, v, **keywords),
        "quantising": lambda: pantile.attention(pantile.quantize(q, k, v), **keywords),
    }.get(variant, lambda: pantile.attention(quantized, **keywords))
    call()
    return peers.contender(name, problem, call, lambda: (call(),))


def ours(problem: Problem, backend: str, name: str = OURS) -> Contender | str:
    """Our call, or the variant of it that the name says, or why there is none."""
    case, variant = problem.case, name.removeprefix(f"{OURS}, ")
    keywords: dict = {"causal": case.causal}
    if case.window_left is not None:
        keywords["window"] = (case.window_left, 0)
    try:
        if problem.dtype == FP8:
            return ours_fp8(name, problem, backend, keywords)
        softmax = SoftmaxOptions(**SOFTMAX_VARIANTS.get(variant, {}))
        options = options_of(backend=backend, softmax=softmax)
        keywords |= {"options": options, "deterministic": name == DETERMINISTIC}
        leaves, bounds = problem.leaves(), problem.cu_seqlens

        def forward():
            if bounds is None:
                return pantile.attention(*leaves, **keywords)
            longest = (case.seqlen, case.seqlen)
            return pantile.varlen_attention(*leaves, bounds, bounds, *longest, **keywords)

        return peers.differentiable(name, problem, forward, leaves)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return peers.first_line(error)


def variants(what: str, setup: Setup) -> list[str]:
    names: list[str] = []
    if what == "forward":
        names += FP8_VARIANTS if setup.dtype == "float8" else ()
        names += SOFTMAX_VARIANTS if setup.softmax else ()
    if what == "backward" and setup.deterministic:
        return [DETERMINISTIC]
    return [f"{OURS}, {name}" for name in names]


def _figures(contender: Contender, flops: float) -> dict:
    return {
        "ms": round(contender.median(), 5),
        "ms_p20": round(contender.percentile(0.2), 5),
        "ms_p80": round(contender.percentile(0.8), 5),
        "tflops": float(f"{flops / contender.median() / 1e9:.4g}"),
    }


Makers = dict[str, Callable[[], "Contender | str"]]


def makers_of(problem: Problem, setup: Setup) -> Makers:
    known = peers.of_device(setup.device)
    names = (OURS, *variants(problem.what, setup))
    mine: Makers = {name: partial(ours, problem, setup.backend, name) for name in names}
    return mine | {name: partial(known[name], name, problem) for name in setup.peers}


def _captured(make: Callable[[], Contender | str]) -> Contender | str:
    try:
        return measure.in_graph(make)
    except Exception as error:  # each library raises a type of its own
        return peers.first_line(error)


def measure_case(case: Case, what: str, setup: Setup) -> dict:
    """One line of the results file: every contender's milliseconds and TFLOP/s."""
    problem = make_problem(case, what, setup)
    judge = check.Judge(problem)
    absent: dict[str, str] = {}
    wrong: dict[str, None] = {}

    def judged(makers: Makers, suffix: str = "") -> list[Contender]:
        """Those that can be made and are right."""
        found = []
        for name, make in makers.items():
            made = make()
            if isinstance(made, Contender):
                reason = judge.wrong(made)
                if not reason:
                    found.append(made)
                    continue
                wrong[name] = None
                made = reason
            absent[name + suffix] = made
        return found

    makers = makers_of(problem, setup)
    running = judged(makers)
    results: dict[str, dict] = {}

    def timed(state: str, contenders: list[Contender]) -> None:
        flushed, rounds = state == "flushed", setup.rounds
        measure.interleave(contenders, rounds=rounds, round_ms=setup.round_ms, flushed=flushed)
        results[state] = {c.name: _figures(c, case.flops(what)) for c in contenders}

    timed("back_to_back", running)
    if setup.flushed:
        timed("flushed", running)
    if setup.graphs:
        eager: Makers = {c.name: partial(_captured, makers[c.name]) for c in running}
        timed("graph", judged(eager, ", in a CUDA graph"))
    return {
        "kind": "timing",
        "case": case.name,
        "pass": what,
        "dtype": setup.dtype,
        "float32_precision": torch.get_float32_matmul_precision(),
        **{k: v for k, v in asdict(case).items() if k not in ("name", "lengths")},
        "absent": absent,
        "wrong": list(wrong),
        "results": results,
    }


# ---- results files


def header(setup: Setup) -> dict:
    if setup.device == "cuda":
        return harness.header(backend=setup.backend, peers=peers.versions())
    cpu = next(device for device in pantile.devices() if device["type"] == "cpu")
    line = {"backend": setup.backend, "cpu": cpu["name"], "isa": cpu["isa"]}
    line |= {"torch_isa": torch.backends.cpu.get_cpu_capability()}
    return harness.header("cpu", **line, threads=torch.get_num_threads())


def joined(earlier: list[dict], lines: list[dict]) -> list[dict]:
    """The lines of one results file for two runs of the same build, one after the other."""
    rows = [line for line in [*earlier, *lines] if line["kind"] == "timing"]
    both = (earlier[0], lines[0])
    first = earlier[0] | {
        "commands": [command for run in both for command in run.get("commands", [])],
        "seconds": round(sum(run.get("seconds", 0.0) for run in both), 1),
    }
    return [first, *rows, *figures.summarise(rows)]
