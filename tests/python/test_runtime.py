"""What ties the bindings to torch: thread counts, forks, workspaces, older torch, import order."""

from __future__ import annotations

import math
import os
import pathlib
import re
import shutil
import subprocess
import threading

import numpy
import pantile
import pytest
import torch
from pantile import _C, _runtime
from pantile._schema import CALL_FIELDS, Call, Variant, bind, call_stub
from support import HERE, run_python

# ---- workspaces of CUDA runs; the lender works on any device


def test_runs_of_one_stream_share_a_block():
    lender = _runtime.WorkspaceLender()
    first = lender.lend("cpu", (0, 1, "forward"), 1000, 0)
    assert first.numel() >= 1000
    assert lender.lend("cpu", (0, 1, "forward"), 500, 0) is first
    assert lender.lend("cpu", (0, 2, "forward"), 500, 0) is not first
    assert lender.lend("cpu", (1, 1, "forward"), 500, 0) is not first
    assert lender.lend("cpu", (0, 1, "backward"), 500, 0) is not first


def test_threads_do_not_share_a_block():
    lender = _runtime.WorkspaceLender()
    blocks = []

    def work():
        blocks.append(lender.lend("cpu", (0, 1, "forward"), 100, 0))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert blocks[0] is not blocks[1]


@pytest.mark.parametrize("seed", range(20))
def test_first_bytes_are_zero_for_every_sequence_of_plans(seed):
    """A plan finds its zeroed bytes zero, whatever the plans before it wrote behind theirs."""
    generator = torch.Generator().manual_seed(seed)
    lender = _runtime.WorkspaceLender()
    for _ in range(50):
        size, zeroed = (int(x) for x in torch.randint(0, 300, (2,), generator=generator))
        size, zeroed = max(size, zeroed), min(size, zeroed)
        block = lender.lend("cpu", ("key",), size, zeroed)
        assert block.numel() >= size
        assert not block[:zeroed].any()
        block[zeroed:size] = 255  # what a kernel may leave


def test_equal_plans_are_not_cleared_again():
    lender = _runtime.WorkspaceLender()
    block = lender.lend("cpu", ("key",), 100, 40)
    version = block._version
    for _ in range(3):
        assert lender.lend("cpu", ("key",), 100, 40) is block
    assert block._version == version


# ---- threads


def test_thread_count_follows_torch():
    output = run_python(
        """
        import torch, pantile
        pantile.load_torch()
        for n in (1, 3, 2):
            torch.set_num_threads(n)
            print(pantile.devices()[0]["threads"])
        """
    )
    assert output.split() == ["1", "3", "2"]


LARGE_CALL = """
import torch, pantile
torch.set_num_threads(2)
q, k, v = (torch.randn(2, 256, 8, 64, requires_grad=True) for _ in range(3))
gradient = torch.randn(q.shape)

def call():
    o = pantile.attention(q, k, v, causal=True)
    return [x.detach().numpy() for x in (o, *torch.autograd.grad(o, (q, k, v), gradient))]
"""


def test_fork_after_a_threaded_call():
    """A child has none of its parent's threads, and must not wait for them.

    torch's own parallel loops do hang in such a child, so it runs nothing but attention.
    """
    output = run_python(
        LARGE_CALL
        + """
import os
import numpy as np

def same():
    return all(np.array_equal(a, b) for a, b in zip(before, call(), strict=True))

before = call()
child = os.fork()
if child == 0:
    os._exit(0 if same() else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), same())
""",
        timeout=60,
    )
    assert output.split() == ["0", "True"]


def test_fork_after_a_threaded_numpy_call():
    """The library's own pool, without torch."""
    output = run_python(
        """
import os
import numpy as np, pantile
pantile._C.set_cpu_threads(2)
q = np.random.default_rng(0).standard_normal((2, 256, 8, 64)).astype(np.float32)
before = pantile.attention(q, q, q)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(before, pantile.attention(q, q, q)) else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), np.array_equal(before, pantile.attention(q, q, q)))
"""
    )
    assert output.split() == ["0", "True"]


def test_data_loader_workers():
    output = run_python(
        LARGE_CALL
        + """
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.full((1, 200, 8, 64), float(index))
        return pantile.attention(x, x, x).mean()

call()
print([round(float(x), 3) for x in DataLoader(Items(), batch_size=None, num_workers=2)])
"""
    )
    assert output.strip() == "[0.0, 1.0, 2.0, 3.0]"


