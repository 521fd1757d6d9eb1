"""What a table's figures depend on, in sentences: on the page above each table, and on the terminal."""

from __future__ import annotations

from mkernel.harness.results import Report, Route, Timing
from mkernel.harness.spec import MODE_TEXT, Mode
from mkernel.tabular import duration

_ROUTES: dict[Route, str] = {
    "direct": "direct, from accelerators' memory and into it",
    "staged": "staged, by host memory at both ends",
}
_MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


def timed(report: Report) -> list[str]:
    """What a turn of each mode is, and how it is timed."""
    return [_timed(report, mode) for mode in report.spec.modes]


def sentences(report: Report) -> list[str]:
    """One a condition; what an older file does not say is said to be not recorded."""
    return [
        *timed(report),
        *_emulated_nic(report),
        _multicast(report),
        _planner(report),
        commit(report),
    ]


def commit(report: Report) -> str:
    """Which commit, how that is known, and whether the tree was that commit's."""
    source = report.provenance
    name = f"Commit `{source['commit'][:12]}`"
    asserted = {"git": ", read from git", "asserted": ", asserted, not read from git"}.get(
        source.get("commit_from", ""), ", how it is known was not recorded"
    )
    if source["dirty"]:
        return f"{name}{asserted}, with uncommitted changes: do not quote."
    clean = "" if source["dirty"] is None or "commit_from" not in source else ", no changes"
    unknown = ", changes unknown" if source["dirty"] is None else ""
    return f"{name}{asserted}{clean}{unknown}."


def _timed(report: Report, mode: Mode) -> str:
    timing = report.timing.get(mode)
    if timing is None:
        hidden = "counted" if report.spec.launches else "hidden"
        start = "ranks start behind a barrier, their skew not recorded"
        cache = "; the flush leaves dirty cache lines" if report.clock.get("flush_bytes") else ""
        incast = ""
        if report.ranks > 2 and "copy" in report.spec.contenders:
            incast = (
                "; in `copy` all ranks pull from one at a time, which slows it down: rho flatters"
            )
        return f"`{mode}`: {MODE_TEXT[mode]}; launches {hidden}; {start}{cache}{incast}."
    launches = {
        "hidden": "launches hidden: what a call costs the host is not in its time",
        "counted": "launches counted: what a call costs the host is in its time",
    }[timing.launches]
    return f"`{mode}`: {MODE_TEXT[mode]}; {launches}; {_started(timing)}."


def _started(timing: Timing) -> str:
    if timing.median_skew_us is None:
        return "ranks start behind a barrier, their skew not measured"
    found = f"ranks start at an agreed instant, median skew {duration(timing.median_skew_us)}"
    if timing.clock_error_us is not None:
        found += f" by clocks known to {duration(timing.clock_error_us)}"
    if timing.most_skew_us is None:
        return found
    return (
        f"{found}, {timing.dropped} of {timing.turns} turns dropped for a skew above "
        f"{duration(timing.most_skew_us)}"
    )


def _emulated_nic(report: Report) -> list[str]:
    asked = report.provenance["hardware"].get("emulated_nic")
    if asked is None:
        return []
    settings = ", ".join(f"{name}={value}" for name, value in sorted(asked.items()))
    rate = f"at the rate that they were asked for ({settings})" if asked else "as fast as they can"
    routes = " and ".join(_ROUTES[each] for each in report.routes) or "not recorded"
    return [
        f"Emulated NIC: CPUs of this host carry what crosses nodes, {rate}. Route: {routes}. It "
        "shows protocol and overlap, not GPUDirect. T_m, where no library takes the NIC, is bytes by "
        "that rate."
    ]


def _multicast(report: Report) -> str:
    if report.conditions is None:
        return "Multicast of NCCL and symm_mem: not recorded."
    said = report.conditions.environment
    settings = ", ".join(f"{name}={said[name]}" for name in _MULTICAST if name in said)
    return f"NCCL and symm_mem run without multicast, as these machines require ({settings})."


def _planner(report: Report) -> str:
    if report.conditions is None:
        return "What the planner's constants were fitted to: not recorded."
    if not report.conditions.planner:
        return "The backend has one path: no constants choose."
    here = report.spec.source in report.conditions.fitted_to
    shapes = "these shapes" if here else "other shapes"
    lists = f" ({', '.join(report.conditions.fitted_to)})" if report.conditions.fitted_to else ""
    return f"The constants by which the planner chooses a path were fitted to {shapes}{lists}."
