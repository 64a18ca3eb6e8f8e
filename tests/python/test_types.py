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
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MISTAKES = {
    number
    for number, line in enumerate(CALLS.read_text().splitlines(), 1)
    if re.search(r"# error: ", line)
}


def _mypy(paths) -> subprocess.CompletedProcess:
    """Strict on tests/typing; examples need not annotate every function of their own."""
    pytest.importorskip("mypy")
    strict = "--strict" if paths == [CALLS] else "--check-untyped-defs"
    command = [sys.executable, "-m", "mypy", strict, "--ignore-missing-imports"]
    command += ["--config-file=", f"--cache-dir={os.devnull}", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _pyright(paths) -> subprocess.CompletedProcess:
    program = shutil.which("pyright")
    if program is None:
        pytest.skip("pyright is not installed")
    command = [program, "--pythonpath", sys.executable, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


checkers = pytest.mark.parametrize(
    ("check", "line_of_error"),
    [
        pytest.param(_mypy, r"public_calls\.py:(\d+): error", id="mypy"),
        pytest.param(_pyright, r"public_calls\.py:(\d+):\d+ - error", id="pyright"),
    ],
)


@pytest.mark.slow
@checkers
def test_examples_are_clean(check, line_of_error):
    result = check(EXAMPLES)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@checkers
def test_public_calls_have_the_types_they_should(check, line_of_error):
    result = check([CALLS])
    found = {int(number) for number in re.findall(line_of_error, result.stdout)}
    assert found == MISTAKES, result.stdout + result.stderr
