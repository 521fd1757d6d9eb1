"""The cases that checks call: one typical case of an op, a grid of odd ones, and random draws.

Sizes keep to what the backend claims: rows of matrices are multiples of its alignment, M of the
world's size where the op cuts M, causal sequences of twice the world's size; sequences and widths of
heads in attention are the next that it takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from mkernel.cases import Case, case_of
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.ranks import each_case
from mkernel.plan.arguments import WITHOUT_B
from mkernel.plan.model import AttentionShape, DtypeName, sums_of
from mkernel.plan.ops import COMPANIONS
from mkernel.plan.shapes import size_names

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
DISPATCHES = ("moe_dispatch", "moe_dispatch_gemm")
MOE = (*DISPATCHES, *COMPANIONS)

_CLASSES = (
    ("all_gather_gemm",),
    ("gemm_reduce_scatter", "gemm_all_reduce", "all_reduce"),
    (*COMPANIONS, "moe_dispatch", "moe_dispatch_gemm"),
    ("ring_attention",),
)
"""Ops that move bytes alike, the quickest first; a combine has a dispatch before it."""
_Sizes = Mapping[str, Any]


def typical(
    subject: AcceleratorSubject,
    op: str,
    world_size: int,
    sizes: _Sizes = MappingProxyType({}),
    *,
    dtype: DtypeName | None = None,
    out_dtype: DtypeName | None = None,
    layout: str | None = None,
    chunk: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Case:
    """Make a small case of an op with several chunks and a partial tile; ``sizes`` replaces some of
    its sizes."""
    given = dtype or subject.dtype()
    result = out_dtype or subject.out_dtype(given)
    step = subject.step(given, result)
    plain: _Sizes
    if op in GEMMS:
        rows = 160 if op == "gemm_all_reduce" else 160 * world_size
        plain = {"m": rows, "n": _up(72, step), "k": _up(264, step)}
    elif op == "all_reduce":
        plain = {"m": 160, "n": _up(72, step)}
    elif op in MOE:
        plain = {
            "tokens": 24,
            "hidden": _up(48, step),
            "features": _up(40, step),
            "experts": 3 * world_size,
            "top_k": min(3, 3 * world_size),
        }
    else:
        plain = {
            "batch": 2,
            "heads": 4,
            "kv_heads": 2,
            "sequence": 24 * world_size,
            "head_dim": _up(32, step),
        }
    wanted = {**plain, **sizes}
    if op in MOE:
        wanted = taken(op, wanted)
    if op == "ring_attention":
        wanted = attended(subject, wanted, world_size)
    return _case(subject, op, wanted, given, result, layout, chunk=chunk, options=options)


def taken(op: str, sizes: _Sizes) -> dict[str, Any]:
    """Return those of the sizes of MoE that an op takes."""
    return {name: size for name, size in sizes.items() if name in size_names(op)}


def small_ones(subject: AcceleratorSubject, world: tuple[int, int]) -> list[Case]:
    """Make a small case of every op that is claimed in a world; if quick, of one op of each
    class."""
    claimed = subject.claimed_in(world)
    of_class = [[op for op in each if op in claimed] for each in _CLASSES]
    chosen = [ops[0] for ops in of_class if ops] if subject.quick else claimed
    return [_small(subject, op, world[0] * world[1]) for op in chosen]


def _small(subject: AcceleratorSubject, op: str, world_size: int) -> Case:
    """Make a case of two rows, tokens or positions a rank."""
    step, rows = subject.step(), 2 * world_size
    sizes: dict[str, int]
    if op in GEMMS:
        sizes = {"m": rows, "n": step, "k": 2 * step}
    elif op == "all_reduce":
        sizes = {"m": rows, "n": step}
    elif op == "ring_attention":
        sizes = {"batch": 1, "sequence": rows}
    else:
        sizes = {"tokens": 2, "features": step, "experts": world_size, "top_k": 2}
    return typical(subject, op, world_size, sizes)


def attended(subject: AcceleratorSubject, sizes: _Sizes, world_size: int) -> dict[str, Any]:
    """Adapt sizes of attention to what the backend takes: the next sequence and width, or the
    widest."""
    claims, width = subject.capabilities, sizes["head_dim"]
    widths = sorted(claims.head_dims)
    wider = [one for one in widths if one >= width] or widths[-1:] or [width]
    shape = AttentionShape(**{**sizes, "head_dim": wider[0]})
    length = sizes["sequence"]
    if claims.positions > 1:
        length = _up(length, claims.sequence_step(shape, world_size))
    return {**sizes, "head_dim": wider[0], "sequence": length}


def typical_of_each(subject: AcceleratorSubject, world: tuple[int, int]) -> list[Case]:
    """Make the typical case of every op that is claimed."""
    return [typical(subject, op, world[0] * world[1]) for op in subject.claimed_in(world)]


def wider(subject: AcceleratorSubject, case: Case, steps: int = 1) -> Case:
    """Widen the case by ``steps`` more steps of columns. If attention claims only some widths, its
    case gets more sequences instead."""
    few = case.op == "ring_attention" and subject.capabilities.head_dims
    names: dict[str, str] = {
        "ring_attention": "batch" if few else "head_dim",
        **dict.fromkeys(MOE, "features"),
        "moe_dispatch": "hidden",
    }
    name, by = names.get(case.op, "n"), steps if few else steps * subject.step()
    return case.with_(sizes={**case.sizes, name: case.sizes[name] + by})


def judge_typical(
    subject: AcceleratorSubject,
    look: Callable[..., Iterable[str]],
    *arguments: Any,
    worlds: Sequence[tuple[int, int]],
) -> None:
    """Have the ranks of some worlds call ``look(case, *arguments)`` on the typical cases."""
    for world in worlds:
        cases = typical_of_each(subject, world)
        subject.judge(each_case, look, cases, *arguments, world=world)


def in_turn(cases: Iterable[Case]) -> list[Case]:
    """Order cases so that ops take turns: what is wrong with one op alone is found early."""
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    return [case for turn in zip_longest(*by_op.values()) for case in turn if case is not None]


def with_tensors(case: Case, **tensors: torch.Tensor) -> Case:
    """Give the case whole tensors of these values, in its dtype."""
    kind = getattr(torch, case.dtype)
    return case.with_(options={"tensors": {name: each.to(kind) for name, each in tensors.items()}})


def whole_mnk(case: Case, world_size: int) -> tuple[int, int, int]:
    """Return M, N and K of the whole tensors of a GEMM op's case."""
    m, n, k = (case.sizes[name] for name in "mnk")
    return m, n, k if case.op == "all_gather_gemm" else k * world_size


