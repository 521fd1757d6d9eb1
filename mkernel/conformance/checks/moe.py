"""Checks of mixture of experts: any routing, rows in their documented order, weights applied at
home."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mkernel
from mkernel.cases import Case
from mkernel.cases.moe import ROUTINGS
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.checks.bits import same_bits
from mkernel.conformance.grid import MOE, typical
from mkernel.conformance.ranks import Judge, describe, each_case, judge_calls, where
from mkernel.harness.outcome import CheckSkipped
from mkernel.ops import moe as op
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.plan.ops import COMPANIONS

DRAWN = 240
"""The number of routings that a thorough run draws, of all ops together; a quick one draws a
sixth."""


def routing(subject: AcceleratorSubject) -> None:
    """Check every kind of routing with every top-k from 1 to 8."""
    ops = subject.claimed(*MOE)
    for world in subject.usual_worlds():
        size = world[0] * world[1]
        cases = [
            typical(
                subject, name, size, {"top_k": top_k, "experts": 8 * size},
                options={"routing": kind},
            )
            for name in ops
            for kind in ROUTINGS
            for top_k in ((1, 2, 8) if subject.quick else range(1, 9))
        ]  # fmt: skip
        subject.judge(each_case, judge_calls, cases, 2, world=world)


def drawn_routings(subject: AcceleratorSubject) -> None:
    """Draw routings, sizes, capacities and ways home at random."""
    ops = subject.claimed(*MOE)
    count = DRAWN // (6 if subject.quick else 1)
    for world in (subject.largest(),):
        cases = list(_drawn(subject, ops, world, count // _CALLS))
        subject.judge(each_case, rank_drawn, cases, world=world)


_CALLS = 5
"""The number of routings that are drawn for one shape."""


def _drawn(
    subject: AcceleratorSubject, ops: Sequence[str], world: tuple[int, int], count: int
) -> Iterator[Case]:
    nodes, world_size = world[0], world[0] * world[1]
    pick = random.Random(f"{subject.seed} routings {world_size}")
    step = subject.step()
    for number in range(count):
        name = ops[number % len(ops)]
        experts = world_size * pick.randint(1, 4)
        sizes = {
            "tokens": pick.choice([1, 2, pick.randint(3, 20), pick.randint(21, 80)]),
            "hidden": step * pick.randint(1, 6),
            "features": step * pick.randint(1, 6),
            "experts": experts,
            "top_k": pick.randint(1, min(8, experts)),
        }
        options: dict[str, Any] = {
            "routing": pick.choice(ROUTINGS),
            "id_dtype": pick.choice(["int32", "int64"]),
        }
        if name == "moe_gemm_combine":
            options["returns"] = pick.choice([None, *subject.capabilities.ways_home(nodes)])
        layout = pick.choice(subject.capabilities.b_layouts)
        made = typical(subject, name, world_size, sizes, layout=layout, options=options)
        yield made.with_(seed=subject.seed + number)


def rank_drawn(case: Case) -> Iterator[str]:
    """Draw some routings of a shape; repeat the first one, whose bits must be the same."""
    judge = Judge(case)
    first = None
    for iteration in range(_CALLS):
        outcome = case.run(judge.inputs(iteration))
        yield from judge.problems(outcome, iteration)
        first = first or {name: each.clone() for name, each in outcome.outputs.items()}
    again = case.run(judge.inputs(0)).outputs
    for name, tensor in (first or {}).items():
        if not same_bits(tensor, again[name]):
            yield f"{describe(case)}, {where()}: {name} differs in bits in the repetition"


def activations(subject: AcceleratorSubject) -> None:
    """Check every activation, dtype and layout, and results that leave partial tiles."""
    claims = subject.capabilities
    subject.claimed("moe_dispatch_gemm")
    if not claims.activations:
        raise CheckSkipped("no activations are claimed")
    wide = {"features": subject.aligned(136)}
    for world in subject.usual_worlds():
        size = world[0] * world[1]
        cases = [
            typical(
                subject, "moe_dispatch_gemm", size, sizes, dtype=dtype, out_dtype=out_dtype,
                layout=layout, options={"activation": activation, "routing": kind},
            )
            for activation in claims.activations
            for sizes, kind in (({}, "uniform"), (wide, "some_empty"))
            for dtype, out_dtype in claims.dtype_pairs()
            for layout in claims.b_layouts
        ]  # fmt: skip
        subject.judge(each_case, judge_calls, cases, 1 if subject.quick else 2, world=world)


def expert_order(subject: AcceleratorSubject) -> None:
    """Check that rows that carry their number through unit matrices come out by expert, source,
    token, slot."""
    subject.claimed("moe_dispatch_gemm")
    for world in subject.usual_worlds():
        subject.judge(rank_expert_order, subject.dtype(), subject.aligned(16), world=world)


def rank_expert_order(dtype: str, width: int) -> list[str]:
    """Have each expert add its own mark: w[e] turns the third number of a row into e + 1."""
    world = mkernel.world()
    tokens, top_k, each = 17, 2, 3
    experts = each * world.size
    kind, device = getattr(torch, dtype), world.accelerator.device
    every = [
        torch.randint(experts, (tokens, top_k), generator=torch.Generator().manual_seed(rank))
        for rank in range(world.size)
    ]
    x = torch.zeros(tokens, width)
    x[:, 0], x[:, 1], x[:, 2] = torch.arange(tokens), world.rank, 1
    w = torch.eye(width).repeat(each, 1, 1)
    w[:, 2, 2] = torch.arange(each) + world.rank * each + 1
    sent = op.moe_dispatch_gemm(
        x.to(kind).to(device), every[world.rank].to(device), w.to(kind).to(device)
    )
    wanted = [
        (token, source, expert + 1)
        for expert in range(world.rank * each, (world.rank + 1) * each)
        for source, ids in enumerate(every)
        for token in range(tokens)
        for slot in range(top_k)
        if int(ids[token, slot]) == expert
    ]
    got = [tuple(int(v) for v in row[:3].tolist()) for row in sent.outputs.cpu().float()]
    if got == wanted:
        return []
    text = f"moe_dispatch_gemm {tokens} tokens of {world.size} ranks, {where()}"
    if sorted(got) == sorted(wanted):
        return [f"{text}: the rows are right, but not in the order of expert, source, token, slot"]
    if len(got) != len(wanted):
        return [f"{text}: {len(got)} rows instead of {len(wanted)}"]
    at = next(i for i, row in enumerate(got) if row != wanted[i])
    return [
        f"{text}: row {at} is (token, source, expert) {_named(got[at])} instead of "
        f"{_named(wanted[at])}"
    ]


def _named(row: tuple[int, ...]) -> str:
    return f"({row[0]}, {row[1]}, {row[2] - 1})"


def combine_weights(subject: AcceleratorSubject) -> None:
    """Check that weights that differ by slot, of both signs and some zero, change the result as
    they should."""
    ops = subject.claimed(*COMPANIONS)
    for world in subject.usual_worlds():
        subject.judge(rank_weights, ops, subject.dtype(), subject.aligned(16), world=world)


def _home(
    name: str, sent: mkernel.MoeDispatch, weights: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Combine a dispatch's outputs; GEMM+combine multiplies them by unit matrices first."""
    if name == "moe_combine":
        return op.moe_combine(sent.outputs, sent.handle, weights, **options)
    width = sent.outputs.shape[1]
    w2 = torch.eye(width, dtype=sent.outputs.dtype, device=weights.device)
    w2 = w2.repeat(len(sent.counts), 1, 1)
    return moe_gemm_combine(sent.outputs, w2, sent.handle, weights, **options)


