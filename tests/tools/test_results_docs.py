"""results_docs.py: blocks come from result files, and a page that differs is noticed."""

from __future__ import annotations

import json
import pathlib

import pytest
import results_docs

RUN = {"kind": "run", "torch": "2.11", "commit": "abc", "backend": "hopper", "seconds": 7.4}
FIGURES = results_docs.figures


def timing(case: str, what: str, seqlen: int, ours: float, **others: float) -> dict:
    times = {"pantile": ours, **others}
    return {
        "kind": "timing",
        "case": case,
        "pass": what,
        "dtype": "bfloat16",
        "head_dim": 64,
        "seqlen": seqlen,
        "causal": "causal" in case.split(),
        "results": {"back_to_back": {n: {"ms": ms, "tflops": 100 / ms} for n, ms in times.items()}},
    }


@pytest.fixture
def results(tmp_path, monkeypatch) -> pathlib.Path:
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("")
    monkeypatch.setattr(results_docs, "ROOT", tmp_path)
    monkeypatch.setattr(results_docs, "RESULTS", folder)
    return folder


def write(path: pathlib.Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rendered(**part) -> str:
    page = results_docs.ROOT / "docs/page.md"
    return "\n".join(results_docs.block("x", page, [{"block": "x"} | part]))


# ---- general parts


def test_a_pivot_has_a_row_and_a_column_for_each_value(results):
    rows = [("a", 64, 1.25), ("a", 128, 2.0), ("b", 64, 3.0), ("b", 64, 5.0)]
    lines = [{"kind": "law", "name": n, "d": d, "x": x} for n, d, x in rows]
    write(results / "x.jsonl", [RUN, *lines, {"kind": "other"}])
    text = rendered(
        files=["x.jsonl"],
        records="law",
        text="Of {commit} ({link}):",
        rows={"": "{name}"},
        columns="{d}",
        cell="{max(r['x'] for r in group):.2f}",
        note="{len(records)} records.",
    )
    assert text == (
        "Of abc ([`x.jsonl`](../benchmarks/results/x.jsonl)):\n\n"
        "|  | 64 | 128 |\n| --- | --- | --- |\n| a | 1.25 | 2.00 |\n| b | 5.00 | - |\n\n"
        "4 records."
    )


def test_items_of_a_dict_are_compared_with_their_base(results):
    write(results / "x.jsonl", [RUN, *(timing(f"c{i}", "forward", i, 2.0, a=i) for i in (4, 8))])
    text = rendered(
        files=["x.jsonl"],
        records="timing",
        expand="results['back_to_back']",
        base={"name": "pantile"},
        same=["case"],
        where="name != 'pantile'",
        rows={"case": "{case}"},
        columns="{name}",
        cell="{ms / base['ms']:.1f}",
    )
    assert text.splitlines()[2:] == ["| c4 | 2.0 |", "| c8 | 4.0 |"]


def test_names_that_are_no_names_are_reached_through_the_record(results):
    write(results / "x.jsonl", [RUN, {"kind": "x", "pass": "forward", "max": 3}])
    columns = {"pass": "{record['pass']}", "max": "{record['max']}, {max(1, 2)}"}
    text = rendered(files=["x.jsonl"], records="x", columns=columns)
    assert text.endswith("| forward | 3, 2 |")


def test_a_row_belongs_to_the_run_above_it(results):
    runs = [{"kind": "run", "gpu": gpu} for gpu in "AB"]
    row = {"kind": "x", "value": 1}
    write(results / "x.jsonl", [runs[0], row, runs[1], row])
    text = rendered(files=["x.jsonl"], records="x", each="On {gpu}:", columns={"value": "{value}"})
    assert [line for line in text.splitlines() if line.startswith("On")] == ["On A:", "On B:"]


def test_records_of_a_model_of_this_project(monkeypatch):
    records = "python/pantile/io_model.py: GPUS"
    text = rendered(records=records, columns={"GPU": "{name}", "ridge": "{ridge(value):.0f}"})
    assert "| H200 SXM | 206 |" in text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"files": ["x.jsonl"], "records": "gone", "columns": {}}, "block x: no record of"),
        (
            {"files": ["x.jsonl"], "records": "x", "columns": {"a": "{nothing}"}},
            "block x of contents.toml: NameError",
        ),
    ],
)
def test_a_part_that_shows_nothing_is_an_error(results, part, message):
    write(results / "x.jsonl", [RUN, {"kind": "x"}])
    with pytest.raises(ValueError, match=message):
        rendered(**part)


