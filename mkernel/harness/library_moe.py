"""MoE by torch and torch.distributed alone: exchange, product, exchange.

These are the peers of the ops that no library fuses. Their results have the order that the ops'
documentation promises, so that the same reference judges them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed
from torch.nn.functional import silu

from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.errors import Unsupported
from mkernel.harness.collectives import all_gather
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.world.order import capturing

DISPATCHED = ("outputs", "counts")
"""Outputs of a dispatch; its combine is an op of its own."""


def padded(rows: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """As many rows as the capacity says, those at the end being zero."""
    if capacity is None:
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, capacity - len(rows)))


def without_padding(results: Tensors) -> Tensors:
    """A dispatch's results with the rows that its counts name, of those that a capacity gave."""
    if "counts" not in results:
        return results
    return {**results, "outputs": results["outputs"][: int(results["counts"].sum())]}


def kept(held: Inputs, name: str, made: torch.Tensor) -> torch.Tensor:
    """What was made before a turn, in the memory of the turn before where it fits: a captured graph
    reads it there."""
    if name in held and held[name].shape == made.shape:
        held[name].copy_(made)
    else:
        held[name] = made.clone()
    found: torch.Tensor = held[name]
    return found


def products(rows: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of each expert, which come one after another, times its weights. Rows behind the last
    expert's have no product: their results are anything.

    One grouped product where torch has it (bfloat16); else a product an expert, for which the host
    waits for the counts. Unsupported, where a graph is captured.
    """
    if rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        grouped: Callable[..., torch.Tensor] = torch._grouped_mm
        return grouped(rows, w, offs=counts.cumsum(0).to(torch.int32))
    _refuse_capture(rows, "products of unknown sizes")
    sizes = counts.tolist()
    parts = torch.split(rows[: sum(sizes)], sizes)
    done = [part @ each for part, each in zip(parts, w, strict=True)]
    return torch.cat([*done, rows.new_empty(len(rows) - sum(sizes), w.shape[2])])


def gated_products(
    rows: torch.Tensor, w: torch.Tensor, w2: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """What the experts of a layer make of their rows; ``w`` has the gates' columns, then the ups'."""
    gate, up = products(rows, w, counts).chunk(2, dim=-1)
    return products(silu(gate) * up, w2, counts)


def _refuse_capture(tensor: torch.Tensor, what: str) -> None:
    if capturing(torch.get_device_module(tensor.device)):
        raise Unsupported(f"{what} need their numbers on the host: not in a graph")


class Exchanged:
    """Every copy of a token to the rank of its expert: which rows go where, from the top-k ids of all
    ranks. Its host waits for the numbers of rows. Collective."""

    def __init__(self, problem: Problem, topk_ids: torch.Tensor) -> None:
        _refuse_capture(topk_ids, "rows for every rank")
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
        _refuse_capture(rows, "rows for every rank")
        arrived = torch.empty_like(rows[: len(self._by_expert)])
        arrived[self._by_expert] = rows[: len(self._by_expert)]
        home = _exchanged(arrived, self._received, self._sent)
        slots = torch.empty_like(home)
        slots[self._order] = home
        each = slots.view(self._tokens, self._top_k, -1).float()
        return each.mul_(weights.float()[..., None]).sum(1).to(rows.dtype)


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: gloo has no all-to-all of every dtype.
    distributed.all_to_all_single(
        arrived.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent
    )
    return arrived


def dispatch(problem: Problem, inputs: Inputs) -> Tensors:
    """All-to-all of every copy of a token, and the products."""
    routing = Exchanged(problem, inputs["topk_ids"])
    rows = products(routing.send(inputs["x"]), inputs["w"], routing.counts)
    return {"outputs": rows, "counts": routing.counts}


def combine(problem: Problem, inputs: Inputs) -> Tensors:
    """All-to-all of rows and their weighted sum, with the routing that is known before."""
    return {"out": inputs["routing"].bring_home(inputs["y"], inputs["topk_weights"])}


def gemm_combine(problem: Problem, inputs: Inputs) -> Tensors:
    """The products, then the combine, with the routing that is known before."""
    routing: Exchanged = inputs["routing"]
    rows = products(inputs["h"], inputs["w2"], routing.counts)
    return {"out": routing.bring_home(rows, inputs["topk_weights"])}


def layer(problem: Problem, inputs: Inputs) -> Tensors:
    """All-to-all of every copy of a token, the experts, and all-to-all of what they made."""
    routing = Exchanged(problem, inputs["topk_ids"])
    rows = routing.send(inputs["x"])
    rows = gated_products(rows, inputs["w"], inputs["w2"], routing.counts)
    return {"out": routing.bring_home(rows, inputs["topk_weights"])}


class Sorted:
    """Which slots of tokens some experts take. The host waits for nothing where there is a capacity.

    Attributes:
        counts: rows of each expert. places: of the rows, by expert and then in the order of the lists
            of slots, where they are in these; of the first ``capacity`` of them, those behind the last
            expert's being somebody else's.
    """

    def __init__(self, topk_ids: torch.Tensor, experts: int, capacity: int | None) -> None:
        """``topk_ids`` [tokens, k]: of other numbers than 0 to ``experts`` no row is made."""
        ids = topk_ids.reshape(-1).long()
        expert = torch.where((ids >= 0) & (ids < experts), ids, experts)
        order = expert.argsort(stable=True)
        ones = torch.ones_like(expert)
        self.counts = torch.zeros(experts + 1, dtype=torch.long, device=ids.device).scatter_add_(
            0, expert, ones
        )[:experts]
        self.places = order[: int(self.counts.sum()) if capacity is None else capacity]
        self.top_k = topk_ids.shape[1]


class Gathered(Sorted):
    """All tokens to all ranks: which of them this rank's experts take. Collective."""

    def __init__(
        self, problem: Problem, topk_ids: torch.Tensor, capacity: int | None = None
    ) -> None:
        own = problem.case.sizes["experts"] // problem.world
        local = gathered(topk_ids, problem.world).long() - problem.rank * own
        super().__init__(local, own, capacity)


def summed_by_token(
    rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the results that are here (:class:`Sorted`) of each token, in float32. Lists
    of slots are those of ``weights`` [tokens, k]."""
    tokens, top_k = weights.shape
    summed = torch.zeros(tokens, rows.shape[1], device=rows.device)
    mine = torch.arange(len(rows), device=rows.device) < counts.sum()
    weighted = torch.where(mine[:, None], rows.float() * weights.flatten()[places, None], 0.0)
    return summed.index_add_(0, places // top_k, weighted)


def gathered(share: torch.Tensor, world: int) -> torch.Tensor:
    """All ranks' rows, one rank's after another's."""
    whole = share.new_empty(world * share.shape[0], *share.shape[1:])
    all_gather(whole, share.contiguous())
    return whole


CALLS: dict[str, Callable[[Problem, Inputs], Tensors]] = {
    "moe_dispatch_gemm": dispatch,
    "moe_combine": combine,
    "moe_gemm_combine": gemm_combine,
    MOE_LAYER: layer,
}
