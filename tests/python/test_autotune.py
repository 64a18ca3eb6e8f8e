"""pantile.autotune: what it measures, what it keeps, and who gets it. What a plan makes of a choice
is tested in C++ (tests/host/test_softmax.cc), on devices that are not here."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import pantile
import pytest
import torch
from pantile import _C, _autotune
from pantile._autotune import Autotuned, _faster, _medians, _rounded_up_log2
from support import run_python

KERNEL = "ampere_forward_bf16_d64_causal"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An own cache folder, and nothing known before or after."""
    path = tmp_path / "new" / "cache"
    monkeypatch.setenv("PANTILE_CACHE", str(path))
    monkeypatch.setattr(_autotune, "_known", {})
    yield path
    _C.set_tuned_softmax([])


class Clock:
    """A timer without a GPU: it makes the call, and says how long that took."""

    def __init__(self, runs: dict, seconds: dict) -> None:
        self._seconds = {runs[name]: list(seconds[name]) for name in runs}
        self.order: list = []

    def __call__(self, run) -> float:
        run()
        self.order.append(run)
        times = self._seconds[run]
        times.append(times.pop(0))
        return times[-1]


def test_medians_in_rotating_order():
    made = {"vector": 0, "tensor": 0}

    def of(name):
        def run():
            made[name] += 1

        return run

    runs = {name: of(name) for name in made}
    clock = Clock(runs, {"vector": [5, 1, 3], "tensor": [2, 9, 2]})
    assert _medians(runs, clock, 3) == {"vector": 3, "tensor": 2}
    names = ["vector" if run is runs["vector"] else "tensor" for run in clock.order]
    assert names == ["vector", "tensor", "tensor", "vector", "vector", "tensor"]
    assert made == {"vector": 6, "tensor": 6}  # three of each to warm up


@pytest.mark.parametrize(
    ("vector", "tensor", "usual", "expected"),
    [
        (1.0, 0.9, "vector", "tensor"),
        (1.0, 0.995, "vector", "vector"),  # noise
        (1.0, 0.995, "tensor", "tensor"),
        (0.9, 1.0, "tensor", "vector"),
    ],
)
def test_a_gain_below_one_percent_changes_nothing(vector, tensor, usual, expected):
    assert _faster({"vector": vector, "tensor": tensor}, usual) == expected


def test_classes_are_those_of_the_plans():
    """pantile::rounded_up_log2 of tuning.h."""
    lengths = [0, 1, 2, 3, 1024, 1025, 131072]
    assert [_rounded_up_log2(n) for n in lengths] == [0, 0, 1, 2, 10, 11, 17]


@pytest.fixture
def two_units(monkeypatch):
    """As if the CPU's kernel had both softmaxes, on a device called "GPU"."""
    made = []

    def candidates(q, k, v, lengths, options, arguments):
        return KERNEL, "tensor", dict.fromkeys(("vector", "tensor"), options)

    def calls(q, k, v, lengths, units, arguments):
        return {unit: lambda unit=unit: made.append(unit) for unit in units}

    monkeypatch.setattr(_autotune, "_candidates", candidates)
    monkeypatch.setattr(_autotune, "_calls", calls)
    monkeypatch.setattr(_autotune, "_device_name", lambda q: "GPU")
    return made


def timer_of(made, **seconds):
    def timer(run) -> float:
        run()
        return seconds[made[-1]]

    return timer


