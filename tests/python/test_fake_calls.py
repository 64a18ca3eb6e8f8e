"""Calls without memory (meta, fake, symbolic) are refused for the reasons of real ones, in the same
words, and symbolic sizes stay symbolic."""

from __future__ import annotations

import pantile
import pytest
import torch
from pantile._schema import LENGTHS, Call
from torch._dynamo.testing import CompileCounter

pantile.load_torch()
E4M3 = torch.float8_e4m3fn

DENSE = dict.fromkeys(LENGTHS)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def forward(packed=False, dtype=torch.float32, **changes) -> dict:
    """Arguments of pantile::forward_extra, with changes."""
    lead_q, lead_k = ((7,), (11,)) if packed else ((2, 5), (2, 7))
    lengths = {
        "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": ints(0, 5, 11),
        "seqused_q": ints(2, 4),
        "seqused_k": ints(5, 5),
    }
    return {
        "q": torch.zeros(*lead_q, 4, 8, dtype=dtype),
        "k": torch.zeros(*lead_k, 2, 8, dtype=dtype),
        "v": torch.zeros(*lead_k, 2, 16, dtype=dtype),
        **Call(window_right=0)._asdict(),
        **(lengths if packed else DENSE),
        "max_seqlen_q": 4 if packed else 0,
        "max_seqlen_k": 6 if packed else 0,
        "deterministic": False,
        "checked": False,
        "keep_low": True,
        "max_logit": True,
        "output_f32": False,
        **changes,
    }


def backward(packed=False, dtype=torch.float16, **changes) -> dict:
    call = forward(packed, dtype)
    shape = (*call["q"].shape[:-1], 16)
    rows = (4, 7) if packed else (2, 4, 5)
    for name in ("checked", "keep_low", "max_logit", "output_f32"):
        del call[name]
    outputs = {
        "o": torch.zeros(shape, dtype=dtype),
        "o_low": torch.zeros(shape, dtype=torch.int8) if dtype is torch.float16 else None,
        "lse": torch.zeros(rows),
        "grad_o": torch.zeros(shape, dtype=dtype),
        "grad_lse": torch.zeros(rows),
    }
    return {**call, **outputs, **changes}


def quantize(packed=False, dtype=torch.float32, **changes) -> dict:
    call = forward(packed, dtype)
    kept = ("q", "k", "v", *DENSE, "max_seqlen_q", "max_seqlen_k", "backend")
    own = {"block_q": 128, "block_k": 128, "hadamard": False, "smooth_k": False}
    descales = dict.fromkeys(("descale_q", "descale_k", "descale_v"))
    return {**{name: call[name] for name in kept}, **own, **descales, **changes}


def fp8_forward(packed=False, smooth_k=True, **changes) -> dict:
    call = forward(packed)
    operands = torch.ops.pantile.quantize(**quantize(packed, smooth_k=smooth_k))
    names = ("codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", "nonfinite_v")
    names += ("q_dot_mean", "mean_k")
    for name in ("keep_low", "max_logit", "output_f32"):
        del call[name]
    sizes = (2, 7, 11) if packed else (2, 5, 7)
    own = {
        **dict(zip(("batch", "rows", "keys"), sizes, strict=True)),
        "head_dim": 8,
        "dtype": torch.bfloat16,
        "block_q": 128,
        "block_k": 128,
        "hadamard": False,
        "smooth_k": smooth_k,
        "fp8_exp": "code",
        "fp8_backward": "bf16",
    }
    made = dict(zip(names, operands, strict=True))
    return {**call, "q": None, "k": None, "v": None, **made, **own, **changes}


