"""What one turn of the benchmark works on: random inputs that any rank can make again, and the truth.

Inputs depend on (seed, turn, tensor, rank) alone and are drawn on the device, so that a check makes
the other ranks' inputs anew instead of asking for them. Every turn of every contender has its own: a
result that somebody left behind in memory is never the right one.

Kinds of work, each with its own truth:
  op             the fused op, as its users call it
  compute        the same product on this rank alone, all inputs there
  communication  the same collective on this rank's data, nothing computed but the sum
  bytes          what the collective's bytes are at the least, moved and not added up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mkernel.plan.model import DtypeName

Kind = Literal["op", "compute", "communication", "bytes"]
Tensors = dict[str, torch.Tensor]

ROWS = 128
"""Rows of a large result that are compared, one from each of as many equal strips, all columns."""

_WHICH = {"a": 0, "b": 1, "x": 2}


@dataclass(frozen=True)
class Problem:
    """One op at one size, as rank ``rank`` of ``world`` sees it.

    Attributes:
        m, n, k: as the op's plans count them (:class:`mkernel.plan.model.GemmShape`).
        layout: of B in memory, ``row`` or ``column``.
        seed: of all random data.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: DtypeName
    layout: str
    seed: int
    rank: int
    world: int
    device: torch.device

    @property
    def gathers(self) -> bool:
        """Whether rows of A come from all ranks."""
        return self.op == "all_gather_gemm"

    @property
    def own_rows(self) -> int:
        """Rows of a rank's share of M."""
        return self.m // self.world

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch's."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def flops(self) -> float:
        """Of one rank."""
        return 2.0 * self.m * self.n * self.k

    def input_shapes(self, kind: Kind) -> dict[str, tuple[int, int]]:
        """Of a rank's inputs, by name."""
        if kind in ("communication", "bytes"):
            return {"x": (self.own_rows, self.k) if self.gathers else (self.m, self.n)}
        rows = self.own_rows if self.gathers and kind == "op" else self.m
        return {"a": (rows, self.k), "b": (self.k, self.n)}

    def out_shape(self, kind: Kind) -> tuple[int, int]:
        """Of a rank's output."""
        if kind in ("communication", "bytes") and self.gathers:
            return (self.m, self.k)
        if kind == "bytes":
            halves = 2 if self.op == "gemm_all_reduce" else 1
            return (halves * self.world * self.own_rows, self.n)
        scattered = self.op == "gemm_reduce_scatter" and kind != "compute"
        return (self.own_rows if scattered else self.m, self.n)

    def pieces(self, peer: int) -> list[tuple[slice, slice]]:
        """Kind ``bytes``: which rows of the output are which rows of a peer's ``x``.

        A scatter takes this rank's rows from every peer; a reduction to all also takes from every
        peer the rows which that peer would have summed.
        """
        rows = self.own_rows
        slot = slice(peer * rows, (peer + 1) * rows)
        if self.gathers:
            return [(slot, slice(0, rows))]
        pieces = [(slot, slice(self.rank * rows, (self.rank + 1) * rows))]
        if self.op == "gemm_all_reduce":
            second = self.world * rows
            pieces.append((slice(second + slot.start, second + slot.stop), slot))
        return pieces

    def empty(self, kind: Kind) -> Tensors:
        """Uninitialised inputs for :meth:`fill`."""
        return {name: self._empty(name, shape) for name, shape in self.input_shapes(kind).items()}

    def fill(self, tensors: Mapping[str, torch.Tensor], rank: int, turn: int) -> None:
        """Draw the inputs of ``rank`` in a turn, in place."""
        for name, tensor in tensors.items():
            state = np.random.SeedSequence((self.seed, turn, _WHICH[name], rank))
            generator = torch.Generator(self.device)
            generator.manual_seed(int(state.generate_state(1, np.uint64)[0] >> 1))
            stored = tensor.t() if name == "b" and self.layout == "column" else tensor
            stored.normal_(generator=generator)

    def sampled_rows(self, kind: Kind, turn: int) -> torch.Tensor:
        """Indices of the output's rows that a check of this turn compares: all of a small one."""
        rows = self.out_shape(kind)[0]
        if rows <= ROWS:
            return torch.arange(rows, device=self.device)
        edges = np.linspace(0, rows, ROWS + 1).astype(np.int64)
        drawn = np.random.default_rng((self.seed, turn)).integers(edges[:-1], edges[1:])
        return torch.from_numpy(drawn).to(self.device)

    def reference(self, kind: Kind, turn: int, rows: torch.Tensor) -> torch.Tensor:
        """Those rows of this rank's right output, in float64."""
        if kind == "compute":
            mine = self._inputs(kind, self.rank, turn, ("a", "b"))
            return mine["a"][rows].double() @ mine["b"].double()
        if kind == "bytes":
            return self._moved(turn, rows)
        if self.gathers:
            return self._gathered(kind, turn, rows)
        first = self.rank * self.own_rows if self.op == "gemm_reduce_scatter" else 0
        total = torch.zeros(len(rows), self.n, dtype=torch.float64, device=self.device)
        for source in range(self.world):
            theirs = self._inputs(kind, source, turn, self.input_shapes(kind))
            if kind == "communication":
                total += theirs["x"][first + rows].double()
            else:
                total += theirs["a"][first + rows].double() @ theirs["b"].double()
        return total

    def _gathered(self, kind: Kind, turn: int, rows: torch.Tensor) -> torch.Tensor:
        name = "x" if kind == "communication" else "a"
        whole = torch.empty(len(rows), self.k, dtype=torch.float64, device=self.device)
        for source in range(self.world):
            here = rows // self.own_rows == source
            theirs = self._inputs(kind, source, turn, (name,))[name]
            whole[here] = theirs[rows[here] - source * self.own_rows].double()
        if kind == "communication":
            return whole
        return whole @ self._inputs(kind, self.rank, turn, ("b",))["b"].double()

    def _moved(self, turn: int, rows: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(rows), self.out_shape("bytes")[1], device=self.device).double()
        for source in range(self.world):
            theirs = self._inputs("bytes", source, turn, ("x",))["x"]
            for target, origin in self.pieces(source):
                here = (rows >= target.start) & (rows < target.stop)
                found[here] = theirs[rows[here] - target.start + origin.start].double()
        return found

    def _inputs(
        self, kind: Kind, rank: int, turn: int, names: Sequence[str] | Mapping[str, object]
    ) -> Tensors:
        shapes = self.input_shapes(kind)
        made = {name: self._empty(name, shapes[name]) for name in names}
        self.fill(made, rank, turn)
        return made

    def _empty(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        column = name == "b" and self.layout == "column"
        stored = shape[::-1] if column else shape
        made = torch.empty(stored, dtype=self.torch_dtype, device=self.device)
        return made.t() if column else made
