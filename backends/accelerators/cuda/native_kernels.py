"""The kernels' native module ``_kernels``, and the reasons why it may be missing."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda import native as cuda
from mkernel.backends.contracts.status import Status
from mkernel.errors import BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType


@cache
def native() -> ModuleType:
    """Return the module ``_kernels``. BackendUnavailable if it was not built."""
    try:
        from mkernel.backends.accelerators.cuda import _kernels
    except ImportError as error:
        raise BackendUnavailable(f"the CUDA kernels do not import: {error}") from error
    return _kernels


def missing() -> Status | None:
    """Return what prevents the kernels from running here; None if nothing does."""
    try:
        native()
    except BackendUnavailable as error:
        return cuda.not_built(error)
    return cuda.missing()
