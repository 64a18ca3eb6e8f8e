"""Attention of NumPy arrays on the CPU, forward only. Needs no torch."""

from __future__ import annotations

import numpy as np

from pantile import _C, _watch
from pantile._options import log
from pantile._schema import CAPTURED, LENGTHS, VARIANT_TENSOR_NAMES, lengths_of
from pantile._variants import seed_numbers

_NAMES = ("q", "k", "v")


def _is_bfloat16(dtype: np.dtype) -> bool:
    """The bfloat16 that the package ml_dtypes adds to NumPy."""
    return dtype.name == "bfloat16" and dtype.itemsize == 2


def check_plain(name: str, x: object, like: str = "q") -> None:
    """An array whose values say everything: a mask, or a unit, would be lost without a word."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a numpy.ndarray like {like}")
    if type(x) not in (np.ndarray, np.memmap):
        masked = isinstance(x, np.ma.MaskedArray)
        cure = "filled() or numpy.ma.getdata()" if masked else "numpy.asarray()"
        raise TypeError(
            f"{name} is a {type(x).__name__}; it must be a plain numpy.ndarray, which {cure} gives"
        )


def _check(name: str, x: object) -> None:
    check_plain(name, x)
    native = x.dtype.isnative and x.dtype.name in ("float32", "float16")
    if not native and not _is_bfloat16(x.dtype):
        raise TypeError(
            f"{name} has dtype {x.dtype}; it must be float32, float16 or bfloat16 of ml_dtypes, "
            "in native byte order"
        )


def _check_native(name: str, x: np.ndarray, dtype: str) -> None:
    if x.dtype.name != dtype or not x.dtype.isnative:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {dtype}, in native byte order")


def _check_lengths(name: str, x: object) -> None:
    check_plain(name, x)
    if x.dtype != np.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32")


def _raw(x: np.ndarray) -> np.ndarray:
    """What the bindings read: bfloat16 as uint16, strides in whole elements, as DLPack wants."""
    if any(stride % x.itemsize for stride in x.strides) or not x.flags.aligned:
        x = np.ascontiguousarray(x)
    return x.view(np.uint16) if _is_bfloat16(x.dtype) else x


def prepare(q, k, v, lengths: tuple) -> list[np.ndarray]:
    for name, x in zip(_NAMES, (q, k, v), strict=True):
        _check(name, x)
    for name, x in zip(LENGTHS, lengths, strict=True):
        if x is not None:
            _check_lengths(name, x)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        name, x = ("k", k) if k.dtype != q.dtype else ("v", v)
        raise TypeError(f"{name} has dtype {x.dtype}; it must have the dtype of q, {q.dtype}")
    return [_raw(x) for x in (q, k, v)]


def final_call(q, call: _C.Call) -> _C.Call:
    """Same as pantile._direct.final_call: nothing is left open for host arrays."""
    return call


_FORMS = {  # dtype, which of the bias may be that of q, and axes, of which some may be left out
    "alibi": ("float32", 0),
    "sinks": ("float32", 0),
    "bias": (None, 4),
    "dropout_seed": ("int64", 0),
    "mask": ("bool", 4),
    "query_ids": ("int32", 2),
    "key_ids": ("int32", 2),
    "block_mask": ("bool", 4),
    "prefixes": ("int32", 0),
}


def _raw_variant(variant):
    """Its arrays as the bindings read them."""
    arrays = {}
    for name, x in zip(VARIANT_TENSOR_NAMES, variant, strict=False):
        if x is None:
            continue
        check_plain(name, x)
        dtype, rank = _FORMS.get(name, (None, 0))
        if name in CAPTURED:
            dtype = dtype if _is_bfloat16(x.dtype) else x.dtype.name
        if dtype is None:
            _check(name, x)
        else:
            _check_native(name, x, dtype)
        if 0 < x.ndim < rank:
            x = x[(None,) * (rank - x.ndim)]
        x = x if x.flags.c_contiguous and x.flags.aligned else np.ascontiguousarray(x)
        arrays[name] = _raw(x) if dtype is None else x
    return variant._replace(**arrays)


def explained_variant(variant, q: np.ndarray):
    return _raw_variant(variant)


def _seed_of(dropout) -> np.ndarray:
    """int64 [2]; drawn from NumPy's global generator."""
    if dropout.seed is None:
        return np.random.randint(0, 2**63 - 1, 2, dtype=np.int64)
    if isinstance(dropout.seed, np.ndarray):
        return dropout.seed
    return np.array(seed_numbers(dropout.seed), dtype=np.int64)


