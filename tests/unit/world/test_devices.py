"""Ranks of a group are placed on the devices that they use, wherever these are on their host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import SIM

from mkernel import machine
from mkernel.backends import registry
from mkernel.machine import seated
from mkernel.settings import Settings
from mkernel.topology.model import Accelerator, Node, Topology
from mkernel.topology.placement import place
from mkernel.world.environment import Chosen, chosen
from mkernel.world.identity import Backends, Identity
from mkernel.world.join import Membership

DEVICES = tuple(
    Accelerator(id=f"cuda{index}", kind="cuda", name="GPU", index=index, pci=f"0000:0{index}:00.0")
    for index in range(4)
)
HOST = Topology(nodes=(Node(id=0, hostname="host", numa=(), accelerators=DEVICES),))


def places(*used: Any) -> list[str]:
    placed = place(seated(HOST, used), len(used), nics=False)
    return [one.accelerator for one in placed]


def test_ranks_are_placed_on_what_they_use() -> None:
    assert places((None, 1), (None, 3)) == ["cuda1", "cuda3"]
    assert places(("0000:03:00.0", 0), ("0000:02:00.0", 0)) == ["cuda3", "cuda2"]


def test_devices_are_counted_as_the_process_is_shown_them() -> None:
    shown = Node(id=0, hostname="host", numa=(), accelerators=(DEVICES[3], DEVICES[1]))
    placed = place(seated(Topology(nodes=(shown,)), [(None, 1), (None, 0)]), 2, nics=False)
    assert [one.accelerator for one in placed] == ["cuda1", "cuda3"]


@pytest.mark.parametrize("used", [[(None, 2), None], [(None, 2)] * 2, [("0000:09:00.0", 2)] * 2])
def test_else_they_are_placed_in_order(used: list[Any]) -> None:
    assert places(*used) == ["cuda0", "cuda1"]


def test_simulated_devices_are_nobodys() -> None:
    machine = Topology(nodes=(Node(id=0, hostname="host", numa=(), accelerators=(SIM,)),))
    assert seated(machine, [(None, 0)]) == machine


@pytest.mark.parametrize(
    ("used", "local_rank", "index"),
    [(3, None, 3), (3, "1", 3), (None, "1", 1), (None, None, None), (None, "4", None)],
)
def test_the_device_of_this_process(
    used: int | None, local_rank: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(
        is_initialized=lambda: used is not None, current_device=lambda: used, device_count=lambda: 4
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(
        torch, "accelerator",
        SimpleNamespace(current_accelerator=lambda: torch.device("cuda"), is_available=lambda: True),
    )  # fmt: skip
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert chosen() == (None if index is None else Chosen("cuda", index))


def test_a_device_as_peers_know_it() -> None:
    backend: Any = SimpleNamespace(device="cuda", probe=lambda: DEVICES)
    assert Chosen("cuda", 2).described(backend) == ("0000:02:00.0", 2)
    assert Chosen("cuda", 7).described(backend) is None
    assert Chosen("npu", 2).described(backend) is None


@pytest.mark.parametrize(("node", "wanted"), [(0, ["cuda3", "cuda0"]), (1, ["cuda2", "cuda1"])])
def test_nodes_of_one_host_are_made_of_what_their_own_ranks_use(
    node: int, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two emulated nodes of two ranks, whose ranks have chosen the host's devices crosswise."""
    backend = SimpleNamespace(probe=lambda: DEVICES, nic_access=lambda: None)
    monkeypatch.setattr(registry, "accelerator", lambda name: backend)
    monkeypatch.setattr(machine, "machine_topology", lambda backends: HOST)
    used = {0: (None, 3), 1: (None, 0), 2: (None, 2), 3: (None, 1)}
    peers: Any = {rank: SimpleNamespace(host="host") for rank in used}
    told: dict[str, Any] = {}
    membership: Any = SimpleNamespace(
        _me=Identity(2 * node, nodes=2, ranks_per_node=2),
        _devices=used,
        _kinds=["cuda", "cuda"],
        _backends=Backends("cuda", None, None),
        _settings=Settings(),
        _exchange=SimpleNamespace(
            publish=lambda _, description: told.update(description),
            collect=lambda _, nodes: {each: told | {"id": each} for each in nodes},
        ),
    )
    made = Membership._gather_topology(membership, peers)
    assert [each.id for each in made.nodes[node].accelerators] == wanted
