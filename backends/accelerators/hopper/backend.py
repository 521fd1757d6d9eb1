"""The hopper backend: persistent kernels on GPUs of compute capability 9.0, over NVLink and NICs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, get_args

from mkernel.backends.accelerators.cuda import native_kernels
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.capabilities import (
    HOPPER,
    MOE,
    OPS,
    SUMS,
    fused_scale_modes,
    ops,
)
from mkernel.backends.accelerators.cuda.settings import CudaSettings
from mkernel.backends.accelerators.hopper.attention import tuning as attention_tuning
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.backends.accelerators.hopper.moe import tuning as moe_tuning
from mkernel.backends.accelerators.hopper.settings import HopperSettings
from mkernel.backends.contracts.status import Status
from mkernel.errors import INSTALL_AGAIN
from mkernel.plan.model import Activation, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda.dispatch import Executor


class HopperAccelerator(CudaAccelerator):
    """The backend for GPUs of compute capability 9.0."""

    name: ClassVar[str] = "hopper"
    preference: ClassVar[int] = 20
    devices: ClassVar[str] = "9.0"
    remedy: ClassVar[str] = "use accelerator cuda or streams, or an H100"
    tunings = tuning.schedule, attention_tuning.schedule, moe_tuning.schedule
    settings: ClassVar[type[CudaSettings]] = HopperSettings

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        """Return whether its kernels run on devices of that compute capability."""
        return capability == HOPPER

    @staticmethod
    def missing() -> Status | None:
        """Return what prevents its kernels from running here; None if nothing does."""
        lacking = native_kernels.missing()
        if lacking is not None or native_kernels.native().HOPPER:
            return lacking
        return Status(False, "built without its kernels", f"{INSTALL_AGAIN} and MKERNEL_HOPPER=ON")

    @staticmethod
    def executor_of(plan: LaunchPlan) -> type[Executor]:
        """Return the executor of the plan's calls. Unsupported."""
        from mkernel.backends.accelerators.hopper.dispatch import executor_of

        return executor_of(plan)

    def claimed(self) -> dict[str, Any]:
        """Return also the ops of kernels with wgmma, and what these do."""
        return {
            "ops": ops(),
            "architectures": ("sm_90",),
            "only_library_ops": (),
            "invariant_ops": (*OPS, *SUMS, *MOE, "ring_attention"),
            "fused_scale_modes": fused_scale_modes(),
            "fused_float32_scale_modes": fused_scale_modes(),
            "scaled_experts": True,
            "hierarchical_ops": (*OPS, *MOE, "ring_attention"),
            "activations": get_args(Activation),
        }
