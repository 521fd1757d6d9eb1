"""``torch.nn.Linear`` with its output features, or its input features, split over the ranks of a
group.

With sequence parallelism the activations outside a pair of layers are split over the ranks along
one dimension (the tokens), and both halves communicate while they compute: AllGather+GEMM in,
GEMM+ReduceScatter out. Without it every rank holds the whole activations: only the second half
communicates, by GEMM+AllReduce, and so does the first one's backward pass.

Source of the decomposition: Shoeybi et al., "Megatron-LM", 2019; of sequence parallelism:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from mkernel.errors import ArgumentError, ShapeError
from mkernel.nn.sharded import ShardedModule, scratch
from mkernel.ops import autocast
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.around import turned
from mkernel.ops.columns import parts_of_columns
from mkernel.ops.gemm_all_reduce import gemm_all_reduce
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.ops.registration import ops
from mkernel.plan.invariance import Wanted, encoded
from mkernel.plan.mixed import Shards
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class _ParallelLinear(ShardedModule):
    """A linear layer of which each rank has a part.

    ``weight`` [out_features, in_features] and ``bias`` are this rank's parts. A state dict of the
    whole ``torch.nn.Linear`` is loaded as well as one of the part: each rank takes its own.
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
        save_gathered: bool = True,
        invariant: Wanted = None,
        shards: Shards = "even",
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's part of the layer.

        Args:
            in_features, out_features, bias, device, dtype: those of the whole layer, as in
                ``torch.nn.Linear``.
            sequence_parallel: True if the activations outside a pair are split over the ranks.
            sequence_dim: the dimension along which they are split; not the last one.
            save_gathered: whether a layer that gathers its input keeps it for the backward pass, which
                takes W times the memory of this rank's part; else it gathers it once more there.
            invariant: as :func:`mkernel.all_gather_gemm` and :func:`mkernel.gemm_all_reduce` take it.
            shards: how unlike nodes share the features that are split, as :func:`mkernel.shard` takes
                it; uneven parts are multiples of the world's alignment.
            group: the group whose world is used; None: the default one.

        Raises:
            ArgumentError: features that the ranks cannot share. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.save_gathered, self.invariant = save_gathered, invariant
        encoded(invariant)  # or ArgumentError
        self.group = world.name
        self._rank, self._ranks = world.rank, world.size
        shared = ("out_features", "in_features")[self._split]
        sizes = [out_features, in_features]
        if shards == "even" and sizes[self._split] % world.size:
            raise ArgumentError(
                shared, sizes[self._split], f"a multiple of the group's {world.size} ranks"
            )
        parts = (sizes[self._split] // world.size,) * world.identity.nodes
        if shards != "even":
            step = world.accelerator.capabilities().alignment_bytes
            step = max(1, step // (dtype or torch.get_default_dtype()).itemsize)
            parts = world.shares(sizes[self._split], shards, step)
        self._first = world.part(parts).start
        sizes[self._split] = parts[world.identity.node]
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
        save_gathered: bool = True,
        invariant: Wanted = None,
        shards: Shards = "even",
        group: Group = None,
    ) -> Any:
        """Make this rank's part of a layer that every rank has whole."""
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            save_gathered=save_gathered,
            invariant=invariant,
            shards=shards,
            group=group,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        made.load_state_dict(linear.state_dict())
        return made

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.Linear`` does, whose bound depends on the whole ``in_features``.
        Each rank draws from its own generator."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        split = self._split if name == "weight" else 0
        own, expected = parameter.shape[split], list(parameter.shape)
        expected[split] = (self.out_features, self.in_features)[split]
        found = list(whole.shape) == expected
        return whole.narrow(split, self._first, own) if found else whole

    @property
    def _split_dim(self) -> int | None:
        return self.sequence_dim if self.sequence_parallel else None

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return zeros that the layer can be called with, for :func:`mkernel.warm`. ``lead``: sizes of
        the whole activation but the last. ShapeError."""
        split = self._split_dim if self._split == 0 else None
        return (scratch(self.weight, lead, self.weight.shape[1], split, self._ranks),)

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer and the way it is split."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ranks={self._ranks}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """The layer y = x @ weight^T + bias, of which each rank has out_features / W features.

    Input: with ``sequence_parallel`` [..., in_features], this rank's part along ``sequence_dim``;
    otherwise all of it, the same on every rank. Output: [..., out_features / W] of the whole
    activation.
    """

    _split = 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Raises ShapeError and the other errors of
        :func:`mkernel.all_gather_gemm`."""
        return column_product(
            x, self.weight, self.bias, self._split_dim, self.group, save_gathered=self.save_gathered,
            invariant=self.invariant,
        )  # fmt: skip


class RowParallelLinear(_ParallelLinear):
    """The layer y = x @ weight^T + bias, of which each rank has in_features / W of the inputs.

    Input: [..., in_features / W], of the whole activation. Output: [..., out_features]; with
    ``sequence_parallel`` this rank's part along ``sequence_dim``, which W divides; otherwise all of
    it, the same on every rank. The bias is the same on every rank, and so is its gradient.
    """

    _split = 1

    def forward(self, x: Tensor, *, prefetch: Tensor | None = None) -> Tensor:
        """Apply the layer. Raises ShapeError and the other errors of
        :func:`mkernel.gemm_reduce_scatter`.

        Args:
            prefetch: the weight of the next layer, as :func:`mkernel.gemm_all_reduce` takes it; unused
                with ``sequence_parallel``, whose exchanges have many rows.
        """
        return row_product(
            x, self.weight, self.bias, self._split_dim, self.group, prefetch, self.invariant
        )


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: int | None,
    group: str,
    *,
    save_gathered: bool = False,
    invariant: Wanted = None,
) -> Tensor:
    """Compute a :class:`ColumnParallelLinear` from this rank's ``weight`` and ``bias``.

    ``split``: the dimension along which ranks have parts of x; None: each has all of it.
    ``save_gathered``: as the layer takes it. ``invariant``: so too.
    """
    check_input(x, weight.shape[1], split)
    if autocast.enabled():
        weight, bias = autocast.cast([weight, bias])
    if split is not None:
        x = turned(x, split) if torch.compiler.is_compiling() else x
        return all_gather_gemm(
            x, weight.t(), bias=bias, gather_dim=split, save_gathered=save_gathered,
            invariant=invariant, group=group,
        )  # fmt: skip
    product: Tensor = ops.replicated_gemm(
        x.flatten(0, -2), weight.t(), invariant=encoded(invariant), group=group
    )
    y = product.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: int | None,
    group: str,
    prefetch: Tensor | None = None,
    invariant: Wanted = None,
) -> Tensor:
    """Compute a :class:`RowParallelLinear` from this rank's ``weight`` and the whole ``bias``.

    ``split``: the dimension along which ranks keep parts of the result; None: each keeps all of it.
    """
    check_input(x, weight.shape[1], split)
    if autocast.enabled():
        weight, bias = autocast.cast([weight, bias])
    if split is None:
        return gemm_all_reduce(
            x, weight.t(), bias=bias, prefetch=prefetch, invariant=invariant, group=group
        )
    return gemm_reduce_scatter(
        x, weight.t(), bias=bias, scatter_dim=split, invariant=invariant, group=group
    )


