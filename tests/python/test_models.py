"""benchmarks/models.py: the same model by every attention, and what its FLOP count says."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pantile
import pytest
import torch
from pantile.bench import figures, peers

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "models.py"


@pytest.fixture(scope="module")
def models():
    spec = importlib.util.spec_from_file_location("models_benchmark", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def as_fa3(monkeypatch):
    """FlashAttention-3's operators, by their schemas, with our kernels behind them."""
    with pantile.compat.install("flash_attn_interface", operators=True):
        monkeypatch.setattr(peers, "fa3_operators", lambda: torch.ops.flash_attn_3)
        yield


def gradients(models, name, recompute=False):
    bench = models.Bench(models.CHECKS["tiny-gpt"], "cpu", recompute)
    bench.model.float()  # so that only the order of sums differs
    bench.result(models.ATTENTION[name](bench.shape))
    return {n: p.grad for n, p in bench.model.named_parameters()}


@pytest.mark.parametrize("name", ["FA2 (torch)", "math (torch)", "recomputed"])
def test_gradients_agree(models, name):
    expected = gradients(models, "pantile")
    recompute = name == "recomputed"
    found = gradients(models, "pantile" if recompute else name, recompute)
    assert len(found) == len(expected) > 10
    for key, gradient in found.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradient, expected[key], atol=2e-6, rtol=1e-3, msg=key)


def test_gradients_through_the_operators_of_fa3(models, as_fa3):
    torch.manual_seed(3)
    leaves = [torch.randn(2, 40, h, 64).bfloat16().requires_grad_() for h in (4, 2, 2)]
    grad_o = torch.randn(2, 40, 4, 64).bfloat16()
    attend = models.fa3(models.CHECKS["tiny-gpt"])
    found, expected = (
        (o, *torch.autograd.grad(o, leaves, grad_o))
        for o in (attend(*leaves), models.attend_pantile(*leaves))
    )
    for x, y in zip(found, expected, strict=True):
        x, y = x.detach().double(), y.detach().double()
        assert (x - y).norm() < 5e-3 * y.norm()


def test_fa3_without_a_backward_is_named(models, monkeypatch):
    class Forward:
        fwd = None

    monkeypatch.setattr(peers, "fa3_operators", Forward)
    assert "no operator flash_attn_3::bwd" in models.fa3(models.CHECKS["tiny-gpt"])
    assert callable(models.fa3(models.CHECKS["tiny-llama"]))


def test_flops_by_hand(models):
    training, prefill = models.CHECKS["tiny-gpt"], models.CHECKS["tiny-llama"]
    layer = 64 * 3 * 64 + 64 * 64 + 2 * 64 * 256 + (256 + 64) + 4 * 64  # with biases and norms
    used = 2 * layer + 2 * 64 + 128 * 64  # two layers, the last norm, the head; no tables
    by_hand = 2 * 48 * (6 * used + 12 * 2 * 64 * 48 / 2)
    assert models.flops(training, models.Decoder(training)) == by_hand
    layer = 64 * (4 + 2 + 2) * 16 + 64 * 64 + 64 * 2 * 96 + 96 * 64 + 2 * 64
    by_hand = 48 * (2 * (2 * layer + 64) + 4 * 2 * 64 * 48 / 2) + 2 * 128 * 64
    assert models.flops(prefill, models.Decoder(prefill)) == by_hand


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt-110m-8k", 110), ("gpt-1.3b-32k", 1482), ("llama-8b-prefill-128k", 1923)],
)
def test_sizes_of_the_shapes(models, name, millions):
    with torch.device("meta"):
        model = models.Decoder(models.SHAPES[name])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def run(models, monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["models.py", "--device", "cpu", *words])
    models.main()


def test_records(models, monkeypatch, tmp_path, capsys, as_fa3):
    path = tmp_path / "models.jsonl"
    names = "pantile,FA3,cuDNN (torch),math (torch)"
    words = ["--rounds", "1", "--round-ms", "1", "--peak", "0.5", "--attention", names]
    run(models, monkeypatch, "--only", "tiny-gpt,tiny-llama", *words, "--out", str(path))
    said = capsys.readouterr().out
    head, *lines = figures.read(path)
    assert head["kind"] == "run"
    assert "benchmarks/models.py --device cpu" in head["commands"][0]
    assert [line["shape"] for line in lines] == ["tiny-gpt", "tiny-llama"]
    for line in lines:
        assert list(line["absent"]) == ["cuDNN (torch)"]
        assert line["weights"] == "bfloat16"
        assert set(line["step_ms"]) == {"pantile", "FA3", "math (torch)"}
        for name, ms in line["step_ms"].items():
            tokens = line["batch"] * line["context"]
            assert line["tokens_per_second"][name] == pytest.approx(tokens / ms * 1e3, rel=1e-3)
            assert line["mfu"][name] == pytest.approx(line["flops"] / ms / 5e8, rel=0.02, abs=1e-4)
            assert line["cosine"][name] > models.LEAST_COSINE
            assert f"{name} {ms:.1f} ms" in said
    assert lines[1]["of_layers"] == 4


def test_a_wrong_contender_is_left_out(models, monkeypatch, tmp_path):
    def full(q, k, v):
        return pantile.attention(q, k, v)  # not causal

    monkeypatch.setitem(models.ATTENTION, "wrong", lambda shape: full)
    path = tmp_path / "models.jsonl"
    words = ["--attention", "pantile,wrong", "--rounds", "1", "--round-ms", "1"]
    run(models, monkeypatch, "--only", "tiny-gpt", *words, "--out", str(path))
    line = json.loads(path.read_text().splitlines()[1])
    assert list(line["step_ms"]) == ["pantile"]
    assert line["absent"]["wrong"].startswith("its result has cosine 0.")


def test_math_is_left_out_where_its_scores_do_not_fit(models):
    said = models.ATTENTION["math (torch)"](models.SHAPES["gpt-1.3b-8k"])
    assert said == "its scores would take 288 GiB"


@pytest.mark.parametrize("option", ["--only", "--attention"])
def test_refusals(models, monkeypatch, capsys, option):
    with pytest.raises(SystemExit):
        run(models, monkeypatch, option, "nothing")
    assert f"{option} 'nothing' is not one of " in capsys.readouterr().err
