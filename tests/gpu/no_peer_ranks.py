"""Run in rank processes of test_no_peer_access: calls in a world whose nodes nobody has named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hopper_ranks import Shape, rows
from in_world import TOLD_S, stores

import mkernel
from mkernel.errors import WorldError


def split(port: int, accelerator: str | None, fn: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``fn`` finds in a world of all ranks, each of which must be a node of its own whose
    bytes rest in host memory."""
    mkernel.finalize()
    world = mkernel.init(accelerator=accelerator, timeout_s=TOLD_S, stores=stores(port))
    assert (world.identity.nodes, world.identity.ranks_per_node) == (world.size, 1)
    assert world.backends.verbs == "soft"
    assert world.map.links.table.staged
    try:
        found = fn(*arguments)
        assert world.nic is not None
        counts = world.nic.statistics()
        assert counts.host_regions > 0
        assert counts.dmabuf_regions + counts.peermem_regions == 0
    except WorldError as error:
        mkernel.finalize(error)
        raise
    mkernel.finalize()
    return found


def of_companions() -> tuple[list[str], list[str]]:
    """Failures of a product and of sums, and the accelerators that ran them."""
    failures, ran = [], []
    for shape in (Shape("gemm_all_reduce", 512, 1024, 512), rows(300, 4096)):
        work = shape.work()
        work.fill(0)
        work.call()
        mkernel.synchronize()
        failures += work.failure(0)
        ran.append(mkernel.world().engine(shape.op).backends.accelerator)
    return failures, ran
