"""The findings of one source about a machine, which :mod:`mkernel.topology.merge` puts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkernel.printable import printable
from mkernel.topology.model import Accelerator, Bridge, FabricLink, Nic, Note, NumaNode

_MOST_NOTE = 500
"""The most characters of a note, which may quote a file."""


@dataclass(frozen=True)
class Findings:
    """The facts that one source knows, named like the fields of a node. Unknown ones are left out.

    Ends of ``fabric`` and ``no_p2p`` are ids of this source's own ``accelerators``.
    """

    source: str
    hostname: str | None = None
    numa: tuple[NumaNode, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    nics: tuple[Nic, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    fabric: tuple[FabricLink, ...] = ()
    fabric_known: bool = False
    no_p2p: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()


class Notes:
    """A collection of the notes of one source, each once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._notes: dict[str, Note] = {}

    def add(self, message: str) -> None:
        shown = printable(message, _MOST_NOTE)
        self._notes.setdefault(shown, Note(source=self.source, message=shown))

    def add_unclassed(self, addresses: Sequence[str]) -> None:
        """Add one note about the PCI functions whose class is unknown."""
        if addresses:
            self.add(
                f"{len(addresses)} PCI functions without a class, so that nobody knows what they are; "
                f"left out: {', '.join(addresses)}"
            )

    def all(self) -> tuple[Note, ...]:
        return tuple(self._notes.values())