# ---- timings


def test_cells_name_the_lost_ones(results):
    rows = [
        timing("d64 full 512", "forward", 512, 1.0, a=0.9, b=3.0),
        timing("d64 causal 512", "forward", 512, 0.5, a=0.35) | {"absent": {"c": "not there"}},
        timing("d64 full 1024", "forward", 1024, 1.0, a=1.5, **{"pantile, exact": 2.0}),
        timing("window at 1k", "forward", 1024, 4.0),
    ]
    run = RUN | {"state_before": {"name": "GPU X"}, "peers": {"FA3_SO": "sha256 abc"}}
    write(results / "x.jsonl", [run, *rows])
    text = rendered(form="cells", files=["x.jsonl"])
    assert "[`x.jsonl`](../benchmarks/results/x.jsonl): GPU X, torch 2.11, commit abc." in text
    assert "Forward, bfloat16, back to back: TFLOP/s (ratio to the best of a, b); geomet" in text
    assert "over 3 cells, worst 0.70 (d64 causal 512), 2 below 1." in text
    assert "| 64 full | 100 (0.90) | 100 (1.50) |" in text
    assert "| window at 1k | 25 |" in text
    assert "Below 1: d64 causal 512 0.700, d64 full 512 0.900." in text
    assert "Speed over each peer (cells): a 0.98 (3), b 3.00 (1)." in text
    assert "Speed of our variants over ours: pantile, exact 0.500 (at worst 0.50)." in text
    assert text.endswith("Absent: c (not there).")


def test_the_build_of_a_peer_that_ran_is_named(results):
    run = RUN | {"peers": {"FA3_SO": "sha256 abc", "nvidia-cudnn-frontend": "1.18"}}
    write(results / "x.jsonl", [run, timing("d64 full 512", "forward", 512, 1.0, FA3=2.0)])
    text = rendered(form="cells", files=["x.jsonl"])
    assert "FA3_SO sha256 abc" in text
    assert "1.18" not in text


def test_many_contenders_have_a_column_each(results):
    peers = {"a": 2.0, "b": 4.0, "c": 5.0, "d": 0.5}
    one = timing("d64 full 512", "forward", 512, 1.0, **peers, **{"pantile, mixed": 9.0})
    other = timing("d64 full 1024", "forward", 1024, 1.0, a=2.0)
    write(results / "x.jsonl", [RUN, one, other])
    text = rendered(form="cells", files=["x.jsonl"])
    assert "| case | pantile | a | b | c | d | ratio to the best |" in text
    assert "| d64 full 512 | 100 | 50 | 25 | 20 | 200 | 0.50 |" in text
    assert "| d64 full 1024 | 100 | 50 | - | - | - | 2.00 |" in text


def test_types_passes_and_states_stand_apart_and_slow_devices_in_gflops(results):
    flushed = timing("d64 full 512", "forward", 512, 100.0, torch=300.0)
    flushed["results"]["flushed"] = {"pantile": {"ms": 200.0, "tflops": 0.5}}
    high = {"dtype": "float32", "float32_precision": "high"}
    backward = timing("d64 full 512", "backward", 512, 100.0, torch=300.0) | high
    write(results / "x.jsonl", [RUN, flushed, backward])
    text = rendered(form="cells", files=["x.jsonl"])
    assert "Forward, bfloat16, back to back: GFLOP/s (ratio to the best of torch)" in text
    assert "Forward, bfloat16, flushed L2: GFLOP/s." in text
    assert "Backward, float32 by TF32, back to back" in text
    assert "| 64 full | 1000 (3.00) |" in text


def test_the_overview_says_how_it_was_run(results):
    run = RUN | {"commands": ["python benchmarks/hopper.py"]}
    write(results / "x.jsonl", [run, timing("d64 full 512", "forward", 512, 1.0, a=2.0)])
    text = rendered(form="overview", files=["x.jsonl"])
    assert "| forward | bfloat16 | 1 | 2.000 | 2.00 (d64 full 512) | 0 |" in text
    assert text.endswith("commit abc, 7 s.\n\n    python benchmarks/hopper.py")


