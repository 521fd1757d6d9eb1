"""What takes turns: mkernel's op, the plain library path, and its two halves alone.

A contender is made anew for every problem. Another one is named ``module:Class``, as backends are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import distributed

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError
from mkernel.harness.problem import Kind, Problem, Tensors
from mkernel.ops.gemm import GemmOp
from mkernel.plan.model import PathName


class Contender(ABC):
    """One way to do a kind of work.

    The order of use: ``unusable`` (None), construction (collective: scratch memory is allocated
    here), then a :meth:`call` a turn, each with inputs and outputs that are new in content.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind] = "op"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        """Why it cannot take part, or None."""
        return None

    def inputs(self) -> Tensors:
        """Memory for its inputs; a contender that wants them somewhere else says where."""
        return self.problem.empty(self.kind)

    def output(self) -> torch.Tensor:
        """Memory for its output; asked for in every turn, and poisoned before the call."""
        problem = self.problem
        return torch.empty(
            problem.out_shape(self.kind), dtype=problem.torch_dtype, device=problem.device
        )

    @abstractmethod
    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        """Do the work on the current stream; returns the output, ``out`` or its own."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """After its last turn, with the device idle. Collective."""

    def limit(self) -> float:
        """Largest relative error that counts as right."""
        return library_limit(self.problem)


def library_limit(problem: Problem) -> float:
    """What a library that adds in the output's dtype can reach, at the margin of our own limit.

    A product alone may be split along K, its parts rounded and their sum rounded again: twice the
    variance of one rounding. Ring and two-shot collectives round every partial product and then
    every sum of two or more terms: W + (2 + ... + W) roundings of one term's variance, where one
    rounding of the sum of W terms counts W.
    """
    world = problem.world
    rounded = 2.0 if problem.gathers else 1 + (world * (world + 1) / 2 - 1) / world
    return TOLERANCE[problem.dtype] * math.sqrt(max(2.0, rounded))


class Mkernel(Contender):
    """The public API on the world's accelerator."""

    name = "mkernel"

    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(mkernel, self.problem.op)(inputs["a"], inputs["b"], out=out)
        return result

    def limit(self) -> float:
        return TOLERANCE[self.problem.dtype]

    def close(self) -> None:
        mkernel.synchronize()  # raises what the device found of the last calls


class MkernelSymmetric(Mkernel):
    """The same with the output in the library's symmetric memory: peers write straight into it."""

    name = "mkernel-symmetric"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._out = mkernel.empty(problem.out_shape(self.kind), problem.torch_dtype)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return None if problem.op == "gemm_all_reduce" else "peers write to no output of this op"

    def output(self) -> torch.Tensor:
        return self._out


class MkernelFused(Mkernel):
    """The op on its fused path, whatever the planner would choose."""

    name = "mkernel-fused"
    path: ClassVar[PathName] = "fused"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op in mkernel.capabilities().library_ops:
            return None
        return "the accelerator has one path for this op: mkernel"

    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        op: GemmOp = import_module(f"mkernel.ops.{self.problem.op}").OP
        result: torch.Tensor = op.call(inputs["a"], inputs["b"], out=out, path=self.path).outputs[
            "out"
        ]
        return result


class MkernelLibrary(MkernelFused):
    """The op on its library path: a product of torch's and a collective of ours."""

    name = "mkernel-library"
    path = "library"


class Gemm(Contender):
    """torch.matmul alone: cuBLAS on CUDA devices. Its time is T_c."""

    name = "gemm"
    kind = "compute"

    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        return torch.matmul(inputs["a"], inputs["b"], out=out)

    def limit(self) -> float:
        return TOLERANCE[self.problem.dtype] * math.sqrt(2.0)


class Collective(Contender):
    """torch.distributed alone: NCCL on CUDA devices, gloo on a CPU. Its time counts as T_m."""

    name = "comm"
    kind = "communication"

    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        return collective(self.problem.op, inputs["x"], out)

    def limit(self) -> float:
        return 0.0 if self.problem.gathers else library_limit(self.problem)


