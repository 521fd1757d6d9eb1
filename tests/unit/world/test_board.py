"""Ranks compare digests on boards in memory that they share."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.errors import PeerFailure, Timeout
from mkernel.world import exchange
from mkernel.world.exchange import Board

native = exchange.native_board()
pytestmark = pytest.mark.skipif(native is None, reason="native modules of an older build")


def digest(text: str) -> bytes:
    return text.encode().ljust(32, b".")


class Boards:
    """Boards of the ranks of one node, in this process."""

    def __init__(self, ranks: int, timeout_s: float = 30.0) -> None:
        self._memory = [ctypes.create_string_buffer(exchange.board_bytes()) for _ in range(ranks)]
        addresses = {rank: ctypes.addressof(one) for rank, one in enumerate(self._memory)}
        self.of = [Board(native, addresses, monitor(rank, timeout_s)) for rank in range(ranks)]  # type: ignore[arg-type]


def monitor(rank: int, timeout_s: float) -> Any:
    return SimpleNamespace(rank=rank, timeout_s=timeout_s, call=(7, ""))


def nothing(missing: set[int]) -> None:
    """No rank has failed."""


def together(boards: Boards, turns: int, late_s: float) -> list[list[dict[int, bytes]]]:
    """What each rank hears in each turn; ranks come apart by up to so many seconds."""
    heard: list[list[dict[int, bytes]]] = [[] for _ in boards.of]

    def one(rank: int) -> None:
        for turn in range(turns):
            time.sleep(late_s * ((rank + turn) % len(boards.of)))
            heard[rank].append(boards.of[rank].gather(digest(f"{rank} in {turn}"), nothing))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(boards.of))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


@pytest.mark.parametrize(("ranks", "turns", "late_s"), [(1, 5, 0.0), (2, 500, 0.0), (4, 30, 0.004)])
def test_all_hear_what_each_says_in_each_turn(ranks: int, turns: int, late_s: float) -> None:
    for heard in together(Boards(ranks), turns, late_s):
        assert heard == [
            {rank: digest(f"{rank} in {turn}") for rank in range(ranks)} for turn in range(turns)
        ]


def test_who_does_not_come_is_named_at_the_deadline() -> None:
    with pytest.raises(Timeout, match=r"ranks \[1, 2\] did not reach call 7 within 0.05 s"):
        Boards(3, timeout_s=0.05).of[0].gather(digest("a"), nothing)


def test_a_wait_ends_with_the_world() -> None:
    def broken(missing: set[int]) -> None:
        raise PeerFailure(f"rank {missing} died", 1)

    with pytest.raises(PeerFailure, match="died"):
        Boards(2).of[0].gather(digest("a"), broken)


def test_the_word_of_a_rank_that_has_left_counts() -> None:
    boards = Boards(2)

    def left(missing: set[int]) -> None:
        told = threading.Thread(target=lambda: boards.of[1].gather(digest("b"), nothing))
        told.start()
        told.join()
        raise PeerFailure("rank 1 has left", 1)

    assert boards.of[0].gather(digest("a"), left) == {0: digest("a"), 1: digest("b")}


def test_a_digest_of_another_turn_is_none_of_this() -> None:
    boards = Boards(2, timeout_s=0.05)
    with pytest.raises(Timeout):
        boards.of[0].gather(digest("never heard"), nothing)
    assert together(boards, 0, 0.0) == [[], []]
    with pytest.raises(Timeout):  # rank 0 is a turn further: rank 1 hears what it said in this one
        boards.of[0].gather(digest("second"), nothing)
    assert boards.of[1].gather(digest("b"), nothing)[0] == digest("never heard")


def test_a_rank_writes_on_its_own_board_alone() -> None:
    """So one that was stopped while the others gave it up writes into nothing that is theirs."""
    boards = Boards(3, timeout_s=0.05)
    with pytest.raises(Timeout):
        boards.of[1].gather(digest("late"), nothing)
    assert [bool(memory.raw.strip(b"\0")) for memory in boards._memory] == [False, True, False]


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1, digest("")),
        (8, 1, digest("")),
        (64, 0, digest("")),
        (64, 1, b""),
    ],
)
def test_what_is_no_word_on_a_board_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(ValueError, match=r"no board|turn"):
        native.board_tell(*arguments)
