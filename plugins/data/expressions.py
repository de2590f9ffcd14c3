"""Conditions in a recipe as ibis expressions, such as quality >= 0.85 and len(text) <= 2048.

They have Python's syntax, with comparisons, and, or, not, in, arithmetic and the functions below
only. They are never executed.
"""

import ast
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from plugins.data.errors import DataError, first_line
from runspec.hints import nearest

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "len": (1, lambda text: text.length()),
    "contains": (2, lambda text, part: text.contains(part)),
    "startswith": (2, lambda text, part: text.startswith(part)),
    "endswith": (2, lambda text, part: text.endswith(part)),
    "is_null": (1, lambda value: value.isnull()),
    "abs": (1, lambda value: value.abs()),
}


def text_of(table: Any) -> Any:
    """Return the whole text of a row: the prompt, a new line, and the answer."""
    import ibis

    both = table.prompt + "\n" + table.answer
    return ibis.ifelse(table.prompt.isnull(), table.answer, both)


def length_of(table: Any) -> Any:
    """Return the characters of a row's whole text."""
    return table.answer.length() + (table.prompt.length() + 1).fill_null(0)


def column(table: Any, name: str, where: str) -> Any:
    """Return a column by its name in a recipe; `text` is prompt and answer together."""
    if name == "text":
        return text_of(table)
    if name not in table.columns or name == "_id":
        known = [*(each for each in table.columns if each != "_id"), "text"]
        hint = nearest(name, known)
        raise DataError(
            f"{where}: there is no column {name!r}{hint}; there are {', '.join(known)}; "
            "name further columns under keep: of the source",
            exit_code=2,
        )
    return table[name]


def condition(text: str, table: Any, where: str) -> Any:
    """Return a condition as a boolean expression over a table.

    Raises:
        DataError: it cannot be read, or names a column that does not exist.
    """
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
        expression = _Reader(str(text).strip(), table, where).read(tree)
    except DataError:
        raise
    except SyntaxError as error:
        raise DataError(
            f"{where}: cannot read the condition {text!r} ({error.msg}): write it as in Python, "
            "such as quality >= 0.85 and len(text) <= 2048",
            exit_code=2,
        ) from None
    except Exception as error:
        raise DataError(
            f"{where}: the condition {text!r} does not fit its columns: {first_line(error)}",
            exit_code=2,
        ) from None
    if not hasattr(expression, "type") or not expression.type().is_boolean():
        raise DataError(
            f"{where}: {text!r} is not a condition: compare it with something", exit_code=2
        )
    return expression


class _Reader:
    """Reads a condition's syntax tree as an expression over a table."""

    def __init__(self, text: str, table: Any, where: str) -> None:
        self.text, self.table, self.where = text, table, where

    def read(self, node: ast.AST) -> Any:
        import ibis

        match node:
            case ast.BoolOp(op=op, values=values):
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return reduce(join, map(self.read, values))
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return ~self.read(inner)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self.read(inner)
            case ast.Compare():
                return self._compared(node)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.read(left), self.read(right))
            case ast.Call(func=ast.Name(id=name), args=given, keywords=[]):
                count, function = FUNCTIONS.get(name, (-1, None))
                if function is None or len(given) != count:
                    raise self._refused(node)
                return function(*map(self.read, given))
            case ast.Name(id=name):
                return column(self.table, name, self.where)
            case ast.Constant(value=str() | int() | float() as value):
                return ibis.literal(value)
        raise self._refused(node)

    def _compared(self, node: ast.Compare) -> Any:
        parts, left = [], self.read(node.left)
        for symbol, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(symbol, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
                part = left.isin([self.read(each) for each in right.elts])
                parts.append(~part if isinstance(symbol, ast.NotIn) else part)
                left = None
            elif type(symbol) in _COMPARE:
                value = self.read(right)
                parts.append(_COMPARE[type(symbol)](left, value))
                left = value
            else:
                raise self._refused(node)
        return reduce(operator.and_, parts)

    def _refused(self, node: ast.AST) -> DataError:
        part = ast.get_source_segment(self.text, node) or self.text
        return DataError(
            f"{self.where}: {part!r} cannot be used in a condition: there are comparisons, and, "
            f"or, not, in, arithmetic, and the functions {', '.join(FUNCTIONS)}",
            exit_code=2,
        )