class Sequential(Contender):
    """The product and the collective, one after the other."""

    name = "sequential"
    device: ClassVar[str] = "cpu"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape = (problem.m, problem.k) if problem.gathers else (problem.m, problem.n)
        self._between = torch.empty(shape, dtype=problem.torch_dtype, device=problem.device)

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return None if problem.device.type == cls.device else f"only on {cls.device} devices"

    def call(self, inputs: Tensors, out: torch.Tensor) -> torch.Tensor:
        op = self.problem.op
        if op == "all_gather_gemm":
            collective(op, inputs["a"], self._between)
            return torch.matmul(self._between, inputs["b"], out=out)
        if op == "gemm_all_reduce":
            torch.matmul(inputs["a"], inputs["b"], out=out)
            distributed.all_reduce(out)
            return out
        torch.matmul(inputs["a"], inputs["b"], out=self._between)
        return collective(op, self._between, out)


class NcclCublas(Sequential):
    """The plain library path on CUDA devices."""

    name = "nccl+cublas"
    device = "cuda"


class GlooMatmul(Sequential):
    """The plain library path on a CPU."""

    name = "gloo+matmul"
    device = "cpu"


def collective(op: str, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The op's collective by torch.distributed, into ``out``. ``source`` may be summed in place."""
    if op == "all_gather_gemm":
        _ALL_GATHER(out, source)
    elif op == "gemm_reduce_scatter":
        _REDUCE_SCATTER(out, source)
    else:
        distributed.all_reduce(source)
        return source
    return out


def _newest(*names: str) -> Callable[..., Any]:
    """torch.distributed's function under the first of its names that this torch knows."""
    found: Callable[..., Any] = next(
        getattr(distributed, name) for name in names if hasattr(distributed, name)
    )
    return found


_ALL_GATHER = _newest("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _newest("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class _Place:
    """Where a contender that ships with mkernel lies."""

    module: str
    attribute: str


_KNOWN = {
    "mkernel": _Place(__name__, "Mkernel"),
    "mkernel-symmetric": _Place(__name__, "MkernelSymmetric"),
    "mkernel-fused": _Place(__name__, "MkernelFused"),
    "mkernel-library": _Place(__name__, "MkernelLibrary"),
    "gemm": _Place(__name__, "Gemm"),
    "comm": _Place(__name__, "Collective"),
    "copy": _Place("mkernel.harness.symm_mem", "Copy"),
    "nccl+cublas": _Place(__name__, "NcclCublas"),
    "gloo+matmul": _Place(__name__, "GlooMatmul"),
    "symm_mem": _Place("mkernel.harness.symm_mem", "SymmMem"),
}
NAMES = tuple(_KNOWN)
ALWAYS = ("gemm", "comm", "copy")
"""What gives T_c and T_m."""
OURS = ("mkernel", "mkernel-symmetric", "mkernel-fused", "mkernel-library")
PEERS = tuple(name for name in NAMES if name not in (*OURS, *ALWAYS))
SEQUENTIAL = ("nccl+cublas", "gloo+matmul")


def named(name: str) -> type[Contender]:
    """The contender of that name, or at ``module:Class``. ArgumentError."""
    if name in _KNOWN:
        place = _KNOWN[name]
        found: Any = getattr(import_module(place.module), place.attribute)
    elif ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ArgumentError("--peers", name, "module:Class", why=str(error)) from error
    else:
        raise ArgumentError("--peers", repr(name), f"one of: {', '.join(NAMES)}; or module:Class")
    if not (isinstance(found, type) and issubclass(found, Contender)):
        raise ArgumentError("--peers", name, "a class that derives from Contender")
    return found


def chosen(peers: Sequence[str] | None, with_mkernel: bool) -> tuple[str, ...]:
    """The contenders of a run in their order: mkernel, the peers (default: all), the parts alone."""
    wanted = PEERS if peers is None else tuple(peers)
    for name in wanted:
        named(name)
    first = ("mkernel",) if with_mkernel else ()
    return tuple(dict.fromkeys((*first, *wanted, *ALWAYS)))
