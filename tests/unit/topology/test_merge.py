"""Several sources, one machine."""

from __future__ import annotations

import pytest
from devices import gpu, nic, node

from mkernel.topology.merge import _same, merge
from mkernel.topology.model import Bridge, FabricLink, Nic, NumaNode
from mkernel.topology.sources.findings import Findings


def merged(*sources: Findings) -> Findings:
    whole = merge(sources)
    parts = {name: getattr(whole, name) for name in ("numa", "bridges", "fabric", "no_p2p")}
    node(whole.accelerators, whole.nics, **parts)  # a node, with unique ids and known ends
    return whole


def nics(*each: Nic) -> Findings:
    return Findings("nics", nics=each)


def test_gaps_are_filled() -> None:
    found = merged(
        nics(nic(0, numa_node=1, speed_gbps=None)), nics(nic(0, pci="0000:00:05.0", speed_gbps=100))
    )
    (one,) = found.nics
    assert (one.pci, one.numa_node, one.speed_gbps) == ("0000:00:05.0", 1, 100)
    assert found.notes == ()
    whole = gpu(0, pci=BUS, architecture="sm_80", cores=56, clock_mhz=1440.0, memory_gbs=933.12)
    sources = (
        Findings(str(i), accelerators=(one,)) for i, one in enumerate((gpu(0, pci=BUS), whole))
    )
    assert merged(*sources).accelerators == (whole,)


def test_a_contradiction_keeps_the_earlier_and_names_both() -> None:
    address = "0000:00:05.0"
    found = merged(
        nics(nic(0, pci=address, speed_gbps=400)), nics(nic(0, id="a", pci=address, speed_gbps=200))
    )
    assert [nic.speed_gbps for nic in found.nics] == [400]
    assert [note.message for note in found.notes] == [
        "mlx5_0: speed_gbps is 200.0 here and 400.0 in an earlier source; the earlier is kept"
    ]


def test_same_id_on_another_address_is_another_device() -> None:
    found = merged(nics(nic(0, pci="0000:00:05.0")), nics(nic(0, pci="0000:00:06.0")))
    assert [nic.id for nic in found.nics] == ["mlx5_0", "mlx5_0-2"]
    assert len(found.notes) == 1


def test_ports_of_one_device_stay_apart() -> None:
    one, two = nic(0, id="a:1", pci="0000:00:05.0"), nic(0, id="a:2", pci="0000:00:05.0", port=2)
    assert merged(nics(one), nics(two, two)).nics == (one, two)


def test_two_gpus_of_one_model_stay_apart() -> None:
    gpus = (gpu(0), gpu(1))
    assert merged(Findings("a"), Findings("b", accelerators=gpus)).accelerators == gpus


def test_an_unknown_vendor_becomes_a_known_one() -> None:
    address = "0000:00:05.0"
    for kinds in (("infiniband", "cx"), ("cx", "infiniband")):
        found = merged(*(nics(nic(0, kind=kind, pci=address)) for kind in kinds))
        assert [nic.kind for nic in found.nics] == ["cx"]
        assert found.notes == ()


NCCL = ("cpu0/0", "0000:39:00.0", "0000:39:00.0/0")
SYSFS = ("pci0000:38", "0000:38:01.0", "0000:39:00.0", "0000:3a:00.0")


@pytest.mark.parametrize(
    ("first", "second", "kept", "contradict"),
    [
        (NCCL, SYSFS, SYSFS, False),
        (SYSFS, NCCL, SYSFS, False),
        (SYSFS, ("pci0000:40", *SYSFS[1:]), SYSFS, True),
        (("pci0000:10",), ("pci0000:20",), ("pci0000:10",), True),
        (("pci0000:10",), ("cpu0/0",), ("pci0000:10",), False),
    ],
)
def test_a_path_that_leaves_bridges_out_is_no_contradiction(
    first: tuple[str, ...], second: tuple[str, ...], kept: tuple[str, ...], contradict: bool
) -> None:
    one, two = (nics(nic(0, pci="0000:3b:00.0", pci_path=path)) for path in (first, second))
    found = merged(one, two)
    assert found.nics[0].pci_path == kept
    assert bool(found.notes) is contradict


