"""Turns all ranks' times and errors into the figures of a row; the formulae are in ``results``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from mkernel.harness.clock import skew_us
from mkernel.harness.contenders import OURS, PROMISING, SEQUENTIAL
from mkernel.harness.problem import Kind
from mkernel.harness.results import Entry, Figures, Row, Timing
from mkernel.harness.spec import Mode, Shape
from mkernel.harness.turns import Turns
from mkernel.harness.verdict import verify
from mkernel.tabular import duration


def row(
    shape: Shape,
    kinds: Mapping[str, Kind],
    ranks: Sequence[Mapping[str, Turns]],
    world: int,
    accelerator: str,
    mode: Mode = "kernel",
    most_skew_us: float | None = None,
    wire_us: float | None = None,
) -> Row:
    """Make one shape's row from what each rank found; ``kinds`` by contender.

    ``most_skew_us``: turns in which ranks started farther apart are dropped. ``wire_us``: T_m where
    nothing is timed for it.
    """
    entries = {
        name: _entry(kind, [rank[name] for rank in ranks], most_skew_us)
        for name, kind in kinds.items()
    }
    times = {name: _slowest_us(entry) for name, entry in entries.items() if entry.state == "right"}
    medians = {name: statistics.median(each) for name, each in times.items()}
    compute = medians.get("gemm")
    moves = [medians[name] for name in ("comm", "copy") if name in medians]
    comm = min(moves, default=wire_us)
    sequential = next((medians[name] for name in SEQUENTIAL if name in medians), None)
    for name, each in times.items():
        whole = entries[name].kind == "op"
        computes = entries[name].kind in ("op", "compute")
        flops = shape.flops(world) if computes else None
        entries[name] = entries[name].model_copy(
            update={
                "figures": figures(
                    each,
                    flops,
                    compute if whole else None,
                    comm if whole else None,
                    sequential if whole else None,
                )
            }
        )
    peers = {
        name: median
        for name, median in medians.items()
        if name not in (*OURS, *PROMISING) and entries[name].kind == "op"
    }
    best = min(peers, key=peers.__getitem__, default=None)
    mine = medians.get("mkernel")
    aimed = shape.aimed_at(world, accelerator)
    target, target_us = (shape.target, shape.target_us) if aimed else (None, None)
    wanted_us = target * compute if target is not None and compute is not None else target_us
    return Row(
        shape=shape,
        mode=mode,
        entries=entries,
        compute_us=compute,
        comm_us=comm,
        floor_us=None if compute is None or comm is None else max(compute, comm),
        best_peer=best,
        to_best=mine / peers[best] if mine is not None and best is not None else None,
        target=target,
        target_us=target_us,
        meets_target=mine <= wanted_us if mine is not None and wanted_us is not None else None,
    )


def figures(
    slowest_us: Sequence[float],
    flops: float | None,
    compute: float | None,
    comm: float | None,
    sequential: float | None,
) -> Figures:
    """Compute a contender's figures, from its slowest rank's time in each iteration and the parts'
    medians."""
    median = statistics.median(slowest_us)
    p10, p90 = np.percentile(slowest_us, (10, 90))
    rho = eta = None
    if compute is not None and comm is not None:
        rho = max(compute, comm) / median
        eta = (compute + comm - median) / min(compute, comm)
    return Figures(
        median_us=median,
        p10_us=float(p10),
        p90_us=float(p90),
        tflops=flops / median / 1e6 if flops is not None else None,
        rho=rho,
        eta=eta,
        speedup=sequential / median if sequential is not None else None,
        to_gemm=median / compute if compute is not None else None,
    )


def timing(settings: Mapping[str, Any], rows: Sequence[Row]) -> Timing:
    """Describe how a mode's turns were timed: a stopwatch's settings, and how the ranks started in its
    rows."""
    entries = [entry for row in rows for entry in row.entries.values()]
    skews = [skew for entry in entries for skew in entry.skew_us]
    return Timing(
        **settings,
        median_skew_us=round(statistics.median(skews), 3) if skews else None,
        turns=sum(len(entry.seconds) + entry.dropped for entry in entries),
        dropped=sum(entry.dropped for entry in entries),
    )


def _entry(kind: Kind, ranks: Sequence[Turns], most_skew_us: float | None) -> Entry:
    absent = next((turns.absent for turns in ranks if turns.absent is not None), None)
    if absent is not None:
        return Entry(kind=kind, state="absent", why=absent)
    failed = next((turns.failed for turns in ranks if turns.failed is not None), None)
    if failed is not None:
        return Entry(kind=kind, state="failed", why=failed)
    found = verify(ranks[0].limits, [turns.checks for turns in ranks])
    seconds = list(zip(*(turns.seconds for turns in ranks), strict=True))
    skews = [skew_us(each) for each in zip(*(turns.starts_ns for turns in ranks), strict=True)]
    kept = [
        turn
        for turn, skew in zip_longest(seconds, skews)
        if skew is None or most_skew_us is None or skew <= most_skew_us
    ]
    why = "" if found.passed else wrong(found.error)
    if found.passed and not kept and most_skew_us is not None:
        why = f"its ranks never started within {duration(most_skew_us)} of each other"
    return Entry(
        kind=kind,
        state="wrong" if not found.passed else "right" if kept else "failed",
        error=found.error,
        limit=found.tolerance,
        seconds=tuple(tuple(round(each, 8) for each in turn) for turn in kept),
        skew_us=tuple(skews),
        turns=len(kept),
        dropped=len(seconds) - len(kept),
        why=why,
        way=ranks[0].way,
    )


def wrong(error: float | None) -> str:
    """Return the text of a wrong contender's cell."""
    return "wrong: not finite" if error is None else f"wrong: {error:.0e}"


def _slowest_us(entry: Entry) -> list[float]:
    return [1e6 * max(iteration) for iteration in entry.seconds]
