"""Draws result files: TFLOP/s against length, ratio heat maps, memory against length, losses,
whole models.

    python benchmarks/plot.py                                 # the plots of contents.toml
    python benchmarks/plot.py --check                         # draw nothing; fail on a stale one
    python benchmarks/plot.py new.jsonl speed forward         # any file: speed, ratio, memory

Plots are SVG: text, so that a change of a number is a small change of a file. Each lies beside its
results and carries their hash; `--check`, which needs nothing but Python, compares the two."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import re
import sys

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(RESULTS.parent.parent / "tools"))

import results_docs  # noqa: E402
from results_docs import figures  # noqa: E402

STATE, OURS = "back_to_back", figures.OURS
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "fp32", "float8": "FP8"}
DARK = 0.15  # distance from 1 beyond which the colours of the map need light letters


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def planned() -> dict[pathlib.Path, tuple[pathlib.Path, str, str]]:
    """Plot -> (results file, what is drawn, pass)."""
    plots = results_docs.contents()["plots"]
    return {RESULTS / name: (RESULTS / file, *rest) for name, (file, *rest) in plots.items()}


def stale() -> dict[pathlib.Path, str]:
    """Plots that do not show what their file says, and why."""
    problems = {}
    for image, (path, *_) in planned().items():
        found = re.search(r"sha256 (\w+)", image.read_text()) if image.exists() else None
        if found is None or found[1] != digest(path):
            problems[image] = f"{image.name} was not drawn from this {path.name}: run make docs"
    known = planned()
    for image in sorted(RESULTS.glob("*.svg")):
        if image not in known:
            problems[image] = f"{image.name} is not in contents.toml"
    return problems


# ---- drawing


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    # The same file from the same numbers: identifiers from a fixed salt, letters as letters.
    matplotlib.rcParams.update({"svg.hashsalt": "pantile", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    return plt


def grid_rows(lines: list[dict], what: str) -> list[dict]:
    rows = [line for line in lines if line["kind"] == "timing" and line["pass"] == what]
    rows = [r for r in rows if figures.is_grid(r) and OURS in r["results"].get(STATE, {})]
    return sorted(rows, key=lambda r: (r["head_dim"], r["causal"], r["seqlen"]))


def title_of(lines: list[dict], what: str) -> str:
    return f"{what}, {figures.device_of(lines[0])}, commit {lines[0]['commit']}"


def what_of(lines: list[dict], rows: list[dict], what: str) -> str:
    """Backend, pass and type of the rows, as far as the file says them."""
    dtype = rows[0].get("dtype", "")
    return " ".join(filter(None, (lines[0].get("backend"), what, SHORT.get(dtype, dtype))))


def length_text(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def length_axis(panel, lengths: list[int]) -> None:
    """A label for each measured length, on a logarithmic axis."""
    panel.set_xscale("log", base=2)
    panel.xaxis.set_ticks(lengths, [length_text(n) for n in lengths], fontsize=8)
    panel.xaxis.set_ticks([], minor=True)
    panel.set_xlabel("sequence length")
    panel.grid(alpha=0.3)


def draw_speed(lines: list[dict], what: str):
    """One panel a head dim and mask, one line an implementation."""
    rows = grid_rows(lines, what)
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    lengths = sorted({row["seqlen"] for row in rows})
    names = dict.fromkeys(n for row in rows for n in row["results"][STATE])
    names = [n for n in names if n == OURS or figures.is_peer(n)]  # our variants are in the tables
    size = (1 + 2.9 * len(head_dims), 0.6 + 2.5 * len(masks))
    form = {"figsize": size, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot().subplots(len(masks), len(head_dims), **form)
    for line, causal in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            panel = axes[line][column]
            cells = [r for r in rows if (r["head_dim"], r["causal"]) == (head_dim, causal)]
            for i, name in enumerate(names):
                mine = [r for r in cells if name in r["results"][STATE]]
                speeds = [r["results"][STATE][name]["tflops"] for r in mine]
                width = 2.2 if name == OURS else 1.2
                style = {"marker": "o", "markersize": 3, "linewidth": width, "color": f"C{i}"}
                order = 3 if name == OURS else 2
                panel.plot([r["seqlen"] for r in mine], speeds, label=name, zorder=order, **style)
            length_axis(panel, lengths)
            panel.set_title(f"d{head_dim} {'causal' if causal else 'full'}", fontsize=9)
        axes[line][0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # shared; set before the curves it would stop the scaling
    axes[0][0].legend(fontsize=7)
    figure.suptitle(title_of(lines, what_of(lines, rows, what)), fontsize=10)
    return figure


def draw_ratio(lines: list[dict], what: str):
    """Head dim and mask against length, coloured by our speed over the best peer's."""
    rows = grid_rows(lines, what)
    lengths = sorted({row["seqlen"] for row in rows})
    kinds = sorted({(row["head_dim"], row["causal"]) for row in rows})
    values = [[math.nan] * len(lengths) for _ in kinds]
    size = (2.2 + 0.75 * len(lengths), 1.2 + 0.34 * len(kinds))
    figure, panel = pyplot().subplots(figsize=size, layout="constrained")
    for row in rows:
        line, column = kinds.index((row["head_dim"], row["causal"])), lengths.index(row["seqlen"])
        values[line][column] = value = figures.ratio(row["results"][STATE])[0]
        ink = "white" if abs(value - 1) > DARK else "black"
        text = "" if math.isnan(value) else f"{value:.2f}"
        panel.text(column, line, text, color=ink, ha="center", va="center", fontsize=8)
    edges = [[i - 0.5 for i in range(count + 1)] for count in (len(lengths), len(kinds))]
    image = panel.pcolormesh(*edges, values, cmap="RdYlGn", vmin=0.8, vmax=1.2)
    panel.invert_yaxis()
    panel.set_xticks(range(len(lengths)), [length_text(n) for n in lengths], fontsize=8)
    labels = [f"d{d} {'causal' if causal else 'full'}" for d, causal in kinds]
    panel.set_yticks(range(len(kinds)), labels, fontsize=8)
    panel.set_xlabel("sequence length")
    figure.colorbar(image, label="speed / best peer")
    figure.suptitle(title_of(lines, what_of(lines, rows, what)), fontsize=9)
    return figure


