"""Pools of outputs that peers may write, on stand-ins for torch's allocator and the native module."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.backends.accelerators import cuda
from mkernel.backends.accelerators.cuda import output_pool
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.output_pool import OutputPool
from mkernel.backends.contracts.output_memory import in_torchs, is_torchs

DEVICE = 3
"""Of the pools; the current one is 0."""
MOST_RANGES = 2


class FakeOutputs:
    """Stands for OutputMemory. ``left``: numbers that no world has."""

    left: list[int]
    retired: list[int]

    def __init__(self, device: int) -> None:
        assert device == DEVICE
        self.added: list[tuple[Any, list[int]]] = []

    def number(self) -> int:
        return FakeOutputs.left.pop(0) if FakeOutputs.left else -1

    def retire(self, number: int) -> None:
        FakeOutputs.retired.append(number)

    def add_range(self, own: Any, everywhere: list[int]) -> None:
        self.added.append((own, everywhere))

    @property
    def ranges(self) -> int:
        return len(self.added)


class FakeTorch:
    """Stands for torch's allocator, which ends the process where a pool goes that a graph has, or while
    any thread uses another.

    Attributes:
        kept: users of each pool by its number, the pool itself one of them. used: the pools in use.
        gone: what went. wrong: what would have ended the process. taken: which pools tensors are of.
        torch: what the module has for torch.
    """

    def __init__(self) -> None:
        self.device = 0
        self.capturing = False
        self.kept: dict[int, int] = {}
        self.made_by: dict[int, str] = {}
        self.made_on: dict[int, int] = {}
        self.used: list[int] = []
        self.gone: list[int] = []
        self.wrong: list[str] = []
        self.taken: list[int | None] = []
        self.torch: Any = None

    def pool(self, allocator: str) -> FakePool:
        return FakePool(self, allocator)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    @contextmanager
    def use(self, pool: FakePool, device: int) -> Iterator[None]:
        assert device == DEVICE
        if self.used:
            self.wrong.append("two threads use pools")
        self.used.append(pool.number)
        yield
        self.used.remove(pool.number)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: int) -> torch.Tensor:
        assert device == DEVICE
        self.taken.append(self.used[-1] if self.used else None)
        return torch.zeros(shape, dtype=dtype)


class FakePool:
    """Stands for torch.cuda.MemPool."""

    def __init__(self, fake: FakeTorch, allocator: str) -> None:
        self._fake, self.number = fake, len(fake.kept)
        fake.kept[self.number], fake.made_by[self.number] = 1, allocator
        fake.made_on[self.number] = fake.device

    @property
    def id(self) -> tuple[int, int]:
        return 0, self.number

    def use_count(self) -> int:
        return self._fake.kept[self.number]

    def __del__(self) -> None:
        self._fake.gone.append(self.number)
        if self.use_count() > 1:
            self._fake.wrong.append(f"pool {self.number} went, and a graph has it")
        if self._fake.used or self._fake.capturing:
            self._fake.wrong.append(f"pool {self.number} went while one was used")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    made = FakeTorch()
    FakeOutputs.left, FakeOutputs.retired = [4, 6], []

    def plugged(file: str, allocate: str, release: str) -> Any:
        assert (file, release) == ("_cuda.so", allocate.replace("allocate", "release"))
        return SimpleNamespace(allocator=lambda: allocate)

    native = SimpleNamespace(
        OutputMemory=FakeOutputs, MOST_OUTPUT_RANGES=MOST_RANGES, __file__="_cuda.so"
    )
    monkeypatch.setattr(cuda, "_cuda", native, raising=False)
    monkeypatch.setattr(output_pool, "_allocators", {})
    monkeypatch.setattr(output_pool, "_captured", [])
    memory = SimpleNamespace(
        CUDAPluggableAllocator=plugged, _cuda_beginAllocateCurrentThreadToPool=None
    )
    torchs = SimpleNamespace(
        MemPool=made.pool,
        use_mem_pool=made.use,
        device=made.on,
        memory=memory,
        is_current_stream_capturing=lambda: made.capturing,
        get_allocator_backend=lambda: "native",
    )
    stand_in = SimpleNamespace(cuda=torchs, empty=made.empty)
    made.torch = stand_in
    monkeypatch.setattr(output_pool, "torch", stand_in)
    yield made
    assert made.wrong == []


NBYTES = 12
"""Of an output."""


def allocated(pool: OutputPool) -> torch.Tensor:
    return pool.empty((2, 3), torch.float16)


def opened(outputs: int = 10) -> OutputPool:
    """Of a world that has ranges with room for so many."""
    pool = OutputPool(DEVICE)
    added(pool, {0: 64, 1: 128}, outputs * NBYTES)
    return pool


def test_outputs_come_from_the_worlds_pool(fake: FakeTorch) -> None:
    pool = opened()
    made = allocated(pool)
    assert (tuple(made.shape), made.dtype) == ((2, 3), torch.float16)
    assert fake.taken == [0]
    assert fake.made_by == {0: "mkernel_allocate_outputs_4"}
    assert fake.made_on == {0: DEVICE}, "a pool is the current device's"


def test_a_pool_has_no_more_outputs_than_ranges_have_room_for(fake: FakeTorch) -> None:
    """What it had besides would be lost to all else as long as the world lives."""
    pool = OutputPool(DEVICE)
    allocated(pool)
    assert fake.taken == [None]
    added(pool, {0: 64, 1: 128}, 2 * NBYTES)
    kept = [allocated(pool) for _ in range(3)]
    assert fake.taken[1:] == [0, 0, None]
    part = kept.pop(0)[1:]
    allocated(pool)
    del part
    kept.append(allocated(pool))
    allocated(pool)
    assert fake.taken[4:] == [None, 0, None], "an output lives as long as a part of it"
    added(pool, {0: 64, 1: 128}, NBYTES)
    kept.append(allocated(pool))
    allocated(pool)
    assert fake.taken[-2:] == [0, None]


def test_while_a_graph_is_captured_its_own_pool_has_them(fake: FakeTorch) -> None:
    pool = opened()
    fake.capturing = True
    allocated(pool)
    assert fake.taken == [None]
    fake.capturing = False


@pytest.mark.parametrize(
    "lacking", ["numbers", "pools of their own allocator", "torch's allocator"]
)
def test_where_there_can_be_no_pool_outputs_are_torchs(
    fake: FakeTorch, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges are taken all the same: they are there on all ranks or none."""
    if lacking == "numbers":
        FakeOutputs.left = []
    elif lacking == "torch's allocator":
        monkeypatch.setattr(fake.torch.cuda, "get_allocator_backend", lambda: "pluggable")
    else:
        monkeypatch.delattr(fake.torch.cuda.memory, "_cuda_beginAllocateCurrentThreadToPool")
    pool = OutputPool(DEVICE)
    allocated(pool)
    assert fake.taken == [None]
    assert pool.graph_pool() is None
    assert added(pool, {0: 64, 1: 128})
    pool.close()
    assert fake.kept == {}
    assert FakeOutputs.retired == []
    assert FakeOutputs.left == ([] if lacking == "numbers" else [4, 6])


