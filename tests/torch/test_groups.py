"""Worlds of groups: tensor, data and expert parallel groups side by side in one job."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_ranks import EVERY_OP, TIMEOUT_S, gathers, mesh_2x2, ranks, reduces, routes
from pydantic import SecretStr
from torch import distributed

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import MkernelError, PeerFailure, Timeout
from mkernel.settings import Settings
from mkernel.world import groups as groups_module
from mkernel.world import handshake, join
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.groups import Group
from mkernel.world.sealing import Seal

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ACCELERATORS = ["streams", "ascend"]
LIMIT = TOLERANCE["float32"]


# ---- side by side --------------------------------------------------------------------------------


def two_dimensions(accelerator: str) -> list[tuple[str, str, float]]:
    mesh = mesh_2x2()
    names = {}
    for dimension in ("tp", "dp"):
        world = mkernel.init(mesh[dimension], accelerator=accelerator, timeout_s=TIMEOUT_S)
        assert world.name == mesh[dimension].get_group().group_name
        assert (world.size, world.rank) == (2, mesh.get_local_rank(dimension))
        names[dimension] = world.name
    assert mkernel.world() is mkernel.world(mesh["tp"]), "the first world is the default"
    return [
        (dimension, op.__name__, op(group, turn))
        for turn, op in enumerate(EVERY_OP)
        for dimension, group in (
            ("tp", mesh["tp"]), ("dp", mesh["dp"].get_group()), ("tp", None), ("dp", names["dp"]),
            ("tp", mkernel.world(mesh["tp"])),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_every_op_in_two_dimensions(accelerator: str, tmp_path: Path) -> None:
    for found in ranks(two_dimensions, tmp_path, accelerator):
        assert len(found) == 25
        assert [one for one in found if not one[2] <= LIMIT] == []


def one_after_another(accelerator: str, order: list[str]) -> list[float]:
    mesh = mesh_2x2()
    groups: dict[str, Group] = {"tp": mesh["tp"], "dp": mesh["dp"], "all": distributed.group.WORLD}
    for group in groups.values():
        mkernel.init(group, accelerator=accelerator, timeout_s=TIMEOUT_S)
    found = []
    for ending in order:
        found += [gathers(group, turn) for turn, group in enumerate(groups.values())]
        mkernel.finalize(group=groups.pop(ending))
    again = mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    assert mkernel.world() is again, "there was no default world any more"
    return [*found, gathers(None), reduces(mesh["tp"])]


@pytest.mark.parametrize(
    ("accelerator", "order"),
    [
        ("streams", ["all", "dp", "tp"]),
        ("ascend", ["dp", "tp", "all"]),
    ],
)
def test_worlds_end_in_any_order(accelerator: str, order: list[str], tmp_path: Path) -> None:
    for found in ranks(one_after_another, tmp_path, accelerator, order):
        assert len(found) == 8
        assert max(found) <= LIMIT


def in_the_backends_default_group(nodes: int) -> list[tuple[int, float]]:
    """The launched world's accelerator has made torch's default group; meshes are made of that."""
    mesh = mesh_2x2()
    found = []
    for dimension in ("tp", "dp"):
        world = mkernel.init(mesh[dimension])
        assert world.backends == mkernel.world().backends
        assert world.settings.timeout_s == TIMEOUT_S
        found.append((world.identity.nodes, gathers(mesh[dimension])))
    mkernel.finalize(group=mkernel.world())
    gc.collect()  # its store carries the messages of the others
    return [*found, (nodes, gathers(mesh["dp"])), (nodes, gathers(mesh["tp"]))]


@pytest.mark.parametrize("nodes", [1, 2])
def test_groups_of_a_launched_world(nodes: int) -> None:
    """Nodes that the launch emulates are those of its groups too."""
    everywhere = mkernel.launch(
        in_the_backends_default_group, nodes,
        nodes=nodes, ranks_per_node=4 // nodes, accelerator="streams", timeout_s=TIMEOUT_S,
    )  # fmt: skip
    for found in everywhere:
        assert [count for count, _ in found[:2]] == [1, nodes]
        assert max(error for _, error in found) <= LIMIT


def through_the_nic() -> list[tuple[int, bool, float]]:
    """Tensor parallel inside the emulated nodes, experts across them."""
    os.environ["MKERNEL_NODES"] = "2"
    mesh = mesh_2x2()
    found = []
    for dimension, op in (("tp", gathers), ("dp", routes)):
        world = mkernel.init(mesh[dimension], accelerator="ascend", timeout_s=TIMEOUT_S)
        errors = [op(world, turn) for turn in range(3)]
        found.append((world.identity.nodes, world.nic is not None, max(errors)))
    found.append((1, False, reduces(mesh["tp"])))
    return found


def test_experts_across_nodes_beside_tensor_parallel_inside(tmp_path: Path) -> None:
    for found in ranks(through_the_nic, tmp_path):
        assert [one[:2] for one in found] == [(1, False), (2, True), (1, False)]
        assert max(error for *_, error in found) <= LIMIT


# ---- failures ------------------------------------------------------------------------------------


def one_breaks(accelerator: str) -> list[float]:
    mesh = mesh_2x2()
    tp = mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    mkernel.init(mesh["dp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    found = [gathers(tp), gathers(mesh["dp"])]
    if distributed.get_rank() == 1:
        tp.close(ValueError("rank 1 has had enough"))
    elif distributed.get_rank() == 0:
        with pytest.raises(PeerFailure, match="rank 1 has had enough"):
            gathers(tp, 1)
        tp.close()
    found += [gathers(mesh["dp"], turn) for turn in range(2, 6)]
    if distributed.get_rank() < 2:
        mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    return [*found, gathers(mesh["tp"], 6), gathers(mesh["dp"], 7)]


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_broken_world_leaves_the_others_usable(accelerator: str, tmp_path: Path) -> None:
    for found in ranks(one_breaks, tmp_path, accelerator):
        assert len(found) == 8
        assert max(found) <= LIMIT


SHORT_S = 3.0


def calls_in_two_orders(accelerator: str, known: bool) -> tuple[str, float]:
    one, other = distributed.new_group([0, 1]), distributed.new_group([0, 1])
    for group in (one, other):
        mkernel.init(group, accelerator=accelerator, timeout_s=TIMEOUT_S)
        if known:
            gathers(group)
        mkernel.world(group).set_timeout(SHORT_S)
    start = time.monotonic()
    with pytest.raises(Timeout) as caught:
        gathers(one if distributed.get_rank() == 0 else other)
    with contextlib.suppress(Timeout):  # of the world in which the other rank was
        mkernel.finalize()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("accelerator", "known"), [("streams", False), ("ascend", True)])
def test_calls_in_two_orders_end_by_the_deadline(
    accelerator: str, known: bool, tmp_path: Path
) -> None:
    for rank, (text, seconds) in enumerate(
        ranks(calls_in_two_orders, tmp_path, accelerator, known, size=2)
    ):
        assert seconds < TIMEOUT_S / 2
        assert f"Rank {1 - rank} was busy with world" in text
        assert "one order" in text


def made_in_two_orders() -> tuple[str, float]:
    groups = [distributed.new_group([0, 1]), distributed.new_group([0, 1])]
    start = time.monotonic()
    with pytest.raises(Timeout) as caught:
        mkernel.init(groups[distributed.get_rank()], accelerator="streams", timeout_s=SHORT_S)
    return str(caught.value), time.monotonic() - start


def test_worlds_made_in_two_orders_end_by_the_deadline(tmp_path: Path) -> None:
    for rank, (text, seconds) in enumerate(ranks(made_in_two_orders, tmp_path, size=2)):
        assert seconds < TIMEOUT_S / 2
        assert f"ranks [{1 - rank}] did not come" in text
        assert "several in one order" in text


# ---- what a group may be -------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    mesh = mesh_2x2()
    pair = distributed.new_group([0, 1])
    rank = distributed.get_rank()
    wrong: dict[str, Callable[[], object]] = {
        "a mesh of two dimensions": lambda: mkernel.init(mesh, accelerator="streams"),
        "no group": lambda: mkernel.init("tp", accelerator="streams"),  # type: ignore[arg-type]
        "no world yet": lambda: mkernel.world(mesh["dp"]),
        "no world of that name": lambda: gathers("dp"),
        "no default world": lambda: gathers(None),
    }
    if rank > 1:
        wrong["not in it"] = lambda: mkernel.init(pair, accelerator="streams")
    found = {name: refused(call) for name, call in wrong.items()}
    tp = mkernel.init(mesh["tp"], accelerator="streams", timeout_s=TIMEOUT_S)
    found["twice"] = refused(lambda: mkernel.init(mesh["tp"].get_group()))
    found["a second default"] = refused(mkernel.init)
    found["another name"] = refused(lambda: gathers("other"))
    assert gathers(None) <= LIMIT
    tp.close()
    found["ended"] = refused(lambda: gathers(tp))
    found["of an ended one"] = refused(lambda: gathers(tp.name))
    tp.close()
    return found


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except MkernelError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_what_is_no_group_is_refused_by_name(tmp_path: Path) -> None:
    everywhere = ranks(refusals, tmp_path)
    for rank, found in enumerate(everywhere):
        assert set(found) - {"not in it"} == set(everywhere[0])
        for name, (kind, said) in {
            "a mesh of two dimensions": ("ArgumentError", "of 1 dimension, such as mesh['dp']"),
            "no group": ("ArgumentError", "expected a torch.distributed.ProcessGroup, or a DeviceMesh"),
            "no world yet": ("NotInitialized", "call mkernel.init(group=...)"),
            "no world of that name": ("NotInitialized", "no world of group 'dp'"),
            "no default world": ("NotInitialized", "call mkernel.init() first"),
            "twice": ("AlreadyInitialized", "mkernel.finalize(group="),
            "a second default": ("AlreadyInitialized", "pass group="),
            "another name": ("NotInitialized", "this process is in worlds '"),
            "ended": ("NotInitialized", "has ended"),
            "of an ended one": ("NotInitialized", "no world of group"),
            **({"not in it": ("ArgumentError", "a group without this rank")} if rank > 1 else {}),
        }.items():  # fmt: skip
            assert found[name].startswith(f"{kind}: "), name
            assert said in found[name], name


def on_hosts(hosts: str, secret: str, group: list[int]) -> tuple[int, float] | str:
    """A group's world where each rank of the job takes itself to be on a host of its own choice."""
    made = distributed.new_group(group)
    mine = distributed.get_rank()
    if mine not in group:
        return ""
    settings = Settings().model_copy(
        update={"timeout_s": TIMEOUT_S, "job_secret": SecretStr(secret)}
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (handshake, groups_module, join):
            patch.setattr(module, "host_identity", lambda: f"{hosts[mine]}/boot/pid")
        try:
            world = mkernel.init(made, accelerator="streams", settings=settings)
        except MkernelError as error:
            return f"{type(error).__name__}: {error}"
        return world.identity.nodes, gathers(made)


@pytest.mark.parametrize(
    ("hosts", "group", "nodes"),
    [("aabb", [0, 1, 2, 3], 2), ("abab", [0, 2], 1)],
)
def test_hosts_of_a_group_are_found(
    hosts: str, group: list[int], nodes: int, tmp_path: Path
) -> None:
    everywhere = ranks(on_hosts, tmp_path, hosts, "0123456789abcdef", group)
    for found in (everywhere[rank] for rank in group):
        assert not isinstance(found, str), found
        assert found[0] == nodes
        assert found[1] <= LIMIT


@pytest.mark.parametrize(
    ("hosts", "secret", "group", "said"),
    [
        ("aaab", "0123456789abcdef", [1, 2, 3], "ranks on a: 1, 2; b: 3 is not legal"),
        ("aabb", "", [0, 1, 2, 3], "MKERNEL_JOB_SECRET = '' is not legal"),
    ],
    ids=["unequal", "several without a secret"],
)
def test_hosts_that_do_not_fit_are_refused(
    hosts: str, secret: str, group: list[int], said: str, tmp_path: Path
) -> None:
    everywhere = ranks(on_hosts, tmp_path, hosts, secret, group)
    for rank in group:
        assert said in str(everywhere[rank])


# ---- threads -------------------------------------------------------------------------------------


def called_from_threads() -> list[float]:
    """Two threads of a process that call two worlds of one rank each, as fast as they can."""
    own = {rank: [distributed.new_group([rank]) for _ in range(2)] for rank in range(2)}
    groups = own[distributed.get_rank()]
    for group in groups:
        mkernel.init(group, accelerator="ascend", timeout_s=TIMEOUT_S)
    found: list[float] = []

    def calls(group: Group) -> None:
        for turn in range(20):
            found.append(gathers(group, turn))
            found.append(reduces(groups[turn % 2], turn))

    threads = [threading.Thread(target=calls, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_take_turns(tmp_path: Path) -> None:
    for found in ranks(called_from_threads, tmp_path, size=2):
        assert len(found) == 80
        assert max(found) <= LIMIT


class Gathers(torch.autograd.Function):
    """Backward calls an op of the same world, on autograd's own thread where the device has one."""

    @staticmethod
    def forward(context: Any, a: torch.Tensor, name: str) -> torch.Tensor:
        context.name = name
        return a.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return mkernel.gemm_all_reduce(
            torch.eye(16), gradients[0].contiguous(), group=context.name
        ), None


def backward_beside_forward() -> bool:
    mesh = mesh_2x2()
    for dimension in ("tp", "dp"):
        mkernel.init(mesh[dimension], accelerator="streams", timeout_s=TIMEOUT_S)
    right = True
    for turn in range(5):
        a = torch.full((16, 32), float(turn), requires_grad=True)
        made = Gathers.apply(a, mkernel.world(mesh["tp"]).name)  # type: ignore[no-untyped-call]
        assert gathers(mesh["dp"], turn) <= LIMIT
        behind = threading.Thread(target=lambda made=made: made.sum().backward())
        behind.start()
        behind.join()
        right &= a.grad is not None and bool((a.grad == 2).all())
    return right


def test_backward_on_another_thread(tmp_path: Path) -> None:
    assert ranks(backward_beside_forward, tmp_path) == [True] * 4


# ---- trust ---------------------------------------------------------------------------------------


def forged(name: str) -> str:
    """What a rank raises where a stranger overwrites a message of rank 1 in the group's own store."""
    publish = Bootstrap.publish

    def published(self: Bootstrap, key: str, value: Any) -> None:
        publish(self, key, value)
        if key == name:
            message: Any = Seal(b"a stranger's secret").close(key, b'"forged"')
            self._store.set(key, message)

    group = distributed.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bootstrap, "publish", published)
        return refused(
            lambda: mkernel.init(group, accelerator="streams", timeout_s=TIMEOUT_S).barrier()
        )


@pytest.mark.parametrize("name", ["nonce/1", "hello/1"])
def test_messages_in_a_groups_store_are_signed(name: str, tmp_path: Path) -> None:
    for said in ranks(forged, tmp_path, name, size=2):
        assert said.startswith("Untrusted: "), said
        assert name in said
