"""Targets, kernel rows, dirty memory and the record of a GPU run: what every test file shares."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pathlib
import tempfile
import time
import zlib

import pantile
import pytest
import torch
import verification
from support import Dirt, Target

GPU_BACKENDS = ("hopper", "ampere")
CACHED_BYTES = 2**31  # of GPU memory that a test process may keep: others share the GPU
LARGE_BYTES = 2**34  # of GPU memory that a test marked large may take

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores
    os.environ["OMP_NUM_THREADS"] = "1"  # and so do processes that tests start


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("gpu"):
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for option in needed_build_options(item):
        if not pantile.build_info()[option]:
            pytest.skip(f"kernel not built; configure with PANTILE_{option.upper()}=ON")


def needed_build_options(item: pytest.Item) -> list[str]:
    """What a test marked gpu needs that a build may leave out: by its markers, or by its
    parameters, of which some are targets, rows of the kernel table or names of backends."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    needed = []
    if item.get_closest_marker("experiments") or parameters.get("exp") == "mixed":
        needed.append("experiments")
    if torch.cuda.get_device_capability()[0] == 9 and (
        item.get_closest_marker("ampere") or any(map(is_ampere, parameters.values()))
    ):
        needed.append("ampere_on_hopper")
    return needed


def is_ampere(parameter: object) -> bool:
    """Whether it stands for 16-bit kernels of the Ampere family."""
    if isinstance(parameter, Target):
        return parameter.backend == "ampere" and parameter.gpu_dtype != torch.float32
    if isinstance(parameter, dict):
        return parameter.get("backend") == "ampere" and parameter["dtype"] != "f32"
    return parameter == "ampere"


@functools.cache
def _know_torch() -> None:
    """torch.compile lists torch's functions once, which must not be while some are replaced."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()
        trace_rules.get_tensor_method()


@pytest.fixture(autouse=True)
def dirty_memory(request: pytest.FixtureRequest):
    """Tests marked gpu: whatever memory torch hands out, to them or to the package, held NaN, 1e30
    or Inf; workspaces are checked. Tests marked undisturbed are about launches that follow each
    other, or run beside each other: nothing is launched or waited for between them."""
    if not request.node.get_closest_marker("gpu") or not torch.cuda.is_available():
        yield
        return
    _know_torch()
    dirt = Dirt(launches=not request.node.get_closest_marker("undisturbed"))
    large = request.node.get_closest_marker("large")
    with share_of_memory() if large else contextlib.nullcontext():
        dirt.soil_allocator()
        with dirt.spread():
            yield
        if large or torch.cuda.memory_reserved() > CACHED_BYTES:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def share_of_memory(
    count: int | None = None, folder: str | os.PathLike | None = None, wait: float = 0.05
):
    """One of as many shares as the GPU's memory has LARGE_BYTES, among all test processes: a file
    lock each, which the system takes back when a process dies."""
    if count is None:
        count = max(1, torch.cuda.get_device_properties(0).total_memory // LARGE_BYTES)
    folder = folder or tempfile.gettempdir()
    with contextlib.ExitStack() as stack:
        paths = [os.path.join(folder, f"pantile-test-memory-{number}") for number in range(count)]
        files = [stack.enter_context(open(path, "a")) for path in paths]
        while not any(map(_lock, files)):
            time.sleep(wait)
        yield


def _lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc):
    _parametrize_targets_and_rows(metafunc)
    yield  # marks of the function
    LEFT_OUT.drop(metafunc)


class LeftOut:
    """Parametrisations marked gpu that a machine without a GPU does not collect: to collect, send
    and skip them took longer than many tests. A function that has no others keeps one, which is
    skipped with its reason; the number of those left out is reported. A run that names a test, or
    writes a record, collects all."""

    KEY = "gpu_tests_left_out"

    def __init__(self) -> None:
        self.active = False
        self.count = 0

    def start(self, config: pytest.Config) -> None:
        named = any("::" in str(word) for word in config.invocation_params.args)
        whole = named or config.getoption("--write-verification") or config.getoption("--all-gpu")
        self.active = not whole and not torch.cuda.is_available()

    def drop(self, metafunc: pytest.Metafunc) -> None:
        calls = getattr(metafunc, "_calls", None)  # pytest's own list: without it nothing is saved
        if not self.active or not calls:
            return
        everything = metafunc.definition.get_closest_marker("gpu") is not None
        kept = [] if everything else [c for c in calls if all(m.name != "gpu" for m in c.marks)]
        metafunc._calls = kept or calls[:1]
        self.count += len(calls) - len(metafunc._calls)


LEFT_OUT = LeftOut()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: each worker collects everything
        session.config.workeroutput[LeftOut.KEY] = LEFT_OUT.count


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    LEFT_OUT.count = getattr(node, "workeroutput", {}).get(LeftOut.KEY, LEFT_OUT.count)


def pytest_terminal_summary(terminalreporter) -> None:
    if LEFT_OUT.count:
        terminalreporter.write_line(
            f"{LEFT_OUT.count} further parametrisations marked gpu were not collected: no CUDA "
            "device (--all-gpu collects them)"
        )


def _parametrize_targets_and_rows(metafunc: pytest.Metafunc) -> None:
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
            # Others: test_fp8.py, test_decode.py.
            if row["pass"] in ("forward", "backward") and row["dtype"] != "e4m3"
        ]
        metafunc.parametrize("row", rows)


# ---- --write-verification=PATH: what a run on a GPU machine found (tools/verification.py)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-verification",
        metavar="PATH",
        help="record the outcome of every test marked gpu as JSON; adds to a record of the same "
        "commit, library, GPU and torch that PATH holds, and refuses another one",
    )

    parser.addoption(
        "--all-gpu",
        action="store_true",
        help="without a GPU: collect, and skip, every parametrisation marked gpu",
    )
    parser.addoption(
        "--sample",
        type=int,
        metavar="N",
        help="run about every N-th test only, always the same: they are chosen by their names",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = config.getoption("--sample")
    if count is None:
        return
    if count < 1:
        raise pytest.UsageError(f"--sample is {count}; it must be at least 1")
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_configure(config: pytest.Config) -> None:
    LEFT_OUT.start(config)
    path = config.getoption("--write-verification")
    if path is None or hasattr(config, "workerinput"):  # with xdist, only the controller writes
        return
    try:
        recorder = Recorder(pathlib.Path(path), verification.facts())
    except ValueError as error:
        raise pytest.UsageError(f"--write-verification: {error}") from None
    config.pluginmanager.register(recorder, "pantile-verification")


class Recorder:
    """Collects the outcome of each test marked gpu, and the kernel that it is about."""

    def __init__(self, path: pathlib.Path, facts: dict) -> None:
        self.path = path
        self.record = verification.opened(path, facts)
        self.started = time.time()

    @pytest.hookimpl(tryfirst=True)  # before -m and -k take tests out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = set(self.record["collected"])
        known |= {item.nodeid for item in items if item.get_closest_marker("gpu")}
        self.record["collected"] = sorted(known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" in report.keywords:
            verification.add(self.record, report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        words = [str(word) for word in session.config.invocation_params.args]
        words = [word for word in words if "write-verification" not in word]
        seconds = time.time() - self.started
        self.record["runs"].append({"arguments": words, "seconds": round(seconds)})
        verification.write_json(self.path, self.record)
