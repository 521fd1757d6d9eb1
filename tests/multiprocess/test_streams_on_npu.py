"""The `streams` backend on an NPU, as far as a stand-in for torch_npu on host memory can tell."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import npu_backend
import pytest
import torch
from command_line import mkernel as mkernel_command
from in_world import DEADLINE_S
from npu_backend import ALL, CUBES, VECTORS

import mkernel
from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.contracts.instrumented import View
from mkernel.cases import case_of
from mkernel.conformance.ranks import Judge, give_up_after
from mkernel.errors import ArgumentError, Timeout
from mkernel.plan.shapes import SHAPES

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SIZES = {
    "all_gather_gemm": {"m": 24, "n": 10, "k": 16},
    "gemm_reduce_scatter": {"m": 24, "n": 10, "k": 16},
    "gemm_all_reduce": {"m": 25, "n": 10, "k": 16},
    "all_reduce": {"m": 25, "n": 10},
    "moe_dispatch": {"tokens": 9, "hidden": 8, "experts": 4, "top_k": 2},
    "moe_dispatch_gemm": {"tokens": 9, "hidden": 8, "features": 6, "experts": 4, "top_k": 2},
    "moe_combine": {"tokens": 9, "features": 6, "experts": 4, "top_k": 2},
    "moe_gemm_combine": {"tokens": 9, "hidden": 5, "features": 6, "experts": 4, "top_k": 2},
    "ring_attention": {
        "batch": 1, "heads": 2, "kv_heads": 1, "sequence": 16, "head_dim": 8,
    },
}  # fmt: skip
Told = tuple[list[str], list[int], list[tuple[str, bool, Any]]]


def called(op: Any, view: View) -> tuple[bool, Told, tuple[int, int]]:
    """Whether the result was right, what the stand-in saw, and the caller's stream's limit after."""
    case = case_of(op)(sizes=SIZES[op], dtype="float32", out_dtype="float32")
    right = not Judge(case)(0, view)
    accelerator: Any = mkernel.world().accelerator
    return right, accelerator.told(), npu_backend.Npu.default.limit


def launch(op: str, backend: str = "OnNpu", view: View = "pipelined") -> list[Any]:
    return mkernel.launch(
        called,
        op,
        view,
        ranks_per_node=2,
        accelerator=f"npu_backend:{backend}",
        timeout_s=DEADLINE_S,
    )


def placed() -> tuple[bool, list[str], int | None, int]:
    """Whether a call was right, the node's accelerators, which one is this rank's, and the ranks of a
    larger world's plan."""
    right, _, _ = called("all_gather_gemm", "pipelined")
    planned = mkernel.plan("all_gather_gemm", ranks_per_node=4, **SIZES["all_gather_gemm"])
    listed = mkernel.world().topology.nodes[0].accelerators
    return right, [one.id for one in listed], npu_backend.Npu.chosen, planned.world_size


def judge(told: Told) -> None:
    """AssertionError unless messages went through HCCL and the two streams shared the cores."""
    backends, groups, record = told
    assert set(backends) == {"hccl"}, backends
    assert groups == [2], groups
    limits = {
        where: {
            more for what, on_callers, more in record if what == "event" and on_callers == where
        }
        for where in (True, False)
    }
    (compute,), (comm,) = limits[True], limits[False]
    assert compute[0] == CUBES, compute
    assert 0 < comm[1] < compute[1], (compute, comm)
    assert compute[1] + comm[1] <= VECTORS, (compute, comm)
    waits = {on_callers for what, on_callers, of_callers in record if what == "wait"}
    assert waits == {True, False}, "each lane waits for the other"


@pytest.mark.parametrize("op", SHAPES)
def test_every_op_shares_cores_and_talks_through_hccl(op: str) -> None:
    for right, told, after in launch(op):
        assert right
        judge(told)
        assert after == ALL, "the caller's stream stays limited"


@pytest.mark.parametrize(
    ("fault", "seen"), [("Unlimited", r"\(24, 48\), \(24, 48\)"), ("WrongGroup", "gloo")]
)
def test_what_is_left_out_is_seen(fault: str, seen: str) -> None:
    for _, told, _ in launch("all_gather_gemm", fault):
        with pytest.raises(AssertionError, match=seen):
            judge(told)


@pytest.mark.parametrize("view", ["sequential", "compute_only"])
def test_lanes_that_take_turns_have_all_cores(view: View) -> None:
    for right, (_, _, record), _ in launch("gemm_reduce_scatter", view=view):
        assert right or view == "compute_only"
        assert {more for what, _, more in record if what == "event"} == {ALL}


def ordered() -> tuple[bool, list[tuple[str, str, str]]]:
    """Whether AllGather+GEMM was right, and in what order its streams worked."""
    right, _, _ = called("all_gather_gemm", "pipelined")
    accelerator: Any = mkernel.world().accelerator
    return right, accelerator.order()


