"""The conformance kit on GPUs: hopper on each of its paths, cuda, streams by copies and by NCCL; and
worlds of hopper on one node and the CPU's ranks, or the simulator's, on another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from device_buffers import takes_ranks
from in_world import TOLD_S
from kept_subject import IN_NEW_PROCESSES, Kept

from mkernel.backends import registry
from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check
from mkernel.settings import load

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks()


@functools.cache
def subject(backend: str, kind: type[AcceleratorSubject]) -> AcceleratorSubject:
    """The backend, if it can run here, in one of its ways."""
    judged = kind(backend.partition("-")[0], True, 0, timeout_s=TOLD_S)
    judged.require_usable()
    assert judged.backends[0].device == "cuda"
    return judged


@pytest.mark.parametrize(
    "backend",
    [
        "hopper-fused", "hopper-library", "cuda", "streams-copies", "streams-messages",
        "hopper,streams", "hopper,ascend",
    ],
)  # fmt: skip
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(
    check: Check, backend: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name, _, way = backend.partition("-")
    if "," in name:
        monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cpu")
        registry.accelerator.cache_clear()  # of streams on the GPU, and then of this one
        request.addfinalizer(registry.accelerator.cache_clear)
    elif way == "library" and check.name in ("chunk-invariance", "split-invariance"):
        pytest.skip("invariant results have no library path")
    elif name == "hopper":  # left to the planner, small calls would all take the same path
        monkeypatch.setenv("MKERNEL_PATH", way)
    elif name == "streams" and load().ranks_per_device > 1:
        pytest.skip("NCCL, which carries other ops than GEMMs, has no two ranks share a GPU")
    elif name == "streams":
        monkeypatch.setenv("MKERNEL_STREAMS_COPIES", str(int(way == "copies")))
    kind = AcceleratorSubject if check.name in IN_NEW_PROCESSES else Kept
    result: Any = run_check(check, subject(backend, kind))
    if result.outcome == "skipped":
        pytest.skip(result.message)
    assert result.outcome == "passed", f"{check.promise}\n{result.message}"
