"""What each view of each op queues, with the native module's own data but nothing started."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gpu_plans import gpu_plan
from hopper_calls import CONTEXT, GAP, last_rank

from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.capabilities import OPS
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import FUSED
from mkernel.backends.accelerators.hopper.gemm import fused as gemm
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan, Scales

STARTS = (
    "push_rows", "all_gather_gemm", "gemm_reduce", "reduce_scatter", "all_reduce",
)  # fmt: skip
MAIN = 5


class Pipelined:
    """Stands for PipelinedGather and PipelinedReduce."""

    def __init__(self, queued: list[str], *given: Any) -> None:
        self._queued = queued
        self._name = "pipelined by copy engines"
        if not isinstance(given[-1], native.native().AllGatherSchedule) or given[-1].push_blocks:
            self._name = "pipelined"

    def start(self, number: int, timeout_s: float, *given: Any) -> None:
        tensors, stream = given[:2]
        assert stream == MAIN
        assert not any(at % 16 for at in (tensors.a, tensors.b, tensors.out, tensors.bias))
        symmetric = given[2:] not in ((), ([],))
        self._queued.append(self._name + " into every out" * symmetric)


class Copies:
    """Stands for GatheredCopies."""

    def __init__(self, queued: list[str]) -> None:
        self._queued = queued

    def start(self, number: int, timeout_s: float, tensors: Any, rows: int, *given: int) -> None:
        assert given[1:] == (MAIN,)
        if rows:
            self._queued.append("copies")


class Recorder:
    """The native module, whose starts only leave their names."""

    def __init__(self, made: Any, queued: list[str]) -> None:
        self._made, self._queued = made, queued

    def __getattr__(self, name: str) -> Any:
        if name.startswith("Pipelined"):
            return partial(Pipelined, self._queued)
        if name == "GatheredCopies":
            return lambda *given, **named: Copies(self._queued)
        if name not in STARTS:
            return getattr(self._made, name)

        def start(
            *arguments: Any, stream: int | None = None, bias: int = 0, columns: int = 0
        ) -> None:
            assert (arguments[-1] if stream is None else stream) == MAIN, name
            self._queued.append(name + f" and a bias of {columns}" * bool(bias))

        return start


@pytest.fixture
def queued(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(gemm, "native", lambda: Recorder(made, names))
    return names


def planned(
    op: str, m: int, n: int, k: int, world: int = 2, chunk: int | None = None, **options: Any
) -> LaunchPlan:
    given = {"dtype": "bfloat16", "chunk": chunk, "path": "fused", **options}
    return gpu_plan(HopperAccelerator(), op, world, {"m": m, "n": n, "k": k}, **given)


def run(
    queued: list[str],
    made: LaunchPlan,
    view: View = "pipelined",
    *,
    gathered: bool = False,
    symmetric: bool = False,
    offset: int = 0,
) -> list[str]:
    """Names of what the last rank queues, in order."""
    call = last_rank(made, view, gathered=gathered, symmetric=symmetric, offset=offset)
    queued.clear()
    FUSED[made.op](call, CONTEXT).start(call, MAIN)
    assert FUSED[made.op].workspace(made).areas[0] >= 1 << 20
    return list(queued)


def test_all_gather_gemm(queued: list[str]) -> None:
    small = planned("all_gather_gemm", 512, 256, 256)
    assert run(queued, small) == ["pipelined"]  # its own blocks push
    large = planned("all_gather_gemm", 8192, 256, 4096)
    assert run(queued, large) == ["pipelined by copy engines"]
    assert run(queued, large, "sequential") == ["push_rows", "all_gather_gemm"]
    assert run(queued, large, "compute_only") == ["all_gather_gemm"]
    alone = planned("all_gather_gemm", 4096, 256, 2048, world=1)
    assert run(queued, alone, "sequential") == ["all_gather_gemm"]


def test_gathered_rows_are_copied_after_the_kernels(queued: list[str]) -> None:
    small = planned("all_gather_gemm", 512, 256, 256)
    assert run(queued, small, gathered=True) == ["pipelined", "copies"]
    alone = planned("all_gather_gemm", 512, 256, 256, world=1)
    *calls, copy = run(queued, alone, gathered=True)
    assert (len(calls), copy) == (1, "copies")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("op", "collective"),
    [("gemm_reduce_scatter", "reduce_scatter"), ("gemm_all_reduce", "all_reduce")],
)
def test_reductions(queued: list[str], op: str, collective: str, symmetric: bool) -> None:
    made = planned(op, 2048, 256, 256)
    everywhere = symmetric and op == "gemm_all_reduce"
    into = "pipelined into every out" if everywhere else "pipelined"
    assert run(queued, made, symmetric=symmetric) == [into]
    assert run(queued, made, "compute_only", symmetric=symmetric) == ["gemm_reduce"]
    separate = ["all_gather_gemm", collective]
    assert run(queued, made, "sequential", symmetric=symmetric) == separate
    assert run(queued, planned(op, 2048, 256, 256, world=1), "sequential") == ["pipelined"]


@pytest.mark.parametrize("op", OPS)
def test_tensors_at_any_element(queued: list[str], op: str) -> None:
    made = planned(op, 2048, 256, 256)
    assert run(queued, made, offset=1) == run(queued, made)


def test_the_planned_chunk_is_one_by_default(queued: list[str]) -> None:
    whole, cut = (
        planned("all_gather_gemm", 8192, 256, 4096, chunk=chunk).part(GatherSchedule)
        for chunk in (None, 300)
    )
    assert (whole.chunk_rows, whole.push_blocks) == (4096, 0)
    assert cut.chunk_rows == 300


class Told:
    """Stands for what the plan's calls are started by: leaves what each call tells."""

    def __init__(self, left: list[Any]) -> None:
        self._left = left

    def start(self, *told: Any) -> None:
        self._left.append(told[:3])