def judge_order(order: list[tuple[str, str, str]]) -> None:
    """AssertionError unless the second product's stream starts after the caller's, waits for the
    message that it multiplies, and is waited for in the end."""
    beside = [
        at for at, (what, stream, _) in enumerate(order) if (what, stream) == ("event", "beside")
    ]
    assert len(beside) == 2, "one product beside: its begin and its end"
    assert ("wait", "beside", "callers") in order[: beside[0]]
    remote = next(at for at, entry in enumerate(order) if entry == ("wait", "callers", "comm"))
    assert remote > beside[1], "own rows first: one half on either stream"
    assert ("wait", "callers", "beside") in order[beside[1] :], "nobody waits for the stream beside"


@pytest.mark.parametrize("backend", ["SideBySide", "NotJoined"])
def test_products_side_by_side(backend: str) -> None:
    for right, order in mkernel.launch(
        ordered, ranks_per_node=2, accelerator=f"npu_backend:{backend}", timeout_s=DEADLINE_S
    ):
        assert right
        if backend == "SideBySide":
            judge_order(order)
        else:
            with pytest.raises(AssertionError, match="nobody waits"):
                judge_order(order)


def product(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The op's result, and what it must be."""
    world = mkernel.world()
    whole = torch.randn(24, 16, generator=torch.Generator().manual_seed(turn))
    b = torch.randn(16, 10, generator=torch.Generator().manual_seed(100 + turn))
    own = whole.chunk(world.size)[world.rank].contiguous()
    return mkernel.all_gather_gemm(own, b), whole @ b


def queued() -> tuple[bool, bool, bool]:
    """Of two calls, the first of which the device has not done when it returns: whether the world knows
    that, whether the second one waits for it, and whether both are right."""
    idle = npu_backend.Npu.idle
    idle.clear()
    found = [product(0)]
    running = [launch.wait(0.2) for launch in mkernel.world()._failure.running] == [False]
    freed = threading.Timer(0.5, idle.set)
    freed.start()
    found.append(product(1))
    waited = idle.is_set()
    mkernel.synchronize()
    freed.join()
    return running, waited, all(torch.allclose(out, wanted, atol=1e-5) for out, wanted in found)


def test_calls_may_be_left_to_a_device_that_queues() -> None:
    found = mkernel.launch(
        queued, ranks_per_node=2, accelerator="npu_backend:Queueing", timeout_s=DEADLINE_S
    )
    assert found == [(True, True, True)] * 2


def never_done() -> None:
    mkernel.world().barrier()
    give_up_after(2)
    npu_backend.Npu.idle.clear()
    product(0)
    mkernel.synchronize()


def test_a_queued_call_that_never_ends_is_a_timeout() -> None:
    with pytest.raises(Timeout, match=r"rank (\d) .* chunk 0 of rank (?!\1)\d"):
        mkernel.launch(
            never_done, ranks_per_node=2, accelerator="npu_backend:Queueing", timeout_s=DEADLINE_S
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in in this process, which others must not see."""
    npu_backend.install()
    yield torch.npu  # type: ignore[attr-defined]
    del torch.npu  # type: ignore[attr-defined]
    del sys.modules["torch_npu"]


def test_an_npu_is_chosen_where_there_is_one(installed: Any) -> None:
    device = Device(None)
    assert (device.name, device.collectives) == ("npu", "hccl")
    assert {found.kind for found in device.probe()} == {"ascend"}


def test_ranks_may_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched() -> list[Any]:
        return mkernel.launch(
            placed, ranks_per_node=3, accelerator="npu_backend:TwoNpus", timeout_s=DEADLINE_S
        )

    with pytest.raises(ArgumentError, match="at most 2, the number of ascend accelerators"):
        launched()
    monkeypatch.setenv("MKERNEL_RANKS_PER_DEVICE", "2")
    devices = ["npu0", "npu1", "npu0.1"]
    assert launched() == [(True, devices, chosen, 4) for chosen in (0, 1, 0)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("command", ["plan", "run"])
def test_commands_let_ranks_share_a_device(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["ag_gemm", "--accelerator", "npu_backend:TwoNpus", "--nodes", "1",
                 "--ranks-per-node", "3", "--m", "24", "--n", "16", "--k", "16"]  # fmt: skip
    refused = mkernel_command(command, *arguments)
    assert refused.returncode == 2
    assert "at most 2" in refused.stderr
    monkeypatch.setenv("MKERNEL_RANKS_PER_DEVICE", "2")
    done = mkernel_command(command, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_torch_npu_is_named(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(npu_backend.Npu, "set_stream_limit")
    assert "too old: torch.npu lacks set_stream_limit" in str(Device("npu").missing())
    assert Device("npu").probe() == ()
    assert Device(None).name != "npu"
