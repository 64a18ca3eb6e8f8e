"""Functions of torch's ``flex_attention``, ``score_mod`` and ``mask_mod``, as expressions.

A function is called once, with values that write down what is done with them. Operations of torch
on these values are seen by a mode of torch's function protocol, so that tensors which the function
finds in its closure are captured where they are indexed; what it makes of tensors alone, torch
computes. An operation that the language of expressions lacks is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pantile import _C
from pantile._arguments import dtype_name, shown

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

_KEPT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool)
_NARROW_INTEGERS = (torch.int8, torch.uint8, torch.int16)
_INTEGERS = (*_NARROW_INTEGERS, torch.int32, torch.int64)
_MOST_AXES = 4
_MOST_POWER = 8
_INT32 = torch.iinfo(torch.int32)
_DESCRIBING = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim)  # properties


class Untraceable(_C.UnsupportedError):
    """The function uses what cannot be traced."""


# ---- captured tensors

_narrowed = WeakIdKeyDictionary()  # int64 tensor: (its version, the same in int32)


def _in_int32(x: Tensor) -> Tensor:
    """Reads its range once, for which a GPU is waited for, and again when it changed."""
    version, found = _narrowed.get(x, (None, None))
    if found is None or version != x._version:
        if x.numel() and not (_INT32.min <= int(x.min()) and int(x.max()) <= _INT32.max):
            raise ValueError(
                f"a captured tensor of int64 has values from {int(x.min())} to {int(x.max())}; "
                "they must fit into int32"
            )
        found = x.to(torch.int32)
        _narrowed[x] = (x._version, found)
    return found


def _readable(x: Tensor) -> Tensor:
    """A captured tensor as expressions take it."""
    if x.ndim > _MOST_AXES:
        raise Untraceable(
            f"a captured tensor has {x.ndim} axes; it may have up to {_MOST_AXES}: index it less "
            "deeply"
        )
    if x.dtype in _NARROW_INTEGERS:
        return x.to(torch.int32)
    if x.dtype is torch.int64:
        return _in_int32(x)
    if x.dtype not in _KEPT_DTYPES:
        raise Untraceable(
            f"a captured tensor has dtype {dtype_name(x.dtype)}; it may be float32, float16, "
            "bfloat16, bool or of integers"
        )
    return x


@dataclass
class Tape:
    """What was written down: lines of the expression, captured tensors by name."""

    lines: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    prefix: str = "t"
    made: dict[str, Value] = field(default_factory=dict)
    names: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    computes: bool = False  # torch has computed something of tensors alone, on the way

    def table(self, x: Tensor) -> str:
        """The name of a captured tensor."""
        if id(x) not in self.names:
            name = f"{self.prefix}{len(self.tensors)}"
            self.tensors[name] = _readable(x)
            self.names[id(x)] = (x, name)
        return self.names[id(x)][1]

    def value(self, text: str, kind: str, op: str, args: tuple, nonnegative=False) -> Value:
        """A value of the text, under a name of its own."""
        found = self.made.get(text)
        if found is None:
            name = f"_{len(self.lines)}"
            self.lines.append(f"{name} = {text}")
            found = self.made[text] = Value(self, name, kind, op, args, nonnegative)
        return found


# ---- values


def _number(tape: Tape, x: Any) -> Value:
    """A constant."""
    if isinstance(x, bool):
        return Value(tape, str(x), "bool", "constant", (x,))
    if isinstance(x, int):
        if not _INT32.min <= x <= _INT32.max:
            raise Untraceable(f"the number {x} stands in the function; integers have 32 bits")
        return Value(tape, str(x) if x >= 0 else f"({x})", "int", "constant", (x,), x >= 0)
    if math.isnan(x):
        raise Untraceable("the number nan stands in the function; expressions have none")
    text = "inf" if math.isinf(x) else repr(abs(x))
    return Value(tape, text if x >= 0 else f"(-{text})", "real", "constant", (x,))


def _value_of(tape: Tape, x: Any) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | int | float):
        return _number(tape, x)
    if isinstance(x, Row):
        x.refuse()
    if isinstance(x, Tensor):
        if x.numel() != 1:
            raise Untraceable(
                f"a tensor of shape {list(x.shape)} stands beside values of one pair; index it"
            )
        if x.device.type == "cpu" and not x.requires_grad and x.dtype is not torch.bool:
            return _number(tape, x.item())
        return _read(tape, x.reshape(1), (0,))
    if hasattr(x, "item") and getattr(x, "shape", None) == ():  # a number of NumPy
        return _number(tape, x.item())
    raise Untraceable(f"{shown(x)} stands in the function; it may use numbers and tensors")


def _read(tape: Tape, x: Tensor, index: tuple) -> Value:
    """One element of a captured tensor. A negative index counts from the end, as torch's does."""
    places = []
    for axis, i in enumerate(index):
        place = _as_integer(_value_of(tape, i), "an index")
        size = x.shape[axis]
        if place.op == "constant":
            (number,) = place.args
            if not -size <= number < size:
                raise IndexError(f"index {number} is out of range; axis {axis} has size {size}")
            place = _number(tape, number % size)
        elif not place.nonnegative:
            place = tape.value(
                f"where({place.text} < 0, {place.text} + {size}, {place.text})", "int", "wrap", ()
            )
        places.append(place)
    name = tape.table(x)
    dtype = tape.tensors[name].dtype
    kind = "bool" if dtype is torch.bool else "int" if dtype is torch.int32 else "real"
    text = f"{name}[{', '.join(p.text for p in places)}]"
    return tape.value(text, kind, "read", (name, *places))


