"""Fits constants of the ascend machine description to published times.

    python bench/ascend_constants.py [--rounds 6] [--write FILE] [--planner FILE]

Only the rows that ``published.json`` marks as fitted are looked at: the published schedule is modelled
on candidate machines, and the mean square of log(modelled / published) is made small by a search along
one constant after the other. All other constants stay as they are in the default description. The
rows that check the fit are printed at the end. ``--write`` puts the result into a description, whose
``source`` is then yours to set right. ``--rounds 0`` fits nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.reference import PublishedRow, published, trace
from mkernel.backends.accelerators.ascend.timeline import model

FITTED = (("fabric", "link_gbs"), ("pipes", "mte2_gbs"), ("chip", "memory_gbs"))
STEPS = (0.8, 0.93, 0.98, 1.02, 1.07, 1.25)


class Rows:
    """Published rows and their traces, which do not depend on the machine."""

    def __init__(self, rows: list[PublishedRow]) -> None:
        self._rows = [(row, [trace(row.shape, i) for i in range(row.ranks)]) for row in rows]

    def ratios(self, machine: Machine) -> list[float]:
        """Modelled over published."""
        return [
            model(traces, machine, tracks=False).total_us / 1e3 / row.ms
            for row, traces in self._rows
        ]

    def loss(self, machine: Machine) -> float:
        """Mean square of the logarithm."""
        ratios = self.ratios(machine)
        return sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios)


def scaled(machine: Machine, part: str, name: str, by: float) -> Machine:
    """With one constant times ``by``, rounded to three digits."""
    data = machine.model_dump()
    data[part][name] = float(f"{data[part][name] * by:.3g}")
    return Machine.model_validate(data)


def fit(machine: Machine, rows: Rows, rounds: int) -> Machine:
    """Each constant in turn, the best of ``STEPS``; stops where no step helps."""
    best, loss = machine, rows.loss(machine)
    for number in range(rounds):
        before = loss
        for part, name in FITTED:
            for step in STEPS:
                tried = scaled(best, part, name, step)
                if (found := rows.loss(tried)) < loss:
                    best, loss = tried, found
        values = {name: getattr(getattr(best, part), name) for part, name in FITTED}
        print(f"round {number}: rms {math.sqrt(loss):.3f} {values}", flush=True)
        if loss == before:
            break
    return best


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    table = published().rows
    machine = load_machine()
    if given.rounds:
        machine = fit(machine, Rows([row for row in table if row.fitted]), given.rounds)
    for row in table:
        (ratio,) = Rows([row]).ratios(machine)
        use = "fitted" if row.fitted else "check"
        print(f"{row.ranks} x {row.m} x {row.k} x {row.n}: {100 * (ratio - 1):+.1f}% {use}")
    if given.write is not None:
        given.write.write_text(json.dumps(machine.model_dump(), indent=2) + "\n")


if __name__ == "__main__":
    main()