def grid(subject: AcceleratorSubject, op: str, world: tuple[int, int]) -> Iterator[Case]:
    """Yield odd cases: one row, one step, partial tiles, more than one tile; narrow and wide."""
    step, world_size = subject.step(), world[0] * world[1]
    if op in GEMMS:
        for rows, n, k in (
            (1, step, step),
            (7, 5 * step, 3 * step),
            (129, _up(264, step), _up(520, step)),
            (130, step, _up(1032, step)),
            (5, _up(1024, step), step),
        ):
            m = rows if op == "gemm_all_reduce" else rows * world_size
            yield typical(subject, op, world_size, {"m": m, "n": n, "k": k})
    elif op == "all_reduce":
        for rows, n in ((1, step), (7, 5 * step), (129, _up(264, step)), (5, _up(1024, step))):
            yield typical(subject, op, world_size, {"m": rows, "n": n})
        yield typical(
            subject, op, world_size, out_dtype=subject.dtype(), options={"in_place": True}
        )
    elif op in MOE:
        for tokens, hidden, features, each, top_k in (
            (1, step, step, 1, 1),
            (7, 3 * step, 5 * step, 2, 2),
            (130, _up(72, step), _up(136, step), 4, 4),
        ):
            sizes = {"tokens": tokens, "features": features, "experts": each * world_size}
            sizes |= {"hidden": hidden, "top_k": min(top_k, each * world_size)}
            yield typical(subject, op, world_size, sizes)
        if op in DISPATCHES and subject.capabilities.takes_routing(world[0]):
            for kind in ("uniform", "padded"):
                options = {"handle": True, "routing": kind}
                yield typical(subject, op, world_size, options=options)
    else:
        for batch, heads, kv_heads, rows, width in (
            (1, 1, 1, 1, step),
            (1, 3, 1, 7, 3 * step),
            (2, 4, 2, 33, _up(64, step)),
        ):
            sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
            sizes["sequence"] = rows * world_size
            yield typical(subject, op, world_size, sizes)
        yield typical(subject, op, world_size, {"sequence": 10 * world_size, "causal": True})


