"""The request of a run: a benchmark's request, which its results keep, and the job of the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Case, case_of
from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.plan.arguments import RESULTS
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import DtypeName, OpName, ScaleMode
from mkernel.plan.shapes import MAX_DIMENSION, size_names
from mkernel.settings import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from mkernel.topology.model import Model, Name

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
Benched = OpName | Literal["moe_layer"]
"""The subject of a row: an op, or a layer of several."""
Mode = Literal["kernel", "eager", "graph", "first"]
MODES: tuple[Mode, ...] = get_args(Mode)
VIEWS: tuple[View, ...] = ("compute_only", "sequential", "pipelined")
SPARE_ROWS = 256
"""Rows of a capacity beyond a quarter more than balanced routing needs."""
LOOP_CALLS = 20
"""Calls of a turn in the modes ``eager`` and ``graph``."""

MODE_TEXT: Mapping[Mode, str] = MappingProxyType(
    {
        "kernel": "one call a turn",
        "eager": f"a turn is {LOOP_CALLS} calls one behind another, without a wait of the host between "
        "them; times are of one call: the host's, until the device has done the last",
        "graph": f"a turn is the replay of a CUDA graph of {LOOP_CALLS} calls; times are of one call",
        "first": "a turn is the first call of a shape that its process has not seen, a few rows more "
        "than the table says; times are the host's, until the device has done it",
    }
)


def sized_like(op: Benched) -> OpName:
    """Return the op whose sizes it takes."""
    return "moe_dispatch_gemm" if op == "moe_layer" else op


def size_text(op: str, sizes: Mapping[str, int]) -> str:
    """Write sizes as ``M x N x K``; for ops that are no GEMM as ``name=value ...``."""
    if op in GEMMS:
        return " x ".join(str(sizes[name]) for name in ("m", "n", "k"))
    return " ".join(f"{name}={int(value)}" for name, value in sizes.items())


class Shape(Model):
    """One row: an op, or a layer of several, at one size, as plans count it.

    Attributes:
        m, n, k: of a GEMM op. sizes: of another op, by name.
        name: the layer or group it stands for.
        target: largest time as a ratio to the product alone, in a world of ``target_ranks`` on
            ``target_accelerator``; None: any. target_us: the same in microseconds, for H200s.
        ranks: the world that it is meant for; None: any.
        layout: of B in memory; None: the run's.
    """

    op: Benched
    m: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    n: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    k: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    sizes: dict[str, int] = Field(default_factory=dict)
    name: Name = ""
    target: float | None = Field(None, gt=0)
    target_us: float | None = Field(None, gt=0)
    target_ranks: int | None = Field(None, ge=1)
    target_accelerator: str | None = None
    ranks: int | None = Field(None, ge=1)
    layout: Literal["row", "column"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Shape:
        given, legal = self.named_sizes.keys(), size_names(sized_like(self.op))
        if not set(legal) - {"causal"} <= given <= set(legal):
            raise ValueError(f"{self.op} takes {', '.join(legal)}")
        return self

    @property
    def named_sizes(self) -> dict[str, int]:
        """Return what the op's plan takes, by name."""
        gemm = {"m": self.m, "n": self.n, "k": self.k}
        return {**{name: value for name, value in gemm.items() if value is not None}, **self.sizes}

    @property
    def size(self) -> str:
        """Return ``M x N x K``; of other ops ``name=value ...``."""
        return size_text(self.op, self.named_sizes)

    def flops(self, world: int) -> float | None:
        """Return the floating-point operations of a rank, on average; None where nothing is
        multiplied."""
        sizes = self.named_sizes
        if self.op in GEMMS:
            return 2.0 * sizes["m"] * sizes["n"] * sizes["k"]
        if self.op in ("moe_dispatch_gemm", "moe_gemm_combine", MOE_LAYER):
            products = 3.0 if self.op == MOE_LAYER else 1.0  # gate, up, down
            of_one = math.prod(sizes[s] for s in ("tokens", "top_k", "hidden", "features"))
            return 2.0 * products * of_one
        if self.op in ("all_reduce", "moe_dispatch", "moe_combine"):
            return None
        scores = math.prod(sizes[s] for s in ("batch", "heads", "sequence", "sequence"))
        products = 2 if self.op == "ring_attention" else 5
        seen = scores / (2 if sizes.get("causal") else 1)
        return 2.0 * products * seen * sizes["head_dim"] / world

    def aimed_at(self, world: int, accelerator: str) -> bool:
        """Return whether the targets are meant for a world of that many ranks on an accelerator
        backend."""
        here = self.target_ranks in (None, world)
        return here and self.target_accelerator in (None, accelerator)


