"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` whose linear layers
communicate while they compute.

They have the names and arguments of torch's styles, so a parallelization plan changes only its
import. Parameters become DTensors, as torch's styles make them, so that checkpoints, optimisers and
clipping work as before. Whatever no fused op computes (subclasses of ``Linear``, layouts that change
on the way) is left to torch's styles.

Column layers that are called with one tensor, one after another (q, k and v; gate and up), gather it
once, and its gradient is one sum over ranks (:mod:`mkernel.ops.shared_input`). What they gathered is
kept for the gradients of their weights. Writes to the tensor between two calls must be of those that
torch counts (``Tensor._version``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.nn import Linear, Module

from mkernel.errors import ArgumentError
from mkernel.nn.embedding_style import shard_rows
from mkernel.nn.linear import check_input, row_product
from mkernel.nn.sharded import scratch
from mkernel.ops import autocast
from mkernel.ops.shared_input import shared_product
from mkernel.world.lifecycle import current


class _Layouts(NamedTuple):
    """A layer's layouts. ``split``: the dimension along which ranks have parts of the activation
    outside the pair."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: bool
    split: int | None
    group: str


class _FusedLinear(Linear):
    """A ``Linear`` whose parameters are DTensors. It takes and returns plain tensors or DTensors."""

    _layouts: _Layouts

    def forward(self, input: Tensor) -> Tensor:
        layouts = self._layouts
        if isinstance(input, DTensor):
            if (split := self._gathers(input)) is not None:
                # Not _replace, which torch 2.6 does not trace.
                layouts = _Layouts(
                    input.placements, layouts.outputs, layouts.local, split, layouts.group
                )
            if input.placements != layouts.inputs:
                input = input.redistribute(placements=layouts.inputs)
        weight, bias = self.weight, self.bias
        if autocast.enabled() and not torch.compiler.is_compiling():  # casts of parameters are kept
            weight, bias = autocast.cast([weight, bias])
        y = self._product(input, _local(weight), _local(bias), layouts)
        if layouts.local:
            return y
        assert isinstance(self.weight, DTensor)
        return DTensor.from_local(y, self.weight.device_mesh, layouts.outputs, run_check=False)

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return zeros that the layer can be called with, for :func:`mkernel.warm`. ``lead``: sizes of
        the whole activation but the last. ShapeError."""
        weight = _local(self.weight)
        split = self._layouts.split if isinstance(self, _ColwiseLinear) else None
        ranks = current(self._layouts.group).size
        return (scratch(weight, lead, weight.shape[1], split, ranks),)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, layouts: _Layouts) -> Tensor:
        raise NotImplementedError

    def _gathers(self, input: DTensor) -> int | None:
        """Return the dimension along which the product itself gathers an input that is split."""
        return None


class _ColwiseLinear(_FusedLinear):
    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, layouts: _Layouts) -> Tensor:
        check_input(x, weight.shape[1], layouts.split)
        return shared_product(x, weight, bias, layouts.split, layouts.group, self)

    def _gathers(self, input: DTensor) -> int | None:
        (given,) = input.placements
        if self._layouts.inputs != (Replicate(),) or not isinstance(given, Shard):
            return None
        return given.dim if 0 <= given.dim < input.dim() - 1 else None


class _RowwiseLinear(_FusedLinear):
    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, layouts: _Layouts) -> Tensor:
        return row_product(_local(x), weight, bias, layouts.split, layouts.group)


class ColwiseParallel(TorchColwiseParallel):
    """The style in which each rank has out_features / W features of a ``Linear``.

    The layer is fused for ``input_layouts`` ``Replicate()`` (GEMM+AllReduce in backward) and
    ``Shard(dim)`` of any dimension but the last (AllGather+GEMM, GEMM+ReduceScatter in backward),
    with ``output_layouts`` ``Shard(-1)``. The world of the mesh must exist: ``mkernel.init(mesh)``.
    Layers that are called with the same tensor communicate once for all of them. There are no second
    derivatives.

    Args:
        input_layouts, output_layouts, use_local_output: those of torch's ``ColwiseParallel``.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Distribute the module and fuse it if possible. ArgumentError: ranks cannot share the
        features. NotInitialized."""
        fused = _fused(module, self.input_layouts) and self.output_layouts == (Shard(-1),)
        if not fused:
            return super()._apply(module, device_mesh)
        return _become(_ColwiseLinear, self, module, device_mesh, "out_features")


class RowwiseParallel(TorchRowwiseParallel):
    """The style in which each rank has in_features / W inputs of a ``Linear``.

    The layer is fused for ``output_layouts`` ``Replicate()`` (GEMM+AllReduce) and ``Shard(dim)`` of
    any dimension but the last (GEMM+ReduceScatter, AllGather+GEMM in backward), with
    ``input_layouts`` ``Shard(-1)``. An ``Embedding`` needs ``input_layouts`` ``Replicate()``; its sum
    for ``output_layouts`` ``Replicate()`` is AllReduce. The world of the mesh must exist:
    ``mkernel.init(mesh)``.

    Args:
        input_layouts, output_layouts, use_local_output: those of torch's ``RowwiseParallel``.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Distribute the module and fuse it if possible. ArgumentError: ranks cannot share the
        features. NotInitialized."""
        fused = _fused(module, self.output_layouts) and self.input_layouts == (Shard(-1),)
        if not fused:
            if shard_rows(module, self, device_mesh):
                return module
            return super()._apply(module, device_mesh)
        return _become(_RowwiseLinear, self, module, device_mesh, "in_features")


def _fused(module: Module, outside: Sequence[Placement]) -> bool:
    """Return whether ops compute a module whose activation has these layouts outside a pair."""
    (layout,) = outside
    plain = type(module) is Linear
    return plain and (layout == Replicate() or (isinstance(layout, Shard) and layout.dim >= 0))


def _become(
    kind: type[_FusedLinear], style: Any, module: Module, mesh: DeviceMesh, shared: str
) -> Module:
    """Turn ``module`` into a layer of ``kind`` and distribute its parameters."""
    world = current(mesh)
    features = getattr(module, shared)
    if features % world.size:
        raise ArgumentError(shared, features, f"a multiple of the mesh's {world.size} ranks")
    distribute_module(module, mesh, style._partition_linear_fn)
    (outside,) = style.input_layouts if kind is _ColwiseLinear else style.output_layouts
    module.__class__ = kind
    assert isinstance(module, _FusedLinear)
    module._layouts = _Layouts(
        style.input_layouts,
        style.output_layouts,
        style.use_local_output,
        outside.dim if isinstance(outside, Shard) else None,
        world.name,
    )
    return module


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
