"""A mutant put into modules that are imported already: the code of its functions, without a new import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CodeType, FunctionType


class Functions:
    """The functions of this process, by the code that they run."""

    def __init__(self) -> None:
        self._by_code: dict[CodeType, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType:
                self._by_code.setdefault(each.__code__, []).append(each)

    def replace(self, path: str, source: str, mutated: str) -> bool:
        """Have functions of a file run ``mutated``'s code; False, and nothing is done, where more than
        code of functions differs: what importing executes, or what a function closes over."""
        before, after = (
            compile(text, path, "exec", dont_inherit=True) for text in (source, mutated)
        )
        pairs = differing(before, after)
        if pairs is None:
            return False
        found = [
            (function, after)
            for before, after in pairs
            for function in self._by_code.get(before, [])
            if function.__code__.co_filename == path
        ]
        if any(len(f.__code__.co_freevars) != len(code.co_freevars) for f, code in found):
            return False
        for function, code in found:
            function.__code__ = code
        return True


def differing(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """(before, after) of each function's code that differs; None: other code differs too."""
    pairs = []
    for one, other in _pairs(before, after):
        if one.co_flags & _OPTIMIZED:
            pairs.append((one, other))
        elif _own(one) != _own(other):
            return None
    return pairs


_OPTIMIZED = 1
"""A function's; that of a module or a class has it not."""


def _pairs(one: CodeType, other: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    if one == other:
        return
    yield one, other
    inner, outer = (
        [const for const in code.co_consts if isinstance(const, CodeType)] for code in (one, other)
    )
    if len(inner) == len(outer):
        for pair in zip(inner, outer, strict=True):
            yield from _pairs(*pair)


def _own(code: CodeType) -> tuple[object, ...]:
    """What a module's or class' code does by itself: all but the code inside of it."""
    consts = [
        None if isinstance(const, CodeType) else (type(const), const) for const in code.co_consts
    ]
    return code.co_code, tuple(consts), code.co_names
