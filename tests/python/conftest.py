"""Targets, kernel rows and the GPU summary: what every test file shares."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections import Counter
from datetime import datetime, timezone

import pantile
import pytest
import torch
from support import Dirt, Target

GPU_BACKENDS = ("hopper", "ampere")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def dirty_memory(request: pytest.FixtureRequest):
    """Tests marked gpu: whatever memory torch hands out, to them or to the package, held NaN, 1e30
    or Inf; workspaces are checked. Tests marked undisturbed are about launches that follow each
    other, or run beside each other: nothing is launched or waited for between them."""
    if not request.node.get_closest_marker("gpu") or not torch.cuda.is_available():
        yield
        return
    dirt = Dirt(launches=not request.node.get_closest_marker("undisturbed"))
    dirt.soil_allocator()
    with dirt.spread():
        yield


def _targets() -> list:
    host = [pytest.param(Target(b, "cpu"), id=b) for b in ("cpu", "reference")]
    gpu = [
        pytest.param(Target(b, "cuda"), id=b, marks=pytest.mark.gpu)
        for b in dict.fromkeys(row["backend"] for row in pantile.kernels())
        if b in GPU_BACKENDS
    ]
    gpu_f32 = [
        pytest.param(Target(b, "cuda", torch.float32), id=f"{b}_f32", marks=pytest.mark.gpu)
        for b in dict.fromkeys(row["backend"] for row in pantile.kernels() if row["dtype"] == "f32")
        if b in GPU_BACKENDS
    ]
    return host + gpu + gpu_f32


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        metafunc.parametrize("target", _targets())
    if "row" in metafunc.fixturenames:
        rows = [
            pytest.param(
                row,
                id=row["name"],
                marks=[pytest.mark.gpu] if row["backend"] in GPU_BACKENDS else [],
            )
            for row in pantile.kernels()
            if row["pass"] != "quantize" and row["dtype"] != "e4m3"  # those: test_fp8.py
        ]
        metafunc.parametrize("row", rows)


# ---- PANTILE_GPU_SUMMARY=path: a Markdown record of a run on a GPU machine


class GpuSummary:
    """Collects the outcome of each test marked gpu, and of each kernel row."""

    def __init__(self, path: str) -> None:
        self.path = pathlib.Path(path)
        self.outcomes: Counter[str] = Counter()
        self.rows: dict[str, Counter[str]] = {}
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        finished = report.when == "call" or (report.when == "setup" and not report.passed)
        if not finished or "gpu" not in report.keywords:
            return
        self.outcomes[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)
        for key, value in report.user_properties:
            if key == "kernel":
                self.rows.setdefault(value, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        self.path.write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> list[str]:
        counts = {name: self.outcomes[name] for name in ("passed", "failed", "skipped")}
        lines = [
            "# GPU verification",
            "",
            "Written by `PANTILE_GPU_SUMMARY=docs/gpu-verification.md pytest -m gpu`.",
            "",
            "| what | value |",
            "|---|---|",
        ]
        facts = {
            "commit": _commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "GPU": _gpu_name(),
            "driver": _driver(),
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
            "build": f"nvcc {pantile.build_info().get('nvcc', '')}",
            **counts,
        }
        lines += [f"| {name} | {value} |" for name, value in facts.items()]
        lines += ["", "## Failures", ""]
        lines += [f"- `{name}`" for name in self.failures] or ["None."]
        lines += [
            "",
            "## Kernels",
            "",
            "| kernel | passed | failed | skipped |",
            "|---|---|---|---|",
        ]
        for name, row in self.rows.items():
            lines.append(f"| {name} | {row['passed']} | {row['failed']} | {row['skipped']} |")
        return lines


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def _commit() -> str:
    here = os.path.dirname(__file__)
    named = os.environ.get("PANTILE_COMMIT")
    return named or _output("git", "-C", here, "rev-parse", "HEAD") or "unknown"


def _gpu_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def _driver() -> str:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0] if answer else "unknown"


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("PANTILE_GPU_SUMMARY")
    if path and not hasattr(config, "workerinput"):  # with xdist, only the controller writes
        config.pluginmanager.register(GpuSummary(path), "pantile-gpu-summary")
