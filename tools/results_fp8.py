"""The tables of docs/experiments/fp8.md, from what tools/fp8_error.py wrote."""

from __future__ import annotations

import json
import pathlib

from results_files import RESULTS, files_of, link, rows_of, table


def number(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-") if x else "0"


def law(page: pathlib.Path) -> list[str]:
    found = rows_of("fp8_law")
    if not found:
        return ["Not measured yet."]
    path, _, first = found[0]
    cells = {(r["variant"], r["head_dim"]): r for _, _, r in found}
    dims = list(dict.fromkeys(d for _, d in cells))
    rows = []
    for variant in dict.fromkeys(v for v, _ in cells):
        texts = []
        for dim in dims:
            row = cells[variant, dim]
            texts.append(f"{row['rmse']:.2e} ({row['least']:.2e} to {row['most']:.2e})")
        rows.append([variant, *texts])
    return [
        f"RMSE of O, mean (and range) of {first['draws']} draws ({link(path, page)}).",
        "",
        *table(["variant", *(f"d{d}" for d in dims)], rows),
    ]


def length(page: pathlib.Path) -> list[str]:
    found = rows_of("fp8_length")
    if not found:
        return ["Not measured yet."]
    cells = {(r["keys"], r["mean"], r["exp"]): r["error"] for _, _, r in found}
    columns = list(dict.fromkeys((mean, exp) for _, mean, exp in cells))
    rows = [
        [f"{keys // 1024}k", *(number(cells[(keys, *column)]) for column in columns)]
        for keys in dict.fromkeys(k for k, _, _ in cells)
    ]
    heads = [f"{exp}, V of mean {mean:g}" for mean, exp in columns]
    return [
        f"Relative error of O, d128 ({link(found[0][0], page)}).",
        "",
        *table(["keys", *heads], rows),
    ]


def offset(page: pathlib.Path) -> list[str]:
    found = rows_of("fp8_offset")
    if not found:
        return ["Not measured yet."]
    names = list(found[0][2]["rmse"])
    rows = [[f"d{r['head_dim']}", *(number(r["rmse"][n]) for n in names)] for _, _, r in found]
    return [f"RMSE of O ({link(found[0][0], page)}).", "", *table(["", *names], rows)]


def gradient(page: pathlib.Path) -> list[str]:
    found = rows_of("fp8_gradient")
    if not found:
        return ["Not measured yet."]
    parts = ("o", "lse", "dq", "dk", "dv")
    rows = [
        [f"d{r['head_dim']} {r['forward']}", *(number(r[part]) for part in parts)]
        for _, _, r in found
    ]
    return [
        f"Relative errors; of LSE the RMS error in nats ({link(found[0][0], page)}).",
        "",
        *table(["forward", "O", "LSE", "dQ", "dK", "dV"], rows),
    ]


def training(page: pathlib.Path) -> list[str]:
    """Mean loss of the last tenth of the steps, as examples/train_gpt.py prints it."""
    path = RESULTS / "h200_train_gpt_fp8.json"
    if not path.exists():
        return ["Not measured yet."]
    report = json.loads(path.read_text())
    last = max(1, report["steps"] // 10)
    means = {r["attention"]: sum(r["losses"][-last:]) / last for r in report["runs"]}
    plain, fp8 = means["pantile"], means["pantile-fp8"]
    return [
        f"{report['parameters'] / 1e6:.0f} M parameters, {report['steps']} steps of "
        f"{report['batch']} x {report['context']} tokens, {report['device']}: mean loss of the "
        f"last {last} steps {plain:.4f} in bf16 and {fp8:.4f} with the FP8 forward, "
        f"{fp8 / plain - 1:+.2%} ({link(path, page)}).",
    ]


def steps(page: pathlib.Path) -> list[str]:
    """Forms of the kernel's step, each timed in turns with the prototype in one process."""
    found = files_of("fp8_step")
    if not found:
        return ["Not measured yet."]
    lines = []
    for path, _, rows in found:
        cells = {(r["head_dim"], r["mask"], r["seqlen"], r["variant"]): r["tflops"] for r in rows}
        names = list(dict.fromkeys(r["variant"] for r in rows))
        body = []
        for case in dict.fromkeys(key[:3] for key in cells):
            own = [cells.get((*case, name)) for name in names]
            base = cells[(*case, "prototype")]
            texts = [f"{x} ({x / base:.2f})" if x else "-" for x in own]
            body.append([f"d{case[0]} {case[1]} {case[2]}", *texts])
        lines += [f"{link(path, page)}:", "", *table(["case", *names], body), ""]
    return lines[:-1]
