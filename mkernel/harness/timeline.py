"""The times at which each rank communicated and computed, on one of two clocks that are never mixed;
and as a Perfetto trace (Trace Event Format; open it at ui.perfetto.dev).

*Modelled*, where the backend models time: every core of one pipelined call. Else *wall*: only how long
a call's communication and compute took in all is known, not when, so each view's last timed call
is drawn as two bars from its start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkernel.backends.contracts.instrumented import ModelledRun, Span, Track
from mkernel.harness.spec import VIEWS
from mkernel.harness.turns import Turns
from mkernel.plan.simulate import Traced
from mkernel.user_files import write_file

_GAP = 1.05  # between views, in lengths of the one before


@dataclass(frozen=True)
class Timeline:
    """Tracks on one clock.

    Attributes:
        clock, label: which clock it is, in a sentence and in a few words.
        title: of the picture. total_us: its length in microseconds.
        pipes: what is known beyond the tracks of the picture.
        sections: names of what follows each other, and where each begins, in microseconds.
    """

    clock: str
    label: str
    title: str
    total_us: float
    tracks: tuple[Track, ...]
    pipes: tuple[Track, ...] = ()
    sections: tuple[tuple[str, float], ...] = ()


def modelled(calls: Sequence[ModelledRun]) -> Timeline:
    """Return the tracks of pipelined calls that follow each other: one for every core; and its
    pipes."""
    machine = calls[0].machine
    return Timeline(
        clock=f"modelled, {machine}; not measured",
        label=f"modelled time, {machine}",
        title="a pipelined call: the share of each rank's cores that work",
        total_us=sum(call.total_us for call in calls),
        tracks=_one_after_another([(call.total_us, call.tracks) for call in calls]),
        pipes=_one_after_another([(call.total_us, (*call.pipes, *call.links)) for call in calls]),
    )


def _one_after_another(calls: Sequence[tuple[float, Sequence[Track]]]) -> tuple[Track, ...]:
    """Join (length, tracks) of each call; a track goes on where the call before has one like it."""
    tracks: dict[tuple[int, str, str], Track] = {}
    start = 0.0
    for length, found in calls:
        for track in found:
            spans = [span._replace(start_us=start + span.start_us) for span in track.spans]
            key = (track.rank, track.name, track.kernel)
            tracks.setdefault(key, track._replace(spans=[])).spans.extend(spans)
        start += length
    return tuple(tracks.values())


def simulated(found: Traced) -> Timeline:
    """Return a simulated call: what each link of a node that stands for its kind did, and each such
    rank."""
    plan = found.call.plan
    first = [site.nodes[0][0] * plan.ranks_per_node for site in plan.placement.sites]
    tracks = [
        Track(
            first[at.site] + at.local,
            "compute",
            "compute",
            [Span(name, start, end - start) for name, start, end in steps if end > start],
        )
        for at, steps in found.computed.items()
    ]
    tracks += [
        Track(
            first[link.site],
            link.name,
            "comm",
            [Span(one.message.name, one.start_us, one.duration_us) for one in found.busy[number]],
        )
        for link, number in found.call.links.items()
    ]
    return Timeline(
        clock=f"simulated with the constants of {found.result.constants}; not measured",
        label=f"simulated, {found.result.constants}",
        title="a simulated call: links of one node of each kind, and its ranks' tiles",
        total_us=found.result.time_us,
        tracks=tuple(tracks),
    )


def wall(ranks: Sequence[Mapping[str, Turns]]) -> Timeline:
    """Return each rank's views' last timed calls one after another: the call, and its comm and
    compute."""
    tracks = {
        (rank, kind): Track(rank, f"{kind} (wall)", kind, [])
        for rank in range(len(ranks))
        for kind in ("call", "compute", "comm")
    }
    start = end = 0.0
    sections = []
    for view in VIEWS:
        sections.append((view.replace("_", " "), 1e6 * start))
        for rank, found in enumerate(ranks):
            took = {"call": found[view].seconds[-1], **found[view].parts[-1]}
            for kind, seconds in took.items():
                if seconds > 0 and (rank, kind) in tracks:
                    name = f"{view.replace('_', ' ')}: {kind}"
                    tracks[rank, kind].spans.append(Span(name, 1e6 * start, 1e6 * seconds))
        longest = max(found[view].seconds[-1] for found in ranks)
        end = start + longest
        start += _GAP * longest
    return Timeline(
        clock="wall, measured on this host; comm and compute are a call's sums, drawn from its start",
        label="wall time on this host",
        title="how long a call of each view computed and communicated in all",
        total_us=1e6 * end,
        tracks=tuple(tracks.values()),
        sections=tuple(sections),
    )


def write_trace(run: Timeline, path: Path) -> None:
    """Write one process a rank, one thread a track or pipe, in microseconds of the timeline's clock."""
    content = {
        "displayTimeUnit": "ns",
        "otherData": {"clock": run.clock},
        "traceEvents": list(_events(run)),
    }
    write_file(path, json.dumps(content))


def _events(run: Timeline) -> Iterator[dict[str, Any]]:
    for rank in sorted({track.rank for track in run.tracks}):
        name = f"rank {rank} ({run.label})"
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
    for thread, track in enumerate((*run.tracks, *run.pipes)):
        where = {"pid": track.rank, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track.name}}
        for span in track.spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": track.kernel,
                **where,
                "ts": span.start_us,
                "dur": span.duration_us,
                "args": _arguments(span),
            }


def _arguments(span: Span) -> dict[str, int]:
    named = {"chunk": span.chunk, "peer": span.peer}
    return {name: value for name, value in named.items() if value is not None}
