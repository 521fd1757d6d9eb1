"""Gains over peers in result files, and which results are the newest of their kind.

Two results are of one kind where the same op was timed in the same mode at the same size, with the same
operands, on as many ranks and nodes of the same card. All drawn shapes of an op are of one kind, or of
two, if those of few rows were drawn by themselves: a draw of another seed takes the place of the one
before.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mkernel.harness import conditions
from mkernel.harness.bench_report import inputs
from mkernel.harness.contenders import OURS, PROMISING
from mkernel.harness.draws import are_few_rows
from mkernel.harness.results import Entry, Report, Row, read

WHOLE_MODELS, WHOLE_LAYERS = WHOLE = ("whole_models", "whole_layers")
"""The files of models, which ``bench/whole_models.py`` writes, and of layers of several ops, which a
script before it wrote."""
OWN = (*OURS, *PROMISING)
"""Contenders that are no peers."""
DRAWN = ANY_DRAWN, FEW_DRAWN = ("random", "random, of few rows")
"""The sources of shapes that were drawn."""
LIMITS_US = (20.0, 200.0)
"""Divide calls by the best peer's time: launch-bound ones, those in between, and long ones."""


class Gain(NamedTuple):
    """One row: mkernel beside the fastest right peer, or why the two cannot be compared."""

    kind: Hashable
    op: str
    size: str
    mine_us: float | None
    peers_us: dict[str, float]
    why: str = ""

    @property
    def best_us(self) -> float | None:
        """Return the fastest peer's time."""
        return min(self.peers_us.values(), default=None)

    @property
    def ratio(self) -> float | None:
        """Return the fastest peer's time over mkernel's: above 1, mkernel is faster."""
        best = self.best_us
        return best / self.mine_us if best is not None and self.mine_us is not None else None


@dataclass(frozen=True)
class Series:
    """The rows of one file in one mode.

    Attributes:
        shapes: where they come from, and whether they are held out. held_out: a draw whose seed was
            used for nothing before. source: ``random``, a shipped list's name, one of :data:`WHOLE`, or
            empty: sizes as given.
        inputs: their dtype, and how they are scaled. card: empty where it was not recorded.
        lost: the commit is not in the repository's history.
        when: date and time of day; an older file has no time.
    """

    file: str
    mode: str
    shapes: str
    held_out: bool
    source: str
    inputs: str
    card: str
    accelerator: str
    ranks: int
    nodes: int
    commit: str
    lost: bool
    when: str
    rows: tuple[Gain, ...]

    @property
    def date(self) -> str:
        """Return the day on which it was measured."""
        return self.when[:10]

    @property
    def on(self) -> str:
        """Return how many ranks ran on which card."""
        return f"{self.ranks} x {self.card or 'GPU'}"

    @property
    def measured(self) -> str:
        """Return which commit was measured, and on which day."""
        return f"`{self.commit[:8]}`{' (lost)' if self.lost else ''}, {self.date}"

    @property
    def ops(self) -> list[str]:
        """Return the ops whose rows these are, in their order."""
        return list(dict.fromkeys(row.op for row in self.rows))

    @property
    def ratios(self) -> list[float]:
        """Return the ratios of the rows that have one."""
        return [row.ratio for row in self.rows if row.ratio is not None]

    @property
    def peers(self) -> dict[str, int]:
        """Return the peers with a time, and in how many rows."""
        names = [name for row in self.rows for name in row.peers_us]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def of(self, op: str) -> Series:
        """Return the rows of one op."""
        rows = tuple(row for row in self.rows if row.op == op)
        return replace(self, rows=rows)


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return statistics.geometric_mean(ratios)


def by_time(rows: Iterable[Gain]) -> float:
    """Return the peers' summed time over mkernel's: each row weighs what it takes."""
    both = [(row.best_us, row.mine_us) for row in rows if row.ratio is not None]
    return sum(best or 0.0 for best, _ in both) / sum(mine or 0.0 for _, mine in both)


def bands(rows: Iterable[Gain]) -> list[list[float]]:
    """Return the ratios by the best peer's time: below, between and above :data:`LIMITS_US`."""
    found: list[list[float]] = [[] for _ in range(len(LIMITS_US) + 1)]
    for row in rows:
        if row.ratio is not None and row.best_us is not None:
            found[sum(row.best_us >= limit for limit in LIMITS_US)].append(row.ratio)
    return found


def all_series(folder: Path) -> list[Series]:
    """Return every file's, the newest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        report = read(path)
        if report is not None:
            found += of_report(path.stem, report)
        elif path.stem in WHOLE:
            content = json.loads(path.read_text())
            gains = _of_models if path.stem == WHOLE_MODELS else _of_layers
            found += _of_whole(path.stem, content, gains(content["figures"]["rows"]))
    return sorted(found, key=lambda each: (each.when, each.held_out), reverse=True)


def newest(series: Sequence[Series]) -> list[Series]:
    """Return those of which a later one does not have every row."""
    return [each for each in series if newer(each, series) is None]


def newer(one: Series, series: Iterable[Series]) -> Series | None:
    """Return the later results that have every row of this one, and every peer."""
    kinds = {row.kind for row in one.rows}
    for each in series:
        later = (each.when, each.held_out) > (one.when, one.held_out)
        peers = one.peers.keys() <= each.peers.keys()
        if later and peers and kinds <= {row.kind for row in each.rows}:
            return each
    return None


def of_report(file: str, report: Report) -> list[Series]:
    """Return a series for each mode of a benchmark's report."""
    drawn = _drawn(report)
    found = []
    for mode in report.spec.modes:
        rows = tuple(_gain(report, row, drawn) for row in report.rows if row.mode == mode)
        counted = mode == "kernel" and report.spec.launches
        found.append(
            Series(
                file=file,
                mode=f"{mode}, launches counted" if counted else mode,
                shapes=conditions.shapes(report),
                held_out=drawn is not None and not conditions.fitted(report),
                source=drawn or conditions.listed_as(report) or "",
                inputs=inputs(report),
                card=card(report.provenance["hardware"]),
                accelerator=report.accelerator,
                ranks=report.ranks,
                nodes=report.nodes,
                rows=rows,
                **_when(report.provenance),
            )
        )
    return found


