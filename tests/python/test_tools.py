"""explain, Options, environment variables, build and device information, the command line."""

from __future__ import annotations

import dataclasses
import re

import pantile
import pytest
import torch
from pantile import __main__ as command_line
from pantile import _check, reference
from pantile.experimental import SoftmaxOptions
from support import run_python, run_python_in_each

# ---- explain


def operands(dtype=torch.float32):
    return [torch.randn(2, n, 4, 64).to(dtype) for n in (9, 13, 13)]


def test_explain_names_the_kernel_that_runs():
    """The log of plans, made at run time, and the answer beforehand name the same kernels."""
    output = run_python(
        """
        import sys
        sys.stderr = sys.stdout
        import torch, pantile
        q = torch.randn(1, 9, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        plan = pantile.explain(q, q, q, causal=True)
        print(plan.forward.kernel, plan.backward.kernel)
        pantile.attention(q, q, q, causal=True).sum().backward()
        """,
        PANTILE_LOG="info",
    )
    first, *planned = output.splitlines()
    assert first.split() == ["cpu_forward_bf16", "cpu_backward_bf16"]
    assert [line.split(": ")[1] for line in planned] == first.split()


def test_log_names_each_new_plan_once():
    output = run_python(
        """
        import sys
        sys.stderr = sys.stdout
        import torch, pantile
        q = torch.randn(1, 9, 2, 64, dtype=torch.bfloat16)
        for _ in range(3):
            pantile.attention(q, q, q, causal=True)
        """,
        PANTILE_LOG="info",
    )
    lines = output.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("pantile: cpu_forward_bf16: batch 1, heads 2/2, length 9 x 9")


def test_explain_reports_copies():
    q, k, v = operands()
    narrow = torch.randn(2, 13, 4, 128)[..., ::2]
    plan = pantile.explain(q, narrow, v)
    assert plan.forward.copies == ("k",)
    assert "copies first: k" in str(plan)
    assert (
        pantile.explain(q, k.transpose(1, 2).contiguous().transpose(1, 2), v).forward.copies == ()
    )


def test_explain_has_a_verdict_for_every_row():
    options = pantile.Options(backend="reference")
    plan = pantile.explain(*operands(torch.float16), options=options, verbose=True)
    table = pantile.kernels()
    for pass_ in ("forward", "backward"):
        explained = getattr(plan, pass_)
        names = [row["name"] for row in table if row["pass"] == pass_]
        assert [row.kernel for row in explained.rows] == names
        assert [row.kernel for row in explained.rows if row.chosen] == [explained.kernel]
        assert explained.kernel == f"reference_{pass_}_f16"
        for row in explained.rows:
            assert row.chosen or row.reason
    text = str(plan)
    assert "cpu_forward_f16" in text
    assert "chosen" in text


def test_explain_prints_one_line_for_each_backend():
    """The choice first; all rows of the table only on request."""
    plan = pantile.explain(*operands())
    lines = str(plan).splitlines()
    assert lines[0] == "call: batch 2, 9 queries x 13 keys, heads 4 / 4, head dim 64 / 64"
    assert lines[1].startswith("forward: cpu_forward_f32, tile ")
    for one in (plan.forward, plan.backward):
        backends = {row.backend for row in one.rows}
        assert len(one.lines("pass")) == len(backends) + 1 + bool(one.softmax)
        for backend in backends:
            assert sum(row.closest for row in one.rows if row.backend == backend) == 1
    assert sum(line.startswith("  hopper ") for line in lines) == 2
    assert "needs a CUDA device" in next(line for line in lines if line.startswith("  hopper "))
    assert sum("chosen: cpu_" in line for line in lines) == 2

    full = str(pantile.explain(*operands(), verbose=True)).splitlines()
    assert full[:2] == lines[:2]
    rows = {row.kernel for row in (*plan.forward.rows, *plan.backward.rows)}
    assert rows <= {line.split()[0] for line in full}


