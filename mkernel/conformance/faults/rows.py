"""The rows of tables of planted faults.

Faults are only there to judge the checks: each is an honest backend with one promise broken. A row
says what is broken, which checks must fail on it, and what is planted to break it.
"""

from __future__ import annotations

import inspect
from abc import update_abstractmethods
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

Wrapper = TypeVar("Wrapper")
Plant = Mapping[str, Any]
"""Attributes of a class that make an honest backend a faulty one."""


@dataclass(frozen=True)
class Row:
    """A planted fault.

    Attributes:
        name: the fault's name; backends are named ``module:name`` with the table's module.
        checks: each of them must fail on it. A row that breaks nothing names checks that must pass.
        backend: an honest backend with that promise broken; its docstring says which one.
    """

    name: str
    checks: tuple[str, ...]
    backend: type[Any]


def planted(
    base: type[Any], name: str, breaks: str, checks: str, *plants: Plant, **attributes: Any
) -> Row:
    """Make a row whose backend is ``base`` with what is planted, and with other attributes and
    methods.

    ``breaks``: the broken promise, in a sentence. ``checks``: names, separated by spaces.
    """
    every = {"__doc__": breaks, "__module__": __name__, **attributes}
    for plant in plants:
        every.update(plant)
    return Row(name, tuple(checks.split()), type(name, (base,), every))


def checks_by_name(module: str, table: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """Map the name of each row's backend in the registry to the row's checks."""
    return {f"{module}:{row.name}": row.checks for row in table}


def forwards(contract: type) -> Callable[[type[Wrapper]], type[Wrapper]]:
    """Have a class pass what it does not define of a contract on to ``self.inner``."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *given, **named: getattr(self.inner, name)(*given, **named)

    def fill(cls: type[Wrapper]) -> type[Wrapper]:
        for name, member in vars(contract).items():
            if name.startswith("_") or name in vars(cls):
                continue
            if inspect.isfunction(member):
                setattr(cls, name, method(name))
            elif isinstance(member, property | classmethod):
                setattr(cls, name, property(attrgetter(f"inner.{name}")))
        return update_abstractmethods(cls)

    return fill
