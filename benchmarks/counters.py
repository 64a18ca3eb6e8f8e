"""Runs a part of a script under ncu and gives back one record per kernel launch, case by case.

A script that wants counters calls itself: `collect` starts it under ncu with the names of its
cases, and in that process `run_cases` runs them, each twice to warm up and once measured. A spin
kernel before each case tells them apart in ncu's output. `report` is all of such a script."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from pantile.bench import harness

MARK = "spin_kernel"  # of torch.cuda._sleep
ABSENT = "absent case: "  # begins a line that names a case that cannot run, and why
CHILD = "PANTILE_COUNTED_CASES"


class CounterError(RuntimeError):
    """ncu is missing, may not read the counters, or gave no data."""


def parse(text: str, metrics: list[str]) -> list[dict]:
    """Launches of ncu's raw CSV page: {"kernel": name, metric: value}, in launch order. A value
    that ncu could not measure is None."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise CounterError(f"ncu gave no table: {' | '.join(lines[-3:])}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    launches = []
    for row in rows:
        if not row["ID"]:  # the line of units
            continue
        record = {"kernel": row["Kernel Name"]}
        for metric in metrics:
            value = (row.get(metric) or "").replace(",", "")
            try:
                record[metric] = float(value)
            except ValueError:
                record[metric] = None
        launches.append(record)
    return launches


def absent_cases(text: str) -> dict[str, str]:
    """Case -> reason, from the lines that the measured process printed."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith(ABSENT):
            found |= json.loads(line.removeprefix(ABSENT))
    return found


def split(launches: list[dict], names: list[str]) -> dict[str, list[dict]]:
    """Launches by case: each case's launches follow its mark."""
    groups: list[list[dict]] = []
    for launch in launches:
        if MARK in launch["kernel"]:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    if len(groups) != len(names):
        raise CounterError(f"ncu saw {len(groups)} of {len(names)} cases")
    return dict(zip(names, groups, strict=True))


def collect(names: list[str], metrics: list[str]) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Runs this script's cases under ncu: the launches of each that ran, and the reason of each
    that did not. Clocks and caches are left as a program would find them."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CounterError("ncu is not on the PATH")
    command = [
        ncu,
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--profile-from-start", "off", "--clock-control", "none"),
        *("--cache-control", "none", "--metrics", ",".join(metrics)),
        *(sys.executable, *sys.argv),
    ]
    environment = os.environ | {CHILD: json.dumps(names)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise CounterError(f"ncu ended with {done.returncode}: {' | '.join(tail)}")
    absent = absent_cases(done.stdout)
    return split(parse(done.stdout, metrics), [n for n in names if n not in absent]), absent


def run_cases(prepare: Callable[[str], Callable[[], object] | str]) -> None:
    """In the process under ncu: `prepare(name)` gives the call to measure, or why there is none."""
    cudart = torch.cuda.cudart()
    for name in json.loads(os.environ[CHILD]):
        call = prepare(name)
        if isinstance(call, str):
            print(ABSENT + json.dumps({name: call}), flush=True)
            continue
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        cudart.cudaProfilerStart()
        torch.cuda._sleep(1000)
        call()
        torch.cuda.synchronize()
        cudart.cudaProfilerStop()
        del call
        torch.cuda.empty_cache()


def report(
    doc: str,
    names: list[str],
    metrics: list[str],
    prepare: Callable[[str], Callable[[], object] | str],
    rows_of: Callable[[dict[str, list[dict]]], list[dict]],
    out: str,
) -> list[dict]:
    """The program of a script: measures the cases, prints the rows and writes them."""
    chosen = harness.parser(doc, out).parse_args()
    harness.require_gpu()
    if CHILD in os.environ:
        run_cases(prepare)
        sys.exit()
    started = time.perf_counter()
    try:
        found, absent = collect(names, metrics)
    except CounterError as error:
        sys.exit(str(error))
    rows = rows_of(found)
    seconds = round(time.perf_counter() - started, 1)
    header = harness.header(gpu=torch.cuda.get_device_name(), seconds=seconds, absent=absent)

    def text(row: dict) -> str:
        return ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("kind", "kernel"))

    harness.emit(chosen.out, [header, *rows], text)
    return rows
