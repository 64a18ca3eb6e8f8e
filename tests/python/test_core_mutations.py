"""The tests of cpp/core must fail when a header is broken: runs tests/core/mutations.py."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location(
    "core_mutations", ROOT / "tests" / "core" / "mutations.py"
)
mutations = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = mutations  # dataclasses look their module up there
SPEC.loader.exec_module(mutations)

NO_LOGIC = {"host_device.h"}


def test_every_header_is_mutated():
    headers = {path.name for path in mutations.CORE.glob("*.h")} - NO_LOGIC
    assert set(mutations.LISTED) == headers
    for header, entries in mutations.LISTED.items():
        assert len(entries) >= 2, header


def test_original_texts_stand_once_in_their_headers():
    complaints = [f"{m}: {mutations.mutate(m)[1]}" for m in mutations.MUTATIONS]
    assert [c for c in complaints if not c.endswith(": ")] == []


def test_named_tests_exist():
    missing = []
    for mutation in mutations.MUTATIONS:
        suite, name = mutation.test.split(".")
        if f"TEST({suite}, {name})" not in mutation.source.read_text():
            missing.append(mutation.test)
    assert missing == []


@pytest.mark.slow
def test_every_mutant_is_caught():
    reason = mutations.missing_tools()
    if reason:
        pytest.skip(reason)
    errors = mutations.run(mutations.MUTATIONS, os.cpu_count() or 1, verbose=False)
    assert not errors, "\n".join(errors)
