"""Outputs of AllReduces that peers may write: which plans have memory for them, what calls tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from library_fabric import Fabric, workspace_of
from test_hopper_library import fabric, planned, run

from mkernel.backends.accelerators.cuda import device_session
from mkernel.backends.accelerators.cuda.collectives import landing
from mkernel.backends.accelerators.cuda.device_session import DeviceSession
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import LibrarySchedule
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.plan.model import LaunchPlan

__all__ = ["fabric"]  # a fixture

MIB = 1 << 20


def plan(rows: int, columns: int, **other: Any) -> Any:
    """Of an AllReduce of so many results of two bytes."""
    shape = SimpleNamespace(m=rows, n=columns)
    facts = {
        "op": "gemm_all_reduce",
        "nodes": 1,
        "world_size": 2,
        "out_dtype": "bfloat16",
        "accelerator": "hopper",
    }
    return SimpleNamespace(**{**facts, "gemm": shape, **other})


@pytest.mark.parametrize(
    ("nbytes", "each"),
    [
        (4 * MIB - 2, 0),
        (4 * MIB, 20 * MIB),  # several of one piece, as torch's allocator takes them
        (10 * MIB - 2, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 2, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
@pytest.mark.parametrize("setting", [None, 0, 1, 5])
def test_there_is_memory_for_so_many_outputs_of_a_plan(
    nbytes: int, each: int, setting: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        monkeypatch.setenv("MKERNEL_HOPPER_OUTPUTS", str(setting))
    assert landing.wanted(plan(nbytes // 2, 1)) == each * (3 if setting is None else setting)


@pytest.mark.parametrize("other", [{"world_size": 1}, {"nodes": 2}])
def test_there_is_none_where_no_peer_could_write_it(other: dict[str, Any]) -> None:
    assert landing.wanted(plan(4096, 4096)) == 3 * 32 * MIB
    assert landing.wanted(plan(4096, 4096, **other)) == 0


def test_results_count_in_the_dtype_of_the_output() -> None:
    assert landing.wanted(plan(2048, 1024)) == landing.wanted(plan(1024, 1024, out_dtype="float32"))
    assert landing.wanted(plan(1024, 1024)) == 0
    summed = SimpleNamespace(m=4096, n=4096)
    alone = plan(0, 0, op="all_reduce", summed=summed, gemm=None)
    assert landing.wanted(alone) == 3 * 32 * MIB


# ---- the library path ----------------------------------------------------------------------------

SIZES = {"two_shot": (4096, 4096), "by mail": (4096, 1024), "one_shot": (64, 1024)}
"""Of results by the way of four ranks."""


def executor(made: LaunchPlan, outputs: Any) -> LibraryExecutor:
    world = made.world_size
    call = Call(
        plan=made, rank=0, tensors={}, epoch=1, number=1, pad=0, workspace=workspace_of(0),
        areas=(0,), peers={p: PeerMemory(0, workspace_of(p)) for p in range(1, world)},
        region=0, fifo=0, timeout_s=1.0,
    )  # fmt: skip
    order: Any = None
    return LibraryExecutor(call, DispatchContext(0, order, 64, outputs=outputs))


MEMORY = SimpleNamespace(ranges=1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[LaunchPlan], tuple[bool, bool, int]]:
    """Whether calls and known calls of a plan tell of outputs, and bytes of memory for these."""
    made = Fabric(4)
    for module in (landing, device_session):
        monkeypatch.setattr(module, "native", lambda: made)
    pool: Any = SimpleNamespace(memory=MEMORY)

    def of(plan: LaunchPlan) -> tuple[bool, bool, int]:
        known: Any = executor(plan, pool).starter({}, {})
        one = executor(plan, pool)
        tells = one._outputs.landings(1) is not None
        outputs: Any = known["outputs"]
        if outputs.memory is not None:
            nbytes = plan.gemm.m * plan.gemm.n * 2
            assert outputs == Fabric.Outputs(MEMORY, plan.world_size, nbytes)
        return tells, outputs.memory is not None, LibraryExecutor.workspace(plan).outputs

    return of


@pytest.mark.parametrize(
    ("op", "way", "lands"),
    [
        ("gemm_all_reduce", "two_shot", True),
        ("gemm_all_reduce", "by mail", False),
        ("gemm_all_reduce", "one_shot", False),
        ("gemm_reduce_scatter", "two_shot", False),
        ("all_gather_gemm", "two_shot", False),
    ],
)
def test_ranks_tell_of_outputs_where_results_are_put_into_them(
    fabric: Any, told: Any, op: str, way: str, lands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only there is memory for them, however large they are."""
    monkeypatch.setattr(landing, "LEAST_BYTES", 1)
    fabric(4)
    made = planned(op, *SIZES[way], 64, 4, constants=machine().constants)
    if op == "gemm_all_reduce":
        how = made.part(LibrarySchedule)
        assert ("by mail" if how.by_mail and how.way == "two_shot" else how.way) == way
    call, known, nbytes = told(made)
    assert (call, known, nbytes > 0) == (lands, lands, lands)


