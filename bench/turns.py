"""Share what benchmarks have that time whole things in turns: their arguments, ranks, turns and rows.

A script has a generator of rows, which runs on every rank, and a main that reads arguments by
``parser``, runs the ranks by ``launched`` and returns ``exit_code``. In each row its contenders take
turns in one run; a turn's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import graphs
import numpy as np
import results_file
import torch
from torch import Tensor, distributed, profiler
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch_group import default_group

import mkernel
from mkernel.harness.clock import Meeting, skew_us, wait_until
from mkernel.harness.contenders.symm_mem import ENVIRONMENT
from mkernel.harness.protocol import HOST_LEAD_S
from mkernel.launch import report

PEERS_ENVIRONMENT = {**ENVIRONMENT, "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast stays off."""
TURN_S, MOST_CALLS = 0.03, 20
MOST_SKEW = 0.01
"""The share of a turn's time by which ranks on GPUs may start apart; other turns are dropped."""
E4M3 = torch.float8_e4m3fn
LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-5, E4M3: 8e-2}
"""The limits of relative errors, by the dtype of weights."""

Call = Callable[[], object]
Made = TypeVar("Made")


class Unfit(Exception):
    """A contender is wrong or cannot be had here, as its message says."""


class Place:
    """A rank's device, its mesh, and what all ranks agree on."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (distributed.get_world_size(),))
        mkernel.init(self.mesh)
        self.rank, self.ranks = self.mesh.get_local_rank(), self.mesh.size()
        store = PrefixStore("turns", mkernel.world().group_store)
        self._meeting = Meeting(store, self.rank, self.ranks)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        mkernel.synchronize(self.mesh)

    def of_all(self, found: Any) -> list[Any]:
        """Return what every rank has found. Collective."""
        each: list[Any] = [None] * self.ranks
        distributed.all_gather_object(each, found)
        return each

    def captured(self, call: Call) -> Call:
        """Return the replay of a CUDA graph of the call; on a CPU the call."""
        return graphs.captured([call]).replay if self.cuda else call

    def timed(self, call: Call, calls: int) -> tuple[int, float]:
        """Start at one instant on all ranks; return when this one did, in nanoseconds, and the seconds
        of a call."""
        self.wait()
        start = wait_until(self._meeting.agree(HOST_LEAD_S))
        for _ in range(calls):
            call()
        self.wait()
        return start, (time.monotonic_ns() - start) / 1e9 / calls


# ---- contenders of a row -------------------------------------------------------------------------


def set_up(
    make: Callable[[], tuple[Made, dict[str, Any]]], place: Place
) -> tuple[Made | None, dict[str, Any]]:
    """Make one contender; return it, None where it failed on any rank, and its entry, whose numbers
    are the largest of all ranks'. Collective."""
    made, found = None, dict[str, Any]()
    try:
        made, found = make()
    except Unfit as failure:
        found = {"failed": str(failure)}
    except Exception as failure:
        lines = str(failure).splitlines() or [""]
        found = {"failed": f"{type(failure).__name__}: {lines[0]}"}
    each = place.of_all(found)
    failed = [one["failed"] for one in each if "failed" in one]
    return (None, {"failed": failed[0]}) if failed else (made, _largest(each))


def _largest(ranks: Sequence[Any]) -> Any:
    if isinstance(ranks[0], dict):
        return {name: _largest([each[name] for each in ranks]) for name in ranks[0]}
    return max(ranks) if isinstance(ranks[0], float) else ranks[0]


