"""results_docs.py: blocks come from result files, and a page that differs is noticed."""

from __future__ import annotations

import json
import pathlib

import pytest
import results_backward
import results_docs
import results_files
import results_kernels
import results_reports
import results_softmax
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


RUN = {"kind": "run", "torch": "2.11", "commit": "abc", "backend": "hopper", "seconds": 7.4}


def test_many_contenders_have_a_column_each(results):
    peers = {"a": 2.0, "b": 4.0, "c": 5.0, "d": 0.5}
    one = timing("d64 full 512", "forward", 512, 1.0, **peers, **{"pantile, mixed": 9.0})
    other = timing("d64 full 1024", "forward", 1024, 1.0, a=2.0)
    write(results / "x.jsonl", [RUN, one, other])
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert "| case | pantile | a | b | c | d | ratio to the best |" in text
    assert "TFLOP/s, the ratio to the best of a, b, c, d. Geometric mean 1.000" in text
    assert "| d64 full 512 | 100 | 50 | 25 | 20 | 200 | 0.50 |" in text
    assert "| d64 full 1024 | 100 | 50 | - | - | - | 2.00 |" in text


def test_a_section_says_how_it_was_run(results):
    run = RUN | {"commands": ["python benchmarks/hopper.py"], "what": "cut short"}
    write(results / "x.jsonl", [run, timing("d64 full 512", "forward", 512, 1.0, a=2.0)])
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert "\n\nCut short.\n\n    python benchmarks/hopper.py\n\nForward, bfloat16" in text


def test_builds_of_the_peers_that_ran_are_named():
    run = RUN | {"peers": {"FA3_SO": "sha256 abc", "nvidia-cudnn-frontend": "1.18"}}
    rows = [timing("d64 full 512", "forward", 512, 1.0, FA3=2.0)]
    assert results_speed.libraries_text(run, rows) == ["Builds: FA3 forward: sha256 abc.", ""]
    rows = [timing("d64 full 512", "backward", 512, 1.0, FA3=2.0)]
    assert results_speed.libraries_text(run, rows) == []
    assert results_speed.libraries_text(RUN, rows) == []


def test_durations_are_those_of_the_files(results):
    write(results / "x.jsonl", [RUN])
    write(results / "y.jsonl", [{"kind": "run"}])
    assert results_reports.durations(results_files.ROOT / "README.md") == [
        "Measuring took: [`x.jsonl`](benchmarks/results/x.jsonl) 7 s."
    ]


def test_float32_by_tf32_is_named():
    row = timing("d64 full 512", "forward", 512, 1.0)
    assert results_speed.type_text(row) == "bfloat16"
    row |= {"dtype": "float32", "float32_precision": "high"}
    assert results_speed.type_text(row) == "float32 by TF32"
    assert results_speed.type_text(row | {"float32_precision": "highest"}) == "float32"


def test_cells_name_the_lost_ones(results):
    rows = [
        timing("d64 full 512", "forward", 512, 1.0, a=0.9),
        timing("d64 causal 512", "forward", 512, 0.5, a=0.35),
        timing("d64 full 1024", "forward", 1024, 1.0, a=1.5),
        timing("d64 full 512", "backward", 512, 1.0, a=0.1),
    ]
    write(results / "h200_forward.jsonl", [RUN, *rows])
    text = "\n".join(results_kernels.forward_cells(results_files.ROOT / "docs/page.md"))
    assert "| 64 full | 100 (0.90) | 100 (1.50) |" in text
    assert "over 3 cells, worst 0.70 (d64 causal 512), 2 below 1." in text
    assert "Below 1: d64 causal 512 0.700, d64 full 512 0.900." in text
    assert text.endswith("At 512 keys a causal mask takes 0.50 (d64) of the full mask's time.")


def test_deterministic_aims_count_long_sequences_only():
    shares = {(64, False): {512: 0.5, 4096: 0.93, 8192: 0.91}, (96, False): {4096: 0.1}}
    assert results_backward.aims_text(shares) == (
        "Aimed at from 4096 keys on: 0.92 at head dim 64 (1 of 2 cells reach it, worst 0.910)."
    )


