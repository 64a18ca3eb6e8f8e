"""tools/measure.py: the list of measurements, and how its steps run and are accepted."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import shlex
import signal
import subprocess
import sys
import time

import measure
import pytest
import results_docs

STEPS, PEERS, HISTORICAL = measure.read_list()
DEFAULT_SECONDS = 1500  # of the steps of one H200: 25 minutes of its time


# ---- the list


def test_every_results_file_is_measured_once_or_has_a_reason():
    made: dict[str, list[str]] = {}
    for step in STEPS:
        made.setdefault(step.file, []).append(step.name)
    files = {p.name for p in results_docs.RESULTS.glob("*.json*")}
    for name in files:
        steps = made.get(f"benchmarks/results/{name}", [])
        assert bool(steps) != (name in HISTORICAL), name
    assert set(HISTORICAL) <= files
    assert all(reason.strip() for reason in HISTORICAL.values())
    for file, names in made.items():
        several = [s for s in STEPS if s.file == file]
        assert len(names) == 1 or all(s.adds and not s.shares for s in several), file


def test_the_default_steps_fit_the_time_of_a_gpu():
    default = [s for s in STEPS if s.machine == measure.MACHINES[0]]
    assert sum(s.seconds for s in default) <= DEFAULT_SECONDS
    assert all(s.seconds <= s.limit() * len(s.commands) for s in STEPS)
    assert all(s.limit() < 600 for s in STEPS if s.machine != "cpu")
    kinds = [not s.file.startswith("benchmarks/") for s in default]
    assert kinds == sorted(kinds, reverse=True)  # correctness first


def test_no_test_of_a_gpu_is_left_out_or_run_twice():
    whole, *parts = [shlex.split(s.commands[0]) for s in STEPS if s.file == "build/gpu.json"]
    named = [word for words in parts for word in words if word.startswith("tests/")]
    ignored = [word.removeprefix("--ignore=") for word in whole if word.startswith("--ignore=")]
    assert sorted(named) == sorted(ignored)
    assert len(set(named)) == len(named)
    assert all((measure.ROOT / word).exists() for word in named)


class Parsed(Exception):  # noqa: N818 - it is no error
    pass


def all_commands() -> list:
    found = []
    for step in STEPS:
        for i, command in enumerate(step.commands):
            words = step.words(command, pathlib.Path("/nowhere"))
            found.append(pytest.param(words, id=f"{step.name} {i}".replace(" ", "-")))
    return found


@pytest.mark.parametrize("words", all_commands())
def test_every_command_is_understood(words, monkeypatch, tmp_path):
    """By the program's own parser; nothing of it runs after that."""
    assert words[0] == sys.executable
    words = words[1:]
    if words[:2] == ["-m", "torch.distributed.run"]:
        from torch.distributed.run import parse_args

        words = [word.replace("{", "") for word in words[2:]]
        given = parse_args(words)
        words = [given.training_script, *given.training_script_args]
    if words[:2] == ["-m", "pytest"]:
        parse = "import _pytest.config, sys; _pytest.config._prepareconfig(sys.argv[1:])"
        subprocess.run([sys.executable, "-c", parse, *words[2:]], cwd=measure.ROOT, check=True)
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *arguments, **named):
        parse(self, *arguments, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    if words[:2] == ["-m", "pantile"]:
        monkeypatch.setattr(sys, "argv", ["pantile", *words[2:]])
        with pytest.raises(Parsed):
            runpy.run_module("pantile", run_name="__main__")
        return
    script = measure.ROOT / words[0]
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:]])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


def test_the_list_is_printed(capsys):
    assert measure.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert "h200_forward.jsonl" in output
    assert f"{len([s for s in STEPS if s.machine == 'cpu'])} steps of cpu" in output


