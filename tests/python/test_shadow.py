"""pantile.shadow: sampled calls compared with the textbook, and what is said of them.

Right kernels stay below the bound in every mask, variant and layout; a wrong one does not. The
textbook of the shadow is itself compared with that of pantile.reference by the errors it finds.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import pantile
import pytest
import torch
from pantile import _direct, _ops, _watch
from pantile._shadow import _Sampler
from support import Target, packed
from torch._dynamo.testing import CompileCounterWithBackend

CPU = Target("cpu", "cpu")


def operands(rows=70, keys=90, dtype=torch.bfloat16, heads=4, heads_k=2, dim=32, device="cpu"):
    generator = torch.Generator().manual_seed(rows)
    shapes = (2, rows, heads, dim), (2, keys, heads_k, dim), (2, keys, heads_k, dim)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in tensors]


def step(call=pantile.attention, tensors=None, **arguments):
    tensors = operands() if tensors is None else tensors
    o = call(*tensors, **arguments)
    o = o[0] if isinstance(o, tuple) else o
    o.backward(torch.ones_like(o) + o.detach())


def table(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def bits(*shape):
    return table(*shape) < 0.5


def ids(*shape):
    return (table(*shape) * 4).to(torch.int32)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "lse": {"return_lse": True},
    "float32 output": {"options": pantile.Options(output_dtype="float32")},
    "reference": {"options": pantile.Options(backend="reference")},
    "deterministic": {"deterministic": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi": table(2, 4)},
    "bias": {"bias": table(1, 4, 70, 90).bfloat16()},
    "sinks": {"sinks": table(4)},
    "dropout": {"dropout": pantile.Dropout(0.3, seed=5, query_offset=7)},
    "mask": {"mask": bits(1, 1, 70, 90)},
    "documents": {"mask": pantile.Documents(ids(2, 70), ids(2, 90)), "causal": True},
    "clauses": {
        "mask": pantile.Documents(ids(2, 70), ids(2, 90)) & bits(2, 4, 70, 90)
        | pantile.Prefix(torch.tensor([5, 40], dtype=torch.int32)),
    },
    "blocks": {"mask": pantile.BlockMask(bits(2, 4, 2, 2), block=64)},
    "score": {
        "score": pantile.Score(
            "d = max(i - j, 0); s - rate[h] * log(1 + d) + (1 if j % 7 == 2 else 0.5) * tanh(s)",
            rate=table(4),
        )
    },
    "expression": {
        "mask": pantile.Mask(
            "i - j // 2 < width[h] and not (j == 3 or i % 5 == 1)",
            width=torch.tensor([3, 9, 40, 100], dtype=torch.int32),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_right_kernels_stay_below_the_bound(name):
    with pantile.shadow(rate=1.0, rows=70) as watch:
        step(**CASES[name])
    report = watch.report
    assert (report.forward_calls, report.backward_calls, report.compared) == (1, 1, 2)
    assert set(report.worst) == {"o", "lse", "dq", "dk", "dv"}
    assert report.good, report
    if name != "zero scale":
        assert 0 < report.worst["o"].ratio < 1, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_that_of_float64(dtype):
    """With all rows of the one head, it is what pantile.reference.error finds."""
    q, k, v = (x.detach()[:1, :, :1] for x in operands(dtype=dtype))
    with pantile.shadow(rate=1.0, rows=70) as watch:
        o = pantile.attention(q, k, v, causal=True)
    exact, _ = pantile.reference.attention(q, k, v, causal=True)
    worst = watch.report.worst["o"]
    assert worst.error <= pantile.reference.error(o, exact) + 1e-12
    difference = (o.double() - exact).abs()
    assert float((difference - worst.error).abs().min()) < 1e-9  # one of its errors
    assert worst.ratio > (0.1 if dtype is not torch.float32 else 0.001)  # the bound is not idle


def test_padded_head_dims_and_strides():
    q, k, v = (x.detach()[..., :29] for x in operands())
    with pantile.shadow(rate=1.0) as watch:
        pantile.attention(q, k, v)
        pantile.attention(*(x.expand(2, -1, -1, -1) for x in (q[:1], k[:1], v[:1])))
        out = torch.empty(2, 70, 4, 32, dtype=torch.bfloat16)[..., :29]
        pantile.attention(q, k, v, out=out)
    assert watch.report.compared == 3
    assert watch.report.good, watch.report


def test_packed_layouts():
    case = packed(CPU, [30, 0, 41], [50, 8, 41], dtype=torch.bfloat16, causal=True)
    used = torch.tensor([20, 0, 41], dtype=torch.int32)
    begins = torch.tensor([3, 0, 40], dtype=torch.int32)
    shift = torch.tensor([9, 0, 2], dtype=torch.int32)
    offsets = case.lengths[0]
    with pantile.shadow(rate=1.0, rows=64) as watch:
        for _ in range(4):  # each draws a sequence
            leaves = [x.detach().requires_grad_() for x in case.operands]
            step(case.ours, leaves)
            step(case.ours, leaves, seqused_k=used, seqused_q=used)
            with torch.no_grad():
                pantile.varlen_attention(
                    *(case.q, case.k, case.v, offsets, None, *case.longest),
                    k_begin=begins,
                    seqused_k=used,
                    mask_shift=shift,
                    causal=True,
                )
                pages = [x[:96].reshape(6, 16, 2, 64) for x in (case.k, case.v)]
                where = torch.tensor([[3, 1], [0, 0], [5, 2]], dtype=torch.int32)
                length = torch.tensor([25, 0, 32], dtype=torch.int32)
                pantile.varlen_attention(
                    *(case.q, *pages, offsets, None, 41, 32),
                    block_table=where,
                    seqused_k=length,
                    alibi=table(4),
                )
    report = watch.report
    assert report.forward_calls == 16
    assert report.compared > 8
    assert report.good, report


class _Wrong:
    """The bindings, with results that ``spoil`` has had its hands on."""

    def __init__(self, whole, spoil) -> None:
        self._whole, self._spoil = whole, spoil

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def attend(self, q, k, v, call):
        o = self._whole.attend(q, k, v, call)
        if o is not None and o is not True:  # True: autograd must record the call
            self._spoil("o", o)
        return o

    def attend_recorded(self, *arguments):
        kept = self._whole.attend_recorded(*arguments)
        if kept is not None:
            self._spoil("o", kept[0])
            self._spoil("lse", kept[2])
        return kept

    def gradients(self, *arguments):
        grads = self._whole.gradients(*arguments)
        for name, x in zip(("dq", "dk", "dv"), grads or (), strict=False):
            self._spoil(name, x)
        return grads

    def forward(self, q, k, v, o, lse, *rest):
        answer = self._whole.forward(q, k, v, o, lse, *rest)
        self._spoil("o", o)
        if lse is not None:
            self._spoil("lse", lse)
        return answer

    def backward(self, *arguments):
        answer = self._whole.backward(*arguments)
        for name, x in zip(("dq", "dk", "dv"), arguments[8:11], strict=True):
            self._spoil(name, x)
        return answer


def spoil_bindings(monkeypatch, spoil) -> None:
    for module in (_ops, _direct):
        monkeypatch.setattr(module, "_C", _Wrong(module._C, spoil))


@pytest.mark.parametrize("wrong", ["o", "lse", "dq", "dk", "dv"])
def test_a_wrong_output_is_reported(monkeypatch, caplog, wrong):
    spoil_bindings(monkeypatch, lambda name, x: x.mul_(1.05) if name == wrong else x)
    with caplog.at_level(logging.WARNING, "pantile"), pantile.shadow(rate=1.0) as watch:
        step(causal=True)
    report = watch.report
    assert report.outside == 1, report
    assert not report.good
    assert report.worst[wrong].ratio > 1
    assert any(f"shadow: {wrong} of q [2, 70, 4, 32] bfloat16" in x for x in caplog.messages)


def test_a_wrong_output_of_the_shortest_way_is_reported(monkeypatch):
    spoil_bindings(monkeypatch, lambda name, x: x.add_(0.1))
    q, k, v = (x.detach() for x in operands())
    with pantile.shadow(rate=1.0) as watch:
        pantile.attention(q, k, v)
    assert watch.report.outside == 1, watch.report


def test_non_finite_values_are_reported_wherever_they_are(monkeypatch, caplog):
    """Of the whole output, not of the sampled rows alone."""

    def spoil(name, x):
        if name == "o":
            x[1, 69, 3, 31] = float("nan")

    spoil_bindings(monkeypatch, spoil)
    q, k, v = (x.detach() for x in operands())
    with caplog.at_level(logging.WARNING, "pantile"), pantile.shadow(1.0, rows=1) as watch:
        pantile.attention(q, k, v)
    assert watch.report.non_finite == 1
    assert not watch.report.good
    assert "1 values are NaN or infinite" in caplog.text


def test_hidden_values_that_are_not_finite_do_not_matter():
    q, k, v = (x.detach() for x in operands())
    mask = torch.ones(90, dtype=torch.bool)
    mask[40:] = False
    k[:, 40:], v[:, 40:] = float("nan"), float("inf")
    with pantile.shadow(rate=1.0, rows=70) as watch:
        step(tensors=[x.requires_grad_() for x in (q, k, v)], mask=mask.expand(1, 1, 70, 90))
    assert watch.report.compared == 2
    assert watch.report.good, watch.report


def test_sampling_by_a_seed():
    def sampled(seed, rate=0.05, calls=2000):
        sampler = _Sampler(rate, f"{seed} forward")
        return [call for call in range(calls) if sampler.due()]

    assert sampled(3) == sampled(3) != sampled(4)
    assert 60 < len(sampled(3)) < 140
    assert sampled(1, rate=0.0) == []
    assert len(sampled(1, rate=1.0)) == 2000
    gaps = np.diff(sampled(7, calls=20000))
    assert gaps.min() == 1
    assert 15 < gaps.mean() < 25


def test_seed_decides_which_calls_are_compared():
    q, k, v = (x.detach() for x in operands(rows=5, keys=6))
    counts = []
    for seed in (0, 0, 1):
        with pantile.shadow(rate=0.3, seed=seed) as watch:
            seen = []
            for _ in range(40):
                pantile.attention(q, k, v)
                seen.append(watch.report.compared)
        counts.append(seen)
    assert counts[0] == counts[1] != counts[2]
    assert 2 < counts[0][-1] < 30


def test_nested_and_closed():
    q, k, v = (x.detach() for x in operands())
    with pantile.shadow(rate=1.0) as outer:
        with pantile.shadow(rate=0.0) as inner:
            pantile.attention(q, k, v)
            with pytest.raises(RuntimeError, match="open already"), inner:
                pass
            assert _watch.watchers == (outer, inner)
        pantile.attention(q, k, v)
    pantile.attention(q, k, v)
    assert outer.report.compared == outer.report.forward_calls == 2
    assert (inner.report.forward_calls, inner.report.compared) == (1, 0)
    assert _watch.watchers == ()
    assert _ops.plain_attention is _ops._plain_attention  # nothing is left of it


def test_nothing_is_left_after_an_error():
    with pytest.raises(ValueError, match="scale"), pantile.shadow():
        pantile.attention(*operands(), scale=float("nan"))
    assert _watch.watchers == ()
    assert _ops.plain_attention is _ops._plain_attention


def test_threads():
    q, k, v = (x.detach() for x in operands(rows=9, keys=9))

    def work():
        for _ in range(20):
            pantile.attention(q, k, v)

    with pantile.shadow(rate=1.0, rows=2) as watch:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.report.compared == watch.report.forward_calls == 80
    assert watch.report.good, watch.report


def test_autocast():
    tensors = [x.detach().float().requires_grad_() for x in operands()]
    with pantile.shadow(rate=1.0) as watch, torch.autocast("cpu", torch.bfloat16):
        step(tensors=tensors)
    assert watch.report.compared == 2
    assert watch.report.good, watch.report


def test_compiled_programs_are_compared_when_they_run():
    """The operators run as ever: a program that was compiled before is looked at, and opening a
    shadow compiles nothing again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: pantile.attention(q, k, v, causal=True), backend=counter, fullgraph=True
    )
    tensors = operands()
    step(compiled, tensors)
    before = counter.frame_count
    with pantile.shadow(rate=1.0) as watch:
        step(compiled, tensors)
    assert counter.frame_count == before
    assert watch.report.compared == 2
    assert watch.report.good, watch.report


