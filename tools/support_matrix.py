#!/usr/bin/env python3
"""Writes the table of supported features into README.md and docs: one row a feature, one column a
backend. Dtypes, head dims and masks come from the kernel table, GPUs from the last verification.

A page holds the table between the lines
    <!-- support-matrix: begin -->    and    <!-- support-matrix: end -->
`--check` changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys

import results_docs

ROOT = results_docs.ROOT
BEGIN, END = "<!-- support-matrix: begin -->", "<!-- support-matrix: end -->"
BACKENDS = ("hopper", "ampere", "cpu")
DTYPES = ("f32", "f16", "bf16", "e4m3")
MASKS = ("full", "causal", "window")
HARDWARE = {
    "hopper": "H100, H200 (sm_90a)",
    "ampere": "compute capability 8.0 or later, FP8 8.9 or later (code for sm_80 and, FP8, sm_89, "
    "f32 also for sm_90; PTX)",
    "cpu": "x86-64 (AVX2, AVX-512), others by portable code",
}
# Promises of the contract, which tests/python/test_contract.py holds every backend to.
EVERY_BACKEND = (
    "any query and key lengths, also zero",
    "grouped-query and multi-query heads",
    "packed sequences, `seqused`",
    "LSE returned and differentiable",
    "largest logit, float32 output",
)
# Variants (docs/variants.md): the feature of a row of the kernel table, and its name here.
VARIANTS = {
    "softcap": "softcap",
    "alibi": "ALiBi",
    "bias": "bias",
    "sinks": "sinks",
    "dropout": "dropout",
    "block_mask": "block masks",
    "documents": "documents",
    "element_mask": "bool masks",
    "prefix": "prefixes",
    "score": "score expressions",
    "mask_expression": "mask expressions",
}
# Gradients beside dQ, dK and dV.
GRADIENTS = {
    "grad_bias": "bias",
    "grad_alibi": "ALiBi slopes",
    "grad_sinks": "sinks",
    "grad_captured": "tensors of a score expression",
}
# Keys that do not lie one sequence after the other (docs/usage.md); of a forward.
KEY_PLACES = {"key_ranges": "ranges", "mask_shift": "shifts of the mask", "paged": "pages"}
# Of decode (docs/inference.md); a kernel may serve less.
CACHES = {
    "paged": "pages",
    "v_in_k": "latent (MLA)",
    "cache_e4m3": "e4m3",
    "cache_int8": "int8",
    "tree_mask": "tree masks",
}
DETERMINISTIC = {"hopper": "optional", "ampere": "optional; f32 always", "cpu": "always"}
Row = tuple[str, str, str, str, str]  # backend, pass, dtype, head dims, mask


def read_rows() -> list[Row]:
    """The rows of cuda/kernels.def and the CPU rows of cpp/host/kernel_table.cc."""
    rows: list[Row] = []
    for line in (ROOT / "cuda/kernels.def").read_text().splitlines():
        if match := re.match(r"PANTILE_KERNEL\((\w+), (\w+), (\w+), (\d+), (\d+), (\w+)\b", line):
            backend, way, dtype, dim, dim_v, mask = match.groups()
            rows.append((backend, way, dtype, dim if dim == dim_v else f"{dim}x{dim_v}", mask))
    table = (ROOT / "cpp/host/kernel_table.cc").read_text()
    problem = (ROOT / "cpp/include/pantile/problem.h").read_text()
    largest = re.search(r"kMaxHeadDim = (\d+)", problem)
    cached = (ROOT / "cpp/include/pantile/kv.h").read_text()
    largest_cached = re.search(r"kMaxKvHeadDim = (\d+)", cached)
    scaling = (ROOT / "cpp/core/scaling.h").read_text()
    largest_fp8 = re.search(r"kMaxFp8Dim = (\d+)", scaling)
    for backend, way, dtype in re.findall(
        r'"(cpu|reference)_([a-z]+)_\w+",[^()]*DType::(\w+)', table
    ):
        most = largest_fp8 if way == "quantize" or dtype == "e4m3" else largest
        most = largest_cached if way in ("decode", "append") else most
        rows.append((backend, way, dtype, f"1 to {most[1]}", "any"))
    return rows


def feature_text(names: str, sets: dict[str, str], seen: frozenset = frozenset()) -> str:
    """A set of features, or an expression of sets, with the sets that it names written out."""
    named = [x for x in re.findall(r"\w+", names) if x in sets and x not in seen]
    return names + "".join(feature_text(sets[x], sets, seen | {x}) for x in named)


def features_of(
    backend: str, names: dict[str, str], ways: tuple[str, ...] = ("forward", "backward")
) -> str:
    """Of the backend's rows that have most: a kernel may serve less."""
    header = ROOT / "cpp/host/features.h"
    sets = dict(re.findall(r"FeatureSet (\w+)[({ =]([^;]*);", header.read_text()))
    if backend == "cpu":
        table = (ROOT / "cpp/host/kernel_table.cc").read_text()
        maker = "kv_info(" if ways == ("decode",) else "cpu_info("
        used = [table.partition(maker)[2].partition("\n}\n")[0]]
    else:
        kernels = (ROOT / "cuda/kernels.def").read_text()
        way = "|".join(ways)
        used = re.findall(rf"PANTILE_KERNEL\({backend}, (?:{way}), .*, (\w+)\)", kernels)
    text = " ".join(feature_text(x, sets) for x in sorted(set(used)))
    return ", ".join(n for x, n in names.items() if re.search(rf"Feature::{x}\b", text)) or "no"


