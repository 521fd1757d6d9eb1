"""Finds backends through entry points, so that third parties ship theirs without touching us."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from mkernel.backends.base import AcceleratorBackend, NicBackend
from mkernel.errors import BackendUnavailable, UnknownBackend

ACCELERATORS = "mkernel.accelerators"
NICS = "mkernel.nics"


def names(group: str) -> tuple[str, ...]:
    """Sorted names of the backends installed under an entry-point group."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def _load(group: str, argument: str, name: str) -> object:
    for point in entry_points(group=group):
        if point.name == name:
            try:
                return point.load()()
            except ImportError as error:
                raise BackendUnavailable(
                    f"{argument} {name!r} is installed but does not import: {error}; "
                    "reinstall the package that ships it"
                ) from error
    known = ", ".join(names(group)) or "none"
    raise UnknownBackend(argument, repr(name), f"one of: {known}")


@cache
def accelerator(name: str) -> AcceleratorBackend:
    """The accelerator backend of that name. UnknownBackend, BackendUnavailable."""
    backend = _load(ACCELERATORS, "accelerator", name)
    if not isinstance(backend, AcceleratorBackend):
        raise BackendUnavailable(f"accelerator {name!r} does not derive from AcceleratorBackend")
    return backend


@cache
def nic(name: str) -> NicBackend:
    """The NIC backend of that name. UnknownBackend, BackendUnavailable."""
    backend = _load(NICS, "nic", name)
    if not isinstance(backend, NicBackend):
        raise BackendUnavailable(f"nic {name!r} does not derive from NicBackend")
    return backend
