"""GPUs of a node as if none reached another's memory (``MKERNEL_<ACCELERATOR>_PEER_ACCESS=0``): each
GPU is a node of its own, whose ranks reach each other's memory even so, and bytes between nodes rest in
pinned host memory. All else that such worlds do, any staged route between nodes does
(``test_hopper_nodes``, families of ``test_calls_on_gpus``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import calls
import capture_ranks
import kept_ranks
import no_peer_ranks
import nodes_faults_ranks
import pytest
from device_buffers import needs_gpus
from hopper_ranks import OPS, Shape
from in_world import TOLD_S
from kept_ranks import none_failed
from test_hopper_nodes import ATTENTION, EXPERTS, MIXED
from test_nodes_faults import EARLY

from mkernel.launch import host_store

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]
accelerators = pytest.mark.parametrize("accelerator", ["hopper", "cuda"])
planted = pytest.mark.parametrize("fault", [False, True], ids=["honest", "planted"])


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the port of a store for the split world's ranks, which are told that they have no peer
    access."""
    for name in ("CUDA", "HOPPER"):
        monkeypatch.setenv(f"MKERNEL_{name}_PEER_ACCESS", "0")
    store, at = host_store(2, TOLD_S)
    yield at
    del store


def launched(port: int, accelerator: str | None, fn: Any, *arguments: Any) -> list[Any]:
    """Return what each of two ranks finds."""
    return kept_ranks.run(
        no_peer_ranks.split, port, accelerator, fn, *arguments,
        nodes=2, accelerator="ascend", timeout_s=TOLD_S,
    )  # fmt: skip


@accelerators
@pytest.mark.parametrize("family", ["products", "attention", "experts"])
def test_calls(family: str, accelerator: str, port: int) -> None:
    shapes: dict[str, list[Any]] = {
        "products": MIXED,
        "attention": ATTENTION,
        "experts": [each for each in EXPERTS if accelerator == "hopper" or not each.activation],
    }
    none_failed(launched(port, accelerator, calls.judged, shapes[family], 17))
    none_failed(launched(port, accelerator, calls.skewed, shapes[family], 24, 18))


@accelerators
def test_captured_graphs(accelerator: str, port: int) -> None:
    none_failed(launched(port, accelerator, calls.replayed, MIXED, 24))
    shapes = [Shape(op, 1024, 520, 264) for op in OPS]
    none_failed(launched(port, accelerator, capture_ranks.new_in_a_capture, shapes, 4))


def test_sums_go_to_a_companion(port: int) -> None:
    for failures, ran in launched(port, None, no_peer_ranks.of_companions):
        assert not failures
        assert ran == ["hopper", "streams"]


@accelerators
@planted
@pytest.mark.parametrize("graph", [False, True], ids=["calls", "replays"])
@pytest.mark.parametrize("shape", EARLY, ids=lambda shape: shape.op)
def test_a_flag_before_its_bytes(
    shape: Shape, graph: bool, fault: bool, accelerator: str, port: int
) -> None:
    failures = launched(
        port, accelerator, nodes_faults_ranks.told_early, port, shape, 4, fault, graph
    )
    assert bool(failures[0]) == fault, failures


@accelerators
@planted
def test_a_slot_that_still_holds_rows_unread(fault: bool, accelerator: str, port: int) -> None:
    failures = launched(port, accelerator, nodes_faults_ranks.reused_early, port, EARLY[0], fault)
    assert bool(failures[0]) == fault, failures


@accelerators
@planted
def test_a_device_that_signals_before_its_bytes(
    fault: bool, accelerator: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATE_NS", str(2_000_000_000 * fault))
    for each in launched(port, accelerator, nodes_faults_ranks.of_each, EARLY):
        assert [bool(failures) for failures in each] == [fault] * len(EARLY), each