def dequantize(packed=False, **changes) -> dict:
    call = fp8_forward(packed)
    kept = ("codes_q", "codes_k", "codes_v", "scale_q", "scale_kv", *DENSE)
    kept += ("max_seqlen_q", "max_seqlen_k", "batch", "rows", "keys", "head_dim", "dtype")
    kept += ("block_q", "block_k", "hadamard", "backend")
    return {**{name: call[name] for name in kept}, "keep_rotation": False, **changes}


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "head counts": ("forward_extra", lambda: forward(k=z(2, 7, 3, 8), v=z(2, 7, 3, 8))),
    "heads of v": ("forward_extra", lambda: forward(v=z(2, 7, 4, 8))),
    "no key heads": ("forward_extra", lambda: forward(k=z(2, 7, 0, 8), v=z(2, 7, 0, 8))),
    "head dims": ("forward_extra", lambda: forward(k=z(2, 7, 2, 9))),
    "batch of k": ("forward_extra", lambda: forward(k=z(3, 7, 2, 8))),
    "batch of v": ("forward_extra", lambda: forward(v=z(1, 7, 2, 8))),
    "keys of v": ("forward_extra", lambda: forward(v=z(2, 8, 2, 8))),
    "rank of q": ("forward_extra", lambda: forward(q=z(5, 4, 8))),
    "rank of k": ("forward_extra", lambda: forward(k=z(7, 2, 8))),
    "rank of v": ("forward_extra", lambda: forward(v=z(2, 1, 7, 2, 8))),
    "head dim 513": ("forward_extra", lambda: forward(q=z(2, 5, 4, 513), k=z(2, 7, 2, 513))),
    "head dim 0": ("forward_extra", lambda: forward(q=z(2, 5, 4, 0), k=z(2, 7, 2, 0))),
    "head dim of v": ("forward_extra", lambda: forward(v=z(2, 7, 2, 513))),
    "dtype of k": ("forward_extra", lambda: forward(k=z(2, 7, 2, 8, dtype=torch.float16))),
    "dtype of v": ("forward_extra", lambda: forward(v=z(2, 7, 2, 8, dtype=torch.bfloat16))),
    "float64": ("forward_extra", lambda: forward(dtype=torch.float64)),
    "integers": ("forward_extra", lambda: forward(dtype=torch.int32)),
    "codes": ("forward_extra", lambda: forward(dtype=E4M3)),
    "window": ("forward_extra", lambda: forward(window_left=-2)),
    "scale": ("forward_extra", lambda: forward(scale=float("nan"))),
    "backend": ("forward_extra", lambda: forward(backend="tpu")),
    "int64 lengths": (
        "forward_extra",
        lambda: forward(True, cu_seqlens_q=ints(0, 3, 7, dtype=torch.int64)),
    ),
    "float lengths": ("forward_extra", lambda: forward(True, cu_seqlens_k=z(3))),
    "count of lengths": ("forward_extra", lambda: forward(True, cu_seqlens_k=ints(0, 11))),
    "no lengths": ("forward_extra", lambda: forward(True, cu_seqlens_q=ints())),
    "rank of lengths": ("forward_extra", lambda: forward(True, cu_seqlens_q=ints(0, 3, 7)[None])),
    "strided lengths": (
        "forward_extra",
        lambda: forward(True, cu_seqlens_q=ints(0, 9, 3, 9, 7)[::2]),
    ),
    "count of seqused": ("forward_extra", lambda: forward(True, seqused_q=ints(1, 2, 3))),
    "int64 seqused": (
        "forward_extra",
        lambda: forward(True, seqused_k=ints(1, 2, dtype=torch.int64)),
    ),
    "negative length": ("forward_extra", lambda: forward(True, max_seqlen_k=-1)),
    "packed rank": ("forward_extra", lambda: forward(True, q=z(1, 7, 4, 8))),
    "packed keys of v": ("forward_extra", lambda: forward(True, v=z(12, 2, 8))),
    "shape of o": ("backward", lambda: backward(o=z(2, 5, 4, 8, dtype=torch.float16))),
    "dtype of o": ("backward", lambda: backward(o=z(2, 5, 4, 16))),
    "shape of grad_o": ("backward", lambda: backward(grad_o=z(2, 4, 5, 16, dtype=torch.float16))),
    "dtype of grad_o": ("backward", lambda: backward(grad_o=z(2, 5, 4, 16))),
    "shape of lse": ("backward", lambda: backward(lse=z(2, 5, 4))),
    "dtype of lse": ("backward", lambda: backward(lse=z(2, 4, 5, dtype=torch.float16))),
    "shape of grad_lse": ("backward", lambda: backward(True, grad_lse=z(7, 4))),
    "dtype of grad_lse": ("backward", lambda: backward(grad_lse=z(2, 4, 5, dtype=torch.float64))),
    "dtype of o_low": ("backward", lambda: backward(o_low=z(2, 5, 4, 16, dtype=torch.uint8))),
    "shape of o_low": ("backward", lambda: backward(o_low=z(0, 5, 4, 16, dtype=torch.int8))),
    "o_low of float32": (
        "backward",
        lambda: backward(dtype=torch.float32, o_low=z(2, 5, 4, 16, dtype=torch.int8)),
    ),
    "backward head counts": (
        "backward",
        lambda: backward(dtype=torch.float32, k=z(2, 7, 3, 8), v=z(2, 7, 3, 16)),
    ),
    "quantize head counts": ("quantize", lambda: quantize(k=z(2, 7, 3, 8), v=z(2, 7, 3, 8))),
    "quantize dtypes": ("quantize", lambda: quantize(k=z(2, 7, 2, 8, dtype=torch.float16))),
    "quantize rank": ("quantize", lambda: quantize(k=z(7, 2, 8))),
    "quantize block": ("quantize", lambda: quantize(block_k=32)),
    "quantize int64": (
        "quantize",
        lambda: quantize(True, cu_seqlens_k=ints(0, 5, 11, dtype=torch.int64)),
    ),
    "quantize hadamard": (
        "quantize",
        lambda: quantize(
            dtype=E4M3, hadamard=True, descale_q=z(2, 2), descale_k=z(2, 2), descale_v=z(2, 2)
        ),
    ),
    "no descale": ("quantize", lambda: quantize(dtype=E4M3)),
    "descale of floats": ("quantize", lambda: quantize(descale_v=z(2, 2))),
    "descale shape": (
        "quantize",
        lambda: quantize(dtype=E4M3, descale_q=z(2, 4), descale_k=z(2, 2), descale_v=z(2, 2)),
    ),
    "fp8 codes_q": ("fp8_forward", lambda: fp8_forward(codes_q=z(4, 384, 16, dtype=E4M3))),
    "fp8 codes_k": ("fp8_forward", lambda: fp8_forward(codes_k=z(2, 256, 16))),
    "fp8 codes_v": ("fp8_forward", lambda: fp8_forward(codes_v=z(2, 1, 16, 128, dtype=E4M3))),
    "fp8 scale_q": ("fp8_forward", lambda: fp8_forward(scale_q=z(4, 3))),
    "fp8 scale_kv": ("fp8_forward", lambda: fp8_forward(scale_kv=z(2, 2))),
    "fp8 nonfinite_v": ("fp8_forward", lambda: fp8_forward(nonfinite_v=z(2, 2, 16, 4))),
    "fp8 q_dot_mean": ("fp8_forward", lambda: fp8_forward(q_dot_mean=z(0))),
    "fp8 mean_k": ("fp8_forward", lambda: fp8_forward(mean_k=z(2, 2, 9))),
    "fp8 rows": ("fp8_forward", lambda: fp8_forward(rows=400)),
    "fp8 head_dim": ("fp8_forward", lambda: fp8_forward(head_dim=40)),
    "fp8 scale": ("fp8_forward", lambda: fp8_forward(scale=-1.0)),
    "fp8 block": ("fp8_forward", lambda: fp8_forward(block_q=0)),
    "quantize block 0": ("quantize", lambda: quantize(block_q=0)),
    "fp8 exp": ("fp8_forward", lambda: fp8_forward(fp8_exp="exp")),
    "fp8 backward": ("fp8_forward", lambda: fp8_forward(fp8_backward="outputs")),
    "codes_q of numbers": ("dequantize", lambda: dequantize(codes_q=z(4, 384, 16, dtype=E4M3))),
    "scale_kv of numbers": ("dequantize", lambda: dequantize(scale_kv=z(2, 2))),
    "rows of numbers": ("dequantize", lambda: dequantize(rows=400)),
    "dtype of numbers": ("dequantize", lambda: dequantize(dtype=torch.float64)),
    "fp8 window": ("fp8_forward", lambda: fp8_forward(window_right=-3)),
    "fp8 int64": (
        "fp8_forward",
        lambda: fp8_forward(True, cu_seqlens_q=ints(0, 3, 7, dtype=torch.int64)),
    ),
}


