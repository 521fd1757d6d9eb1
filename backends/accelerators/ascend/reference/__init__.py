"""The published AllGather+GEMM for Ascend A3: its schedule under the timed model, its times as data."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from mkernel.backends.accelerators.ascend.reference.published_kernels import Shape, trace
from mkernel.topology.model import Model

__all__ = ["PublishedRow", "PublishedTable", "Shape", "published", "trace"]


class PublishedRow(Model):
    """A published time. ``fitted``: constants of the default machine description were fitted to it;
    the other rows only check them."""

    ranks: int = Field(ge=2)
    m: int = Field(ge=1)
    k: int = Field(ge=1)
    n: int = Field(ge=1)
    ms: float = Field(gt=0)
    fitted: bool

    @property
    def shape(self) -> Shape:
        """The row's sizes as :func:`trace` takes them."""
        return Shape(self.ranks, self.m, self.k, self.n)


class PublishedTable(Model):
    """The rows as published, smallest world first. ``credit``: their publisher."""

    title: str
    credit: str
    rows: tuple[PublishedRow, ...]


def published() -> PublishedTable:
    """Return the eight rows (``published.json``)."""
    return PublishedTable.from_file(Path(__file__).with_name("published.json"), "published times")
