"""MoE by torch and torch.distributed alone: exchange, product, exchange; or gathers of all tokens.

These are the peers of the ops that no library fuses. Their results have the order that the ops'
documentation promises, so that the same reference judges them. Rows in e4m3 travel as such, and so do
their scales; results travel in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from mkernel.backends.contracts.scaled import (
    STEP,
    block_product,
    dequantised,
    padded_blocks,
    quantised_rows,
)
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.errors import Unsupported
from mkernel.harness.contenders import EXPERTS, Contender, expert_blocks, expert_rows, widened
from mkernel.harness.contenders.collectives import all_gather, reduce_scatter
from mkernel.harness.contenders.products import scales_without_product
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.world.order import capturing


def padded(rows: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Return as many rows as the capacity says, those at the end being zero."""
    if capacity is None:
        return rows
    more = torch.nn.functional.pad(plain(rows), (0, 0, 0, capacity - len(rows)))
    return more.view(rows.dtype)


def without_padding(results: Tensors) -> Tensors:
    """Return a dispatch's results with the rows that its counts name, of those that a capacity gave."""
    if "counts" not in results:
        return results
    rows = int(results["counts"].sum())
    return {name: each if name == "counts" else each[:rows] for name, each in results.items()}


def kept(held: Inputs, name: str, made: torch.Tensor) -> torch.Tensor:
    """Keep what was made before a turn, in the memory of the turn before where it fits: a captured
    graph reads it there."""
    if name in held and held[name].shape == made.shape:
        held[name].copy_(made)
    else:
        held[name] = made.clone()
    found: torch.Tensor = held[name]
    return found


