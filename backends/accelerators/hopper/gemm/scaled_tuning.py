"""The predicted time of the fused path of e4m3 operands, whose schedules :mod:`.tuning` makes.

``wgmma`` adds e4m3 products with about 14 bits, as cuBLAS does with ``use_fast_accum``. Calls that
ask for float32 sums take tiles that add every step of K up in float32 (``promoted``).
"""

from __future__ import annotations

from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.plan import paths
from mkernel.plan.model import CommonPart, Prediction
from mkernel.plan.predict import prediction
from mkernel.topology.cost import FewRowsConstants, MachineConstants

_MACHINE = machine()


def fused(
    plan: CommonPart, tiling: TilingName, cores: int, constants: MachineConstants
) -> Prediction | None:
    """Predict the fused path of a plan with such tiles. None: it was not measured, and is never
    chosen."""
    assert plan.scales is not None
    how = _MACHINE.of_plan(plan).scaled
    found = how.fused if plan.scales.use_fast_accum else how.promoted
    columns = _MACHINE.tilings.clusters[tiling][1]
    tiles = () if found is None else tuple(t for t in found.tiles if t.columns == columns)
    if found is None or not tiles:
        return None
    found = found.model_copy(update={"tiles": tiles})
    ours, _ = paths.fused(
        plan.op, plan.gemm, plan.dtype, plan.out_dtype, plan.world_size, cores, found, constants
    )
    return prediction(*ours, found.start_us, constants)


def of_few_rows(
    plan: CommonPart, cores: int, few: FewRowsConstants, constants: MachineConstants
) -> Prediction:
    """Predict the kernel for few rows."""
    times = paths.of_few_rows(
        plan.op, plan.gemm, plan.dtype, plan.out_dtype, plan.world_size, cores, few
    )
    return prediction(*times, few.start_us, constants)
