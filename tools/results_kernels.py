"""Measured cells on the kernels' own pages: hopper.md, ampere.md, fp8.md, cpu.md."""

from __future__ import annotations

import json
import pathlib

import results_files
import results_speed as speed
from results_files import OURS, lines_of, link, table

STATE = "back_to_back"
ABSENT = ["Not measured yet."]


def _timings(name: str) -> list[dict]:
    path = results_files.RESULTS / name
    lines = lines_of(path) if path.exists() else []
    return [line for line in lines if line["kind"] == "timing" and OURS in line["results"][STATE]]


# ---- Hopper


def forward_cells(page: pathlib.Path) -> list[str]:
    path = results_files.RESULTS / "h200_forward.jsonl"
    if not path.exists():
        return ABSENT
    return [*speed.cells(path, "forward", page), "", causal_share(_timings(path.name))]


def causal_share(rows: list[dict]) -> str:
    """The causal mask's time over the full one's, at the longest length that has both."""
    grid = {
        (r["head_dim"], r["seqlen"], r["causal"]): r["results"][STATE][OURS]["ms"]
        for r in rows
        if r["pass"] == "forward" and speed.is_grid(r)
    }
    both = [(d, n) for d, n, causal in grid if causal and (d, n, False) in grid]
    longest = max(n for _, n in both)
    shares = ", ".join(
        f"{grid[d, n, True] / grid[d, n, False]:.2f} (d{d})"
        for d, n in sorted(both)
        if n == longest
    )
    return f"At {longest} keys a causal mask takes {shares} of the full mask's time."


# ---- FP8


def fp8_cells(page: pathlib.Path) -> list[str]:
    path = results_files.RESULTS / "h200_fp8.jsonl"
    return speed.cells(path, "forward", page) if path.exists() else ABSENT


def fp8_quantiser(page: pathlib.Path) -> list[str]:
    path = results_files.RESULTS / "h200_fp8_variants.jsonl"
    lines = lines_of(path) if path.exists() else []
    found = [line for line in lines if line["kind"] == "quantise"]
    if not found:
        return ABSENT
    kinds = list(dict.fromkeys(line["what"] for line in found))
    cells = {
        (line["head_dim"], line["what"]): f"{line['ms']:.3f} ms, {line['gb_per_s'] / 1e3:.2f} TB/s"
        for line in found
    }
    dims = sorted({d for d, _ in cells})
    rows = [[f"{d}", *(cells.get((d, kind), "-") for kind in kinds)] for d in dims]
    (copy,) = (line["gb_per_s"] / 1e3 for line in lines if line["kind"] == "copy")
    return [
        f"Q, K and V of 16384 tokens from bf16 ({link(path, page)}); a device copy of as many "
        f"bytes runs at {copy:.2f} TB/s.",
        "",
        *table(["head dim", *kinds], rows),
    ]


# ---- Ampere


def ampere_cells(page: pathlib.Path) -> list[str]:
    path = results_files.RESULTS / "h200_ampere.jsonl"
    if not path.exists():
        return ABSENT
    out = []
    for what in ("forward", "backward"):
        facts, *rest = speed.cells(path, what, page)
        out += [
            f"Forward. {facts}" if what == "forward" else "Backward, in the same run.",
            *rest,
            "",
        ]
    return out[:-1]


FLOAT32 = {"`tf32`": "h200_ampere_tf32.jsonl", "`highest`": "h200_ampere_float32.jsonl"}


def ampere_float32(page: pathlib.Path) -> list[str]:
    """TFLOP/s of fp32 inputs, full / causal, at the one length that was measured."""
    found = {kind: _timings(name) for kind, name in FLOAT32.items()}
    if not any(found.values()):
        return ABSENT
    everything = [row for rows in found.values() for row in rows if speed.is_grid(row)]
    length = max(row["seqlen"] for row in everything)
    dims = sorted({row["head_dim"] for row in everything})
    speeds: dict[tuple, dict[tuple, float]] = {}
    for kind, rows in found.items():
        for row in (r for r in rows if speed.is_grid(r) and r["seqlen"] == length):
            for name, figures in row["results"][STATE].items():
                key = (row["pass"], kind if name == OURS else name)
                speeds.setdefault(key, {})[row["head_dim"], row["causal"]] = figures["tflops"]

    def cell(of: dict[tuple, float], d: int) -> str:
        texts = [f"{of[d, causal]:.0f}" if (d, causal) in of else "-" for causal in (False, True)]
        return " / ".join(texts)

    order = sorted(speeds, key=lambda key: (key[0] != "forward", key[1] not in FLOAT32))
    files = ", ".join(
        link(results_files.RESULTS / name, page) for k, name in FLOAT32.items() if found[k]
    )
    out = [
        f"{length} keys, full / causal, TFLOP/s ({files}).",
        "",
        *table(
            ["", *(f"d{d}" for d in dims)],
            [
                [f"{what}, {name}", *(cell(speeds[what, name], d) for d in dims)]
                for what, name in order
            ],
        ),
    ]
    for what in ("forward", "backward"):
        for kind, rows in found.items():
            values = speed.ratios(rows, what, STATE)
            lost = sorted((v, case) for case, v in values.items() if v < 1)
            if lost:
                cases = ", ".join(f"{case} {v:.2f}" for v, case in lost)
                out += ["", f"Slower than the peer: {what} by {kind} at {cases}."]
    return out


# ---- CPU

CPU = ("cpu.jsonl", "cpu_avx2.jsonl")


def cpu_bars(page: pathlib.Path) -> list[str]:
    """Which cells reach what is promised, and what the others would have needed."""
    out, missed = [], []
    for name in CPU:
        rows = [row for row in _timings(name) if row.get("bar") is not None]
        if not rows:
            continue
        isa = lines_of(results_files.RESULTS / name)[0]["isa"]
        met = sum(row["met"] for row in rows)
        out.append(f"{link(results_files.RESULTS / name, page)}: {met} of {len(rows)} cells reach")
        for row in (row for row in rows if not row["met"]):
            ours, peer = (row["results"][STATE][n]["tflops"] * 1e3 for n in (OURS, "torch"))
            case = f"{row['pass']}, {row['dtype']}, {' '.join(row['case'].split()[:2])}"
            figures = [f"{ours:.0f}", f"{peer:.0f}", f"{row['ratio']:.2f}", f"{row['bar']:.2f}"]
            missed.append([case, isa, *figures, f"{peer * row['bar']:.0f}"])
    if not out:
        return ABSENT
    out = [f"{'; '.join(out)} what is promised."]
    if missed:
        columns = [
            "missed",
            "instructions",
            "ours, GFLOP/s",
            "torch",
            "ratio",
            "promised",
            "needed",
        ]
        out += ["", *table(columns, missed)]
    ceiling = results_files.RESULTS / "cpu_ceiling.json"
    if ceiling.exists():
        found = json.loads(ceiling.read_text())
        out += [
            "",
            f"torch's own float32 matrix product reaches {found['sgemm_gflops']} GFLOP/s there; a "
            f"call on `[1, 1, 1, 8]` costs {found['forward_us']:.1f} us forward and "
            f"{found['forward_backward_us']:.0f} us with the backward ({link(ceiling, page)}).",
        ]
    return out