def test_links_follow_their_accelerators_to_the_merged_ids() -> None:
    first = Findings("a", accelerators=(gpu(0, pci="0000:01:00.0"), gpu(1, pci="0000:02:00.0")))
    link = FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=4, gbs=100.0)
    to_switch = FabricLink(kind="nvlink", ends=("cuda0", "switch"), count=18, gbs=450.0)
    second = Findings(
        "b",
        accelerators=(gpu(0, pci="0000:02:00.0"), gpu(1, pci="0000:01:00.0")),  # numbered otherwise
        fabric=(link, to_switch),
        no_p2p=(("cuda0", "cuda1"),),
    )
    found = merged(first, second)
    assert [one.ends for one in found.fabric] == [("cuda1", "cuda0"), ("cuda1", "switch")]
    assert found.no_p2p == (("cuda1", "cuda0"),)
    again = merged(first, second, second)
    assert (again.fabric, again.no_p2p, again.notes) == (found.fabric, found.no_p2p, ())


def test_links_that_contradict_are_reported() -> None:
    gpus = (gpu(0, pci="0000:01:00.0"), gpu(1, pci="0000:02:00.0"))
    links = [FabricLink(kind="nvlink", ends=("cuda0", "cuda1"), count=n) for n in (4, 6)]
    found = merged(*(Findings("s", accelerators=gpus, fabric=(link,)) for link in links))
    assert [link.count for link in found.fabric] == [4]
    assert "count is 6 here and 4" in found.notes[0].message


def test_numa_nodes_and_bridges_are_merged_by_id() -> None:
    one = Findings("a", numa=(NumaNode(id=0, cpus=()),), bridges=(Bridge(id="0000:00:01.0"),))
    two = Findings(
        "b",
        numa=(NumaNode(id=0, cpus=(0, 1)), NumaNode(id=1, cpus=(2,))),
        bridges=(Bridge(id="0000:00:01.0", pcie_gbs=31.5),),
    )
    found = merged(one, two)
    assert found.numa == two.numa
    assert found.bridges == two.bridges
    assert found.notes == ()


def test_nics_of_one_name_are_one_whatever_their_ids() -> None:
    one, other = (Nic(id=each, kind="cx", name="mlx5_0") for each in ("mlx5_0", "0000:01:00.0"))
    assert _same(one, other)
    assert not _same(one, other.model_copy(update={"name": "mlx5_1"}))
    assert not _same(one, other.model_copy(update={"port": 2}))


BUS = "0000:05:00.0"


def npus(*indices: int, **more: object) -> Findings:
    each = (gpu(i, id=f"npu{i}", kind="ascend", pci=BUS, **more) for i in indices)
    return Findings(f"npus {indices}", accelerators=tuple(each))


@pytest.mark.parametrize("sources", [(npus(0, 1),), (npus(0, 1), npus(1)), (npus(0), npus(0, 1))])
def test_devices_of_one_function_that_a_source_tells_apart_stay_apart(
    sources: tuple[Findings, ...],
) -> None:
    found = merged(*sources)
    assert [one.id for one in found.accelerators] == ["npu0", "npu1"]
    assert found.notes == ()


@pytest.mark.parametrize("chips_first", [True, False])
def test_devices_of_one_function_have_its_place(chips_first: bool) -> None:
    function = npus(0, pci_path=("pci0000:00", "0000:00:01.0"), numa_node=1, pcie_gbs=31.5)
    found = merged(*((npus(0, 1), function) if chips_first else (function, npus(0, 1))))
    assert {(one.pci_path, one.numa_node, one.pcie_gbs) for one in found.accelerators} == {
        (("pci0000:00", "0000:00:01.0"), 1, 31.5)
    }
    assert len(found.accelerators) == 2


def test_what_several_backends_report_of_one_device_is_one() -> None:
    one = gpu(0, pci=BUS)
    assert merged(Findings("backends", accelerators=(one, one))).accelerators == (one,)
