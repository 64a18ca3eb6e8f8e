"""The measuring core and ``python -m pantile bench``, on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time

import pytest
import torch
from pantile import __main__ as command_line
from pantile.bench import cases, check, command, figures, measure, peers, sweep

SMALL = ["--device", "cpu", "--head-dims", "16", "--lengths", "32", "--heads", "2", "--rounds", "2"]


def bench(*words: str) -> int:
    return command_line.main(["bench", *words])


# ---- the command


def test_prints_a_table_and_writes_the_results(capsys, tmp_path):
    path = tmp_path / "new" / "bench.jsonl"
    assert bench(*SMALL, "--peers", "all", "--out", str(path)) == 0
    output = capsys.readouterr().out
    assert "pantile ms" in output
    assert "math (torch)" in output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run"] + ["timing"] * 4 + ["summary"] * 2
    assert lines[0]["cpu"]
    assert len(lines[0]["commands"]) == 1
    for line in lines[1:5]:
        results = line["results"]["back_to_back"]
        assert set(results) == {"pantile", *peers.CPU_PEERS}
        for found in results.values():
            assert 0 < found["ms_p20"] <= found["ms"] <= found["ms_p80"]
            assert found["tflops"] > 0
        value, best = figures.ratio(results)
        assert f"{value:.2f}x {best}" in output


def test_variants_of_ours_are_measured_or_say_why_not(capsys):
    words = ["--head-dims", "32", "--lengths", "16", "--masks", "full", "--peers", "math (torch)"]
    assert bench("--device", "cpu", *words, "--rounds", "1", "--deterministic", "--softmax") == 0
    output = capsys.readouterr().out
    assert "pantile, deterministic ms" in output
    assert "pantile, vector ms" in output
    assert "absent in 1 of the rows: pantile, surrogate: " in output


def test_says_when_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("--device", "cuda") == command.NOT_POSSIBLE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--device cuda" in captured.err
    assert "no CUDA device" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head-dims", "64,x"], "--head-dims is '64,x'; it must be positive integers"),
        (["--lengths", "0"], "--lengths is '0'; it must be positive integers"),
        (["--masks", "casual"], "--masks is 'casual'; it must be of full, causal"),
        (["--passes", "both"], "--passes is 'both'; it must be of forward, backward"),
        (["--heads", "-1"], "--heads is -1; it must be a positive integer"),
        (["--rounds", "0"], "--rounds is 0; it must be a positive integer"),
        (["--round-ms", "nan"], "--round-ms is nan; it must be a positive number"),
        (["--lengths", ","], "--lengths is ','; it must be positive integers"),
        (["--dtype", "float64"], "--dtype is 'float64'; it must be of bfloat16, float16"),
        (["--only-special"], "the suite quick has no special cases"),
        (["--backend", "hopper"], "--backend hopper runs on cuda; the device is cpu"),
        (["--graphs"], "--graphs captures CUDA graphs; the device is cpu"),
        (["--peers", "FA9"], "peer 'FA9' is not known; there are: torch, math (torch)"),
    ],
)
def test_names_a_wrong_argument(words, message, capsys):
    assert bench("--device", "cpu", *words) == command.NOT_POSSIBLE
    assert message in capsys.readouterr().err


def test_refuses_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(sweep, "measure_case", None)
    assert bench(*SMALL, "--backend", "ampere") == command.NOT_POSSIBLE


def test_fails_when_no_kernel_serves(capsys):
    words = ["--passes", "forward", "--masks", "full", "--head-dims", "1024"]
    assert bench(*SMALL, *words) == 1
    assert "absent in 1 of the rows: pantile: " in capsys.readouterr().out


def interrupting(at: int):
    """measure_case that Ctrl-C ends at its call number `at`."""
    real, calls = sweep.measure_case, []

    def measure_case(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*arguments)

    return measure_case


def test_interrupted_run_keeps_what_was_measured(monkeypatch, capsys, tmp_path):
    path = tmp_path / "bench.jsonl"
    monkeypatch.setattr(sweep, "measure_case", interrupting(at=3))
    assert bench(*SMALL, "--out", str(path)) == 130
    lines = figures.read(path)
    assert [line["kind"] for line in lines] == ["run", "timing", "timing", "summary"]
    assert lines[0]["interrupted"] is True
    captured = capsys.readouterr()
    assert captured.out.count("d16 ") == 3  # two rows, and the worst of the summary
    assert captured.err.splitlines()[-1] == "interrupted"


def test_several_types_and_passes_stand_apart(capsys):
    words = ["--dtype", "float32,bfloat16", "--passes", "forward+backward", "--masks", "causal"]
    assert bench(*SMALL, *words, "--heads-k", "1", "--batch", "1") == 0
    output = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        assert f"forward+backward {dtype}" in output


def test_progress_is_on_stderr(capsys):
    assert bench(*SMALL, "--passes", "forward") == 0
    assert capsys.readouterr().err.splitlines() == [
        "[1/2] d16 full 32, forward, float32",
        "[2/2] d16 causal 32, forward, float32",
    ]


@pytest.mark.parametrize("suite", ["hopper", "ampere", "cpu"])
def test_a_suite_gives_what_is_not_given(suite):
    given = {"suite": suite, "only_special": False, "no_special": False, "rounds": 1}
    given |= dict.fromkeys(("flushed", "graphs", "deterministic", "softmax"), False) | {
        "round_ms": 1.0
    }
    given |= cases.suite(suite)
    chosen = command._chosen(given, given["device"])
    special = {"hopper": 7, "ampere": 6, "cpu": 0}[suite]
    assert sum(not figures.is_grid({"case": c.name, "head_dim": c.head_dim}) for c in chosen) == (
        special
    )
    for setup in command.setups_of(given, given["device"]):
        assert setup.backend == suite
    given["head_dims"] = "8"
    assert {c.head_dim for c in command._chosen(given | {"no_special": True}, "cpu")} == {8}


def test_the_bars_of_the_cpu(monkeypatch):
    import cpu

    row = {"pass": "forward", "dtype": "bfloat16", "head_dim": 64, **cpu.PROMISED}
    row["results"] = {"back_to_back": {"pantile": {"ms": 1.0}, "torch": {"ms": 1.5}}}
    for isa, bar, met in (("avx512", 1.8, False), ("avx2", 1.2, True), ("baseline", None, None)):
        cpu.judge(row, {"isa": isa})
        assert (row["bar"], row["met"], row["ratio"]) == (bar, met, 1.5)
    assert cpu.bar_of(row | {"seqlen": 1}, "avx512") is None


def test_a_missed_bar_fails_the_command(capsys):
    def judge(row: dict, _run: dict) -> None:
        row |= {"bar": 1e9, "met": False}

    words = ["bench", *SMALL, "--passes", "forward", "--masks", "full"]
    assert command.bench(command_line.parser().parse_args(words), judge) == 1
    assert "MISSES" in capsys.readouterr().out


# ---- results are compared before they are timed

CHECKED = {
    "plain": cases.Case("plain", 2, 4, 4, 16, 90, False),
    "causal, grouped": cases.Case("causal", 2, 6, 2, 16, 90, True),
    "window": cases.Case("window", 1, 2, 1, 16, 90, True, window_left=20),
    "packed": cases.Case("packed", 3, 4, 2, 16, 60, True, lengths=(5, 60, 31)),
}
CPU_SETUP = sweep.Setup("cpu", "cpu", "float32", tuple(peers.CPU_PEERS), rounds=1, round_ms=1e-3)


@pytest.mark.parametrize("what", check.NAMES)
@pytest.mark.parametrize("name", CHECKED)
def test_right_contenders_are_timed(name, what):
    row = sweep.measure_case(CHECKED[name], what, CPU_SETUP)
    assert row["wrong"] == []
    timed = row["results"]["back_to_back"]
    assert figures.OURS in timed
    assert set(timed) | set(row["absent"]) == {figures.OURS, *peers.CPU_PEERS}


@pytest.mark.parametrize("chunk", [1, 700, 2**26])
def test_the_textbook_does_not_depend_on_its_chunks(monkeypatch, chunk):
    monkeypatch.setattr(check, "CHUNK_SCORES", chunk)
    for case in CHECKED.values():
        assert sweep.measure_case(case, "backward", CPU_SETUP)["wrong"] == []


def spoiled(tensors: tuple, how: str) -> tuple:
    """The results with an error in the last sequence and head, where they are compared."""
    found = [x.clone() for x in tensors]
    part = found[-1][-1] if found[-1].ndim == 4 else found[-1]
    if how == "nan":
        part[3, -1, 2] = float("nan")
    elif how == "tile":
        part[32:64, -1] = 0
    else:
        found[-1] = found[-1][..., :8]
    return tuple(found)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("how", ["nan", "tile", "shape"])
@pytest.mark.parametrize("name", ["plain", "causal, grouped", "packed"])
def test_wrong_contenders_are_reported_and_not_timed(monkeypatch, name, how, what):
    real = sweep.ours

    def ours(*arguments, **keywords):
        contender = real(*arguments, **keywords)
        answer = contender.answer
        contender.answer = lambda: spoiled(answer(), how)
        return contender

    if name == "packed":  # the longest sequence is compared
        monkeypatch.setitem(CHECKED, name, cases.Case("p", 2, 4, 2, 16, 90, False, lengths=(90, 2)))
    monkeypatch.setattr(sweep, "ours", ours)
    row = sweep.measure_case(CHECKED[name], what, CPU_SETUP)
    assert row["wrong"] == [figures.OURS]
    assert row["absent"][figures.OURS].startswith("wrong result, not timed: ")
    assert figures.OURS not in row["results"]["back_to_back"]


def test_a_wrong_result_of_ours_fails_the_command(monkeypatch, capsys):
    monkeypatch.setitem(check.MOST_ERROR, torch.float32, 0.0)
    assert bench(*SMALL) == 1
    assert "pantile: wrong result, not timed: o is off by " in capsys.readouterr().out


def test_a_contender_that_cannot_be_compared_is_not_timed():
    problem = sweep.make_problem(CHECKED["plain"], "forward", CPU_SETUP)
    silent = measure.on_cpu("silent", lambda: None)
    assert "nothing can be compared" in check.Judge(problem).wrong(silent)


# ---- timing


def test_interleaving_gives_each_contender_its_own_time():
    slow = measure.on_cpu("slow", lambda: time.sleep(4e-3))
    fast = measure.on_cpu("fast", lambda: time.sleep(1e-3))
    measure.interleave([slow, fast], rounds=3, round_ms=4)
    for contender, milliseconds in ((slow, 4), (fast, 1)):
        assert len(contender.milliseconds) == 3
        assert milliseconds <= contender.percentile(0.0) <= contender.median()
    assert slow.percentile(0.0) > fast.percentile(0.0)


def test_the_order_rotates():
    order: list[str] = []
    contenders = [
        measure.Contender(name, lambda n, name=name: order.append(name), True, measure.drained)
        for name in "abc"
    ]
    measure.interleave(contenders, rounds=3, round_ms=1e-6)
    timed = order[-18:]  # two entries a round and contender: one to start, one that is timed
    assert "".join(timed[::2]) == "abcbcacab"


class FakeGpu:
    """torch's streams and graphs, as far as a capture needs them; a replay makes the calls that
    were captured."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[str] = []
        self.current, self.capturing = "default", False
        gpu = self

        class Stream:
            def wait_stream(self, other) -> None:
                gpu.events.append("wait")

        class Graph:
            def replay(self) -> None:
                gpu.events.append("replay")

        @contextlib.contextmanager
        def stream_of(stream):
            gpu.current = "side"
            yield
            gpu.current = "default"

        @contextlib.contextmanager
        def graph_of(graph, stream):
            gpu.events.append("capture")
            gpu.current, gpu.capturing = "side", True
            yield
            gpu.current, gpu.capturing = "default", False

        names = {"Stream": Stream, "CUDAGraph": Graph, "stream": stream_of, "graph": graph_of}
        names |= {"current_stream": lambda: None}
        names |= {"synchronize": lambda: self.events.append("synchronize")}
        for name, fake in names.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self) -> tuple:
        self.events.append(f"call on {self.current}{', captured' * self.capturing}")
        return (torch.ones(1),)


