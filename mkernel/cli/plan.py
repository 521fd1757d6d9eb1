"""``mkernel plan OP``: what would be launched, without launching it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mkernel import machine
from mkernel.backends import registry
from mkernel.backends.base import Status
from mkernel.cli import sizes
from mkernel.errors import BackendUnavailable, UnknownBackend
from mkernel.identity import Backends
from mkernel.plan import ops, render
from mkernel.plan.planner import plan
from mkernel.plan.shapes import sizes_or_defaults
from mkernel.settings import load as load_settings
from mkernel.topology.discover import load, replicate
from mkernel.topology.model import Topology


def world_topology(
    backends: Backends, nodes: int, ranks_per_node: int, file: Path | None = None
) -> Topology:
    """The nodes of a world that would run on this machine, or on the machines of a file.

    A file with ``nodes`` nodes is taken as it is; one machine in a file is repeated ``nodes``
    times. A file without accelerators gets the backend's own.

    Raises:
        BackendUnavailable: there is no device to plan for; the message says what to do.
    """
    topology = None
    if file is not None:
        topology = load(file)
        if any(node.accelerators for node in topology.nodes):
            one = len(topology.nodes) == 1
            return replicate(topology, nodes) if one and nodes > 1 else topology
    _check_accelerator(backends.accelerator)
    _check_nic(backends)
    if topology is None:
        topology = machine.machine_topology(backends)
    return machine.emulated_topology(topology, backends, nodes, ranks_per_node)


def _check_accelerator(name: str) -> None:
    backend = registry.accelerator(name)
    if not backend.probe():
        raise BackendUnavailable(
            f"accelerator {name!r} has no device here: {_reason(backend.status())}; "
            "to plan for another machine, give its topology with --topology"
        )


def _check_nic(backends: Backends) -> None:
    name, verbs = backends.nic, backends.verbs
    if name is None or verbs is None:
        return
    backend = registry.nic(name)
    # Any other provider is the path of a library, which is the system's verbs by another name.
    if verbs not in backend.providers and "/" not in verbs:
        raise UnknownBackend("verbs", repr(verbs), f"one of: {', '.join(backend.providers)}")
    if not backend.probe(verbs):
        raise BackendUnavailable(
            f"nic {name!r} has no device on verbs provider {verbs!r}: "
            f"{_reason(backend.status(verbs))}"
        )


def _reason(status: Status) -> str:
    return f"{status.detail}; {status.remedy}" if status.remedy else status.detail


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op or its alias, as `ag_gemm`.")],
    m: sizes.M = None,
    n: sizes.N = None,
    k: sizes.K = None,
    tokens: sizes.Tokens = None,
    hidden: sizes.Hidden = None,
    features: sizes.Features = None,
    experts: sizes.Experts = None,
    top_k: sizes.TopK = None,
    batch: sizes.Batch = None,
    heads: sizes.Heads = None,
    kv_heads: sizes.KvHeads = None,
    sequence: sizes.Sequence = None,
    head_dim: sizes.HeadDim = None,
    causal: sizes.Causal = False,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    nodes: Annotated[int, typer.Option(help="Number of (emulated) nodes.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks on each node.")] = 2,
    accelerator: Annotated[str | None, typer.Option(help="Accelerator backend.")] = None,
    nic: Annotated[str | None, typer.Option(help="NIC backend between nodes.")] = None,
    verbs: Annotated[str | None, typer.Option(help="Verbs provider of the NIC.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tiles in a chunk.")] = None,
    path: Annotated[
        str | None, typer.Option(help="auto, fused or library; default: MKERNEL_PATH.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan for this machine: `mkernel probe --json` output."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Print the launch plan of an op: placement, routes, chunks, order, predicted time."""
    name = ops.canonical(op)  # before a backend is loaded: a typo should not wait for that
    chosen = sizes_or_defaults(
        name,
        {
            "m": m,
            "n": n,
            "k": k,
            "tokens": tokens,
            "hidden": hidden,
            "features": features,
            "experts": experts,
            "top_k": top_k,
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "sequence": sequence,
            "head_dim": head_dim,
            "causal": causal,
        },
    )
    settings = load_settings()
    apart = nodes > 1
    backends = Backends(
        accelerator or settings.accelerator,
        (nic or settings.nic) if apart else None,
        (verbs or settings.verbs) if apart else None,
    )
    backend = registry.accelerator(backends.accelerator)
    world = world_topology(backends, nodes, ranks_per_node, topology)
    made = plan(
        name,
        chosen,
        dtype=dtype,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator=backends.accelerator,
        capabilities=backend.capabilities(),
        nic=backends.nic,
        verbs=backends.verbs,
        topology=world,
        chunk=chunk,
        path=path or settings.path,
        pinning=settings.pinning,
    )
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
        return
    console = Console()
    console.print(render.topology(world))
    console.print(render.plan(made))