# ---- the end of the process


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_exit_while_a_daemon_thread_is_inside_a_call(library):
    """The thread must not take the GIL of an interpreter that goes away: that ended in abort."""
    output = run_python(
        f"""
        import atexit, threading, time
        import {library}, pantile

        pantile._C.set_cpu_threads(1)
        # Some tenths of a second a call: the threads are inside one when the interpreter ends, and
        # not inside torch, which does not survive that, and come out of it while it ends.
        x = {library}.ones((1, 4000, 8, 64), dtype={library}.float32)
        entered = threading.Event()

        def work():
            while True:
                entered.set()
                pantile.attention(x, x, x)

        class Slow:
            def __del__(self):  # runs while the interpreter is finalizing, and takes its time
                end = time.monotonic() + 0.7
                while time.monotonic() < end:
                    time.sleep(0.01)

        keep = Slow()
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        entered.wait()
        time.sleep(0.1)
        print("done", flush=True)
        """
    )
    assert output.split() == ["done"]


@pytest.mark.parametrize("waits", [False, True], ids=["outside", "inside"])
def test_exit_while_a_daemon_thread_logs(tmp_path, waits):
    """A thread that compiles a kernel takes the GIL to log, or loses it inside the logger, while
    the interpreter ends: that was "terminate called without an active exception"."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler for a library that pretends to be NVRTC")
    source = pathlib.Path(HERE).parent / "jit" / "fake_nvrtc.cc"
    version = ["-DFAKE_MAJOR=13", "-DFAKE_MINOR=0"]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *version, str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "libnvrtc.so.13")], check=True)
    output = run_python(
        """
        import sys, threading, time
        from pantile import _C

        folder, waits = sys.argv[1], sys.argv[2] == "True"
        entered = threading.Event()

        def log(level, text):
            entered.set()
            if waits:
                time.sleep(0.3)

        _C.set_jit(folder, "", log)

        def work():
            while True:
                try:
                    _C.compile_kernel("k", "broken slow", "k", 90, folder + "/made")
                except Exception:
                    pass  # the source is broken: that is what is logged

        class Slow:
            def __del__(self):  # runs while the interpreter is finalizing, and takes its time
                end = time.monotonic() + 0.7
                while time.monotonic() < end:
                    time.sleep(0.01)

        keep = Slow()
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        assert entered.wait(60)
        time.sleep(0.1)
        print("done", flush=True)
        """,
        *(str(tmp_path), str(waits)),
    )
    assert output.split() == ["done"]


# ---- locales


def comma_locale(folder: pathlib.Path) -> str:
    """A locale whose decimal point is a comma, made of glibc's C.utf8; its name under LOCPATH."""
    source = pathlib.Path("/usr/lib/locale/C.utf8/LC_NUMERIC")
    if not source.exists():
        pytest.skip(f"no {source} to make a locale of")
    made = folder / "comma"
    made.mkdir()
    (made / "LC_NUMERIC").write_bytes(source.read_bytes().replace(b".", b","))
    return "comma"


