"""build_facts.py: columns that keep each other, the time of a call."""

from __future__ import annotations

import json

import build_facts
import pytest

PUBLIC = {"other": {"build": "2 h"}, "sources": "its page"}


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
    ((_, text),) = build_facts.call_time("cpu").items()
    assert 0 < float(text.removesuffix(" us")) < 1e4
