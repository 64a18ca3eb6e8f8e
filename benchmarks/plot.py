"""Draws result files: TFLOP/s against length, ratio heat maps, memory against length.

    python benchmarks/plot.py                                 # all of benchmarks/results
    python benchmarks/plot.py benchmarks/results/h200_forward.jsonl

An image lies beside its file and is named after it. It carries the hash of that file, so that
`stale` can tell when the file has changed since: `make lint` checks it. Needs matplotlib to draw,
nothing to check."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import struct
import sys
from collections.abc import Callable

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
SOURCE = "pantile-source"  # key of the hash among the text chunks of an image
OURS = "pantile"
STATE = "back_to_back"
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "fp32", "float8": "FP8"}


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def text_chunks(image: pathlib.Path) -> dict[str, str]:
    """The tEXt chunks of a PNG: length, type, data, checksum, one after the other."""
    data = image.read_bytes()
    found, at = {}, 8
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"tEXt":
            key, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
            found[key.decode("latin-1")] = value.decode("latin-1")
        at += 12 + length
    return found


# ---- which images a results file has


def grid_rows(lines: list[dict], what: str) -> list[dict]:
    """The cells of the grid: "d128 causal 4096" and the like, one dtype."""
    return [
        line
        for line in lines
        if line["kind"] == "timing"
        and line["pass"] == what
        and line["case"].split()[0] == f"d{line['head_dim']}"
        and len(line["case"].split()) == 3
        and OURS in line["results"].get(STATE, {})
    ]


def images(path: pathlib.Path) -> dict[pathlib.Path, Callable]:
    """Image -> function of (lines) that draws it, for one results file."""
    lines = read(path)
    found = {}
    for what in ("forward", "backward"):
        rows = grid_rows(lines, what)
        if len({row["seqlen"] for row in rows}) < 3:
            continue  # a quick look, not a curve
        stem = path.stem if path.stem.endswith(what) else f"{path.stem}_{what}"
        found[path.with_name(f"{stem}.png")] = lambda ls, w=what: draw_speed(ls, w)
        if any(len(row["results"][STATE]) > 1 for row in rows):
            found[path.with_name(f"{stem}_ratio.png")] = lambda ls, w=what: draw_ratio(ls, w)
    if any(line["kind"] == "memory" for line in lines):
        found[path.with_suffix(".png")] = draw_memory
    return found


def all_images() -> dict[pathlib.Path, tuple[pathlib.Path, Callable]]:
    """Image -> (results file, function)."""
    return {
        image: (path, function)
        for path in sorted(RESULTS.glob("*.jsonl"))
        if "_repeat" not in path.stem
        for image, function in images(path).items()
    }


def stale() -> list[str]:
    """What is wrong with the images of benchmarks/results."""
    problems = []
    for image, (path, _) in all_images().items():
        if not image.exists():
            problems.append(f"{image.name} is missing: run make docs")
        elif text_chunks(image).get(SOURCE) != digest(path):
            problems.append(f"{image.name} was not drawn from this {path.name}: run make docs")
    return problems


# ---- drawing


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def title_of(lines: list[dict], what: str) -> str:
    run = lines[0]
    gpu = run.get("state_before", {}).get("name") or run.get("cpu") or run.get("device", "")
    return f"{what}, {gpu}, commit {run['commit']}"


def what_of(lines: list[dict], rows: list[dict], what: str) -> str:
    """Backend, pass and type of the rows, as far as the file says them."""
    backend = lines[0].get("backend", "")
    dtype = rows[0].get("dtype", "")
    return " ".join(word for word in (backend, what, SHORT.get(dtype, dtype)) if word)


def length_text(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def length_axis(axis, lengths: list[int]) -> None:
    """A label for each measured length, on a logarithmic axis."""
    axis.set_ticks(lengths, [length_text(n) for n in lengths], fontsize=8)
    axis.set_ticks([], minor=True)


def masks_of(rows: list[dict]) -> list[bool]:
    return sorted({row["causal"] for row in rows})


def draw_speed(lines: list[dict], what: str):
    """One panel a head dim and mask, one line an implementation."""
    plt = pyplot()
    rows = grid_rows(lines, what)
    head_dims, masks = sorted({row["head_dim"] for row in rows}), masks_of(rows)
    names = dict.fromkeys(n for row in rows for n in row["results"][STATE])
    names = [n for n in names if not n.startswith(f"{OURS},")]  # our variants: tables show them
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    figure, axes = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(1 + 2.9 * len(head_dims), 0.6 + 2.5 * len(masks)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, causal in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            panel = axes[line][column]
            cells = [r for r in rows if r["head_dim"] == head_dim and r["causal"] == causal]
            cells.sort(key=lambda r: r["seqlen"])
            for name in names:
                points = [
                    (r["seqlen"], r["results"][STATE][name]["tflops"])
                    for r in cells
                    if name in r["results"][STATE]
                ]
                if not points:
                    continue
                ours = name == OURS
                panel.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    label=name,
                    color=colours[name],
                    linewidth=2.2 if ours else 1.2,
                    zorder=3 if ours else 2,
                )
            panel.set_xscale("log", base=2)
            length_axis(panel.xaxis, sorted({r["seqlen"] for r in rows}))
            panel.set_title(f"d{head_dim} {'causal' if causal else 'full'}", fontsize=9)
            panel.grid(alpha=0.3)
        axes[line][0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # shared; set before the curves it would stop the scaling
    axes[0][0].legend(fontsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    figure.suptitle(title_of(lines, what_of(lines, rows, what)), fontsize=10)
    return figure


DARK = 0.15  # distance from 1 beyond which the colours of the map need light letters


def best_ratio(results: dict) -> float:
    others = [r["ms"] for n, r in results.items() if not n.startswith(OURS)]
    return min(others) / results[OURS]["ms"] if others else math.nan


def draw_ratio(lines: list[dict], what: str):
    """Head dim and mask against length, coloured by our speed over the best peer's."""
    plt = pyplot()
    rows = grid_rows(lines, what)
    lengths = sorted({row["seqlen"] for row in rows})
    kinds = sorted({(row["head_dim"], row["causal"]) for row in rows})
    values = [[math.nan] * len(lengths) for _ in kinds]
    for row in rows:
        at = kinds.index((row["head_dim"], row["causal"])), lengths.index(row["seqlen"])
        values[at[0]][at[1]] = best_ratio(row["results"][STATE])
    figure, panel = plt.subplots(
        figsize=(2.2 + 0.75 * len(lengths), 1.2 + 0.34 * len(kinds)), layout="constrained"
    )
    image = panel.imshow(values, cmap="RdYlGn", vmin=0.8, vmax=1.2, aspect="auto")
    for line, cells in enumerate(values):
        for column, value in enumerate(cells):
            if not math.isnan(value):
                ink = "white" if abs(value - 1) > DARK else "black"
                place = {"ha": "center", "va": "center", "fontsize": 8}
                panel.text(column, line, f"{value:.2f}", color=ink, **place)
    panel.set_xticks(range(len(lengths)), [length_text(n) for n in lengths], fontsize=8)
    labels = [f"d{d} {'causal' if causal else 'full'}" for d, causal in kinds]
    panel.set_yticks(range(len(kinds)), labels, fontsize=8)
    panel.set_xlabel("sequence length")
    figure.colorbar(image, label="speed / best peer")
    figure.suptitle(title_of(lines, what_of(lines, rows, what)), fontsize=9)
    return figure


