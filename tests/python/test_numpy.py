"""NumPy arrays, with and without torch in the process."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pantile
import pytest
import torch
from support import run_python


def arrays(dtype=np.float32, rows=20, keys=33):
    random = np.random.default_rng(0)
    shapes = ((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 24))
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (3, 5)}], ids=str)
def test_equals_torch(dtype, arguments):
    q, k, v = arrays(dtype)
    o, lse = pantile.attention(q, k, v, return_lse=True, **arguments)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    expected, expected_lse = pantile.attention(*tensors, return_lse=True, **arguments)
    assert isinstance(o, np.ndarray)
    assert o.dtype == dtype
    assert np.array_equal(o, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())
    assert np.array_equal(pantile.attention(q, k, v, **arguments), o)


def test_packed():
    random = np.random.default_rng(1)
    q, k = (random.standard_normal((n, 2, 8), dtype=np.float32) for n in (7, 11))
    bounds = [np.array(x, dtype=np.int32) for x in ([0, 3, 7], [0, 5, 11])]
    used = np.array([2, 4], dtype=np.int32)
    arguments = {"causal": True, "return_lse": True}
    o, lse = pantile.varlen_attention(q, k, k, *bounds, 4, 6, seqused_q=used, **arguments)
    expected = pantile.varlen_attention(
        *(torch.from_numpy(x) for x in (q, k, k)),
        *(torch.from_numpy(x) for x in bounds),
        4,
        6,
        seqused_q=torch.from_numpy(used),
        **arguments,
    )
    assert np.array_equal(o, expected[0].numpy())
    assert np.array_equal(lse, expected[1].numpy())
    assert not o[2].any()
    assert np.isneginf(lse[:, 2]).all()
    with pytest.raises(ValueError, match=r"^cu_seqlens_k\[0\] is 1; it must be 0$"):
        pantile.varlen_attention(q, k, k, bounds[0], bounds[1] + 1, 4, 6)


def test_layouts():
    q, k, v = arrays()
    expected = pantile.attention(q, k, v)
    record = np.zeros(q.shape, dtype=[("tag", "i1"), ("value", "<f4")])
    record["value"] = q  # strides of 5 bytes
    readonly = q.copy()
    readonly.flags.writeable = False
    views = {
        "transposed": np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "reversed": np.ascontiguousarray(q[:, ::-1])[:, ::-1],
        "fortran": np.asfortranarray(q),
        "record": record["value"],
        "readonly": readonly,
    }
    for name, view in views.items():
        assert np.array_equal(pantile.attention(view, k, v), expected), name


def test_zero_sizes():
    q, k, v = arrays(rows=0)
    assert pantile.attention(q, k, v).shape == (2, 0, 4, 24)
    q, k, v = arrays(keys=0)
    o, lse = pantile.attention(q, k, v, return_lse=True)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in arrays())
    o = pantile.attention(q, k, v, causal=True)
    tensors = [torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) for x in (q, k, v)]
    expected = pantile.attention(*tensors, causal=True)
    assert o.dtype == ml_dtypes.bfloat16
    assert np.array_equal(o.view(np.uint16), expected.view(torch.uint16).numpy())


def test_rank_is_named():
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"^q has 3 dimensions; it must have 4"):
        pantile.attention(q[0], k, v)


def test_explain():
    plan = pantile.explain(*arrays(np.float16))
    assert plan.forward.kernel == "cpu_forward_f16"


def test_without_torch():
    """torch is not importable: pantile still imports and serves arrays, and torch stays away."""
    output = run_python(
        """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch":
                    raise ModuleNotFoundError("torch is blocked")

        sys.meta_path.insert(0, Block())
        import pantile
        assert "numpy" not in sys.modules
        import numpy as np

        random = np.random.default_rng(0)
        q, k = (random.standard_normal((1, n, 2, 8)).astype(np.float32) for n in (5, 7))
        o, lse = pantile.attention(q, k, k, return_lse=True)
        scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        expected = np.einsum("bhij,bjhd->bihd", weights / total, k)
        assert np.allclose(o, expected, atol=1e-6)
        assert np.allclose(lse, scores.max(-1) + np.log(total[..., 0]), atol=1e-6)
        print(pantile.__version__, len(pantile.kernels()) > 0, "torch" in sys.modules)
        try:
            pantile.attention([1], k, k)
        except TypeError as error:
            print(error)
        """
    )
    version, message = output.splitlines()
    assert version == f"{pantile.__version__} True False"
    assert message == "q is a list; it must be a torch.Tensor or a numpy.ndarray"


@pytest.mark.parametrize("barred", ["torch", "numpy"])
def test_modules_that_are_barred_from_import(barred):
    """``sys.modules[name] = None`` is Python's way to say so: the name is there, the module not."""
    other = "numpy" if barred == "torch" else "torch"
    output = run_python(
        f"""
        import sys

        sys.modules["{barred}"] = None
        import {other}
        import pantile

        pantile.load_torch()
        q = {other}.ones((1, 3, 1, 8), dtype={other}.float32)
        print(pantile.attention(q, q, q).shape[1], pantile._info.tensor_path() != "")
        part = pantile.attention(q, q, q, return_lse=True)
        print(pantile.merge_attention([part, part])[0].shape[1])
        try:
            pantile.attention([1], q, q)
        except TypeError as error:
            print(error)
        """
    )
    *answers, message = output.splitlines()
    assert answers == ["3 True", "3"]
    assert message == "q is a list; it must be a torch.Tensor or a numpy.ndarray"


