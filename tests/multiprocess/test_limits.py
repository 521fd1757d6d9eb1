"""What worlds do at the edge of what they take, and beyond it: docs/limits.md has it in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kept_ranks
import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.cases import case_of
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.grid import small_ones
from mkernel.conformance.ranks import Judge, each_case, judge_calls
from mkernel.launch import _ALWAYS_STARTED
from mkernel.plan.model import OpName

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

GEMMS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
WIDTH = 16
"""Of rows: any accelerator takes it."""


def judged(each: Sequence[tuple[OpName, dict[str, int]]]) -> list[str]:
    """What is wrong with calls of these ops and sizes, two of each."""
    found = []
    for op, sizes in each:
        judge = Judge(case_of(op)(sizes=sizes, dtype="float32", out_dtype="float32"))
        found += [wrong for number in range(2) for wrong in judge(number)]
    return found


def test_one_element_and_sizes_that_nothing_divides() -> None:
    """All that an op needs is a row for each rank, where it shares rows."""
    sizes: list[tuple[OpName, dict[str, int]]] = [
        (op, {"m": 2 * m, "n": n, "k": k}) for op in GEMMS for m, n, k in ((1, 1, 1), (7, 13, 11))
    ]
    sizes += [("gemm_all_reduce", {"m": 1, "n": 1, "k": 1})]
    sizes += [("moe_dispatch_gemm",
               {"tokens": 1, "hidden": 1, "features": 1, "experts": 2, "top_k": 1})]  # fmt: skip
    sizes += [("ring_attention",
               {"batch": 1, "heads": 1, "kv_heads": 1, "sequence": 2, "head_dim": 8,
                "causal": 0})]  # fmt: skip
    assert kept_ranks.run(judged, sizes, accelerator="streams", ranks_per_node=2) == [[], []]


@pytest.mark.parametrize("world", [(2, 8), (4, 4)], ids=["2x8", "4x4"])
@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
def test_every_op_on_as_many_ranks_as_every_machine_starts(
    accelerator: str, world: tuple[int, int]
) -> None:
    assert world[0] * world[1] == _ALWAYS_STARTED
    subject = AcceleratorSubject(accelerator)
    cases = small_ones(subject, world)
    assert [case.op for case in cases] == list(subject.claimed())
    backward = case_of("ring_attention_backward")
    cases += [
        backward(case.sizes, case.dtype, case.out_dtype)
        for case in cases
        if case.op == "ring_attention" and backward.op in subject.capabilities.ops
    ]
    subject.judge(each_case, judge_calls, cases, 1, world=world)


def refusals(accelerator: str) -> dict[str, str]:
    """What is said of calls beyond the limits, and of one within them, behind each."""
    size = mkernel.world().size

    def dispatch(ids: Tensor, **options: Any) -> Any:
        return mkernel.moe_dispatch_gemm(
            torch.ones(len(ids), WIDTH), ids, torch.ones(2, WIDTH, WIDTH), **options
        )

    def row(count: int) -> Tensor:
        """So many rows in the memory of one."""
        return torch.ones(1, WIDTH).expand(count, WIDTH)

    def ids(number: int, slots: int = 1) -> Tensor:
        return torch.full((5, slots), number)

    none = torch.ones(0, WIDTH)
    w = torch.ones(WIDTH, WIDTH)
    heads = torch.ones(1, 1, 1, WIDTH)
    calls: dict[str, Callable[[], Any]] = {
        "no rows to gather": lambda: mkernel.all_gather_gemm(none, w),
        "no rows to add": lambda: mkernel.gemm_all_reduce(none, w),
        "no columns": lambda: mkernel.gemm_all_reduce(torch.ones(4, 0), torch.ones(0, 4)),
        "a row too many": lambda: mkernel.gemm_reduce_scatter(torch.ones(size + 1, WIDTH), w),
        "a position too many": lambda: mkernel.gemm_reduce_scatter(
            torch.ones(2, size + 1, WIDTH), w, scatter_dim=1
        ),
        "2^31 rows": lambda: mkernel.all_gather_gemm(row(2**31 // size), w),
        "no tokens": lambda: dispatch(torch.empty(0, 1, dtype=torch.int64)),
        "no slots": lambda: dispatch(torch.empty(5, 0, dtype=torch.int64)),
        "more slots than experts": lambda: dispatch(ids(0, 2 * size + 1)),
        "an expert too many": lambda: dispatch(ids(2 * size)),
        "-2": lambda: dispatch(ids(-2)),
        "no capacity": lambda: dispatch(ids(0), capacity=0),
        "no positions": lambda: mkernel.ring_attention(*[heads[:, :, :0]] * 3),
        "half a piece": lambda: mkernel.ring_attention(heads, heads, heads, causal=True),
        "2^60 bytes": lambda: mkernel.empty((2**60,), torch.uint8),
        "2^70 bytes": lambda: mkernel.empty((2**70,), torch.uint8),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises((mkernel.errors.MkernelError, OSError)) as refused:
            call()
        said[name] = str(refused.value)
        assert mkernel.gemm_all_reduce(torch.ones(4, WIDTH), w).eq(size * WIDTH).all(), name
    return said


SAID = {
    "no rows to gather": ("shape=(0, 16)", "at least 1 row"),
    "no rows to add": ("shape=(0, 16)", "at least 1 row"),
    "no columns": ("shape=(4, 0)", "1 column"),
    "a row too many": ("m = 3", "a multiple of 2", "nearest: 2 or 4"),
    "a position too many": ("a = ", "shape=(2, 3, 16)"),
    "2^31 rows": ("m = 2147483648", "from 1 to 2147483647"),
    "no tokens": ("shape=(0, 16)", "at least 1 row"),
    "no slots": ("shape=(5, 0)", "1 column"),
    "more slots than experts": ("top_k = 5", "at most 4"),
    "an expert too many": ("topk_ids", " 4 ", "0 to 3, or -1"),
    "-2": ("topk_ids", " -2 ", "0 to 3, or -1"),
    "no capacity": ("capacity = 0", "from 1 to 2147483647"),
    "no positions": ("shape=(1, 1, 0, 16)", "at least 1"),
    "half a piece": ("sequence = 2", "a multiple of 4", "nearest: 4"),
    "2^60 bytes": (f"{2**60} bytes of shared memory", "ask for less"),
    "2^70 bytes": (f"{2**70} bytes of shared memory", "ask for less"),
}


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_beyond_a_limit_the_limit_the_value_and_what_to_do_are_named(accelerator: str) -> None:
    for said in kept_ranks.run(refusals, accelerator, accelerator=accelerator, ranks_per_node=2):
        assert said.keys() == SAID.keys()
        for name, words in SAID.items():
            assert [word for word in words if word not in said[name]] == [], (name, said[name])


def routed(kind: str) -> list[str]:
    """What is wrong with layers of such a routing: matrices of one and weights of powers of two, so a
    token comes home as itself times the sum of the weights of its slots that have an expert."""
    world = mkernel.world()
    tokens, experts = 9, 2 * world.size
    ids = {
        "all on one expert": torch.full((tokens, 2), experts - 1),
        "no expert": torch.full((tokens, 2), -1),
        "every expert": torch.arange(experts).repeat(tokens, 1),
        "one token has one": torch.full((tokens, 2), -1),
    }[kind]
    if kind == "one token has one":
        ids[tokens - 1, 1] = 0
    random = torch.Generator().manual_seed(world.rank)
    found = []
    for _ in range(2):
        x = torch.randint(1, 5, (tokens, WIDTH), generator=random).float()
        weights = torch.randint(1, 4, ids.shape, generator=random) * 2.0 ** torch.arange(
            ids.shape[1]
        )
        sent = mkernel.moe_dispatch_gemm(x, ids, torch.eye(WIDTH).repeat(2, 1, 1))
        got = mkernel.moe_combine(sent.outputs, sent.handle, weights)
        wanted = x.double() * (weights * (ids >= 0)).double().sum(1, keepdim=True)
        mkernel.synchronize()
        mine = (ids // 2 == world.rank).sum() * world.size
        if sent.outputs.shape != (mine, WIDTH):
            found.append(f"rank {world.rank}: {tuple(sent.outputs.shape)}, not {int(mine)} rows")
        if not torch.equal(got.double(), wanted):
            found.append(f"rank {world.rank}: {kind}: {got} is not {wanted}")
    return found


@pytest.mark.parametrize(
    "kind", ["all on one expert", "no expert", "every expert", "one token has one"]
)
@pytest.mark.parametrize(("accelerator", "nodes"), [("streams", 1), ("ascend", 1), ("ascend", 2)])
def test_routings_at_their_edge(accelerator: str, nodes: int, kind: str) -> None:
    ranks: dict[str, Any] = {"nodes": nodes, "ranks_per_node": 2}
    assert kept_ranks.run(routed, kind, accelerator=accelerator, **ranks) == [[]] * 2 * nodes


def far_out() -> list[str]:
    """Results that go to the end of more than 2^32 bytes; nothing else of these is touched."""
    found = []
    rows = 2**32 // (4 * WIDTH) + 8
    whole = mkernel.empty((rows, WIDTH), torch.float32)
    for first in (rows - 8, 2**31 // (4 * WIDTH) - 4, 2**32 // (4 * WIDTH) - 4):
        part = whole[first : first + 8]
        mkernel.gemm_all_reduce(torch.ones(8, WIDTH), torch.ones(WIDTH, WIDTH), out=part)
        mkernel.synchronize()
        if not part.eq(mkernel.world().size * WIDTH).all():
            found.append(f"rows from {first} on are {part}")
        lower = first % (2**31 // (4 * WIDTH))  # where a lost bit would lead
        if lower + 8 <= first and whole[lower : lower + 8].any():
            found.append(f"what is for row {first} lies at row {lower}")
        part.zero_()
    return found


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_offsets_beyond_32_bits(accelerator: str) -> None:
    assert kept_ranks.run(far_out, accelerator=accelerator, ranks_per_node=2) == [[], []]
