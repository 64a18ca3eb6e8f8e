"""A zoo of wrong values, thrown at every argument of every public function.

Each call either works, or is refused by an error that names the argument: not by whatever
conversion met the value first, in words of its own. New arguments are found by their signature.
"""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import inspect

import numpy as np
import pantile
import pytest
import torch
from pantile.experimental import SoftmaxOptions

OUR_ERRORS = (ValueError, TypeError, pantile.UnsupportedError)


class Rude:
    """Whatever it is asked for, it raises."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


SCALARS = {
    "int64_end": 2**63 - 1,
    "int64_over": 2**63,
    "uint64_over": 2**64,
    "int_negative": -(2**63) - 1,
    "int_huge": 10**400,
    "int_too_long_to_print": 10**5000,
    "minus_one": -1,
    "zero": 0,
    "float": 1.5,
    "float_huge": 1e300,
    "float_tiny": 1e-300,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus_inf": -float("inf"),
    "fraction": fractions.Fraction(10**400, 3),
    "decimal": decimal.Decimal("0.5"),
    "complex": 1j,
    "text": "abc",
    "number_as_text": "2",
    "bytes": b"2",
    "empty": "",
    "none": None,
    "true": True,
    "list": [1, 2],
    "empty_tuple": (),
    "pair": (1, 2),
    "nested_pair": ((1,), (2,)),
    "pair_of_huge": (2**63, 10**400),
    "dict": {"a": 1},
    "set": {1},
    "type": int,
    "function": len,
    "ellipsis": ...,
    "rude": Rude(),
    "np_int64": np.int64(3),
    "np_uint64": np.uint64(2**64 - 1),
    "np_float32": np.float32(2.0),
    "np_nan": np.float64("nan"),
    "np_bool": np.bool_(True),
    "np_str": np.str_("cpu"),
    "np_complex": np.complex64(1),
    "np_array_0d": np.array(2),
    "np_array": np.arange(3),
    "np_float_array": np.zeros((2, 5, 4, 8), np.float32),
    "np_empty": np.zeros(0),
    "np_object": np.array([None, "a"], dtype=object),
    "np_masked": np.ma.masked_array(np.zeros(3, np.int32), mask=[0, 1, 0]),
    "np_dtype": np.dtype("int32"),
}

TENSORS = {
    "scalar_float": lambda: torch.tensor(2.0),
    "scalar_nan": lambda: torch.tensor(float("nan")),
    "scalar_int": lambda: torch.tensor(4),
    "scalar_bool": lambda: torch.tensor(True),
    "scalar_meta": lambda: torch.empty((), dtype=torch.int64, device="meta"),
    "one_float": lambda: torch.ones(1),
    "some_int32": lambda: torch.tensor([0, 3, 7], dtype=torch.int32),
    "some_int64": lambda: torch.tensor([0, 3, 7]),
    "some_float": lambda: torch.tensor([0.0, 3.0, 7.0]),
    "empty": lambda: torch.empty(0),
    "complex": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.complex64),
    "complex_half": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.complex32),
    "bool": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.bool),
    "meta": lambda: torch.zeros(2, 5, 4, 8, device="meta"),
    "sparse": lambda: torch.zeros(2, 5, 4, 8).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2, 5, 4, 8), 0.1, 0, torch.qint8),
    "quantized_uint8": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8),
    "quantized_int32": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint32),
    "float8": lambda: torch.zeros(2, 5, 4, 8).to(torch.float8_e4m3fn),
    "float8_fnuz": lambda: torch.zeros(2, 5, 4, 8).to(torch.float8_e4m3fnuz),
    "float8_e8m0": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "float4": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "uint16": lambda: torch.zeros(2, 5, 4, 8, dtype=torch.uint16),
    "rank_9": lambda: torch.zeros((1,) * 9),
    "lazily_negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2, 5, 4, 8)),
}
ZOO = {**{name: lambda value=value: value for name, value in SCALARS.items()}, **TENSORS}


# ---- calls that work, of every public function


def dense():
    return {
        "q": torch.ones(2, 5, 4, 8),
        "k": torch.ones(2, 7, 2, 8),
        "v": torch.ones(2, 7, 2, 8),
    }


def packed():
    return {
        "q": torch.ones(7, 4, 8),
        "k": torch.ones(11, 2, 8),
        "v": torch.ones(11, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 11], dtype=torch.int32),
        "max_seqlen_q": 4,
        "max_seqlen_k": 6,
    }


def arrays(made: dict) -> dict:
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in made.items()}


def codes():
    return {name: x.to(torch.float8_e4m3fn) for name, x in dense().items()}


def partials():
    return {"partials": [pantile.attention(**dense(), return_lse=True)] * 2}


def quantized():
    return {"q": pantile.quantize(**dense())}


def mask_sizes():
    dropout = pantile.Dropout(0.5, seed=1)
    return {"dropout": dropout, "batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4}


def cache(**given):
    k, v = (torch.ones(6, 4, 2, 8) for _ in range(2))
    table = torch.tensor([[0, 3], [5, 2]], dtype=torch.int32)
    return pantile.KVCache(**{"k": k, "v": v, "block_table": table, **given})


def step():
    return {
        "q": torch.ones(2, 1, 4, 8),
        "cache": cache(),
        "lengths": torch.tensor([3, 6], dtype=torch.int32),
    }


def new_keys():
    return {**step(), "k_new": torch.ones(2, 1, 2, 8), "v_new": torch.ones(2, 1, 2, 8)}


def appended():
    return {name: x for name, x in new_keys().items() if name != "q"}


def packed_step():
    return {
        **step(),
        "q": torch.ones(4, 4, 8),
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "max_seqlen_q": 3,
        "k_new": torch.ones(3, 2, 8),
        "v_new": torch.ones(3, 2, 8),
        "cu_seqlens_new": torch.tensor([0, 1, 3], dtype=torch.int32),
        "max_seqlen_new": 2,
    }


def prefixed():
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    return {
        **step(),
        "cu_members": bounds,
        "max_members": 2,
        "prefix_lengths": torch.tensor([2], dtype=torch.int32),
    }


def latent():
    made = step()
    keys = torch.ones(6, 4, 1, 576)
    del made["q"]
    return {
        **made,
        "q_nope": torch.ones(2, 1, 3, 512),
        "q_rope": torch.ones(2, 1, 3, 64),
        "cache": cache(k=keys, v=None, head_dim_v=512),
        "scale": 0.1,
    }


CALLS = {
    "attention": (pantile.attention, dense),
    "attention_numpy": (pantile.attention, lambda: arrays(dense())),
    "attention_meta": (pantile.attention, lambda: {n: x.to("meta") for n, x in dense().items()}),
    "attention_quantized": (pantile.attention, quantized),
    "varlen_attention": (pantile.varlen_attention, packed),
    "varlen_attention_numpy": (pantile.varlen_attention, lambda: arrays(packed())),
    "explain": (pantile.explain, dense),
    "explain_packed": (pantile.explain, packed),
    "compile": (pantile.compile, dense),
    "quantize": (pantile.quantize, dense),
    "quantize_packed": (pantile.quantize, packed),
    "quantize_codes": (pantile.quantize, codes),
    "merge_attention": (pantile.merge_attention, partials),
    "BlockMask": (lambda **given: attend_blocks(**given), dict),
    "Documents": (lambda **given: attend_documents(**given), dict),
    "Prefix": (lambda **given: attend_prefix(**given), dict),
    "Dropout": (lambda **given: attend_dropped(**given), dict),
    "dropout_mask": (pantile.dropout_mask, mask_sizes),
    "Options": (lambda **given: attend_with(**given), dict),
    "SoftmaxOptions": (lambda **given: attend_softmax(**given), dict),
    "decode": (pantile.decode, step),
    "decode_new": (pantile.decode, new_keys),
    "decode_packed": (pantile.decode, packed_step),
    "append": (pantile.append, appended),
    "decode_schedule": (pantile.decode_schedule, step),
    "explain_decode": (pantile.explain_decode, step),
    "decode_shared_prefix": (pantile.decode_shared_prefix, prefixed),
    "mla_decode": (pantile.mla_decode, latent),
    "KVCache": (lambda **given: decode_cached(**given), dict),
    "shadow": (lambda **given: attend_watched(**given), dict),
    "fp8.attention": (pantile.fp8.attention, lambda: {"operands": pantile.quantize(**dense())}),
}
# Without arguments, or holding answers: nothing to get wrong. Mask and Score: test_expressions.py.
PLAIN = {
    "Autotuned",  # with autotune and clear_autotuned: test_autotune.py
    "autotune",
    "clear_autotuned",
    "DecodeExplanation",
    "Explanation",
    "FlexMask",  # this and flex_attention: test_flex.py
    "checkpoint_save_ops",
    "flex_attention",
    "Mask",
    "PassExplanation",
    "Quantized",
    "Score",
    "ShadowError",
    "ShadowReport",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "build_info",
    "cuda_reason",
    "devices",
    "experimental",
    "fp8",
    "kernels",
    "load_torch",
}


def attend_with(**given):
    return pantile.attention(**dense(), options=pantile.Options(**given))


def decode_cached(**given):
    return pantile.decode(**{**step(), "cache": cache(**given)})


def attend_dropped(**given):
    return pantile.attention(**dense(), dropout=pantile.Dropout(**{"p": 0.5, **given}))


def attend_blocks(**given):
    blocks = torch.ones(2, 4, 1, 1, dtype=torch.bool)
    return pantile.attention(**dense(), mask=pantile.BlockMask(**{"blocks": blocks, **given}))


def attend_documents(**given):
    ids = torch.zeros(2, 5, dtype=torch.int32)
    key_ids = torch.zeros(2, 7, dtype=torch.int32)
    documents = pantile.Documents(**{"ids": ids, "key_ids": key_ids, **given})
    return pantile.attention(**dense(), mask=documents)


def attend_prefix(**given):
    lengths = torch.zeros(2, dtype=torch.int32)
    return pantile.attention(**dense(), mask=pantile.Prefix(**{"lengths": lengths, **given}))


def attend_softmax(**given):
    return attend_with(softmax=SoftmaxOptions(**given))


def attend_watched(**given):
    with pantile.shadow(**{"rate": 1.0, **given}):
        return pantile.attention(**dense())


def parameters(name: str) -> list[str]:
    classes = {
        "BlockMask": pantile.BlockMask,
        "Documents": pantile.Documents,
        "Dropout": pantile.Dropout,
        "KVCache": pantile.KVCache,
        "Options": pantile.Options,
        "Prefix": pantile.Prefix,
        "SoftmaxOptions": SoftmaxOptions,
        "shadow": pantile.shadow,
    }
    found = inspect.signature(classes.get(name, CALLS[name][0])).parameters.values()
    return [x.name for x in found if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]


def test_every_public_function_is_here():
    assert {function.__name__ for function, _ in CALLS.values()} - {"<lambda>"} | PLAIN | {
        "BlockMask",
        "Documents",
        "Dropout",
        "KVCache",
        "Options",
        "Prefix",
        "shadow",
    } == set(pantile.__all__)


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_work(call):
    function, arguments = CALLS[call]
    function(**arguments())


def cases():
    for call in CALLS:
        for parameter in parameters(call):
            yield pytest.param(call, parameter, id=f"{call}-{parameter}")


# Values that are not named by the argument but by what they are of: an int as q is a wrong "q",
# partials are counted, and lengths that contradict the tensors are named by either.
ALSO = {
    "q": ("k ", "v ", "heads_q", "head_dim", "max_seqlen_q", "cu_seqlens_q", "descale", "total_q"),
    "k": ("v ", "q ", "heads_k", "head_dim", "max_seqlen_k", "cu_seqlens_k"),
    "v": ("k ", "head_dim_v"),
    "cu_seqlens_q": ("cu_seqlens_k", "max_seqlen_q", "total_q", "q is", "q has"),
    "cu_seqlens_k": ("cu_seqlens_q", "max_seqlen_k", "total_k", "q has"),
    "max_seqlen_q": ("cu_seqlens_q", "q is"),
    "max_seqlen_k": ("cu_seqlens_k", "q is"),
    "seqused_q": ("q is",),
    "seqused_k": ("q is",),
    "softmax_mode": ("softmax",),
    "tensor_split": ("softmax",),
    "rescale_threshold": ("p_max_offset",),
    "backend": ("hopper", "ampere"),
    "options": ("backend",),
    "partials": ("lse has shape",),
    "blocks": ("mask",),
    "block": ("mask",),
    "ids": ("query_ids",),
    "seqlen_new": ("lengths",),
    "max_members": ("cu_seqlens_q",),
    "cu_members": ("prefix_lengths",),
    "block_table": ("lengths", "k"),
    "k_new": ("v_new",),
    "v_new": ("k_new",),
    "cu_seqlens_new": ("max_seqlen_new", "k_new"),
    "max_seqlen_new": ("cu_seqlens_new",),
    "lengths": ("batch", "cache.k", "block_table", "prefixes"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "parameter"), cases())
def test_wrong_values_are_named(call, parameter):
    function, arguments = CALLS[call]
    strangers = []
    for name, make in ZOO.items():
        given = arguments()
        given[parameter] = make()
        try:
            function(**given)
        except OUR_ERRORS as error:
            text = str(error)
            named = any(part in text for part in (parameter, *ALSO.get(parameter, ())))
            if not named or len(text) > 600:
                strangers.append(f"{name}: {type(error).__name__}: {text[:300]}")
        except Exception as error:
            strangers.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not strangers, "\n".join(strangers)


def test_what_is_right_is_taken():
    """Numbers of other libraries, where they mean the same."""
    q, k, v = dense().values()
    expected = pantile.attention(q, k, v, window=(2, 1), scale=0.5)
    for window in ((np.int64(2), np.uint8(1)), [2, torch.tensor(1)], (2, True + 0)):
        assert torch.equal(
            pantile.attention(q, k, v, window=window, scale=np.float32(0.5)), expected
        )
    unbounded = pantile.attention(q, k, v)
    assert torch.equal(pantile.attention(q, k, v, window=(2**63, 10**400)), unbounded)
    half = fractions.Fraction(1, 2)
    assert torch.equal(pantile.attention(q, k, v, window=(2, 1), scale=half), expected)
    for block in (64, np.int64(64), torch.tensor(64)):
        assert pantile.quantize(q, k, v, block=block).block_k == 64
    made = packed()
    o = pantile.varlen_attention(**made)
    given = {**made, "max_seqlen_q": np.int32(4), "max_seqlen_k": torch.tensor(6)}
    assert torch.equal(pantile.varlen_attention(**given), o)


# ---- lengths have no silent default


GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("function", "device"),
    [
        pytest.param(pantile.varlen_attention, "cpu", id="cpu"),
        pytest.param(pantile.varlen_attention, "meta", id="meta"),
        pytest.param(pantile.varlen_attention, "cuda", id="cuda", marks=GPU),
        pytest.param(pantile.quantize, "cpu", id="quantize_cpu"),
        pytest.param(pantile.quantize, "cuda", id="quantize_cuda", marks=GPU),
    ],
)
@pytest.mark.parametrize("which", ["q", "k"])
def test_lengths_of_packed_tensors_are_demanded(function, device, which):
    """A kernel writes no more rows of a sequence than max_seqlen; the others stay as allocated."""
    made = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in packed().items()}
    name = f"max_seqlen_{which}"
    total, least = (7, 4) if which == "q" else (11, 6)
    function(**made)
    given = dict(made)
    del given[name]
    with pytest.raises(TypeError, match=f"^{name} is missing; it must be the length of the"):
        function(**given)
    for value in (0, least - 1):
        message = (
            rf"^{name}.* is {value}; with batch 2 and total_{which} {total} it must be at least"
        )
        with pytest.raises(ValueError, match=f"{message} {least}$"):
            function(**{**made, name: value})


def test_lengths_are_demanded_by_explain():
    made = packed()
    del made["max_seqlen_k"]
    with pytest.raises(TypeError, match=r"^max_seqlen_k is missing"):
        pantile.explain(**made)
    with pytest.raises(ValueError, match=r"^max_seqlen_q is 4; lengths need cu_seqlens_q"):
        pantile.explain(**dense(), max_seqlen_q=4)
    with pytest.raises(ValueError, match=r"^max_seqlen_k is 4; lengths need cu_seqlens_q"):
        pantile.quantize(**dense(), max_seqlen_k=4)


def test_quantized_operands_know_their_lengths():
    made = pantile.quantize(**packed())
    pantile.varlen_attention(made)
    with pytest.raises(TypeError, match="which knows its sequences"):
        pantile.varlen_attention(made, max_seqlen_q=4)


# ---- options


def test_options_survive_a_round_trip():
    for options in (
        pantile.Options(),
        pantile.Options("cpu", checked=True, output_dtype=torch.float32),
        pantile.Options(softmax="tensor"),
        pantile.Options(softmax=SoftmaxOptions("tensor", tensor_share=0.5, tensor_split="rows")),
    ):
        again = pantile.Options(**dataclasses.asdict(options))
        assert again == options
        for exact in (False, True):
            assert again.call_fields[exact] == options.call_fields[exact]
        changed = dataclasses.replace(options, backend="reference")
        assert changed.call_fields[0] == ("reference", *options.call_fields[0][1:])
