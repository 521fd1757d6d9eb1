"""Peers between nodes that fuse nothing: the host puts and waits, and torch multiplies.

Each rank is a node of its own. A host copies what a peer is to have to host memory, queues one put of
all of it, and waits for the peers' puts, by the NIC that mkernel's own kernels use; no library takes
it. Nothing overlaps. Products of experts are dispatched by rank, as DeepEP does: a token goes once to
each rank that has an expert of its.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from mkernel.errors import BackendUnavailable, Unsupported
from mkernel.harness.contenders import Contender, expert_rows
from mkernel.harness.contenders.by_rank import Dispatched, DispatchedByRank
from mkernel.harness.contenders.experts import Sorted, plain
from mkernel.harness.contenders.library import place_rows, summed_rows
from mkernel.harness.contenders.norm import AddAndNorm
from mkernel.harness.contenders.products import product, scales_without_product
from mkernel.harness.nic_ranks import NicSubject, Port
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS
from mkernel.world.lifecycle import current
from mkernel.world.order import capturing

_HALVES = 2
_ALIGNED = 256
_OWN_NODE = "between nodes of one rank each"


def _unusable(problem: Problem) -> str | None:
    if problem.nodes == 1 or problem.nodes != problem.world:
        return _OWN_NODE
    if current().backends.nic is None:
        return "the world has no NIC"
    return scales_without_product(problem)


class PutExchange:
    """An all-to-all among ranks that are a node each, by one put a peer. Collective.

    Arrivals lie in two halves by turns: a peer's put of the call after the next comes when its host
    has this rank's put of the next one, which this rank queues once it has copied out all of this call.
    """

    def __init__(self, problem: Problem, nbytes: int) -> None:
        """Open a NIC session. ``nbytes``: the most that a rank sends to another in a call."""
        world = current()
        assert world.backends.nic is not None
        assert world.backends.verbs is not None
        self._rank, self._world, self._device = problem.rank, problem.world, problem.device
        self._module: Any = torch.get_device_module(self._device)
        self._slot = -(-nbytes // _ALIGNED) * _ALIGNED
        self._calls = 0
        timeout_s = world.settings.timeout_s
        subject = NicSubject(world.backends.nic, world.backends.verbs, timeout_s=timeout_s)
        self._session = subject.session(self._rank)
        try:
            self._port = self._joined(timeout_s)
        except BaseException:
            self._session.close()
            raise
        self._memory = torch.from_numpy(self._port.memory.bytes)
        self._pinned = self._device.type != "cpu" and self._pin()

    def _joined(self, timeout_s: float) -> Port:
        session = self._session
        port = Port(self._rank, session, (1 + _HALVES) * self._world * self._slot, timeout_s)
        addresses = self._told({peer: session.address(peer) for peer in self._peers})
        for peer in self._peers:
            session.connect(peer, addresses[peer][self._rank])
        session.start(port.pad, ())
        keys = self._told(session.register(0, port.memory.address, port.memory.nbytes))
        for peer in self._peers:
            session.bind(0, peer, keys[peer])
        distributed.barrier()
        return port

    @property
    def _peers(self) -> list[int]:
        """The other ranks, the next one first: not all put to the same one at once."""
        return [(self._rank + step) % self._world for step in range(1, self._world)]

    def _told(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._world
        distributed.all_gather_object(found, value)
        return found

    def _pin(self) -> bool:
        """Have a runtime that knows how pin the memory, without which copies to it are slow."""
        if not hasattr(self._module, "cudart"):
            return False
        memory, module = self._port.memory, self._module
        failed = module.cudart().cudaHostRegister(memory.address, memory.nbytes, 0)
        if int(failed) != 0:
            raise BackendUnavailable(f"cudaHostRegister of {memory.nbytes} bytes failed: {failed}")
        return True

    def __call__(self, arriving: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Send ``parts[rank]`` to each rank, and receive what it sends here in ``arriving[rank]``."""
        if capturing(self._module):
            raise Unsupported("the host exchanges what it puts: not in a graph")
        half = (1 + self._calls % _HALVES) * self._world
        self._calls += 1
        self._port.flush()  # of the call before: its sources are overwritten
        for peer in self._peers:
            nbytes = self._copied(parts[peer], peer)
            self._session.put(
                peer, 0, peer * self._slot, (half + self._rank) * self._slot, nbytes, self._rank, 1
            )
        arriving[self._rank].copy_(parts[self._rank])
        for peer in self._peers:
            self._port.wait(peer, self._calls, "exchange by puts of the host")
            whole = _bytes(arriving[peer])
            whole.copy_(self._slice(half + peer, whole.numel()), non_blocking=True)

    def _copied(self, part: torch.Tensor, slot: int) -> int:
        """Copy what a peer is to have to host memory; return how many bytes it is."""
        whole = _bytes(part.contiguous())
        self._slice(slot, whole.numel()).copy_(whole, non_blocking=True)
        self._finish()
        return whole.numel()

    def _slice(self, slot: int, nbytes: int) -> torch.Tensor:
        if nbytes > self._slot:
            raise ValueError(f"{nbytes} bytes for one rank; a slot has {self._slot}")
        return self._memory[slot * self._slot :][:nbytes]

    def _finish(self) -> None:
        if self._device.type != "cpu":
            self._module.current_stream().synchronize()

    def close(self) -> None:
        """Close the session, when no peer puts here any more. Collective."""
        self._finish()
        distributed.barrier()
        self._session.close()
        if self._pinned:
            self._module.cudart().cudaHostUnregister(self._port.memory.address)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class HostPuts(Contender):
    """The GEMM ops and AllReduce: a gather before torch's product; or a scatter of its rows behind it,
    their sums, and for an AllReduce a gather of these."""

    name = "host-puts"
    ops, ops_text = (*GEMMS, "all_reduce"), "for GEMM ops and sums"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or _unusable(problem)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._norm = AddAndNorm(problem)
        case, sizes = problem.case, problem.case.sizes
        self._rows = [len(each) for each in torch.arange(sizes["m"]).tensor_split(problem.world)]
        dtype = getattr(torch, case.dtype if problem.gathers else case.out_dtype)
        shape = sizes["m"], sizes["k" if problem.gathers else "n"]
        self._whole = torch.empty(shape, dtype=dtype, device=problem.device)
        own = self._rows[problem.rank]
        self._parts = self._whole.new_empty(problem.world, own, shape[1])
        self._exchange = PutExchange(problem, max(self._rows) * max(4, shape[1] * dtype.itemsize))

    def place(self, inputs: Inputs, outputs: Tensors) -> None:
        place_rows(self, inputs, outputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        if self.problem.gathers:
            self._gather(self._whole, inputs["a"])
            if "a_scale" in inputs:
                inputs = {**inputs, "a_scale": self._gathered_scales(inputs["a_scale"])}
            product(self._whole, inputs, out, fast=self.fast)
            return outputs
        if self.op == "gemm_reduce_scatter":
            product(inputs["a"], inputs, self._whole, fast=self.fast)
            self._scatter(self._whole, out)
            return outputs
        summed_rows(self, inputs, out)
        own = torch.split(out, self._rows)[self.problem.rank]
        self._scatter(out, own)
        self._gather(out, own)
        return self._norm(out, inputs)

    def _gather(self, out: torch.Tensor, share: torch.Tensor) -> None:
        self._exchange(torch.split(out, self._rows), [share] * self.problem.world)

    def _gathered_scales(self, scale: torch.Tensor) -> torch.Tensor:
        """Gather scales of all ranks' rows; a rank's single one is repeated for each of its rows."""
        world, rows = self.problem.world, self._rows
        if len(scale) != rows[self.problem.rank]:
            rows = [len(scale)] * world
        found = scale.new_empty(sum(rows), scale.shape[1])
        self._exchange(torch.split(found, rows), [scale] * world)
        repeats = torch.tensor(self._rows, device=scale.device)
        return found if rows is self._rows else found.repeat_interleave(repeats, 0)

    def _scatter(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._exchange(self._parts.unbind(), torch.split(rows, self._rows))
        torch.sum(self._parts, 0, out=out)

    def close(self) -> None:
        self._exchange.close()


class HostPutsByRank(DispatchedByRank):
    """Products of experts: tokens and sums by puts of the host, whose sizes it waits for."""

    name = "host-puts-by-rank"
    library = False

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        return super().unusable(problem) or _unusable(problem)

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        sizes = problem.case.sizes
        self._own = sizes["experts"] // problem.world
        row_bytes = max(
            2 * sizes.get("hidden", 0), 2 * sizes.get("features", 0), 8 * sizes["top_k"]
        )
        self._exchange = PutExchange(problem, sizes["tokens"] * row_bytes)

    def sent(self, inputs: Inputs) -> Dispatched:
        ids, world = inputs["topk_ids"].long(), self.problem.world
        owners = torch.where(ids < 0, world, ids // self._own)
        ranks = torch.arange(world, device=ids.device)
        wanted = (owners[:, :, None] == ranks).any(1)
        _, tokens = wanted.t().nonzero(as_tuple=True)  # by rank, then by token
        there = wanted.sum(0)
        here = torch.empty_like(there)
        self._exchange(torch.split(here, 1), torch.split(there, 1))
        sizes = there.tolist(), here.tolist()

        def moved(each: torch.Tensor) -> torch.Tensor:
            return self._moved(each[tokens], *sizes)

        local = moved(ids) - self.problem.rank * self._own
        scales = moved(inputs["x_scale"]) if "x_scale" in inputs else None
        rows = moved(plain(inputs["x"])).view(inputs["x"].dtype)
        # Where each token's sum of each rank comes home; the last row stands for none.
        places = torch.full_like(wanted, len(tokens), dtype=torch.int32).t().contiguous()
        places[wanted.t()] = torch.arange(len(tokens), dtype=torch.int32, device=ids.device)
        routing = Sorted(local, self._own, self.capacity)
        handle = (there, here, places.t().flatten().contiguous())
        return Dispatched(rows, scales, moved(inputs["topk_weights"].float()), routing, handle)

    def brought_home(self, sums: torch.Tensor, handle: tuple[torch.Tensor, ...]) -> torch.Tensor:
        there, here, places = handle
        rows = self._moved(sums, here.tolist(), there.tolist())
        ones = rows.new_ones(len(places) // self.problem.world, self.problem.world)
        count = torch.full((1,), len(rows), dtype=torch.int32, device=rows.device)
        return expert_rows.summed(rows, ones, places, count)

    def _moved(self, rows: torch.Tensor, there: list[int], here: list[int]) -> torch.Tensor:
        found = rows.new_empty(sum(here), rows.shape[1])
        self._exchange(torch.split(found, here), torch.split(rows, there))
        return found

    def close(self) -> None:
        self._exchange.close()
