#!/usr/bin/env python3
"""What the package costs to build and to use: wheel, build time and memory, import, call.

    python tools/build_facts.py               # builds a CPU-only wheel on two cores
    python tools/build_facts.py --cuda        # with every CUDA kernel; minutes
    python tools/build_facts.py --call        # only the time of a call on this machine's GPU

Rewrites figures of its own column of benchmarks/results/build_facts.json and keeps the others, such
as the published figures of another library.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACTS = ROOT / "benchmarks/results/build_facts.json"
CORES = 2
KERNELS = "import pantile; print(sum(row['compiled'] for row in pantile.kernels()))"
IMPORT = """
import time, torch
started = time.perf_counter()
import pantile
print(time.perf_counter() - started)
"""
CALL = """
import timeit, torch, pantile
shape = (1, 64, 8, 64) if "{device}" == "cuda" else (1, 1, 1, 64)  # one row: the call is left
q = torch.randn(shape, device="{device}", dtype=torch.bfloat16)
times = []
for _ in range(40):
    times.append(timeit.timeit(lambda: pantile.attention(q, q, q, causal=True), number=50) / 50)
    torch.cuda.synchronize() if q.is_cuda else None
print(min(times))
"""


def python(code: str, path: pathlib.Path | None = None) -> str:
    more = {} if path is None else {"PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=os.environ | more, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def on_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def build(cuda: bool) -> dict[str, str]:
    """Builds the wheel on two cores, from nothing, and uses it where it is."""
    pip = [sys.executable, "-m", "pip"]
    settings = {"PANTILE_CUDA": "ON" if cuda else "OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(CORES)}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", name, str(ROOT)]
        command.append(f"--config-settings=build-dir={folder}/build")
        started = time.perf_counter()
        subprocess.run(command, env=os.environ | settings, preexec_fn=on_cores, check=True)
        seconds, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        (wheel,) = folder.glob("*.whl")
        site = folder / "site"
        unpack = [*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
        subprocess.run(unpack, check=True)
        facts = {
            "wheel": f"{wheel.stat().st_size / 1e6:.1f} MB",
            "build": f"{seconds:.0f} s on {CORES} cores",
            "processor time of the build": f"{used.ru_utime + used.ru_stime:.0f} s",
            "largest process of the build": f"{used.ru_maxrss * 1024 / 1e9:.1f} GB",
            "kernels in the wheel": python(KERNELS, site),
        }
        if not cuda:
            best = min(float(python(IMPORT, site)) for _ in range(5))
            facts["import, torch being there"] = f"{best * 1e3:.0f} ms"
        return facts


def call_time(device: str) -> dict[str, str]:
    names = {"cuda": "host time of a GPU call", "cpu": "time of a call on the CPU, one row"}
    return {names[device]: f"{float(python(CALL.format(device=device))) * 1e6:.1f} us"}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    p.add_argument("--cuda", action="store_true", help="build the CUDA kernels too")
    p.add_argument("--call", action="store_true", help="time a call on this machine's GPU")
    p.add_argument("--out", type=pathlib.Path, default=FACTS, help="a file of this form, rewritten")
    chosen = p.parse_args()
    from pantile.bench import measure  # before a build of minutes, in case pantile is not there

    column = "with CUDA" if chosen.cuda or chosen.call else "CPU only"
    if chosen.call:
        source, measured = f"{column}, the call", call_time("cuda")
    else:
        source, measured = column, build(chosen.cuda) | ({} if chosen.cuda else call_time("cpu"))
    facts = json.loads(chosen.out.read_text())
    for name, figure in measured.items():
        facts["rows"].setdefault(name, {})[column] = figure
    model = re.search(r"^model name\s*:\s*(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    facts["sources"][source] = f"{model[1]}, commit {measure.commit()}"
    chosen.out.write_text(json.dumps(facts, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in measured.items()))


if __name__ == "__main__":
    main()
