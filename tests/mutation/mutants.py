"""Mutants of a Python file: one small change each, of the kind that a slip of the hand makes.

Left alone is what no test should pin down: annotations, docstrings, texts, arguments of decorators and
of raised errors, ``strict=`` of sequences that are equally long.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change: the text from ``start`` to ``end`` (offsets) becomes ``after``."""

    line: int
    last_line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def lines(self) -> range:
        """Its lines."""
        return range(self.line, self.last_line + 1)

    def applied(self, source: str) -> str:
        """The mutated source."""
        return source[: self.start] + self.after + source[self.end :]

    def __str__(self) -> str:
        """On one line, as tables show it."""
        return f"`{' '.join(self.before.split())}` → `{self.after.replace(chr(10), '')}`"


def mutants(source: str) -> list[Mutant]:
    """All mutants of a file, in its order."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text.encode()))
    encoded = source.encode()

    def offset(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    found = []
    for node, changed in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        # What follows stays on its line.
        after = ast.unparse(changed) + "\n" * (node.end_lineno - node.lineno)
        if isinstance(changed, ast.expr):
            after = f"({after})"
        found.append(Mutant(node.lineno, node.end_lineno, start, end, source[start:end], after))
    return found


Located = ast.expr | ast.stmt


def _changes(tree: ast.Module) -> Iterator[tuple[Located, ast.AST]]:
    """(node, what to put there), depth first."""
    for body in tree.body:
        yield from _of(body)


def _of(node: ast.AST) -> Iterator[tuple[Located, ast.AST]]:
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
    for child in _children(node):
        yield from _of(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        skipped += node.decorator_list
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped.append(node.returns)
    if isinstance(node, ast.AnnAssign | ast.arg):
        skipped.append(node.annotation)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is each for each in skipped):
            yield child


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _of_statement(node: ast.stmt) -> Iterator[tuple[Located, ast.AST]]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield node, ast.Pass()
        case ast.Continue():
            yield node, ast.Break()
        case ast.Break():
            yield node, ast.Continue()
        case ast.Return(value=ast.expr() as value):
            if not (
                isinstance(value, ast.Constant) and (value.value is None or value.value is False)
            ):
                yield node, ast.Return(value=ast.Constant(None))
        case ast.If(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield test, ast.UnaryOp(ast.Not(), test)
        case _:
            pass
    if isinstance(node, ast.AugAssign) and type(node.op) in _COMPUTED:
        yield node, _with(node, op=_COMPUTED[type(node.op)]())


def _of_expression(node: ast.expr) -> Iterator[tuple[Located, ast.AST]]:  # noqa: PLR0912
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            yield node, _with(node, ops=[_COMPARED[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED:
            yield node, _with(node, op=_COMPUTED[type(operator)]())
        case ast.BoolOp(op=ast.And()):
            yield node, _with(node, op=ast.Or())
        case ast.BoolOp():
            yield node, _with(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, operand
        case ast.IfExp(test=test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield node, ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield node, ast.Constant(value * 2 + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            yield node, _with(node, func=ast.Name(_CALLED[name]))
        case _:
            pass
    if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        for generator in node.generators:
            for test in generator.ifs:
                yield test, ast.Constant(True)
