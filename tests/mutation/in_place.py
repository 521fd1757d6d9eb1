"""A mutant put into modules that are imported already, by the code of their functions."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from os.path import realpath
from types import CodeType, FunctionType


class Functions:
    """The functions of this process, by the code that they run."""

    def __init__(self) -> None:
        self._by_code: dict[CodeType, list[FunctionType]] = {}
        for each in gc.get_objects():
            if type(each) is FunctionType:
                self._by_code.setdefault(each.__code__, []).append(each)

    def replace(self, path: str, source: str, mutated: str) -> bool:
        """Have a file's functions run ``mutated``'s code. False, and nothing is done, where that is not
        all: importing does something else, a function closes over something else, or none is here."""
        texts = (source, mutated)
        before, after = (compile(text, path, "exec", dont_inherit=True) for text in texts)
        replaced = []
        for one, other, inside in _differing(before, after):
            if not one.co_flags & _OF_FUNCTION:
                if _own(one) != _own(other):
                    return False
                continue
            functions = [
                each
                for each in self._by_code.get(one, [])
                if realpath(each.__code__.co_filename) == realpath(path)
            ]
            if not (functions or inside) or len(one.co_freevars) != len(other.co_freevars):
                return False
            replaced += [(each, other) for each in functions]
        for function, code in replaced:
            function.__code__ = code
        return bool(replaced)


_OF_FUNCTION = 1  # CO_OPTIMIZED: what modules and classes execute has it not


def _differing(
    one: CodeType, other: CodeType, inside: bool = False
) -> Iterator[tuple[CodeType, CodeType, bool]]:
    """Code that differs, as it lies in each other, the outermost first; ``inside``: of a function,
    whose new code makes it anew."""
    if one == other:
        return
    yield one, other, inside
    pair = (one, other)
    inner, outer = ([c for c in code.co_consts if isinstance(c, CodeType)] for code in pair)
    if len(inner) == len(outer):
        for each in zip(inner, outer, strict=True):
            yield from _differing(*each, inside or bool(one.co_flags & _OF_FUNCTION))


def _own(code: CodeType) -> tuple[object, ...]:
    """What a module's or class' code does by itself: all but the code inside of it."""
    consts = [
        None if isinstance(const, CodeType) else (type(const), const) for const in code.co_consts
    ]
    return code.co_code, tuple(consts), code.co_names
