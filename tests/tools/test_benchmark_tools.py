"""The scripts of benchmarks/ that judge and draw: compare, plot, counters, io_check, memory."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import compare
import counters
import host_time
import io_check
import plot
import pytest
import softmax_cycles
import utilisation
import variant_bars
from pantile import io_model
from pantile.bench import peers, sweep

# ---- compare


def figures(ms: float, spread: float = 0.0) -> dict:
    half = ms * spread / 2
    return {"ms": ms, "ms_p20": ms - half, "ms_p80": ms + half, "tflops": 1 / ms}


def cells(**times: float) -> dict:
    return {name: figures(ms) for name, ms in times.items()}


def test_the_drift_of_the_gpu_is_taken_out():
    before = cells(pantile=1.0, FA3=1.0, cuDNN=2.0)
    slower_clock = cells(pantile=1.1, FA3=1.1, cuDNN=2.2)
    cell = compare.compare_cell("x", before, slower_clock)
    assert cell.change == pytest.approx(1.0)
    assert cell.drift == pytest.approx(1 / 1.1)
    assert cell.verdict == "same"


@pytest.mark.parametrize(
    ("after", "verdict"), [(0.9, "faster"), (0.98, "same"), (1.02, "same"), (1.1, "slower")]
)
def test_verdicts(after, verdict):
    cell = compare.compare_cell("x", cells(pantile=1.0, FA3=1.0), cells(pantile=after, FA3=1.0))
    assert cell.verdict == verdict
    assert cell.noise == compare.LEAST_NOISE


def test_a_noisy_cell_is_not_called_slower():
    before = {"pantile": figures(1.0, 0.2)}
    after = {"pantile": figures(1.15, 0.2)}
    cell = compare.compare_cell("x", before, after)
    assert cell.noise == pytest.approx(0.2 * 2**0.5)
    assert cell.verdict == "same"
    assert cell.drift is None


def test_our_variants_are_no_peers():
    variant = {"pantile, deterministic": 1.0}
    cell = compare.compare_cell("x", cells(pantile=1.0, **variant), cells(pantile=2.0, **variant))
    assert cell.drift is None
    assert cell.change == 0.5


def write(path, ours: float, peer: float = 1.0) -> str:
    rows = [
        {
            "kind": "timing",
            "case": f"case {i}",
            "pass": "forward",
            "dtype": "bfloat16",
            "results": {"back_to_back": cells(pantile=ours, FA3=peer)},
        }
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in [{"kind": "run"}, *rows]))
    return str(path)


def run_compare(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    compare.main()


def test_compare_ends_well_when_nothing_is_slower(tmp_path, monkeypatch, capsys):
    a, b = write(tmp_path / "a", 1.0), write(tmp_path / "b", 1.005)
    run_compare(monkeypatch, a, b, "--all")
    output = capsys.readouterr().out
    assert "4 cells: 0 faster, 4 the same, 0 slower; geometric mean 0.995" in output
    assert output.count("case ") == 4


def test_compare_fails_when_slower(tmp_path, monkeypatch):
    a, b = write(tmp_path / "a", 1.0), write(tmp_path / "b", 1.2)
    with pytest.raises(SystemExit, match=r"slower: geometric mean 0\.833.*case 0 forward"):
        run_compare(monkeypatch, a, b)
    run_compare(monkeypatch, b, a)


def test_compare_needs_a_common_cell(tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.write_text('{"kind": "run"}\n')
    with pytest.raises(SystemExit, match="no cell of ours in common"):
        run_compare(monkeypatch, write(tmp_path / "a", 1.0), str(empty))


# ---- plot


def grid(lengths=(512, 1024, 2048)) -> list[dict]:
    run = {"kind": "run", "commit": "abc", "state_before": {"name": "GPU X"}}
    rows = [
        {
            "kind": "timing",
            "case": f"d64 {mask} {n}",
            "pass": "forward",
            "head_dim": 64,
            "seqlen": n,
            "causal": mask == "causal",
            "results": {"back_to_back": cells(pantile=1.0, FA3=1.25)},
        }
        for n in lengths
        for mask in ("full", "causal")
    ]
    return [run, *rows]


CONTENTS = """
[plots]
"x.svg" = ["x.jsonl", "speed", "forward"]
"x_ratio.svg" = ["x.jsonl", "ratio", "forward"]
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    monkeypatch.setattr(plot.results_docs, "RESULTS", tmp_path)
    (tmp_path / "contents.toml").write_text(CONTENTS)
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in grid()))
    return path


