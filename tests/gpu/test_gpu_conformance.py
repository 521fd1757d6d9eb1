"""The conformance kit on GPUs: hopper on each of its paths, streams by copies and by NCCL."""

from __future__ import annotations

import functools
from typing import Any

import kept_ranks
import pytest
from device_buffers import takes_ranks
from in_world import TOLD_S

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks, bounded
from mkernel.conformance.check import Check, run_check
from mkernel.settings import load

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

CHECKS = accelerator_checks()
OF_PROCESSES = ("leaks", "two-worlds", "after-failure")
"""Checks of what processes hold or go on with, which have new ones."""


class Kept(AcceleratorSubject):
    """The same with rank processes that are kept, but for checks in which ranks tell how they break."""

    def launch(
        self,
        fn: Any,
        *args: Any,
        world: tuple[int, int],
        timeout_s: float | None = None,
        **told: Any,
    ) -> list[Any]:
        """As its parent's."""
        if told:
            return super().launch(fn, *args, world=world, timeout_s=timeout_s, **told)
        return kept_ranks.run(
            bounded, self.timeout_s if timeout_s is None else timeout_s, None, fn, *args,
            nodes=world[0], ranks_per_node=world[1], accelerator=self.name,
        )  # fmt: skip


@functools.cache
def subject(backend: str, kind: type[AcceleratorSubject]) -> AcceleratorSubject:
    """The backend, if it can run here, in one of its ways."""
    judged = kind(backend.partition("-")[0], True, 0, timeout_s=TOLD_S)
    judged.require_usable()
    assert judged.backend.device == "cuda"
    return judged


@pytest.mark.parametrize(
    "backend", ["hopper-fused", "hopper-library", "streams-copies", "streams-messages"]
)
@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_promise(check: Check, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, way = backend.partition("-")
    if name == "hopper":  # left to the planner, small calls would all take the same path
        monkeypatch.setenv("MKERNEL_PATH", way)
    elif load().ranks_per_device > 1:
        pytest.skip("NCCL, which carries other ops than GEMMs, has no two ranks share a GPU")
    else:
        monkeypatch.setenv("MKERNEL_STREAMS_COPIES", str(int(way == "copies")))
    kind = AcceleratorSubject if check.name in OF_PROCESSES else Kept
    result: Any = run_check(check, subject(backend, kind))
    if result.outcome == "skipped":
        pytest.skip(result.message)
    assert result.outcome == "passed", f"{check.promise}\n{result.message}"
