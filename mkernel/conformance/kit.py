"""The checks of one backend and what they judge, put together from names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mkernel.conformance.check import Check, Report, Result, run_checks
from mkernel.errors import ArgumentError


@dataclass(frozen=True)
class Kit:
    """A backend to judge (``title``, ``subject``) and the ``checks`` that judge it."""

    title: str
    subject: Any
    checks: tuple[Check, ...]

    def only(self, names: Sequence[str]) -> Kit:
        """Reduce the kit to the named checks. Raises ArgumentError if there is no such check."""
        known = {check.name: check for check in self.checks}
        for name in names:
            if name not in known:
                raise ArgumentError("--check", repr(name), "one of: " + ", ".join(known))
        return Kit(self.title, self.subject, tuple(known[name] for name in dict.fromkeys(names)))

    def run(self, on_result: Callable[[Result], None] = lambda result: None) -> Report:
        """Run every check."""
        return run_checks(self.title, self.subject, self.checks, on_result)


def kit_for(
    accelerator: str | None,
    nic: str | None,
    *,
    verbs: str | None = None,
    quick: bool = False,
    seed: int = 0,
) -> Kit:
    """Make the kit of one backend, named by exactly one of ``accelerator`` and ``nic``.

    Raises:
        ArgumentError: none or both are named, or ``verbs`` beside an accelerator.
        UnknownBackend, BackendUnavailable: the backend is not there, or cannot run here.
    """
    if (accelerator is None) == (nic is None):
        value = "neither" if nic is None else "both"
        raise ArgumentError(
            "--accelerator/--nic", value, "one of them, with the name of the backend to judge"
        )
    if accelerator is not None:
        if verbs is not None:
            raise ArgumentError("--verbs", verbs, "nothing beside --accelerator")
        from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks

        judged = AcceleratorSubject(accelerator, quick, seed)
        judged.require_usable()
        return Kit(f"accelerator {accelerator}", judged, accelerator_checks())
    from mkernel.conformance.nic import NicSubject, nic_checks

    assert nic is not None
    subject = NicSubject.usable(nic, verbs, quick, seed)
    return Kit(str(subject), subject, nic_checks())


def listed(accelerator: str | None, nic: str | None) -> dict[str, tuple[Check, ...]]:
    """List checks by kind of backend: those of the kind that is named, or of both if none is."""
    from mkernel.conformance.accelerator import accelerator_checks
    from mkernel.conformance.nic import nic_checks

    found: dict[str, tuple[Check, ...]] = {}
    if accelerator is not None or nic is None:
        found["accelerator"] = accelerator_checks()
    if nic is not None or accelerator is None:
        found["NIC"] = nic_checks()
    return found