def two_shot(made: LaunchPlan) -> LaunchPlan:
    how = made.part(LibrarySchedule).model_copy(update={"way": "two_shot", "by_mail": False})
    return made.model_copy(update={"schedule": how})


def test_small_outputs_are_told_of_by_nobody(fabric: Any, told: Any) -> None:
    fabric(4)
    assert told(two_shot(planned("gemm_all_reduce", 1024, 1024, 64, 4))) == (False, False, 0)


def test_nothing_is_told_where_ranks_have_no_memory_for_outputs(
    fabric: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though this one has a pool, for graphs: the others need not."""
    monkeypatch.setattr(landing, "LEAST_BYTES", 1)
    monkeypatch.setattr(MEMORY, "ranges", 0)
    fabric(4)
    tells, known, _ = told(two_shot(planned("gemm_all_reduce", 1024, 1024, 64, 4)))
    assert not tells
    assert not known


def test_each_call_tells_where_its_own_output_lies(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fabric(2)
    monkeypatch.setattr(landing, "native", lambda: made)
    monkeypatch.setattr(landing, "LEAST_BYTES", 1)
    pool: Any = SimpleNamespace(memory=MEMORY)
    with_outputs = partial(DispatchContext, outputs=pool)
    monkeypatch.setattr("test_hopper_library.DispatchContext", with_outputs)
    everyone, _ = run(two_shot(planned("gemm_all_reduce", 64, 64, 8, 2)), numbers=(3, 4))
    place = MEMORY, everyone[0]["out"].data_ptr()
    assert made.landings == [place, place]


# ---- a rank's session ----------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> DeviceSession:
    """Without a device."""
    made = DeviceSession.__new__(DeviceSession)
    made.index, made._used = 3, False
    made._order, made._context = Mock(), Mock(outputs=None)
    monkeypatch.setattr(device_session, "OutputPool", Mock(side_effect=lambda device: Mock()))
    return made


def test_a_world_has_one_pool_of_outputs(session: DeviceSession) -> None:
    pool: Any = session.outputs
    own: Any = "own"
    assert session.add_outputs(own, {0: 64}) is pool.add.return_value
    pool.add.assert_called_once_with(own, {0: 64})
    assert session.allocation(plan(1, 1), (2, 3), torch.float16) == (
        pool.empty,
        ((2, 3), torch.float16),
    )
    assert session.close(1.0)
    pool.close.assert_called_once_with()
    assert pool is session.outputs is session._context.outputs
    module: Any = device_session
    module.OutputPool.assert_called_once_with(3)


def test_a_world_without_outputs_closes(session: DeviceSession) -> None:
    assert session.close(1.0)
    module: Any = device_session
    module.OutputPool.assert_not_called()


def test_outputs_that_kernels_may_still_write_are_kept(
    session: DeviceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session._used = True
    monkeypatch.setattr(session, "_drained", lambda timeout_s: False)
    pool: Any = session.outputs
    assert not session.close(1.0)
    pool.close.assert_not_called()


def test_the_backend_asks_its_session() -> None:
    backend = HopperAccelerator()
    inner: Any = Mock()
    backend._session = inner
    own: Any = "own"
    assert backend.add_outputs(own, {0: 1}) is inner.add_outputs.return_value
    assert backend.graph_pool() is inner.outputs.graph_pool.return_value
    made = plan(1, 1)
    assert backend.allocation(made, (1,), torch.float16) is inner.allocation.return_value
    inner.allocation.assert_called_once_with(made, (1,), torch.float16)


# ---- native code ---------------------------------------------------------------------------------


def test_a_call_whose_output_lies_elsewhere_tells_that() -> None:
    hopper = pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    cuda = pytest.importorskip("mkernel.backends.accelerators.cuda._cuda")
    nothing = hopper.Outputs().landings(64)
    assert (nothing.told, nothing.own) == (False, 0)
    elsewhere = hopper.Outputs(cuda.OutputMemory(0), 2, 64).landings(64)
    assert (elsewhere.told, elsewhere.own) == (True, 0)


def test_a_memory_of_outputs_has_its_number_until_torch_has_nothing_of_it() -> None:
    cuda = pytest.importorskip("mkernel.backends.accelerators.cuda._cuda")
    memories = [cuda.OutputMemory(0) for _ in range(10)]
    numbers = [each.number() for each in memories]
    taken = {
        memory: number for memory, number in zip(memories, numbers, strict=True) if number >= 0
    }
    try:
        assert 0 < len(taken) < 10
        assert len(set(taken.values())) == len(taken)
        assert numbers[len(taken) :] == [-1] * (10 - len(taken))
    finally:
        for memory, number in taken.items():
            memory.retire(number)
    again = cuda.OutputMemory(0)
    number = again.number()
    assert number == numbers[0]
    again.retire(number)
