"""One rank's calls: each is agreed on, gets its workspace, is launched and waited for.

A call of a stream-ordered backend is under way when ``run`` returns; what breaks it surfaces at the
next call, in ``synchronize`` or in ``close``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import Instrumented, LaunchTimes, View
from mkernel.backends.contracts.nic import NicSession
from mkernel.errors import Timeout, Unsupported, WorldError
from mkernel.plan.model import LaunchPlan
from mkernel.world.agreement import Agreement
from mkernel.world.engine import DRAIN_S, Engine
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.known import known_calls, learn
from mkernel.world.order import Turns
from mkernel.world.statistics import CallCounters
from mkernel.world.torch_state import allocation

_WAIT_SLICE_S = 0.05


class CallRecord(NamedTuple):
    """The record of a call: outputs whose sizes only the call found out; once it has ended, wall
    seconds by kernel, and the trace where one was asked for."""

    times: LaunchTimes
    trace: bytes | None
    results: Mapping[str, Any]


class Calls:
    """Runs the calls of one engine of a world on one rank, one after another, from any thread.

    Args:
        session: that the engine puts through; None: none.
        agreement, failure: the world's, which its engines share.
        turns: the engine's turns among all engines and worlds of this process.
        learns: whether calls may come to be started without Python.

    Attributes:
        known: starts calls that :meth:`run` was told the signature of, without Python; None: there is
            no such way here.
        counters: of all calls, those too.
    """

    def __init__(
        self,
        engine: Engine,
        session: NicSession | None,
        exchange: Exchange,
        failure: FailureMonitor,
        agreement: Agreement,
        turns: Turns,
        *,
        learns: bool,
    ) -> None:
        self._turns = turns
        self._rank = exchange.rank
        self._accelerator = engine.accelerator
        self._heap = engine.heap
        self._pad = engine.heap.pad
        self._group = engine.group
        self._session = session
        self._fifo = session.fifo if session else 0
        self._exchange = exchange
        self._agreement = agreement
        self._failure = failure
        self._running = failure.running
        self._launched = 0
        # Without order a put may still be repeated after the peer has seen it. On an ordered NIC the
        # peer's release, which came after the data, says that its source may be written again.
        self._ordered = session is None or session.capabilities().ordered
        self._flushes = not (self._ordered or engine.claims.settles_puts)
        # Calls may be left to the device where the host need not wait for its puts.
        self._queues = engine.claims.stream_ordered and not self._flushes
        self.known = (
            known_calls(self, failure, self._running, turns, self._pad)
            if learns and self._queues
            else None
        )
        if self.known is not None:
            self._heap.watched_by(self.known)
            self._agreement.forgets(self.known.forget)
        forget = (lambda: None) if self.known is None else self.known.forget
        self.counters = CallCounters(self._rank, forget)

    def run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        view: View,
        *,
        trace: bool,
        wait: bool,
        signature: bytes | None,
    ) -> CallRecord:
        """Run one call, as :meth:`mkernel.World.run` does."""
        if view != "pipelined" and not isinstance(self._accelerator, Instrumented):
            raise Unsupported(
                f"accelerator {self._accelerator.name!r} runs calls in the view 'pipelined' only, not "
                f"{view!r}: it is not mkernel.backends.contracts.instrumented.Instrumented"
            )
        try:
            return self._run(plan, tensors, options, view, trace, wait, signature)
        except BaseException:
            self.counters.errors += 1
            raise

    def _run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        view: View,
        trace: bool,
        wait: bool,
        signature: bytes | None,
    ) -> CallRecord:
        with self._turns:
            self._failure.raise_if_broken()
            self._failure.raise_recorded()
            running = self._running
            while running and running[0].wait(0.0):
                running.popleft()
            with self._accelerator.on(tensors):
                places = self._heap.places(tensors)
                number = self._agreement.enter(plan, tensors, places)
                memory = self._heap.of_plan(plan)
                arena = memory.arena
                if self._queues:
                    self._turns.follow()
                self._failure.look_if_behind()
                launch = self._accelerator.launch(
                    Call(
                        plan=plan,
                        rank=self._rank,
                        tensors=tensors,
                        epoch=self._launched + 1,
                        number=number,
                        pad=self._pad,
                        workspace=arena.buffer.local.address if arena else 0,
                        areas=arena.offsets if arena else (),
                        peers=memory.peers,
                        region=memory.region,
                        staging=memory.staging.local.address if memory.staging else 0,
                        fifo=self._fifo,
                        ordered=self._ordered,
                        timeout_s=self._failure.timeout_s,
                        view=view,
                        trace=trace,
                        timed=wait or view != "pipelined",
                        options=options,
                        group=self._group,
                        symmetric={
                            name: self._heap.everywhere(place) for name, place in places.items()
                        },
                    )
                )
                self._launched += 1  # not where a launch is refused, on all ranks alike
                if self._queues:
                    self._turns.queued()
            running.append(launch)
            key = self._failure.call[1]
            kind = self.counters.of(key, plan)
            kind.count()
            if signature is not None and self.known is not None:
                learn(
                    self.known,
                    signature,
                    launch,
                    key,
                    self._allocation(plan, tensors),
                    kind.counter,
                )
            if not (wait or trace or view != "pipelined") and self._queues:
                return CallRecord(LaunchTimes(), None, launch.results())
            self._await_all()
            if self._flushes:
                self._flush()
            self._raise_refused()
            times, recorded = instrumented.times(launch), instrumented.trace(launch)
            return CallRecord(times, recorded, launch.results())

    def _allocation(
        self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the function and arguments that make outputs of such calls."""
        out = tensors["out"]
        return self._backends_allocation(plan, tuple(out.shape), out.dtype) or allocation(out)

    def _backends_allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        if not self._heap.has_outputs(plan):
            return None
        return self._accelerator.allocation(plan, shape, dtype)

    def output(
        self, plan: LaunchPlan, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate a plan's ``out``, row-major and without contents, on the device of ``like``. That
        of a plan's first call is torch's: a backend has no memory for it yet, and would keep what it
        takes in its place."""
        found = self._backends_allocation(plan, shape, dtype)
        if found is None:
            return torch.empty(shape, dtype=dtype, device=like.device)
        make, arguments = found
        made: torch.Tensor = make(*arguments)
        return made

    def synchronize(self) -> None:
        """Wait until every call that this rank has made is over, those of replayed graphs too.

        Raises:
            WorldError: what broke one of them, the same kind on every rank. Timeout also where the
                device did not come to a call within twice the deadline.
            CapacityExceeded: a queued dispatch had more rows than that; the world goes on.
        """
        with self._turns:
            self._await_all()
            self._await_replays()
            self._failure.raise_if_broken()
            self._raise_refused()

    def _await_replays(self) -> None:
        """Wait for replays of calls that graphs hold, and raise what broke them. The host does not hear
        of replays, so this waits for all that the device was given, by the deadline of a call."""
        if not self._accelerator.captured():
            return
        over = self._accelerator.await_replays()
        limit_s = self._limit_s
        deadline = time.monotonic() + limit_s
        while not over.wait(_WAIT_SLICE_S):
            self._failure.raise_if_broken()
            self._failure.raise_recorded()
            if time.monotonic() > deadline:
                raise self._late("a replay of a graph that holds calls", limit_s)
        self._failure.raise_recorded()

    def _raise_refused(self) -> None:
        """Raise the error of a queued call that was refused; this rank then goes on."""
        if self._queues:
            error = self._accelerator.refused()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # or it and this frame would hold each other

    def drain(self) -> None:
        """Run :meth:`synchronize`, for calls that no error has ended yet."""
        if self._running:
            self.synchronize()

    def _flush(self) -> None:
        """Wait for the puts that are still under way, and raise what broke them."""
        if self._session is not None and not self._session.flush(self._failure.timeout_s):
            self._failure.raise_unflushed()

    def end(self, error: BaseException | None) -> None:
        """Wait until no rank calls any more; return at once where the world is broken.

        Args:
            error: why this rank stops early, told to the others; None: a normal end.

        Raises:
            WorldError: what broke a call that was only queued, where nothing raised it before.
        """
        if error is not None and self._failure.notice is None:
            self._failure.tell(error)  # without a turn: the others must not wait for one
        with self._turns:
            self._end(error)

    @property
    def _limit_s(self) -> float:
        """Return how long a call may take to end, in seconds. Its own waits end by the deadline;
        before it starts, the user's own work may be queued."""
        return 2 * self._failure.timeout_s + DRAIN_S

    def _late(self, what: str, limit_s: float) -> Timeout:
        error = Timeout(
            f"{what} of rank {self._rank} did not end within {limit_s:g} s; is its device still busy "
            "with other work? (MKERNEL_TIMEOUT_S raises the limit)"
        )
        self._failure.tell(error)
        return error

    def forget(self) -> None:
        """Start no more calls without Python; what does so refers to this world."""
        if self.known is not None:
            self.known.close()

    def let_go(self) -> None:
        """Hold no process group and no session any more. The world has ended."""
        self._group = self._session = None

    def _end(self, error: BaseException | None) -> None:
        self.forget()
        replays = self._accelerator.captured() and not self._failure.raised
        if error is None and (self._running or replays):
            self.synchronize()
        if self._failure.notice is None:
            self._flush()
            self._exchange.barrier()  # no rank unmaps while another still writes

    def _await_all(self) -> None:
        """Wait for the calls under way, and raise what broke them."""
        try:
            while self._running:
                self._await_first()
        except WorldError:
            raise
        except BaseException as error:  # Ctrl-C: stop the kernels before their memory can go
            self._failure.tell(error)
            deadline = time.monotonic() + DRAIN_S
            with contextlib.suppress(Exception):  # the first error is the one to hear of
                while self._running and self._running[0].wait(deadline - time.monotonic()):
                    self._running.popleft()
            self._running.clear()
            raise
        self._failure.raise_recorded()

    def _await_first(self) -> None:
        limit_s = self._limit_s
        deadline = time.monotonic() + limit_s
        first = self._running[0]
        over = first.calls_over()
        began = time.monotonic()
        while not first.wait(_WAIT_SLICE_S):
            if first.calls_over() != over:
                over, deadline = first.calls_over(), time.monotonic() + limit_s
            if time.monotonic() > deadline:
                self._failure.raise_recorded()
                raise self._late("a call", limit_s)
        self._running.popleft()
        self.counters.waits += 1
        self.counters.waited_s += time.monotonic() - began
