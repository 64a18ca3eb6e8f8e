"""Tables of docs/experiments/hopper-backward.md: measured cells, deterministic mode, variants."""

from __future__ import annotations

import pathlib

import results_speed as speed
from results_files import OURS, RESULTS, lines_of, link, mean, table

STATE = "back_to_back"
DETERMINISTIC = f"{OURS}, deterministic"
AIMED = {64: 0.92, 128: 0.92, 256: 0.80}  # of the ordinary mode's speed
AIMED_FROM = 4096  # keys
CELLS = RESULTS / "h200_backward.jsonl"
MORE_CELLS = RESULTS / "h200_backward_d96_d192.jsonl"
VARIANTS = RESULTS / "h200_backward_variants.jsonl"


def cells(page: pathlib.Path) -> list[str]:
    return speed.cells(CELLS, "backward", page)


def more_cells(page: pathlib.Path) -> list[str]:
    return speed.cells(MORE_CELLS, "backward", page)


def deterministic(page: pathlib.Path) -> list[str]:
    """Share of the ordinary mode's speed, by head dim and mask."""
    shares: dict[tuple[int, bool], dict[int, float]] = {}
    for line in lines_of(CELLS):
        results = line["results"][STATE] if line["kind"] == "timing" else {}
        if DETERMINISTIC in results and speed.is_grid(line):
            share = results[OURS]["ms"] / results[DETERMINISTIC]["ms"]
            key = (line["head_dim"], line["causal"])
            shares.setdefault(key, {})[line["seqlen"]] = share
    if not shares:
        return ["Not measured in this run."]
    lengths = sorted({n for row in shares.values() for n in row})
    rows = [
        [f"{d} {'causal' if causal else 'full'}"]
        + [f"{row[n]:.3f}" if n in row else "-" for n in lengths]
        for (d, causal), row in sorted(shares.items())
    ]
    everything = [share for row in shares.values() for share in row.values()]
    return [
        f"Speed against the ordinary mode in the same run ({link(CELLS, page)}), geometric mean "
        f"{mean(everything):.3f}, {min(everything):.2f} to {max(everything):.2f}:",
        "",
        *table(["d, mask", *map(str, lengths)], rows),
        "",
        aims_text(shares),
    ]


def aims_text(shares: dict[tuple[int, bool], dict[int, float]]) -> str:
    """How many cells keep what the deterministic mode was to keep."""
    texts = []
    for head_dim, aim in AIMED.items():
        found = [
            share
            for (d, _), row in shares.items()
            for length, share in row.items()
            if d == head_dim and length >= AIMED_FROM
        ]
        if found:
            reached = f"{sum(share >= aim for share in found)} of {len(found)} cells reach it"
            texts.append(f"{aim:.2f} at head dim {head_dim} ({reached}, worst {min(found):.3f})")
    return f"Aimed at from {AIMED_FROM} keys on: {', '.join(texts)}."


def variants(page: pathlib.Path) -> list[str]:
    """What was tried: TFLOP/s of every variant, interleaved with the others of its column."""
    lines = lines_of(VARIANTS)
    names = {line["variant"]: line["what"] for line in lines if line["kind"] == "variant"}
    timed = [line for line in lines if line["kind"] == "variant_timing"]
    out = [f"TFLOP/s, variants of a column interleaved ({link(VARIANTS, page)}).", ""]
    for title in dict.fromkeys(line["table"] for line in timed):
        columns = [line for line in timed if line["table"] == title]
        rows = [
            [what, *(f"{c['tflops'][v]:.0f}" if v in c["tflops"] else "-" for c in columns)]
            for v, what in names.items()
            if any(v in c["tflops"] for c in columns)
        ]
        out += [*table([title, *(c["case"] for c in columns)], rows), ""]
    return out[:-1]


def conversions(page: pathlib.Path) -> list[str]:
    """How dQ is made integer: the deterministic mode's share of the ordinary mode's speed."""
    lines = lines_of(VARIANTS)
    names = {line["variant"]: line["what"] for line in lines if line["kind"] == "variant"}
    shares: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["kind"] == "share":
            share = line["deterministic"] / line["ordinary"]
            shares.setdefault(line["variant"], {})[line["case"]] = share
    out = [
        "Share of the ordinary mode's speed, both modes interleaved in one process a row "
        f"({link(VARIANTS, page)}):"
    ]
    cases = dict.fromkeys(case for row in shares.values() for case in row)
    for head_dim in dict.fromkeys(case.split()[0] for case in cases):
        columns = [case for case in cases if case.split()[0] == head_dim]
        rows = [
            [names[variant], *(f"{row[c]:.3f}" if c in row else "-" for c in columns)]
            for variant, row in shares.items()
            if any(c in row for c in columns)
        ]
        out += ["", *table(["conversion", *columns], rows)]
    return out


def stalls(page: pathlib.Path) -> list[str]:
    """Where the warps of the consumers were found, share of the samples."""
    (found,) = (line for line in lines_of(VARIANTS) if line["kind"] == "stalls")
    parts = sorted(found["parts"].items(), key=lambda part: -part[1])
    texts = (f"{name} {100 * count / found['samples']:.0f} %" for name, count in parts)
    return [f"{found['case']} ({link(VARIANTS, page)}): {', '.join(texts)}."]
