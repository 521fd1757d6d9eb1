"""``torch.nn.Embedding`` with its rows split over the ranks of a group: each rank looks up the
tokens whose rows it has, and AllReduce combines the vectors.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Parameter
from torch.nn.functional import embedding

from mkernel.errors import ArgumentError
from mkernel.nn.sharded import ShardedModule
from mkernel.ops.all_reduce import all_reduce
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class VocabParallelEmbedding(ShardedModule):
    """An embedding of tokens, of whose vectors each rank has num_embeddings / W.

    ``weight`` [num_embeddings / W, embedding_dim]: rank r has the rows from r * num_embeddings / W
    on. A state dict of the whole ``torch.nn.Embedding`` is loaded as well as one of the part.

    Input: ids [..], integers below ``num_embeddings``, the same on every rank. Output: [..,
    embedding_dim], the same on every rank. Ids that are out of range have vectors of zeros.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's part of the embedding.

        Args:
            padding_idx: a row of the whole embedding, counted from its end if negative, which
                starts as zeros and whose gradient is zero, as in ``torch.nn.Embedding``.

        Raises:
            ArgumentError: rows that the ranks cannot share, or a ``padding_idx`` that is none of
                them.
            NotInitialized: there is no world yet.
        """
        super().__init__()
        world = current(group)
        if num_embeddings % world.size:
            legal = f"a multiple of the group's {world.size} ranks"
            raise ArgumentError("num_embeddings", num_embeddings, legal)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            legal = f"{-num_embeddings} to {num_embeddings - 1}, or None"
            raise ArgumentError("padding_idx", padding_idx, legal)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.group = world.name
        self._ranks, rows = world.size, num_embeddings // world.size
        self._first = world.rank * rows
        self.weight = Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, whole: Embedding, *, group: Group = None) -> VocabParallelEmbedding:
        """Make this rank's part of a layer that every rank has whole. ArgumentError: the layer
        renormalises rows (``max_norm``), scales gradients by frequency or has sparse ones."""
        for name, none in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(whole, name) != none:
                raise ArgumentError(f"whole.{name}", getattr(whole, name), f"{none}")
        weight = whole.weight
        made = cls(
            *weight.shape,
            padding_idx=whole.padding_idx,
            group=group,
            device=weight.device,
            dtype=weight.dtype,
        )
        made.load_state_dict(whole.state_dict())
        return made

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.Embedding`` does; each rank draws from its own generator."""
        torch.nn.init.normal_(self.weight)
        padding = _own_row(self.padding_idx, self._first, len(self.weight))
        if padding is not None:
            with torch.no_grad():
                self.weight[padding].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the vectors of ``ids``. Raises ShapeError and the other errors of
        :func:`mkernel.all_reduce`."""
        rows = own_rows(ids, self.weight, self._first, self.padding_idx)
        return all_reduce(rows, group=self.group)

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return ids of the first row, for :func:`mkernel.warm`. ``lead``: their sizes."""
        return (torch.zeros(lead, dtype=torch.int64, device=self.weight.device),)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        if whole.shape != (self.num_embeddings, self.embedding_dim):
            return whole
        return whole[self._first : self._first + len(parameter)]

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer and the number of ranks that it is split over."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, ranks={self._ranks}"


def own_rows(ids: Tensor, weight: Tensor, first: int, padding_idx: int | None) -> Tensor:
    """Look up the vectors that lie in this rank's part of an embedding, whose row 0 is the whole's row
    ``first``. Those of other ids are zeros. ``padding_idx``: the whole's row without a gradient."""
    own = ids - first
    absent = (own < 0) | (own >= len(weight))
    padding = _own_row(padding_idx, first, len(weight))
    rows = embedding(own.masked_fill(absent, 0), weight, padding)
    return rows.masked_fill(absent[..., None], 0)


def _own_row(row: int | None, first: int, rows: int) -> int | None:
    """Return the row of this rank's part that is ``row`` of the whole; None: it has no such row."""
    own = -1 if row is None else row - first
    return own if 0 <= own < rows else None
