"""Planted faults of the accelerator checks: honest backends with one promise broken each.

Every class here is an accelerator backend, named ``mkernel.conformance.faults:Class`` where a
backend's name is asked for. :data:`FAULTS` says which checks must fail on it; a check that no fault
trips does not count. Most wrap ``streams`` (all ops); what needs kernels with chunks and a NIC wraps
``ascend``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch

from mkernel.backends import registry
from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call, Launch
from mkernel.backends.contracts.instrumented import (
    Instrumented,
    InstrumentedLaunch,
    LaunchTimes,
    ModelledRun,
    View,
)
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime import _runtime
from mkernel.errors import Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import AttentionShape, LaunchPlan
from mkernel.plan.shapes import SHAPES
from mkernel.topology.model import Accelerator

Tensors = dict[str, torch.Tensor]


class Fault(AcceleratorBackend, Instrumented):
    """An honest wrapper around a backend; faults override what they break."""

    name: ClassVar[str] = "fault"
    wraps: ClassVar[str] = "streams"

    def __init__(self) -> None:
        self.inner = registry.accelerator(self.wraps)
        self.device = self.inner.device
        self.collectives = self.inner.collectives

    def status(self) -> Status:
        return self.inner.status()

    def probe(self) -> tuple[Accelerator, ...]:
        return self.inner.probe()

    def capabilities(self) -> AcceleratorCapabilities:
        return self.inner.capabilities()

    def group_options(self, timeout: timedelta) -> Any:
        return self.inner.group_options(timeout)

    def open(self, device: Accelerator) -> None:
        self.inner.open(device)

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        return self.inner.on(tensors)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        return self.inner.allocate(nbytes)

    def format(self, memory: SymmetricMemory) -> None:
        self.inner.format(memory)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        return self.inner.attach(descriptor)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        return self.inner.workspace(plan)

    def launch(self, call: Call) -> Launch:
        return self.inner.launch(call)

    def abort(self, code: _runtime.AbortCode) -> None:
        self.inner.abort(code)

    def failure(self) -> tuple[_runtime.AbortCode, _runtime.Diagnosis] | None:
        return self.inner.failure()

    def at_deadline(self) -> str:
        return self.inner.at_deadline()

    def model(self, traces: Sequence[bytes], view: View) -> ModelledRun | None:
        return instrumented.model(self.inner, traces, view)

    def claiming(self, **changes: Any) -> AcceleratorCapabilities:
        """The wrapped backend's claims with some changed."""
        return self.inner.capabilities().model_copy(update=changes)


class Wrapped(Launch, InstrumentedLaunch):
    """A launch that is followed by ``after(results)``, once, when it has ended."""

    def __init__(self, inner: Launch, after: Callable[[dict[str, Any]], None]) -> None:
        self.inner = inner
        self._after: Callable[[dict[str, Any]], None] | None = after
        self._results: dict[str, Any] = {}

    def wait(self, timeout_s: float) -> bool:
        if not self.inner.wait(timeout_s):
            return False
        after, self._after = self._after, None
        if after is not None:
            self._results = dict(self.inner.results())
            after(self._results)
        return True

    def times(self) -> LaunchTimes:
        return instrumented.times(self.inner)

    def results(self) -> Mapping[str, Any]:
        return self._results

    def trace(self) -> bytes | None:
        return instrumented.trace(self.inner)


