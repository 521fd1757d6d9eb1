"""MoE on `streams` where ranks relay for those of other nodes, judged by the cases' float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S

import mkernel
from mkernel.backends.accelerators.streams import moe, relay, schedule
from mkernel.backends.accelerators.streams.device import torch_device
from mkernel.cases import Case, case_of
from mkernel.cases.moe import ROUTINGS
from mkernel.conformance.ranks import Judge
from mkernel.errors import CapacityExceeded
from mkernel.plan.model import BLOCK, E4M3

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]
CHUNK = 5
"""Rows of a chunk: a rank's tokens make several."""


def make(op: str, world: int, hidden: int = 24, **changes: Any) -> Case:
    sizes = {"tokens": 23, "hidden": hidden, "features": 17, "experts": 3 * world, "top_k": 3}
    fewer = {"moe_dispatch": ("features",), "moe_combine": ("hidden",)}.get(op, ())
    sizes = {name: size for name, size in sizes.items() if name not in fewer}
    fields = {"dtype": "float32", "out_dtype": "float32", "chunk": CHUNK, **changes}
    return case_of(op)(sizes=sizes, **fields)  # type: ignore[arg-type]


def cases(world: int) -> list[Case]:
    made = [make("moe_dispatch_gemm", world, options={"routing": one}) for one in ROUTINGS]
    made.append(make("moe_dispatch", world, options={"routing": "padded", "handle": True}))
    scaled = {"dtype": E4M3, "out_dtype": E4M3, "options": {"scales": "block"}}
    made.append(make("moe_dispatch", world, hidden=2 * BLOCK, **scaled))
    made.append(make("moe_combine", world, options={"routing": "padded"}))
    for returns in ("slots", "ranks"):
        options = {"routing": "padded", "returns": returns}
        made.append(make("moe_gemm_combine", world, options=options))
    half = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    options = {"returns": "slots", "partial_dtype": "bfloat16"}
    made.append(make("moe_gemm_combine", world, options=options, **half))
    return made


@contextmanager
def traits(**changes: bool) -> Iterator[None]:
    """Plan as on a device with such traits."""
    cpu = torch_device("cpu")
    described = cpu.model_copy(update={"traits": cpu.traits.model_copy(update=changes)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "torch_device", lambda name: described)
        yield


PASSED = -1
"""Stands for a chunk that a relay passes on, among the sources whose tokens are multiplied."""


@contextmanager
def sources() -> Iterator[list[int | None]]:
    """Note in which order sources' tokens are multiplied, and when chunks are passed on."""
    seen: list[int | None] = []

    def passed(*given: Any) -> torch.Tensor:
        seen.append(PASSED)
        return relayed(*given)

    def noted(*given: Any) -> Iterator[int | None]:
        for source in as_they_come(*given):
            seen.append(source)
            yield source

    as_they_come, relayed = moe._as_they_come, relay.relayed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "_as_they_come", noted)
        patch.setattr(relay, "relayed", passed)
        yield seen


def near_first() -> list[int | None]:
    """Dispatch with tokens for everyone; return in which order sources are multiplied. A relay passes
    its last chunk on when the first products have been started."""
    world = mkernel.world()
    ids = torch.arange(world.size).repeat(8, 1).int()
    with traits(overlaps=True), sources() as seen:
        mkernel.moe_dispatch_gemm(torch.ones(8, 24), ids, torch.ones(1, 24, 17))
    first = next(at for at, source in enumerate(seen) if source not in (None, PASSED))
    assert PASSED in seen[first:]
    return [source for source in seen if source != PASSED]


