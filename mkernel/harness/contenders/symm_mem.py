"""torch's symmetric memory as a peer, and the copy engines alone. Never through multicast memory.

Both need CUDA devices with peer access, and the environment of :data:`ENVIRONMENT`, which the harness
sets before it starts ranks: torch would otherwise pick multicast by itself where the hardware has it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import distributed

from mkernel.cases.parts import Transfer
from mkernel.harness.contenders import NO_ROUNDING, SUMS, Contender
from mkernel.harness.contenders.library import (
    PartAlone,
    place_rows,
    summed_rows,
)
from mkernel.harness.contenders.norm import AddAndNorm
from mkernel.harness.contenders.products import product, scales_without_product
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
)
ONE_SHOT_BYTES = 128 * 1024
"""All-reduces up to this size take one exchange, as torch's own compiler chooses."""


def _module() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def group_name() -> str:
    """Return the name of the group of all ranks, which torch's symmetric memory is told of."""
    group = distributed.group.WORLD
    assert group is not None
    name: str = group.group_name
    enable = getattr(_module(), "enable_symm_mem_for_group", None)
    if enable is not None:  # needed up to torch 2.10, deprecated after
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(name)
    return name


def _sees_multicast(device: torch.device) -> bool:
    """Return whether torch would use multicast memory in spite of the environment."""
    from torch._C._autograd import DeviceType

    found: bool = _module()._SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
    return found


def unusable(problem: Problem) -> str | None:
    """Return why the problem's ranks cannot use it, on devices where no library is barred, or None."""
    if problem.world < 2:
        return "needs at least 2 ranks"
    for name, value in ENVIRONMENT.items():
        if os.environ.get(name) != value:
            return f"needs {name}={value}"
    return None


class SymmMem(Contender):
    """torch.ops.symm_mem's fused ops; for AllReduce the product into symmetric memory, then its
    two-shot all-reduce (one-shot where the result is small)."""

    name = "symm_mem"
    ops, ops_text = GEMMS, "has no such op"
    device, library = "cuda", True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._gathers = problem.gathers
        self._group = group_name()
        self._multicast = _sees_multicast(problem.device)
        self._sums = problem.op == "gemm_all_reduce"
        self._norm = AddAndNorm(problem)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        scales = problem.case.options.get("scales")
        if scales == "tensor" and problem.gathers:
            return "multiplies all ranks' rows by one rank's scale"
        if scales == "block" and problem.op != "gemm_all_reduce":
            return "takes no scales by blocks"
        return super().unusable(problem) or unusable(problem) or scales_without_product(problem)

    def outputs(self) -> Tensors:
        """Return GEMM+AllReduce's output in symmetric memory, where products are summed."""
        return {"out": symmetric_output(self.problem, self._group)} if self._sums else {}

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        ops, a, b = torch.ops.symm_mem, inputs["a"], inputs["b"]
        if "a_scale" in inputs and not self._sums:
            return {"out": self._scaled(inputs)}
        if self._gathers:
            # Without the gathered A it would choose multicast for small shapes.
            _, (result,) = ops.fused_all_gather_matmul(
                a, [b], 0, self._group, return_A=self._multicast
            )
            return {"out": result}
        if not self._sums:
            return {"out": ops.fused_matmul_reduce_scatter(a, b, "sum", 0, self._group)}
        out = outputs["out"]
        product(a, inputs, out, fast=self.fast)
        small = out.nbytes <= ONE_SHOT_BYTES
        reduced = ops.one_shot_all_reduce if small else ops.two_shot_all_reduce_
        return self._norm(reduced(out, "sum", self._group), inputs)

    def _scaled(self, inputs: Inputs) -> torch.Tensor:
        """Call the op for e4m3 operands."""
        ops, a, b = torch.ops.symm_mem, inputs["a"], inputs["b"]
        _, dtype = self.problem.memory("op")["out"]
        of_a, of_b = inputs["a_scale"], inputs["b_scale"]
        result: torch.Tensor
        if self._gathers:
            _, (result,) = ops.fused_all_gather_scaled_matmul(
                a, [b], of_a, [of_b], 0, self._group, [None], [None], [dtype], [self.fast]
            )
            return result
        shape = [a.shape[0], b.shape[1]]
        result = ops.fused_scaled_matmul_reduce_scatter(
            a, b, of_a, of_b, "sum", 0, 0, self._group, shape, None, None, dtype, self.fast
        )
        return result


