"""Registry of backends, found through entry points, so that third parties ship theirs without
touching this package.

A backend without an entry point is named ``module:attribute`` (``my_package.npu:MyNpu``), as an
entry point would spell it; rank processes import it by that name too.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint
from inspect import isabstract
from typing import TypeVar

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.nic import NicBackend
from mkernel.errors import BackendUnavailable, UnknownBackend
from mkernel.installed import points

_Backend = TypeVar("_Backend")

ACCELERATORS = "mkernel.accelerators"
NICS = "mkernel.nics"

_BY_NAME = (EntryPoint(name="tcp", value="mkernel.backends.nics.tcp:TcpNic", group=NICS),)
"""Backends of this package that nothing lists, because only worlds that need them ask for them."""
_IMPORTABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def names(group: str) -> tuple[str, ...]:
    """Return the sorted names of the backends installed under an entry-point group."""
    return tuple(sorted({point.name for point in points(group)}))


def _point(group: str, argument: str, name: str) -> EntryPoint:
    if ":" in name:
        if not _IMPORTABLE.fullmatch(name):
            raise UnknownBackend(argument, repr(name), "module:attribute, such as my.npu:MyNpu")
        return EntryPoint(name=name, value=name, group=group)
    for point in (*points(group), *_BY_NAME):
        if (point.group, point.name) == (group, name):
            return point
    known = ", ".join(names(group)) or "none"
    raise UnknownBackend(argument, repr(name), f"one of: {known}; or module:attribute")


def _load(group: str, argument: str, name: str, base: type[_Backend]) -> _Backend:
    """Return an object of the class of that name. A class that is no backend is refused before it
    is called."""
    point = _point(group, argument, name)
    try:
        found = point.load()
    except ImportError as error:
        raise BackendUnavailable(
            f"{argument} {name!r} does not import: {error}; "
            "reinstall the package that ships it, or see that it is on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise UnknownBackend(argument, repr(name), "what its module has", why=str(error)) from error
    except (Exception, SystemExit) as error:  # a module that the user names may do anything
        raise BackendUnavailable(
            f"{argument} {name!r} does not import: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)) or isabstract(found):
        what = found.__name__ if isinstance(found, type) else type(found).__name__
        raise BackendUnavailable(
            f"{argument} {name!r} is {what}, not a whole class that derives from {base.__name__}"
        )
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise BackendUnavailable(
            f"{argument} {name!r} raises {type(error).__name__} as it is made: {error}"
        ) from error


@cache
def accelerator(name: str) -> AcceleratorBackend:
    """Return the accelerator backend of that name, for queries of its capabilities. UnknownBackend,
    BackendUnavailable."""
    return new_accelerator(name)


def new_accelerator(name: str) -> AcceleratorBackend:
    """Return an instance for one world, which alone opens it. UnknownBackend, BackendUnavailable."""
    return _load(ACCELERATORS, "accelerator", name, AcceleratorBackend)  # type: ignore[type-abstract]


@cache
def nic(name: str) -> NicBackend:
    """Return the NIC backend of that name. UnknownBackend, BackendUnavailable."""
    return _load(NICS, "nic", name, NicBackend)  # type: ignore[type-abstract]