def run_plot(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot.py", *words])
    plot.main()


def test_a_plot_knows_its_file(results, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match=r"x\.svg was not drawn from this x\.jsonl: run make docs"):
        run_plot(monkeypatch, "--check")
    run_plot(monkeypatch)
    first = results.with_name("x.svg").read_bytes()
    run_plot(monkeypatch, str(results), "speed", "forward")
    assert results.with_name("x_speed_forward.svg").read_bytes() == first
    results.with_name("x_speed_forward.svg").rename(results.with_name("x.svg"))
    assert plot.stale() == {}
    results.write_text(results.read_text() + json.dumps({"kind": "summary"}) + "\n")
    assert len(plot.stale()) == 2


def test_a_plot_of_no_page_is_named(results):
    results.with_name("y.svg").touch()
    assert "y.svg is not in contents.toml" in plot.stale().values()


def test_memory_plot():
    pytest.importorskip("matplotlib")
    rows = [
        {
            "kind": "memory",
            "implementation": name,
            "length": n,
            "peak_bytes": n,
            "matrix_bytes": n * n,
        }
        for name in ("pantile", "textbook")
        for n in (1024, 2048)
    ]
    panel = plot.draw_memory([{"kind": "run", "commit": "abc", "device": "GPU X"}, *rows]).axes[0]
    assert len(panel.lines) == 3
    assert list(panel.lines[2].get_ydata()) == [1.0, 4.0]


def test_losses_of_equal_runs_leave_a_gap():
    pytest.importorskip("matplotlib")
    runs = [{"attention": n, "losses": [5.0, last]} for n, last in (("a", 4.0), ("b", 4.5))]
    report = {"runs": runs, "parameters": 1e6, "device": "GPU X"}
    _, bottom = plot.draw_losses([report]).axes
    first, second = bottom.lines[0].get_ydata()
    assert first != first
    assert second == 0.5


# ---- counters

NCU = """\
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","byte","ns"
"0","7","spin_kernel(long)","100","1"
"1","7","void gemm<1>(int, int)","1,500","20"
"2","7","softmax","n/a","30"
"3","7","at::cuda::spin_kernel(long)","100","1"
"4","7","forward","7","40"
"""
METRICS = ["dram__bytes_read.sum", "gpu__time_duration.sum"]


def test_reads_the_csv_of_ncu_and_tells_the_cases_apart():
    launches = counters.parse(NCU, METRICS)
    assert len(launches) == 5
    found = counters.split(launches, ["textbook", "ours"])
    assert [x["kernel"] for x in found["textbook"]] == ["void gemm<1>(int, int)", "softmax"]
    assert found["textbook"][0]["dram__bytes_read.sum"] == 1500
    assert found["textbook"][1]["dram__bytes_read.sum"] is None
    assert found["ours"] == [
        {"kernel": "forward", "dram__bytes_read.sum": 7.0, "gpu__time_duration.sum": 40.0}
    ]


def test_absent_cases_are_read_from_the_output():
    line = counters.ABSENT + json.dumps({"FA3": "FA3_SO is not set"})
    assert counters.absent_cases(f"==PROF== 1\n{line}\n{NCU}") == {"FA3": "FA3_SO is not set"}
    assert counters.absent_cases(NCU) == {}


def test_missing_counters_are_an_error(monkeypatch):
    with pytest.raises(counters.CounterError, match="no permission"):
        counters.parse("==ERROR== no permission\n", METRICS)
    with pytest.raises(counters.CounterError, match="2 of 3 cases"):
        counters.split(counters.parse(NCU, METRICS), ["a", "b", "c"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(counters.CounterError, match="ncu is not on the PATH"):
        counters.collect(["a"], METRICS)


# ---- utilisation and io_check: from launches to rows


def test_the_longest_kernel_of_a_call_is_shown():
    launches = [
        {"kernel": "prepare"} | dict.fromkeys(utilisation.METRICS, 10.0),
        {"kernel": "main"} | dict.fromkeys(utilisation.METRICS, 40.0),
    ]
    launches[1] |= {
        utilisation.CONFLICTS: 3.0,
        utilisation.WAVEFRONTS: 300.0,
        utilisation.CYCLES: 60.0,
        utilisation.PERCENT["MUFU"]: None,
    }
    row = utilisation.row_of("pantile|backward|bfloat16|64|full", launches)
    assert (row["kernel"], row["case"]) == ("main", "bf16 backward d64 full")
    assert (row["bank_conflicts"], row["ghz"]) == (0.01, 1.5)
    assert row["percent"]["tensor"] == 40.0
    assert row["percent"]["MUFU"] is None


def test_every_case_of_the_utilisation_report_is_well_formed():
    names = utilisation.case_names()
    assert len(set(names)) == len(names)
    known = {utilisation.OURS, utilisation.GEMM, *peers.GPU_PEERS}
    known |= {f"pantile, {name}" for name in sweep.SOFTMAX_VARIANTS}
    for name in names:
        implementation, what, dtype, head_dim, _ = name.split("|")
        assert implementation in known
        assert what in ("forward", "backward")
        assert dtype in sweep.DTYPES
        assert 2048 % int(head_dim) == 0 or implementation == utilisation.GEMM


def test_io_rows_compare_the_sum_with_the_model(monkeypatch):
    traffic = io_model.Traffic(60.0, 40.0)
    monkeypatch.setattr(io_check, "predicted", lambda name, gpu: traffic)
    launches = [
        {"kernel": "a", io_check.READ: 50.0, io_check.WRITTEN: 20.0, io_check.TIME: 1e6},
        {"kernel": "b", io_check.READ: 20.0, io_check.WRITTEN: 20.0, io_check.TIME: 2e6},
    ]
    (row,) = io_check.rows_of({"textbook 2048": launches}, io_model.GPUS["H200"])
    assert (row["kernels"], row["read_bytes"], row["written_bytes"]) == (2, 70.0, 40.0)
    assert (row["ratio"], row["ms"]) == (1.1, 3.0)


def test_io_cases_dwarf_the_l2():
    gpu = io_model.GPUS["H200"]
    for kind, length, heads in io_check.CASES.values():
        shape = io_model.Shape(length, length, io_check.HEAD_DIM, heads)
        moved = shape.scores_bytes if kind == "textbook" else 2 * shape.rows_bytes
        assert moved > 4 * gpu.l2_mib * 2**20


# ---- variant_bars


def timing(variant: str, what: str = "forward", causal: bool = True, **ms: float) -> dict:
    names = {"flex": "FlexAttention", "cudnn": "cuDNN (torch)", "fa2": "FA2 (torch)"}
    return {
        "kind": "timing",
        "variant": variant,
        "pass": what,
        "head_dim": 128,
        "causal": causal,
        "ms": {names.get(name, name): x for name, x in ms.items()},
    }


def listed(mask: str, share: float, over_full: float, **more: float) -> dict:
    ms = {"full": 1.0, "pantile": over_full, "FlexAttention": 2 * over_full}
    figures = {"share": share, "over_full": over_full, "ms": ms, **more}
    return {"kind": "timing", "mask": mask, "pass": "backward", "head_dim": 128, **figures}


def test_bars_of_variants():
    lines = [
        {"kind": "run"},
        timing("softcap", pantile=1.0, plain=0.8, flex=4.0),
        timing("softcap", pantile=2.0, plain=1.0, flex=2.0, causal=False),
        timing("dropout", pantile=1.0, plain=0.5, cudnn=3.0, fa2=2.0),
        {**timing("softcap expression", pantile=1.05, plain=0.8), "over_hook": 1.05},
        listed("documents", 0.125, 0.15),
        listed("band", 0.25, 0.27, over_window=1.05),
        {**timing("ALiBi", flex=9.0), "kind": "warm"},
    ]
    bars = {bar.name: bar for bar in variant_bars.bars_of(lines)}
    flex = bars["forward, ahead of FlexAttention"]
    assert (flex.measured, flex.cells, flex.met) == (2.0, 2, True)
    assert bars["forward, ahead of cuDNN and FA2, dropout"].measured == 2.0
    least = bars["forward, least of all cells"]
    assert (least.measured, least.met) == (1.0, True)
    softcap = bars["forward, softcap over plain"]
    assert (softcap.measured, softcap.met, softcap.cells) == (1.25, True, 1)
    dropout = bars["forward, dropout over plain"]
    assert (dropout.measured, dropout.met) == (2.0, False)
    assert bars["forward, expression over hook"].met is True
    documents = bars["backward, documents over their share"]
    assert (documents.measured, documents.met) == (1.2, False)
    assert bars["backward, lists: of full less the share"].measured == pytest.approx(0.025)
    assert bars["backward, band over window"].met is False
    assert bars["backward, ahead of FlexAttention"].measured == 2.0
    nothing = bars["backward, dropout over plain"]
    assert nothing.met is None
    assert "not measured" in variant_bars.text_of(nothing)


def test_bars_are_written(tmp_path, monkeypatch, capsys):
    lines, out = tmp_path / "lines.jsonl", tmp_path / "bars.json"
    lines.write_text(json.dumps(timing("ALiBi", pantile=1.0, plain=1.0, flex=2.0)) + "\n")
    monkeypatch.setattr(sys, "argv", ["variant_bars.py", str(lines), "--out", str(out)])
    variant_bars.main()
    rows = {row["name"]: row for row in json.loads(out.read_text())}
    assert rows["forward, ALiBi over plain"]["met"] is True
    assert "ALiBi over plain" in capsys.readouterr().out


# ---- softmax_cycles: the model, and what the library makes of it


def test_choices_by_generation_are_those_of_the_model():
    """Rows of cuda/ampere/forward/softmax_choice.h that are not measured, against the model's."""
    root = pathlib.Path(softmax_cycles.__file__).parents[1]
    text = (root / "cuda/ampere/forward/softmax_choice.h").read_text()
    rows = re.findall(r'\{(\d+), SoftmaxUnit::(\w+), "(model|measured)', text)
    assert [row[0] for row in rows] == ["80", "86", "87", "89", "90", "100", "120"]
    for capability, unit, source in rows:
        chips = softmax_cycles.MODELLED.get(divmod(int(capability), 10))
        if chips is None:
            assert capability == "100"  # taken as sm_90
            continue
        assert source == ("measured" if capability == "90" else "model")
        for chip in chips:
            for head_dim in (64, 128):
                clocks = {x: softmax_cycles.clocks(chip, head_dim, x) for x in ("vector", "tensor")}
                assert unit == min(clocks, key=clocks.__getitem__), (chip, head_dim)


def test_host_time_has_a_line_for_each_kind_of_call(tmp_path, monkeypatch):
    out = tmp_path / "host_time.jsonl"
    given = ["--device", "cpu", "--rounds", "1", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["host_time.py", *given])
    host_time.main()
    run, *lines = map(json.loads, out.read_text().splitlines())
    assert run["shape"] == [1, 1, 1, 64]
    kinds = ["no gradient", "recorded", "forward+backward"]
    assert [line["call"] for line in lines] == kinds * 2
    for line in lines:
        for name in ("pantile", "torch"):
            assert 0 < line[name]["least"] <= line[name]["median"]
        assert line["bar"] is None  # bars are of an H200


def test_host_time_refuses_an_unknown_device(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_time.py", "--device", "tpu"])
    with pytest.raises(SystemExit):
        host_time.main()
    assert "--device is 'tpu'; allowed: cpu, cuda" in capsys.readouterr().err
