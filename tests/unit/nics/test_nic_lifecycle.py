"""Sessions leave nothing behind; addresses and keys are checked; providers explain themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nic_ranks import Rank, local_ranks, opened

from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import ArgumentError, BackendUnavailable, NicError


def test_order_of_use_is_checked() -> None:
    rank = Rank(0)
    with pytest.raises(NicError, match="before start"):
        rank.session.put(1, 0, 0, 0, 0, 0, 1)
    with pytest.raises(NicError, match="signal pad"):
        rank.session.start(rank.memory.address, ())
    rank.session.start(rank.pad, ())
    with pytest.raises(NicError, match="started already"):
        rank.session.start(rank.pad, ())
    assert rank.session.fifo != 0
    rank.close()


def test_the_proxy_is_pinned() -> None:
    cpu = min(os.sched_getaffinity(0))
    rank = Rank(0)
    rank.session.start(rank.pad, (cpu,))
    names = {
        Path(f"/proc/self/task/{tid}/comm").read_text().strip(): int(tid)
        for tid in os.listdir("/proc/self/task")
    }
    assert os.sched_getaffinity(names["mkernel-proxy"]) == {cpu}
    rank.close()
    rank = Rank(0)
    with pytest.raises(NicError, match="CPU"):
        rank.session.start(rank.pad, (1 << 20,))
    rank.close()


def test_address_names_both_ends() -> None:
    ranks = [Rank(i) for i in range(3)]
    for_two = ranks[0].session.address(2)
    ranks[1].session.address(0)
    with pytest.raises(ArgumentError, match="address"):
        ranks[1].session.connect(0, for_two)
    with pytest.raises(ArgumentError, match="address"):
        ranks[1].session.connect(2, for_two)
    for each in ranks:
        each.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "x" * 10_000,
        '{"rank": 1}',
        json.dumps({"rank": 1, "region": 0, "address": -1, "nbytes": 8, "rkeys": [1]}),
        json.dumps({"rank": 1, "region": 0, "address": 1, "nbytes": 0, "rkeys": [1]}),
        json.dumps({"rank": 1, "region": 0, "address": 1, "nbytes": 8, "rkeys": [1 << 32]}),
        json.dumps({"rank": 1, "region": 0, "address": 1, "nbytes": 8, "rkeys": ["1"]}),
        json.dumps({"rank": 1, "region": 1, "address": 1, "nbytes": 8, "rkeys": [1]}),
        json.dumps({"rank": 2, "region": 0, "address": 1, "nbytes": 8, "rkeys": [1]}),
        json.dumps({"rank": 1, "region": 0, "address": 1, "nbytes": 8, "rkeys": [1], "x": 1}),
    ],
)
def test_a_key_from_elsewhere_is_checked(text: str) -> None:
    rank = Rank(0)
    rank.session.address(1)
    with pytest.raises(ArgumentError) as caught:
        rank.session.bind(0, 1, text)
    assert caught.value.argument == "key"
    rank.session.bind(
        0, 1, json.dumps({"rank": 1, "region": 0, "address": 1, "nbytes": 8, "rkeys": [1]})
    )
    rank.close()


@pytest.mark.parametrize(
    "change",
    [
        {"qp_num": 1 << 24},
        {"mtu": 1000},
        {"gid": "zz" * 16},
        {"gid": "00" * 15},
        {"nic": "efa"},
        {"extra": 1},
        {"lid": True},
        {"rail": 8},
        {"receives": 0},
        {"lanes": []},
    ],
)
def test_an_address_from_elsewhere_is_checked(change: dict[str, object]) -> None:
    a, b = Rank(0), Rank(1)
    a.session.address(1)
    good = json.loads(b.session.address(0))
    lane = good["lanes"][0]
    bad = {"lanes": [lane | change]} if change.keys() <= lane.keys() else change
    with pytest.raises(ArgumentError) as caught:
        a.session.connect(1, json.dumps(good | bad))
    assert caught.value.argument == "address"
    a.session.connect(1, json.dumps(good))
    a.close()
    b.close()


def test_a_peer_that_is_gone_does_not_connect() -> None:
    a, b = Rank(0), Rank(1)
    a.session.address(1)
    address = b.session.address(0)
    b.close()
    with pytest.raises(NicError, match="RTR"):
        a.session.connect(1, address)
    a.close()


def test_registration_is_checked() -> None:
    rank = Rank(0)
    with pytest.raises(ArgumentError, match="region"):
        rank.session.register(1024, rank.memory.address, 8)
    with pytest.raises(ArgumentError, match="nbytes"):
        rank.session.register(0, rank.memory.address, 0)
    with pytest.raises(NicError, match="ibv_reg_mr"):
        rank.session.register(0, 4096, 4096)
    rank.session.register(0, rank.memory.address, 8)
    with pytest.raises(NicError, match="already"):
        rank.session.register(0, rank.memory.address, 8)
    rank.close()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("signal", (1, 0, 0, 0, 8, 1 << 23, 1)),
        ("signal", (1, 0, 0, 0, 8, -1, 1)),
        ("value", (1, 0, 0, 0, 8, 0, 1 << 23)),
        ("value", (1, 0, 0, 0, 8, 0, -1)),
        ("local", (1, 0, -1, 0, 8, 0, 1)),
        ("nbytes", (1, 0, 0, 0, 1 << 63, 0, 1)),
    ],
)
def test_illegal_arguments_are_named(argument: str, values: tuple[int, ...]) -> None:
    with local_ranks() as (a, _):
        with pytest.raises(ArgumentError) as caught:
            a.session.put(*values)
        assert caught.value.argument == argument
        assert a.session.failure() is None


def test_soft_is_usable_and_probed() -> None:
    nic = Cx7Nic()
    assert nic.status("soft").usable
    (found,) = nic.probe("soft")
    assert (found.id, found.kind, found.emulated, found.active) == ("soft0", "soft", True, True)
    assert found.link_layer == "Ethernet"


def test_a_missing_provider_says_what_to_do() -> None:
    nic = Cx7Nic()
    status = nic.status("/nowhere/libnothing.so")
    assert not status.usable
    assert "/nowhere/libnothing.so" in status.detail
    assert status.remedy
    assert nic.probe("/nowhere/libnothing.so") == ()
    with pytest.raises(BackendUnavailable, match="libnothing"):
        opened(nic, verbs="/nowhere/libnothing.so")


def test_a_library_that_is_no_provider_is_refused() -> None:
    status = Cx7Nic().status("libc.so.6")
    assert not status.usable
    assert "ibv_get_device_list" in status.detail


def test_the_system_provider_answers_either_way() -> None:
    status = Cx7Nic().status("system")
    assert status.usable or status.remedy


def test_unknown_devices_and_gids_are_named() -> None:
    with pytest.raises(BackendUnavailable, match="soft0"):
        opened(Cx7Nic(), device="mlx5_0")
    with pytest.raises(BackendUnavailable, match="gid_index 9"):
        opened(Cx7Nic(), gid_index=9)
    with pytest.raises(BackendUnavailable, match="port"):
        opened(Cx7Nic(), device="soft0:2")


def test_a_device_without_rdma_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_RDMA_WRITE", "0")
    with pytest.raises(BackendUnavailable, match="no RDMA write"):
        opened(EfaNic())
