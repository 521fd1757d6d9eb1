"""torch's own context parallelism as a peer: the functions that ``context_parallel`` puts in the place
of scaled dot product attention on cuDNN, and of its backward, on this rank's tensors.

They are called as they are: ``context_parallel`` itself asks for a buffer to cut, which no call here
has, and wraps tensors in DTensors; neither is timed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import distributed

from mkernel.harness.contenders import ATTENTION_BACKWARD, Contender
from mkernel.harness.contenders.experts import kept
from mkernel.harness.problem import Inputs, Problem, Tensors


class ContextParallel(Contender):
    """Keys and values are gathered, and attended to rank by rank. Sequences are split in the same
    zigzag where ``causal``."""

    name = "context-parallel"
    ops, ops_text = ("ring_attention", ATTENTION_BACKWARD), "for attention"
    cpu, library = False, True
    rotation: ClassVar[str] = "allgather"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._mesh = distributed.device_mesh.init_device_mesh(problem.device.type, (problem.world,))
        self._causal = bool(problem.case.sizes.get("causal"))

    def promised(self) -> tuple[str, ...] | None:
        return ("out",) if self.op == "ring_attention" else None

    def before(self, inputs: Inputs) -> None:
        if self.op == ATTENTION_BACKWARD:
            found = self._forward(inputs)
            for name, each in zip(("out", "lse"), found, strict=False):
                kept(inputs, name, each)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        if self.op == "ring_attention":
            return {"out": self._forward(inputs)[0]}
        q, k = inputs["q"], inputs["k"]
        none = torch.empty(
            (), dtype=torch.int64, device=q.device
        )  # of a generator that drops nothing
        of_q, of_k, of_v, *_ = self._torch()._scaled_dot_product_ring_cudnn_attention_backward(
            self._mesh, inputs["grad_out"], q, k, inputs["v"], inputs["out"], inputs["lse"], none,
            none, None, None, None, q.shape[2], k.shape[2], 0.0, self._causal,
        )  # fmt: skip
        return {"grad_q": of_q, "grad_k": of_k, "grad_v": of_v}

    def _forward(self, inputs: Inputs) -> tuple[Any, ...]:
        """Compute out, log-sum-exp, and more."""
        found: tuple[Any, ...] = self._torch()._scaled_dot_product_ring_cudnn_attention(
            self._mesh, *(inputs[name] for name in "qkv"), is_causal=self._causal
        )
        return found

    def _torch(self) -> Any:
        """Return torch's module, told how to rotate; it cuts in zigzag where sequences are."""
        from torch.distributed.tensor.experimental import _attention
        from torch.distributed.tensor.experimental._context_parallel import _attention as module

        _attention.set_rotate_method(self.rotation)
        module._cp_options.enable_load_balance = self._causal
        return module


class ContextParallelAllToAll(ContextParallel):
    """The same with parts that travel on while others are attended to."""

    name = "context-parallel-alltoall"
    rotation: ClassVar[str] = "alltoall"
