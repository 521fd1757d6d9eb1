"""Modelled time and timeline of a call, from the traces of all its ranks.

Everything here is *modelled*: the recorded schedule replayed on a machine description, never a
measurement. Times are microseconds from the launch of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.accelerators.ascend.trace import NO_CHUNK, Kind, Pipe, Role
from mkernel.backends.contracts.instrumented import KernelSpan, ModelledRun, Span, Track, View

_SPAN = np.dtype(
    [
        ("rank", "<u4"),
        ("role", "<u4"),
        ("core", "<u4"),
        ("kind", "u1"),
        ("pipe", "u1"),
        ("reserved", "<u2"),
        ("chunk", "<u4"),
        ("peer", "<u4"),
        ("start_ns", "<f8"),
        ("duration_ns", "<f8"),
    ]
)
_SAME_RUN_US = 2.0
"""Microseconds: equal instructions of one chunk whose gap is at most this make one slice of the
timeline."""

_VECTOR_WORK = 0xFF
"""The kind that stands for all work of the vector unit and the stores of its results."""
_NAMES = {int(kind): kind.name for kind in Kind} | {
    int(Kind.TMATMUL_ACC): Kind.TMATMUL.name,
    _VECTOR_WORK: "VECTOR",
}
_SIGNALS = (Kind.TNOTIFY, Kind.TWAIT, Kind.NIC_PUT)
_BETWEEN_RANKS = (Kind.TPUT, Kind.TGET, *_SIGNALS)

_Spans = npt.NDArray[np.void]


def model(
    traces: Sequence[bytes], machine: Machine, view: View = "pipelined", *, tracks: bool = True
) -> ModelledRun:
    """Replay the traces of all ranks of one call (any view's; ``pipelined`` is the usual one).

    ``compute_only`` ignores signals and leaves the comm kernel out; ``sequential`` starts compute
    when communication has ended on every rank. Raises RuntimeError, naming core and signal, if a
    wait is never satisfied.
    """
    from mkernel.backends.accelerators.ascend import _ascend

    total, kernels, raw = _ascend.replay(list(traces), machine.native(), view, tracks)
    spans = np.frombuffer(raw, dtype=_SPAN)
    return ModelledRun(
        machine=machine.name,
        view=view,
        total_us=total / 1e3,
        kernels=tuple(
            KernelSpan(rank, name, start / 1e3, end / 1e3) for rank, name, start, end in kernels
        ),
        tracks=tuple(_track(name, role, each) for name, role, each in _cores(spans)),
        pipes=tuple(
            track for name, role, each in _cores(spans) for track in _pipes(name, role, each)
        ),
        links=tuple(_links(spans)),
    )


def replayed_spans(traces: Sequence[bytes], machine: Machine) -> tuple[float, _Spans]:
    """Return the microseconds of a pipelined call, and every instruction that its cores executed."""
    from mkernel.backends.accelerators.ascend import _ascend

    total, _, raw = _ascend.replay(list(traces), machine.native(), "pipelined", True)
    return total / 1e3, np.frombuffer(raw, dtype=_SPAN)


def _cores(spans: _Spans) -> Iterator[tuple[str, Role, _Spans]]:
    """Yield (name, kind, its spans by start) of each core, rank by rank."""
    order = np.lexsort((spans["start_ns"], spans["core"], spans["role"], spans["rank"]))
    spans = spans[order]
    key = (
        spans["rank"].astype(np.uint64) << np.uint64(34)
        | spans["role"].astype(np.uint64) << np.uint64(32)
        | spans["core"].astype(np.uint64)
    )
    for group in np.split(spans, np.flatnonzero(np.diff(key)) + 1):
        if len(group):
            role = Role(group["role"][0])
            yield f"{role.unit} {int(group['core'][0])}", role, group


def _track(name: str, role: Role, spans: _Spans) -> Track:
    """Return a core's track as a whole: its main work, one thing at a time, and the waits in which
    nothing else happened."""
    worked = _one_at_a_time(_runs(_work(role, spans)))
    return Track(
        int(spans["rank"][0]),
        name,
        role.kernel,
        sorted(worked + _waits(spans, worked), key=lambda each: each.start_us),
    )


def _work(role: Role, spans: _Spans) -> _Spans:
    """Return a core's main work. Cube cores: products and their stores. Vector cores: puts, vector
    work and scalar computation; for a core whose vector unit does nothing, the stores themselves."""
    pipe = spans["pipe"]
    work: _Spans
    if role == Role.CUBE:
        work = spans[(pipe == Pipe.M) | (pipe == Pipe.FIX)]
        return work
    vector = pipe == Pipe.V
    work = spans[vector | (pipe == Pipe.MTE3) | np.isin(spans["kind"], (Kind.NIC_PUT, Kind.SCALAR))]
    if vector.any():
        work["kind"][(work["pipe"] == Pipe.V) | (work["kind"] == Kind.TSTORE)] = _VECTOR_WORK
    return work


def _one_at_a_time(slices: list[Span]) -> list[Span]:
    """Return slices by start; an overlap of two slices is attributed to the earlier one."""
    kept: list[Span] = []
    free = 0.0
    for each in slices:
        start, end = max(each.start_us, free), each.start_us + each.duration_us
        if not kept or end > free:
            kept.append(each._replace(start_us=start, duration_us=end - start))
            free = end
    return kept


def _pipes(name: str, role: Role, spans: _Spans) -> Iterator[Track]:
    """Yield a track for each pipe of a core."""
    for pipe in Pipe:
        own = spans[spans["pipe"] == pipe]
        if len(own):
            rank = int(spans["rank"][0])
            yield Track(rank, f"{name} {pipe.name}", role.kernel, _runs(own))


def _links(spans: _Spans) -> Iterator[Track]:
    """Yield a track for each link of a rank: the times at which any core put to that peer, or the
    peer's got from it."""
    moved = spans[np.isin(spans["kind"], (Kind.TPUT, Kind.TGET)) & (spans["peer"] != spans["rank"])]
    gets = moved["kind"] == Kind.TGET
    moved["rank"], moved["peer"] = (
        np.where(gets, moved["peer"], moved["rank"]),
        np.where(gets, moved["rank"], moved["peer"]),
    )
    for rank, peer in np.unique(moved[["rank", "peer"]]):
        own = moved[(moved["rank"] == rank) & (moved["peer"] == peer)]
        own = own[np.argsort(own["start_ns"], kind="stable")]
        start = own["start_ns"] / 1e3
        until = np.maximum.accumulate(start + own["duration_ns"] / 1e3)
        first = np.concatenate(([0], np.flatnonzero(start[1:] > until[:-1]) + 1))
        last = np.concatenate((first[1:] - 1, [len(own) - 1]))
        busy = [
            Span("LINK", float(start[i]), float(until[j] - start[i]), None, int(peer))
            for i, j in zip(first, last, strict=True)
        ]
        yield Track(int(rank), f"link to rank {peer}", "comm", busy)


def _of(spans: _Spans, *kinds: int) -> _Spans:
    return spans[np.isin(spans["kind"], kinds)]


def _runs(spans: _Spans) -> list[Span]:
    """Merge consecutive spans of one kind, chunk and peer into one slice each; signals stay single."""
    if not len(spans):
        return []
    start = spans["start_ns"] / 1e3
    end = start + spans["duration_ns"] / 1e3
    kind = np.where(spans["kind"] == Kind.TMATMUL_ACC, Kind.TMATMUL, spans["kind"])
    new = start[1:] - np.maximum.accumulate(end)[:-1] > _SAME_RUN_US
    new |= np.isin(kind[1:], _SIGNALS)
    for like in (kind, spans["chunk"], spans["peer"]):
        new |= np.diff(like.astype(np.int64)) != 0
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    until = np.maximum.reduceat(end, first)
    return [
        Span(
            _NAMES[int(kind[i])],
            float(start[i]),
            float(last - start[i]),
            _chunk(int(spans["chunk"][i])),
            int(spans["peer"][i]) if kind[i] in _BETWEEN_RANKS else None,
        )
        for i, last in zip(first, until, strict=True)
    ]


def _chunk(value: int) -> int | None:
    return None if value == NO_CHUNK else value


def _waits(spans: _Spans, busy: list[Span]) -> list[Span]:
    """Return waits for signals, less the time for which the core's other pipes still worked."""
    slices = []
    at = 0
    for span in _of(spans, Kind.TWAIT):
        start = float(span["start_ns"]) / 1e3
        end = start + float(span["duration_ns"]) / 1e3
        while at < len(busy) and busy[at].start_us + busy[at].duration_us <= start:
            at += 1
        i = at
        while i < len(busy) and busy[i].start_us < end:
            start = max(start, busy[i].start_us + busy[i].duration_us)
            i += 1
        if end - start > 1e-3:
            chunk, peer = _chunk(int(span["chunk"])), int(span["peer"])
            slices.append(Span("TWAIT", start, end - start, chunk, peer))
    return slices
