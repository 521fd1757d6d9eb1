"""Movement of MoE's rows where ranks relay for each other (the exchange ``hierarchical``).

A token crosses once to each other node that wants it, to the rank in the place of its own, in chunks of
rows; that rank passes each chunk on as it arrives, to those of its neighbours that want its tokens. On
the way home a node's results of a token go to the same rank, which weights and adds them, in the order
of slots (or sums of ranks, in the order of ranks), rounds the sum, and sends it home; there the sums of
nodes are added in their order. A node's part of an invariant sum is a whole subtree. Every rank derives
all sizes from the ids of all ranks, which travel by the same ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

import torch

from mkernel.backends.accelerators.streams.call_streams import CallStreams, Message, Sent
from mkernel.backends.accelerators.streams.exchange import Arrivals, exchange
from mkernel.backends.accelerators.streams.moe_travel import (
    add_at,
    groups_of,
    landing,
    weighted_sums,
)
from mkernel.backends.accelerators.streams.routing import Relays, Routing
from mkernel.backends.accelerators.streams.schedule import HomeSchedule, RelayedSchedule
from mkernel.backends.contracts.accelerator import Call


def gather(call: Call, streams: CallStreams, gathered: torch.Tensor) -> Arrivals:
    """Send this rank's item of ``gathered`` [W, ...] to every rank, by relays; return the messages that
    bring the others'."""
    each = call.plan.ranks_per_node
    own = gathered[call.rank]
    across = exchange(call, streams, lambda target: own, gathered.__getitem__, among="place")
    for *_, message in across:
        streams.wait(message)
    arrivals: Arrivals = []
    for node in range(call.plan.nodes):
        arrivals += exchange(
            call, streams,
            partial(_of_ward, gathered, node * each + call.rank % each),
            partial(_of_node, gathered, node * each, each),
            among="node",
        )  # fmt: skip
    return arrivals


def _of_ward(gathered: torch.Tensor, ward: int, target: int) -> torch.Tensor:
    return gathered[ward]


def _of_node(gathered: torch.Tensor, first: int, each: int, source: int) -> torch.Tensor:
    return gathered[first + source % each]