class BenchSpec(Model):
    """One run of the benchmark.

    Attributes:
        contenders: names, in the order of the first iteration.
        source: where the shapes come from: a list's name, a file, ``random``; empty: sizes as given.
        modes: what is timed, each for all shapes (:data:`MODE_TEXT`).
        iterations: timed turns of each contender; warmup: untimed ones before.
        launches: what a call costs the host to launch counts too, in mode ``kernel``.
        routing: of MoE (:mod:`mkernel.cases.moe`). capacity: whether a dispatch is given one, so that
            no size depends on its routing and graphs capture it.
        dtype: of the inputs; of results too, but of e4m3 inputs, whose ``scales`` are named, bfloat16.
        fast_accum: their products may be added with fewer bits (``use_fast_accum``).
        norm: AllReduce and GEMM+AllReduce add a residual and normalise rows (RMSNorm).
        invariant: the sum of contenders that promise invariant results; None: none takes part.
        timeout_s: of every step of a rank: a contender's construction, a turn, a check.
    """

    shapes: tuple[Shape, ...]
    contenders: tuple[str, ...]
    source: str = ""
    modes: tuple[Mode, ...] = ("kernel",)
    dtype: DtypeName = "bfloat16"
    layout: Literal["row", "column"] = "row"
    scales: ScaleMode | None = None
    routing: Literal["uniform", "zipf"] = "uniform"
    capacity: bool = False
    fast_accum: bool = False
    norm: bool = False
    invariant: Invariant | None = None
    warmup: int = Field(3, ge=1)
    iterations: int = Field(20, ge=1)
    seed: int = Field(0, ge=0)
    launches: bool = False
    timeout_s: float = Field(60.0, ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)

    def _options(self, shape: Shape, ranks: int) -> dict[str, Any]:
        """Return the options of the shape's case."""
        norm = {"norm": "residual"} if self.norm else {}
        promise = {} if self.invariant is None else {"invariant": self.invariant}
        if shape.op == "all_reduce":
            return norm | promise
        scales = {} if self.scales is None else {"scales": self.scales}
        if not shape.op.startswith("moe"):
            fast = {"use_fast_accum": True} if self.fast_accum else {}
            summed = norm if shape.op == "gemm_all_reduce" else {}
            return {"replicate_b": False} | scales | fast | summed | promise
        rows = shape.sizes["tokens"] * shape.sizes["top_k"]
        most = rows * ranks if self.routing == "zipf" else rows * 5 // 4 + SPARE_ROWS
        found: dict[str, Any] = {"routing": self.routing} | scales | promise
        return found | {"capacity": min(most, rows * ranks)} if self.capacity else found

    def _results(self, op: str) -> DtypeName:
        """Return the dtype of an op's results: rows that are moved alone keep theirs."""
        return self.dtype if self.scales is None or op == "moe_dispatch" else RESULTS[0]

    def job(self, ranks: int) -> Job:
        """Return what the ranks do."""
        cases = tuple(
            case_of(shape.op)(
                sizes=shape.named_sizes,
                dtype=self.dtype,
                out_dtype=self._results(shape.op),
                layout=self.layout if self.scales else shape.layout or self.layout,
                seed=self.seed,
                options=self._options(shape, ranks),
            )
            for shape in self.shapes
        )
        return Job(
            cases,
            self.contenders,
            self.warmup,
            self.iterations,
            self.modes,
            self.launches,
            self.timeout_s,
        )


@dataclass(frozen=True)
class Job:
    """The work of rank processes, which measure and check; travels to them.

    Attributes:
        cases: the problems, one a row.
        contenders: who takes turns at each, in the order of the first iteration.
        warmup, iterations, modes, launches, timeout_s: as in :class:`BenchSpec`.
        files: input files that replace random data (see :func:`mkernel.harness.inputs.load`).
        output: folder for the outputs of the traced call, or None.
    """

    cases: tuple[Case, ...]
    contenders: tuple[str, ...]
    warmup: int
    iterations: int
    modes: tuple[Mode, ...] = ("kernel",)
    launches: bool = False
    timeout_s: float = 60.0
    files: tuple[Path, ...] = ()
    output: Path | None = None

    @property
    def views(self) -> bool:
        """Return whether it is the op's views that take turns, as in ``mkernel run``: from a barrier,
        without peers, all elements checked, and with one more call that is traced."""
        return self.contenders == VIEWS
