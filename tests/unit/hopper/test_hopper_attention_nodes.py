"""Plans of ring attention between nodes: chunks, the exchange, what takes them and the bytes that
cross."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plan_walk import WalkedWorld
from test_hopper_attention import Started, decorations_of, sizes_of
from test_parts_nodes import world_of

from mkernel.backends.accelerators.cuda.attention import in_parts as attention
from mkernel.backends.accelerators.cuda.attention import merge as attention_merge
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.dispatch import executor_of
from mkernel.backends.accelerators.cuda.schedule import FLAGS, AttentionSchedule, KeysSchedule
from mkernel.backends.accelerators.hopper.attention import core as attention_core
from mkernel.backends.accelerators.hopper.attention import kernel as attention_kernel
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.schedule import AttentionKernelSchedule
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.traffic import traffic_of

LONG = {"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128}
WAY = "MKERNEL_HOPPER_ATTENTION"


@pytest.fixture(autouse=True)
def not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way is asked for by name; other tests' is."""
    monkeypatch.setenv(WAY, "auto")


def planned(nodes: int, ranks: int, accelerator: Any = None, **changes: Any) -> LaunchPlan:
    """Plan a call of ``rows`` rows a rank, 12288 by default."""
    rows, exchange = changes.pop("rows", 12288), changes.pop("exchange", "auto")
    direct = changes.pop("direct", False)
    sizes = {**LONG, "sequence": rows * nodes * ranks, "causal": False, **changes}
    made = world_of(nodes, ranks, direct=direct, accelerator=accelerator or HopperAccelerator())
    plan: LaunchPlan = made.plan("ring_attention", sizes, dtype="bfloat16", exchange=exchange)
    return plan


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2), (2, 4)])
def test_one_kernel_is_taken_and_hides_the_wire(nodes: int, ranks: int, causal: bool) -> None:
    plan = planned(nodes, ranks, causal=causal)
    how, times = plan.part(AttentionKernelSchedule), plan.prediction
    assert how.exchange == ("hierarchical" if ranks > 1 else "direct")
    assert how.far_rows == 2048, "of 6 MiB, a MiB of keys and values"
    assert times is not None
    floor = max(times.compute_us, times.comm_us)
    assert times.pipelined_us < 1.15 * floor


def test_keys_cross_to_each_rank_if_somebody_asks_for_it() -> None:
    hierarchical, direct = planned(2, 2), planned(2, 2, exchange="direct")
    whole = 2 * 12288 * 16 * 128 * 2
    assert traffic_of(hierarchical).from_rank(0) == {1: 2 * whole, 2: whole}
    assert traffic_of(direct).from_rank(0) == dict.fromkeys((1, 2, 3), whole)
    causal = planned(2, 1, causal=True)
    assert [traffic_of(causal).sent(*pair) for pair in ((0, 1), (1, 0))] == [whole / 2, whole]


def test_one_block_lands_what_nobody_copies() -> None:
    def blocks(**changes: Any) -> int:
        return planned(**{"nodes": 2, "ranks": 1, **changes}).part(KeysSchedule).land_blocks

    assert blocks(direct=True) == 1
    assert blocks() == blocks(direct=True, ranks=2) > 1


@pytest.mark.parametrize("accelerator", [HopperAccelerator(), CudaAccelerator()])
def test_what_the_kernel_does_not_take_goes_by_parts(accelerator: Any) -> None:
    how = planned(2, 2, accelerator, head_dim=256).part(AttentionSchedule)
    assert how.far_rows % 128 == 0
    assert how.put_blocks
    assert how.land_blocks


def test_chunks_have_flags() -> None:
    many = planned(2, 1, batch=1024, rows=128, kv_heads=16, accelerator=CudaAccelerator())
    assert many.part(KeysSchedule).far_rows == 128
    with pytest.raises(Unsupported, match=rf"need 131072 flags, and there are {FLAGS - 1}"):
        planned(2, 1, batch=4096, rows=128, kv_heads=16, accelerator=CudaAccelerator())


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("far_rows", 0, r"far_rows = 0 .* 1 or more between nodes"),
        ("put_blocks", 0, r"put_blocks = 0 .* 1 or more between nodes"),
        ("land_blocks", 0, r"land_blocks = 0 .* 1 or more between nodes"),
        ("exchange", "hierarchical", r"exchange = hierarchical .* there are no relays"),
    ],
)
@pytest.mark.parametrize("way", ["kernel", "parts"])
def test_schedules_that_a_call_would_not_follow_are_refused(
    monkeypatch: pytest.MonkeyPatch, way: str, field: str, value: Any, match: str
) -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    from mkernel.backends.accelerators.hopper.dispatch import executor_of

    monkeypatch.setenv(WAY, way)
    plan = planned(2, 1)
    assert plan.schedule is not None
    how = plan.schedule.model_copy(update={field: value})
    with pytest.raises(ArgumentError, match=match):
        executor_of(plan).workspace(plan.model_copy(update={"schedule": how}))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
@pytest.mark.parametrize("way", ["kernel", "parts"])
def test_no_field_is_decoration(made: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv(WAY, way)
    monkeypatch.setattr(DispatchContext, "network_of", lambda self, call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    started: Any = Started(made)
    started.shares_device = lambda *_: False
    started.load_attention = lambda *_: None
    modules = (attention, attention_merge, attention_ring, attention_core, attention_kernel)
    for module in modules:
        monkeypatch.setattr(module, "native", lambda: started)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, n: torch.zeros(n, dtype=torch.uint8))

    monkeypatch.setattr(attention, "attend", started.attend)
    monkeypatch.setattr(attention, "on_stream", lambda *_: nullcontext())
    world: WalkedWorld = world_of(2, 1, accelerator=HopperAccelerator())
    width = 128 if way == "kernel" else 64
    usual = world.plan(
        "ring_attention", sizes_of(2, causal=True, head_dim=width, sequence=512), dtype="bfloat16"
    )
    q, k = torch.zeros(2, 4, 256, width).bfloat16(), torch.zeros(2, 2, 256, width).bfloat16()
    tensors = {"q": q, "k": k, "v": k.clone(), "out": q.clone(), "lse": torch.zeros(2, 4, 256)}
    assert decorations_of(world, usual, tensors, started) == []


def test_the_executor_of_the_other_backend_is_by_parts() -> None:
    plan = planned(2, 1, CudaAccelerator())
    assert executor_of(plan) is attention.AttentionExecutor
