"""The schedule of the GEMM ops by a library's products, and of AllReduce.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`..machine`), which states
where each number was measured; these numbers change times, never results.
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.gemm import library_tuning, scaled_tuning
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import LibrarySchedule, SumSchedule, SumWay
from mkernel.plan.model import DTYPE_BYTES, GemmShape, SumShape
from mkernel.plan.predict import payloads
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()
_ELEMENT_BYTES = 2


def schedule(request: ScheduleRequest) -> Scheduled:
    """Schedule a plan of a GEMM op or of AllReduce."""
    return with_norm(request, scheduled(request))


def with_norm(request: ScheduleRequest, found: Scheduled) -> Scheduled:
    """Add the time of a norm of summed rows, either in the kernel that sums them or in one that
    follows."""
    plan, times, made = request.plan, found.prediction, found.schedule
    if plan.norm is None or times is None:
        return found
    assert isinstance(plan.shape, GemmShape | SumShape)
    mailed = isinstance(made, SumSchedule) and made.way != "two_shot"
    inside = mailed or (isinstance(made, LibrarySchedule) and made.normalises)
    norms = _MACHINE.of_plan(plan).norms
    added = norms.inside if inside else norms.behind
    more = added.of(plan.shape.m * plan.shape.n * DTYPE_BYTES[plan.out_dtype])
    names = ["compute_us", "sequential_us", "pipelined_us"]
    names += [f"{plan.path}_us"] if times.fused_us is not None else []
    later = {name: getattr(times, name) + more for name in names}
    return found._replace(prediction=times.model_copy(update=later))


def scheduled(request: ScheduleRequest) -> Scheduled:
    """Return the schedule without the time of a norm."""
    plan = request.plan
    if plan.scales is not None:
        return scaled_tuning.schedule(request)
    found = by_rows(request, chunks=1)
    if not isinstance(plan.shape, SumShape):
        return library_tuning.schedule(request, found)
    normed, cores = plan.norm is not None, found.pipeline.compute_blocks
    how = sums(
        plan.shape, plan.world_size, normed, cores, request.constants,
        twice=plan.invariant is None or plan.world_size == 2,
    )  # fmt: skip
    return found._replace(schedule=how)


def sums(
    shape: SumShape,
    world: int,
    normed: bool,
    processors: int,
    constants: MachineConstants | None,
    *,
    twice: bool = True,
) -> SumSchedule:
    """Schedule AllReduce: one Lamport exchange if that is faster than two exchanges, everything
    fits, and a block can keep a row that it normalises; otherwise two exchanges, by mail if that is
    predicted to be faster and the same holds. ``constants``: of the plan; without mail, or None: two
    exchanges by flags. ``twice``: two exchanges by mail may be taken."""
    nbytes = shape.m * shape.n * _ELEMENT_BYTES
    sent = payloads("all_reduce", shape, "bfloat16", world)
    library = None if constants is None else constants.library
    mailed = library is not None and library.mail is not None
    fits = mail.of_sums(nbytes, world) <= mail.MAIL_BYTES
    brief = mailed and _MACHINE.in_one(nbytes, world) and fits
    way: SumWay = "two_shot"
    if brief and (not normed or mail.keeps_rows(shape, world, "one_shot")):
        way = "mail"
    elif twice and _MACHINE.twice_by_mail(sent.scatter, sent.spread, world, constants):
        needed = mail.of_two_exchanges(shape.m * shape.n, world, "bfloat16", "bfloat16")
        fits = needed <= mail.MAIL_BYTES
        if fits and (not normed or mail.keeps_rows(shape, world, "two_shot")):
            way = "mail_twice"
    return SumSchedule(way=way, blocks=processors)
