"""A world's symmetric memory: what a NIC registers of it, what plans are told of it, what is freed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mkernel.backends.contracts.memory import Workspace
from mkernel.world import memory
from mkernel.world.identity import Identity
from mkernel.world.memory import Arena, PlanMemory, SymmetricHeap


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that buffers were registered with; the buffers are none."""
    given: list[Any] = []

    def allocate(region: int, nbytes: int, *, session: Any, **_: Any) -> Any:
        given.append(session)
        local = SimpleNamespace(address=4096 * (region + 1))
        return Mock(region=region, nbytes=nbytes, local=local, peers={1: local})

    monkeypatch.setattr(memory, "allocate", allocate)
    return given


def heap(nodes: int = 1) -> SymmetricHeap:
    return SymmetricHeap(Identity(0, nodes, 2), Mock(), Mock(), Mock(), itertools.count())


def test_a_nic_gets_what_it_reaches(sessions: list[Any]) -> None:
    """Where it does not reach the accelerator's memory it gets staging memory."""
    made, nic = heap(), Mock()
    assert sessions == [None], "the pad"
    made.session = nic
    made._arena_for([64])
    made._staging_for(64)
    assert sessions[1:] == [nic, nic]
    made.staged = True
    made._arena_for([1 << 20])
    made._staging_for(1 << 20)
    assert sessions[3:] == [None, nic]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("built", [False, True])
