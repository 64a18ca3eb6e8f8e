"""results_docs.py: blocks come from result files, and a page that differs is noticed."""

from __future__ import annotations

import json
import pathlib

import pytest
import results_docs
import results_files
import results_reports
import results_speed

PAGE = results_files.ROOT / "docs/page.md"


def timing(case: str, what: str, seqlen: int, ours: float, **others: float) -> dict:
    words = case.split()
    results = {
        name: {"ms": ms, "tflops": 100 / ms} for name, ms in {"pantile": ours, **others}.items()
    }
    return {
        "kind": "timing",
        "case": case,
        "pass": what,
        "dtype": "bfloat16",
        "head_dim": 64,
        "seqlen": seqlen,
        "causal": "causal" in words,
        "results": {"back_to_back": results},
    }


@pytest.fixture
def results(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setattr(results_files, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(results_files, "RESULTS", folder)
    return folder


def write(path: pathlib.Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_speed_block(results):
    run = {"kind": "run", "torch": "2.11", "commit": "abc", "state_before": {"name": "GPU X"}}
    rows = [
        timing("d64 full 512", "forward", 512, 1.0, a=2.0, b=0.5),
        timing("d64 causal 512", "forward", 512, 2.0, a=4.0),
        timing("window at 1k", "forward", 1024, 4.0) | {"absent": {"c": "not there"}},
    ]
    write(results / "x.jsonl", [run, *rows])
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert "GPU X, torch 2.11, commit abc" in text
    assert "[`x.jsonl`](../benchmarks/results/x.jsonl)" in text
    assert "Forward, bfloat16, back to back: TFLOP/s, in brackets" in text
    assert "Absent: c (not there)." in text
    assert "| 64 full | 100 (0.50) |" in text
    assert "| 64 causal | 50 (2.00) |" in text
    assert "| window at 1k | 25 |" in text
    assert "the best of a, b. Geometric mean 1.000 over 2 cells" in text
    assert "worst 0.50 (d64 full 512), 1 below 1; by peer (cells) a 2.00 (2), b 0.50 (1)." in text


def test_two_runs_are_compared_by_their_ratios(results):
    run = {"kind": "run", "torch": "2.11", "commit": "abc", "state_before": {"name": "GPU X"}}
    for i, factor in ((1, 1.0), (2, 1.1)):
        rows = [
            timing("d64 full 512", "forward", 512, 1.0 * factor, a=2.0 * factor),
            timing("d64 full 1024", "forward", 1024, 1.0 * factor, a=2.0),
        ]
        write(results / f"x_repeat{i}.jsonl", [run, *rows])
    text = "\n".join(results_speed.repeat(results_files.ROOT / "docs/page.md"))
    assert "| forward | 0.953 | 1 of 2 | 0.909 (d64 full 1024) |" in text
    assert results_files.speed_files() == []


def test_the_readme_shows_the_plots_that_are_there(results):
    page = results_files.ROOT / "README.md"
    assert results_speed.plots(page) == []
    (results / "h200_memory.png").touch()
    (shown,) = results_speed.plots(page)
    assert shown.endswith("(benchmarks/results/h200_memory.png)")


def test_a_headline_may_name_its_only_peer():
    rows = [timing("d64 full 512", "forward", 512, 1.0, a=3.0, b=0.5)]
    kept = results_speed.only_against(rows, "a")
    assert results_speed.ratios(kept, "forward", "back_to_back") == {"d64 full 512": 3.0}
    assert results_speed.ratios(rows, "forward", "back_to_back") == {"d64 full 512": 0.5}


def test_our_variants_are_no_peers(results):
    run = {"kind": "run", "torch": "2.11", "commit": "abc", "state_before": {"name": "GPU X"}}
    variant = {"pantile, deterministic": 2.0}
    write(
        results / "x.jsonl", [run, timing("d64 full 512", "backward", 512, 1.0, a=3.0, **variant)]
    )
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert "the best of a. Geometric mean 3.000" in text
    assert "pantile, deterministic: 0.500 of the speed (geometric mean, 1 cells)" in text


def test_ratios_leave_out_cells_without_peers():
    rows = [timing("a", "forward", 8, 1.0), timing("b", "forward", 8, 1.0, x=3.0)]
    assert results_speed.ratios(rows, "forward", "back_to_back") == {"b": 3.0}


def test_slow_devices_are_shown_in_gflops_and_types_apart(results):
    run = {"kind": "run", "torch": "2.11", "commit": "abc", "cpu": "CPU X"}
    rows = [
        timing("d64 full 512", "forward", 512, 200.0, torch=300.0),
        timing("d64 full 512", "forward", 512, 100.0, torch=300.0) | {"dtype": "float32"},
    ]
    write(results / "x.jsonl", [run, *rows])
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert text.startswith("### x\n\nCPU X, torch 2.11")
    assert "Forward, bfloat16, back to back: GFLOP/s" in text
    assert "| 64 full | 500 (1.50) |" in text
    assert "| 64 full | 1000 (3.00) |" in text


def test_accuracy_is_set_against_the_textbook(results):
    def row(name: str, law: str, rmse: float | None) -> dict:
        case = {"dtype": "bf16", "head_dim": 64, "mask": "full", "length": 512, "law": law}
        errors = {} if rmse is None else {"o": {"rmse": rmse, "max": 1.0, "relative": 0.1}}
        return {"kind": "accuracy", "implementation": name, "errors": errors} | case

    run = {"kind": "run", "torch": "2.11", "commit": "abc", "device": "GPU X"}
    rows = [row("pantile", "a", 1e-3), row("textbook", "a", 2e-3)]
    rows += [row("pantile", "b", 4e-3), row("textbook", "b", 2e-3), row("FA3", "b", None)]
    write(results / "x.jsonl", [run, *rows])
    text = "\n".join(results_reports.accuracy(results_files.ROOT / "docs/page.md"))
    assert "| pantile | 1.00 / 2.00 | - | - | - | - |" in text
    assert "| FA3 | - | - | - | - | - |" in text
    assert "| bf16 | 64 | full | 512 | b | 4.0e-03 | 2.0e-03 | - |" in text


def test_memory_block_states_the_case_of_32768(results):
    def row(name: str, peak: int) -> dict:
        keys = {"kind": "memory", "implementation": name, "length": 32768, "head_dim": 128}
        return keys | {"peak_bytes": peak, "model_bytes": 1, "matrix_bytes": 2 * 2**30}

    run = {"kind": "run", "commit": "abc", "device": "GPU X"}
    rows = [row("textbook", 8 * 2**30), row("pantile", 2**28)]
    write(results / "m.jsonl", [run, *rows])
    text = "\n".join(results_reports.memory(results_files.ROOT / "docs/page.md"))
    assert "One matrix" in text or "one matrix takes 2,048.0 MiB" in text
    assert "32 times less" in text


def test_missing_results_are_said_to_be_missing(results):
    for name in (
        "speed",
        "memory",
        "accuracy",
        "accuracy-fp8",
        "io-check",
        "utilisation",
        "build",
        "repeat",
    ):
        assert results_docs.BLOCKS[name](PAGE) == ["Not measured yet."], name


def test_render_replaces_only_blocks():
    text = "a\n<!-- results gpus: begin -->\nold 1.23\n<!-- results gpus: end -->\nb\n"
    new = results_docs.render(text, PAGE)
    assert new.startswith("a\n<!-- results gpus: begin -->\n| GPU |")
    assert new.endswith("<!-- results gpus: end -->\nb\n")
    assert "old 1.23" not in new
    assert results_docs.render(new, PAGE) == new


def test_an_unknown_block_is_named():
    with pytest.raises(ValueError, match="block 'speeed'; there are: accuracy"):
        results_docs.render("<!-- results speeed: begin -->\n<!-- results speeed: end -->", PAGE)


def test_check_fails_on_a_number_typed_by_hand(monkeypatch, tmp_path, capsys):
    page = tmp_path / "README.md"
    monkeypatch.setattr(results_docs, "pages", lambda: [page])
    monkeypatch.setattr(results_docs, "ROOT", tmp_path)
    page.write_text("<!-- results gpus: begin -->\n<!-- results gpus: end -->\n")
    monkeypatch.setattr("sys.argv", ["results_docs.py"])
    assert results_docs.main() == 0
    monkeypatch.setattr("sys.argv", ["results_docs.py", "--check"])
    assert results_docs.main() == 0
    page.write_text(page.read_text().replace("| 989 |", "| 1989 |"))
    assert results_docs.main() == 1
    assert "README.md: numbers differ" in capsys.readouterr().out
