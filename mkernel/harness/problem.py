"""The problem of a turn: an op at one size on one rank, and the parts of it that are timed alone.

Inputs depend on (seed, turn, tensor, rank) alone and are drawn on the device, so that a check makes
the other ranks' inputs anew instead of asking for them. Every turn of every contender has its own: a
result that somebody left behind in memory is never the right one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from mkernel.cases import Case, Comparison
from mkernel.cases.base import Memory, Onto, Oracle, Rows, every_row
from mkernel.cases.gemm import GemmCase
from mkernel.cases.parts import Collective, Part, Product, Transfer

Kind = Literal["op", "compute", "communication", "bytes"]
"""Kinds of work: the op as its users call it, or a part of it (:mod:`mkernel.cases.parts`)."""
Tensors = dict[str, torch.Tensor]
Inputs = dict[str, Any]
"""Tensors by name, and what a contender made of them before the turn."""

ROWS = 128
"""Rows of a large result that are compared where its reference cannot be projected, one from each of as
many equal strips, all columns."""
COLUMNS = 8
"""Random columns that a large result and its reference are multiplied by, which compares all rows."""
_COLUMNS = 1 << 16  # which random numbers of a case; its tensors' come before

_PARTS: dict[Kind, type[Part]] = {
    "compute": Product,
    "communication": Collective,
    "bytes": Transfer,
}


@dataclass(frozen=True)
class Problem:
    """One op at one size, as rank ``rank`` of ``world`` sees it.

    ``device``: where the op finds its tensors. The case's own is where they are drawn and checked.
    ``nodes``: of the world. ``bars_libraries``: why their collectives cannot take part, or None.
    """

    case: Case
    rank: int
    world: int
    device: torch.device
    nodes: int = 1
    bars_libraries: str | None = None

    @property
    def op(self) -> str:
        """Return the op's name."""
        return self.case.op

    @property
    def gathers(self) -> bool:
        """Return whether rows of A come from all ranks."""
        return isinstance(self.case, GemmCase) and self.case.gemm.gathers

    @property
    def fast_accum(self) -> bool:
        """Return whether products of e4m3 operands may be added with fewer bits."""
        return bool(self.case.options.get("use_fast_accum", False))

    def without(self, option: str) -> Problem:
        """Return the problem whose case lacks an option."""
        if option not in self.case.options:
            return self
        kept = {name: each for name, each in self.case.options.items() if name != option}
        return replace(self, case=self.case.with_(options=kept))

    def oracle(self, kind: Kind) -> Oracle:
        """Return the oracle, which makes the inputs of a kind of work and knows its truth."""
        if kind == "op" or (kind == "compute" and not isinstance(self.case, GemmCase)):
            return self.case
        assert isinstance(self.case, GemmCase), f"{self.op} has no parts that are timed alone"
        return _PARTS[kind](self.case)

    def memory(self, kind: Kind) -> dict[str, Memory]:
        """Return the memory that a rank's outputs take."""
        return self.oracle(kind).results(self.world)

    def given(self, kind: Kind) -> dict[str, Memory]:
        """Return the memory of the outputs that the caller gives."""
        memory = self.memory(kind)
        return {name: memory[name] for name in self.oracle(kind).given_outputs}

    def empty(self, kind: Kind) -> Tensors:
        """Return uninitialised memory for the outputs that the caller gives."""
        return {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.given(kind).items()
        }

    def fill(self, kind: Kind, held: Inputs, turn: int) -> None:
        """Draw this rank's inputs of a turn, into the memory that holds earlier ones where it fits."""
        for name, drawn in self.oracle(kind).inputs(self.rank, self.world, turn, held).items():
            if name not in held or held[name].shape != drawn.shape:
                held[name] = drawn.to(self.device)
            elif held[name].data_ptr() != drawn.data_ptr():
                held[name].copy_(drawn)

    def compared(
        self,
        kind: Kind,
        outputs: Mapping[str, torch.Tensor],
        turn: int,
        promised: Collection[str] | None = None,
        *,
        sampled: bool = True,
    ) -> dict[str, Comparison]:
        """Compare outputs of a turn with the truth: those promised, or all.

        ``sampled``: large outputs are compared by their products with random columns, all rows of them;
        where the oracle has none (attention), by some rows, other ones in every turn.
        """
        if promised is not None and not promised:
            return {}
        oracle = self.oracle(kind)
        rows: Rows = every_row
        onto: Onto = None
        if sampled:
            names = outputs.keys() if promised is None else promised
            whole = self._large(outputs, promised) and oracle.projects(names)
            onto = partial(self._random_columns, turn) if whole else None
            rows = rows if whole else partial(self.sampled_rows, turn)
        return oracle.compared(outputs, self.rank, self.world, turn, promised, rows, onto)

    def _large(self, outputs: Mapping[str, torch.Tensor], promised: Collection[str] | None) -> bool:
        """Return whether an output has more rows than are compared one by one."""
        judged = [each for name, each in outputs.items() if promised is None or name in promised]
        return any(each.dim() == 2 and len(each) > ROWS for each in judged)

    def _random_columns(self, turn: int, count: int) -> torch.Tensor:
        """Return the columns of a turn, the same ones for all of its calls."""
        chance, device = self.case.generator(turn, _COLUMNS, 0), self.case.device
        shape = count, COLUMNS
        return torch.randn(shape, generator=chance, dtype=torch.float64, device=device)

    def sampled_rows(self, turn: int, count: int) -> torch.Tensor | slice:
        """Return which of so many rows a check of this turn compares: all where there are few."""
        if count <= ROWS:
            return slice(count)
        edges = np.linspace(0, count, ROWS + 1).astype(np.int64)
        drawn = np.random.default_rng((self.case.seed, turn)).integers(edges[:-1], edges[1:])
        return torch.from_numpy(drawn).to(self.case.device)