def added(pool: OutputPool, everywhere: Mapping[int, int], nbytes: int = NBYTES) -> bool:
    own = DeviceMemory.__new__(DeviceMemory)
    own.nbytes = nbytes
    own.shared = lambda: "shared"  # type: ignore[method-assign, assignment, return-value]
    own.close = lambda: None  # type: ignore[method-assign]
    return pool.add(own, everywhere)


def test_ranges_are_told_by_rank_as_long_as_there_is_room(fake: FakeTorch) -> None:
    pool = OutputPool(DEVICE)
    assert added(pool, {1: 128, 0: 64, 2: 192})
    assert not added(pool, {0: 256, 1: 320, 2: 512})
    told: Any = pool.memory
    assert told.added == [("shared", [64, 128, 192]), ("shared", [256, 320, 512])]


def test_a_graph_has_a_pool_of_its_own_of_the_same_memory(fake: FakeTorch) -> None:
    pool = opened()
    assert pool.graph_pool() == (0, 1)
    assert pool.graph_pool() == (0, 2)
    assert set(fake.made_by.values()) == {"mkernel_allocate_outputs_4"}
    assert set(fake.made_on.values()) == {DEVICE}
    allocated(pool)
    assert fake.taken == [0]


def captured(fake: FakeTorch, pool: OutputPool) -> int:
    """A graph with a call of a new pool's, by the pool's number."""
    _, number = pool.graph_pool() or (0, 0)
    fake.kept[number] += 1
    fake.capturing = True
    allocated(pool)
    fake.capturing = False
    return number