def test_float32_table_joins_two_files(results):
    def row(what: str, causal: bool, ours: float, peer: float) -> dict:
        case = f"d64 {'causal' if causal else 'full'} 4096"
        return timing(case, what, 4096, ours, e=peer) | {"dtype": "float32"}

    names = results_kernels.FLOAT32
    tf32 = [row("forward", False, 1.0, 4.0), row("forward", True, 2.0, 4.0)]
    highest = [row("forward", False, 2.0, 4.0), row("backward", True, 5.0, 4.0)]
    for name, rows in zip(names.values(), (tf32, highest), strict=True):
        write(results / name, [RUN, *rows])
    text = "\n".join(results_kernels.ampere_float32(results_files.ROOT / "docs/page.md"))
    assert "| forward, `tf32` | 100 / 50 |" in text
    assert "| forward, `highest` | 50 / - |" in text
    assert "| forward, e | 25 / 25 |" in text
    assert "| backward, `highest` | - / 20 |" in text
    assert "Slower than the peer: backward by `highest` at d64 causal 4096 0.80." in text


def test_cpu_bars_say_what_was_needed(results):
    row = timing("d64 full 2048", "forward", 2048, 200.0, torch=220.0)
    missed = row | {"ratio": 1.1, "bar": 1.15, "met": False}
    met = row | {"ratio": 1.1, "bar": 1.0, "met": True}
    write(results / "cpu.jsonl", [RUN | {"isa": "avx9"}, missed, met, row | {"bar": None}])
    text = "\n".join(results_kernels.cpu_bars(results_files.ROOT / "docs/page.md"))
    assert "cpu.jsonl): 1 of 2 cells reach what is promised." in text
    assert "| forward, bfloat16, d64 full | avx9 | 500 | 455 | 1.10 | 1.15 | 523 |" in text


def test_quantiser_table(results):
    rows = [
        {"kind": "quantise", "head_dim": 64, "what": "rotated", "ms": 0.1, "gb_per_s": 3120},
        {"kind": "copy", "gb_per_s": 4038},
    ]
    write(results / "h200_fp8_variants.jsonl", [{"kind": "run"}, *rows])
    text = "\n".join(results_kernels.fp8_quantiser(results_files.ROOT / "docs/page.md"))
    assert "runs at 4.04 TB/s" in text
    assert "| 64 | 0.100 ms, 3.12 TB/s |" in text


def test_exposed_share_of_the_softmax():
    rows = [
        {"head_dim": 64, "unit": unit, "without": "all", "share": share}
        for unit, share in (("vector always", -0.3), ("tensor", -0.15))
    ]
    found = [(PAGE, {}, row) for row in rows]
    assert results_softmax.exposed_text(found) == (
        "The share of time that the softmax is exposed falls from 30% to 15% at head dim 64 "
        "(2.0x lower)."
    )


def test_predictions_are_those_of_the_cycle_model():
    softmax_cycles = pytest.importorskip("softmax_cycles")
    expected = softmax_cycles.predicted_ratio(softmax_cycles.A100, 64, "tensor")
    _, _, *rows = results_softmax.cycles(PAGE)
    assert rows[0].startswith("| A100 d64 | ")
    assert f"| {expected:.2f} |" in rows[0]
    assert len(rows) == 2 * len(softmax_cycles.CHIPS)


def test_headline_counts_lost_cells_and_names_a_command(results):
    rows = [timing(f"d64 full {n}", "forward", n, 1.0, a=1.0 + n / 1e4) for n in (512, 1024)]
    rows.append(timing("d64 causal 512", "forward", 512, 1.0, a=0.5))
    write(results / "h200_forward.jsonl", [RUN, *rows])
    (row,) = results_speed.headline(results_files.ROOT / "README.md")[2:]
    assert "| 0.50x | 1 of 3 | `python benchmarks/hopper.py --passes forward` |" in row


def test_ratios_leave_out_cells_without_peers():
    rows = [timing("a", "forward", 8, 1.0), timing("b", "forward", 8, 1.0, x=3.0)]
    assert results_speed.ratios(rows, "forward", "back_to_back") == {"b": 3.0}


def test_slow_devices_are_shown_in_gflops_and_types_apart(results):
    run = {"kind": "run", "torch": "2.11", "commit": "abc", "cpu": "CPU X", "backend": "cpu"}
    rows = [
        timing("d64 full 512", "forward", 512, 200.0, torch=300.0),
        timing("d64 full 512", "forward", 512, 100.0, torch=300.0) | {"dtype": "float32"},
    ]
    write(results / "x.jsonl", [run, *rows])
    text = "\n".join(results_speed.speed(results_files.ROOT / "docs/page.md"))
    assert text.startswith("Ratios to the best peer of each cell:\n\n| file |")
    assert "| forward | bfloat16 | 1 | 1.500 | 1.50 (d64 full 512) | 0 |" in text
    assert "\n\n### x: CPU backend\n\nCPU X, torch 2.11" in text
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
    assert "| bf16 | pantile | 1.0e-01 / 1.0e+00 | - | - | - | - |" in text
    assert "| bf16 | 64 | full | 512 | b | 4.0e-03 | 2.0e-03 | - |" in text


