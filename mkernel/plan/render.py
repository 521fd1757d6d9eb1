"""A topology and a plan as rich renderables, in about 15 lines each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mkernel.plan.missing import WhatIf
from mkernel.plan.mixed import MixedSchedule, wire_gbs
from mkernel.plan.model import CommonPart, GemmShape, LaunchPlan, Prediction, Schedule
from mkernel.plan.request import Alternative
from mkernel.plan.simulate import Simulation
from mkernel.plan.traffic import traffic_of
from mkernel.tabular import Column, Sheet, amount, duration
from mkernel.topology.kinds import NodeKinds, node_kinds, spans
from mkernel.topology.lanes import NicSchedule
from mkernel.topology.model import Accelerator, Nic, Node, Topology
from mkernel.topology.routes import RouteKind, RouteTable
from mkernel.topology.sources.chips import product

_Device = TypeVar("_Device", Accelerator, Nic)

MAX_LINES = 15


def topology(world: Topology, kinds: NodeKinds | None = None) -> RenderableType:
    """Draw nodes with their CPUs, accelerators and NICs; equal devices share a line. ``kinds``: the
    world's, if they are known.

    If not everything fits into 15 lines, the first nodes are shown, and the first of each other kind
    of node; the rest is counted.
    """
    count = len(world.nodes)
    tree = Tree(_line(f"topology · {count} {'node' if count == 1 else 'nodes'}", "bold"))
    left = MAX_LINES - 2  # the title, and the line that counts what is not shown
    of, hidden = (kinds or node_kinds(world)).of, 0
    for number, node in enumerate(world.nodes):
        lines = _node_lines(node)
        if number and (hidden or len(lines) > left) and of[number] in of[:number]:
            hidden += 1
            continue
        if hidden:
            tree.add(_line(f"… and {hidden} more of these"))
        hidden = 0
        branch = tree.add(_line(lines[0]))
        room = max(len(lines) if number else 1, left - 1)
        rest = lines[1:]
        for line in rest if len(rest) <= room else rest[: room - 1]:
            branch.add(_line(line))
        if len(rest) > room:
            branch.add(_line(f"… and {len(rest) - room + 1} more"))
        left -= len(lines)
    if hidden:
        tree.add(_line(f"… and {hidden} more nodes"))
    return tree


def plan(
    made: LaunchPlan | WhatIf,
    notes: Sequence[str] = (),
    *,
    brief: bool = False,
    verbose: bool = False,
) -> RenderableType:
    """Show what was decided, one decision a line; for a what-if, also what is missing to launch it.
    Times are predictions and are marked as such.

    Args:
        notes: what was left out, and why.
        brief: leave out how the bytes go and what the backend decided.
        verbose: with every field of the schedule, and the digest that ranks compare.
    """
    between = f", {made.nic} over {made.verbs} verbs between nodes" if made.nic else ""
    if made.carrier:
        between = f", {made.carrier} between ranks"
    title = "launch plan" if isinstance(made, LaunchPlan) else "what if"
    rows = {
        title: f"{made.op} · {sizes(made)} · {made.dtype} → {made.out_dtype}",
        "world": f"{made.nodes} nodes x {made.ranks_per_node} ranks on {made.accelerator}{between}",
        "ranks": _shorten([_rank(made, node) for node in range(made.nodes)], 4, "nodes"),
        "path": made.path if brief else _path(made),
    }
    if brief and not verbose:
        return _grid(rows)
    rows |= {
        "routes": _routes(made),
        **({"lanes": _lanes(made.nics, made.routes)} if made.nics else {}),
        **({"around": around} if (around := _around(made)) else {}),
    }
    if isinstance(made, LaunchPlan) and isinstance(made.schedule, MixedSchedule):
        rows["wire"] = (
            f"{made.nic}, through host memory, {wire_gbs(made):.3g} GB/s a rank (predicted)"
        )
    if isinstance(made, LaunchPlan):
        rows |= {"schedule": _schedule(made.schedule, unused=verbose)}
    elif made.nodes > 1:
        rows |= {"exchange": made.exchange}
    rows |= {"predicted": _predicted(made.prediction)}
    if isinstance(made, LaunchPlan) and verbose:
        rows |= {"bytes": _bytes(made), "digest": made.digest()[:16]}
    if notes:
        rows |= {"notes": "; ".join(notes)}
    if isinstance(made, WhatIf):
        rows |= {"missing": "; ".join(made.missing)}
    return _grid(rows)


_WAYS: Mapping[RouteKind, str] = {
    "p2p": "directly",
    "nic": "by the NIC",
    "relay": "by a neighbour's NIC",
    "host": "by host memory",
}
"""These phrases name the ways in which bytes go from one rank to another."""


def _routes(made: CommonPart) -> str:
    """Count the ordered pairs of ranks that send to each other in each way, in words, with the
    rates of those that go over PCIe or through host memory."""
    pairs: Counter[str] = Counter()
    rates: dict[str, set[float]] = {}
    ways = {**_WAYS, "group": f"by {made.carrier or 'a process group'}"}
    for route in sorted(made.routes.classes, key=lambda one: (one.kind, one.over_pcie)):
        way = ways[route.kind] + (" over PCIe" if route.over_pcie else "")
        way += " through host memory" if route.kind == "nic" and route.staged else ""
        pairs[way] += route.pairs
        if route.over_pcie or route.staged:
            rates.setdefault(way, set()).add(route.bandwidth_gbs)
    said = ", ".join(f"{count} {way}{_rates(rates.get(way))}" for way, count in pairs.items())
    return f"pairs of ranks: {said}" if said else "none needed"


def _rates(gbs: set[float] | None) -> str:
    """Return `` at 16 to 41.3 GB/s (modelled)``; nothing if no rates are given."""
    if not gbs:
        return ""
    ends = dict.fromkeys(f"{rate:.3g}" for rate in (min(gbs), max(gbs)))
    return f" at {' to '.join(ends)} GB/s (modelled)"


def _around(made: CommonPart) -> str:
    """Describe what the op does before and after the launch."""
    before = [name for name in made.copies if name not in ("out", "gathered")]
    after = [name for name in made.copies if name not in before]
    steps = [f"copies {' and '.join(before)}"] if before else []
    if made.products:
        columns = ", ".join(map(str, made.products))
        steps += [
            f"launches product {made.launched} of {columns} columns, then a library the others"
        ]
    if made.bias is not None:
        steps += [{"launch": "the launch adds the bias", "after": "adds the bias"}[made.bias]]
    if made.norm is not None:
        what = "adds the residual and normalises" if made.norm.residual else "normalises"
        what += ", in e4m3" if made.norm.quantises else ""
        steps += [{"launch": f"the launch {what}", "after": what}[made.norm.step]]
    steps += [f"copies {' and '.join(after)}"] if after else []
    if made.invariant is not None:
        sums = f"{made.invariant.segments} segments in {made.invariant.partial_dtype}"
        steps.insert(0, f"invariant results, by sums of {sums}")
    if made.scales is not None:
        fast = ", fast accumulation" if made.scales.use_fast_accum else ""
        of = f", of {made.scales.quantises} rows" if made.scales.quantises else ""
        steps.insert(0, f"scales by {made.scales.mode}{of}{fast}")
    return "; ".join(steps)


def _bytes(made: LaunchPlan) -> str:
    """Return what rank 0 sends in a call, inside its node and to others, and by which ports."""
    if made.schedule is None or made.world_size == 1:
        return "none"
    found, each = traffic_of(made), made.ranks_per_node
    sent = found.from_rank(0)
    near = sum(nbytes for peer, nbytes in sent.items() if peer < each)
    text = f"rank 0 sends {amount(near)} inside its node"
    if made.nodes == 1:
        return text
    ports = found.by_port(0, made.route)
    rails = ", ".join(f"{port} {amount(nbytes)}" for port, nbytes in ports.items())
    far = amount(sum(sent.values()) - near)
    return f"{text}, {far} to other nodes" + (f" ({rails})" if rails else "")


def _predicted(times: Prediction | None) -> str:
    if times is None:
        return "nothing: no constants of these chips are known; --constants gives some"
    return (
        f"pipelined {duration(times.pipelined_us)}, sequential {duration(times.sequential_us)} "
        f"(compute {duration(times.compute_us)}, communication {duration(times.comm_us)}; constants: "
        f"{times.constants})"
    )


def alternatives(considered: Sequence[Alternative]) -> RenderableType:
    """Show why the plan is as it is: each decision's options with the time that the call would
    take."""
    if not considered:
        return Text("nothing to choose between: every decision was given or has one option")
    table = Sheet(
        (
            Column("decision", key=True),
            Column("option", key=True),
            Column("predicted", right=True),
            Column("verdict"),
            Column("why", prose=True),
        )
    )
    for one in considered:
        time = "" if one.predicted_us is None else duration(one.predicted_us)
        table.row(one.decision, one.option, time, "chosen" if one.chosen else "", one.why)
    return table


MOST_LINKS = 6


def simulation(found: Simulation) -> RenderableType:
    """Show the simulated call: its times, and its busiest links."""
    rows = {
        "simulated": f"{duration(found.time_us)}, predicted; at least {duration(found.floor_us)} on "
        f"these links and cores ({found.exchange} exchange; constants: {found.constants})",
        "": f"compute {duration(found.compute_us)}, communication until "
        f"{duration(found.communication_us)}, of which {duration(found.exposed_us)} exposed",
        "links": "; ".join(
            f"{link.name} {100 * link.utilization:.0f} %" for link in found.links[:MOST_LINKS]
        )
        or "none",
        "detail": f"{found.simulated_ranks} ranks stand for all; {found.messages} messages",
    }
    return _grid(rows)


def _grid(rows: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, Text(value))
    return grid


def _path(made: CommonPart) -> str:
    """Return the path, and if there was a choice both predicted times."""
    times = made.prediction
    if times is None or times.fused_us is None or times.library_us is None:
        return made.path
    return (
        f"{made.path} (predicted: fused {duration(times.fused_us)}, library "
        f"{duration(times.library_us)})"
    )


def _schedule(part: Schedule | None, *, unused: bool) -> str:
    """List the fields of the backend's part, each under its name in the plan. ``unused`` also lists
    those that the plan makes no use of, whose value is 0, no or none."""
    if part is None:
        return "none yet"
    fields = [f"{name} {_word(value)}" for name, value in _leaves(part) if value or unused]
    return f"{part.kind}: {', '.join(fields)}" if fields else part.kind


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        runs = ((each, len([*run])) for each, run in groupby(value))
        return ", ".join(f"{count} x {each}" if count > 1 else str(each) for each, count in runs)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _leaves(part: BaseModel) -> Iterator[tuple[str, object]]:
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value)
        elif name != "kind":
            yield name, value


def _lanes(nics: NicSchedule, routes: RouteTable) -> str:
    """Describe how puts lie on ports and queue pairs: ``2 rails x 4 queue pairs a peer; puts in
    turn, …``."""
    rails = sorted({len(one.rails) for one in routes.classes if one.rails})
    each = f"{' or '.join(map(str, rails))} rails" if rails != [1] else "1 rail"
    pairs = f"{nics.queue_pairs} queue pair{'s' if nics.queue_pairs > 1 else ''}"
    striped = "" if nics.stripe_bytes is None else f", on all from {nics.stripe_bytes} bytes on"
    return f"{each} x {pairs} a peer" + (f"; puts {nics.small_puts}{striped}" if striped else "")


def sizes(made: CommonPart) -> str:
    """Return ``M 2048 x N 1024 x K 2048``, or the named sizes of ops that are no GEMM."""
    if isinstance(made.shape, GemmShape):
        return f"M {made.shape.m} x N {made.shape.n} x K {made.shape.k}"
    sizes = made.shape.model_dump(exclude={"kind"}, exclude_none=True)
    return ", ".join(f"{name} {_word(value)}" for name, value in sizes.items())


def _line(text: str, style: str = "") -> Text:
    """Return a line of plain text: names come from devices and files and are no markup."""
    return Text(text, style=style, overflow="fold")


def _rank(plan: CommonPart, node: int) -> str:
    first = node * plan.ranks_per_node
    own = plan.placement.sites[plan.placement.site_of(node)].seats
    ranks = f"{first}" if len(own) == 1 else f"{first}-{first + len(own) - 1}"
    devices = _shorten([seat.accelerator for seat in own], 4, "devices")
    nics = sorted({nic for seat in own for nic in seat.nics[:1]})
    return f"{ranks} on node {node} ({devices}{'; ' + _shorten(nics, 4, 'NICs') if nics else ''})"


def _node_lines(node: Node) -> list[str]:
    kind = "emulated node" if node.emulated else "node"
    memory = sum(part.memory_bytes or 0 for part in node.numa)
    numa = "1 NUMA node" if len(node.numa) == 1 else f"{len(node.numa)} NUMA nodes"
    cpus = f"CPUs {ranges(node.cpus) or 'unknown'} in {numa}"
    lines = [f"{kind} {node.id} · {node.hostname} · {cpus}"]
    if memory:
        lines[0] += f" · {memory / 2**30:.1f} GiB"
    known = {device.numa_node for device in node.accelerators}
    known |= {device.numa_node for device in node.nics} | {part.id for part in node.numa}
    where = _where if len(known - {None}) > 1 else lambda _: ""
    lines += _grouped(
        node.accelerators, lambda device: accelerator_name(device) + _memory(device) + where(device)
    )
    lines += _grouped(node.nics, lambda device: _nic(device) + where(device))
    if not node.accelerators:
        lines.append("no accelerator")
    if not node.nics:
        lines.append("no NIC")
    return lines


def _memory(device: Accelerator) -> str:
    return f" {device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else ""


def accelerator_name(device: Accelerator) -> str:
    """Return the device's name, with its kind unless the name includes it, and a note if it is
    simulated."""
    name = product(device)
    known = name.lower()
    said = [device.kind] if device.kind not in known else []
    said += (
        ["simulated"] if device.emulated and not {"simulated", "host"} & {*known.split()} else []
    )
    return f"{name} ({', '.join(said)})" if said else name


def _nic(device: Nic) -> str:
    speed = f" {device.speed_gbps:g} Gb/s" if device.speed_gbps else ""
    state = "" if device.active else " DOWN"
    emulated = ", emulated" if device.emulated else ""
    return f"NIC ({device.kind}{emulated}){speed}{state}"


def _where(device: Accelerator | Nic) -> str:
    return "" if device.numa_node is None else f" · NUMA {device.numa_node}"


def _grouped(devices: Sequence[_Device], describe: Callable[[_Device], str]) -> list[str]:
    """Return one line for all devices of the same description."""
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(describe(device), []).append(device.id)
    return [f"{_shorten(ids, 4, 'devices')}: {what}" for what, ids in groups.items()]


def _shorten(parts: Sequence[str], most: int, what: str) -> str:
    if len(parts) <= most:
        return ", ".join(parts)
    first = parts[: most - 1] if what == "nodes" else parts[:1]
    return f"{', '.join(first)}, … {parts[-1]} ({len(parts)} {what})"


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: (0, 1, 2, 5) → ``0-2,5``. The numbers must be sorted."""
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans(numbers))
