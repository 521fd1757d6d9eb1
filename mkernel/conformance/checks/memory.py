"""Users' tensors: views work, inputs stay as they are, nothing around them is read or written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.checks.bits import same_bits
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge, describe, seconds_apart, where

_GUARD_BYTES = 4096


class Guarded:
    """A copy of a tensor in the middle of a larger allocation, between guards.

    Guards are NaN (integers: the least number), so that a kernel that reads too far shows it in its
    results; one that writes too far changes them.
    """

    def __init__(self, tensor: torch.Tensor, alignment: int) -> None:
        packed, self._turned = tensor, False
        if not tensor.is_contiguous():  # column-major in its last two dimensions
            packed, self._turned = tensor.transpose(-1, -2), True
        guard = (_GUARD_BYTES + alignment) // tensor.element_size()
        size = tensor.numel()
        value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        whole = torch.full((size + 2 * guard,), value, dtype=tensor.dtype, device=tensor.device)
        inner = whole[guard : guard + size]
        inner.copy_(packed.reshape(-1))
        view = inner.view(packed.shape)
        self.tensor = view.transpose(-1, -2) if self._turned else view
        self._whole, self._guard, self._before = whole, guard, whole.clone()

    def guards_intact(self) -> bool:
        """Nothing was written around the tensor."""
        ends = (slice(None, self._guard), slice(-self._guard, None))
        return all(same_bits(self._whole[end], self._before[end]) for end in ends)

    def intact(self) -> bool:
        """Nothing was written at all."""
        return same_bits(self._whole, self._before)


def _cases(subject: AcceleratorSubject, size: int) -> list[Case]:
    layouts = subject.capabilities.b_layouts
    return [
        typical(subject, op, size, layout=layout) for op in subject.claimed() for layout in layouts
    ]


def inputs(subject: AcceleratorSubject) -> None:
    """Inputs are slices of larger tensors."""
    world = subject.largest()
    cases = _cases(subject, world[0] * world[1])
    subject.judge(rank_memory, cases, subject.capabilities.alignment_bytes, True, world=world)


def bounds(subject: AcceleratorSubject) -> None:
    """Outputs are slices of larger tensors, and sizes leave partial tiles."""
    world = subject.largest()
    cases = _cases(subject, world[0] * world[1])
    subject.judge(rank_memory, cases, subject.capabilities.alignment_bytes, False, world=world)


def rank_memory(cases: Sequence[Case], alignment: int, watch_inputs: bool) -> list[str]:
    """Two calls each on guarded tensors; what was changed, and results."""
    found = []
    for case in cases:
        judge = Judge(case)
        for iteration in range(2):
            plain = judge.inputs(iteration)
            given = {name: Guarded(tensor, alignment) for name, tensor in plain.items()}
            outputs = {
                name: Guarded(tensor, alignment) for name, tensor in case.poisoned(plain).items()
            }
            outcome = case.call(
                {name: each.tensor for name, each in given.items()},
                {name: each.tensor for name, each in outputs.items()},
            )
            mkernel.world().barrier()
            text = f"{describe(case)}, {where()}, call {iteration}"
            found += judge.problems(outcome, iteration)
            if watch_inputs:
                found += [f"{text}: wrote to {n}" for n, each in given.items() if not each.intact()]
            else:
                found += [
                    f"{text}: wrote outside of {name}"
                    for name, each in outputs.items()
                    if not each.guards_intact()
                ]
    return found


def input_reuse(subject: AcceleratorSubject) -> None:
    """Inputs are overwritten as soon as the call has returned; slower ranks must not see it."""
    for world in subject.usual_worlds():
        cases = [typical(subject, op, world[0] * world[1]) for op in subject.claimed()]
        subject.judge(rank_reuses, cases, 3 if subject.quick else 12, world=world)


def rank_reuses(cases: Sequence[Case], calls: int) -> list[str]:
    """Call, overwrite, and only then judge."""
    found = []
    for case in cases:
        judge = Judge(case)
        for iteration in range(calls):
            given = judge.inputs(iteration)
            outputs = case.poisoned(given)
            seconds_apart(case, iteration, 0.005)
            outcome = case.call(given, outputs)
            for tensor in given.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            found += judge.problems(outcome, iteration)
    return found


CHECKS = (
    Check("user-tensors", "inputs may be slices of larger tensors, and are not changed", inputs),
    Check("input-reuse", "inputs may be overwritten as soon as a call has returned", input_reuse),
    Check("bounds", "nothing outside of the output is written", bounds),
)
