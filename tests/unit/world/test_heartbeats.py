"""Heartbeats on a node's table and in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mkernel.errors import Untrusted
from mkernel.world.heartbeats import (
    Heartbeat,
    HeartbeatTable,
    Report,
    newest,
    next_row,
    row_to_json,
    shown,
    unreported,
)

RANKS = range(6, 9)
FULL = Heartbeat(2**40, True, 2**40, "f" * 64, 2**40, shown("\N{GRINNING FACE}" * 1000))
"""As long as a heartbeat can be."""


@pytest.fixture
def tables() -> Iterator[tuple[HeartbeatTable, HeartbeatTable]]:
    """A table as its owner and as another rank has it."""
    owner = HeartbeatTable.create(RANKS)
    other = HeartbeatTable.attach(owner.export(), RANKS)
    yield owner, other
    for each in (owner, other):
        each.close()


Tables = tuple[HeartbeatTable, HeartbeatTable]


def test_what_a_rank_writes_the_others_read(tables: Tables) -> None:
    owner, other = tables
    assert other.read() == dict.fromkeys(RANKS, Report())
    told = {rank: Report(FULL, 1.5 + rank, 0.5) for rank in RANKS}
    for rank in (7, 6, 8):
        (owner if rank == 6 else other).write(rank, told[rank])
    assert owner.read() == other.read() == told
    assert owner.row() == (FULL,) * 3


def test_a_failure_is_marked_for_all(tables: Tables) -> None:
    owner, other = tables
    assert not owner.failed
    other.mark_failed()
    assert owner.failed
    assert owner.read() == dict.fromkeys(RANKS, Report())


def test_a_report_that_is_half_written_does_not_count(tables: Tables) -> None:
    """Whichever of its bytes are there; the one before does."""
    owner, other = tables
    other.write(7, Report(Heartbeat(1)))
    slot = owner._slot(7)
    whole = {}
    for beat, elsewhere in ((1, ""), (23, "another world")):
        other.write(7, Report(Heartbeat(beat, busy_with=elsewhere)))
        whole[beat] = bytes(owner._bytes[slot : slot + 200])
    other.write(7, Report(Heartbeat(1)))
    assert owner.row()[1] == Heartbeat(1)
    length = len(whole[23].rstrip(b"\0"))
    for there in range(1, length):
        owner._bytes[slot : slot + 200] = whole[23][:there] + whole[1][there:]
        assert owner.row()[1] == Heartbeat(1), f"{there} of {length} bytes"
    owner._bytes[slot : slot + 200] = whole[23]
    assert owner.row()[1] == Heartbeat(23, busy_with="another world")


def test_who_still_reads_may_go_on_when_it_is_closed(tables: Tables) -> None:
    owner, other = tables
    owner.close()
    other.write(8, Report(FULL))
    other.close()
    other.write(6, Report(FULL))
    assert owner.row() == (FULL, Heartbeat(), FULL)


def test_a_row_travels_as_json() -> None:
    row = (FULL, Heartbeat(3, call=2))
    assert next_row(4, unreported(2), [list(each) for each in row_to_json(row)]) == row


def test_the_newest_of_two_rows_counts() -> None:
    older, newer = Heartbeat(1), Heartbeat(2, left=True)
    assert newest((older, newer), (newer, older)) == (newer, newer)


SOUND: list[Any] = [1, False, 0, "", 0, ""]


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        "heartbeats",
        {},
        [],
        [SOUND],
        [SOUND] * 3,
        [SOUND, SOUND[:5]],
        [SOUND, [*SOUND, 0]],
        [SOUND, "heart!"],
        [SOUND, 5],
        *([SOUND, [*SOUND[:n], wrong, *SOUND[n + 1 :]]] for n in range(6) for wrong in (None, 0.5)),
        [SOUND, [True, *SOUND[1:]]],
        [SOUND, [1, 0, *SOUND[2:]]],
    ],
    ids=str,
)
def test_what_no_rank_writes_is_refused(told: Any) -> None:
    with pytest.raises(Untrusted, match="node 3"):
        next_row(3, unreported(2), told)


def test_a_row_with_an_older_heartbeat_is_refused() -> None:
    told = "heartbeat 1 of rank 7 was put in the place of its heartbeat 2"
    with pytest.raises(Untrusted, match=told):
        next_row(3, (Heartbeat(), Heartbeat(2)), [SOUND, SOUND])
