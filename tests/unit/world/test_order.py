"""The order of all calls of a process: one at a time, on the device too, and captured as well."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from mkernel.errors import Timeout, Unsupported
from mkernel.world import order
from mkernel.world.order import DeviceOrder, Queued, Turns


class Stream:
    """A device's stream that notes which events it waits for. ``capture``: that it is part of."""

    def __init__(self, name: str, capture: int = 0) -> None:
        self.name, self.capture = name, capture
        self.waits: list[str] = []

    def record_event(self) -> Stream:
        return Stream(self.name, self.capture)

    def wait_event(self, event: Stream) -> None:
        if event.capture != self.capture:
            raise RuntimeError("cudaErrorStreamCaptureMerge")
        self.waits.append(event.name)


class Module:
    """What a device's module of torch has of streams."""

    def __init__(self) -> None:
        self.now = Stream("default")

    def current_stream(self) -> Stream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.now.capture != 0

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Worlds:
    """Two worlds of one device, and the streams of their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = Module()
        self.told: list[BaseException] = []
        self.drained: list[str] = []
        monkeypatch.setattr(torch, "get_device_module", lambda device: self.module)
        device = DeviceOrder("fake")
        monkeypatch.setattr(order, "order_of", lambda name: device)
        self.device = device

    def world(self, name: str, limit_s: float = 30.0) -> Turns:
        made = Turns(
            "fake", name, lambda: limit_s, lambda: self.drained.append(name), self.told.append
        )
        made.join()
        return made

    def call(self, turns: Turns, stream: Stream) -> None:
        with self.module.stream(stream), turns:
            turns.follow()
            turns.queued()


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Worlds:
    return Worlds(monkeypatch)


def test_calls_of_two_worlds_on_two_streams_follow_each_other(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    first, second = Stream("first"), Stream("second")
    worlds.call(one, first)
    worlds.call(other, second)
    assert (first.waits, second.waits) == ([], ["first"])
    worlds.call(other, first)  # a world orders its own calls
    worlds.call(one, first)  # a stream does too
    assert (first.waits, second.waits) == ([], ["first"])
    worlds.call(other, second)
    assert second.waits == ["first", "first"]


def test_what_native_code_queued_last_is_followed(worlds: Worlds) -> None:
    """It records no event: that is done when another stream has to wait."""
    worlds.world("one")
    other = worlds.world("other")
    first, second = Stream("first"), Stream("second")
    worlds.device.last[False] = Queued("one", first, None)
    worlds.call(other, first)
    assert (first.waits, second.waits) == ([], [])
    worlds.device.last[False] = Queued("one", first, None)
    worlds.call(other, second)
    assert second.waits == ["first"]
    assert worlds.drained == ["one"]  # as the second world began


def test_what_is_followed_on_a_stream_that_is_captured_by_then_is_over(worlds: Worlds) -> None:
    worlds.world("one")
    other = worlds.world("other")
    worlds.drained.clear()
    worlds.device.last[False] = Queued("one", Stream("first", 7), None)
    second = Stream("second")
    worlds.call(other, second)
    assert worlds.drained == ["one"]
    assert second.waits == []


def test_a_world_alone_pays_nothing(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    one = worlds.world("one")
    monkeypatch.setattr(Module, "current_stream", lambda self: pytest.fail("asked for the stream"))
    worlds.call(one, Stream("first"))


def test_calls_of_a_world_that_was_alone_are_over_before_another_begins(worlds: Worlds) -> None:
    worlds.call(worlds.world("one"), Stream("first"))
    assert worlds.drained == []
    worlds.world("other")
    assert worlds.drained == ["one"]


def test_a_capture_that_forks_two_worlds_puts_them_in_order(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    first, second = Stream("first", 7), Stream("second", 7)
    worlds.call(one, first)
    worlds.call(other, second)
    assert second.waits == ["first"]


def test_two_captures_at_once_are_refused(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    worlds.call(one, Stream("first", 7))
    with pytest.raises(Unsupported, match=r"'other' is captured while another .* of world 'one'"):
        worlds.call(other, Stream("second", 8))
    assert worlds.device.under_way == []


def test_a_capture_and_what_runs_meanwhile_do_not_wait_for_each_other(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    first, captured, third = Stream("first"), Stream("captured", 7), Stream("third")
    worlds.call(one, first)
    worlds.call(other, captured)  # its graph runs when it is replayed
    assert captured.waits == []
    worlds.call(other, third)
    assert third.waits == ["first"]  # what runs follows what ran
    captured.capture = 0
    late = Stream("late", 9)
    worlds.call(one, late)  # the other capture has ended
    assert late.waits == []


def test_a_stream_that_is_captured_after_a_call_takes_no_other_along(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    first, second = Stream("first"), Stream("second")
    worlds.call(one, first)
    first.capture = 3
    worlds.call(other, second)
    assert second.waits == ["first"]


# ---- threads -------------------------------------------------------------------------------------


def test_threads_take_turns(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other")
    inside: list[str] = []
    most: list[int] = []

    def calls(turns: Turns) -> None:
        for _ in range(50):
            with turns, turns:  # the thread that has its turn may enter again
                inside.append("x")
                most.append(len(inside))
                time.sleep(0.0001)
                inside.pop()

    threads = [threading.Thread(target=calls, args=(turns,)) for turns in (one, other, one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 150
    assert set(most) == {1}


def test_a_turn_that_does_not_come_is_a_timeout(worlds: Worlds) -> None:
    one, other = worlds.world("one"), worlds.world("other", limit_s=0.2)
    entered, leave = threading.Event(), threading.Event()

    def stays() -> None:
        with one:
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=stays)
    thread.start()
    entered.wait(30)
    assert (one.elsewhere(), other.elsewhere()) == ("", "one")
    with pytest.raises(Timeout, match=r"'other' waited 0.2 s for a call of world 'one'"), other:
        pytest.fail("it is the other's turn")
    assert [type(error) for error in worlds.told] == [Timeout]
    leave.set()
    thread.join()


def test_a_world_that_is_being_made_keeps_the_process_busy(worlds: Worlds) -> None:
    one = worlds.world("one")
    with order.making("another"):
        assert one.elsewhere() == "another"
    assert one.elsewhere() == ""


def test_a_world_that_has_ended_is_not_waited_for(worlds: Worlds) -> None:
    worlds.world("one").leave()
    worlds.world("other")
    assert worlds.drained == []


def test_a_call_from_before_a_world_began_is_not_followed(worlds: Worlds) -> None:
    """Nobody noted what the one that stayed alone has queued since."""
    one, other = worlds.world("one"), worlds.world("other")
    worlds.call(one, Stream("a"))
    one.leave()
    worlds.world("third")
    later = Stream("b")
    worlds.call(other, later)
    assert worlds.drained == ["one", "other"]
    assert later.waits == []
