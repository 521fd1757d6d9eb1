"""The schedule of GEMM ops of 16-bit operands on the library path: one product and one collective,
or parts. Those of e4m3 operands are in :mod:`.scaled_tuning`.

All functions are pure: they read a plan's sizes and ``machine.json`` (:mod:`.machine`).

Whether a product runs whole or in parts decides which kernel of the library multiplies a row, so the
bits of a result may differ between the two; the order of sums is the same.
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.gemm import parts_tuning
from mkernel.backends.accelerators.cuda.gemm.parts_tuning import WHOLE, Times
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import LibrarySchedule, ScaledBy, Way
from mkernel.plan import paths
from mkernel.plan.model import DTYPE_BYTES, CommonPart, DtypeName, GemmShape, Prediction
from mkernel.plan.predict import payloads, prediction
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import choose
from mkernel.topology.cost import MachineConstants

_MACHINE = machine()


def schedule(request: ScheduleRequest, found: Scheduled) -> Scheduled:
    """Schedule a plan of 16-bit operands. ``found``: the schedule of one product and one
    collective, with its times. If a caller requests this path and a chunk, parts have that chunk's
    rows. Between nodes each rank's rows are one part, which is predicted by closed forms alone."""
    plan, whole, constants = request.plan, found.prediction, request.constants
    cores = found.pipeline.compute_blocks
    if plan.nodes > 1:
        return found._replace(
            schedule=parts_tuning.schedule(plan, 1, product_dtype(plan), None, cores)
        )
    if plan.world_size > 1 and request.path == "library" and request.chunk is not None:
        options: tuple[int, ...] = (parts_tuning.wished(plan, request.chunk),)
    elif whole is None:
        options = (WHOLE,)
    else:
        options = parts_tuning.ways(plan)

    path = None if constants is None else constants.library
    each: dict[int, Times] = {}
    if constants is not None and path is not None:
        each = {parts: times(plan, parts, cores, constants) for parts in options if parts != WHOLE}

    def cost(parts: int) -> float:
        if path is not None and parts in each:
            return each[parts].pipelined + path.start_us
        assert whole is not None  # where there are several ways
        return whole.pipelined_us

    def pays(parts: int) -> bool:
        return parts <= 1 or cost(parts) * _MACHINE.parts.least_gain <= cost(1)

    if len(options) > 1:
        options = tuple(filter(pays, options))
    parts, considered = choose("parts", options, cost, parts_tuning.name_of)
    made = (
        library(plan, constants)
        if parts == WHOLE
        else parts_tuning.schedule(plan, parts, product_dtype(plan), None, cores)
    )
    return found._replace(
        schedule=made,
        prediction=_predicted(each[parts], whole, constants) if parts in each else whole,
        alternatives=found.alternatives + considered,
    )


def times(plan: CommonPart, parts: int, cores: int, constants: MachineConstants) -> Times:
    """Predict a call in ``parts`` parts of each rank's rows, at least one."""
    path, shape = constants.library, plan.gemm
    assert path is not None

    def multiplied_us(rows: int) -> float:
        return path.products.fastest(
            1, rows, shape.n, shape.k, cores, constants.memory_gbs, DTYPE_BYTES[plan.dtype]
        ).total_us

    return parts_tuning.times(plan, parts, product_dtype(plan), multiplied_us)


def _predicted(
    times: Times, whole: Prediction | None, constants: MachineConstants | None
) -> Prediction:
    assert constants is not None
    assert constants.library is not None
    start = constants.library.start_us
    both: dict[str, float] = {}
    if whole is not None and whole.fused_us is not None:
        both = {"fused_us": whole.fused_us, "library_us": times.pipelined + start}
    return prediction(*times, start, constants, **both)


def library(
    plan: CommonPart,
    constants: MachineConstants | None = None,
    product: DtypeName | None = None,
    scaled_by: ScaledBy | None = None,
) -> LibrarySchedule:
    """Schedule one product and one collective. ``product``: the dtype of products; None:
    :func:`product_dtype`."""
    shape, world, product = plan.gemm, plan.world_size, product or product_dtype(plan)
    summed = plan.op == "gemm_all_reduce" and world > 1
    way = _MACHINE.way(shape, product, world) if summed else None
    mailed = by_mail(plan, product, way, constants)
    terms = product == plan.out_dtype or way == "one_shot"
    normed = plan.norm is not None and plan.bias is None and terms
    return LibrarySchedule(
        product=product,
        scaled_by=scaled_by,
        way=way,
        by_mail=mailed,
        normalises=mailed and normed and way is not None and mail.keeps_rows(shape, world, way),
    )


def by_mail(
    plan: CommonPart,
    product: DtypeName,
    way: Way | None,
    constants: MachineConstants | None = None,
) -> bool:
    """Return whether the one collective of a plan is a Lamport exchange."""
    two_shot = way == "two_shot"
    sent = payloads(
        plan.op, plan.gemm, plan.dtype, plan.world_size,
        partials=product, results=plan.out_dtype, one_exchange=not two_shot,
    )  # fmt: skip
    if two_shot:
        faster = _MACHINE.twice_by_mail(sent.scatter, sent.spread, plan.world_size, constants)
    else:
        faster = _MACHINE.by_mail(round(sum(sent)), plan.world_size, constants)
    return faster and mail.fits(plan, product, way)


def product_dtype(plan: CommonPart) -> DtypeName:
    """Return the dtype of partial products: the result's, or float32 for small results."""
    return _product_dtype(plan.op, plan.gemm, plan.dtype, plan.world_size)


def _product_dtype(op: str, shape: GemmShape, dtype: DtypeName, world: int) -> DtypeName:
    if op == "all_gather_gemm" or world == 1:
        few = shape.m * shape.n <= _MACHINE.partials.scattered_elements
        return "float32" if few else dtype
    return paths.partial_dtype(shape, dtype)
