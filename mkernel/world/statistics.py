"""Statistics of a rank's calls of a world, counted where it costs a call next to nothing."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mkernel.plan.model import LaunchPlan
from mkernel.plan.traffic import traffic_of

Way = Literal["peer memory", "copy engine", "nic", "process group"]

_MOST = 4096
"""Kinds of calls that are counted apart. When there are more, all are summed up by their sort."""


class Sort(NamedTuple):
    """The properties by which statistics tell calls apart."""

    op: str
    accelerator: str
    path: str


@dataclass(frozen=True)
class Statistics:
    """One rank's calls of one world since it was made.

    Attributes:
        calls: by op.
        sent_bytes: what this rank sent to other ranks, by way: stores to the memory of peers, copy
            engines that write there, the NIC, a process group of torch.distributed. Of the NIC it is
            what its proxy has carried so far; of the other ways what the calls' plans say, of MoE ops
            with uniform routing.
        new_shapes: how many different calls there were: each was planned and agreed on at its first.
        waits: how often the host waited for a call to end. waited_s: how long, in seconds.
        retries: commands that the NIC's proxy set aside because the peer's queue was full, and posted
            later.
        errors: calls that raised.
    """

    calls: Mapping[str, int]
    sent_bytes: Mapping[Way, int]
    new_shapes: int = 0
    waits: int = 0
    waited_s: float = 0.0
    retries: int = 0
    errors: int = 0


class CallKind:
    """Calls with one agreement key: how often they were made, and what each sends."""

    __slots__ = ("_plan", "counter")

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self.counter = bytearray(8)
        """Their number as 8 bytes in the host's order; native code counts here too."""

    @property
    def calls(self) -> int:
        """Return how often calls of this kind were made."""
        return int.from_bytes(self.counter, sys.byteorder)

    def count(self) -> None:
        """Count one more call of this kind."""
        self.counter[:] = (self.calls + 1).to_bytes(8, sys.byteorder)

    def add_to(self, calls: Counter[Sort], sent_bytes: Counter[Way], rank: int) -> None:
        """Add these calls of a rank to counters; what each of them sends nobody asked before."""
        number, plan = self.calls, self._plan
        calls[Sort(plan.op, plan.accelerator, plan.path)] += number
        for way, nbytes in sent(self._plan, rank).items():
            sent_bytes[way] += number * nbytes


class CallCounters:
    """Counts one engine's calls. In the engine's turn.

    Args:
        forget: makes native code forget what it counts.
    """

    def __init__(self, rank: int, forget: Callable[[], None] = lambda: None) -> None:
        self._rank = rank
        self._forget = forget
        self._kinds: dict[str, CallKind] = {}
        self._calls: Counter[Sort] = Counter()
        self._sent: Counter[Way] = Counter()
        self.new_shapes = 0
        self.waits = 0
        self.waited_s = 0.0
        self.errors = 0

    def of(self, key: str, plan: LaunchPlan) -> CallKind:
        """Return the kind of calls with an agreement key; a new one has counted none yet."""
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) >= _MOST:
                self._sum_up()
            self.new_shapes += 1
            found = self._kinds[key] = CallKind(plan)
        return found

    def add_to(self, calls: Counter[Sort], sent_bytes: Counter[Way]) -> None:
        """Add all that was counted to these counters; bytes of all ways are those that plans say."""
        calls.update(self._calls)
        sent_bytes.update(self._sent)
        for kind in list(self._kinds.values()):
            kind.add_to(calls, sent_bytes, self._rank)

    def _sum_up(self) -> None:
        self._forget()
        for kind in self._kinds.values():
            kind.add_to(self._calls, self._sent, self._rank)
        self._kinds.clear()


def sent(plan: LaunchPlan, rank: int) -> dict[Way, int]:
    """Return the bytes that a rank sends in one call of a plan, by way."""
    world = plan.world_size
    if world == 1:
        return {}
    how = plan.schedule
    assert how is not None, "plans that are called have a schedule"
    near: Way = "copy engine" if how.copy_engines else "peer memory"
    ways: dict[str, Way] = {"p2p": near, "group": "process group", "nic": "nic"}
    nbytes: defaultdict[str, float] = defaultdict(float)
    for peer, each in traffic_of(plan).from_rank(rank).items():
        nbytes[plan.routes.route(plan.placement, rank, peer).kind] += each
    return {ways[kind]: round(each) for kind, each in nbytes.items() if kind in ways}
