"""Checks of one plan that is called again and again: nothing of an earlier call may show."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import torch

import mkernel
from mkernel.cases import Case
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.conformance.accelerator_subject import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.grid import judge_typical, small_ones, typical_of_each, wider
from mkernel.conformance.process_timeout import report_progress
from mkernel.conformance.ranks import Judge, describe, each_case, seconds_apart, where
from mkernel.harness.outcome import CheckSkipped

_LONG_RUN = 310
_LOOK_EVERY = 50
_INPUTS = 3


def repeated_calls(subject: AcceleratorSubject) -> None:
    """Call two plans of every op in turn, with ranks apart by some milliseconds."""
    calls = 12 if subject.quick else 40
    subject.judge(rank_alternates, _pairs(subject), calls, world=subject.largest())


def _pairs(subject: AcceleratorSubject) -> list[tuple[Case, Case]]:
    """Pair the typical case of every op with a wider one."""
    cases = typical_of_each(subject, subject.largest())
    return [(case, wider(subject, case, 3)) for case in cases]


def rank_alternates(pairs: Sequence[tuple[Case, Case]], calls: int) -> list[str]:
    """Call A and B in turn, in runs of two, then all ops mixed, with fresh inputs each time."""
    found = []
    for pair in pairs:
        judges = [Judge(case) for case in pair]
        for iteration in range(calls):
            seconds_apart(pair[0], iteration, 0.01)
            found += judges[(iteration // 2) % 2](iteration)
    every = [Judge(case) for pair in pairs for case in pair]
    order = random.Random(pairs[0][0].seed)  # the same on every rank
    for iteration in range(calls, calls + 2):
        for judge in order.sample(every, len(every)):
            found += judge(iteration)
    return found


def long_runs(subject: AcceleratorSubject) -> None:
    """Call small plans for so long that counters, rings and caches of a few hundred come round."""
    world = subject.worlds((1, 2))[0]
    cases = small_ones(subject, world)
    few = cases[:2] if subject.quick else cases
    subject.judge(each_case, rank_runs_long, few, world=world)


def rank_runs_long(case: Case) -> Iterator[str]:
    """Call with a few inputs in turn; judge at intervals, and judge all of the last calls."""
    judge = Judge(case)
    inputs = [judge.inputs(iteration) for iteration in range(_INPUTS)]
    for number in range(_LONG_RUN):
        report_progress()
        outcome = case.run(inputs[number % _INPUTS])
        if number % _LOOK_EVERY == 0 or number >= _LONG_RUN - _INPUTS:
            found = judge.problems(outcome, number % _INPUTS)
            yield from (f"{text}, in call {number} of a long run" for text in found)


def stale_data(subject: AcceleratorSubject) -> None:
    """Check that no row of a result is what an earlier call should have given there."""
    calls = 4 if subject.quick else 12
    judge_typical(subject, rank_stale, calls, worlds=subject.usual_worlds())


def rank_stale(case: Case, calls: int) -> Iterator[str]:
    """Judge calls, and look for rows of earlier calls."""
    judge = Judge(case)
    for iteration in range(calls):
        outcome = case.run(judge.inputs(iteration))
        wrong = judge.problems(outcome, iteration)
        yield from judge.stale_rows(outcome, iteration) or wrong


def poison(subject: AcceleratorSubject) -> None:
    """Fill outputs with poison, a number and infinity, and allocations with NaN: all must be
    overwritten."""
    judge_typical(subject, rank_poison, worlds=subject.usual_worlds())


def rank_poison(case: Case) -> Iterator[str]:
    """Check that every element of every output is written in every call."""
    judge = Judge(case)
    for iteration, value in enumerate((None, 77.0, float("inf"))):
        inputs = judge.inputs(iteration)
        outputs = case.poisoned(inputs)
        if value is not None:
            for output in outputs.values():
                output.fill_(value)
        with uninitialised_is_nan():
            outcome = case.call(inputs, outputs)
        yield from judge.problems(outcome, iteration)
        if value is not None:
            yield from _untouched(case, outputs, value, iteration)


def _untouched(
    case: Case, outputs: dict[str, torch.Tensor], value: float, iteration: int
) -> Iterator[str]:
    for name, output in outputs.items():
        left = int((output.cpu() == value).sum())
        if left > output.numel() // 100:
            yield (
                f"{describe(case)}, {where()}, call {iteration}: {left} elements of {name} still "
                f"hold the {value:g} that was there before"
            )


def kept_results(subject: AcceleratorSubject) -> None:
    """Check that a result stays as it is while later calls run."""
    judge_typical(subject, rank_keeps, worlds=[subject.largest()])


def rank_keeps(case: Case) -> Iterator[str]:
    """Keep the first call's results, call again, and compare them with a copy."""
    judge = Judge(case)
    first = case.run(judge.inputs(0))
    copies = {name: tensor.clone() for name, tensor in first.outputs.items()}
    for iteration in range(1, 4):
        case.run(judge.inputs(iteration))
    for name, copy in copies.items():
        if not torch.equal(first.outputs[name], copy):
            yield f"{describe(case)}, {where()}: {name} of the first call changed in later calls"
    mkernel.world().barrier()


def queued_calls(subject: AcceleratorSubject) -> None:
    """Queue many calls of two plans without waiting for any, then judge all results."""
    if not subject.capabilities.stream_ordered:
        raise CheckSkipped("stream_ordered is not claimed")
    calls = 8 if subject.quick else 40
    subject.judge(rank_queues, _pairs(subject), calls, world=subject.largest())


def rank_queues(pairs: Sequence[tuple[Case, Case]], calls: int) -> list[str]:
    """Queue calls while the first rank comes late, so that the others' calls pile up."""
    found = []
    for pair in pairs:
        judges = [Judge(case) for case in pair]
        for judge in judges:
            found += judge(calls)  # agreed on by all ranks: later calls need not meet
        queued = []
        for iteration in range(calls):
            judge = judges[iteration % 2]
            inputs = judge.inputs(iteration)
            outputs = judge.case.poisoned(inputs)
            if iteration == 0 and mkernel.world().rank == 0:
                time.sleep(0.2)
            queued.append((judge, judge.case.call(inputs, outputs, wait=False)))
        mkernel.synchronize()
        for iteration, (judge, outcome) in enumerate(queued):
            found += judge.problems(outcome, iteration)
    return found


CHECKS = (
    Check(
        "repeated-calls",
        "many calls of two plans in turn, with fresh inputs, all give the truth",
        repeated_calls,
    ),
    Check("long-runs", "hundreds of calls of one plan all give the truth", long_runs),
    Check("stale-data", "no result holds rows of an earlier call", stale_data),
    Check("poison", "every element of every output is written, whatever was there", poison),
    Check("queued-calls", "calls that are not waited for give the truth too", queued_calls),
    Check("kept-results", "results of earlier calls stay as they are", kept_results),
)
