"""Memory, IO model, accuracy, utilisation and build facts on the pages."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import results_files
from results_files import (
    OURS,
    counter_cells,
    files_of,
    image,
    lines_of,
    link,
    mean,
    rows_of,
    table,
)


def _io_model():
    """pantile.io_model without the package, which need not be built when pages are checked."""
    path = results_files.ROOT / "python/pantile/io_model.py"
    spec = importlib.util.spec_from_file_location("pantile_io_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


io_model = _io_model()


# ---- memory


def megabytes(count: float) -> str:
    return f"{count / 2**20:,.1f}"


def memory(page: pathlib.Path) -> list[str]:
    found = files_of("memory")
    if not found:
        return ["Not measured yet."]
    out = []
    for path, run, mine in found:
        rows = [
            [
                row["implementation"],
                f"{row['length']:,}",
                megabytes(row["peak_bytes"]),
                megabytes(row["model_bytes"]),
                megabytes(row["matrix_bytes"]),
                f"{row['peak_bytes'] / row['length']:,.0f}",
            ]
            for row in mine
        ]
        out += [
            f"{run['device']}, commit {run['commit']} ({link(path, page)}): bf16, causal, one head "
            f"of dim {mine[0]['head_dim']}, forward and backward; MiB.",
            "",
            *table(["", "length", "peak", "model", "one N x N matrix", "peak bytes a token"], rows),
            "",
        ]
        case = {row["implementation"]: row for row in mine if row["length"] == 32768}
        if len(case) == 2:
            ours, textbook = case[OURS]["peak_bytes"], case["textbook"]["peak_bytes"]
            out += [
                f"At 32,768 tokens one matrix takes {megabytes(first_matrix(case))} MiB, the "
                f"textbook's step {megabytes(textbook)} MiB and ours {megabytes(ours)} MiB: "
                f"{textbook / ours:.0f} times less.",
                "",
            ]
        picture = path.with_suffix(".png")
        if picture.exists():
            out += [image(picture, "memory against length", page), ""]
    return out[:-1]


def first_matrix(case: dict) -> int:
    return case[OURS]["matrix_bytes"]


# ---- IO model


def gb(count: float) -> str:
    return f"{count / 1e9:,.2f}"


def gpus(_: pathlib.Path) -> list[str]:
    rows = [
        [
            gpu.name,
            f"{gpu.tflops_16bit:.0f}",
            "-" if gpu.tflops_fp8 is None else f"{gpu.tflops_fp8:.0f}",
            f"{gpu.hbm_tbps:.2f}",
            f"{gpu.hbm_gb}",
            f"{gpu.l2_mib}",
            f"{gpu.shared_kib}",
            f"{gpu.multiprocessors} x {gpu.clock_ghz:.2f}",
            f"{io_model.ridge(gpu):.0f}",
        ]
        for gpu in io_model.GPUS.values()
    ]
    return table(
        [
            "GPU",
            "16-bit TFLOP/s",
            "FP8 TFLOP/s",
            "HBM TB/s",
            "HBM GB",
            "L2 MiB",
            "shared KiB",
            "SMs x GHz",
            "ridge, FLOP/byte",
        ],
        rows,
    )


MODEL_LENGTHS = (1024, 4096, 16384, 65536)
MODEL_HEADS = 16
MODEL_TILE = 128  # rows of a tile of the Hopper forward


def io_table(_: pathlib.Path) -> list[str]:
    """GB through HBM of one forward, 16 heads of dim 128, on an H200."""
    gpu = io_model.GPUS["H200"]
    tiles1 = io_model.paper_tiles(128, gpu.shared_kib * 1024)
    rows = []
    for length in MODEL_LENGTHS:
        shape = io_model.Shape(length, length, 128, MODEL_HEADS)
        moved = [
            io_model.textbook_forward(shape),
            io_model.flash1_forward(shape, *tiles1),
            io_model.flash2_forward(shape, MODEL_TILE, MODEL_TILE),
            io_model.pantile_forward(shape, MODEL_TILE, gpu),
        ]
        fused = io_model.roofline(gpu, shape, moved[-1])
        stored = io_model.roofline(gpu, shape, moved[0])
        rows.append(
            [
                f"{length:,}",
                *(gb(t.bytes) for t in moved),
                f"{shape.flops() / moved[0].bytes:.0f}",
                f"{shape.flops() / moved[-1].bytes:.0f}",
                f"{stored.milliseconds:.3f} ({stored.slowest})",
                f"{fused.milliseconds:.3f} ({fused.slowest})",
            ]
        )
    return table(
        [
            "length",
            "textbook",
            f"FlashAttention-1, tiles {tiles1[0]} x {tiles1[1]}",
            f"FlashAttention-2, {MODEL_TILE} rows",
            "ours, with the L2",
            "FLOP/byte textbook",
            "ours",
            "roofline ms, textbook",
            "ours",
        ],
        rows,
    )


def roofline_table(_: pathlib.Path) -> list[str]:
    """Milliseconds of each unit for the forward at 16384 tokens, hidden 2048."""
    rows = []
    for gpu in io_model.GPUS.values():
        for head_dim in (64, 128, 256):
            shape = io_model.Shape(16384, 16384, head_dim, 2048 // head_dim)
            bound = io_model.roofline(gpu, shape, io_model.pantile_forward(shape, 128, gpu))
            rows.append(
                [
                    gpu.name,
                    f"{head_dim}",
                    f"{bound.tensor_ms:.3f}",
                    f"{bound.exp_ms:.3f}",
                    f"{bound.memory_ms:.3f}",
                    f"{shape.flops() / bound.milliseconds / 1e9:.0f}",
                ]
            )
    columns = ["GPU", "d", "tensor ms", "exp ms", "HBM ms", "TFLOP/s of the slowest"]
    return table(columns, rows)


IO_LIMIT = 0.15  # that a forward may differ from the model


def io_check(page: pathlib.Path) -> list[str]:
    """The first file in full; of files beside it (other runs, other builds) the ratios."""
    found = rows_of("io")
    if not found:
        return ["Not measured yet."]
    runs = {path: run for path, run, _ in found}
    ratios = {
        (path, row["implementation"], row["length"]): f"{row['ratio']:.3f}"
        for path, _, row in found
    }
    first, *others = runs
    rows = [
        [
            row["implementation"],
            f"{row['length']:,}",
            f"{row['heads']}",
            f"{gb(row['read_bytes'])} ({gb(row['model_read_bytes'])})",
            f"{gb(row['written_bytes'])} ({gb(row['model_written_bytes'])})",
            f"{row['ratio']:.3f}",
            *(ratios.get((path, row["implementation"], row["length"]), "-") for path in others),
        ]
        for path, _, row in found
        if path == first
    ]
    columns = ["", "length", "heads", "read (model)", "written (model)", "measured / model"]
    columns += [f"at {runs[path]['commit']}" for path in others]
    files = ", ".join(link(path, page) for path in runs)
    return [
        f"{runs[first]['gpu']}, commit {runs[first]['commit']} ({files}), head dim 128, bf16, "
        "full; GB.",
        "",
        *table(columns, rows),
        "",
        io_verdict([row for _, _, row in found]),
    ]


def io_verdict(rows: list[dict]) -> str:
    """How far the forwards of all runs are from the model."""
    off = [abs(row["ratio"] - 1) for row in rows if not row["implementation"].endswith("backward")]
    inside = sum(value <= IO_LIMIT for value in off)
    return (
        f"{inside} of {len(off)} forwards are within {IO_LIMIT:.0%} of the model; the farthest is "
        f"{max(off):.1%} off."
    )


# ---- accuracy


def scientific(value: float) -> str:
    return f"{value:.1e}"


CASE_KEYS = ("dtype", "head_dim", "mask", "length", "law")
EXTREMES = ("relative", "max")
RESULTS_OF_A_CALL = ("o", "lse", "dq", "dk", "dv")


def accuracy(page: pathlib.Path) -> list[str]:
    """RMSE of O case by case, and how every result compares with the textbook in the same type."""
    found = files_of("accuracy")
    if not found:
        return ["Not measured yet."]
    out = []
    for path, run, rows in found:
        cells: dict[tuple, dict[str, dict]] = {}
        for row in rows:
            key = tuple(row[k] for k in CASE_KEYS)
            cells.setdefault(key, {})[row["implementation"]] = row["errors"]
        names = list(dict.fromkeys(name for values in cells.values() for name in values))
        out += [
            f"{run['device']}, torch {run['torch']}, commit {run['commit']} ({link(path, page)}).",
            "",
        ]
        if any(errors.get("textbook") for errors in cells.values()):
            out += [
                "RMSE over that of the textbook in the same type, geometric mean and largest over "
                "all cases:",
                "",
                *against_textbook(cells, names),
                "",
            ]
        out += [
            "Relative error (RMSE over the RMS of the exact result) / largest absolute error, the "
            "largest of each over all cases:",
            "",
            *extremes_table(cells, names),
            "",
            "RMSE of O against float64:",
            "",
            *rmse_table(cells, names),
            "",
        ]
    return out[:-1]


def against_textbook(cells: dict[tuple, dict[str, dict]], names: list[str]) -> list[str]:
    rows = []
    for name in (n for n in names if n != "textbook"):
        texts = []
        for result in RESULTS_OF_A_CALL:
            values = [
                errors[name][result]["rmse"] / errors["textbook"][result]["rmse"]
                for errors in cells.values()
                if result in errors.get(name, {}) and result in errors.get("textbook", {})
            ]
            texts.append(f"{mean(values):.2f} / {max(values):.2f}" if values else "-")
        rows.append([name, *texts])
    return table(["", *RESULTS_OF_A_CALL], rows)


def extremes_table(cells: dict[tuple, dict[str, dict]], names: list[str]) -> list[str]:
    rows = []
    for dtype in dict.fromkeys(key[0] for key in cells):
        for name in names:
            found = [errors.get(name, {}) for key, errors in cells.items() if key[0] == dtype]
            texts = []
            for result in RESULTS_OF_A_CALL:
                figures = [errors[result] for errors in found if result in errors]
                pair = (max((f[kind] for f in figures), default=None) for kind in EXTREMES)
                texts.append(" / ".join(scientific(x) for x in pair) if figures else "-")
            rows.append([dtype, name, *texts])
    return table(["dtype", "", *RESULTS_OF_A_CALL], rows)


def rmse_table(cells: dict[tuple, dict[str, dict]], names: list[str]) -> list[str]:
    def text(errors: dict) -> str:
        return scientific(errors["o"]["rmse"]) if "o" in errors else "-"

    return table(
        ["dtype", "d", "mask", "length", "law", *names],
        [
            [*map(str, key), *(text(values.get(n, {})) for n in names)]
            for key, values in cells.items()
        ],
    )


def accuracy_fp8(page: pathlib.Path) -> list[str]:
    found = rows_of("accuracy_fp8")
    if not found:
        return ["Not measured yet."]
    path, run, _ = found[0]
    kinds = list(dict.fromkeys((r["head_dim"], r["mask"]) for _, _, r in found))
    names = list(dict.fromkeys(r["implementation"] for _, _, r in found))
    cells = {
        (r["implementation"], r["head_dim"], r["mask"]): scientific(r["errors"]["o"]["rmse"])
        for _, _, r in found
        if r["errors"]
    }
    rows = [[name, *(cells.get((name, *kind), "-") for kind in kinds)] for name in names]
    head = f"RMSE of O, {found[0][2]['length']} tokens, {run['device']}, commit {run['commit']}"
    absent = {r["implementation"]: r["absent"] for _, _, r in found if r["absent"]}
    return [
        f"{head} ({link(path, page)}).",
        "",
        *table(["FP8 forward", *(f"d{d} {mask}" for d, mask in kinds)], rows),
        *(
            ["", "Absent: " + "; ".join(f"{n}: {r}" for n, r in absent.items()) + "."]
            if absent
            else []
        ),
    ]


# ---- training


def training(page: pathlib.Path) -> list[str]:
    """The GPT of examples/train_gpt.py, once with each attention."""
    path = results_files.RESULTS / "h200_train_gpt.json"
    if not path.exists():
        return ["Not measured yet."]
    report = json.loads(path.read_text())
    first = report["runs"][0]
    rows = []
    for run in report["runs"]:
        apart = [abs(a - b) for a, b in zip(first["losses"], run["losses"], strict=True)]
        rows.append(
            [
                run["attention"],
                f"{run['tokens_per_second']:,.0f}",
                f"{first['tokens_per_second'] / run['tokens_per_second']:.2f}",
                f"{run['step_seconds'] * 1e3:.1f}",
                f"{run['peak_bytes'] / 2**30:.1f}",
                f"{max(apart):.1e}" if run is not first else "-",
            ]
        )
    columns = ["attention", "tokens/s", f"{first['attention']}, times as fast", "ms a step", "GiB"]
    picture = path.with_suffix(".png")
    return [
        f"{report['parameters'] / 1e6:.0f} M parameters, {report['layers']} layers, head dim "
        f"{report['width'] // report['heads']}, {report['steps']} steps of {report['batch']} x "
        f"{report['context']} tokens, bf16, {report['device']}, torch {report['torch']}, commit "
        f"{report.get('commit', 'not recorded')} ({link(path, page)}).",
        "",
        *table([*columns, "largest difference of losses"], rows),
        *(["", image(picture, "losses of the training runs", page)] if picture.exists() else []),
    ]


# ---- durations, utilisation, build facts


def durations(page: pathlib.Path) -> list[str]:
    """What the runs behind the files took, as far as they say it."""
    texts = []
    for path in sorted(results_files.RESULTS.glob("*.jsonl")):
        seconds = lines_of(path)[0].get("seconds")
        if seconds is not None:
            texts.append(f"{link(path, page)} {seconds:.0f} s")
    return [f"Measuring took: {', '.join(texts)}."] if texts else ["Not measured yet."]


# Often named as the goals of fully tensorised attention: units (the highest counts), percent.
TARGETS = {
    "tensor cores": (("tensor",), 85),
    "vector pipes": (("FMA", "ALU", "MUFU"), 80),
    "memory": (("DRAM",), 70),
}


def targets_text(rows: list[dict]) -> str:
    """Which attention kernels reach the targets, and how near the others come."""
    texts = []
    attention = [row for row in rows if " d" in row["case"]]
    for name, (units, least) in TARGETS.items():

        def use(row: dict, units: tuple[str, ...] = units) -> float:
            return max(row["percent"][unit] or 0.0 for unit in units)

        reached = [row for row in attention if use(row) > least]
        best = max(attention, key=use)
        who = ", ".join(f"{row['implementation']} {row['case']}" for row in reached) or "none"
        highest = f"highest {use(best):.0f} %, {best['implementation']} {best['case']}"
        texts.append(f"{name} above {least} %: {who} ({highest})")
    return f"Of these kernels reach the targets: {'; '.join(texts)}."


def utilisation(page: pathlib.Path) -> list[str]:
    found = rows_of("utilisation")
    if not found:
        return ["Not measured yet."]
    path, run, first = found[0]
    columns = list(first["percent"])
    rows = [
        [
            row["implementation"],
            row["case"],
            *counter_cells(row, columns),
            f"{row['ghz']:.2f}",
            f"{row['us']:.0f}",
        ]
        for _, _, row in found
    ]
    return [
        f"{run['gpu']}, commit {run['commit']} ({link(path, page)}); % of the unit's peak while "
        "the kernel runs.",
        "",
        *table(["", "case", *columns, "bank conflicts", "GHz", "us"], rows),
        "",
        targets_text([row for _, _, row in found]),
    ]


def build_facts(page: pathlib.Path) -> list[str]:
    path = results_files.RESULTS / "build_facts.json"
    if not path.exists():
        return ["Not measured yet."]
    facts = json.loads(path.read_text())
    columns = list(facts["columns"])
    rows = [
        [name, *(str(values.get(column, "-")) for column in columns)]
        for name, values in facts["rows"].items()
    ]
    notes = [f"{name}: {text}" for name, text in facts["sources"].items()]
    notes.append(facts["public"])
    return [f"{link(path, page)}.", "", *table(["", *columns], rows), "", "; ".join(notes) + "."]
