"""Races between ranks that are processes: each rank leaves logs of its strict calls in a folder,
which are examined together afterwards (``sim/race_log.hpp``)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from mkernel.backends.accelerators.ascend.native import native

_SUFFIX = ".races"


def keep(folder: Path, rank: int, number: int, log: bytes) -> None:
    """Write the log of a rank's call. OSError: the folder cannot be written to."""
    (folder / f"{rank}-{number}{_SUFFIX}").write_bytes(log)


def between(folder: Path) -> str:
    """Return the first race between ranks of the world that left its logs there, in words; empty if
    there is none.

    Raises:
        ValueError: there are no logs, or they are not those of all calls of one world.
    """
    logs: dict[int, dict[int, bytes]] = defaultdict(dict)
    for file in folder.glob(f"*-*{_SUFFIX}"):
        rank, number = map(int, file.stem.split("-"))
        logs[rank][number] = file.read_bytes()
    if not logs or set(logs) != set(range(len(logs))):
        raise ValueError(f"{folder}: no logs of all ranks of a world, but of {sorted(logs)}")
    if len({tuple(sorted(calls)) for calls in logs.values()}) > 1:
        raise ValueError(f"{folder}: ranks have left logs of different calls; did all of them end?")
    ranks = [[calls[number] for number in sorted(calls)] for _, calls in sorted(logs.items())]
    found: str = native().race_between(ranks)
    return found
