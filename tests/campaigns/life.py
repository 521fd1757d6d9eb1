"""A rank of the soak: it lives one life after another, each in several worlds at once, until a rank is
killed."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from campaigns.draw import draw_cases
from campaigns.flat import LEAST
from campaigns.held import held, more_than
from campaigns.planted import Planted, keep, lose_an_epoch, spoil
from campaigns.replay import Replayed
from campaigns.sample import Sample, take
from torch import distributed
from torch.distributed import ProcessGroup, TCPStore

import mkernel
from mkernel.conformance import grid
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.ranks import Judge
from mkernel.errors import WorldError
from mkernel.harness.contenders.symm_mem import ENVIRONMENT
from mkernel.world import lifecycle
from mkernel.world.registry import worlds
from mkernel.world.world import World

TIMEOUT_S = 60.0
NOTICED_S = 30.0
"""Within which every world of a rank that was killed says so, on a machine that is busy."""
WARM = 5
"""Calls of each case before a life is warm: by then a judge keeps as many results as it ever does."""
BURST = 4
"""Calls that are made before the first of them is judged."""
_TRAFFIC = (1, 1000, 1 << 16)
"""Elements of the collectives of torch.distributed."""
_MULTIPROCESSORS = "96"
"""Of a GPU, for mkernel's kernels."""
_UNDER_WAY = 3
_WAYS = ("eager", "burst", "stream", "graph")
_lived = 0
"""Lives of this process: what the first one makes once is there afterwards."""

Say = Callable[[Sample], None]


@dataclass(frozen=True)
class Life:
    """The part of one rank until a rank is killed, or its time is up.

    Attributes:
        number: of the life in the soak. size: ranks. port: of the store of its ranks.
        seconds: after which all ranks leave, when they have taken ``LEAST`` samples; None: one of them
            is killed before.
        step_calls: rounds of calls between two samples. cases: drawn for each world.
        planted: a mistake that this rank is to make, after so many calls as ``planted_after``.
    """

    seed: int
    number: int
    rank: int
    size: int
    port: int
    accelerator: str
    seconds: float | None
    step_calls: int = 12
    cases: int = 4
    planted: Planted | None = None
    planted_after: int = 0