def card(hardware: dict[str, Any]) -> str:
    """Return the accelerators' name without vendor and memory; empty: not recorded."""
    name = str(next(iter(hardware.get("gpus") or ()), ""))
    words = [word for word in name.split() if any(map(str.isdigit, word))]
    shared = " (shared)" if hardware.get("shared") else ""
    return (words[0] if words else name) + shared


def _when(provenance: dict[str, Any]) -> dict[str, Any]:
    return {
        "commit": provenance["commit"],
        "lost": provenance.get("commit_from") == "lost",
        "when": f"{provenance['date']} {provenance.get('time', '')}".strip(),
    }


def _drawn(report: Report) -> str | None:
    """Return what drawn shapes are called; None: they are listed."""
    if report.spec.source != "random":
        return None
    return FEW_DRAWN if are_few_rows(report.spec.shapes) else ANY_DRAWN


def _gain(report: Report, row: Row, drawn: str | None) -> Gain:
    spec, shape = report.spec, row.shape
    problem = drawn or (shape.size, shape.layout)
    kind = (
        shape.op, row.mode, spec.launches and row.mode == "kernel", problem, report.accelerator,
        card(report.provenance["hardware"]), report.ranks, report.nodes, report.carrier, spec.dtype,
        spec.scales, spec.fast_accum, spec.norm, spec.routing, spec.invariant,
    )  # fmt: skip
    mine = row.entries.get("mkernel")
    peers = {
        name: entry.figures.median_us
        for name, entry in row.entries.items()
        if entry.kind == "op" and name not in OWN and entry.figures is not None
    }
    mine_us = mine.figures.median_us if mine is not None and mine.figures is not None else None
    return Gain(kind, shape.op, shape.size, mine_us, peers, _why(row, mine))


def _why(row: Row, mine: Entry | None) -> str:
    """Return why there is no ratio; empty where there is one."""
    if mine is None or mine.figures is None:
        return "mkernel was not timed" if mine is None else f"mkernel {mine.state}: {mine.why}"
    if row.best_peer is not None:
        return ""
    lost = [
        f"{name} {entry.state}: {entry.why}"
        for name, entry in row.entries.items()
        if entry.kind == "op" and name not in OWN and entry.state in ("wrong", "failed")
    ]
    return "; ".join(lost) or "no peer ran"


def _of_models(rows: Sequence[dict[str, Any]]) -> dict[str, list[Gain]]:
    """Return the gains of models by measure, mode and which of ours: a row is a model at a size."""
    found: dict[str, list[Gain]] = {}
    for row in rows:
        entries = row["contenders"]
        for name, entry in entries.items():
            ours, mode = name.split()
            if ours not in ("nn", "styles", "pass"):
                continue
            peers = {
                peer: us
                for peer in ("torch", "async")
                if (us := entries.get(f"{peer} {mode}", {}).get("median_us")) is not None
            }
            op = f"Llama {row['width']}"
            size = f"{row['tokens']} tokens, B {row['batch']}"
            kind = (WHOLE_MODELS, name, row["measure"], op, size)
            gain = Gain(kind, op, size, entry.get("median_us"), peers, entry.get("failed", ""))
            found.setdefault(f"{row['measure']}, {mode}, {ours}", []).append(gain)
    return found


def _of_layers(rows: Sequence[dict[str, Any]]) -> dict[str, list[Gain]]:
    """Return the gains of layers by mode and direction: a row is a layer at a number of tokens."""
    found: dict[str, list[Gain]] = {}
    for row in rows:
        times = {name: us for name, us in row["us"].items() if not isinstance(us, str)}
        mine = times.pop("mkernel", None)
        lost = {name: us for name, us in row["us"].items() if isinstance(us, str)}
        size = f"{row['tokens']} tokens"
        kind = (WHOLE_LAYERS, row["mode"], row["backward"], row["layer"], row["tokens"])
        why = "; ".join(f"{name}: {said}" for name, said in lost.items())
        mode = f"{row['mode']}, {'with backward' if row['backward'] else 'forward'}"
        found.setdefault(mode, []).append(Gain(kind, row["layer"], size, mine, times, why))
    return found


def _of_whole(file: str, content: dict[str, Any], by_mode: dict[str, list[Gain]]) -> list[Series]:
    return [
        Series(
            file=file,
            mode=mode,
            shapes=file.replace("_", " "),
            held_out=False,
            source=file,
            inputs="bfloat16",
            card=card(content["hardware"]),
            accelerator=content["figures"].get("accelerator", ""),
            ranks=content["figures"].get("ranks", 2),
            nodes=1,
            rows=tuple(rows),
            **_when(content),
        )
        for mode, rows in by_mode.items()
    ]
