"""The choice of the engine and the number of blocks for a copy, by direction and size, from
measured times.

The ``copies`` of the backend's ``machine.json`` were measured by ``bench/transfer.py``; its
``--engines`` writes them anew on another machine.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

Engine = Literal["copy_engine", "bulk", "plain"]
Direction = Literal["put", "get", "local", "to_host", "from_host"]


class Point(Model):
    """A measured copy."""

    nbytes: int = Field(gt=0)
    microseconds: float = Field(gt=0)


class Curve(Model):
    """Times of one engine on ``blocks`` blocks (0: the copy engine), in ascending size."""

    engine: Engine
    blocks: int = Field(ge=0)
    points: tuple[Point, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _ascend(self) -> Curve:
        sizes = [point.nbytes for point in self.points]
        if sorted(set(sizes)) != sizes:
            raise ValueError("sizes must ascend")
        return self

    def microseconds(self, nbytes: int) -> float:
        """Return the time on the line through the two nearest points; below the first point, that
        point's time."""
        points = self.points
        last = len(points) - 1
        at = next((i for i in range(1, last) if points[i].nbytes >= nbytes), last)
        before, after = points[at - 1], points[at]
        slope = (after.microseconds - before.microseconds) / (after.nbytes - before.nbytes)
        beyond = max(nbytes, points[0].nbytes) - before.nbytes
        return before.microseconds + max(slope, 0.0) * beyond


class Choice(NamedTuple):
    """The engine and blocks for a copy, and its expected time."""

    engine: Engine
    blocks: int
    microseconds: float


class Engines(Sourced):
    """The measured times of one kind of machine. ``multicast``: no engine writes multicast memory.

    ``keeps_processors``: the copy engine occupies no multiprocessor, so it is chosen if it is
    slower than the best by at most this share. This does not apply within one GPU, where the driver
    runs a kernel.
    """

    keeps_processors: float = Field(ge=0)
    multicast: Literal[False] = False
    most_gbs: float | None = Field(
        None, gt=0, description="that links to peers carry; None: those that were measured"
    )
    directions: dict[Direction, tuple[Curve, ...]]

    def microseconds(self, direction: Direction, engine: Engine, blocks: int, nbytes: int) -> float:
        """Return the time of a copy by that engine on ``blocks`` blocks. ValueError if it was not
        measured."""
        for curve in self.directions.get(direction, ()):
            if (curve.engine, curve.blocks) == (engine, blocks):
                return self._microseconds(direction, curve, nbytes)
        raise ValueError(
            f"{direction} by {engine} on {blocks} blocks has no times; measure with bench/transfer.py"
        )

    def choose(
        self, direction: Direction, nbytes: int, max_blocks: int = 16, *, flagged: bool = False
    ) -> Choice:
        """Choose the engine for a copy of ``nbytes`` that may use ``max_blocks`` multiprocessors; 0
        leaves only the copy engine. ``flagged``: a flag follows the bytes, for which the copy
        engine needs one more copy. ValueError for a direction without times, or if no engine fits."""

        def microseconds(curve: Curve) -> float:
            flag = curve.microseconds(1) if flagged and curve.engine == "copy_engine" else 0.0
            return self._microseconds(direction, curve, nbytes) + flag

        choices = [
            Choice(curve.engine, curve.blocks, microseconds(curve))
            for curve in self.directions.get(direction, ())
            if curve.blocks <= max_blocks
        ]
        if not choices:
            raise ValueError(
                f"no engine is known for {direction} with at most {max_blocks} blocks; "
                "measure with bench/transfer.py"
            )
        best = min(choices, key=lambda choice: (choice.microseconds, choice.blocks))
        for choice in choices:
            free = choice.engine == "copy_engine" and direction != "local"
            if free and choice.microseconds <= best.microseconds * (1 + self.keeps_processors):
                return choice
        return best

    def _microseconds(self, direction: Direction, curve: Curve, nbytes: int) -> float:
        """Return the time of a copy by that engine: as measured, but no sooner than links carry it."""
        measured = curve.microseconds(nbytes)
        if self.most_gbs is None or direction not in ("put", "get"):
            return measured
        return max(measured, curve.microseconds(1) + nbytes / (self.most_gbs * 1e3))