def products(rows: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert, which come one after another, by its weights. Rows behind the
    last expert's have no product: their results are anything.

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


def keep_scales(held: Inputs, capacity: int | None = None) -> None:
    """Keep the scales of e4m3 experts, where there are some, as their products take them: those of
    given rows beside ``rows``, and those of weights as users lay them out once."""
    if "h_scale" in held:
        kept(held, "rows_scale", padded(held["h_scale"], capacity))
    for name in ("w", "w2"):
        if f"{name}_scale" in held:
            blocks = [padded_blocks(each).t() for each in held[f"{name}_scale"]]
            kept(held, f"{name}_blocks", torch.stack(blocks).transpose(1, 2))
    if {"w_scale", "w2_scale"} <= held.keys():
        expert_blocks.prepare(held["w2"].device, held["w2"].shape[1])


def of_experts(
    inputs: Inputs, name: str, rows: torch.Tensor, scale: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, e4m3 ones beside their scales [rows, K / 128] or [rows, 1], by the weights of that
    name, as :func:`products` does.

    torch's grouped product takes no float32 scales by blocks, so that e4m3 operands have a product an
    expert, and results in bfloat16. It takes rows in fours: those that are the next expert's get their
    own results by the next product. Weights that are kept in bfloat16 have the grouped one. A peer may
    have a ``product`` of its own.
    """
    if "product" in inputs:
        made: torch.Tensor = inputs["product"](inputs, name, rows, scale, counts)
        return made
    w = inputs[f"{name}_wide" if f"{name}_wide" in inputs else name]
    if scale is not None and w.dtype == torch.bfloat16:
        rows, scale = expert_blocks.widened(rows, scale), None
    if scale is None:
        return products(rows, w, counts)
    _refuse_capture(rows, "products of unknown sizes")
    out = rows.new_empty((len(rows), w.shape[2]), dtype=torch.bfloat16)
    first = 0
    for count, one, blocks in zip(counts.tolist(), w, inputs[f"{name}_blocks"], strict=True):
        if count:
            these = slice(first, first + count + -count % STEP)
            block_product(rows[these], one, scale[these], blocks, out[these])
        first += count
    return out


def gated_products(
    inputs: Inputs, rows: torch.Tensor, scale: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """Compute a layer's experts of their rows, as :func:`of_experts` does each product; ``w`` has the
    gates' columns, then the ups'. What comes between e4m3 weights is quantised."""
    both = of_experts(inputs, "w", rows, scale, counts)
    scale = None
    if "w2_wide" in inputs:
        between = expert_blocks.rounded(both)
    elif "w2_columns" in inputs:
        between, scale = expert_blocks.quantised_whole(both)
    elif "w2_scale" in inputs:
        between, scale = expert_blocks.quantised(both)
    else:
        between = expert_rows.gated(both, counts.sum(0, keepdim=True))
    return of_experts(inputs, "w2", between, scale, counts)


def _refuse_capture(tensor: torch.Tensor, what: str) -> None:
    if capturing(torch.get_device_module(tensor.device)):
        raise Unsupported(f"{what} need their numbers on the host: not in a graph")


class Exchanged:
    """Every copy of a token to the rank of its expert: which rows go where, from the top-k ids of all
    ranks. Its host waits for the numbers of rows. Collective."""

    def __init__(self, problem: Problem, topk_ids: torch.Tensor) -> None:
        _refuse_capture(topk_ids, "rows for every rank")
        self._top_k = topk_ids.shape[1]
        world, own = problem.world, problem.case.sizes["experts"] // problem.world
        ids = topk_ids.reshape(-1).long()
        self._order = ids.argsort(stable=True)
        places = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        self._home = torch.empty_like(places).scatter_(0, self._order, places)
        self._all = torch.full_like(places[:1], len(ids))
        sent = torch.bincount(ids, minlength=world * own)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        self._sent = sent.view(world, own).sum(1).tolist()
        self._received = received.view(world, own).sum(1).tolist()
        experts = torch.arange(own, device=ids.device).repeat(world).repeat_interleave(received)
        self._by_expert = experts.argsort(stable=True)
        self.counts = received.view(world, own).sum(0)

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """Send tokens to the ranks of their experts; return rows by expert, source, token and slot."""
        rows = plain(x)[self._order // self._top_k]
        return _exchanged(rows, self._sent, self._received)[self._by_expert].view(x.dtype)

    def bring_home(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send rows back to their tokens; add them up weighted, in float32, rounded once."""
        _refuse_capture(rows, "rows for every rank")
        arrived = torch.empty_like(rows[: len(self._by_expert)])
        arrived[self._by_expert] = rows[: len(self._by_expert)]
        home = _exchanged(arrived, self._received, self._sent)
        return expert_rows.summed(home, weights, self._home, self._all)


def plain(rows: torch.Tensor) -> torch.Tensor:
    """Return e4m3 rows as bytes: not every library, index or padding takes the dtype."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: gloo has no all-to-all of every dtype.
    distributed.all_to_all_single(
        arrived.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent
    )
    return arrived


def dispatched_rows(problem: Problem, inputs: Inputs) -> Tensors:
    """Exchange every copy of a token, and its scales, by an all-to-all."""
    routing, rows, scale = _sent(problem, inputs)
    found = {"rows": rows, "counts": routing.counts}
    return found if scale is None else {**found, "scales": scale}


def _sent(problem: Problem, inputs: Inputs) -> tuple[Exchanged, torch.Tensor, torch.Tensor | None]:
    routing = Exchanged(problem, inputs["topk_ids"])
    scale = inputs.get("x_scale")
    return routing, routing.send(inputs["x"]), None if scale is None else routing.send(scale)


def dispatch(problem: Problem, inputs: Inputs) -> Tensors:
    """Exchange every copy of a token by an all-to-all, and multiply."""
    routing, rows, scale = _sent(problem, inputs)
    rows = of_experts(inputs, "w", rows, scale, routing.counts)
    return {"outputs": rows, "counts": routing.counts}


def combine(problem: Problem, inputs: Inputs) -> Tensors:
    """Exchange rows by an all-to-all and add them up, with the routing that is known before."""
    return {"out": inputs["routing"].bring_home(inputs["y"], inputs["topk_weights"])}


def gemm_combine(problem: Problem, inputs: Inputs) -> Tensors:
    """Multiply, then combine, with the routing that is known before."""
    routing: Exchanged = inputs["routing"]
    rows = of_experts(inputs, "w2", inputs["h"], inputs.get("h_scale"), routing.counts)
    return {"out": routing.bring_home(rows, inputs["topk_weights"])}


def layer(problem: Problem, inputs: Inputs) -> Tensors:
    """Exchange every copy of a token, compute the experts, and exchange what they made."""
    routing, rows, scale = _sent(problem, inputs)
    rows = gated_products(inputs, rows, scale, routing.counts)
    return {"out": routing.bring_home(rows, inputs["topk_weights"])}


class Sorted:
    """The slots of tokens that some experts take. The host waits for nothing where there is a capacity.

    Attributes:
        counts: rows of each expert. count [1]: of all of them.
        places: of the rows, by expert and then in the order of the lists of slots, where they are in
            these; of the first ``capacity`` of them, those behind the last expert's being somebody
            else's. home: the inverse, the row of each slot; those of other experts come last.
    """

    def __init__(self, topk_ids: torch.Tensor, experts: int, capacity: int | None) -> None:
        """Sort ``topk_ids`` [tokens, k]; ids that are not 0 to ``experts`` make no row."""
        ids = topk_ids.reshape(-1)
        # The fewer bytes a key has, the fewer passes a radix sort makes.
        key = torch.int16 if experts < torch.iinfo(torch.int16).max else torch.int32
        expert = torch.where((ids >= 0) & (ids < experts), ids, experts).to(key)
        found, order = expert.sort(stable=True)
        numbers = torch.arange(experts, dtype=key, device=ids.device)
        ends = torch.searchsorted(found, numbers, right=True)
        self.counts = torch.diff(ends, prepend=ends.new_zeros(1))
        self.count = ends[-1:]
        self.places = order[: int(self.count) if capacity is None else capacity]
        rows = torch.arange(len(order), dtype=torch.int32, device=ids.device)
        self.home = torch.empty_like(rows).scatter_(0, order, rows)
        self.top_k = topk_ids.shape[1]

    def copied(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the rows."""
        return expert_rows.copied(tokens, self.places, self.count, self.top_k)

    def summed(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each token's sum of what ``rows`` has of it, weighted by its slots' ``weights``."""
        return expert_rows.summed(rows, weights, self.home, self.count)


class Gathered(Sorted):
    """The tokens of all ranks that this rank's experts take."""

    def __init__(self, problem: Problem, topk_ids: torch.Tensor, capacity: int | None) -> None:
        """Sort ``topk_ids`` of all ranks."""
        own = problem.case.sizes["experts"] // problem.world
        super().__init__(topk_ids - problem.rank * own, own, capacity)


def gathered(share: torch.Tensor, world: int) -> torch.Tensor:
    """Gather all ranks' rows, one rank's after another's."""
    whole, coming = gathering(share, world)
    coming.wait()
    return whole


def gathering(share: torch.Tensor, world: int) -> tuple[torch.Tensor, Any]:
    """Start to gather all ranks' rows; return their memory, and what to wait for before it is read."""
    whole = share.new_empty(world * share.shape[0], *share.shape[1:])
    return whole, all_gather(plain(whole), plain(share.contiguous()), async_op=True)


class ExpertPeer(Contender):
    """A peer to which each rank's tokens come once, and whose experts' results go home as ranks'
    sums."""

    ops, ops_text = ("moe_dispatch", *EXPERTS), "for experts"
    library = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.capacity: int | None = problem.case.options.get("capacity")

    def keep(self, inputs: Inputs, routing: Sorted) -> None:
        """Keep what GEMM+combine knows before its turn: the routing, and rows for its experts."""
        for name in ("counts", "count", "home"):
            kept(inputs, name, getattr(routing, name))
        kept(inputs, "rows", padded(inputs["h"], self.capacity))

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        return without_padding(results)

    def limits(self) -> dict[str, float]:
        """Allow three roundings: results, then ranks' sums of them, then their sum are rounded, each
        time with as large an error, in all, as one rounding of the sum."""
        if self.op == MOE_LAYER:
            return super().limits()
        return widened(self.problem.case.tolerances(), 3.0)


class GatheredExperts(ExpertPeer):
    """A peer that sends all tokens to all ranks, each of which takes the rows of its experts: a
    gather, a copy and a grouped product. Results come home as sums of ranks, by a reduce-scatter.
    Gathers overlap with what does not need them. Experts in e4m3 have a product each, not a grouped
    one."""

    name = "gather+grouped"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or scales_without_product(problem)

    def before(self, inputs: Inputs) -> None:
        keep_scales(inputs, self.capacity)
        if self.op == "moe_gemm_combine":
            self.keep(inputs, self.routed(gathered(inputs["topk_ids"], self.problem.world)))

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        world = self.problem.world
        if self.op == "moe_gemm_combine":
            weights, coming = gathering(inputs["topk_weights"], world)
            scale = inputs.get("rows_scale")
            rows = of_experts(inputs, "w2", inputs["rows"], scale, inputs["counts"])
            coming.wait()
            return self._brought_home(
                expert_rows.summed(rows, weights, inputs["home"], inputs["count"])
            )
        ids, coming_first = gathering(inputs["topk_ids"], world)
        tokens, coming = gathering(inputs["x"], world)  # while ids are sorted
        scales, scale = None, None
        if "x_scale" in inputs:
            scales, coming_last = gathering(inputs["x_scale"], world)
        coming_first.wait()
        routing = self.routed(ids)
        coming.wait()
        if scales is not None:
            coming_last.wait()
            if "w_wide" in inputs:
                tokens = expert_blocks.widened(tokens, scales)
            else:
                scale = routing.copied(scales)
        if self.op == "moe_dispatch":
            found = {"rows": routing.copied(tokens), "counts": routing.counts}
            return found if scale is None else {**found, "scales": scale}
        if self.op == "moe_dispatch_gemm":
            rows = of_experts(inputs, "w", routing.copied(tokens), scale, routing.counts)
            return {"outputs": rows, "counts": routing.counts}
        weights, coming = gathering(inputs["topk_weights"], world)
        rows = gated_products(inputs, routing.copied(tokens), scale, routing.counts)
        coming.wait()
        return self._brought_home(routing.summed(rows, weights))

    def routed(self, ids: torch.Tensor) -> Gathered:
        """Return which rows of all ranks' tokens its experts take."""
        return Gathered(self.problem, ids, self.capacity)

    def _brought_home(self, sums: torch.Tensor) -> Tensors:
        out = sums.new_empty(len(sums) // self.problem.world, sums.shape[1])
        reduce_scatter(out, sums)
        return {"out": out}


class DequantisedExperts(GatheredExperts):
    """The same of e4m3 experts by a grouped product, which graphs capture: their weights are kept in
    bfloat16, twice as many bytes, and rows are dequantised where they arrived. Nothing of the former is
    timed."""

    name = "gather+dequantised"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in EXPERTS or problem.case.options.get("scales") != "block":
            return "for products of experts in e4m3"
        return super(GatheredExperts, cls).unusable(problem)

    def before(self, inputs: Inputs) -> None:
        super().before(inputs)
        for name in ("w", "w2"):
            if name in inputs:
                self._widen(inputs, name)

    def _widen(self, inputs: Inputs, name: str) -> None:
        w, scales = inputs[name], inputs[f"{name}_scale"]
        expert_blocks.prepare(self.problem.device, w.shape[1])
        if f"{name}_wide" not in inputs:
            inputs[f"{name}_wide"] = torch.empty_like(w, dtype=torch.bfloat16)
        # One after the other: in float32 all of them take much memory.
        for wide, one, scale in zip(inputs[f"{name}_wide"], w, scales, strict=True):
            wide.copy_(dequantised(one, scale))


def _scaled_product(
    inputs: Inputs, name: str, rows: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    grouped: Callable[..., torch.Tensor] = torch._scaled_grouped_mm
    return grouped(
        rows, inputs[f"{name}_by_columns"].transpose(1, 2), scale.flatten(),
        inputs[f"{name}_columns"], offs=counts.cumsum(0).to(torch.int32),
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


E4M3_ROUNDING = 2**-5
"""The error of a rounding to e4m3: an element is off by 1/16 at most, by half of that in the mean."""


class ScaledGroupedExperts(GatheredExperts):
    """The same of e4m3 experts by torch's grouped product of e4m3 operands, which graphs capture. It
    takes a scale a row and a scale a column, so operands are quantised anew before the turn."""

    name = "gather+scaled"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in EXPERTS or problem.case.options.get("scales") != "block":
            return "for products of experts in e4m3"
        return super().unusable(problem)

    def before(self, inputs: Inputs) -> None:
        super().before(inputs)
        rows = "h" if self.op == "moe_gemm_combine" else "x"
        capacity = self.capacity if rows == "h" else None
        anew = quantised_rows(dequantised(inputs[rows], inputs[f"{rows}_scale"]))
        for name, each in zip(("by_rows", "by_rows_scale"), anew, strict=True):
            kept(inputs, name, padded(each, capacity))
        for name in ("w", "w2"):
            if name in inputs:
                self._by_columns(inputs, name)

    def _by_columns(self, inputs: Inputs, name: str) -> None:
        w = inputs[name].transpose(1, 2)
        if f"{name}_by_columns" not in inputs:
            inputs[f"{name}_by_columns"] = torch.empty_like(w)
            inputs[f"{name}_columns"] = w.new_empty(w.shape[:2], dtype=torch.float32)
        for expert, (one, its) in enumerate(zip(w, inputs[f"{name}_scale"], strict=True)):
            values, scale = quantised_rows(dequantised(one, its.t()))
            inputs[f"{name}_by_columns"][expert].copy_(values)
            inputs[f"{name}_columns"][expert].copy_(scale.flatten())

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        rows = "rows" if self.op == "moe_gemm_combine" else "x"
        anew = {rows: inputs["by_rows"], f"{rows}_scale": inputs["by_rows_scale"]}
        return super().call(inputs | anew | {"product": _scaled_product}, outputs)

    def limits(self) -> dict[str, float]:
        """Allow roundings to e4m3 of both operands; in a layer those of both weights, of tokens, and of
        what is between the products, by rows here and by blocks in the reference."""
        error = E4M3_ROUNDING * (5 if self.op == MOE_LAYER else 2) ** 0.5
        return {name: math.hypot(limit, error) for name, limit in super().limits().items()}


CALLS: dict[str, Callable[[Problem, Inputs], Tensors]] = {
    "moe_dispatch": dispatched_rows,
    "moe_dispatch_gemm": dispatch,
    "moe_combine": combine,
    "moe_gemm_combine": gemm_combine,
    MOE_LAYER: layer,
}
