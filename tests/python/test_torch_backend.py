"""Options(backend="torch"): torch's own attention, as a way back that is always there; and
environment variables, none of which makes a valid call fail."""

from __future__ import annotations

import pantile
import pytest
import torch
from support import Target, dense, packed, run_python

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def torch_target(device: str) -> Target:
    return Target("torch", device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(37, 37), (37, 90), (90, 37)], ids=str)
def test_dense(device, causal, sizes):
    """Grouped heads, more queries than keys and fewer: the mask is aligned to the bottom right."""
    target = torch_target(device)
    case = dense(target, target.default_dtype, rows=sizes[0], keys=sizes[1], causal=causal)
    options = pantile.Options(backend="torch")
    leaves = [x.detach().requires_grad_() for x in case.operands]
    o = pantile.attention(*leaves, causal=causal, options=options)
    truth_leaves = [x.detach().double().requires_grad_() for x in case.operands]
    truth = case.expected(*truth_leaves, None)[0]
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    found = [o, *torch.autograd.grad(o, leaves, grad)]
    exact = [truth, *torch.autograd.grad(truth, truth_leaves, grad.double())]
    tolerance = 2e-5 if o.dtype is torch.float32 else 3e-2
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
        assert (x.double() - y).abs().max() <= tolerance * (1 + y.abs().max()), name
    assert o.is_contiguous()
    if causal and sizes[0] > sizes[1]:
        assert not o[:, : sizes[0] - sizes[1]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_packed(device):
    target = torch_target(device)
    case = packed(target, [37, 0, 50, 9], [45, 20, 31, 0], target.default_dtype, causal=True)
    used = torch.tensor([30, 0, 50, 9], dtype=torch.int32, device=device)
    expected = case.expected(*case.operands, torch.float64)[0]
    run = [*case.operands, *case.lengths, *case.longest]
    o = pantile.varlen_attention(*run, causal=True, options=target.options)
    tolerance = 2e-5 if o.dtype is torch.float32 else 3e-2
    assert (o.double() - expected).abs().max() <= tolerance
    o = pantile.varlen_attention(*run, seqused_q=used, options=target.options)
    assert not o[30:37].any()


@pytest.mark.parametrize("device", DEVICES)
def test_bias_mask_and_dropout(device):
    target = torch_target(device)
    case = dense(target, target.default_dtype, rows=37, keys=45)
    bias = torch.randn(1, 4, 37, 45, device=device)
    mask = torch.rand(37, 45, device=device) < 0.7
    mask[3] = False
    tolerance = 2e-5 if case.q.dtype is torch.float32 else 3e-2
    for given in ({"bias": bias}, {"mask": mask}):
        o = pantile.attention(*case.operands, **given, options=target.options)
        truth = pantile.reference.attention(*case.operands, **given)[0]
        assert (o.double() - truth).abs().max() <= tolerance, given.keys()
    o = pantile.attention(*case.operands, dropout=0.5, options=target.options)
    plain = pantile.attention(*case.operands, options=target.options)
    assert not torch.equal(o, plain)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"window": (3, 0)}, "window"),
        ({"softcap": 5.0}, "softcap"),
        ({"alibi": torch.ones(4)}, "alibi"),
        ({"sinks": torch.ones(4)}, "sinks"),
        ({"dropout": pantile.Dropout(0.1, seed=3)}, "seed"),
        ({"dropout": pantile.Dropout(0.1, key_offset=3)}, "key_offset"),
        ({"return_lse": True}, "return_lse"),
        ({"return_max_logit": True}, "return_max_logit"),
        ({"deterministic": True}, "deterministic"),
        ({"bias": torch.ones(37, 45), "causal": True}, "bias"),
        ({"mask": pantile.Documents(torch.ones(37, dtype=torch.int32))}, "Documents"),
        ({"options": {"output_dtype": "float32"}}, "output_dtype"),
        ({"options": {"fp8": True}}, "fp8"),
        ({"options": {"float32_precision": "tf32"}}, "float32_precision"),
        ({"options": {"softmax": "vector"}}, "softmax"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses_by_name(given, name):
    case = dense(torch_target("cpu"))
    given = dict(given)
    options = pantile.Options(backend="torch", **given.pop("options", {}))
    with pytest.raises(pantile.UnsupportedError, match=name):
        pantile.attention(*case.operands, **given, options=options)
    plan = pantile.explain(*case.operands, **given, options=options)
    assert plan.forward.kernel is None
    assert name in plan.forward.reason


def test_explain_names_torch():
    case = dense(torch_target("cpu"))
    plan = pantile.explain(*case.operands, options=pantile.Options(backend="torch"))
    assert str(plan).startswith("forward: torch.nn.functional.scaled_dot_product_attention\n")


def test_quantizer_is_refused():
    case = dense(torch_target("cpu"))
    with pytest.raises(pantile.UnsupportedError, match="backend is torch"):
        pantile.quantize(*case.operands, options=pantile.Options(backend="torch"))


# ---- environment variables are preferences

CALLS = """
    import sys, torch, numpy, pantile
    device = sys.argv[1]
    gpu = device == "cuda"
    def tensors(dtype, d=64):
        return [torch.randn(2, 48, 4, d, device=device, dtype=dtype, requires_grad=True)
                for _ in range(3)]
    def both(out):
        out.float().sum().backward()
    q, k, v = tensors(torch.bfloat16)
    bounds = torch.tensor([0, 48, 96], dtype=torch.int32, device=device)
    both(pantile.attention(q, k, v))
    both(pantile.attention(q, k, v, causal=True))
    both(pantile.attention(q, k, v, window=(9, 4), return_lse=True)[0])
    both(pantile.attention(q, k, v, deterministic=True))
    both(pantile.attention(q, k, v, softcap=5.0, sinks=torch.zeros(4, device=device)))
    both(pantile.attention(q, k, v, dropout=pantile.Dropout(0.1, seed=1)))
    both(pantile.attention(*tensors(torch.float32)))
    both(pantile.attention(*tensors(torch.float16, 96), causal=True))
    packed = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    both(pantile.varlen_attention(*packed, bounds, bounds, 48, 48, causal=True))
    if not gpu or torch.cuda.get_device_capability() == (9, 0):
        codes = pantile.quantize(q.detach(), k.detach(), v.detach())
        pantile.attention(codes, causal=True)
        both(pantile.attention(q, k, v, options=pantile.Options(fp8=True)))
    a = numpy.ones((1, 8, 2, 16), numpy.float32)
    pantile.attention(a, a, a)
    forward = pantile.explain(q, k, v).forward
    print(forward.kernel, forward.backend_gave_way)
"""
VALUES = {
    "PANTILE_BACKEND": ("hopper", "ampere", "cpu", "reference", "torch"),
    "PANTILE_SOFTMAX": ("vector", "tensor"),
    "PANTILE_TENSOR_SHARE": ("0.5",),
    "PANTILE_LOG": ("info",),
    "PANTILE_JIT": ("on", "cache"),
    "PANTILE_CHECK_WORKSPACE": ("1",),
    "PANTILE_CPU_ISA": ("baseline",),
    "PANTILE_SHARED_MEMORY_KB": ("227",),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in VALUES.items() for value in values]
)
def test_no_environment_variable_makes_a_valid_call_fail(device, name, value):
    if device == "cuda" and name == "PANTILE_JIT" and value == "cache":
        pytest.skip("says that nothing may be compiled, which the variants among the calls need")
    run_python(CALLS, device, **{name: value})


def test_what_the_environment_chose_holds_where_it_serves():
    assert run_python(CALLS, "cpu", PANTILE_BACKEND="reference").split()[-1] == "False"
    assert run_python(CALLS, "cpu", PANTILE_BACKEND="hopper").split()[-1] == "True"


def test_what_the_code_chose_is_never_replaced():
    case = dense(Target("hopper", "cpu"))
    with pytest.raises(pantile.UnsupportedError, match="hopper"):
        pantile.attention(*case.operands, options=pantile.Options(backend="hopper"))
