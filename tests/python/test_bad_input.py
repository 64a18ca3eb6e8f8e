"""Bad arguments: an exception that names the argument, its value and what is allowed."""

from __future__ import annotations

import re

import numpy as np
import pantile
import pytest
import torch
from pantile._schema import Call, bind
from pantile.experimental import SoftmaxOptions


def tensors(**changes):
    shapes = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
    return {name: torch.randn(changes.get(name, shape)) for name, shape in shapes.items()}


def call(arguments=None, change=None, **shapes):
    """attention() with one thing wrong."""

    def run():
        made = tensors(**shapes)
        if change:
            change(made)
        return pantile.attention(**made, **(arguments or {}))

    return run


def varlen(**changes):
    """varlen_attention() of lengths (3, 4) and (5, 6) with one argument replaced."""

    def run():
        given = {
            "q": torch.randn(7, 4, 8),
            "k": torch.randn(11, 2, 8),
            "v": torch.randn(11, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 5, 11], dtype=torch.int32),
            "max_seqlen_q": 4,
            "max_seqlen_k": 6,
            **changes,
        }
        return pantile.varlen_attention(**given)

    return run


def replace(name, function):
    def change(made):
        made[name] = function(made[name])

    return change


def every(function):
    def change(made):
        for name in made:
            made[name] = function(made[name])

    return change


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


ALLOWED = "it must be float32, float16 or bfloat16"

