"""A world of one rank, this process: how it is joined, what it refuses, what is left of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import mkernel
from mkernel.backends import registry
from mkernel.errors import (
    AlreadyInitialized,
    ArgumentError,
    BackendUnavailable,
    NotInitialized,
    ShapeError,
    UnknownBackend,
    Unsupported,
)
from mkernel.ops.all_gather_gemm import OP as GATHER
from mkernel.ops.gemm import GemmCall
from mkernel.world.lifecycle import join


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if mkernel.is_initialized():
        mkernel.finalize()


def test_from_begin_to_end() -> None:
    assert not mkernel.is_initialized()
    world = mkernel.init(accelerator="streams")
    assert (world.rank, world.size, world.identity.nodes) == (0, 1, 1)
    assert mkernel.is_initialized()
    assert mkernel.world() is world
    assert repr(world) == f"<World {world.name!r}: rank 0 of 1, streams>"
    with pytest.raises(AlreadyInitialized, match="already in a world"):
        mkernel.init(accelerator="streams")
    x = torch.ones(2, 8)
    assert torch.equal(mkernel.all_reduce(x), x)  # type: ignore[arg-type]
    mkernel.synchronize()
    assert mkernel.stats().calls == {"all_reduce": 1}
    mkernel.finalize()
    assert not mkernel.is_initialized()
    with pytest.raises(NotInitialized):
        mkernel.world()
    with pytest.raises(NotInitialized):
        mkernel.all_reduce(x)
    again = mkernel.init(accelerator="streams")
    assert again.name != world.name
    assert torch.equal(mkernel.all_reduce(x), x)  # type: ignore[arg-type]


def test_a_graphs_pool_is_torchs_own_where_the_accelerator_has_none() -> None:
    with pytest.raises(NotInitialized):
        mkernel.graph_pool()
    world = mkernel.init(accelerator="streams")
    assert mkernel.graph_pool() is None
    assert mkernel.graph_pool(world.name) is None
    with pytest.raises(NotInitialized):
        mkernel.graph_pool("none such")
    mkernel.finalize()
    with pytest.raises(NotInitialized):
        mkernel.graph_pool(world)


def test_a_graphs_pool_is_the_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    world = mkernel.init(accelerator="streams")
    monkeypatch.setattr(world.accelerator, "graph_pool", lambda: (0, 7))
    assert mkernel.graph_pool() == (0, 7)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"accelerator": "none such"}, UnknownBackend, "none such"),
        ({"nodes": 2}, ArgumentError, "nodes"),
        ({"nodes": 0}, ArgumentError, "nodes"),
        ({"ranks_per_node": 2}, ArgumentError, "ranks"),
        ({"timeout_s": -1.0}, ArgumentError, "timeout_s"),
    ],
)
def test_refused_by_name(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        mkernel.init(**{"accelerator": "streams", **options})
    assert not mkernel.is_initialized()


def test_an_accelerator_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.accelerator("streams")
    status = replace(backend.status(), usable=False, detail="it is broken", remedy="mend it")
    monkeypatch.setattr(type(backend), "status", lambda _: status)
    with pytest.raises(BackendUnavailable, match="'streams': it is broken; mend it"):
        mkernel.init(accelerator="streams")
    assert not mkernel.is_initialized()


def test_calls_are_counted() -> None:
    world = mkernel.init(accelerator="streams")
    given: list[int] = []
    accelerator = world.accelerator
    launch = accelerator.launch

    def seen(call: Any) -> Any:
        given.append(call.number)
        return launch(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "launch", seen)
        for _ in range(3):
            GATHER.call(GemmCall(torch.ones(2, 8), torch.ones(8, 8)))
    assert given == [1, 2, 3]


def test_python_without_its_lock_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(Unsupported, match="PYTHON_GIL=1"):
        mkernel.init(accelerator="streams")


class SomebodyFirst:
    """Turns in which another thread's call comes just before the first of this one's."""

    def __init__(self, turns: Any, call: Callable[[], object]) -> None:
        self._turns, self._calls = turns, [call]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._turns, name)

    def __enter__(self) -> None:
        if self._calls:
            self._calls.pop()()
        self._turns.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._turns.__exit__(*error)


def test_a_companion_that_two_threads_want_at_once_is_opened_once() -> None:
    world = mkernel.init(accelerator="ascend,streams")
    opened, x = [], torch.ones(2, 8)
    turns: Any = world._turns
    open_one = world._membership.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world._membership, "open", lambda each: (opened.append(each), open_one(each)))
        patch.setattr(world, "_turns", SomebodyFirst(turns, lambda: mkernel.all_reduce(x)))
        assert torch.equal(mkernel.all_reduce(x), x)  # type: ignore[arg-type]
    assert len(opened) == 1
    assert mkernel.stats().calls == {"all_reduce": 2}


def test_a_plan_is_not_launched_on_other_tensors() -> None:
    """Of another world too, which has planned nothing."""
    a, b = torch.ones(2, 8), torch.ones(8, 8)
    mkernel.init(accelerator="streams")
    plan = GATHER.call(GemmCall(a, b)).plan
    mkernel.finalize()
    world = mkernel.init(accelerator="streams")
    with pytest.raises(ShapeError, match=r"a = .* as planned"):
        world.run(plan, {"a": torch.ones(3, 8), "b": b, "out": torch.empty(2, 8)})
    assert world.statistics().errors == 1
    world.run(plan, {"a": a, "b": b, "out": torch.empty(2, 8)})


@pytest.mark.parametrize("opens", [False, True])
def test_a_backend_that_was_opened_is_closed(opens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(registry.accelerator("streams"))
    seen: list[Any] = []
    open_, close = kind.open, kind.close

    def opened(self: Any, device: Any) -> None:
        if not opens:
            raise OSError("no such device")
        seen.append(device.id)
        open_(self, device)

    def closed(self: Any, limit_s: float) -> bool:
        seen.append("closed")
        return close(self, limit_s)

    monkeypatch.setattr(kind, "open", opened)
    monkeypatch.setattr(kind, "close", closed)
    if opens:
        device = mkernel.init(accelerator="streams").map.placement[0].accelerator
        mkernel.finalize()
        assert seen == [device, "closed"]
    else:
        with pytest.raises(OSError, match="no such device"):
            mkernel.init(accelerator="streams")
        assert seen == []


@pytest.mark.parametrize("named", [False, True])
def test_the_world_that_is_named_ends_or_all_do(named: bool) -> None:
    world = mkernel.init(accelerator="streams")
    stores = HashStore(), HashStore()
    other = join(world.identity, world.backends, world.settings, stores, "other")
    mkernel.finalize(group=other if named else None)
    assert (world.ended, other.ended) == (not named, True)


def test_stores_that_are_given_come_before_the_programs_group() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert group is not None
        assert mkernel.init(accelerator="streams").name == group.group_name
        mkernel.finalize()
        given = mkernel.init(accelerator="streams", stores=(HashStore(), HashStore()))
        assert given.name.startswith("mkernel:")
        mkernel.finalize()
    finally:
        torch.distributed.destroy_process_group()
