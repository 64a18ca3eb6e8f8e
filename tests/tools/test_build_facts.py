"""build_facts.py: memory of a process tree, and columns that keep each other."""

from __future__ import annotations

import json
import subprocess
import sys

import build_facts
import pytest

PUBLIC = {"other": {"build": "2 h"}, "sources": "its page"}


def test_a_family_holds_grandchildren_only_of_its_own():
    parents = {1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 0}
    assert build_facts.children_of(parents, 1) == {1, 2, 3, 4, 5}
    assert build_facts.children_of(parents, 4) == {4, 5}


def test_memory_of_a_child_counts():
    code = "x = bytearray(80_000_000); print(len(x), flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        assert build_facts.resident_bytes(process.pid) > 80_000_000
        process.communicate(b"\n")


def test_columns_keep_each_other():
    facts = build_facts.merge({}, "CPU only", {"wheel": "1 MB", "build": "20 s"}, PUBLIC)
    facts["sources"]["CPU only"] = "machine A"
    facts = build_facts.merge(facts, "with CUDA", {"wheel": "9 MB"}, PUBLIC)
    assert facts["columns"] == ["CPU only", "with CUDA", "other"]
    assert facts["rows"]["wheel"] == {"CPU only": "1 MB", "with CUDA": "9 MB"}
    assert facts["rows"]["build"] == {"CPU only": "20 s", "other": "2 h"}
    assert facts["sources"] == {"CPU only": "machine A"}
    again = build_facts.merge(facts, "CPU only", {"wheel": "2 MB"}, PUBLIC)
    assert again["rows"]["wheel"] == {"CPU only": "2 MB", "with CUDA": "9 MB"}


def test_public_figures_name_their_source():

    public = json.loads(build_facts.PUBLIC.read_text())
    for name in public:
        assert name == "sources" or name in public["sources"]


def test_the_time_of_a_call_is_measured():
    pytest.importorskip("pantile")
    ((_, text),) = build_facts.call_seconds("cpu").items()
    assert 0 < float(text.removesuffix(" us")) < 1e4
