"""FlashInfer's fused all-reduce, residual and norm as a peer, where it is installed and compiled.

Its kernels load and store peers' memory directly, as TensorRT-LLM's do; none of them uses multicast.
Its workspace is torch's symmetric memory, which :data:`symm_mem.ENVIRONMENT` keeps from multicast, too.
Its first use compiles the kernels for minutes, so that has to be done before a run (:data:`COMPILE`).
Options of the calls are those that vLLM passes on Hopper.
"""

from __future__ import annotations

import math
from ctypes import c_void_p
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import distributed

from mkernel.harness.contenders import SUMS, Contender
from mkernel.harness.contenders.norm import has_norm
from mkernel.harness.contenders.products import product, scales_without_product
from mkernel.harness.contenders.symm_mem import unusable
from mkernel.harness.problem import Inputs, Problem, Tensors

COMPILE = (
    "python -c 'from flashinfer.jit.comm import gen_trtllm_comm_module as m; m().build_and_load()'"
)
_ABSENT = "flashinfer is not installed: pip install flashinfer-python"
_WORLDS = (2, 4, 8)
_ACCESS_BYTES = 16
_MOST_THREADS, _MOST_CLUSTER = 1024, 8
"""A row has a thread for each access, in blocks that are a cluster and have as many threads each."""
_MOST_BYTES = 2**31 - 2**21
"""Its buffer of all ranks' rows is at most so large."""


class Sums:
    """FlashInfer's sums of one size over all ranks, by one of its two algorithms, in memory of their
    own. Collective."""

    def __init__(
        self,
        place: tuple[int, int],
        shape: tuple[int, ...],
        device: torch.device,
        *,
        one_shot: bool,
        eps: float | None = None,
    ) -> None:
        """Make the memory. ``place``: this rank's number, and how many there are; ``eps``: that of the
        norm behind each sum, None: there is none."""
        comm: Any = import_module("flashinfer.comm")
        (rank, world), (rows, columns) = place, shape
        self._handles, workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            rank, world, rows, columns, group=distributed.group.WORLD
        )
        # Its barriers begin with flags of zero, and it leaves that to who gave it the memory.
        inside: Any = import_module("flashinfer.comm.trtllm_ar")
        flags = c_void_p(self._handles[1][rank])
        inside.cudart.cudaMemset(flags, 0, 4 * world * inside.BarrierFlagCount)
        torch.get_device_module(device).synchronize()
        distributed.barrier()
        self._free = comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion
        self._reduce = comm.trtllm_allreduce_fusion
        patterns = comm.AllReduceFusionPattern
        self._options = {
            "world_size": world,
            "world_rank": rank,
            "token_num": rows,
            "hidden_dim": columns,
            "launch_with_pdl": True,
            "trigger_completion_at_end": True,
            "fp32_acc": True,
            "pattern_code": patterns.kAllReduce if eps is None else patterns.kARResidualRMSNorm,
            "use_oneshot": one_shot,
            "quant_out": None,
            "scale_out": None,
            "rms_eps": eps,
            "scale_factor": None,
            "layout_code": None,
            "workspace_ptrs": workspace,
        }

    def add(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the sums of rows without a norm."""
        self._reduce(rows, allreduce_out=out, **_NO_NORM, **self._options)

    def add_and_normalise(
        self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Compute the normalised sums of rows and a residual; return the new residual."""
        new = torch.empty_like(out)
        self._reduce(
            rows,
            allreduce_out=None,
            residual_in=residual,
            residual_out=new,
            norm_out=out,
            rms_gamma=weight,
            **self._options,
        )
        return new

    def close(self) -> None:
        self._free(self._handles, distributed.group.WORLD)


class FlashInfer(Contender):
    """FlashInfer's kernel by one of its two algorithms, of GEMM+AllReduce after torch's product."""

    ops, ops_text = SUMS, "for sums on every rank"
    cpu, library = False, True
    one_shot: ClassVar[bool]

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape, dtype = problem.memory("op")["out"]
        case: Any = problem.case
        eps = case.eps if has_norm(problem) else None
        place = problem.rank, problem.world
        self._sums = Sums(place, shape, problem.device, one_shot=self.one_shot, eps=eps)
        self._product = torch.empty(shape, dtype=dtype, device=problem.device)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        found = super().unusable(problem) or unusable(problem) or scales_without_product(problem)
        return found or _unsupported(problem, cls.one_shot) or why_not_usable()

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out, rows = outputs["out"], inputs.get("x")
        if rows is None:
            rows = self._product
            product(inputs["a"], inputs, rows, fast=self.fast)
        if "residual" not in inputs:
            self._sums.add(rows, out)
            return {"out": out}
        new = self._sums.add_and_normalise(rows, inputs["residual"], inputs["norm_weight"], out)
        return {"out": out, "residual_out": new}

    def close(self) -> None:
        self._sums.close()


class OneShot(FlashInfer):
    """Everything to everyone at once, by data that say themselves that they have come (Lamport)."""

    name = "flashinfer-one-shot"
    one_shot = True


class TwoShot(FlashInfer):
    """In two exchanges, with barriers."""

    name = "flashinfer-two-shot"
    one_shot = False


_NO_NORM = dict.fromkeys(("residual_in", "residual_out", "norm_out", "rms_gamma"))


def _unsupported(problem: Problem, one_shot: bool) -> str | None:
    """Return why its kernels do not take the problem, or None."""
    (rows, columns), dtype = problem.memory("op")["out"]
    threads, rest = divmod(columns * dtype.itemsize, _ACCESS_BYTES)
    a_block = threads // math.gcd(threads, _MOST_CLUSTER)
    taken = {
        "for 2, 4 or 8 ranks": problem.world in _WORLDS,
        "for sums of 16-bit elements: the buffer of its two exchanges holds no others":
            dtype.itemsize == 2,
        f"for rows of multiples of {_ACCESS_BYTES} bytes": rest == 0,
        f"for rows that up to {_MOST_CLUSTER} blocks of {_MOST_THREADS} threads share evenly":
            a_block <= _MOST_THREADS,
        "for more rows than ranks": one_shot or rows > problem.world,
        "its buffer of all ranks' rows is less than 2 GiB":
            rows * columns * dtype.itemsize * problem.world <= _MOST_BYTES,
    }  # fmt: skip
    return next((why for why, takes in taken.items() if not takes), None)


def why_not_usable() -> str | None:
    """Return why FlashInfer cannot be used in this process, or None."""
    if find_spec("flashinfer") is None:
        return _ABSENT
    try:
        compiled = import_module("flashinfer.jit.comm").gen_trtllm_comm_module().is_compiled
    except (ImportError, RuntimeError) as error:  # what it needs is missing, or it has no such card
        return f"flashinfer does not load: {error}"
    return None if compiled else f"not compiled yet: {COMPILE}"