def listed(values: set[str], order: tuple[str, ...] | None = None) -> str:
    if order:
        return ", ".join(v for v in order if v in values) or "no"
    return ", ".join(sorted(values, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])) or "no"


def gpu_tested() -> dict[str, str]:
    """Backend -> the GPU on which its kernels passed tests, by docs/gpu-verification.json."""
    path = ROOT / "docs/gpu-verification.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    backends = {name.split("_")[0] for name, counts in record["kernels"].items() if counts[0] > 0}
    return {backend: record["facts"]["gpu"].removeprefix("NVIDIA ") for backend in backends}


def context_parallelism(backend: str) -> str:
    """Between GPUs it counts as tested when a results file says so."""
    measured = any((ROOT / "benchmarks/results").glob("*distributed*.jsonl"))
    return "yes" if backend == "cpu" or measured else "yes; not yet run on GPUs"


def make_table() -> str:
    rows = read_rows()
    tested = gpu_tested()

    def dtypes(backend: str, way: str) -> str:
        return listed({r[2] for r in rows if r[:2] == (backend, way)} - {"e4m3"}, DTYPES)

    def dims(backend: str, way: str, fp8: bool) -> str:
        chosen = {r[3] for r in rows if r[:2] == (backend, way) and (r[2] == "e4m3") == fp8}
        return listed(chosen)

    def masks(backend: str) -> str:
        found = {r[4] for r in rows if r[0] == backend and r[1] in ("forward", "backward")}
        return listed(set(MASKS) if "any" in found else found, MASKS)

    features = {
        "hardware": lambda b: HARDWARE[b],
        "tests run on": lambda b: "every CI machine" if b == "cpu" else tested.get(b, "no GPU yet"),
        "forward": lambda b: dtypes(b, "forward"),
        "backward": lambda b: dtypes(b, "backward"),
        "kernels for head dims, forward": lambda b: dims(b, "forward", False),
        "kernels for head dims, backward": lambda b: dims(b, "backward", False),
        "FP8 (e4m3) kernels for head dims, forward": lambda b: dims(b, "forward", True),
        "FP8 (e4m3) kernels for head dims, backward": lambda b: dims(b, "backward", True),
        "[decode over a KV cache](docs/inference.md)": lambda b: dtypes(b, "decode"),
        "decode, kernels for head dims": lambda b: dims(b, "decode", False),
        "append to a KV cache, with rotary": lambda b: dtypes(b, "append"),
        "caches of decode": lambda b: features_of(b, CACHES, ("decode",)),
        "masks": masks,
        **{name: lambda b: "yes" for name in EVERY_BACKEND},
        "[variants](docs/variants.md)": lambda b: features_of(b, VARIANTS),
        "[keys](docs/usage.md#4-parts-of-the-keys) in 16 bits, CPU also f32": lambda b: features_of(
            b, KEY_PLACES
        ),
        "gradients of variants' tensors": lambda b: features_of(b, GRADIENTS, ("backward",)),
        "[context parallelism](docs/distributed.md)": context_parallelism,
        "deterministic gradients": lambda b: DETERMINISTIC[b],
    }
    rows = [[name, *map(value, BACKENDS)] for name, value in features.items()]
    return "\n".join(results_docs.table(["feature", *(f"`{b}`" for b in BACKENDS)], rows))


def main() -> int:
    check = results_docs.only_check()
    block = f"{BEGIN}\n{make_table()}\n{END}"
    stale = 0
    for page in results_docs.pages(ROOT):
        text = page.read_text()
        new = re.sub(f"{BEGIN}.*?{END}", lambda _: block, text, flags=re.DOTALL)
        stale += results_docs.rewrite(page, new, check)
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
