"""A rank's part in a world of unlike nodes (:mod:`mkernel.plan.mixed`): calls of its own backend among
the ranks of its node, and the wire to the others.

Each chunk of rows is one call of the backend in a world of the node alone. What crosses nodes lies in
host memory, pinned for devices, which the NIC reads and writes; nothing on a device knows who is on the
other side.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_kernels import Ended, HostAccelerator, Kernel, Signals
from mkernel.backends.transport import _transport
from mkernel.errors import Unsupported
from mkernel.plan import mixed
from mkernel.plan.arguments import NOTHING, path_of
from mkernel.plan.mixed import MixedCapabilities, MixedSchedule, Side
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import Plans
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.settings import Settings
from mkernel.topology.model import Accelerator, Topology
from mkernel.world.bootstrap import LATE
from mkernel.world.engine import DRAIN_S, Engine
from mkernel.world.exchange import Check, Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Backends, Identity
from mkernel.world.order import capturing, order_of
from mkernel.world.process_group import GroupStore

_WAIT_SLICE_S = 0.05


class NodeExchange(Exchange):
    """The messages among the ranks of one node, by their numbers there."""

    def __init__(self, failure: FailureMonitor, world: Identity) -> None:
        super().__init__(failure)
        self.rank, self.size = world.local_rank, world.ranks_per_node
        self._first = world.node * world.ranks_per_node
        self._prefix = f"node{world.node}"

    def publish(self, key: str, value: Any) -> None:
        """Set ``key`` of this node."""
        super().publish(f"{self._prefix}/{key}", value)

    def collect(
        self,
        key: str,
        ranks: Iterable[int] | None = None,
        check: Check | None = None,
        late: str = LATE,
    ) -> dict[int, Any]:
        """Wait for values of ``key`` of this node, as :meth:`Exchange.collect` does."""

        def watch(missing: set[int]) -> None:
            self._failure.check_peers({self._first + rank for rank in missing})

        return super().collect(f"{self._prefix}/{key}", ranks, check or watch, late)

    def forget(self, key: str) -> None:
        """Delete a key of this node, if it is there."""
        super().forget(f"{self._prefix}/{key}")


class NodeCalls:
    """Makes a rank's calls among the ranks of its node, on their own backend.

    Args:
        topology: the world's. world: the rank's place in it.
    """

    def __init__(
        self, accelerator: str, topology: Topology, world: Identity, settings: Settings
    ) -> None:
        node = topology.nodes[world.node].model_copy(update={"id": 0})
        self._settings = settings
        self._world = world
        self.me = Identity(world.local_rank, 1, world.ranks_per_node)
        self.engine = Engine(
            Backends(accelerator, None, None), Topology(nodes=(node,)), self.me, settings
        )
        self._plans: TwoGenerationCache[object, Plans] = TwoGenerationCache()
        self._epoch = 0

    def side(self) -> Side:
        """Return what this node's ranks claim."""
        claims = self.engine.claims
        return Side.of(self.engine.backends.accelerator, claims, self.engine.map.constants)

    def open(
        self,
        failure: FailureMonitor,
        store: GroupStore,
        name: str,
        undo: contextlib.ExitStack,
    ) -> None:
        """Open the backend. Collective among the node's ranks."""
        node = self._world.node
        self.engine.open(NodeExchange(failure, self._world), failure, itertools.count())
        failure.first = self._world.rank - self.me.rank
        failure.guard(self.engine.heap.pad, failure.first)
        prefix, group = f"node{node}", f"mkernel/{name}/node{node}"
        self.engine.join_group(store, prefix=prefix, name=group, one_host=True, undo=undo)

    def run(
        self, call: Call, op: str, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
    ) -> None:
        """Make one call of a plan of this node alone, and wait for its end. Ended: it did not come."""
        engine = self.engine
        given = next(iter(tensors.values()))
        dtype, out_dtype = (
            str(each.dtype).removeprefix("torch.") for each in (given, tensors["out"])
        )
        plan = self._plans_of(op, dtype, out_dtype, call.plan.b_layout).plan(sizes)
        memory, pad = engine.heap.of_plan(plan), engine.heap.pad
        self._epoch += 1
        own = Call(
            plan=plan,
            rank=self.me.rank,
            tensors=tensors,
            epoch=self._epoch,
            number=call.number,
            pad=pad,
            workspace=memory.arena.buffer.local.address if memory.arena else 0,
            areas=memory.arena.offsets if memory.arena else (),
            peers=memory.peers,
            region=memory.region,
            fifo=0,
            timeout_s=call.timeout_s,
            timed=False,
            group=engine.group,
        )
        deadline = time.monotonic() + 2 * call.timeout_s + DRAIN_S
        with engine.accelerator.on(tensors):
            launch = engine.accelerator.launch(own)
        while not launch.wait(_WAIT_SLICE_S):
            if time.monotonic() > deadline:
                _transport.pad_abort(pad, _transport.AbortCode.timeout)
                raise Ended
        record = engine.accelerator.record()
        failed = record and _transport.record_outcome(record) is not None  # a device's kernels did
        if failed or _transport.pad_aborted(pad) or _transport.pad_aborted(call.pad):
            raise Ended

    def _plans_of(self, op: str, dtype: str, out_dtype: str, layout: str) -> Plans:
        key = op, dtype, out_dtype, layout
        found, engine = self._plans[key], self.engine
        if found is None:
            found = self._plans[key] = Plans(
                op, dtype, out_dtype, layout, NOTHING, engine.map, engine.backends.accelerator,
                engine.claims, None, None, path=path_of(op, self._settings.path),
                schedule=engine.accelerator.schedule,
            )  # fmt: skip
        return found