CASES = {
    # ranks and shapes
    "q_rank_3": (
        call(q=(5, 4, 8)),
        ValueError,
        "q has 3 dimensions; it must have 4: [batch, seqlen_q, heads_q, head_dim]",
    ),
    "k_rank_5": (
        call(k=(1, 2, 7, 2, 8)),
        ValueError,
        "k has 5 dimensions; it must have 4: [batch, seqlen_k, heads_k, head_dim]",
    ),
    "v_rank_0": (
        call(v=()),
        ValueError,
        "v has 0 dimensions; it must have 4: [batch, seqlen_k, heads_k, head_dim_v]",
    ),
    "batch_differs": (
        call(k=(3, 7, 2, 8)),
        ValueError,
        "k has batch size 3; it must be 2, the batch size of q",
    ),
    "v_batch_differs": (
        call(v=(1, 7, 2, 8)),
        ValueError,
        "v has batch size 1; it must be 2, the batch size of q",
    ),
    "v_length_differs": (
        call(v=(2, 8, 2, 8)),
        ValueError,
        "v has sequence length 8; it must be 7, the sequence length of k",
    ),
    "head_dim_differs": (
        call(k=(2, 7, 2, 16)),
        ValueError,
        "k has head_dim 16; it must be 8, the head_dim of q",
    ),
    "v_heads_differ": (
        call(v=(2, 7, 4, 8)),
        ValueError,
        "v has head count 4; it must be 2, the head count of k",
    ),
    "heads_do_not_divide": (
        call(k=(2, 7, 3, 8), v=(2, 7, 3, 8)),
        ValueError,
        "heads_q is 4 and heads_k is 3; heads_q must be a positive multiple of heads_k, or both 0",
    ),
    "no_key_heads": (
        call(k=(2, 7, 0, 8), v=(2, 7, 0, 8)),
        ValueError,
        "heads_q is 4 and heads_k is 0; heads_q must be a positive multiple of heads_k, or both 0",
    ),
    "head_dim_0": (
        call(q=(2, 5, 4, 0), k=(2, 7, 2, 0)),
        ValueError,
        "head_dim is 0; it must be from 1 to 512",
    ),
    "head_dim_513": (
        call(q=(2, 5, 4, 513), k=(2, 7, 2, 513)),
        ValueError,
        "head_dim is 513; it must be from 1 to 512",
    ),
    "head_dim_v_513": (
        call(v=(2, 7, 2, 513)),
        ValueError,
        "head_dim_v is 513; it must be from 1 to 512",
    ),
    # types
    "q_list": (
        call(change=replace("q", lambda x: x.tolist())),
        TypeError,
        "q is a list; it must be a torch.Tensor or a numpy.ndarray",
    ),
    "k_none": (
        call(change=replace("k", lambda x: None)),
        TypeError,
        "k is missing; it must be a torch.Tensor like q",
    ),
    "v_numpy": (
        call(change=replace("v", lambda x: x.numpy())),
        TypeError,
        "v is a ndarray; it must be a torch.Tensor like q",
    ),
    "dtype_mix": (
        call(change=replace("k", lambda x: x.half())),
        TypeError,
        "k has dtype float16; it must have the dtype of q, float32",
    ),
    "dtype_mix_v": (
        call(change=replace("v", lambda x: x.bfloat16())),
        TypeError,
        "v has dtype bfloat16; it must have the dtype of q, float32",
    ),
    "float64": (
        call(change=every(lambda x: x.double())),
        TypeError,
        f"q has dtype float64; {ALLOWED}",
    ),
    "int64": (
        call(change=every(lambda x: x.long())),
        TypeError,
        f"q has dtype int64; {ALLOWED}",
    ),
    "uint8": (
        call(change=every(lambda x: x.byte())),
        TypeError,
        f"q has dtype uint8; {ALLOWED}",
    ),
    "uint16": (
        call(change=every(lambda x: x.abs().to(torch.uint16))),
        TypeError,
        f"q has dtype uint16; {ALLOWED}",
    ),
    "bool": (
        call(change=every(lambda x: x > 0)),
        TypeError,
        f"q has dtype bool; {ALLOWED}",
    ),
    "complex64": (
        call(change=every(lambda x: x.to(torch.complex64))),
        TypeError,
        f"q has dtype complex64; {ALLOWED}",
    ),
    "float8_e4m3fn": (
        call(change=every(lambda x: x.to(torch.float8_e4m3fn))),
        TypeError,
        f"q has dtype float8_e4m3fn; {ALLOWED}; pantile.quantize takes it, with descales",
    ),
    "float8_e5m2": (
        call(change=every(lambda x: x.to(torch.float8_e5m2))),
        TypeError,
        f"q has dtype float8_e5m2; {ALLOWED}",
    ),
    "sparse": (
        call(change=replace("k", lambda x: x.to_sparse())),
        ValueError,
        "k has layout torch.sparse_coo; it must be torch.strided",
    ),
    "nested": (
        call(change=replace("q", lambda x: torch.nested.nested_tensor([x[0], x[1]]))),
        ValueError,
        "q has layout nested; it must be torch.strided",
    ),
    "meta_and_cpu": (
        call(change=replace("k", lambda x: x.to("meta"))),
        ValueError,
        "k is on meta; it must be on the device of q, cpu",
    ),
    # mask
    "causal_int": (
        call({"causal": 1}),
        TypeError,
        "causal is 1; it must be True or False",
    ),
    "window_int": (
        call({"window": 4}),
        TypeError,
        "window is 4; it must be a pair (left, right) or None",
    ),
    "window_triple": (
        call({"window": (1, 2, 3)}),
        TypeError,
        "window is (1, 2, 3); it must be a pair (left, right) or None",
    ),
    "window_below_minus_1": (
        call({"window": (-2, 0)}),
        ValueError,
        "window[0] is -2; it must be 0 or more, or -1 or None for unbounded",
    ),
    "window_right_below_minus_1": (
        call({"window": (None, -7), "causal": True}),
        ValueError,
        "window[1] is -7; it must be 0 or more, or -1 or None for unbounded",
    ),
    "window_float": (
        call({"window": (1.5, 0)}),
        TypeError,
        "window[0] is 1.5; it must be an integer or None",
    ),
    "window_bool": (
        call({"window": (0, True)}),
        TypeError,
        "window[1] is True; it must be an integer or None",
    ),
    # scalars
    "scale_nan": (
        call({"scale": float("nan")}),
        ValueError,
        "scale is nan; it must be finite",
    ),
    "scale_inf": (
        call({"scale": float("inf")}),
        ValueError,
        "scale is inf; it must be finite",
    ),
    "scale_beyond_float32": (
        call({"scale": -1e300}),
        ValueError,
        "scale is -inf; it must be finite",
    ),
    "scale_text": (
        call({"scale": "0.1"}),
        TypeError,
        "scale is '0.1'; it must be a real number or None",
    ),
    "scale_tensor": (
        call({"scale": torch.tensor(0.5)}),
        TypeError,
        "scale is tensor(0.5000); it must be a real number or None",
    ),
    "return_lse_int": (
        call({"return_lse": 1}),
        TypeError,
        "return_lse is 1; it must be True or False",
    ),
    "deterministic_none": (
        call({"deterministic": None}),
        TypeError,
        "deterministic is None; it must be True or False",
    ),
    "options_dict": (
        call({"options": {"backend": "cpu"}}),
        TypeError,
        "options is {'backend': 'cpu'}; it must be a pantile.Options or None",
    ),
    "backend_unknown": (
        lambda: pantile.Options(backend="tpu"),
        ValueError,
        "backend is 'tpu'; it must be one of auto, hopper, ampere, cpu, reference, torch",
    ),
    "float32_precision_unknown": (
        lambda: pantile.Options(float32_precision="high"),
        ValueError,
        "float32_precision is 'high'; it must be one of auto, highest, tf32",
    ),
    "checked_int": (
        lambda: pantile.Options(checked=1),
        TypeError,
        "checked is 1; it must be True or False",
    ),
    "softmax_unknown": (
        lambda: pantile.Options(softmax="gpu"),
        ValueError,
        "softmax is 'gpu'; it must be one of auto, vector, tensor",
    ),
    "tensor_share_third": (
        lambda: SoftmaxOptions(softmax="tensor", tensor_share=0.3),
        ValueError,
        "tensor_share is 0.3; it must be one of 0, 0.25, 0.5, 1, or None for the table",
    ),
    "softmax_mode_unknown": (
        lambda: SoftmaxOptions(softmax_mode="paper"),
        ValueError,
        "softmax_mode is 'paper'; it must be one of exact, surrogate, fast_scale",
    ),
    "rescale_threshold_text": (
        lambda: SoftmaxOptions(rescale_threshold="8"),
        TypeError,
        "rescale_threshold is '8'; it must be a real number",
    ),
    "softmax_of_another_class": (
        lambda: pantile.Options(softmax=pantile.Options()),
        ValueError,
        "softmax is Options(backend='auto', float32_precision='auto', checked=False, fp8=False, "
        "f...; it must be one of auto, vector, tensor",
    ),
    **{
        f"moved_{name}": (
            lambda name=name: pantile.Options(**{name: 1}),
            TypeError,
            f"{name} is an option of pantile.experimental.SoftmaxOptions; use "
            f"pantile.Options(softmax=pantile.experimental.SoftmaxOptions({name}=...))",
        )
        for name in (
            *("tensor_share", "tensor_split", "softmax_mode", "rescale_threshold"),
            *("p_max_offset", "min_exponent_log2"),
        )
    },
    # arguments of other libraries
    "is_causal": (
        call({"is_causal": True}),
        TypeError,
        "attention() has no argument is_causal: use causal, which is aligned to the bottom right",
    ),
    "softmax_scale": (
        varlen(softmax_scale=0.5),
        TypeError,
        "varlen_attention() has no argument softmax_scale: use scale",
    ),
    "dropout_p": (
        call({"dropout_p": 0.0}),
        TypeError,
        "attention() has no argument dropout_p: use dropout",
    ),
    "attn_mask": (
        call({"attn_mask": torch.ones(4, 6)}),
        TypeError,
        "attention() has no argument attn_mask: a bool mask is mask, a float one bias",
    ),
    "lengths_of_dense_tensors": (
        call({"cu_seqlens_q": torch.zeros(3)}),
        TypeError,
        "attention() has no argument cu_seqlens_q: use varlen_attention",
    ),
    "misspelt": (
        call({"return_les": True}),
        TypeError,
        "attention() has no argument return_les: did you mean return_lse?",
    ),
    "unknown": (
        lambda: pantile.fp8.quantize(*[torch.randn(1, 4, 2, 8)] * 3, colour=1),
        TypeError,
        "quantize() has no argument colour: it has seqused_q, seqused_k, block, block_q, "
        "hadamard, smooth_k, descale_q, descale_k, descale_v, options",
    ),
    "explain_is_causal": (
        lambda: pantile.explain(*[torch.randn(1, 4, 2, 8)] * 3, is_causal=True),
        TypeError,
        "explain() has no argument is_causal: use causal, which is aligned to the bottom right",
    ),
    "dropout_by_position": (
        lambda: pantile.attention(*[torch.randn(1, 4, 2, 8)] * 3, 0.1),
        TypeError,
        "attention() takes no more arguments by position; give causal, window, scale, softcap, "
        "alibi, bias, sinks, dropout, mask, score, return_lse, return_max_logit, deterministic, "
        "options, "
        "out by name",
    ),
    "fp8_of_tensors": (
        lambda: pantile.fp8.attention(torch.randn(1, 4, 2, 8)),
        TypeError,
        "operands is a Tensor of shape [1, 4, 2, 8] and dtype float32; it must be what "
        "pantile.fp8.quantize(q, k, v) returns",
    ),
    "fp8_softmax_scale": (
        lambda: pantile.fp8.attention(None, sm_scale=1.0),
        TypeError,
        "fp8.attention() has no argument sm_scale: use scale",
    ),
    # packed
    "varlen_rank_4": (
        varlen(q=torch.randn(1, 7, 4, 8)),
        ValueError,
        "q has 4 dimensions; it must have 3: [total_q, heads_q, head_dim]",
    ),
    "varlen_v_total": (
        varlen(v=torch.randn(10, 2, 8)),
        ValueError,
        "v has total length 10; it must be 11, the total length of k",
    ),
    "cu_none": (
        varlen(cu_seqlens_k=None),
        TypeError,
        "cu_seqlens_k is None; it must be an int32 tensor of batch + 1 offsets",
    ),
    "cu_list": (
        varlen(cu_seqlens_q=[0, 3, 7]),
        TypeError,
        "cu_seqlens_q is a list; it must be a torch.Tensor like q",
    ),
    "cu_int64": (
        varlen(cu_seqlens_q=torch.tensor([0, 3, 7])),
        TypeError,
        "cu_seqlens_q has dtype int64; it must be int32",
    ),
    "cu_rank": (
        varlen(cu_seqlens_q=int32(0, 3, 7)[None]),
        ValueError,
        "cu_seqlens_q has 2 dimensions; it must have 1: one entry per sequence",
    ),
    "cu_stride": (
        varlen(cu_seqlens_q=int32(0, 9, 3, 9, 7)[::2]),
        ValueError,
        "cu_seqlens_q has stride 2; it must be contiguous",
    ),
    "cu_empty": (
        varlen(cu_seqlens_q=int32()),
        ValueError,
        "cu_seqlens_q is empty; it must hold batch + 1 entries",
    ),
    "cu_counts_differ": (
        varlen(cu_seqlens_k=int32(0, 11)),
        ValueError,
        "cu_seqlens_k has 2 entries; it must have as many as cu_seqlens_q, 3",
    ),
    "cu_starts_late": (
        varlen(cu_seqlens_q=int32(1, 3, 7)),
        ValueError,
        "cu_seqlens_q[0] is 1; it must be 0",
    ),
    "cu_decreases": (
        varlen(cu_seqlens_k=int32(0, 12, 11), max_seqlen_k=12),
        ValueError,
        "cu_seqlens_k[2] is 11; it must be at least cu_seqlens_k[1], 12",
    ),
    "cu_ends_early": (
        varlen(cu_seqlens_k=int32(0, 5, 10)),
        ValueError,
        "cu_seqlens_k[2] is 10; the last offset must be total_k, 11",
    ),
    "cu_ends_late": (
        varlen(cu_seqlens_q=int32(0, 3, 8), max_seqlen_q=5),
        ValueError,
        "cu_seqlens_q[2] is 8; the last offset must be total_q, 7",
    ),
    "sequence_too_long": (
        varlen(cu_seqlens_q=int32(0, 2, 7)),
        ValueError,
        "cu_seqlens_q makes sequence 1 5 long; it must be at most max_seqlen_q (seqlen_q), 4",
    ),
    "max_seqlen_negative": (
        varlen(max_seqlen_k=-1),
        ValueError,
        "max_seqlen_k is -1; it must be from 0 to 536870911",
    ),
    "max_seqlen_too_long": (
        varlen(max_seqlen_q=2**29),
        ValueError,
        "max_seqlen_q is 536870912; it must be from 0 to 536870911",
    ),
    "max_seqlen_forgotten": (
        varlen(max_seqlen_q=None),
        TypeError,
        "max_seqlen_q is missing; it must be the length of the longest sequence",
    ),
    "max_seqlen_float": (
        varlen(max_seqlen_q=4.0),
        TypeError,
        "max_seqlen_q is 4.0; it must be an integer",
    ),
    "seqused_long": (
        varlen(seqused_k=int32(5, 7)),
        ValueError,
        "seqused_k[1] is 7; it must be from 0 to 6",
    ),
    "seqused_negative": (
        varlen(seqused_q=int32(-1, 4)),
        ValueError,
        "seqused_q[0] is -1; it must be from 0 to 3",
    ),
    "seqused_count": (
        varlen(seqused_q=int32(1, 1, 1)),
        ValueError,
        "seqused_q has 3 entries; it must have one per sequence, 2",
    ),
    "seqused_int64": (
        varlen(seqused_q=torch.tensor([1, 1])),
        TypeError,
        "seqused_q has dtype int64; it must be int32",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    run, exception, message = CASES[case]
    with pytest.raises(exception, match=f"^{re.escape(message)}$"):
        run()


@pytest.mark.parametrize("case", ["q_rank_3", "dtype_mix", "heads_do_not_divide", "scale_nan"])
def test_message_through_the_dispatcher(case):
    """A profiler makes calls go through the operator instead of the short cut."""
    run, exception, message = CASES[case]
    with torch.profiler.profile(), pytest.raises(exception, match=f"^{re.escape(message)}$"):
        run()


def test_message_from_a_compiled_graph():
    """What tracing sees it refuses, in the same words; what it cannot see, the graph that runs."""
    compiled = torch.compile(pantile.attention, fullgraph=True, backend="eager")
    made = tensors(k=(2, 7, 3, 8), v=(2, 7, 3, 8))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="heads_q is 4 and heads_k is 3"):
        compiled(**made)

    def run(lengths):
        packed = [x.flatten(0, 1) for x in tensors().values()]
        return pantile.varlen_attention(*packed, lengths, lengths, 10, 14)

    with pytest.raises(ValueError, match="cu_seqlens_q"):
        torch.compile(run, fullgraph=True, backend="eager")(torch.tensor([0, 9, 3]).int())


def test_nothing_is_written():
    """A refused call leaves its output alone: the operator's out tensors are never launched on."""
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    o, lse = torch.full_like(q, 7.0), torch.full((1, 2, 4), 7.0)
    call = bind(Call(scale=float("nan")))
    with pytest.raises(ValueError, match="scale is nan"):
        pantile._C.forward(q, k, v, o, lse, None, None, call)
    assert (o == 7).all()
    assert (lse == 7).all()


def test_unimplemented_arguments_are_refused():
    """Nothing is accepted silently."""
    made = tensors()
    for name in ("score_mod", "alibi_slopes", "dropout_p", "block_mask", "qv"):
        with pytest.raises(TypeError, match=name):
            pantile.attention(**made, **{name: 0.5})


def test_arguments_after_v_are_keywords():
    made = tensors()
    with pytest.raises(TypeError, match="by position"):
        pantile.attention(made["q"], made["k"], made["v"], True)


def test_backend_that_does_not_serve():
    made = tensors()
    for backend in ("hopper", "ampere"):
        with pytest.raises((pantile.UnsupportedError, RuntimeError), match=backend) as caught:
            pantile.attention(**made, options=pantile.Options(backend=backend))
        assert "no forward kernel serves this problem" in str(caught.value) or "has no" in str(
            caught.value
        )


def test_unsupported_error_is_a_not_implemented_error():
    assert issubclass(pantile.UnsupportedError, NotImplementedError)
    assert pantile.UnsupportedError.__module__ == "pantile"


@pytest.mark.gpu
def test_device_mix():
    q, k, v = (torch.randn(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match=r"^k is on cpu; it must be on the device of q, cuda:0$"):
        pantile.attention(q.cuda(), k, v)
    with pytest.raises(ValueError, match=r"^v is on cuda:0; it must be on the device of q, cpu$"):
        pantile.attention(q, k, v.cuda())


@pytest.mark.gpu
def test_checked_mode_reads_device_arrays():
    q = torch.randn(7, 4, 64, dtype=torch.bfloat16, device="cuda")
    bad = int32(0, 5, 4).cuda()
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[2\] is 4; it must be at least"):
        pantile.varlen_attention(q, q, q, bad, bad, 7, 7, options=pantile.Options(checked=True))


NUMPY_CASES = {
    "float64": (
        lambda q, k, v: (q.astype(np.float64), k, v),
        "q has dtype float64; it must be float32, float16 or bfloat16 of ml_dtypes, "
        "in native byte order",
    ),
    "uint16": (
        lambda q, k, v: (q, k.astype(np.uint16), v),
        "k has dtype uint16; it must be float32, float16 or bfloat16 of ml_dtypes, "
        "in native byte order",
    ),
    "byte_order": (
        lambda q, k, v: (q, k, v.astype(">f4")),
        "v has dtype >f4; it must be float32, float16 or bfloat16 of ml_dtypes, "
        "in native byte order",
    ),
    "mix": (
        lambda q, k, v: (q, k, v.astype(np.float16)),
        "v has dtype float16; it must have the dtype of q, float32",
    ),
    "torch": (
        lambda q, k, v: (q, torch.from_numpy(k), v),
        "k is a Tensor; it must be a numpy.ndarray like q",
    ),
}


@pytest.mark.parametrize("case", NUMPY_CASES)
def test_numpy_message(case):
    change, message = NUMPY_CASES[case]
    q, k, v = (np.zeros(x.shape, np.float32) for x in tensors().values())
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        pantile.attention(*change(q, k, v))
