"""The MoE ops around a product: dispatches and combines on one rank.

Data flow of a dispatch:
  x (own) ──copy engines, a second stream──▶ every peer's workspace, a flag behind;
      or, of each peer those that it has experts of, ──a kernel there──▶ the same
  topk_ids ──one kernel──▶ every peer; then the tables of the handle, counts, and rows, which the host
      waits for to size the outputs; with a capacity it waits for nothing
  rows of x and of the workspace ──one kernel──▶ rows of the outputs, in the order of their experts
If a dispatch uses the routing of an earlier one, no ids travel and nothing is sorted. Products are
those of a library (:mod:`.moe.grouped`), or a backend's own.
Tokens of e4m3 experts are first quantised, each once, and their scales lie behind them wherever they
go (kernels/moe/quantise_rows.hpp).
Between nodes tokens, ids, weights and sums travel by puts of a NIC as well (:mod:`.moe.nodes`); tokens
in pieces, the flags of which copies and products wait for.
Results return by slot and are added on the token's rank; or a token's results on one rank are added
first (kernels/moe/home.hpp), as is always done between nodes.

Errors. Sums are float32. Results travel in ``partial_dtype``; if they return by rank, they are also
rounded to it before they are added. If a rank gets more rows than its capacity, no rank computes
anything: outputs are zeros, combined tokens NaN, and the next call that waits for the device raises
the error.

A replay of a graph is no call of the world: wait for its stream before you read what it refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from mkernel.backends.accelerators.cuda.collectives.norm import check_tree
from mkernel.backends.accelerators.cuda.device_world import (
    DispatchContext,
    call_id,
    device_world,
    workspace_of,
)
from mkernel.backends.accelerators.cuda.moe.nodes import (
    FarRanks,
    crossing_of,
    outbox_bytes,
    returning_of,
    sums_bytes,
)
from mkernel.backends.accelerators.cuda.moe.tuning import check_size, row_bytes, sums_dtype
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.schedule import CombineSchedule, RowsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError
from mkernel.plan.model import (
    BLOCK,
    DTYPE_BYTES,
    CombineShape,
    DispatchShape,
    DtypeName,
    GemmCombineShape,
    LaunchPlan,
    MoeShape,
)

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

_heights: WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = WeakKeyDictionary()


def known_height(routing: torch.Tensor) -> int | None:
    """Return the rows of the outputs of the dispatch that made these words in this process; None:
    the number is not known without waiting for the device."""
    version, height = _heights.get(routing.untyped_storage(), (-1, 0))
    return height if version == _version(routing) else None


def _version(words: torch.Tensor) -> int:
    return 0 if words.is_inference() else words._version


def sizes_of(world: int, tokens: int, top_k: int, experts: int) -> _kernels.MoeSizes:
    """Return the sizes as kernels take them. ``experts``: of all ranks."""
    made: _kernels.MoeSizes = native().MoeSizes(
        world=world, tokens=tokens, top_k=top_k, experts=experts // world
    )
    return made


class MoeExecutor:
    """Base of the executors of all MoE ops."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls. ``call``: any of them; values that differ from call to call are
        not read."""
        plan = call.plan
        self._context, self._plan = context, plan
        self._sizes = sizes_of_plan(plan)
        self._world = device_world(call, context)
        self._several = plan.world_size > 1
        if plan.nodes > 1:
            native().load_moe(context.device)
        self._copies_first = native().shares_device(context.device, self._world)

    def starter(
        self, symmetric: Mapping[str, tuple[int, ...]], strides: Mapping[str, Sequence[int]]
    ) -> object | None:
        """Return None: calls are started from Python."""
        return None

    def _of_call(self, call: Call) -> _kernels.DeviceWorld:
        return self._world.of_call(call_id(call), call.timeout_s)

    def _exchanges(self, call: Call) -> bool:
        return self._several and call.view != "compute_only"

    def _copy(self, call: Call, rows: torch.Tensor, nbytes: int) -> Callable[[int], None]:
        """Return a function that queues copies of so many bytes to every peer of this node on a
        stream."""
        made, device = native(), self._context.device
        return lambda stream: made.push_whole(
            device, self._of_call(call), rows.data_ptr(), nbytes, stream
        )

    def _push(
        self,
        call: Call,
        stream: int,
        to_near: Callable[[int], None],
        to_far: Callable[[int], None],
    ) -> bool:
        """Queue the transfers to this node's ranks (``to_near``) and to those of other nodes
        (``to_far``). Returns whether they run on a second stream, which must be joined."""
        context, beside = self._context, stream
        forks = call.view == "pipelined" and not self._copies_first
        if forks:
            beside = context.order.fork(stream)
        try:
            to_near(beside)
            if self._plan.nodes > 1:
                to_far(beside)
        except BaseException:
            if forks:
                context.order.join(stream)
            raise
        return forks

    def _rows(self, call: Call, name: str, stream: int) -> torch.Tensor:
        """Return the call's rows of that name, as they travel. Those of e4m3 experts are queued to be
        quantised, or copied: they have their scales behind each row, in bytes."""
        rows, scales = aligned(call.tensors[name]), self._plan.scales
        if scales is None:
            return rows
        of_rows, made = call.tensors.get(f"{name}_scale"), native()
        count, width = rows.shape
        each = row_bytes(width, scaled=True)
        found = torch.empty((count, each), dtype=torch.uint8, device=rows.device)
        quantised = made.QuantisedRows(
            x=rows.data_ptr(),
            scales=address_of(of_rows),
            out=found.data_ptr(),
            rows=count,
            width=width,
            row_bytes=each,
            half=scales.quantises == "float16",
        )
        made.quantise_rows(self._context.device, quantised, stream)
        return found

    def _home(
        self,
        call: Call,
        y: torch.Tensor | None,
        out: torch.Tensor,
        blocks: int,
        *,
        wide: bool,
        by_rank: bool,
        tokens: tuple[int, int] = (0, 0),
    ) -> _kernels.Home:
        """Return the arguments of a step of what comes home. ``tokens``: the first and the end of those
        of each rank that a step by rank sums, or relays."""
        how, exchanges = returning_of(self._plan), self._exchanges(call)
        made: _kernels.Home = native().Home(
            sizes=self._sizes,
            routing=call.tensors["routing"].data_ptr(),
            y=address_of(y),
            weights=call.tensors["topk_weights"].data_ptr(),
            out=out.data_ptr(),
            width=out.shape[1],
            first=tokens[0],
            end=tokens[1],
            pieces=how.pieces,
            groups=0 if self._plan.invariant is None else self._plan.invariant.segments,
            half=self._plan.out_dtype == "float16",
            wide=wide,
            by_rank=by_rank,
            waits=exchanges,
            hierarchical=exchanges and how.exchange == "hierarchical",
            blocks=blocks,
        )
        return made


class DispatchBase(MoeExecutor):
    """Base of the executors of both dispatches."""

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a dispatch needs. Unsupported."""
        check_size(plan)
        pieces = crossing_of(plan).pieces
        nbytes = sizes_of_plan(plan).dispatch_bytes(_row_bytes(plan), pieces)
        return workspace_of(plan, nbytes, outbox_bytes(plan))

    def _send(
        self, call: Call, x: torch.Tensor, ids: torch.Tensor, pushing: int, stream: int
    ) -> bool:
        """Queue the transfer of the own tokens, in this node by so many blocks that push, or by copy
        engines. Returns whether it runs on a second stream, which must be joined."""
        if not self._exchanges(call):
            return False
        made, device, plan = native(), self._context.device, self._plan
        near, world, how = (
            self._tokens(call, x, ids, pushing),
            self._of_call(call),
            crossing_of(plan),
        )
        crossing = made.CrossingTokens(
            sizes=self._sizes,
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            row_bytes=_row_bytes(plan),
            pieces=how.pieces,
            hierarchical=how.exchange == "hierarchical",
        )

        def leave(beside: int) -> None:
            if plan.nodes > 1:
                made.put_tokens(device, world, crossing, beside)
            if plan.ranks_per_node > 1:
                near(beside)

        return self._push(
            call, stream, leave,
            lambda beside: made.land_tokens(device, world, crossing, how.land_blocks, beside),
        )  # fmt: skip

    def _pieces(self, call: Call) -> int:
        """Return the pieces that other nodes' tokens come in; 0 where none come."""
        return crossing_of(self._plan).pieces if self._exchanges(call) else 0

    def _waits_for_push(self) -> bool:
        """Return whether what follows on the call's stream would keep the push of own tokens out, and
        waits for it therefore. Between nodes the routing already waits until it has ended."""
        return crossing_of(self._plan).push_blocks > 0 and self._plan.nodes == 1

    def _own_ids(self, call: Call) -> tuple[torch.Tensor, int | None]:
        """Return the own tokens' ids, and the number of rows where it is known: from the capacity, or
        from an earlier dispatch whose routing is used. ArgumentError: a graph is captured and it is
        not."""
        shape, words = self._plan.shape, call.tensors["routing"]
        assert isinstance(shape, MoeShape | DispatchShape)
        if not shape.routed:
            _expect_height(shape.capacity)
            return call.tensors["topk_ids"].to(torch.int32), shape.capacity
        own = shape.tokens * shape.top_k
        known = known_height(words)
        height = known if known is not None else shape.capacity
        _expect_height(height)
        if height is None:
            height = int(words[-2])  # the world's mark follows it
        return words.narrow(0, call.rank * own, own), height

    def _route(
        self, call: Call, ids: torch.Tensor, stream: int, early: int = 0, early_rows: int = 1
    ) -> tuple[torch.Tensor, int]:
        """Queue the routing; return the counts and the number of rows, for which the host waits if
        there is no capacity. ``early``, ``early_rows``: as of the schedule."""
        made, context, plan = native(), self._context, self._plan
        shape = plan.shape
        assert isinstance(shape, MoeShape | DispatchShape)
        experts, words = shape.experts // plan.world_size, call.tensors["routing"]
        counts = torch.empty(experts, dtype=torch.int64, device=ids.device)
        exchanges = self._exchanges(call)
        made.moe_route(
            context.device,
            self._of_call(call),
            made.Routing(
                sizes=self._sizes,
                routing=words.data_ptr(),
                ids=ids.data_ptr(),
                counts=counts.data_ptr(),
                row_bytes=_row_bytes(plan),
                capacity=shape.capacity or 0,
                early=early if exchanges else 0,
                early_rows=early_rows,
                pieces=self._pieces(call),
                exchanges=exchanges,
            ),
            context.reports.block,
            stream,
        )
        height = shape.capacity
        if height is None:
            height = context.reports.rows(call_id(call))
        _heights[words.untyped_storage()] = _version(words), height
        return counts, height

    def _tokens(
        self, call: Call, x: torch.Tensor, ids: torch.Tensor, blocks: int
    ) -> Callable[[int], None]:
        """Return a function that queues the transfer of the own tokens to the peers of this node on
        a stream."""
        made, device = native(), self._context.device
        row_bytes = _row_bytes(self._plan)
        if blocks == 0:
            return self._copy(call, x, len(x) * row_bytes)
        tokens = made.WantedTokens(
            sizes=self._sizes,
            x=x.data_ptr(),
            ids=ids.data_ptr(),
            row_bytes=row_bytes,
            blocks=blocks,
        )
        return lambda stream: made.push_wanted(device, self._of_call(call), tokens, stream)


