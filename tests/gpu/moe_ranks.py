"""What rank processes on GPUs run of MoE: calls on fresh routings, judged in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from few_elements import experts_right
from hopper_ranks import LATE_S, captured, deciding, other_bits, spin

import mkernel
from mkernel.backends.accelerators.hopper import moe as backend
from mkernel.backends.accelerators.hopper import moe_tuning
from mkernel.cases import case_of
from mkernel.cases.comparison import FEW
from mkernel.cases.moe import ROUTINGS, MoeDispatchCase
from mkernel.errors import ArgumentError, CapacityExceeded, ShapeError
from mkernel.ops import moe as moe_ops
from mkernel.ops.moe_gemm_combine import gemm_combine
from mkernel.plan.model import Activation
from mkernel.plan.pipeline import Returns


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

    def work(self, seed: int) -> Work:
        """Its tensors on this rank."""
        return Work(self, seed)


class Work:
    """A size's tensors on this rank, refilled in place for every turn: x and w for the dispatch, w2 for
    what follows, of which ``h`` is the dispatch's own outputs."""

    def __init__(self, shape: Moe, seed: int = 0, device: str = "cuda") -> None:
        world = mkernel.world()
        self.rank, self.world, self.shape = world.rank, world.size, shape
        sizes = {
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "features": shape.features,
            "experts": shape.experts * world.size,
            "top_k": min(shape.top_k, shape.experts * world.size),
        }
        self.top_k = sizes["top_k"]
        options = {
            "routing": shape.routing, "id_dtype": shape.ids, "activation": shape.activation
        }  # fmt: skip
        made: Any = case_of("moe_dispatch_gemm")
        self.case: MoeDispatchCase = made(
            sizes, shape.dtype, shape.dtype, shape.layout, seed=seed, options=options, device=device
        )
        self.given = self.case.inputs(self.rank, self.world, 0)
        self.w2 = self._w2(self.rank)

    def _w2(self, rank: int) -> torch.Tensor:
        """As small as a model's, by a power of two: products with gated ``h`` of eight slots that one
        expert has would leave float16's range, where there is nothing to compare."""
        shape = (self.shape.experts, self.shape.features, self.shape.hidden)
        return self.case.normal(0, 9, rank, *shape) * 2.0 ** -round(math.log2(shape[1]) / 2)

    def fill(self, turn: int) -> None:
        """Fresh inputs where the last ones lie."""
        for name, tensor in self.case.inputs(self.rank, self.world, turn).items():
            self.given[name].copy_(tensor)

    def call(self) -> dict[str, torch.Tensor]:
        """The three public ops."""
        given, shape = self.given, self.shape
        sent = mkernel.moe_dispatch_gemm(
            given["x"], given["topk_ids"], given["w"], capacity=shape.capacity or None,
            activation=shape.activation,
        )  # fmt: skip
        weights = given["topk_weights"]
        self.found = {"outputs": sent.outputs, "counts": sent.counts}
        self.found["out"] = mkernel.moe_combine(sent.outputs, sent.handle, weights)
        self.found["home"] = mkernel.moe_gemm_combine(
            sent.outputs, self.w2, sent.handle, weights, returns=shape.returns,
            partial_dtype=getattr(torch, shape.dtype) if shape.narrow else torch.float32,
        )  # fmt: skip
        return self.found

    def failure(self, turn: int) -> list[str]:
        """Of the last call."""
        return self.failures(turn, self.found)

    def failures(self, turn: int, found: dict[str, torch.Tensor], what: str = "") -> list[str]:
        """Empty where all results are right."""
        rows = int(found["counts"].sum())
        judged = {name: found[name] for name in ("counts", "out") if name in found}
        judged["outputs"] = found["outputs"][:rows]
        limits = self.case.tolerances()
        compared = self.case.compared(judged, self.rank, self.world, turn, tuple(judged))
        text = f"rank {self.rank} {self.shape} turn {turn} {what}:"
        wrong = [
            f"{text} {name} is off by {one.error:.2e} {one.why}"
            for name, one in compared.items()
            if not one.error <= limits.get(name, 0.0)
            and not (name in limits and not one.why and self.is_rounded(name, judged[name], turn))
        ]
        if found["outputs"][rows:].count_nonzero():
            wrong.append(f"{text} rows behind the last one are not zero")
        if "home" not in found:
            return wrong
        # Narrow results, ranks' sums of them, then the sum of these are rounded, each as much.
        roundings = 3 if self.shape.narrow else 1
        wanted, terms = self._home(turn)
        error = (found["home"].double() - wanted).abs()
        off = float(error.norm()) / (float(wanted.norm()) or 1.0)
        # Limits are of norms: of few elements each may be off by the most that its roundings make.
        half_step = torch.finfo(found["home"].dtype).eps / 2
        few = error.numel() <= FEW and bool((error <= roundings * half_step * terms).all())
        if not (off <= limits["out"] * roundings**0.5 or few):
            wrong.append(f"{text} GEMM+combine is off by {off:.2e}")
        return wrong

    def is_rounded(self, name: str, got: torch.Tensor, turn: int) -> bool:
        """:func:`experts_right` of few different elements of ``outputs`` or ``out``."""
        return len(got.unique()) <= FEW and experts_right(
            self.case, name, got, self.rank, self.world, turn
        )

    def _home(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64 of the outputs as they should be, rounded once: the own tokens' results, and the
        sums of their terms' absolute values."""
        case, shape = self.case, self.shape
        kind = getattr(torch, shape.dtype)
        x = case._x(self.rank, turn).double()
        ids = case._ids(self.rank, turn).long()
        weights = case._weights(self.rank, turn).float().double()
        wanted = torch.zeros(shape.tokens, shape.hidden, device=x.device).double()
        terms = torch.zeros_like(wanted)
        for owner in range(self.world):
            w, w2 = case._w(owner, self.world, turn).double(), self._w2(owner).double()
            for expert in range(shape.experts):
                token, slot = (ids == owner * shape.experts + expert).nonzero(as_tuple=True)
                if len(token):
                    h = case._activate(x[token] @ w[expert]).to(kind).double()
                    weighted = weights[token, slot, None] * (h @ w2[expert])
                    wanted.index_add_(0, token, weighted)
                    terms.index_add_(0, token, weighted.abs())
        return wanted, terms


def permuted(fn: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """What ``fn`` returns where plans are those of many tokens: dispatches copy their rows into order
    first; second products have wide tiles."""
    with deciding(moe_tuning, permutes=True, reads_weights=False):
        return fn(*arguments)


def early(rows: int, fn: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """What ``fn`` returns where all multiples of so many own rows come first."""
    with deciding(moe_tuning, early_rows=rows, early_tiles=1 << 20):
        return fn(*arguments)


def wanted(fn: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """What ``fn`` returns where each token goes once to each rank that has an expert of it."""
    with deciding(moe_tuning, push_blocks=(8, ())):
        return fn(*arguments)


def judged(shapes: Sequence[Moe], seed: int) -> list[str]:
    """Failures of two calls each."""
    found = []
    for shape in shapes:
        work = Work(shape, seed)
        for turn in range(2):
            work.fill(turn)
            found += work.failures(turn, work.call())
    mkernel.synchronize()
    return found


def drawn(chance: random.Random, world: int) -> Moe:
    """Any legal size and routing."""
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


def queued(shapes: Sequence[Moe], rounds: int, seed: int) -> list[str]:
    """Failures of calls whose results are looked at in the end, ranks late by turns."""
    works = [Work(shape, seed) for shape in shapes]
    kept = []
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % work.world == work.rank:
            spin(LATE_S / 10)
        kept.append((work, turn, work.call()))
    mkernel.synchronize()
    return [text for work, turn, found in kept for text in work.failures(turn, found, "queued")]


def replayed(shapes: Sequence[Moe], replays: int) -> list[str]:
    """Failures of a captured graph of all shapes' calls, with another routing in every replay, and
    plain calls between."""
    works = [Work(shape) for shape in shapes]
    graph, results = captured([work.call for work in works])
    found = []
    for turn in range(1, replays + 1):
        for work, outputs in zip(works, results, strict=True):
            work.fill(turn)
            for tensor in outputs.values():
                tensor.fill_(7)
        if turn % (works[0].world + 1) == works[0].rank:
            spin(LATE_S / 4)
        graph.replay()
        for work, outputs in zip(works, results, strict=True):
            found += work.failures(turn, outputs, "replayed")
        if turn % 10 == 0:
            found += works[0].failures(turn, works[0].call(), "between replays")
    mkernel.synchronize()
    return found


def repeated(shape: Moe, times: int) -> list[str]:
    """What differs between calls on the same inputs."""
    return other_bits(Work(shape).call, times)


def overflowed(shape: Moe) -> list[str]:
    """What is wrong where a routing has more rows than its capacity, eager, then in a graph; the world
    goes on."""
    small = replace(shape, routing="one_expert", capacity=shape.tokens)
    work, found = Work(small), []
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
    return found + judged([shape], 1)


def tables(shapes: Sequence[Moe], seed: int) -> list[str]:
    """What is wrong in the tables of dispatches: ids, rows and places; tiles have each row once, and
    rows of one expert."""
    found = []
    for shape in shapes:
        work = Work(shape, seed)
        case, given = work.case, work.given
        work.fill(0)
        sent = mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"])
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
WANTED_FAULTS = ("stale", "unsent")
"""Of tokens that go where they are wanted."""


def faulty(shape: Moe, fault: str) -> list[str]:
    """Failures with a fault in the backend, after a right call."""
    work = Work(shape)
    assert not work.failures(0, work.call())
    native = backend.native()
    old = work.given["x"].clone()
    nobody = torch.full_like(work.given["topk_ids"], -1, dtype=torch.int32)

    class Native:
        """The native module, with the fault."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def moe_route(self, *given: Any) -> None:
            native.moe_route(*given)
            words = routed[-1]
            places = work.world * shape.tokens * shape.top_k
            tiles = (3 * places + 3) // 4 * 4
            if fault == "expert":  # the first tile's rows go to the next expert
                words[tiles] = (words[tiles] + 1) % shape.experts
            if fault == "tail":  # the last row of the first tile is dropped
                words[tiles + 2] -= 1
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

        def push_rows(self, device: int, world: Any, rows: int, *rest: Any) -> None:
            given = old.data_ptr() if fault == "stale" else rows
            native.push_rows(device, world, given, *rest)

        def WantedTokens(self, **given: Any) -> Any:
            if fault == "stale":
                given["x"] = old.data_ptr()
            if fault == "unsent":  # as if no rank wanted any
                given["ids"] = nobody.data_ptr()
            return native.WantedTokens(**given)

        def moe_home(self, device: int, world: Any, home: Any, *rest: Any) -> None:
            if fault == "weights":  # of the token before
                work.given["topk_weights"].copy_(work.given["topk_weights"].roll(1, 0))
            native.moe_home(device, world, home, *rest)

    routed: list[torch.Tensor] = []
    start = backend.DispatchExecutor.start

    def noted(self: Any, call: Any, stream: int) -> Any:
        routed.append(call.tensors["routing"])
        return start(self, call, stream)

    backend.DispatchExecutor.start = noted  # type: ignore[method-assign]
    backend.native = Native  # type: ignore[assignment]
    work.fill(1)
    result = work.call()
    mkernel.synchronize()
    return work.failures(1, result)


def late_tokens(shape: Moe) -> list[str]:
    """What is wrong in a dispatch behind one that was refused while the first rank's tokens still
    travelled: these would come in the next call, whose tokens they say are there."""
    first = replace(shape, routing="one_expert", capacity=1)
    most = mkernel.world().size * shape.tokens * shape.top_k
    refused, work = Work(first, 1), Work(replace(shape, capacity=most), 2)
    found = work.failures(0, work.call())
    mkernel.synchronize()
    native = backend.native()

    class Native:
        """The native module, whose tokens leave late."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def push_rows(self, *given: Any) -> None:
            late(given[-1])
            native.push_rows(*given)

        def push_wanted(self, *given: Any) -> None:
            late(given[-1])
            native.push_wanted(*given)

    def late(stream: int) -> None:
        if work.rank == 0:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                spin(LATE_S)

    def dispatched(one: Work) -> Any:
        given = one.given
        return mkernel.moe_dispatch_gemm(
            given["x"], given["topk_ids"], given["w"], capacity=one.shape.capacity
        )

    work.fill(1)
    torch.cuda.synchronize()
    with mock.patch.object(backend, "native", Native):
        dispatched(refused)
        sent = dispatched(work)
    try:
        mkernel.synchronize()
        found.append("too many rows raised nothing")
    except CapacityExceeded:
        pass
    result = {"outputs": sent.outputs, "counts": sent.counts}
    return found + work.failures(1, result, "behind late tokens")


def other_rows(shape: Moe) -> list[str]:
    """What a combine says of rows that are fewer than the dispatch gave."""
    work = Work(shape)
    given = work.given
    sent = mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"])
    try:
        gemm_combine(sent.outputs[:-1], work.w2, sent.handle, given["topk_weights"])
    except ShapeError as error:
        return [str(error)]
    return []


def foreign(shape: Moe) -> list[str]:
    """What combines say of the handle of a dispatch in another world; this one's is used twice."""
    work, found = shape.work(0), []
    given, weights = work.given, work.given["topk_weights"]
    own = mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"])
    with mock.patch.object(moe_ops, "mark", return_value=5):
        other = mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"])
    for call in (
        lambda sent: mkernel.moe_combine(sent.outputs, sent.handle, weights),
        lambda sent: mkernel.moe_gemm_combine(sent.outputs, work.w2, sent.handle, weights),
    ):
        first, again = call(own), call(own)
        assert torch.equal(first, again)
        try:
            call(other)
            found.append("a handle of another world was taken")
        except ArgumentError as error:
            if "of another world" not in str(error):
                found.append(str(error))
    mkernel.synchronize()
    return found


def trained(shape: Moe) -> list[str]:
    """Gradients that are off, by those of ``torch`` in float64 of the own tokens' results."""
    work = Work(shape)
    given = {name: work.given[name].clone().requires_grad_() for name in ("x", "w", "topk_weights")}
    sent = mkernel.moe_dispatch_gemm(given["x"], work.given["topk_ids"], given["w"])
    out = mkernel.moe_combine(sent.outputs, sent.handle, given["topk_weights"])
    out.float().square().sum().backward()
    mkernel.synchronize()
    case = work.case
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
