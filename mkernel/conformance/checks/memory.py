"""Checks of users' tensors: views work, inputs stay as they are, and nothing around them is read or
written."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import mkernel
from mkernel.cases import Case
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.checks.bits import same_bits
from mkernel.conformance.grid import judge_typical, typical
from mkernel.conformance.ranks import Judge, describe, each_case, seconds_apart, where

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
        """Return whether nothing was written around the tensor."""
        ends = (slice(None, self._guard), slice(-self._guard, None))
        return all(same_bits(self._whole[end], self._before[end]) for end in ends)

    def intact(self) -> bool:
        """Return whether nothing was written at all."""
        return same_bits(self._whole, self._before)


def inputs(subject: AcceleratorSubject) -> None:
    """Pass inputs that are slices of larger tensors; they must not change."""
    _judge(subject, watch_inputs=True)


def bounds(subject: AcceleratorSubject) -> None:
    """Pass outputs that are slices of larger tensors, with sizes that leave partial tiles."""
    _judge(subject, watch_inputs=False)


def _judge(subject: AcceleratorSubject, watch_inputs: bool) -> None:
    world, claims = subject.largest(), subject.capabilities
    cases = [
        typical(subject, op, world[0] * world[1], layout=layout)
        for op in subject.claimed_in(world)
        for layout in claims.b_layouts
    ]
    subject.judge(each_case, rank_memory, cases, claims.alignment_bytes, watch_inputs, world=world)


def rank_memory(case: Case, alignment: int, watch_inputs: bool) -> Iterator[str]:
    """Make two calls on guarded tensors; yield what was changed, and what is wrong with the
    results."""
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
        yield from judge.problems(outcome, iteration)
        for name, each in (given if watch_inputs else outputs).items():
            if watch_inputs and not each.intact():
                yield f"{text}: wrote to {name}"
            elif not watch_inputs and not each.guards_intact():
                yield f"{text}: wrote outside of {name}"


def input_reuse(subject: AcceleratorSubject) -> None:
    """Overwrite inputs as soon as the call has returned; slower ranks must not see it."""
    calls = 3 if subject.quick else 12
    judge_typical(subject, rank_reuses, calls, worlds=subject.usual_worlds())


def rank_reuses(case: Case, calls: int) -> Iterator[str]:
    """Call, overwrite, and only then judge."""
    judge = Judge(case)
    for iteration in range(calls):
        given = judge.inputs(iteration)
        outputs = case.poisoned(given)
        seconds_apart(case, iteration, 0.005)
        outcome = case.call(given, outputs)
        for tensor in given.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        yield from judge.problems(outcome, iteration)


CHECKS = (
    Check("user-tensors", "inputs may be slices of larger tensors, and are not changed", inputs),
    Check("input-reuse", "inputs may be overwritten as soon as a call has returned", input_reuse),
    Check("bounds", "nothing outside of the output is written", bounds),
)