def test_options_in_a_locale_with_decimal_commas(tmp_path):
    """C's own conversions read 2.5 as 2 there."""
    output = run_python(
        f"""
        import locale
        import numpy, pantile

        locale.setlocale(locale.LC_NUMERIC, "{comma_locale(tmp_path)}")
        print(locale.localeconv()["decimal_point"])
        q = numpy.ones((1, 3, 1, 8), numpy.float32)
        softmax = pantile.experimental.SoftmaxOptions(
            "vector", rescale_threshold=2.5, p_max_offset=0.25, min_exponent_log2=-0.5
        )
        options = pantile.Options(softmax=softmax)
        print(options.call_fields[False][-4:])
        print(pantile.explain(q, q, q, options=options).forward.softmax)
        """,
        LOCPATH=str(tmp_path),
    )
    point, fields, softmax = output.splitlines()
    assert point == ","
    assert fields == "(2.5, 0.25, -0.5, False)"
    assert softmax.endswith(("rescale threshold 2.5", "rescale threshold 2,5"))  # printf follows it


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("backend", "ampere;tensor", "backend is 'ampere;tensor'; it must be one of auto, hopper,"),
        ("backend", "", "backend is ''; it must be one of auto, hopper, ampere, cpu, reference"),
        ("float32_precision", "high", "float32_precision is 'high'; it must be one of auto, high"),
        ("softmax", "gpu", "softmax is 'gpu'; it must be one of auto, vector, tensor"),
        ("softmax_mode", "paper", "softmax_mode is 'paper'; it must be one of exact, surrogate,"),
        ("tensor_share", 0.3, "tensor_share is 0.3; it must be one of 0, 0.25, 0.5, 1, or None"),
        ("tensor_share", math.nan, "tensor_share is nan; it must be one of 0, 0.25, 0.5, 1, or"),
        ("tensor_split", "heads", "tensor_split is 'heads'; it must be one of keys, rows"),
        ("rescale_threshold", 1e300, "rescale_threshold is inf; it must be from 0 to 15"),
        ("rescale_threshold", math.nan, "rescale_threshold is nan; it must be from 0 to 15"),
        ("p_max_offset", -1.0, "p_max_offset is -1; with rescale_threshold 8 it must be from 0"),
        ("min_exponent_log2", 1.0, "min_exponent_log2 is 1; it must be from -126 to 0"),
        ("scale", math.inf, "scale is inf; it must be finite"),
        ("window_left", -2, "window_left is -2; it must be "),
    ],
)
def test_the_operators_check_each_field(field, value, message):
    """They can be called without the functions in front of them, in a traced program too."""
    pantile.load_torch()
    for device in ("cpu", "meta"):
        q = torch.ones(1, 3, 1, 8, device=device)
        call = Call(**{field: value})
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            torch.ops.pantile.forward(q, q, q, *call, False, False, False)


WRONG_TYPES = {int: ("4", 1.5, None), str: (None, 3), bool: (1, None), float: ("4", None, True)}


@pytest.mark.parametrize("field", Call._fields)
def test_the_bindings_name_a_field_of_the_wrong_type(field):
    kinds = {"SymInt": int, "int": int, "float": float, "float?": float, "str": str, "bool": bool}
    kind = next(x.kind for x in CALL_FIELDS if x.name == field)
    if kind == "Tensor?":
        q = numpy.ones((3, 1, 8), numpy.float32)
        bounds = numpy.array([0, 3], numpy.int32)
        packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 3}
        if field in ("k_begin", "block_table"):  # in place of cu_seqlens_k
            packing |= {"cu_seqlens_k": None, "seqused_k": numpy.array([3], numpy.int32)}
        k = q[None] if field == "block_table" else q
        call = bind(Call(**packing, max_seqlen_k=3)._replace(**{field: "text"}))
        with pytest.raises(TypeError, match=f"^{field}: expected a tensor or an array, got"):
            _C.explain(q, k, k, call, False)
        return
    for value in WRONG_TYPES[kinds[kind]]:
        if kind.endswith("?") and value is None:
            continue
        with pytest.raises((TypeError, ValueError), match=rf"^{field} is .*; it must be"):
            bind(Call(**{field: value}))


def test_one_list_of_fields():
    """That of the bindings, of the operators, and of the stub is pantile._schema's."""
    pantile.load_torch()
    assert _C.Call._fields == Call._fields
    call = Call(scale=0.5, tensor_share=0.25, float32_precision="tf32", exact_lse=True)
    assert tuple(bind(call)) == tuple(call)
    assert [getattr(bind(call), name) for name in Call._fields] == list(call)
    assert tuple(bind(call)._replace(scale=None, max_seqlen_k=4)) == tuple(
        call._replace(scale=None, max_seqlen_k=4)
    )
    with pytest.raises(TypeError, match=r"no such field: {'scales': 1}"):
        bind(call)._replace(scales=1)
    with pytest.raises(TypeError, match=f"a call has {len(Call._fields)} fields; 3 were given"):
        _C.Call(1, 2, 3)
    schema = torch.ops.pantile.forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[3 : 3 + len(Call._fields)] == list(Call._fields)
    assert Variant._fields == _C.VARIANT_FIELDS
    schema = torch.ops.pantile.forward_variant.default._schema
    names = [argument.name for argument in schema.arguments]
    assert tuple(x for x in names if x in Variant._fields) == Variant._fields
    stub = pathlib.Path(pantile.__file__).with_name("_C.pyi").read_text()
    assert call_stub() in stub, f"_C.pyi must hold\n{call_stub()}"


