"""The smallest accelerator backend: AllGather+GEMM on the CPU, within a node and between nodes."""

import torch

from mkernel.backends.contracts.memory import Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_kernels import HostAccelerator, Signals
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.standard import RowSchedule
from mkernel.topology.model import Accelerator


class TinyAccelerator(HostAccelerator):
    name = "tiny"

    def status(self):
        return Status(True, "torch on the CPU")

    def probe(self):
        return (Accelerator(id="tiny0", kind="cpu", name="tiny", index=0, emulated=True),)

    def capabilities(self):
        return AcceleratorCapabilities(
            ops=("all_gather_gemm",),
            dtypes=("float16", "bfloat16", "float32"),
            out_dtypes=("float32", "float16", "bfloat16"),
            b_layouts=("row", "column"),
            alignment_bytes=1,
            transfer_paths=("p2p", "nic"),
            peer_access=True,
            compute_cores=1,
            comm_cores=1,
        )

    def workspace(self, plan):
        """All rows of A, for even and for odd epochs; a signal a reader, one a (chunk, source)."""
        nbytes = plan.gemm.m * plan.gemm.k * getattr(torch, plan.dtype).itemsize
        signals = plan.world_size * (1 + len(chunks(plan)))
        return Workspace(areas=(nbytes, nbytes), signals=signals)

    def signals(self, call):
        peers = [peer for peer in range(call.plan.world_size) if peer != call.rank]
        numbers = range(len(chunks(call.plan)))
        arrivals = [(arrival(call, peer, number), peer) for number in numbers for peer in peers]
        return Signals(arrivals, releases=[(peer, peer) for peer in peers])

    def communicate(self, kernel):
        """Own rows, chunk by chunk, to every peer."""
        mine = gathered(kernel)[kernel.rank]
        for peer in kernel.peers:  # what this overwrites was sent two calls ago
            kernel.wait(peer, peer, amount=-1)
        for number, rows in enumerate(chunks(kernel.call.plan)):
            mine[rows] = kernel.call.tensors["a"][rows]
            for peer in kernel.peers:
                kernel.put(peer, mine[rows], arrival(kernel.call, kernel.rank, number))

    def compute(self, kernel):
        """Own rows first, then the others' as they arrive."""
        call, tensors = kernel.call, kernel.call.tensors
        b, out = tensors["b"].float(), tensors["out"].chunk(call.plan.world_size)
        order = call.plan.order(call.plan.part(RowSchedule).order)
        for source in order[call.rank]:
            a = tensors["a"] if source == call.rank else gathered(kernel)[source]
            for number, rows in enumerate(chunks(call.plan)):
                if source != call.rank:
                    kernel.wait(arrival(call, source, number), source, number)
                out[source][rows] = a[rows].float() @ b
                if "gathered" in tensors:
                    tensors["gathered"].view(-1, *a.shape)[source][rows] = a[rows]
            if source != call.rank:
                kernel.tell(source, kernel.rank)


def gathered(kernel):
    """[ranks, rows, K]: every rank's rows, in the area that this call uses."""
    a = kernel.call.tensors["a"]
    return kernel.area((kernel.call.plan.world_size, *a.shape), a.dtype)


def chunks(plan):
    """A rank's rows, as slices."""
    rows, step = plan.gemm.m // plan.world_size, plan.part(RowSchedule).rows_per_chunk
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


# All plans use the same signals. Each has one rank that adds to it, whatever the plan, and that rank's
# calls follow one another: what it adds for a later call never comes before what it adds for this one.
# The first ones, a rank each, are those by which that rank has read this rank's rows.


def arrival(call, source, number):
    return call.plan.world_size * (1 + number) + source
