"""benchmarks/memory.py: its verdict, and our linear memory on the CPU."""

from __future__ import annotations

import memory
import torch
from pantile import reference


def row(length: int, peak: int, name: str = "pantile") -> dict:
    return {"kind": "memory", "implementation": name, "length": length, "peak_bytes": peak}


def test_only_our_long_sequences_count():
    rows = [
        row(4096, 9 * 4096),
        row(8192, 3 * 8192),
        row(16384, 3 * 16384),
        row(16384, 7, "textbook"),
        {"kind": "absent", "implementation": "pantile", "length": 32768},
    ]
    assert memory.bytes_per_token(rows, "cpu") == [3.0, 3.0]


def test_verdict():
    assert memory.is_linear([100.0, 104.0])
    assert not memory.is_linear([100.0, 106.0])
    assert not memory.is_linear([100.0])


def test_our_step_is_linear_and_the_textbook_is_not():
    ours = [memory.in_own_process("pantile", n, "cpu") for n in (8192, 16384)]
    assert memory.is_linear(memory.bytes_per_token(ours, "cpu"))
    large = memory.in_own_process("textbook", 2048, "cpu")
    assert large["peak_bytes"] > 3 * large["matrix_bytes"]
    assert ours[1]["peak_bytes"] < large["peak_bytes"]


def test_the_textbook_is_causal_attention():
    leaves, grad_o = memory.draw(37, 16, "cpu")
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    found = memory.textbook(*leaves)
    exact, _ = reference.attention(*leaves, causal=True)
    assert reference.error(found, exact) < 1e-12
    for a, b in zip(
        torch.autograd.grad(found, leaves, grad_o.double()),
        torch.autograd.grad(exact, leaves, grad_o.double()),
        strict=True,
    ):
        assert reference.error(a, b) < 1e-12


def test_a_failure_is_a_row_with_its_reason():
    found = memory.in_own_process("pantile", -5, "cpu")
    assert found["kind"] == "absent"
    assert "-5" in found["reason"]