def judged(every: Sequence[Case]) -> list[str]:
    """Say what is wrong with these cases, and with what a dispatch refuses meanwhile."""
    found = []
    with traits(overlaps=True, peers_together=True):
        for case in every:
            judge = Judge(case)
            for iteration, view in enumerate(("pipelined", "sequential")):
                outcome = case.run(judge.inputs(iteration), view=view)  # type: ignore[arg-type]
                found += judge.problems(outcome, iteration)
                how = outcome.plan.schedule
                assert how.exchange == "hierarchical"
                assert how.relay_bytes > 0
                if case.op == "moe_gemm_combine":
                    assert how.node_sums == outcome.plan.shape.partial_dtype
        rank, each = mkernel.world().rank, 2
        nodes = [source // each for source in near_first() if source is not None]
        assert nodes == [(rank // each - turn) % 3 for turn in range(3) for _ in range(each)]
        every[0].run(Judge(every[0]).inputs(2), view="compute_only")
        judge, given = Judge(every[0]), Judge(every[0]).inputs(0)
        with pytest.raises(CapacityExceeded):
            mkernel.moe_dispatch_gemm(given["x"], given["topk_ids"], given["w"], capacity=1)
        return found + judge(1)


def test_relayed_rows_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call that has no room is refused on all ranks, and the next one runs."""
    monkeypatch.setenv("MKERNEL_EXCHANGE", "hierarchical")
    for found in mkernel.launch(
        judged, cases(6), nodes=3, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):  # fmt: skip
        assert found == []


# ---- planted faults ------------------------------------------------------------------------------

_relayed, _weighted_sums = relay.relayed, relay.weighted_sums
_first: dict[int, torch.Tensor] = {}


def stale(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Pass on rows of the first chunk that was passed on, in place of those of each later one, in
    whatever call."""
    found = _relayed(rows, which)
    first = _first.setdefault(rows.shape[1], found) if len(which) else found
    return first[torch.arange(len(which)) % max(1, len(first))]


def unwanted(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Pass on each token's neighbour in the token's place."""
    return _relayed(rows, (which + 1) % max(1, len(rows)))


def twice(*given: torch.Tensor) -> torch.Tensor:
    """Add a node's sums twice."""
    return 2 * _weighted_sums(*given)


def backwards(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Add a node's results in the opposite order of slots."""
    return _weighted_sums(rows, places.flip(1), weights.flip(1), *rest)


FAULTS: dict[str, Callable[..., Any]] = {
    "relayed": stale, "relayed ": unwanted, "weighted_sums": twice, "weighted_sums ": backwards
}  # fmt: skip


def in_slot_order() -> list[str]:
    """Combine rows whose sum depends on its order: 1e8, 1, -1e8 and 1 on the other node's ranks by
    turns are 1 in the order of slots, 2 in the order of ranks, 0 backwards."""
    world = mkernel.world()
    first = 4 * (1 - world.rank // 2)  # of eight experts, two a rank
    ids = torch.tensor([[first, first + 2, first + 1, first + 3]], dtype=torch.int32)
    sent = mkernel.moe_dispatch(torch.ones(1, 8), ids, num_experts=8)
    values = [1e8, -1e8] if world.rank % 2 == 0 else [1.0, 1.0]
    y = torch.tensor(values).repeat_interleave(sent.counts)[:, None].expand(-1, 8).contiguous()
    out = mkernel.moe_combine(y, sent.handle, torch.ones(1, 4))
    return [] if out.eq(1).all() else [f"{out[0, 0].item()}, expected 1"]


def judged_with_faults() -> dict[str, list[str]]:
    found = {}
    every = [make(op, 4) for op in ("moe_dispatch_gemm", "moe_combine")]

    def problems() -> list[str]:
        return [one for case in every for one in Judge(case)(0)] + in_slot_order()

    found["none"] = problems()
    for name, fault in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            _first.clear()
            patch.setattr(relay, name.strip(), fault)
            found[fault.__name__] = problems()
    return found


def test_planted_faults_of_relays_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has neighbours that relay for it, and every fault acts in each call; rows are random,
    so that no two are alike."""
    monkeypatch.setenv("MKERNEL_EXCHANGE", "hierarchical")
    for found in mkernel.launch(
        judged_with_faults, nodes=2, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert found.pop("none") == []
        assert set(found) == {fault.__name__ for fault in FAULTS.values()}
        assert all(found.values()), found
