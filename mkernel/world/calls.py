"""One rank's calls: each is agreed on, gets its workspace, is launched and waited for.

A call of a stream-ordered backend is under way when ``run`` returns; what breaks it surfaces at the
next call, in ``synchronize`` or in ``close``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.backends.contracts.instrumented import Instrumented, LaunchTimes, View
from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.contracts.output_memory import is_torchs
from mkernel.backends.runtime._calls import CallPath
from mkernel.errors import NotInitialized, Timeout, Unsupported, WorldError
from mkernel.plan.model import LaunchPlan
from mkernel.world.agreement import Agreement
from mkernel.world.engine import DRAIN_S, Engine
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.order import Queued, Turns
from mkernel.world.statistics import CallCounters, CallKind
from mkernel.world.torch_state import allocation, native_functions

_WAIT_SLICE_S = 0.05


class Program(NamedTuple):
    """The steps of a call around its launch (:class:`mkernel.ops.steps.Steps`), by numbers of slots:
    first the caller's tensors, lists unfolded, then what steps made.

    Attributes:
        before, after: (function, arguments, slots of these or -1, names of the last ones, result).
        launched, found: slots of the launch's tensors, and of what it returns, by name.
        written: slots of the caller's tensors that the call writes to.
        result: a slot, or a tuple or list of such.
        output: the number of the step that allocates ``out``, its shape and dtype; None: the caller
            gave it.
    """

    slots: int
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    launched: Mapping[str, int]
    found: Mapping[str, int]
    written: tuple[int, ...]
    result: Any
    output: tuple[int, tuple[int, ...], torch.dtype] | None


class CallRecord(NamedTuple):
    """The record of a call: outputs whose sizes only the call found out; once it has ended, wall
    seconds by kernel, and the trace where one was asked for. ``learn(signature, program)`` lets native
    code make such calls from now on; None: of a call that was made for its times or its trace."""

    times: LaunchTimes
    trace: bytes | None
    results: Mapping[str, Any]
    learn: Callable[[object, Program], None] | None = None


class Calls:
    """Runs the calls of one engine of a world on one rank, one after another, from any thread.

    Args:
        session: that the engine puts through; None: none.
        agreement, failure: the world's, which its engines share.
        turns: the engine's turns among all engines and worlds of this process.
        table: the path that knows the world's calls; None: this engine's own.

    Attributes:
        path: the native path that every call takes.
        counters: of all calls, those too that Python does not see.
    """

    def __init__(
        self,
        engine: Engine,
        session: NicSession | None,
        exchange: Exchange,
        failure: FailureMonitor,
        agreement: Agreement,
        turns: Turns,
        table: CallPath | None = None,
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
        order = turns.order
        self.path = CallPath(
            functions=native_functions(turns.device),
            failure=failure,
            calls=self,
            running=self._running,
            turns=turns,
            lock=order.lock,
            under_way=order.under_way,
            worlds=order.turns,
            last=order.last,
            queued=Queued,
            name=turns.world,
            pad=self._pad,
            record=engine.accelerator.record(),
            queues=self._queues,
        )
        self._table = table or self.path
        self._heap.watched_by(self._table)
        if table is None:
            self._agreement.forgets(self.path.forget)
        self.counters = CallCounters(self._rank, self._table.forget)

    def run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        view: View,
        *,
        trace: bool,
        wait: bool,
    ) -> CallRecord:
        """Run one call, as :meth:`mkernel.World.run` does."""
        if view != "pipelined" and not isinstance(self._accelerator, Instrumented):
            raise Unsupported(
                f"accelerator {self._accelerator.name!r} runs calls in the view 'pipelined' only, not "
                f"{view!r}: it is not mkernel.backends.contracts.instrumented.Instrumented"
            )
        try:
            return self._run(plan, tensors, options, view, trace, wait)
        except BaseException:
            self.count_error()
            raise

    def _run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        view: View,
        trace: bool,
        wait: bool,
    ) -> CallRecord:
        waits = wait or trace or view != "pipelined" or not self._queues
        found: dict[str, Any] = {}

        def prepare() -> tuple[str, Callable[..., Launch], bool]:
            # Ranks may prefetch different tensors.
            alike = {name: each for name, each in tensors.items() if name != "prefetch"}
            places = self._heap.places(alike)
            self._agreement.enter(plan, tensors, places)
            memory = self._heap.of_plan(plan)
            arena = memory.arena
            key = found["key"] = self._failure.call[1]
            found["kind"] = self.counters.of(key, plan)

            def start(number: int, epoch: int, timeout_s: float, _: object) -> Launch:
                call = found["call"] = Call(
                    plan=plan,
                    rank=self._rank,
                    tensors=tensors,
                    epoch=epoch,
                    number=number,
                    pad=self._pad,
                    workspace=arena.buffer.local.address if arena else 0,
                    areas=arena.offsets if arena else (),
                    peers=memory.peers,
                    region=memory.region,
                    staging=memory.staging.local.address if memory.staging else 0,
                    fifo=self._fifo,
                    ordered=self._ordered,
                    timeout_s=timeout_s,
                    view=view,
                    trace=trace,
                    timed=wait or view != "pipelined",
                    options=options,
                    group=self._group,
                    symmetric={
                        name: self._heap.everywhere(place) for name, place in places.items()
                    },
                )
                launch = self._accelerator.launch(call)
                found["kind"].count()
                return launch

            return key, start, waits

        with self._accelerator.on(tensors):
            launch = self.path.first(prepare)
        if launch is None:
            raise NotInitialized(f"world {self._turns.world!r} has ended")
        learn = None
        if not (wait or trace or view != "pipelined"):
            learn = self._learner(launch, found["call"], found["key"], found["kind"])
        if not waits:
            return CallRecord(LaunchTimes(), None, launch.results(), learn)
        times, recorded = instrumented.times(launch), instrumented.trace(launch)
        return CallRecord(times, recorded, launch.results(), learn)

    def _starter(self, call: Call) -> Callable[..., Launch]:
        """Return what launches calls like this one, of other tensors. In the world's turn."""
        template = replace(call, tensors={}, timed=False)

        def start(
            number: int, epoch: int, timeout_s: float, tensors: Mapping[str, torch.Tensor]
        ) -> Launch:
            return self._accelerator.launch(
                replace(
                    template,
                    tensors=tensors,
                    number=number,
                    epoch=epoch,
                    timeout_s=timeout_s,
                    begun_s=time.monotonic(),
                )
            )

        return start

    def _learner(
        self, launch: Launch, call: Call, key: str, kind: CallKind
    ) -> Callable[[object, Program], None]:
        """Return what lets native code make calls like the one that was launched."""

        def learn(signature: object, program: Program) -> None:
            before = program.before
            if program.output is not None:  # there may be memory for it by now
                step, shape, dtype = program.output
                if (found := self._from_backend(call.plan, shape, dtype)) is not None:
                    function, arguments = found
                    made = (function, arguments, (-1,) * len(arguments), None, before[step][-1])
                    before = (*before[:step], made, *before[step + 1 :])
            again = launch.again() if self._queues else None
            names, slots = tuple(program.launched), tuple(program.launched.values())
            if program.found or (again is not None and not set(names) <= set(again.tensors)):
                again = None
            if again is not None:
                names = again.tensors
                slots = tuple(program.launched.get(name, -1) for name in names)
            recorded = (
                program.slots, before, program.after, slots, names,
                tuple(program.found.values()), tuple(program.found), program.written, program.result,
            )  # fmt: skip
            self._table.learn(
                signature=signature,
                engine=self.path,
                program=recorded,
                starter=None if again is None else again.starter,
                start=self._starter(call) if again is None else None,
                launches=None if again is None else again.launches,
                key=key,
                counter=kind.counter,
            )

        return learn

    def ended(self, launch: Launch) -> Mapping[str, Any]:
        """Wait for the calls under way, and return what the last one, ``launch``, found out. In the
        world's turn."""
        self._await_all()
        if self._flushes:
            self._flush()
        self._raise_refused()
        return launch.results()

    @property
    def launched(self) -> int:
        """Return how many calls were launched: the epoch of the last one."""
        return self._launched

    @property
    def memory(self) -> Mapping[str, int]:
        """Return the bytes of symmetric memory that are held, by use."""
        return self._heap.held_bytes

    def count_error(self) -> None:
        """Count a call that raised."""
        self.counters.errors += 1

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the function and arguments that allocate a plan's ``out``, row-major and without
        contents, on the device of ``like``. That of a plan's first call is torch's: a backend has no
        memory for it yet, and would keep what it takes in its place."""
        return self._from_backend(plan, shape, dtype) or allocation(shape, dtype, like)

    def _from_backend(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        if not self._heap.has_outputs(plan) or is_torchs():
            return None
        return self._accelerator.allocation(plan, shape, dtype)

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
        """Make no more calls; what makes them refers to this world."""
        self.path.close()

    def let_go(self) -> None:
        """Hold no process group and no session any more. The world has ended."""
        self._group = self._session = None
        self.path.close()

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