def _ways(name: str) -> Sequence[dict[str, Any]]:
    """List the options with which an op's results may come home."""
    if name == "moe_combine":
        return ({},)
    world = mkernel.world()
    ways = world.engine(name).claims.ways_home(world.identity.nodes)
    return tuple({"returns": one, "partial_dtype": torch.float32} for one in ways)


def rank_weights(ops: Sequence[str], dtype: str, width: int) -> list[str]:
    """Pass tokens through unit matrices: y is the token itself, so out[t] = x[t] times the sum of
    its weights."""
    world = mkernel.world()
    tokens, found = 11, []
    kind, device = getattr(torch, dtype), world.accelerator.device
    for top_k in (1, 2):
        random = torch.Generator().manual_seed(7 * world.rank + top_k)
        x = torch.randint(1, 5, (tokens, width), generator=random).to(kind).to(device)
        ids = torch.randint(2 * world.size, (tokens, top_k), generator=random).to(device)
        w = torch.eye(width, dtype=kind).repeat(2, 1, 1).to(device)
        sent = op.moe_dispatch_gemm(x, ids, w, out_dtype=kind)
        # The sign by row and slot marks which slot a row came from.
        marks = 2.0 ** torch.arange(top_k)
        weights = torch.randint(-2, 3, (tokens, top_k), generator=random) * marks
        wanted = x.cpu().double() * weights.double().sum(1, keepdim=True)
        for name in ops:
            for way in _ways(name):
                got = _home(name, sent, weights.to(device), out_dtype=kind, **way)
                if not torch.equal(got.cpu().double(), wanted):
                    found.append(
                        f"{name} of top-{top_k} {way}, {where()}: the result is not the sum of rows "
                        "times their weights"
                    )
    return found