MASKED = "it must be a plain numpy.ndarray, which filled() or numpy.ma.getdata() gives"


class WithUnit(np.ndarray):
    """What packages of physical units do."""


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_arrays_whose_meaning_would_be_lost_are_refused(name):
    made = dict(zip(("q", "k", "v"), arrays(), strict=True))
    masked = np.ma.masked_array(made[name], mask=made[name] > 1)
    with pytest.raises(TypeError, match=f"^{name} is a MaskedArray; {re.escape(MASKED)}$"):
        pantile.attention(**{**made, name: masked})
    assert pantile.attention(**{**made, name: masked.filled(0.0)}).shape == (2, 20, 4, 24)
    with pytest.raises(TypeError, match=f"^{name} is a WithUnit; it must be a plain numpy.ndarray"):
        pantile.attention(**{**made, name: made[name].view(WithUnit)})


def test_masked_lengths_are_refused():
    q = np.ones((7, 1, 8), np.float32)
    bounds = np.array([0, 3, 7], np.int32)
    masked = np.ma.masked_array(bounds, mask=[False, True, False])
    with pytest.raises(TypeError, match=r"^cu_seqlens_k is a MaskedArray"):
        pantile.varlen_attention(q, q, q, bounds, masked, 4, 4)
    with pytest.raises(TypeError, match=r"^seqused_q is a MaskedArray"):
        pantile.varlen_attention(q, q, q, bounds, bounds, 4, 4, seqused_q=masked[1:])


def test_memory_mapped_arrays(tmp_path):
    q, k, v = arrays()
    mapped = np.memmap(tmp_path / "q", dtype=q.dtype, mode="w+", shape=q.shape)
    mapped[:] = q
    assert np.array_equal(pantile.attention(mapped, k, v), pantile.attention(q, k, v))


# ---- merging parts


def parts(dtype=np.float32):
    """Attention over the first 10, no and the last 23 keys; some rows see none of a part."""
    q, k, v = arrays(dtype)
    options = pantile.Options(output_dtype=np.float32)
    return [
        pantile.attention(q, k[:, keys], v[:, keys], window=w, return_lse=True, options=options)
        for keys, w in ((slice(0, 10), (None, 0)), (slice(10, 10), None), (slice(10, 33), None))
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_merged_arrays_equal_merged_tensors(dtype):
    made = parts(dtype)
    o, lse = pantile.merge_attention(made)
    assert type(o) is type(lse) is np.ndarray
    assert o.dtype == lse.dtype == np.float32
    expected = pantile.merge_attention([tuple(map(torch.from_numpy, part)) for part in made])
    np.testing.assert_allclose(o, expected[0].numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1].numpy(), rtol=1e-6, atol=1e-6)
    for spelled in (np.float16, "float16", np.dtype("float16"), torch.float16):
        assert pantile.merge_attention(made, dtype=spelled)[0].dtype == np.float16


def test_merged_arrays_are_attention_over_all_keys():
    q, k, v = arrays()
    made = [
        pantile.attention(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(0, 10), slice(10, 33))
    ]
    for found, expected in zip(
        pantile.merge_attention(made), pantile.attention(q, k, v, return_lse=True), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_merged_rows_without_keys():
    q, k, v = arrays(keys=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, lse = pantile.merge_attention([pantile.attention(q, k, v, return_lse=True)] * 2)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_parts_that_do_not_fit_are_named():
    (o, lse), *_ = parts()
    for partials, message in (
        ([(o, torch.from_numpy(lse))], "partials[0][1] is a Tensor; it must be a numpy.ndarray"),
        ([(torch.from_numpy(o), lse)], "partials[0][1] is a ndarray of shape [2, 4, 20]"),
        ([(o, lse), (o,)], "partials[1] is "),
        ([(o, np.ma.masked_array(lse))], "partials[0][1] is a MaskedArray; "),
        ([(o.astype(int), lse)], "partials[0][0] has dtype int64; it must be float32"),
        (o, "partials is a ndarray of shape [2, 20, 4, 24]"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            pantile.merge_attention(partials)
    with pytest.raises(ValueError, match=r"^partials\[0\]\[0\] has 2 dimensions"):
        pantile.merge_attention([(o[0, 0], lse)])


def test_importing_pantile_does_not_import_torch():
    output = run_python("import pantile, sys; print('torch' in sys.modules)")
    assert output.strip() == "False"