def _as_integer(x: Value, what: str) -> Value:
    if x.kind == "real":
        raise Untraceable(f"{what} is a real number; rounding of real numbers is not traced")
    return _as_number(x)


def _as_number(x: Value) -> Value:
    if x.kind != "bool":
        return x
    if x.op == "constant":
        return _number(x.tape, int(x.args[0]))
    return x.tape.value(f"where({x.text}, 1, 0)", "int", "number", (x,), True)


def _as_real(x: Value) -> Value:
    if x.kind == "real":
        return x
    if x.op == "constant":
        return _number(x.tape, float(x.args[0]))
    return x.tape.value(f"{_as_number(x).text} * 1.0", "real", "real", (x,))


def _as_condition(x: Value) -> Value:
    if x.op == "constant":
        return _number(x.tape, bool(x.args[0]))
    return x if x.kind == "bool" else x.tape.value(f"{x.text} != 0", "bool", "condition", (x,))


class Value:
    """A value of a traced function: of all pairs of a query and a key, no number yet.

    ``kind``: real, int or bool. ``op`` and ``args``: what it was made by, for masks that kernels
    know. ``nonnegative``: known to be 0 or more.
    """

    __slots__ = ("args", "kind", "nonnegative", "op", "tape", "text")
    __hash__ = object.__hash__

    def __init__(self, tape: Tape, text: str, kind: str, op: str, args: tuple, nonnegative=False):
        self.tape, self.text, self.kind = tape, text, kind
        self.op, self.args, self.nonnegative = op, args, nonnegative

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None):
        return apply(getattr(function, "__name__", str(function)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: apply(name, (self, *args), kwargs)

    @property
    def dtype(self) -> torch.dtype:
        return {"real": torch.float32, "int": torch.int32, "bool": torch.bool}[self.kind]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    ndim = 0

    def __getitem__(self, _: object) -> NoReturn:
        raise Untraceable("a value of one pair is indexed; only captured tensors can be")

    def __bool__(self) -> NoReturn:
        raise Untraceable(
            "a condition depends on the pair of query and key: use torch.where(condition, x, y), & "
            "and | instead of if, and, or"
        )

    def _no_number(self, *_: object) -> NoReturn:
        raise Untraceable(
            "a value of one pair is used as a number of Python; use torch's functions"
        )

    __int__ = __float__ = __index__ = __len__ = __iter__ = _no_number  # type: ignore[assignment]


def _operator(name: str, swapped: bool = False) -> Callable[..., Value]:
    def call(self: Value, *others: Any) -> Value:
        return apply(name, (*others, self) if swapped else (self, *others), {})

    return call


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs"),
):
    setattr(Value, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(Value, f"__r{_name}__", _operator(_name, True))


class Row:
    """A captured tensor of which some axes are indexed."""

    def __init__(self, tape: Tape, tensor: Tensor, index: tuple) -> None:
        self._tape, self._tensor, self._index = tape, tensor, index

    def __getitem__(self, index: Any) -> Any:
        return _indexed(self._tape, self._tensor, self._index, index)

    def refuse(self, *_: object, **__: object) -> NoReturn:
        missing = self._tensor.ndim - len(self._index)
        raise Untraceable(
            f"{missing} axes of a captured tensor of shape {list(self._tensor.shape)} are not "
            "indexed; the values of one pair are numbers"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None):
        next(x for x in args if isinstance(x, cls)).refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse


def _indexed(tape: Tape, tensor: Tensor, before: tuple, index: Any) -> Any:
    index = (*before, *(index if isinstance(index, tuple) else (index,)))
    for i in index:
        if i is None or i is Ellipsis or isinstance(i, slice | list):
            raise Untraceable(
                f"a captured tensor is indexed with {shown(i)}; use one number an axis"
            )
    if len(index) > tensor.ndim:
        raise IndexError(
            f"a captured tensor of shape {list(tensor.shape)} is indexed by {len(index)} numbers"
        )
    return _read(tape, tensor, index) if len(index) == tensor.ndim else Row(tape, tensor, index)


# ---- operations

_SIGNS = {
    **dict.fromkeys(("add", "radd"), "+"),
    **dict.fromkeys(("sub", "subtract"), "-"),
    **dict.fromkeys(("mul", "multiply"), "*"),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), "/"),
    **dict.fromkeys(("floordiv", "floor_divide"), "//"),
    **dict.fromkeys(("mod", "remainder"), "%"),
    **dict.fromkeys(("lt", "less"), "<"),
    **dict.fromkeys(("le", "less_equal"), "<="),
    **dict.fromkeys(("gt", "greater"), ">"),
    **dict.fromkeys(("ge", "greater_equal"), ">="),
    "eq": "==",
    **dict.fromkeys(("ne", "not_equal"), "!="),
}
_LOGIC = {
    **dict.fromkeys(("and", "logical_and", "bitwise_and"), "&"),
    **dict.fromkeys(("or", "logical_or", "bitwise_or"), "|"),
    **dict.fromkeys(("xor", "logical_xor", "bitwise_xor"), "!="),
}
_KEEPS_SIGN = ("+", "*", "//", "%")


