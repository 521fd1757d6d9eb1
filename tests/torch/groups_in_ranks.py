"""What tests of groups do in their ranks: torch.distributed of their own, calls in any group."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mkernel
from mkernel.world.groups import Group

T = TypeVar("T")
TIMEOUT_S = 240.0


def ranks(
    part: Callable[..., T], folder: object, *arguments: Any, size: int = 4, **options: Any
) -> list[T]:
    """What ``part`` returns on ranks that are in torch.distributed, by gloo, and in no world yet."""
    return mkernel.launch(
        _in_torch, part, str(folder), arguments, ranks_per_node=size, accelerator="ascend", **options
    )  # fmt: skip


def _in_torch(part: Callable[..., T], folder: str, arguments: tuple[Any, ...]) -> T:
    mkernel.finalize()
    with torch_distributed(folder):
        result = part(*arguments)
        mkernel.finalize()
    return result


@contextlib.contextmanager
def torch_distributed(folder: str) -> Iterator[None]:
    """torch.distributed of the job's ranks, as a program makes it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/torch",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield
    distributed.barrier()  # nobody leaves while another still connects
    distributed.destroy_process_group()


def mesh_2x2() -> DeviceMesh:
    """Ranks 0, 1 and 2, 3 share a ``tp`` group; 0, 2 and 1, 3 share a ``dp`` group."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensors(group: Group, turn: int, *shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """For each shape every rank's tensor in a group's world; they differ with turn and group."""
    world = mkernel.world(group)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{world.name} {turn}".encode()))
    return [
        [torch.randn(shape, generator=generator) for _ in range(world.size)] for shape in shapes
    ]


def gathers(group: Group, turn: int = 0) -> float:
    """The error of an AllGather+GEMM in a group's world."""
    world = mkernel.world(group)
    a, b = tensors(group, turn, (16 * (turn % 3 + 1), 64), (64, 48))
    got = mkernel.all_gather_gemm(a[world.rank], b[world.rank], group=group)
    return error(got, torch.cat(a).double() @ b[world.rank].double())


def scatters(group: Group, turn: int = 0) -> float:
    """The error of a GEMM+ReduceScatter in a group's world."""
    world = mkernel.world(group)
    a, b = tensors(group, turn, (16 * world.size, 32), (32, 48))
    got = mkernel.gemm_reduce_scatter(a[world.rank], b[world.rank], group=group)
    whole = sum(one.double() @ other.double() for one, other in zip(a, b, strict=True))
    assert isinstance(whole, torch.Tensor)
    return error(got, whole.chunk(world.size)[world.rank])


def reduces(group: Group, turn: int = 0) -> float:
    """The error of a GEMM+AllReduce in a group's world."""
    world = mkernel.world(group)
    a, b = tensors(group, turn, (16, 32), (32, 48))
    got = mkernel.gemm_all_reduce(a[world.rank], b[world.rank], group=group)
    whole = sum(one.double() @ other.double() for one, other in zip(a, b, strict=True))
    assert isinstance(whole, torch.Tensor)
    return error(got, whole)


def attends(group: Group, turn: int = 0) -> float:
    """The error of a ring attention in a group's world."""
    world = mkernel.world(group)
    shape = (1, 2, 32, 64)
    q, k, v = tensors(group, turn, shape, shape, shape)
    got = mkernel.ring_attention(q[world.rank], k[world.rank], v[world.rank], group=group)
    truth = torch.nn.functional.scaled_dot_product_attention(
        q[world.rank].double(), torch.cat(k, 2).double(), torch.cat(v, 2).double()
    )
    return error(got, truth)


def routes(group: Group, turn: int = 0) -> float:
    """The error of an MoE dispatch+GEMM and its combine in a group's world."""
    world = mkernel.world(group)
    tokens, hidden, features, each = 16, 64, 48, 2
    x, w, weights = tensors(
        group, turn, (tokens, hidden), (each, hidden, features), (tokens, 2)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(each * world.size, (world.size, tokens, 2), generator=generator)
    mine = ids[world.rank]
    sent = mkernel.moe_dispatch_gemm(x[world.rank], mine, w[world.rank], group=group)
    got = mkernel.moe_combine(sent.outputs, sent.handle, weights[world.rank], group=group)
    experts = torch.cat(w).double()
    products = torch.einsum("th,tkhi->tki", x[world.rank].double(), experts[mine])
    return error(got, (products * weights[world.rank].double()[..., None]).sum(1))


EVERY_OP = (gathers, scatters, reduces, attends, routes)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The relative error of a result."""
    assert got.shape == truth.shape
    return float((got.double() - truth).norm() / truth.norm())