def variant_attention(
    q, k, v, call: _C.Call, variant, dropout, deterministic, checked, return_lse, extras
):
    """Same arguments as pantile._variant_ops.variant_attention."""
    if dropout is not None:
        variant = variant._replace(dropout_seed=_seed_of(dropout))
    return attention(
        q, k, v, call, deterministic, checked, return_lse, extras, _raw_variant(variant)
    )


def attention_into(
    q, k, v, out, call: _C.Call, variant, dropout, deterministic, checked, return_lse, extras
):
    """Into ``out``, with a variant and the dropout that asks for a seed, or None twice."""
    check_plain("out", out)
    _check("out", out)
    if not out.flags.writeable:
        raise ValueError("out is read-only; it is written")
    if out.dtype not in (q.dtype, np.float32):
        raise TypeError(
            f"out has dtype {out.dtype}; it must have the dtype of q, {q.dtype}, or be float32"
        )
    if extras is not None and extras[1] and out.dtype != np.float32:
        raise ValueError(
            f"output_dtype is float32, and out has dtype {out.dtype}; leave output_dtype out, the "
            "dtype of out decides"
        )
    if any(stride % out.itemsize for stride in out.strides) or not out.flags.aligned:
        raise ValueError(
            f"out has strides of {out.strides} bytes; each must be a multiple of its element size"
        )
    if variant is not None:
        if dropout is not None:
            variant = variant._replace(dropout_seed=_seed_of(dropout))
        variant = _raw_variant(variant)
    return attention(q, k, v, call, deterministic, checked, return_lse, extras, variant, out)


def attention(
    q, k, v, call: _C.Call, deterministic, checked, return_lse, extras, variant=None, out=None
):
    """Same arguments as pantile._ops.attention; host arrays are always checked."""
    operands = prepare(q, k, v, lengths_of(call))
    packed = call.packed
    rank = 3 if packed else 4
    if q.ndim != rank or v.ndim != (rank if call.block_table is None else 4):
        _C.explain(*operands, call, deterministic)  # raises: names the argument and its rank
    *rows, _ = q.shape
    wants_max_logit, output_f32 = extras or (False, False)
    o = out
    if o is None:
        o = np.empty((*rows, v.shape[-1]), dtype=np.float32 if output_f32 else q.dtype)
    lse = max_logit = None
    if return_lse:
        lse = np.empty((*rows[:-2], rows[-1], rows[-2]), dtype=np.float32)
    if wants_max_logit:
        batch = max(call.cu_seqlens_q.shape[0] - 1, 0) if packed else q.shape[0]
        max_logit = np.full((batch, q.shape[-2]), -np.inf, dtype=np.float32)
    output = o.view(np.uint16) if _is_bfloat16(o.dtype) else o
    if _watch.watchers:
        _watch.skip("NumPy arrays")
    while copies := _C.forward(*operands, output, lse, None, max_logit, call, variant):
        for bit, name in enumerate(_NAMES):
            if copies >> bit & 1:
                log.debug("copies %s, strides %s bytes", name, operands[bit].strides)
                operands[bit] = np.array(operands[bit], order="C", copy=True)
    answer = [x for x in (o, lse, max_logit) if x is not None]
    return tuple(answer) if len(answer) > 1 else o
