"""Breakdown of a modelled call's time: how busy each rank's pipes, memory and links were, and whom
its cores waited for. Modelled, never measured; microseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.accelerators.ascend.timeline import replayed_spans
from mkernel.backends.accelerators.ascend.trace import (
    Kind,
    Pipe,
    Role,
    communication,
    cores,
)
from mkernel.topology.model import Model

_OF_MEMORY = (Kind.TLOAD, Kind.TSTORE, Kind.TPUT, Kind.TGET)


class RankUse(Model):
    """One rank's use of its resources.

    ``pipes``: time for which a pipe of each unit executed, as the mean over the rank's cores of
    that unit; it includes the time for which the pipe was held while a memory or link that ranks
    share was busy. ``memory_us``, ``egress_us``, ``ingress_us`` and ``links`` (by the rank written
    to): bytes over rate. ``waits``: by kernel and the rank waited for, as the mean over the
    kernel's cores.
    """

    rank: int
    pipes: dict[str, float]
    memory_us: float
    egress_us: float
    ingress_us: float
    links: dict[int, float]
    waits: dict[str, dict[int, float]]


class Explanation(Model):
    """The times of a pipelined call, and of its communication alone: every comm kernel by itself,
    whose data counts as already computed. Both include one launch."""

    pipelined_us: float
    communication_us: float
    ranks: tuple[RankUse, ...]


def explain(traces: Sequence[bytes], machine: Machine) -> Explanation:
    """Evaluate the traces of all ranks of one call."""
    total_us, spans = replayed_spans(traces, machine)
    alone_us, _ = replayed_spans(communication(traces), machine)
    world = len(traces)
    sent, touched = np.zeros((world, world)), np.zeros(world)
    counts = []
    for rank, trace in enumerate(traces):
        own = cores(trace)
        counts.append([sum(role == each for role, _ in own) for each in Role])
        for _, records in own:
            moved = records[np.isin(records["kind"], _OF_MEMORY) & (records["pipe"] != Pipe.V)]
            touched[rank] += moved["amount"].sum()
            puts, gets = (moved[moved["kind"] == kind] for kind in (Kind.TPUT, Kind.TGET))
            for each in (puts, gets):
                np.add.at(touched, each["peer"], each["amount"].astype(float))
            np.add.at(sent[rank], puts["peer"], puts["amount"].astype(float))
            np.add.at(sent[:, rank], gets["peer"], gets["amount"].astype(float))
    np.fill_diagonal(sent, 0.0)
    fabric = machine.fabric
    ranks = []
    for rank in range(world):
        mine = spans[spans["rank"] == rank]
        cube, comm, vector = counts[rank]
        pipes = {}
        for unit, roles, number in (
            ("AIC", (Role.CUBE,), cube),
            ("AIV", (Role.COMM, Role.VECTOR), comm + vector),
        ):
            of_unit = mine[np.isin(mine["role"], roles)]
            for pipe in (Pipe.MTE1, Pipe.MTE2, Pipe.M, Pipe.V, Pipe.FIX, Pipe.MTE3):
                busy = of_unit["duration_ns"][of_unit["pipe"] == pipe].sum() / 1e3
                if busy:
                    pipes[f"{unit} {pipe.name}"] = float(busy) / number
        waits: dict[str, dict[int, float]] = {}
        for kernel, roles, number in (
            ("compute", (Role.CUBE, Role.VECTOR), cube + vector),
            ("comm", (Role.COMM,), comm),
        ):
            waited = mine[(mine["kind"] == Kind.TWAIT) & np.isin(mine["role"], roles)]
            waits[kernel] = {
                int(peer): float(waited["duration_ns"][waited["peer"] == peer].sum()) / 1e3 / number
                for peer in np.unique(waited["peer"])
            }
        ranks.append(
            RankUse(
                rank=rank,
                pipes=pipes,
                memory_us=touched[rank] / machine.chip.l2_gbs / 1e3,
                egress_us=sent[rank].sum() / fabric.egress_rate / 1e3,
                ingress_us=sent[:, rank].sum() / fabric.ingress_rate / 1e3,
                links={
                    peer: sent[rank, peer] / fabric.link_rate / 1e3
                    for peer in range(world)
                    if peer != rank
                },
                waits=waits,
            )
        )
    return Explanation(pipelined_us=total_us, communication_us=alone_us, ranks=tuple(ranks))
