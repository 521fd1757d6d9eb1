"""Ring attention in pieces: its order, and its part on the host with the stand-ins of
test_hopper_attention.py. A rank's streams are one here, so that who could wait for good does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hopper_calls import gpus
from test_hopper_attention import (
    BESIDE,
    MAIN,
    Fabric,
    Here,
    Running,
    Started,
    attended,
    decorations_of,
    flat_at,
    planned,
    run,
    sizes_of,
)

from mkernel.backends.accelerators.cuda import device_world
from mkernel.backends.accelerators.cuda.attention import in_pieces as attention_in_pieces
from mkernel.backends.accelerators.cuda.attention import merge as attention_merge
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention import tuning as attention_tuning
from mkernel.backends.accelerators.cuda.attention.in_pieces import AttentionInPiecesExecutor
from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.attention.pieces import Pieces, cuts
from mkernel.backends.accelerators.cuda.schedule import AttentionInPiecesSchedule, AttentionSchedule
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.accelerators.hopper.gemm.tuning import FLAGS
from mkernel.backends.contracts.instrumented import View
from mkernel.errors import ArgumentError
from mkernel.plan.model import AttentionShape, LaunchPlan

LONG: dict[str, Any] = {
    "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "sequence": 1 << 20,
}  # fmt: skip


class Piece(NamedTuple):
    at: int
    width: int
    pitch: int
    count: int


class PiecesFabric(Fabric):
    """Also of pieces."""

    MAX_FLAGS, Piece = FLAGS, Piece

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.lock = threading.Condition()
        self.set: set[tuple[int, int]] = set()

    def clear(self) -> None:
        self.set.clear()

    def push_piece(
        self, device: int, here: Here, to: int, k: int, v: int, piece: Piece, place: int, flag: int,
        stream: int,
    ) -> None:  # fmt: skip
        self._note(here, ("push", to, flag), stream)
        at = here.workspaces[to] + self.DATA_OFFSET + place
        for source in (k, v):
            for stretch in range(piece.count):
                ctypes.memmove(at, source + piece.at + stretch * piece.pitch, piece.width)
                at += piece.width
        self._set(to, flag)

    def tell(self, device: int, here: Here, to: int, flag: int, stream: int) -> None:
        self._note(here, ("tell", to, flag), stream)
        self._set(to, flag)

    def await_part(self, device: int, here: Here, source: int, flag: int, stream: int) -> None:
        self._note(here, ("await", source, flag), stream)
        with self.lock:
            assert self.lock.wait_for(lambda: (here.rank, flag) in self.set, 60), (here.rank, flag)

    def _set(self, to: int, flag: int) -> None:
        with self.lock:
            assert 0 <= flag < self.MAX_FLAGS
            assert (to, flag) not in self.set, "a flag is set once in a call"
            self.set.add((to, flag))
            self.lock.notify_all()


def in_pieces(plan: LaunchPlan, rows: int, slots: int = 2) -> LaunchPlan:
    blocks = plan.part(AttentionSchedule).merge_blocks
    how = AttentionInPiecesSchedule(
        library="cudnn", merge_blocks=blocks, piece_rows=rows, slots=slots
    )
    return plan.model_copy(update={"schedule": how})


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], PiecesFabric]:
    def make(world: int) -> PiecesFabric:
        made = PiecesFabric(world)
        for module in (attention_in_pieces, attention_merge, attention_ring, device_world):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(attention_in_pieces, "attend", attended)
        monkeypatch.setattr(attention_ring, "bytes_at", flat_at)
        return made

    return make


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("world", "rows", "slots"), [(1, 16, 2), (2, 16, 2), (2, 12, 3), (3, 32, 2)]
)
def test_results(fabric: Any, world: int, rows: int, slots: int, causal: bool, layout: str) -> None:
    """Pieces that divide a rank's rows, and that do not."""
    plan = in_pieces(planned(world, causal=causal, layout=layout, sequence=64 * world), rows, slots)
    assert run(fabric(world), plan) == []


