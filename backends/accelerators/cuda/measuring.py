"""Measurement of the constants of a CUDA card: its products, memory, copies and exchanges.

Rates are those of a busy device: each work is repeated until it takes long enough, and the median of
three such runs counts. Constants that nothing here measures, such as the fits of each way to run an op,
are those of the device's card, multiplied by the ratio of the measured rate that bounds them to the
card's (:func:`.chips.ratios_by`).
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.chips import ratios_by, scaled
from mkernel.errors import BackendUnavailable
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator
from mkernel.topology.sources.chips import architecture, capability, cores, product
from mkernel.topology.world_map import constants_of

_LONG_ENOUGH_S = 0.1
_DEADLINE_S = 60.0
_PAUSE_S = 0.0005
_E4M3 = (8, 9)
"""The first compute capability whose devices multiply e4m3 operands."""


class Rates(NamedTuple):
    """Measured rates of a device: TFLOP/s of products, GB/s of memory (bytes read and written), of a
    copy through pinned host memory, of an exchange with one peer, of copies to all peers together; the
    microseconds of a small copy to a peer. None: there is none, or it was not measured."""

    bfloat16: float
    float16: float
    float32: float
    float8: float | None
    memory_gbs: float
    host_gbs: float
    link_gbs: float | None = None
    egress_gbs: float | None = None
    link_us: float | None = None


def measured(devices: Sequence[Accelerator], every: Sequence[MachineConstants]) -> MachineConstants:
    """Measure the first of this process's devices. ``every``: constants of known cards, of which the
    device's is taken, else the first. BackendUnavailable: a device does not answer."""
    first, peers = devices[0], devices[1:]
    reached = [one for one in peers if torch.cuda.can_device_access_peer(first.index, one.index)]
    found = rates(
        torch.device("cuda", first.index),
        [torch.device("cuda", one.index) for one in reached],
        e4m3=(capability(first) or (0, 0)) >= _E4M3,
    )
    return constants(constants_of([first], every) or every[0], first, found)


def constants(base: MachineConstants, device: Accelerator, found: Rates) -> MachineConstants:
    """Return the constants of a device by its measured rates; all else is that of ``base``, as far as
    a rate bounds it in proportion."""
    known, count = base.cores or 1, cores(device) or base.cores or 1
    half = found.bfloat16 / (base.bfloat16_tflops_per_core * known)
    e4m3 = half
    if found.float8 and base.float8_tflops_per_core:
        e4m3 = found.float8 / (base.float8_tflops_per_core * known)
    link = (found.egress_gbs or base.p2p_gbs) / (base.egress_gbs or base.p2p_gbs)
    ratios = ratios_by(
        cores=count / known,
        half=half,
        e4m3=e4m3,
        float32=found.float32 / (base.float32_tflops_per_core * known),
        memory=found.memory_gbs / base.memory_gbs,
        link=link,
    )
    chip = architecture(device)
    alike = chip is None or chip in base.architectures
    tree = scaled(base.model_dump(), ratios) | {
        "name": f"measured on {platform.node() or 'this machine'}",
        "source": _source(base, device, count, found),
        "products": base.products if alike else (product(device),),
        "architectures": base.architectures if alike else (chip,),
        "cores": count,
        "measured": True,
        "fitted_to": (),
        "bfloat16_tflops_per_core": found.bfloat16 / count,
        "float16_tflops_per_core": found.float16 / count,
        "float32_tflops_per_core": found.float32 / count,
        "float8_tflops_per_core": found.float8 and found.float8 / count,
        "memory_gbs": found.memory_gbs,
        "host_gbs": found.host_gbs,
    }
    if found.link_gbs and found.link_us:
        tree |= {
            "p2p_gbs": found.link_gbs,
            "copy_engine_gbs": found.link_gbs,
            "egress_gbs": found.egress_gbs,
            "p2p_latency_us": found.link_us,
        }
    made = MachineConstants.model_validate(tree)
    return made if alike else made.by_flags()


def _source(base: MachineConstants, device: Accelerator, count: int, found: Rates) -> str:
    clock = f" at {device.clock_mhz:g} MHz" if device.clock_mhz else ""
    memory = f", memory of {device.memory_gbs:g} GB/s" if device.memory_gbs else ""
    links = "copies and exchanges with peers" if found.link_gbs else "no peer in reach"
    return (
        f"{product(device)} ({count} multiprocessors{clock}{memory}, as the driver says), torch "
        f"{torch.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}: random products, memory, "
        f"host memory, {links}; all else is that of {base.name}, in proportion to these"
    )


