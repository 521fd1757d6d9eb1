"""Machine descriptions for the timed model: the rates and latencies of a modelled chip, its fabric
and its NIC.

``machine.json`` beside this file is the default, and holds the constants of the simulated chip that
plans use. A user's own file has the same fields; unknown fields and values out of range are
refused.

Rates are GB/s (1e9 bytes a second) in one direction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from mkernel.backends.accelerators.ascend.settings import AscendSettings
from mkernel.errors import ArgumentError
from mkernel.settings import load_as
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Model
from mkernel.topology.routes import RouteTable

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend


FILE = Path(__file__).with_name("machine.json")


class Cube(Model):
    """The matrix unit of an AIC core."""

    macs_per_cycle_16bit: float = Field(gt=0, description="multiply-adds a cycle, 16-bit inputs")
    macs_per_cycle_32bit: float = Field(gt=0, description="the same for float32 inputs")
    startup_cycles: float = Field(ge=0, description="cycles added to each matrix instruction")


class Vector(Model):
    """The vector unit of an AIV core. All its instructions have one rate: an exponential or row
    sums take as long as adding two tiles of that size."""

    bytes_per_cycle: float = Field(gt=0, description="of the float32 tile worked on")


class Pipes(Model):
    """Rates and latencies of one core's pipes."""

    issue_ns: float = Field(ge=0, description="time the scalar pipe takes to issue an instruction")
    scalar_ns: float = Field(
        ge=0, description="a scalar load or store of memory through the core's cache, in the mean"
    )
    mte1_gbs: float = Field(gt=0, description="L1 to L0A/L0B")
    mte1_latency_ns: float = Field(ge=0)
    mte2_gbs: float = Field(gt=0, description="memory to L1, one core, through the L2 cache")
    fix_gbs: float = Field(gt=0, description="L0C to memory, one core")
    mte3_gbs: float = Field(gt=0, description="one AIV core's puts, if no link is slower")
    memory_latency_ns: float = Field(ge=0, description="of a load or store; overlaps with others")


class Shared(Model):
    """The resources that the cores of a rank share."""

    l2_gbs: float = Field(gt=0, description="all loads and stores together")
    hbm_gbs: float = Field(gt=0, description="what is read of a call's inputs for the first time")
    launch_us: float = Field(ge=0, description="from the host's call to the first instruction")


class Fabric(Model):
    """Links between the ranks of a node."""

    link_gbs: float = Field(gt=0, description="one ordered pair of ranks, as it is rated")
    efficiency: float = Field(gt=0, le=1, description="the share of rated links that transfers get")
    link_latency_us: float = Field(ge=0)
    egress_gbs: float = Field(gt=0, description="all that a rank sends, rated")
    ingress_gbs: float = Field(gt=0, description="all that a rank receives, rated")
    signal_latency_us: float = Field(ge=0, description="from raising to being seen at a peer")

    @property
    def link_rate(self) -> float:
        """The GB/s that one ordered pair of ranks gets."""
        return self.link_gbs * self.efficiency

    @property
    def egress_rate(self) -> float:
        """The GB/s that a rank sends in all."""
        return self.egress_gbs * self.efficiency

    @property
    def ingress_rate(self) -> float:
        """The GB/s that a rank receives in all."""
        return self.ingress_gbs * self.efficiency


