"""Draw a results file: TFLOP/s against sequence length, one panel per head dim and mask.

python benchmarks/plot.py benchmarks/results/h200.jsonl forward benchmarks/results/h200.png"""

from __future__ import annotations

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("what", choices=["forward", "backward"])
    parser.add_argument("image", type=pathlib.Path)
    parser.add_argument("--state", default="back_to_back", choices=["back_to_back", "flushed"])
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    run = next(line for line in lines if line["kind"] == "run")
    rows = [
        line
        for line in lines
        if line["kind"] == "timing"
        and line["pass"] == arguments.what
        and line["case"].startswith("d")
        and arguments.state in line["results"]
    ]
    head_dims = sorted({row["head_dim"] for row in rows})
    figure, axes = plt.subplots(
        2,
        len(head_dims),
        figsize=(3.1 * len(head_dims), 5.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, head_dim in enumerate(head_dims):
        for line, causal in enumerate((False, True)):
            panel = axes[line][column]
            cells = [r for r in rows if r["head_dim"] == head_dim and r["causal"] == causal]
            cells.sort(key=lambda r: r["seqlen"])
            names = list(dict.fromkeys(n for r in cells for n in r["results"][arguments.state]))
            for name in names:
                points = [
                    (r["seqlen"], r["results"][arguments.state][name]["tflops"])
                    for r in cells
                    if name in r["results"][arguments.state]
                ]
                ours = name == "pantile"
                panel.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    label=name,
                    linewidth=2.2 if ours else 1.2,
                    zorder=3 if ours else 2,
                )
            panel.set_xscale("log", base=2)
            panel.set_title(f"d{head_dim} {'causal' if causal else 'full'}", fontsize=9)
            panel.grid(alpha=0.3)
            panel.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=7)
    for line in axes:
        line[0].set_ylabel("TFLOP/s")
    for panel in axes[1]:
        panel.set_xlabel("sequence length")
    gpu = run["state_before"].get("name", "GPU")
    figure.suptitle(f"{arguments.what}, {gpu}, commit {run['commit']}", fontsize=10)
    figure.savefig(arguments.image, dpi=130)
    print(f"wrote {arguments.image}")


if __name__ == "__main__":
    main()
