"""What a stranger can and cannot do to a job: the lines of ``docs/trust.md``, one test each.

A stranger is another user of the machine who reaches the port of the job's store (``stranger.py``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stranger import (
    PATIENCE_S,
    Deed,
    Outcome,
    Strangers,
    connect,
    delete,
    disturb,
    fetch,
    fetch_secret,
    fill,
    host,
    join,
    listening,
    looked_around,
    meet,
    memfds,
    met,
    move,
    offer_secret,
    open_memory,
    outcome,
    overwrite,
    read,
    repeatedly,
    where,
    works,
)
from torch.distributed import TCPStore

import mkernel
from mkernel.backends.runtime import fd_exchange
from mkernel.cases.base import TOLERANCE
from mkernel.world import lifecycle
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.sealing import Seal

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
RANKS = 3
GIVE_UP_S = 8.0
"""Deadline of a job in which somebody waits in vain."""
another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)


def launched(
    body: Callable[..., Any], *arguments: Any, nodes: int = 1, **options: Any
) -> tuple[list[Any], list[Any]]:
    """The ranks' results, and what the strangers that they met have seen."""
    options = {"timeout_s": PATIENCE_S, "accelerator": "ascend", **options}
    with Strangers() as strangers:
        found = mkernel.launch(
            body,
            *arguments,
            nodes=nodes,
            ranks_per_node=RANKS if nodes == 1 else 1,
            on_report=strangers.hear,
            **options,
        )
    return found, strangers.seen


def assert_stopped(outcomes: list[Outcome], kind: str, named: str) -> None:
    """Every rank raised that error, which names the message."""
    for found, message in outcomes:
        assert (found, named in message) == (kind, True), outcomes


def assert_undisturbed(outcomes: list[Outcome]) -> None:
    """Every rank had right results."""
    for kind, error in outcomes:
        assert kind == "", outcomes
        assert float(error) <= TOLERANCE["float32"]


# ---- what stops a job -----------------------------------------------------------------------------


def met_while_joining(
    victim: int, name: str, deed: Deed, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Outcome:
    port, _ = where()

    def joined() -> float:
        with met(port, victim, name, deed, *arguments):
            join(port, **options)
            return works()

    return outcome(joined)


JOINING = {
    "nonce": (1, "nonce/1", {}),
    "hello": (1, "hello/1", {}),
    "topology": (0, "topology/0", {}),
    "memory": (1, "region/0/node0/1", {}),
    "memory of a call": (1, "region/1/node0/1", {}),
    "NIC address": (1, "nic/0/1", {"nodes": 2}),
    "NIC key": (1, "region/1/nic/1", {"nodes": 2}),
    "process group's address": (1, "group/0//cpu//0/1", {"accelerator": "streams"}),
}
ANOTHER_SECRET = "signed with another secret"


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *((what, ANOTHER_SECRET) for what in JOINING),
        ("hello", "rubbish"),
        ("hello", "signed with no secret"),
    ],
)
def test_overwriting_a_message_of_a_job_that_starts(what: str, how: str) -> None:
    victim, name, options = JOINING[what]
    outcomes, _ = launched(
        met_while_joining, victim, name, overwrite, (how,), options,
        nodes=options.get("nodes", 1), timeout_s=GIVE_UP_S if "group" in what else PATIENCE_S,
    )  # fmt: skip
    assert_stopped(outcomes, "Untrusted", name)


def mapped_late(victim: int, name: str, options: dict[str, Any]) -> Outcome:
    """As ``met_while_joining``, but the victim maps the others' memory when they have given up, and
    their memory is gone with them."""
    port, _ = where()
    rank, told = mkernel.world().rank, connect(port)

    def joined() -> float:
        with (
            met(port, victim, name, overwrite, ANOTHER_SECRET),
            pytest.MonkeyPatch.context() as patch,
        ):
            publish = Bootstrap.publish

            def published(self: Bootstrap, key: str, value: Any) -> None:
                publish(self, key, value)
                if key == name and rank == victim:
                    told.wait([f"gave up/{other}" for other in range(RANKS) if other != victim])

            patch.setattr(Bootstrap, "publish", published)
            join(port, **options)
            return works()

    found = outcome(joined)
    told.set(f"gave up/{rank}", "")
    return found


@pytest.mark.parametrize("what", ["memory", "memory of a call"])
def test_who_maps_memory_that_is_gone_hears_why(what: str) -> None:
    outcomes, _ = launched(mapped_late, *JOINING[what])
    assert_stopped(outcomes, "Untrusted", JOINING[what][1])