def rates(
    device: torch.device,
    peers: Sequence[torch.device],
    *,
    e4m3: bool,
    size: int = 8192,
    nbytes: int = 256 << 20,
) -> Rates:
    """Measure a device, and its exchanges with ``peers``, whose memory it reaches. ``size``: rows,
    columns and K of products; ``nbytes``: of a copy. BackendUnavailable: it does not answer."""
    clock = _Clock([device, *peers])
    a, b = (torch.randn(size, size, device=device) for _ in range(2))

    def tflops(multiply: Callable[[], object]) -> float:
        return 2 * size**3 / clock.seconds(multiply) / 1e12

    def product_tflops(dtype: torch.dtype) -> float:
        one, other = a.to(dtype), b.to(dtype)
        return tflops(lambda: torch.mm(one, other))

    def e4m3_tflops() -> float:
        scale = torch.ones((), device=device)
        one, other = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        wide = torch.bfloat16
        return tflops(
            lambda: torch._scaled_mm(one, other, scale_a=scale, scale_b=scale, out_dtype=wide)
        )

    own = torch.ones(nbytes, dtype=torch.uint8, device=device)
    copied = torch.empty_like(own)
    found = Rates(
        bfloat16=product_tflops(torch.bfloat16),
        float16=product_tflops(torch.float16),
        float32=product_tflops(torch.float32),
        float8=e4m3_tflops() if e4m3 else None,
        memory_gbs=2 * nbytes / clock.seconds(lambda: copied.copy_(own)) / 1e9,
        host_gbs=_host_gbs(clock, own, copied),
    )
    if not peers:
        return found
    there = [torch.empty(nbytes, dtype=torch.uint8, device=peer) for peer in peers]
    gone, back = clock.copy(own, there[0]), clock.copy(torch.empty_like(there[0]), copied)
    exchange_s = clock.seconds(lambda: (gone(), back()))
    leaving = [clock.copy(own, one) for one in there]
    egress_s = clock.seconds(lambda: [copy() for copy in leaving])
    small = clock.copy(own[:4096], there[0][:4096])
    return found._replace(
        link_gbs=nbytes / exchange_s / 1e9,
        egress_gbs=len(peers) * nbytes / egress_s / 1e9,
        link_us=1e6 * clock.seconds(small),
    )


def _host_gbs(clock: _Clock, own: torch.Tensor, other: torch.Tensor) -> float:
    """Return the rate of what rests in pinned host memory: copies there and back at the same time, and
    one thread's copy between, of which the slowest counts."""
    pinned = own.device.type == "cuda"
    up, down = (torch.empty(len(own), dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    away, home = clock.copy(own, up), clock.copy(down, other)
    both_s = clock.seconds(lambda: (away(), home()))
    down_at, up_at, nbytes = down.data_ptr(), up.data_ptr(), len(own)
    between_s = clock.seconds(lambda: ctypes.memmove(down_at, up_at, nbytes))
    return nbytes / max(both_s, between_s) / 1e9


class _Clock:
    """Times works whose effects on devices are awaited."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [one for one in devices if one.type == "cuda"]
        self._streams = [torch.cuda.default_stream(one) for one in self._devices]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Return a function that copies on streams of its own, beside others."""
        devices = {one.device for one in (target, source) if one.device.type == "cuda"}
        streams = [torch.cuda.Stream(one) for one in devices]  # type: ignore[no-untyped-call]
        self._streams += streams

        def start() -> None:
            with ExitStack() as stack:
                for stream in streams:
                    context: Any = torch.cuda.stream(stream)
                    stack.enter_context(context)
                target.copy_(source, non_blocking=True)

        return start

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median time of one run of ``work`` among many, on the current streams or others.
        BackendUnavailable: a device is not done in time."""
        with self._on_first():
            work()
            count, taken = 1, self._run(work, 1)
            while taken < _LONG_ENOUGH_S and count < 1 << 16:
                count *= 2
                taken = self._run(work, count)
            return statistics.median([taken, *(self._run(work, count) for _ in range(2))]) / count

    def _on_first(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._devices[0]) if self._devices else nullcontext()

    def _run(self, work: Callable[[], object], count: int) -> float:
        self._await()
        start = time.perf_counter()
        for _ in range(count):
            work()
        self._await()
        return time.perf_counter() - start

    def _await(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        for stream in self._streams:
            while not stream.query():
                if time.monotonic() > deadline:
                    raise BackendUnavailable(
                        f"{stream.device} was not done with what is measured within {_DEADLINE_S:g} s; "
                        "is it used by others (`nvidia-smi`)?"
                    )
                time.sleep(_PAUSE_S)
