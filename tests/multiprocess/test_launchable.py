"""``mkernel plan`` and ``init`` agree on what can be launched, and give the same reasons."""

from __future__ import annotations

import json

import pytest
from command_line import mkernel as command

import mkernel
from mkernel.errors import Unsupported

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def joined() -> int:
    return mkernel.world().size


@pytest.mark.parametrize(
    ("backend", "nodes", "reason"),
    [
        ("ascend", 1, None),
        ("ascend", 2, None),
        ("streams", 1, None),
        ("streams", 2, None),
        ("limited_backends:GemmsOnly", 2, None),
        ("limited_backends:OneNode", 1, None),
        ("limited_backends:OneNode", 2, "has no path between nodes (it claims p2p)"),
        ("limited_backends:ThatChip", 1, None),
        ("limited_backends:ThatChip", 2, None),
        ("limited_backends:OtherChip", 1, "has kernels for sm_90 only, not for simulated A3"),
        ("limited_backends:OtherChip", 2, "has kernels for sm_90 only, not for simulated A3"),
    ],
)
def test_the_plan_says_what_init_does(backend: str, nodes: int, reason: str | None) -> None:
    told = command(
        "plan", "ag_gemm", "--accelerator", backend, "--nodes", str(nodes),
        "--ranks-per-node", "2", "--json",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert (report["plan"] is None, report["what_if"] is None) == (
        reason is not None,
        reason is None,
    )
    if reason is None:
        found = mkernel.launch(joined, nodes=nodes, ranks_per_node=2, accelerator=backend)
        assert found == [2 * nodes] * 2 * nodes
        return
    with pytest.raises(Unsupported) as caught:
        mkernel.launch(joined, nodes=nodes, ranks_per_node=2, accelerator=backend)
    assert any(reason in sentence for sentence in report["what_if"]["missing"])
    assert str(caught.value) in "; ".join(report["what_if"]["missing"])


def test_an_exchange_that_no_backend_runs_is_a_what_if_here_too() -> None:
    told = command("plan", "ag_gemm", "--accelerator", "ascend", "--exchange", "hierarchical")
    assert told.returncode == 0
    assert "what if" in told.stdout
    assert "'ascend' does not run the exchange 'hierarchical' of 'all_gather_gemm'" in " ".join(
        told.stdout.split()
    )


@pytest.mark.parametrize("world", [("2", "1"), ("1", "2")])
def test_a_process_group_is_named_as_the_carrier(world: tuple[str, str]) -> None:
    nodes, ranks = world
    size = ["--nodes", nodes, "--ranks-per-node", ranks, "--m", "64", "--n", "32", "--k", "32"]
    told = command("plan", "ag_gemm", "--accelerator", "streams", *size)
    assert "torch.distributed (gloo) between ranks" in " ".join(told.stdout.split())
    assert "verbs" not in told.stdout
    done = command("run", "ag_gemm", "--accelerator", "streams", "--iterations", "1", *size)
    assert done.returncode == 0, done.stderr
    assert "torch.distributed (gloo) between ranks" in " ".join(done.stdout.split())
    assert "through the NIC" not in done.stdout
