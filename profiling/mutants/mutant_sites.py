"""Sites of mutants: the operators, constants and names of a file that may be changed, one at a time.

Comparisons, `and` and `or`, arithmetic and signs are swapped, `not` is removed, an integer grows by 1, True and
False change places, and so do `min` and `max`. Left alone is what no test of behaviour can see: annotations,
decorators, `__all__`, imports for types, `assert`, zip's `strict`, and texts (f-strings, `raise`, `__repr__`).
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
NAMES = {"min": "max", "minimum": "maximum", "amin": "amax"}
NAMES |= {new: old for old, new in NAMES.items()}
SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr)
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes from `start` to `end`, which are `before`, become `after`."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    statement: int  # its first line
    in_function: bool


def mutants_of(file: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a file: at most one for each operator, constant or name."""
    offsets = [0]
    for text in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))

    def begin(node: Any) -> int:
        return int(offsets[node.lineno - 1] + node.col_offset)

    def end(node: Any) -> int:
        return int(offsets[node.end_lineno - 1] + node.end_col_offset)

    def change(first: int, last: int, old: str, new: str) -> tuple[int, int, str]:
        """Find `old` between two places, but not in a comment, and return its place and `new`."""
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), source[first:last])
        found = re.search(re.escape(old).replace(r"\ ", r"\s*").encode(), between)
        assert found is not None, (file, first, old)
        return first + found.start(), first + found.end(), new

    def changes(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for before, operator, after in zip([left, *others], ops, others, strict=False):
                    yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=values):
                for before, after in pairwise(values):
                    yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.BinOp(left=before, op=operator, right=after) if type(operator) in OPERATORS:
                yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.AugAssign(target=before, op=operator, value=after) if type(operator) in OPERATORS:
                yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield change(begin(node), begin(operand), "not ", "")
            case ast.UnaryOp(op=ast.USub()):
                yield begin(node), begin(node) + 1, "+"
            case ast.Constant(value=bool(value)):
                yield begin(node), end(node), str(not value)
            case ast.Constant(value=int(value)):
                yield begin(node), end(node), str(value + 1)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in NAMES:
                yield end(node.func) - len(name), end(node.func), NAMES[name]

    for node, statement, in_function in _nodes(ast.parse(source), 1, False):
        for first, last, new in changes(node):
            line = source.count(b"\n", 0, first) + 1
            yield Mutant(file, line, first, last, source[first:last].decode(), new, statement, in_function)


def _nodes(node: ast.AST, statement: int, in_function: bool) -> Iterator[tuple[ast.AST, int, bool]]:
    """Yield the nodes that may be mutated, each with its statement's first line."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return
        case ast.stmt():
            statement = node.lineno
    yield node, statement, in_function
    for field, value in ast.iter_fields(node):
        inner = in_function or (
            field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED) and field not in SKIPPED_FIELDS:
                yield from _nodes(child, statement, inner)
