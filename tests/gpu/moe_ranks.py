"""Calls of the three MoE ops on a rank, for :mod:`calls`, on fresh routings; faults beneath them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import calls
import torch
from calls import LATE_S, Decisions, Tensors, spin
from few_elements import EPS_OF_SUMS, experts_right, rounded_once

import mkernel
from mkernel.backends.accelerators.cuda.capabilities import MOE
from mkernel.backends.accelerators.cuda.moe import executors as backend
from mkernel.backends.accelerators.cuda.moe import nodes
from mkernel.backends.accelerators.hopper.moe import executors as products
from mkernel.backends.contracts.scaled import dequantised, quantised_blocks, spread
from mkernel.cases import case_of, poison
from mkernel.cases.comparison import FEW, compare
from mkernel.cases.moe import E4M3_SUMS, ROUTINGS, MoeDispatchCase, wide
from mkernel.errors import CapacityExceeded
from mkernel.plan import planner
from mkernel.plan.model import BLOCK, E4M3, Activation
from mkernel.plan.pipeline import Returns

PERMUTED: Decisions = {"moe.tuning": {"permutes": True, "reads_weights": False}}
"""Plans as of many tokens: dispatches copy their rows into order first; second products have wide
tiles."""
IN_ORDER: Decisions = {"moe.tuning": {"permutes": True}}
"""The same of e4m3 experts, which have one tiling."""
GATHERED: Decisions = {"moe.tuning": {"permutes": False}}
OF_LAYERS = ("home", "values", "scales", "slots", "slots of values")
"""Results that the case of a dispatch does not know."""
QUANTISED = 2**-5
WANTED: Decisions = {"moe.tuning": {"push_blocks": (8, ())}}
"""Each token goes once to each rank that has an expert of it."""


IN_PIECES: Decisions = {"moe.tuning": {"piece_rows": 70}}
"""Tokens cross between nodes in pieces of so many, of up to 1120 in 16."""


def relaying(shapes: Any, fn: Any, *arguments: Any) -> Any:
    """Call ``fn`` where tokens and sums cross by relays, in no other op."""
    choices = planner.arguments.exchanges

    def exchanges(wanted: str, op: Any, *world: int) -> Any:
        return choices("hierarchical" if op in MOE else wanted, op, *world)

    with mock.patch.object(planner.arguments, "exchanges", exchanges):
        planner._planned.cache_clear()
        found = fn(shapes, *arguments)
    planner._planned.cache_clear()
    return found


def early(rows: int) -> Decisions:
    """Have all multiples of so many own rows come first."""
    return {"moe.tuning": {"early_rows": rows, "early_tiles": 1 << 20}}


def all_of(*decisions: Decisions) -> Decisions:
    """Decide all of these."""
    made: dict[str, Any] = {}
    for each in decisions:
        made |= each["moe.tuning"]
    return {"moe.tuning": made}


@dataclass(frozen=True)
class Moe:
    """One size; ``experts`` of a rank. ``capacity``: rows, as the op takes it; 0: none."""

    tokens: int
    hidden: int = 64
    features: int = 64
    experts: int = 2
    top_k: int = 2
    routing: str = "uniform"
    dtype: str = "bfloat16"
    layout: str = "row"
    capacity: int = 0
    returns: Returns | None = None
    ids: str = "int32"
    activation: Activation | None = None
    narrow: bool = False
    """Whether results of GEMM+combine travel in ``dtype``, not in float32."""
    scales: bool = False
    """Says that operands are e4m3 with scales by blocks; ``dtype`` is then that of results."""
    quantise: bool = False
    """Says that the first op quantises what the second one multiplies; else that has 16 bits."""
    again: bool = False
    """Says that a dispatch uses the handle of one of other tokens, and no ids."""

    def work(self, seed: int = 0, device: str | None = None) -> Work:
        """Make its tensors on this rank."""
        world = mkernel.world()
        experts = self.experts * world.size
        sizes = {
            "tokens": self.tokens,
            "hidden": self.hidden,
            "features": self.features,
            "experts": experts,
            "top_k": min(self.top_k, experts),
        }
        options = {
            "routing": self.routing,
            "id_dtype": self.ids,
            "activation": self.activation,
            **({"scales": "block"} if self.scales else {}),
        }
        made: Any = case_of("moe_dispatch_gemm")
        case = made(
            sizes,
            E4M3 if self.scales else self.dtype,
            self.dtype,
            "column" if self.scales else self.layout,
            seed=seed,
            options=options,
            device=device or calls.DEVICE,
        )
        return Work(self, case)


class Work(calls.Work):
    """A size's tensors on this rank: x and w for the dispatch, w2 for what follows, of which ``h`` is
    the dispatch's own outputs."""

    turns = 2

    def __init__(self, shape: Moe, case: MoeDispatchCase) -> None:
        super().__init__(shape, case)
        self.moe, self.top_k = case, case.sizes["top_k"]
        self.w2 = self._laid_out(self._w2(self.rank))
        self.w2_scale = self._w2_scale(self.rank)

    def _w2(self, rank: int) -> torch.Tensor:
        """As small as a model's, by a power of two: products with gated ``h`` of eight slots that one
        expert has would leave float16's range, where there is nothing to compare."""
        shape = (self.shape.experts, self.shape.features, self.shape.hidden)
        drawn = self.case.normal(0, 9, rank, *shape)
        if self.shape.scales:  # which keep results small
            return drawn
        return drawn * 2.0 ** -round(math.log2(shape[1]) / 2)

    def _w2_scale(self, rank: int) -> torch.Tensor | None:
        shape = self.shape
        if not shape.scales or shape.features % BLOCK:
            return None
        sizes = shape.experts, shape.features, shape.hidden
        return self.moe.scales_of((0, 14, rank), *sizes)[0]

    def _laid_out(self, w: torch.Tensor) -> torch.Tensor:
        return w.transpose(1, 2).contiguous().transpose(1, 2) if self.shape.scales else w

    def dispatched(self, **options: Any) -> Any:
        """Call the dispatch, once or twice."""
        given, shape = self.given, self.shape
        scales = {name: given[name] for name in ("x_scale", "w_scale") if shape.scales}
        call = partial(
            mkernel.moe_dispatch_gemm, w=given["w"], capacity=shape.capacity or None,
            activation=shape.activation, **scales,
            **{**({"out_dtype": getattr(torch, shape.dtype)} if shape.scales else {}), **options},
        )  # fmt: skip
        ids = given["topk_ids"]
        if shape.again:
            first = call(other_tokens(given["x"]), ids)
            self.sent: Any = call(given["x"], torch.full_like(ids, -1), handle=first.handle)
        else:
            self.sent = call(given["x"], ids)
        return self.sent

    def call(self) -> Tensors:
        """Call the three public ops."""
        sent, weights = self.dispatched(), self.given["topk_weights"]
        self.found = {"outputs": sent.outputs, "counts": sent.counts}
        self.found["out"] = mkernel.moe_combine(sent.outputs, sent.handle, weights)
        if self.shape.scales:
            self.found["slots"] = self._by_slots(sent.outputs, sent.handle)
        if self.shape.scales and self.w2_scale is None:
            return self.found
        scales: dict[str, Any] = {}
        if self.shape.scales:
            scales = {"w2_scale": self.w2_scale, "out_dtype": sent.outputs.dtype}
        h = sent.outputs
        if self.shape.quantise:
            sent = self.dispatched(out_dtype=None, quantise="block")
            h = self.found["values"] = sent.outputs
            scales["h_scale"] = self.found["scales"] = sent.scales
            parts = in_bfloat16(dequantised(h, sent.scales))
            home = self._by_slots(torch.cat(parts, 1), sent.handle)
            self.found["slots of values"] = home.unflatten(2, (len(parts), -1)).double().sum(2)
        self.found["home"] = mkernel.moe_gemm_combine(
            h, self.w2, sent.handle, weights, returns=self.shape.returns,
            partial_dtype=getattr(torch, self.shape.dtype) if self.shape.narrow else torch.float32,
            **scales,
        )  # fmt: skip
        return self.found

    def _by_slots(self, y: torch.Tensor, handle: Any) -> torch.Tensor:
        """Return rows of the own tokens by slot [top_k, tokens, columns], as a combine brings each
        home. By these what follows e4m3 experts is judged: a sum near a tie is rounded to one step or
        the other, and may change the scale of 128 elements. Of a few tokens that is too far from the
        reference."""
        each = torch.eye(self.top_k, device=y.device)[:, None].repeat(1, self.shape.tokens, 1)
        return torch.stack([mkernel.moe_combine(y, handle, one) for one in each])

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say what is wrong with the results of a turn."""
        rows = int(found["counts"].sum())
        judged = {name: each for name, each in found.items() if name not in OF_LAYERS}
        wrong = self._combined(turn, judged.pop("out"), found["slots"]) if "slots" in found else []
        wrong += super().wrong(turn, {**judged, "outputs": found["outputs"][:rows]})
        if found["outputs"][rows:].count_nonzero():
            wrong.append("rows behind the last one are not zero")
        if "values" in found:
            wrong += self._quantised(turn, found["values"], found["scales"], rows)
        if "home" not in found:
            return wrong
        # Narrow results, ranks' sums of them, relayed ones' sums, then the sum of these are rounded,
        # each as much; the library of `cuda` rounds products also where results are wide.
        by_library = mkernel.world().accelerator.name == "cuda"
        roundings = 3 + self._relayed() if self.shape.narrow else 1 + by_library
        limit = self.case.tolerances()["out"] * roundings**0.5
        between = found.get("slots of values", found.get("slots"))
        wanted, terms = self._home(turn, between)
        error = (found["home"].double() - wanted).abs()
        off = float(error.norm()) / (float(wanted.norm()) or 1.0)
        # Limits are of norms: of few elements each may be off by the most that its roundings make.
        half_step = torch.finfo(found["home"].dtype).eps / 2
        few = error.numel() <= FEW and bool((error <= roundings * half_step * terms).all())
        if not (off <= limit or few):
            wrong.append(f"GEMM+combine is off by {off:.2e}")
        return wrong

    def _combined(self, turn: int, out: torch.Tensor, slots: torch.Tensor) -> list[str]:
        """Say what is wrong with the combine of e4m3 experts' outputs, by their rows, and by the
        reference, from which 1 to 3 tokens were 1.5 times as far as others on two H200."""
        limit = self.case.tolerances()["out"]
        weights = self.moe._weights(self.rank, turn).double()
        of_rows = torch.einsum("tk,kti->ti", weights, slots.double())
        sums = torch.einsum("tk,kti->ti", weights.abs(), slots.double().abs())
        once = out.numel() <= FEW and rounded_once(out, of_rows, self.top_k * EPS_OF_SUMS * sums)
        of_case = self.case.truths(self.rank, self.world, turn, ("out",))["out"]
        by_rows, by_case = compare(out, of_rows), compare(out, of_case)
        judged = ("its rows", by_rows, 1, once), ("the reference", by_case, 3, False)
        return [
            f"out is off by {one.error:.2e} by {by} {one.why}"
            for by, one, times, right in judged
            if not (right or one.within(times * limit))
        ]

    def _quantised(
        self, turn: int, values: torch.Tensor, scales: torch.Tensor, rows: int
    ) -> list[str]:
        """Say what is wrong with quantised outputs. A rounding to e4m3 is off by 1/16 of an element at
        most, or half the least step, and by half of that in the mean; few elements have another one."""
        wanted = self.case.truths(self.rank, self.world, turn, ("outputs",))["outputs"]
        got = dequantised(values[:rows], scales[:rows], torch.float64)
        off = float((got - wanted).norm()) / (float(wanted.norm()) or 1.0)
        of_sums = E4M3_SUMS * float(wanted.square().mean().sqrt())
        most = wanted.abs() / 16 + spread(scales[:rows].double(), *wanted.shape) * 2**-10 + of_sums
        each = bool(((got - wanted).abs() <= most).all())
        wrong = [] if off <= QUANTISED or each else [f"quantised outputs are off by {off:.2e}"]
        of_wanted = quantised_blocks(wanted)[1]
        if not torch.allclose(scales[:rows], of_wanted, rtol=1e-2):
            wrong.append("scales are not those of the largest elements")
        rest = values[rows:].view(torch.uint8)
        if rest.count_nonzero() or not bool((scales[rows:] == 1).all()):
            wrong.append("rows behind the last one are not zero, or have other scales than 1")
        return wrong

    def _relayed(self) -> bool:
        """Return whether a node's sums are rounded on their way to another."""
        if mkernel.world().identity.nodes == 1:
            return False
        plan = mkernel.plan(
            "moe_gemm_combine", dtype=self.shape.dtype, out_dtype=self.shape.dtype,
            partial_dtype=self.shape.dtype, **self.case.sizes,
        )  # fmt: skip
        return getattr(plan.schedule, "exchange", "direct") == "hierarchical"

    def rounded(self, name: str, got: torch.Tensor, turn: int) -> bool:
        """Return :func:`experts_right` of few different elements of ``outputs`` or ``out``."""
        return len(got.unique()) <= FEW and experts_right(
            self.moe, name, got, self.rank, self.world, turn
        )

    def _home(
        self, turn: int, between: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64 of the outputs as they should be, rounded once, or as they are ``between``: the
        own tokens' results, and the sums of their terms' absolute values."""
        case, shape = self.moe, self.shape
        kind = getattr(torch, shape.dtype)
        x = case._wide_x(self.rank, turn).double()
        ids = case._ids(self.rank, turn).long()
        weights = case._weights(self.rank, turn).float().double()
        wanted = torch.zeros(shape.tokens, shape.hidden, device=x.device).double()
        terms = torch.zeros_like(wanted)
        for owner in range(self.world):
            both = (
                case._wide_w(owner, self.world, turn),
                wide(self._w2(owner), self._w2_scale(owner)),
            )
            for expert, (w, w2) in enumerate(zip(*both, strict=True)):
                token, slot = (ids == owner * shape.experts + expert).nonzero(as_tuple=True)
                if len(token):
                    if between is None:
                        h = case._activate(x[token] @ w.double()).to(kind).double()
                    else:
                        h = between[slot, token].double()
                        if not shape.quantise:
                            h = dequantised(*quantised_blocks(h), torch.float64)
                    weighted = weights[token, slot, None] * (h @ w2.double())
                    wanted.index_add_(0, token, weighted)
                    terms.index_add_(0, token, weighted.abs())
        return wanted, terms


def in_bfloat16(rest: torch.Tensor) -> list[torch.Tensor]:
    """Return three terms of 8 bits each: the 24 of e4m3 times its scale, or all but the last few."""
    parts: list[torch.Tensor] = []
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts


def other_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return the same tokens in another order."""
    return x.view(torch.uint8).flip(0).view(x.dtype)


def drawn(chance: random.Random, world: int) -> Moe:
    """Draw any legal size and routing."""
    experts = chance.randint(1, 5)
    tokens = chance.choice((1, 2, 3, chance.randint(4, 40), chance.randint(40, 700)))
    top_k = chance.randint(1, min(8, experts * world))
    most = tokens * top_k * world
    return Moe(
        tokens=tokens,
        hidden=8 * chance.choice((1, 2, 9, chance.randint(1, 40))),
        features=8 * chance.choice((1, 3, 33, chance.randint(1, 80))),
        experts=experts,
        top_k=top_k,
        routing=chance.choice(ROUTINGS),
        dtype=chance.choice(("bfloat16", "float16")),
        layout=chance.choice(("row", "column")),
        capacity=chance.choice((0, 0, most, most + 13)),
        returns=chance.choice((None, "slots", "ranks")),
        ids=chance.choice(("int32", "int64")),
        activation=chance.choice((None, None, "silu_and_mul")),
        narrow=chance.choice((False, True)),
    )


def drawn_scaled(chance: random.Random, world: int) -> Moe:
    """Draw any legal size and routing of e4m3 experts."""
    shape = drawn(chance, world)
    step = chance.choice((BLOCK, 16)) if shape.activation is None else BLOCK
    features = step * chance.randint(1, 640 // step)
    return replace(
        shape,
        hidden=BLOCK * chance.choice((1, 2, 5, 9)),
        features=max(features, 64),
        scales=True,
        quantise=features % BLOCK == 0 and chance.random() < 0.6,
    )


def overflowed(shape: Moe) -> list[str]:
    """What is wrong where a routing has more rows than its capacity, eager, then in a graph; the world
    goes on."""
    small = replace(shape, routing="one_expert", capacity=shape.tokens)
    work, found = small.work(), list[str]()
    graph = torch.cuda.CUDAGraph()
    for how in ("eager", "captured"):
        if how == "eager":
            result = work.call()
        else:
            with torch.cuda.graph(graph):
                result = work.call()
            graph.replay()
            torch.cuda.synchronize()  # the world knows of no replays
        try:
            mkernel.synchronize()
            found.append(f"{how}: too many rows raised nothing")
        except CapacityExceeded as error:
            if error.rows != work.world * shape.tokens * shape.top_k:
                found.append(f"{how}: {error}")
        if result["outputs"].count_nonzero() or not bool(result["out"].isnan().all()):
            found.append(f"{how}: something was computed")
        if not bool(result["home"].isnan().all()):
            found.append(f"{how}: GEMM+combine computed something")
    return found + calls.judged([shape], 1)


def tables(shapes: Sequence[Moe], seed: int) -> list[str]:
    """What is wrong in the tables of dispatches: ids, rows and places; tiles have each row once, and
    rows of one expert."""
    found = []
    for shape in shapes:
        work = shape.work(seed)
        case = work.moe
        work.fill(0)
        sent = work.dispatched()
        words = sent.handle.routing.cpu()
        ids = torch.cat([case._ids(source, 0) for source in range(work.world)]).reshape(-1).cpu()
        places = len(ids)
        text = f"rank {work.rank} {shape}:"
        if not torch.equal(words[:places].long(), ids.long()):
            found.append(f"{text} the ids")
        source, token, slot, counts = (each.cpu() for each in case._rows(work.rank, work.world, 0))
        row_place = (source * shape.tokens + token) * work.top_k + slot
        if not torch.equal(words[2 * places : 2 * places + len(row_place)].long(), row_place):
            found.append(f"{text} the places of rows")
        place_row = torch.full((places,), -1)
        place_row[row_place] = torch.arange(len(row_place))
        if not torch.equal(words[places : 2 * places].long(), place_row):
            found.append(f"{text} the rows of places")
        if [len(row_place), 0, len(row_place)] != words[-4:-1].tolist():
            found.append(f"{text} {words[-4:-1].tolist()} rows, refused, height")
        expert_of = torch.arange(len(counts)).repeat_interleave(counts)
        seen, at = torch.zeros(len(row_place)), (3 * places + 3) // 4 * 4
        while (tile := words[at : at + 4].tolist())[0] >= 0:
            expert, first, rows, _ = tile
            here = slice(first, first + rows)
            seen[here] += 1
            if not 0 < rows <= 256 or not bool((expert_of[here] == expert).all()):
                found.append(f"{text} tile {tile}")
            at += 4
        if not bool((seen == 1).all()):
            found.append(f"{text} tiles have some rows not once")
    mkernel.synchronize()
    return found


FAULTS = ("expert", "tail", "slots", "stale", "weights", "halves")
ROWS_FAULTS = ("neighbour", "missing", "stale")
"""They are planted in a dispatch without a product."""
AGAIN_FAULTS = ("expert", "tail", "stale", "tables")
"""They are planted in a dispatch that uses a handle. ``tables`` are those of another routing.
``uncounted``, where a dispatch permutes, takes its rows for permuted from the start."""
WANTED_FAULTS = ("stale", "unsent")
"""They are planted in tokens that go where they are wanted."""
CROSSING_FAULTS = ("stale", "unsent")
"""They are planted in tokens that cross between nodes."""
RELAYED_FAULTS = ("unadded", "old weights")
"""They are planted in sums that are relayed, and in weights that are passed on for them."""


def _spoil(fault: str, words: torch.Tensor, work: Any) -> None:
    """Plant a fault in the tables that a routing left, or in what is multiplied by them."""
    shape = work.shape
    places = work.world * shape.tokens * shape.top_k
    tiles = (3 * places + 3) // 4 * 4
    if fault == "expert":  # the first tile's rows go to the next expert
        words[tiles] = (words[tiles] + 1) % shape.experts
    if fault == "tail":  # the last row of the first tile is dropped
        words[tiles + 2] -= 1
    if fault == "neighbour":  # a row lies where the next one belongs
        words[2 * places : 2 * places + 2] = words[2 * places : 2 * places + 2].flip(0)
    if fault == "missing":  # the last row is not there
        words[-4] -= 1
    if fault == "slots":  # rows of a token's slots change places
        rows = words[2 * places : 2 * places + int(words[-4])]
        slot = rows % shape.top_k
        rows += (slot + 1) % shape.top_k - slot
    if fault == "halves":  # gate and up change places
        w = work.given["w"]
        w.copy_(w.roll(shape.features, 2))
    if fault == "group":  # the first rows are said to be in order before they are
        most = places // 256 + 3 * shape.experts + 1  # tiles
        words[tiles + 4 * most] += 1
        words[-5] += 1


def planted(fault: str, work: Any) -> AbstractContextManager[object]:
    """Plant a fault in the backend. ``work``: a :class:`Work`, or ``rows_ranks``' one."""
    native, routed = backend.native(), list[torch.Tensor]()
    old, tables = work.given["x"].clone(), work.sent.handle.routing.clone()
    old_weights = work.given["topk_weights"].clone()
    nobody = torch.full_like(work.given["topk_ids"], -1, dtype=torch.int32)

    def moe_route(*given: Any) -> None:
        native.moe_route(*given)
        _spoil(fault, routed[-1], work)

    def push_whole(device: int, world: Any, rows: int, *rest: Any) -> None:
        native.push_whole(device, world, old.data_ptr() if fault == "stale" else rows, *rest)

    def wanted_tokens(**given: Any) -> Any:
        if fault == "stale":
            given["x"] = old.data_ptr()
        if fault == "unsent":  # as if no rank wanted any
            given["ids"] = nobody.data_ptr()
        return native.WantedTokens(**given)

    def crossing_tokens(**given: Any) -> Any:
        if fault == "stale":
            given["x"] = old.data_ptr()
        if fault == "unsent":
            given["ids"] = nobody.data_ptr()
        return native.CrossingTokens(**given)

    def moe_home(device: int, world: Any, home: Any, *rest: Any) -> None:
        if fault == "weights":  # of the token before
            work.given["topk_weights"].copy_(work.given["topk_weights"].roll(1, 0))
        if fault == "unadded" and rest[0] == native.HomeStep.relay_sums:
            return
        native.moe_home(device, world, home, *rest)

    def send_far(device: int, world: Any, rows: int, *rest: Any) -> None:
        of_call = old_weights.data_ptr() if fault == "old weights" else rows
        native.send_far(device, world, of_call, *rest)

    def dispatched_rows(**given: Any) -> Any:
        if fault == "tables":  # of the call before
            given["routing"] = tables.data_ptr()
        return native.DispatchedRows(**given)

    def grouped_product(**given: Any) -> Any:
        if fault == "tables" and given["tokens"]:
            given["routing"] = tables.data_ptr()
        return native.GroupedProduct(**given)

    def noted(self: Any, start: Any, call: Any, stream: int) -> Any:
        routed.append(call.tensors["routing"])
        return start(self, call, stream)

    stack = ExitStack()
    if fault == "uncounted":
        stack.enter_context(mock.patch.object(products.DispatchExecutor, "_permute_again"))
    for each in (products.DispatchExecutor, backend.RowsExecutor):
        stack.enter_context(mock.patch.object(each, "start", partialmethod(noted, each.start)))
    stack.enter_context(
        calls.native_with(
            backend, nodes, products, moe_route=moe_route, push_whole=push_whole,
            WantedTokens=wanted_tokens, CrossingTokens=crossing_tokens, send_far=send_far,
            moe_home=moe_home, DispatchedRows=dispatched_rows, GroupedProduct=grouped_product,
        )
    )  # fmt: skip
    return stack


def late_tokens(shape: Moe) -> list[str]:
    """What is wrong in a dispatch behind one that was refused while the first rank's tokens still
    travelled: these would come in the next call, whose tokens they say are there."""
    most = mkernel.world().size * shape.tokens * shape.top_k
    refused = replace(shape, routing="one_expert", capacity=1).work(1)
    work, native = replace(shape, capacity=most).work(2), backend.native()
    work.call()
    found = work.failure(0)
    mkernel.synchronize()

    def late(push: Any, *given: Any) -> None:
        if work.rank == 0:
            with torch.cuda.stream(torch.cuda.ExternalStream(given[-1])):
                spin(LATE_S)
        push(*given)

    work.fill(1)
    torch.cuda.synchronize()
    with calls.native_with(
        backend,
        products,
        push_whole=partial(late, native.push_whole),
        push_wanted=partial(late, native.push_wanted),
        put_tokens=partial(late, native.put_tokens),
    ):
        refused.dispatched()
        sent = work.dispatched()
    try:
        mkernel.synchronize()
        found.append("too many rows raised nothing")
    except CapacityExceeded:
        pass
    result = {"outputs": sent.outputs, "counts": sent.counts}
    return found + work.failure(1, result, "behind late tokens")


def trained(shape: Moe) -> list[str]:
    """Gradients that are off, by those of ``torch`` in float64 of the own tokens' results."""
    work = shape.work()
    given = {name: work.given[name].clone().requires_grad_() for name in ("x", "w", "topk_weights")}
    sent = mkernel.moe_dispatch_gemm(given["x"], work.given["topk_ids"], given["w"])
    out = mkernel.moe_combine(sent.outputs, sent.handle, given["topk_weights"])
    out.float().square().sum().backward()
    mkernel.synchronize()
    case = work.moe
    x = case._x(work.rank, 0).double().requires_grad_()
    weights = case._weights(work.rank, 0).float().double().requires_grad_()
    ids = case._ids(work.rank, 0).long()
    w = torch.cat([case._w(one, work.world, 0) for one in range(work.world)]).double()
    wanted = torch.einsum("tk,th,tkhi->ti", weights, x, w[ids])
    wanted.square().sum().backward()
    found = []
    for name, truth in (("x", x), ("topk_weights", weights)):
        got: Any = given[name].grad
        off = float((got.double() - truth.grad).norm() / truth.grad.norm())  # type: ignore[union-attr, operator]
        if not off < 2e-2:
            found.append(f"rank {work.rank}: the gradient of {name} is off by {off:.1e}")
    return found


class Trained(Work):
    """A layer of both ops with gradients."""

    names = ("x", "w", "w2", "topk_weights")

    def call(self) -> Tensors:
        """Make one step on the tensors where they lie; return the gradients."""
        given = {**self.given, "w2": self.w2}
        leaves = {name: given[name].detach().requires_grad_() for name in self.names}
        sent = mkernel.moe_dispatch_gemm(
            leaves["x"], given["topk_ids"], leaves["w"], capacity=self.shape.capacity or None,
            activation=self.shape.activation,
        )  # fmt: skip
        home = mkernel.moe_gemm_combine(
            sent.outputs, leaves["w2"], sent.handle, leaves["topk_weights"],
            returns=self.shape.returns,
        )  # fmt: skip
        out = home + mkernel.moe_combine(sent.outputs, sent.handle, leaves["topk_weights"]).sum(
            1, keepdim=True
        )
        found = torch.autograd.grad(out.float().square().sum(), tuple(leaves.values()))
        self.found = dict(zip(self.names, found, strict=True))
        return self.found

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        """Say which gradients are off, by torch's in float64 of all ranks' tokens."""
        case, ranks, leaves = self.moe, range(self.world), list[dict[str, torch.Tensor]]()
        for rank in ranks:
            drawn = (
                case._x(rank, turn), case._w(rank, self.world, turn), self._w2(rank),
                case._weights(rank, turn).float(),
            )  # fmt: skip
            each = (one.double().requires_grad_() for one in drawn)
            leaves.append(dict(zip(self.names, each, strict=True)))
        w, w2 = (torch.cat([leaves[rank][name] for rank in ranks]) for name in ("w", "w2"))
        loss = torch.zeros((), dtype=torch.float64, device=w.device)
        for rank in ranks:
            x, weights = leaves[rank]["x"], leaves[rank]["topk_weights"]
            ids, parts = case._ids(rank, turn).long(), list[torch.Tensor]()
            for expert in range(len(w)):
                token, slot = (ids == expert).nonzero(as_tuple=True)
                h = case._activate(x[token] @ w[expert])
                rows = weights[token, slot, None] * (h @ w2[expert] + h.sum(1, keepdim=True))
                parts.append(torch.zeros_like(x).index_add(0, token, rows))
            loss = loss + torch.stack(parts).sum(0).square().sum()
        own = tuple(leaves[self.rank].values())
        wrong = []
        for name, truth in zip(self.names, torch.autograd.grad(loss, own), strict=True):
            off = float((found[name].double() - truth).norm() / (float(truth.norm()) or 1.0))
            if not off < 2e-2:
                wrong.append(f"the gradient of {name} is off by {off:.1e}")
        return wrong


def composed(shapes: Sequence[Moe]) -> list[str]:
    """Gradients that are off, or whose bits are others in a second step; with a capacity those of
    replays too."""
    failures = []
    for shape in shapes:
        work = Trained(shape, shape.work().moe)
        for turn in range(2):
            work.fill(turn)
            first = work.call()
            failures += work.failure(turn, first)
            poison.freed([(each.shape, each.dtype) for each in first.values()], calls.DEVICE)
            again = work.call()
            failures += [
                f"rank {work.rank} {shape}: other bits of {name}"
                for name, one in first.items()
                if not torch.equal(one, again[name])
            ]
        if not shape.capacity:
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work.call()
        for turn in range(2, 4):
            work.fill(turn, captured)
            graph.replay()
            failures += work.failure(turn, captured, "replayed")
    mkernel.synchronize()
    return failures
