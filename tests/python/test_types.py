"""The annotations, as mypy and pyright read them: on the examples and on tests/typing."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLS = ROOT / "tests" / "typing" / "public_calls.py"
# Without those that import what is not installed here.
EXAMPLES = sorted(x for x in (ROOT / "examples").glob("*.py") if x.name != "retrieval.py")
MISTAKES = {
    number
    for number, line in enumerate(CALLS.read_text().splitlines(), 1)
    if re.search(r"# error: ", line)
}


def _mypy() -> subprocess.CompletedProcess:
    """Strict, but the examples need not annotate every function of their own."""
    if "PANTILE_CI" not in os.environ:  # there it is installed, and the test must not be skipped
        pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports"]
    command += ["--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls"]
    command += ["--config-file=", f"--cache-dir={os.devnull}", *map(str, [CALLS, *EXAMPLES])]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _pyright() -> subprocess.CompletedProcess:
    program = shutil.which("pyright")
    if program is None:
        pytest.skip("pyright is not installed")
    command = [program, "--pythonpath", sys.executable, *map(str, [CALLS, *EXAMPLES])]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "error"),
    [
        pytest.param(_mypy, r"(\w+\.py):(\d+): error", id="mypy"),
        pytest.param(_pyright, r"(\w+\.py):(\d+):\d+ - error", id="pyright"),
    ],
)
def test_marked_mistakes_are_the_only_errors(check, error):
    """One run for all files: reading torch is what takes time."""
    result = check()
    found = {(name, int(number)) for name, number in re.findall(error, result.stdout)}
    assert found == {(CALLS.name, number) for number in MISTAKES}, result.stdout + result.stderr
