"""A job's outcome as data: what ``--json`` prints and what the terminal shows.

Two clocks, never mixed: *wall* is this machine's time, *modelled* is what the accelerator's machine
model predicts. Formulae (docs/architecture.md): speed-up = sequential / pipelined; overlap
efficiency = (T_comm + T_compute - T_pipelined) / min(T_comm, T_compute), of times without a launch
where it is known: each part alone has one, and so has the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mkernel.backends.contracts.instrumented import ModelledRun, View
from mkernel.cases import Comparison
from mkernel.harness.rank import RankResult
from mkernel.harness.spec import VIEWS, Job
from mkernel.harness.turns import Turns
from mkernel.harness.verdict import Verification, verify
from mkernel.plan.model import LaunchPlan, Prediction
from mkernel.tabular import Column, Sheet, amount, duration, in_unit, unit_of
from mkernel.topology.model import Model, Topology


class Clock(Model):
    """The three views on one clock, in milliseconds; the slowest rank's, median of iterations.

    ``comm_only_ms`` ends when the bytes have arrived. ``noise_ms``: the largest spread of a view
    over the iterations; an overlap efficiency whose denominator is smaller says nothing.
    """

    compute_only_ms: float
    comm_only_ms: float
    sequential_ms: float
    pipelined_ms: float
    speedup: float
    overlap_efficiency: float
    noise_ms: float = 0.0


class RunReport(Model):
    """Everything that a job found."""

    op: str
    passed: bool
    verification: Verification
    wall: Clock
    modelled: Clock | None
    modelled_machine: str | None
    nic_bytes: int
    iterations: int
    plan: LaunchPlan
    topology: Topology


def clock(
    compute: float,
    comm: float,
    sequential: float,
    pipelined: float,
    noise: float = 0.0,
    launch: float = 0.0,
) -> Clock:
    """Return a :class:`Clock` of times in milliseconds. ``launch``: of these, what each part alone and
    the pipelined call begin with; 0 where it is not known."""
    hidden = compute + comm - pipelined - launch
    least = max(0.0, min(compute, comm) - launch)
    return Clock(
        compute_only_ms=compute,
        comm_only_ms=comm,
        sequential_ms=sequential,
        pipelined_ms=pipelined,
        speedup=sequential / pipelined if pipelined else 0.0,
        overlap_efficiency=hidden / least if least else 0.0,
        noise_ms=noise,
    )


Views = Mapping[View, ModelledRun]
"""A call in each view, on the modelled machine."""


def modelled_clock(calls: Sequence[Views], comm_us: float | None = None) -> Clock:
    """Return the three views in modelled time, of calls that follow each other. ``comm_us``:
    communication alone, where it was modelled by itself; else what is sequential and not compute.
    Kernels of a call start when it is launched."""

    def total_ms(view: View) -> float:
        return sum(call[view].total_us for call in calls) / 1e3

    return clock(
        total_ms("compute_only"),
        (sum(_comm_us(call["sequential"]) for call in calls) if comm_us is None else comm_us) / 1e3,
        total_ms("sequential"),
        total_ms("pipelined"),
        launch=sum(_launch_us(call["pipelined"]) for call in calls) / 1e3,
    )


def _launch_us(run: ModelledRun) -> float:
    return min((kernel.start_us for kernel in run.kernels), default=0.0)


def _comm_us(sequential: ModelledRun) -> float:
    """Return communication's time on every rank, alone, with the time to launch it: until the bytes
    have arrived and compute is launched, or, where compute comes first, from its end on. With compute
    alone it makes up the sequential time."""
    starts = {
        kernel: max((k.start_us for k in sequential.kernels if k.kernel == kernel), default=None)
        for kernel in ("comm", "compute")
    }
    comm, compute = starts["comm"], starts["compute"]
    if comm is None:
        return 0.0
    if compute is None:
        return sequential.total_us
    launch = min(comm, compute)
    return sequential.total_us - comm + launch if compute < comm else compute - launch


def slowest(samples: Sequence[Sequence[float]]) -> float:
    """Return the median over iterations of the slowest rank; ``samples[rank][iteration]``."""
    return float(statistics.median(max(each) for each in zip(*samples, strict=True)))


def spread(samples: Sequence[Sequence[float]]) -> float:
    """Return the largest minus the smallest, over iterations, of the slowest rank's time."""
    each = [max(one) for one in zip(*samples, strict=True)]
    return float(max(each) - min(each))