def gives_up(store: TCPStore, key: str) -> None:
    """Say, in a rank's name, that it has waited for rank 1 for too long."""
    name = "meeting"
    said = json.dumps({"awaited": "nonce", "missing": [1]}).encode()
    store.set(key.replace("secret/0", name), Seal(b"").close(name, said))


def test_saying_that_ranks_have_given_up() -> None:
    """Before the ranks of one host share a secret nobody can sign that."""
    outcomes, _ = launched(met_while_joining, 0, "secret/0", gives_up, (), {"secret": ""})
    assert_stopped(outcomes, "Timeout", "ranks [1] did not come ('nonce')")


def met_at_work(secret: str | None, key: str, deed: Deed, *arguments: Any) -> Outcome:
    port, _ = where()

    def worked() -> None:
        if secret is not None:
            join(port, secret=secret)
        world = mkernel.world()
        world.barrier()
        if world.rank == 0:
            meet(port, deed, f"{where()[1]}/{key}", *arguments)
        while True:
            world.barrier()

    return outcome(worked)


@pytest.mark.parametrize(
    ("how", "secret"),
    [("rubbish", None), ("unsigned", ""), ("signed with no secret", ""), (ANOTHER_SECRET, None)],
)
def test_writing_an_abort(how: str, secret: str | None) -> None:
    """Also in a job that was given no secret, as under torchrun on one host."""
    outcomes, _ = launched(met_at_work, secret, "abort", overwrite, how)
    assert_stopped(outcomes, "Untrusted", "abort")


@pytest.mark.parametrize("how", ["empty", ANOTHER_SECRET])
def test_writing_a_heartbeat(how: str) -> None:
    outcomes, _ = launched(met_at_work, None, "heartbeats/0", keep_overwriting, how)
    assert_stopped(outcomes, "Untrusted", "heartbeats/0")


def keep_overwriting(store: TCPStore, key: str, how: str) -> None:
    """As ``overwrite``, until the job has noticed: a rank writes new heartbeats all the time."""
    while not store.check([key.split("heartbeat", maxsplit=1)[0] + "abort"]):
        overwrite(store, key, how)


@pytest.mark.parametrize("how", ["put back", "delete"])
def test_putting_back_or_deleting_a_heartbeat(how: str) -> None:
    outcomes, _ = launched(met_at_work, None, "heartbeats/0", repeatedly, how)
    what = "heartbeats of node 0 were deleted" if how == "delete" else "was put in the place of"
    assert_stopped(outcomes, "Untrusted", what)


def barrier_without(victim: int) -> Outcome:
    port, _ = where()

    def worked() -> None:
        with met(port, victim, f"barrier/0/{victim}", delete):
            while True:
                mkernel.world().barrier()

    return outcome(worked)


def test_deleting_a_message() -> None:
    outcomes, _ = launched(barrier_without, 1, timeout_s=GIVE_UP_S)
    assert_stopped(outcomes, "Timeout", "ranks [1] did not come to a barrier")


@another_user
def test_offering_a_secret_in_rank_0s_place() -> None:
    outcomes, _ = launched(met_while_joining, 0, "secret/0", offer_secret, (), {"secret": ""})
    assert_stopped(outcomes, "Untrusted", "")


# ---- what does not disturb a job ------------------------------------------------------------------


def met_and_works(deed: Deed, *arguments: Any) -> Outcome:
    port, _ = where()

    def worked() -> float:
        mkernel.world().barrier()
        if mkernel.world().rank == 0:
            meet(port, deed, *arguments)
        mkernel.world().barrier()
        looked_around()
        return works()

    return outcome(worked)


def test_filling_the_store() -> None:
    assert_undisturbed(launched(met_and_works, fill, 64)[0])


def test_holding_connections_and_sending_rubbish() -> None:
    assert_undisturbed(launched(met_and_works, disturb)[0])


def shows_sockets() -> Outcome:
    return met_and_works(disturb, *listening())


def test_connecting_to_gloos_sockets() -> None:
    assert_undisturbed(launched(shows_sockets, accelerator="streams")[0])


def met_while_handing_out(deed: Deed) -> Outcome:
    return met_while_joining(0, "secret/0", deed, (), {"secret": ""})


@another_user
def test_fetching_the_secret_from_rank_0() -> None:
    outcomes, seen = launched(met_while_handing_out, fetch_secret)
    assert_undisturbed(outcomes)
    assert "no longer offers that descriptor to this user" in seen[0]


def offers_memory() -> Outcome:
    if mkernel.world().rank != 0:
        return met_and_works(read)
    memory = os.memfd_create("mkernel-test")
    offer = fd_exchange.offer(memory)
    try:
        os.close(fd_exchange.fetch(offer.address, PATIENCE_S))  # a process of this user can
        return met_and_works(fetch, offer.address)
    finally:
        offer.close()
        os.close(memory)


