"""A backend whose calls do nothing, on host memory: what a call costs apart from its launch."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.contracts.accelerator import Again, Call, Launch
from mkernel.backends.contracts.memory import Workspace
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan

TENSORS = ("a", "b", "bias", "out", "a_scale", "b_scale", "gathered", "gathered_scale", "x")


class _Starter(ctypes.Structure):
    """``MkernelCallStarter`` of ``backends/contracts/call_starter.h``."""

    _fields_: ClassVar = [
        ("start", ctypes.c_void_p),
        ("self", ctypes.c_void_p),
        ("alignment", ctypes.c_uint64),
    ]


# The C library's abs(0), which is 0: the call is queued.
_STARTER = _Starter(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p), None, 1)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Ended(Launch):
    """A call that is over."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def again(self) -> Again:
        return Again(
            _capsule(ctypes.addressof(_STARTER), b"mkernel.call_starter.4", None), TENSORS, self
        )


_ENDED = Ended()


class Nothing(StreamsAccelerator):
    """Outputs stay as they are."""

    name: ClassVar[str] = "nothing"

    def __init__(self) -> None:
        super().__init__("cpu")
        self._ordered = super().capabilities().model_copy(update={"stream_ordered": True})

    def capabilities(self) -> AcceleratorCapabilities:
        return self._ordered

    def workspace(self, plan: LaunchPlan) -> Workspace:
        return Workspace((64,), signals=1)

    def launch(self, call: Call) -> Any:
        return _ENDED
