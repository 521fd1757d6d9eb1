"""MoE and attention by torch and torch.distributed alone: exchange, compute, exchange.

These are the peers of the ops that no library fuses. Their results have the order and the rounding that
the ops' documentation promises, so that the same reference judges them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed
from torch.nn.functional import scaled_dot_product_attention

from mkernel.cases.attention import RingAttentionCase
from mkernel.harness.problem import Inputs, Problem, Tensors


class Routing:
    """Which rows go where, from the top-k ids of all ranks. Collective."""

    def __init__(self, problem: Problem, topk_ids: torch.Tensor) -> None:
        self._tokens, self._top_k = topk_ids.shape
        world, own = problem.world, problem.case.sizes["experts"] // problem.world
        ids = topk_ids.reshape(-1).long()
        self._order = ids.argsort(stable=True)
        sent = torch.bincount(ids, minlength=world * own)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        self._sent = sent.view(world, own).sum(1).tolist()
        self._received = received.view(world, own).sum(1).tolist()
        experts = torch.arange(own, device=ids.device).repeat(world).repeat_interleave(received)
        self._by_expert = experts.argsort(stable=True)
        self.counts = received.view(world, own).sum(0)

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens to the ranks of their experts; their rows by expert, source, token and slot."""
        rows = x[self._order // self._top_k]
        return _exchanged(rows, self._sent, self._received)[self._by_expert]

    def bring_home(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows back to their tokens, weighted and summed in float32, rounded once."""
        arrived = torch.empty_like(rows)
        arrived[self._by_expert] = rows
        home = _exchanged(arrived, self._received, self._sent)
        slots = torch.empty_like(home)
        slots[self._order] = home
        each = slots.view(self._tokens, self._top_k, -1).float()
        return (each * weights.float()[..., None]).sum(1).to(rows.dtype)


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: gloo has no all-to-all of every dtype.
    distributed.all_to_all_single(
        arrived.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent
    )
    return arrived


def dispatch_and_combine(problem: Problem, inputs: Inputs) -> Tensors:
    """All-to-all of tokens, a product an expert, all-to-all back, the weighted sum."""
    routing = Routing(problem, inputs["topk_ids"])
    parts = torch.split(routing.send(inputs["x"]), routing.counts.tolist())
    rows = torch.cat([part @ w for part, w in zip(parts, inputs["w"], strict=True)])
    out = routing.bring_home(rows, inputs["topk_weights"])
    return {"outputs": rows, "counts": routing.counts, "out": out}


def combine(problem: Problem, inputs: Inputs) -> Tensors:
    """All-to-all of rows and their weighted sum, with the routing that is known before."""
    return {"out": inputs["routing"].bring_home(inputs["y"], inputs["topk_weights"])}


def gemm_combine(problem: Problem, inputs: Inputs) -> Tensors:
    """A product an expert, then the combine, with the routing that is known before."""
    routing: Routing = inputs["routing"]
    parts = torch.split(inputs["h"], routing.counts.tolist())
    rows = torch.cat([part @ w2 for part, w2 in zip(parts, inputs["w2"], strict=True)])
    return {"out": routing.bring_home(rows, inputs["topk_weights"])}


def mask(problem: Problem) -> torch.Tensor | None:
    """Which of all ranks' keys each query of this one sees; None: all."""
    case, world = problem.case, problem.world
    assert isinstance(case, RingAttentionCase)
    if not case.sizes.get("causal"):
        return None
    held = torch.cat([case.positions(rank, world) for rank in range(world)])
    return (held[None, :] <= case.positions(problem.rank, world)[:, None]).to(problem.device)


def attention(problem: Problem, inputs: Inputs) -> Tensors:
    """All keys and values gathered, then torch's attention, whose mask is known before."""
    sizes = problem.case.sizes
    groups = sizes["heads"] // sizes["kv_heads"]
    k, v = (_gathered(problem, inputs[name], groups) for name in ("k", "v"))
    return {"out": scaled_dot_product_attention(inputs["q"], k, v, attn_mask=inputs["mask"])}


def _gathered(problem: Problem, share: torch.Tensor, groups: int) -> torch.Tensor:
    shares = [torch.empty_like(share) for _ in range(problem.world)]
    distributed.all_gather(shares, share)
    return torch.cat(shares, dim=2).repeat_interleave(groups, dim=1)


CALLS: dict[str, Callable[[Problem, Inputs], Tensors]] = {
    "moe_dispatch_gemm": dispatch_and_combine,
    "moe_combine": combine,
    "moe_gemm_combine": gemm_combine,
    "ring_attention": attention,
}
