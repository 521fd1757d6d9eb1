"""The part of ``RowwiseParallel`` for embeddings: rows are split over the ranks.

Each rank looks up the tokens whose rows it has. torch's style does the same with a placement of its own
(``MaskPartial``), which keeps a mask from forward to backward and which torch 2.13 does not compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_module
from torch.nn import Embedding, Module

from mkernel.nn.embedding import own_rows
from mkernel.ops.all_reduce import all_reduce
from mkernel.world.lifecycle import current


def shard_rows(module: Module, style: Any, mesh: DeviceMesh) -> bool:
    """Split a module by rows, as ``style`` says, if it is an embedding and all ranks have all ids."""
    if type(module) is not Embedding or style.input_layouts != (Replicate(),):
        return False
    rewrites = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if rewrites or module.num_embeddings % mesh.size():
        return False
    group = current(mesh).name
    distribute_module(module, mesh, style._partition_embedding_fn)
    module.__class__ = _RowsOfEmbedding
    vars(module).update(group=group, outputs=style.output_layouts, local=style.use_local_output)
    return True


class _RowsOfEmbedding(Embedding):
    """An embedding whose weight is a DTensor, sharded by rows. Ids are the same on every rank."""

    group: str
    outputs: tuple[Placement, ...]
    local: bool

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return ids of the first row, for :func:`mkernel.warm`. ``lead``: their sizes."""
        return (torch.zeros(lead, dtype=torch.int64, device=self.weight.device),)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[Replicate()]).to_local()
        mesh, part = weight.device_mesh, weight.to_local()
        rows = own_rows(input, part, mesh.get_local_rank() * len(part), self.padding_idx)
        given: Placement = Partial()
        if self.outputs == (Replicate(),):
            rows, given = all_reduce(rows, group=self.group), Replicate()
            if self.local:
                return rows
        out = DTensor.from_local(rows, mesh, [given], run_check=False)
        out = out.redistribute(placements=self.outputs)
        return out.to_local() if self.local else out