def check_input(x: Tensor, features: int, split: int | None) -> None:
    """Check the shapes. Raises ShapeError or ArgumentError in the terms of layers."""
    if x.dim() < 2 or x.shape[-1] != features:
        raise ShapeError("x", tuple(x.shape), f"[..., {features}], at least two dimensions")
    if split is not None and not 0 <= split < x.dim() - 1:
        raise ArgumentError(
            "sequence_dim", split, f"0 to {x.dim() - 2}, for x of {x.dim()} dimensions"
        )


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, computed by one product.

    A rank has its part of the features of each layer; ``weight`` stores these layer after layer.
    Output: one tensor [..., features / W] for each layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        bias: bool = True,
        **options: Any,
    ) -> None:
        """Make this rank's part of the layers.

        Args:
            out_features: features of each layer, by its name.
            options: options of :class:`ColumnParallelLinear`, but for ``shards``: each layer is shared
                evenly.
        """
        if (shards := options.get("shards", "even")) != "even":
            raise ArgumentError("shards", repr(shards), "'even', of layers that are merged")
        super().__init__(in_features, sum(out_features.values()), bias, **options)
        self.layers = dict(out_features)
        for name, features in out_features.items():
            if features % self._ranks:
                legal = f"a multiple of the group's {self._ranks} ranks"
                raise ArgumentError(f"out_features of {name}", features, legal)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Apply the layers. Raises the errors of :class:`ColumnParallelLinear`."""
        own = [features // self._ranks for features in self.layers.values()]
        y, dim = super().forward(x), self._split_dim or 0
        # So the gradients of the parts are joined in the order in which they travel.
        return tuple(each.movedim(0, dim) for each in parts_of_columns(y.movedim(dim, 0), own))

    def merged(self, wholes: Mapping[str, Tensor]) -> Tensor | None:
        """Merge the single layers' parameters, or this rank's parts of them, into one of this
        rank's parameters. None: their sizes do not match."""
        parts = []
        for name, features in self.layers.items():
            given, own = wholes[name], features // self._ranks
            if len(given) not in (features, own):
                return None
            parts.append(given if len(given) == own else given.chunk(self._ranks)[self._rank])
        return torch.cat(parts)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        if len(whole) != self.out_features:
            return whole
        pieces = torch.split(whole, list(self.layers.values()))
        found = self.merged(dict(zip(self.layers, pieces, strict=True)))
        return whole if found is None else found
