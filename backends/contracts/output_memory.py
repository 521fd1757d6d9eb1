"""Where a call's outputs may be allocated, if the caller gives none.

Torch's compilers plan the memory of what their code returns: while they warm a graph up, an output that
is not in the pool they allocate from is an error of theirs. Such code calls ops through torch's
dispatcher; a backend then leaves outputs to torch (:meth:`.accelerator.AcceleratorBackend.allocation`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

_thread = threading.local()


def is_torchs() -> bool:
    """Whether outputs of this thread's calls must be torch's own at the moment."""
    return getattr(_thread, "torchs", False)


def in_torchs(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, whose outputs torch's own allocator makes."""

    @wraps(kernel)
    def called(*arguments: Any, **keywords: Any) -> Any:
        before, _thread.torchs = is_torchs(), True
        try:
            return kernel(*arguments, **keywords)
        finally:
            _thread.torchs = before

    return called
