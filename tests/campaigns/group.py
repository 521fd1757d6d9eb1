"""A world of some ranks beside the world of all, as seen by one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from campaigns.draw import Turn
from campaigns.planted import Planted, spoil
from torch.distributed import TCPStore

from mkernel.conformance.ranks import Judge
from mkernel.errors import WorldError
from mkernel.world import lifecycle
from mkernel.world.identity import Backends, Identity
from mkernel.world.registry import worlds
from mkernel.world.world import World


class Group:
    """One rank's part in the group's world; it ends with the world of all.

    Attributes:
        error: the name and message of what ended it early.
    """

    def __init__(self, turn: Turn, rank: int, port: int, planted: Planted | None) -> None:
        """Collective among the group's ranks; nothing on others."""
        self._planted = planted
        self.error: tuple[str, str] | None = None
        self._world: World | None = None
        self._calls = 0
        if rank not in turn.group:
            return
        whole = lifecycle.current()
        patience = timedelta(seconds=turn.timeout_s)
        one, two = (
            TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False) for _ in range(2)
        )
        nodes = turn.group_nodes
        me = Identity(turn.group.index(rank), nodes, len(turn.group) // nodes)
        alone = whole.backends if nodes > 1 else Backends(whole.backends.accelerator, None, None)
        self._world = lifecycle.join(me, alone, whole.settings, (one, two), "group")
        self._world.set_timeout(turn.timeout_s)
        with _as_default(self._world):
            self._judges = [Judge(case) for case in turn.group_cases]

    def call(self) -> list[str]:
        """Call once in the group; return what is wrong with the results. A failure is kept, and ends
        its calls: the world of all says what came of the turn."""
        if self._world is None or self.error is not None:
            return []
        judge = self._judges[self._calls % len(self._judges)]
        iteration = self._calls // len(self._judges)
        self._calls += 1
        try:
            with _as_default(self._world):
                outcome = judge.case.run(judge.inputs(iteration))
                spoil(self._planted, outcome, in_group=True)
                return [f"in the group: {each}" for each in judge.problems(outcome, iteration)]
        except WorldError as error:
            self.error = (type(error).__name__, str(error))
            return []


@contextlib.contextmanager
def _as_default(world: World) -> Iterator[None]:
    before, worlds.default = worlds.default, world
    try:
        yield
    finally:
        worlds.default = before