def of_contenders(
    makers: Mapping[str, Callable[[], tuple[Call, dict[str, Any]]]],
    turns: int,
    place: Place,
    traces: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Make contenders, let them take turns, and return their entries. ``traces``: the beginning of
    paths of traces of a call of each. Collective."""
    calls, entries = dict[str, Call](), dict[str, dict[str, Any]]()
    for name, make in makers.items():
        call, entries[name] = set_up(make, place)
        if call is not None:
            calls[name] = call
    for name, figures in take_turns(calls, turns, place).items():
        entries[name] |= figures
        count_turns(entries[name])
        if traces is not None:
            trace(calls[name], Path(f"{traces}_{name}"), place)
    return entries


def take_turns(calls: Mapping[str, Call], turns: int, place: Place) -> dict[str, dict[str, Any]]:
    """Let calls take turns, whose order alternates; return each one's figures. Collective."""
    numbers: dict[str, int] = {}
    for name, call in calls.items():
        took = max(place.of_all(place.timed(call, 2)[1]))
        numbers[name] = max(1, min(MOST_CALLS, round(TURN_S / took)))
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in calls if turn % 2 == 0 else reversed(calls):
            found[name].append(place.timed(calls[name], numbers[name]))
    ranks = place.of_all(found)
    skew = MOST_SKEW if place.cuda else math.inf
    return {name: _figures([rank[name] for rank in ranks], numbers[name], skew) for name in calls}


def _figures(
    ranks: Sequence[Sequence[tuple[int, float]]], calls: int, most_skew: float
) -> dict[str, Any]:
    """Return the slowest rank's figures; ``us``: of each turn, None where ranks started apart."""
    us: list[float | None] = []
    for same in zip(*ranks, strict=True):
        slowest = max(seconds for _, seconds in same)
        apart = skew_us([start for start, _ in same]) > most_skew * slowest * calls * 1e6
        us.append(None if apart else slowest * 1e6)
    kept = [each for each in us if each is not None]
    figures: dict[str, Any] = {"us": us, "calls_a_turn": calls, "dropped": len(us) - len(kept)}
    if not kept:
        return {**figures, "failed": "every turn was dropped"}
    p10, p90 = np.percentile(kept, (10, 90))
    median = statistics.median(kept)
    return {**figures, "median_us": median, "p10_us": float(p10), "p90_us": float(p90)}


def count_turns(entry: dict[str, Any]) -> None:
    """Leave of an entry's turns their number: turns stay out of git."""
    if "us" in entry:
        entry["turns"] = len(entry.pop("us"))


def trace(call: Call, path: Path, place: Place) -> None:
    """Write what one call of rank 0 runs, as a trace and as a table of what takes most. Collective."""
    place.wait()
    kinds = [profiler.ProfilerActivity.CPU]
    if place.cuda:
        kinds.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=kinds) if place.rank == 0 else nullcontext() as recorded:
        call()
        place.wait()
    if recorded is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(f"{path}.trace.json.gz")
        most = f"self_{place.device.type}_time_total"
        path.with_suffix(".txt").write_text(recorded.key_averages().table(most, row_limit=40))


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def shown(
    row: Mapping[str, Any], more: Callable[[str, dict[str, Any]], str] = lambda name, entry: ""
) -> list[str]:
    """Return a line of text for each contender. ``more``: what follows its time."""
    lines = []
    for name, entry in row["contenders"].items():
        text = entry.get("failed")
        if text is None:
            spread = f"{entry['p10_us']:.0f} to {entry['p90_us']:.0f}"
            text = f"{entry['median_us']:10.1f} us  ({spread}){more(name, entry)}"
        lines.append(f"  {name:18} {text}")
    return lines


# ---- a run ---------------------------------------------------------------------------------------


def parser(about: str, sizes: str, read: Callable[[str], object]) -> argparse.ArgumentParser:
    """Return a parser of what all of these scripts take. ``read``: reads one of ``sizes``."""

    def list_of_sizes(text: str) -> list[object]:
        return [read(each) for each in text.split(",")]

    found = argparse.ArgumentParser(description=about.partition("\n")[0])
    found.add_argument("--ranks", type=int, default=2)
    found.add_argument("--accelerator", default="hopper")
    found.add_argument("--sizes", default=sizes, type=list_of_sizes)
    found.add_argument("--turns", type=int, default=15)
    found.add_argument("--json", type=Path, help="the result, written after every row")
    return found


def size_of(text: str, widths: Iterable[str]) -> tuple[str, int]:
    """Read ``WIDTH:NUMBER``. ArgumentTypeError, ValueError: it is none."""
    width, _, number = text.partition(":")
    if width not in widths:
        raise argparse.ArgumentTypeError(f"{text}: widths are {', '.join(widths)}")
    return width, int(number)


def dtypes(text: str) -> list[torch.dtype]:
    """Read dtypes of weights. ArgumentTypeError: it has another."""
    known = {name_of(each): each for each in LIMIT}
    if unknown := {*text.split(",")} - known.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: dtypes are {', '.join(known)}")
    return [known[each] for each in text.split(",")]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def let_go() -> None:
    """Free what contenders of other rows hold: compiled code, graphs and their memory."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


Rows = Callable[..., Iterator[dict[str, Any]]]


def launched(
    benchmark: str, given: argparse.Namespace, rows: Rows, *arguments: Any,
    text: Callable[[dict[str, Any]], str], **figures: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return what ``rows(place, *arguments)`` yields on rank 0 of a run. Each row is printed and
    written as soon as it is known, beside other ``figures``."""
    os.environ.update(PEERS_ENVIRONMENT)
    found: list[dict[str, Any]] = []
    figures = {"accelerator": given.accelerator, "ranks": given.ranks, **figures, "rows": found}

    def done(rank: int, row: Any) -> None:
        found.append(row)
        print(text(row), flush=True)
        if given.json is not None:
            results_file.save(given.json, benchmark, figures)

    mkernel.launch(
        of_one_rank, rows, given.accelerator == "hopper", *arguments, ranks_per_node=given.ranks,
        accelerator=given.accelerator, timeout_s=300.0, on_report=done,
    )  # fmt: skip
    return found


def of_one_rank(rows: Rows, cuda: bool, *arguments: Any) -> None:
    """Run all rows; rank 0 reports each as it is done."""
    with default_group(cuda):
        place = Place(cuda)
        torch._dynamo.config.recompile_limit = 64
        for row in rows(place, *arguments):
            if place.rank == 0:
                report(row)
            let_go()


def exit_code(rows: Sequence[Mapping[str, Any]], wanted: int) -> int:
    """Return 0 if there are all rows and none misses anything, else 1."""
    return 1 if len(rows) < wanted or any(row["missed"] for row in rows) else 0
