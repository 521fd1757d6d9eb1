"""Styles for ``parallelize_module`` for modules other than linear layers.

``ExpertParallel`` splits the experts of a mixture over the ranks. ``ReplicatedParallel`` keeps a module
whole whose input is split. ``PrepareModuleInput`` leaves a gather to the layers that multiply its
result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput as TorchPrepareModuleInput
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from mkernel.nn.experts import ExpertParallelMLP
from mkernel.nn.styles import _local


class PrepareModuleInput(TorchPrepareModuleInput):
    """torch's style of this name, which does not gather inputs that the module's layers gather.

    Where ``input_layouts`` has ``Shard`` and ``desired_input_layouts`` has ``Replicate()``, the module
    gets a DTensor that is still sharded, whose shape is the whole one. :class:`ColwiseParallel` layers
    gather it while they multiply; other operations see a DTensor as torch knows it.
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
    """The style of a module that every rank has whole and applies to a part of the activation.

    Such are norms of the heads that a rank has, or of its part of a sequence. Parameters stay as they
    are, and their gradients are sums over the ranks. So do inputs and outputs.
    """

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        kind: Any = type(module)
        module.__class__ = _replicated(kind, device_mesh)
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
        """Split the experts. ArgumentError: ranks cannot share them. NotInitialized."""
        made = ExpertParallelMLP.from_experts(module, transposed=self.transposed, group=device_mesh)
        for name, part in list(made.named_parameters()):
            whole = DTensor.from_local(part.detach(), device_mesh, [Shard(0)], run_check=False)
            made.register_parameter(name, Parameter(whole, part.requires_grad))
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


@cache
def _replicated(kind: Any, mesh: DeviceMesh) -> Any:
    """Make a class of modules whose parameters' gradients are summed over the ranks."""

    def forward(self: Module, *arguments: Any, **keywords: Any) -> Any:
        given = dict(self._parameters)
        self._parameters.update({name: _summed(each, mesh) for name, each in given.items()})  # type: ignore[misc]
        try:
            return kind.forward(self, *arguments, **keywords)
        finally:
            self._parameters.update(given)

    return type(kind.__name__, (kind,), {"forward": forward})


def _summed(parameter: Tensor | None, mesh: DeviceMesh) -> Tensor | None:
    """Return a parameter whose gradient is the sum of those that ranks have."""
    if parameter is None or not torch.is_grad_enabled() or not parameter.requires_grad:
        return parameter
    same = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])
