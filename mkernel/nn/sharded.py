"""Base of modules of which each rank has a part, which it takes from a state dict of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mkernel.errors import ShapeError


class ShardedModule(Module):
    """A module whose parameters are parts of those of a whole layer.

    It loads a state dict of the whole layer as well as one of this rank's part. With
    ``assign=True`` the parameters become tensors of the state dict, as in all of torch's modules;
    parts cut out of the whole are copied first, so that a rank keeps memory for its part only.
    """

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        """Return this rank's part of a whole parameter, or ``whole`` itself if its sizes differ
        from the whole's."""
        raise NotImplementedError

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *arguments: Any,
    ) -> None:
        own = dict(state_dict)
        for name, parameter in self.named_parameters():
            given = own.get(prefix + name)
            if isinstance(given, Tensor) and given.shape != parameter.shape:
                part = self._part(name, given, parameter)
                if local_metadata.get("assign_to_params_buffers") and _shares(part):
                    part = part.detach().clone(memory_format=torch.contiguous_format)
                own[prefix + name] = part
        super()._load_from_state_dict(own, prefix, local_metadata, *arguments)


def scratch(
    weight: Tensor, lead: tuple[int, ...], features: int, split: int | None, ranks: int
) -> Tensor:
    """Return zeros like a layer's input: [..., ``features``], in the dtype of ``weight``.

    Args:
        lead: the other dimensions of the whole activation.
        split: that of them of which each rank has its share; None: each has all of it.

    Raises:
        ShapeError: ranks cannot share that dimension.
    """
    sizes = [*lead]
    if split is not None:
        if split >= len(sizes) or sizes[split] % ranks:
            legal = f"sizes whose dimension {split} the group's {ranks} ranks can share"
            raise ShapeError("rows", lead, legal)
        sizes[split] //= ranks
    return torch.zeros((*sizes, features), dtype=weight.dtype, device=weight.device)


def _shares(part: Tensor) -> bool:
    """Return whether a tensor lies in memory that is larger than the tensor."""
    return part.untyped_storage().nbytes() > part.nbytes
