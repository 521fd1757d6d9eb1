"""Routing tables of MoE, built with torch ops on the device from the ids of all ranks.

A *place* is (token, slot of top-k), numbered token by token. Experts are split evenly over the
ranks; a place whose id names no expert has no row. Calls of one routing share the ids: tables that
were built once are reused as long as the ids' tensor lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch


@dataclass(frozen=True)
class Routing:
    """The rows that one rank sends and receives. Lists are on the host, tensors on the device
    (int64).

    Attributes:
        outgoing: tokens to send, rank by rank, each token once per rank; ``tokens_to``: their
            number.
        tokens_from: rows of tokens that come from each rank.
        counts: rows of each expert here. ``rows_by[source][expert]``: their number by source.
        row_token: for each output row, the index of its token among the received rows;
            ``row_source``: its index among all ranks' tokens; ``row_slot``: its slot of that token.
        returning: output rows in the order in which they return: by source rank, then place;
            ``rows_to``: their number to each rank.
        homecoming: for each own place, the index of its row among those that return, which are
            ordered by rank, then place; one past their end if it has none. ``rows_from``: their
            number from each rank.
        rows_on: rows of all experts of each rank.
        top_k: slots of a token.
    """

    outgoing: torch.Tensor
    tokens_to: list[int]
    tokens_from: list[int]
    counts: torch.Tensor
    rows_by: list[list[int]]
    row_token: torch.Tensor
    row_source: torch.Tensor
    row_slot: torch.Tensor
    returning: torch.Tensor
    rows_to: list[int]
    homecoming: torch.Tensor
    rows_from: list[int]
    rows_on: list[int]
    top_k: int


def route(ids: torch.Tensor, rank: int, experts: int) -> Routing:
    """Build the tables of ``rank``. On a device with streams the host waits here, for the sizes.

    Args:
        ids: [W, T, k], the experts that the tokens of every rank go to. experts: number on one
            rank.
    """
    world, _, top_k = ids.shape
    ids = ids.to(torch.int64)
    owner = (ids // experts).masked_fill_(ids < 0, world).clamp_(max=world)  # world: nobody
    ranks = torch.arange(world, device=ids.device)

    wanted = (owner[rank] == ranks[:, None, None]).any(2)  # [W, T]: my tokens for each rank
    here = owner == rank
    needed = here.any(2)  # [W, T]: tokens of each rank that come here

    place = here.view(-1).nonzero().squeeze(1)  # by source, token, slot
    source = place // here[0].numel()
    expert = ids.view(-1)[place] - rank * experts
    order = expert.argsort(stable=True)
    received = needed.view(-1).cumsum(0) - 1
    by = torch.bincount(source * experts + expert, minlength=world * experts)

    home = owner[rank].view(-1)
    homes = torch.bincount(home, minlength=world + 1)[:world]
    on = torch.bincount(owner.view(-1), minlength=world + 1)[:world]
    sizes = torch.cat([wanted.sum(1), needed.sum(1), homes, on, by]).tolist()
    rows_by = [sizes[at : at + experts] for at in range(4 * world, len(sizes), experts)]
    tokens_to, tokens_from, rows_from, rows_on = (
        sizes[at * world : (at + 1) * world] for at in range(4)
    )
    places = place[order]
    row_source = places // top_k
    return Routing(
        outgoing=wanted.nonzero()[:, 1],
        tokens_to=tokens_to,
        tokens_from=tokens_from,
        counts=by.view(world, experts).sum(0),
        rows_by=rows_by,
        row_token=received[row_source],
        row_source=row_source,
        row_slot=places % top_k,
        returning=_inverse(order),
        rows_to=[sum(rows) for rows in rows_by],
        homecoming=_inverse(home.argsort(stable=True)).clamp_(max=sum(rows_from)),
        rows_from=rows_from,
        rows_on=rows_on,
        top_k=top_k,
    )


@dataclass(frozen=True)
class Relays:
    """The rows that one rank sends and relays. A rank's *wards* are the ranks in its place, one of each
    node and itself among them. Indices are on the device (int64), numbers on the host.

    Attributes:
        across: for each node, which of the own tokens it wants.
        wanted: [nodes, tokens] whether this node wants a ward's token.
        wards: for each ward, how many of its tokens this node wants; they are *packed* in the order of
            wards and tokens.
        forward: for each ward and each rank of this node, which of the ward's packed tokens that wants.
        crossed: for each rank of the world, for each of its tokens that come here, its place among
            those that this node wants of that rank.
        many: for each rank of the world, how many of its tokens this node wants.
        results: output rows in the order in which they go to the ranks of this node that relay them:
            by that rank, then node, token and slot; ``results_to``: their number to each.
        ids: [packed tokens, slots] their experts.
        places: [packed tokens, slots] the row among those that come from this node's ranks, or one past
            their end; ``results_from``: their number from each rank.
    """

    across: list[torch.Tensor]
    wanted: torch.Tensor
    wards: list[int]
    forward: list[list[torch.Tensor]]
    crossed: list[torch.Tensor]
    many: list[int]
    results: torch.Tensor
    results_to: list[int]
    ids: torch.Tensor
    places: torch.Tensor
    results_from: list[int]


def relays(ids: torch.Tensor, rank: int, each: int, experts: int, routing: Routing) -> Relays:
    """Build the tables of ``rank``. On a device with streams the host waits here, for the sizes.

    Args:
        ids: [W, T, k], the experts that the tokens of every rank go to. each: ranks of a node.
        experts: number on one rank. routing: the rank's tables.
    """
    world, tokens, top_k = ids.shape
    node, place = divmod(rank, each)
    ids = ids.to(torch.int64)
    owner = torch.where(ids < 0, -1, ids // experts)  # a number that is no rank's: nobody

    there = owner.div(each, rounding_mode="floor")  # the node; -1 stays -1
    across = [(there[rank] == one).any(1).nonzero()[:, 0] for one in range(world // each)]
    local = owner - node * each
    local = local.masked_fill((local < 0) | (local >= each), each)  # of this node; each: not here
    wanted = (local < each).any(2)  # [W, T]
    packed = wanted.cumsum(1) - 1
    here = (local == place).any(2)
    of_wards = local[place::each]  # [N, T, k]
    ours = wanted[place::each]
    forward = [
        [packed[place + ward * each][(of_wards[ward] == one).any(1)] for one in range(each)]
        for ward in range(world // each)
    ]
    home = of_wards[ours]  # [packed, k]
    order = home.view(-1).argsort(stable=True)
    counts = torch.bincount(home.view(-1), minlength=each + 1)[:each]

    source, token = routing.row_source // tokens, routing.row_source % tokens
    key = (source % each * (world // each) + source // each) * tokens + token
    results = (key * top_k + routing.row_slot).argsort()
    to = torch.bincount(source % each, minlength=each)
    sizes = torch.cat([wanted.sum(1), counts, to]).tolist()
    many, results_from, results_to = sizes[:world], sizes[world : world + each], sizes[-each:]
    return Relays(
        across=across,
        wanted=ours,
        wards=many[place::each],
        forward=forward,
        crossed=[packed[one][here[one]] for one in range(world)],
        many=many,
        results=results,
        results_to=results_to,
        ids=ids[place::each][ours],
        places=_inverse(order).view(home.shape).clamp_(max=sum(results_from)),
        results_from=results_from,
    )


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


class Remembered(NamedTuple):
    """The tables of a rank, and the number of rows of its outputs. ``relays``: once a call of the
    routing has relays."""

    rank: int
    height: int
    routing: Routing
    relays: Relays | None = None


_known: WeakKeyDictionary[torch.UntypedStorage, tuple[int, Remembered]] = WeakKeyDictionary()


def remember(words: torch.Tensor, found: Remembered) -> None:
    """Keep the tables that follow from a call's tensor ``routing``, as long as that tensor lives."""
    _known[words.untyped_storage()] = _version(words), found


def recall(words: torch.Tensor, rank: int) -> Remembered | None:
    """Return the tables kept for ``rank``."""
    found = known(words)
    return found if found is not None and found.rank == rank else None


def known(words: torch.Tensor) -> Remembered | None:
    """Return the tables kept; None if the tensor is a copy, or was written to since."""
    version, found = _known.get(words.untyped_storage(), (0, None))
    return found if version == _version(words) else None


def _version(words: torch.Tensor) -> int:
    return 0 if words.is_inference() else words._version
