"""The mover of this process, by which an emulated NIC reaches the memory of its accelerator.

The accelerator's backend registers it before NIC sessions are opened (``mover.hpp``); NIC backends
pass it to the provider that they open. A real NIC takes none.
"""

from __future__ import annotations


class _Process:
    mover = 0


def register(address: int) -> None:
    """Register the address of a ``Mover`` that stays valid until the process ends; the last call
    counts."""
    _Process.mover = address


def registered() -> int:
    """Return the registered mover's address; 0: none."""
    return _Process.mover
