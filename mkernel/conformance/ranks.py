"""The accelerator checks' part in rank processes: calls a case with fresh inputs, and judges the
results.

Everything here runs in rank processes and reports what it found wrong as sentences.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

import mkernel
from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Case, Outcome, compare
from mkernel.cases.comparison import compare_exact
from mkernel.cases.moe import E4M3_SUMS
from mkernel.conformance.process_timeout import report_progress
from mkernel.host_limits import check_descriptors, check_loopback

_ROUNDING: dict[str, float] = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
}
"""The relative size of two roundings of an element."""
EXPERTS = ("moe_dispatch_gemm", "moe_gemm_combine")
_DESCRIPTORS = 14
"""The number of descriptors that a store and a rank's connection to it open."""
_SLACK = {"ring_attention": 2e-2}
_SLACK_ELSEWHERE = 2e-3
"""The error that one element may have beyond rounding, relative to the output's root mean
square. A wrong element is off by about 1; a relative Frobenius error alone would let one in a
million pass. Elements of e4m3 experts may have that of their sums."""


def seconds_apart(case: Case, iteration: int, most_s: float) -> None:
    """Sleep a little, for a different time on every rank and in every iteration."""
    rank = mkernel.world().rank
    time.sleep(random.Random(f"{case.seed} {iteration} {rank}").uniform(0, most_s))


@contextmanager
def meeting_place() -> Iterator[int]:
    """Open a store in the kit's process, where ranks meet beside their world; yield its port."""
    check_descriptors(_DESCRIPTORS, "a store where ranks meet")
    check_loopback()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield int(store.port)
    del store


_first_finds: list[FirstFind] = []


class FirstFind:
    """A store through which ranks report to each other that one has found something wrong, so that
    all leave the other cases out. While it is entered, :func:`each_case` does so.

    Args:
        port: port of the store where they meet. timeout_s: limit of a rank's wait for another's
            report.
    """

    def __init__(self, port: int, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=limit)
        self._asked = 0

    def __enter__(self) -> None:
        _first_finds.append(self)

    def __exit__(self, *_: object) -> None:
        _first_finds.pop()

    def any(self, wrong: bool) -> bool:
        """Return whether any rank found something wrong. Collective."""
        world = mkernel.world()
        self._asked += 1
        self._store.set(f"{self._asked}/{world.rank}", str(int(wrong)))
        said = self._store.multi_get([f"{self._asked}/{rank}" for rank in range(world.size)])
        return b"1" in said


def give_up_after(timeout_s: float) -> None:
    """Set another deadline for waits of this rank's world than its making had: the time that a busy
    machine takes to start processes then says nothing of a short deadline."""
    mkernel.world().set_timeout(timeout_s)


def describe(case: Case) -> str:
    """Describe a case in a message, enough to repeat it."""
    sizes = " ".join(f"{name}={value}" for name, value in case.sizes.items())
    options = "".join(
        f" {name}={value}" for name, value in case.options.items() if name != "tensors"
    )
    chunk = "" if case.chunk is None else f" chunk={case.chunk}"
    return (
        f"{case.op} {sizes} {case.dtype}->{case.out_dtype} {case.layout}-major"
        f"{chunk}{options} seed={case.seed}"
    )


def where() -> str:
    """Describe this rank in a message."""
    me = mkernel.world().identity
    return f"rank {me.rank} of {me.nodes}x{me.ranks_per_node}"


