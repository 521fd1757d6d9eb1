"""The case of ring attention's gradients. Sizes and options are the forward's; the gradient of ``out``
is random, that of the log-sum-exp none.

With S = q kᵀ · scale and P = softmax(S), as far as a query sees: dv = Pᵀ dO, dS = P ∘ (dO vᵀ - dO·O),
dq = dS k · scale, dk = dSᵀ q · scale, where heads of queries that share one of keys add up. Source: Dao
et al., "FlashAttention", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mkernel.cases import attention
from mkernel.cases.attention import RingAttentionCase, by_keys, products
from mkernel.cases.base import EVERY_RANK, Memory, Onto, Outcome, Rows, Tensors, every_row
from mkernel.ops import ring_attention, ring_attention_backward
from mkernel.ops.common import Execution
from mkernel.plan.model import DtypeName

GRADIENT_TOLERANCE: dict[DtypeName, float] = {
    "float64": 1e-12,
    "float32": 3e-5,
    "float16": 1.5e-3,
    "bfloat16": 1e-2,
}
"""Relative Frobenius error. ``out``, weights, what each part gives and the sum are rounded: of random
tensors each costs up to 2.8e-3 in bfloat16."""

_OF_OUT = 3


class RingAttentionBackwardCase(RingAttentionCase):
    """Inputs: q, k, v and ``grad_out``. Outputs: ``grad_q``, ``grad_k``, ``grad_v``, of ``dtype``."""

    op = "ring_attention_backward"

    def _whole(self, iteration: int) -> dict[str, torch.Tensor]:
        sizes = (self.sizes[name] for name in ("batch", "heads", "sequence", "head_dim"))
        of_out = self.normal(iteration, _OF_OUT, EVERY_RANK, *sizes)
        return {**super()._whole(iteration), "grad_out": of_out}

    def results(self, world_size: int) -> dict[str, Memory]:
        """Return those of grad_q, grad_k and grad_v."""
        dtype, rows = getattr(torch, self.dtype), self.sizes["sequence"] // world_size
        return {
            f"grad_{name}": (
                (self.sizes["batch"], self.sizes[heads], rows, self.sizes["head_dim"]),
                dtype,
            )
            for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
        }

    def called(self, tensors: Tensors, outputs: Tensors, execution: Execution) -> Outcome:
        """Call the forward, then the op."""
        q, k, v = (tensors[name] for name in "qkv")
        bounds = self.options.get("cu_seqlens")
        documents = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
        causal, scale = bool(self.sizes.get("causal")), self.options.get("scale")
        found = ring_attention.call(
            q, k, v, causal=causal, scale=scale, chunk=self.chunk, cu_seqlens=documents
        ).outputs
        done = ring_attention_backward.call(
            tensors["grad_out"], None, q, k, v, documents, found["out"], found["lse"],
            causal=causal, scale=scale, chunk=self.chunk, **execution,
        )  # fmt: skip
        return Outcome(done.outputs, done.plan, done.record)

    def reference(
        self, rank: int, world_size: int, iteration: int, rows: Rows = every_row, onto: Onto = None
    ) -> dict[str, torch.Tensor]:
        """Compute the gradients, of some rows of queries, and of keys, at a time."""
        mine = self.positions(rank, world_size).to(self.device)
        mine = mine[rows(len(mine))]
        wide = _Wide(self, iteration)
        of_keys = [wide.of_keys(at) for at in wide.steps(mine)]
        return {
            "grad_q": torch.cat([wide.of_queries(at) for at in wide.steps(mine)], dim=2),
            "grad_k": torch.cat([of_k for of_k, _ in of_keys], dim=2),
            "grad_v": torch.cat([of_v for _, of_v in of_keys], dim=2),
        }

    def tolerances(self) -> dict[str, float]:
        """Allow the same error of all three."""
        return dict.fromkeys(("grad_q", "grad_k", "grad_v"), GRADIENT_TOLERANCE[self.dtype])


class _Wide:
    """Whole tensors in float64, with heads of queries by the head of keys that they use: q, scaled, and
    dO [B, Hkv, G, S, D], k and v [B, Hkv, S, D]; lse and dO·O [B, Hkv, G, S]."""

    def __init__(self, case: RingAttentionBackwardCase, iteration: int) -> None:
        self._case = case
        whole = {name: each.double() for name, each in case._whole(iteration).items()}
        heads = case.sizes["kv_heads"]
        self._q, self._of_out = (by_keys(whole[name], heads) for name in ("q", "grad_out"))
        self._q = self._q * case.scale
        self._k, self._v = whole["k"], whole["v"]
        self._every = torch.arange(case.sizes["sequence"], device=case.device)
        sums = [self._sums(at) for at in self.steps(self._every)]
        self._lse, self._inner = (torch.cat(each, dim=3) for each in zip(*sums, strict=True))

    def steps(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the positions, so many at a time that their scores bound memory."""
        scores = self._q[..., 0].numel()
        yield from torch.split(positions, max(1, attention.SCORES // scores))

    def _times(
        self, of_queries: torch.Tensor, of_keys: torch.Tensor, at: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows into [B, Hkv, G, queries, keys]."""
        return products(of_queries[:, :, :, at], of_keys[:, :, keys].transpose(2, 3))

    def _scores(self, at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        found = self._times(self._q, self._k, at, keys)
        hidden = self._case.hidden(at, keys)
        return found if hidden is None else found.masked_fill_(hidden, float("-inf"))

    def _sums(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute lse and dO·O of these queries."""
        scores = self._scores(at, self._every)
        lse = scores.logsumexp(4)
        weights = scores.sub_(lse[..., None]).exp_()
        return lse, (products(weights, self._v) * self._of_out[:, :, :, at]).sum(4)

    def _of_scores(self, at: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute P and dS."""
        weights = self._scores(at, keys).sub_(self._lse[:, :, :, at, None]).exp_()
        of_weights = self._times(self._of_out, self._v, at, keys)
        return weights, of_weights.sub_(self._inner[:, :, :, at, None]).mul_(weights)

    def of_queries(self, at: torch.Tensor) -> torch.Tensor:
        """Compute dq [B, H, queries, D]."""
        _, of_scores = self._of_scores(at, self._every)
        return products(of_scores, self._k).flatten(1, 2) * self._case.scale

    def of_keys(self, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute dk and dv [B, Hkv, keys, D]."""
        weights, of_scores = (
            each.flatten(2, 3).transpose(2, 3) for each in self._of_scores(self._every, at)
        )
        of_k = of_scores @ self._q.flatten(2, 3)
        return of_k, weights @ self._of_out.flatten(2, 3)
