"""The steps of a call around its launch, run once by Python and recorded for native code, which runs
them in all later calls of the same signature (``backends/runtime/calls/program.hpp``).

A step is a function, called on the caller's tensors and on what earlier steps made; before the launch
one of torch's that is implemented in C, so that no later call runs Python there. What an op computes
by any other means must be the same for all calls of a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mkernel.plan.model import LaunchPlan
from mkernel.world.calls import CallRecord, Program
from mkernel.world.torch_state import allocation
from mkernel.world.world import World


class Steps:
    """Runs the steps of one call, and records them.

    Args:
        values: the arguments of the native op, lists of tensors among them. None: nothing is recorded.
        family: what all calls share that differ from this one by rows alone; None: nothing is known.
    """

    def __init__(self, values: Iterable[Any] | None = None, family: bytes | None = None) -> None:
        self.family = family
        self._kept: list[Tensor] = []  # by slot; held, or another tensor could get the same id
        self._slots: dict[int, int] = {}
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._output: tuple[int, tuple[int, ...], torch.dtype] | None = None
        self._launched: dict[str, int] = {}
        self._found: dict[str, int] = {}
        self._record: CallRecord | None = None
        self._written: list[Tensor] = []
        self._records = values is not None
        self._launch: tuple[World, LaunchPlan] | None = None
        for value in values or ():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor):
                    self._add(each)

    def _add(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return self._slots.setdefault(id(tensor), len(self._kept) - 1)

    def _slot(self, value: object) -> int:
        """Return the slot of a tensor; -1: the value is the same for all calls of the signature."""
        if not isinstance(value, Tensor):
            return -1
        found = self._slots.get(id(value))
        if found is None:  # of the first call alone
            self._records = False
            return -1
        return found

    def do(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a step, and return what it returns."""
        made = function(*arguments, **keywords)
        if self._records:
            given = (*arguments, *keywords.values())
            slots = tuple(map(self._slot, given))
            result = -1
            if isinstance(made, Tensor):
                self._kept.append(made)
                result = self._slots.setdefault(id(made), len(self._kept) - 1)
            constants = tuple(
                None if slot >= 0 else one for one, slot in zip(given, slots, strict=True)
            )
            steps = self._before if self._record is None else self._after
            steps.append((function, constants, slots, tuple(keywords) or None, result))
        return made

    def output(
        self,
        world: World,
        plan: LaunchPlan,
        shape: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Allocate a plan's ``out``, row-major, on the device of ``like``; in later calls where peers
        may write it, if the accelerator has such memory for it."""
        function, arguments = world.allocation(plan, shape, like, dtype)
        made: Tensor = self.do(function, *arguments)
        self._output = (len(self._before) - 1, shape, dtype)
        return made

    def empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate a row-major tensor on the device of ``like``."""
        function, arguments = allocation(shape, dtype, like)
        made: Tensor = self.do(function, *arguments)
        return made

    def launch(
        self, world: World, plan: LaunchPlan, tensors: Mapping[str, Tensor], **execution: Any
    ) -> CallRecord:
        """Run the launch, between the steps before and after it."""
        self._launched = {name: self._slot(tensor) for name, tensor in tensors.items()}
        self._launch = world, plan
        record = self._record = world.run(plan, tensors, **execution)
        for name, found in record.results.items():
            self._found[name] = self._add(found)
        return record

    def wrote(self, tensors: list[Tensor]) -> None:
        """Note that the call wrote to tensors of the caller's."""
        self._written = tensors

    def learn(self, signature: object, result: object) -> None:
        """Let native code make later calls of this signature, which return what ``result`` shows."""
        if self._record is None or self._record.learn is None:
            return
        program = Program(
            len(self._kept),
            tuple(self._before),
            tuple(self._after),
            self._launched,
            self._found,
            tuple(map(self._slot, self._written)),
            self._shape(result),
            self._output,
        )
        if self._records:
            self._record.learn(signature, program)

    def note(self, op: str, given: Mapping[str, Any], result: object) -> None:
        """Note the call of a native op, with its arguments, where its world records calls."""
        if self._launch is None or self._launch[0].recording is None:
            return
        world, plan = self._launch
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        if not world.in_symmetric_memory(tensors):
            world.recording.add(op, given, plan, result)

    def _shape(self, result: object) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(map(self._shape, result))
        return None if result is None else self._slot(result)
