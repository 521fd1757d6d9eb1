"""Mixture of experts: any routing, rows in their documented order, weights applied at home."""

from __future__ import annotations

import torch

import mkernel
from mkernel.cases import Case
from mkernel.cases.moe import ROUTINGS
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge, each_case, judge_calls, where
from mkernel.ops import moe as op


def routing(subject: AcceleratorSubject) -> None:
    """Every kind of routing with every top-k from 1 to 8."""
    ops = subject.claimed("moe_dispatch_gemm", "moe_combine")
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


def expert_order(subject: AcceleratorSubject) -> None:
    """Rows that carry their number through unit matrices come out by expert, source, token, slot."""
    subject.claimed("moe_dispatch_gemm")
    for world in subject.usual_worlds():
        subject.judge(rank_expert_order, subject.dtype(), subject.aligned(16), world=world)


def rank_expert_order(dtype: str, width: int) -> list[str]:
    """Each expert adds its own mark: w[e] turns the third number of a row into e + 1."""
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
    """Weights that differ by slot, of both signs, zero among them, change the result as they should."""
    subject.claimed("moe_combine")
    for world in subject.usual_worlds():
        subject.judge(rank_weights, subject.dtype(), subject.aligned(16), world=world)


def rank_weights(dtype: str, width: int) -> list[str]:
    """Unit matrices: y is the token itself, so out[t] = x[t] times the sum of its weights."""
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
        got = op.moe_combine(sent.outputs, sent.handle, weights.to(device), out_dtype=kind)
        wanted = x.cpu().double() * weights.double().sum(1, keepdim=True)
        if not torch.equal(got.cpu().double(), wanted):
            found.append(
                f"moe_combine of top-{top_k}, {where()}: the result is not the sum of rows times "
                "their weights"
            )
    return found


def handles(subject: AcceleratorSubject) -> None:
    """An older dispatch's handle still brings its own rows home, twice."""
    subject.claimed("moe_combine")
    world = subject.largest()
    case = typical(subject, "moe_dispatch_gemm", world[0] * world[1])
    subject.judge(rank_handles, case, world=world)


def rank_handles(case: Case) -> list[str]:
    """Dispatch three times, then combine in another order, each twice."""
    world, judge = mkernel.world(), Judge(case)
    dtype = getattr(torch, case.out_dtype)
    sent = []
    for iteration in range(3):
        given = judge.inputs(iteration)
        done = op.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"], out_dtype=dtype)
        sent.append((done, given["topk_weights"]))
    found = []
    for iteration in (1, 0, 2, 0):
        done, weights = sent[iteration]
        got = op.moe_combine(done.outputs, done.handle, weights, out_dtype=dtype).cpu().double()
        wanted = judge.truth(iteration)["out"]
        if not torch.allclose(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max())):
            found.append(
                f"moe_combine, rank {world.rank}: the handle of dispatch {iteration} of 3 brings "
                "home something else"
            )
    return found


CHECKS = (
    Check(
        "routing", "any routing works: empty experts, one expert, duplicates, top-k 1 to 8", routing
    ),
    Check("expert-order", "rows come by expert, source rank, token, slot", expert_order),
    Check("combine-weights", "the combine weighs every slot with its own weight", combine_weights),
    Check("handles", "handles stay valid, in any order, any number of times", handles),
)
