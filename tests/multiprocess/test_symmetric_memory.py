"""Workspaces and tensors in symmetric memory: who shares what, where it lies, how long it lives."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

import mkernel
from mkernel.errors import ArgumentError, PlanMismatch, Unsupported
from mkernel.world import memory

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "queueing_backend:Queueing"
N, K = 16, 24


def backend() -> Any:
    return mkernel.world().accelerator


def reduce(rows: int, **options: Any) -> torch.Tensor:
    return mkernel.gemm_all_reduce(torch.ones(rows, K), torch.ones(K, N), **options)


def workspaces() -> tuple[list[int], list[str], list[int]]:
    """Calls of plans with 8, 20, 10, 8, 100 rows: workspace addresses, events, epochs."""
    for rows in (8, 20, 10, 8, 100):
        reduce(rows)
    mkernel.synchronize()
    made = backend()
    events = [event for event in made.events if event.startswith("format")]
    return [c.workspace for c in made.calls], events, [c.epoch for c in made.calls]


def test_plans_share_a_workspace_that_grows() -> None:
    for addresses, events, epochs in mkernel.launch(
        workspaces, ranks_per_node=2, accelerator=BACKEND
    ):
        small, larger, same, again, largest = addresses
        assert larger != small
        assert same == larger, "what fits is not allocated again"
        assert again == small, "a plan keeps the workspace that it was adopted with"
        assert largest not in (small, larger)
        # Doubled where that is more than what is needed; formatted once each, never the pad.
        assert events == ["format 8000", "format 20000", "format 100000"]
        assert epochs == [1, 2, 3, 4, 5], "of the world, whatever the plans"


def test_a_plan_that_needs_too_many_signals_is_named() -> None:
    name = "queueing_backend:Wordy"
    with pytest.raises(Unsupported, match=r"a plan of gemm_all_reduce .* needs 8388609 signals"):
        mkernel.launch(reduce, 8, accelerator=name)


def epochs_around_a_refusal() -> list[int]:
    for number in range(1, 6):
        if number == 3:
            with pytest.raises(Unsupported, match="the third call"):
                reduce(8 * number)
        else:
            assert reduce(8 * number).eq(mkernel.world().size * K).all()
    found: list[int] = backend().epochs
    return found


def test_a_call_that_is_not_launched_counts_for_nothing() -> None:
    """Nobody releases it, so that the next one must not take the memory of the call before it."""
    name = "judged_backends:RefusesThird"
    found = mkernel.launch(epochs_around_a_refusal, ranks_per_node=2, accelerator=name)
    assert found == [[1, 2, 3, 4]] * 2


def test_areas_never_overlap_and_grow_together() -> None:
    first = memory.Arena((100, 5000))
    assert (first.offsets, first.nbytes) == ((0, 4096), 9096)
    assert first.holds((100, 1)), "in any order of plans"
    assert not first.holds((101, 1))
    assert not first.holds((1, 1, 1))
    for areas in ((101, 1), (1, 6000), (1, 1, 1), (90_000, 0)):
        second = first.larger(areas)
        assert second.holds(areas)
        assert second.holds(first.sizes)
        assert sum(second.sizes) >= 2 * sum(first.sizes), (
            "all that is kept is no more than the newest"
        )
        ends = [a + size for a, size in zip(second.offsets, second.sizes, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, second.offsets[1:], strict=False))
    assert memory.Arena((0, 0)).nbytes == 1


def peers_write() -> list[tuple[int, int]]:
    """Write the own rank at each peer's tensor, by the addresses that a backend is given."""
    world = mkernel.world()
    decoy = mkernel.empty((3,), torch.float16)
    out = mkernel.empty((10, N), torch.float32)
    assert not out.any()
    part = out[2:6]
    reduce(4, out=part)
    mkernel.synchronize()
    assert part.eq(world.size * K).all()
    assert not out[6:].any()
    world.barrier()
    call = backend().calls[-1]
    addresses = call.symmetric["out"]
    assert list(call.symmetric) == ["out"]
    assert addresses[world.rank] == part.data_ptr()
    for peer, address in enumerate(addresses):
        if peer != world.rank:
            ctypes.c_float.from_address(address + 4 * world.rank).value = 100.0 + world.rank
    world.barrier()
    got = part[0, : world.size].tolist()
    reduce(4)  # an output of the op's own
    mkernel.synchronize()
    assert not backend().calls[-1].symmetric
    assert not decoy.any()
    return [(rank, int(value)) for rank, value in enumerate(got)]