def test_explain_says_why_no_kernel_serves():
    plan = pantile.explain(*operands(), options=pantile.Options(backend="hopper"))
    assert plan.forward.kernel is None
    assert "hopper" in plan.forward.reason
    assert "forward: no kernel." in str(plan)


def test_explain_refuses_what_attention_refuses():
    q, k, v = operands()
    with pytest.raises(ValueError, match="v has head count 2"):
        pantile.explain(q, k, v[:, :, :2])
    with pytest.raises(ValueError, match="scale is nan"):
        pantile.explain(q, k, v, scale=float("nan"))
    with pytest.raises(
        ValueError, match=r"^seqused_q is a Tensor of shape \[2\].*; lengths need cu_seqlens_q"
    ):
        pantile.explain(q, k, v, seqused_q=torch.zeros(2, dtype=torch.int32))


def test_explain_packed():
    q = torch.randn(7, 4, 64)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    plan = pantile.explain(q, q, q, bounds, bounds, 4, 4)
    assert plan.forward.kernel == "cpu_forward_f32"
    assert plan.call == "packed, 7 queries x 7 keys, heads 4 / 4, head dim 64 / 64"


def test_explain_shows_a_wrong_layout():
    """[batch, heads, seq, dim] runs where the axes agree; the first line shows how it was read."""
    q, k, v = (x.transpose(1, 2) for x in operands())
    k, v = (x[:, :, :9] for x in (k, v))
    read = pantile.explain(q, k, v).call
    assert read == "batch 2, 4 queries x 4 keys, heads 9 / 9, head dim 64 / 64"


# ---- options and environment


def test_options_are_frozen_values():
    options = pantile.Options(backend="cpu", checked=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.backend = "auto"
    assert options == pantile.Options("cpu", checked=True)
    assert hash(options) == hash(pantile.Options("cpu", checked=True))


def test_softmax_options_reach_the_plan():
    q, k, v = operands()
    plain = pantile.explain(q, k, v).forward.softmax
    assert plain == "vector, mode exact, tensor share 0, rescale threshold 8"
    options = pantile.Options(softmax=SoftmaxOptions("vector", rescale_threshold=2.5))
    assert pantile.explain(q, k, v, options=options).forward.softmax.endswith("threshold 2.5")
    assert "softmax: vector" in str(pantile.explain(q, k, v))
    assert pantile.explain(q, k, v).backward.softmax == ""
    with pytest.raises(pantile.UnsupportedError, match="cpu: has no softmax on tensor cores"):
        pantile.attention(q, k, v, options=pantile.Options(softmax="tensor"))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"rescale_threshold": 16}, "rescale_threshold is 16; it must be from 0 to 15"),
        ({"p_max_offset": 8}, "p_max_offset is 8; with rescale_threshold 8 it must be from 0 to 7"),
        ({"min_exponent_log2": 1}, "min_exponent_log2 is 1; it must be from -126 to 0"),
        ({"tensor_share": 0.5}, "tensor_share is 0.5; it needs softmax = tensor, which is auto"),
        (
            {"softmax_mode": "surrogate"},
            "softmax_mode is surrogate; it needs softmax = tensor, which is auto",
        ),
        (
            {"softmax": "tensor", "tensor_split": "rows"},
            "tensor_split is rows; it needs tensor_share = 0.5",
        ),
    ],
)
def test_softmax_options_that_no_call_takes(choice, message):
    q, k, v = operands()
    with pytest.raises(ValueError, match=message):
        pantile.attention(q, k, v, options=pantile.Options(softmax=SoftmaxOptions(**choice)))


def test_environment_sets_the_softmax():
    source = """
        import pantile
        options = pantile.experimental.SoftmaxOptions()
        print(pantile.Options().softmax, options.softmax, options.tensor_share)
    """
    found = run_python(source, PANTILE_SOFTMAX="tensor", PANTILE_TENSOR_SHARE="0.25")
    assert found.split() == ["tensor", "tensor", "0.25"]
    assert run_python(source).split() == ["auto", "auto", "None"]


