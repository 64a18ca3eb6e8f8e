"""build_facts.py: columns that keep each other, the time of a call."""

from __future__ import annotations

import json

import build_facts
import pytest


def test_columns_keep_each_other(tmp_path, monkeypatch):
    pytest.importorskip("pantile.bench.measure")
    path = tmp_path / "facts.json"
    path.write_text(build_facts.FACTS.read_text())
    before = json.loads(path.read_text())
    monkeypatch.setattr(build_facts, "build", lambda cuda: {"wheel": "9 MB", "new": "1"})
    monkeypatch.setattr("sys.argv", ["build_facts.py", "--cuda", "--out", str(path)])
    build_facts.main()
    after = json.loads(path.read_text())
    assert after["rows"].pop("new") == {"with CUDA": "1"}
    before["rows"]["wheel"]["with CUDA"] = "9 MB"
    assert after["rows"] == before["rows"]
    assert after["public"] == before["public"]
    assert "commit" in after["sources"].pop("with CUDA")
    assert after["sources"].items() <= before["sources"].items()


def test_the_time_of_a_call_is_measured():
    pytest.importorskip("pantile")
    ((_, text),) = build_facts.call_time("cpu").items()
    assert 0 < float(text.removesuffix(" us")) < 1e4
