"""Checks that results are deterministic, bit for bit, as far as is promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import (
    judge_typical,
    typical,
    typical_of_each,
    whole_mnk,
    with_tensors,
)
from mkernel.conformance.ranks import Judge, describe, each_case, seconds_apart, where
from mkernel.harness.outcome import CheckSkipped


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are equal in every bit, NaN and signed zeros included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().view(torch.uint8) if one.dim() else one,
        other.contiguous().view(torch.uint8) if other.dim() else other,
    )


def _results(case: Case, iteration: int) -> dict[str, torch.Tensor]:
    outcome = case.run(Judge(case).inputs(iteration))
    return {name: tensor.cpu().clone() for name, tensor in outcome.outputs.items()}


def determinism(subject: AcceleratorSubject) -> None:
    """Repeat the same call, with ranks apart in another way and another plan's calls in between."""
    calls = 4 if subject.quick else 12
    judge_typical(subject, rank_repeats, calls, worlds=[subject.largest()])


def rank_repeats(case: Case, calls: int) -> Iterator[str]:
    """Compare every repetition with the first."""
    other = case.with_(seed=case.seed + 1)
    first = _results(case, 0)
    for number in range(1, calls):
        _results(other, number)
        seconds_apart(case, number, 0.01)
        yield from _unequal(case, first, _results(case, 0), f"repetition {number}")


def _unequal(
    case: Case, first: dict[str, torch.Tensor], again: dict[str, torch.Tensor], which: str
) -> list[str]:
    return [
        f"{describe(case)}, {where()}: {name} differs in bits in {which}"
        for name in first
        if not same_bits(first[name], again[name])
    ]


def _claimed(subject: AcceleratorSubject) -> tuple[str, ...]:
    """Return the ops whose invariant results the backend claims. CheckSkipped if there are none."""
    if not subject.capabilities.invariant_ops:
        raise CheckSkipped("no op's invariant results are claimed (invariant_ops)")
    return subject.capabilities.invariant_ops


def chunk_invariance(subject: AcceleratorSubject) -> None:
    """Cut the same call into other chunks."""
    claimed = _claimed(subject)
    world = subject.largest()
    cases = [case for case in typical_of_each(subject, world) if case.op in claimed]
    subject.judge(each_case, rank_chunks, cases, (1, 2, 3, 7, 64), world=world)


def rank_chunks(case: Case, chunks: Sequence[int]) -> Iterator[str]:
    """Compare every chunk size with the planner's choice."""
    first = _results(case, 0)
    for chunk in chunks:
        again = _results(case.with_(chunk=chunk), 0)
        yield from _unequal(case, first, again, f"chunks of {chunk}")


def split_invariance(subject: AcceleratorSubject) -> None:
    """Run AllGather+GEMM in every world, and the sums in every split of four ranks."""
    claimed = _claimed(subject)
    found: list[str] = []
    compared = False
    for op in subject.claimed("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        if op not in claimed:
            continue
        wanted = [(1, 4), (2, 2), (4, 1)]
        if op == "all_gather_gemm":
            wanted = [(1, 1), (1, 2), *wanted]
        worlds = subject.worlds(*wanted)
        if len(worlds) < 2:
            continue
        compared = True
        paths = ["library"] if op in subject.capabilities.library_ops else []
        paths += ["fused"] if op not in subject.capabilities.only_library_ops else []
        for case in [_given(typical(subject, op, 4), path) for path in paths]:
            kept: dict[tuple[int, int], torch.Tensor] = {}
            for world in worlds:
                parts = subject.launch(rank_result, case, world=world)
                scattered = op == "gemm_reduce_scatter"
                kept[world] = torch.cat(parts) if scattered else parts[0]
            first, *others = kept
            found += [
                f"{describe(case)}: bits differ between {first[0]}x{first[1]} and "
                f"{world[0]}x{world[1]}"
                for world in others
                if not same_bits(kept[first], kept[world])
            ]
    blame(found)
    if not compared:
        raise CheckSkipped("needs two worlds of one size to compare; one fits this machine")


def _given(case: Case, path: str) -> Case:
    """Put the case on one path, with whole tensors that do not depend on the world."""
    m, n, k = whole_mnk(case, 4)
    random = torch.Generator().manual_seed(case.seed)
    a, b = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
    given = with_tensors(case, a=a, b=b)
    return given.with_(options={**given.options, "path": path})


def rank_result(case: Case) -> torch.Tensor:
    """Return the result of this rank."""
    return _results(case, 0)["out"]


def replicas(subject: AcceleratorSubject) -> None:
    """Check that every rank holds the same bits of an all-reduced result."""
    ops = subject.claimed("gemm_all_reduce", "all_reduce")
    worlds = subject.worlds((1, 3), *([] if subject.quick else [subject.largest()]))
    found = []
    for world, op in product(worlds, ops):
        if not subject.capabilities.provides(op, world[0]):
            continue
        case = typical(subject, op, world[0] * world[1])
        results = subject.launch(rank_replicas, case, 3, world=world)
        found += [
            f"{describe(case)} on {world[0]}x{world[1]}, call {call}: rank {rank} holds other bits "
            "than rank 0"
            for rank, mine in enumerate(results)
            for call, result in enumerate(mine)
            if not same_bits(results[0][call], result)
        ]
    blame(found)


def rank_replicas(case: Case, calls: int) -> list[torch.Tensor]:
    """Return copies of this rank's results of some calls."""
    return [_results(case, iteration)["out"] for iteration in range(calls)]


CHECKS = (
    Check("determinism", "the same call gives the same bits, whatever ran in between", determinism),
    Check("chunk-invariance", "every chunk size gives the same bits", chunk_invariance),
    Check("split-invariance", "every split into nodes gives the same bits", split_invariance),
    Check("replicas", "all-reduced results are the same bits on every rank", replicas),
)
