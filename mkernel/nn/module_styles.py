"""Styles for ``parallelize_module`` for modules other than linear layers.

``ExpertParallel`` splits the experts of a mixture over the ranks. ``ReplicatedParallel`` keeps a module
whole. ``PrepareModuleInput`` leaves a gather to the layers that multiply its result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import PrepareModuleInput as TorchPrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import Module, Parameter
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from mkernel.errors import ArgumentError
from mkernel.nn.experts import ExpertParallelMLP
from mkernel.nn.styles import _local


class PrepareModuleInput(TorchPrepareModuleInput):
    """torch's style of this name, which does not gather inputs that the module's layers gather.

    Where ``input_layouts`` has ``Shard`` and ``desired_input_layouts`` has ``Replicate()``, the module
    gets a DTensor that is still sharded, whose shape is the whole one. :class:`ColwiseParallel` layers
    gather it while the first of them multiplies; other operations see a DTensor as torch knows it.
    """

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if not isinstance(input_layout, Shard) or desired_layout != Replicate():
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if isinstance(input, DTensor):
            return input
        return DTensor.from_local(input, mesh, (input_layout,), run_check=False)


class ReplicatedParallel(ParallelStyle):
    """The style of a module that every rank has whole.

    Parameters become replicated DTensors, so that clipping and optimisers find parameters of one kind.
    The module computes with plain tensors. Modules that share a parameter go on sharing it if one style
    is applied to all of them.
    """

    def __init__(self, *, split_input: bool) -> None:
        """Make the style.

        Args:
            split_input: True if ranks apply the module to parts of the activation, such as a norm to
                their heads; gradients are then sums over the ranks. Otherwise all have the same input.
        """
        super().__init__()
        self.split_input = split_input
        self._made = WeakIdKeyDictionary()  # by the parameter that a module had before

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        kind: Any = type(module)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            given = module._parameters[name]
            if given not in self._made:
                self._made[given] = _distributed(given, device_mesh, Replicate())
            module.register_parameter(name, self._made[given])
        module.__class__ = _replicated(kind, tuple(names), self.split_input)
        return module


class ExpertParallel(ParallelStyle):
    """The style in which each rank has E/W of the experts of a mixture, and all have the same tokens.

    The module is one that :meth:`ExpertParallelMLP.from_experts` takes and is called as
    ``module(x, topk_ids, topk_weights)``. A rank sends its W-th part of the tokens to their experts,
    and the results are gathered. Parameters become DTensors, sharded by expert. The world of the mesh
    must exist: ``mkernel.init(mesh)``.
    """

    def __init__(self, *, transposed: bool) -> None:
        """Make the style.

        Args:
            transposed: True if parameters are stored as ``torch.nn.Linear`` stores weights.
        """
        super().__init__()
        self.transposed = transposed

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Split the experts. ArgumentError: ranks cannot share them, or they are e4m3.
        NotInitialized."""
        if any(each.dtype == torch.float8_e4m3fn for each in module.parameters()):
            legal = "experts in 16 or 32 bits; ExpertParallelMLP takes e4m3"
            raise ArgumentError("module", f"{type(module).__name__} in e4m3", legal)
        made = ExpertParallelMLP.from_experts(module, transposed=self.transposed, group=device_mesh)
        for name, _ in list(made.named_parameters()):
            whole = _distributed(getattr(module, name), device_mesh, Shard(0))
            made.register_parameter(name, whole)
        made.training = module.training
        module.__class__ = _ReplicatedTokens
        vars(module).clear()
        vars(module).update(vars(made), mesh=device_mesh)
        return module


class _ReplicatedTokens(ExpertParallelMLP):
    """Experts whose tokens are the same on every rank, and so are their results."""

    mesh: DeviceMesh

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        tokens, slots = x.reshape(-1, x.shape[-1]), topk_ids.shape[-1]
        missing = -len(tokens) % self._ranks
        whole = (
            pad(tokens, (0, 0, 0, missing)),
            pad(topk_ids.reshape(-1, slots), (0, 0, 0, missing), value=-1),
            pad(topk_weights.reshape(-1, slots), (0, 0, 0, missing)),
        )
        out = super().forward(
            *(_redistributed(each, self.mesh, Replicate(), Shard(0)) for each in whole)
        )
        out = _redistributed(out, self.mesh, Shard(0), Replicate())
        return out[: len(tokens)].view(x.shape)

    def _weights(self) -> tuple[Tensor, Tensor]:
        up, down = super()._weights()
        return _local(up), _local(down)


def _redistributed(x: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Tensor:
    found = DTensor.from_local(x, mesh, [given], run_check=False).redistribute(placements=[wanted])
    return found.to_local()


def _distributed(given: Any, mesh: DeviceMesh, placement: Placement) -> Parameter:
    """Make a parameter of rank 0's values, as torch's styles do."""
    whole = distribute_tensor(given.detach(), mesh, [placement])
    return Parameter(whole, given.requires_grad)


@cache
def _replicated(kind: Any, names: tuple[str, ...], split_input: bool) -> Any:
    """Make a class of modules whose parameters are DTensors, and plain tensors in forward."""

    def forward(self: Module, *arguments: Any, **keywords: Any) -> Any:
        # torch's DDP makes attributes of them for the time of a forward pass.
        held = self._parameters if names[0] in self._parameters else self.__dict__
        given = {name: held[name] for name in names}
        for name in names:
            held[name] = _plain(given[name], split_input)
        try:
            return kind.forward(self, *arguments, **keywords)
        finally:
            for name in names:
                held[name] = given[name]

    return type(kind.__name__, (kind,), {"forward": forward})


def _plain(parameter: Any, split_input: bool) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    if not split_input or not torch.is_grad_enabled():
        return parameter.to_local()
    # The backward of these two makes the sum of partial gradients.
    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
