"""Memory: that results do not depend on what it held, that workspaces are left as plans say, and
benchmarks/memory.py, which shows that ours is linear."""

from __future__ import annotations

import memory
import pantile
import pytest
import torch
from pantile import _C, _runtime, reference
from support import (
    FILLS,
    Dirt,
    Target,
    dense,
    dirty_runs,
    fill,
    gradients,
    on_dirty_memory,
    run_python,
)

pantile.load_torch()

CPU = Target("cpu", "cpu")


# ---- memory that held something else


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_what_memory_held(dtype):
    case = dense(CPU, dtype, rows=60, keys=40, causal=True)  # the first rows see nothing
    grad_o = torch.ones(case.q.shape, dtype=dtype)
    on_dirty_memory(lambda: gradients(case.ours, case.operands, grad_o), "cpu")
    on_dirty_memory(lambda: pantile.attention(*case.operands), "cpu")  # the shortest way
    options = pantile.Options(fp8=True)
    on_dirty_memory(lambda: case.ours(*case.operands, options=options), "cpu")


def test_an_output_that_is_not_written_is_found(monkeypatch):
    case = dense(CPU)
    monkeypatch.setattr(_C, "forward", lambda *_: 0)
    with pytest.raises(AssertionError, match="result 0 differs on memory full of large"):
        on_dirty_memory(lambda: case.ours(*case.operands), "cpu")


@pytest.mark.parametrize("before", [False, True], ids=["behind", "before"])
def test_a_write_beside_an_output_is_found(monkeypatch, before):
    case = dense(CPU)
    real = _C.forward

    def careless(q, k, v, o, *rest):
        at = o.storage_offset() - 1 if before else o.storage_offset() + o.numel()
        torch.empty(0).set_(o.untyped_storage(), at, (1,)).zero_()
        return real(q, k, v, o, *rest)

    monkeypatch.setattr(_C, "forward", careless)
    with pytest.raises(AssertionError, match="a kernel wrote beside a buffer"):
        dirty_runs(lambda: case.ours(*case.operands), "cpu")


def test_every_buffer_of_a_call_is_filled():
    """Outputs of the dispatcher's way, of the short cut, of the bindings', and gradients."""
    case = dense(CPU)
    dirt = Dirt()
    calls = {
        "plain": (lambda: pantile.attention(*case.operands), 1),
        "with LSE": (lambda: case.ours(*case.operands), 2),
        "operator": (lambda: torch.vmap(pantile.attention)(*(x[None] for x in case.operands)), 2),
        "quantize": (lambda: pantile.quantize(*case.operands), 8),
    }
    with dirt.spread():
        for name, (call, count) in calls.items():
            dirt.filled = 0
            call()
            assert dirt.filled >= count, name
    dirt.filled = 0
    pantile.attention(*case.operands)
    torch.empty_like(case.q)
    case.q.new_empty(3)
    assert dirt.filled == 0
    assert "new_empty" not in torch.Tensor.__dict__


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8],
    ids=str,
)
def test_fill_leaves_no_element_out(name, dtype):
    raw = torch.ones(7, dtype.itemsize, dtype=torch.uint8)
    x = raw.view(-1).view(dtype)
    fill(x, name)
    assert (raw != 1).any(1).all()
    if dtype.is_floating_point and dtype.itemsize >= 2:
        assert {"nan": x.isnan(), "inf": x.isinf(), "large": x.isfinite()}[name].all()


# ---- checked workspaces


def test_a_workspace_that_is_not_zero_before_a_run_is_named():
    lender = _runtime.WorkspaceLender()
    key = (0, 1, "forward")
    block = lender.lend("cpu", key, 100, 40)
    block[39] = 1
    assert lender.lend("cpu", key, 100, 40) is block  # nobody looks
    with _runtime.checked_workspaces():
        with pytest.raises(RuntimeError, match=r"forward pass: 1 of the first 40 bytes .* before"):
            lender.lend("cpu", key, 100, 40)
        fresh = lender.lend("cpu", key, 100, 40)  # the block that was wrong is not lent again
        assert fresh is not block
        assert not fresh.any()


def test_a_workspace_that_is_not_zero_after_a_run_is_named(monkeypatch):
    lender = _runtime.WorkspaceLender()
    monkeypatch.setattr(_runtime, "_lender", lender)
    key = (0, 1, "backward")
    block = lender.lend("cpu", key, 100, 8)
    _runtime.check_after_run(block, "backward", 8)
    assert lender.lend("cpu", key, 100, 8) is block
    block[:3] = 7
    with pytest.raises(RuntimeError, match=r"backward pass: 3 of the first 8 bytes .* after"):
        _runtime.check_after_run(block, "backward", 8)
    assert not lender.lend("cpu", key, 100, 8).any()


def test_what_lies_behind_the_zeros_is_filled():
    lender = _runtime.WorkspaceLender()
    with _runtime.checked_workspaces(lambda x: fill(x, "nan")):
        for size, zeroed in ((100, 40), (100, 0), (100, 64), (64, 64), (100, 100), (80, 8)):
            block = lender.lend("cpu", (0, 1, "forward"), size, zeroed)
            assert not block[:zeroed].any()
            assert block[zeroed:size].bool().any() or size == zeroed


def test_the_environment_switches_the_checks_on():
    source = """
        import pantile, torch
        print(pantile._C.checks_workspaces())
        q = torch.randn(1, 300, 2, 32, requires_grad=True)
        pantile.attention(q, q, q, causal=True).sum().backward()
    """
    assert run_python(source, PANTILE_CHECK_WORKSPACE="1").strip() == "True"
    assert run_python(source, PANTILE_CHECK_WORKSPACE="0").strip() == "False"


@pytest.mark.gpu
@pytest.mark.undisturbed
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_counter_that_is_not_zero_is_found_on_the_gpu(fp8):
    """Even where the bindings remember the block that they were lent last."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's forward kernels count")
    q, k, v = (torch.randn(4, 2305, 16, 64, device="cuda").bfloat16() for _ in range(3))
    options = pantile.Options(backend="hopper", fp8=fp8)

    def call():
        return pantile.attention(q, k, v, causal=True, options=options)

    expected = call()
    call()
    key = (q.device.index, torch.cuda.current_stream().cuda_stream, "forward")
    block = _runtime._lender._local.__dict__[key].tensor
    block[0] = 1
    torch.cuda.synchronize()
    with _runtime.checked_workspaces():
        with pytest.raises(RuntimeError, match="workspace of the forward pass"):
            call()
        assert torch.equal(call(), expected)
    assert torch.equal(call(), expected)


# ---- benchmarks/memory.py


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
    small, large = (memory.in_own_process("textbook", n, "cpu") for n in (2048, 4096))
    assert large["peak_bytes"] > 3 * large["matrix_bytes"]
    assert large["peak_bytes"] > 3 * small["peak_bytes"]
    assert ours[1]["peak_bytes"] < large["peak_bytes"]  # four times the tokens, and less memory


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
