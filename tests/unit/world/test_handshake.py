"""A world's key: the same on all ranks, another one for every world, and no job without a secret."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import SecretStr
from torch.distributed import HashStore

from mkernel.backends.runtime import fd_exchange
from mkernel.errors import ArgumentError, Timeout, Untrusted
from mkernel.settings import Settings
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.handshake import world_key

SECRET = "0123456789abcdef"


def keys(
    secrets: list[str],
    store: HashStore | None = None,
    one_host: bool | None = False,
    **changes: Any,
) -> list[bytes | type[BaseException]]:
    """The key that each rank comes to, or the type of what it raises."""
    store = store or HashStore()

    def key(rank: int) -> bytes | type[BaseException]:
        chosen = {"timeout_s": 60.0, "job_secret": SecretStr(secrets[rank]), **changes}
        settings = Settings().model_copy(update=chosen)
        try:
            return world_key(
                store, rank, len(secrets), name="tp", one_host=one_host, settings=settings
            )
        except Exception as error:
            return type(error)

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(key, range(len(secrets))))


@pytest.mark.parametrize(
    ("secret", "one_host"), [(SECRET, True), (SECRET, False), ("", True), ("", None)]
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_share_a_key_that_is_new(secret: str, one_host: bool | None, ranks: int) -> None:
    worlds = [keys([secret] * ranks, one_host=one_host) for _ in range(2)]
    for found in worlds:
        assert len(set(found)) == 1
        assert isinstance(found[0], bytes)
        assert len(found[0]) == 32
    assert worlds[0][0] != worlds[1][0]


def test_ranks_that_find_out_that_they_are_on_several_hosts_need_a_secret() -> None:
    store = HashStore()
    Bootstrap(store).publish("greeting/1", "another host")
    with pytest.raises(ArgumentError, match="MKERNEL_JOB_SECRET"):
        world_key(store, 0, 2, name="tp", one_host=None, settings=Settings())


def test_ranks_of_different_secrets_are_told() -> None:
    assert keys([SECRET, SECRET + "!"]) == [Untrusted, Untrusted]


def test_a_rank_that_does_not_come_is_named() -> None:
    settings = Settings().model_copy(update={"timeout_s": 0.2, "job_secret": SecretStr(SECRET)})
    with pytest.raises(Timeout, match=r"ranks \[1\] did not come .* world 'tp'.* in one order"):
        world_key(HashStore(), 0, 2, name="tp", one_host=True, settings=settings)


LATE = {
    "of the secret's hosts": (SECRET, False, 1),
    "of one host": ("", True, 1),
    "of one that makes the secret": ("", True, 0),
    "of some host": ("", None, 1),
}


@pytest.mark.parametrize("who", LATE)
def test_a_rank_that_comes_after_others_gave_up_gives_up_as_they_did(who: str) -> None:
    """It would wait for them until its own deadline, and say then that they had not come."""
    secret, one_host, late = LATE[who]
    store = HashStore()

    def comes(rank: int, timeout_s: float) -> str:
        chosen = {"timeout_s": timeout_s, "job_secret": SecretStr(secret)}
        settings = Settings().model_copy(update=chosen)
        with pytest.raises(Timeout) as raised:
            world_key(store, rank, 2, name="tp", one_host=one_host, settings=settings)
        return str(raised.value)

    gave_up = comes(1 - late, 0.2)
    assert f"ranks [{late}] did not come" in gave_up
    assert comes(late, 60.0) == gave_up.replace("0.2 s", "60 s")


def test_a_rank_that_would_give_up_as_others_have_met_meets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    collect = Bootstrap.collect

    def late(self: Bootstrap, key: str, *arguments: Any, **options: Any) -> Any:
        """Rank 1 hears of rank 0 as that one's time is over."""
        monkeypatch.undo()
        Bootstrap(store, SECRET.encode()).publish("nonce/1", "one")
        Bootstrap(store, SECRET.encode()).publish("meeting", True)
        raise Timeout("rank 1 did not come")

    monkeypatch.setattr(Bootstrap, "collect", late)
    settings = Settings().model_copy(update={"job_secret": SecretStr(SECRET)})
    assert len(world_key(store, 0, 2, name="tp", one_host=True, settings=settings)) == 32
    assert Bootstrap.collect is collect


@pytest.mark.parametrize(
    "said",
    [False, [], {}, "met", {"awaited": "nonce", "missing": []}, {"awaited": "all", "missing": [1]},
     {"awaited": "nonce", "missing": [2]}, {"awaited": "nonce", "missing": [[1]]}],
)  # fmt: skip
def test_what_no_rank_says_of_a_meeting(said: Any) -> None:
    store = HashStore()
    Bootstrap(store).publish("meeting", said)
    with pytest.raises(Untrusted, match="'meeting' is none that a rank writes"):
        world_key(store, 0, 2, name="tp", one_host=True, settings=Settings())


def test_who_was_given_a_secret_is_told_by_no_stranger_that_others_gave_up() -> None:
    store = HashStore()
    Bootstrap(store).publish("meeting", {"awaited": "nonce", "missing": [1]})
    settings = Settings().model_copy(update={"job_secret": SecretStr(SECRET)})
    with pytest.raises(Untrusted, match="meeting"):
        world_key(store, 0, 2, name="tp", one_host=True, settings=settings)


@pytest.mark.parametrize(
    "address",
    [None, [], {}, {"socket": 1}, {"socket": "mkernel-nobody", "cookie": "00" * 16},
     {"socket": "x" * 500, "cookie": "00"}, {"socket": "mkernel", "cookie": "not hex"}],
)  # fmt: skip
def test_an_address_that_leads_nowhere(address: Any) -> None:
    store = HashStore()
    Bootstrap(store).publish("secret/0", address)
    with pytest.raises(Untrusted if address is not None else Timeout, match="secret"):
        world_key(
            store, 1, 2, name="tp", one_host=True,
            settings=Settings().model_copy(update={"timeout_s": 1.0}),
        )  # fmt: skip


@pytest.mark.parametrize("held", ["", "mkernel job secret", "x" * 4096])
def test_a_memory_that_holds_something_else(held: str) -> None:
    """Whose offer was put into the store in place of rank 0's."""
    memory = os.memfd_create("not-a-secret", os.MFD_CLOEXEC)
    os.pwrite(memory, held.encode(), 0)
    store = HashStore()
    offered = fd_exchange.offer(memory)
    Bootstrap(store).publish("secret/0", offered.address)
    with pytest.raises(Untrusted, match="it holds something else"):
        world_key(store, 1, 2, name="tp", one_host=True, settings=Settings())
    offered.close()
    os.close(memory)


def test_of_the_offer_nothing_is_left() -> None:
    """Neither descriptors nor the secret: who comes later finds nobody."""
    keys([""] * 2, one_host=True)  # what the first offer of a process makes stays
    before = set(os.listdir("/proc/self/fd"))
    store = HashStore()
    assert len(set(keys([""] * 2, store, one_host=True))) == 1
    address: Any = Bootstrap(store).peek("secret/0")
    with pytest.raises(OSError, match=r"."):
        fd_exchange.fetch(address, 1.0)
    assert set(os.listdir("/proc/self/fd")) == before
