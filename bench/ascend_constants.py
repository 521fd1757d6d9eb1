"""Fits constants of the ascend machine description to published times.

    python bench/ascend_constants.py [--rounds 6] [--swap] [--write FILE] [--json FILE]

Only the rows that ``published.json`` marks as fitted are looked at: the published schedule is modelled
on candidate machines, and the mean square of log(modelled / published) is made small by a search along
one constant after the other. All other constants stay as they are in the default description. The
rows that check the fit are printed at the end. ``--write`` puts the result into a description, whose
``source`` is then yours to set right. ``--rounds 0`` fits nothing. ``--swap`` fits on the rows that
check, and checks on the others: how far constants move says how well the rows determine them.
``--json`` writes both fits, with the errors of all rows.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import results_file

from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.reference import PublishedRow, published, trace
from mkernel.backends.accelerators.ascend.timeline import model

FITTED = (("fabric", "efficiency"), ("pipes", "mte2_gbs"), ("chip", "l2_gbs"))
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


def fitted(machine: Machine, fits: list[PublishedRow], rounds: int) -> dict[str, Any]:
    """The constants that fit those rows, and every row's error with them, in percent."""
    found = fit(machine, Rows(fits), rounds) if rounds else machine
    errors = {}
    for row in published().rows:
        (ratio,) = Rows([row]).ratios(found)
        name = f"{row.ranks} x {row.m} x {row.k} x {row.n}"
        errors[name] = round(100 * (ratio - 1), 1)
        print(f"{name}: {errors[name]:+.1f}% {'fitted' if row in fits else 'check'}")
    sizes = [abs(error) for error in errors.values()]
    mean, worst = round(sum(sizes) / len(sizes), 2), max(sizes)
    print(f"mean {mean:.1f}%, worst {worst:.1f}%")
    constants = {f"{part}.{name}": getattr(getattr(found, part), name) for part, name in FITTED}
    return {
        "constants": constants,
        "errors": errors,
        "mean": mean,
        "worst": worst,
        "machine": found,
    }


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    halves = [[row for row in published().rows if row.fitted is side] for side in (True, False)]
    machine = load_machine()
    found = fitted(machine, halves[given.swap], given.rounds)
    if given.write is not None:
        given.write.write_text(json.dumps(found["machine"].model_dump(), indent=2) + "\n")
    if given.json is not None:
        other = fitted(machine, halves[not given.swap], given.rounds)
        for one in (found, other):
            del one["machine"]
        both = {"format": results_file.FORMAT, "fit": found, "swapped": other}
        given.json.write_text(json.dumps(both, indent=2) + "\n")


if __name__ == "__main__":
    main()
