"""No field of a schedule is decoration: another value is another launch, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan
from hopper_calls import CONTEXT, last_rank

from mkernel.backends.accelerators.hopper import dispatch, gemm, library, native
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.schedule import (
    GatherSchedule,
    LibrarySchedule,
    ReduceSchedule,
)
from mkernel.backends.contracts.instrumented import View
from mkernel.errors import BackendUnavailable, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.schedule import Schedule

OTHERS: dict[type[Schedule], dict[str, Any]] = {
    GatherSchedule: {
        "tiling": "deep", "chunk_rows": 100, "push_blocks": 4, "columns_ahead": 3, "slices": 3,
        "band": 4, "blocks": 100, "gathered_engine": "bulk", "gathered_blocks": 3,
    },
    ReduceSchedule: {
        "tiling": "deep", "rows": 1024, "panel_rows": 3, "panel_columns": 5, "pace": 17,
        "by_outbox": True, "band": 4, "blocks": 100, "product_tiling": "deep",
    },
    LibrarySchedule: {"product": "float32", "way": "two_shot"},
}  # fmt: skip
"""For each field, a value that the plans below do not have."""
BUILT = ("AllGatherSchedule", "ReduceSchedule", "Product")
STARTED = (
    "PipelinedGather", "PipelinedReduce", "all_reduce", "reduce_scatter", "copy", "rendezvous",
    "push_rows", "all_gather_gemm",
)  # fmt: skip
LEAST_ADDRESS = 1 << 20
CASES = [
    ("all_gather_gemm", "fused", GatherSchedule),
    ("gemm_reduce_scatter", "fused", ReduceSchedule),
    ("gemm_all_reduce", "fused", ReduceSchedule),
    ("gemm_all_reduce", "library", LibrarySchedule),
]


class Started:
    """Stands for the native module: notes what is made of it and started."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)

        def build(*given: Any, **named: Any) -> Any:
            self.told.append((name, str(given), str(named)))
            return found(*given, **named)

        def start(*given: Any, **named: Any) -> Any:
            sizes = [one for one in given if isinstance(one, int) and one < LEAST_ADDRESS]
            self.told.append((name, *sizes, *(str(one) for one in given if type(one) in kinds)))
            return self

        kinds = (self._made.Element, self._made.Way, self._made.Engine)
        return build if name in BUILT else start if name in STARTED else found

    def start(self, *given: Any) -> None:
        """One call."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    try:
        module = Started(native.native())
    except BackendUnavailable as error:
        pytest.skip(f"this build has no kernels for Hopper: {error}")

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        module.told.append(("mm", str(out.dtype)))

    monkeypatch.setattr(gemm, "native", lambda: module)
    monkeypatch.setattr(library, "native", lambda: module)
    monkeypatch.setattr(library, "_mm", multiply)
    return module


def planned(op: str, path: str) -> LaunchPlan:
    sizes = {"m": 4096, "n": 512, "k": 512}
    return gpu_plan(HopperAccelerator(), op, 2, sizes, dtype="bfloat16", path=path)


def launched(started: Started, plan: LaunchPlan) -> list[Any]:
    """What launches of the plan on rank 1 make and start, and the bytes that they need."""
    started.told.clear()
    executor = dispatch.executor_of(plan)
    nbytes = executor.workspace_bytes(plan)
    views: tuple[View, ...] = ("pipelined", "sequential")
    for view in views:
        call = last_rank(plan, view, gathered=plan.op == "all_gather_gemm")
        executor(call, CONTEXT).start(call, 5)
    return [nbytes, *started.told]


@pytest.mark.parametrize(
    ("op", "path", "kind", "field"),
    [(*case, field) for case in CASES for field in OTHERS[case[2]]],
)
def test_every_field_changes_the_launch(
    started: Started, op: str, path: str, kind: type[Schedule], field: str
) -> None:
    plan = planned(op, path)
    part, value = plan.part(kind), OTHERS[kind][field]
    assert getattr(part, field) != value
    usual = launched(started, plan)
    assert usual == launched(started, plan)
    other = plan.model_copy(update={"schedule": part.model_copy(update={field: value})})
    try:
        assert launched(started, other) != usual
    except (ValueError, Unsupported) as error:
        if field not in str(error):
            raise


def test_the_table_has_every_field() -> None:
    for kind, others in OTHERS.items():
        assert {"kind", *others} == set(kind.model_fields)


@pytest.mark.parametrize(("op", "path", "kind"), CASES)
def test_a_plan_without_its_backends_part_is_not_launched(
    started: Started, op: str, path: str, kind: type[Schedule]
) -> None:
    plan = planned(op, path).model_copy(update={"schedule": None})
    with pytest.raises(TypeError, match=kind.__name__):
        dispatch.executor_of(plan).workspace_bytes(plan)