@another_user
def test_fetching_memory_from_a_socket() -> None:
    outcomes, seen = launched(offers_memory)
    assert_undisturbed(outcomes)
    assert "no longer offers that descriptor to this user" in seen[0]


def shows_memory() -> Outcome:
    fds = memfds() if mkernel.world().rank == 0 else []
    return met_and_works(open_memory, os.getpid(), fds)


@another_user
@pytest.mark.parametrize("nodes", [1, 2])
def test_opening_memory_in_proc(nodes: int) -> None:
    outcomes, seen = launched(shows_memory, nodes=nodes)
    assert_undisturbed(outcomes)
    assert set(seen[0]) == {"PermissionError"}


# ---- what a stranger cannot steer or read ---------------------------------------------------------


def test_reading_messages() -> None:
    for launch in ((reads_all,), (met_while_joining, 1, "region/0/node0/1", read, (), {})):
        outcomes, seen = launched(*launch)
        assert_undisturbed(outcomes)
        for sealed in seen[0]:
            for word in (b"host", b"pid", b"beat", b"cookie", b"accelerators"):
                assert word not in sealed


def reads_all() -> Outcome:
    _, prefix = where()
    names = ("nonce/0", "hello/0", "heartbeats/0", "topology/0")
    return met_and_works(read, *(f"{prefix}/{name}" for name in names))


@pytest.mark.parametrize("name", ["nonce/1", "hello/1", "topology/0"])
def test_replaying_a_message_of_another_world(name: str) -> None:
    victim = int(name[-1])
    outcomes, _ = launched(replayed, victim, name)
    # With a nonce that is not its own a rank has another key: either side's hello or abort comes first.
    keys_differ = "is not signed by a rank of this world"
    assert_stopped(outcomes, "Untrusted", keys_differ if "nonce" in name else name)


def replayed(victim: int, name: str) -> Outcome:
    """The message of the world before, which had the same secret."""
    _, prefix = where()
    return met_while_joining(victim, name, move, (f"{prefix}/{name}",), {})


def test_replaying_a_message_under_another_name() -> None:
    outcomes, _ = launched(moved)
    assert_stopped(outcomes, "Untrusted", "hello/1")


def moved() -> Outcome:
    generation = lifecycle.generations[lifecycle.STARTED] + 1
    source = f"mkernel/0/{generation}/nonce/1"
    return met_while_joining(1, "hello/1", move, (source,), {})


def hosted_by(port: int) -> Outcome:
    def joined() -> float:
        join(port)
        return works()

    return outcome(joined)


def test_hosting_the_store() -> None:
    outcomes, _ = launched(in_a_strangers_store)
    assert_undisturbed(outcomes)


def in_a_strangers_store() -> Outcome:
    port, _ = where()
    if mkernel.world().rank == 0:
        meet(port, host)
    mkernel.world().barrier()
    theirs = TCPStore("127.0.0.1", port, wait_for_workers=False).get("strangers port")
    return hosted_by(int(theirs))


def as_if_on_several_hosts(changes: dict[str, Any], secret: str) -> Outcome:
    port, _ = where()
    os.environ["LOCAL_WORLD_SIZE"] = "1"

    def joined() -> float:
        join(port, secret=secret, changes=changes)
        return works()

    return outcome(joined)


def test_several_hosts_without_a_secret() -> None:
    for outcomes in (
        launched(as_if_on_several_hosts, {}, "")[0],
        launched(as_if_on_several_hosts, {"allow_unsigned": True}, "fifteen letters")[0],
    ):
        assert_stopped(outcomes, "ArgumentError", "MKERNEL_JOB_SECRET")
    assert_undisturbed(launched(as_if_on_several_hosts, {"allow_unsigned": True}, "")[0])
    assert_undisturbed(launched(as_if_on_several_hosts, {}, "a secret of the user's own")[0])


# ---- the page ------------------------------------------------------------------------------------


def test_every_line_of_the_page_has_its_test() -> None:
    table = PAGE.read_text().partition("| a stranger |")[2].partition("\n\n")[0]
    named = [re.findall(r"`(test_\w+)`", line) for line in table.splitlines()[2:]]
    assert all(len(tests) == 1 for tests in named), "a line of the page without a test of its own"
    own = {
        name for name, value in globals().items() if name.startswith("test_") and callable(value)
    }
    own.remove("test_every_line_of_the_page_has_its_test")
    assert sorted(test for (test,) in named) == sorted(own)
