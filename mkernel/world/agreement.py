"""The agreement of ranks on a call that is new to them: they compare its plan, and where its tensors
lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from mkernel.errors import PlanMismatch, Timeout
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.plan.recent import Recent
from mkernel.world.exchange import Board, Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.memory import Place

Check = Callable[[LaunchPlan, Mapping[str, torch.Tensor]], None]

MOST_TOLD = 256
"""The least number of calls that a rank remembers. Where a peer is still in one of them, the error
names the field that differs; for an older call it names the digest."""


class Told(NamedTuple):
    """A call, as ranks compare it."""

    plan: LaunchPlan
    places: Mapping[str, Place]

    def decisions(self) -> dict[str, Any]:
        """Return all that must be the same on every rank, as JSON."""
        told = self.plan.decisions()
        told["symmetric"] = {
            name: {"buffer": buffer, "offset": offset}
            for name, (buffer, offset) in self.places.items()
        }
        return told


class Agreement:
    """The calls that all ranks of one world have agreed on."""

    def __init__(
        self, exchange: Exchange, failure: FailureMonitor, check: Check, board: Board | None
    ) -> None:
        """Begin without any call agreed on.

        Args:
            check: raises where this world cannot follow a plan, before anybody is told of it.
            board: of a world of one node; without one ranks compare through the store.
        """
        self._board = board
        self._check = check
        self._exchange = exchange
        self._failure = failure
        self._agreed: Recent[str, bool] = Recent()  # what is not kept is agreed on again
        self._lately: Recent[str, Told] = Recent(MOST_TOLD)
        self._said = ""  # the key of a call that differed, which lies in the store

    def forgets(self, told: Callable[[], None]) -> None:
        """Call ``told`` whenever calls are forgotten."""
        self._agreed.forgets = told

    def enter(
        self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]
    ) -> int:
        """Begin the next call, which every rank makes alike, and return its number. PlanMismatch.

        Args:
            tensors: of the call.
            places: of tensors in symmetric memory. Peers write to them, so that they must lie at the
                same place everywhere.
        """
        number = self._failure.call[0] + 1
        key = _key(plan, places)
        known = self._agreed[key] is not None
        if not known:
            self._check(plan, tensors)
        # Until a rank has agreed its heartbeat shows no plan: its message in the agreement names it.
        self._failure.call = (number, key if known else "")
        if not known:
            self._agree(plan, key, places)
            self._failure.call = (number, key)
        return number

    def _agree(self, plan: LaunchPlan, key: str, places: Mapping[str, Place]) -> None:
        call = Told(plan, dict(places))

        def check(missing: set[int]) -> None:
            self._failure.check_peers(missing)
            for rank in sorted(missing):  # not here: is it in the same call with another plan?
                told = self._exchange.peek(f"heartbeat/{rank}")
                number = self._failure.call[0]
                if told and told["call"] == number and told["plan"] not in ("", key):
                    raise self._refused(rank, (key, told["plan"]), call)

        keys = self._keys(key, check)
        # Whoever is in this agreement has read what was said in the last one.
        if self._said:
            self._exchange.forget(f"plans/{self._said}/{self._exchange.rank}")
            self._said = ""
        for rank in range(self._exchange.size):
            if keys[rank] != keys[0]:
                raise self._differs(rank, keys, call)
        self._agreed[key] = True
        self._lately[key] = call

    def _keys(self, key: str, check: Callable[[set[int]], None]) -> dict[int, str]:
        """All-gather the ranks' keys of the call."""
        if self._board is None:
            told: dict[int, str] = self._exchange.gather("plan", key, check)
            return told
        try:
            digests = self._board.gather(bytes.fromhex(key), check)
        except Timeout as late:
            self._failure.raise_late(late)
        return {rank: digest.hex() for rank, digest in digests.items()}

    def _differs(self, rank: int, keys: Mapping[int, str], call: Told) -> PlanMismatch:
        """Return the error that all ranks raise where the key of ``rank`` is another than that of
        rank 0. All of them are here, and each publishes what it was about to do."""
        own = keys[self._exchange.rank]
        self._said = own
        self._exchange.publish(f"plans/{own}/{self._exchange.rank}", call.decisions())
        texts = {who: self._exchange.collect(f"plans/{keys[who]}", [who])[who] for who in (0, rank)}
        return _mismatch((0, rank), keys[0], keys[rank], texts[0], texts[rank])

    def _refused(self, rank: int, keys: tuple[str, str], call: Told) -> PlanMismatch:
        """Return the error that this rank raises where ``rank`` has already agreed on another call,
        and tell the other ranks of it, so that their waits end."""
        known = self._lately[keys[1]]
        theirs = None if known is None else known.decisions()
        error = _mismatch((self._exchange.rank, rank), *keys, call.decisions(), theirs)
        self._failure.tell(error)
        return error


def _mismatch(
    ranks: tuple[int, int], ours: str, theirs: str, mine: Any, other: Any | None
) -> PlanMismatch:
    found = None if other is None else first_difference(mine, other)
    field, one, two = found or ("digest", ours, theirs)
    return PlanMismatch(ranks, field, (one, two))


def _key(plan: LaunchPlan, places: Mapping[str, Place]) -> str:
    """Return a digest, 64 hexadecimal digits, of what all ranks must share in a call: the plan, and
    where its symmetric tensors lie."""
    if not places:
        return plan.digest()
    text = plan.digest() + "".join(
        f" {name}@{number}+{offset}" for name, (number, offset) in places.items()
    )
    return sha256(text.encode()).hexdigest()
