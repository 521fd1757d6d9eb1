"""How ranks find, as they join, that they do not fit together."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from mkernel.errors import ArgumentError, PeerFailure, PlanMismatch, Unsupported
from mkernel.settings import Settings
from mkernel.version import __version__
from mkernel.world.heartbeats import Heartbeat, Report
from mkernel.world.identity import Backends, Identity
from mkernel.world.join import Membership
from mkernel.world.watchdog import Peer


def member(identity: Identity, exchange: Any = None, *companions: str) -> Membership:
    nobody: Any = None
    backends = Backends("first", "efa", "system", companions)
    return Membership("test", None, identity, backends, Settings(), exchange, nobody)


class Exchange:
    """Where rank 1 says the same as rank 0, but for ``told``, and for ``changes`` of its world."""

    def __init__(self, told: dict[str, Any] | None = None, **changes: Any) -> None:
        self.told, self.changes = told or {}, changes
        self.hello: dict[str, Any] = {}

    def publish(self, key: str, value: Any) -> None:
        assert key == "hello/0"
        self.hello = value

    def collect(self, key: str) -> dict[int, Any]:
        assert key == "hello"
        other = self.hello | self.told | {"world": self.hello["world"] | self.changes}
        return {0: self.hello, 1: other}


def test_ranks_that_say_the_same_know_each_other() -> None:
    peers = member(Identity(0, 1, 2), Exchange())._meet()
    assert [(peer.rank, peer.host, peer.pid) for peer in peers.values()] == [
        (rank, peers[0].host, peers[0].pid) for rank in (0, 1)
    ]


def of_one_node() -> tuple[Membership, Membership]:
    """Ranks 2 and 3 of four on two nodes, which have met: all say what rank 2 says."""
    exchange = Mock()
    exchange.collect = lambda key: dict.fromkeys(range(4), exchange.publish.call_args_list[0][0][1])
    one, other = (member(Identity(rank, 2, 2), exchange) for rank in (2, 3))
    for each in (one, other):
        each._meet()
    return one, other


def test_ranks_of_a_node_share_the_table_that_its_first_has_made() -> None:
    one, other = of_one_node()
    with one._undo, other._undo:
        other._heartbeat_table().write(3, Report(Heartbeat(5)))
        assert one._heartbeat_table().row() == (Heartbeat(), Heartbeat(5))


def test_a_table_that_is_gone_was_a_dead_ranks() -> None:
    one, other = of_one_node()
    one._undo.close()
    other._failure = Mock()
    with pytest.raises(PeerFailure, match="rank 2 died, or ended its world, before") as raised:
        other._heartbeat_table()
    assert raised.value.peer == 2
    other._failure.look_for_abort.assert_called_once_with()


@pytest.mark.parametrize(
    ("changes", "field", "values", "advice"),
    [
        ({"nodes": 7}, "world.nodes", (1, 7), "start every rank with the same options"),
        (
            {"accelerator": "another"}, "world.accelerator", ("first", "another"),
            "left to `auto` .*MKERNEL_ACCELERATOR",
        ),
        *(
            ({name: told}, f"world.{name}", (own, told), "start every rank with the same options")
            for name, own, told in (
                ("ranks_per_node", 2, 3), ("nic", "efa", "cx7"), ("verbs", "system", "soft"),
            )
        ),
        ({"mkernel": "0.0"}, "world.mkernel", (__version__, "0.0"), "install the same version"),
        (
            {"mkernel": "0.0", "nodes": 7}, "world.mkernel", (__version__, "0.0"),
            "install the same version",
        ),
    ],
)  # fmt: skip
def test_what_another_rank_says_otherwise_is_named(
    changes: dict[str, Any], field: str, values: tuple[Any, Any], advice: str
) -> None:
    with pytest.raises(PlanMismatch, match=advice) as raised:
        member(Identity(0, 1, 2), Exchange(**changes))._meet()
    found = raised.value
    assert (found.ranks, found.field, found.values) == ((0, 1), field, values)


def test_a_hello_of_another_version_may_mean_anything() -> None:
    strange = Exchange({"host": {"a host": "in other words"}}, mkernel="0.0.7")
    with pytest.raises(PlanMismatch, match=r"0\.0\.7.*install the same version"):
        member(Identity(0, 1, 2), strange)._meet()


def engine(name: str, device: str = "cpu", *, process_group: bool = False) -> Any:
    return SimpleNamespace(
        accelerator=SimpleNamespace(device=device),
        backends=SimpleNamespace(accelerator=name),
        claims=SimpleNamespace(process_group=process_group),
    )


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("process_group", [False, True])
def test_between_nodes_a_companion_takes_a_process_group(nodes: int, process_group: bool) -> None:
    joining = member(Identity(0, nodes, 1), None, "other")
    own, other = engine("first"), engine("other", process_group=process_group)
    joining.engines = {"first": own, "other": other}
    joining._check_companion(own)
    refused = nodes > 1 and not process_group
    said = pytest.raises(Unsupported, match=r"'other' puts through a NIC .* before 'first'")
    with said if refused else nullcontext():
        joining._check_companion(other)


def test_companions_share_a_kind_of_device() -> None:
    joining = member(Identity(0, 1, 1), None, "other")
    joining.engines = {"first": engine("first"), "other": engine("other", "cuda")}
    with pytest.raises(Unsupported, match="'other' takes tensors on 'cuda', and 'first' on 'cpu'"):
        joining._check_companion(joining.engines["other"])


def test_ranks_of_a_node_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = member(Identity(0, 2, 2))
    hosts = ["one", "one", "one", "other"]
    peers = {rank: Peer(rank, host, 1) for rank, host in enumerate(hosts)}
    monkeypatch.setattr(joining, "_meet", lambda: peers)
    with pytest.raises(ArgumentError, match="ranks 2 and 3 of one node are on different hosts"):
        joining._open()


def test_who_cannot_join_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    joining, failure = member(Identity(0, 1, 2)), Mock()
    monkeypatch.setattr(joining, "_failure", failure)
    error = OSError("no memory")
    monkeypatch.setattr(joining, "_open", Mock(side_effect=error))
    with pytest.raises(OSError, match="no memory"):
        joining.join()
    assert failure.mock_calls == [
        call.tell(error), call.stop(), call.close(), call.raise_first_cause(error),
    ]  # fmt: skip
