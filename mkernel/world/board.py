"""Boards on which ranks of one node compare what they are about to do: digests in memory that they
share (``backends/transport/board.hpp``), in microseconds where a store takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from mkernel.world.bootstrap import wait_for
from mkernel.world.exchange import Check
from mkernel.world.failure import FailureMonitor

_FIRST_LOOK_S = 0.002
"""Seconds for which a rank only looks at the boards, before it asks whether the others still live."""


def native() -> ModuleType | None:
    """Import ``_board``; None: native modules of an older build, whose worlds go by the store."""
    try:
        return import_module("mkernel.backends.transport._board")
    except ImportError:
        return None


def nbytes() -> int:
    """Return the bytes that a board takes, wherever it begins; 0: there is none."""
    made = native()
    return 0 if made is None else made.BYTES + made.ALIGNMENT


class Board:
    """The boards of a world's ranks, which are all of one node.

    Args:
        board: ``_board``.
        boards: address of each rank's, the own one among them, in zeroed memory of :func:`nbytes`.
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

        def look(missing: set[int]) -> dict[int, bytes]:
            found: list[bytes | None] = native.board_await(self._boards, turn, _FIRST_LOOK_S)
            return {rank: told for rank in missing if (told := found[rank]) is not None}

        return wait_for(
            look,
            range(ranks),
            self._failure.timeout_s,
            check,
            f"ranks {{missing}} did not reach call {self._failure.call[0]}",
            lambda pause: native.board_await(self._boards, turn, pause),
        )