def pull_order(rank: int, world: int) -> tuple[int, ...]:
    """Return from which rank ``rank`` pulls in each step, its own share last. In no step do two ranks
    pull from one: its link would be shared, and the figure flatter whatever it is compared with."""
    return tuple((rank + step) % world for step in range(1, world + 1))


class Copy(PartAlone):
    """The collective's bytes pulled by copy engines out of peers' memory, one peer after another: T_m
    without a library. AllGather is done with them; the sums would still have to be added up."""

    name = "copy"
    kind = "bytes"
    device, library = "cuda", True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        oracle, sizes = problem.oracle("bytes"), problem.case.sizes
        assert isinstance(oracle, Transfer)
        self._transfer = oracle
        shape = (
            (sizes["m"] // problem.world, sizes["k"])
            if problem.gathers
            else (sizes["m"], sizes["n"])
        )
        self._source = symmetric(shape, problem)
        handle = rendezvous(self._source, group_name())
        self._theirs: Sequence[torch.Tensor] = [
            handle.get_buffer(rank, shape, self._source.dtype) for rank in range(problem.world)
        ]

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        found = super().unusable(problem) or unusable(problem)
        rows = problem.case.sizes.get("m", 0)
        return found or ("for rows that ranks share alike" if rows % problem.world else None)

    def inputs(self) -> Inputs:
        return {"x": self._source}

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out, rank, world = outputs["out"], self.problem.rank, self.problem.world
        for peer in pull_order(rank, world):
            for target, source in self._transfer.pieces(rank, world, peer):
                out[target].copy_(self._theirs[peer][source], non_blocking=True)
        return outputs

    def limits(self) -> dict[str, float]:
        return {"out": NO_ROUNDING}


def rendezvous(tensor: torch.Tensor, group: str) -> Any:
    """Return the handle of memory that :func:`symmetric` gave every rank. Collective."""
    return _module().rendezvous(tensor, group)


def symmetric(shape: tuple[int, ...], problem: Problem) -> torch.Tensor:
    """Allocate memory of its own: a handle's buffers start at the allocation, and a pool would share
    one."""
    case = problem.case
    dtype = case.dtype if problem.gathers else case.out_dtype
    made: torch.Tensor = _module()._SymmetricMemory.empty_strided_p2p(
        shape, (shape[1], 1), getattr(torch, dtype), problem.device
    )
    return made


def symmetric_output(problem: Problem, group: str) -> torch.Tensor:
    """Allocate a sum's output, which all ranks of the group can reach. Collective."""
    shape, _ = problem.memory("op")["out"]
    made = symmetric(shape, problem)
    rendezvous(made, group)
    return made


class SymmetricSum(Contender):
    """One of torch.ops.symm_mem's all-reduces, of rows that a product wrote to its memory or that lie
    there before the call."""

    ops, ops_text = SUMS, "for sums on every rank"
    device, library = "cuda", True
    reduced: ClassVar[str]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._group = group_name()
        self._norm = AddAndNorm(problem)
        self._reduced = getattr(torch.ops.symm_mem, self.reduced)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or unusable(problem) or scales_without_product(problem)

    def outputs(self) -> Tensors:
        return {"out": symmetric_output(self.problem, self._group)}

    def place(self, inputs: Inputs, outputs: Tensors) -> None:
        place_rows(self, inputs, outputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        summed_rows(self, inputs, out)
        return self._norm(self._reduced(out, "sum", self._group), inputs)


class OneShot(SymmetricSum):
    """Everything to everyone at once, into new memory."""

    name = "symm_mem-one-shot"
    reduced = "one_shot_all_reduce"


class TwoShot(SymmetricSum):
    """In two exchanges, in place."""

    name = "symm_mem-two-shot"
    reduced = "two_shot_all_reduce_"