def test_what_is_not_compared_is_named(caplog):
    q, k, v = (x.detach() for x in operands())
    arrays = [x.float().numpy() for x in (q, k, v)]
    with caplog.at_level(logging.WARNING, "pantile"), pantile.shadow(rate=1.0) as watch:
        for _ in range(2):
            pantile.attention(*arrays)
        pantile.attention(q, k, v, options=pantile.Options(fp8=True))
        pantile.attention(q, k, v, options=pantile.Options(backend="torch"))
        cache = pantile.KVCache(k.clone(), v.clone())
        pantile.decode(q[:, :1], cache, torch.tensor([50, 90], dtype=torch.int32))
    assert watch.report.skipped == {
        "NumPy arrays": 2,
        "FP8 attention": 1,
        "backend torch": 1,
        "decode": 1,
    }
    assert watch.report.compared == 0
    assert caplog.text.count("not compared: NumPy arrays") == 1  # said once


def test_captured_calls_are_not_read(monkeypatch):
    """As if a CUDA graph were being captured: nothing of the textbook may run."""
    from pantile import _runtime, _shadow_reference

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(_runtime, "is_capturing", lambda: True)
    monkeypatch.setattr(_shadow_reference.Place, "drawn", None)  # a call would fail
    with pantile.shadow(rate=1.0) as watch:
        watch.forward(OnGpu(), None, None, None, None, None, None)
        watch.backward(OnGpu(), *[None] * 6)
    assert watch.report.skipped == {"calls captured into a CUDA graph": 2}


