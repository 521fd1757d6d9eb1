"""A world of one rank, this process: what an op checks, plans, returns and differentiates is all there,
without another process. What ranks do to each other, tests/torch and tests/multiprocess judge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mkernel
from mkernel.world.world import World

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name in _LAUNCHED:
            patch.delenv(name, raising=False)
        yield mkernel.init(accelerator="streams")
        mkernel.finalize()