class RowsExecutor(DispatchBase):
    """The executor of one plan's calls of MoE dispatch without a product, into ``routing`` and tensors
    of its own; or with the ``routing`` of an earlier dispatch."""

    def start(self, call: Call, stream: int) -> Mapping[str, Any]:
        """Queue one call on a stream; the host waits for the number of rows if neither a capacity nor
        an earlier dispatch of this process gives it."""
        return self._dispatched(call, stream)

    def _dispatched(self, call: Call, stream: int) -> dict[str, torch.Tensor]:
        made, context, plan = native(), self._context, self._plan
        shape, how, words = plan.shape, plan.part(RowsSchedule), call.tensors["routing"]
        assert isinstance(shape, MoeShape | DispatchShape)
        found: dict[str, torch.Tensor] = {}
        ids, height = self._own_ids(call)
        x = self._rows(call, "x", stream)
        forked = self._send(call, x, ids, how.push_blocks, stream)
        try:
            if not shape.routed:
                found["counts"], height = self._route(call, ids, stream)
            assert height is not None
            rows = x.new_empty((height, shape.hidden), dtype=dtype_of(plan.dtype))
            found["rows"] = rows
            if plan.scales is not None:
                sizes = height, shape.hidden // BLOCK
                found["scales"] = x.new_empty(sizes, dtype=torch.float32)
            if forked and self._waits_for_push():
                forked = False
                context.order.join(stream)
            copies = made.DispatchedRows(
                sizes=self._sizes,
                routing=words.data_ptr(),
                a=x.data_ptr(),
                out=rows.data_ptr(),
                scales=address_of(found.get("scales")),
                row_bytes=_row_bytes(plan),
                width=shape.hidden,
                height=height,
                pieces=self._pieces(call),
                waits=self._exchanges(call),
                blocks=how.blocks,
            )
            made.copy_rows(context.device, self._of_call(call), copies, stream)
        finally:
            if forked:
                context.order.join(stream)
        return found