@pytest.mark.parametrize("view", ["pipelined", "sequential"])
def test_what_is_queued(fabric: Any, view: View) -> None:
    """Of rank 0 of 2, whose first rows see nothing of its peer: what it sends, it sends when its peer
    comes to it, and not before the slot is free."""
    made = fabric(2)
    plan = in_pieces(planned(2, causal=True, sequence=128), 16)
    assert run(made, plan, view=view, calls=1) == []
    beside = BESIDE if view == "pipelined" else MAIN
    blocks = plan.part(AttentionInPiecesSchedule).merge_blocks
    pushes = [(what, stream) for what, stream in made.queued if what[0] == "push"]
    assert pushes == [(("push", 1, number), beside) for number in range(8)]
    free = [what for what, stream in made.queued if what[0] == "await" and stream == beside]
    assert view == "sequential" or free == [("await", 1, 48 + number) for number in range(6)]
    arrived = [what for what, stream in made.queued if what[0] == "await" and what[2] < 48]
    assert arrived == [("await", 1, 32 + number) for number in range(8)]
    tells = [what for what, _ in made.queued if what[0] == "tell"]
    assert tells == [("tell", 1, 16 + number) for number in range(6)]
    merges = [(what[1:], stream) for what, stream in made.queued if what[0] == "merge"]
    # Two cuts of queries that see own keys alone; two more with 4 pieces each, merged in 4 kernels.
    ends = [((1, blocks, False), MAIN), ((2, blocks, False), MAIN)]
    each = [((3, blocks, False), MAIN), *[((1, blocks, False), MAIN)] * 3]
    assert merges == [*ends, *each, *each[:-1], ((1, blocks, True), MAIN)]


def test_compute_only_exchanges_nothing(fabric: Any) -> None:
    made = fabric(2)
    run(made, in_pieces(planned(2, sequence=128), 16), view="compute_only", calls=1)
    assert {what[0] for what, _ in made.queued} == {"merge"}
    assert not any(what[-1] for what, _ in made.queued)


