"""Turn after turn: play it, judge it, have the same processes make the next world."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from campaigns.draw import Turn, after, draw
from campaigns.planted import Planted
from campaigns.pool import Pool, Scene
from campaigns.turn_judge import Outcome, judge


class Result(NamedTuple):
    """A turn that was played. ``wrong``: in sentences."""

    turn: Turn
    outcome: Outcome
    next_outcome: Outcome | None
    wrong: list[str]


def play(pool: Pool, turn: Turn, planted: Planted | None = None, **limits: float) -> Result:
    """Play a turn and, where it had a fault, the world after it. ``planted``, ``limits``: as
    :class:`Scene` takes them."""
    fault = turn.fault
    next_outcome = None
    wrong = pool.fallen()
    with ExitStack() as ending:
        scene = Scene(pool, turn, planted, **limits)
        ending.callback(scene.close)
        resumed = fault.victims if fault.resumes else ()
        scene.play(without=resumed)
        if not resumed:
            ending.close()
        if fault.kind != "none":
            following = Scene(pool, after(turn))
            ending.callback(following.close)
            if resumed:
                delay_s = random.Random(f"resume {turn.seed}/{turn.number}").uniform(0.0, 0.1)
                following.at("calls", delay_s, scene.resume)
            following.play()
            next_outcome = following.outcome
            wrong += [f"the next world: {each}" for each in judge(following.turn, next_outcome)]
            if resumed:
                scene.resume()
                scene.play()
                wrong += scene.written_late()
    return Result(turn, scene.outcome, next_outcome, judge(turn, scene.outcome) + wrong)


def campaign(
    folder: Path,
    seed: int,
    first: int = 0,
    kind: str | None = None,
    before: Iterable[Turn] = (),
) -> Iterator[Result]:
    """Play turns ``before``, then those of the seed without end, in processes of one pool."""
    pool = Pool(folder)
    try:
        for turn in before:
            yield play(pool, turn)
        number = first
        while True:
            yield play(pool, draw(seed, number, kind))
            number += 1
    finally:
        pool.close()
