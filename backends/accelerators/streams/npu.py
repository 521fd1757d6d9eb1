"""The part that only NPUs have: a limit on the cores that a stream's kernels use. Never run on an
NPU.

From torch_npu's public documentation: ``torch.npu.set_stream_limit(stream, cube_num, vector_num)``
applies to operators written in Ascend C that are put on the stream from then on;
``reset_stream_limit(stream)`` undoes it; ``get_device_limit(device)`` returns the number of cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NEEDED = ("set_stream_limit", "reset_stream_limit", "get_device_limit")


def missing(module: Any) -> str | None:
    """Return what ``torch.npu`` lacks, in words: a device, or functions that :func:`shared_cores`
    needs."""
    if not module.is_available():
        return "torch_npu sees no NPU"
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    return f"torch_npu is too old: torch.npu lacks {', '.join(lacking)}" if lacking else None


@contextmanager
def shared_cores(
    module: Any, device: torch.device, compute: Any, comm: Any, share: int
) -> Iterator[None]:
    """Reserve one in ``share`` vector cores for ``comm`` and the others for ``compute``; afterwards
    both may use all again.

    ``compute`` is the caller's own stream, so it must not stay limited. Everything that was put on
    the streams must have ended when the context is left.
    """
    cores = module.get_device_limit(device.index or 0)
    cubes, vectors = cores["cube_core_num"], cores["vector_core_num"]
    moving = max(1, vectors // share)
    try:
        module.set_stream_limit(comm, 1, moving)  # of 1 at least
        module.set_stream_limit(compute, cubes, max(1, vectors - moving))
        yield
    finally:
        module.reset_stream_limit(comm)
        module.reset_stream_limit(compute)
