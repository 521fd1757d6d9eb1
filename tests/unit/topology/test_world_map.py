"""A world's map: each part is found once, by whoever asks first."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run
from counted import found
from devices import gpu, nic, node, world
from shipped import constants_of

from mkernel.cli.plan import command
from mkernel.errors import ArgumentError
from mkernel.topology.placement import Pinning
from mkernel.topology.world_map import world_map

CONSTANTS = constants_of("ascend")
TWO = world(node((gpu(0), gpu(1)), (nic(0), nic(1))), node((gpu(0), gpu(1)), (nic(0), nic(1))))


def test_each_part_is_found_once_and_only_when_asked_for() -> None:
    with found() as counts:
        made = world_map(TWO, 2, CONSTANTS)
        assert counts == {"kinds": 1}
        assert made.placement is made.placement
        assert counts == {"kinds": 1, "place": 1}
        assert made.links is made.links
        assert counts == {"kinds": 1, "place": 1, "routes": 1}
    assert made == world_map(TWO, 2, CONSTANTS)
    assert hash(made) == hash(world_map(TWO, 2, CONSTANTS))
    assert made != world_map(TWO, 1, CONSTANTS)


@pytest.mark.parametrize(
    ("nodes", "group", "nics"), [(2, False, True), (2, True, False), (1, False, False)]
)
def test_ranks_have_nics_where_nics_carry_what_they_send(
    nodes: int, group: bool, nics: bool
) -> None:
    made = world_map(world(*TWO.nodes[:nodes]), 2, CONSTANTS, group=group)
    assert [bool(rank.nics) for rank in made.placement] == [nics] * 2 * nodes


def test_pins_that_do_not_fit_are_refused_by_name() -> None:
    made = world_map(TWO, 2, CONSTANTS, pinning=Pinning(nics={"cuda0": ("gone",)}))
    with pytest.raises(ArgumentError, match=r"pinning.nics\[cuda0\] = gone .*: mlx5_0"):
        _ = made.links


def test_mkernel_plan_finds_them_once(tmp_path: Path) -> None:
    size = ("--m", "4096", "--n", "1024", "--k", "1024")
    with found() as counts:
        run(command, "ag_gemm", *size, "--accelerator", "ascend", "--explain", "--simulate")
    assert counts == {"kinds": 1, "place": 1, "routes": 1}


def test_detours_are_for_who_takes_them() -> None:
    """Across rails NICs are half as fast: a neighbour's would be faster. A NIC that does not reach the
    device has no other way."""
    slow = CONSTANTS.model_copy(update={"cross_rail_share": 0.5, "p2p_gbs": 100.0})
    two = world(*[node((gpu(0), gpu(1)), (nic(0), nic(1)))] * 2)
    made = world_map(two, 2, slow)
    assert made.fastest_links.table.route(made.placement, 0, 3).kind == "relay"
    direct = made.links.table.route(made.placement, 0, 3)
    assert (direct.kind, direct.src_relay, direct.staged) == ("nic", None, ())
    assert direct.bandwidth_gbs == 0.5 * made.links.table.route(made.placement, 0, 2).bandwidth_gbs
    far = world(*[node((gpu(0),), (nic(0, gpudirect=False),))] * 2)
    made = world_map(far, 1, slow)
    assert made.links.table.route(made.placement, 0, 1).staged == ("source", "destination")
