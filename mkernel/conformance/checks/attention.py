"""Checks of ring attention: causality, grouped queries, scale, log-sum-exp, large scores and packed
documents, in every layout that is claimed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject, blame
from mkernel.conformance.check import Check
from mkernel.conformance.checks.bits import same_bits
from mkernel.conformance.grid import attended, typical, with_tensors
from mkernel.conformance.ranks import Judge, each_case, judge_calls
from mkernel.harness.outcome import CheckSkipped
from mkernel.plan.invariance import Invariant

_OP = "ring_attention"

DRAWN = 216
"""The number of shapes that a thorough run draws; a quick one draws a sixth."""


def _judge(subject: AcceleratorSubject, variants: list[dict[str, int]]) -> None:
    subject.claimed(_OP)
    wanted = subject.worlds((1, 3), *([] if subject.quick else [(1, 1), subject.largest()]))
    for world in _worlds(subject, *wanted):
        size = world[0] * world[1]
        cases = [
            typical(
                subject,
                _OP,
                size,
                {**sizes, "sequence": sizes.get("sequence", 24) * size},
                options={} if layout == "heads" else {"lies": layout},
            )
            for sizes in variants
            for layout in subject.capabilities.attention_layouts
        ]
        subject.judge(each_case, judge_calls, cases, 2, world=world)


def _worlds(subject: AcceleratorSubject, *wanted: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Select the worlds in which the op is claimed; if there is none, one of one node."""
    found = [each for each in wanted if subject.capabilities.provides(_OP, each[0])]
    return tuple(dict.fromkeys(found)) or subject.worlds((1, 2))


def causal(subject: AcceleratorSubject) -> None:
    """Split short and longer sequences into zigzag pieces, with chunks that cross the diagonal."""
    _judge(subject, [{"causal": True, "sequence": rows} for rows in (2, 10, 48)])


def gqa(subject: AcceleratorSubject) -> None:
    """Check 1, 2, 3 and 6 heads of keys for 6 of queries."""
    _judge(subject, [{"heads": 6, "kv_heads": kv_heads} for kv_heads in (1, 2, 3, 6)])


def lse(subject: AcceleratorSubject) -> None:
    """Check scales other than the default, causal or not."""
    subject.claimed(_OP)
    for world in _worlds(subject, *subject.usual_worlds()):
        size = world[0] * world[1]
        cases = [
            typical(subject, _OP, size, {"causal": causal}, options={"scale": scale})
            for scale in (0.05, 1.0, -0.3)
            for causal in (False, True)
        ]
        subject.judge(each_case, judge_calls, cases, 1, world=world)


# ---- large scores --------------------------------------------------------------------------------

_LARGE = 1e4


def extreme_scores(subject: AcceleratorSubject) -> None:
    """Check scores around 10,000 of one sign and of both, all alike, and one that towers over the
    others."""
    subject.claimed(_OP)
    for world in _worlds(subject, *subject.usual_worlds()):
        size = world[0] * world[1]
        cases = [
            _extreme(typical(subject, _OP, size, {"causal": causal}, dtype=dtype), kind)
            for dtype in subject.capabilities.dtypes
            for causal in (False, True)
            for kind in _EXTREMES
        ]
        subject.judge(each_case, judge_calls, cases, 1, world=world)


_EXTREMES = ("large", "negative", "both signs", "alike", "one")