def _two(a: Value, sign: str, b: Value) -> Value:
    a, b = _as_number(a), _as_number(b)
    compares = sign in ("<", "<=", ">", ">=", "==", "!=")
    kind = "real" if "real" in (a.kind, b.kind) or sign == "/" else "int"
    if kind == "real" and sign in ("//", "%"):
        raise Untraceable(f"{sign} of real numbers is not traced; use it with integers")
    nonnegative = sign in _KEEPS_SIGN and a.nonnegative and b.nonnegative
    text = f"{a.text} {sign} {b.text}"
    return a.tape.value(text, "bool" if compares else kind, sign, (a, b), nonnegative)


def _logic(a: Value, sign: str, b: Value) -> Value:
    if "real" in (a.kind, b.kind) or (a.kind == b.kind == "int"):
        raise Untraceable(f"{sign} of numbers is not traced; use it with conditions")
    if sign == "!=":
        return _two(a, sign, b)
    a, b = _as_condition(a), _as_condition(b)
    for x, other in ((a, b), (b, a)):  # True & b, False | b: torch's and_masks, or_masks begin so
        if x.op == "constant" and x.args == (sign == "&",):
            return other
    return a.tape.value(f"{a.text} {sign} {b.text}", "bool", sign, (a, b))


def _function(name: str, *args: Value, nonnegative: bool = False) -> Value:
    """A function of expressions, of real numbers."""
    text = f"{name}({', '.join(_as_real(x).text for x in args)})"
    return args[0].tape.value(text, "real", name, args, nonnegative)


