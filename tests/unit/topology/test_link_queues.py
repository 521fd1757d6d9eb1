from __future__ import annotations

import pytest

from mkernel.topology.link_queues import Busy, Message, run


def test_alpha_beta_of_one_message() -> None:
    one = Message("one", [[(0, 10.0)]], 2.0)
    assert run([one], 1) == [10.0]
    assert one.arrived_us == 12.0


def test_messages_queue_for_a_link_in_order_of_arrival() -> None:
    late = Message("late", [[(0, 10.0)]], 0.0, ready_us=1.0)
    early = Message("early", [[(0, 4.0)]], 0.0)
    trace: list[list[Busy]] = [[]]
    run([late, early], 1, trace)
    assert (early.arrived_us, late.arrived_us) == (4.0, 14.0)
    assert [busy.message.name for busy in trace[0]] == ["early", "late"]


@pytest.mark.parametrize(("first", "second", "end"), [(10.0, 4.0, 10.0), (4.0, 10.0, 10.0)])
def test_bytes_stream_through_links(first: float, second: float, end: float) -> None:
    """The slower of two links sets the time; the faster is busy only for its own part of it."""
    one = Message("one", [[(0, first), (1, second)]], 1.0)
    trace: list[list[Busy]] = [[], []]
    run([one], 2, trace)
    assert one.arrived_us == end + 1.0
    assert trace[1][0].duration_us == second


def test_parts_on_several_subflows_arrive_together() -> None:
    one = Message("one", [[(0, 3.0)], [(1, 5.0)]], 0.0)
    assert run([one], 2) == [3.0, 5.0]
    assert one.arrived_us == 5.0


def test_a_message_waits_for_others() -> None:
    first, second = (Message(name, [[(0, 5.0)]], 1.0) for name in ("first", "second"))
    moment = Message("both", (), 0.0)
    moment.after(first)
    moment.after(second)
    last = Message("last", [[(1, 2.0)]], 0.0)
    last.after(moment)
    run([last, moment, first, second], 2)
    assert moment.arrived_us == 11.0
    assert last.arrived_us == 13.0


def test_a_circle_is_named() -> None:
    one, other = (Message(name, [[(0, 1.0)]], 0.0) for name in ("one", "other"))
    one.after(other)
    other.after(one)
    with pytest.raises(ValueError, match="'one' waits"):
        run([one, other], 1)


def test_a_message_that_waits_for_itself_is_named_beside_one_that_arrives() -> None:
    one, stuck = (Message(name, [[(0, 1.0)]], 0.0) for name in ("one", "stuck"))
    stuck.after(stuck)
    with pytest.raises(ValueError, match="'stuck'"):
        run([one, stuck], 1)
