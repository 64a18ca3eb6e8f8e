"""Traces of functions of torch's ``flex_attention`` that are kept from call to call.

A function is called anew in each call unless its code says that only what is compared here can
change its trace: it is a function of Python whose globals, closure and defaults are numbers,
tensors and functions of the same kind, and it does nothing but arithmetic, indexing and functions
of torch that are traced. Numbers are compared by value, tensors by shape, dtype, device and
whether they require a gradient; the tensors of the call at hand take the places of those that were
traced. A function that computes something of tensors alone (``slope.exp()[h]``), or reads a number
from one, is not kept.
"""

from __future__ import annotations

import builtins
import dis
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pantile import _flex_trace as tracing

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

_MOST_KEPT = 256
_MOST_NESTED = 8  # functions that call functions

_NUMBERS = (bool, int, float, str, type(None), torch.dtype)
_OF_PYTHON = {
    getattr(builtins, name)
    for name in ("abs", "bool", "float", "int", "max", "min", "pow", "range", "round", "sum")
}
_OF_TENSORS = {"T", "device", "dim", "dtype", "ndim", "numel", "shape", "size"}  # in the key
_DTYPES = {name for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_TRACED = {
    *(*tracing._UNARY, *tracing._SIGNS, *tracing._LOGIC, *tracing._OTHERS),
    *_OF_TENSORS,
    *_DTYPES,
}
# Instructions that leave something behind, or take it from elsewhere; stores to locals do not.
_REFUSED = (
    *("STORE_", "DELETE_", "IMPORT_", "MAKE_FUNCTION", "LOAD_BUILD_CLASS", "LOAD_NAME"),
    *("LOAD_SUPER_ATTR", "YIELD", "GET_AWAITABLE", "SEND", "SETUP_", "BEFORE_WITH"),
)
_LOCAL = ("STORE_FAST", "DELETE_FAST")


class Trace(NamedTuple):
    """What a function gave: a value of no tensors, the expression, and which of the function's
    tensors each captured one is."""

    value: tracing.Value
    text: str
    places: dict[str, int]


class Traced(NamedTuple):
    """A trace, and the tensors of the call at hand."""

    trace: Trace
    tensors: list[Tensor]

    def captured(self) -> dict[str, Tensor]:
        """By name, as expressions take them."""
        return {
            name: tracing._readable(self.tensors[place])
            for name, place in self.trace.places.items()
        }

    def value(self) -> tracing.Value:
        """Of these tensors."""
        tape = tracing.Tape(list(self.trace.value.tape.lines), self.captured())
        tape.names = {
            id(self.tensors[i]): (self.tensors[i], x) for x, i in self.trace.places.items()
        }
        return _copied(self.trace.value, tape, {})


def _copied(x: Any, tape: tracing.Tape, copies: dict[int, tracing.Value]) -> Any:
    """A value on another tape, with all that it was made of."""
    if not isinstance(x, tracing.Value):
        return x
    found = copies.get(id(x))
    if found is None:
        args = tuple(_copied(arg, tape, copies) for arg in x.args)
        found = tracing.Value(tape, x.text, x.kind, x.op, args, x.nonnegative)
        copies[id(x)] = found
    return found


_codes: dict[types.CodeType, tuple[str, ...] | None] = {}  # the globals that it reads
_traces: dict[tuple, Trace] = {}


def _names_of(code: types.CodeType) -> tuple[str, ...] | None:
    """None where the code does what is not compared."""
    if code in _codes:
        return _codes[code]
    read: dict[str, None] = {}
    found: tuple[str, ...] | None = None
    for step in dis.get_instructions(code):
        if step.opname.startswith(_REFUSED) and not step.opname.startswith(_LOCAL):
            break
        if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and step.argval not in _TRACED:
            break
        if step.opname.startswith("LOAD_GLOBAL"):
            read[step.argval] = None
    else:
        found = tuple(read)
    if len(_codes) >= _MOST_KEPT:
        _codes.clear()
    _codes[code] = found
    return found


class _UnknownError(Exception):
    """The function cannot be compared."""


class _Fingerprint:
    """What a trace hangs on, as a key, and the tensors, in the order in which they were met."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def tensor(self, x: Tensor) -> None:
        place = self._places.get(id(x))
        if place is None:
            if x.numel() == 1 or x.layout is not torch.strided or type(x) not in _PLAIN:
                raise _UnknownError  # its number may stand in the text
            place = self._places[id(x)] = len(self.tensors)
            self.tensors.append(x)
        self.key.append((place, x.shape, x.dtype, x.device, x.requires_grad))

    def thing(self, x: Any, depth: int) -> None:
        if isinstance(x, Tensor):
            self.tensor(x)
        elif type(x) in _NUMBERS or x is torch or (type(x) is types.BuiltinFunctionType):
            if type(x) is types.BuiltinFunctionType and x not in _OF_PYTHON:
                raise _UnknownError
            self.key.append((type(x), repr(x) if isinstance(x, float) else x))
        elif type(x) is type and x in _OF_PYTHON:
            self.key.append(x)
        elif type(x) is tuple:
            self.key.append(len(x))
            for part in x:
                self.thing(part, depth)
        elif type(x) is types.FunctionType:
            self.function(x, depth + 1)
        else:
            raise _UnknownError

    def function(self, function: types.FunctionType, depth: int = 0) -> None:
        names = _names_of(function.__code__)
        if names is None or depth > _MOST_NESTED:
            raise _UnknownError
        self.key.append(function.__code__)
        for name in names:
            if name in function.__globals__:
                self.thing(function.__globals__[name], depth)
            else:
                self.thing(getattr(builtins, name, _UnknownError), depth)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # empty
                raise _UnknownError from None
            self.thing(content, depth)
        self.thing(function.__defaults__ or (), depth)
        for name, x in (function.__kwdefaults__ or {}).items():
            self.key.append(name)
            self.thing(x, depth)


_PLAIN = (Tensor, torch.nn.Parameter)


def trace(function: Callable[..., Any], inputs: tuple[str, ...], prefix: str, what: str) -> Traced:
    """As :func:`pantile._flex_trace.trace`, from an earlier call where that is the same."""
    read = _Fingerprint()
    key: tuple | None = None
    if type(function) is types.FunctionType and not torch.compiler.is_compiling():
        try:
            read.function(function)
            key = (inputs, prefix, *read.key)
        except _UnknownError:
            pass
    known = None if key is None else _traces.get(key)
    if known is not None:
        return Traced(known, read.tensors)
    value = tracing.trace(function, inputs, prefix, what)
    tape = value.tape
    tensors = [x for x, _ in tape.names.values()]
    kept = key is not None and not tape.computes
    if kept:
        of_function = {id(x): place for place, x in enumerate(read.tensors)}
        kept = all(x in of_function for x in tape.names)
    if not kept:
        of_function = {id(x): place for place, x in enumerate(tensors)}
    bare = tracing.Tape(list(tape.lines))  # holds no tensor
    places = {name: of_function[x] for x, (_, name) in tape.names.items()}
    found = Trace(_copied(value, bare, {}), tracing.text_of(tape, value), places)
    if not kept:
        return Traced(found, tensors)
    if len(_traces) >= _MOST_KEPT:
        _traces.clear()
    _traces[key] = found
    return Traced(found, read.tensors)