def test_a_call_is_captured_on_the_stream_that_it_was_made_on(monkeypatch):
    gpu = FakeGpu(monkeypatch)

    def make() -> measure.Contender:
        gpu.events.append(f"made on {gpu.current}")
        return measure.Contender("x", measure.repeat(gpu.call), answer=gpu.call)

    found = measure.in_graph(make)
    begin = ["wait", "made on side", "call on side", "synchronize", "capture"]
    assert gpu.events == [*begin, "call on side, captured"]
    assert found.name == "x"
    assert not found.wall
    gpu.events.clear()
    found.call(3)
    assert gpu.events == ["replay"] * 3
    assert found.answer()[0].item() == 1.0
    assert gpu.events == ["replay"] * 4  # it computes nothing but by a replay


def test_what_cannot_be_captured_says_why(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    by_clock = measure.Contender("x", measure.repeat(gpu.call), wall=True, answer=gpu.call)
    silent = measure.Contender("x", measure.repeat(gpu.call))
    for made in (by_clock, silent):
        assert "not on a stream" in measure.in_graph(lambda made=made: made)
    assert measure.in_graph(lambda: "no kernel") == "no kernel"
    assert "capture" not in gpu.events


def test_replays_stand_beside_eager_calls(monkeypatch, capsys):
    made: list[str] = []

    def in_graph(make):
        contender = make()
        made.append(contender.name)
        if contender.name == "torch":
            raise RuntimeError("capture failed\nmore")
        if contender.name == "math (torch)":
            answer = contender.answer
            contender.answer = lambda: spoiled(answer(), "nan")
        return contender

    monkeypatch.setattr(measure, "in_graph", in_graph)
    setup = dataclasses.replace(CPU_SETUP, graphs=True)
    row = sweep.measure_case(CHECKED["plain"], "forward", setup)
    assert made == [figures.OURS, *peers.CPU_PEERS]
    assert set(row["results"]) == {"back_to_back", "graph"}
    assert set(row["results"]["back_to_back"]) == {figures.OURS, *peers.CPU_PEERS}
    assert set(row["results"]["graph"]) == {figures.OURS}
    assert row["absent"]["torch, in a CUDA graph"] == "capture failed"
    assert row["absent"]["math (torch), in a CUDA graph"].startswith("wrong result, not timed")
    assert row["wrong"] == ["math (torch)"]
    run = {"kind": "run", "cpu": "x"}
    row["results"]["back_to_back"] = {
        "pantile": {"ms": 3.0, "tflops": 1.0},
        "torch": {"ms": 6.0, "tflops": 0.5},
    }
    row["results"]["graph"] = {
        "pantile": {"ms": 2.0, "tflops": 1.5},
        "torch": {"ms": 3.0, "tflops": 1.0},
    }
    command._table([run, row, *figures.summarise([row])])
    output = capsys.readouterr().out.splitlines()
    eager, replayed = [line.split() for line in output[2:4]]
    assert eager == ["plain", "forward", "3.000", "1000", "6.000", "500", "2.00x", "torch"]
    words = ["plain", "forward,", "CUDA", "graph", "2.000", "1500", "3.000", "1000", "1.50x"]
    assert replayed == [*words, "torch"]
    states = {line.split(":")[0] for line in output if "geometric mean" in line}
    assert states == {"forward, float32, back to back", "forward, float32, CUDA graph"}


@pytest.mark.gpu
@pytest.mark.parametrize("what", check.NAMES)
def test_replays_of_ours_are_right(what):
    setup = sweep.Setup("cuda", "auto", "bfloat16", (), rounds=1, round_ms=1.0, graphs=True)
    row = sweep.measure_case(cases.Case("small", 2, 4, 4, 64, 256, True), what, setup)
    assert row["wrong"] == []
    assert set(row["results"]["graph"]) == {figures.OURS}, row["absent"]


def test_percentiles_of_few_figures():
    contender = measure.Contender("x", lambda n: None, milliseconds=[5.0, 1.0, 3.0, 2.0, 4.0])
    assert contender.median() == 3.0
    assert [contender.percentile(p) for p in (0, 0.2, 0.8, 1)] == [1.0, 2.0, 4.0, 5.0]


def test_monitor_summary_skips_what_is_no_number():
    lines = ["1980, 2619, 650.5, 61", "1650, 2619, [N/A], 63", "1700, 2619, 600.5, 62", "19"]
    found = measure.summarise_samples(lines)
    assert found["clocks.sm"] == {"median": 1700, "lowest": 1650, "highest": 1980}
    assert found["power.draw"] == {"median": 625.5, "lowest": 600.5, "highest": 650.5}
    assert measure.summarise_samples([]) == {}


def test_the_command_line_is_kept_without_paths(monkeypatch):
    words = ["--peers", "FA3,cuDNN (torch)", "--out", "/x/y.jsonl", "--rounds", "3"]
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/hopper.py", *words])
    expected = "python benchmarks/hopper.py --peers 'FA3,cuDNN (torch)' --rounds 3"
    assert measure.command() == expected
    monkeypatch.setattr("sys.argv", ["benchmarks/cpu.py", "--json", "/x/y.jsonl"])
    assert measure.command() == "python benchmarks/cpu.py"
    monkeypatch.setattr("sys.argv", ["/site/pantile/__main__.py", "bench"])
    assert measure.command() == "python -m pantile bench"


# ---- cases and figures


def test_pairs_of_a_window_are_counted_exactly():
    case = cases.Case("w", 2, 1, 1, 8, 50, True, window_left=6)
    shown = sum(min(i, 6) + 1 for i in range(50))
    assert case.pairs() == 2 * shown


def test_catalogue_names_are_unique_and_read():
    chosen = [*cases.grid(), *cases.special(), cases.varlen()]
    assert len({case.name for case in chosen}) == len(chosen)
    packed = cases.varlen()
    assert sum(packed.lengths) == cases.CATALOGUE["varlen"]["total"]
    assert max(packed.lengths) == packed.seqlen
    assert packed == cases.varlen()


def timing(case: str, ours: float, **others: float) -> dict:
    results = {name: {"ms": ms} for name, ms in {"pantile": ours, **others}.items()}
    row = {"case": case, "pass": "forward", "dtype": "float32"}
    return row | {"results": {"back_to_back": results}}


def test_ratio_is_to_the_fastest_peer():
    results = timing("x", 2.0, a=3.0, b=5.0)["results"]["back_to_back"]
    assert figures.ratio(results) == (1.5, "a")
    assert figures.ratio({"pantile": {"ms": 1.0}})[1] == "-"


def test_deterministic_figures_are_ours_and_no_peers():
    results = timing("x", 2.0, a=3.0)["results"]["back_to_back"]
    results[sweep.DETERMINISTIC] = {"ms": 1.0}
    assert figures.ratio(results) == (1.5, "a")


def test_appended_run_keeps_earlier_timings():
    def lines(run: str, case: str) -> list[dict]:
        rows = [timing(case, 2.0, a=4.0) | {"kind": "timing"}]
        first = {"kind": "run", "commit": run, "commands": [f"run {run}"], "seconds": 1.5}
        return [first, *rows, *figures.summarise(rows)]

    found = sweep.joined(lines("1", "x"), lines("2", "y"))
    assert [line["kind"] for line in found] == ["run", "timing", "timing", "summary"]
    assert [line.get("case") for line in found[1:3]] == ["x", "y"]
    assert found[0]["commit"] == "1"
    assert found[0]["commands"] == ["run 1", "run 2"]
    assert found[0]["seconds"] == 3.0
    assert found[3]["cells"] == 2


def test_summary():
    rows = [timing("x", 2.0, a=4.0), timing("y", 2.0, a=1.0), timing("z", 2.0)]
    (line,) = figures.summarise(rows)
    assert line["cells"] == 2
    assert line["geometric_mean"] == 1.0
    assert (line["worst"], line["worst_case"], line["below_one"]) == (0.5, "y", 1)


def test_types_are_summed_up_apart():
    rows = [timing("x", 1.0, a=2.0), timing("x", 1.0, a=3.0) | {"dtype": "float16"}]
    found = {line["dtype"]: line["geometric_mean"] for line in figures.summarise(rows)}
    assert found == {"float32": 2.0, "float16": 3.0}


def test_every_absent_peer_has_a_reason(monkeypatch):
    for name in ("FA3_SO", "DEW3_SO"):
        monkeypatch.delenv(name, raising=False)
    setup = sweep.Setup("cpu", "cpu", "float32", ())
    for what in ("forward", "backward"):
        problem = sweep.make_problem(cases.Case("x", 1, 2, 2, 16, 8, True, 3), what, setup)
        for name in ("FA3", "FA2 (torch)", "FlexAttention (torch)", "cuDNN FP8"):
            reason = peers.GPU_PEERS[name](name, problem)
            assert isinstance(reason, str)
            assert reason
    packed = sweep.make_problem(cases.varlen(), "forward", setup)
    for name, peer in peers.CPU_PEERS.items():
        assert "packed" in peer(name, packed)


def test_a_peers_library_is_known_by_its_hash(monkeypatch, tmp_path):
    library = tmp_path / "fa3.so"
    library.write_bytes(b"abc")
    monkeypatch.setenv("FA3_SO", str(library))
    monkeypatch.setenv("DEW3_SO", str(tmp_path / "gone.so"))
    found = peers.versions()
    assert found["FA3_SO"] == "sha256 ba7816bf8f01"
    assert "DEW3_SO" not in found


def test_a_score_matrix_that_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(peers, "MOST_SCORE_BYTES", 100)
    setup = sweep.Setup("cpu", "cpu", "float32", ())
    problem = sweep.make_problem(cases.Case("x", 1, 2, 2, 16, 8, False), "forward", setup)
    assert "score matrix" in peers.CPU_PEERS["math (torch)"]("math (torch)", problem)
