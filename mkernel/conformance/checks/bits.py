"""Checks that results are deterministic, bit for bit, as far as is promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch

from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.grid import GEMMS, judge_typical, typical, with_tensors
from mkernel.conformance.ranks import EXPERTS, Judge, describe, seconds_apart, where
from mkernel.harness.outcome import CheckSkipped
from mkernel.plan.invariance import Invariant


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


_SEGMENTS, _OF_SEGMENT, _COLUMNS, _RANDOM_ROWS = 8, 32, 72, 132
_LARGE = 2.0**14
_SUM = Invariant(_SEGMENTS, "float16")
"""A float16 sum, which loses terms up to four beside ``_LARGE``."""
_PROMISES = (*GEMMS, "all_reduce", *EXPERTS)


def telling_leaves(leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [rows, leaves], whose rows' sums tell in which tree they were added, and these sums.

    A row has a large term, the same with the other sign, and ones. Along the way to the node where the
    two meet, each loses the ones that it is added to. So what is left are the ones outside of that
    node, in float64 all of them, and any other tree has another such node for some pair.
    """
    pairs = list(combinations(range(leaves), 2))
    rows = torch.ones(len(pairs), leaves)
    for row, (one, other) in zip(rows, pairs, strict=True):
        row[one], row[other] = _LARGE, -_LARGE
    left = [float(leaves - (1 << (one ^ other).bit_length())) for one, other in pairs]
    return rows, torch.tensor(left)


def _claimed(subject: AcceleratorSubject) -> tuple[str, ...]:
    """Return the ops whose invariant results are claimed and checked here. CheckSkipped if there are
    none."""
    found = tuple(op for op in _PROMISES if op in subject.capabilities.invariant_ops)
    if not found:
        raise CheckSkipped("no op's invariant results are claimed (invariant_ops)")
    return found


class _Variant(NamedTuple):
    """A call, or several, that must give rows the bits that they have in another: which rows each
    passes, in chunks of which size, and in which way results of experts come home."""

    name: str
    calls: tuple[torch.Tensor, ...]
    chunk: int | None = None
    way: str | None = None


