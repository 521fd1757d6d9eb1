"""Styles of parallelize_module: models have the results and the gradients of the unsharded ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_in_ranks import TIMEOUT_S, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import mkernel
from mkernel.errors import ArgumentError, NotInitialized
from mkernel.nn import ColwiseParallel, RowwiseParallel

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
B, S, H, N = 3, 8, 12, 20


def mesh_of_all() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (RANKS,))
    mkernel.init(mesh, accelerator="streams", timeout_s=TIMEOUT_S)
    return mesh


def calls(mesh: DeviceMesh) -> Callable[[], Counter[str]]:
    """What counts the calls that a world has run since now, by op."""
    world = mkernel.world(mesh)
    before = Counter(world.statistics().calls)
    return lambda: Counter(world.statistics().calls) - before


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---- a pair of layers ----------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, N, bias=bias), nn.Linear(N, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


def pair(split: int | None, bias: bool, local: bool, compiled: bool) -> dict[str, int]:
    mesh = mesh_of_all()
    torch.manual_seed(0)
    reference = Mlp(bias)
    outside = Replicate() if split is None else Shard(split)
    plan = {
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside, use_local_output=local),
    }
    model = parallelize_module(copy.deepcopy(reference), mesh, plan)
    found = calls(mesh)
    x = torch.randn(B + 1, S, H, requires_grad=True)
    wanted = reference(x)
    wanted.sin().sum().backward()

    part = x.detach() if split is None else x.detach().chunk(RANKS, split)[mesh.get_local_rank()]
    part = part.clone().requires_grad_()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(part) if compiled else model(part)
    assert isinstance(y, DTensor) == (not local)
    y.sin().sum().backward()

    def gathered(piece: Tensor) -> Tensor:
        return DTensor.from_local(piece, mesh, [outside], run_check=False).full_tensor()

    assert x.grad is not None
    assert part.grad is not None
    y = y.to_local() if isinstance(y, DTensor) else y
    close([gathered(y.detach()), gathered(part.grad)], [wanted.detach(), x.grad])
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(one, DTensor)
        close([whole(one.grad)], [whole(other.grad)])
    return dict(found())


@pytest.mark.parametrize(
    ("split", "bias", "local", "compiled"),
    [
        (None, True, True, False),
        (None, False, False, False),
        (0, False, True, False),
        (1, True, True, False),
        (1, False, False, False),
        (1, True, True, True),
    ],
)
def test_a_pair_is_the_unsharded_one(
    split: int | None, bias: bool, local: bool, compiled: bool, tmp_path: Path
) -> None:
    wanted = {"gemm_all_reduce": 2}
    if split is not None:
        wanted = {
            "all_gather_gemm": 3,
            "gemm_reduce_scatter": 2,
        }  # backward gathers the input again
    for found in ranks(pair, tmp_path, split, bias, local, compiled, size=RANKS):
        assert found == wanted


def strangers() -> tuple[bool, list[str]]:
    """Whether what no op computes is torch's; what is said of what cannot be."""
    mesh = init_device_mesh("cpu", (RANKS,))

    def refused(style: Any) -> str:
        try:
            parallelize_module(nn.Linear(H + 1, N + 1), mesh, style)
        except (ArgumentError, NotInitialized) as error:
            return str(error)
        return "nothing"

    said = [refused(ColwiseParallel())]
    mkernel.init(mesh, accelerator="streams", timeout_s=TIMEOUT_S)
    said += [refused(ColwiseParallel()), refused(RowwiseParallel())]
    found = calls(mesh)
    torch.manual_seed(1)
    reference = nn.Linear(H, N)
    model = parallelize_module(
        copy.deepcopy(reference), mesh, ColwiseParallel(output_layouts=Replicate())
    )
    x = torch.randn(S, H)
    right = torch.allclose(whole(model(x)), reference(x), atol=1e-5)
    parallelize_module(nn.Embedding(N, H), mesh, RowwiseParallel(input_layouts=Replicate()))
    return right and not found(), said


def test_what_no_op_computes_is_left_to_torch(tmp_path: Path) -> None:
    for right, said in ranks(strangers, tmp_path, size=RANKS):
        assert right
        assert "mkernel.init" in said[0]
        assert f"out_features = {N + 1}" in said[1]
        assert f"in_features = {H + 1}" in said[2]
