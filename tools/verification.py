#!/usr/bin/env python3
"""docs/gpu-verification.md: what the tests found on a GPU machine. Nothing is written by hand.

    pytest -m gpu --write-verification=build/gpu.json      # one run, or several of the same build
    python tools/gpu_sanitizer.py --record                 # docs/gpu-sanitizer.json
    python tools/verification.py build/gpu.json            # docs/gpu-verification.json and the page
    python tools/verification.py                           # the page from the two JSON files
    python tools/verification.py --check                   # fails if it would change the page

A record holds the outcome of every test by name; the JSON file beside the page sums it up. Both
name the commit and the hash of the compiled library that was tested.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone

import racecheck_known
import results_docs

ROOT = results_docs.ROOT
PAGE = "gpu-verification.md"
SUMMARY = "gpu-verification.json"
SANITIZER = "gpu-sanitizer.json"
SOURCES = ("cpp", "cuda", "python", "tests", "cmake", "CMakeLists.txt")
SAME = ("commit", "library", "gpu", "torch")  # what runs that are joined have in common
OUTCOMES = ("passed", "failed", "skipped")
WORSE = {"passed": 0, "skipped": 1, "failed": 2}
LONGEST_MESSAGE = 200


# ---- what was tested


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def commit() -> str:
    """Of the sources; "+" behind it where they differ from it. PANTILE_COMMIT: for a machine that
    has the files without their history."""
    if named := os.environ.get("PANTILE_COMMIT"):
        return named
    git = ("git", "-C", str(ROOT))
    found = _output(*git, "rev-parse", "HEAD") or "unknown"
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", *SOURCES)
    return found + ("+" if changed else "")


def library_hash() -> str:
    """sha256 of the compiled library that Python loaded."""
    from pantile import _C

    return hashlib.sha256(pathlib.Path(_C.__file__).read_bytes()).hexdigest()


def facts() -> dict[str, str]:
    import pantile
    import torch
    from pantile.bench import measure

    return {
        "commit": commit(),
        "library": library_hash(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "driver": measure.gpu_state().get("driver_version", "unknown"),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "nvcc": str(pantile.build_info().get("nvcc", "")),
    }


# ---- the record of one or more runs of pytest


def opened(path: pathlib.Path, found: dict[str, str]) -> dict:
    """A new record, or the one that is there, if it is of the same build."""
    if not path.exists():
        return {"facts": found, "runs": [], "collected": [], "tests": {}}
    record = json.loads(path.read_text())
    for name in SAME:
        if record["facts"][name] != found[name]:
            raise ValueError(
                f"{path} is of {name} {record['facts'][name]}, this run of {found[name]}; records "
                "of different builds are not joined: remove the file or name another one"
            )
    return record


def _reason(report) -> str:
    """Of a failure or a skip, in one line."""
    if report.outcome == "skipped":
        if isinstance(report.longrepr, tuple):
            return str(report.longrepr[2]).removeprefix("Skipped: ")
        return getattr(report, "wasxfail", "")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = text.splitlines() or [""]
    return lines[0][:LONGEST_MESSAGE]


def add(record: dict, report) -> None:
    """One phase of one test. The worst phase counts; a new run of a test replaces its last one."""
    tests = record["tests"]
    if report.when == "setup":
        tests[report.nodeid] = {}
    test = tests.setdefault(report.nodeid, {})
    if report.outcome == "passed" and report.when != "call":
        return
    if WORSE[report.outcome] < WORSE.get(test.get("outcome"), -1):
        return
    test["outcome"] = report.outcome
    if report.outcome != "passed":
        test["reason"] = _reason(report)
    kernels = [value for key, value in report.user_properties if key == "kernel"]
    if kernels:
        test["kernel"] = kernels[0]


def write_json(path: pathlib.Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def summarise(record: dict) -> dict:
    """What the page shows of a record."""
    tests = {name: test for name, test in record["tests"].items() if "outcome" in test}
    counts = Counter(test["outcome"] for test in tests.values())
    kernels: dict[str, Counter] = {}
    for test in tests.values():
        if "kernel" in test:
            kernels.setdefault(test["kernel"], Counter())[test["outcome"]] += 1
    of_outcome = {
        outcome: {
            n: t.get("reason", "") for n, t in sorted(tests.items()) if t["outcome"] == outcome
        }
        for outcome in ("failed", "skipped")
    }
    left_out = Counter(n.split("::")[0] for n in record["collected"] if n not in tests)
    return {
        "facts": record["facts"],
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "runs": record["runs"],
        "failures": of_outcome["failed"],
        "not_run": dict(sorted(left_out.items())),
        "skips": dict(Counter(of_outcome["skipped"].values()).most_common()),
        "kernels": {
            name: [found[outcome] for outcome in OUTCOMES]
            for name, found in sorted(kernels.items())
        },
    }


# ---- the page

NAMES = {
    "commit": "commit",
    "library": "library, sha256",
    "date": "date",
    "gpu": "GPU",
    "driver": "driver",
    "torch": "torch",
    "nvcc": "nvcc",
}


INTRODUCTION = [
    "Written by `tools/verification.py` from what `pytest -m gpu --write-verification=PATH`",
    "and `tools/gpu_sanitizer.py --record` found. `make lint` fails where it says otherwise.",
]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _table(columns: list[str], rows: Iterable[Iterable]) -> list[str]:
    return results_docs.table(columns, [[_cell(value) for value in row] for row in rows])


def _facts_table(found: dict, more: Iterable = ()) -> list[str]:
    rows = [(label, found.get(name) or "not recorded") for name, label in NAMES.items()]
    return _table(["what", "value"], [*rows, *more])


def sanitizer_parts(result: dict | None) -> list[list[str]]:
    title = ["## compute-sanitizer"]
    if result is None:
        return [title, ["No run is recorded."]]
    names = ("tool", "what", "cases")
    rows = []
    for one in result["results"]:
        outcome = "passed" if one["ok"] else "FAILED"
        rows.append([*(one[n] for n in names), one["summary"] or "no summary", outcome])
    columns = ["tool", "what ran", "cases", "what it found", "outcome"]
    parts = [title, _facts_table(result["facts"]), _table(columns, rows)]
    if any("known: " in one["summary"] for one in result["results"]):
        parts.append([*racecheck_known.TEXT])
    return parts


def page(summary: dict, sanitizer: dict | None) -> str:
    def quoted(rows: dict) -> list:
        return [(f"`{name}`", value) for name, value in rows.items()]

    def part(title: str, columns: list[str], rows: list) -> list[list[str]]:
        return [[f"## {title}"], _table(columns, rows)] if rows else []

    counts, failures = summary["counts"], quoted(summary["failures"])
    parts = [
        ["# GPU verification"],
        INTRODUCTION,
        _facts_table(summary["facts"], counts.items()),
        ["## Failures"],
        _table(["test", "reason"], failures)
        if failures
        else ["None." if counts["passed"] else "Nothing was run."],
        *part("Collected, but not run", ["file", "tests"], quoted(summary["not_run"])),
        *sanitizer_parts(sanitizer),
        ["## Kernels"],
        _table(["kernel", *OUTCOMES], [(n, *c) for n, c in summary["kernels"].items()]),
        *part("Reasons of skipped tests", ["reason", "tests"], list(summary["skips"].items())),
    ]
    return "\n".join(results_docs.joined(parts)) + "\n"


def rendered(docs: pathlib.Path) -> str:
    sanitizer = docs / SANITIZER
    found = json.loads(sanitizer.read_text()) if sanitizer.exists() else None
    return page(json.loads((docs / SUMMARY).read_text()), found)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", nargs="?", type=pathlib.Path, help="of --write-verification")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs")
    chosen = parser.parse_args(words)
    if chosen.record is not None:
        write_json(chosen.docs / SUMMARY, summarise(json.loads(chosen.record.read_text())))
    stale = results_docs.rewrite(chosen.docs / PAGE, rendered(chosen.docs), chosen.check)
    return int(chosen.check and stale)


if __name__ == "__main__":
    sys.exit(main())
