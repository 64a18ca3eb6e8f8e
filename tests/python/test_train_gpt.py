"""examples/train_gpt.py: a step that is not finite ends it, and rounds of several lengths."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import pantile
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")
PATH = pathlib.Path(__file__).parents[2] / "examples" / "train_gpt.py"
TEXT = torch.arange(4000) % 97


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_gpt_example", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    tiny = module.Preset(
        layers=1, width=16, heads=2, context=16, batch=2, steps=3, learning_rate=1e-3
    )
    monkeypatch.setitem(module.PRESETS, "small", tiny)
    monkeypatch.setattr(module, "load_text", lambda: TEXT)
    return module


def train(example, name="pantile"):
    preset = example.PRESETS["small"]
    return example.train(name, preset, TEXT, torch.device("cpu"), seed=1, every=0)


def test_gradient_norms_are_logged(example):
    run = train(example)
    assert len(run.gradient_norms) == len(run.losses) == 3
    assert all(0 < norm < 100 for norm in run.gradient_norms)


class _Poisoned(torch.autograd.Function):
    """The identity, with one NaN in the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0, 0, 0, 0] = float("nan")
        return grad


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_with_a_message(example, monkeypatch, where):
    calls = []

    def attend(q, k, v):
        calls.append(1)
        o = pantile.attention(q, k, v, causal=True)
        if len(calls) == 2:
            o = o * float("nan") if where == "loss" else _Poisoned.apply(o)
        return o

    monkeypatch.setitem(example.ATTENTION, "wrong", (attend, None))
    with pytest.raises(example.NonFiniteStepError) as caught:
        train(example, "wrong")
    said = str(caught.value)
    assert said.startswith("wrong: step 1 has loss ")
    assert "gradient norm nan, which must be finite; first of " in said
    assert ("loss nan" in said) == (where == "loss")
    assert len(calls) == 2  # it did not go on


def test_rounds_of_several_lengths(example, monkeypatch, tmp_path, capsys):
    names = "pantile,pantile-ampere-tensor,math"
    arguments = ["--attention", names, "--contexts", "8,16", "--device", "cpu", "--out"]
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments, str(tmp_path)])
    example.main()
    said = capsys.readouterr().out
    assert said.count("pantile-ampere-tensor left out at context ") == 2  # there is no GPU for it
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [(x["context"], x["attention"]) for x in steps] == [
        (context, name) for context in (8, 16) for name in ("pantile", "math")
    ]
    assert all(x["step_seconds"] > 0 and x["largest_gradient_norm"] > 0 for x in steps)
    assert (tmp_path / "steps.png").stat().st_size > 1000
    for context, batch in ((8, 4), (16, 2)):  # as many tokens a step
        report = json.loads((tmp_path / str(context) / "losses.json").read_text())
        assert (report["context"], report["batch"]) == (context, batch)
        first, second = (run["losses"] for run in report["runs"])
        assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < 1e-4


def test_longest_leaves_an_attention_out(example, monkeypatch, tmp_path, capsys):
    arguments = ["--attention", "pantile,math", "--contexts", "8,16", "--longest", "math=8"]
    monkeypatch.setattr(
        sys, "argv", ["train_gpt.py", *arguments, "--device", "cpu", "--out", str(tmp_path)]
    )
    example.main()
    assert "math left out at context 16: --longest" in capsys.readouterr().out
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    ran = [(x["context"], x["attention"]) for x in steps]
    assert ran == [(8, "pantile"), (8, "math"), (16, "pantile")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--longest", "nothing=8"], "--longest is 'nothing=8'; it must be like math=2048"),
        (["--longest", "math=x"], "--longest is 'math=x'; it must be like math=2048"),
        (["--contexts", "8,x"], "--contexts is '8,x'; it must be numbers above 0"),
        (["--contexts", "8", "--batch", "2"], "takes the place of --context and --batch"),
    ],
)
def test_refusals(example, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    with pytest.raises(SystemExit):
        example.parse_arguments()
    assert message in capsys.readouterr().err
