"""``torch.nn.Embedding`` whose rows are on different ranks of a group: each looks up the tokens whose
rows it has, and AllReduce brings the vectors of all together.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from torch.nn.functional import embedding

from mkernel.errors import ArgumentError
from mkernel.ops.all_reduce import all_reduce
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class VocabParallelEmbedding(Module):
    """Vectors of tokens, of which each rank has num_embeddings / W.

    ``weight`` [num_embeddings / W, embedding_dim]: rank r has those from r * num_embeddings / W on. A
    state dict of the whole ``torch.nn.Embedding`` is loaded as well as one of the part.
    Input: ids [..], integers below ``num_embeddings``, the same on every rank. Output:
    [.., embedding_dim], the same on every rank. Ids that are out of range have vectors of zeros.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """ArgumentError: rows that the ranks cannot share. NotInitialized."""
        super().__init__()
        world = current(group)
        if num_embeddings % world.size:
            legal = f"a multiple of the group's {world.size} ranks"
            raise ArgumentError("num_embeddings", num_embeddings, legal)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.group = world.name
        self._ranks, rows = world.size, num_embeddings // world.size
        self._first = world.rank * rows
        self.weight = Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, whole: Embedding, *, group: Group = None) -> VocabParallelEmbedding:
        """This rank's part of a layer that every rank has whole, without ``padding_idx``, ``max_norm``
        and the like."""
        weight = whole.weight
        made = cls(*weight.shape, group=group, device=weight.device, dtype=weight.dtype)
        made.load_state_dict(whole.state_dict())
        return made

    def reset_parameters(self) -> None:
        """As ``torch.nn.Embedding``; each rank draws from its own generator."""
        torch.nn.init.normal_(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ShapeError and the other errors of :func:`mkernel.all_reduce`."""
        own = ids - self._first
        absent = (own < 0) | (own >= len(self.weight))
        rows = embedding(own.masked_fill(absent, 0), self.weight)
        return all_reduce(rows.masked_fill(absent[..., None], 0), group=self.group)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        given = state_dict.get(prefix + "weight")
        if isinstance(given, Tensor) and given.shape == (self.num_embeddings, self.embedding_dim):
            part = given[self._first : self._first + len(self.weight)]
            state_dict = {**state_dict, prefix + "weight": part}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and over how many ranks it is split."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self._ranks}"