@dataclass
class Lived:
    """The outcome of a rank's life.

    Attributes:
        calls, collectives: of mkernel and of torch.distributed, all of them judged. wrong: results.
        ops: calls by op and way.
        error: what ended it: name and message. at: when, by CLOCK_MONOTONIC.
        noticed: what each world with all ranks raised then: name and message, by world.
        left: what the process holds beyond what it held before. after: a sample of then.
    """

    rank: int
    calls: int = 0
    collectives: int = 0
    wrong: list[str] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    error: tuple[str, str] | None = None
    at: float = 0.0
    noticed: dict[str, tuple[str, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    after: Sample | None = None


class Place(NamedTuple):
    """A world of a life that this rank is in, and its cases. ``graphs``: of those that are captured."""

    world: World
    judges: list[Judge]
    counts: Counter[int]
    graphs: dict[int, Replayed]


def live(life: Life, say: Say) -> Lived:
    """Live one life; return its outcome, and what it left behind."""
    global _lived  # noqa: PLW0603 - of the process
    lived = Lived(life.rank)
    before = held()
    try:
        with _torch(life):
            _Living(life, lived, say).until_the_end()
    except Exception as error:
        if lived.error is None:
            _note(lived, error)
    if _lived:
        # A message to a rank that is gone may block torch.distributed up to its deadline.
        lived.left = more_than(before, TIMEOUT_S + 10)
    _lived += 1
    lived.after = take(lived.calls, {})
    return lived


def _note(lived: Lived, error: BaseException) -> None:
    lived.at = time.monotonic()
    lived.error = (type(error).__name__, str(error))


@contextlib.contextmanager
def _torch(life: Life) -> Iterator[None]:
    """torch.distributed of the life's ranks."""
    os.environ.update(
        RANK=str(life.rank),
        WORLD_SIZE=str(life.size),
        LOCAL_RANK=str(life.rank),
        LOCAL_WORLD_SIZE=str(life.size),
        GLOO_SOCKET_IFNAME="lo",
        **ENVIRONMENT,
        MKERNEL_HEARTBEAT_S="0.2",
        MKERNEL_JOB_SECRET=f"the secret of life {life.number} of seed {life.seed}",
        MKERNEL_TIMEOUT_S=str(TIMEOUT_S),
    )
    lifecycle.generations.clear()  # the store is this life's own
    backend = "gloo"
    # NCCL's kernels run beside ours, in whatever order devices start them.
    os.environ.setdefault("MKERNEL_HOPPER_MULTIPROCESSORS", _MULTIPROCESSORS)
    if torch.cuda.is_available() and life.accelerator != "ascend":
        torch.cuda.set_device(life.rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend,
        store=TCPStore(
            "127.0.0.1", life.port, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        ),
        rank=life.rank,
        world_size=life.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    broken = True
    try:
        yield
        broken = False
    finally:
        if broken:
            _abort_nccl()
        distributed.destroy_process_group()
        gc.collect()


def _abort_nccl() -> None:
    """End its kernels, which wait for a rank that is gone and keep up what is queued behind them."""
    if "nccl" in distributed.get_backend_config():
        _whole()._get_backend(torch.device("cuda")).abort()


def _whole() -> ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None
    return group


class _Living:
    """One rank's life from its worlds to its end."""

    def __init__(self, life: Life, lived: Lived, say: Say) -> None:
        self._life, self._lived, self._say = life, lived, say
        self._chance = random.Random(f"{life.seed}/{life.number}")  # all ranks draw the same
        self._places: dict[str, Place | None] = {}
        self._warm: Sample | None = None
        self._piled_up = False
        self._traffic: list[tuple[Any, torch.Tensor, float]] = []
        self._streams: list[Any] = []

    def until_the_end(self) -> None:
        """Call until a rank is gone, or the time is up."""
        life = self._life
        try:
            self._join()
            for place in self._places.values():
                self._warm_up(place)
            for elements in _TRAFFIC:
                self._send(elements)
            self._sample()
            end = time.monotonic() + (life.seconds or 0.0)
            taken = 1
            while not self._is_over(end if taken >= LEAST else math.inf):
                for _ in range(life.step_calls):
                    self._step()
                self._sample()
                taken += 1
        except Exception as error:
            _note(self._lived, error)
            _abort_nccl()
            self._traffic.clear()
            self._break(error)
        else:
            mkernel.finalize()

    def _join(self) -> None:
        size, rank = self._life.size, self._life.rank
        ranks = {"all": None, "twin": list(range(size))}
        if size > 2:
            ranks["pair"] = [0, 1]
        for name, members in ranks.items():
            group = _whole() if members is None else distributed.new_group(members)
            seed = self._chance.randrange(1 << 30)
            if members is not None and rank not in members:
                self._places[name] = None
                continue
            world = mkernel.init(group, accelerator=self._life.accelerator)
            worlds.default = world
            cases = draw_cases(
                AcceleratorSubject(self._life.accelerator), (1, world.size), random.Random(seed),
                self._life.cases,
            )  # fmt: skip
            judges = [Judge(case) for case in cases]
            self._places[name] = Place(world, judges, Counter(), {})
        if torch.cuda.is_initialized():
            self._streams = [torch.cuda.Stream() for _ in range(3)]

    def _warm_up(self, place: Place | None) -> None:
        if place is None:
            return
        worlds.default = place.world
        for which, judge in enumerate(place.judges):
            for _ in range(WARM):
                self._eager(place, which)
            if self._streams and judge.case.op in grid.GEMMS:
                place.graphs[which] = Replayed(judge)

    def _step(self) -> None:
        """One thing, the same on all ranks."""
        chance = self._chance
        name = chance.choice(list(self._places))
        which, way = chance.randrange(self._life.cases), chance.choice(_WAYS)
        sends, elements = chance.random() < 0.5, chance.choice(_TRAFFIC)
        stream = chance.randrange(3)
        if sends:
            self._send(elements)
        self._receive(_UNDER_WAY)
        place = self._places[name]
        if place is None:
            return
        worlds.default = place.world
        if way == "graph" and which in place.graphs:
            self._judged(place, which, way, place.graphs[which].replay)
        elif way == "stream" and self._streams:
            with torch.cuda.stream(self._streams[stream]):
                self._eager(place, which, way)
        elif way == "burst":
            self._burst(place, which)
        else:
            self._eager(place, which)

    # ---- calls ---------------------------------------------------------------------------------

    def _eager(self, place: Place, which: int, way: str = "eager") -> None:
        judge = place.judges[which]
        self._judged(place, which, way, lambda iteration: judge.case.run(judge.inputs(iteration)))

    def _judged(self, place: Place, which: int, way: str, call: Callable[[int], Any]) -> None:
        iteration = place.counts[which]
        place.counts[which] += 1
        self._judge(place, which, way, iteration, call(iteration))

    def _burst(self, place: Place, which: int) -> None:
        """Several calls, of which a stream-ordered accelerator queues the next before one has ended."""
        judge, first = place.judges[which], place.counts[which]
        place.counts[which] += BURST
        inputs = [judge.inputs(first + number) for number in range(BURST)]
        outcomes = [judge.case.run(each, wait=False) for each in inputs]
        for number, outcome in enumerate(outcomes):
            self._judge(place, which, "burst", first + number, outcome)

    def _judge(self, place: Place, which: int, way: str, iteration: int, outcome: Any) -> None:
        life, lived = self._life, self._lived
        self._until_done()
        place.world.synchronize()  # what a rank that is gone has left unfinished is no result
        planted = life.planted if lived.calls >= life.planted_after else None
        if lived.calls == life.planted_after:
            spoil(planted, outcome)
            lose_an_epoch(planted, place.world)
        keep(planted)
        judge = place.judges[which]
        lived.wrong += judge.problems(outcome, iteration)
        lived.calls += 1
        lived.ops[f"{judge.case.op} {way}"] += 1

    # ---- beside them ---------------------------------------------------------------------------

    def _send(self, elements: int) -> None:
        value = float(self._lived.collectives % 1000 + self._life.rank)
        device = "cuda" if self._streams else "cpu"
        tensor = torch.full((elements,), value, device=device)
        first = value - self._life.rank
        size = self._life.size
        wanted = size * first + size * (size - 1) / 2
        self._traffic.append((distributed.all_reduce(tensor, async_op=True), tensor, wanted))
        self._lived.collectives += 1

    def _receive(self, leave: int) -> None:
        while len(self._traffic) > leave:
            work, tensor, wanted = self._traffic.pop(0)
            work.wait()
            right = (tensor == wanted).all()
            self._until_done()
            if not bool(right):
                self._lived.wrong.append(
                    f"rank {self._life.rank}: an all_reduce of torch.distributed of "
                    f"{tensor.numel()} elements is not {wanted}"
                )

    def _until_done(self) -> None:
        """Until the device has done what is queued on this stream. NCCL's part never ends where a
        rank is gone; what a world says of that is raised."""
        if not self._streams:
            return
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            for place in self._places.values():
                if place is not None:
                    place.world.synchronize()
            time.sleep(0.0002)

    def _sample(self) -> None:
        self._receive(0)
        live = {name: place.world for name, place in self._places.items() if place is not None}
        for world in live.values():
            world.synchronize()
        warm = None if self._warm is None or self._piled_up else self._warm.held
        sample = take(self._lived.calls, live, warm)
        self._warm = self._warm or sample
        self._piled_up = bool(sample.held - self._warm.held)  # and is not waited for again
        self._say(sample)

    def _is_over(self, end: float) -> bool:
        over = torch.tensor(self._life.seconds is not None and time.monotonic() > end).int()
        distributed.broadcast(over, 0)
        return bool(over)

    # ---- its end -------------------------------------------------------------------------------

    def _break(self, error: BaseException) -> None:
        """Hear of the rank that is gone in every world that has all ranks, then leave all."""
        noticed = self._lived.noticed
        for name, place in self._places.items():
            if place is not None and place.world.size == self._life.size:
                noticed[name] = _told(place.world)
        for place in reversed(list(self._places.values())):
            if place is not None:
                with contextlib.suppress(WorldError):
                    place.world.close(error)
        worlds.default = None


def _told(world: World) -> tuple[str, str]:
    """Return what a broken world raises."""
    late = time.monotonic() + NOTICED_S
    while time.monotonic() < late:
        try:
            world.synchronize()
        except WorldError as error:
            return type(error).__name__, str(error)
        time.sleep(0.02)
    return "", f"the world still stands after {NOTICED_S:g} s"
