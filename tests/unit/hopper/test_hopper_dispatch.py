"""What each view of each op queues, with the native module's own data but nothing started."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gpu_plans import gpu_plan
from hopper_calls import CONTEXT, last_rank

from mkernel.backends.accelerators.hopper import gemm, native
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import FUSED
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule
from mkernel.backends.contracts.instrumented import View
from mkernel.errors import BackendUnavailable
from mkernel.plan.model import LaunchPlan

STARTS = (
    "push_rows", "all_gather_gemm", "gemm_reduce", "rendezvous", "copy", "reduce_scatter",
    "all_reduce",
)  # fmt: skip
MAIN = 5


class Pipelined:
    """Stands for PipelinedGather and PipelinedReduce."""

    def __init__(self, queued: list[str], *given: Any) -> None:
        self._queued = queued
        self._name = "pipelined by copy engines"
        if not isinstance(given[-1], native.native().AllGatherSchedule) or given[-1].push_blocks:
            self._name = "pipelined"

    def start(self, number: int, timeout_s: float, *given: Any) -> None:
        *addresses, stream = given[:4]
        assert stream == MAIN
        assert not any(address % 16 for address in addresses)
        symmetric = given[4:] not in ((), ([],))
        self._queued.append(self._name + " into every out" * symmetric)


class Recorder:
    """The native module, whose starts only leave their names."""

    def __init__(self, made: Any, queued: list[str]) -> None:
        self._made, self._queued = made, queued

    def __getattr__(self, name: str) -> Any:
        if name.startswith("Pipelined"):
            return partial(Pipelined, self._queued)
        if name not in STARTS:
            return getattr(self._made, name)

        def start(*arguments: Any, stream: int | None = None) -> None:
            assert (arguments[-1] if stream is None else stream) == MAIN, name
            self._queued.append(name)

        return start


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    try:
        made = native.native()
    except BackendUnavailable as error:
        pytest.skip(f"this build has no kernels for Hopper: {error}")
    names: list[str] = []
    monkeypatch.setattr(gemm, "native", lambda: Recorder(made, names))
    return names


def planned(
    op: str, m: int, n: int, k: int, world: int = 2, chunk: int | None = None
) -> LaunchPlan:
    sizes = {"m": m, "n": n, "k": k}
    return gpu_plan(
        HopperAccelerator(), op, world, sizes, dtype="bfloat16", chunk=chunk, path="fused"
    )


def run(
    queued: list[str],
    made: LaunchPlan,
    view: View = "pipelined",
    *,
    gathered: bool = False,
    symmetric: bool = False,
    offset: int = 0,
) -> list[str]:
    """Names of what the last rank queues, in order."""
    call = last_rank(made, view, gathered=gathered, symmetric=symmetric, offset=offset)
    queued.clear()
    FUSED[made.op](call, CONTEXT).start(call, MAIN)
    assert FUSED[made.op].workspace(made).areas[0] >= 1 << 20
    return list(queued)


def test_all_gather_gemm(queued: list[str]) -> None:
    small = planned("all_gather_gemm", 512, 256, 256)
    assert run(queued, small) == ["pipelined"]  # its own blocks push
    large = planned("all_gather_gemm", 8192, 256, 4096)
    assert run(queued, large) == ["pipelined by copy engines"]
    assert run(queued, large, "sequential") == ["push_rows", "all_gather_gemm"]
    assert run(queued, large, "compute_only") == ["all_gather_gemm"]
    alone = planned("all_gather_gemm", 4096, 256, 2048, world=1)
    assert run(queued, alone, "sequential") == ["all_gather_gemm"]


def test_what_lies_in_the_workspace_is_copied_before_any_rank_goes_on(queued: list[str]) -> None:
    small = planned("all_gather_gemm", 512, 256, 256)
    copies = ["pipelined", "copy", "copy", "rendezvous"]  # the last rank: no rows after its
    assert run(queued, small, gathered=True) == copies
    alone = planned("all_gather_gemm", 512, 256, 256, world=1)
    *calls, copy = run(queued, alone, gathered=True)
    assert (len(calls), copy) == (1, "copy")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("op", "collective"),
    [("gemm_reduce_scatter", "reduce_scatter"), ("gemm_all_reduce", "all_reduce")],
)
def test_reductions(queued: list[str], op: str, collective: str, symmetric: bool) -> None:
    made = planned(op, 512, 256, 256)
    everywhere = symmetric and op == "gemm_all_reduce"
    into = "pipelined into every out" if everywhere else "pipelined"
    assert run(queued, made, symmetric=symmetric) == [into]
    assert run(queued, made, "compute_only", symmetric=symmetric) == ["gemm_reduce"]
    separate = ["all_gather_gemm", collective]
    assert run(queued, made, "sequential", symmetric=symmetric) == separate
    assert run(queued, planned(op, 512, 256, 256, world=1), "sequential") == ["pipelined"]


@pytest.mark.parametrize("op", sorted(FUSED))
def test_tensors_at_any_element(queued: list[str], op: str) -> None:
    made = planned(op, 512, 256, 256)
    assert run(queued, made, offset=1) == run(queued, made)


def test_the_planned_chunk_is_one_by_default(queued: list[str]) -> None:
    whole, cut = (
        planned("all_gather_gemm", 8192, 256, 4096, chunk=chunk).part(GatherSchedule)
        for chunk in (None, 300)
    )
    assert (whole.chunk_rows, whole.push_blocks) == (4096, 0)
    assert cut.chunk_rows == 300


class Told:
    """Stands for what the plan's calls are started by: leaves what each call tells."""

    def __init__(self, left: list[Any]) -> None:
        self._left = left

    def start(self, *told: Any) -> None:
        self._left.append(told[:5])


@pytest.mark.parametrize("op", sorted(FUSED))
def test_each_call_tells_its_own_number_deadline_and_tensors(
    queued: list[str], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    left: list[Any] = []
    made: Any = gemm.native()
    made.PipelinedGather = made.PipelinedReduce = lambda *given: Told(left)
    monkeypatch.setattr(gemm, "native", lambda: made)
    plan = planned(op, 640, 256, 256)
    first = last_rank(plan, "pipelined", gathered=False, symmetric=False, offset=0)
    calls = FUSED[op](first, CONTEXT)
    for number in (1, 2, (1 << 32) + 3):
        call = last_rank(plan, "pipelined", gathered=False, symmetric=False, offset=0)
        addresses = tuple(call.tensors[name].data_ptr() for name in ("a", "b", "out"))
        calls.start(replace(call, number=number, timeout_s=number / 8), MAIN)
        assert left.pop() == (number & 0xFFFFFFFF, number / 8, *addresses)
        assert not left