def test_commands_are_printed_with_what_lacks(capsys, monkeypatch):
    monkeypatch.setattr(measure, "NEEDS", measure.NEEDS | {"1 GPU": lambda: "no GPU here"})
    assert measure.main(["--dry-run", "--only", "^bench$|softmax choice"]) == 0
    output = capsys.readouterr().out
    assert "# bench: 20 s; missing: no GPU here" in output
    assert "-m pantile bench --out DIR/h200_bench.jsonl" in output
    assert "softmax choice" not in output  # of another machine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--list", "--only", "nothing of it"], "--only 'nothing of it': no step of any machine"),
        (["--machine", "a100"], "invalid choice: 'a100'"),
        (["--jobs", "0"], "--jobs is 0; it must be at least 1"),
        ([], "--out, --accept, --list or --dry-run is needed"),
        (["--accept", "/nowhere"], "--accept /nowhere: it is not there"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        measure.main(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('machine = "a100"', "machine 'a100' is none of"),
        ('needs = ["luck"]', "need 'luck' is none of"),
        ('[[step]]\nname = "x"\nfile = "b"\ncommands = []\nseconds = 1', "same name: x"),
    ],
)
def test_a_wrong_list_is_refused(text, message, tmp_path):
    path = tmp_path / "list.toml"
    path.write_text(f'[[step]]\nname = "x"\nfile = "a"\ncommands = []\nseconds = 1\n{text}\n')
    with pytest.raises(ValueError, match=message):
        measure.read_list(path)


def test_needs_say_what_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("FA3_SO", str(tmp_path / "gone.so"))
    monkeypatch.delenv("DEW3_SO", raising=False)
    assert "which is not there" in measure.NEEDS["FA3_SO"]()
    assert measure.NEEDS["DEW3_SO"]() == "DEW3_SO is not set"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.NEEDS["ncu"]() == "ncu is not on the PATH"
    assert "2 CUDA GPUs are needed" in measure.NEEDS["2 GPUs"]()
    assert measure._module("no_such_module") == "Python has no module no_such_module"


# ---- running: steps of a project that is made up

FACTS = {"commit": "abc", "library": "123"}
HEAD = '{"kind": "run"}'


def step(name: str, code: str, seconds: float = 1.0, **more) -> measure.Step:
    command = shlex.join(["python", "-c", code]) + " {out} {part}"
    named = {"file": f"results/{name}.jsonl", "commands": [command], "seconds": seconds}
    return measure.Step(name=name, **(named | more))


def writes(records: int = 1) -> str:
    lines = [HEAD] + ['{"kind": "timing"}'] * records
    return f"import sys; open(sys.argv[1], 'w').write({chr(10).join(lines)!r})"


def run(folder: pathlib.Path, *steps: measure.Step, budget: float = 60.0, jobs=1, pack=None):
    return measure.Run(folder, FACTS, budget, pack).run_all(list(steps), jobs)


SLEEPS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
pathlib.Path(sys.argv[1] + '.pid').write_text(str(child.pid))
try:
    time.sleep(600)
except KeyboardInterrupt:
    print('interrupted, kept')
