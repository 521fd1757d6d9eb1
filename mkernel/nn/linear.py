"""``torch.nn.Linear`` over the ranks of a group: its output features on different ranks, or its input
features.

With sequence parallelism the activations outside of a pair are split over the ranks along one
dimension (the tokens), and both halves communicate while they compute: AllGather+GEMM in,
GEMM+ReduceScatter out. Without it every rank holds all of them: only the second half communicates, by
GEMM+AllReduce, and the first one's backward does.

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
        sequence_dim: int = 0,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args:
            in_features, out_features, bias, device, dtype: of the whole, as of ``torch.nn.Linear``.
            sequence_parallel: whether the activations outside of a pair are split over the ranks.
            sequence_dim: along which dimension they are split; not the last one.
            group: names the world; None: the default one.

        Raises:
            ArgumentError: features that the ranks cannot share. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
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
        cls,
        linear: Linear,
        *,
        sequence_parallel: bool = True,
        sequence_dim: int = 0,
        group: Group = None,
    ) -> Any:
        """This rank's part of a layer that every rank has whole."""
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
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

    @property
    def _split_dim(self) -> int | None:
        return self.sequence_dim if self.sequence_parallel else None

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and how it is split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self._ranks}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y = x @ weight^T + bias of which each rank has out_features / W features.

    Input: with ``sequence_parallel`` [..., in_features], this rank's part along ``sequence_dim``; else
    all of it, the same on every rank. Output: [..., out_features / W] of the whole activation.
    """

    _split = 0

    def forward(self, x: Tensor) -> Tensor:
        """ShapeError and the other errors of :func:`mkernel.all_gather_gemm`."""
        return column_product(x, self.weight, self.bias, self._split_dim, self.group)


class RowParallelLinear(_ParallelLinear):
    """y = x @ weight^T + bias of which each rank has in_features / W of the inputs.

    Input: [..., in_features / W], of the whole activation. Output: [..., out_features], with
    ``sequence_parallel`` this rank's part along ``sequence_dim``, which W divides; else all of it, the
    same on every rank. The bias is the same on every rank, and so is its gradient.
    """

    _split = 1

    def forward(self, x: Tensor) -> Tensor:
        """ShapeError and the other errors of :func:`mkernel.gemm_reduce_scatter`."""
        return row_product(x, self.weight, self.bias, self._split_dim, self.group)


def column_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, split: int | None, group: str
) -> Tensor:
    """What :class:`ColumnParallelLinear` computes, of this rank's ``weight`` and ``bias``.

    ``split``: the dimension along which ranks have parts of x; None: each has all of it.
    """
    rows, shape = _rows(x, weight.shape[1], split)
    if split is None:
        y = torch.ops.mkernel.replicated_gemm(rows, weight.t(), group=group)
    else:
        y = all_gather_gemm(rows, weight.t(), group=group)
        shape = (len(y) // math.prod(shape[1:]), *shape[1:])
    if bias is not None:
        y = y + bias
    return _activation(y, shape, split)


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, split: int | None, group: str
) -> Tensor:
    """What :class:`RowParallelLinear` computes, of this rank's ``weight`` and the whole ``bias``.

    ``split``: the dimension along which ranks keep parts of the result; None: each keeps all of it.
    """
    rows, shape = _rows(x, weight.shape[1], split)
    if split is None:
        y = gemm_all_reduce(rows, weight.t(), group=group)
        return _activation(y if bias is None else y + bias, shape, None)
    ranks = current(group).size
    if shape[0] % ranks:
        raise ShapeError("x", tuple(x.shape), f"a multiple of {ranks} along dimension {split}")
    y = gemm_reduce_scatter(rows, weight.t(), group=group)
    if bias is not None:
        y = torch.ops.mkernel.shared_bias(y, bias, group=group)
    return _activation(y, (shape[0] // ranks, *shape[1:]), split)


def _rows(x: Tensor, features: int, split: int | None) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` [..., features] as a matrix whose rows begin with dimension ``split``; sizes of the other
    dimensions in that order."""
    if x.dim() < 2 or x.shape[-1] != features:
        raise ShapeError("x", tuple(x.shape), f"[..., {features}], at least two dimensions")
    if split is not None:
        if not 0 <= split < x.dim() - 1:
            raise ArgumentError(
                "sequence_dim", split, f"0 to {x.dim() - 2}, for x of {x.dim()} dimensions"
            )
        x = x.movedim(split, 0)
    return x.reshape(-1, features), tuple(x.shape[:-1])


def _activation(y: Tensor, shape: tuple[int, ...], split: int | None) -> Tensor:
    """Rows as :func:`_rows` makes them, as an activation again."""
    y = y.view(*shape, y.shape[-1])
    return y if split is None else y.movedim(0, split)
