"""Names of calls for profilers: where one looks, each call is a range ``mkernel.<op>``.

Ranges are torch's (``record_function``), which ``torch.profiler`` and ``emit_nvtx`` show, and NVTX's
own where a tool such as Nsight Systems has started the process. Where nobody looks there is nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch.autograd import profiler

_INJECTED = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Variables that tools which listen to NVTX set in the processes that they start."""

nvtx = getattr(torch._C, "_nvtx", None) if any(name in os.environ for name in _INJECTED) else None
"""torch's functions for NVTX; None: nobody listens, or this torch has none."""

_inside = threading.local()


def wanted() -> bool:
    """Return whether a call that begins now shall be named: a profiler looks, and no range is open for
    the call."""
    looks = profiler._is_profiler_enabled or nvtx is not None
    return looks and not getattr(_inside, "named", False)


@contextlib.contextmanager
def named(op: str) -> Iterator[None]:
    """Open a range for one call; parts of the call open none of their own."""
    name = f"mkernel.{op}"
    _inside.named = True
    try:
        with profiler.record_function(name):
            if nvtx is not None:
                nvtx.rangePushA(name)
            try:
                yield
            finally:
                if nvtx is not None:
                    nvtx.rangePop()
    finally:
        _inside.named = False