class Altered(Fault):
    """Changes the inputs of a call, or its outputs when it has ended.

    A class has a variant for each op, honest in every other: ``…faults:ReturnsZeros.ring_attention``.
    """

    only: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.only is None:
            for op in SHAPES:
                setattr(cls, op, type(cls.__name__, (cls,), {"only": op, "__doc__": cls.__doc__}))

    def launch(self, call: Call) -> Launch:
        if self.only is not None and call.plan.op != self.only:
            return self.inner.launch(call)
        kept = self.before(call)
        inner = self.inner.launch(self.call(call))

        def after(results: dict[str, Any]) -> None:
            if not _runtime.pad_aborted(call.pad):
                outputs = {k: call.tensors[k] for k in _OUTPUTS if k in call.tensors}
                self.alter(call, outputs, results, kept)

        return Wrapped(inner, after)

    def call(self, call: Call) -> Call:
        """The call as the wrapped backend gets it."""
        tensors = dict(call.tensors)
        self.inputs(call, tensors)
        return replace(call, tensors=tensors)

    def inputs(self, call: Call, tensors: Tensors) -> None:
        """Replace tensors."""

    def before(self, call: Call) -> Any:
        """What ``alter`` needs to know of the state before the call."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        """Change outputs in place (or ``results``, of MoE)."""


_OUTPUTS = ("out", "lse", "gathered")


def _all(outputs: Tensors, results: dict[str, Any]) -> list[torch.Tensor]:
    return [*outputs.values(), *([results["outputs"]] if "outputs" in results else [])]


def _nudge(tensor: torch.Tensor) -> None:
    """Change the last bit of the first element."""
    if tensor.numel():
        first = tensor.reshape(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))


# ---- claims --------------------------------------------------------------------------------------


class ClaimsUnknownOp(Fault):
    """Claims an op that mkernel does not have."""

    def capabilities(self) -> AcceleratorCapabilities:
        return self.claiming(ops=("all_to_all_gemm", *self.inner.capabilities().ops))


class HalfOfMoe(Fault):
    """Claims the dispatch without the combine."""

    def capabilities(self) -> AcceleratorCapabilities:
        return self.claiming(ops=("moe_dispatch_gemm",))


class ChangesItsMind(Fault):
    """Claims something else each time."""

    cores = 0

    def capabilities(self) -> AcceleratorCapabilities:
        self.cores += 1
        return self.claiming(compute_cores=self.cores)


class NoDevice(Fault):
    """Says that it is usable, and finds no device."""

    def probe(self) -> tuple[Accelerator, ...]:
        return ()


class ClaimsTooMuch(Fault):
    """Claims an op that it does not run."""

    def workspace(self, plan: LaunchPlan) -> Workspace:
        if plan.op == "ring_attention":
            raise Unsupported(f"accelerator {self.name!r} does not run {plan.op}")
        return self.inner.workspace(plan)


# ---- values --------------------------------------------------------------------------------------


class ReturnsZeros(Altered):
    """Every result is zero."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for tensor in _all(outputs, results):
            tensor.zero_()


