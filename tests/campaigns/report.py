"""The result of a soak as JSON, and of several soaks as one."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from campaigns.flat import grown
from campaigns.life_judge import Ended
from campaigns.lives import Plan, libraries


class Report:
    """Adds up the lives of one soak."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._start = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._ops: Counter[str] = Counter()
        self._noticed_s: list[float] = []
        self._grown: dict[str, int] = {}
        self._wrong: list[str] = []
        self._ended = False

    def add(self, ended: Ended, wrong: list[str]) -> None:
        """Add a life and what was wrong with it."""
        self._wrong += wrong
        self._counts["lives"] += 1
        self._counts["killed"] += ended.victim is not None
        for lived in ended.lived.values():
            self._counts["calls_judged"] += lived.calls
            self._counts["collectives_judged"] += lived.collectives
            self._ops.update(lived.ops)
            if ended.victim is not None and lived.error is not None:
                self._noticed_s.append(lived.at - ended.killed_at)
        for samples in ended.samples.values():
            self._counts["samples"] += len(samples)
            for kind, by in grown(samples).items():
                if kind not in self._plan.allowed:
                    continue
                self._grown[kind] = max(by, self._grown.get(kind, by))

    def end(self, wrong: list[str]) -> None:
        """Note that all lives are over, and what was wrong with the whole."""
        self._wrong += wrong
        self._ended = True

    def line(self, ended: Ended) -> str:
        """Describe a life in a line."""
        calls = sum(lived.calls for lived in ended.lived.values())
        end = "all left" if ended.victim is None else f"rank {ended.victim} was killed"
        samples = min(map(len, ended.samples.values()), default=0)
        return (
            f"life {ended.number}: {calls} calls of those that are left, {samples} samples, {end}"
        )

    def summary(self) -> dict[str, Any]:
        """Return a JSON-safe summary. Growth is the most of any process in a life, by kind of memory
        that was judged, in bytes."""
        wrong = self._wrong if self._ended else [*self._wrong, "it did not come to its end"]
        return {
            "accelerator": self._plan.accelerator,
            "ranks": self._plan.ranks,
            "seed": self._plan.seed,
            "beside": self._plan.beside,
            "libraries": libraries(),
            "seconds": round(time.monotonic() - self._start),
            **{name: self._counts[name] for name in sorted(self._counts)},
            "slowest_notice_s": round(max(self._noticed_s, default=0.0), 2),
            "most_grown_bytes": self._grown,
            "calls_by_op_and_way": dict(sorted(self._ops.items())),
            "wrong": wrong,
        }


_ADDED = ("seconds", "lives", "killed", "calls_judged", "collectives_judged", "samples", "calls")


_SAME = ("commit", "hardware", "software")


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several results of one machine, some of them perhaps merged before, as one: the runs
    without their ops, and their sums. ValueError where they are of different commits, machines or
    versions."""
    first = results[0]
    for name in _SAME:
        said = [json.dumps(each[name], sort_keys=True) for each in results]
        if len(set(said)) > 1:
            raise ValueError(f"soaks with different {name} cannot be merged: {said}")
    total: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    runs: list[dict[str, Any]] = []
    for figures in [each["figures"] for each in results]:
        ops.update(figures.get("calls_by_op_and_way", {}))
        for run in figures.get("runs", [figures]):
            runs.append({name: run[name] for name in run if name != "calls_by_op_and_way"})
            total.update({name: run[name] for name in _ADDED if name in run})
    figures = {
        "runs": runs,
        "total": dict(total),
        "calls_by_op_and_way": dict(sorted(ops.items())),
        "wrong": [f"{_name(run)}: {each}" for run in runs for each in run["wrong"]],
    }
    return {**first, "figures": figures}


def _name(run: Mapping[str, Any]) -> str:
    return f"seed {run['seed']}" if "seed" in run else f"{run['calls']} calls"
