"""A training step through attention, on every device: compiled, captured in a CUDA graph,
checkpointed, under autocast, accumulated over microbatches, counted by torch's FLOP counter.

The gradients are asked for in deterministic mode, so that equal work must give equal bits."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import assert_same_bits, bits
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pantile.load_torch()

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEAD_DIMS = [64, 128, 256]
HEADS, KEY_HEADS = 4, 2
NAMES = ("y", "dx", "d inner", "d outer")

pytestmark = pytest.mark.parametrize("device", DEVICES)


class Block(torch.nn.Module):
    """Projections around causal grouped-query attention."""

    def __init__(self, head_dim: int = 64) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.inner = torch.nn.Linear(32, (HEADS + 2 * KEY_HEADS) * head_dim, bias=False)
        self.outer = torch.nn.Linear(HEADS * head_dim, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.inner(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = packed.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)  # strided views
        o = pantile.attention(q, k, v, causal=True, deterministic=True)
        return self.outer(o.flatten(2))


def block(device: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Block:
    torch.manual_seed(0)
    return Block(head_dim).to(device, dtype)


def rows(device: str, batch: int = 2, length: int = 200, dtype: torch.dtype = torch.bfloat16):
    length = length if device == "cuda" else 20
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1)).to(
        device, dtype
    )


def gradients(module: Block, function, x: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients of a loss of ``function(x)``, with respect to x and the parameters."""
    x = x.detach().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_compiled_step(device, head_dim):
    """fullgraph: forward and backward without a graph break."""
    torch._dynamo.reset()
    module = block(device, head_dim)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = rows(device)
    for a, b in zip(gradients(module, compiled, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_step(device, head_dim, reentrant):
    module = block(device, head_dim)
    x = rows(device)
    again = gradients_through_backward(
        module, lambda t: checkpoint(module, t, use_reentrant=reentrant), x
    )
    assert_same_bits(again, gradients_through_backward(module, module, x), NAMES)


def gradients_through_backward(module: Block, function, x: torch.Tensor) -> list[torch.Tensor]:
    """Like ``gradients``, by backward(): what a reentrant checkpoint needs."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = function(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_step(device, dtype):
    """fp32 parameters: attention runs in the autocast dtype, gradients come back in fp32."""
    module = block(device, dtype=torch.float32)
    x = rows(device, dtype=torch.float32)

    def function(t):
        with torch.autocast(device, dtype=dtype):
            y = module(t)
        assert y.dtype == dtype
        return y

    found = gradients(module, function, x)[1:]
    assert {g.dtype for g in found} == {torch.float32}
    if device == "cpu":
        for a, b in zip(found, gradients(module, module, x)[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * b.abs().max().item())
    assert all(g.isfinite().all() for g in found)
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_microbatches_add_up(device, head_dim):
    """Every sequence's gradient is the same bits alone and in a batch, and backward() adds to
    .grad instead of replacing it."""
    module = block(device, head_dim)
    x = rows(device, batch=4)
    whole = gradients(module, module, x)[:2]
    module.zero_grad()
    alone, sums = [], None
    for part in x.split(1):
        leaf = part.detach().requires_grad_()
        y = module(leaf)
        before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        single = torch.autograd.grad(
            y.float().square().sum(), [leaf, *module.parameters()], retain_graph=True
        )
        y.float().square().sum().backward()
        sums = [g if b is None else b + g for b, g in zip(before, single[1:], strict=True)]
        alone.append((y, leaf.grad))
        assert torch.equal(bits(leaf.grad), bits(single[0]))
    assert_same_bits([p.grad for p in module.parameters()], sums, NAMES[2:])
    for a, b in zip(whole, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(a, torch.cat(b), rtol=2e-2, atol=2e-2)


def test_flops_of_a_step(device):
    """Forward: 4 operations a visible pair and element; backward 2.5 times that."""
    q, k, v = (
        torch.randn(2, 128, h, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    with FlopCounterMode(display=False) as counter:
        pantile.attention(q, k, v, causal=True).float().sum().backward()
    found = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    pairs = 2 * HEADS * (128 * 129 // 2)
    assert found == {"pantile.forward": 4 * pairs * 64, "pantile.backward": 10 * pairs * 64}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_step(device, head_dim, deterministic):
    """Forward and backward in one CUDA graph: replays follow the inputs' new values."""
    if device == "cpu":
        pytest.skip("CUDA graphs are a matter of the GPU")
    shapes = [(2, 300, h, head_dim) for h in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    static = [torch.randn(s, device=device, dtype=torch.bfloat16) for s in shapes]
    leaves = [x.requires_grad_() for x in static[:3]]
    grad_o = static[3]

    def step(q, k, v, gradient):
        o = pantile.attention(q, k, v, causal=True, deterministic=deterministic)
        return [o, *torch.autograd.grad(o, (q, k, v), gradient)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(*leaves, grad_o)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*leaves, grad_o)
    for seed in range(3):
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for x in static:
                x.copy_(torch.randn(x.shape, generator=generator, device=device))
        graph.replay()
        torch.cuda.synchronize()
        expected = step(*(x.detach().clone().requires_grad_() for x in leaves), grad_o)
        if deterministic:
            assert_same_bits(captured, expected, ("o", "dq", "dk", "dv"))
        for a, b in zip(captured, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
