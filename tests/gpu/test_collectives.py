"""The library path's collectives: bit-exact sums in the promised order, in any timing."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from collective_ranks import BRIEF, FLAGS, MAIL, MOST_MAIL, PEERS_WORDS, Ranks, Work
from device_buffers import needs_gpus

from mkernel.backends.transport import _transport

MIB = 1 << 20
WAYS = {  # name, way, symmetric outs
    "all_gather": ("all_gather", "", False),
    "all_gather-mail": ("all_gather", "mail", False),
    "all_gather-symmetric": ("all_gather", "", True),
    "reduce_scatter": ("reduce_scatter", "", False),
    "reduce_scatter-mail": ("reduce_scatter", "mail", False),
    "all_reduce-mail": ("all_reduce", "mail", False),
    "all_reduce-mail_twice": ("all_reduce", "mail_twice", False),
    "all_reduce-one_shot": ("all_reduce", "one_shot", False),
    "all_reduce-two_shot": ("all_reduce", "two_shot", False),
    "all_reduce-two_shot-symmetric": ("all_reduce", "two_shot", True),
}
MAIL_BYTES = 5  # of an element at most: a float32, or a 16-bit one and its share of what says zeros
SIZES = (1, 7, 8, 9, 100, 4096, 4099, 65_536, 123_457, 2 * MIB)

pytestmark = needs_gpus(2)
worlds = pytest.mark.parametrize("world", [2, pytest.param(4, marks=needs_gpus(4))])
every_way = pytest.mark.parametrize("which", WAYS)


def work(ranks: Ranks, which: str, elements: int, **fields: Any) -> Work:
    name, way, symmetric = WAYS[which]
    return Work(ranks, name, elements, way=way, symmetric=symmetric, **fields)


def run(done: Work, blocks: tuple[int, ...] = (0,)) -> None:
    ranks = done.ranks
    ranks.on_each(lambda rank: done.launch(rank, blocks=blocks[rank % len(blocks)]))
    ranks.synchronize()
    ranks.check_outcomes()


def most_of_two_exchanges(world: int) -> int:
    """16-bit elements of the largest all-reduce whose two exchanges go by mail, in whole slots."""
    return MOST_MAIL // (4 * (world - 1)) // 64 * 64 * world


def judge_sizes(world: int, which: str, sizes: tuple[int, ...], **fields: Any) -> None:
    """One call of each size is right."""
    ranks = Ranks(world, 64 * MIB)
    for elements in sizes:
        if WAYS[which][1] == "mail" and world * elements * MAIL_BYTES > MOST_MAIL:
            continue
        made = work(ranks, which, elements, **fields)
        run(made)
        assert made.wrong_ranks() == [], f"{elements} elements"


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
halves = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
FORMS: dict[str, dict[str, Any]] = {
    **{name: {"dtype": dtype} for name, dtype in HALVES.items()},
    **{
        f"float32-{name}": {"dtype": torch.float32, "rounded_to": dtype}
        for name, dtype in HALVES.items()
    },
}


@pytest.mark.parametrize(
    ("which", "form"),
    [(which, form) for which in WAYS for form in FORMS if "gather" not in which or form in HALVES],
)
@worlds
def test_sizes(world: int, which: str, form: str) -> None:
    """Also of outs that are not aligned, and of sums with a bias, rounded once."""
    fields = FORMS[form]
    judge_sizes(world, which, SIZES, **fields)
    judge_sizes(world, which, (5, 800, 20_001), out_offset=3, **fields)
    for columns, rows in ((8, 1), (24, 31), (1000, 12), (4104, 130)):
        for offset in (0, 3):
            if "gather" not in which:
                sizes = (rows * columns,)
                judge_sizes(world, which, sizes, columns=columns, out_offset=offset, **fields)


@pytest.mark.parametrize("which", [which for which in WAYS if "mail" not in which])
@worlds
def test_many_chunks_a_block(world: int, which: str) -> None:
    elements = 80 * MIB + 24
    ranks = Ranks(world, 2 * world * (elements * 2 + 128))
    made = work(ranks, which, elements // world if which == "reduce_scatter" else elements)
    for seed in range(2):
        made.refresh(seed)
        run(made)
        assert made.wrong_ranks() == []


@pytest.mark.alone
@pytest.mark.parametrize("which", ["all_reduce-one_shot", "all_reduce-two_shot"])
def test_more_than_4_gib(which: str) -> None:
    elements = (2 << 30) + 1000
    ranks = Ranks(2, 2 * 2 * elements + 4096)
    made = work(ranks, which, elements)
    run(made)
    assert made.wrong_ranks() == []


@worlds
def test_bytes_of_any_number(world: int) -> None:
    ranks = Ranks(world)
    for nbytes in (1, 3, 15, 17, 4097, 70_001):
        for symmetric, way in ((False, ""), (True, ""), (False, "mail")):
            made = Work(
                ranks, "all_gather", nbytes, torch.uint8, way, symmetric=symmetric, poison=255
            )
            run(made)
            assert made.wrong_ranks() == [], f"{nbytes} bytes"


@worlds
def test_mail_brings_any_bits(world: int) -> None:
    """Words that are zero, and those that stand for them on the way."""
    ranks = Ranks(world)
    made = Work(ranks, "all_gather", 40_000, torch.uint8, "mail", poison=255, beside=3000)
    words = torch.tensor([0, 0, 0, -(1 << 31), 1, -1], dtype=torch.int32)
    for seed in range(3):
        made.refresh(seed)
        for rank, (source, small) in enumerate(zip(made.sources, made.small, strict=True)):
            chance = torch.Generator().manual_seed(10 * seed + rank)
            for of in (source.view(torch.int32), small.view(torch.int32)):
                of.copy_(words[torch.randint(6, (of.numel(),), generator=chance)])
        ranks.synchronize()
        run(made)
        assert made.wrong_ranks() == []


@halves
@worlds
def test_sums_by_mail_have_the_bits_of_those_by_flags(world: int, dtype: torch.dtype) -> None:
    """Words of two sums that are +0 or -0, by themselves or after rounding, and NaNs of any kind."""
    ranks, elements = Ranks(world, 8 * MIB), 40_000
    nan = torch.tensor([-1, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    terms = torch.cat((torch.tensor([0.0, -0.0, -1e-45, 1e-45, 1.0]), nan))
    found = []
    for which in ("all_reduce-two_shot", "all_reduce-mail_twice"):
        made = work(ranks, which, elements, dtype=torch.float32, rounded_to=dtype)
        for rank, source in enumerate(made.sources):
            chance = torch.Generator().manual_seed(rank)
            # Others' are mostly zeros, so that words of all kinds are sums too.
            drawn = torch.randint(len(terms), (elements,), generator=chance)
            few = torch.rand(elements, generator=chance) < 0.2
            source.copy_(terms[drawn if rank == 0 else torch.where(few, drawn, 0)])
        ranks.synchronize()
        run(made)
        found.append([out.view(torch.int32).cpu() for out in made.outs])
    for bits in found[1]:
        assert torch.equal(bits, found[0][0])
    assert {0, -(1 << 31), 1 << 15} <= set(found[0][0].tolist())


@pytest.mark.parametrize("which", ["all_reduce-two_shot", "all_reduce-mail_twice"])
@worlds
def test_two_exchanges_in_place(world: int, which: str) -> None:
    ranks = Ranks(world, 8 * MIB)
    for elements, shift in ((8, 0), (300_008, 0), (123_457, 3)):
        made = work(ranks, which, elements, out_offset=shift)
        wanted = [made.wanted(rank) for rank in range(world)]
        for source, out in zip(made.sources, made.outs, strict=True):
            out.copy_(source)
        made.sources = made.outs
        ranks.synchronize()
        run(made)
        for out, right in zip(made.outs, wanted, strict=True):
            assert torch.equal(out.cpu(), right.cpu()), f"{elements} elements"


@worlds
def test_the_largest_two_exchanges_by_mail(world: int) -> None:
    """All that mail holds; more is refused, but for symmetric outs, which flags bring."""
    elements = most_of_two_exchanges(world)
    ranks = Ranks(world, 4 * BRIEF)
    made = work(ranks, "all_reduce-mail_twice", elements)
    for seed in range(3):  # even and odd epochs
        made.refresh(seed)
        run(made)
        assert made.wrong_ranks() == []
    more = elements + 64 * world
    with pytest.raises(ValueError, match="a call by mail may have 16777216"):
        run(work(ranks, "all_reduce-mail_twice", more))
    made = Work(ranks, "all_reduce", more, way="mail_twice", symmetric=True)
    run(made)
    assert made.wrong_ranks() == []


@pytest.mark.parametrize("beside", [1, 5, 64, 4099, 100_000])
@worlds
@pytest.mark.parametrize("which", ["all_gather", "all_gather-mail"])
def test_a_gather_carries_something_beside(world: int, which: str, beside: int) -> None:
    ranks = Ranks(world, 64 * MIB)
    for elements in (1, 100, 65_536, MIB):
        made = work(ranks, which, elements, beside=beside)
        for seed in range(2):
            made.refresh(seed)
            run(made, (0, 3))
            assert made.wrong_ranks() == [], f"{elements} elements"


@every_way
@worlds
def test_grids_may_differ(world: int, which: str) -> None:
    ranks = Ranks(world, 32 * MIB)
    made = work(ranks, which, 300_008)
    for seed, blocks in enumerate([(1,), (2, 37), (132, 3), (64, 1, 5, 500)]):
        made.refresh(seed)
        run(made, blocks)
        assert made.wrong_ranks() == [], f"blocks {blocks}"


@worlds
def test_a_hundred_calls_of_skewed_ranks(world: int) -> None:
    """Fresh inputs and other work in every call; ranks wait for each other in the calls alone."""
    ranks = Ranks(world, 8 * MIB)
    for which in WAYS:
        run(work(ranks, which, 8))  # loads the kernels, see Ranks
    chance = random.Random(world)
    calls = []
    for seed in range(100):
        made = work(ranks, chance.choice(list(WAYS)), chance.choice([8, 1000, 4096, 60_000]))
        made.refresh(1000 + seed)
        calls.append(made)
    delays = [[chance.choice([0, 0, 20_000, 200_000]) for _ in calls] for _ in range(world)]

    def launch_all(rank: int) -> None:
        for made, delay in zip(calls, delays[rank], strict=True):
            if delay:
                ranks.delay(delay)
            made.launch(rank)

    ranks.on_each(launch_all)
    ranks.synchronize()
    ranks.check_outcomes()
    assert [made.name for made in calls if made.wrong_ranks()] == []
    assert ranks.epochs() == [1 + len(WAYS) + 100] * world


@pytest.mark.parametrize("which", [which for which in WAYS if "symmetric" not in which])
@worlds
def test_a_slow_reader_is_not_overrun(world: int, which: str) -> None:
    """The last rank reads with one block, byte by byte, when the others are in the next call."""
    slots = 2 if "two_shot" in which else world  # of a shard, a part or the whole
    ranks = Ranks(world, 2 * BRIEF)
    elements = BRIEF // slots // 2 if "mail" not in which else MOST_MAIL // slots // MAIL_BYTES
    if "twice" in which:
        elements = most_of_two_exchanges(world)
    calls = [work(ranks, which, elements, out_offset=3) for _ in range(4)]
    for seed, made in enumerate(calls):
        made.refresh(seed)
    run(work(ranks, which, 8))  # loads the kernels, see Ranks

    def launch_all(rank: int) -> None:
        for made in calls:
            made.launch(rank, blocks=1 if rank == world - 1 else 0)

    ranks.on_each(launch_all)
    ranks.synchronize()
    ranks.check_outcomes()
    assert [number for number, made in enumerate(calls) if made.wrong_ranks()] == []


@every_way
@worlds
def test_graphs_replay(world: int, which: str) -> None:
    ranks = Ranks(world, 8 * MIB)
    made = work(ranks, which, 50_000)
    run(made)  # loads the kernels
    graphs = []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(rank),
            torch.cuda.graph(graph, stream=ranks.streams[rank], capture_error_mode="thread_local"),
        ):
            made.launch(rank)
            made.launch(rank)  # two calls a replay
        graphs.append(graph)
    for seed in range(20):
        made.refresh(seed)
        ranks.on_each(lambda rank: graphs[rank].replay())
        ranks.synchronize()
        ranks.check_outcomes()
        assert made.wrong_ranks() == [], f"replay {seed}"
    assert ranks.epochs() == [42] * world


@every_way
@worlds
def test_a_rank_that_does_not_come(world: int, which: str) -> None:
    ranks = Ranks(world, 8 * MIB, timeout_s=0.3)
    made = work(ranks, which, 50_000)
    start = time.monotonic()
    ranks.on_each(made.launch, only=[rank for rank in range(world) if rank != 1])
    ranks.synchronize()
    assert time.monotonic() - start < 5
    for rank in range(world):
        found = _transport.record_outcome(ranks.controls[rank].record)
        assert (found is None) == (rank == 1)
        if found is not None:
            code, who = found
            assert code.name == "timeout"
            assert who.op == 7
            assert who.seen < who.wanted == 1
            assert rank != 0 or who.peer == 1
    other = work(Ranks(world, 8 * MIB), which, 50_000)  # the context still works
    run(other)
    assert other.wrong_ranks() == []


@every_way
@worlds
def test_an_abort_ends_the_waits(world: int, which: str) -> None:
    from mkernel.backends.transport._transport import AbortCode

    ranks = Ranks(world, 8 * MIB, timeout_s=60)
    made = work(ranks, which, 50_000)
    start = time.monotonic()
    ranks.on_each(made.launch, only=[0])
    time.sleep(0.05)
    assert not ranks.streams[0].query(), "the call ended without its peers"
    ranks.controls[0].abort(AbortCode.cancelled)
    ranks.synchronize()
    assert time.monotonic() - start < 5


@every_way
@worlds
def test_waits_that_pass_too_soon_are_noticed(world: int, which: str) -> None:
    """The planted fault: what rank 0 waits for is far ahead, so it takes what is not there yet."""
    ranks = Ranks(world, 8 * MIB)
    made = work(ranks, which, 50_000)
    run(made)
    made.refresh(1)
    for words in (FLAGS, PEERS_WORDS):
        ranks.workspaces[0].bytes()[words].view(torch.int64).fill_(1 << 40)
    ranks.workspaces[0].bytes()[MAIL].fill_(0x81)
    ranks.synchronize()

    def late(rank: int) -> None:
        if rank != 0:
            ranks.delay(20_000_000)  # some 10 ms
        made.launch(rank)

    ranks.on_each(late)
    ranks.synchronize()
    assert 0 in made.wrong_ranks()


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("staging_bytes = 16; this call needs", {"staging_bytes": 16}),
        ("staging = 8", {"staging": 8}),
        ("columns = 12; expected a multiple of 8", {"columns": 12}),
        ("bias is not aligned", {"bias": 4104}),
        *(
            (
                "a call by mail may have 16777216",
                {"staging_bytes": 64 * MIB, "by_mail": True, "elements": elements, "way": way},
            )
            for elements, way in ((4 * MIB + 8, "one_shot"), (8 * MIB + 8, "two_shot"))
        ),
    ],
)
def test_wrong_calls_are_refused(message: str, change: dict[str, Any]) -> None:
    from mkernel.backends.accelerators.cuda import _kernels

    world = _kernels.DeviceWorld([4096, 8192], rank=0, control=0, timeout_s=1.0, call=1)
    asked = {"bias": 4096, "columns": 8, "elements": 1000, "way": "one_shot"}
    asked |= {name: change[name] for name in asked if name in change}
    settings = {"staging_bytes": MIB, **change}
    row = {name: asked[name] for name in ("bias", "columns") if "by_mail" not in change}
    call = _kernels.Collective(world, **{n: settings[n] for n in settings if n not in asked})
    way = getattr(_kernels.Way, asked["way"])
    with pytest.raises(ValueError, match=message):
        _kernels.all_reduce(
            call, _kernels.Element.bfloat16, 4096, asked["elements"], [8192], way, 0, **row
        )
