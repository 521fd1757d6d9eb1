"""A rank process of the campaign: it lives through many worlds, and says what came of each."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from campaigns.draw import TIMEOUT_S, Turn
from campaigns.faults import Fault
from campaigns.group import Group
from campaigns.held import held, more_than, own_bytes
from campaigns.limits import exhaust, limits
from campaigns.planted import Planted, misbehave, spoil, write_late
from torch.distributed import TCPStore

import mkernel
from mkernel import fork_server
from mkernel.conformance.ranks import Judge, give_up_after
from mkernel.errors import PlanMismatch, WorldError
from mkernel.world import join, lifecycle
from mkernel.world.watchdog import host_identity

MOST_S = 60.0
"""How long a rank calls a world whose end it waits for."""
_OTHER_ROWS = 48
"""Of the call that only one rank makes."""
_familiar: set[str] = set()
"""Kinds of worlds that this process has been in: what they make once is there."""


@dataclass(frozen=True)
class Part:
    """The part of one rank in a turn.

    Attributes:
        port: of the store of the world's ranks. planted: a mistake that it is to make.
    """

    turn: Turn
    rank: int
    port: int
    planted: Planted | None = None


@dataclass
class RankOutcome:
    """The outcome of a rank's part.

    Attributes:
        calls: those that ended. wrong: what was wrong with their results.
        error: the name and message of what ended the world here; empty: nothing did.
        at: when it was raised, by CLOCK_MONOTONIC. struck_at: when this rank struck itself.
        reached: the stage it was in. group_error: what ended the group's world here.
        left: what the process holds beyond what it held before. bytes: of its own memory.
    """

    rank: int
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    at: float = 0.0
    struck_at: float = 0.0
    reached: str = "join"
    group_error: tuple[str, str] | None = None
    left: list[str] = field(default_factory=list)
    bytes: int = 0


Say = Callable[[str], None]


def live(
    pipe: Connection, log: str, folder: str, play: Callable[[Any, Callable[[Any], None]], Any]
) -> None:
    """Take one part after another until the driver's end of the pipe closes. Temporary files go to
    ``folder``.

    Args:
        play: plays a part; its result is told. Given what tells the driver something meanwhile.
    """
    gc.freeze()  # what was imported stays: else whoever looks for what is left looks through it all
    tempfile.tempdir = folder
    fork_server.leave_ctrl_c_to_parent()
    file = open(log, "a")  # noqa: SIM115 - it lives as long as the process
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    torch.set_num_threads(1)
    own = dict(os.environ)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            part = pipe.recv()
            os.environ.clear()
            os.environ.update(own)
            pipe.send(("told", play(part, lambda stage: pipe.send(("stage", stage)))))


def play(part: Part, say: Say) -> RankOutcome:
    """Join, call, leave; return the outcome and what that left behind."""
    told = RankOutcome(part.rank)
    turn = part.turn
    kind = f"{turn.world.accelerator} {turn.nic} {turn.world.nodes > 1}"
    before = held()
    try:
        with limits():
            _world(part, told, say)
    except KeyboardInterrupt as error:  # between two calls, say
        _note(told, error)
        mkernel.finalize(error)
    if kind in _familiar:
        # A message to a rank that is gone may block torch.distributed up to its deadline.
        told.left = more_than(before, TIMEOUT_S + 10)
    elif told.reached == "leave":
        _familiar.add(kind)
    told.bytes = own_bytes()
    return told


def _note(told: RankOutcome, error: BaseException) -> None:
    if told.error is None:
        told.at = time.monotonic()
        told.error = (type(error).__name__, str(error))


def _world(part: Part, told: RankOutcome, say: Say) -> None:
    turn, world = part.turn, part.turn.world
    fault = turn.fault if part.rank in turn.fault.victims else Fault("none")
    node = part.rank // world.ranks_per_node
    os.environ.update(
        turn.environment,
        RANK=str(part.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(part.rank),
        LOCAL_WORLD_SIZE=str(world.ranks_per_node if turn.apart else world.size),
        MKERNEL_JOB_SECRET=f"the secret of turn {turn.number}",
        MKERNEL_TIMEOUT_S=str(TIMEOUT_S),  # how long a busy machine takes to join says nothing
        GLOO_SOCKET_IFNAME="lo",
    )
    if fault.device:
        os.environ["MKERNEL_SOFTVERBS_FAULTS"] = fault.device
    join.host_identity = (lambda: f"host {node}") if turn.apart else host_identity
    lifecycle.generations.clear()  # the store is this world's own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if fault.of.by == "rank" and fault.stage == "join":
            told.struck_at = time.monotonic()
            exhaust(fault.kind, fault.amount)
        patience = timedelta(seconds=turn.timeout_s)
        one, two = (
            TCPStore("127.0.0.1", part.port, timeout=patience, wait_for_workers=False)
            for _ in range(2)
        )
        say("join")  # what torch's store takes, and raises, is not ours
        mkernel.init(
            nodes=world.nodes,
            ranks_per_node=world.ranks_per_node,
            accelerator=world.accelerator,
            nic=turn.nic or None,
            verbs="soft" if turn.nic else None,
            stores=(one, two),
        )
        told.reached = "calls"
        mkernel.world().barrier()
        give_up_after(turn.timeout_s)
        group = Group(turn, part.rank, part.port, part.planted)
        say("calls")
        _calls(turn, fault, told, part.planted, group)
        told.reached = "leave"
        say("leave")
        misbehave(part.planted)
        mkernel.finalize()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _note(told, error)
        write_late(part.planted)
        with contextlib.suppress(WorldError):
            mkernel.finalize(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _calls(
    turn: Turn, fault: Fault, told: RankOutcome, planted: Planted | None, group: Group
) -> None:
    judges = [Judge(case) for case in turn.cases]
    ends = bool(turn.fault.of.raised) and not turn.fault.of.maybe and turn.fault.stage == "calls"
    counts: Counter[int] = Counter()
    late = time.monotonic() + MOST_S
    while ends or told.calls < turn.calls:
        which = told.calls % len(judges)
        if told.calls == turn.fault.call % max(turn.calls, 1):
            told.struck_at = time.monotonic() if fault.of.by == "rank" else 0.0
            _own_fault(turn, fault)
        judge, iteration = judges[which], counts[which]
        outcome = judge.case.run(judge.inputs(iteration))
        spoil(planted, outcome)
        told.wrong += judge.problems(outcome, iteration)
        counts[which] += 1
        told.calls += 1
        told.wrong += group.call()
        told.group_error = group.error
        if time.monotonic() > late:
            raise TimeoutError(f"the world still works after {MOST_S:g} s")


def _own_fault(turn: Turn, fault: Fault) -> None:
    """What this rank does to itself before a call; what all do where it is one call that differs."""
    if turn.fault.kind == "differs" and turn.world.size > 1:
        rows = _OTHER_ROWS * (2 if fault.kind == "differs" else 1)
        a, b = torch.randn(rows, 64), torch.randn(64, 32)
        try:
            mkernel.all_gather_gemm(a, b)
        except PlanMismatch:
            return
        raise AssertionError("a call that differs was not refused")
    if fault.kind == "raises":
        raise ValueError("this rank has had enough")
    if fault.kind == "absent":
        _wait_for_the_end()
    elif fault.of.by == "rank" and fault.stage == "calls":
        exhaust(fault.kind, fault.amount)


def _wait_for_the_end() -> None:
    late = time.monotonic() + MOST_S
    while time.monotonic() < late:
        mkernel.synchronize()
        time.sleep(0.05)
    raise TimeoutError(f"the world still stands after {MOST_S:g} s")
