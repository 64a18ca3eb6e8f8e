"""GPUs that are not here: tiles for less shared memory, and PTX that a later GPU compiles."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pantile
import pytest
import torch
from support import run_python
from test_key_means import DIMS

pytestmark = pytest.mark.gpu
smaller_gpus = pytest.mark.parametrize("kilobytes", [99, 163], ids=["sm_86", "sm_80"])


def ampere_rows() -> list[str]:
    """Rows that can run here; f16 has the tiles of bf16."""
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    sixteen = pantile.build_info()["ampere_on_hopper"] or not on_hopper
    dtypes = ("f32", "bf16") if sixteen else ("f32",)
    return [
        row["name"]
        for row in pantile.kernels()
        if row["backend"] == "ampere" and row["compiled"] and row["dtype"] in dtypes
        # Those that test_kernels.py has.
        if row["pass"] in ("forward", "backward")
    ]


def run_with_shared_memory(kilobytes: int, *arguments: str) -> str:
    """What pytest says of a run in which blocks get no more than that."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**environment, "PANTILE_SHARED_MEMORY_KB": str(kilobytes)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout


@smaller_gpus
def test_tiles_of_smaller_gpus(kilobytes):
    """Every row within the contract's bound, with the tiles it takes where blocks get less: packed
    sequences of lengths around tile edges, under every mask the row has."""
    rows = ampere_rows()
    if not rows:
        pytest.skip("no ampere kernels in this build")
    tests = pathlib.Path(__file__).with_name("test_kernels.py")
    said = run_with_shared_memory(
        kilobytes, *[f"{tests}::test_row_packed_sequences[{row}]" for row in rows]
    )
    assert f"{len(rows)} passed" in said, said[-500:]


@smaller_gpus
def test_keys_with_a_mean_in_tiles_of_smaller_gpus(kilobytes):
    """Where warps share the sums of dS in other ways, or sum all keys of a step."""
    if not any("backward_bf16" in row for row in ampere_rows()):
        pytest.skip("no 16-bit ampere backward in this build, or none that runs here")
    tests = pathlib.Path(__file__).with_name("test_key_means.py")
    said = run_with_shared_memory(
        kilobytes,
        "-k",
        "ampere and bf16 and not f32",
        f"{tests}::test_keys_with_a_mean",
    )
    assert f"{len(DIMS) * 4} passed" in said, said[-500:]  # masks, modes


@smaller_gpus
def test_softmaxes_in_tiles_of_smaller_gpus(kilobytes):
    """auto, tensor and vector, forward and backward, without and with the LSE."""
    if not any("backward_bf16" in row for row in ampere_rows()):
        pytest.skip("no 16-bit ampere backward in this build, or none that runs here")
    tests = pathlib.Path(__file__).with_name("test_tensor_softmax.py")
    said = run_with_shared_memory(kilobytes, f"{tests}::test_both_passes_in_every_tile")
    assert "128 passed, 16 skipped" in said, said[-500:]  # 2 x 2 x 2 x (6 + 6 + 4), and without


@smaller_gpus
def test_variants_in_tiles_of_smaller_gpus(kilobytes):
    """Alone and in pairs."""
    if not any("backward_bf16" in row for row in ampere_rows()):
        pytest.skip("no 16-bit ampere backward in this build, or none that runs here")
    tests = pathlib.Path(__file__).with_name("test_variants.py")
    said = run_with_shared_memory(kilobytes, "-k", "test_dense and ampere and not f32", str(tests))
    assert "52 passed" in said, said[-500:]


def test_shared_memory_is_never_raised():
    source = """
        import pantile
        try:
            pantile.devices()
        except ValueError as error:
            print(error)
    """
    said = run_python(source, PANTILE_SHARED_MEMORY_KB="100000")
    assert "PANTILE_SHARED_MEMORY_KB is '100000'; it must be a number from 1 to" in said


@pytest.mark.ampere
def test_ptx_serves_later_gpus():
    """With CUDA_FORCE_PTX_JIT the driver passes over machine code and compiles the PTX of sm_80.

    No kernel of torch may run: torch has no PTX for this GPU. Hopper kernels have none either,
    which shows that the driver really did look for PTX.
    """
    if not {"ampere_forward_bf16_d64_causal", "ampere_backward_bf16_d64_any"} <= set(ampere_rows()):
        pytest.skip("no ampere kernels in this build")
    if "80" not in pantile.build_info()["architectures"].split("ampere: ")[1].split(",")[0].split():
        pytest.skip("this build has no PTX of sm_80")
    source = """
        import torch
        import pantile
        from pantile import reference
        from pantile._schema import Call

        pantile.load_torch()
        make_zeros = torch.zeros
        torch.zeros = lambda *size, device=None, **rest: make_zeros(*size, **rest).to(device)
        torch.manual_seed(0)
        q, k, v, grad_o = (torch.randn(1, 200, 2, 64).bfloat16() for _ in range(4))
        settings = Call(window_right=0, backend="ampere")
        on_gpu = [x.cuda() for x in (q, k, v)]
        o, lse, o_low = torch.ops.pantile.forward(*on_gpu, *settings, False, False, True)
        grads = torch.ops.pantile.backward(
            grad_o.cuda(), None, *on_gpu, o, o_low, lse, *settings, False)

        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        truth, _ = reference.attention(*leaves, causal=True)
        expected = [truth, *torch.autograd.grad(truth, leaves, grad_o.double())]
        for ours, exact in zip([o, *grads], expected):
            error = (ours.cpu().double() - exact).abs().max()
            assert error < 0.02 * exact.abs().max(), error
        try:
            hopper = settings._replace(backend="hopper")
            torch.ops.pantile.forward(*on_gpu, *hopper, False, False, False)
            torch.cuda.synchronize()
            print("hopper ran")
        except (RuntimeError, NotImplementedError) as error:
            print("hopper did not:", error)
        print("within bounds")
    """
    said = run_python(source, CUDA_FORCE_PTX_JIT="1", CUDA_CACHE_DISABLE="1", timeout=300)
    assert "within bounds" in said
    assert "hopper ran" not in said, said