def draw_memory(lines: list[dict], _what: str = ""):
    """Peak bytes of both implementations, and the one matrix that the textbook cannot avoid."""
    rows = sorted((x for x in lines if x["kind"] == "memory"), key=lambda row: row["length"])
    figure, panel = pyplot().subplots(figsize=(5.4, 3.8), layout="constrained")
    for name in sorted({row["implementation"] for row in rows}):
        mine = [row for row in rows if row["implementation"] == name]
        peaks = [row["peak_bytes"] / 2**20 for row in mine]
        width = 2.2 if name == OURS else 1.2
        lengths = [row["length"] for row in mine]
        panel.plot(lengths, peaks, "o-", lw=width, label=f"{name}, measured")
    matrix = {row["length"]: row["matrix_bytes"] / 2**20 for row in rows}
    panel.plot(list(matrix), list(matrix.values()), "k--", lw=1, label="one N x N matrix")
    length_axis(panel, list(matrix))
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_ylabel("peak memory, MiB")
    panel.legend(fontsize=8)
    figure.suptitle(title_of(lines, "forward and backward, one head"), fontsize=9)
    return figure


def draw_losses(lines: list[dict], _what: str = ""):
    """Of a training report: each run's loss, and how far the others are from the first."""
    report = lines[0]
    first, *others = report["runs"]
    form = {"figsize": (7, 6), "height_ratios": (2, 1), "sharex": True, "layout": "constrained"}
    figure, (top, bottom) = pyplot().subplots(2, 1, **form)
    for i, run in enumerate(report["runs"]):
        top.plot(run["losses"], label=run["attention"], color=f"C{i}", lw=max(3.5 - 1.2 * i, 0.8))
    for i, run in enumerate(others, 1):
        apart = [
            abs(a - b) or math.nan for a, b in zip(first["losses"], run["losses"], strict=True)
        ]
        name = f"|{first['attention']} - {run['attention']}|"
        bottom.plot(apart, label=name, color=f"C{i}", lw=1)
    top.set_ylabel("loss")
    bottom.set_ylabel("difference of losses")
    bottom.set_xlabel("step")
    bottom.set_yscale("log")
    for panel in (top, bottom):
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    size = f"{report['parameters'] / 1e6:.0f} M parameters"
    figure.suptitle(f"GPT of {size}, bf16, {report['device']}", fontsize=10)
    return figure


def draw_models(lines: list[dict], _what: str = ""):
    """One panel a model: tokens per second of each attention, with the MFU on the bars."""
    rows = [line for line in lines if line["kind"] == "model"]
    names = list(dict.fromkeys(name for row in rows for name in row["step_ms"]))
    form = {"figsize": (0.6 + 2.2 * len(rows), 3.6), "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot().subplots(1, len(rows), **form)
    for panel, row in zip(axes[0], rows, strict=True):
        rates = row["tokens_per_second"]
        colours = [f"C{names.index(name)}" for name in rates]
        bars = panel.bar(list(rates), [rate / 1e3 for rate in rates.values()], color=colours)
        panel.bar_label(bars, [f"{100 * row['mfu'][name]:.0f} %" for name in rates], fontsize=8)
        panel.tick_params(axis="x", labelrotation=60, labelsize=8)
        part = f", {row['layers']} of {row['of_layers']} layers" if row["of_layers"] else ""
        panel.set_title(f"{row['shape']}{part}", fontsize=8)
        panel.margins(y=0.12)
    axes[0][0].set_ylabel("thousand tokens/s; on the bars: MFU")
    figure.suptitle(title_of(lines, "whole models, bf16"), fontsize=10)
    return figure


DRAW = {
    "speed": draw_speed,
    "ratio": draw_ratio,
    "memory": draw_memory,
    "losses": draw_losses,
    "models": draw_models,
}


def draw(image: pathlib.Path, path: pathlib.Path, form: str, what: str) -> None:
    lines = [json.loads(path.read_text())] if path.suffix == ".json" else figures.read(path)
    figure = DRAW[form](lines, what)
    source = f"{path.name}, sha256 {digest(path)}"
    figure.savefig(image, metadata={"Date": None, "Source": source})
    pyplot().close(figure)
    print(f"wrote {image}")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    p.add_argument("results", nargs="?", type=pathlib.Path, help="one file, drawn beside it")
    p.add_argument("form", nargs="?", choices=list(DRAW), default="speed")
    p.add_argument("what", nargs="?", choices=["forward", "backward"], default="forward")
    p.add_argument("--check", action="store_true", help="draw nothing; fail on a stale plot")
    chosen = p.parse_args()
    if chosen.results is not None:
        name = f"{chosen.results.stem}_{chosen.form}_{chosen.what}.svg"
        draw(chosen.results.with_name(name), chosen.results, chosen.form, chosen.what)
        return
    problems = stale()
    if chosen.check:
        sys.exit("\n".join(problems.values()) or 0)
    for image in problems:
        if image in planned():
            draw(image, *planned()[image])


if __name__ == "__main__":
    main()