def draw_memory(lines: list[dict]):
    """Peak bytes of both implementations, and the one matrix that the textbook cannot avoid."""
    plt = pyplot()
    rows = [line for line in lines if line["kind"] == "memory"]
    figure, panel = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
    for name in sorted({row["implementation"] for row in rows}):
        mine = sorted((r for r in rows if r["implementation"] == name), key=lambda r: r["length"])
        ours = name == OURS
        lengths = [r["length"] for r in mine]
        label = f"{name}, measured"
        width = 2.2 if ours else 1.2
        panel.plot(lengths, [r["peak_bytes"] / 2**20 for r in mine], "o-", lw=width, label=label)
    everywhere = sorted({(r["length"], r["matrix_bytes"]) for r in rows})
    panel.plot(
        [n for n, _ in everywhere],
        [b / 2**20 for _, b in everywhere],
        "k--",
        lw=1,
        label="one N x N matrix",
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    length_axis(panel.xaxis, [n for n, _ in everywhere])
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_xlabel("sequence length")
    panel.set_ylabel("peak memory, MiB")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.suptitle(title_of(lines, "forward and backward, one head"), fontsize=9)
    return figure


def save(figure, image: pathlib.Path, source: pathlib.Path) -> None:
    figure.savefig(image, dpi=110, metadata={SOURCE: digest(source)})
    pyplot().close(figure)
    print(f"wrote {image}")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("results", nargs="*", type=pathlib.Path)
    p.add_argument("--check", action="store_true", help="draw nothing; fail on a stale image")
    arguments = p.parse_args()
    if arguments.check:
        problems = stale()
        for problem in problems:
            print(problem)
        sys.exit(1 if problems else 0)
    if arguments.results:
        wanted = {i: (r, f) for r in arguments.results for i, f in images(r).items()}
    else:
        wanted = {
            image: (path, function)
            for image, (path, function) in all_images().items()
            if not image.exists() or text_chunks(image).get(SOURCE) != digest(path)
        }
    for image, (path, function) in wanted.items():
        save(function(read(path)), image, path)


if __name__ == "__main__":
    main()
