"""The launcher's side: starts ranks, names what hangs, and makes the report of what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mkernel import selection
from mkernel.backends import registry
from mkernel.errors import ArgumentError
from mkernel.harness import figures, rank, wire
from mkernel.harness.contenders import named
from mkernel.harness.contenders.symm_mem import ENVIRONMENT
from mkernel.harness.draws import SPENT
from mkernel.harness.environment import variables
from mkernel.harness.guard import ContenderHung, Hung, Progress
from mkernel.harness.provenance import provenance
from mkernel.harness.results import Conditions, Report, Row
from mkernel.harness.spec import BenchSpec, Mode
from mkernel.launch import host_store, launch
from mkernel.settings import load as load_settings
from mkernel.topology.model import Node, Topology
from mkernel.topology.world_map import constants_of


def run(
    spec: BenchSpec,
    *,
    ranks: int,
    accelerator: str,
    nodes: int = 1,
    nic: str | None = None,
    verbs: str | None = None,
    name: str = "bench",
    commit: str | None = None,
    on_row: Callable[[str], None] = lambda row: None,
) -> Report:
    """Run a benchmark on ``ranks`` processes of this machine.

    Args:
        nodes: emulated ones that the ranks are spread over evenly; between them they talk only through
            the NIC. nic, verbs: its backend and library, as of :func:`mkernel.launch`.
        on_row: called with each row that is done.

    Raises:
        ArgumentError: ranks would share devices, or these have no such mode.
        ContenderHung: a step outlasted its deadline; names the contender. Else what a rank raised.
    """
    check_modes(spec, accelerator)
    shared = load_settings().ranks_per_device
    if shared > 1:
        together = registry.accelerator(accelerator).side_by_side(shared)
        if not together.usable:
            raise ArgumentError(
                "MKERNEL_RANKS_PER_DEVICE",
                shared,
                f"1 for figures: {together.detail}; {together.remedy}",
            )

    def hear(_rank: int, payload: Any) -> None:
        if isinstance(payload, Hung):
            raise ContenderHung(
                f"{payload.step}: did not end within {payload.seconds:g} s on rank {_rank}; "
                "every rank was ended. Leave it out, or give it longer with --timeout"
            )
        if isinstance(payload, Progress):
            on_row(payload.done)

    store, port = host_store(ranks, spec.timeout_s)
    try:
        with variables(ENVIRONMENT):  # ranks inherit what keeps multicast memory off
            results = launch(
                rank.run,
                spec.job(ranks),
                port,
                nodes=nodes,
                ranks_per_node=ranks // nodes,
                accelerator=accelerator,
                nic=nic,
                verbs=verbs,
                timeout_s=spec.timeout_s,
                on_report=hear,
            )
    finally:
        del store
    found = provenance(Path.cwd(), commit)
    found["hardware"] = {**found["hardware"], **results[0].platform}
    if shared > 1:
        found["hardware"]["shared"] = together.detail
    if results[0].emulated:
        found["hardware"]["emulated_nic"] = wire.emulated()
    rows = {mode: _rows(spec, mode, results, accelerator) for mode in spec.modes}
    return Report(
        name=name,
        ranks=ranks,
        nodes=nodes,
        carrier=results[0].carrier,
        routes=results[0].routes,
        accelerator=accelerator,
        spec=spec,
        provenance=found,
        timing={mode: figures.timing(results[0].timing[mode], rows[mode]) for mode in rows},
        conditions=conditions(accelerator),
        rows=tuple(row for made in rows.values() for row in made),
    )


def _rows(
    spec: BenchSpec, mode: Mode, results: Sequence[rank.RankResult], accelerator: str
) -> list[Row]:
    """Make a mode's rows, from what each rank sent back."""
    kinds = {each: named(each).kind for each in spec.contenders}
    most_skew_us = results[0].timing[mode].get("most_skew_us")
    return [
        figures.row(shape, kinds, ranks, len(results), accelerator, mode, most_skew_us, wire_us)
        for shape, wire_us, *ranks in zip(
            spec.shapes,
            results[0].wire_us,
            *(each.rows[mode] for each in results),
            strict=True,
        )
    ]


def conditions(accelerator: str) -> Conditions:
    """Return what the figures of a run on this accelerator backend depend on."""
    backend = registry.accelerator(accelerator)
    claims = backend.capabilities()
    devices = selection.real_devices(backend)
    here = Topology(nodes=(Node(id=0, hostname="", numa=(), accelerators=devices),))
    every = claims.constants_by(load_settings().constants, backend.cards_of(here))
    constants = constants_of(devices, every)
    if not claims.library_ops or constants is None:
        return Conditions(whole=True, environment=dict(ENVIRONMENT))
    return Conditions(
        whole=True,
        environment=dict(ENVIRONMENT),
        planner=constants.source,
        fitted_to=constants.fitted_to,
        spent_seeds=tuple(SPENT),
    )


def check_modes(spec: BenchSpec, accelerator: str) -> None:
    """Raise ArgumentError for a mode that the accelerator's device has not, or the ops of the
    shapes."""
    if "graph" not in spec.modes:
        return
    moe = next((each.op for each in spec.shapes if each.op.startswith("moe")), None)
    if moe is not None and not spec.capacity:
        why = f"the sizes of {moe} depend on its data"
        raise ArgumentError("--mode", "graph", "kernel, eager or first, or --capacity", why=why)
    device = registry.accelerator(accelerator).device
    if device != "cuda":
        why = f"{accelerator} runs on {device!r} here"
        raise ArgumentError("--mode", "graph", "kernel, eager or first", why=why)
