"""A world as ops and users see it; what it does lies in the modules beside this one."""

from __future__ import annotations

import hmac
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import Store

from mkernel import log, selection
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.nic import NicSession, NicStatistics
from mkernel.backends.runtime._calls import CallPath
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan import mixed
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import Plans
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.settings import Settings
from mkernel.topology.model import Topology
from mkernel.topology.world_map import WorldMap
from mkernel.world import profiling
from mkernel.world.agreement import Agreement
from mkernel.world.calls import CallRecord, Calls
from mkernel.world.engine import DRAIN_S, Engine
from mkernel.world.environment import Chosen
from mkernel.world.exchange import Exchange
from mkernel.world.exposition import Page
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Backends, Identity
from mkernel.world.join import Membership
from mkernel.world.join_deadline import JoinDeadline
from mkernel.world.order import Turns
from mkernel.world.process_group import GroupStore, innermost
from mkernel.world.sealing import Seal
from mkernel.world.statistics import Sort, Statistics, Way
from mkernel.world.torch_state import allocation


class World:
    """One rank's view of a world: the ranks that call ops together, and what they share.

    Made by :func:`mkernel.init`; not to be constructed by users. Worlds of one process share nothing
    but the order of their calls on a device (:mod:`mkernel.world.order`): any thread may call, and
    calls take turns. Ranks that share several worlds call them in one order.

    Attributes:
        name: of the process group that it was made of (``group_name``), else one of its own; no other
            world of this process has it, and it is the same on all ranks.
        rank, size: this rank, 0 to ``size`` - 1, and the number of ranks.
        ended: whether it has been closed.
        on_end: called once, when it begins to close.
        planned: plans of this world's calls by what was asked for; ``plans``: what makes them, by all
            but sizes; ``families``: what checks found of a call, which stands for all that differ from
            it by rows alone. They belong to ``mkernel.ops``.
        stored: plans of a file, by what the planner is asked for. recording: notes new calls, where it
            is not None; recorded: what noted some before (:mod:`mkernel.ops.plan_file`).
    """

    def __init__(
        self,
        identity: Identity,
        backends: Backends,
        settings: Settings,
        stores: tuple[Store, Store],
        key: bytes,
        name: str,
        device: Chosen | None = None,
        deadline: JoinDeadline | None = None,
    ) -> None:
        """Join. Collective; the errors are those of :func:`mkernel.init`.

        Args:
            stores: two clients of one store that holds keys of this world only; the second is the
                watchdog's.
            device: that this rank uses; None: it is placed on one.
            key: seals all messages of this world and of no other (:mod:`mkernel.world.handshake`).
            deadline: of the join; None: one of its own.
        """
        self.name = name
        self.ended = False
        self.on_end: Callable[[World], None] = lambda world: None
        self.identity = identity
        self.rank, self.size = identity.rank, identity.size
        self.backends = backends
        self.settings = settings
        self.planned: TwoGenerationCache[Hashable, LaunchPlan] = TwoGenerationCache()
        self.plans: TwoGenerationCache[Hashable, Plans] = TwoGenerationCache()
        self.families: TwoGenerationCache[bytes, Any] = TwoGenerationCache()
        self.stored: Mapping[str, LaunchPlan] = {}
        self.recording: Any = None
        self.recorded: Any = None
        self._key = key
        self._stores = [innermost(store) for store in stores]
        self._plans_made: Counter[str] = Counter()  # by accelerator
        log.show(settings.log)
        self._log = log.of_world(__name__, self.rank, name)
        self._failure = FailureMonitor(self.rank, self.size, settings.timeout_s, stores, key)
        self._failure.joining = deadline or JoinDeadline(settings.join_timeout_s)
        self._failure.about = {
            "world": name,
            "nodes": identity.nodes,
            "accelerator": backends.accelerator,
            "nic": backends.nic,
            "verbs": backends.verbs,
        }
        self._exchange = Exchange(self._failure)
        self._membership = Membership(
            name, device, identity, backends, settings, self._exchange, self._failure
        )
        self._membership.join()
        self.backends = backends = self._membership.backends
        self._failure.joining = None
        self._agreement = Agreement(
            self._exchange,
            self._failure,
            self._membership.check,
            self._membership.engine.heap.board,
        )
        self._turns = self._new_turns(name)
        self._calls = self._calls_of(self._membership.engine, self._turns)
        self._engines: dict[str, Engine] = {}  # by op
        self._companions: dict[str, tuple[Calls, Turns]] = {}  # by accelerator; those that are open
        self._failure.elsewhere = self._elsewhere  # heartbeats ask it from now on
        try:
            self._turns.join()
        except BaseException as error:  # Ctrl-C while the calls of other worlds end
            self._failure.tell(error)
            self._calls.forget()
            self._leave()
            raise
        self._log.info(
            "begins: %d ranks on %d nodes, on %s, nic %s, verbs %s",
            self.size, identity.nodes, ",".join(backends.accelerators), backends.nic, backends.verbs,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = self.backends.accelerator + (" (ended)" if self.ended else "")
        return f"<World {self.name!r}: rank {self.rank} of {self.size}, {state}>"

    # ---- what it consists of -------------------------------------------------------------------

    @property
    def accelerator(self) -> AcceleratorBackend:
        """Return the backend that this world was made with; no other world uses this instance."""
        return self._membership.engine.accelerator

    def engine(
        self, op: str, takes: Callable[[AcceleratorCapabilities], bool] | None = None
    ) -> Engine:
        """Return the engine that runs an op's calls: that of the first of the world's accelerators
        that provides the op. An op that reads what another op's call left runs where that one ran.
        Unsupported.

        Args:
            takes: returns whether an accelerator takes the call: the first of them that does so runs
                it. None: they all take the same calls.
        """
        nodes, engines = self.identity.nodes, self._membership.engines
        if self._membership.mixed:
            return self._of_unlike_nodes(op)
        if takes is not None:
            return engines[selection.provider(self.backends, op, nodes, takes)]
        found = self._engines.get(op)
        if found is None:
            found = self._engines[op] = engines[selection.provider(self.backends, op, nodes)]
        return found

    def _of_unlike_nodes(self, op: str) -> Engine:
        engine = self._membership.engine
        ops = engine.claims.ops
        if op not in ops:
            raise Unsupported(
                f"a world of unlike nodes ({engine.backends.accelerator}) runs {', '.join(ops)}, not "
                f"{op!r}; call it in a world of the ranks of one kind (group=)"
            )
        return engine

    def check_gradients(self, op: str) -> None:
        """Raise Unsupported where calls of an op have no gradients, before anything starts."""
        if self._membership.mixed:
            raise Unsupported(
                f"{op} has no gradients in a world of unlike nodes ({self.backends.accelerator}); call "
                "it under torch.no_grad(), or train in a world of one kind (group=)"
            )

    def part(self, parts: Sequence[int]) -> slice:
        """Return this rank's part of a dimension, of parts by node."""
        me = self.identity
        first = me.ranks_per_node * sum(parts[: me.node]) + me.local_rank * parts[me.node]
        return slice(first, first + parts[me.node])

    def shares(self, size: int, wanted: mixed.Shards, multiple: int = 1) -> tuple[int, ...]:
        """Return what each rank of a node gets of a dimension, by node; as
        :func:`mkernel.world.lifecycle.shard` says."""
        me, claims = self.identity, self._membership.engine.claims
        mixed.encoded(wanted)
        if wanted == "even":
            return mixed.shares(size, multiple, me.ranks_per_node, [1.0] * me.nodes)
        if not isinstance(claims, mixed.MixedCapabilities):
            raise Unsupported(
                f"shards={wanted!r}: the nodes of this world are alike "
                f"({self.backends.accelerator}), and share everything evenly"
            )
        if wanted == "speed":
            return mixed.shares(size, multiple, me.ranks_per_node, claims.speeds())
        given = tuple(wanted)
        fits = len(given) == me.nodes and me.ranks_per_node * sum(given) == size
        if not fits or any(each < 1 or each % multiple for each in given):
            raise ArgumentError(
                "shards",
                list(given),
                f"{me.nodes} multiples of {multiple}, one a node, that are {size} with "
                f"{me.ranks_per_node} ranks on each",
            )
        return given

    def engines(self) -> list[Engine]:
        """Return the engines of all of the world's accelerators, its own first; of unlike nodes the one
        that they share."""
        if self._membership.mixed:
            return [self._membership.engine]
        return [*self._membership.engines.values()]

    @property
    def topology(self) -> Topology:
        """Return the machines of all ranks; the same model on every rank."""
        return self._membership.topology

    @property
    def map(self) -> WorldMap:
        """Return the map with which plans of its first accelerator are made: where its ranks are, and
        how bytes go between them."""
        return self._membership.engine.map

    @property
    def nic(self) -> NicSession | None:
        """Return the NIC session to other nodes; None in a world of one node."""
        return self._membership.session

    @property
    def group_store(self) -> GroupStore:
        """Return the store through which a process group of this world's ranks may exchange
        addresses."""
        return self._membership.group_store

    def seal(self, purpose: str) -> Seal:
        """Return a seal for messages of this world's ranks that take a way of their own."""
        return Seal(hmac.digest(self._key, purpose.encode(), "sha256"))

    def set_timeout(self, timeout_s: float) -> None:
        """Give this rank's waits, on the host and in calls, another deadline from now on."""
        self.settings = self.settings.model_copy(update={"timeout_s": timeout_s})
        self._failure.timeout_s = timeout_s

    # ---- what its ranks do together ------------------------------------------------------------

    def run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        *,
        options: Mapping[str, Any] | None = None,
        view: View = "pipelined",
        trace: bool = False,
        wait: bool = False,
    ) -> CallRecord:
        """Run one call of a plan. Collective: every rank, with the same plan and view.

        Returns when the call has ended; with a stream-ordered backend once it is queued, unless
        ``wait``, a trace or another view than the product's is asked for. The record has times and
        trace only of a call that has ended.

        Raises:
            Unsupported: the accelerator is not instrumented, and has the product's view only.
            PlanMismatch: another rank calls something else; nothing was launched.
            WorldError: PeerFailure, Timeout, NicError, Untrusted or Cancelled, the same kind on every
                rank; of this call, or of an earlier one that was only queued.
        """
        if profiling.wanted():
            with profiling.named(plan.op):
                return self.run(plan, tensors, options=options, view=view, trace=trace, wait=wait)
        calls = self._calls
        if plan.accelerator in self.backends.companions:
            calls = self._companion(plan, tensors)
        return calls.run(plan, tensors, options or {}, view, trace=trace, wait=wait)

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the function and arguments that allocate a plan's ``out``, row-major and without
        contents, on the device of ``like``: where peers may write it, if the accelerator has such
        memory for it."""
        if plan.accelerator in self.backends.companions:
            return allocation(shape, dtype, like)
        return self._calls.allocation(plan, shape, like, dtype)

    @property
    def path(self) -> CallPath:
        """Return the path that knows this world's calls."""
        return self._calls.path

    def plan_made(self, plan: LaunchPlan) -> None:
        """Remember a plan that was made with this world's map and backends: its calls need not be
        compared with the world again."""
        self._membership.planned(plan)
        self._plans_made[plan.accelerator] += 1
        if self._log.isEnabledFor(logging.INFO):
            self._log.info("plan %s", _described(plan))
            if plan.accelerator != self.backends.accelerator:
                self._log.info(
                    "fallback: %s runs on %s, as %s does not take it",
                    plan.op, plan.accelerator, self.backends.accelerator,
                )  # fmt: skip

    def synchronize(self) -> None:
        """Wait until every call that this rank has made is over. WorldError: what broke one."""
        self._calls.synchronize()

    def statistics(self) -> Statistics:
        """Sum up this rank's calls so far. Not collective."""
        sorts, sent_bytes = self._counted()
        calls: Counter[str] = Counter()
        for sort, number in sorts.items():
            calls[sort.op] += number
        counters = [each.counters for each in self._all_calls().values()]
        carried = None if self.nic is None or self.ended else self.nic.statistics()
        del sent_bytes["nic"]  # of them the proxy counts what it has carried
        if carried is not None and carried.put_bytes:
            sent_bytes["nic"] = carried.put_bytes
        return Statistics(
            calls=dict(calls),
            sent_bytes=dict(sent_bytes),
            new_shapes=sum(each.new_shapes for each in counters),
            waits=sum(each.waits for each in counters),
            waited_s=sum(each.waited_s for each in counters),
            retries=0 if carried is None else carried.stalls,
            errors=sum(each.errors for each in counters),
        )

    def observe(self, page: Page) -> None:
        """Add this rank's numbers of the world to a page of Prometheus' text."""
        page.common = {"world": self.name, "rank": self.rank}
        page.add("world_ranks", self.size)
        page.add("world_nodes", self.identity.nodes)
        sorts, planned = self._counted()
        for sort, number in sorts.items():
            page.add("calls_total", number, **sort._asdict())
            if sort.accelerator != self.backends.accelerator:
                page.add("fallback_calls_total", number, **sort._asdict())
        for name, number in dict(self._plans_made).items():  # any thread may ask
            page.add("plans_total", number, accelerator=name)
        for name, calls in self._all_calls().items():
            page.add("new_shapes_total", calls.counters.new_shapes, accelerator=name)
            page.add("epochs_total", calls.launched, accelerator=name)
            for use, nbytes in dict(calls.memory).items():
                page.add("memory_bytes", nbytes, accelerator=name, use=use)
        found = self.statistics()
        page.add("errors_total", found.errors)
        page.add("waits_total", found.waits)
        page.add("wait_seconds_total", found.waited_s)
        for way, nbytes in found.sent_bytes.items():
            page.add("sent_bytes_total", nbytes, way=way)
        if self.nic is not None and not self.ended:
            page.add("planned_nic_bytes_total", planned["nic"])
            _observe_nic(page, self.nic.statistics())

    def _all_calls(self) -> dict[str, Calls]:
        """Return the calls of each engine that is open, by its accelerator."""
        companions = list(self._companions.items())
        return {
            self.backends.accelerator: self._calls,
            **{name: one for name, (one, _) in companions},
        }

    def _counted(self) -> tuple[Counter[Sort], Counter[Way]]:
        """Return the numbers of calls, and what they send as their plans say."""
        calls: Counter[Sort] = Counter()
        sent_bytes: Counter[Way] = Counter()
        for each in self._all_calls().values():
            each.counters.add_to(calls, sent_bytes)
        return calls, sent_bytes

    def barrier(self) -> None:
        """Wait until every rank has called it. Timeout, PeerFailure."""
        with self._turns:
            self._exchange.barrier()

    def gather(self, topic: str, value: Any) -> dict[int, Any]:
        """All-gather ``value``, JSON-safe, under ``topic``. Collective. Timeout, PeerFailure."""
        with self._turns:
            return self._exchange.gather(topic, value)

    def in_symmetric_memory(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether one of these tensors lies in a buffer of :meth:`empty`."""
        return bool(self._membership.engine.heap.places(tensors))

    def forget_calls(self) -> None:
        """Let Python make each known call once more. Plans and memory stay."""
        with self._turns:
            self._calls.path.forget()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor as :func:`mkernel.empty` does, in this world. Collective."""
        if self._membership.mixed:
            raise Unsupported(
                f"a world of unlike nodes ({self.backends.accelerator}) has no symmetric memory; "
                "allocate with torch.empty"
            )
        with self._turns:
            return self._membership.engine.heap.empty(shape, dtype)

    def capture(self) -> int:
        """Return the number of the capture that the current stream is part of; 0: none that its first
        accelerator takes part in."""
        return self.accelerator.capture()

    def graph_pool(self) -> tuple[int, int] | None:
        """Make a pool as :func:`mkernel.graph_pool` does, in this world."""
        with self._turns:
            return self._membership.engine.accelerator.graph_pool()

    def close(self, error: BaseException | None = None) -> None:
        """Take the world down. Collective where it is healthy; alone where it is broken. Harmless where
        it has ended.

        Args:
            error: why this rank stops early, told to the others; None: a normal end.

        Raises:
            WorldError: what broke a call that was only queued, where nothing raised it before.
        """
        if self.ended:
            return
        self.ended = True
        self.on_end(self)
        try:
            self._calls.end(error)
        finally:
            launched = sum(each.launched for each in self._all_calls().values())
            self._leave()
            self._log.info(
                "ends after %d calls%s", launched, "" if error is None else f": {error!r}"
            )

    def _leave(self) -> None:
        """Free what the world holds. What refers back to it is dropped, so that it goes as soon as
        nobody holds it, without a run of Python's cyclic collector."""
        for turns in (self._turns, *(turns for _, turns in self._companions.values())):
            turns.leave()
        self._stores.clear()
        try:
            self._membership.leave()
        finally:
            for calls in (self._calls, *(calls for calls, _ in self._companions.values())):
                calls.let_go()

    # ---- its accelerators ----------------------------------------------------------------------

    def _companion(self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor]) -> Calls:
        """Return the calls of a companion, and open it at the first of them. Collective then."""
        name = plan.accelerator
        if name in self._companions:
            return self._companions[name][0]
        with self._turns:
            if name not in self._companions:  # another thread may have been first
                self._failure.raise_if_broken()
                self._agreement.enter(plan, tensors, {})  # all ranks want it
                engine = self._membership.engines[name]
                self._membership.open(engine)
                turns = self._new_turns(f"{self.name} on {name}")
                turns.join()
                self._companions[name] = (self._calls_of(engine, turns), turns)
        return self._companions[name][0]

    def _calls_of(self, engine: Engine, turns: Turns) -> Calls:
        own = engine is self._membership.engine
        return Calls(
            engine,
            self._membership.session if own else None,
            self._exchange,
            self._failure,
            self._agreement,
            turns,
            None if own else self._calls.path,
        )

    def _new_turns(self, name: str) -> Turns:
        device, failure = self.accelerator.device, self._failure

        def limit_s() -> float:
            """Return how long, in seconds, another world of this process may keep its turn: its calls
            end by then."""
            return 2 * failure.timeout_s + DRAIN_S

        return Turns(device, name, limit_s, self._drain, failure.tell)

    def _elsewhere(self) -> str:
        """Return the other world that this process is calling or making; empty: there is none. Any
        thread."""
        busy = self._turns.elsewhere()
        return "" if busy in {turns.world for _, turns in self._companions.values()} else busy

    def _drain(self) -> None:
        self._calls.drain()


def _described(plan: LaunchPlan) -> str:
    """Describe a plan in a line of the log."""
    every = plan.shape.model_dump(exclude={"kind"})
    sizes = {name: each for name, each in every.items() if each not in (None, ())}
    times = plan.prediction
    predicted = "no prediction" if times is None else f"predicted {times.pipelined_us:.1f} us"
    return (
        f"{plan.op} of {sizes} {plan.dtype} on {plan.accelerator}: path {plan.path}, {predicted}, "
        f"digest {plan.digest()[:12]}"
    )


def _observe_nic(page: Page, found: NicStatistics) -> None:
    page.add("nic_puts_total", found.puts)
    page.add("nic_signals_sent_total", found.signals_sent)
    page.add("nic_signals_raised_total", found.signals_raised)
    page.add("nic_stalls_total", found.stalls)
    page.add("nic_queue_depth", found.queue_depth)
    for kind in ("host", "dmabuf", "peermem"):
        page.add("nic_regions", getattr(found, f"{kind}_regions"), kind=kind)
    for lane in found.lanes:
        page.add("nic_lane_bytes_total", lane.nbytes, peer=lane.peer, port=lane.port)
        page.add("nic_lane_messages_total", lane.messages, peer=lane.peer, port=lane.port)
