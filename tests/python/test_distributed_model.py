"""pantile.distributed.model: bytes and times of the methods, and the replay of schedules."""

from __future__ import annotations

import json
import time

import pytest
from pantile.distributed import _layout, _replay, model
from pantile.distributed._replay import Attention, Program, Transfer

SHAPE = model.Shape(gpus=64, tokens=8192, heads_q=64, heads_k=8)


def by_method(shape, **named):
    return {e.method: e for e in model.estimates(shape, **named)}


def test_bytes_are_those_of_the_formulas():
    found, n, total, dim = by_method(SHAPE), SHAPE.tokens, SHAPE.total, SHAPE.head_dim
    keys = 4 * (total - n) * SHAPE.heads_k * dim  # K and V in 2 bytes
    assert found["gather"].forward_bytes == keys
    assert found["gather"].backward_bytes == 3 * keys  # and gradients in 4
    assert found["ring"].forward_bytes == keys
    half = model.exchange(SHAPE, model.Machine(), needed=0.5)
    assert half.forward_bytes == keys / 2
    # Of 8 key heads each goes to the 8 of 64 ranks that have its queries.
    assert found["heads"].forward_bytes == 63 / 64 * n * dim * 4 * (64 + 64)


def test_times_follow_what_they_depend_on():
    fast, slow = model.Machine(), model.Machine(card=5e9)
    for method in ("gather", "exchange", "ring", "heads", "hybrid"):
        quick, late = by_method(SHAPE, machine=fast)[method], by_method(SHAPE, machine=slow)[method]
        assert quick.forward_seconds < late.forward_seconds
        assert 0.0 < late.forward_efficiency < quick.forward_efficiency < 1.1
    many_heads = model.Shape(gpus=64, tokens=2048, heads_q=32, heads_k=32)
    assert by_method(many_heads)["ring"].forward_efficiency < 0.2  # bound by the network
    assert model.stages(1, 2.0, 3.0) == 5.0
    assert model.stages(4, 2.0, 3.0) == 2.0 + 4 * 3.0
    assert model.stages(4, 5.0, 3.0) == 4 * 5.0 + 3.0


def test_rate_is_between_the_measured_ones():
    assert model.rate(model.FORWARD_RATES, 16384) == 788e12
    assert model.rate(model.FORWARD_RATES, 10**9) == 788e12
    assert 480e12 < model.rate(model.FORWARD_RATES, 2000) < 693e12


def test_replay_computes_times():
    transfers = [Transfer("a", -1, [1], 2.0), Transfer("b", 0, [1], 2.0)]
    one = Program(transfers, [Attention(3.0, 0), Attention(3.0, 1)])
    other = Program([t._replace(peers=[0]) for t in transfers], one.attention)
    outcome = _replay.replay([one, other])
    # a until 2, attention until 5, b until 7, attention until 10.
    assert outcome.seconds == 10.0
    assert outcome.busy == 0.6
    assert not outcome.waiting


def test_replay_finds_a_cycle():
    """Two ranks that issue their transfers in opposite orders, a third that waits behind them."""
    a, b, c = (
        Transfer(name, -1, peers, 1.0) for name, peers in (("a", [1]), ("b", [1]), ("c", []))
    )
    first = Program([a, b], [])
    second = Program([b._replace(peers=[0]), a._replace(peers=[0])], [])
    free = Program([c], [])
    outcome = _replay.replay([first, second, free])
    assert outcome.waiting == {0: "a", 1: "b"}


@pytest.mark.parametrize("size", [2, 3, 64])
def test_ring_finishes(size):
    outcome = _replay.replay(_replay.ring_programs(size, step_seconds=2.0, move_seconds=1.0))
    assert not outcome.waiting
    assert outcome.seconds >= 2.0 * size


def test_exchange_of_documents_finishes():
    found = model.replay_documents(SHAPE)
    assert found["ranks"] == 64
    assert found["waiting_on_a_cycle"] == 0
    assert found["imbalance"] <= 1.03
    assert 0.0 < found["busy"] <= 1.0


@pytest.mark.parametrize(
    ("gpus", "seed", "most"),
    [(64, 0, 7.71), (64, 1, 5.63), (512, 0, 11.82), (512, 1, 38.37), (4096, 0, 26.5)],
)
def test_forwards_of_documents_are_no_slower_than_before(gpus, seed, most):
    """Milliseconds, the better of two earlier planners: chunks dealt by their work, and sweeps
    without levelling."""
    shape = model.Shape(gpus=gpus, tokens=8192, heads_q=64, heads_k=8)
    found = model.replay_documents(shape, seed=seed)
    assert found["seconds"] <= 1e-3 * most
    assert found["plan_seconds"] < 3.0  # at most 0.5
    assert found["imbalance"] <= 1.02


@pytest.mark.slow
def test_4096_ranks():
    """33 million tokens: the planner, and a schedule in which nobody waits on a cycle."""
    shape = model.Shape(gpus=4096, tokens=8192, heads_q=64, heads_k=8)
    bounds, mask = model.document_lengths(shape.total), _layout.Mask(-1, 0)
    started = time.process_time()
    _, shares = _layout.make(bounds, 4096, mask, "documents", 0.02)
    seconds = time.process_time() - started
    assert _layout.imbalance(shares, bounds, mask) <= 1.03
    assert seconds < 1.5  # about 0.25
    assert model.replay_documents(shape)["waiting_on_a_cycle"] == 0


ARGUMENTS = ["--gpus", "16", "--heads", "32/8", "--tokens", "4096"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    assert model.main([*ARGUMENTS, "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 1000


def test_command(capsys):
    assert model.main(ARGUMENTS) == 0
    text = capsys.readouterr().out
    assert "hybrid" in text
    assert "16 GPUs" in text
    assert model.main([*ARGUMENTS, "--json", "--replay"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["replay"]["waiting_on_a_cycle"] == 0
    assert {line["method"] for line in answer["methods"]} >= {"gather", "ring", "heads"}
    with pytest.raises(SystemExit):
        model.main(["--gpus", "4", "--heads", "7/2"])
