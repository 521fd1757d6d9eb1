"""The smallest accelerator backend: AllGather+GEMM on the CPU, within one node."""

import ctypes
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from mkernel.backends.contracts.accelerator import AcceleratorBackend, Launch
from mkernel.backends.contracts.instrumented import Instrumented, InstrumentedLaunch, LaunchTimes
from mkernel.backends.contracts.memory import Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.standard import RowSchedule
from mkernel.topology.model import Accelerator


class TinyAccelerator(AcceleratorBackend, Instrumented):
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
            transfer_paths=("p2p",),
            peer_access=True,
            compute_cores=1,
            comm_cores=1,
            chunk_invariant=False,
        )

    def allocate(self, nbytes):
        return HostMemory.create(nbytes)

    def attach(self, descriptor):
        return HostMemory.attach(descriptor)

    def workspace(self, plan):
        """A rank's rows, for even and for odd epochs; a signal a reader, one a (chunk, source)."""
        world, k = plan.world_size, plan.gemm.k
        rows = plan.gemm.m // world
        nbytes = rows * k * getattr(torch, plan.dtype).itemsize
        chunks = -(-rows // plan.part(RowSchedule).rows_per_chunk)
        return Workspace(areas=(nbytes, nbytes), signals=world + world * chunks)

    def launch(self, call):
        return TinyLaunch(call)


class TinyLaunch(Launch, InstrumentedLaunch):
    _pool = ThreadPoolExecutor(8)

    def __init__(self, call):
        self._call = call
        self._seconds = {}
        comm = self._pool.submit(self._timed, "comm", send, call, None)
        before = comm if call.view == "sequential" else None
        self._kernels = [comm, self._pool.submit(self._timed, "compute", compute, call, before)]

    def _timed(self, name, kernel, call, before: Future | None):
        if before is not None:
            wait([before])
        start = time.perf_counter()
        kernel(call)
        self._seconds[name] = time.perf_counter() - start

    def wait(self, timeout_s):
        if wait(self._kernels, timeout_s).not_done:
            return False
        for kernel in self._kernels:
            kernel.result()  # raises what the kernel raised
        if self._call is not None and not _transport.pad_aborted(self._call.pad):
            move_on(self._call)
        self._call = None
        return True

    def times(self):
        return LaunchTimes(self._seconds)


def send(call):
    """The comm kernel: own rows, chunk by chunk, to where the peers read them."""
    a, mine = call.tensors["a"], shared_rows(call, call.workspace)
    for peer in call.peers:  # what this overwrites was sent two calls ago
        if call.epoch > 2 and not awaited(call, release_signal(peer), -1, peer, None):
            return
    for number, (start, end) in enumerate(chunks(call)):
        mine[start:end] = a[start:end]
        for peer in call.peers.values():
            _transport.pad_add(peer.pad, chunk_signal(call, call.rank, number), 1)


def compute(call):
    """The compute kernel: own rows first, then the others' as they arrive."""
    a, b, out = call.tensors["a"], call.tensors["b"].float(), call.tensors["out"]
    order = call.plan.order(call.plan.part(RowSchedule).order)
    sources = order[call.rank]
    if call.view == "sequential" and not all(
        awaited(call, chunk_signal(call, source, number), 1, source, number)
        for source in sources[1:]
        for number in range(len(chunks(call)))
    ):
        return
    for source in sources:
        rows = a if source == call.rank else shared_rows(call, call.peers[source].workspace)
        for number, (start, end) in enumerate(chunks(call)):
            signal = chunk_signal(call, source, number)
            if source != call.rank and not awaited(call, signal, 1, source, number):
                return
            at = source * len(a) + start
            out[at : at + end - start] = rows[start:end].float() @ b
            if "gathered" in call.tensors:
                call.tensors["gathered"][at : at + end - start] = rows[start:end]
        if source != call.rank:
            _transport.pad_add(call.peers[source].pad, release_signal(call.rank), 1)


def awaited(call, signal, amount, peer, chunk):
    """Wait until this call has added so much to a signal; -1: until the calls before it have added all
    but one. False after an abort or at the deadline, which also aborts: the kernel then returns."""
    if call.view == "compute_only":
        return True
    value = _transport.pad_expected(call.pad, signal) + amount
    who = _transport.Diagnosis()
    who.waiter = _transport.Waiter.compute_kernel
    who.peer, who.op = peer, call.number
    who.chunk = 0xFFFFFFFF if chunk is None else chunk
    return (
        _transport.pad_wait(call.pad, signal, value, call.timeout_s, who)
        == _transport.WaitResult.ok
    )


def shared_rows(call, workspace):
    """A rank's rows in its workspace, in the area that this call uses."""
    a = call.tensors["a"]
    at = workspace + call.areas[call.epoch % 2]
    memory = (ctypes.c_char * (a.numel() * a.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=a.dtype).view(a.shape)


def chunks(call):
    rows, step = len(call.tensors["a"]), call.plan.part(RowSchedule).rows_per_chunk
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


# All plans use the same signals. Each has one rank that adds to it, whatever the plan, and that rank's
# calls follow one another: what it adds for a later call never comes before what it adds for this one.


def release_signal(reader):
    return reader


def chunk_signal(call, source, number):
    return call.plan.world_size * (1 + number) + source


def move_on(call):
    """The call has ended: what each signal is expected to be before the next one."""
    for peer in call.peers:
        _transport.pad_move_on(call.pad, release_signal(peer), 1)
        for number in range(len(chunks(call))):
            _transport.pad_move_on(call.pad, chunk_signal(call, peer, number), 1)
