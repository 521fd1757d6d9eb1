"""What carries a plan's bytes: the routes and the carrier are those that calls use."""

from __future__ import annotations

import re
from pathlib import Path

import commands
import pytest
from devices import SIM, SOFT, gpu, node
from devices import nic as port
from devices import world as worlds

from mkernel import doctor
from mkernel.cli.plan import PlanReport, command
from mkernel.plan.model import LaunchPlan

GEMM = ("ag_gemm", "--m", "4096", "--n", "1024", "--k", "1024")


def text(tmp_path: Path, *flags: str, kind: str = "cuda", refused: bool = False) -> str:
    """Of `streams` on machines of four accelerators; ``refused``: two do not reach each other."""
    devices = tuple(gpu(i, kind=kind, name="NVIDIA A100") for i in range(4))
    pairs = (("cuda0", "cuda1"),) if refused else ()
    machine = node((SIM, *devices), (SOFT, port(0)), no_p2p=pairs)
    file = tmp_path / "machine.json"
    file.write_text(worlds(machine).model_dump_json())
    return commands.run(command, *flags, "--topology", str(file), "--accelerator", "streams")


def plan(tmp_path: Path, *flags: str, kind: str = "cuda", refused: bool = False) -> LaunchPlan:
    told = text(tmp_path, *flags, "--json", kind=kind, refused=refused)
    made = PlanReport.model_validate_json(told).plan
    assert made is not None
    return made


def kinds(made: LaunchPlan) -> set[str]:
    assert (made.nic, made.verbs) == (None, None)
    assert not any(seat.nics for site in made.placement.sites for seat in site.seats)
    return {route.kind for route in made.routes.classes}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("kind", "group"), [("cuda", "nccl"), ("rocm", "nccl"), ("ascend", "hccl")]
)
def test_torch_distributed_carries_everything_but_copies(
    tmp_path: Path, kind: str, group: str, nodes: int
) -> None:
    for op in (GEMM, ("moe_dispatch_gemm",), ("ring_attention",)):
        made = plan(tmp_path, *op, "--nodes", str(nodes), kind=kind)
        if (kind, nodes, op) == ("cuda", 1, GEMM):
            assert (kinds(made), made.carrier) == ({"p2p"}, None)
        else:
            assert (kinds(made), made.carrier) == ({"group"}, f"torch.distributed ({group})")


def test_copies_are_for_devices_that_all_reach_each_other(tmp_path: Path) -> None:
    made = plan(tmp_path, *GEMM, "--nodes", "1", refused=True)
    assert (kinds(made), made.carrier) == ({"group"}, "torch.distributed (nccl)")


def test_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_COPIES", "0")
    made = plan(tmp_path, *GEMM, "--nodes", "1")
    assert (kinds(made), made.carrier) == ({"group"}, "torch.distributed (nccl)")


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_people_read_it(tmp_path: Path, nodes: str) -> None:
    told = " ".join(text(tmp_path, "moe_combine", "--nodes", nodes).split())
    assert "ranks on streams, torch.distributed (nccl) between ranks" in told
    assert re.search(r"pairs of ranks: \d+ by torch\.distributed \(nccl\) schedule", told)
    assert "verbs" not in told


def test_doctor_says_that_a_process_group_opens_no_nic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_STREAMS_DEVICE", "cpu")
    rows = {row.name: row for row in doctor.examine().rows}
    assert "torch.distributed (gloo) between ranks" in rows["streams"].detail
    if rows["accelerator"].detail.startswith("streams"):
        told = rows["nic, verbs"].detail
        assert told.endswith("streams does not open it: torch.distributed (gloo) carries its bytes")