def test_headline_counts_lost_cells_and_may_name_its_only_peer(results):
    rows = [timing(f"d64 full {n}", "forward", n, 1.0, a=1.0 + n / 1e4, b=0.5) for n in (512, 1024)]
    write(results / "x.jsonl", [RUN, *rows])
    runs = [{"attention": n, "step_seconds": s} for n, s in (("pantile", 1.0), ("flash", 1.5))]
    (results / "y.json").write_text(json.dumps({"runs": runs}))
    lines = [["any", "x.jsonl", "forward", "", "do x"], ["a", "x.jsonl", "forward", "a", "do x"]]
    text = rendered(form="headline", lines=[*lines, ["step", "y.json", "", "", "do y"]])
    assert "0.50x | 0.50x | 2 of 2 | `do x` |" in text
    assert "1.08x | 1.05x | 0 of 2 | `do x` |" in text
    assert "1.50x | 1.50x | 0 of 1 | `do y` |" in text


def test_a_timing_has_the_ratio_to_its_best_peer(results):
    rows = [timing("a", "forward", 8, 2.0, x=3.0, y=5.0), timing("b", "forward", 8, 1.0)]
    write(results / "x.jsonl", [RUN, *rows])
    columns = {"case": "{case}", "ratio": "{ratio:.1f}"}
    text = rendered(files=["x.jsonl"], records="timing", columns=columns)
    assert text.splitlines()[2:] == ["| a | 1.5 |", "| b | nan |"]


def test_ratios_are_to_the_best_peer_and_our_variants_are_none():
    rows = [timing("a", "forward", 8, 1.0), timing("b", "forward", 8, 1.0, x=3.0, y=4.0)]
    rows.append(timing("c", "forward", 8, 1.0, x=2.0, **{"pantile, mixed": 0.5}))
    assert FIGURES.ratios(rows) == {"b": 3.0, "c": 2.0}


# ---- pages

CONTENTS = """
[pages]
"README.md" = ["x"]
[[part]]
block = "x"
files = ["x.jsonl"]
records = "x"
columns = { value = "{value}" }
"""
PAGE = "a\n<!-- results x: begin -->\nold 1.23\n<!-- results x: end -->\nb\n"


@pytest.fixture
def page(results) -> pathlib.Path:
    (results / "contents.toml").write_text(CONTENTS)
    write(results / "x.jsonl", [{"kind": "x", "value": 989}])
    page = results_docs.ROOT / "README.md"
    page.write_text(PAGE)
    return page


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["results_docs.py", *words])
    return results_docs.main()


def test_only_blocks_are_written_and_a_number_typed_by_hand_is_noticed(page, monkeypatch, capsys):
    assert run(monkeypatch, "--check") == 1
    assert run(monkeypatch) == 0
    block = "| value |\n| --- |\n| 989 |\n"
    assert page.read_text() == PAGE.replace("old 1.23\n", block)
    assert run(monkeypatch, "--check") == 0
    page.write_text(page.read_text().replace("| 989 |", "| 1989 |"))
    capsys.readouterr()
    assert run(monkeypatch, "--check") == 1
    assert capsys.readouterr().out == "README.md is out of date: run make docs\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("README.md", "", "README.md: no block x, which contents.toml lists"),
        ("docs/new.md", PAGE, "docs/new.md: block x is not in contents.toml"),
    ],
)
def test_pages_and_contents_must_agree(page, monkeypatch, capsys, name, text, message):
    (results_docs.ROOT / name).write_text(text)
    assert run(monkeypatch) == 1
    assert message in capsys.readouterr().out


def test_a_page_that_is_gone_is_named(page, results, monkeypatch, capsys):
    (results / "contents.toml").write_text(CONTENTS.replace('x"]', 'x"]\n"docs/y.md" = []'))
    assert run(monkeypatch) == 1
    assert "contents.toml lists blocks of docs/y.md, which is not there" in capsys.readouterr().out


def test_every_part_belongs_to_a_block_of_a_page():
    contents = results_docs.contents()
    shown = {name for names in contents["pages"].values() for name in names}
    assert {part["block"] for part in contents["part"]} == shown


def test_results_that_no_page_shows_are_in_the_archive():
    texts = [(results_docs.RESULTS / "contents.toml").read_text()]
    texts += [page.read_text() for page in (results_docs.ROOT / "docs").rglob("*.md")]
    for path in results_docs.RESULTS.glob("*.json*"):
        assert any(path.name in text for text in texts), path.name
