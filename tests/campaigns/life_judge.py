"""The judge of lives: is the outcome of a life the right one?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from campaigns.flat import ALLOWED, apart, piled_up, too_much
from campaigns.life import NOTICED_S, TIMEOUT_S, Lived
from campaigns.sample import Sample

_RECORD = re.compile(r" \((?:kept for|no record of it)[^()]*\)$")


@dataclass
class Ended:
    """A life that is over.

    Attributes:
        number: of the life. allowed: what each kind of memory may grow by (``flat.limits``).
        victim: the rank that was killed, at ``killed_at`` by CLOCK_MONOTONIC; None: none was.
        lived: by rank. died: ranks whose processes ended, with how. silent: ranks that said nothing in
            time, with where they were.
        samples: by rank, in order; all ranks take them at the same points.
    """

    number: int
    allowed: Mapping[str, int] = field(default_factory=lambda: ALLOWED)
    victim: int | None = None
    killed_at: float = 0.0
    lived: dict[int, Lived] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[Sample]] = field(default_factory=dict)


def judge(life: Ended) -> list[str]:
    """Return what is wrong, in sentences."""
    found = [f"rank {rank} says nothing: {where}" for rank, where in life.silent.items()]
    found += [f"rank {rank} died: {how}" for rank, how in life.died.items() if rank != life.victim]
    if life.victim is not None and life.victim not in life.died:
        found.append(f"rank {life.victim} was killed and did not die")
    for rank, lived in sorted(life.lived.items()):
        found += lived.wrong
        found += [f"rank {rank} holds {each} of an ended life" for each in lived.left]
    for rank, samples in sorted(life.samples.items()):
        found += [f"rank {rank}: {each}" for each in _pile(life, samples)]
    found += apart(life.samples)
    found = [f"life {life.number}: {each}" for each in found]
    return found + [f"life {life.number}: {each}" for each in _end(life)]


def _pile(life: Ended, samples: Sequence[Sample]) -> list[str]:
    return piled_up(samples) + too_much(samples, life.allowed)


def _end(life: Ended) -> list[str]:
    if life.victim is None:
        return [
            f"rank {rank} raised {lived.error[0]}: {lived.error[1]}"
            for rank, lived in life.lived.items()
            if lived.error is not None
        ]
    found = []
    for rank, lived in sorted(life.lived.items()):
        if lived.error is None:
            found.append(f"rank {rank} did not notice that rank {life.victim} was killed")
            continue
        if not lived.noticed:
            found.append(
                f"rank {rank} raised {lived.error[0]} before it had a world: {lived.error[1]}"
            )
        late = lived.at - life.killed_at
        if late > TIMEOUT_S + NOTICED_S:
            found.append(f"rank {rank} raised {lived.error[0]} only {late:.1f} s after the kill")
        for world, (kind, message) in lived.noticed.items():
            if kind != "PeerFailure" or not re.search(rf"\brank {life.victim}\b", message):
                found.append(
                    f"rank {rank}'s world {world!r} raised {kind or 'nothing'}, not a PeerFailure "
                    f"that names rank {life.victim}: {message}"
                )
    return found + _disagreed(life)


def _disagreed(life: Ended) -> list[str]:
    said: dict[str, set[str]] = {}
    for lived in life.lived.values():
        for world, (_, message) in lived.noticed.items():
            said.setdefault(world, set()).add(_RECORD.sub("", message))
    return [
        f"ranks say different things of world {world!r}: {sorted(each)}"
        for world, each in said.items()
        if len(each) > 1
    ]


def over_lives(processes: Mapping[int, Sequence[Sample]], allowed: Mapping[str, int]) -> list[str]:
    """Report what piles up in processes from life to life: samples of each, between two lives."""
    return [
        f"process {number}: {each} of {len(samples)} lives"
        for number, samples in processes.items()
        for each in too_much(samples, allowed)
    ]
