"""tools/verification.py: the record of GPU tests, its summary and the page that is made of it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import racecheck_known
import verification

ROOT = pathlib.Path(__file__).resolve().parents[2]
FACTS = {
    "commit": "abc",
    "library": "00ff",
    "date": "2026-01-01",
    "gpu": "NVIDIA H200",
    "driver": "1",
    "torch": "2.11",
    "nvcc": "13.0",
}


def report(name: str, outcome: str = "passed", when: str = "call", reason="", kernel=None):
    longrepr = ("file", 1, f"Skipped: {reason}") if outcome == "skipped" else reason
    properties = [] if kernel is None else [("kernel", kernel)]
    return SimpleNamespace(
        nodeid=name, outcome=outcome, when=when, longrepr=longrepr, user_properties=properties
    )


@pytest.fixture
def record(tmp_path):
    return verification.opened(tmp_path / "absent.json", FACTS)


def phases(record: dict, name: str, **call) -> None:
    for one in (report(name, when="setup"), report(name, **call), report(name, when="teardown")):
        verification.add(record, one)


def test_each_outcome_is_counted_once(record):
    phases(record, "f.py::a", kernel="k1")
    phases(record, "f.py::b", outcome="failed", reason="E first\nE second", kernel="k1")
    verification.add(record, report("f.py::c", "skipped", "setup", "one GPU"))
    verification.add(record, report("f.py::c", when="teardown"))
    record["collected"] = ["f.py::a", "f.py::b", "f.py::c", "g.py::d"]
    found = verification.summarise(record)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["failures"] == {"f.py::b": "E first"}
    assert found["skips"] == {"one GPU": 1}
    assert found["kernels"] == {"k1": [1, 1, 0]}
    assert found["not_run"] == {"g.py": 1}


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_an_error_outside_the_call_is_a_failure(record, when):
    for phase in ("setup", "call", "teardown"):
        verification.add(record, report("a", "failed" if phase == when else "passed", phase, "E x"))
    assert verification.summarise(record)["failures"] == {"a": "E x"}


def test_a_new_run_of_a_test_replaces_the_last_one(record):
    phases(record, "a", outcome="failed", reason="E x")
    phases(record, "a")
    assert verification.summarise(record)["counts"] == {"passed": 1, "failed": 0, "skipped": 0}


def test_records_are_joined_if_they_are_of_the_same_build(tmp_path, record):
    path = tmp_path / "record.json"
    phases(record, "a")
    verification.write_json(path, record)
    again = verification.opened(path, FACTS | {"date": "2026-01-02"})
    phases(again, "b")
    assert set(again["tests"]) == {"a", "b"}
    for name in verification.SAME:
        with pytest.raises(ValueError, match=f"is of {name} .*, this run of other"):
            verification.opened(path, FACTS | {name: "other"})


def test_failures_are_shown_as_failures(record):
    phases(record, "f.py::a[x|y]", outcome="failed", reason="E 1 | 2")
    text = verification.page(verification.summarise(record), None)
    assert "| failed | 1 |" in text
    assert "| `f.py::a[x\\|y]` | E 1 \\| 2 |" in text
    assert "None." not in text
    assert "No run is recorded." in text


def test_nothing_run_is_not_nothing_failed(record):
    assert "Nothing was run." in verification.page(verification.summarise(record), None)


def test_a_page_that_differs_from_its_json_is_refused(tmp_path, record, capsys):
    phases(record, "a", kernel="k1")
    raw = tmp_path / "record.json"
    verification.write_json(raw, record)
    docs = ["--docs", str(tmp_path)]
    assert verification.main([str(raw), *docs]) == 0
    assert verification.main(["--check", *docs]) == 0
    page = tmp_path / verification.PAGE
    page.write_text(page.read_text() + "\n## Since then\n\nAll is well.\n")
    assert verification.main(["--check", *docs]) == 1
    assert "run make docs" in capsys.readouterr().out
    assert verification.main(docs) == 0
    summary = json.loads((tmp_path / verification.SUMMARY).read_text())
    summary["counts"]["failed"] = 1
    verification.write_json(tmp_path / verification.SUMMARY, summary)
    assert verification.main(["--check", *docs]) == 1


def test_the_sanitizer_is_part_of_the_page(tmp_path, record):
    summary = tmp_path / verification.SUMMARY
    verification.write_json(summary, verification.summarise(record))
    one = {"tool": "memcheck", "what": "kernels", "cases": 3, "summary": "ERROR SUMMARY: 2 errors"}
    result = {"facts": FACTS, "results": [one | {"ok": False}]}
    verification.write_json(tmp_path / verification.SANITIZER, result)
    text = verification.rendered(tmp_path)
    assert "| memcheck | kernels | 3 | ERROR SUMMARY: 2 errors | FAILED |" in text
    assert racecheck_known.TEXT[0] not in text
    known = one | {"summary": "RACECHECK SUMMARY: 4 hazards; known: 4, others: 0", "ok": True}
    verification.write_json(tmp_path / verification.SANITIZER, result | {"results": [known]})
    text = verification.rendered(tmp_path)
    assert "known: 4, others: 0 | passed |" in text
    assert racecheck_known.TEXT[0] in text


def test_the_page_of_this_project():
    assert verification.main(["--check"]) == 0


def test_pytest_writes_a_record_and_adds_to_it(tmp_path):
    """With no GPU every test is skipped, with one they run: each is in the record either way."""
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += [f"--write-verification={path}", "tests/python/test_memory.py", "-k"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}

    def run(which: str, **more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, which],
            cwd=ROOT,
            env=environment | {"PANTILE_COMMIT": "abc"} | more,
            capture_output=True,
            text=True,
            check=False,
        )

    for words, count in (("counter and bf16", 1), ("counter and fp8", 2)):
        result = run(words)
        assert result.returncode == 0, result.stdout + result.stderr
        record = json.loads(path.read_text())
        assert len(record["tests"]) == count
        assert len(record["runs"]) == count
        assert set(record["tests"]) <= set(record["collected"])
        assert record["facts"]["commit"] == "abc"
        assert len(record["facts"]["library"]) == 64
    assert all(test["outcome"] in verification.OUTCOMES for test in record["tests"].values())
    other = run("counter", PANTILE_COMMIT="def")
    assert other.returncode != 0
    assert "records of different builds are not joined" in other.stdout + other.stderr