"""


def alive(pid: int) -> bool:
    state = pathlib.Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def assert_ends(pid: int) -> None:
    """Soon: the system takes a moment for a killed process."""
    ends = time.monotonic() + 20
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path, capsys):
    folder = tmp_path / "out"
    hangs = step("hangs", SLEEPS, timeout=6.0)
    steps = [step("fails", "raise SystemExit(3)"), hangs, step("empty", ""), step("ok", writes())]
    assert run(folder, *steps) == ["fails", "hangs", "empty"]
    records = measure.records_of(folder)
    assert {name: r["status"] for name, r in records.items()} == {
        "fails": "failed",
        "hangs": "timed out",
        "empty": "failed",
        "ok": "done",
    }
    assert records["fails"]["statuses"] == [3]
    assert records["hangs"]["statuses"] == [None]
    assert 6.0 <= records["hangs"]["seconds"] < 6.0 + measure.GRACE
    assert records["empty"]["reason"] == "it made no empty.jsonl"
    assert all(r["commit"] == "abc" for r in records.values())
    assert "interrupted, kept" in (folder / "hangs.log").read_text()  # SIGINT before SIGKILL
    child = int((folder / "hangs.jsonl.pid").read_text())
    assert_ends(child)
    assert "timed out" in capsys.readouterr().out


def test_a_run_goes_on_where_it_ended(tmp_path):
    folder, count = tmp_path / "out", tmp_path / "count"
    code = f"{writes()}; open({str(count)!r}, 'a').write('x')"
    fails = step("later", f"import os; os.path.exists({str(count)!r}) or exit(1); {writes()}")
    first, second = step("first", code), step("second", writes())
    assert run(folder, fails, first) == ["later"]
    assert run(folder, fails, first, second) == []
    assert count.read_text() == "x"  # not a second time
    assert measure.records_of(folder)["later"]["status"] == "done"


def test_steps_that_do_not_fit_the_budget_are_not_started(tmp_path, capsys):
    long, short = step("long", writes(), seconds=500.0), step("short", writes())
    assert run(tmp_path / "out", long, short, budget=20.0) == ["long"]
    assert "no time" in capsys.readouterr().out
    assert list(measure.records_of(tmp_path / "out")) == ["short"]


@pytest.mark.parametrize("deaf", [False, True])
def test_the_budget_ends_a_step(tmp_path, deaf):
    """Also of a run that a shell started in its background, deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    try:
        end_by_budget(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def end_by_budget(tmp_path):
    hangs = step("hangs", "import time; time.sleep(60)", seconds=0.5, timeout=50.0)
    started = time.monotonic()
    assert run(tmp_path / "out", hangs, budget=1.5) == ["hangs"]
    assert time.monotonic() - started < 1.5 + measure.GRACE


def test_what_lacks_is_named_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(measure.NEEDS, "ncu", lambda: "ncu is not on the PATH")
    assert run(tmp_path / "out", step("counts", writes(), needs=["ncu"])) == ["counts"]
    record = measure.records_of(tmp_path / "out")["counts"]
    assert (record["status"], record["reason"]) == ("missing", "ncu is not on the PATH")
    assert not (tmp_path / "out/counts.jsonl").exists()


MEETS = """
import pathlib, sys, time
mine = pathlib.Path(sys.argv[1]); mine.with_suffix('.here').write_text('')
ends = time.monotonic() + 20
while len(list(mine.parent.glob('*.here'))) < 2:
    if time.monotonic() > ends: raise SystemExit('alone')
    time.sleep(0.02)
mine.write_text('{}')
"""
ALONE = """
import os, pathlib, sys
mine = pathlib.Path(sys.argv[1])
mine.write_text(str(len(list(mine.parent.glob('[ot][nw][eo].jsonl')))))
"""


def test_only_steps_that_share_run_beside_each_other(tmp_path):
    folder = tmp_path / "out"
    pair = [step(name, MEETS, shares=True, seconds=10) for name in ("one", "two")]
    assert run(folder, *pair, step("timing", ALONE, seconds=10), jobs=2) == []
    assert (folder / "timing.jsonl").read_text() == "2"  # both were over


def test_copies_of_a_command_run_at_once_and_may_fail(tmp_path):
    folder = tmp_path / "out"
    code = "import sys; open(sys.argv[1] + sys.argv[2].replace('/', 'of'), 'w'); exit(4)"
    warm = "-" + shlex.join(["python", "-c", code]) + " {dir}/part {part}"
    both = [warm, step("x", writes()).commands[0].replace(" {part}", "")]
    assert run(folder, step("x", "", commands=both, parts=3)) == []
    assert sorted(p.name for p in folder.glob("part*")) == ["part1of3", "part2of3", "part3of3"]
    assert measure.records_of(folder)["x"]["statuses"] == [4, 4, 4, 0]


def test_environment_and_statuses_of_a_step(tmp_path):
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ['WHERE']); exit(1)"
    one = step("x", code, env={"WHERE": "{dir}/here"}, statuses=[0, 1])
    assert run(tmp_path / "out", one) == []
    assert (tmp_path / "out/x.jsonl").read_text() == f"{tmp_path}/out/here"


def test_steps_of_two_builds_are_not_mixed(tmp_path):
    folder = tmp_path / "out"
    run(folder, step("x", writes()))
    measure.refuse_other_build(folder, FACTS)
    with pytest.raises(ValueError, match=r"'x' there is of library 123, this run of 456"):
        measure.refuse_other_build(folder, FACTS | {"library": "456"})


def test_an_unknown_commit_is_refused(monkeypatch):
    monkeypatch.setattr(measure.verification, "commit", lambda: "unknown")
    monkeypatch.setattr(measure.verification, "library_hash", lambda: "1")
    with pytest.raises(ValueError, match="set the environment variable PANTILE_COMMIT"):
        measure.facts_here()