def _expect_height(height: int | None) -> None:
    """Raise ArgumentError where a graph is captured and the number of rows is not known."""
    if height is None and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "capacity", None, "a number of rows: a graph's shapes cannot depend on its routing"
        )


class CombineBase(MoeExecutor):
    """Base of the executors of both combines."""

    def _by_rank(
        self,
        call: Call,
        stream: int,
        row_bytes: int,
        rows: Callable[[], torch.Tensor],
        blocks: int,
        *,
        wide: bool,
    ) -> None:
        """Queue the return of results as sums by rank. ``rows`` queues the experts' results, while
        weights travel: rows of ``row_bytes`` each, float32 if ``wide``."""
        made, device, world, plan = native(), self._context.device, self._of_call(call), self._plan
        weights, out = call.tensors["topk_weights"], call.tensors["out"]
        written, steps = writable(out), made.HomeStep
        how, exchanges = returning_of(plan), self._exchanges(call)
        far = FarRanks(device, self._sizes, row_bytes, how)
        forked = exchanges and self._push(
            call, stream, self._copy(call, weights, weights.nbytes),
            lambda beside: far.send_weights(world, weights, beside),
        )  # fmt: skip
        try:
            y = rows()
            if forked and plan.nodes > 1:  # sums would keep out the kernel that sets their flags
                forked = False
                self._context.order.join(stream)
            count, pieces = len(weights), how.pieces if exchanges else 0
            each = -(-count // max(pieces, 1))
            homes = [
                self._home(
                    call, y, written, blocks, wide=wide, by_rank=True,
                    tokens=(piece * each, min((piece + 1) * each, count)),
                )
                for piece in range(max(pieces, 1))
            ]  # fmt: skip
            # Relays add a piece of their node's sums while their neighbours make the next one.
            behind = 1 if exchanges and how.exchange == "hierarchical" else 0
            for piece in range(len(homes) + behind):
                if piece < len(homes):
                    made.moe_home(device, world, homes[piece], steps.sum_rows, stream)
                if behind and piece:
                    made.moe_home(device, world, homes[piece - 1], steps.relay_sums, stream)
                if pieces and piece >= behind:
                    far.send_sums(world, piece - behind, stream)
            made.moe_home(device, world, homes[-1], steps.sum_ranks, stream)
        finally:
            if forked:
                self._context.order.join(stream)
        deliver(written, out)

    def _by_slot(self, call: Call, stream: int, y: torch.Tensor, blocks: int) -> None:
        """Queue the return of rows ``y``, each to its slot, and their sums."""
        made, device, world = native(), self._context.device, self._of_call(call)
        out = call.tensors["out"]
        written = writable(out)
        home = self._home(call, y, written, blocks, wide=False, by_rank=False)
        made.moe_home(device, world, home, made.HomeStep.send_rows, stream)
        made.moe_home(device, world, home, made.HomeStep.sum_slots, stream)
        deliver(written, out)


class CombineExecutor(CombineBase):
    """The executor of one plan's MoE combine calls in a world, into ``out``. Between nodes results
    return as sums by rank, in :func:`sums_dtype`."""

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that a combine needs. Unsupported."""
        plan.part(CombineSchedule)
        shape = plan.shape
        assert isinstance(shape, CombineShape)
        by_rank = plan.nodes > 1
        row_bytes = shape.features * DTYPE_BYTES[sums_dtype(plan) if by_rank else plan.dtype]
        return returns_workspace(plan, row_bytes, by_rank=by_rank)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        blocks = self._plan.part(CombineSchedule).sum_blocks
        y = aligned(call.tensors["y"])
        if self._plan.nodes > 1:
            sums = sums_dtype(self._plan)
            self._by_rank(
                call, stream, y.shape[1] * DTYPE_BYTES[sums], lambda: y.to(dtype_of(sums)), blocks,
                wide=sums == "float32",
            )  # fmt: skip
        else:
            self._by_slot(call, stream, y, blocks)


def returns_workspace(plan: LaunchPlan, row_bytes: int, *, by_rank: bool) -> Workspace:
    """Return the symmetric memory in which tokens of each rank get results, in rows of so many bytes;
    between nodes with an outbox. Unsupported: a ``partial_dtype`` of invariant results that is not
    theirs."""
    check_tree(plan)
    returning_of(plan)
    nbytes = sizes_of_plan(plan).home_bytes(row_bytes, by_rank)
    return workspace_of(plan, nbytes, sums_bytes(plan))


def sizes_of_plan(plan: LaunchPlan) -> _kernels.MoeSizes:
    shape = plan.shape
    assert isinstance(shape, MoeShape | DispatchShape | CombineShape | GemmCombineShape)
    return sizes_of(plan.world_size, shape.tokens, shape.top_k, shape.experts)


def _row_bytes(plan: LaunchPlan) -> int:
    assert isinstance(plan.shape, MoeShape | DispatchShape)
    return row_bytes(plan.shape.hidden, scaled=plan.scales is not None)


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def dtype_of(name: DtypeName) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
