"""``pantile`` on a terminal, in a pipe, and ended early."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pantile
import pytest
from pantile import __main__ as command_line
from pantile import _check, _report

COMMAND = [sys.executable, "-m", "pantile"]


def narrow_terminal(monkeypatch) -> None:
    """Standard output becomes a terminal of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_without_a_command_it_prints_the_help(capsys):
    assert command_line.main([]) == 0
    output = capsys.readouterr().out
    for name in ("info", "kernels", "check", "bench"):
        assert re.search(rf"^ +{name} ", output, re.MULTILINE)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"pantile {pantile.__version__}\n"


def test_help_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    p = command_line.parser()
    (commands,) = (a for a in p._actions if a.dest == "command")
    for one in (p, *commands.choices.values()):
        assert max(map(len, one.format_help().splitlines())) <= 80


def test_every_argument_of_bench_has_a_text_and_a_default():
    (commands,) = (a for a in command_line.parser()._actions if a.dest == "command")
    for action in commands.choices["bench"]._actions:
        assert action.help, action.dest
        if action.nargs != 0 and action.dest != "out":
            assert "default" in action.help, action.dest


def test_info_has_no_empty_rows(capsys):
    assert command_line.main(["info"]) == 0
    for line in capsys.readouterr().out.splitlines()[2:]:
        assert len(line.strip().split("  ")) > 1, line


def test_kernels_fit_a_narrow_terminal(monkeypatch, capsys):
    narrow_terminal(monkeypatch)
    assert command_line.main(["kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for row, line in zip(pantile.kernels(), lines[2:], strict=True):
        assert line.split()[0] == row["name"]


def rows_of_check(count: int):
    names = ("ampere_backward_f32_d192x128_causal", "no kernel")
    for i in range(count):
        error = (0.5, 9.0, None)[i % 3]
        yield _check.Row("ampere", names[i % 2], "bf16", 192, "varlen", "backward", error, 1.0)


def test_check_fits_a_narrow_terminal_in_colours(monkeypatch, capsys):
    narrow_terminal(monkeypatch)
    monkeypatch.setattr(_check, "check_rows", lambda _: rows_of_check(3))
    assert command_line.main(["check"]) == 1
    output = capsys.readouterr().out
    assert max(len(plain(line)) for line in output.splitlines()) <= 80
    assert "\x1b[32mok" in output
    assert "\x1b[1;31mFAIL" in output
    monkeypatch.setenv("NO_COLOR", "1")
    command_line.main(["check"])
    assert "\x1b" not in capsys.readouterr().out


def test_interrupted_check_prints_what_it_found(monkeypatch, capsys):
    def check_rows(_):
        yield from rows_of_check(2)
        raise KeyboardInterrupt

    monkeypatch.setattr(_check, "check_rows", check_rows)
    assert command_line.main(["check"]) == _report.INTERRUPTED
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("interrupted: 1 ok, 1 failed")
    assert captured.err.splitlines()[0] == ("[1] ampere_backward_f32_d192x128_causal, varlen: ok")


def test_a_line_of_progress_changes_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = _report.Progress(2)
    progress.start("a")
    progress.start("b")
    progress.finish()
    assert capsys.readouterr().err == "\r\x1b[K[1/2] a\r\x1b[K[2/2] b\r\x1b[K"


def test_a_reader_that_closes_the_pipe_is_no_error():
    process = subprocess.Popen(
        [*COMMAND, "kernels"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == _report.PIPE_CLOSED
    assert errors == ""


def heed_ctrl_c() -> None:
    """Processes in the background of a shell ignore it, and so do theirs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_bench_with_what_was_measured(tmp_path):
    out = tmp_path / "out.jsonl"
    words = ["bench", "--device", "cpu", "--lengths", "64", "--rounds", "100000"]
    process = subprocess.Popen(
        [*COMMAND, *words, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    try:
        assert process.stderr.readline().startswith("[1/8] d64 full 64, forward")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == _report.INTERRUPTED
    assert errors == "interrupted\n"
    assert "medians" in output
    assert out.read_text().count("\n") == 1  # the run, in which no case came to its end


def test_ctrl_c_elsewhere_is_one_line(capsys):
    def main() -> int:
        raise KeyboardInterrupt

    assert _report.run_to_the_end(main) == _report.INTERRUPTED
    assert capsys.readouterr().err == "\ninterrupted\n"
