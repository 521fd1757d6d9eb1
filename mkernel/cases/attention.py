"""The case of ring attention. Size ``causal`` (bool) chooses the zigzag split. Option ``scale``: of the
scores, default D^-0.5. Option ``tensors``: the user's whole ``q``, ``k`` and ``v`` [B, H, S, D]. Option
``lies``: how a rank's lie in memory (``AttentionShape.layout``), default ``heads``. Option
``cu_seqlens``: where documents begin that are packed into the sequence, and its end (a tuple of int).
"""

from __future__ import annotations

import torch

from mkernel.cases.base import (
    EVERY_RANK,
    NOWHERE,
    TOLERANCE,
    Case,
    Memory,
    Onto,
    Outcome,
    Rows,
    Tensors,
    every_row,
)
from mkernel.ops import ring_attention
from mkernel.ops.common import Execution
from mkernel.ops.zigzag import zigzag_positions
from mkernel.plan.invariance import encoded

LSE_TOLERANCE = 1e-5
"""Relative Frobenius error of the log-sum-exp. It is float32 whatever the inputs are: products of
halves are exact in float32, so scores that were ever rounded to a half type exceed it."""

_Q, _K, _V = range(3)
SCORES = 1 << 24
"""Scores of a reference that are held at once, to bound memory."""


def by_keys(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [B, H, R, D] as [B, Hkv, G, R, D]: heads of queries by the one of keys that they use."""
    batch, _, rows, width = tensor.shape
    return tensor.reshape(batch, kv_heads, -1, rows, width)


def products(rows: torch.Tensor, with_: torch.Tensor) -> torch.Tensor:
    """Multiply rows [B, Hkv, G, R, K] and ``with_`` [B, Hkv, K, N] into [B, Hkv, G, R, N]: one product
    for all heads of queries that share one of keys."""
    found: torch.Tensor = rows.flatten(2, 3) @ with_
    return found.reshape(*rows.shape[:4], -1)


class RingAttentionCase(Case):
    """softmax(q kᵀ · scale) v. Outputs: ``out`` (of ``dtype``; ``out_dtype`` does not count), and
    ``lse``."""

    op = "ring_attention"
    row_axis = 2

    def inputs(
        self, rank: int, world_size: int, iteration: int, into: Tensors = NOWHERE
    ) -> dict[str, torch.Tensor]:
        """Return q, k, v at the rank's positions."""
        mine = self.positions(rank, world_size)
        found = {name: whole[:, :, mine] for name, whole in self._whole(iteration).items()}
        if self.options.get("lies") == "positions":
            return {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in found.items()}
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def positions(self, rank: int, world_size: int) -> torch.Tensor:
        """Return the positions of the sequence that ``rank`` holds, in order."""
        sequence = self.sizes["sequence"]
        if self.sizes.get("causal"):
            return zigzag_positions(sequence, world_size, rank)
        rows = sequence // world_size
        return torch.arange(rank * rows, (rank + 1) * rows)

    def _whole(self, iteration: int) -> dict[str, torch.Tensor]:
        if self.given is not None:
            return {name: self.given[name] for name in ("q", "k", "v")}
        batch, sequence, width = (self.sizes[n] for n in ("batch", "sequence", "head_dim"))
        return {
            name: self.normal(iteration, which, EVERY_RANK, batch, heads, sequence, width)
            for name, which, heads in (
                ("q", _Q, self.sizes["heads"]),
                ("k", _K, self.sizes["kv_heads"]),
                ("v", _V, self.sizes["kv_heads"]),
            )
        }

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return those of out and lse."""
        positions = self.sizes["sequence"] // world_size
        shape = (self.sizes["batch"], self.sizes["heads"], positions)
        out = (*shape, self.sizes["head_dim"]), getattr(torch, self.dtype)
        sums = torch.float64 if self.dtype == "float64" else torch.float32
        return {"out": out, "lse": (shape, sums)}

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the op."""
        documents = self.options.get("cu_seqlens")
        done = ring_attention.call(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            causal=bool(self.sizes.get("causal")),
            scale=self.options.get("scale"),
            chunk=self.chunk,
            cu_seqlens=None if documents is None else torch.tensor(documents, dtype=torch.int32),
            invariant=encoded(self.invariant),
            **execution,
        )
        return Outcome(done.outputs, done.plan, done.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute out [B, H, S/W, D], lse [B, H, S/W]; some rows of queries at a time."""
        whole = self._whole(iteration)
        mine = self.positions(rank, world_size).to(self.device)
        mine = mine[rows(len(mine))]
        q = by_keys(whole["q"][:, :, mine].double() * self.scale, self.sizes["kv_heads"])
        k, v = (whole[name].double() for name in "kv")
        every = torch.arange(k.shape[2], device=self.device)
        step = max(1, SCORES // (q[..., 0, 0].numel() * k.shape[2]))
        outs, sums = [], []
        for at, some in zip(torch.split(mine, step), torch.split(q, step, 3), strict=True):
            scores = products(some, k.transpose(2, 3))
            hidden = self.hidden(at, every)
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            sums.append(scores.logsumexp(4).flatten(1, 2))
            outs.append(products(scores.softmax(4), v).flatten(1, 2))
        return {"out": torch.cat(outs, dim=2), "lse": torch.cat(sums, dim=2)}

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return which keys each query does not see, [queries, keys], given their positions; None: it
        sees all."""
        found = None
        if self.sizes.get("causal"):
            found = keys[None, :] > queries[:, None]
        document = self._documents()
        if document is not None:
            other = document[keys][None, :] != document[queries][:, None]
            found = other if found is None else found | other
        return found

    @property
    def scale(self) -> float:
        """Return the factor of scores."""
        scale = self.options.get("scale")
        return float(self.sizes["head_dim"]) ** -0.5 if scale is None else float(scale)

    def _documents(self) -> torch.Tensor | None:
        """Return which document each position is of [S]; None: all are of one."""
        bounds = self.options.get("cu_seqlens")
        if bounds is None:
            return None
        lengths = torch.tensor(bounds, device=self.device).diff()
        return torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)

    def tolerances(self) -> dict[str, float]:
        """Allow three roundings of ``out``: its own, that of weights, and that of what one rank's keys
        give. Each is off by at most eps/2/sqrt(3) in the norm, where all numbers are just above a power
        of two; near-even weights come close. ``lse`` is float32."""
        roundings = torch.finfo(getattr(torch, self.dtype)).eps / 2
        return {"out": max(TOLERANCE[self.dtype], roundings), "lse": LSE_TOLERANCE}
