#!/usr/bin/env python3
"""What the package costs to build and to use: wheel, build time and memory, import, call.

    python tools/build_facts.py               # CPU-only wheel, on two cores
    python tools/build_facts.py --cuda        # with every CUDA kernel; minutes
    python tools/build_facts.py --wheel X.whl # size and kernels of a wheel that is there
    python tools/build_facts.py --call        # the time of a call on the GPU, of what is installed

Rewrites its own column of benchmarks/results/build_facts.json and keeps the others. Beside them
stand the public figures of benchmarks/results/public_figures.json, with their source.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
FACTS, PUBLIC = RESULTS / "build_facts.json", RESULTS / "public_figures.json"
CORES = 2


# ---- the build


def children_of(parents: dict[int, int], root: int) -> set[int]:
    """root and everything below it, from {process: its parent}."""
    family = {root}
    while True:
        more = {child for child, parent in parents.items() if parent in family} - family
        if not more:
            return family
        family |= more


def resident_bytes(root: int) -> int:
    """Resident memory of a process and all below it, from /proc."""
    parents, sizes = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "status").read_text()
        except OSError:  # it ended meanwhile
            continue
        fields = dict(re.findall(r"^(PPid|VmRSS):\s+(\d+)", text, re.MULTILINE))
        parents[int(entry.name)] = int(fields["PPid"])
        sizes[int(entry.name)] = int(fields.get("VmRSS", 0)) * 1024
    return sum(sizes.get(pid, 0) for pid in children_of(parents, root))


def watch(process: subprocess.Popen, seen: list[int]) -> None:
    while process.poll() is None:
        seen.append(resident_bytes(process.pid))
        time.sleep(0.2)


def processor_seconds() -> float:
    """Of the children that have ended: what a busy machine does not change."""
    times = os.times()
    return times.children_user + times.children_system


def on_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, allowed)


def build(cuda: bool, folder: pathlib.Path) -> dict[str, str]:
    """Builds the wheel on two cores, from nothing."""
    environment = os.environ | {
        "PANTILE_CUDA": "ON" if cuda else "OFF",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(CORES),
    }
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(folder), f"--config-settings=build-dir={folder}/build", str(ROOT)]
    started, before = time.perf_counter(), processor_seconds()
    process = subprocess.Popen(command, env=environment, preexec_fn=on_cores)
    seen = [0]
    watcher = threading.Thread(target=watch, args=(process, seen))
    watcher.start()
    if process.wait() != 0:
        sys.exit(f"the build ended with {process.returncode}")
    watcher.join()
    (wheel,) = folder.glob("*.whl")
    return {
        "build": f"{time.perf_counter() - started:.0f} s on {CORES} cores",
        "processor time of the build": f"{processor_seconds() - before:.0f} s",
        "peak memory of the build": f"{max(seen) / 1e9:.1f} GB",
        **wheel_facts(wheel),
    }


def wheel_facts(wheel: pathlib.Path) -> dict[str, str]:
    return {
        "wheel": f"{wheel.stat().st_size / 1e6:.1f} MB",
        "kernels in the wheel": str(kernel_count(wheel)),
    }


def kernel_count(wheel: pathlib.Path) -> int:
    """Compiled rows of the kernel table, asked of the wheel itself."""
    code = "import pantile; print(sum(row['compiled'] for row in pantile.kernels()))"
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site]
        subprocess.run([*command, str(wheel)], check=True)
        return int(python(code, site))


# ---- using it


def python(code: str, path: str | None = None) -> str:
    environment = dict(os.environ) if path is None else os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


IMPORT = """
import time, torch
started = time.perf_counter()
import pantile
print(time.perf_counter() - started)
"""
CALL = """
import timeit, torch, pantile
device = "DEVICE"
q = torch.randn(1, 64, 8, 64, device=device, dtype=torch.bfloat16)
def call():
    pantile.attention(q, q, q, causal=True)
times = []
for _ in range(40):
    times.append(timeit.timeit(call, number=50) / 50)
    if device == "cuda":
        torch.cuda.synchronize()
print(min(times))
"""


def import_seconds() -> dict[str, str]:
    best = min(float(python(IMPORT)) for _ in range(5))
    return {"import, torch being there": f"{best * 1e3:.0f} ms"}


def call_seconds(device: str) -> dict[str, str]:
    if device == "cuda":
        best = float(python(CALL.replace("DEVICE", "cuda")))
        return {"host time of a GPU call": f"{best * 1e6:.1f} us"}
    # One row of one head: what is left is the call.
    small = CALL.replace("DEVICE", "cpu").replace("(1, 64, 8, 64,", "(1, 1, 1, 64,")
    return {"time of a call on the CPU, one row": f"{float(python(small)) * 1e6:.1f} us"}


# ---- the file


def merge(facts: dict, column: str, measured: dict[str, str], public: dict) -> dict:
    """The facts with one column rewritten, and the public columns as their file says."""
    columns = [c for c in facts.get("columns", []) if c not in public and c != column]
    named = [c for c in public if c != "sources"]
    rows: dict[str, dict[str, str]] = {}
    for name, values in facts.get("rows", {}).items():
        rows[name] = {c: v for c, v in values.items() if c in columns or c == column}
    for name, value in measured.items():
        rows.setdefault(name, {})[column] = value
    for other in named:
        for name, value in public[other].items():
            rows.setdefault(name, {})[other] = value
    sources = facts.get("sources", {})
    return {
        "columns": [*sorted([*columns, column]), *named],
        "rows": {name: values for name, values in rows.items() if values},
        "sources": sources,
        "public": public["sources"],
    }


def processor() -> str:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    return re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)[1]


def gpu() -> str:
    name = python("import torch; print(torch.cuda.get_device_name())")
    return f"{name} beside {processor()}"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--cuda", action="store_true", help="build the CUDA kernels too")
    p.add_argument("--wheel", type=pathlib.Path, help="a wheel with CUDA kernels, built already")
    p.add_argument("--call", action="store_true", help="time a call on this machine's GPU")
    p.add_argument("--out", type=pathlib.Path, default=FACTS)
    arguments = p.parse_args()
    from pantile.bench import measure  # before a build of minutes, in case pantile is not there

    column = "CPU only"
    parts = {}  # what the source is said of -> figures
    if arguments.wheel is not None:
        column, parts["with CUDA, the wheel"] = "with CUDA", wheel_facts(arguments.wheel)
    if arguments.call:
        column, parts["with CUDA, the call"] = "with CUDA", call_seconds("cuda")
    if not parts:
        column = "with CUDA" if arguments.cuda else "CPU only"
        with tempfile.TemporaryDirectory() as folder:
            parts[column] = build(arguments.cuda, pathlib.Path(folder))
        if not arguments.cuda:
            parts[column] |= import_seconds() | call_seconds("cpu")
    facts = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    measured = {name: value for part in parts.values() for name, value in part.items()}
    facts = merge(facts, column, measured, json.loads(PUBLIC.read_text()))
    for part in parts:
        where = processor() if "call" not in part else gpu()
        facts["sources"][part] = f"{where}, commit {measure.commit()}"
    arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
