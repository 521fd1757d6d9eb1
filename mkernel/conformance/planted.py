"""Judges the judge: every planted fault must trip the checks that its promise belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from mkernel.backends import registry
from mkernel.conformance.kit import kit_for
from mkernel.errors import ArgumentError, BackendUnavailable, Unsupported
from mkernel.tabular import Column, Sheet


@dataclass(frozen=True)
class Row:
    """The result of one check on one fault: whether it failed as it must, the time it took, and its
    message.

    ``caught`` is None if the fault cannot be planted here, as ``message`` explains. An error that
    came up instead of a judgement catches nothing: a fault that only crashes would pass for one
    that is found. But a claim that is not kept shows as :class:`Unsupported`.
    """

    check: str
    fault: str
    breaks: str
    caught: bool | None
    seconds: float
    message: str


def faults(nic: str | None = None) -> Mapping[str, tuple[str, ...]]:
    """Map faulty backends to the checks that must fail on them: accelerators, or variants of the
    NIC backend ``nic``. Raises ArgumentError if no faults are planted in that NIC backend."""
    if nic is not None:
        from mkernel.conformance.nic_faults import FAULTS as NIC_FAULTS

        if nic not in NIC_FAULTS:
            known = ", ".join(NIC_FAULTS)
            raise ArgumentError("--nic", nic, f"one of those that faults are planted in: {known}")
        return NIC_FAULTS[nic]
    from mkernel.conformance.faults import FAULTS

    return FAULTS


def judge_one(fault: str, checks: Sequence[str], *, nics: bool = False, seed: int = 0) -> list[Row]:
    """Run the named checks alone, quickly, on one faulty backend."""
    backend = (registry.nic if nics else registry.accelerator)(fault.partition(",")[0])
    breaks = (type(backend).__doc__ or "").partition("\n")[0]
    name = fault.rpartition(":")[2]
    try:
        kit = kit_for(None if nics else fault, fault if nics else None, quick=True, seed=seed)
    except BackendUnavailable as missing:
        return [Row(check, name, breaks, None, 0.0, str(missing)) for check in checks]
    # What never comes need not be awaited for long, and one find is enough.
    hasty: dict[str, Any] = {"timeout_s": 2.0} if nics else {"first_find": True}
    kit = replace(kit, subject=replace(kit.subject, **hasty))
    return [
        Row(
            result.name,
            name,
            breaks,
            result.outcome == "failed" and result.raised in ("", Unsupported.__name__),
            result.seconds,
            result.message or result.outcome,
        )
        for result in kit.only(checks).run().results
    ]


def wanted(nic: str | None, only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Reduce :func:`faults` to the checks ``only``, and to faults that have one of these; if
    ``only`` is empty, return all of them."""
    chosen = {
        fault: [check for check in checks if not only or check in only]
        for fault, checks in faults(nic).items()
    }
    return {fault: checks for fault, checks in chosen.items() if checks}


def judge(
    nic: str | None, only: Sequence[str] = (), on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Judge every fault of :func:`wanted`."""
    rows = []
    for fault, checks in wanted(nic, only).items():
        for row in judge_one(fault, checks, nics=nic is not None):
            on_row(row)
            rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> Sheet:
    """Draw a line for every check and fault, ordered by check."""
    judged = [row.caught for row in rows if row.caught is not None]
    drawn = Sheet(
        (
            Column("check", key=True),
            Column("fault", key=True),
            Column("caught"),
            Column("seconds", right=True),
            Column("what it breaks", prose=True),
        ),
        f"planted faults: {sum(judged)} of {len(judged)} caught",
    )
    for row in sorted(rows, key=lambda row: row.check):
        verdict = Text("yes", style="green") if row.caught else Text("NO", style="red")
        if row.caught is None:
            verdict = Text("not planted", style="yellow")
        drawn.row(row.check, row.fault, verdict, f"{row.seconds:.1f}", row.breaks)
    return drawn


def passed(rows: Sequence[Row]) -> bool:
    """Return whether some fault was planted, and every one that was planted is caught."""
    outcomes = {row.caught for row in rows}
    return True in outcomes and False not in outcomes
