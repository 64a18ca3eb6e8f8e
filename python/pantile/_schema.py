"""The arguments of the operators: one list of the fields of a call, from which all else is made.

The schema texts of ``torch.ops.pantile``, the tuple :class:`Call`, the stub of ``_C.Call`` in
``_C.pyi`` and the access by name in every kernel, rule and formula come from here. The bindings
hold the same fields (bindings/call.h); a test compares the names.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

from pantile import _C


class Field(NamedTuple):
    name: str
    kind: str  # in the language of torch's operator schemas
    default: Any  # of Call only: the operators have no defaults


# In this order: tensors of a packed call, lengths and mask, options.
CALL_FIELDS = (
    Field("cu_seqlens_q", "Tensor?", None),
    Field("cu_seqlens_k", "Tensor?", None),
    Field("seqused_q", "Tensor?", None),
    Field("seqused_k", "Tensor?", None),
    Field("k_begin", "Tensor?", None),
    Field("mask_shift", "Tensor?", None),
    Field("block_table", "Tensor?", None),
    Field("max_seqlen_q", "SymInt", 0),
    Field("max_seqlen_k", "SymInt", 0),
    Field("scale", "float?", None),  # None: head_dim ** -0.5
    Field("window_left", "SymInt", -1),  # -1: unbounded
    Field("window_right", "SymInt", -1),
    # pantile.Options
    Field("backend", "str", "auto"),
    Field("backend_preferred", "bool", False),  # the environment chose it: it may give way
    Field("float32_precision", "str", "auto"),
    Field("num_splits", "int", 1),  # 0: the plan decides
    Field("softmax", "str", "auto"),
    Field("softmax_preferred", "bool", False),  # the same
    Field("softmax_mode", "str", "exact"),
    Field("tensor_share", "float?", None),
    Field("tensor_split", "str", "keys"),
    Field("rescale_threshold", "float", 8.0),
    Field("p_max_offset", "float", 0.0),
    Field("min_exponent_log2", "float", -100.0),
    Field("exact_lse", "bool", False),  # of the fp32 weights, because the caller gets it
)
NAMES = tuple(field.name for field in CALL_FIELDS)
LENGTHS = NAMES[:7]  # the tensors
PACKING = NAMES[:9]
OPTIONS = NAMES[NAMES.index("backend") :]

# A call in Python, of any values: the symbols of a traced program, too. What goes to the bindings
# is _C.Call, with the same fields; both unpack in the order of the list and have _replace().
Call = namedtuple("Call", NAMES, defaults=[field.default for field in CALL_FIELDS])

NO_PLACES = (None,) * 3  # k_begin, mask_shift and block_table of a call without them
NO_LENGTHS = dict.fromkeys(LENGTHS)


def lengths_of(call: Any) -> tuple:
    """The values of LENGTHS."""
    lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k
    return *lengths, call.k_begin, call.mask_shift, call.block_table


def _fields_of(text: str) -> list[Field]:
    """Of ``"Tensor q, Tensor? k"``."""
    pairs = (item.split() for item in text.split(","))
    return [Field(name, kind, None) for kind, name in pairs]


class Signature:
    """Of one operator: tensors, then the fields of a call or the first of them, then its own."""

    def __init__(self, name: str, before: str, after: str, returns: str, shared=NAMES) -> None:
        first, last = _fields_of(before), _fields_of(after)
        common = CALL_FIELDS[: len(shared)]
        fields = ", ".join(f"{field.kind} {field.name}" for field in (*first, *common, *last))
        self.schema = f"{name}({fields}) -> ({returns})"
        self.operand_count = len(first)
        self._end = len(first) + len(common)
        names = [*(field.name for field in first), "call", *(field.name for field in last)]
        self._arguments = namedtuple(f"{name}_arguments", names)

    def split(self, arguments: tuple) -> Any:
        """The arguments by name; ``call`` is a :class:`Call`."""
        first, end = self.operand_count, self._end
        call = Call(*arguments[first:end])
        return self._arguments(*arguments[:first], call, *arguments[end:])


FORWARD = Signature(
    "forward",
    "Tensor q, Tensor k, Tensor v",
    "bool deterministic, bool checked, bool keep_low",
    "Tensor o, Tensor lse, Tensor o_low",
)
# With what few calls want; max_logit is [0, heads] when it is not wanted.
FORWARD_EXTRA = Signature(
    "forward_extra",
    "Tensor q, Tensor k, Tensor v",
    "bool deterministic, bool checked, bool keep_low, bool max_logit, bool output_f32",
    "Tensor o, Tensor lse, Tensor o_low, Tensor max_logit",
)
BACKWARD = Signature(
    "backward",
    "Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor? o_low, "
    "Tensor lse",
    "bool deterministic",
    "Tensor grad_q, Tensor grad_k, Tensor grad_v",
)
# A variant (pantile._variants): tensors, then numbers. The bindings hold the same fields
# (bindings/variant.h). Plain calls have operators of their own, which do not carry them.
VARIANT_TENSORS = (
    "Tensor? alibi, Tensor? sinks, Tensor? bias, Tensor? dropout_seed, Tensor? mask, "
    "Tensor? query_ids, Tensor? key_ids, Tensor? block_mask, Tensor? prefixes, "
    "Tensor? captured0, Tensor? captured1, Tensor? captured2, Tensor? captured3, "
    "Tensor? captured4, Tensor? captured5"
)
VARIANT_NUMBERS = (
    "float softcap, int dropout, SymInt batch_offset, SymInt head_offset, SymInt query_offset, "
    "SymInt key_offset, int mask_block, int mask_clauses, str score, str mask_expression, "
    "str captured_names"
)
VARIANT = tuple(field.name for field in _fields_of(f"{VARIANT_TENSORS}, {VARIANT_NUMBERS}"))
VARIANT_TENSOR_NAMES = tuple(field.name for field in _fields_of(VARIANT_TENSORS))
VARIANT_TENSOR_COUNT = len(VARIANT_TENSOR_NAMES)
CAPTURED = tuple(name for name in VARIANT_TENSOR_NAMES if name.startswith("captured"))
_NOTHING = {"Tensor?": None, "float": 0.0, "int": 0, "SymInt": 0, "str": ""}
Variant = namedtuple(
    "Variant",
    VARIANT,
    defaults=[_NOTHING[x.kind] for x in _fields_of(f"{VARIANT_TENSORS}, {VARIANT_NUMBERS}")],
)
NO_VARIANT = Variant()  # plain attention


def variant_of(arguments: Any) -> Variant:
    """The variant among the arguments of its operators."""
    return Variant(*(getattr(arguments, name) for name in VARIANT))


FORWARD_VARIANT = Signature(
    "forward_variant",
    f"Tensor q, Tensor k, Tensor v, {VARIANT_TENSORS}",
    f"{VARIANT_NUMBERS}, bool deterministic, bool checked, bool keep_low, bool max_logit, "
    "bool output_f32",
    "Tensor o, Tensor lse, Tensor o_low, Tensor max_logit",
)
# With or without a variant, into a tensor of the caller.
FORWARD_OUT = Signature(
    "forward_out",
    f"Tensor q, Tensor k, Tensor v, Tensor(a!) out, {VARIANT_TENSORS}",
    f"{VARIANT_NUMBERS}, bool checked, bool max_logit",
    "Tensor lse, Tensor max_logit",
)
# Gradients that are not wanted are [0].
BACKWARD_VARIANT = Signature(
    "backward_variant",
    "Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor? o_low, "
    f"Tensor lse, {VARIANT_TENSORS}",
    f"{VARIANT_NUMBERS}, bool deterministic, bool wants_alibi, bool wants_sinks, bool wants_bias, "
    "int wants_captured",  # a bit for each
    "Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_alibi, Tensor grad_sinks, "
    "Tensor grad_bias, " + ", ".join(f"Tensor grad_{name}" for name in CAPTURED),
)
FP8_OPERANDS = (
    "Tensor codes_q, Tensor codes_k, Tensor codes_v, Tensor scale_q, Tensor scale_kv, "
    "Tensor nonfinite_v, Tensor q_dot_mean, Tensor mean_k"
)
FP8_OPERAND_NAMES = tuple(field.name for field in _fields_of(FP8_OPERANDS))
QUANTIZE = Signature(
    "quantize",
    "Tensor q, Tensor k, Tensor v, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v",
    "int block_q, int block_k, bool hadamard, bool smooth_k, str backend",
    FP8_OPERANDS,
    shared=PACKING,
)
# q, k less its mean, and v in 16 bits or float32; with keep_rotation q and k stay rotated.
DEQUANTIZE = Signature(
    "dequantize",
    "Tensor codes_q, Tensor codes_k, Tensor codes_v, Tensor scale_q, Tensor scale_kv",
    "SymInt batch, SymInt rows, SymInt keys, SymInt head_dim, ScalarType dtype, int block_q, "
    "int block_k, bool hadamard, bool keep_rotation, str backend",
    "Tensor q, Tensor k, Tensor v",
    shared=PACKING,
)
FP8_FORWARD = Signature(
    "fp8_forward",
    f"Tensor? q, Tensor? k, Tensor? v, {FP8_OPERANDS}",
    "SymInt batch, SymInt rows, SymInt keys, SymInt head_dim, ScalarType dtype, int block_q, "
    "int block_k, bool hadamard, bool smooth_k, str fp8_exp, str fp8_backward, bool deterministic, "
    "bool checked",
    "Tensor o, Tensor lse",
)
# The gradients of rotated q and k stay rotated; those of q are multiplied by
# core::rotation_balance, those of k divided.
FP8_BACKWARD = Signature(
    "fp8_backward",
    "Tensor grad_o, Tensor? grad_lse, Tensor codes_q, Tensor codes_k, Tensor codes_v, "
    "Tensor scale_q, Tensor scale_kv, Tensor q_dot_mean, Tensor o, Tensor lse",
    "SymInt batch, SymInt rows, SymInt keys, SymInt head_dim, int block_q, int block_k, "
    "bool smooth_k, bool deterministic",
    "Tensor grad_q, Tensor grad_k, Tensor grad_v",
)

_STUB_TYPES = {
    "Tensor?": "Any | None",
    "SymInt": "int",
    "int": "int",
    "float": "float",
    "float?": "float | None",
    "bool": "bool",
    "str": "str",
}


def call_stub() -> str:
    """The class ``Call`` as it stands in ``_C.pyi``."""
    lines = [
        "class Call:",
        '    """One call of the bindings; the fields are those of pantile._schema.Call."""',
        "",
        "    _fields: tuple[str, ...]",
        "    def __init__(",
        "        self,",
        *(f"        {field.name}: {_STUB_TYPES[field.kind]}," for field in CALL_FIELDS),
        "        /,",
        "    ) -> None: ...",
        "    def __iter__(self) -> Iterator[Any]: ...",
        "    def _replace(self, **fields: Any) -> Call: ...",
        "    @property",
        "    def packed(self) -> bool: ...",
    ]
    for field in CALL_FIELDS:
        kind = _STUB_TYPES[field.kind]
        lines += ["    @property", f"    def {field.name}(self) -> {kind}: ..."]
    return "\n".join(lines) + "\n"


def bind(call: Any) -> _C.Call:
    """``call`` for the bindings."""
    return call if type(call) is _C.Call else _C.Call(*call)
