"""Conditions in a recipe as ibis expressions, such as quality >= 0.85 and len(text) <= 2048.

They have Python's syntax, with comparisons, and, or, not, in, arithmetic and the functions below
only. They are never executed.
"""

import ast
import operator
from collections.abc import Callable
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


def length_bucket(table: Any) -> Any:
    """Return k for a text of 2^k - 1 to 2^(k+1) - 2 characters."""
    return (length_of(table) + 1).log2().floor().cast("int64")


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
    import ibis

    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
    except SyntaxError as error:
        raise DataError(
            f"{where}: cannot read the condition {text!r} ({error.msg}): write it as in Python, "
            "such as quality >= 0.85 and len(text) <= 2048",
            exit_code=2,
        ) from None

    def refuse(node: ast.AST) -> DataError:
        part = ast.get_source_segment(str(text).strip(), node) or str(text)
        return DataError(
            f"{where}: {part!r} cannot be used in a condition: there are comparisons, and, or, "
            f"not, in, arithmetic, and the functions {', '.join(FUNCTIONS)}",
            exit_code=2,
        )

    def walk(node: ast.AST) -> Any:
        if isinstance(node, ast.BoolOp):
            parts = [walk(each) for each in node.values]
            joined = parts[0]
            for part in parts[1:]:
                joined = joined & part if isinstance(node.op, ast.And) else joined | part
            return joined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~walk(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -walk(node.operand)
        if isinstance(node, ast.Compare):
            return compare(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            count, function = FUNCTIONS.get(node.func.id, (-1, None))
            if function is None or len(node.args) != count:
                raise refuse(node)
            return function(*(walk(each) for each in node.args))
        if isinstance(node, ast.Name):
            return column(table, node.id, where)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool):
            return ibis.literal(node.value)
        raise refuse(node)

    def compare(node: ast.Compare) -> Any:
        left, joined = walk(node.left), None
        for symbol, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(symbol, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
                part = left.isin([walk(each) for each in right.elts])
                part = ~part if isinstance(symbol, ast.NotIn) else part
                value = None
            elif type(symbol) in _COMPARE:
                value = walk(right)
                part = _COMPARE[type(symbol)](left, value)
            else:
                raise refuse(node)
            joined = part if joined is None else joined & part
            left = value
        return joined

    try:
        expression = walk(tree)
    except DataError:
        raise
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
