"""``mkernel plan OP``: what would be launched, without launching it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from mkernel import machine, selection
from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.cli.options import (
    OP_HELP,
    AsJson,
    Chunk,
    FastAccum,
    Given,
    Nic,
    Scaling,
    Verbs,
    layout_of,
    scales_of,
    with_sizes,
)
from mkernel.cli.terminal import Terminal, write_json, writing
from mkernel.errors import ArgumentError, BackendUnavailable, NoRoute, Unsupported
from mkernel.plan import mixed, ops, render
from mkernel.plan import scaling as growth
from mkernel.plan.arguments import Around, check_world, path_of
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.invariance import resolved
from mkernel.plan.missing import WhatIf
from mkernel.plan.mixed import JOINT, MixedCapabilities
from mkernel.plan.model import LaunchPlan, OpName, Scales
from mkernel.plan.planner import Planned, explain
from mkernel.plan.request import Alternative
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.plan.simulate import Simulation, trace
from mkernel.selection import SOFT, SYSTEM
from mkernel.settings import AUTO, Settings
from mkernel.settings import load as load_settings
from mkernel.topology import presets
from mkernel.topology.discover import load, read
from mkernel.topology.model import Accelerator, Model, Node, Topology
from mkernel.topology.placement import usable_nics
from mkernel.topology.rails import by_tcp, keep_rails, real_ports
from mkernel.topology.reshape import (
    by_kind,
    common_kinds,
    of_one_kind,
    ranks_on_each,
    reached_together,
    repeat_each,
    replicate,
    require_ports,
    split_by,
)
from mkernel.topology.sources.chips import cores, described, product
from mkernel.topology.world_map import WorldMap, world_map
from mkernel.world.identity import Backends


class PlanReport(Model):
    """The object that ``--json`` prints: ``plan``, which ``init`` and the op would accept on such
    machines, or else ``what_if``, a prediction that states what is missing. ``notes``: what was
    left out, and why: RDMA ports that are no rails, accelerator backends that do not run there."""

    plan: LaunchPlan | None = None
    what_if: WhatIf | None = None
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    simulation: Simulation | None = None
    scaling: tuple[growth.Point, ...] = ()


@with_sizes
def command(
    op: Annotated[str, typer.Argument(metavar="OP", help=OP_HELP)],
    given: Given,
    dtype: Annotated[
        str,
        typer.Option(
            help="Plan for inputs of float16, bfloat16 or float32; of GEMM ops also float8_e4m3."
        ),
    ] = "float16",
    scales: Scaling = None,
    fast_accum: FastAccum = False,
    nodes: Annotated[
        int | None,
        typer.Option(help="Plan for so many nodes. [the file's, else 2; with real devices here 1]"),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Plan for so many ranks on each node. [its accelerators; 2 of emulated ones]"
        ),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(help="Use this accelerator backend. [the most preferred that runs there]"),
    ] = None,
    nic: Nic = None,
    verbs: Verbs = None,
    chunk: Chunk = None,
    path: Annotated[
        str | None, typer.Option(help="Take this path: auto, fused or library. [MKERNEL_PATH]")
    ] = None,
    topology: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE|PRESET",
            help="Plan for the machine in it, times --nodes: `mkernel probe --json` output, or what "
            "`mkernel probe --from` reads; or for a machine that `mkernel probe --list` names. Given "
            "several times: for the machines in them, which share --nodes evenly.",
        ),
    ] = None,
    constants_file: Annotated[
        Path | None,
        typer.Option(
            "--constants",
            metavar="FILE",
            help="Predict by the constants in a file of `mkernel probe --measure`. [MKERNEL_CONSTANTS, "
            "or the shipped ones]",
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(
            help="Exchange between nodes in this way: auto, direct or hierarchical. [MKERNEL_EXCHANGE]"
        ),
    ] = None,
    why: Annotated[
        bool, typer.Option("--explain", help="Print the alternatives, with their predicted times.")
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Simulate the call: contention, waves, signals. Of unlike nodes, compare even shards, "
            "shards by speed, and the nodes of each kind alone.",
        ),
    ] = False,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the simulation for ui.perfetto.dev."),
    ] = None,
    scaling_file: Annotated[
        Path | None,
        typer.Option(
            "--scaling",
            metavar="FILE",
            help="Simulate 1, 2, 4, … nodes up to --nodes and draw it: .svg, .png or .pdf.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print also what the schedule leaves unused, and the digest that ranks compare.",
        ),
    ] = False,
) -> None:
    """Print an op's launch plan; where it cannot be launched, what is missing.

    A plan has placement, routes, chunks, order and predicted time. Where none can be launched, a
    what-if shows what the machines would do."""
    name = ops.canonical(op)  # before a backend is loaded: a typo should not wait for that
    wanted = sizes_or_defaults(name, given)
    mode = scales_of(dtype, scales, name, fast=fast_accum)
    settings = load_settings()
    check_world(
        1 if nodes is None else nodes,
        1 if ranks_per_node is None else ranks_per_node,
        ("--nodes", "--ranks-per-node"),
    )
    where = planned_world(
        settings, name, tuple(topology or ()), nodes, ranks_per_node,
        accelerator=accelerator, nic=nic, verbs=verbs,
    )  # fmt: skip
    world, backends, claims = where.topology, where.backends, where.capabilities
    asked = _Asked(
        name, wanted, settings, constants_file or settings.constants,
        {
            "dtype": dtype,
            "b_layout": layout_of(None, mode),
            "around": Around(
                scales=None if mode is None else Scales(mode=mode, use_fast_accum=fast_accum),
                invariant=resolved(None, settings),
            ),
            "chunk": chunk,
            "path": path or path_of(name, settings.path),
            "exchange": exchange or settings.exchange,
        },
    )  # fmt: skip
    mapped, planned = asked.planning(where)
    here = mapped(world)
    made, considered, pipeline = planned(world=here)
    notes = where.notes + _assumed(made, here, claims)
    if constants_file is None and settings.constants is None:
        notes += _of_another_cpu(made, world)
    console = Terminal()
    if not as_json:
        console.print(
            render.topology(where.machines or world, None if where.machines else here.kinds)
        )
        console.print(render.plan(made, notes, verbose=verbose))
    found, constants = None, here.constants
    shares = tuple(asked.shares(where, here, made)) if simulated else ()
    considered, why = shares or considered, why or bool(shares)
    if constants is None and ((simulated and not shares) or trace_file or scaling_file):
        raise Unsupported(
            f"accelerator {backends.accelerator!r} brings no constants of these chips, so nothing "
            "can be simulated; --constants FILE gives some (`mkernel probe --measure` writes them)"
        )
    if constants is not None and (simulated or trace_file):
        traced = trace(made, pipeline, constants, keep=trace_file is not None)
        found = traced.result
        if trace_file:
            from mkernel.harness import timeline

            with writing("--trace", trace_file):
                timeline.write_trace(timeline.simulated(traced), trace_file)
    points: list[growth.Point] = []
    if constants is not None and scaling_file:
        points = list(
            growth.points(
                lambda count: planned(world=mapped(Topology(nodes=world.nodes[:count]))),
                constants,
                made.nodes,
            )
        )
        ranks = f"{made.ranks_per_node} ranks a node on {made.accelerator}"
        title = f"{made.op} of {render.sizes(made)}, {ranks}"
        title += "" if constants.measured else f" ({constants.name})"
        with writing("--scaling", scaling_file, ", .svg, .png or .pdf"):
            growth.write(points, title, scaling_file)
    if as_json:
        report = PlanReport(
            plan=made if isinstance(made, LaunchPlan) else None,
            what_if=made if isinstance(made, WhatIf) else None,
            notes=notes,
            alternatives=considered if why else (),
            simulation=found,
            scaling=tuple(points),
        )
        write_json(report.model_dump_json(indent=2))
        return
    if why:
        console.print(render.alternatives(considered))
    if found:
        console.print(render.simulation(found))
    for file in (trace_file, scaling_file):
        if file:
            console.print(f"wrote {file}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Asked:
    """A call that a user asks about. ``options``: those of its plan that are the same everywhere."""

    op: OpName
    sizes: Mapping[str, int]
    settings: Settings
    constants: Path | None
    options: Mapping[str, Any]

    def planning(
        self, where: PlannedWorld
    ) -> tuple[Callable[[Topology], WorldMap], Callable[..., Planned]]:
        """Return what maps nodes as a world has them, and what plans the call there."""
        backends, claims = where.backends, where.capabilities
        selection.require_op(backends.accelerator, claims, self.op)
        backend = None if where.unlike else registry.accelerator(backends.accelerator)
        mapped = partial(
            world_map,
            ranks_per_node=where.ranks_per_node,
            constants=_fit(claims, where.topology).constants_by(
                self.constants, () if backend is None else backend.cards_of(where.topology)
            ),
            group=claims.process_group,
            pinning=self.settings.pinning,
            nics=selection.nic_use(backends.nic, self.settings),
        )
        return mapped, partial(
            explain, self.op, self.sizes, **self.options,
            accelerator=backends.accelerator, capabilities=claims,
            nic=backends.nic, verbs=backends.verbs,
            schedule=mixed.schedule if backend is None else backend.schedule,
        )  # fmt: skip

    def shares(
        self, where: PlannedWorld, here: WorldMap, made: LaunchPlan | WhatIf
    ) -> Iterator[Alternative]:
        """Yield, of unlike nodes, the predicted times of even and of unequal shards, and of the nodes
        of each kind alone with the same work and what ``auto`` chooses there."""
        claims, of = where.capabilities, here.kinds.of
        if isinstance(made, WhatIf) or not isinstance(claims, MixedCapabilities):
            return
        yield from mixed.sharings(made, claims)
        own = made.part(mixed.MixedSchedule).own_sizes(self.op)
        for kind in dict.fromkeys(of):
            one, count = (where.machines or where.topology).nodes[of.index(kind)], of.count(kind)
            half = replicate(Topology(nodes=(one.model_copy(update={"id": 0}),)), count)
            there = _elsewhere(self.settings, self.op, half, where.ranks_per_node, AUTO, AUTO, None)
            more = {size: self.sizes[size] * len(of) // count for size in own}
            mapped, planned = replace(self, sizes={**self.sizes, **more}).planning(there)
            found = planned(world=mapped(there.topology)).plan
            name = f"{count} x {product(one.accelerators[0])} alone, on {found.accelerator}"
            if (times := found.prediction) is not None:
                yield Alternative("nodes", name, times.pipelined_us, False, times.constants)


def _fit(claims: AcceleratorCapabilities, world: Topology) -> AcceleratorCapabilities:
    """Return the capabilities, without constants if the backend does not run on these chips."""
    alike = {id(node.accelerators): node.accelerators for node in world.nodes}  # copies share them
    fits = all(claims.misfit(one) is None for devices in alike.values() for one in devices)
    return claims if fits else claims.model_copy(update={"constants": None})


def _of_another_cpu(made: LaunchPlan | WhatIf, world: Topology) -> tuple[str, ...]:
    """Return a note if the times are predicted by constants of another CPU than this one."""
    kinds = {one.kind for node in world.nodes for one in node.accelerators}
    if kinds != {"cpu"} or made.prediction is None:
        return ()
    return (
        "times are those of the CPU that the shipped constants were measured on; `mkernel probe "
        "--measure FILE` measures this one, for --constants",
    )


def _assumed(
    made: LaunchPlan | WhatIf, here: WorldMap, claims: AcceleratorCapabilities
) -> tuple[str, ...]:
    """Return a note if the number of the chips' cores is unknown."""
    if isinstance(claims, MixedCapabilities) or (
        isinstance(made, WhatIf) and made.prediction is None
    ):
        return ()
    unknown = [
        described(one)
        for node in here.kinds.prototypes
        for one in node.accelerators
        if not one.emulated and cores(one) is None
    ]
    if not unknown:
        return ()
    count = claims.with_cores(here.cores).compute_cores
    return (f"nobody says how many cores {unknown[0]} has: {count} are assumed",)