def views(results: Sequence[RankResult]) -> list[dict[str, Turns]]:
    """Return each rank's turns by view."""
    return [result.rows["kernel"][0] for result in results]


def _all_checks(found: Mapping[str, Turns]) -> dict[str, Comparison]:
    """Add up the comparisons of all views of a rank."""
    total = Turns()
    for turns in found.values():
        total.add(turns.checks)
    return total.checks


def build(
    job: Job,
    plan: LaunchPlan,
    topology: Topology,
    results: Sequence[RankResult],
    modelled: Sequence[Views],
) -> RunReport:
    """Make the report of a finished job from its ranks' results."""
    ranks = views(results)
    times = {view: 1e3 * slowest([each[view].seconds for each in ranks]) for view in VIEWS}
    comm = 1e3 * slowest(
        [[parts.get("comm", 0.0) for parts in each["sequential"].parts] for each in ranks]
    )
    noise = 1e3 * max(spread([each[view].seconds for each in ranks]) for view in VIEWS)
    (case,) = job.cases
    verification = verify(case.tolerances(), [_all_checks(each) for each in ranks])
    return RunReport(
        op=case.op,
        passed=verification.passed,
        verification=verification,
        wall=clock(times["compute_only"], comm, times["sequential"], times["pipelined"], noise),
        modelled=modelled_clock(modelled) if modelled else None,
        modelled_machine=modelled[0]["pipelined"].machine if modelled else None,
        nic_bytes=sum(r.nic_bytes for r in results),
        iterations=job.iterations,
        plan=plan,
        topology=topology,
    )


def render(report: RunReport, *, measured_constants: bool = False) -> RenderableType:
    """Show the report on a terminal.

    Args:
        measured_constants: whether predictions are made with constants that were measured here.
    """
    if report.modelled is None:
        clocks = [("measured", "wall time on this host", report.wall)]
    else:
        clocks = [("modelled", f"modelled time on {report.modelled_machine}", report.modelled)]
    if (expected := _predicted_clock(report, measured=measured_constants)) is not None:
        clocks.append(("predicted", _cost_model(report.plan.prediction), expected))
    units = [
        unit_of(
            1e3 * getattr(each, name)
            for name in ("compute_only_ms", "comm_only_ms", "sequential_ms", "pipelined_ms")
        )
        for _, _, each in clocks
    ]
    table = Sheet(
        (
            Column("view", key=True),
            *(
                Column(name, right=True, unit=unit)
                for (name, _, _), unit in zip(clocks, units, strict=True)
            ),
        )
    )
    for label, attribute in (
        ("compute only", "compute_only_ms"),
        ("communication only", "comm_only_ms"),
        ("sequential: one after the other", "sequential_ms"),
        ("pipelined: both at once", "pipelined_ms"),
    ):
        times = [1e3 * getattr(each, attribute) for _, _, each in clocks]
        table.row(label, *(in_unit(time, unit) for time, unit in zip(times, units, strict=True)))
    if not all(_noisy(each) for _, _, each in clocks):
        table.row(
            "speed-up over sequential",
            *(_unless_noisy(each, f"{each.speedup:.2f}x") for _, _, each in clocks),
        )
        table.row(
            "overlap efficiency",
            *(_efficiency(each) for _, _, each in clocks),
        )
    legend = "; ".join(f"{name}: {where}" for name, where, _ in clocks)
    calls = "1 call" if report.iterations == 1 else f"{report.iterations} calls"
    legend = f"{legend}. Median over {calls} of the slowest rank's time."
    if report.modelled is not None:
        legend += " Wall time, of which the simulator takes most, is in --json."
    elif _noisy(report.wall) and len(clocks) > 1:
        legend += f" {_NOISY}: calls differ by more than there is to hide."
    elif any(_beyond_all(each) for _, _, each in clocks):
        legend += f" {_NOISY}: a part alone took longer than both at once."
    check = report.verification
    word, style = ("PASSED", "bold green") if report.passed else ("FAILED", "bold red")
    verdict = Text.assemble(
        (word, style),
        f"  {_found(check)}, {len(check.error_by_rank)} ranks",
        _carrier(report),
    )
    return Group(table, Text(legend, style="dim"), Text(_gain(clocks[0][2])), verdict)


