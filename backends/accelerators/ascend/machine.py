"""Machine descriptions for the timed model: what a modelled chip, its fabric and its NIC can do.

``machine.json`` beside this file is the default, and what plans know of the simulated chip. A user's
own file has the same fields; unknown fields and values out of range are refused.
Rates are GB/s (1e9 bytes a second) in one direction.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Finite

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend


FILE = Path(__file__).with_name("machine.json")


class Cube(Finite):
    """The matrix unit of an AIC core."""

    macs_per_cycle_16bit: float = Field(gt=0, description="multiply-adds a cycle, 16-bit inputs")
    macs_per_cycle_32bit: float = Field(gt=0, description="the same for float32 inputs")
    startup_cycles: float = Field(ge=0, description="cycles added to each matrix instruction")


class Vector(Finite):
    """The vector unit of an AIV core. All its instructions have one rate: an exponential or the sums
    of rows take as long as adding two tiles of that size."""

    bytes_per_cycle: float = Field(gt=0, description="of the float32 tile worked on")


class Pipes(Finite):
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


class Chip(Finite):
    """What the cores of a rank share."""

    memory_gbs: float = Field(gt=0, description="all loads and stores together: HBM through L2")
    launch_us: float = Field(ge=0, description="from the host's call to the first instruction")


class Fabric(Finite):
    """Links between the ranks of a node."""

    link_gbs: float = Field(gt=0, description="one ordered pair of ranks")
    link_latency_us: float = Field(ge=0)
    egress_gbs: float = Field(gt=0, description="all that a rank sends")
    ingress_gbs: float = Field(gt=0, description="all that a rank receives")
    signal_latency_us: float = Field(ge=0, description="from raising to being seen at a peer")


class NicModel(Finite):
    """The NIC of a node, shared by its ranks, each direction by itself."""

    gbs: float = Field(gt=0)
    latency_us: float = Field(ge=0, description="last byte sent to signal seen")
    proxy_us: float = Field(ge=0, description="command pushed to transfer started")


class Machine(Finite):
    """One kind of machine, as the timed model sees it."""

    name: str
    source: str = Field(description="where the numbers come from")
    clock_ghz: float = Field(gt=0)
    aic_cores: int = Field(ge=1)
    aiv_cores: int = Field(ge=1)
    cube: Cube
    vector: Vector
    pipes: Pipes
    chip: Chip
    fabric: Fabric
    nic: NicModel

    def native(self) -> _ascend.Machine:
        """The same numbers in the replay's units (ns, bytes a ns)."""
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
        made.memory_rate = self.chip.memory_gbs
        made.link_rate = self.fabric.link_gbs
        made.link_ns = self.fabric.link_latency_us * 1e3
        made.egress_rate = self.fabric.egress_gbs
        made.ingress_rate = self.fabric.ingress_gbs
        made.proxy_ns = self.nic.proxy_us * 1e3
        made.nic_rate = self.nic.gbs
        made.nic_ns = self.nic.latency_us * 1e3
        return made

    def constants(self) -> MachineConstants:
        """What the planner needs of it, so that a plan predicts and a simulation models the same
        machine."""

        def tflops(macs_per_cycle: float) -> float:
            return round(2e-3 * macs_per_cycle * self.clock_ghz, 1)

        return MachineConstants(
            name="ascend",
            source=f"{self.name}, the machine description of the ascend backend; not measured here",
            float16_tflops_per_core=tflops(self.cube.macs_per_cycle_16bit),
            bfloat16_tflops_per_core=tflops(self.cube.macs_per_cycle_16bit),
            float32_tflops_per_core=tflops(self.cube.macs_per_cycle_32bit),
            memory_gbs=self.chip.memory_gbs,
            p2p_gbs=self.fabric.link_gbs,
            p2p_latency_us=self.fabric.link_latency_us,
            nic_gbs=self.nic.gbs,
            nic_latency_us=self.nic.proxy_us + self.nic.latency_us,
            comm_block_gbs=self.pipes.mte3_gbs,
            signal_us=self.fabric.signal_latency_us,
            launch_us=self.chip.launch_us,
        )


def load_machine(path: str | Path | None = None) -> Machine:
    """A machine description; ``None``: the A3-class default. InputFileError names the bad field."""
    return machine() if path is None else Machine.from_file(Path(path), "machine description")


@cache
def machine() -> Machine:
    """The default; read once."""
    return Machine.from_file(FILE, "machine description")
