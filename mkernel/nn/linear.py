"""``torch.nn.Linear`` over the ranks of a group: its output features on different ranks, or its input
features.

With sequence parallelism the activations outside of a pair are split over the ranks by rows (tokens),
and both halves communicate while they compute: AllGather+GEMM in, GEMM+ReduceScatter out. Without it
every rank holds all rows: only the second half communicates, by GEMM+AllReduce, and the first one's
backward does.

Source of the decomposition: Shoeybi et al., "Megatron-LM", 2019; of sequence parallelism: Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.gemm_all_reduce import gemm_all_reduce
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class _ParallelLinear(Module):
    """A linear layer of which each rank has a part.

    ``weight`` [out_features, in_features] of this rank's part, ``bias``. A state dict of the whole
    ``torch.nn.Linear`` is loaded as well as one of the part: each rank takes what is its own.
    """

    _split: int  # the dimension of the weight that ranks share

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        world = current(group)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.group = world.name
        self._rank, self._ranks = world.rank, world.size
        shared = ("out_features", "in_features")[self._split]
        sizes = [out_features, in_features]
        if sizes[self._split] % world.size:
            raise ArgumentError(
                shared, sizes[self._split], f"a multiple of the group's {world.size} ranks"
            )
        sizes[self._split] //= world.size
        self.weight = Parameter(torch.empty(sizes, device=device, dtype=dtype))
        rows = sizes[0] if self._split == 0 else out_features
        self.bias = Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: Linear, *, sequence_parallel: bool = True, group: Group = None
    ) -> Any:
        """This rank's part of a layer that every rank has whole."""
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            sequence_parallel=sequence_parallel,
            group=group,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        made.load_state_dict(linear.state_dict())
        return made

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``, whose bound depends on the whole ``in_features``. Each rank draws
        from its own generator."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        own = dict(state_dict)
        for name, parameter in self.named_parameters():
            given = own.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != parameter.shape:
                own[prefix + name] = self._part(name, given, parameter)
        super()._load_from_state_dict(own, prefix, *arguments)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        """What of a whole parameter is this rank's; ``whole`` itself where it is not of this layer."""
        split = self._split if name == "weight" else 0
        expected = list(parameter.shape)
        expected[split] *= self._ranks
        return (
            whole.chunk(self._ranks, split)[self._rank] if list(whole.shape) == expected else whole
        )

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and how it is split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self._ranks}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y = x @ weight^T + bias of which each rank has out_features / W features.

    Input: with ``sequence_parallel`` [..., in_features], this rank's part along dimension 0; else all
    of it, the same on every rank. Output: [..., out_features / W] of all rows.
    """

    _split = 0

    def forward(self, x: Tensor) -> Tensor:
        """ShapeError and the other errors of :func:`mkernel.all_gather_gemm`."""
        rows, shape = _rows(x, self.in_features)
        if self.sequence_parallel:
            y = all_gather_gemm(rows, self.weight.t(), group=self.group)
            shape = (shape[0] * self._ranks, *shape[1:])
        else:
            y = torch.ops.mkernel.replicated_gemm(rows, self.weight.t(), group=self.group)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*shape, y.shape[-1])


class RowParallelLinear(_ParallelLinear):
    """y = x @ weight^T + bias of which each rank has in_features / W of the inputs.

    Input: [..., in_features / W], all rows. Output: [..., out_features], with ``sequence_parallel``
    this rank's part along dimension 0, which W divides; else all of it, the same on every rank. The
    bias is the same on every rank, and so is its gradient.
    """

    _split = 1

    def forward(self, x: Tensor) -> Tensor:
        """ShapeError and the other errors of :func:`mkernel.gemm_reduce_scatter`."""
        rows, shape = _rows(x, self.in_features // self._ranks)
        if not self.sequence_parallel:
            y = gemm_all_reduce(rows, self.weight.t(), group=self.group)
            return (y if self.bias is None else y + self.bias).view(*shape, self.out_features)
        if shape[0] % self._ranks:
            raise ShapeError("x", tuple(x.shape), f"a multiple of {self._ranks} along dimension 0")
        y = gemm_reduce_scatter(rows, self.weight.t(), group=self.group)
        if self.bias is not None:
            y = torch.ops.mkernel.shared_bias(y, self.bias, group=self.group)
        return y.view(shape[0] // self._ranks, *shape[1:], self.out_features)


def _rows(x: Tensor, features: int) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` [..., features] as a matrix, and what its other dimensions are."""
    if x.dim() < 2 or x.shape[-1] != features:
        raise ShapeError("x", tuple(x.shape), f"[..., {features}], at least two dimensions")
    return x.reshape(-1, features), tuple(x.shape[:-1])