# ---- torch before 2.11


def test_without_the_exchange_table():
    """Tensors read through their attributes give the same bits, and the same messages."""
    output = run_python(
        """
        import torch, pantile
        from pantile import _C, _runtime
        pantile.load_torch()

        def run():
            results, errors = [], []
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                torch.manual_seed(0)
                q, k, v = (torch.randn(2, n, 4, 16).to(dtype).requires_grad_() for n in (9, 13, 13))
                o, lse = pantile.attention(q, k, v, causal=True, return_lse=True)
                results += [o, lse, *torch.autograd.grad(o.float().sum() + lse.sum(), (q, k, v))]
                results.append(pantile.attention(*(x.transpose(0, 2) for x in (q, k, v))))
            for bad in (lambda: pantile.attention(q.double(), k, v),
                        lambda: pantile.attention(q, k[0], v),
                        lambda: pantile.attention(q, k, v.to(torch.float8_e4m3fn))):
                try:
                    bad()
                except (TypeError, ValueError) as error:
                    errors.append(str(error))
            return results, errors

        table = run()
        _C.set_torch(torch.Tensor, None, _runtime.describe, _runtime.current_stream,
                     _runtime.lend_workspace, _runtime.is_capturing, 0)
        attributes = run()
        assert all(torch.equal(a, b) for a, b in zip(table[0], attributes[0], strict=True))
        assert table[1] == attributes[1] and len(table[1]) == 3, (table[1], attributes[1])
        print("same")
        """
    )
    assert output.strip() == "same"


def test_torch_that_is_too_old_is_named():
    output = run_python(
        """
        import torch
        torch.__version__ = "2.5.1"
        try:
            import pantile
        except ImportError as error:
            print(error)
        """
    )
    assert output.strip() == "pantile needs torch 2.6 or newer; this is torch 2.5.1"


# ---- import order


@pytest.mark.parametrize("order", ["import torch, pantile", "import pantile, torch"])
def test_first_call_inside_a_compiled_function(order):
    output = run_python(
        f"""
        {order}
        q = torch.randn(1, 8, 2, 16)
        compiled = torch.compile(
            lambda x: pantile.attention(x, x, x) + 1, fullgraph=True, backend="eager"
        )
        print(torch.equal(compiled(q), pantile.attention(q, q, q) + 1))
        """
    )
    assert output.strip() == "True"


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_second_import(library):
    """After removal from sys.modules: the operators stay registered, the environment is read."""
    output = run_python(
        f"""
        import os, sys
        import {library}, pantile

        x = {library}.ones((1, 3, 1, 8), dtype={library}.float32)
        first, before = pantile, pantile.attention(x, x, x)
        if "{library}" == "torch":
            leaf = x.clone().requires_grad_()
            pending = pantile.attention(leaf, x, x)
            operands = pantile.quantize(x, x, x)
        for name in [n for n in sys.modules if n.split(".")[0] == "pantile"]:
            del sys.modules[name]
        os.environ["PANTILE_BACKEND"] = "reference"
        import pantile

        assert pantile is not first
        print(pantile.Options().backend, pantile.explain(x, x, x).forward.kernel)
        assert abs(pantile.attention(x, x, x) - before).max() < 1e-6
        assert abs(first.attention(x, x, x) - before).max() == 0
        if "{library}" == "torch":
            torch.autograd.grad(pending.sum(), leaf)
            pantile.attention(leaf, x, x).sum().backward()
            pantile.attention(operands, options=pantile.Options("cpu"))
            compiled = torch.compile(pantile.attention, fullgraph=True, backend="eager")
            compiled(x, x, x)
            assert pantile.UnsupportedError is first.UnsupportedError
            assert pantile._C is first._C
        try:
            pantile.attention(x, x, x, options=pantile.Options("cpu", softmax="tensor"))
        except pantile.UnsupportedError as error:
            print(error)
        """
    )
    first, second = output.splitlines()
    assert first == "reference reference_forward_f32"
    assert "softmax is tensor" in second


def test_load_torch_registers_the_operators():
    output = run_python(
        """
        import pantile, torch
        print(hasattr(torch.ops.pantile, "forward"))
        pantile.load_torch()
        print(hasattr(torch.ops.pantile, "forward"))
        """
    )
    assert output.split() == ["False", "True"]
