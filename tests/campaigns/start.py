"""A world that seems to have made many calls already, so that its numbers are near an edge."""

from __future__ import annotations

from mkernel.backends.accelerators.cuda import device_session
from mkernel.backends.transport import _transport
from mkernel.world.world import World


def start_at(world: World, calls: int) -> None:
    """Before the first call of a world of one accelerator, on all ranks alike: its number, its epoch,
    the turn of its board and what ranks have released on ascend stand as after so many calls. Hopper's
    epoch is in its workspaces, and is that of all that are made from now on."""
    world._failure.call = (calls, "")
    world._calls._launched = calls
    board = world._agreement._board
    if board is not None:
        board._turn = calls
    if world.accelerator.name == "hopper":
        device_session._FIRST_EPOCH = calls + 1
    if world.accelerator.name == "ascend":
        pad = world._calls._pad
        for peer in range(world.size):  # kernels/call.hpp: the first words of a pad
            if peer != world.rank:
                _transport.pad_add(pad, peer, calls)
                _transport.pad_move_on(pad, peer, calls)
    world.barrier()