class _Promise:
    """One op with invariant results: whole tensors, and any rows of them as cases.

    In those of experts a token goes to each of as many as there are segments, in an order of its own,
    and its weights are the leaves, of results of one.
    """

    def __init__(self, subject: AcceleratorSubject, op: str, world_size: int) -> None:
        random = torch.Generator().manual_seed(subject.seed)
        self._subject, self._op = subject, op
        leaves, self.known = telling_leaves(world_size if op == "all_reduce" else _SEGMENTS)
        self.rows = len(leaves) + _RANDOM_ROWS + (-len(leaves) % 4)
        self._columns = subject.aligned(_COLUMNS)
        more = self.rows - len(leaves)
        if op == "all_reduce":
            others = torch.randn(world_size, more, self._columns, generator=random)
            spread = leaves.t()[:, :, None].expand(-1, -1, self._columns)
            self._x = torch.cat((spread, others), 1)
            return
        if op in EXPERTS:
            self._experts(leaves, random)
            return
        k = _SEGMENTS * _OF_SEGMENT
        self._a, self._b = (
            torch.randn(size, generator=random) for size in ((self.rows, k), (k, self._columns))
        )
        firsts = torch.arange(0, k, _OF_SEGMENT)
        self._a[: len(leaves)] = 0.0
        large = leaves.abs() == _LARGE
        self._a[: len(leaves), firsts] = torch.where(large, leaves / _LARGE**0.5, 0.0)
        self._a[: len(leaves), firsts + 1] = torch.where(large, 0.0, 1.0)
        self._b[firsts], self._b[firsts + 1] = _LARGE**0.5, 1.0

    def _experts(self, leaves: torch.Tensor, random: torch.Generator) -> None:
        def some(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=random)

        places, each = (self.rows, _SEGMENTS), self._columns
        ids = torch.rand(places, generator=random).argsort(1)
        of_experts = some(*places)
        of_experts[: len(leaves)] = leaves
        self._tokens = {"x": some(self.rows, each), "h": some(*places, each)}
        for rows in self._tokens.values():
            rows[: len(leaves)] = 0.0
            rows[: len(leaves), ..., 0] = 1.0
        self._tokens |= {"topk_ids": ids, "topk_weights": of_experts.gather(1, ids)}
        self._w = {name: some(_SEGMENTS, each, each) for name in ("w", "w2")}
        for w in self._w.values():
            w[:, 0] = 1.0

    def _experts_case(self, rows: torch.Tensor, variant: _Variant, world_size: int) -> Case:
        sizes = {"tokens": len(rows) // world_size, "experts": _SEGMENTS, "top_k": _SEGMENTS}
        sizes |= dict.fromkeys(("hidden", "features"), self._columns)
        case = typical(self._subject, self._op, world_size, sizes, chunk=variant.chunk)
        given = {name: each[rows] for name, each in self._tokens.items()} | self._w
        kind = getattr(torch, case.dtype)
        exact = ("topk_ids", "topk_weights")
        given |= {name: given[name].to(kind) for name in given if name not in exact}
        options = {"tensors": given, "invariant": _SUM}
        return case.with_(options={**options, "returns": variant.way} if variant.way else options)

    def case(self, rows: torch.Tensor, variant: _Variant, world_size: int) -> Case:
        """Return a call on these rows."""
        if self._op in EXPERTS:
            return self._experts_case(rows, variant, world_size)
        sizes = {"m": len(rows), "n": self._columns}
        if self._op != "all_reduce":
            gathers = self._op == "all_gather_gemm"
            sizes["k"] = len(self._b) if gathers else len(self._b) // world_size
        case = typical(self._subject, self._op, world_size, sizes, chunk=variant.chunk)
        if self._op == "all_reduce":
            made = with_tensors(case, x=torch.cat([each[rows] for each in self._x]))
        else:
            made = with_tensors(case, a=self._a[rows], b=self._b)
        return made.with_(options={**made.options, "invariant": _SUM})

    def results(
        self, variants: Sequence[_Variant], world: tuple[int, int]
    ) -> Iterator[tuple[_Variant, torch.Tensor]]:
        """Yield the whole result of each variant's rows."""
        size = world[0] * world[1]
        cases = [self.case(rows, each, size) for each in variants for rows in each.calls]
        found = self._subject.launch(rank_results, cases, world=world)
        calls = iter(zip(*found, strict=True))
        for each in variants:
            yield each, torch.cat([self._whole(rows, next(calls)) for rows in each.calls])

    def _whole(self, rows: torch.Tensor, parts: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return the result of a call's rows from what ranks have of it, with those of its experts."""
        if self._op not in (*EXPERTS, "gemm_reduce_scatter"):
            return parts[0]["out"]
        out = torch.cat([part["out"] for part in parts])
        if self._op != "moe_dispatch_gemm":
            return out
        by_expert = torch.cat([part["outputs"] for part in parts])
        by_place = torch.empty_like(by_expert)
        by_place[self._tokens["topk_ids"][rows].flatten().argsort(stable=True)] = by_expert
        return torch.cat((out, by_place.view(len(rows), -1)), 1)

    def wrong(
        self, variants: Sequence[_Variant], world: tuple[int, int], first: torch.Tensor | None
    ) -> tuple[list[str], torch.Tensor]:
        """Return in which variants rows have other bits than in ``first``, or in the first variant,
        which has all rows in order, and that one's result."""
        found = []
        for each, result in self.results(variants, world):
            first = result if first is None else first
            where = f"{self._op} on {world[0]}x{world[1]}, {each.name}"
            if not same_bits(first[torch.cat(each.calls)], result):
                found.append(f"{where}: rows have other bits")
        assert first is not None
        known = self.known[:, None].expand(-1, self._columns)
        adds = "moe_combine" if self._op == "moe_dispatch_gemm" else self._op
        adds_so = adds in self._subject.capabilities.invariant_ops and adds != "all_gather_gemm"
        sums = first[: len(known), : self._columns]
        if adds_so and not torch.equal(sums.float(), known):
            found.append(f"{self._op} on {world[0]}x{world[1]}: not added by the tree")
        return found, first


def rank_results(cases: Sequence[Case]) -> list[dict[str, torch.Tensor]]:
    """Return this rank's results."""
    return [_results(case, 0) for case in cases]


def chunk_invariance(subject: AcceleratorSubject) -> None:
    """Cut calls with invariant results into other chunks, change their rows' order and number, and
    split them into several calls."""
    world, *_ = subject.worlds((2, 2), (1, 4), (1, 2), (1, 1))
    found: list[str] = []
    for op in _claimed(subject):
        if subject.capabilities.provides(op, world[0]):
            promise = _Promise(subject, op, world[0] * world[1])
            every = torch.arange(promise.rows)
            mixed = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))]
            variants = [
                _Variant("all rows", (every,)),
                *(_Variant(f"chunks of {size}", (every,), size) for size in (1, 2, 3, 7, 64)),
                _Variant("rows in another order", (mixed,)),
                _Variant("few rows at a time", (mixed[:4], mixed[4:24], mixed[24:88], mixed[88:])),
            ]
            found += promise.wrong(variants, world, None)[0]
        if found and subject.first_find:
            break
    blame(found)


def split_invariance(subject: AcceleratorSubject) -> None:
    """Give worlds of other sizes and nodes, in each way home, the same whole tensors. Invariant results
    have no library path."""
    found: list[str] = []
    worlds = subject.worlds((1, 1), (1, 2), (1, 4), (2, 2), (4, 1))
    claims = subject.capabilities
    for op in _claimed(subject):
        if op == "all_reduce":  # whose terms are the ranks' own
            continue
        promise, first = _Promise(subject, op, 1), None
        every = torch.arange(promise.rows)
        for world in [one for one in worlds if claims.provides(op, one[0])]:
            ways: Sequence[str | None] = (None,)
            if op == "moe_gemm_combine":
                ways = claims.ways_home(world[0])
            variants = [_Variant(f"home {way or 'as planned'}", (every,), way=way) for way in ways]
            wrong, first = promise.wrong(variants, world, first)
            found += wrong
        if found and subject.first_find:
            break
    blame(found)


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
    Check(
        "chunk-invariance",
        "invariant results: chunks, other rows and their order do not change a row's bits",
        chunk_invariance,
    ),
    Check(
        "split-invariance",
        "invariant results: ranks, nodes and ways home do not change bits, which are the tree's",
        split_invariance,
    ),
    Check("replicas", "all-reduced results are the same bits on every rank", replicas),
)