def test_ctrl_c_ends_the_programs_of_a_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        f"import signal, sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import pathlib, test_measure as t\n"
        f"t.run(pathlib.Path({str(tmp_path / 'out')!r}), t.step('hangs', t.SLEEPS, timeout=500.0),"
        " t.step('next', t.writes()), budget=900)\n"
    )
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, script], env=env, stderr=subprocess.DEVNULL)
    pid = tmp_path / "out/hangs.jsonl.pid"
    ends = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(2)
    assert process.wait(30) != 0
    assert_ends(int(pid.read_text()))
    assert "next" not in measure.records_of(tmp_path / "out")


# ---- accepting


@pytest.fixture
def tree(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path


def accepted(tree: pathlib.Path, *steps: measure.Step, fewer: bool = False) -> int:
    return measure.accept(tree / "out", list(steps), fewer, tree)


def test_results_that_passed_are_copied(tree, capsys):
    good = step("good", writes(2), then=["make docs", "python tools/verification.py"])
    bad, never = step("bad", f"{writes()}; exit(1)"), step("never", writes())
    run(tree / "out", good, bad)
    assert accepted(tree, good, bad, never) == 0
    assert (tree / "results/good.jsonl").read_text().startswith(HEAD)
    assert not (tree / "results/bad.jsonl").exists()
    output = capsys.readouterr().out
    assert "left out   bad: failed: exit 1, see bad.log" in output
    assert "left out   never: not run" in output
    assert "next: make docs; python tools/verification.py" in output
    assert "1 are listed" in output  # the seconds that the list has are far off


def test_a_file_with_fewer_records_is_accepted_on_request_only(tree, capsys):
    target, one = tree / "results/x.jsonl", step("x", writes(1))
    target.write_text("\n".join([HEAD, *['{"kind": "timing"}'] * 2]))
    before = target.read_text()
    run(tree / "out", one)
    assert accepted(tree, one) == 1
    assert "1 records, the committed file has 2: --fewer takes it" in capsys.readouterr().out
    assert target.read_text() == before
    assert accepted(tree, one, fewer=True) == 0
    assert target.read_text() != before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "run", "interrupted": true}\n{"kind": "timing"}', "its run was interrupted"),
        ('{"kind": "run"}\n{"kind": ', "Expecting value"),
        ('{"kind": "run"}', "it has no records"),
    ],
)
def test_a_damaged_result_is_refused(tree, capsys, text, reason):
    one = step("x", f"import sys; open(sys.argv[1], 'w').write({text!r})")
    run(tree / "out", one)
    assert accepted(tree, one) == 1
    assert reason in capsys.readouterr().out
    assert not (tree / "results/x.jsonl").exists()


def test_a_file_that_is_measured_in_part_begins_as_the_committed_one(tree, capsys):
    code = "import sys; open(sys.argv[1], 'a').write(' ')"
    some = {"file": "results/facts.json", "begins": True, "adds": True}
    one, two = step("one", code, **some), step("two", code, **some)
    target = tree / "results/facts.json"
    target.write_text('{"a": 1}')
    run(tree / "out", one, two)
    assert (tree / "out/facts.json").read_text() == '{"a": 1}  '
    assert accepted(tree, one, two) == 0
    assert target.read_text() == '{"a": 1}  '
    target.write_text('{"a": 2}')  # somebody else's new column
    assert accepted(tree, one) == 1
    assert "it began as another version of results/facts.json" in capsys.readouterr().out


def test_an_archive_is_kept_and_accepted(tree):
    one = step("x", writes())
    pack = tree / "back/run.tar.gz"
    run(tree / "out", one, pack=pack)
    with measure.opened(pack) as folder:
        assert measure.accept(folder, [one], False, tree) == 0
    assert json.loads((tree / "results/x.jsonl").read_text().splitlines()[0]) == {"kind": "run"}


def test_what_another_step_makes_of_a_folder(tree):
    made = step("x", "import os, sys; os.mkdir(sys.argv[1] + '.d')", made="{out}.d")
    assert made.result(tree) == tree / "x.jsonl.d"
    one = step("y", writes(), made="{dir}/y/losses.json", file="results/y.json")
    assert run(tree / "out", one) == ["y"]
    assert measure.records_of(tree / "out")["y"]["reason"] == "it made no losses.json"