def moved(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Move inputs to the memory that the accelerator reads; layouts stay."""
    device = mkernel.world().accelerator.device
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class Judge:
    """Calls one case again and again on this rank and judges every result.

    It remembers the truths of earlier calls, so that it can name stale results.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._rounds = mkernel.world().accelerator.capabilities().rounded_partials
        self._older: dict[int, Mapping[str, torch.Tensor]] = {}

    def inputs(self, iteration: int) -> dict[str, torch.Tensor]:
        """Make this rank's fresh inputs, and report progress."""
        report_progress()
        world = mkernel.world()
        return moved(self.case.inputs(world.rank, world.size, iteration))

    def truth(self, iteration: int) -> dict[str, torch.Tensor]:
        """Compute what this rank must get, in float64."""
        world = mkernel.world()
        return self.case.reference(world.rank, world.size, iteration)

    def __call__(self, iteration: int, view: View = "pipelined") -> list[str]:
        """Call once with fresh inputs, and return what is wrong with the results."""
        return self.problems(self.case.run(self.inputs(iteration), view=view), iteration)

    def problems(self, outcome: Outcome, iteration: int) -> list[str]:
        """Judge the results of a finished call as they are now, since what comes later is too late;
        return what is wrong."""
        world = mkernel.world()
        now = {name: tensor.to("cpu", copy=True) for name, tensor in outcome.outputs.items()}
        found, truth, partials = [], self.truth(iteration), {}
        if self._rounds or self.case.rounds_partials:
            partials = self.case.partials(world.rank, world.size, iteration)
        tolerances = self.case.tolerances()
        for name, wanted in truth.items():
            got = now[name]
            limit = tolerances.get(name)
            wrong = _differs(self.case, got, wanted, limit, partials.get(name), None)
            if wrong:  # which is rare: what ties allow takes as long to find as the truth
                ties = self.case.near_ties(world.rank, world.size, iteration).get(name)
                wrong = _differs(self.case, got, wanted, limit, partials.get(name), ties)
            if wrong:
                why = self._explain(name, got, wanted, limit) or wrong
                text = f"{describe(self.case)}, {where()}, call {iteration}: {name} {why}"
                found.append(text)
        self._older[iteration] = truth
        for old in sorted(self._older)[:-4]:
            del self._older[old]
        return found

    def stale_rows(self, outcome: Outcome, iteration: int) -> list[str]:
        """Report rows that hold what an earlier call should have given there."""
        found = []
        for name in self.case.tolerances():
            got = outcome.outputs[name].cpu().double()
            for call, truths in self._older.items():
                old = truths[name]
                if call == iteration or old.shape != got.shape or got.numel() == 0:
                    continue
                gap = (got - old).abs().amax(dim=-1)
                rows = int((gap <= 1e-2 * old.abs().amax(dim=-1)).sum())
                if rows:
                    found.append(
                        f"{describe(self.case)}, {where()}, call {iteration}: {rows} rows of "
                        f"{name} are those of call {call}: stale"
                    )
        return found

    def _explain(
        self, name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float | None
    ) -> str:
        """Name a known way to be wrong, or nothing."""
        if limit is None or compare(got, wanted).why:
            return ""
        if not got.any():
            return "is all zeros"
        for call, truths in self._older.items():
            if compare(got, truths[name]).within(limit):
                return f"is the result of call {call}: stale"
        return _wrong_rows(got, wanted, limit)


def _wrong_rows(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> str:
    """Say which rows are off, if some clearly are."""
    if got.dim() < 2 or not got.numel():
        return ""
    gaps = (got.double() - wanted).abs().flatten(1).amax(1)
    bad = (gaps > 0.05 * (float(wanted.abs().max()) or 1.0)).nonzero().flatten().tolist()
    if not bad:
        return ""
    shown = ", ".join(map(str, bad[:4])) + (", …" if len(bad) > 4 else "")
    return (
        f"is off by {compare(got, wanted).error:.1e} (limit {limit:.0e}); "
        f"{len(bad)} of {len(gaps)} rows are wrong: {shown}"
    )


def _differs(
    case: Case,
    got: torch.Tensor,
    wanted: torch.Tensor,
    limit: float | None,
    partials: torch.Tensor | None,
    ties: torch.Tensor | None,
) -> str:
    """Say why an output is not accepted, or nothing. ``partials`` is the sum of the sizes of the
    terms that were added, if each may have been rounded. ``ties`` is as ``Case.near_ties`` says."""
    if limit is None:
        return compare_exact(got, wanted).why
    found = compare(got, wanted)
    if found.rounding and partials is not None and wanted.norm() > 0:
        # Of few elements the terms may all be rounded by nearly half a step, too.
        terms = float(partials.norm() / wanted.norm())
        found = replace(found, rounding=found.rounding * (1 + terms))
    if not found.within(limit):
        return found.why or f"is off by {found.error:.1e} (limit {found.limit(limit):.0e})"
    wide = got.double()
    finite = torch.isfinite(wanted) & torch.isfinite(wide)
    wide, true = wide[finite], wanted[finite]
    if not true.numel():
        return ""
    scale = float(true.square().mean().sqrt())
    eps = _ROUNDING[str(got.dtype).removeprefix("torch.")]
    slack = _SLACK.get(case.op, _SLACK_ELSEWHERE)
    if case.op in EXPERTS and case.dtype == "float8_e4m3fn":
        slack = E4M3_SUMS
    allowed = eps * true.abs() + slack * scale
    if partials is not None:
        allowed += eps / 2 * partials[finite]
    if ties is not None:
        allowed += ties[finite]
    over = (wide - true).abs() - allowed
    count, most = int((over > 0).sum()), int(over.argmax())
    if not count:
        return ""
    return (
        f"has {count} of {got.numel()} elements that are wrong; one is {float(wide[most]):.6g} "
        f"instead of {float(true[most]):.6g}, which may be off by {float(allowed[most]):.2g}"
    )


def each_case(
    look: Callable[..., Iterable[str]], cases: Sequence[Case], *arguments: Any
) -> list[str]:
    """Collect what ``look(case, *arguments)`` finds wrong on this rank, one case after another.
    While a :class:`FirstFind` is entered, stop after the first case that is wrong on any rank."""
    wrong: list[str] = []
    for case in cases:
        report_progress()
        wrong.extend(look(case, *arguments))
        if _first_finds and _first_finds[-1].any(bool(wrong)):
            break
    return wrong


def judge_calls(case: Case, calls: int, view: View = "pipelined") -> Iterator[str]:
    """Call a case ``calls`` times with fresh inputs, and yield what was wrong."""
    judge = Judge(case)
    for iteration in range(calls):
        yield from judge(iteration, view)
