"""What one engine's calls of a world ask of its parts, and when; the parts stand in for themselves."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from mkernel.backends.transport import _transport
from mkernel.errors import Timeout, Unsupported
from mkernel.world import calls
from mkernel.world.calls import CallRecord, Calls
from mkernel.world.engine import DRAIN_S
from mkernel.world.order import DeviceOrder
from mkernel.world.statistics import CallCounters, CallKind


class Backend:
    """An accelerator whose launches end as soon as one waits; ``launched``: what it was called with."""

    name = "backend"

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.refuses = False
        self.graphs = False
        self.replayed = threading.Event()

    def record(self) -> int:
        return 0

    def on(self, tensors: Mapping[str, torch.Tensor]) -> nullcontext[None]:
        return nullcontext()

    def launch(self, call: Any) -> Any:
        if self.refuses:
            raise Unsupported("this launch")
        self.launched.append(call)
        return Mock(wait=Mock(return_value=True), calls_over=lambda: 0, results=dict)

    def refused(self) -> None:
        return None

    def captured(self) -> bool:
        return self.graphs

    def await_replays(self) -> threading.Event:
        return self.replayed


class Made:
    """``Calls`` among mocks."""

    def __init__(self, *, stream_ordered: bool = False, session: Any = None) -> None:
        self.backend = Backend()
        claims = SimpleNamespace(stream_ordered=stream_ordered, settles_puts=False)
        self.heap = MagicMock()
        self.heap.places.return_value = {}
        engine: Any = SimpleNamespace(
            accelerator=self.backend, heap=self.heap, group=None, claims=claims
        )
        self._pad = (ctypes.c_uint64 * (_transport.pad_bytes(1) // 8 + 8))()
        self.heap.pad = ctypes.addressof(self._pad)
        _transport.pad_format(self.heap.pad, 1)
        self.failure = Mock(running=deque(), call=(0, "key"), notice=None, timeout_s=5.0)
        self.failure._watchdog = None
        self.exchange, order = Mock(rank=0), DeviceOrder("cpu")
        self.turns = MagicMock(device="cpu", world="world", order=order)
        order.turns |= {self.turns, Mock()}  # there is another world
        agreement = Mock(enter=self._agreed)
        self.calls = Calls(engine, session, self.exchange, self.failure, agreement, self.turns)

    def _agreed(self, *call: object) -> None:
        self.failure.call = (self.failure.call[0] + 1, "key")

    def run(self, *, wait: bool = False, view: Any = "pipelined") -> CallRecord:
        plan: Any = SimpleNamespace(op="an op", world_size=1)
        return self.calls.run(plan, {}, {}, view, trace=False, wait=wait)


def nic(*, flushed: bool = True) -> Mock:
    """A session without order, whose puts complete in time, or do not."""
    return Mock(
        fifo=1,
        capabilities=Mock(return_value=Mock(ordered=False)),
        flush=Mock(return_value=flushed),
    )


def test_each_launch_has_the_next_epoch() -> None:
    """Kernels tell the marks of one call from those of the last by it."""
    made = Made()
    for _ in range(3):
        made.run()
    assert [call.epoch for call in made.backend.launched] == [1, 2, 3]


def test_a_launch_that_was_refused_takes_no_epoch() -> None:
    made = Made()
    made.backend.refuses = True
    with pytest.raises(Unsupported):
        made.run()
    made.backend.refuses = False
    made.run()
    assert [call.epoch for call in made.backend.launched] == [1]
    assert made.calls.counters.errors == 1


def test_every_wait_is_counted() -> None:
    made = Made()
    for _ in range(3):
        made.run(wait=True)
    assert made.calls.counters.waits == 3


@pytest.mark.parametrize("stream_ordered", [False, True])
def test_calls_that_are_queued_take_their_place_among_those_of_other_worlds(
    stream_ordered: bool,
) -> None:
    made = Made(stream_ordered=stream_ordered)
    made.run()
    assert made.turns.follow.call_count == made.turns.queued.call_count == stream_ordered
    assert len(made.failure.running) == stream_ordered  # else it was waited for
    made.run()
    assert len(made.failure.running) == stream_ordered  # the first is over, and forgotten


def test_a_call_is_timed_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "Instrumented", Backend)
    made = Made()
    for view, wait in (("pipelined", False), ("pipelined", True), ("sequential", False)):
        made.run(view=view, wait=wait)
    assert [call.timed for call in made.backend.launched] == [False, True, True]


def test_in_a_broken_world_nothing_is_launched() -> None:
    made = Made()
    made.failure.notice = Mock()
    made.failure.raise_if_broken.side_effect = Timeout("rank 1 did not come")
    with pytest.raises(Timeout, match="rank 1 did not come"):
        made.run()
    assert made.backend.launched == []


def test_synchronize_raises_what_broke_the_world() -> None:
    made = Made(stream_ordered=True)
    made.failure.raise_if_broken.side_effect = Timeout("rank 1 did not come")
    with pytest.raises(Timeout, match="rank 1 did not come"):
        made.calls.synchronize()


def test_a_world_that_breaks_ends_the_wait_for_replays() -> None:
    made = Made(stream_ordered=True)
    made.backend.graphs = True

    def wait(seconds: float) -> bool:
        made.failure.raise_if_broken.side_effect = Timeout("rank 1 did not come")
        return False

    made.backend.replayed.wait = wait  # type: ignore[method-assign]
    with pytest.raises(Timeout, match="rank 1 did not come"):
        made.calls.synchronize()


def test_views_take_an_instrumented_backend() -> None:
    made = Made()
    made.run(view="pipelined")
    with pytest.raises(Unsupported, match="in the view 'pipelined' only, not 'sequential'"):
        made.run(view="sequential")


@pytest.mark.parametrize("flushed", [True, False])
def test_puts_without_order_are_flushed_behind_each_call(flushed: bool) -> None:
    made = Made(session=nic(flushed=flushed))
    made.failure.raise_unflushed.side_effect = Timeout("the NIC did not complete its puts")
    with nullcontext() if flushed else pytest.raises(Timeout, match="did not complete"):
        made.run()
    assert made.failure.raise_unflushed.call_count == (not flushed)


def test_a_world_ends_together() -> None:
    made = Made(stream_ordered=True)
    made.run()
    made.calls.end(None)
    assert not made.failure.running
    assert made.exchange.barrier.call_count == 1
    assert made.failure.tell.call_count == 0


def test_a_rank_that_stops_early_tells_the_others() -> None:
    made = Made()
    error = RuntimeError("no more")
    made.calls.end(error)
    made.failure.tell.assert_called_once_with(error)


def test_a_broken_world_ends_at_once() -> None:
    made = Made()
    made.failure.notice = Mock()
    made.calls.end(RuntimeError("no more"))
    assert made.failure.tell.call_count == made.exchange.barrier.call_count == 0


def test_a_call_that_does_not_end_breaks_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """After twice the deadline: the user's own work may be queued before it."""
    now = [0.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(for_s: float) -> bool:
        now[0] += for_s
        return False

    made = Made(stream_ordered=True)
    made.failure.running.append(Mock(wait=wait, calls_over=lambda: 0))
    with pytest.raises(Timeout, match="did not end within"):
        made.calls.synchronize()
    assert now[0] == pytest.approx(2 * 5.0 + DRAIN_S, abs=1.0)
    assert made.failure.tell.call_count == 1


def test_the_deadline_of_the_first_call_begins_anew_with_each_that_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit_s = 2 * 5.0 + DRAIN_S

    def wait(for_s: float) -> bool:
        now[0] += for_s
        return now[0] > 3 * limit_s

    made = Made(stream_ordered=True)
    over = lambda: int(now[0] / (0.9 * limit_s))  # noqa: E731
    made.failure.running.append(Mock(wait=wait, calls_over=over))
    made.calls.synchronize()
    assert made.calls.counters.waited_s == pytest.approx(3 * limit_s, abs=1.0)


def test_native_code_finds_the_number_of_calls_in_eight_bytes() -> None:
    kind = CallKind(SimpleNamespace(op="an op"))  # type: ignore[arg-type]
    for number in range(3):
        assert (kind.calls, len(kind.counter)) == (number, 8)
        kind.count()


def test_calls_of_one_key_are_one_kind() -> None:
    counters = CallCounters(0)
    plan: Any = SimpleNamespace(op="an op", world_size=1)
    kinds = [counters.of(key, plan) for key in ("one", "other", "one")]
    assert kinds[0] is kinds[2] is not kinds[1]
    assert counters.new_shapes == 2


class Making(Backend):
    """A backend that makes outputs of its plans."""

    made = torch.zeros(2, 3)

    def allocation(self, *asked: Any) -> Any:
        self.asked = asked
        return (lambda *_: self.made), asked


@pytest.mark.parametrize("has", [False, True])
def test_outputs_are_the_backends_where_it_has_memory_for_them(has: bool) -> None:
    """Which is not before a plan's first call."""
    made = Made()
    made.calls._accelerator = backend = Making()  # type: ignore[assignment]
    made.heap.has_outputs.return_value = has
    plan: Any = SimpleNamespace(op="an op")
    make, arguments = made.calls.allocation(plan, (2, 3), torch.empty(1), torch.float16)
    out = make(*arguments)
    if has:
        assert out is backend.made
        assert backend.asked == (plan, (2, 3), torch.float16)
    else:
        assert (out.shape, out.dtype) == ((2, 3), torch.float16)
        assert out.is_contiguous()
    made.heap.has_outputs.assert_called_once_with(plan)


def test_a_backend_may_leave_an_output_to_torch() -> None:
    made = Made()
    made.backend.allocation = Mock(return_value=None)  # type: ignore[attr-defined]
    plan: Any = SimpleNamespace(op="an op")
    like = torch.empty(1, device="meta")
    make, arguments = made.calls.allocation(plan, (2, 3), like, torch.float16)
    out = make(*arguments)
    assert (tuple(out.shape), out.dtype, out.device.type) == ((2, 3), torch.float16, "meta")


def broken(failure: Mock) -> None:
    """Report from now on that a replay has recorded a time-out."""
    failure.raise_recorded.side_effect = Timeout("a replay waited for rank 1")


@pytest.mark.parametrize("ends", [False, True])
def test_synchronize_waits_for_replays_and_raises_what_broke_them(ends: bool) -> None:
    """They are no calls: nothing says that they run, or that their peer stays away."""
    made = Made(stream_ordered=True)
    made.calls.synchronize()  # no graph holds a call: the device is not waited for
    made.backend.graphs = True
    looked: list[float] = []

    def wait(seconds: float) -> bool:
        looked.append(seconds)
        if len(looked) > 2:
            broken(made.failure)
        return ends and len(looked) > 2

    made.backend.replayed.wait = wait  # type: ignore[method-assign]
    with pytest.raises(Timeout, match="a replay waited for rank 1"):
        made.calls.synchronize()
    assert len(looked) == 3


@pytest.mark.parametrize("raised", [False, True])
def test_the_end_raises_what_broke_a_replay_unless_it_was_raised(raised: bool) -> None:
    made = Made(stream_ordered=True)
    made.backend.graphs = True
    made.backend.replayed.set()
    made.failure.raised = raised
    made.failure.notice = None
    broken(made.failure)
    with nullcontext() if raised else pytest.raises(Timeout, match="a replay waited"):
        made.calls.end(None)
