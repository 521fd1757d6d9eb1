"""``mkernel.plan`` and ``mkernel.capabilities``: queries before (or without) a launch."""

from __future__ import annotations

from typing import Literal

from mkernel import machine, selection
from mkernel.backends import registry
from mkernel.errors import ArgumentError
from mkernel.plan.arguments import Around, check_world, path_of
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.invariance import Wanted, encoded, resolved
from mkernel.plan.mixed import JOINT
from mkernel.plan.model import LaunchPlan, ScaleMode, Scales
from mkernel.plan.ops import canonical
from mkernel.plan.planner import plan as _plan
from mkernel.plan.shapes import takes
from mkernel.settings import load as load_settings
from mkernel.topology.model import Topology
from mkernel.topology.world_map import world_map
from mkernel.world import lifecycle as _lifecycle


def capabilities(accelerator: str | None = None) -> AcceleratorCapabilities:
    """Return the capabilities of an accelerator backend: ops, dtypes, alignments, paths.

    Args:
        accelerator: its name; default: the world's, else the setting's. ``auto``: the one that a
            world of one node on this machine would use.

    Raises:
        UnknownBackend, BackendUnavailable: it is not installed, or cannot run here.
    """
    if accelerator is None and _lifecycle.is_initialized():
        return _lifecycle.current().accelerator.capabilities()
    backends = selection.backends(load_settings(), nodes=1, accelerator=accelerator)
    return registry.accelerator(backends.accelerator).capabilities()


def plan(
    op: str,
    *,
    dtype: str = "float16",
    out_dtype: str | None = None,
    b_layout: Literal["row", "column"] = "row",
    scales: ScaleMode | None = None,
    use_fast_accum: bool = False,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    accelerator: str | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    topology: Topology | None = None,
    chunk: int | None = None,
    path: Literal["auto", "fused", "library"] | None = None,
    exchange: Literal["auto", "direct", "hierarchical"] | None = None,
    invariant: Wanted = None,
    **sizes: int,
) -> LaunchPlan:
    """Plan one call: return every decision, before anything is launched.

    Inside a world the world's size, backends and topology are the defaults, and the result equals
    the plan that the op would use; outside, this machine is split into ``nodes`` emulated nodes.

    Args:
        op: name or alias (``ag_gemm``, …).
        dtype: dtype of the inputs; out_dtype: dtype of the result, default float32 (the inputs' if
            the accelerator keeps it). Names: float16, bfloat16, float32. For GEMM ops with
            ``scales`` the inputs' is float8_e4m3fn, with bfloat16 as the default of the result.
        scales, use_fast_accum: options of e4m3 inputs (:mod:`mkernel.plan.arguments`), whose
            ``b_layout`` is column.
        chunk: tiles (or rows) per chunk; default: the planner's choice.
        path: path of a GEMM op; default: the setting ``MKERNEL_PATH``.
        exchange: exchange between nodes; default: the setting ``MKERNEL_EXCHANGE``.
        invariant: promise of invariant results, as ops take it; default: the settings'.
        sizes: sizes of the op (:mod:`mkernel.plan.model`): ``m=, n=, k=`` for the GEMMs; ``tokens=,
            hidden=, features=, experts=, top_k=`` for MoE; ``batch=, heads=, kv_heads=, sequence=,
            head_dim=, causal=`` for ring attention.

    Raises:
        UnknownOp, ShapeError, DtypeError, ArgumentError: a wrong argument.
        NoRoute: two ranks have no path between them.
        Unsupported: the accelerator lacks the op, or something else is missing to launch it
            (`mkernel plan` shows such calls as what-ifs).
    """
    live = _lifecycle.current() if _lifecycle.is_initialized() else None
    if live is not None:
        nodes = nodes or live.identity.nodes
        ranks_per_node = ranks_per_node or live.identity.ranks_per_node
        backends, found = live.backends, live.topology
        settings = live.settings
        if (nodes, ranks_per_node) == (live.identity.nodes, live.identity.ranks_per_node):
            topology = topology or found
    else:
        nodes, ranks_per_node = nodes or 1, ranks_per_node or 1
        settings = load_settings()
        backends = selection.backends(
            settings,
            nodes,
            accelerator=accelerator,
            nic=nic,
            verbs=verbs,
            op=canonical(op),
            ranks=nodes * ranks_per_node,
        )
    check_world(nodes, ranks_per_node)
    if topology is None:
        whole = machine.machine_topology(backends)
        topology = machine.emulated_topology(whole, backends, nodes, ranks_per_node, settings)
    full, ranks = canonical(op), nodes * ranks_per_node
    scaled = None if scales is None else Scales(mode=scales, use_fast_accum=use_fast_accum)

    def taken(claims: AcceleratorCapabilities) -> bool:
        return takes(claims, full, sizes, ranks, dtype, scaled)

    if live is not None and JOINT in backends.accelerator:  # only a world has unlike nodes
        name, backend = backends.accelerator, live.engine(full).accelerator
    else:
        name = selection.provider(backends, full, nodes, taken)
        backend = registry.accelerator(name)
    claims = backend.capabilities()
    if len(topology.nodes) != nodes:
        raise ArgumentError(
            "nodes", nodes, f"{len(topology.nodes)}, the topology's number of nodes"
        )
    if live is not None and topology is live.topology and ranks_per_node == live.map.ranks_per_node:
        where = live.engine(full, taken).map
    else:
        where = world_map(
            topology,
            ranks_per_node,
            claims.constants_by(settings.constants, backend.cards_of(topology)),
            group=claims.process_group,
            pinning=settings.pinning,
            nics=selection.nic_use(backends.nic, settings),
        )
    return _plan(
        op,
        sizes,
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        around=Around(scales=scaled, invariant=resolved(encoded(invariant), settings)),
        world=where,
        accelerator=name,
        capabilities=claims,
        nic=backends.nic if name == backends.accelerator else None,
        verbs=backends.verbs if name == backends.accelerator else None,
        chunk=chunk,
        path=path or path_of(full, settings.path),
        exchange=exchange or settings.exchange,
        schedule=backend.schedule,
    )