class DropsLastRow(Altered):
    """The last row of an odd number of rows is zero: a partial tile is forgotten."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for tensor in _all(outputs, results):
            if tensor.dim() == 2 and len(tensor) % 2 and len(tensor) > 1:
                tensor[-1].zero_()


class DropsLastChunk(Altered):
    """The last 64 rows of large results are those that were there before."""

    def before(self, call: Call) -> Any:
        return {name: call.tensors[name].clone() for name in _OUTPUTS if name in call.tensors}

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for name, tensor in outputs.items():
            if len(tensor) > 128:
                tensor[-64:] = kept[name][-64:]


class OneWrongElement(Altered):
    """One element of every result is zero, far too few for a relative error of the whole."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for tensor in _all(outputs, results):
            if tensor.numel():
                tensor.view(-1)[tensor.numel() // 2] = 0


class FewChunksOnly(Altered):
    """Half of each rank's rows is zero where there are more than 8 chunks."""

    wraps = "ascend"

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        chunking = call.plan.chunking
        if chunking is not None and chunking.chunks_per_rank > 8:
            for rows in outputs["out"].chunk(call.plan.world_size):
                rows[len(rows) // 2 :] = 0


class IgnoresLayout(Altered):
    """Reads column-major weights as if they were row-major."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        b = tensors.get("b")
        if b is not None and call.plan.b_layout == "column":
            misread = b.t().contiguous().view(b.shape)
            tensors["b"] = misread.t().contiguous().t()


class NarrowOutputs(Altered):
    """Rounds results to bfloat16 whatever was asked for."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for tensor in _all(outputs, results):
            tensor.copy_(tensor.bfloat16().to(tensor.dtype))


class SwapsNodes(Altered):
    """Rows of the first and the last node change places where there are several nodes."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.plan.op == "all_gather_gemm" and call.plan.nodes > 1:
            rows = len(outputs["out"]) // call.plan.nodes
            first, last = outputs["out"][:rows].clone(), outputs["out"][-rows:].clone()
            outputs["out"][:rows], outputs["out"][-rows:] = last, first


class SumsInBf16(Altered):
    """A rank's own partial sums are rounded to bfloat16 on their way."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "a" not in call.tensors:
            return
        a, b, out = call.tensors["a"].float(), call.tensors["b"].float(), outputs["out"]
        half = a.shape[1] // 2
        partials = (a[:, :half] @ b[:half], a[:, half:] @ b[half:])
        error = sum((p.bfloat16().float() - p for p in partials), torch.zeros(()))
        rows, first = len(out), 0
        if call.plan.op == "all_gather_gemm":
            rows, first = len(a), call.rank * len(a)
        elif call.plan.op == "gemm_reduce_scatter":
            error = error[call.rank * rows : (call.rank + 1) * rows]
        out[first : first + rows] += error.to(out.dtype)


class SumsInBf16WithinRanks(SumsInBf16):
    """What ranks add may be rounded once, but a rank's own partial sums are rounded too."""

    def capabilities(self) -> AcceleratorCapabilities:
        return self.inner.capabilities().model_copy(update={"rounded_partials": True})


class RoundsPartials(Altered):
    """Breaks nothing: what a rank adds to a sum over ranks is rounded to the output's dtype, as is
    claimed."""

    def capabilities(self) -> AcceleratorCapabilities:
        return self.inner.capabilities().model_copy(update={"rounded_partials": True})

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.plan.op not in ("gemm_reduce_scatter", "gemm_all_reduce"):
            return
        out = outputs["out"]
        partial = call.tensors["a"].float() @ call.tensors["b"].float()
        error = partial.to(out.dtype).float() - partial
        if call.plan.op == "gemm_reduce_scatter":
            error = error[call.rank * len(out) :][: len(out)]
        out += error.to(out.dtype)


class CombinesInBf16(Fault):
    """The combine's sum over slots is kept in bfloat16."""

    def launch(self, call: Call) -> Launch:
        if call.plan.op != "moe_combine":
            return self.inner.launch(call)
        weights, out = call.tensors["topk_weights"], call.tensors["out"]
        launches, parts = [], []
        for slot in range(weights.shape[1]):
            alone = torch.zeros_like(weights)
            alone[:, slot] = weights[:, slot]
            parts.append(torch.empty_like(out, dtype=out.dtype))
            tensors = {**call.tensors, "topk_weights": alone, "out": parts[-1]}
            launches.append(self.inner.launch(replace(call, tensors=tensors)))

        def after(results: dict[str, Any]) -> None:
            for launch in launches[:-1]:
                while not launch.wait(0.05):
                    pass
            total = torch.zeros_like(out, dtype=torch.bfloat16)
            for part in parts:
                total += part.bfloat16()
            out.copy_(total.to(out.dtype))

        return Wrapped(launches[-1], after)


class CleansNan(Altered):
    """NaN in the inputs counts as 0."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        if "a" in tensors:
            tensors["a"] = torch.nan_to_num(tensors["a"], nan=0.0, posinf=6e4)


# ---- repetition ----------------------------------------------------------------------------------


class _Remembers(Altered):
    """Keeps copies of the latest results of each plan."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[tuple[str, int], torch.Tensor] = {}

    def exchange(self, call: Call, which: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The previous result of the plan; ``tensor`` is remembered in its place."""
        key = (call.plan.digest(), which)
        older = self.latest.get(key)
        self.latest[key] = tensor.clone()
        return older


class ReturnsPrevious(_Remembers):
    """From a plan's second call on, returns the previous call's result."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for which, tensor in enumerate(_all(outputs, results)):
            older = self.exchange(call, which, tensor)
            if older is not None and older.shape == tensor.shape:
                tensor.copy_(older)


class KeepsSomeRows(_Remembers):
    """One row of each result is the previous call's."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for which, tensor in enumerate(_all(outputs, results)):
            older = self.exchange(call, which, tensor)
            if older is not None and len(tensor) and len(older):
                tensor[-1] = older[-1]


class WrongEveryFifth(_Remembers):
    """Every fifth call of a plan returns the previous call's result."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for which, tensor in enumerate(_all(outputs, results)):
            older = self.exchange(call, which, tensor)
            if older is not None and older.shape == tensor.shape and call.epoch % 5 == 0:
                tensor.copy_(older)


class SharesStaging(Fault):
    """Stages the inputs of all queued calls in one place. A call starts when it is waited for, as if
    the device were busy until then."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def capabilities(self) -> AcceleratorCapabilities:
        return self.claiming(stream_ordered=True, ops=("all_gather_gemm", "gemm_all_reduce"))

    def launch(self, call: Call) -> Launch:
        tensors = dict(call.tensors)
        for name in ("a", "b"):
            given = tensors[name]
            staged = self._staged.setdefault((name, given.shape), torch.empty_like(given))
            tensors[name] = staged.copy_(given)
        return _Queued(lambda: self.inner.launch(replace(call, tensors=tensors)))


class _Queued(Launch, InstrumentedLaunch):
    """A launch that starts when it is waited for."""

    def __init__(self, start: Callable[[], Launch]) -> None:
        self._start = start
        self._inner: Launch | None = None

    def wait(self, timeout_s: float) -> bool:
        if self._inner is None and timeout_s > 0:
            self._inner = self._start()
        return self._inner is not None and self._inner.wait(timeout_s)

    def times(self) -> LaunchTimes:
        return instrumented.times(self._inner)

    def results(self) -> Mapping[str, Any]:
        return {} if self._inner is None else self._inner.results()

    def trace(self) -> bytes | None:
        return instrumented.trace(self._inner)


class CachesWeights(Altered):
    """Keeps the weights of a plan's first call."""

    def __init__(self) -> None:
        super().__init__()
        self._cached: dict[str, torch.Tensor] = {}

    def inputs(self, call: Call, tensors: Tensors) -> None:
        for name in {"b", "w"} & tensors.keys():
            kept = self._cached.setdefault(call.plan.digest(), tensors[name].clone())
            tensors[name] = kept


class OnePlanOnly(_Remembers):
    """Plans of one op share what a workspace holds: a change of plan returns zeros."""

    last = ""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        changed, self.last = self.last not in ("", call.plan.digest()), call.plan.digest()
        if changed:
            for tensor in _all(outputs, results):
                tensor.zero_()


class LeavesRowUnwritten(Altered):
    """The last row of each output is what was there before."""

    def before(self, call: Call) -> Any:
        return {n: call.tensors[n][-1].clone() for n in _OUTPUTS if n in call.tensors}

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for name, tensor in outputs.items():
            tensor[-1] = kept[name]


class LeavesElement(Altered):
    """One element of the main output is what was there before: the one which that changes least, so
    that in a large output only what was put there on purpose tells it from a right one."""

    def before(self, call: Call) -> Any:
        return call.tensors["out"].clone() if "out" in call.tensors else None

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if kept is not None:
            _leave_nearest(outputs["out"], kept)
        if "outputs" in results:
            _leave_nearest(results["outputs"], torch.empty_like(results["outputs"]))


def _leave_nearest(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.numel():
        gaps = (tensor.double() - before.double()).abs().nan_to_num(nan=float("inf"))
        at = int(gaps.argmin())
        tensor.view(-1)[at] = before.reshape(-1)[at]


class WritesOverNanOnly(Altered):
    """Takes any number in the output for a result that is there already."""

    def before(self, call: Call) -> Any:
        return {n: call.tensors[n].clone() for n in _OUTPUTS if n in call.tensors}

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for name, tensor in outputs.items():
            tensor.copy_(torch.where(torch.isnan(kept[name]), tensor, kept[name]))


class AddsToOutput(Altered):
    """Adds to what is in the output instead of overwriting it, as if it had been zeroed."""

    def before(self, call: Call) -> Any:
        return {n: call.tensors[n].clone() for n in _OUTPUTS if n in call.tensors}

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for name, tensor in outputs.items():
            tensor.add_(kept[name])


class ReusesOutputs(Altered):
    """Grouped outputs of every dispatch lie in one buffer."""

    buffer: torch.Tensor | None = None

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        mine = results.get("outputs")
        if mine is None:
            return
        if self.buffer is None or self.buffer.dtype != mine.dtype:
            self.buffer = torch.zeros(1 << 20, dtype=mine.dtype)
        view = self.buffer[: mine.numel()].view(mine.shape)
        view.copy_(mine)
        results["outputs"] = view


# ---- bits ----------------------------------------------------------------------------------------


class NoisyLastBit(Altered):
    """The last bit of one element differs in every third call of a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        self.calls[call.plan.digest()] += 1
        if self.calls[call.plan.digest()] % 3 == 0:
            for tensor in _all(outputs, results):
                _nudge(tensor)


class DependsOnChunk(Altered):
    """Odd chunks give another last bit."""

    wraps = "ascend"

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        chunking = call.plan.chunking
        if chunking is not None and chunking.tiles_per_chunk % 2:
            _nudge(outputs["out"])


class DependsOnSplit(Altered):
    """A world of several nodes gives another last bit."""

    wraps = "ascend"

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.plan.nodes > 1:
            _nudge(outputs["out"])


class RanksDiffer(Altered):
    """One rank's copy of a result has another last bit."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.rank == 1:
            _nudge(outputs["out"])


# ---- order and memory ----------------------------------------------------------------------------


class SwapsRanks(Altered):
    """Rows of ranks 0 and 1 change places."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        world, out = call.plan.world_size, outputs.get("out")
        if out is not None and "a" in call.tensors and world > 1 and len(out) >= world:
            rows = len(out) // world
            out[: 2 * rows] = torch.cat([out[rows : 2 * rows], out[:rows]])


class ReversesRows(Altered):
    """A rank's scattered rows come out backwards."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.plan.op == "gemm_reduce_scatter":
            outputs["out"].copy_(outputs["out"].flip(0))


class GathersByArrival(Altered):
    """The gathered A is in the order of consumption instead of rank."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        whole = outputs.get("gathered")
        if whole is not None:
            parts = whole.clone().chunk(call.plan.world_size)
            whole.copy_(torch.cat([parts[rank] for rank in call.plan.order[call.rank]]))


class WritesInputs(Altered):
    """Uses the caller's input as scratch memory."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for name in {"a", "x", "k"} & call.tensors.keys():
            call.tensors[name].view(-1)[-1] = 0


class IgnoresOffset(Altered):
    """Reads an input from the start of its storage."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        for name in {"a", "x", "q"} & tensors.keys():
            tensor = tensors[name]
            tensors[name] = tensor.as_strided(tensor.shape, tensor.stride(), 0)


class WritesPastTheEnd(Altered):
    """Writes one element behind the output."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        for tensor in outputs.values():
            end = tensor.storage_offset() + tensor.numel()
            if end < tensor.untyped_storage().nbytes() // tensor.element_size():
                tensor.as_strided((1,), (1,), end).fill_(1)


# ---- mixture of experts --------------------------------------------------------------------------


class OffByOneExpert(Altered):
    """Every token goes to the next expert."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        if "topk_ids" in tensors:
            tensors["topk_ids"] = (tensors["topk_ids"] + 1) % call.plan.shape.model_dump()[
                "experts"
            ]


class Capacity(Altered):
    """An expert takes no more than 20 rows; the rest is zero."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "counts" in results:
            for rows in torch.split(results["outputs"], results["counts"].tolist()):
                rows[20:] = 0


class UniqueExperts(Altered):
    """An expert twice in one token's list counts as the next expert of its rank."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        ids = tensors.get("topk_ids")
        if ids is not None and ids.shape[1] > 1:
            ids = ids.clone()
            again = ids[:, 1] == ids[:, 0]
            each = call.plan.shape.model_dump()["experts"] // call.plan.world_size
            twice = ids[again, 1]
            ids[again, 1] = twice - twice % each + (twice + 1) % each
            tensors["topk_ids"] = ids


class RowsByArrival(Altered):
    """Rows of an expert come in another order."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "counts" in results:
            parts = torch.split(results["outputs"], results["counts"].tolist())
            results["outputs"] = torch.cat([part.flip(0) for part in parts])


class IgnoresWeights(Altered):
    """The combine adds rows without weights."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        if "topk_weights" in tensors:
            tensors["topk_weights"] = torch.ones_like(tensors["topk_weights"])


class FirstWeightForAll(Altered):
    """The combine uses the first slot's weight for every slot."""

    def inputs(self, call: Call, tensors: Tensors) -> None:
        weights = tensors.get("topk_weights")
        if weights is not None:
            tensors["topk_weights"] = weights[:, :1].expand_as(weights).contiguous()


class LatestHandleOnly(Altered):
    """The combine uses the routing of the latest dispatch, whatever handle it gets. Rows beyond that
    are left out, and missing ones are zero."""

    state: Any = None
    rows = 0

    def call(self, call: Call) -> Call:
        if call.plan.op != "moe_combine" or self.state is None:
            return call
        given = call.tensors["y"]
        y = given.new_zeros(self.rows, given.shape[1])
        y[: len(given)] = given[: self.rows]
        options = {**call.options, "state": self.state}
        return replace(call, tensors={**call.tensors, "y": y}, options=options)

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "state" in results:
            self.state, self.rows = results["state"], len(results["outputs"])


# ---- attention -----------------------------------------------------------------------------------


class IgnoresCausal(Altered):
    """Every position sees every other."""

    def call(self, call: Call) -> Call:
        shape = call.plan.shape
        if not isinstance(shape, AttentionShape) or not shape.causal:
            return call
        open_ = shape.model_copy(update={"causal": False})
        return replace(call, plan=call.plan.model_copy(update={"shape": open_}))


class HeadsInterleaved(Altered):
    """Query head h uses key head h % Hkv."""

    def _slots(self, call: Call) -> list[int]:
        shape = call.plan.shape.model_dump()
        kv, each = shape["kv_heads"], shape["heads"] // shape["kv_heads"]
        return [h % kv * each + h // kv for h in range(shape["heads"])]

    def inputs(self, call: Call, tensors: Tensors) -> None:
        if "q" in tensors:
            q = torch.empty_like(tensors["q"])
            q[:, self._slots(call)] = tensors["q"]
            tensors["q"] = q

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "q" in call.tensors:
            for tensor in outputs.values():
                tensor.copy_(tensor[:, self._slots(call)].clone())


class LogBaseTwo(Altered):
    """The log-sum-exp is to base 2."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if "lse" in outputs:
            outputs["lse"] /= 0.6931471805599453


class IgnoresScale(Altered):
    """Scores are scaled with D^-0.5, whatever was asked for."""

    def call(self, call: Call) -> Call:
        if "q" not in call.tensors:
            return call
        width = call.tensors["q"].shape[-1]
        return replace(call, options={**call.options, "scale": width**-0.5})


# ---- waiting -------------------------------------------------------------------------------------


def _elsewhere(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same inputs, and other memory for the outputs."""
    return {k: torch.empty_like(t) if k in _OUTPUTS else t for k, t in tensors.items()}


class SkipsWaits(Fault):
    """Computes on the rows of other ranks that lie there: those of the call before."""

    wraps = "ascend"

    def launch(self, call: Call) -> Launch:
        if call.plan.op == "moe_dispatch_gemm":  # it would not know how many rows it has
            return self.inner.launch(call)
        first = replace(call, epoch=2 * call.epoch - 1, view="compute_only")
        early = self.inner.launch(first)
        while not early.wait(0.05):
            pass
        # The data still travels, for the next call to find. The first rank that gets here can have
        # seen none of it: nobody had sent any.
        again = replace(call, epoch=2 * call.epoch, tensors=_elsewhere(call.tensors))
        self._later = self.inner.launch(again)
        return early


class ReportsEarly(Fault):
    """Says at once that a call of a GEMM op has ended. What is not there by then never comes."""

    limit_s: ClassVar[float] = 0.0
    has: ClassVar[str] = "a"

    def launch(self, call: Call) -> Launch:
        if self.has not in call.tensors:
            return self.inner.launch(call)
        elsewhere = replace(call, tensors=_elsewhere(call.tensors))
        return _GivesUp(self.inner.launch(elsewhere), call, elsewhere, self.limit_s)


class _GivesUp(Launch, InstrumentedLaunch):
    """Ends when ``inner`` has, with its results, or after some seconds without them."""

    def __init__(self, inner: Launch, call: Call, elsewhere: Call, after_s: float) -> None:
        self._inner, self._call, self._elsewhere = inner, call, elsewhere
        self._end = time.monotonic() + after_s if after_s else 0.0

    def wait(self, timeout_s: float) -> bool:
        left = self._end - time.monotonic()
        if left <= 0:
            return True
        if not self._inner.wait(min(left, timeout_s)):
            return False
        for name in self._call.tensors.keys() & {*_OUTPUTS}:
            self._call.tensors[name].copy_(self._elsewhere.tensors[name])
        return True

    def times(self) -> LaunchTimes:
        return LaunchTimes({"comm": 0.0, "compute": 0.0})

    def results(self) -> Mapping[str, Any]:
        return {}


class AttentionReportsEarly(ReportsEarly):
    """Says at once that ring attention has ended."""

    has = "q"


class CombineReportsEarly(ReportsEarly):
    """Says at once that a combine has ended."""

    has = "y"


class SendsLate(Fault):
    """Rank 0 returns with the right result while others still wait for its rows, which it reads from
    the caller's memory when that has changed, or after some seconds."""

    wraps = "ascend"

    def __init__(self) -> None:
        super().__init__()
        self._late: threading.Thread | None = None

    def launch(self, call: Call) -> Launch:
        if call.plan.op == "moe_dispatch_gemm":  # a rank's rows follow from the ids, which all have
            return self.inner.launch(call)
        if self._late is not None:
            self._late.join()
        first = self.inner.launch(replace(call, epoch=2 * call.epoch - 1))
        while not first.wait(0.05):
            pass
        again = replace(call, epoch=2 * call.epoch)
        if call.rank:
            return self.inner.launch(again)
        again = replace(again, tensors=_elsewhere(call.tensors))
        read = next(call.tensors[name] for name in ("a", "x", "y", "q") if name in call.tensors)
        self._late = threading.Thread(target=self._send, args=(again, read, read.clone()))
        self._late.start()
        return first

    def _send(self, call: Call, read: torch.Tensor, before: torch.Tensor) -> None:
        end = time.monotonic() + 5
        while torch.equal(read, before) and time.monotonic() < end:
            time.sleep(0.001)
        late = self.inner.launch(call)
        while not late.wait(0.05):
            pass


class GivesUpWaiting(ReportsEarly):
    """Waits for other ranks, but no longer than 20 ms. What is not there by then never comes."""

    limit_s = 0.02


class SequentialIsWrong(Altered):
    """The sequential view computes before the data is there."""

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.view == "sequential":
            for tensor in _all(outputs, results):
                tensor.zero_()


class TellsNoTimes(Fault):
    """Launches tell no times."""

    def launch(self, call: Call) -> Launch:
        class Timeless(Wrapped):
            def times(self) -> LaunchTimes:
                return LaunchTimes()

        return Timeless(self.inner.launch(call), lambda results: None)


# ---- refusals ------------------------------------------------------------------------------------


class AcceptsAnything(Fault):
    """In rank processes it claims every alignment."""

    wraps = "ascend"

    def capabilities(self) -> AcceleratorCapabilities:
        if "RANK" not in os.environ:
            return self.inner.capabilities()
        return self.claiming(alignment_bytes=1)


# ---- lives ---------------------------------------------------------------------------------------


class OneWorldOnly(Altered):
    """From a process's second world on, results are zero."""

    worlds = 0

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        self.worlds += call.number == 1
        if self.worlds > 1:
            for tensor in _all(outputs, results):
                tensor.zero_()


class BrokenForGood(Fault):
    """Once a world has failed all results are zero, in new worlds too."""

    failed = False

    def abort(self, code: _runtime.AbortCode) -> None:
        self.failed = True
        self.inner.abort(code)

    def launch(self, call: Call) -> Launch:
        def after(results: dict[str, Any]) -> None:
            if self.failed:
                for name in call.tensors.keys() & {*_OUTPUTS}:
                    call.tensors[name].zero_()

        return Wrapped(self.inner.launch(call), after)


class LeaksMemory(Fault):
    """Never frees symmetric memory."""

    kept: ClassVar[list[SymmetricMemory]] = []

    def allocate(self, nbytes: int) -> SymmetricMemory:
        memory = self.inner.allocate(nbytes)
        self.kept.append(memory)
        memory.close = lambda: None  # type: ignore[method-assign]
        return memory


class LeaksThreads(Fault):
    """Starts a thread for every world, and leaves it."""

    def launch(self, call: Call) -> Launch:
        if call.number == 1:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return self.inner.launch(call)


# ---- failures ------------------------------------------------------------------------------------


class IgnoresAbort(Fault):
    """A call of a broken world goes on for 8 seconds."""

    def launch(self, call: Call) -> Launch:
        start = time.monotonic()

        class Deaf(Wrapped):
            def wait(self, timeout_s: float) -> bool:
                done = super().wait(timeout_s)
                code, _ = _runtime.pad_outcome(call.pad)
                if code == _runtime.AbortCode.none or time.monotonic() > start + 8:
                    return done
                time.sleep(min(timeout_s, 0.05))
                return False

        return Deaf(self.inner.launch(call), lambda results: None)


class IgnoresDeadline(Fault):
    """Waits ten times as long as it may."""

    wraps = "ascend"

    def launch(self, call: Call) -> Launch:
        return self.inner.launch(replace(call, timeout_s=10 * call.timeout_s))


_BROKEN: dict[type[Fault], tuple[str, ...]] = {
    ClaimsUnknownOp: ("capabilities",),
    HalfOfMoe: ("capabilities",),
    ChangesItsMind: ("capabilities",),
    NoDevice: ("capabilities",),
    ClaimsTooMuch: ("shapes",),
    ReturnsZeros: ("shapes",),
    DropsLastRow: ("shapes",),
    DropsLastChunk: ("shapes",),
    OneWrongElement: ("shapes",),
    IgnoresLayout: ("dtypes",),
    NarrowOutputs: ("dtypes",),
    SwapsNodes: ("worlds",),
    FewChunksOnly: ("many-chunks",),
    SumsInBf16: ("accumulation",),
    SumsInBf16WithinRanks: ("accumulation",),
    CombinesInBf16: ("accumulation",),
    CleansNan: ("nonfinite",),
    WrongEveryFifth: ("repeated-calls",),
    OnePlanOnly: ("repeated-calls",),
    ReturnsPrevious: ("stale-data",),
    KeepsSomeRows: ("stale-data",),
    CachesWeights: ("stale-data",),
    SharesStaging: ("queued-calls",),
    LeavesRowUnwritten: ("poison",),
    LeavesElement: ("poison",),
    WritesOverNanOnly: ("poison",),
    AddsToOutput: ("poison",),
    ReusesOutputs: ("kept-results",),
    NoisyLastBit: ("determinism",),
    DependsOnChunk: ("chunk-invariance",),
    DependsOnSplit: ("split-invariance",),
    RanksDiffer: ("replicas",),
    SwapsRanks: ("rank-order",),
    ReversesRows: ("rank-order",),
    GathersByArrival: ("gathered",),
    WritesInputs: ("user-tensors",),
    IgnoresOffset: ("user-tensors",),
    WritesPastTheEnd: ("bounds",),
    Capacity: ("routing",),
    UniqueExperts: ("routing",),
    OffByOneExpert: ("expert-order",),
    RowsByArrival: ("expert-order",),
    IgnoresWeights: ("combine-weights",),
    FirstWeightForAll: ("combine-weights",),
    LatestHandleOnly: ("handles",),
    IgnoresCausal: ("causal",),
    HeadsInterleaved: ("gqa",),
    LogBaseTwo: ("lse",),
    IgnoresScale: ("lse",),
    SkipsWaits: ("waits", "stale-data"),
    ReportsEarly: ("waits", "mismatched-call"),
    AttentionReportsEarly: ("waits",),
    CombineReportsEarly: ("waits",),
    SendsLate: ("input-reuse",),
    GivesUpWaiting: ("paused-ranks", "waits"),
    SequentialIsWrong: ("views",),
    TellsNoTimes: ("views",),
    AcceptsAnything: ("wrong-calls",),
    OneWorldOnly: ("two-worlds",),
    BrokenForGood: ("after-failure",),
    LeaksMemory: ("leaks",),
    LeaksThreads: ("leaks",),
    IgnoresAbort: ("killed-rank",),
    IgnoresDeadline: ("absent-rank",),
}

FAULTS: dict[str, tuple[str, ...]] = {
    f"{fault.__module__}:{fault.__name__}": checks for fault, checks in _BROKEN.items()
}
"""Backend's name → checks that must fail on it."""
