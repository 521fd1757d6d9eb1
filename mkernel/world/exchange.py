"""Small messages among the ranks of one world, whose waits end as soon as the world breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from mkernel.errors import Timeout
from mkernel.world.bootstrap import LATE, wait_for
from mkernel.world.failure import FailureMonitor

Check = Callable[[set[int]], None]
"""Called with the ranks that are still missing; raises to end the wait."""


class Exchange:
    """The messages that one rank sends to the others and receives from them, by key."""

    def __init__(self, failure: FailureMonitor) -> None:
        self.rank = failure.rank
        self.size = failure.size
        self._failure = failure
        self._bootstrap = failure.bootstrap
        self._turns: Counter[str] = Counter()  # how often a topic was gathered

    def publish(self, key: str, value: Any) -> None:
        """Set ``key`` to a JSON-safe value."""
        self._bootstrap.publish(key, value)

    def collect(
        self,
        key: str,
        ranks: Iterable[int] | None = None,
        check: Check | None = None,
        late: str = LATE,
    ) -> dict[int, Any]:
        """Wait for the values of ``key/<rank>``, of all ranks by default, and return them. Timeout
        (which breaks the world), PeerFailure.

        Args:
            check: by default ends the wait where the world is broken or one of the ranks has left.
            late: what a Timeout says of the ranks that are missing.
        """
        wanted = range(self.size) if ranks is None else ranks
        watch = check or self._failure.check_peers
        try:
            return self._bootstrap.collect(key, wanted, self._failure.wait_s(), watch, late)
        except Timeout as error:
            self._failure.raise_late(error)

    def gather(
        self, topic: str, value: Any, check: Check | None = None, late: str = LATE
    ) -> dict[int, Any]:
        """All-gather ``value`` under ``topic``, each time anew. Collective. Timeout, PeerFailure.

        What this rank said two times before is deleted from the store first: every rank has come past
        it. After the last answer nothing is asked of the store, whose host may be gone by then.
        """
        turn = self._turns[topic]
        self._turns[topic] += 1
        if turn > 1:
            self.forget(f"{topic}/{turn - 2}/{self.rank}")
        self.publish(f"{topic}/{turn}/{self.rank}", value)
        return self.collect(f"{topic}/{turn}", check=check, late=late)

    def forget(self, key: str) -> None:
        """Delete a key from the store, if it is there."""
        self._bootstrap.forget(key)

    def barrier(self) -> None:
        """Wait until every rank has called it. Timeout, PeerFailure."""
        self.gather(
            "barrier", True, late="ranks {missing} did not come to a barrier, or to the end"
        )


_FIRST_LOOK_S = 0.002
"""Seconds for which a rank only looks at the boards, before it asks whether the others still live."""


def native_board() -> ModuleType | None:
    """Import ``_board``; None: native modules of an older build, whose worlds go by the store."""
    try:
        return import_module("mkernel.backends.transport._board")
    except ImportError:
        return None


def board_bytes() -> int:
    """Return the bytes that a board takes, wherever it begins; 0: there is none."""
    made = native_board()
    return 0 if made is None else made.BYTES + made.ALIGNMENT


class Board:
    """The boards of a world's ranks, which are all of one node, on which they compare what they are
    about to do: digests in memory that they share (``backends/transport/board.hpp``), in microseconds
    where a store takes milliseconds.

    Args:
        board: ``_board``.
        boards: address of each rank's, the own one among them, in zeroed memory of :func:`board_bytes`.
        failure: of the world; ends waits.
    """

    def __init__(
        self, board: ModuleType, boards: Mapping[int, int], failure: FailureMonitor
    ) -> None:
        self._native = board
        align = board.ALIGNMENT
        self._boards = [-(-boards[rank] // align) * align for rank in sorted(boards)]
        self._failure = failure
        self._turn = 0

    def gather(self, digest: bytes, check: Check) -> dict[int, bytes]:
        """All-gather the ranks' digests (32 bytes), each time anew. Collective. Timeout, PeerFailure.

        Args:
            check: called with the ranks that are still missing; raises to end the wait.
        """
        self._turn = turn = self._turn + 1
        ranks, rank, native = len(self._boards), self._failure.rank, self._native
        native.board_tell(self._boards[rank], turn, digest)
        first: list[bytes | None] = native.board_await(self._boards, turn, _FIRST_LOOK_S)
        there = {rank: told for rank, told in enumerate(first) if told is not None}
        if len(there) == ranks:
            return there

        def look(missing: set[int]) -> dict[int, bytes]:
            found: list[bytes | None] = native.board_await(self._boards, turn, 0.0)
            return {rank: told for rank in missing if (told := found[rank]) is not None}

        return wait_for(
            look,
            range(ranks),
            self._failure.timeout_s,
            check,
            f"ranks {{missing}} did not reach call {self._failure.call[0]}",
            lambda pause: native.board_await(self._boards, turn, pause),
        )
