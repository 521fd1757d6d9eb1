"""The judge of turns: is the outcome of a turn the one that its fault must have?"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from campaigns.draw import Turn
from campaigns.rank import RankOutcome

SLACK_S = 10.0
"""What a busy machine may add to a deadline."""
_RECORD = re.compile(r" \((?:kept for|no record of it)[^()]*\)$")


@dataclass
class Outcome:
    """The outcome of a turn.

    Attributes:
        told: by rank. died: ranks whose processes ended, each with how.
        silent: ranks that said nothing in time, each with where it was.
        leaving: ranks that had done all their calls.
        struck_at: when the fault struck, by CLOCK_MONOTONIC; 0: it did not, or is not known.
    """

    told: dict[int, RankOutcome] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    struck_at: float = 0.0

    def summary(self) -> str:
        """Name the errors of the ranks."""
        kinds = sorted({told.error[0] if told.error else "right" for told in self.told.values()})
        return ", ".join(kinds) or "nobody is left"


def judge(turn: Turn, outcome: Outcome) -> list[str]:
    """Return what is wrong, in sentences; nothing if all is as it must be."""
    found = [f"rank {rank} says nothing: {where}" for rank, where in outcome.silent.items()]
    victims = turn.fault.victims if turn.fault.of.dies or turn.fault.of.own else ()
    for rank, how in outcome.died.items():
        if not (turn.fault.of.dies and rank in victims):
            found.append(f"rank {rank} died: {how}")
    for rank, told in sorted(outcome.told.items()):
        found += told.wrong
        found += [f"rank {rank} holds {each}" for each in told.left]
    others = {rank: told for rank, told in outcome.told.items() if rank not in victims}
    legal = {*turn.fault.of.raised, "PeerFailure"} if turn.fault.of.raised else set()
    found += [
        f"in the group: {_unexpected(rank, told.group_error, legal)}"
        for rank, told in others.items()
        if told.group_error and told.group_error[0] not in legal
    ]
    if not found:
        found += _errors(turn, outcome, others, [outcome.told.get(rank) for rank in victims])
    return found


def _errors(
    turn: Turn,
    outcome: Outcome,
    others: Mapping[int, RankOutcome],
    victims: Collection[RankOutcome | None],
) -> list[str]:
    fault = turn.fault
    legal = set(fault.of.raised)
    raised = {rank: told.error for rank, told in others.items() if told.error is not None}
    own = [told for told in victims if told is not None]
    if fault.kind in ("raises", "interrupted") and not all(told.error for told in own):
        return [f"{fault.kind}: the rank itself raised nothing"]
    failed = not fault.of.maybe or any(told.error for told in own)
    if not legal or not failed:
        return [_unexpected(rank, error) for rank, error in raised.items()]
    found = [
        _unexpected(rank, error, legal) for rank, error in raised.items() if error[0] not in legal
    ]
    # A rank that fails while the world ends cannot stop those that have left it; nor one that has made
    # all its calls, and fails in its last one of a group.
    ending = fault.stage == "leave" or any(rank in outcome.leaving for rank in fault.victims)
    ending |= fault.of.maybe and any(told.calls >= turn.calls for told in own)
    if len(raised) < len(others) and not ending:
        found += [f"rank {rank} noticed nothing" for rank in others.keys() - raised.keys()]
    agrees = fault.kind != "store-lost"  # who has lost the store has no way to
    if agrees and len({_RECORD.sub("", message) for _, message in raised.values()}) > 1:
        found.append(f"the ranks say different things: {dict(sorted(raised.items()))}")
    if fault.victims and "PeerFailure" in legal and fault.kind != "store-lost":
        named = rf"\branks? \[?(?:\d+, )*({'|'.join(map(str, fault.victims))})\b"
        found += [
            f"rank {rank}'s error names none of ranks {fault.victims}: {message}"
            for rank, (_, message) in raised.items()
            if not re.search(named, message)
        ]
    return found + _late(turn, outcome, others)


def _late(turn: Turn, outcome: Outcome, others: Mapping[int, RankOutcome]) -> list[str]:
    struck = outcome.struck_at or max((told.struck_at for told in outcome.told.values()), default=0)
    if not struck:
        return []
    within = turn.timeout_s + SLACK_S
    stopped = turn.fault.victims if turn.fault.resumes else ()
    return [
        f"rank {rank} raised {told.error[0]} only {told.at - struck:.1f} s after it: {told.error[1]}"
        for rank, told in others.items()
        if told.error and rank not in stopped and told.at - struck > within
    ]


def _unexpected(rank: int, error: tuple[str, str], legal: Collection[str] = ()) -> str:
    wanted = " or ".join(sorted(legal)) or "nothing"
    return f"rank {rank} raised {error[0]} instead of {wanted}: {error[1]}"
