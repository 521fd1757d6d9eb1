"""The native module ``_ascend``, and the error if it is missing."""

from __future__ import annotations

from typing import Any

from mkernel.errors import INSTALL_AGAIN, BackendUnavailable


def native() -> Any:
    """Return the native module. BackendUnavailable if it does not import."""
    try:
        from mkernel.backends.accelerators.ascend import _ascend
    except ImportError as error:
        raise BackendUnavailable(
            f"the ascend simulator's native module does not import: {error}; {INSTALL_AGAIN}"
        ) from error
    return _ascend