def send_tokens(
    call: Call, streams: CallStreams, tables: Relays, routing: Routing, rows: torch.Tensor
) -> tuple[torch.Tensor, Iterator[tuple[int, int, int, Message]]]:
    """Send rows of own tokens to where they are wanted, by relays; return the memory of those that come
    here, from all ranks, and their arrivals. Relayed rows are passed on as arrivals are taken: those of
    this node come first, and all must be taken."""
    each, rank = call.plan.ranks_per_node, call.rank
    node = rank // each
    with streams.compute():
        landed = rows.new_empty((sum(routing.tokens_from), rows.shape[1]))
        parts = torch.split(landed, routing.tokens_from)
        packed = torch.split(rows[routing.outgoing], routing.tokens_to)
        parts[rank].copy_(packed[rank])
        crossing = [rows[which] for which in tables.across]
        here = [
            rows.new_empty((0 if ward == node else count, rows.shape[1]))
            for ward, count in enumerate(tables.wards)
        ]
    if not streams.communicates:
        return landed, iter(())
    across = exchange(
        call, streams,
        lambda target: crossing[target // each], lambda source: here[source // each], among="place",
    )  # fmt: skip
    near = exchange(call, streams, packed.__getitem__, parts.__getitem__, among="node")
    arrivals = _passed_on(call, streams, tables, across, here, parts)
    if not streams.sequential:
        return landed, _in_turn(near, arrivals)
    passed = list(arrivals)
    streams.finish()
    return landed, iter([*near, *passed])


def _in_turn(
    near: Arrivals, far: Iterator[tuple[int, int, int, Message]]
) -> Iterator[tuple[int, int, int, Message]]:
    yield from near
    yield from far


def _passed_on(
    call: Call,
    streams: CallStreams,
    tables: Relays,
    across: Arrivals,
    here: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> Iterator[tuple[int, int, int, Message]]:
    """Pass chunks on as they arrive, and yield the arrivals of rows of other nodes. All ranks of a node
    go through its wards' chunks in one order, in which libraries match messages that run as kernels."""
    each, rank, nodes = call.plan.ranks_per_node, call.rank, call.plan.nodes
    node, place = divmod(rank, each)
    step = call.plan.part(RelayedSchedule).rows_per_chunk
    messages = {(source // each, start // step): message for source, start, _, message in across}
    others = [(place + turn) % each for turn in range(1, each)]
    with streams.compute():
        come = _Chunks(tables.crossed, tables.many, step)
        go = [
            _Chunks(each_of, [tables.wards[ward]] * each, step)
            for ward, each_of in enumerate(tables.forward)
        ]
    for ward in ((node - turn) % nodes for turn in range(1, nodes)):
        ranks = range(ward * each, (ward + 1) * each)
        for number in range(-(-max(tables.many[one] for one in ranks) // step)):
            message, sends = messages.get((ward, number)), list[Sent]()
            if message is not None:
                streams.wait(message)
                with streams.compute():
                    mine = come.at(ranks[place], number)
                    parts[ranks[place]][mine] = here[ward][tables.crossed[ranks[place]][mine]]
                    for one in others:
                        which = tables.forward[ward][one][go[ward].at(one, number)]
                        sends.append(Sent(node * each + one, relayed(here[ward], which), None))
            taken = [(ranks[one], come.at(ranks[one], number)) for one in others]
            takes = [(node * each + source % each, parts[source][rows]) for source, rows in taken]
            passed = streams.post(sends, takes, number)
            if message is not None:
                taken.insert(0, (ranks[place], mine))
            for source, rows in taken:
                if rows.stop > rows.start:
                    arrived = message if source == ranks[place] else passed
                    assert arrived is not None
                    yield source, rows.start, rows.stop, arrived


def relayed(rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Return those of a ward's rows that a neighbour wants."""
    return rows[which]


class _Chunks:
    """The places of one chunk's indices in each of several ascending lists.

    Args:
        indices: the lists. many: the number that each list's indices are below. step: those of a
            chunk.
    """

    def __init__(self, indices: Sequence[torch.Tensor], many: Sequence[int], step: int) -> None:
        bounds = [
            torch.arange(0, count + step, step, device=each.device)
            for each, count in zip(indices, many, strict=True)
        ]
        found = [torch.searchsorted(*each) for each in zip(indices, bounds, strict=True)]
        edges = torch.cat(found).tolist()
        ends = accumulate((len(each) for each in bounds), initial=0)
        self._edges = [edges[at : at + len(each)] for at, each in zip(ends, bounds, strict=False)]

    def at(self, which: int, number: int) -> slice:
        """Return the places in a list of its indices in the chunk of that number."""
        edges = self._edges[which]
        if number + 1 >= len(edges):
            return slice(edges[-1], edges[-1])
        return slice(edges[number], edges[number + 1])


def return_by_slot(
    call: Call, streams: CallStreams, tables: Relays, y: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each own token's rows of ``y``, [T, D] in the dtype of ``weights`` [T,
    k]: relays add those of their node, in the order of slots."""
    each = call.plan.ranks_per_node
    node, place = divmod(call.rank, each)
    with streams.compute():
        packed = torch.split(y[tables.results], tables.results_to)
        rows, parts = landing(streams, packed, tables.results_from, place)
        crossing = [weights[which] for which in tables.across]
        theirs = weights.new_empty((len(tables.places), weights.shape[1]))
        of_wards = torch.split(theirs, tables.wards)
        of_wards[node].copy_(crossing[node])
    _exchange(call, streams, crossing, of_wards, "place")
    _exchange(call, streams, packed, parts, "node")
    streams.finish()
    with streams.compute():
        groups = groups_of(call, tables.ids, node, call.plan.nodes)
        sums = weighted_sums(rows, tables.places, theirs, groups)
    return _home(call, streams, tables, sums, len(weights))


def return_by_rank(
    call: Call, streams: CallStreams, tables: Relays, routing: Routing, of_tokens: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the sum of what ranks have for each own token in ``of_tokens``, a row for each token that
    came here: [T, D] in the dtype of ``weights`` [T, k]. Relays add those of their node, in the order
    of ranks."""
    each = call.plan.ranks_per_node
    place = call.rank % each
    with streams.compute():
        there = torch.split(of_tokens, routing.tokens_from)
        packed = [torch.cat(there[one::each]) for one in range(each)]
        first = list(accumulate(tables.wards, initial=0))
        which = [
            torch.cat(
                [of_ward[one] + at for of_ward, at in zip(tables.forward, first, strict=False)]
            )
            for one in range(each)
        ]
        parts = [of_tokens.new_empty((len(index), of_tokens.shape[1])) for index in which]
        parts[place].copy_(packed[place])
    _exchange(call, streams, packed, parts, "node")
    streams.finish()
    with streams.compute():
        zeros = weights.new_zeros((len(tables.places), of_tokens.shape[1]))
        sums = add_at(call, zip(which, parts, strict=True), zeros)
    return _home(call, streams, tables, sums, len(weights))


def _exchange(
    call: Call,
    streams: CallStreams,
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    among: Literal["node", "place"],
) -> None:
    """Exchange rows with the ranks of this node, by their place in it, or with those in the own place
    of every node, by node."""
    each = call.plan.ranks_per_node

    def at(rank: int) -> int:
        return rank % each if among == "node" else rank // each

    exchange(
        call,
        streams,
        lambda target: outgoing[at(target)],
        lambda source: incoming[at(source)],
        among,
    )


def _home(
    call: Call, streams: CallStreams, tables: Relays, sums: torch.Tensor, tokens: int
) -> torch.Tensor:
    """Send this node's sums of its wards' tokens home, rounded to the plan's ``node_sums``; return the
    sums of own tokens, to which those of nodes are added in their order."""
    each = call.plan.ranks_per_node
    node, name = call.rank // each, call.plan.part(HomeSchedule).node_sums
    assert name is not None
    with streams.compute():
        rounded = sums.to(getattr(torch, name))
        leaving, own = torch.split(rounded, tables.wards), torch.split(sums, tables.wards)[node]
        home = [rounded.new_empty((len(which), sums.shape[1])) for which in tables.across]
    _exchange(call, streams, leaving, home, "place")
    streams.finish()
    with streams.compute():
        home[node] = own
        parts = zip(tables.across, home, strict=True)
        return add_at(call, parts, sums.new_zeros((tokens, sums.shape[1])))
