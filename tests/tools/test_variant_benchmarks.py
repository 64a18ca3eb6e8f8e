"""benchmarks/variants.py and masks.py end to end, with tiny shapes on the CPU for the GPU."""

from __future__ import annotations

import functools
import json
import sys

import masks
import pytest
import torch
import variants
from pantile.bench import figures, harness, measure, peers
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """What is asked for on a GPU comes on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(x, str) and x == "cuda" else x for x in args)
        return function(*args, **kwargs)


def indices(shape) -> list[torch.Tensor]:
    """b, h, i, j of scores, each of the rank of the scores."""
    return list(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"))


def shown_of(mask_mod, batch, heads, rows: int, keys: int, device="cuda") -> torch.Tensor:
    assert device == "cuda"
    return mask_mod(*indices((batch or 1, heads or 1, rows, keys)))


def flex(q, k, v, score_mod=None, block_mask=None) -> torch.Tensor:
    """FlexAttention by its definition."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if score_mod is not None:
        scores = score_mod(scores, *indices(scores.shape))
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask, -torch.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(peers, "compiled_flex", lambda: (flex, flex_attention))
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    monkeypatch.setattr(flex_attention, "create_block_mask", shown_of)

    def contender(name, call):
        return measure.on_cpu(name, lambda: call(1))

    monkeypatch.setattr(variants, "Contender", contender)
    short = functools.partial(harness.medians, rounds=1, round_ms=0.1)
    monkeypatch.setattr(harness, "medians", short)
    for script in (variants, masks):
        monkeypatch.setattr(script, "SHAPES", ((1, 256),))
        monkeypatch.setattr(script, "HIDDEN", 64)
    with OnCpu():
        yield


def run(monkeypatch, script, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script.__name__}.py", *words])
    script.main()


def test_variants_are_timed_beside_plain_attention_and_peers(cpu_as_gpu, monkeypatch, tmp_path):
    path = tmp_path / "variants.jsonl"
    words = ["--lengths", "256", "--head-dims", "32", "--masks", "causal", "--out", str(path)]
    named = "softcap,ALiBi,dropout,softcap expression,relative expression,sinks"
    run(monkeypatch, variants, *words, "--variants", named, "--passes", "forward")
    header, *lines = figures.read(path)
    assert header["kind"] == "run"
    assert [line["variant"] for line in lines] == named.split(",")
    for line in lines:
        assert set(line["ms"]) | set(line["absent"]) >= {"plain", "pantile", *variants.PEERS}
        if "pantile" in line["ms"]:
            assert line["over_plain"] > 0
            assert line["first_use_s"] >= 0
            assert line["variant"] == "dropout" or line["error"] < 0.02
    found = {line["variant"]: line for line in lines}
    assert "pantile" in found["softcap"]["ms"]
    assert "FlexAttention" in found["softcap"]["ms"]
    assert found["sinks"]["absent"]["FlexAttention"] == "not offered by FlexAttention"
    assert "by hand" in found["softcap expression"]["ms"]
    assert found["softcap expression"]["over_hook"] > 0


def test_gradients_of_variants_are_timed(cpu_as_gpu, monkeypatch, tmp_path):
    path = tmp_path / "variants.jsonl"
    words = ["--lengths", "256", "--head-dims", "32", "--masks", "full", "--out", str(path)]
    named = ["--variants", "softcap,learned bias", "--passes", "backward"]
    run(monkeypatch, variants, *words, *named)
    for line in figures.read(path)[1:]:
        assert {"plain", "pantile"} <= set(line["ms"]), line["absent"]


def test_masks_are_timed_beside_full_attention(cpu_as_gpu, monkeypatch, tmp_path):
    path = tmp_path / "masks.jsonl"
    named = "all,random 0.5,documents,band"
    words = ["--cases", named, "--head-dims", "32", "--passes", "forward", "--out", str(path)]
    run(monkeypatch, masks, *words)
    lines = figures.read(path)[1:]
    assert [line["mask"] for line in lines] == named.split(",")
    for line in lines:
        assert {"full", "pantile", masks.FLEX} <= set(line["ms"]), line["absent"]
        assert line["over_full"] > 0
        assert line["ahead_of_flex"] > 0
    assert lines[-1]["over_window"] > 0


@pytest.mark.parametrize("script", [variants, masks])
def test_warming_times_and_writes_nothing(cpu_as_gpu, monkeypatch, capsys, tmp_path, script):
    path = tmp_path / "x.jsonl"
    some = ["--variants", "softcap"] if script is variants else ["--cases", "band"]
    some += ["--lengths", "256", "--masks", "full"] if script is variants else ["--no-flex"]
    words = ["--head-dims", "32", "--passes", "forward", "--warm", "--out", str(path)]
    run(monkeypatch, script, *some, *words)
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["run", "warm"]
    assert not path.exists()