def test_memory_block_states_the_case_of_32768(results):
    def row(name: str, peak: int) -> dict:
        keys = {"kind": "memory", "implementation": name, "length": 32768, "head_dim": 128}
        return keys | {"peak_bytes": peak, "model_bytes": 1, "matrix_bytes": 2 * 2**30}

    run = {"kind": "run", "commit": "abc", "device": "GPU X"}
    rows = [row("textbook", 8 * 2**30), row("pantile", 2**28)]
    write(results / "m.jsonl", [run, *rows])
    text = "\n".join(results_reports.memory(results_files.ROOT / "docs/page.md"))
    assert "one matrix takes 2,048.0 MiB" in text
    assert "32 times less" in text


def test_io_rows_of_another_run_stand_beside_the_first(results):
    def row(name: str, length: int, ratio: float) -> dict:
        figures = dict.fromkeys(("read_bytes", "written_bytes"), 2e9)
        model = dict.fromkeys(("model_read_bytes", "model_written_bytes"), 1e9)
        keys = {"kind": "io", "implementation": name, "length": length, "heads": 4}
        return keys | figures | model | {"ratio": ratio}

    def run(commit: str) -> dict:
        return {"kind": "run", "commit": commit, "gpu": "GPU X"}

    rows = [row("pantile", 2048, 1.05), row("pantile backward", 2048, 2.0)]
    write(results / "io.jsonl", [run("abc"), *rows])
    write(results / "io_earlier.jsonl", [run("def"), row("pantile", 2048, 0.8)])
    text = "\n".join(results_reports.io_check(results_files.ROOT / "docs/page.md"))
    assert "| written (model) | measured / model | at def |" in text
    assert "| pantile | 2,048 | 4 | 2.00 (1.00) | 2.00 (1.00) | 1.050 | 0.800 |" in text
    assert "| pantile backward | 2,048 | 4 | 2.00 (1.00) | 2.00 (1.00) | 2.000 | - |" in text
    assert text.endswith("1 of 2 forwards are within 15% of the model; the farthest is 20.0% off.")


def test_training_runs_stand_beside_each_other(results):
    def run(name: str, speed: float, last: float) -> dict:
        figures = {"tokens_per_second": speed, "step_seconds": 0.05, "peak_bytes": 3 * 2**30}
        return {"attention": name, "losses": [5.0, last]} | figures

    report = {"parameters": 110e6, "layers": 8, "width": 1024, "heads": 8, "steps": 2, "batch": 4}
    report |= {"context": 8192, "device": "GPU X", "torch": "2.11"}
    report["runs"] = [run("pantile", 3000.0, 4.0), run("flash", 2000.0, 4.25)]
    (results / "h200_train_gpt.json").write_text(json.dumps(report))
    text = "\n".join(results_reports.training(results_files.ROOT / "docs/page.md"))
    assert "110 M parameters, 8 layers, head dim 128, 2 steps of 4 x 8192 tokens" in text
    assert "commit not recorded" in text
    assert "| pantile | 3,000 | 1.00 | 50.0 | 3.0 | - |" in text
    assert "| flash | 2,000 | 1.50 | 50.0 | 3.0 | 2.5e-01 |" in text


def test_targets_of_utilisation():
    def row(name: str, case: str, tensor: float, mufu: float) -> dict:
        percent = {"tensor": tensor, "FMA": 1.0, "ALU": None, "MUFU": mufu, "DRAM": 5.0}
        return {"implementation": name, "case": case, "percent": percent}

    rows = [row("cuBLAS", "bf16", 97.0, 0.0), row("a", "bf16 forward d64 full", 60.0, 81.0)]
    rows.append(row("b", "bf16 forward d256 full", 95.0, 20.0))
    text = results_reports.targets_text(rows)
    assert "tensor cores above 85 %: b bf16 forward d256 full (highest 95 %, b" in text
    assert "vector pipes above 80 %: a bf16 forward d64 full (highest 81 %, a" in text
    assert "memory above 70 %: none (highest 5 %, a" in text


def test_missing_results_are_said_to_be_missing(results):
    for name in (
        "speed",
        "memory",
        "accuracy",
        "accuracy-fp8",
        "io-check",
        "utilisation",
        "build",
        "durations",
        "training",
        "repeat",
        "forward-cells",
        "fp8-cells",
        "fp8-quantiser",
        "ampere-cells",
        "ampere-float32",
        "cpu-bars",
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
