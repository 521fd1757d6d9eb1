"""Every op on the `ascend` simulator, with cx7 on the soft provider between nodes, judged by the kit.

``tests/unit/ascend`` judges the kernels by themselves, in more worlds, dtypes and shapes.
"""

from __future__ import annotations

import pytest
import torch

import mkernel
from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check
from mkernel.ops.all_gather_gemm import OP

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

PROMISES = {
    *("shapes", "dtypes", "worlds", "nonfinite", "gathered"),
    *("determinism", "chunk-invariance", "split-invariance"),
}
CHECKS = [check for check in accelerator_checks() if check.name in PROMISES]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_ascend_keeps_its_promises(check: Check) -> None:
    result = run_check(check, AcceleratorSubject("ascend", quick=True))
    assert result.outcome == "passed", result.message


def plan_is_the_launched_one() -> bool:
    world = mkernel.world()
    a, b = torch.ones(128, 256).half(), torch.ones(256, 256).half()
    launched = OP.call(a, b, out=torch.empty(128 * world.size, 256)).plan
    asked = mkernel.plan("ag_gemm", m=128 * world.size, n=256, k=256)
    return launched == asked and launched.digest() == asked.digest()


def test_plan_is_what_the_launch_uses() -> None:
    assert all(
        mkernel.launch(plan_is_the_launched_one, nodes=2, ranks_per_node=2, accelerator="ascend")
    )