def _extreme(case: Case, kind: str) -> Case:
    """Give the case queries and keys of whole numbers, so that float32 holds their products, the
    scores. The first column adds 100 times 100 or its negative to a score, the others add some
    units."""
    batch, heads, kv, length, width = (
        case.sizes[n] for n in ("batch", "heads", "kv_heads", "sequence", "head_dim")
    )
    random = torch.Generator().manual_seed(case.seed)
    q = torch.randint(-1, 2, (batch, heads, length, width), generator=random).float()
    k = torch.randint(-1, 2, (batch, kv, length, width), generator=random).float()
    v = torch.randn(batch, kv, length, width, generator=random)
    root = _LARGE**0.5
    q[..., 0], k[..., 0] = root, root
    if kind == "negative":
        k[..., 0] = -root
    elif kind == "both signs":
        k[..., 0] *= 2 * torch.randint(2, (batch, kv, length), generator=random) - 1
    elif kind == "alike":
        k[..., 1:] = 0
    elif kind == "one":  # another position in each sequence; causal: earlier ones do not see it
        k[..., 0] = 0
        for sequence in range(batch):
            k[sequence, :, (2 * sequence + 1) * length // (2 * batch), 0] = root
    made = with_tensors(case, q=q, k=k, v=v)
    return made.with_(options={**made.options, "scale": 1.0})


# ---- not-a-number --------------------------------------------------------------------------------


def with_nonfinite(case: Case) -> list[Case]:
    """Make cases with NaN in a query, which only its result shows; with NaN in a key, which the
    results that see it show; and with NaN and infinity in values, which all results show in these
    columns."""
    batch, heads, kv, length, width = (
        case.sizes[n] for n in ("batch", "heads", "kv_heads", "sequence", "head_dim")
    )
    random = torch.Generator().manual_seed(case.seed)
    q = torch.randn(batch, heads, length, width, generator=random)
    k, v = (torch.randn(batch, kv, length, width, generator=random) for _ in "kv")
    nan, infinity = float("nan"), float("inf")
    bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
    bad_q[0, -1, length // 3, 1] = nan
    bad_k[0, 0, 2 * length // 3, 2] = nan
    bad_v[0, 0, length // 5, 0], bad_v[-1, -1, -1, -1] = nan, -infinity
    causal = case.with_(sizes={**case.sizes, "causal": True})
    return (
        [with_tensors(each, q=bad_q, k=k, v=v) for each in (case, causal)]
        + [with_tensors(each, q=q, k=bad_k, v=v) for each in (case, causal)]
        + [with_tensors(case, q=q, k=k, v=bad_v)]
    )


# ---- documents -----------------------------------------------------------------------------------


def documents(subject: AcceleratorSubject) -> None:
    """Check documents that begin at the seams of pieces, and one position before and after them;
    documents of one position, and empty ones; one document alone."""
    subject.claimed(_OP)
    if not subject.capabilities.documents:
        raise CheckSkipped("not claimed: packed documents")
    for world in _worlds(subject, *subject.usual_worlds()):
        size = world[0] * world[1]
        cases = []
        for causal in (False, True):
            plain = typical(subject, _OP, size, {"causal": causal})
            length = plain.sizes["sequence"]
            seams = [length // (2 * size) * piece for piece in range(1, 2 * size)]
            each = [
                (0, *(seam + by for seam in seams), length) for by in (-1, 0, 1)
            ]  # fmt: skip
            each += [(0, 1, 1, 3, length - 1, length), (0, length), tuple(range(length + 1))]
            cases += [
                plain.with_(options={"cu_seqlens": bounds, "lies": layout})
                for bounds in each
                for layout in subject.capabilities.attention_layouts
            ]
        subject.judge(each_case, judge_calls, cases, 1, world=world)


# ---- invariant results ---------------------------------------------------------------------------

_BLOCKS, _FIRST, _SOME = 256, 100, slice(37, None, 50)
"""The positions of a rank, which are whole blocks where pieces of causal sequences have to be, of the
largest world."""


class _Variant(NamedTuple):
    """A call that must give some rows [B, :, S] the bits that they have in another one.

    Attributes:
        like: the name of that one, the first of this name. batch, rows: which rows of it. moved: by how
            many positions they stand earlier here.
    """

    like: str
    name: str
    case: Case
    batch: slice = slice(None)
    rows: slice = slice(None)
    moved: int = 0


def _variants(subject: AcceleratorSubject, size: int, length: int) -> Iterator[_Variant]:
    """Yield calls on the same whole tensors: in chunks, a sequence alone, beside other rows, and with a
    document in another place."""
    for causal in (False, True):
        wanted: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 1}
        wanted |= {"sequence": length, "causal": causal}
        plain = typical(subject, _OP, size, wanted)
        drawn = plain.with_(sizes={**plain.sizes, "causal": False}).inputs(0, 1, 0)
        like = f"causal={causal}"
        whole = _promising(plain, drawn)
        other = {**drawn, "q": 3 * drawn["q"].flip(2)}
        other["q"][:, :, _SOME] = drawn["q"][:, :, _SOME]
        yield _Variant(like, "whole", whole)
        yield _Variant(like, "chunks of 37", whole.with_(chunk=37))
        alone = _promising(plain, {name: each[1:] for name, each in drawn.items()})
        yield _Variant(like, "a sequence alone", alone, batch=slice(1, None))
        yield _Variant(like, "beside other rows", _promising(plain, other), rows=_SOME)
        if subject.capabilities.invariant_documents:
            turned = {name: each.roll(-_FIRST, 2) for name, each in drawn.items()}
            for bounds, given, moved in (
                ((0, _FIRST, length), drawn, 0),
                ((0, length - _FIRST, length), turned, _FIRST),
            ):
                placed = _promising(plain, given, cu_seqlens=bounds)
                rows = slice(_FIRST, None) if moved else slice(None)
                yield _Variant(f"{like}, documents", f"at {moved}", placed, rows=rows, moved=moved)


def _promising(case: Case, whole: Mapping[str, torch.Tensor], **options: Any) -> Case:
    """Return a call on these whole tensors, with invariant results."""
    made = with_tensors(case, **whole)
    sizes = {**case.sizes, "batch": len(whole["q"])}
    return made.with_(sizes=sizes, options={**made.options, "invariant": Invariant(), **options})


def split(subject: AcceleratorSubject) -> None:
    """Split the same sequences over several worlds, in chunks, beside other rows, and place a document
    elsewhere. The log-sum-exp, which is float32, tells in which order blocks were merged."""
    if _OP not in subject.capabilities.invariant_ops:
        raise CheckSkipped(f"not claimed: invariant results of {_OP} (invariant_ops)")
    first: dict[str, dict[str, torch.Tensor]] = {}
    found: list[str] = []
    worlds = subject.worlds((1, 1), (1, 2), *(() if subject.quick else ((1, 4), (2, 2))))
    length = _BLOCKS * max(nodes * each for nodes, each in worlds)
    for world in worlds:
        if not subject.capabilities.provides(_OP, world[0]):
            continue
        size = world[0] * world[1]
        variants = list(_variants(subject, size, length))
        ranks = subject.launch(rank_bits, [each.case for each in variants], world=world)
        for each, *parts in zip(variants, *ranks, strict=True):
            for name in ("out", "lse"):
                whole = torch.cat([part[name] for part in parts], 2)
                at = torch.cat([each.case.positions(rank, size) for rank in range(size)])
                result = torch.empty_like(whole).index_copy_(2, at, whole).roll(each.moved, 2)
                wanted = first.setdefault(each.like, {}).setdefault(name, result)
                if not same_bits(wanted[each.batch, :, each.rows], result[:, :, each.rows]):
                    found.append(f"{each.like} on {world[0]}x{world[1]}, {each.name}: other {name}")
    blame(found)


def rank_bits(cases: list[Case]) -> list[dict[str, torch.Tensor]]:
    """Return this rank's results."""
    found = [case.run(Judge(case).inputs(0)).outputs for case in cases]
    return [{name: each.cpu().clone() for name, each in one.items()} for one in found]


# ---- draws ---------------------------------------------------------------------------------------


def drawn(subject: AcceleratorSubject) -> None:
    """Draw shapes, dtypes, layouts, scales, chunks and documents at random; each shape is called
    twice."""
    subject.claimed(_OP)
    for world in _worlds(subject, subject.largest()):
        count = DRAWN // (6 if subject.quick else 1)
        cases = list(_drawn(subject, world[0] * world[1], count))
        subject.judge(each_case, judge_calls, cases, 2, world=world)


def _drawn(subject: AcceleratorSubject, world_size: int, count: int) -> Iterator[Case]:
    pick = random.Random(f"{subject.seed} attention {world_size}")
    claims = subject.capabilities
    for number in range(count):
        dtype = pick.choice(claims.dtypes)
        step = subject.step(dtype)
        kv_heads, causal = pick.randint(1, 3), pick.random() < 0.6
        rows = pick.choice([1, 2, pick.randint(3, 20), pick.randint(21, 64)])
        sizes = {
            "batch": pick.randint(1, 3),
            "heads": kv_heads * pick.choice([1, 2, 3, 4]),
            "kv_heads": kv_heads,
            "sequence": rows * world_size * (2 if causal else 1),
            "head_dim": step * pick.randint(1, max(1, 96 // step)),
            "causal": causal,
        }
        sizes = attended(subject, sizes, world_size)
        options: dict[str, Any] = {"lies": pick.choice(claims.attention_layouts)}
        if pick.random() < 0.5:
            options["scale"] = pick.choice([-1, 1]) * pick.uniform(0.02, 1.0)
        if claims.documents and pick.random() < 0.5:
            length = sizes["sequence"]
            inner = sorted(pick.randint(0, length) for _ in range(pick.randint(1, 6)))
            options["cu_seqlens"] = (0, *inner, length)
        chunk = pick.choice([None, None, 1, 2, 5])
        case = typical(subject, _OP, world_size, sizes, dtype=dtype, chunk=chunk, options=options)
        yield case.with_(seed=subject.seed + number)


CHECKS = (
    Check("causal", "no position sees a later one, and every earlier one counts", causal),
    Check("gqa", "query head h uses key head h * Hkv // Hq", gqa),
    Check("lse", "the log-sum-exp is that of the scaled scores", lse),
    Check(
        "extreme-scores", "scores of 10,000 cost no precision, and none overflows", extreme_scores
    ),
    Check("documents", "of packed documents each position sees its own alone", documents),
    Check(
        "split-attention",
        "invariant results: ranks, chunks, other rows and places of documents change no row's bits",
        split,
    ),
    Check("drawn-attention", "attention of hundreds of random shapes gives the truth", drawn),
)
