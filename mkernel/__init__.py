"""mkernel: fused communication+compute kernels behind one Python API.

    import mkernel

    def step():
        world = mkernel.world()
        a = torch.randn(512, 2048, dtype=torch.float16)   # this rank's rows
        b = torch.randn(2048, 1024, dtype=torch.float16)
        return mkernel.all_gather_gemm(a, b)              # [512 * world.size, 1024]

    mkernel.launch(step, nodes=2, ranks_per_node=2)

``docs/architecture.md`` says how a call travels through the packages below.
"""

from mkernel import errors
from mkernel.api import capabilities, plan
from mkernel.current import current as world
from mkernel.current import empty, finalize, init, is_initialized, synchronize
from mkernel.launch import launch
from mkernel.ops.all_gather_gemm import all_gather_gemm
from mkernel.ops.gemm_all_reduce import gemm_all_reduce
from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
from mkernel.ops.moe import MoeDispatch, MoeHandle, moe_combine, moe_dispatch_gemm
from mkernel.ops.ring_attention import ring_attention, zigzag_positions
from mkernel.plan.model import LaunchPlan
from mkernel.settings import Settings
from mkernel.world import World

__version__ = "0.1.0"

__all__ = [
    "LaunchPlan",
    "MoeDispatch",
    "MoeHandle",
    "Settings",
    "World",
    "__version__",
    "all_gather_gemm",
    "capabilities",
    "empty",
    "errors",
    "finalize",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "init",
    "is_initialized",
    "launch",
    "moe_combine",
    "moe_dispatch_gemm",
    "plan",
    "ring_attention",
    "synchronize",
    "world",
    "zigzag_positions",
]