def _where(condition: Value, yes: Value, no: Value) -> Value:
    if condition.kind != "bool":
        raise Untraceable("the condition of where is a number; compare it with 0")
    if not yes.kind == no.kind == "bool":
        yes, no = _as_number(yes), _as_number(no)
    if "real" in (yes.kind, no.kind):
        yes, no = _as_real(yes), _as_real(no)
    text = f"where({condition.text}, {yes.text}, {no.text})"
    nonnegative = yes.nonnegative and no.nonnegative
    return condition.tape.value(text, yes.kind, "where", (condition, yes, no), nonnegative)


def _extreme(name: str, a: Value, b: Value) -> Value:
    a, b = _as_number(a), _as_number(b)
    if "real" in (a.kind, b.kind):
        a, b = _as_real(a), _as_real(b)
    known = (a.nonnegative, b.nonnegative)
    nonnegative = any(known) if name == "max" else all(known)
    return a.tape.value(f"{name}({a.text}, {b.text})", a.kind, name, (a, b), nonnegative)


def _clamped(x: Value, low: Any = None, high: Any = None, **named: Any) -> Value:
    low, high = named.get("min", low), named.get("max", high)
    if low is not None:
        x = _extreme("max", x, _value_of(x.tape, low))
    return x if high is None else _extreme("min", x, _value_of(x.tape, high))


def _absolute(x: Value) -> Value:
    x = _as_number(x)
    return x.tape.value(f"abs({x.text})", x.kind, "abs", (x,), True)


def _negative(x: Value) -> Value:
    x = _as_number(x)
    return x.tape.value(f"-{x.text}", x.kind, "negative", (x,))


def _inverted(x: Value) -> Value:
    if x.kind != "bool":
        raise Untraceable("~ of a number is not traced; use it with conditions")
    return x.tape.value(f"~{x.text}", "bool", "~", (x,))


def _power(x: Value, exponent: Value) -> Value:
    """Of a small integer by products; 0.5 is a root."""
    if exponent.op != "constant":
        raise Untraceable("pow with an exponent that hangs on the pair is not traced")
    (n,) = exponent.args
    if n == 0.5:
        return _function("sqrt", x)
    if n != int(n) or not -1 <= n <= _MOST_POWER:
        raise Untraceable(f"pow with the exponent {n} is not traced; -1, 0.5 and 0 to 8 are")
    if n == -1:
        return _two(_number(x.tape, 1), "/", x)
    product = _as_number(x)
    result = _number(x.tape, 1) if n == 0 else product
    for _ in range(int(n) - 1):
        result = _two(result, "*", product)
    return _as_real(result) if exponent.kind == "real" else result


def _cast(x: Value, dtype: Any, *_: Any) -> Value:
    if isinstance(dtype, Value | Tensor):
        dtype = dtype.dtype
    if dtype in (torch.float32, torch.float64, float):
        return _as_real(x)
    if dtype in (torch.float16, torch.bfloat16):
        raise Untraceable(f"a conversion to {dtype_name(dtype)} is not traced; scores are float32")
    if dtype in (*_INTEGERS, int):
        return _as_integer(x, f"what is converted to {dtype_name(dtype) or 'int'}")
    if dtype in (torch.bool, bool):
        return _as_condition(x)
    if isinstance(dtype, str | torch.device):
        return x
    raise Untraceable(f"a conversion to {shown(dtype)} is not traced")


