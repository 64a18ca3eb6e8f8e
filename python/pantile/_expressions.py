"""Scores and masks of the user's own: an expression as text, or a Python function that is traced.

cpp/include/pantile/expression.h defines the language. A function is called once, with values that
write down what is done with them; the text that comes of it is parsed as any other.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from pantile import _C
from pantile._arguments import dtype_name, shown

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CAPTURED = 6  # tensors, by the score and the mask of a call together
_DTYPES = ("float32", "float16", "bfloat16", "int32", "bool")
_INPUTS = {"score": ("s", "b", "h", "i", "j"), "mask": ("b", "h", "i", "j")}


# ---- tracing


def _written(x: object) -> str:
    """A constant as text."""
    if isinstance(x, bool):
        return str(x)
    if isinstance(x, int):
        return str(x) if x >= 0 else f"({x})"
    if isinstance(x, float) and not math.isnan(x):
        text = "inf" if math.isinf(x) else repr(abs(x))
        return text if x >= 0 else f"(-{text})"
    raise TypeError(
        f"{shown(x)} stands in the function; it may use its arguments and Python's own numbers. "
        "Tensors are given by name: pantile.Score(function, table=table)"
    )


class Value:
    """A value of a traced function: of all pairs of a query and a key, no number yet."""

    __slots__ = ("_lines", "_text")
    __hash__ = object.__hash__

    def __init__(self, lines: list[str], text: str) -> None:
        self._lines = lines
        self._text = text

    def _new(self, text: str) -> Value:
        name = f"_{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return Value(self._lines, name)

    def _two(self, sign: str, other: object, swapped: bool = False) -> Value:
        a, b = self._text, _text_of(other)
        return self._new(f"{b} {sign} {a}" if swapped else f"{a} {sign} {b}")

    def _call(self, name: str, *others: object) -> Value:
        return self._new(f"{name}({', '.join((self._text, *map(_text_of, others)))})")

    def __add__(self, other: object) -> Value:
        return self._two("+", other)

    def __radd__(self, other: object) -> Value:
        return self._two("+", other, True)

    def __sub__(self, other: object) -> Value:
        return self._two("-", other)

    def __rsub__(self, other: object) -> Value:
        return self._two("-", other, True)

    def __mul__(self, other: object) -> Value:
        return self._two("*", other)

    def __rmul__(self, other: object) -> Value:
        return self._two("*", other, True)

    def __truediv__(self, other: object) -> Value:
        return self._two("/", other)

    def __rtruediv__(self, other: object) -> Value:
        return self._two("/", other, True)

    def __floordiv__(self, other: object) -> Value:
        return self._two("//", other)

    def __rfloordiv__(self, other: object) -> Value:
        return self._two("//", other, True)

    def __mod__(self, other: object) -> Value:
        return self._two("%", other)

    def __rmod__(self, other: object) -> Value:
        return self._two("%", other, True)

    def __and__(self, other: object) -> Value:
        return self._two("&", other)

    __rand__ = __and__

    def __or__(self, other: object) -> Value:
        return self._two("|", other)

    __ror__ = __or__

    def __lt__(self, other: object) -> Value:
        return self._two("<", other)

    def __le__(self, other: object) -> Value:
        return self._two("<=", other)

    def __gt__(self, other: object) -> Value:
        return self._two(">", other)

    def __ge__(self, other: object) -> Value:
        return self._two(">=", other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self._two("==", other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self._two("!=", other)

    def __neg__(self) -> Value:
        return self._new(f"-{self._text}")

    def __pos__(self) -> Value:
        return self

    def __invert__(self) -> Value:
        return self._new(f"~{self._text}")

    def __abs__(self) -> Value:
        return self._call("abs")

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a condition depends on the pair of query and key: use where(condition, x, y), & and | "
            "instead of if, and, or, min and max"
        )

    def __getitem__(self, _: object) -> NoReturn:
        raise TypeError("only captured tensors can be indexed")

    def exp(self) -> Value:
        return self._call("exp")

    def log(self) -> Value:
        return self._call("log")

    def tanh(self) -> Value:
        return self._call("tanh")

    def sqrt(self) -> Value:
        return self._call("sqrt")

    def abs(self) -> Value:
        return self._call("abs")

    def minimum(self, other: object) -> Value:
        return self._call("min", other)

    def maximum(self, other: object) -> Value:
        return self._call("max", other)

    def clamp(self, min: object = None, max: object = None) -> Value:  # noqa: A002
        value = self if min is None else self.maximum(min)
        return value if max is None else value.minimum(max)

    def where(self, yes: object, no: object) -> Value:
        """``yes`` where this condition holds, else ``no``."""
        return self._call("where", yes, no)

    # Functions of torch and NumPy, by name: torch.tanh(s), numpy.where(c, x, y).

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None):
        return _named_function(getattr(function, "__name__", ""), args, kwargs or {})

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Value:
        return _named_function(function.__name__ if method == "__call__" else method, args, kwargs)

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: Any) -> Value:
        return _named_function(function.__name__, args, kwargs)


_SIGNS = {
    "add": "+",
    "sub": "-",
    "subtract": "-",
    "rsub": "-",
    "mul": "*",
    "multiply": "*",
    "div": "/",
    "true_divide": "/",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "logical_and": "&",
    "bitwise_and": "&",
    "logical_or": "|",
    "bitwise_or": "|",
    "lt": "<",
    "less": "<",
    "le": "<=",
    "less_equal": "<=",
    "gt": ">",
    "greater": ">",
    "ge": ">=",
    "greater_equal": ">=",
    "eq": "==",
    "equal": "==",
    "ne": "!=",
    "not_equal": "!=",
}
_METHODS = {
    **{name: name for name in ("exp", "log", "tanh", "sqrt", "abs", "where", "clamp")},
    "absolute": "abs",
    "fabs": "abs",
    "clip": "clamp",
    "minimum": "minimum",
    "maximum": "maximum",
}


def _named_function(name: str, args: tuple, kwargs: dict) -> Value:
    """A function of torch or NumPy of some Value."""
    name = name.strip("_")
    value = next(x for x in (*args, *kwargs.values()) if isinstance(x, Value))
    if name in _SIGNS and len(args) == 2 and not kwargs:
        return value._new(f"{_text_of(args[0])} {_SIGNS[name]} {_text_of(args[1])}")
    if name in ("neg", "negative"):
        return -value
    if name in ("logical_not", "bitwise_not", "invert"):
        return ~value
    if name not in _METHODS:
        raise TypeError(
            f"{name} cannot be traced; a score or mask may use + - * / // %, comparisons, & | ~, "
            f"and {', '.join(sorted(_METHODS))} of its arguments"
        )
    first, *rest = args
    first = first if isinstance(first, Value) else Value(value._lines, _text_of(first))
    return getattr(first, _METHODS[name])(*rest, **kwargs)


def _text_of(x: object) -> str:
    return x._text if isinstance(x, Value) else _written(x)


class _Table:
    """A captured tensor of a traced function."""

    __slots__ = ("_axes", "_lines", "_name")

    def __init__(self, lines: list[str], name: str, axes: int) -> None:
        self._lines, self._name, self._axes = lines, name, axes

    def __getitem__(self, index: object) -> Value:
        parts = index if isinstance(index, tuple) else (index,)
        return Value(self._lines, "")._new(f"{self._name}[{', '.join(map(_text_of, parts))}]")


def _trace(kind: str, function: Callable[..., Any], tensors: dict[str, Any]) -> str:
    lines: list[str] = []
    inputs = [Value(lines, name) for name in _INPUTS[kind]]
    tables = {name: _Table(lines, name, x.ndim) for name, x in tensors.items()}
    result = _text_of(function(*inputs, **tables))
    return "; ".join([*lines, result])


# ---- what users make


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


class _Expression:
    """The text and the tensors of a score or a mask. ``kind`` is a class attribute."""

    kind = ""
    __slots__ = ("_tensors", "_text")

    def __init__(self, expression: str | Callable[..., Any], /, **tensors: Any) -> None:
        for name, x in tensors.items():
            dtype = dtype_name(getattr(x, "dtype", None))
            if dtype not in _DTYPES:
                raise TypeError(
                    f"{name} is {shown(x)}; it must be a tensor of {', '.join(_DTYPES[:-1])} or "
                    f"{_DTYPES[-1]}"
                )
            if name.startswith("_"):
                raise ValueError(f"a captured tensor is called {name!r}; it must not begin with _")
        if len(tensors) > MOST_CAPTURED:
            raise ValueError(
                f"{len(tensors)} tensors are captured; at most {MOST_CAPTURED} are allowed"
            )
        if isinstance(expression, str):
            text = expression
        elif callable(expression):
            text = _trace(self.kind, expression, tensors)
        else:
            raise TypeError(f"{self.kind} is {shown(expression)}; it must be a text or a function")
        self._text = text
        self._tensors = tensors
        if not _is_compiling():  # a traced program checks it when it runs
            types = [(name, dtype_name(x.dtype), len(x.shape)) for name, x in tensors.items()]
            _C.check_expression(self.kind, text, types)

    @property
    def text(self) -> str:
        """The expression; of a function, what was traced."""
        return self._text

    @property
    def tensors(self) -> dict[str, Any]:
        """What it captures, by name."""
        return dict(self._tensors)

    def __repr__(self) -> str:
        names = "".join(f", {name}=..." for name in self._tensors)
        return f"pantile.{type(self).__name__}({self._text!r}{names})"


class Score(_Expression):
    """A score of the user's own: what attention takes the softmax of, in place of ``s``.

    An expression of ``s``, the score so far (``scale * q . k`` and what softcap, ALiBi and bias
    made of it), ``b``, ``h``, ``i``, ``j``, the numbers of the sequence, query head, query and key,
    and of captured tensors by name, which are indexed by integers::

        pantile.Score("50 * tanh(s / 50)")
        pantile.Score("s + slope[h] * (j - i)", slope=slopes)
        pantile.Score("d = max(i - j, 0); s - rate[h] * log(1 + d)", rate=rates)

    or a function of the same, which is called once and traced. It gets the tensors by name::

        pantile.Score(lambda s, b, h, i, j, table: s + table[h, i - j + n], table=table)

    Operators are + - * / // %, comparisons, ``and or not`` (& | ~), ``x if c else y``; functions
    where, min, max, exp, log, tanh, sqrt, abs; constants inf, True, False. In a function use
    ``torch.where``, ``torch.tanh`` and so on, or the methods of the values. An index outside of its
    axis reads the nearest element, at pairs that are hidden, too.

    Captured tensors are float32, float16, bfloat16, int32 or bool, have one to four axes, and get
    gradients where they are real numbers and require one.
    """

    kind = "score"
    __slots__ = ()


class Mask(_Expression):
    """A mask of the user's own: a condition of ``b``, ``h``, ``i``, ``j`` and captured tensors,
    true where the pair is visible, as a text or a function, in the language of :class:`Score`::

        pantile.Mask("i - j < width[h] or j < 4", width=widths)
        pantile.Mask(lambda b, h, i, j: (i // 64 + j // 64) % 2 == 0)

    It combines with ``causal`` and ``window``: a pair is visible when all show it. What it captures
    has no gradient.
    """

    kind = "mask"
    __slots__ = ()


def expression_fields(score: Score | None, mask: Mask | None) -> tuple[tuple, tuple[str, str, str]]:
    """The captured tensors of a call, and its texts: (score, mask, names of the tensors)."""
    of_score = {} if score is None else score._tensors
    of_mask = {} if mask is None else mask._tensors
    for name, x in of_mask.items():
        if getattr(x, "requires_grad", False):
            raise ValueError(
                f"mask captures {name}, which requires a gradient; a mask has none: capture "
                f"{name}.detach()"
            )
    tensors = (*of_score.values(), *of_mask.values())
    if len(tensors) > MOST_CAPTURED:
        raise ValueError(
            f"score and mask capture {len(tensors)} tensors; together they may capture "
            f"{MOST_CAPTURED}"
        )
    names = ",".join(of_score) + ("|" + ",".join(of_mask) if of_mask else "")
    texts = ("" if score is None else score._text, "" if mask is None else mask._text, names)
    return (*tensors, *(None,) * (MOST_CAPTURED - len(tensors))), texts
