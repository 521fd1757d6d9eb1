"""Puts into windows, on host memory: streams are queues, run in any order that they allow."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from window_plans import plan

from mkernel.backends.accelerators.streams import window
from mkernel.backends.accelerators.streams.call_streams import AbortWord, CallStreams, Scratch, Sent
from mkernel.backends.accelerators.streams.exchange import exchange, share
from mkernel.backends.accelerators.streams.schedule import (
    GatherSchedule,
    StreamsSchedule,
    landing_bytes,
    landings,
)
from mkernel.backends.accelerators.streams.window import Words, words_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.plan.model import DTYPE_BYTES, LaunchPlan

Step = Callable[[], bool]
"""Does its work and is True, or must still wait."""
POISON = float("nan")
SIGNALS = 1024


class Queue:
    """A hardware queue of a rank: in order, and the first that waits holds up the rest."""

    def __init__(self) -> None:
        self.steps: deque[Step] = deque()

    def add(self, work: Callable[[], Any]) -> None:
        def step() -> bool:
            work()
            return True

        self.steps.append(step)

    def run(self) -> bool:
        """Whether something was done."""
        if not self.steps or not self.steps[0]():
            return False
        self.steps.popleft()
        return True


class Machine:
    """The queues of all ranks. A stream is the index of its queue."""

    def __init__(self, seed: int) -> None:
        self.queues: list[Queue] = []
        self.random = random.Random(seed)

    def drain(self) -> bool:
        """Run until nothing can run, in a random order; True: all is done."""
        busy = [queue for queue in self.queues if queue.steps]
        while busy:
            ready = [queue for queue in self.random.sample(busy, len(busy)) if queue.run()]
            if not ready:
                return False
            busy = [queue for queue in self.queues if queue.steps]
        return True


class Native:
    """Stands for the part of `_cuda` that a window needs."""

    def __init__(self, machine: Machine) -> None:
        self._queues = machine.queues

    def MappedPages(self, address: int, nbytes: int) -> object:
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        return address

    def copy(self, dst: int, src: int, nbytes: int, *, stream: int) -> None:
        self._queues[stream].add(lambda: ctypes.memmove(dst, src, nbytes))

    def write_word(self, address: int, value: int, *, stream: int) -> None:
        word = ctypes.c_int64.from_address(address)
        self._queues[stream].add(lambda: setattr(word, "value", value))

    def wait_word(self, device: int, address: int, value: int, *, stream: int) -> None:
        word = ctypes.c_int64.from_address(address)
        self._queues[stream].steps.append(lambda: word.value >= value)


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        stream.queue.add(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        return self.done


class Stream:
    device_index = 0

    def __init__(self, machine: Machine, queue: Queue) -> None:
        self.queue = queue
        self.cuda_stream = machine.queues.index(queue)

    def wait_event(self, event: Event) -> None:
        self.queue.steps.append(event.query)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def query(self) -> bool:
        return not self.queue.steps


class FakeDevice:
    """A rank's device. ``queues``: hardware queues that its streams share."""

    has_streams = True
    queues = True

    def __init__(self, machine: Machine, queues: int) -> None:
        self._machine = machine
        self._shared = [Queue() for _ in range(queues)]
        machine.queues += self._shared
        self._made = 0
        self.first = self.stream()

    def stream(self, device: object = None) -> Stream:
        self._made += 1
        return Stream(self._machine, self._shared[self._made % len(self._shared)])

    def current(self, device: object) -> Stream:
        return self.first

    def event(self, *, timed: bool) -> Event:
        return Event()

    def on(self, stream: Stream) -> Any:
        return memoryview(b"")  # a context that does nothing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(seed=1)

    def bytes_at(address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(window, "native", lambda: Native(made))
    monkeypatch.setattr(window, "bytes_at", bytes_at)
    return made


class Rank:
    """One rank's memory, device and calls."""

    def __init__(self, machine: Machine, rank: int, nbytes: int, queues: int) -> None:
        self.rank = rank
        self.device = FakeDevice(machine, queues)
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.pad = HostMemory.create(_transport.pad_bytes(SIGNALS))
        _transport.pad_format(self.pad.address, SIGNALS)
        self.words: Words | None = None

    def streams(self, plan: LaunchPlan, number: int, ranks: list[Rank]) -> tuple[Call, CallStreams]:
        call = Call(
            plan=plan, rank=self.rank, tensors={}, epoch=1, number=number,
            pad=self.pad.address, workspace=self.memory.data_ptr(), areas=(0,),
            peers={r.rank: PeerMemory(r.pad.address, r.memory.data_ptr())
                   for r in ranks if r is not self},
            region=0, fifo=0, timeout_s=1.0,
        )  # fmt: skip
        device: Any = self.device
        self.words = self.words or Words(call)
        return call, CallStreams(
            call, device, torch.device("cpu"), Scratch(), AbortWord(call.pad), words=self.words
        )


def world_of(machine: Machine, plan: LaunchPlan, queues: int) -> list[Rank]:
    nbytes = plan.part(StreamsSchedule).window_bytes
    assert nbytes > 0
    return [Rank(machine, rank, nbytes, queues) for rank in range(plan.world_size)]


def word_at(rank: Rank, word: int) -> int:
    address: int = _transport.word_address(rank.pad.address, word)
    return address


def rows_of(rank: int, number: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("queues", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("chunk", [None, 3])
def test_everyones_rows_arrive_call_after_call(
    machine: Machine, world: int, queues: int, chunk: int | None
) -> None:
    """And are seen by what follows a wait; also where all streams of a rank share one hardware queue.
    Words are never cleared."""
    made = plan("all_gather_gemm", world, m=7 * world, n=8, k=5)
    if chunk is not None:
        how = made.part(GatherSchedule).model_copy(update={"rows_per_chunk": chunk})
        made = made.model_copy(update={"schedule": how})
    ranks = world_of(machine, made, queues)
    for number in (1, 2, 5):
        gathered = []
        for one in ranks:
            call, streams = one.streams(made, number, ranks)
            own = rows_of(one.rank, number, (7, 5))
            whole = streams.landing("gathered")
            whole.fill_(POISON)  # before any rank has said that its window is free
            gathered.append((whole, own, call, streams))
        seen = [torch.full((world, 7, 5), POISON) for _ in ranks]
        for whole, own, call, streams in gathered:
            arrivals = exchange(call, streams, lambda target, own=own: own, whole.__getitem__)
            for source, start, end, message in arrivals:
                streams.wait(message)
                to, rows = (rows[source, start:end] for rows in (seen[call.rank], whole))
                ranks[call.rank].device.first.queue.add(lambda to=to, rows=rows: to.copy_(rows))
            streams.finish()
        assert machine.drain()
        for rank, found in enumerate(seen):
            for source in range(world):
                wanted = rows_of(source, number, (7, 5))
                assert source == rank or torch.equal(found[source], wanted)


def test_uneven_shares_land_where_they_belong(machine: Machine) -> None:
    """Seven rows of three ranks: chunks of both directions differ in number."""
    made = plan("gemm_all_reduce", 3, m=7, n=4, k=16)
    ranks = world_of(machine, made, 1)
    shares = [share(7, 3, rank) for rank in range(3)]
    kept = []
    for one in ranks:
        call, streams = one.streams(made, 1, ranks)
        first, last = shares[one.rank]
        kept.append((call, streams, streams.landing("results"), last - first))
    for call, streams, landing, rows in kept:
        results = [landing[rank, : end - start] for rank, (start, end) in enumerate(shares)]
        own = rows_of(call.rank, 1, (rows, 4)).to(landing.dtype)
        exchange(call, streams, lambda target, own=own: own, results.__getitem__)
    assert machine.drain()
    for rank, (_, _, landing, _) in enumerate(kept):
        for source, (start, end) in enumerate(shares):
            wanted = rows_of(source, 1, (end - start, 4)).to(landing.dtype)
            assert source == rank or torch.equal(landing[source, : end - start], wanted)


def test_nothing_is_put_before_the_window_is_free(machine: Machine) -> None:
    made = plan("all_gather_gemm", 2, m=8, n=8, k=8)
    first, second = ranks = world_of(machine, made, 2)
    _, streams = first.streams(made, 3, ranks)
    own = rows_of(0, 3, (4, 8))
    streams.post([Sent(1, own, streams.landing("gathered")[0])], [], 0)
    before = second.memory[landings(made)["gathered"].offset :].clone()
    machine.drain()
    after = second.memory[landings(made)["gathered"].offset :]
    assert torch.equal(before, after)
    _, others = second.streams(made, 3, ranks)
    machine.drain()
    assert torch.equal(others.landing("gathered")[0], own)


def test_a_call_that_failed_ends_its_waits(machine: Machine, monkeypatch: Any) -> None:
    """A peer never comes; one that lives writes a smaller number afterwards."""
    made = plan("all_gather_gemm", 2, m=8, n=8, k=8)
    first, _ = ranks = world_of(machine, made, 2)
    call, streams = first.streams(made, 3, ranks)
    whole = streams.landing("gathered")
    exchange(call, streams, lambda target: whole[0], whole.__getitem__)
    streams.finish()
    assert not machine.drain()
    rounds = []

    def asleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 1:
            for word in range(words_of(2)):
                ctypes.c_int64.from_address(word_at(first, word)).value = 1
        else:
            machine.drain()

    monkeypatch.setattr(window.time, "sleep", asleep)
    assert streams.abandon()
    assert all(not queue.steps for queue in machine.queues)
    assert 1 < len(rounds) < 5


def test_a_window_stays_where_a_stream_does_not_end(machine: Machine, monkeypatch: Any) -> None:
    made = plan("all_gather_gemm", 2, m=8, n=8, k=8)
    first, _ = ranks = world_of(machine, made, 2)
    _, streams = first.streams(made, 3, ranks)
    first.device.first.queue.steps.append(lambda: False)
    monkeypatch.setattr(window, "_DRAIN_S", 0.01)
    assert not streams.abandon()


@pytest.mark.parametrize(
    ("op", "world", "m"),
    [("all_gather_gemm", 4, 64), ("gemm_reduce_scatter", 3, 63), ("gemm_all_reduce", 4, 5)],
)
def test_landings_lie_apart(op: str, world: int, m: int) -> None:
    made = plan(op, world, m=m, n=24, k=40)
    end = 0
    for landing in landings(made).values():
        sources, rows, columns = landing.shape
        assert landing.offset >= end
        assert landing.offset % 256 == 0  # what a product reads
        assert sources == world
        assert rows == -(-m // world)
        end = landing.offset + sources * rows * columns * DTYPE_BYTES[landing.dtype]
    assert made.part(StreamsSchedule).window_bytes == landing_bytes(made) == end


def test_where_messages_are_not_puts() -> None:
    """In a world of one, where devices do not reach each other, and in ops that have no landings."""
    sizes = {"m": 64, "n": 24, "k": 40}
    attention = {"batch": 1, "heads": 2, "kv_heads": 2, "sequence": 64, "head_dim": 8}
    assert plan("all_gather_gemm", 4, **sizes).part(StreamsSchedule).window_bytes > 0
    for made in (
        plan("all_gather_gemm", 1, **sizes),
        plan("all_gather_gemm", 4, no_p2p=True, **sizes),
        plan("ring_attention", 4, **attention),
    ):
        assert made.part(StreamsSchedule).window_bytes == 0


def test_words_are_where_native_code_says_and_nowhere_else() -> None:
    pad = HostMemory.create(_transport.pad_bytes(8))
    _transport.pad_format(pad.address, 8)
    start, end = _transport.word_range(pad.address, 2, 3)
    addresses = [_transport.word_address(pad.address, word) for word in range(2, 5)]
    assert addresses == [start, start + 8, start + 16]
    assert end == start + 24
    _transport.pad_add(pad.address, 3, 77)
    assert ctypes.c_uint64.from_address(addresses[1]).value == 77
    with pytest.raises(IndexError, match="signal 8 of a pad of 8"):
        _transport.word_range(pad.address, 2, 7)
    with pytest.raises(IndexError, match="signal 8 of a pad of 8"):
        _transport.word_address(pad.address, 8)


def test_a_message_too_many_is_not_taken_for_one_of_the_next_call() -> None:
    assert _transport.message_number(3, 1) > _transport.message_number(3, 0)
    last = (1 << 20) - 1
    assert _transport.message_number(3, last) == _transport.message_number(4, 0) - 1
    with pytest.raises(IndexError, match="message 1048576 of call 3: a call has at most 1048575"):
        _transport.message_number(3, last + 1)
