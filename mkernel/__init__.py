"""mkernel: fused communication+compute kernels behind one Python API.

    import mkernel

    def step():
        world = mkernel.world()
        a = torch.randn(512, 2048, dtype=torch.float16)   # this rank's rows
        b = torch.randn(2048, 1024, dtype=torch.float16)
        return mkernel.all_gather_gemm(a, b)              # [512 * world.size, 1024]

    mkernel.launch(step, nodes=2, ranks_per_node=2)

``docs/architecture.md`` describes how a call travels through the packages below.

Modules are imported when one of their names is first used: importing torch takes a second, and
``mkernel plan`` does not need it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mkernel import errors

if find_spec("mkernel.backends.transport._transport") is None:
    from mkernel.unbuilt import import_installed

    import_installed(globals())

from mkernel.settings import Settings
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel import backends as backends
    from mkernel import conformance as conformance
    from mkernel import nn as nn
    from mkernel import topology as topology
    from mkernel.api import capabilities, plan
    from mkernel.async_tensor_parallel.enable import enable_async_tensor_parallel
    from mkernel.headers import include_dir
    from mkernel.launch import launch
    from mkernel.ops.all_gather_gemm import all_gather_gemm
    from mkernel.ops.all_reduce import all_reduce
    from mkernel.ops.gemm_all_reduce import gemm_all_reduce
    from mkernel.ops.gemm_reduce_scatter import gemm_reduce_scatter
    from mkernel.ops.invariant_mm import invariant_mm
    from mkernel.ops.moe import (
        MoeDispatch,
        MoeHandle,
        MoeQuantisedDispatch,
        moe_combine,
        moe_dispatch_gemm,
    )
    from mkernel.ops.moe_dispatch import MoeRows, moe_dispatch
    from mkernel.ops.moe_gemm_combine import moe_gemm_combine
    from mkernel.ops.ring_attention import ring_attention
    from mkernel.ops.symm_mem import (
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_matmul_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
    )
    from mkernel.ops.warm import warm
    from mkernel.ops.zigzag import zigzag_merge, zigzag_positions, zigzag_split
    from mkernel.plan.invariance import Invariant
    from mkernel.plan.model import LaunchPlan
    from mkernel.world.lifecycle import current as world
    from mkernel.world.lifecycle import (
        empty,
        finalize,
        graph_pool,
        init,
        is_initialized,
        shard,
        stats,
        synchronize,
    )
    from mkernel.world.statistics import Statistics
    from mkernel.world.world import World

__all__ = [
    "Invariant",
    "LaunchPlan",
    "MoeDispatch",
    "MoeHandle",
    "MoeQuantisedDispatch",
    "MoeRows",
    "Settings",
    "Statistics",
    "World",
    "__version__",
    "all_gather_gemm",
    "all_reduce",
    "capabilities",
    "empty",
    "enable_async_tensor_parallel",
    "errors",
    "finalize",
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "graph_pool",
    "include_dir",
    "init",
    "invariant_mm",
    "is_initialized",
    "launch",
    "moe_combine",
    "moe_dispatch",
    "moe_dispatch_gemm",
    "moe_gemm_combine",
    "plan",
    "ring_attention",
    "shard",
    "stats",
    "synchronize",
    "warm",
    "world",
    "zigzag_merge",
    "zigzag_positions",
    "zigzag_split",
]

HOMES = {
    "Invariant": "mkernel.plan.invariance",
    "LaunchPlan": "mkernel.plan.model",
    "MoeDispatch": "mkernel.ops.moe",
    "MoeHandle": "mkernel.ops.moe",
    "MoeQuantisedDispatch": "mkernel.ops.moe",
    "MoeRows": "mkernel.ops.moe_dispatch",
    "Statistics": "mkernel.world.statistics",
    "World": "mkernel.world.world",
    "all_gather_gemm": "mkernel.ops.all_gather_gemm",
    "all_reduce": "mkernel.ops.all_reduce",
    "capabilities": "mkernel.api",
    "empty": "mkernel.world.lifecycle",
    "enable_async_tensor_parallel": "mkernel.async_tensor_parallel.enable",
    "finalize": "mkernel.world.lifecycle",
    "fused_all_gather_matmul": "mkernel.ops.symm_mem",
    "fused_all_gather_scaled_matmul": "mkernel.ops.symm_mem",
    "fused_matmul_reduce_scatter": "mkernel.ops.symm_mem",
    "fused_scaled_matmul_reduce_scatter": "mkernel.ops.symm_mem",
    "gemm_all_reduce": "mkernel.ops.gemm_all_reduce",
    "gemm_reduce_scatter": "mkernel.ops.gemm_reduce_scatter",
    "graph_pool": "mkernel.world.lifecycle",
    "include_dir": "mkernel.headers",
    "init": "mkernel.world.lifecycle",
    "invariant_mm": "mkernel.ops.invariant_mm",
    "is_initialized": "mkernel.world.lifecycle",
    "launch": "mkernel.launch",
    "moe_combine": "mkernel.ops.moe",
    "moe_dispatch": "mkernel.ops.moe_dispatch",
    "moe_dispatch_gemm": "mkernel.ops.moe",
    "moe_gemm_combine": "mkernel.ops.moe_gemm_combine",
    "plan": "mkernel.api",
    "ring_attention": "mkernel.ops.ring_attention",
    "shard": "mkernel.world.lifecycle",
    "stats": "mkernel.world.lifecycle",
    "synchronize": "mkernel.world.lifecycle",
    "warm": "mkernel.ops.warm",
    "world": "mkernel.world.lifecycle",
    "zigzag_merge": "mkernel.ops.zigzag",
    "zigzag_positions": "mkernel.ops.zigzag",
    "zigzag_split": "mkernel.ops.zigzag",
}
"""The module that defines each of the other names; ranks are forked from a process that imported
all of them."""

SUBMODULES = frozenset({"backends", "conformance", "nn", "topology"})
"""Public packages that are available after ``import mkernel``; each is imported on first use."""


class _Package(ModuleType):
    """The module type of this package. ``launch``, ``plan`` and ``world`` are functions here and
    also names of submodules; the import system would replace the functions whenever it loads one of
    these."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle (used by Ray, for example) pickles plain modules: a
        script's function is pickled with the modules that it uses."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name):
        if name in SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "init":  # a FlopCounterMode counts the ops that are registered when it is made
            import_module("mkernel.ops")
        defined = "current" if name == "world" else name
        value = globals()[name] = getattr(import_module(HOMES[name]), defined)
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *SUBMODULES})