class Mixed(HostAccelerator):
    """The backend of a world of unlike nodes, on one of its ranks.

    Signals: one a peer, by which it has read what this rank sent; then one a (chunk, source).
    """

    name = mixed.JOINT

    def __init__(self, sides: tuple[Side, ...], world: Identity, own: NodeCalls) -> None:
        self._capabilities = mixed.capabilities(sides)
        self._world = world
        self._own = own
        self.device = own.engine.accelerator.device
        self._module = torch.get_device_module(self.device)
        local = world.local_rank
        self._far = [rank for rank, node in enumerate(world.node_of) if node != world.node]
        self._rail = [rank for rank in self._far if rank % world.ranks_per_node == local]

    def status(self) -> Status:
        """Return a usable status: the world has been made."""
        return Status(True, f"{mixed.name_of(self._capabilities.sides)}, joined by the wire")

    def probe(self) -> tuple[Accelerator, ...]:
        """Return nothing: the nodes' own backends know their devices."""
        return ()

    def capabilities(self) -> MixedCapabilities:
        """Return what all nodes claim."""
        return self._capabilities

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Decide what all ranks share."""
        return mixed.schedule(request)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return two areas, for even and odd epochs, of what crosses nodes."""
        how, world = plan.part(MixedSchedule), self._world
        nbytes = math.prod(_area(plan)) * getattr(torch, how.wire).itemsize
        most = max(_signals(plan, node, node) for node in range(world.nodes))
        return Workspace(areas=(nbytes, nbytes), signals=world.size * (1 + most))

    def signals(self, call: Call) -> Signals:
        """Return the signals of a call."""
        op, me = call.plan.op, self._world
        peers = [rank for rank in range(me.size) if rank != me.rank]
        senders = {"gemm_all_reduce": self._far, "all_reduce": peers}.get(op, self._rail)
        arrivals = [
            (self._arrival(chunk, peer), peer)
            for peer in senders
            for chunk in range(_signals(call.plan, me.node_of[peer], me.node))
        ]
        return Signals(arrivals, releases=[(peer, peer) for peer in peers])

    def _arrival(self, chunk: int, source: int) -> int:
        return self._world.size * (1 + chunk) + source

    def open(self, device: Accelerator) -> None:
        """Start the threads, and make the stream of the comm kernel on the rank's device."""
        super().open(device)
        self._beside = self._module.Stream()

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate pages of the host, pinned where the rank's backend does that."""
        own = self._own.engine
        return (own.accelerator.allocate_staging if own.claims.stages else super().allocate)(nbytes)

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Return the context of the rank's backend. ArgumentError for tensors on another device."""
        return self._own.engine.accelerator.on(tensors)

    def launch(self, call: Call) -> Launch:
        """Start both kernels behind what is queued on the caller's stream: compute on that stream,
        comm beside it. Only gathered rows can all come before anything is computed: other ops'
        sequential calls are pipelined ones. Unsupported: it is being captured into a graph."""
        if capturing(self._module):
            raise Unsupported(
                f"{call.plan.op} is not captured into graphs in a world of unlike nodes, whose calls "
                "wait on the host; call it outside of the capture"
            )
        order_of(self.device).follow(self.name)  # other worlds' calls
        self._callers = self._module.current_stream()
        self._beside.wait_stream(self._callers)
        if call.view == "sequential" and call.plan.op != "all_gather_gemm":
            call = replace(call, view="pipelined")
        return super().launch(call)

    @torch.no_grad()
    def communicate(self, kernel: Kernel) -> None:
        """Send own rows to the rails of other nodes, chunk by chunk, where rows are gathered."""
        call = kernel.call
        if call.plan.op != "all_gather_gemm":
            return
        self._ready(kernel)
        node, a = self._world.node, call.tensors["a"]
        mine = _inbox(kernel)[node]
        with self._module.stream(self._beside):
            for chunk, rows in enumerate(call.plan.part(MixedSchedule).chunks(node)):
                mine[rows].copy_(a[rows])
                for peer in self._rail:
                    kernel.put(peer, mine[rows], self._arrival(chunk, kernel.rank))

    @torch.no_grad()
    def compute(self, kernel: Kernel) -> None:
        """Make the node's own calls, and what other nodes wait for first."""
        run = {
            "all_gather_gemm": self._gather,
            "gemm_reduce_scatter": self._scatter,
            "gemm_all_reduce": self._reduce,
            "all_reduce": self._sum,
        }
        with self._module.stream(self._callers):
            run[kernel.call.plan.op](kernel)
            done = self._module.Event()
            done.record()
            done.synchronize()
        for peer in kernel.peers:
            kernel.tell(peer, kernel.rank)

    def _gather(self, kernel: Kernel) -> None:
        """Multiply own rows, then those of other nodes as their chunks arrive."""
        call, world = kernel.call, self._world
        how, tensors = call.plan.part(MixedSchedule), call.tensors
        self._product(kernel, world.node, slice(0, how.rows[world.node]), tensors["a"])
        for node in self._others():
            peer = node * world.ranks_per_node + world.local_rank
            for chunk, rows in enumerate(how.chunks(node)):
                kernel.wait(self._arrival(chunk, peer), peer, chunk)
                self._product(kernel, node, rows, self._here(_inbox(kernel)[node][rows], tensors))

    def _product(self, kernel: Kernel, node: int, rows: slice, a: torch.Tensor) -> None:
        """Gather the same rows of all ranks of a node in this one, and multiply them."""
        call, each = kernel.call, self._world.ranks_per_node
        tensors = {"a": a, "b": call.tensors["b"]}
        targets = {
            name: _rows_of(call.plan, node, call.tensors[name], each)[:, rows]
            for name in ("out", "gathered")
            if name in call.tensors
        }
        for name, target in targets.items():
            tensors[name] = target.flatten(0, 1).contiguous()  # a view, or memory of its own
        sizes = {"m": len(a) * each, "n": tensors["b"].shape[1], "k": a.shape[1]}
        self._own.run(call, call.plan.op, tensors, sizes)
        for name, target in targets.items():
            if tensors[name].data_ptr() != target.data_ptr():
                target.copy_(tensors[name].view_as(target))

    def _scatter(self, kernel: Kernel) -> None:
        """Send sums of the other nodes' rows to their owners, then add what comes to the own ones."""
        call, world = kernel.call, self._world
        how, tensors, each = call.plan.part(MixedSchedule), call.tensors, world.ranks_per_node
        a, b, out, inbox = tensors["a"], tensors["b"], tensors["out"], _inbox(kernel)

        def summed(node: int, rows: slice, into: torch.Tensor) -> None:
            part = _rows_of(call.plan, node, a, each)[:, rows].flatten(0, 1)
            sizes = {"m": len(part), "n": b.shape[1], "k": a.shape[1]}
            self._into(call, {"a": part, "b": b}, into, sizes)

        self._ready(kernel)
        for node in self._others():
            peer = node * each + world.local_rank
            for chunk, rows in enumerate(how.chunks(node)):
                slot = inbox[node, world.node, rows]
                summed(node, rows, slot)
                kernel.put(peer, slot, self._arrival(chunk, kernel.rank))
        mine = inbox[world.node]
        summed(world.node, slice(0, how.rows[world.node]), mine[world.node, : len(out)])
        for chunk, rows in enumerate(how.chunks(world.node)):
            for peer in self._rail:
                kernel.wait(self._arrival(chunk, peer), peer, chunk)
            out[rows].copy_(_added(self._here(mine[:, rows], tensors)))

    def _reduce(self, kernel: Kernel) -> None:
        """Send this rank's share of each chunk of the node's sum to all ranks of other nodes, and add
        the sums of all nodes."""
        call, world = kernel.call, self._world
        how, tensors, each = call.plan.part(MixedSchedule), call.tensors, world.ranks_per_node
        a, b, inbox = tensors["a"], tensors["b"], _inbox(kernel)
        self._ready(kernel)
        for chunk, rows in enumerate(how.chunks(world.node)):
            slot = inbox[world.node, rows]
            sizes = {"m": len(slot), "n": b.shape[1], "k": a.shape[1]}
            self._into(call, {"a": a[rows], "b": b}, slot, sizes)
            share = slot.tensor_split(each)[world.local_rank]
            for peer in self._far:
                self._put(kernel, peer, share, self._arrival(chunk, kernel.rank))
        for chunk, rows in enumerate(how.chunks(world.node)):
            for peer in self._far:
                kernel.wait(self._arrival(chunk, peer), peer, chunk)
            tensors["out"][rows].copy_(_added(self._here(inbox[:, rows], tensors)))

    def _sum(self, kernel: Kernel) -> None:
        """Send each rank its rows, add all ranks' terms of the own ones, and send the sums to all."""
        call, me = kernel.call, kernel.rank
        how, x, out = call.plan.part(MixedSchedule), call.tensors["x"], call.tensors["out"]
        inbox, share, chunks = _inbox(kernel), how.rows[0], list(how.chunks(0))

        def rows_of(owner: int, rows: slice) -> slice:
            first = owner * share
            return slice(min(len(x), first + rows.start), min(len(x), first + rows.stop))

        self._ready(kernel)
        for owner in (*kernel.peers, me):
            for chunk, rows in enumerate(chunks):
                own = x[rows_of(owner, rows)]
                slot = inbox[owner, me, rows][: len(own)]
                slot.copy_(own)
                if owner != me:
                    self._put(kernel, owner, slot, self._arrival(chunk, me))
        for chunk, rows in enumerate(chunks):
            for peer in kernel.peers:
                kernel.wait(self._arrival(chunk, peer), peer, chunk)
            count = len(out[rows_of(me, rows)])
            total = inbox[-1, me, rows][:count]
            total.copy_(_added(inbox[me, :, rows][:, :count]))
            for peer in kernel.peers:
                self._put(kernel, peer, total, self._arrival(len(chunks) + chunk, me))
        for owner in (me, *kernel.peers):
            for chunk, rows in enumerate(chunks):
                if owner != me:
                    kernel.wait(self._arrival(len(chunks) + chunk, owner), owner, chunk)
                here = out[rows_of(owner, rows)]
                here.copy_(inbox[-1, owner, rows][: len(here)])

    @staticmethod
    def _put(kernel: Kernel, peer: int, part: torch.Tensor, signal: int) -> None:
        """Put a part, which may be empty."""
        if len(part):
            kernel.put(peer, part, signal)
        else:
            kernel.tell(peer, signal)

    def _into(
        self,
        call: Call,
        given: Mapping[str, torch.Tensor],
        slot: torch.Tensor,
        sizes: dict[str, int],
    ) -> None:
        """Make a call of the node whose result goes to a slot in host memory."""
        like = next(iter(given.values()))
        out = slot if like.device.type == "cpu" else torch.empty_like(slot, device=like.device)
        self._own.run(call, call.plan.op, {**given, "out": out}, sizes)
        if out is not slot:
            slot.copy_(out)

    def _ready(self, kernel: Kernel) -> None:
        """Wait until all other ranks have read what this call's slots held two calls ago."""
        for peer in kernel.peers:
            kernel.wait(peer, peer, amount=-1)

    def _others(self) -> Iterator[int]:
        """Yield the other nodes, the next one first."""
        nodes = self._world.nodes
        return ((self._world.node + step) % nodes for step in range(1, nodes))

    def _here(self, part: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return part.to(tensors["b"].device)


def _signals(plan: LaunchPlan, sender: int, receiver: int) -> int:
    """Return how many chunks a rank of one node sends to one of another: of its own rows, where rows
    are gathered, else of the receiver's; of terms and then of sums, where nothing is multiplied."""
    how = plan.part(MixedSchedule)
    count = sum(1 for _ in how.chunks(sender if plan.op == "all_gather_gemm" else receiver))
    return 2 * count if plan.op == "all_reduce" else count


def _area(plan: LaunchPlan) -> tuple[int, ...]:
    """Return the shape of what crosses nodes in a call, as it lies in each rank's memory: the rows of a
    rank of each node; scattered sums by (owner's node, node); terms by (owner, rank), and then sums by
    owner."""
    how, nodes, ranks = plan.part(MixedSchedule), plan.nodes, plan.world_size
    rows = max(how.rows)
    if plan.op == "all_reduce":
        return ranks + 1, ranks, rows, plan.summed.n
    if plan.op == "all_gather_gemm":
        return nodes, rows, plan.gemm.k
    scatters = (nodes,) * (plan.op == "gemm_reduce_scatter")
    return *scatters, nodes, rows, plan.gemm.n


def _inbox(kernel: Kernel) -> torch.Tensor:
    plan = kernel.call.plan
    return kernel.area(_area(plan), getattr(torch, plan.part(MixedSchedule).wire))


def _rows_of(plan: LaunchPlan, node: int, whole: torch.Tensor, each: int) -> torch.Tensor:
    """Return the rows of a node in a tensor of all ranks' rows, as [ranks, rows, columns]."""
    rows = plan.part(MixedSchedule).rows
    first = each * sum(rows[:node])
    return whole[first : first + each * rows[node]].view(each, rows[node], -1)


def _added(sums: torch.Tensor) -> torch.Tensor:
    """Add sums of nodes [nodes, rows, columns] in the order of nodes, in float32 or more."""
    wide = torch.float64 if sums.dtype == torch.float64 else torch.float32
    total = sums[0].to(wide, copy=True)
    for each in sums[1:]:
        total += each
    return total
