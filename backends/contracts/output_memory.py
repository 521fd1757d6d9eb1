"""The choice of allocator for a call's outputs if the caller passes none.

Torch's compilers plan the memory of the outputs of their code: while they warm up a graph, they
raise an error for an output that is not in the pool they allocate from. Such code calls ops through
torch's dispatcher; a backend then leaves outputs to torch
(:meth:`.accelerator.AcceleratorBackend.allocation`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

_thread = threading.local()


def is_torchs() -> bool:
    """Return whether torch must currently allocate the outputs of this thread's calls."""
    return getattr(_thread, "torchs", False)


def in_torchs(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``kernel`` so that torch's own allocator makes its outputs."""

    @wraps(kernel)
    def called(*arguments: Any, **keywords: Any) -> Any:
        before, _thread.torchs = is_torchs(), True
        try:
            return kernel(*arguments, **keywords)
        finally:
            _thread.torchs = before

    return called
