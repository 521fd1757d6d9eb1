"""Accelerators that start, await or end launches in another way than they should."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.backends.contracts.instrumented import InstrumentedLaunch, LaunchTimes
from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.runtime.host_kernels import Kernel
from mkernel.backends.transport import _transport
from mkernel.conformance.faults.altering import Followed, Honest, Tensors, outputs_of
from mkernel.conformance.faults.rows import Plant
from mkernel.errors import WorldError
from mkernel.plan.model import BLOCK
from mkernel.topology.model import Accelerator
from mkernel.world.failure import FailureMonitor
from mkernel.world.watchdog import Notice

_DISPATCHES = ("moe_dispatch", "moe_dispatch_gemm")


def _elsewhere(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the same inputs, and other memory for the outputs."""
    return {k: torch.empty_like(t) if k in outputs_of(tensors) else t for k, t in tensors.items()}


def _finish(launch: Launch) -> None:
    while not launch.wait(0.05):
        pass


class _SlotBySlot(Honest):
    """Runs a combine for every slot; ``total`` adds up their results."""

    ops: ClassVar[tuple[str, ...]] = ("moe_combine",)

    def total(self, parts: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def launch(self, call: Call) -> Launch:
        if call.plan.op not in self.ops:
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
                _finish(launch)
            out.copy_(self.total(parts))

        return Followed(launches[-1], after)


class CombinesInBf16(_SlotBySlot):
    """Sums over slots in bfloat16."""

    def total(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(parts[0], dtype=torch.bfloat16)
        for part in parts:
            total += part.bfloat16()
        return total


class CombinesBackwards(_SlotBySlot):
    """Sums over slots from the last one to the first."""

    def total(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(parts[0])
        for part in reversed(parts):
            total += part
        return total


class SumsOf14Bits(Honest):
    """Adds a block of K after the other to sums that keep 14 bits, as matrix units do where nothing
    adds up their results in float32."""

    ops: ClassVar[tuple[str, ...]] = ("moe_dispatch_gemm",)

    def launch(self, call: Call) -> Launch:
        if call.plan.op not in self.ops or call.plan.scales is None:
            return self.inner.launch(call)
        dispatches = call.plan.op in _DISPATCHES
        name = "x" if dispatches else "h"
        given, launches, outs = call.tensors[name], list[Launch](), list[torch.Tensor]()
        for first in range(0, given.shape[1], BLOCK):
            tensors = _elsewhere(call.tensors)
            tensors[name] = torch.zeros_like(given)
            tensors[name][:, first : first + BLOCK] = given[:, first : first + BLOCK]
            launches.append(self.inner.launch(replace(call, tensors=tensors)))
            _finish(launches[-1])
            outs.append(launches[-1].results()["outputs"] if dispatches else tensors["out"])

        def after(results: dict[str, Any]) -> None:
            total = torch.zeros_like(outs[0], dtype=torch.float32)
            for part in outs:
                total += part
                total = (total.view(torch.int32) & -(1 << 10)).view(torch.float32)
            whole = results["outputs"] if dispatches else call.tensors["out"]
            whole.copy_(total)

        return Followed(launches[-1], after)


class SharesStaging(Honest):
    """Stages the inputs of all queued calls in one place. A call starts when it is waited for, as if
    the device were busy until then."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[tuple[str, torch.Size], torch.Tensor] = {}

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


class _Repeats(Honest):
    """Launches some calls twice. All ranks do, so that the world's calls are numbered alike on all."""

    def __init__(self) -> None:
        super().__init__()
        self._launched = 0

    def next(self, call: Call, **changes: Any) -> Launch:
        """Launch a call as the next one that the wrapped backend gets."""
        self._launched += 1
        return self.inner.launch(replace(call, epoch=self._launched, **changes))


class SkipsWaits(_Repeats):
    """Computes with those rows of other ranks that lie there, which are an earlier call's."""

    _later: Launch | None = None

    def launch(self, call: Call) -> Launch:
        if self._later is not None:
            _finish(self._later)
        if call.plan.op in _DISPATCHES:  # it would not know how many rows it has
            return self.next(call)
        early = self.next(call, view="compute_only")
        _finish(early)
        # The data still travels, for a later call to find. The first rank that gets here can have seen
        # none of it: nobody had sent any.
        self._later = self.next(call, tensors=_elsewhere(call.tensors))
        return early

    def close(self, timeout_s: float) -> bool:
        """Wait for the later call too: it uses the world's memory, and the world does not know of
        it."""
        begun = time.monotonic()
        if self._later is not None and not self._later.wait(timeout_s):
            return False
        return self.inner.close(max(0.0, begun + timeout_s - time.monotonic()))


class ReportsEarly(Honest):
    """Says after ``limit_s`` that a call with the input ``has`` has ended. What is not there by then
    never comes."""

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
        for name in outputs_of(self._call.tensors):
            self._call.tensors[name].copy_(self._elsewhere.tensors[name])
        return True

    def times(self) -> LaunchTimes:
        return LaunchTimes({"comm": 0.0, "compute": 0.0})

    def trace(self) -> bytes | None:
        return None


class SendsLate(_Repeats):
    """Rank 0 returns with the right result while others still wait for its rows. It reads those from
    the caller's memory when that has changed, or after some seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._late: threading.Thread | None = None

    def launch(self, call: Call) -> Launch:
        if self._late is not None:
            self._late.join()
        if call.plan.op in _DISPATCHES:  # a rank's rows follow from the ids, which all have
            return self.next(call)
        first = self.next(call)
        _finish(first)
        if call.rank:
            return self.next(call)
        read = next(
            call.tensors[name] for name in ("a", "x", "y", "h", "q") if name in call.tensors
        )
        self._late = threading.Thread(target=self._send, args=(call, read, read.clone()))
        self._late.start()
        return first

    def _send(self, call: Call, read: torch.Tensor, before: torch.Tensor) -> None:
        end = time.monotonic() + 5
        while torch.equal(read, before) and time.monotonic() < end:
            time.sleep(0.001)
        _finish(self.next(call, tensors=_elsewhere(call.tensors)))


class Timeless(Followed):
    """A launch that tells no times."""

    def times(self) -> LaunchTimes:
        return LaunchTimes()


class Deaf(Followed):
    """A launch that goes on for 8 seconds from its start though its world is broken."""

    def __init__(self, inner: Launch, call: Call) -> None:
        super().__init__(inner)
        self._pad, self._end = call.pad, time.monotonic() + 8

    def wait(self, timeout_s: float) -> bool:
        done = super().wait(timeout_s)
        if not _transport.pad_aborted(self._pad) or time.monotonic() > self._end:
            return done
        time.sleep(min(timeout_s, 0.05))
        return False


class BrokenForGood(Honest):
    """Gives zeros once a world has failed, in new worlds too."""

    failed: ClassVar[bool] = False  # of the process: each world has an instance of its own

    def abort(self, code: _transport.AbortCode) -> None:
        type(self).failed = True
        self.inner.abort(code)

    def launch(self, call: Call) -> Launch:
        def after(results: dict[str, Any]) -> None:
            if self.failed:
                for name in outputs_of(call.tensors):
                    call.tensors[name].zero_()

        return Followed(self.inner.launch(call), after)


class LeaksMemory(Honest):
    """Never frees symmetric memory."""

    kept: ClassVar[list[SymmetricMemory]] = []

    def allocate(self, nbytes: int) -> SymmetricMemory:
        memory = self.inner.allocate(nbytes)
        self.kept.append(memory)
        memory.close = lambda: None  # type: ignore[method-assign]
        return memory


class GoesWhenCollected(Honest):
    """Holds a descriptor, and itself, so that both stay until Python's cyclic collector runs."""

    def open(self, device: Accelerator) -> None:
        self.inner.open(device)
        self._file = open(os.devnull)  # noqa: SIM115
        self._itself = self


_wait, _failed = Kernel.wait, FailureMonitor._failed


def one_side(owner: type, **method: Callable[..., Any]) -> Plant:
    """Plant another method of a class of worlds on the ranks of one of unlike nodes, whose processes
    have no other world."""

    def open(self: Honest, device: Accelerator) -> None:
        for name, planted in method.items():
            setattr(owner, name, planted)
        self.inner.open(device)

    return {"open": open}


def wait_swapped(kernel: Kernel, signal: int, *given: int, **named: int) -> None:
    """Take any signal that is not 0 for a large one, as a small number is in the other byte order."""
    if not _transport.pad_load(kernel.call.pad, signal):
        _wait(kernel, signal, *given, **named)


def wait_briefly(kernel: Kernel, *given: int, **named: int) -> None:
    """Wait for 1.5 seconds less than the call may."""
    call = replace(kernel.call, timeout_s=max(0.0, kernel.call.timeout_s - 1.5))
    _wait(Kernel(call, kernel._waiter), *given, **named)


def fail_late(failure: FailureMonitor, notice: Notice) -> WorldError:
    """Raise a failure 12 seconds after it."""
    time.sleep(12)
    return _failed(failure, notice)
