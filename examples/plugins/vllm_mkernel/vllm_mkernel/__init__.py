"""A general plug-in of vLLM: row-parallel and sequence-parallel products by mkernel's fused ops.

``register``: what vLLM calls in each of its processes. ``layers``: the row-parallel layer. ``fusion``:
the pass for norms and sequence parallelism. ``ops``: the custom ops that both put into the program.
"""

from vllm.logger import init_logger
from vllm.version import __version_tuple__

WRITTEN_FOR = (0, 33)
"""The minor version of vLLM whose interface this package knows."""

logger = init_logger("vllm.mkernel")


def register() -> None:
    """Replace vLLM's row-parallel layer, as often as vLLM calls this in a process.

    Where vLLM has another version than this package was written for, or another plug-in has replaced
    the layer already, a warning says so and everything stays vLLM's own.
    """
    if __version_tuple__[:2] != WRITTEN_FOR:
        logger.warning(
            "vllm_mkernel replaces nothing: it was written for vLLM %s, and this is %s",
            ".".join(map(str, WRITTEN_FOR)),
            ".".join(map(str, __version_tuple__[:3])),
        )
        return
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.linear import RowParallelLinear

    from vllm_mkernel.layers import FusedRowParallelLinear

    present = op_registry_oot.get(RowParallelLinear.__name__)
    if present is None:
        RowParallelLinear.register_oot(FusedRowParallelLinear)
    elif present is not FusedRowParallelLinear:
        logger.warning(
            "vllm_mkernel replaces nothing: %s of another plug-in has replaced %s; leave that plug-in "
            "out of VLLM_PLUGINS to use this one",
            present.__qualname__,
            RowParallelLinear.__name__,
        )
