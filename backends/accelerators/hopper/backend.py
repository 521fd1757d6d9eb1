"""The hopper backend: persistent kernels on GPUs of compute capability 9.0, over NVLink and NICs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, get_args

from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.capabilities import (
    MOE,
    MOST_RANKS,
    OPS,
    PREFETCHES,
    fused_scale_modes,
    library_ops,
    one_node_ops,
    ops,
    scale_modes,
)
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.native import ARCHITECTURE
from mkernel.backends.accelerators.cuda.native_kernels import missing
from mkernel.backends.accelerators.cuda.settings import CudaSettings
from mkernel.backends.accelerators.hopper.attention import tuning as attention_tuning
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.backends.accelerators.hopper.moe import tuning as moe_tuning
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import Activation, AttentionShape, LaunchPlan
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.settings import load_as

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.cuda.dispatch import Executor


class HopperAccelerator(CudaAccelerator):
    """The backend for GPUs of compute capability 9.0."""

    name: ClassVar[str] = "hopper"
    preference: ClassVar[int] = 20
    settings: ClassVar[type[CudaSettings]] = HopperSettings
    devices: ClassVar[str] = "9.0"
    remedy: ClassVar[str] = "use accelerator streams, or an H100"

    def __init__(self) -> None:
        """Make the backend without starting anything."""
        super().__init__()
        self._capabilities: AcceleratorCapabilities | None = None

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        """Return whether wgmma is there."""
        return capability == ARCHITECTURE

    @staticmethod
    def executor_of(plan: LaunchPlan) -> type[Executor]:
        """Return the executor of the plan's calls. Unsupported."""
        from mkernel.backends.accelerators.hopper.dispatch import executor_of

        return executor_of(plan)

    def capabilities(self) -> AcceleratorCapabilities:
        """Return the capabilities: the GEMM ops, AllReduce, MoE and ring attention in half
        precision; for e4m3 operands the GEMM ops on the library path, and fused where sums with
        fewer bits are allowed, and the products of MoE in worlds of one node."""
        if self._capabilities is None:
            found = [] if missing() is not None else self.found()
            processors = found[0].multiprocessors if found else machine().cores
            most = load_as(HopperSettings).multiprocessors
            processors = min(processors, most or processors)
            self._capabilities = AcceleratorCapabilities(
                ops=ops(),
                dtypes=("bfloat16", "float16"),
                out_dtypes=("bfloat16", "float16"),
                mixed_dtypes=False,
                rounded_partials=True,
                b_layouts=("row", "column"),
                pitched=("a", "b"),
                packed_shards=True,
                adds_bias=True,
                adds_norm=True,
                quantises_norms=True,
                scale_modes=scale_modes(),
                fused_scale_modes=fused_scale_modes(),
                fused_float32_scale_modes=fused_scale_modes(),
                scaled_experts=True,
                alignment_bytes=16,
                transfer_paths=("p2p", "nic", "staged"),
                peer_access=True,
                multicast=False,
                compute_cores=processors,
                comm_cores=processors,
                most_cores=most,
                sums_in_rank_order=False,
                most_ranks=MOST_RANKS,
                stream_ordered=True,
                settles_puts=True,
                library_ops=library_ops(),
                hierarchical_ops=OPS,
                one_node_ops=one_node_ops(),
                prefetch_ops=PREFETCHES,
                far_returns=("ranks",),
                routing_of_ids=True,
                reuses_routing="in_one_node",
                head_dims=machine().attention.head_dims,
                positions=machine().attention.positions,
                activations=get_args(Activation),
                attention_layouts=("heads", "positions"),
                documents=("ring_attention",),
                kinds=("cuda",),
                architectures=(f"sm_{ARCHITECTURE[0]}{ARCHITECTURE[1]}",),
                constants=machine().constants,
            )
        return self._capabilities

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Choose tiles, chunks and who pushes them; on the library path, what is sent and how."""
        if isinstance(request.plan.shape, AttentionShape):
            return attention_tuning.schedule(request)
        if request.plan.op in MOE:
            return moe_tuning.schedule(request)
        return tuning.schedule(request)

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """Return the words of the ids of all ranks, of tables for the device, and of the number of
        rows of the outputs (kernels/moe/tables.cuh)."""
        from mkernel.backends.accelerators.hopper.moe.executors import sizes_of

        words: int = sizes_of(world, tokens, top_k, experts).table_words()
        return words

    def dispatched_rows(self, routing: torch.Tensor) -> int | None:
        """Return the number of rows of a dispatch of this process."""
        from mkernel.backends.accelerators.hopper.moe.executors import known_height

        return known_height(routing)