@pytest.mark.parametrize("op", OPS)
def test_each_call_tells_its_own_number_deadline_and_tensors(
    queued: list[str], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    left: list[Any] = []
    made: Any = gemm.native()
    made.PipelinedGather = made.PipelinedReduce = lambda *given: Told(left)
    monkeypatch.setattr(gemm, "native", lambda: made)
    plan = planned(op, 2048, 256, 256)
    first = last_rank(plan, "pipelined", gathered=False, symmetric=False, offset=0)
    calls = FUSED[op](first, CONTEXT)
    for number in (1, 2, (1 << 32) + 3):
        call = last_rank(plan, "pipelined", gathered=False, symmetric=False, offset=0)
        addresses = tuple(call.tensors[name].data_ptr() for name in ("a", "b", "out"))
        calls.start(replace(call, number=number, timeout_s=number / 8), MAIN)
        *told, tensors = left.pop()
        assert told == [number & 0xFFFFFFFF, number / 8]
        assert (tensors.a, tensors.b, tensors.out, tensors.bias) == (*addresses, 0)
        assert not left


def told_of(
    monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan, **options: Any
) -> tuple[Call, Any, dict[str, Any]]:
    """A call, the tensors that native code is told of it, and what a starter of such calls is told."""
    left: list[Any] = []
    starters: list[dict[str, Any]] = []
    made: Any = gemm.native()

    def starter(*given: Any, **named: Any) -> None:
        starters.append(named)

    made.PipelinedGather = made.PipelinedReduce = lambda *given: Told(left)
    made.gather_starter = made.reduce_starter = starter
    monkeypatch.setattr(gemm, "native", lambda: made)
    call = last_rank(plan, **options)
    calls = FUSED[plan.op](call, CONTEXT)
    calls.start(call, MAIN)
    calls.starter({}, {name: each.stride() for name, each in call.tensors.items()})
    return call, left.pop()[2], starters.pop()


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("op", OPS)
def test_kernels_read_rows_that_lie_apart(
    queued: list[str], monkeypatch: pytest.MonkeyPatch, op: str, layout: str
) -> None:
    plan = planned(op, 2048, 256, 512, b_layout=layout)
    gaps = ("b",) if op == "all_gather_gemm" else ("a", "b")
    width = 256 if layout == "row" else 512
    call, tensors, starter = told_of(monkeypatch, plan, gaps=gaps)
    pitches = (512 + GAP * ("a" in gaps), width + GAP)
    assert (tensors.a_pitch, tensors.b_pitch) == pitches
    assert (starter["a_pitch"], starter["b_pitch"]) == pitches
    assert tensors.a == call.tensors["a"].data_ptr()
    assert tensors.b == call.tensors["b"].data_ptr()
    _, tensors, starter = told_of(monkeypatch, plan)
    assert (tensors.a_pitch, tensors.b_pitch) == (512, width)
    call, tensors, _ = told_of(monkeypatch, plan, gaps=gaps, offset=3)
    assert (tensors.a_pitch, tensors.b_pitch) == (512, width), "an aligned copy has no gaps"
    assert tensors.b != call.tensors["b"].data_ptr()


def test_one_row_has_no_pitch(queued: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("all_gather_gemm", 2, 4096, 512)
    call = last_rank(plan)
    odd = call.tensors["a"].as_strided((1, 512), (3, 1))
    made = gemm.Operands.of(replace(call, tensors={**call.tensors, "a": odd})).tensors()
    assert made.a_pitch == 0


@pytest.mark.parametrize("op", OPS)
def test_the_launch_adds_a_bias(
    queued: list[str], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    plan = planned(op, 2048, 256, 256, around=Around(bias=True))
    assert plan.bias == "launch"
    separate = run(queued, plan, "sequential")
    collective = {"gemm_reduce_scatter": "reduce_scatter", "gemm_all_reduce": "all_reduce"}.get(op)
    if collective is not None:
        assert separate == ["all_gather_gemm", f"{collective} and a bias of 256"]
    call, tensors, _ = told_of(monkeypatch, plan)
    assert tensors.bias == call.tensors["bias"].data_ptr()
    call, tensors, _ = told_of(monkeypatch, plan, offset=1)
    assert tensors.bias not in (0, call.tensors["bias"].data_ptr())


@pytest.mark.parametrize("op", OPS)
def test_calls_of_e4m3_operands_are_started_with_their_scales(
    queued: list[str], monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    around = Around(scales=Scales(mode="row", use_fast_accum=True))
    given: Any = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "b_layout": "column"}
    plan = planned(op, 2048, 256, 512, around=around, **given)
    call, tensors, starter = told_of(monkeypatch, plan)
    scales = tuple(call.tensors[name].data_ptr() for name in ("a_scale", "b_scale"))
    assert (tensors.a_scale, tensors.b_scale) == scales
    assert (starter["a_pitch"], starter["b_pitch"]) == (512, 512)
