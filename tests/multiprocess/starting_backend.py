"""A backend whose calls native code starts again, on host memory: what a GPU's backend does, where
there is none. Its starter is a C function as any other's, which here comes back into Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from queueing_backend import Queueing

from mkernel.backends.contracts.accelerator import Again, Call, Launch
from mkernel.backends.contracts.scaled import quantised_rows
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan

QUEUED, DECLINED, RAISED = 0, 1, -1
ALIGNMENT = 64


class NativeCall(ctypes.Structure):
    """``MkernelCall``."""

    _fields_: ClassVar = [
        ("number", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
        ("stream", ctypes.c_uint64),
        ("addresses", ctypes.POINTER(ctypes.c_uint64)),
        ("tensors", ctypes.POINTER(ctypes.py_object)),
    ]


START = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(NativeCall))


class NativeStarter(ctypes.Structure):
    """``MkernelCallStarter``."""

    _fields_: ClassVar = [
        ("start", START),
        ("self", ctypes.c_void_p),
        ("alignment", ctypes.c_uint64),
    ]


NAME = b"mkernel.call_starter.4"
NAMES = (
    "a", "b", "bias", "out", "a_scale", "b_scale", "norm_weight", "residual", "residual_out",
    "quantised", "quantised_scale",
)  # fmt: skip
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Started(Launch):
    """All calls that starters have started."""

    def __init__(self) -> None:
        self.under_way: list[Launch] = []
        self._over = 0

    def wait(self, timeout_s: float) -> bool:
        while self.under_way and self.under_way[0].wait(timeout_s):
            self.under_way.pop(0)
            self._over += 1
        return not self.under_way

    def calls_over(self) -> int:
        return self._over


class Restartable(Launch):
    """A launch that can be started again."""

    def __init__(self, inner: Launch, again: Callable[[], Again]) -> None:
        self._inner = inner
        self._again = again

    def wait(self, timeout_s: float) -> bool:
        return self._inner.wait(timeout_s)

    def again(self) -> Again:
        return self._again()


class Ending(Launch):
    """A launch whose end adds the bias, or quantises normalised rows; these are in no other memory
    then."""

    def __init__(self, inner: Launch, call: Call) -> None:
        self._inner = inner
        self._call: Call | None = call

    def wait(self, timeout_s: float) -> bool:
        if not self._inner.wait(timeout_s):
            return False
        call, self._call = self._call, None
        if call is not None and call.plan.bias:
            call.tensors["out"].add_(call.tensors["bias"])
        elif call is not None:
            found, scale = quantised_rows(call.tensors["out"])
            call.tensors["quantised"].copy_(found)
            call.tensors["quantised_scale"].copy_(scale)
            call.tensors["out"].fill_(torch.nan)
        return True


class Starting(Queueing):
    """Remembers which calls came by a starter. ``answer``: what starters do instead of a call;
    ``stale``, a planted fault: they take the scales of rows of the call before."""

    name: ClassVar[str] = "starting"

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Call] = []
        self.launches = Started()
        self.answer = QUEUED
        self.stale = False
        self._scale_before: Any = None
        self._kept: list[NativeStarter] = []

    def workspace(self, plan: LaunchPlan) -> Any:
        made = super().workspace(plan)
        return replace(made, areas=(1000,))

    def capabilities(self) -> AcceleratorCapabilities:
        own = {"adds_bias": True, "quantises_norms": True}
        return super().capabilities().model_copy(update=own)

    def launch(self, call: Call) -> Any:
        template = replace(call, tensors={})
        return Restartable(self._launched(call), lambda: self._starter(template))

    def _launched(self, call: Call) -> Launch:
        # As a device writes: torch's versions do not move.
        unheard = {name: each.data for name, each in call.tensors.items()}
        call = replace(call, tensors=unheard)
        norm, launched = call.plan.norm, super().launch(call)
        ends = call.plan.bias or (norm is not None and norm.quantises)
        return Ending(launched, call) if ends else launched

    def _starter(self, template: Call) -> Again:
        def start(_: int, native: Any) -> int:
            if self.answer != QUEUED:
                return self.answer
            told = native.contents
            given = {name: told.tensors[i] for i, name in enumerate(NAMES)}
            addresses = [0 if one is None else one.data_ptr() for one in given.values()]
            assert [told.addresses[i] for i in range(len(NAMES))] == addresses
            tensors = {name: one for name, one in given.items() if one is not None}
            if "a_scale" in tensors:
                tensors |= self._scales(tensors["a_scale"], tensors["b_scale"])
            call = replace(
                template,
                tensors=tensors,
                number=told.number,
                epoch=told.epoch,
                timeout_s=told.timeout_s,
            )
            self.started.append(call)
            self.launches.under_way.append(self._launched(call))
            return QUEUED

        made = NativeStarter(START(start), None, ALIGNMENT)
        self._kept.append(made)
        return Again(_capsule(ctypes.addressof(made), NAME, None), NAMES, self.launches)

    def _scales(self, a_scale: Any, b_scale: Any) -> dict[str, Any]:
        """As a launch has them: a single one may come without dimensions."""
        fresh, before = a_scale.clone(), self._scale_before
        self._scale_before = fresh
        if self.stale and before is not None:
            a_scale = before
        scales = {"a_scale": a_scale, "b_scale": b_scale}
        return {name: each if each.dim() else each.view(1, 1) for name, each in scales.items()}
