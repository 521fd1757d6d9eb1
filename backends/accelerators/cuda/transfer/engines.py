"""The choice of the engine and the number of blocks for a copy, by direction and size, from
measured times.

The ``copies`` of the backend's ``machine.json`` were measured by ``bench/transfer.py``; its
``--engines`` writes them anew on another machine.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from mkernel.backends.accelerators.cuda import _closed_forms
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

Engine = Literal["copy_engine", "bulk", "plain"]
Direction = Literal["put", "get", "local", "to_host", "from_host"]
_TO_PEERS: tuple[Direction, ...] = ("put", "get")


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

    def on_links(self, times: float) -> Engines:
        """Return the engines on links to peers that carry ``times`` as many bytes in the same time;
        what the smallest copy takes stays."""

        def faster(curve: Curve) -> Curve:
            start = curve.points[0].microseconds
            points = tuple(
                Point(nbytes=one.nbytes, microseconds=start + (one.microseconds - start) / times)
                for one in curve.points
            )
            return curve.model_copy(update={"points": points})

        made = {
            direction: tuple(map(faster, curves)) if direction in _TO_PEERS else curves
            for direction, curves in self.directions.items()
        }
        return self.model_copy(update={"directions": made})

    def microseconds(self, direction: Direction, engine: Engine, blocks: int, nbytes: int) -> float:
        """Return the time of a copy by that engine on ``blocks`` blocks: on the line through the two
        nearest points, but no sooner than links carry it. ValueError if it was not measured."""
        for number, curve in enumerate(self.directions.get(direction, ())):
            if (curve.engine, curve.blocks) == (engine, blocks):
                return self.copies[direction].microseconds(number, nbytes)
        raise ValueError(
            f"{direction} by {engine} on {blocks} blocks has no times; measure with bench/transfer.py"
        )

    def choose(
        self, direction: Direction, nbytes: int, max_blocks: int = 16, *, flagged: bool = False
    ) -> Choice:
        """Choose the engine for a copy of ``nbytes`` that may use ``max_blocks`` multiprocessors; 0
        leaves only the copy engine. ``flagged``: a flag follows the bytes, for which the copy
        engine needs one more copy. ValueError for a direction without times, or if no engine fits."""
        copies = self.copies.get(direction)
        found = None if copies is None else copies.choose(nbytes, max_blocks, flagged)
        if found is None:
            raise ValueError(
                f"no engine is known for {direction} with at most {max_blocks} blocks; "
                "measure with bench/transfer.py"
            )
        curve = self.directions[direction][found[0]]
        return Choice(curve.engine, curve.blocks, found[1])

    @cached_property
    def copies(self) -> dict[Direction, _closed_forms.Copies]:
        """Return the closed forms of the copies of each direction."""
        return {
            direction: _closed_forms.Copies(
                [
                    (
                        curve.engine == "copy_engine",
                        curve.blocks,
                        [(point.nbytes, point.microseconds) for point in curve.points],
                    )
                    for curve in curves
                ],
                self.most_gbs if direction in _TO_PEERS else None,
                self.keeps_processors if direction != "local" else None,
            )
            for direction, curves in self.directions.items()
        }