SOFTMAX_ENVIRONMENTS = [
    {"PANTILE_TENSOR_SHARE": "0.5"},
    {"PANTILE_TENSOR_SHARE": "0"},
    {"PANTILE_SOFTMAX": "vector"},
    {"PANTILE_SOFTMAX": "tensor"},
    {"PANTILE_SOFTMAX": "tensor", "PANTILE_TENSOR_SHARE": "1"},
    {"PANTILE_SOFTMAX": "vector", "PANTILE_TENSOR_SHARE": "0.25"},
]


def test_environment_of_the_softmax_fails_no_call():
    """It is a preference; what a call asks for itself is served or refused."""
    outputs = run_python_in_each(
        """
        import dataclasses
        import torch, pantile

        q = torch.ones(1, 5, 2, 64, requires_grad=True)
        fp8 = pantile.Options(fp8=True)
        Softmax = pantile.experimental.SoftmaxOptions
        exact = pantile.Options(softmax=Softmax(softmax_mode="exact"))
        for options in (None, fp8, exact, pantile.Options("cpu"),
                        pantile.Options(**dataclasses.asdict(pantile.Options()))):
            pantile.attention(q, q, q, options=options).sum().backward()
            pantile.attention(q.detach(), q.detach(), q.detach(), options=options)
            print(pantile.explain(q, q, q, options=options).forward.kernel)
        pantile.attention(pantile.quantize(q, q, q))
        pantile.attention(q, q, q, return_lse=True, return_max_logit=True)
        for own in ({"softmax": "tensor"}, {"softmax": Softmax("tensor", 0.5)},
                    {"softmax": Softmax(tensor_share=0.5)}, {"softmax": "vector", "fp8": True}):
            try:
                pantile.attention(q, q, q, options=pantile.Options(**own))
                print("served")
            except (pantile.UnsupportedError, ValueError) as error:
                print("refused")
        """,
        SOFTMAX_ENVIRONMENTS,
    )
    served = ["cpu_forward_f32", "cpu_forward_e4m3", *["cpu_forward_f32"] * 3]
    for environment, output in zip(SOFTMAX_ENVIRONMENTS, outputs, strict=True):
        assert output.split() == [*served, *["refused"] * 4], environment


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PANTILE_SOFTMAX", "gpu", "it must be one of auto, vector, tensor"),
        ("PANTILE_TENSOR_SHARE", "0.3", "is '0.3'; it must be one of 0, 0.25, 0.5, 1, or auto"),
        ("PANTILE_TENSOR_SHARE", "half", "is 'half'; it must be one of 0, 0.25, 0.5, 1, or auto"),
    ],
)
def test_environment_of_the_softmax_is_checked(name, value, message):
    with pytest.raises(AssertionError, match=message):
        run_python("import pantile", **{name: value})


def test_environment_sets_the_backend():
    source = """
        import torch, pantile
        q = torch.randn(1, 3, 1, 8)
        print(pantile.Options().backend, pantile.explain(q, q, q).forward.kernel)
    """
    assert run_python(source, PANTILE_BACKEND="reference").split() == [
        "reference",
        "reference_forward_f32",
    ]


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("PANTILE_BACKEND", "auto, hopper, ampere, cpu, reference, torch"),
        ("PANTILE_LOG", "debug, info, warning"),
    ],
)
def test_bad_environment_is_named(name, allowed):
    source = """
        try:
            import pantile
        except ValueError as error:
            print(error)
    """
    output = run_python(source, **{name: "loud"})
    assert output.strip() == f"environment variable {name} is 'loud'; it must be one of {allowed}"


# ---- what there is


