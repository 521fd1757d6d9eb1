"""Accelerators that claim something else, or change what calls read or return.

Most faults are planted so: they name what they change, and the rest is honest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mkernel.backends import registry
from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call, Launch
from mkernel.backends.contracts.instrumented import (
    Instrumented,
    InstrumentedLaunch,
    LaunchTimes,
    ModelledRun,
    View,
)
from mkernel.backends.transport import _transport
from mkernel.conformance.faults.rows import Plant, forwards
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.shapes import SHAPES

Tensors = dict[str, torch.Tensor]

_OUTPUTS = ("out", "lse", "gathered", "gathered_scale", "residual_out")
_GRADIENTS = ("grad_q", "grad_k", "grad_v")


def outputs_of(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the call's tensors that a backend writes to. Gradients of attention are
    computed from its results, which then are inputs."""
    names = _GRADIENTS if _GRADIENTS[0] in tensors else _OUTPUTS
    return [name for name in names if name in tensors]


@forwards(AcceleratorBackend)
class Honest(AcceleratorBackend, Instrumented):
    """Breaks nothing: passes everything on to another backend."""

    name: ClassVar[str] = "fault"
    wraps: ClassVar[str] = "streams"

    def __init__(self) -> None:
        self.inner = registry.new_accelerator(self.wraps)
        self.device = self.inner.device
        self.collectives = self.inner.collectives

    def model(self, plan: LaunchPlan, traces: Sequence[bytes], view: View) -> ModelledRun | None:
        return instrumented.model(self.inner, plan, traces, view)


class Followed(Launch, InstrumentedLaunch):
    """A launch that is followed by ``after(results)``, once, when it has ended."""

    def __init__(
        self, inner: Launch, after: Callable[[dict[str, Any]], None] = lambda results: None
    ) -> None:
        self.inner = inner
        self._after: Callable[[dict[str, Any]], None] | None = after
        self._results: dict[str, Any] = {}

    def wait(self, timeout_s: float) -> bool:
        if not self.inner.wait(timeout_s):
            return False
        after, self._after = self._after, None
        if after is not None:
            self._results = dict(self.inner.results())
            after(self._results)
        return True

    def times(self) -> LaunchTimes:
        return instrumented.times(self.inner)

    def results(self) -> Mapping[str, Any]:
        return self._results

    def trace(self) -> bytes | None:
        return instrumented.trace(self.inner)


@dataclass(frozen=True)
class Ended:
    """A call that has ended, for a fault to change its results in place.

    Attributes:
        outputs: tensors that the caller gave. results: what the launch returned (MoE).
        before: contents of ``outputs`` before the call.
        kept: what the fault remembers from call to call.
    """

    call: Call
    outputs: Tensors
    results: dict[str, Any]
    before: Tensors
    kept: dict[Any, Any]

    @property
    def all(self) -> list[torch.Tensor]:
        """Return every result, wherever it lies."""
        return [*self.outputs.values(), *self.grouped()]

    @property
    def name(self) -> str:
        """Return the name of a dispatch's result."""
        return "rows" if "rows" in self.results else "outputs"

    def grouped(self) -> list[torch.Tensor]:
        """Return the results of a dispatch: one tensor, or none of other ops."""
        return [self.results[self.name]] if self.name in self.results else []

    def by_expert(self) -> list[torch.Tensor]:
        """Return each expert's rows of a dispatch."""
        if "counts" not in self.results:
            return []
        return list(torch.split(self.results[self.name], self.results["counts"].tolist()))

    def previous(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield every result with that of the plan's previous call, from its second call on."""
        for which, tensor in enumerate(self.all):
            key = self.call.plan.digest(), which
            older, self.kept[key] = self.kept.get(key), tensor.clone()
            if older is not None:
                yield tensor, older


class Altered(Honest):
    """Changes what calls read, or their results when they have ended.

    Every fault of all ops has a variant of each op, honest in the others:
    ``ReturnsZeros.ring_attention``.
    """

    ops: ClassVar[tuple[str, ...]] = ()
    """The ops whose calls are changed; empty: all."""

    kept: ClassVar[dict[Any, Any]]
    """The memory of a fault in this process, which lasts from one world to the next too."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kept = {}
        for op in () if cls.ops else SHAPES:
            setattr(cls, op, type(cls.__name__, (cls,), {"ops": (op,), "__doc__": cls.__doc__}))

    def launch(self, call: Call) -> Launch:
        if self.ops and call.plan.op not in self.ops:
            return self.inner.launch(call)
        given = {name: call.tensors[name] for name in outputs_of(call.tensors)}
        before = {name: tensor.clone() for name, tensor in given.items()}
        inner = self.inner.launch(self.change(call))

        def after(results: dict[str, Any]) -> None:
            if not _transport.pad_aborted(call.pad):
                self.alter(Ended(call, given, results, before, self.kept))

        return Followed(inner, after)

    def change(self, call: Call) -> Call:
        """Return the call as the wrapped backend gets it."""
        return call

    def alter(self, ended: Ended) -> None:
        """Change results in place."""


def claims(change: Callable[[AcceleratorCapabilities], Mapping[str, Any]]) -> Plant:
    """Plant a change of some of the wrapped backend's claims."""

    def capabilities(self: Honest) -> AcceleratorCapabilities:
        honest = self.inner.capabilities()
        return honest.model_copy(update=dict(change(honest)))

    return {"capabilities": capabilities}


def calls(change: Callable[[Call], Call]) -> Plant:
    """Plant a change of the call that is run."""
    return {"change": lambda self, call: change(call)}


def inputs(*names: str, change: Callable[[Call, torch.Tensor], torch.Tensor]) -> Plant:
    """Plant a change of the tensors of these names that the call reads, if it has them."""

    def changed(call: Call) -> Call:
        found = {name: change(call, call.tensors[name]) for name in names if name in call.tensors}
        return replace(call, tensors={**call.tensors, **found})

    return calls(changed)


def ended(change: Callable[[Ended], Any]) -> Plant:
    """Plant an action on every call that has ended."""
    return {"alter": lambda self, call: change(call)}


def _always(ended: Ended) -> bool:
    return True


def results(
    change: Callable[[torch.Tensor], Any], when: Callable[[Ended], bool] = _always
) -> Plant:
    """Plant a change of every result that is not empty, in some calls."""
    return ended(
        lambda call: when(call) and [change(tensor) for tensor in call.all if tensor.numel()]
    )


def from_before(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Plant:
    """Plant a mixture of an output with what it held before the call."""
    return ended(
        lambda call: [change(tensor, call.before[name]) for name, tensor in call.outputs.items()]
    )


def from_previous(
    change: Callable[[torch.Tensor, torch.Tensor], Any], when: Callable[[Ended], bool] = _always
) -> Plant:
    """Plant a mixture of these results with the plan's previous ones, in some calls."""
    return ended(lambda call: [change(*pair) for pair in call.previous() if when(call)])
