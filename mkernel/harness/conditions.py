"""Sentences about what a table's figures depend on: on the page above each table, and on the
terminal."""

from __future__ import annotations

from functools import partial

from mkernel.harness import draws
from mkernel.harness.draws import SPENT
from mkernel.harness.problem import ROWS
from mkernel.harness.results import Report, Route, Timing
from mkernel.harness.shapes import FP8, SHIPPED, listed
from mkernel.harness.spec import LOOP_CALLS, MODE_TEXT, Mode, Shape
from mkernel.harness.work import SHARE
from mkernel.tabular import duration

_ROUTES: dict[Route, str] = {
    "direct": "direct, from accelerators' memory and into it",
    "staged": "staged, by host memory at both ends",
}
SAMPLED = {"ring_attention", "ring_attention_backward"}
"""Ops whose large results no product with random columns compares as a whole."""
_MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


def timed(report: Report) -> list[str]:
    """Say what a turn of each mode is, and how it is timed."""
    return [_timed(report, mode) for mode in report.spec.modes]


def sentences(report: Report) -> list[str]:
    """Return a sentence for each condition; what an older file lacks is said to be not recorded."""
    return [
        *timed(report),
        *_emulated_nic(report),
        _multicast(report),
        *_compared(report),
        _planner(report),
        commit(report),
    ]


def commit(report: Report) -> str:
    """Say which commit it was, how that is known, and whether the tree was that commit's."""
    source = report.provenance
    name = f"Commit `{source['commit'][:12]}`"
    asserted = {
        "git": ", read from git",
        "asserted": ", asserted, not read from git",
        "lost": ", asserted, **not in this history**: it was rewritten afterwards",
    }.get(source.get("commit_from", ""), ", how it is known was not recorded")
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


def _compared(report: Report) -> list[str]:
    """Describe which results were compared, in files that record it."""
    if report.conditions is None or not report.conditions.whole:
        return []
    ops = {row.shape.op for row in report.rows}
    sampled = sorted(ops & SAMPLED)
    if ops <= SAMPLED:
        rows = f"{ROWS} rows of the last result on each set of inputs, other ones in each turn"
    else:
        rows = "all rows of the last result on each set of inputs"
        rows += f" ({ROWS} of them of {' and '.join(sampled)})" if sampled else ""
    calls = (
        ""
        if report.spec.modes == ("kernel",)
        else (
            "; of a loop's other calls all elements were compared with that one's, but of those whose "
            "memory later calls took (results of more than "
            f"1/{LOOP_CALLS * round(1 / SHARE)} of a device's memory)"
        )
    )
    return [f"Compared with float64: {rows}{calls}."]


def _multicast(report: Report) -> str:
    if report.conditions is None:
        return "Multicast of NCCL and symm_mem: not recorded."
    said = report.conditions.environment
    settings = ", ".join(f"{name}={said[name]}" for name in _MULTICAST if name in said)
    return f"NCCL and symm_mem run without multicast, as these machines require ({settings})."


def shapes(report: Report) -> str:
    """Name where the shapes come from, and how many of them the planner was fitted to or chosen by."""
    source, seed = report.spec.source, report.spec.seed
    count, known = len(_distinct(report)), sum(fitted(report).values())
    if source == "random":
        few = f"at most {draws.FEW_ROWS} rows, " if draws.are_few_rows(report.spec.shapes) else ""
        return f"drawn, {few}seed {seed} ({'spent' if known else 'held out'})"
    name = listed_as(report)
    named = "sizes as given" if name is None else f"`{name}`"
    if not known:
        return named
    return f"{named} ({'fitted to' if known == count else f'{known} of {count} fitted to'})"


def listed_as(report: Report) -> str | None:
    """Return the shipped list that the shapes are of, also where the file does not name it."""
    if report.spec.source in SHIPPED:
        return report.spec.source
    sizes = {(shape.op, shape.size) for shape in _distinct(report)}
    whole = (name for name in SHIPPED if sizes <= {(each.op, each.size) for each in listed(name)})
    return next(whole, None)


def fitted(report: Report) -> dict[str, int]:
    """Count the shapes that the planner's constants were fitted to or choices were made by, by the
    list or the spent seed that has them; however a run named its shapes. A draw of a spent seed counts
    whole."""
    lists, seeds = _fitted_to(report)
    if report.spec.source == "random" and report.spec.seed in seeds:
        return {f"seed {report.spec.seed}": len(_distinct(report))}
    sizes = {size: f"seed {seed}" for size, seed in draws.spent_sizes(report.ranks).items()}
    for name in lists:
        sizes |= {shape.size: name for shape in listed(name)}
    found = [sizes[shape.size] for shape in _distinct(report) if shape.size in sizes]
    return {name: found.count(name) for name in dict.fromkeys(found)}


def _fitted_to(report: Report) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Shape lists, and seeds: those that the file recorded and those that are known by now."""
    if report.conditions is None:
        return (), tuple(SPENT)
    return report.conditions.fitted_to, (*SPENT, *report.conditions.spent_seeds)


def _planner(report: Report) -> str:
    lists, _ = _fitted_to(report)
    used = fitted(report)
    if report.conditions is not None and not report.conditions.planner:
        return "The backend has one path: no constants choose."
    count = len(_distinct(report))
    if not used:
        unknown = report.conditions is None or not any(map(partial(_like, report), lists))
        if unknown and report.spec.source != "random":
            return "What the planner's constants for these ops were fitted to: not recorded."
        drawn = report.spec.source == "random"
        fresh = ", and no choice was made by this seed: they are held out" if drawn else ""
        return (
            "The constants by which the planner chooses a path were fitted to other shapes "
            f"({', '.join(lists)}){fresh}."
        )
    many = f"{sum(used.values())} of these {count}" if sum(used.values()) < count else "these"
    return (
        "**Not held out**: the constants by which the planner chooses a path were fitted to "
        f"{many} shapes, or choices were made by them ({'; '.join(map(_named, used))})."
    )


def _named(used: str) -> str:
    """Name a list, or a seed and why it is spent."""
    _, seed, number = used.partition("seed ")
    return f"{used}: {SPENT.get(int(number), 'spent when this was measured')}" if seed else used


def _like(report: Report, name: str) -> bool:
    """Return whether a shape list has rows of the report's ops and kind of operands."""
    scaled = report.spec.scales is not None
    ops = {row.shape.op for row in report.rows}
    return (name == FP8) == scaled and any(shape.op in ops for shape in listed(name))


def _distinct(report: Report) -> list[Shape]:
    """Return the shapes of all rows, each once though several modes have it."""
    return list({repr(row.shape): row.shape for row in report.rows}.values())
