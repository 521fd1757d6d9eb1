"""Pinned host memory that a GPU's kernels access and a NIC registers, at the same addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.native import native
from mkernel.backends.runtime.host_memory import HostMemory, page_up

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _cuda


class PinnedMemory(HostMemory):
    """Host pages that are registered with a device until they are closed."""

    _pages: _cuda.MappedPages | None = None

    @classmethod
    def create(cls, nbytes: int) -> PinnedMemory:
        """Allocate zeroed memory for the current device. ValueError for a size below 1; OSError if
        memory is short or cannot be pinned."""
        made = super().create(nbytes)
        assert isinstance(made, cls)
        try:
            made._pages = native().MappedPages(made.address, page_up(nbytes))
        except native().CudaError as error:
            made.close()
            raise OSError(f"no {nbytes} bytes of pinned host memory: {error}") from error
        return made

    def close(self) -> None:
        """Unregister and unmap. No kernel or NIC may use the memory any more."""
        self._pages = None
        super().close()