def draws(subject: AcceleratorSubject, op: str, world_size: int, count: int) -> Iterator[Case]:
    """Draw random shapes, dtypes, layouts and chunk sizes from the subject's seed."""
    pick = random.Random(f"{subject.seed} {op} {world_size}")
    claims = subject.capabilities
    for number in range(count):
        dtype, out_dtype = pick.choice(claims.dtype_pairs())
        step = subject.step(dtype, out_dtype)
        sizes = _draw(op, world_size, step, pick)
        if op == "ring_attention":
            sizes = attended(subject, sizes, world_size)
        chunk = pick.choice([None, None, 1, 2, 5])
        layout = pick.choice(claims.b_layouts)
        options: dict[str, Any] = {}
        if op in MOE:
            options["routing"] = pick.choice(["uniform", "some_empty", "duplicates"])
            options["id_dtype"] = pick.choice(["int32", "int64"])
        case = _case(subject, op, sizes, dtype, out_dtype, layout, chunk=chunk, options=options)
        yield case.with_(seed=subject.seed + number)


def _draw(op: str, world_size: int, step: int, pick: random.Random) -> dict[str, int]:
    rows = pick.choice([1, 2, 3, pick.randint(4, 40), pick.randint(100, 300)])

    def aligned(most: int) -> int:
        return step * pick.randint(1, max(1, most // step))

    if op in GEMMS:
        m = rows if op == "gemm_all_reduce" else rows * world_size
        return {"m": m, "n": aligned(300), "k": aligned(600)}
    if op == "all_reduce":
        return {"m": rows, "n": aligned(600)}
    if op in MOE:
        experts = world_size * pick.randint(1, 5)
        sizes = {
            "tokens": rows,
            "features": aligned(80),
            "experts": experts,
            "top_k": pick.randint(1, min(8, experts)),
        }
        return taken(op, sizes if op == "moe_combine" else {**sizes, "hidden": aligned(120)})
    kv_heads, causal = pick.randint(1, 3), pick.random() < 0.5
    return {
        "batch": pick.randint(1, 2),
        "heads": kv_heads * pick.randint(1, 4),
        "kv_heads": kv_heads,
        "sequence": pick.randint(1, 40) * world_size * (2 if causal else 1),
        "head_dim": aligned(96),
        "causal": causal,
    }


def _case(
    subject: AcceleratorSubject,
    op: str,
    sizes: _Sizes,
    dtype: DtypeName,
    out_dtype: DtypeName,
    layout: str | None,
    *,
    chunk: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Case:
    claimed = subject.capabilities.b_layouts
    if op in WITHOUT_B or layout is None:
        layout = "row" if "row" in claimed else claimed[0]
    if op in ("moe_dispatch", "ring_attention"):
        out_dtype = dtype
    if op in COMPANIONS:
        chunk = None
    options = dict(options or {})
    if op == "moe_gemm_combine" and options.get("routing") in ("padded", "empty_ranks"):
        # Tokens without results leave too few others to judge partial results that were rounded.
        options["partial_dtype"] = sums_of(dtype, out_dtype)
    return case_of(op)(
        sizes=sizes,
        dtype=dtype,
        out_dtype=out_dtype,
        layout=layout,
        chunk=chunk,
        seed=subject.seed,
        options=options,
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