def test_choice_is_kept_read_and_cleared(folder, two_units, monkeypatch):
    rows = []
    monkeypatch.setattr(_C, "set_tuned_softmax", rows.append)
    q = torch.ones(2, 1000, 8, 64)
    k = torch.ones(2, 1025, 8, 64)
    found = pantile.autotune(q, k, k, timer=timer_of(two_units, vector=2.0, tensor=3.0))
    assert found.softmax == "vector"
    assert found._class == (KERNEL, "GPU", 11, 14)
    path = Path(found.file)
    assert found.source == f"autotuned: file {path}, 1.50x of tensor"
    assert rows == [[(*found._class, "vector", found.source)]]
    # The rules of the cache of kernels.
    assert path.parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    assert [x.name for x in folder.iterdir()] == [path.name]  # no private name is left
    # Another process.
    _autotune._known.clear()
    _autotune.load()
    assert _autotune._known == {found._class: found}
    assert rows[-1] == rows[0]
    # Measured again, with another end.
    again = pantile.autotune(q, k, k, timer=timer_of(two_units, vector=2.0, tensor=1.0))
    assert (again.softmax, again.file) == ("tensor", found.file)
    assert pantile.clear_autotuned() == 1
    assert rows[-1] == []
    assert not path.exists()
    assert pantile.clear_autotuned() == 0


def test_packed_calls_count_sequences(folder, two_units):
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
    q = torch.ones(300, 4, 64)
    found = pantile.autotune(
        q, q, q, offsets, offsets, 200, 200, timer=timer_of(two_units, vector=1.0, tensor=1.0)
    )
    assert found._class == (KERNEL, "GPU", 8, 11)  # 200 keys; 2 * 4 * 200 queries
    assert found.softmax == "tensor"  # the table's


def test_environment_does_not_stand_in_the_way(folder, two_units, monkeypatch):
    """PANTILE_SOFTMAX is a preference of calls, not of what is measured."""
    q = torch.ones(1, 8, 1, 64)
    timer = timer_of(two_units, vector=1.0, tensor=1.0)
    for asked in ("vector", "tensor"):
        with pytest.raises(ValueError, match=f"options.softmax is '{asked}'; it must be auto"):
            pantile.autotune(q, q, q, options=pantile.Options(softmax=asked), timer=timer)


@pytest.mark.parametrize("wrong", ["garbage", "format", "library", "unit", "name"])
def test_files_that_are_not_used(folder, two_units, wrong):
    q = torch.ones(1, 8, 1, 64)
    found = pantile.autotune(q, q, q, timer=timer_of(two_units, vector=1.0, tensor=2.0))
    path = Path(found.file)
    kept = json.loads(path.read_text())
    if wrong == "garbage":
        path.write_text("{")
    elif wrong == "name":
        path.rename(path.with_name("0" * 64 + ".softmax"))
    else:
        change = {"format": 0, "library": "0", "unit": "reference"}[wrong]
        path.write_text(json.dumps({**kept, {"unit": "softmax"}.get(wrong, wrong): change}))
    _autotune._known.clear()
    _autotune.load()
    assert _autotune._known == {}


def test_folders_that_everybody_may_write_are_not_believed(folder, two_units, caplog):
    q = torch.ones(1, 8, 1, 64)
    pantile.autotune(q, q, q, timer=timer_of(two_units, vector=1.0, tensor=2.0))
    folder.chmod(0o777)
    _autotune._known.clear()
    _autotune.load()
    assert _autotune._known == {}
    assert "can be written to by everybody" in caplog.text
    found = pantile.autotune(q, q, q, timer=timer_of(two_units, vector=1.0, tensor=2.0))
    assert found.file == ""  # nor written to
    assert "in this process" not in found.source
    assert "this process" in found.source
    assert "ends with this process" in caplog.text


def test_no_folder_is_asked_for(two_units, monkeypatch, caplog):
    monkeypatch.setenv("PANTILE_CACHE", "")
    monkeypatch.setattr(_autotune, "_known", {})
    q = torch.ones(1, 8, 1, 64)
    try:
        found = pantile.autotune(q, q, q, timer=timer_of(two_units, vector=1.0, tensor=2.0))
    finally:
        _C.set_tuned_softmax([])
    assert found.file == ""
    assert caplog.text == ""


