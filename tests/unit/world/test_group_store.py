"""The store of process groups: torch's requests as sealed messages."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from mkernel.errors import PeerFailure, Timeout, Unsupported, Untrusted
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.process_group import GroupStore, innermost


def stores(raw: HashStore, secret: bytes = b"secret") -> tuple[GroupStore, PrefixStore]:
    """A group's store, and as C++ sees it: in a prefix of torch's."""
    own = GroupStore(Bootstrap(raw, secret), 0.2, lambda: None)
    return own, PrefixStore("0", own)


def test_values_travel_sealed_through_torch() -> None:
    raw = HashStore()
    _one, mine = stores(raw)
    _two, theirs = stores(raw)
    value = bytes(range(256))
    mine.set("address", value)
    assert bytes(theirs.get("address")) == value
    assert theirs.check(["address"])
    assert not theirs.check(["address", "other"])
    theirs.wait(["address"], timedelta(seconds=1))
    assert value[:16] not in bytes(raw.get("group/0/address"))
    if hasattr(
        mine, "clone"
    ):  # not before torch 2.9, and nothing asks for it there (world/groups.py)
        assert mine.clone() is not None


def test_a_value_is_waited_for() -> None:
    raw = HashStore()
    _one, mine = stores(raw)
    _two, theirs = stores(raw)
    timer = threading.Timer(0.05, lambda: theirs.set("late", b"value"))
    timer.start()
    mine.wait(["late"], timedelta(seconds=60))
    assert bytes(mine.get("late")) == b"value"
    timer.join()


def test_a_wait_ends() -> None:
    own, torchs = stores(HashStore())
    with pytest.raises(Timeout, match="'0/never'"):
        torchs.get("never")
    with pytest.raises(Timeout, match=r"within 0\.1 s"):
        torchs.wait(["never"], timedelta(seconds=0.1))
    with own.waiting_at_least(0.3), pytest.raises(Timeout, match=r"within 0\.3 s"):
        torchs.wait(["never"], timedelta(seconds=0.1))
    with pytest.raises(Timeout, match=r"within 0\.1 s"):
        torchs.wait(["never"], timedelta(seconds=0.1))

    def broken() -> None:
        raise PeerFailure("rank 1 died", 1)

    own._check = broken
    with pytest.raises(PeerFailure, match="rank 1 died"):
        torchs.wait(["never"], timedelta(seconds=60))


def test_a_strangers_address_is_refused_and_told() -> None:
    raw = HashStore()
    told: list[str] = []
    own = GroupStore(
        Bootstrap(raw, b"secret", lambda error: told.append(str(error))), 1.0, lambda: None
    )
    raw.set("group/address", "127.0.0.1:1")
    with pytest.raises(Untrusted, match="group/address"):
        own.get("address")
    assert len(told) == 1


def test_a_value_is_compared_and_set_as_torchs_own_stores_do() -> None:
    """Also where a world's heartbeats are in the store of a group that another world has made."""
    _own, torchs = stores(HashStore())
    for store in (torchs, HashStore()):
        assert bytes(store.compare_set("key", "no", "one")) == b"no"
        assert not store.check(["key"])
        assert bytes(store.compare_set("key", "", "one")) == b"one"
        assert bytes(store.compare_set("key", "no", "two")) == b"one"
        assert bytes(store.compare_set("key", "one", b"two\xff")) == b"two\xff"
        assert bytes(store.get("key")) == b"two\xff"


def test_counters_are_refused() -> None:
    _own, torchs = stores(HashStore())
    with pytest.raises(Unsupported, match="counter"):
        torchs.add("count", 1)


def test_who_clones_it_gets_it_itself() -> None:
    own, _torchs = stores(HashStore())
    assert own.clone() is own


def test_the_store_inside_of_prefixes() -> None:
    raw = HashStore()
    for each in (raw, PrefixStore("a", raw), PrefixStore("b", PrefixStore("a", raw))):
        assert isinstance(innermost(each), HashStore)