def _to(x: Value, dtype: Any = None, *_: Any, **named: Any) -> Value:
    return _cast(x, named.pop("dtype", dtype) or x.dtype)


def _new(number: float) -> Callable[..., Value]:
    """``x.new_ones(())`` and the like."""

    def call(x: Value, size: Any = (), *_: Any, dtype: Any = None, **_named: Any) -> Value:
        if tuple(size) != ():
            raise Untraceable(f"a tensor of shape {list(size)} is made of a pair; its shape is []")
        return _cast(_number(x.tape, number), dtype or x.dtype)

    return call


def _divided(a: Value, b: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode not in (None, "floor"):
        raise Untraceable(f"div with rounding_mode {rounding_mode!r} is not traced")
    return _two(a, "/" if rounding_mode is None else "//", b)


def _sigmoid(x: Value) -> Value:
    one = _number(x.tape, 1.0)
    return _two(one, "/", _two(one, "+", _function("exp", _negative(x))))


def _sign_of(x: Value) -> Value:
    zero, one = _number(x.tape, 0), _number(x.tape, 1)
    below = _where(_two(x, "<", zero), _number(x.tape, -1), zero)
    return _where(_two(x, ">", zero), one, below)


def _scaled(function: str, factor: float, inside: bool) -> Callable[[Value], Value]:
    """``function(x * factor)``, or ``function(x) * factor``."""

    def call(x: Value) -> Value:
        by = _number(x.tape, factor)
        return (
            _function(function, _two(x, "*", by))
            if inside
            else _two(_function(function, x), "*", by)
        )

    return call


_LN2 = math.log(2.0)
_UNARY: dict[str, Callable[[Value], Value]] = {
    **{
        name: (lambda x, name=name: _function(name, x))  # type: ignore[misc]
        for name in ("log", "tanh")
    },
    "exp": lambda x: _function("exp", x, nonnegative=True),
    "sqrt": lambda x: _function("sqrt", x, nonnegative=True),
    "exp2": _scaled("exp", _LN2, True),
    "log2": _scaled("log", 1 / _LN2, False),
    "log10": _scaled("log", 1 / math.log(10.0), False),
    "log1p": lambda x: _function("log", _two(_number(x.tape, 1.0), "+", x)),
    "expm1": lambda x: _two(_function("exp", x), "-", _number(x.tape, 1.0)),
    "rsqrt": lambda x: _two(_number(x.tape, 1.0), "/", _function("sqrt", x)),
    "reciprocal": lambda x: _two(_number(x.tape, 1.0), "/", x),
    "square": lambda x: _two(x, "*", x),
    "relu": lambda x: _extreme("max", x, _number(x.tape, 0)),
    "sigmoid": _sigmoid,
    **dict.fromkeys(("sign", "sgn"), _sign_of),
    **dict.fromkeys(("abs", "absolute"), _absolute),
    **dict.fromkeys(("neg", "negative"), _negative),
    **dict.fromkeys(("invert", "logical_not", "bitwise_not"), _inverted),
    **dict.fromkeys(("pos", "positive", "clone", "contiguous", "detach_copy"), lambda x: x),
    **dict.fromkeys(("float", "double"), lambda x: _cast(x, torch.float32)),
    **dict.fromkeys(("int", "long", "short"), lambda x: _cast(x, torch.int32)),
    "bool": lambda x: _cast(x, torch.bool),
    "zeros_like": lambda x: _number(x.tape, 0.0),
    "ones_like": lambda x: _number(x.tape, 1.0),
}
_OTHERS: dict[str, tuple[Callable[..., Value], tuple[str, ...]]] = {
    # Operands that are values, by their names in torch; the rest is passed as it is.
    "where": (_where, ("condition", "input", "other")),
    "masked_fill": (lambda x, mask, value: _where(mask, value, x), ("input", "mask", "value")),
    **dict.fromkeys(("minimum", "fmin"), (lambda a, b: _extreme("min", a, b), ("input", "other"))),
    **dict.fromkeys(("maximum", "fmax"), (lambda a, b: _extreme("max", a, b), ("input", "other"))),
    "pow": (_power, ("input", "exponent")),
    **dict.fromkeys(("clamp", "clip"), (_clamped, ("input",))),
    "clamp_min": (lambda x, low=None, **named: _clamped(x, low, None, **named), ("input",)),
    "clamp_max": (lambda x, high=None, **named: _clamped(x, None, high, **named), ("input",)),
    "new_ones": (_new(1), ("input",)),
    "new_zeros": (_new(0), ("input",)),
    "full_like": (lambda x, fill_value, **_: _value_of(x.tape, fill_value), ("input",)),
    **dict.fromkeys(("div", "divide"), (_divided, ("input", "other"))),
    "to": (_to, ("input",)),
    "type_as": (_cast, ("input",)),
}


def _tape_in(args: Any) -> Tape | None:
    for x in args:
        if isinstance(x, Value):
            return x.tape
        if isinstance(x, Row):
            return x._tape
        if isinstance(x, tuple | list):
            found = _tape_in(x)
            if found is not None:
                return found
    return None


def apply(name: str, args: tuple, kwargs: dict) -> Any:
    """An operation of torch or of Python on some value, by its name."""
    name = name.strip("_")
    tape = _tape_in((*args, *kwargs.values()))
    assert tape is not None
    if name in ("min", "max") and len(args) == 2:
        name += "imum"
    if name in ("rsub", "rmul", "rdiv", "rtruediv", "rpow"):
        name, args = {"rdiv": "div", "rtruediv": "div"}.get(name, name[1:]), args[::-1]
    if name == "getitem":
        return _indexed(tape, args[0], (), args[1])
    if name in _OTHERS:
        function, operands = _OTHERS[name]
        values = [_value_of(tape, x) for x in args[: len(operands)]]
        missing = operands[len(values) :]
        named = [_value_of(tape, kwargs[x]) for x in missing if x in kwargs]
        rest = {x: y for x, y in kwargs.items() if x not in missing}
        return function(*values, *named, *args[len(operands) :], **rest)
    if not kwargs:
        if name in _UNARY and len(args) == 1:
            return _UNARY[name](_value_of(tape, args[0]))
        if len(args) == 2 and (name in _SIGNS or name in _LOGIC):
            a, b = (_value_of(tape, x) for x in args)
            return _logic(a, _LOGIC[name], b) if name in _LOGIC else _two(a, _SIGNS[name], b)
    known = sorted({*_UNARY, *_SIGNS, *_LOGIC, *_OTHERS} - {"and", "or", "xor", "radd", "pos"})
    extra = f" with {', '.join(kwargs)}" if kwargs and name in {*_SIGNS, *_UNARY} else ""
    raise Untraceable(f"{name}{extra} is not traced; what is: {', '.join(known)}")


class _Watch(TorchFunctionMode):
    """Sees functions of torch whose operands are tensors and values."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if _tape_in((*args, *kwargs.values())) is None:
            self.tape.computes |= getattr(function, "__self__", None) not in _DESCRIBING
            return function(*args, **kwargs)
        return apply(getattr(function, "__name__", str(function)), args, kwargs)


def trace(function: Callable[..., Any], inputs: tuple[str, ...], prefix: str, what: str) -> Value:
    """What the function gives of values called ``inputs``, of which ``s`` is real."""
    tape = Tape(prefix=prefix)
    values = [
        Value(tape, x, "real" if x == "s" else "int", "input", (x,), x != "s") for x in inputs
    ]
    try:
        with _Watch(tape):
            return _value_of(tape, function(*values))
    except Untraceable as error:
        raise _C.UnsupportedError(f"{what} cannot be traced: {error}") from None


def text_of(tape: Tape, value: Value) -> str:
    return "; ".join([*tape.lines, value.text])
