"""What a turn does to a device, in which order, and when it starts; without a device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from mkernel.harness.clock import Meeting, calibrated, skew_us, wait_until
from mkernel.harness.problem import Tensors
from mkernel.harness.protocol import (
    LATE_S,
    LONGEST_LEAD_S,
    SHORTEST_LEAD_S,
    SPARE,
    CountedLaunch,
    HiddenLaunch,
    Leads,
    Stopwatch,
)
from mkernel.harness.queue import Cache

RESULT = {"out": torch.zeros(3)}


class Recorder:
    """A queue that does nothing and keeps what it was asked for."""

    def __init__(self, has_clock: bool = True) -> None:
        self.done: list[str] = []
        self.instant = 0
        self._has_clock = has_clock

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.done.append(name)

    def calibrate(self) -> bool:
        self.done.append("calibrate")
        return self._has_clock

    def hold(self, instant_ns: int) -> None:
        self.done.append("hold")
        self.instant = instant_ns

    def spin(self, seconds: float) -> None:
        self.done.append(f"spin {seconds:g}")

    def copy(self, result: torch.Tensor) -> torch.Tensor:
        self.done.append("copy")
        return result.clone()

    def seconds(self) -> float:
        return 0.25

    def held_until(self) -> int:
        self.done.append("held_until")
        return self.instant + 700

    def settings(self) -> dict[str, Any]:
        return {"flush_bytes": 1}


def turn(watch: type[Stopwatch], queue: Recorder, late: bool = False, **more: Any) -> Any:
    def call() -> tuple[Tensors, ...]:
        queue.done.append("call")
        return RESULT, RESULT

    made: Any = watch
    return made(queue, Meeting(HashStore(), 0, 1), **more).time("mkernel", call, late)


def test_a_turn_starts_with_a_cold_clean_cache_at_the_agreed_instant() -> None:
    queue = Recorder()
    timed = turn(HiddenLaunch, queue)
    assert queue.done == [
        "flush", "calibrate", "hold", "start", "call", "end", "copy", "copy", "barrier",
        "synchronize", "held_until",
    ]  # fmt: skip
    assert timed.seconds == 0.25
    assert timed.started_ns == queue.instant + 700
    assert len(timed.results) == 2
    assert all(copy["out"] is not RESULT["out"] for copy in timed.results)


def test_a_late_rank_comes_after_the_instant() -> None:
    queue = Recorder()
    turn(HiddenLaunch, queue, late=True)
    assert queue.done[2:5] == ["hold", f"spin {LATE_S:g}", "start"]


def test_without_a_clock_ranks_start_behind_a_barrier() -> None:
    queue = Recorder(has_clock=False)
    timed = turn(HiddenLaunch, queue)
    assert queue.done == [
        "flush", "calibrate", f"spin {SHORTEST_LEAD_S:g}", "barrier", "start", "call", "end",
        "copy", "copy", "barrier", "synchronize",
    ]  # fmt: skip
    assert timed.started_ns is None


@pytest.mark.parametrize("until_done", [False, True])
def test_hosts_whose_launches_count_start_on_an_idle_device(until_done: bool) -> None:
    queue = Recorder()
    timed = turn(CountedLaunch, queue, until_done=until_done)
    waits = ["wait_for_end"] if until_done else []
    assert queue.done == [
        "flush", "synchronize", "start", "call", "end", *waits, "copy", "copy", "barrier",
        "synchronize",
    ]  # fmt: skip
    assert timed.started_ns is not None
    assert (timed.seconds == 0.25) is not until_done


class Touched(TorchDispatchMode):
    """Bytes that operations wrote and read, by address, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        kind = {"zero_": "write", "fill_": "write", "sum": "read"}.get(
            func.overloadpacket.__name__, "other"
        )
        self.done.append((kind, first.data_ptr(), first.nbytes))
        return func(*args, **(kwargs or {}))


def test_a_flush_replaces_the_whole_cache_and_leaves_nothing_dirty() -> None:
    bytes_of_cache = 1 << 20
    cache = Cache(torch.device("cpu"), bytes_of_cache)
    with Touched() as touched:
        cache.flush()
    kinds = [kind for kind, _, _ in touched.done]
    assert kinds == ["write", "read"]
    (_, written, wrote), (_, read, went_over) = touched.done
    assert wrote > 2 * bytes_of_cache
    assert went_over > 2 * bytes_of_cache
    assert written != read  # else it would be the dirty lines themselves that are read


def test_the_fastest_answer_says_best_what_lies_between_two_clocks() -> None:
    found = calibrated([(0, 5_000_900, 1000), (2000, 5_002_600, 2600), (3000, 5_003_001, 4000)])
    assert found.offset_ns == 5_002_600 - 2300
    assert found.error_ns == 300
    assert found.on_host(found.on_device(77)) == 77


def test_ranks_agree_on_the_latest_of_what_they_propose() -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = HashStore()
    leads = [0.001, 50.0, 3.0]

    def agreed(rank: int) -> list[int]:
        meeting = Meeting(store, rank, len(leads))
        return [meeting.agree(leads[rank]) for _ in range(20)]

    began = time.monotonic_ns()
    with ThreadPoolExecutor(len(leads)) as pool:
        found = list(pool.map(agreed, range(len(leads))))
    assert found[0] == found[1] == found[2]
    assert sorted(set(found[0])) == found[0]  # every time a new one
    assert min(found[0]) - began > max(leads) * 1e9
    assert store.num_keys() <= len(leads) + 1  # what was read is gone


def test_a_host_waits_no_shorter_than_agreed() -> None:
    instant = Meeting(HashStore(), 0, 1).agree(0.01)
    assert wait_until(instant) >= instant


def test_skew_is_from_the_first_to_the_last() -> None:
    assert skew_us([5_000, 1_000, 3_500]) == 4.0


def test_a_hold_outlasts_what_the_host_needed_last() -> None:
    leads = Leads()
    leads.queued("slow", 0.003)
    assert leads.before("slow") == SPARE * 0.003
    assert leads.before("another") == SHORTEST_LEAD_S
    leads.queued("slow", 0.0001)
    assert leads.before("slow") == SHORTEST_LEAD_S


def test_a_first_turn_that_loads_libraries_does_not_hold_up_the_others() -> None:
    leads = Leads()
    leads.queued("first", 30.0)
    assert leads.before("first") == LONGEST_LEAD_S
    leads.queued("first", 0.001)
    assert leads.before("first") == SHORTEST_LEAD_S


def test_a_hosts_time_lasts_as_long_as_the_call() -> None:
    def call() -> tuple[Tensors, ...]:
        time.sleep(0.05)
        return (RESULT,)

    queue: Any = Recorder()
    began = time.monotonic()
    timed = CountedLaunch(queue, Meeting(HashStore(), 0, 1), True).time("mkernel", call)
    assert 0.05 <= timed.seconds <= time.monotonic() - began