def test_backends_get_every_ranks_address_of_a_symmetric_tensor() -> None:
    for rank, got in enumerate(mkernel.launch(peers_write, ranks_per_node=3, accelerator=BACKEND)):
        assert got == [(r, 3 * K if r == rank else 100 + r) for r in range(3)]


def gathers_into() -> bool:
    world = mkernel.world()
    a = torch.full((5, K), float(world.rank))
    whole = mkernel.empty((10, K), torch.float32)
    out, gathered = mkernel.all_gather_gemm(a, torch.eye(K), gathered=whole, return_gathered=True)
    mkernel.synchronize()
    assert gathered.data_ptr() == whole.data_ptr()
    assert set(backend().calls[-1].symmetric) == {"gathered"}
    alone = mkernel.all_gather_gemm(a, torch.eye(K), gathered=whole)
    mkernel.synchronize()
    return torch.equal(out, gathered) and torch.equal(alone, out) and bool(whole[5:].eq(1).all())


def test_gathered_rows_go_where_they_are_wanted() -> None:
    assert mkernel.launch(gathers_into, ranks_per_node=2, accelerator=BACKEND) == [True, True]


def differs(how: str) -> None:
    world = mkernel.world()
    first, second = mkernel.empty((8, N), torch.float32), mkernel.empty((8, N), torch.float32)
    here = {"buffer": (first, second), "offset": (first[:4], first[4:]), "one": (first, None)}[how]
    out = here[world.rank]
    reduce(8 if how != "offset" else 4, out=out)
    mkernel.synchronize()


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("buffer", "symmetric.out.buffer"),
        ("offset", "symmetric.out.offset"),
        ("one", "symmetric.out"),
    ],
)
def test_symmetric_tensors_must_be_the_same_on_all_ranks(how: str, field: str) -> None:
    with pytest.raises(PlanMismatch) as raised:
        mkernel.launch(differs, how, ranks_per_node=2, accelerator=BACKEND)
    assert raised.value.field == field


def between_nodes() -> tuple[int, ...]:
    out = mkernel.empty((8, N), torch.float32)
    reduce(8, out=out)
    mkernel.synchronize()
    found: tuple[int, ...] = backend().calls[-1].symmetric["out"]
    return found


def test_ranks_of_other_nodes_have_no_address() -> None:
    for rank, found in enumerate(
        mkernel.launch(between_nodes, nodes=2, ranks_per_node=2, accelerator=BACKEND)
    ):
        assert [bool(address) for address in found] == [r // 2 == rank // 2 for r in range(4)]


# ---- lifetime, in a world of this process ------------------------------------------------------------


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mkernel")


def test_a_symmetric_tensor_outlives_its_world() -> None:
    before = mapped()
    mkernel.init(accelerator=BACKEND)
    kept, dropped = mkernel.empty((64,), torch.bfloat16), mkernel.empty((64,), torch.bfloat16)
    del dropped
    kept.fill_(7)
    mkernel.finalize()
    assert mapped() == before + 1
    assert kept.eq(7).all()
    del kept
    assert mapped() == before


@pytest.mark.parametrize("shape", [(), (0,), (4, -1)])
def test_shapes_without_elements_are_refused(shape: tuple[int, ...]) -> None:
    mkernel.init(accelerator=BACKEND)
    try:
        with pytest.raises(ArgumentError, match="shape"):
            mkernel.empty(shape, torch.float32)
    finally:
        mkernel.finalize()


def test_memory_stays_mapped_while_the_device_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    monkeypatch.setattr(memory, "_kept_until_exit", left)
    before = mapped()
    mkernel.init(accelerator=BACKEND)
    reduce(4)
    made = backend()
    made.ends_in_time = False
    mkernel.finalize()
    assert made.events == ["open cpu0", "format 4000", "close"]
    assert mapped() == before + 2, "pad and workspace"
    ((held, kept),) = left
    assert kept is made
    held.close()
    assert mapped() == before