_NOISY = "noise"
_NO_GAIN = 1.005
"""A speed-up below this is none, as it is shown."""


def _gain(each: Clock) -> str:
    """Return what overlap gains by a clock, in a sentence."""
    parts = {"compute": each.compute_only_ms, "communication": each.comm_only_ms}
    shorter = min(parts, key=lambda part: parts[part])
    both, one = duration(1e3 * each.pipelined_ms), duration(1e3 * each.sequential_ms)
    if not parts[shorter]:
        return f"There is no {shorter} here, so there is nothing to overlap."
    if _noisy(each):
        return (
            f"Calls differ by up to {duration(1e3 * each.noise_ms)}, more than overlap could save, so "
            "these times do not say what it gains: larger sizes or more --iterations may."
        )
    if each.speedup < _NO_GAIN:
        return f"Overlap gains nothing here: both at once take {both}, one after the other {one}."
    hidden = (
        "" if _beyond_all(each) else f": {each.overlap_efficiency:.0%} of the {shorter} is hidden"
    )
    return f"Overlap makes the call {each.speedup:.2f}x as fast, {both} instead of {one}{hidden}."


def _cost_model(times: Prediction | None) -> str:
    """Say what predicted, and whether its constants were ever measured."""
    why = f" ({times.constants})" if times is not None and not times.measured else ""
    return f"by the planner's cost model{why}"


def _predicted_clock(report: RunReport, *, measured: bool) -> Clock | None:
    """Return what the planner predicted of what a column shows: of the modelled machine, or of devices
    that ran. A prediction with shipped constants says nothing of this host's CPUs."""
    times: Prediction | None = report.plan.prediction
    emulated = all(one.emulated for node in report.topology.nodes for one in node.accelerators)
    if times is None or not (report.modelled is not None or measured or not emulated):
        return None
    launch = times.sequential_us - times.compute_us - times.comm_us
    alone = times.comm_us + launch if times.comm_us else 0.0
    return clock(
        (times.compute_us + launch) / 1e3,
        alone / 1e3,
        times.sequential_us / 1e3,
        times.pipelined_us / 1e3,
        launch=launch / 1e3,
    )


def _found(check: Verification) -> str:
    """Say what decided: the worst error, or why there is none."""
    if check.error is None:
        why = check.by_output[check.output].why or "has an error that is not finite"
        return f"{check.output} on rank {check.rank} {why}"
    return (
        f"relative error {check.error:.2e} against float64 "
        f"(tolerance {check.tolerance:.0e}; worst: {check.output} on rank {check.rank})"
    )


def _carrier(report: RunReport) -> str:
    """Say what carried the bytes, where it was no peer's memory."""
    if report.plan.carrier:
        return f", {report.plan.carrier} between ranks"
    through = report.plan.nic is not None and report.nic_bytes > 0
    return f", {amount(report.nic_bytes)} through the NIC" if through else ""


def _unless_noisy(each: Clock, said: str) -> str:
    return _NOISY if _noisy(each) else said


def _efficiency(each: Clock) -> str:
    return _unless_noisy(each, _NOISY if _beyond_all(each) else f"{each.overlap_efficiency:.0%}")


def _beyond_all(each: Clock) -> bool:
    """Return whether more than 100 % would be hidden, which only parts that vary can say: one of them
    alone took longer than both at once."""
    return round(each.overlap_efficiency, 2) > 1


def _noisy(each: Clock) -> bool:
    """Return whether what overlap gains would say nothing."""
    return each.noise_ms > 0 and min(each.compute_only_ms, each.comm_only_ms) <= each.noise_ms
