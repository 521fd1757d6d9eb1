"""What a benchmark is asked to do, as data that travels to the ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mkernel.plan.model import DtypeName, OpName
from mkernel.plan.shapes import MAX_DIMENSION
from mkernel.topology.model import Model, Name


class Shape(Model):
    """One row: an op at one size, as its plan counts it.

    Attributes:
        name: the layer or group it stands for.
        target: largest time as a ratio to the product alone, in a world of ``target_ranks`` on
            ``target_accelerator``; None: any.
        ranks: the world that it is meant for; None: any.
    """

    op: OpName
    m: int = Field(ge=1, le=MAX_DIMENSION)
    n: int = Field(ge=1, le=MAX_DIMENSION)
    k: int = Field(ge=1, le=MAX_DIMENSION)
    name: Name = ""
    target: float | None = Field(None, gt=0)
    target_ranks: int | None = Field(None, ge=1)
    target_accelerator: str | None = None
    ranks: int | None = Field(None, ge=1)

    @property
    def size(self) -> str:
        """``M x N x K``."""
        return f"{self.m} x {self.n} x {self.k}"

    def target_for(self, world: int, accelerator: str) -> float | None:
        """The target in a world of that many ranks on an accelerator backend."""
        here = self.target_ranks in (None, world)
        with_it = self.target_accelerator in (None, accelerator)
        return self.target if here and with_it else None


class BenchSpec(Model):
    """One run of the benchmark.

    Attributes:
        contenders: names, in the order of the first iteration.
        iterations: timed turns of each contender; warmup: untimed ones before.
        launches: what a call costs the host to launch counts too.
        timeout_s: of every step of a rank: a contender's construction, a turn, a check.
    """

    shapes: tuple[Shape, ...]
    contenders: tuple[str, ...]
    dtype: DtypeName = "bfloat16"
    layout: Literal["row", "column"] = "row"
    warmup: int = Field(3, ge=1)
    iterations: int = Field(20, ge=1)
    seed: int = Field(0, ge=0)
    launches: bool = False
    timeout_s: float = Field(60.0, gt=0)