def answer_of(operator: str, arguments: dict):
    """(type, message) of what the operator raises, or its outputs."""
    try:
        return getattr(torch.ops.pantile, operator)(**arguments)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return type(error), str(error)


def without_memory(kind: str, operator: str, arguments: dict):
    if kind == "meta":
        moved = {
            n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
        }
        # to() makes copies contiguous
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor) and not x.is_contiguous():
                moved[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return answer_of(operator, moved)
    with torch._subclasses.FakeTensorMode() as mode:
        faked = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
            for n, x in arguments.items()
        }
        return answer_of(operator, faked)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("case", WRONG)
def test_refused_alike(case, kind):
    operator, make = WRONG[case]
    arguments = make()
    real = answer_of(operator, arguments)
    assert isinstance(real[0], type), "a real call takes this"
    assert real[0] in (ValueError, TypeError)
    assert without_memory(kind, operator, arguments) == real


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("operator", "make"),
    [
        ("forward_extra", forward),
        ("backward", backward),
        ("quantize", quantize),
        ("fp8_forward", fp8_forward),
        ("dequantize", dequantize),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_right_calls_have_the_shapes_of_real_ones(operator, make, packed, kind):
    calls = [make(packed)]
    if operator == "forward_extra":
        calls.append(make(packed, torch.bfloat16))
        calls.append(make(packed, torch.bfloat16, output_f32=True, max_logit=False))
        calls.append(make(packed, torch.bfloat16, keep_low=False))
    for arguments in calls:
        real = answer_of(operator, arguments)
        found = without_memory(kind, operator, arguments)
        forms = [[(x.shape, x.dtype, x.stride()) for x in outputs] for outputs in (found, real)]
        assert forms[0] == forms[1]


def test_devices_are_compared():
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(2, 5, 4, 8, device="meta")
    with pytest.raises(ValueError, match="k is on cpu; it must be on the device of q, meta"):
        torch.ops.pantile.forward_extra(**forward(q=q))


def attend(q, k, v):
    return pantile.attention(q, k, v, causal=True)


def attend_fp8(q, k, v):
    return pantile.attention(q, k, v, options=pantile.Options(fp8=True))


@pytest.mark.parametrize("function", [attend, attend_fp8])
def test_symbolic_sizes_are_not_guarded(function):
    """One graph for all lengths, and for all batches; also where a size has no value in tracing."""
    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        for batch, rows, keys in ((2, 6, 9), (3, 11, 5), (5, 4, 30)):
            made = [torch.randn(batch, n, h, 8) for n, h in ((rows, 4), (keys, 2), (keys, 2))]
            if mark is torch._dynamo.mark_dynamic:
                for x in made:
                    mark(x, 0)
                    mark(x, 1)
            else:
                mark(made[0], 1)
            with torch.no_grad():
                torch.testing.assert_close(compiled(*made), function(*made))
            if mark is not torch._dynamo.mark_dynamic:
                break
        assert counter.frame_count == 1
    torch._dynamo.reset()


def test_refused_in_tracing():
    """Of the example that is traced, also where its sizes are symbols."""
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="eager", dynamic=dynamic)
        made = [torch.randn(2, n, h, 8) for n, h in ((6, 4), (9, 3), (9, 3))]
        with pytest.raises(Exception, match="heads_q is 4 and heads_k is 3; heads_q must be a"):
            compiled(*made)
    torch._dynamo.reset()
