"""What ranks compare before a call that is new to them: its plan, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mkernel.errors import PlanMismatch, Timeout
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.plan.recent import Recent
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.memory import Place

Check = Callable[[LaunchPlan, Mapping[str, torch.Tensor]], None]

MOST_TEXTS = 256
"""Calls whose plans a rank keeps as text, at least, to name the field that differs where a peer is
still in one of them; of older ones it names the digest."""


class Agreement:
    """The calls that all ranks of one world have agreed on."""

    def __init__(self, exchange: Exchange, failure: FailureMonitor, check: Check) -> None:
        """``check`` raises where this world cannot follow a plan, before anybody is told of it."""
        self._check = check
        self._exchange = exchange
        self._failure = failure
        self._agreed: Recent[str, bool] = Recent()  # what is not kept is agreed on again
        self._lately: Recent[str, dict[str, Any]] = Recent(MOST_TEXTS)  # what was told of calls
        self._last = ""  # the key of the agreement before, whose text lies in the store

    def forgets(self, told: Callable[[], None]) -> None:
        """Call ``told`` whenever calls are forgotten."""
        self._agreed.forgets = told

    def enter(
        self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place]
    ) -> int:
        """Begin the next call, which every rank makes alike; returns its number. PlanMismatch.

        Args:
            tensors: of the call.
            places: of tensors in symmetric memory. Peers write to them, so that they must lie at the
                same place everywhere.
        """
        number = self._failure.call[0] + 1
        key = _key(plan, places) if places else plan.digest()
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
        told = plan.decisions()
        told["symmetric"] = {
            name: {"buffer": buffer, "offset": offset} for name, (buffer, offset) in places.items()
        }
        self._exchange.publish(f"plans/{key}", told)

        def check(missing: set[int]) -> None:
            self._failure.check_peers(missing)
            for rank in sorted(missing):  # not here: is it in the same call with another plan?
                told = self._exchange.peek(f"heartbeat/{rank}")
                call = self._failure.call[0]
                if told and told["call"] == call and told["plan"] not in ("", key):
                    self._refuse(rank, key, told["plan"])

        try:
            keys = self._exchange.gather("plan", key, check)
        except Timeout as error:
            raise Timeout(f"{error}. {self._failure.who_is_behind()}".rstrip()) from error
        for rank in range(self._exchange.size):
            if keys[rank] != keys[0]:
                self._refuse(rank, keys[0], keys[rank], first_rank=0)
        self._agreed[key] = True
        # Whoever is in this agreement has read the last one.
        if self._last and self._exchange.rank == 0:
            self._exchange.forget(f"plans/{self._last}")
        self._last = key
        self._lately[key] = told

    def _refuse(self, rank: int, ours: str, theirs: str, first_rank: int | None = None) -> None:
        mine, other = (
            self._lately[key] or self._exchange.peek(f"plans/{key}") for key in (ours, theirs)
        )
        found = first_difference(mine, other) or ("digest", ours, theirs)
        one = self._exchange.rank if first_rank is None else first_rank
        error = PlanMismatch((one, rank), found[0], (found[1], found[2]))
        if first_rank is None:  # the other rank is already past its agreement: end its waits
            self._failure.tell(error)
        raise error


def _key(plan: LaunchPlan, places: Mapping[str, Place]) -> str:
    """What all ranks must share of a call: the plan, and where its symmetric tensors lie."""
    return plan.digest() + "".join(
        f" {name}@{number}+{offset}" for name, (number, offset) in places.items()
    )