def test_ranks_of_one_node_have_boards(
    sessions: list[Any], nodes: int, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not built:
        monkeypatch.setattr(memory, "native_board", lambda: None)
    elif memory.native_board() is None:
        pytest.skip("native modules of an older build have none")
    assert (heap(nodes).board is not None) == (nodes == 1 and built)


def test_nics_read_and_write_the_staging_memory_where_there_is_some() -> None:
    arena = Arena([64])
    arena.buffer = Mock(region=3)
    staging: Any = Mock(region=5)
    assert PlanMemory(None, None, {}).region == 0
    assert PlanMemory(arena, None, {}).region == 3
    assert PlanMemory(arena, staging, {}).region == 5


@pytest.mark.parametrize("quiet", [False, True])
def test_memory_that_kernels_may_touch_is_kept_until_the_end(
    sessions: list[Any], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(memory, "_kept_until_exit", kept)
    made = heap()
    pad: Any = made._pad
    made.close(quiet=quiet)
    assert (pad.close.call_count, len(kept)) == (quiet, not quiet)


class Plan:
    """Of a backend's that has ``outputs`` bytes of memory for its outputs."""

    def __init__(self, outputs: int, digest: str = "") -> None:
        self.outputs, self._digest = outputs, digest or str(outputs)

    def digest(self) -> str:
        return self._digest


class Takes:
    """A backend that takes ``most`` ranges for outputs, of ``room`` bytes at most; ``given``: those
    that it has; ``made``: all memory."""

    def __init__(self, most: int = 100, room: int = 1 << 20) -> None:
        self.given: list[tuple[Any, dict[int, int]]] = []
        self.made: list[Any] = []
        self.room, self._most = room, most

    def workspace(self, plan: Plan) -> Workspace:
        return Workspace(outputs=plan.outputs)

    def allocate(self, nbytes: int) -> Any:
        if nbytes > self.room:
            raise OSError("no memory")
        self.made.append(Mock(nbytes=nbytes))
        return self.made[-1]

    def attach(self, descriptor: Any) -> Any:
        raise NotImplementedError

    def add_outputs(self, own: Any, everywhere: dict[int, int]) -> bool:
        self.given.append((own, everywhere))
        return len(self.given) < self._most


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Buffers, on both ranks of a node."""
    made: list[Any] = []

    def allocate(region: int, nbytes: int, *, source: Any, **_: Any) -> Any:
        if isinstance(source, memory._Found):
            assert source.allocate(nbytes).nbytes == nbytes
        local, peer = (SimpleNamespace(address=4096 * (2 * region + rank)) for rank in range(2))
        made.append(SimpleNamespace(nbytes=nbytes, local=peer, peers={0: local}, close=Mock()))
        return made[-1]

    monkeypatch.setattr(memory, "allocate", allocate)
    monkeypatch.setattr(memory, "native_board", lambda: None)
    return made


def of_second_rank(backend: Takes, *, first_has: bool = True) -> SymmetricHeap:
    """``first_has``: whether the other rank has memory for outputs."""
    accelerator: Any = backend
    exchange = Mock()
    exchange.gather = lambda topic, value: {0: first_has, 1: value}
    return SymmetricHeap(Identity(1, 1, 2), accelerator, exchange, Mock(), itertools.count())


def adopt(made: SymmetricHeap, *outputs: int) -> None:
    for nbytes in outputs:
        plan: Any = Plan(nbytes)
        made.of_plan(plan)


def test_plans_share_memory_for_outputs_and_more_is_twice_as_much(allocated: list[Any]) -> None:
    backend = Takes()
    made = of_second_rank(backend)
    adopt(made, 0)
    assert backend.given == []
    adopt(made, 100, 100, 60)
    assert [each.nbytes for each in allocated[1:]] == [100]
    adopt(made, 120, 199, 200, 1000)
    assert [each.nbytes for each in allocated[1:]] == [100, 200, 1000]
    assert [own for own, _ in backend.given] == [each.local for each in allocated[1:]]


def test_every_rank_of_a_node_is_told_where_outputs_may_lie(allocated: list[Any]) -> None:
    backend = Takes()
    adopt(of_second_rank(backend), 100)
    ((own, everywhere),) = backend.given
    assert own is allocated[-1].local
    assert everywhere == {0: 4096 * 2, 1: 4096 * 3}


def test_a_backend_that_takes_no_more_gets_no_more(allocated: list[Any]) -> None:
    """It would be memory that nothing uses."""
    backend = Takes(most=2)
    adopt(of_second_rank(backend), 100, 1000, 5000)
    assert [each.nbytes for each in allocated[1:]] == [100, 1000]
    assert len(backend.given) == 2


@pytest.mark.parametrize("first_has", [True, False])
def test_without_memory_on_every_rank_there_is_none_for_outputs(
    allocated: list[Any], first_has: bool
) -> None:
    """Calls do without it: nothing fails, and nobody is left with memory that others lack."""
    backend = Takes(room=100 if first_has else 1000)
    made = of_second_rank(backend, first_has=first_has)
    adopt(made, 200, 50)
    assert len(allocated) == 1, "the pad alone"
    assert backend.given == []
    assert [each.close.call_count for each in backend.made] == [1] * (not first_has)
    one = of_second_rank(backend)
    adopt(one, 60, 300)
    assert [each.nbytes for each in allocated[2:]] == [60] + [300] * (not first_has)
    assert not any(each.close.called for each in backend.made[-len(allocated[2:]) :])


def test_a_plan_has_outputs_from_its_first_call_on_where_it_wants_some(
    allocated: list[Any],
) -> None:
    backend = Takes()
    made = of_second_rank(backend)
    wants, none = (Plan(nbytes) for nbytes in (100, 0))
    for plan, wanted in ((wants, True), (none, False)):
        found: Any = plan
        assert not made.has_outputs(found)
        made.of_plan(found)
        assert made.has_outputs(found) == wanted


def test_to_ask_for_outputs_is_no_use_of_a_plan(allocated: list[Any]) -> None:
    """What is forgotten depends on the order of uses, the same on every rank; threads ask in any."""
    made = of_second_rank(Takes())
    made._plans.most = 1
    first: Any = Plan(100, "first")
    second: Any = Plan(100, "second")
    made.of_plan(first)
    made.of_plan(second)
    before = dict(made._plans), dict(made._plans._before)
    made.has_outputs(first)
    assert (dict(made._plans), dict(made._plans._before)) == before