def test_folders_of_the_environment(monkeypatch):
    monkeypatch.setenv("PANTILE_CACHE", "/a::/b")
    assert _autotune.cache_folders() == ["/a", "/b"]
    monkeypatch.delenv("PANTILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert _autotune.cache_folders() == ["/x/pantile/kernels"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # is to be ignored
    monkeypatch.setenv("HOME", "/home/someone")
    assert _autotune.cache_folders() == ["/home/someone/.cache/pantile/kernels"]


def test_import_reads_what_is_kept(tmp_path):
    """In another process, of the same library."""
    choice = Autotuned(KERNEL, "GPU", 11, 14, "vector", {"vector": 1.0, "tensor": 1.25})
    tmp_path.chmod(0o700)
    kept = {**dataclasses.asdict(choice), "library": _autotune._library_hash(), "format": 1}
    del kept["file"]
    (tmp_path / _autotune._file_name(choice._class)).write_text(json.dumps(kept))
    source = "import pantile; print(*(x.source for x in pantile._autotune._known.values()))"
    said = run_python(source, PANTILE_CACHE=str(tmp_path))
    assert "1.25x of tensor" in said


def test_what_has_no_choice_is_refused():
    q = torch.ones(1, 8, 1, 64)
    for arguments in ({}, {"options": pantile.Options(fp8=True)}, {"return_lse": True}):
        with pytest.raises(pantile.UnsupportedError, match="autotune has nothing to choose: cpu_"):
            pantile.autotune(q, q, q, **arguments)
    with pytest.raises(pantile.UnsupportedError, match="nothing to choose: torch"):
        pantile.autotune(q, q, q, options=pantile.Options(backend="torch"))
    with pytest.raises(pantile.UnsupportedError, match="hopper"):
        pantile.autotune(q, q, q, options=pantile.Options(backend="hopper"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"repeats": 0}, ValueError, "repeats is 0; it must be at least 1"),
        ({"repeats": 1.5}, TypeError, "repeats is 1.5; it must be an integer"),
        ({"casual": True}, TypeError, "casual"),
        ({"options": "tensor"}, TypeError, "options is 'tensor'; it must be a pantile.Options"),
        ({"scale": "x"}, TypeError, "scale is 'x'"),
    ],
)
def test_refusals(arguments, error, message):
    q = torch.ones(1, 8, 1, 64)
    with pytest.raises(error, match=message):
        pantile.autotune(q, q, q, **arguments)


def test_refused_while_a_graph_is_captured(monkeypatch):
    from pantile import _runtime

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(_runtime, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"):
        pantile.autotune(OnGpu(), None, None)


def test_bindings_check_the_unit():
    with pytest.raises(ValueError, match="unit"):
        _C.set_tuned_softmax([(KERNEL, "GPU", 1, 1, "matrix", "")])


@pytest.mark.gpu
@pytest.mark.ampere
def test_on_a_gpu(folder):
    """Both ends, by a timer that lies; explain shows it, and calls take it."""
    options = pantile.Options(backend="ampere")
    q = torch.randn(2, 500, 4, 64, device="cuda", dtype=torch.bfloat16)
    measured = pantile.autotune(q, q, q, causal=True, options=options)
    assert set(measured.seconds) == {"vector", "tensor"}
    for wanted in ("vector", "tensor"):
        turn = {"vector": 1.0, "tensor": 1.0, wanted: 0.5}
        names = iter([*(["vector", "tensor", "tensor", "vector"] * 10)])

        def timer(run, turn=turn, names=names) -> float:
            run()
            return turn[next(names)]

        found = pantile.autotune(q, q, q, causal=True, options=options, timer=timer)
        assert found.softmax == wanted
        plan = pantile.explain(q, q, q, causal=True, options=options).forward
        assert plan.softmax.startswith(wanted)
        assert f"chosen: autotuned: file {found.file}, 2.00x of" in plan.softmax
        named = dataclasses.replace(options, softmax=wanted)
        same = [pantile.attention(q, q, q, causal=True, options=x) for x in (options, named)]
        assert torch.equal(*same)
    assert pantile.clear_autotuned() == 1
    assert "autotuned" not in pantile.explain(q, q, q, causal=True, options=options).forward.softmax
    assert not os.listdir(folder)
