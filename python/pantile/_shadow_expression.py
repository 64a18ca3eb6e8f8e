"""Expressions of pantile.Score and pantile.Mask on tensors of torch, for the textbook of a shadow.

The language is Python's but for the names of parts and integers that round down, so that Python's
own parser reads it. It shares nothing with cpp/expression.
"""

from __future__ import annotations

import ast
import functools
from typing import Any

import torch

Tensor = torch.Tensor

_FUNCTIONS = {
    **{name: getattr(torch, name) for name in ("exp", "log", "tanh", "sqrt", "abs", "where")},
    "min": torch.minimum,
    "max": torch.maximum,
}
_OPERATORS: dict[type, Any] = {
    ast.Add: torch.add,
    ast.Sub: torch.sub,
    ast.Mult: torch.mul,
    ast.And: torch.logical_and,
    ast.Or: torch.logical_or,
    ast.BitAnd: torch.logical_and,
    ast.BitOr: torch.logical_or,
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
    ast.Eq: torch.eq,
    ast.NotEq: torch.ne,
}


class Expression:
    """The value of an expression of pantile.Score or pantile.Mask on tensors that broadcast."""

    def __init__(self, names: dict[str, Tensor], captured: dict[str, Tensor], device) -> None:
        self._names = dict(names)
        self._captured = captured
        self._device = device
        self._names["inf"] = torch.tensor(torch.inf, dtype=torch.float64, device=device)

    def value(self, text: str) -> Tensor:
        *parts, last = (part.strip() for part in text.split(";"))
        for part in parts:
            if part:
                name, _, definition = part.partition("=")
                self._names[name.strip()] = self._parsed(definition)
        return self._parsed(last)

    def _parsed(self, text: str) -> Tensor:
        return self._of(ast.parse(f"({text.strip()})", mode="eval").body)

    def _of(self, node: Any) -> Tensor:
        return getattr(self, f"_{type(node).__name__}")(node)

    def _Name(self, node):  # noqa: N802 (named as the nodes of ast)
        return self._names[node.id]

    def _Constant(self, node):  # noqa: N802
        kind = {bool: torch.bool, int: torch.int64}.get(type(node.value), torch.float64)
        return torch.tensor(node.value, dtype=kind, device=self._device)

    def _UnaryOp(self, node):  # noqa: N802
        value = self._of(node.operand)
        if isinstance(node.op, ast.Not | ast.Invert):
            return ~value
        return -value if isinstance(node.op, ast.USub) else value

    def _BinOp(self, node):  # noqa: N802
        left, right = self._of(node.left), self._of(node.right)
        if isinstance(node.op, ast.Div):
            return left.double() / right.double()
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            divisor = torch.where(right == 0, 1, right)
            floors = isinstance(node.op, ast.FloorDiv)
            answer = left // divisor if floors else torch.remainder(left, divisor)
            return torch.where(right == 0, 0, answer)
        return self._two(node.op, left, right)

    def _two(self, operator, left, right):
        if left.dtype is not right.dtype and torch.bool not in (left.dtype, right.dtype):
            left, right = left.double(), right.double()
        return _OPERATORS[type(operator)](left, right)

    def _BoolOp(self, node):  # noqa: N802
        values = [self._of(value) for value in node.values]
        return functools.reduce(lambda a, b: self._two(node.op, a, b), values)

    def _Compare(self, node):  # noqa: N802
        sides = [self._of(side) for side in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        return functools.reduce(torch.logical_and, [self._two(*pair) for pair in pairs])

    def _IfExp(self, node):  # noqa: N802
        return self._chosen(*map(self._of, (node.test, node.body, node.orelse)))

    def _chosen(self, condition, yes, no):
        if yes.dtype is not no.dtype:
            yes, no = yes.double(), no.double()
        return torch.where(condition, yes, no)

    def _Call(self, node):  # noqa: N802
        name, values = node.func.id, [self._of(value) for value in node.args]
        if name == "where":
            return self._chosen(*values)
        if len(values) == 2 and values[0].dtype is not values[1].dtype:
            values = [x.double() for x in values]
        if name != "abs" and len(values) == 1:
            values = [values[0].double()]
        return _FUNCTIONS[name](*values)

    def _Subscript(self, node):  # noqa: N802
        table = self._captured[node.value.id]
        nodes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        indices = [
            self._of(x).clamp(0, size - 1) for x, size in zip(nodes, table.shape, strict=True)
        ]
        value = table[tuple(torch.broadcast_tensors(*indices))]
        if value.dtype is torch.bool:
            return value
        return value.double() if value.is_floating_point() else value.to(torch.int64)