# ---- the world that is planned for: of this machine, or of the machines in a file ----------------


class PlannedWorld(NamedTuple):
    """The world to plan for. ``elsewhere``: real devices of a file, on which nothing can be
    launched from here. ``notes``: a sentence about each group of RDMA ports that are no rails, each
    accelerator backend that was passed over, each part of unlike nodes that is left out, and what is
    known of the speed of each. ``machines``: the nodes as they are, if TCP stands for their NICs."""

    topology: Topology
    ranks_per_node: int
    backends: Backends
    capabilities: AcceleratorCapabilities
    elsewhere: bool = False
    notes: tuple[str, ...] = ()
    machines: Topology | None = None

    @property
    def unlike(self) -> bool:
        """Return whether the nodes have backends of their own (:mod:`mkernel.plan.mixed`)."""
        return isinstance(self.capabilities, MixedCapabilities)


def planned_world(
    settings: Settings,
    op: OpName,
    files: tuple[Path, ...],
    nodes: int | None,
    ranks_per_node: int | None,
    *,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> PlannedWorld:
    """Return the world, and the backends that would run on it: those that are named, else those
    that ``auto`` would choose there.

    Raises:
        InputFileError, ArgumentError: as :func:`world_of_file`. UnknownBackend. BackendUnavailable:
        nothing runs there, or has a device here; states why. NoRoute: no NIC is of the named kind.
    """
    several = JOINT in (accelerator or settings.accelerator)
    world, left_out = world_of_file(files, nodes, several) if files else (None, ())
    if world is not None and ranks_per_node is None:
        ranks_per_node, uneven = ranks_on_each(world)
        left_out += uneven
    if world is not None and not world.nodes[0].accelerators[0].emulated:
        assert ranks_per_node is not None
        find = _unlike if several or _kinds(world) > 1 else _elsewhere
        planned = find(settings, op, world, ranks_per_node, accelerator, nic, verbs)
        return planned._replace(notes=left_out + planned.notes)
    name = selection.named_for(op, accelerator or settings.accelerator)
    if world is not None:
        name = selection.emulating(world.nodes[0].accelerators[0].kind, name)
    elif name == AUTO:
        name = selection.accelerator_here(op, settings, nodes)
    backend = registry.accelerator(name)
    if world is not None:
        assert ranks_per_node is not None
        backends = selection.backends(
            settings, len(world.nodes), accelerator=name, nic=nic, verbs=verbs
        )
    else:
        _check_accelerator(name, backend)
        left_open = nodes is None
        backends, nodes, ranks_per_node = selection.world_here(
            settings, name, nodes, ranks_per_node, nic, verbs
        )
        if backends.nic is not None and backends.verbs is not None:
            machine.usable_nic(backends.nic, backends.verbs)
        world = load(files[0]) if files else machine.machine_topology(backends)
        world = machine.emulated_topology(world, backends, nodes, ranks_per_node, settings)
        if left_open and nodes > 1 and selection.real_devices(backend):
            left_out += (_APART,)
    return PlannedWorld(world, ranks_per_node, backends, backend.capabilities(), notes=left_out)


_APART = "ranks that do not reach each other's memory are nodes of their own"


def _elsewhere(
    settings: Settings,
    op: OpName,
    world: Topology,
    ranks_per_node: int,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> PlannedWorld:
    device = world.nodes[0].accelerators[0]
    name = selection.named_for(op, accelerator or settings.accelerator)
    passed_over: tuple[str, ...] = ()
    nodes, together = len(world.nodes), reached_together(world.nodes, ranks_per_node)
    if name == AUTO:
        name, others = selection.accelerator_for(device, nodes, op, nodes * ranks_per_node)
        if machine.splits(registry.accelerator(name).capabilities_on(device)):
            nodes *= ranks_per_node // together
            name, others = selection.accelerator_for(device, nodes, op, nodes * together)
        passed_over = tuple(
            f"not on {other.name}: it {other.detail}"
            for other in others
            if other.detail != selection.BY_NAME
        )
    claims = registry.accelerator(name).capabilities_on(device)
    if not machine.splits(claims):
        together = ranks_per_node
    if len(world.nodes) == 1 and together < ranks_per_node:
        world = split_by(world, together, ranks_per_node, by_host=True)
        nic = nic or settings.nic
        nic = selection.chosen_nic(SOFT) if nic == AUTO else nic
        return PlannedWorld(
            world, together, Backends(name, nic, SOFT), claims, True, (*passed_over, _APART)
        )
    if len(world.nodes) == 1 or claims.process_group:
        if nic not in (None, AUTO):
            registry.nic(nic)  # it is not used, but a misspelt name is reported
        return PlannedWorld(
            world, ranks_per_node, Backends(name, None, None), claims, True, passed_over
        )
    given, nic, verbs = nic, nic or settings.nic, verbs or settings.verbs
    if nic == AUTO:
        ports = tuple(port for node in world.nodes for port in real_ports(node))
        nic = selection.nic_of(ports)
        if nic is None and ports:
            kinds = " and ".join(sorted({port.kind for port in ports}))
            raise NoRoute(
                f"no installed NIC backend drives the {kinds} ports of these nodes; plan for one node "
                "(--nodes 1), or with torch.distributed between them (--accelerator streams)"
            )
        nic = nic or selection.chosen_nic(SOFT)
    every = world
    drives = {selection.nic_of(real_ports(node)) for node in world.nodes}
    if len(drives) > 1 and None not in drives and given in (None, AUTO) and settings.nic == AUTO:
        return _unlike(settings, op, world, ranks_per_node, accelerator, None, None)
    world, left_out = keep_rails(world, nic, registry.nic(nic).kinds)
    if left_out and not any(usable_nics(node) for node in world.nodes):
        raise NoRoute(
            f"nic {nic!r} drives no RDMA port of these nodes ({'; '.join(left_out)}); leave --nic "
            "away, and the backend that drives them is taken"
        )
    require_ports(every, world, nic)
    if together < ranks_per_node:
        world, left_out = split_by(world, together, ranks_per_node), (*left_out, _APART)
    backends = Backends(name, nic, SYSTEM if verbs == AUTO else verbs)
    return PlannedWorld(world, together, backends, claims, True, passed_over + left_out)


def _kinds(world: Topology) -> int:
    """Count the kinds of accelerators of a world whose nodes have one each."""
    return len({node.accelerators[0].kind for node in world.nodes})


def _unlike(
    settings: Settings,
    op: OpName,
    world: Topology,
    ranks_per_node: int,
    accelerator: str | None,
    nic: str | None,
    verbs: str | None,
) -> PlannedWorld:
    """Plan for nodes each of which has a backend of its own: the first named one that fits, or that
    ``auto`` would choose there. They are joined by a NIC backend that drives ports of all of them, or
    by TCP."""
    sides: dict[int, mixed.Side] = {}
    for node in world.nodes:
        if id(node.accelerators) not in sides:  # copies of a node share them
            made = _side(settings, op, node, ranks_per_node, accelerator)
            sides[id(node.accelerators)] = made
    chosen = [sides[id(node.accelerators)] for node in world.nodes]
    claims, machines = mixed.capabilities(chosen), world
    drives = {selection.nic_of(real_ports(node)) for node in world.nodes}
    wanted: str | None = nic or settings.nic
    if wanted == AUTO:
        wanted = next(iter(drives)) if len(drives) == 1 else None
    notes = tuple(dict.fromkeys(map(str, chosen)))
    if wanted is None or wanted == selection.TCP[0]:
        wanted, verbs = selection.TCP
        world = by_tcp(world)
        notes += ("TCP joins the nodes: no NIC backend drives RDMA ports of all of them",)
    else:
        world, left_out = keep_rails(world, wanted, registry.nic(wanted).kinds)
        require_ports(machines, world, wanted)
        verbs, notes = verbs or settings.verbs, notes + left_out
    backends = Backends(mixed.name_of(chosen), wanted, SYSTEM if verbs == AUTO else verbs)
    return PlannedWorld(world, ranks_per_node, backends, claims, True, notes, machines)


def _side(
    settings: Settings, op: OpName, node: Node, ranks: int, accelerator: str | None
) -> mixed.Side:
    """Return the backend of a node, with its constants there. BackendUnavailable, UnknownBackend."""
    device = node.accelerators[0]
    given = accelerator or settings.accelerator
    if given == AUTO:
        within = op if op != "all_reduce" else "gemm_all_reduce"  # its sums need no backend
        name, _ = selection.accelerator_for(device, 1, within, ranks)
    else:
        names = [each.strip() for each in given.replace(",", JOINT).split(JOINT)]
        fit = (
            each
            for each in names
            if registry.accelerator(each).capabilities_on(device).misfit(device) is None
        )
        name = next(fit, names[0])
    backend = registry.accelerator(name)
    alone = Topology(nodes=(node.model_copy(update={"id": 0}),))
    claims = backend.capabilities_on(device)
    here = world_map(alone, ranks, claims.constants_by(settings.constants, backend.cards_of(alone)))
    return mixed.Side.of(name, claims.with_cores(here.cores), here.constants)


def world_of_file(
    files: tuple[Path, ...], nodes: int | None, several: bool
) -> tuple[Topology | None, tuple[str, ...]]:
    """Return the nodes of a file, as they are, or its one machine ``nodes`` times (default: twice),
    with accelerators of one kind, and only real devices if there are any; and sentences about what
    is left out. Machines without a kind in common, or of which ``several`` are wanted, have a node for
    each kind. None: the file lists no accelerators, or lists one machine with only the prototypes of
    its simulators.

    Raises:
        InputFileError: a file cannot be read.
        ArgumentError: the file has several nodes, but not ``nodes``.
        Unsupported: a node has no accelerator.
    """
    read_files = read(*files)
    found, made = read_files.topology, len(files) > 1
    every = [one for node in found.nodes for one in node.accelerators]
    if not every or (len(found.nodes) == 1 and _prototypes(every)):
        return None, ()
    told = [one for one in map(presets.note, map(str, files)) if one is not None]
    told += [one for one in read_files.notes if one.source == "files"]
    left_out = tuple(f"{one.source}: {one.message}" for one in told)
    kinds = by_kind(found)
    if kinds is not None and (several or not common_kinds(found)):
        found, made = kinds, True
    elif not several:
        found, beside = of_one_kind(found)
        left_out += beside
    if len(found.nodes) == 1:
        return replicate(found, 2 if nodes is None else nodes), left_out
    if nodes is not None and len(found.nodes) != nodes:
        if made:
            return repeat_each(found, nodes), left_out
        raise ArgumentError("--nodes", nodes, f"{len(found.nodes)}, the nodes of {files[0]}")
    return found, left_out


def _prototypes(devices: Sequence[Accelerator]) -> bool:
    """Return whether they are what `mkernel probe` shows for backends that emulate devices: one of
    a kind."""
    kinds = [one.kind for one in devices]
    return all(one.emulated for one in devices) and len(set(kinds)) == len(kinds)


def _check_accelerator(name: str, backend: AcceleratorBackend) -> None:
    if not backend.probe():
        status = backend.status()
        raise BackendUnavailable(
            f"accelerator {name!r} has no device here: {status.detail}; {status.remedy}; "
            "to plan for another machine, give its topology with --topology"
        )