def test_build_info():
    info = pantile.build_info()
    assert info["version"] == pantile.__version__
    assert isinstance(info["cuda"], bool)
    assert info["cuda"] or info["cuda_reason"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", pantile.__version__)


def test_devices():
    first = pantile.devices()[0]
    assert first["type"] == "cpu"
    assert first["isa"] in ("baseline", "avx2", "avx512")
    assert first["threads"] == torch.get_num_threads()
    if torch.cuda.is_available():
        assert len(pantile.devices()) == 1 + torch.cuda.device_count()
    else:
        assert pantile.cuda_reason()


def test_lower_instruction_sets_give_right_results():
    """PANTILE_CPU_ISA forces what an older processor would run."""
    sets = ("baseline", "avx2", "avx512")
    outputs = run_python_in_each(
        """
        import torch, pantile
        from pantile import reference
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            q, k, v = (torch.randn(1, n, 2, 72).to(dtype) for n in (70, 90, 90))
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            o = pantile.attention(q, k, v, causal=True)
            grads = torch.autograd.grad(o.float().square().sum(), (q, k, v))
            d = [x.detach().double().requires_grad_() for x in (q, k, v)]
            e, _ = reference.attention(*d, causal=True)
            exact = torch.autograd.grad(e.square().sum(), d)
            tolerance = 1e-4 if dtype is torch.float32 else 0.06
            for a, b in zip((o, *grads), (e, *exact)):
                assert reference.error(a, b) < tolerance, (dtype, reference.error(a, b))
        print(pantile.devices()[0]["isa"])
        """,
        [{"PANTILE_CPU_ISA": isa} for isa in sets],
    )
    for isa, output in zip(sets, outputs, strict=True):
        # A set that this processor lacks is not forced on it.
        assert output.strip() in (isa, pantile.devices()[0]["isa"])


# ---- command line


def test_info_command(capsys):
    assert command_line.main(["info"]) == 0
    output = capsys.readouterr().out
    for word in (pantile.__version__, torch.__version__, "backend cpu", "cpu:0"):
        assert word in output


def test_kernels_command(capsys):
    assert command_line.main(["kernels"]) == 0
    output = capsys.readouterr().out
    for row in pantile.kernels():
        assert row["name"] in output


def test_check_command(capsys):
    assert command_line.main(["check", "--backend", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "24 ok, 0 failed, 0 not served" in output
    assert output.count("cpu_backward_bf16") == len(_check.MASKS)


def test_check_command_notices_a_wrong_kernel(capsys, monkeypatch):
    """Scores that are 1 % too large must not pass as rounding."""
    real = pantile.attention

    def wrong(q, k, v, **arguments):
        return real(q, k, v, scale=1.01 * q.shape[-1] ** -0.5, **arguments)

    monkeypatch.setattr(pantile, "attention", wrong)
    assert command_line.main(["check", "--backend", "cpu"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    verdicts = {tuple(x[2:6:1]): x[0] for x in lines if x and x[0] in ("ok", "FAIL")}
    failed = {key[0] for key, verdict in verdicts.items() if verdict == "FAIL"}
    assert {"f32", "f16"} <= failed


def test_check_rows_know_their_verdict():
    row = _check.Row("cpu", "kernel", "f32", 64, "full", "forward", 1.0, 2.0)
    assert row.verdict == "ok"
    assert dataclasses.replace(row, error=3.0).verdict == "FAIL"
    assert dataclasses.replace(row, error=float("inf")).verdict == "FAIL"
    assert dataclasses.replace(row, error=None, bound=None).verdict == "-"


def test_error_measures_nan_as_wrong():
    exact = torch.tensor([1.0, -torch.inf])
    assert reference.error(torch.tensor([1.5, -torch.inf]), exact) == 0.5
    assert reference.error(torch.tensor([float("nan"), -torch.inf]), exact) == float("inf")
    assert reference.error(torch.tensor([1.0, 0.0]), exact) == float("inf")