def test_pools_of_graphs_are_kept_until_no_graph_has_them_any_more(fake: FakeTorch) -> None:
    pool = opened()
    pool.graph_pool()  # for a graph that is captured later
    first, second = captured(fake, pool), captured(fake, pool)
    pool.graph_pool()
    assert fake.gone == []
    fake.kept[first] = 1
    assert fake.gone == []
    pool.graph_pool()
    assert fake.gone == [first]
    fake.kept[second] = 1
    pool.graph_pool()
    assert fake.gone == [first, second]


def test_a_pool_that_a_graph_had_only_for_a_while_is_over(fake: FakeTorch) -> None:
    """Seen in the graph's calls: by the next pool the graph is gone."""
    pool = opened()
    number = captured(fake, pool)
    fake.kept[number] = 1
    pool.graph_pool()
    assert fake.gone == [number]


def test_no_pool_goes_while_a_graph_is_captured(fake: FakeTorch) -> None:
    pool = opened()
    number = captured(fake, pool)
    fake.kept[number] = 1
    fake.capturing = True
    pool.graph_pool()
    fake.capturing = False
    assert fake.gone == []
    pool.graph_pool()
    assert fake.gone == [number]


def test_what_graphs_have_outlives_the_world(fake: FakeTorch) -> None:
    pool = opened()
    pool.graph_pool()
    had, has = captured(fake, pool), captured(fake, pool)
    fake.kept[had] = 1
    pool.close()
    pool.close()
    assert sorted(fake.gone) == [0, 1, had]
    assert FakeOutputs.retired == [4]
    assert pool.graph_pool() is None
    allocated(pool)
    assert fake.taken[-1] is None
    del pool
    assert has not in fake.gone


@pytest.mark.parametrize("ends", [False, True], ids=["as one begins", "as one ends"])
def test_a_later_world_lets_go_of_what_no_graph_has_any_more(fake: FakeTorch, ends: bool) -> None:
    first = OutputPool(DEVICE)
    second = OutputPool(DEVICE) if ends else None
    number = captured(fake, first)
    first.close()
    fake.kept[number] = 1
    assert number not in fake.gone
    if second is None:
        second = OutputPool(DEVICE)
    else:
        second.close()
    assert number in fake.gone


def test_threads_of_several_worlds_take_turns(fake: FakeTorch) -> None:
    """Else torch ends the process: a pool goes while another thread allocates."""
    first, second = opened(), opened()
    inside, goes_on = threading.Event(), threading.Event()
    plain = fake.empty

    def slow(*shape: Any, **how: Any) -> torch.Tensor:
        inside.set()
        assert goes_on.wait(60)
        return plain(*shape, **how)

    fake.torch.empty = slow
    allocating = threading.Thread(target=allocated, args=(first,))
    allocating.start()
    assert inside.wait(60)
    closing = [threading.Thread(target=each.close) for each in (second, first)]
    for thread in closing:
        thread.start()
    closing[0].join(0.2)
    assert fake.gone == []
    goes_on.set()
    for thread in (allocating, *closing):
        thread.join(60)
    assert sorted(fake.gone) == [0, 1]
    assert fake.taken == [0]


def test_outputs_that_compilers_plan_are_torchs(fake: FakeTorch) -> None:
    pool = opened()
    allocated(pool)
    in_torchs(allocated)(pool)
    allocated(pool)
    assert fake.taken == [0, None, 0]


def test_what_raises_leaves_nothing_behind() -> None:
    def raises() -> None:
        assert is_torchs()
        raise KeyError

    with pytest.raises(KeyError):
        in_torchs(raises)()
    assert not is_torchs()
