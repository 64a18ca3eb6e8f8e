"""What the scripts of benchmarks/ share (pantile.bench.harness), and decode's cells."""

from __future__ import annotations

import importlib

import decode
import pytest
import torch
from pantile.bench import figures, harness, measure


def test_absent_contenders_have_a_reason():
    def lacks():
        raise ModuleNotFoundError("No module named 'fa9'\nmore")

    made = measure.on_cpu("made", lambda: None)
    makers = {"one": lambda: made, "two": lambda: [made, made], "text": lambda: "not measured"}
    absent: dict[str, str] = {}
    found = harness.running(makers | {"raises": lacks}, absent)
    assert found == [made] * 3
    assert absent == {"text": "not measured", "raises": "No module named 'fa9'"}


def test_only_refusals_of_ours_are_reasons():
    def broken():
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        harness.running({"pantile": broken}, {}, harness.OURS_REFUSES)


def test_lines_are_kept_as_they_come(tmp_path, capsys):
    def lines():
        yield {"kind": "run"}
        yield {"kind": "timing", "ms": 2.0}
        raise KeyboardInterrupt

    path = tmp_path / "new/x.jsonl"
    with pytest.raises(KeyboardInterrupt):
        harness.emit(path, lines(), lambda line: f"{line['ms']} ms" if "ms" in line else "")
    assert figures.read(path) == [{"kind": "run"}, {"kind": "timing", "ms": 2.0}]
    assert capsys.readouterr().out == "2.0 ms\n"


def test_lines_without_a_file_are_printed(capsys):
    assert harness.emit(None, [{"a": 1}]) == [{"a": 1}]
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_a_header_says_where_and_how():
    line = harness.header("cpu", threads=2)
    assert line["kind"] == "run"
    assert (line["device"], line["threads"], line["torch"]) == ("cpu", 2, torch.__version__)
    assert line["commands"] == [measure.command()]
    assert "state_before" not in line


def test_a_time_that_is_missing_has_no_quotient():
    assert harness.quotient(3.0, 2.0) == 1.5
    assert harness.quotient(None, 2.0) is None
    assert harness.quotient(3.0, None) is None


@pytest.mark.parametrize("name", ["decode", "fp8_training", "io_check"])
def test_scripts_for_a_gpu_say_so(monkeypatch, name):
    script = importlib.import_module(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [f"benchmarks/{name}.py"])
    with pytest.raises(SystemExit, match=rf"{name}\.py needs a CUDA GPU"):
        script.main()


def test_cells_of_decode_fit_and_differ():
    for grid, least in (("short", 10), ("full", 200)):
        cells = list(decode.cells(grid))
        assert len(set(cells)) == len(cells) >= least
        for cell in cells:
            assert cell.batch * cell.keys * cell.row_bytes() <= decode.MOST_BYTES
            assert len(cell.used()) == cell.batch
            assert sum(cell.used()) <= cell.batch * cell.keys
    formats = {cell.format for cell in decode.cells("short")}
    assert formats == {"bf16", "e4m3", "int8"}
    assert any(cell.latent for cell in decode.cells("short"))


def test_the_best_setting_leaves_out_other_bits_and_the_hosts_work():
    us = {"pantile": 3.0, "pantile, schedule apart": 2.0, "pantile, invariant": 1.0}
    us |= {"FA3": 9.0, "FA3, 8 splits": 8.0, "FlashInfer": 7.0, "FlashInfer, plan + run": 1.0}
    assert decode.best_of(us) == {
        "pantile": {"setting": "pantile, schedule apart", "us": 2.0},
        "FA3": {"setting": "FA3, 8 splits", "us": 8.0},
        "FlashInfer": {"setting": "FlashInfer", "us": 7.0},
    }
