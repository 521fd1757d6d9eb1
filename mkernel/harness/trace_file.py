"""A timeline as a Perfetto trace (Trace Event Format; open it at ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkernel.backends.contracts.instrumented import Span
from mkernel.harness.timeline import Timeline


def write_trace(run: Timeline, path: Path) -> None:
    """One process a rank, one thread a track or pipe; microseconds of the timeline's clock."""
    content = {
        "displayTimeUnit": "ns",
        "otherData": {"clock": run.clock},
        "traceEvents": list(_events(run)),
    }
    path.write_text(json.dumps(content))


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