def test_gradients_can_be_left_out():
    with pantile.shadow(rate=1.0, gradients=False) as watch:
        step()
    assert watch.report.backward_calls == 1
    assert watch.report.compared == 1
    assert "dq" not in watch.report.worst


def test_empty_calls():
    with pantile.shadow(rate=1.0) as watch:
        pantile.attention(*(x.detach() for x in operands(rows=0)))
        pantile.attention(*(x.detach() for x in operands(keys=0)))
    assert watch.report.forward_calls == 2
    assert watch.report.good, watch.report


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rate": 1.5}, ValueError, "rate is 1.5; it must be from 0 to 1"),
        ({"rate": "much"}, TypeError, "rate is 'much'; it must be a real number"),
        ({"rows": 0}, ValueError, "rows is 0; it must be from 1 to 1024"),
        ({"seed": 0.5}, TypeError, "seed is 0.5; it must be an integer"),
        ({"gradients": 1}, TypeError, "gradients is 1; it must be True or False"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        pantile.shadow(**arguments)


def test_summary_is_logged(caplog):
    with caplog.at_level(logging.INFO, "pantile"), pantile.shadow(rate=1.0):
        step()
    assert "2 of 1 forward and 1 backward calls compared; o " in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(name, dtype):
    arguments = {
        key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in CASES[name].items()
    }
    mask, score = arguments.get("mask"), arguments.get("score")
    if isinstance(mask, pantile.Documents):
        arguments["mask"] = pantile.Documents(mask.ids.cuda(), mask.key_ids.cuda())
    elif isinstance(mask, pantile.BlockMask):
        arguments["mask"] = pantile.BlockMask(mask.blocks.cuda(), block=mask.block)
    elif (mask is not None and not isinstance(mask, torch.Tensor)) or score is not None:
        pytest.skip("captures tensors of the CPU")
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].to(dtype)
    tensors = operands(dtype=dtype, dim=64, device="cuda")
    try:
        with pantile.shadow(rate=1.0, rows=70) as watch:
            step(tensors=tensors, **arguments)
    except pantile.UnsupportedError as refused:
        pytest.skip(str(refused))
    assert watch.report.compared >= 2
    assert watch.report.good, watch.report


@pytest.mark.gpu
def test_graph_capture_on_a_gpu():
    q, k, v = (x.detach() for x in operands(device="cuda", dim=64))
    pantile.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with pantile.shadow(rate=1.0) as watch:
        with torch.cuda.graph(graph):
            o = pantile.attention(q, k, v)
        graph.replay()
        expected = pantile.attention(q, k, v)
    assert torch.equal(o, expected)
    assert watch.report.skipped == {"calls captured into a CUDA graph": 1}
    assert watch.report.compared == 1
