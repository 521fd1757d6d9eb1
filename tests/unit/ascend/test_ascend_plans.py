"""No field of a plan of ``ascend`` is decoration: another value is another launch, or is refused."""

from __future__ import annotations

from typing import Any

import devices
import pytest
import torch
from plan_walk import WalkedWorld, decorations

from mkernel.backends.accelerators.ascend import AscendAccelerator, backend, moe
from mkernel.backends.accelerators.ascend.moe import MoeCombineOp
from mkernel.backends.accelerators.ascend.native import native
from mkernel.backends.accelerators.ascend.schedule import GemmSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import CombineShape, LaunchPlan
from mkernel.topology.reshape import split_into_nodes
from mkernel.world.agreement import planned_tensors

MACHINE = devices.world(devices.node())
SIZES: dict[str, dict[str, int]] = {
    "all_gather_gemm": {"m": 1024, "n": 256, "k": 512},
    # The last row group of a rank is shorter: which tiles it gives depends on the band.
    "gemm_reduce_scatter": {"m": 800, "n": 512, "k": 128},
    "gemm_all_reduce": {"m": 1000, "n": 512, "k": 128},
    "moe_dispatch": {"tokens": 40, "hidden": 64, "experts": 12, "top_k": 3},
    "moe_dispatch_gemm": {"tokens": 40, "hidden": 64, "features": 72, "experts": 12, "top_k": 3},
    "moe_combine": {"tokens": 40, "features": 72, "experts": 12, "top_k": 3},
    "ring_attention": {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 384, "head_dim": 16},
}
CHUNKS = {"moe_dispatch": 16, "moe_dispatch_gemm": 16, "moe_combine": 16, "ring_attention": 40}
RANK = 1


class Painted(GemmSchedule):
    """Has a field that is decoration, which must be found."""

    kind: Any = "tests.painted_tiles"  # type: ignore[mutable-override]
    colour: str = "red"


class Told:
    """The native module, but for what starts kernels: it leaves how they would start."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(native(), name)
        if name != "moe_dispatch":
            return found

        def made(**given: Any) -> Any:  # dtypes of equal size are alike in a record
            self.told.append(given["out_dtype"])
            return found(**given)

        return made

    def launch(self, **given: Any) -> Any:
        self.told.append({name: str(given[name]) for name in ("blocks", "node", "rank", "view")})
        return self

    def set_slots(self, slots: int) -> None:
        """How many cores run at a time is no matter of a plan."""

    def wait(self, timeout_s: float) -> bool:
        return True


def tensors(plan: LaunchPlan) -> dict[str, torch.Tensor]:
    """Of a rank's call; ``y`` has as many rows as balanced routing gives."""
    made = {}
    for name, (shape, dtypes, stored) in planned_tensors(plan).items():
        size = [plan.shape.tokens * plan.shape.top_k if one is None else one for one in shape]  # type: ignore[union-attr]
        flat = torch.zeros(size, dtype=getattr(torch, dtypes[0]))
        column = stored and plan.b_layout == "column"
        made[name] = flat.transpose(-1, -2).contiguous().transpose(-1, -2) if column else flat
    return made


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("op", SIZES)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_no_field_is_decoration(op: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "column" and op in ("moe_dispatch", "moe_combine", "ring_attention"):
        pytest.skip("has no B")
    module, accelerator = Told(), AscendAccelerator()
    for asks in (backend, moe):
        monkeypatch.setattr(asks, "native", lambda: module)
    where = WalkedWorld(accelerator, split_into_nodes(MACHINE, 2, 2, devices.SIM, devices.SOFT), 2)
    usual = where.plan(
        op,
        SIZES[op],
        dtype="float16",
        out_dtype="float16",
        b_layout=layout,
        chunk=CHUNKS.get(op, 1),
    )
    given, options = tensors(usual), {"scale": 1.0}
    if isinstance(usual.shape, CombineShape):
        recorded = MoeCombineOp().record(usual, RANK).finish
        assert recorded is not None
        given |= recorded()
        rows = int(given["routing"][usual.shape.experts // usual.world_size])
        given["y"] = torch.zeros((rows, usual.shape.features), dtype=torch.float16)

    def launch(plan: LaunchPlan) -> object:
        module.told.clear()
        where.admit(plan, given)
        needs = accelerator.workspace(plan)
        call = Call(
            plan=plan, rank=RANK, tensors=given, epoch=1, number=1, pad=1, workspace=1,
            areas=(0,) * 5, peers={}, region=0, fifo=1, timeout_s=1.0, options=options,
        )  # fmt: skip
        accelerator.launch(call)
        done = [backend.record(plan, rank) for rank in range(plan.world_size)]
        return needs, module.told[:], done

    # Rows are counted against it when the kernels have ended.
    late = ["shape.capacity: None or 1"] if op == "moe_dispatch" else []
    assert decorations(usual, launch) == late
    if usual.op == "all_gather_gemm":
        part = Painted(**{**dict(usual.part(GemmSchedule)), "kind": "tests.painted_tiles"})
        found = decorations(usual.model_copy(update={"schedule": part}), launch)
        assert found == ["schedule.colour: 'red' or 'red-other'"]
