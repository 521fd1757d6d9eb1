"""Symmetric memory of GPUs between processes: exchange, reach, exports, and what a death leaves."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from device_buffers import needs_gpus, several
from memory_ranks import ranks

from mkernel.backends.accelerators.cuda.memory import DeviceMemory

MIB = 1 << 20
pytestmark = needs_gpus(2)


def pattern(writer: int, owner: int) -> list[int]:
    return [1000 * writer + 100 * owner + place for place in range(50)]


@several
def test_every_rank_writes_to_every_other(world: int) -> None:
    nbytes = 3 * MIB + 8  # not whole pages
    with ranks(world) as made:
        descriptors = [rank.do("create", "own", nbytes) for rank in made]
        for number, rank in enumerate(made):
            assert rank.do("read", "own", nbytes - 80, 10) == [0] * 10, "not zeroed"
            for owner in range(world):
                if owner != number:
                    rank.do("attach", f"peer{owner}", descriptors[owner])
        for writer, rank in enumerate(made):
            for owner in range(world):
                if owner != writer:
                    rank.do("write", f"peer{owner}", 4096 * writer, pattern(writer, owner))
        for owner, rank in enumerate(made):
            for writer in range(world):
                wanted = [0] * 50 if writer == owner else pattern(writer, owner)
                assert rank.do("read", "own", 4096 * writer, 50) == wanted
        # And reads: what the owner wrote, through a peer's mapping.
        made[0].do("write", "own", nbytes - 16, [5, 6])
        assert made[-1].do("read", "peer0", nbytes - 16, 2) == [5, 6]


def test_a_tensor_is_the_memory_itself_and_keeps_it() -> None:
    with ranks(2) as made:
        descriptor = made[1].do("create", "own", MIB)
        made[0].do("attach", "peer", descriptor)
        made[0].do("write", "peer", 64, [0x4000_3F80_4000_3F80, 0])  # bf16: 1, 2, 1, 2, 0, ...
        assert made[1].do("tensor", "own", 64, [2, 3], "bfloat16") == [1, 2, 1, 2, 0, 0]
        assert made[1].do("outlives", "own")


def test_it_exports_as_a_dmabuf() -> None:
    with ranks(2) as made:
        made[0].do("create", "own", 5 * MIB)
        kind, size, nbytes = made[0].do("dmabuf", "own")
        assert "dmabuf" in kind
        assert size >= nbytes


@pytest.mark.alone
def test_memory_of_a_killed_process_stays_until_its_peers_let_go() -> None:
    big = 1024 * MIB
    free = torch.cuda.mem_get_info(1)[0]
    with ranks(2) as made:
        descriptor = made[1].do("create", "own", big)
        made[0].do("attach", "peer", descriptor)
        made[1].do("write", "own", big - 800, pattern(1, 1))
        made[1].kill()
        assert made[0].do("read", "peer", big - 800, 50) == pattern(1, 1)
        made[0].do("write", "peer", 0, pattern(0, 1))
        assert made[0].do("read", "peer", 0, 50) == pattern(0, 1)
        assert torch.cuda.mem_get_info(1)[0] < free - big // 2
        with pytest.raises(RuntimeError, match="nobody offers"):
            made[0].do("attach", "again", descriptor)
        made[0].do("close", "peer")
        deadline = time.monotonic() + 10
        while torch.cuda.mem_get_info(1)[0] < free - 64 * MIB:
            assert time.monotonic() < deadline, "the last mapping is gone, the memory is not"
            time.sleep(0.05)


@pytest.mark.alone
def test_closed_memory_is_not_offered_and_leaves_nothing() -> None:
    with ranks(2) as made:
        first = made[0].do("create", "warm", MIB)
        made[1].do("attach", "peer", first)
        made[0].do("close", "warm")
        made[1].do("close", "peer")
        before = made[0].do("left"), made[1].do("left")
        free = made[0].do("free_bytes")
        for _ in range(20):
            descriptor = made[0].do("create", "own", 256 * MIB)
            made[1].do("attach", "peer", descriptor)
            made[0].do("close", "own")
            with pytest.raises(RuntimeError, match=r"nobody offers|no longer offers"):
                made[1].do("attach", "late", descriptor)
            made[1].do("close", "peer")
        assert (made[0].do("left"), made[1].do("left")) == before
        assert made[0].do("free_bytes") >= free - 64 * MIB
        assert "mkernel-fds" not in before[0][1]
    left = re.findall(r"@mkernel-(\d+)-", Path("/proc/net/unix").read_text())
    assert not {str(each.process.pid) for each in made} & set(left), "others' worlds have theirs"


def test_two_ranks_on_one_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKERNEL_RANKS_PER_DEVICE", raising=False)
    with ranks(1) as made:
        descriptor = made[0].do("create", "own", MIB)
        with pytest.raises(RuntimeError, match=r"ArgumentError.*a GPU of its own for each rank"):
            made[0].do("attach", "self", descriptor)


def test_more_than_there_is_says_so() -> None:
    with ranks(1) as made, pytest.raises(RuntimeError, match=r"symmetric memory.*OUT_OF_MEMORY"):
        made[0].do("create", "own", 1 << 50)


# ---- order of calls --------------------------------------------------------------------------------


@pytest.fixture
def order() -> Any:
    from mkernel.backends.accelerators.cuda import _kernels

    return _kernels.CallOrder(0)


@pytest.fixture
def total() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cuda:0")


def slowly(stream: torch.cuda.Stream, tensor: torch.Tensor, value: int) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        tensor.mul_(10).add_(value)


def test_calls_on_different_streams_run_one_after_another(order: Any, total: torch.Tensor) -> None:
    streams = [torch.cuda.Stream(0) for _ in range(3)]
    calls = []
    torch.cuda.synchronize()
    for value, stream in enumerate(streams, 1):
        order.begin(stream.cuda_stream)
        slowly(stream, total, value)
        calls.append(order.end(stream.cuda_stream))
    assert not order.finished(calls[-1])
    deadline = time.monotonic() + 10
    while not order.finished(calls[-1]):
        assert time.monotonic() < deadline
    assert all(order.finished(call) for call in calls)
    assert int(total) == 123


def test_the_second_stream_of_a_call_comes_between(order: Any, total: torch.Tensor) -> None:
    stream = torch.cuda.Stream(0)
    torch.cuda.synchronize()
    order.begin(stream.cuda_stream)
    slowly(stream, total, 1)
    side = torch.cuda.ExternalStream(order.fork(stream.cuda_stream), device=0)
    slowly(side, total, 2)
    order.join(stream.cuda_stream)
    slowly(stream, total, 3)
    call = order.end(stream.cuda_stream)
    assert not order.finished(call)
    stream.synchronize()
    assert order.finished(call)
    assert int(total) == 123


def test_calls_of_one_capture_are_ordered_too(order: Any, total: torch.Tensor) -> None:
    one, two = torch.cuda.Stream(0), torch.cuda.Stream(0)
    order.begin(one.cuda_stream)  # a call before, which the capture must not depend on
    order.end(one.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=one):
        two.wait_stream(one)
        order.begin(one.cuda_stream)
        slowly(one, total, 1)
        assert order.end(one.cuda_stream) == 0
        order.begin(two.cuda_stream)
        side = torch.cuda.ExternalStream(order.fork(two.cuda_stream), device=0)
        slowly(side, total, 2)
        order.join(two.cuda_stream)
        assert order.end(two.cuda_stream) == 0
        one.wait_stream(two)
    for replay in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert int(total) == int("12" * replay)
    order.begin(two.cuda_stream)
    call = order.end(two.cuda_stream)
    torch.cuda.synchronize()
    assert order.finished(call)


def test_a_capture_survives_questions_and_allocations(order: Any, total: torch.Tensor) -> None:
    stream = torch.cuda.Stream(0)
    order.begin(stream.cuda_stream)
    slowly(stream, total, 0)
    before = order.end(stream.cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(0)):
        total.add_(1)
        order.finished(before)
        memory = DeviceMemory.create(MIB, 0)
        memory.write_word(8, 9)
        del memory
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert int(total) == 1


def test_many_calls_share_few_events(order: Any) -> None:
    stream = torch.cuda.Stream(0)
    calls = []
    for _ in range(300):
        order.begin(stream.cuda_stream)
        calls.append(order.end(stream.cuda_stream))
    stream.synchronize()
    assert calls == list(range(1, 301))
    assert all(order.finished(call) for call in calls)