class NicModel(Model):
    """The NIC of a node, shared by its ranks; each direction has its own rate."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0, description="last byte sent to signal seen")
    proxy_us: float = Field(ge=0, description="command pushed to transfer started")


class Chip(Model):
    """A chip of the same kind with other numbers of cores."""

    name: str
    aic_cores: int = Field(ge=1)
    aiv_cores: int = Field(ge=1)


class Machine(Model):
    """One kind of machine, as the timed model sees it."""

    name: str
    source: str = Field(description="where the numbers come from")
    clock_ghz: float = Field(gt=0)
    aic_cores: int = Field(ge=1)
    aiv_cores: int = Field(ge=1)
    cube: Cube
    vector: Vector
    pipes: Pipes
    chip: Shared
    fabric: Fabric
    nic: NicModel
    chips: dict[str, Chip] = Field(
        default_factory=dict, description="chips by the name that the setting `machine` gives"
    )

    def with_nics_of(self, routes: RouteTable) -> Machine:
        """Return this machine with NICs as fast as a node's rails together; the slowest node
        counts."""
        rails = {
            (route.src_site, rail.src_nic): rail.bandwidth_gbs
            for route in routes.classes
            for rail in route.rails
        }
        if not rails:
            return self
        nodes = {site for site, _ in rails}
        gbs = min(sum(rate for (site, _), rate in rails.items() if site == node) for node in nodes)
        return self.model_copy(update={"nic": self.nic.model_copy(update={"gbs": gbs})})

    def native(self) -> _ascend.Machine:
        """Return the same numbers in the replay's units (ns, bytes per ns)."""
        from mkernel.backends.accelerators.ascend import _ascend

        made = _ascend.Machine()
        made.launch_ns = self.chip.launch_us * 1e3
        made.issue_ns = self.pipes.issue_ns
        made.scalar_ns = self.pipes.scalar_ns
        made.signal_ns = self.fabric.signal_latency_us * 1e3
        made.macs_per_ns_16 = self.cube.macs_per_cycle_16bit * self.clock_ghz
        made.macs_per_ns_32 = self.cube.macs_per_cycle_32bit * self.clock_ghz
        made.matmul_ns = self.cube.startup_cycles / self.clock_ghz
        made.extract_rate = self.pipes.mte1_gbs
        made.extract_ns = self.pipes.mte1_latency_ns
        made.vector_rate = self.vector.bytes_per_cycle * self.clock_ghz
        made.load_rate = self.pipes.mte2_gbs
        made.store_rate = self.pipes.fix_gbs
        made.put_rate = self.pipes.mte3_gbs
        made.memory_ns = self.pipes.memory_latency_ns
        made.memory_rate = self.chip.l2_gbs
        made.hbm_rate = self.chip.hbm_gbs
        made.link_rate = self.fabric.link_rate
        made.link_ns = self.fabric.link_latency_us * 1e3
        made.egress_rate = self.fabric.egress_rate
        made.ingress_rate = self.fabric.ingress_rate
        made.proxy_ns = self.nic.proxy_us * 1e3
        made.nic_rate = self.nic.gbs
        made.nic_ns = self.nic.latency_us * 1e3
        return made

    def constants(self) -> MachineConstants:
        """Return the constants that the planner needs, so that a plan predicts and a simulation
        models the same machine."""

        def tflops(macs_per_cycle: float) -> float:
            return round(2e-3 * macs_per_cycle * self.clock_ghz, 1)

        return MachineConstants(
            name="ascend",
            source=f"{self.name}, machine description {self.fingerprint[:8]} of the ascend backend; "
            "not measured here",
            float16_tflops_per_core=tflops(self.cube.macs_per_cycle_16bit),
            bfloat16_tflops_per_core=tflops(self.cube.macs_per_cycle_16bit),
            float32_tflops_per_core=tflops(self.cube.macs_per_cycle_32bit),
            memory_gbs=self.chip.l2_gbs,
            p2p_gbs=round(self.fabric.link_rate, 2),
            p2p_latency_us=self.fabric.link_latency_us,
            nic_gbs=self.nic.gbs,
            nic_latency_us=self.nic.proxy_us + self.nic.latency_us,
            comm_block_gbs=self.pipes.mte3_gbs,
            signal_us=self.fabric.signal_latency_us,
            launch_us=self.chip.launch_us,
        )


def load_machine(which: str | Path | None = None) -> Machine:
    """Load a machine description: the name of a chip of the default file, or a file. ``None``: the
    setting ``machine``, by default the A3-class chip.

    Raises:
        ArgumentError: it is neither the name of a chip nor of a file.
        InputFileError: names the bad field.
    """
    if which is None:
        return machine()
    if isinstance(which, str):
        if which in _default().chips:
            return _chip(which)
        if not Path(which).suffix and not os.path.lexists(which):
            known = ", ".join(_default().chips)
            raise ArgumentError("machine", repr(which), f"a file, or one of: {known}")
    return Machine.from_file(Path(which), "machine description")


def machine() -> Machine:
    """Return the machine that :func:`using` set, or else that of the setting ``machine``."""
    return _given.get() or load_machine(load_as(AscendSettings).machine)


@contextmanager
def using(described: Machine) -> Iterator[None]:
    """Make plans and models inside the context use this machine."""
    token = _given.set(described)
    try:
        yield
    finally:
        _given.reset(token)


_given: ContextVar[Machine | None] = ContextVar("machine", default=None)


@cache
def _default() -> Machine:
    return Machine.from_file(FILE, "machine description")


@cache
def _chip(name: str) -> Machine:
    return _default().model_copy(update=dict(_default().chips[name]))