def test_wrong_pieces_are_seen(fabric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own eyes: what was found before is forgotten, a piece is read where the next one lies,
    and queries see the rows behind them."""
    plan = in_pieces(planned(2, causal=True, sequence=128), 16)
    made = fabric(2)
    made.Running = lambda out, lse, read, write: Running(out, lse, False, write)
    assert run(made, plan, calls=1)

    made, lies = fabric(2), attention_ring.lying
    with monkeypatch.context() as patched:
        patched.setattr(
            attention_in_pieces,
            "lying",
            lambda plan, at, offset, rows: lies(plan, at, offset + rows * 128, rows),
        )
        assert run(made, plan, calls=1)

    def unmasked(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        return attended(q, k, v, first, False, scale)

    made = fabric(2)
    monkeypatch.setattr(attention_in_pieces, "attend", unmasked)
    assert run(made, plan, calls=1)


def test_slots_are_not_written_before_they_are_read(fabric: Any) -> None:
    """That results depend on it: without its waits rank 0 sends the third piece, into the first one's
    slot, before rank 1 reads the first."""
    plan = in_pieces(planned(2, sequence=128), 8)
    made, sent = fabric(2), threading.Event()
    right = PiecesFabric.await_part

    def hurried(device: int, here: Here, source: int, flag: int, stream: int) -> None:
        if here.rank == 0 and stream == BESIDE:
            return  # does not wait for slots
        if here.rank == 1 and stream == MAIN:
            assert sent.wait(60)
        right(made, device, here, source, flag, stream)

    count = 0

    def push(device: int, here: Here, *rest: Any) -> None:
        nonlocal count
        PiecesFabric.push_piece(made, device, here, *rest)
        count += here.rank == 0
        if count == 3:
            sent.set()

    made.await_part, made.push_piece = hurried, push
    assert run(made, plan, calls=1)


# ---- order ---------------------------------------------------------------------------------------


def shape_of(world: int, causal: bool, rows: int = 96) -> AttentionShape:
    return AttentionShape(**sizes_of(world, causal=causal, sequence=rows * world))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_visible_pair_meets_once_and_no_slot_is_taken_twice(world: int, causal: bool) -> None:
    pieces = Pieces(shape_of(world, causal), world, 20, 3)
    used: dict[int, set[int]] = {rank: set() for rank in range(world)}
    for reader in range(world):
        steps = list(pieces.steps(reader))
        assert [step.turn for step in steps] == list(range(len(steps)))
        assert len({(step.queries, step.source, step.keys) for step in steps}) == len(steps)
        if not causal:
            assert len(steps) == len(pieces.cuts) ** 2 * (world - 1)
        for source in range(world):
            of = [step for step in steps if step.source == source]
            assert [step.number for step in of] == list(range(len(of)))
            sent = [step for to, step in pieces.sent(source) if to == reader]
            assert sent == of
            places = {pieces.place(reader, step) for step in of}
            assert len(places) == min(3, len(of))
            for each in places:
                assert each not in used[reader], "a slot of another source"
                used[reader].add(each)
                assert 0 <= each < pieces.area
    flags: dict[int, list[int]] = {rank: [] for rank in range(world)}
    for reader in range(world):
        for step in pieces.steps(reader):
            flags[reader].append(pieces.arrived(step))
            flags[step.source].append(pieces.read(reader, step.number))
    for each in flags.values():
        assert len(set(each)) == len(each)
        assert max(each) < FLAGS


def test_cuts() -> None:
    assert [tuple(each) for each in cuts(shape_of(2, False), 2, 40)] == [
        (0, 40, 0), (40, 40, 0), (80, 16, 0),
    ]  # fmt: skip
    assert [tuple(each) for each in cuts(shape_of(2, True), 2, 40)] == [
        (0, 40, 0), (40, 8, 0), (48, 40, 1), (88, 8, 1),
    ]  # fmt: skip


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_million_positions_take_less_than_a_gibibyte(causal: bool) -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    plan = planned(2, **LONG, causal=causal)
    how = plan.part(AttentionInPiecesSchedule)
    assert executor_of(plan) is AttentionInPiecesExecutor
    assert (how.piece_rows, how.slots) == (8192, 3)
    rows = how.piece_rows
    queries = rows * LONG["heads"] * LONG["head_dim"]
    keys = rows * LONG["kv_heads"] * LONG["head_dim"]
    workspace = AttentionInPiecesExecutor.workspace(plan).areas[0]
    taken = workspace + queries * (3 * 2 + 4) + LONG["heads"] * rows * 4 * 4
    assert workspace >= how.slots * keys * 2 * 2
    assert taken < 1 << 30
    made = plan.prediction
    assert made is not None
    assert made.comm_us < made.compute_us / 4
    assert made.pipelined_us < made.sequential_us


def test_what_fits_whole_stays_whole() -> None:
    for heads, kv_heads in ((16, 16), (32, 8)):
        sizes = {**LONG, "heads": heads, "kv_heads": kv_heads, "sequence": 98304}
        assert isinstance(planned(2, **sizes).schedule, AttentionSchedule)
    assert isinstance(
        planned(2, **{**LONG, "sequence": 1 << 18}).schedule, AttentionInPiecesSchedule
    )


def test_flags_are_enough_or_pieces_grow() -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    sizes = {**LONG, "sequence": 1 << 24}
    how = planned(8, **sizes).part(AttentionInPiecesSchedule)
    assert (
        attention_tuning.flags(AttentionShape(**sizes_of(8, **sizes)), 8, how.piece_rows) <= FLAGS
    )
    plan = planned(8, **sizes)
    few = plan.model_copy(update={"schedule": how.model_copy(update={"piece_rows": 1024})})
    with pytest.raises(ArgumentError, match="piece_rows"):
        AttentionInPiecesExecutor.workspace(few)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
def test_no_field_is_decoration(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(made)
    for module in (attention_in_pieces, attention_merge, attention_ring):
        monkeypatch.setattr(module, "native", lambda: started)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, n: torch.zeros(n, dtype=torch.uint8))

    def seen(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        started.told.append((tuple(q.shape), tuple(k.shape), k.stride(), first, causal))
        return Seen(torch.zeros_like(q), torch.zeros(q.shape[:3]), first)

    monkeypatch.setattr(attention_in_pieces, "attend", seen)
    monkeypatch.setattr(attention_tuning, "_FEWEST_ROWS", 16)
    how = attention_tuning._MACHINE.attention.model_copy(
        update={"whole_bytes": 0, "pieces_bytes": 1}
    )
    machine = attention_tuning._MACHINE.model_copy(update={"attention": how})
    monkeypatch.setattr(attention_tuning, "_MACHINE", machine)
    world = gpus()
    usual = world.plan("ring_attention", sizes_of(2, causal=True, sequence=256), dtype="bfloat16")
    assert isinstance(usual.schedule, AttentionInPiecesSchedule)
    q, k = torch.zeros(2, 4, 128, 64).bfloat16(), torch.zeros(2, 2, 128, 64).bfloat16()
    tensors = {"q": q, "k": k, "v": k.clone(), "out": q.clone(), "lse": torch.zeros(2, 4, 128)}
    assert decorations_of(world, usual, tensors, started) == []
