"""Routing tables of MoE, built with torch ops on the device from the ids of all ranks.

A *place* is (token, slot of top-k), numbered token by token. Experts are cut evenly over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """The rows that one rank sends and gets. Lists are on the host, tensors on the device (int64).

    Attributes:
        outgoing: tokens to send, rank by rank, each token once a rank; ``tokens_to``: how many.
        tokens_from: rows of tokens that come from each rank.
        counts: rows of each expert here. rows: of ``rows_by[source][expert]``, how many.
        row_token: for each output row, which of the received token rows it multiplies.
        returning: output rows in the order in which they go home: by source rank, then place;
            ``rows_to``: how many to each rank.
        homecoming: for each own place, where its row lies among those that come home, which are
            ordered by rank, then place; ``rows_from``: how many from each rank.
        real: False where the ids of other ranks were made up (a compute-only view).
    """

    outgoing: torch.Tensor
    tokens_to: list[int]
    tokens_from: list[int]
    counts: torch.Tensor
    rows_by: list[list[int]]
    row_token: torch.Tensor
    returning: torch.Tensor
    rows_to: list[int]
    homecoming: torch.Tensor
    rows_from: list[int]
    real: bool


def route(ids: torch.Tensor, rank: int, experts: int, *, real: bool) -> Routing:
    """The tables of ``rank``. On a device with streams the host waits here, for the sizes.

    Args:
        ids: [W, T, k], the experts that the tokens of every rank go to. experts: of one rank.
    """
    world, _, top_k = ids.shape
    ids = ids.to(torch.int64)
    owner = ids // experts
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
    sizes = torch.cat(
        [wanted.sum(1), needed.sum(1), torch.bincount(home, minlength=world), by]
    ).tolist()
    rows_by = [sizes[at : at + experts] for at in range(3 * world, len(sizes), experts)]
    return Routing(
        outgoing=wanted.nonzero()[:, 1],
        tokens_to=sizes[:world],
        tokens_from=sizes[world : 2 * world],
        counts=by.view(world, experts).sum(0),
        rows_by=rows_by,
        row_token=received[place // top_k][order],
        returning=_inverse(order),
        rows_to=[sum(rows) for rows in rows_by],
        homecoming=_inverse(home.argsort(stable=True)),
        rows_from=sizes[2 * world : 3 * world],
        real=real,
    )


def _inverse(order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