def combine_order(subject: AcceleratorSubject) -> None:
    """Make sums that float32 holds exactly in the documented order, and in no other."""
    ops = subject.claimed(*COMPANIONS)
    for world in subject.worlds((1, 2), (1, 3)):
        subject.judge(rank_order_of_sums, ops, subject.dtype(), subject.aligned(16), world=world)


def rank_order_of_sums(ops: Sequence[str], dtype: str, width: int) -> list[str]:
    """Add 2^25 x - 2^25 x + x = x; in another order the small term is lost in the large ones. Slots
    go to one rank; or to all in the order of ranks, which then is that of slots too."""
    world, found = mkernel.world(), []
    kind, device, tokens = getattr(torch, dtype), world.accelerator.device, 9
    chance = torch.Generator().manual_seed(world.rank)
    x = torch.randint(1, 8, (tokens, width), generator=chance).to(kind).to(device)
    w = torch.eye(width, dtype=kind).repeat(3, 1, 1).to(device)
    weights = torch.tensor([2.0**25, -(2.0**25), 1.0]).repeat(tokens, 1).to(device)
    one_rank = 3 * ((torch.arange(tokens) + world.rank) % world.size)[:, None] + torch.arange(3)
    across = (torch.arange(3) * world.size // 3 * 3 + torch.arange(3)).repeat(tokens, 1)
    for ids in (one_rank, across):
        sent = op.moe_dispatch_gemm(x, ids.to(device), w, out_dtype=kind)
        for name in ops:
            for way in _ways(name):
                got = _home(name, sent, weights, out_dtype=kind, **way)
                if not torch.equal(got, x):
                    found.append(
                        f"{name} {way}, {where()}: 2^25 x - 2^25 x + x is not x, of experts "
                        f"{ids[0].tolist()}: what is added is in another order"
                    )
    return found


def handles(subject: AcceleratorSubject) -> None:
    """Keep calls in flight with handles of their own: an older dispatch's handle must still bring
    its own rows home, twice."""
    ops = subject.claimed(*COMPANIONS)
    world = subject.largest()
    case = typical(subject, "moe_dispatch_gemm", world[0] * world[1])
    subject.judge(rank_handles, ops, case, world=world)


def rank_handles(ops: Sequence[str], case: Case) -> list[str]:
    """Dispatch three times, then combine in another order, each twice."""
    world, judge = mkernel.world(), Judge(case)
    dtype = getattr(torch, case.out_dtype)
    sent = []
    for iteration in range(3):
        given = judge.inputs(iteration)
        done = op.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"], out_dtype=dtype)
        sent.append((done, given["topk_weights"]))
    found = []
    calls = [(name, iteration) for name in ops for iteration in (1, 0, 2, 0)]
    home = []  # nothing is looked at, or waited for, before all have been called
    for name, iteration in calls:
        done, weights = sent[iteration]
        home.append(_home(name, done, weights, out_dtype=dtype))
    for (name, iteration), out in zip(calls, home, strict=True):
        got, wanted = out.cpu().double(), judge.truth(iteration)["out"]
        if not torch.allclose(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max())):
            found.append(
                f"{name}, rank {world.rank}: the handle of dispatch {iteration} of 3 brings "
                "home something else"
            )
    return found


CHECKS = (
    Check(
        "routing", "any routing works: empty experts, one expert, duplicates, top-k 1 to 8", routing
    ),
    Check(
        "drawn-routings",
        "routings drawn at random give the truth, and the same bits again",
        drawn_routings,
    ),
    Check("activations", "products of [gate, up] are activated, and rounded once", activations),
    Check("expert-order", "rows come by expert, source rank, token, slot", expert_order),
    Check("combine-weights", "the combine weighs every slot with its own weight", combine_weights),
    Check("combine-order", "the combine adds in the order of slots, or of ranks", combine_order),
    Check("handles", "handles stay valid, in any order, any number of times", handles),
)
