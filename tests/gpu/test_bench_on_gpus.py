"""The benchmark's GPU half: clocks, holds, the flush, stopwatches; whole runs, and faults in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bench_ranks
import pytest
from device_buffers import needs_gpus

import mkernel
from mkernel.harness import bench_run as run
from mkernel.harness.results import Report
from mkernel.harness.spec import BenchSpec, Mode, Shape
from mkernel.plan.model import OpName
from mkernel.settings import load

pytestmark = [needs_gpus(1), pytest.mark.alone, pytest.mark.usefixtures("leaves_nothing")]

OPS: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
EVERY: tuple[Mode, ...] = ("kernel", "eager", "graph", "first")
PEERS = ("nccl+cublas", "symm_mem")
SUMS = (
    "nccl+cublas", "nccl-windows", "symm_mem-one-shot", "symm_mem-two-shot",
    "flashinfer-one-shot", "flashinfer-two-shot",
)  # fmt: skip
PARTS = ("gemm", "comm", "copy")
MOST_SKEW_US = 5.0

times_ranks = pytest.mark.skipif(
    load().ranks_per_device > 1, reason="ranks that share a device are not timed"
)


def one_rank(function: Any, *arguments: Any) -> Any:
    (found,) = mkernel.launch(
        function, *arguments, ranks_per_node=1, accelerator="hopper", timeout_s=60
    )
    return found


def bench(ranks: int, where: Mapping[str, Any] | None = None, **fields: Any) -> Report:
    """``where``: nodes and NIC, if not one node."""
    spec = BenchSpec(
        **{"warmup": 2, "iterations": 7, "dtype": "bfloat16", "timeout_s": 60, **fields}
    )
    return run.run(spec, ranks=ranks, accelerator="hopper", commit="0" * 40, **(where or {}))


def test_a_devices_clock_is_known_to_a_few_microseconds() -> None:
    found = one_rank(bench_ranks.clocks)
    assert max(error for _, error in found) < 5_000
    offsets = [offset for offset, _ in found]
    # 100 ms from the first to the last: clocks drift by less than 100 us a second.
    assert max(offsets) - min(offsets) < 10_000 + 2 * 5_000


def test_a_hold_ends_at_its_instant() -> None:
    found = one_rank(bench_ranks.holds)
    late = sorted(abs(each) for each, _ in found)
    assert late[len(late) // 2] < MOST_SKEW_US
    for _, seconds in found:
        assert 3e-3 < seconds < 0.1  # it did hold: asked 5 ms before


def test_a_hold_gives_up() -> None:
    assert 0.04 < one_rank(bench_ranks.held_too_long) < 10


def test_a_clock_is_read_a_legal_number_of_times() -> None:
    from mkernel.backends.accelerators.cuda import _cuda

    with pytest.raises(ValueError, match="samples = 0"):
        _cuda.DeviceClock(0).read(0, 1.0, stream=0)
    with pytest.raises(ValueError, match="samples = 65"):
        _cuda.DeviceClock(0).read(65, 1.0, stream=0)


def test_a_flush_empties_the_cache() -> None:
    found = one_rank(bench_ranks.reads)
    # On an H200 13.7 and 16.7 us: the last levels of a search, of which each waits for memory.
    assert found["flushed"] > 1.1 * found["warm"], found


def test_a_flush_leaves_nothing_to_write_back() -> None:
    found = one_rank(bench_ranks.products)
    assert found["flushed"] < 0.85 * found["dirty"], found


def test_hidden_launches_are_not_in_the_time() -> None:
    found = one_rank(bench_ranks.timed, "hidden")
    assert found["right"]
    assert 0.9 < found["device"] / found["plain"] < 1.3, found
    assert found["host"] < bench_ranks.HOST_S / 3, found
    assert found["settings"]["start"] == "instant"
    assert found["settings"]["clock_error_us"] < MOST_SKEW_US


@pytest.mark.parametrize("clock", ["counted", "host"])
def test_counted_launches_are_in_the_time(clock: str) -> None:
    found = one_rank(bench_ranks.timed, clock)
    assert found["right"]
    assert 0.9 < found["device"] / found["plain"] < 1.5, found
    assert bench_ranks.HOST_S < found["host"] < 2 * bench_ranks.HOST_S, found


@times_ranks
@needs_gpus(2)
@pytest.mark.parametrize("op", OPS)
def test_every_mode_is_timed_and_right_and_ranks_start_together(op: OpName) -> None:
    shapes = (Shape(op=op, m=512, n=1024, k=768), Shape(op=op, m=64, n=520, k=264, layout="column"))
    made = bench(2, shapes=shapes, modes=EVERY, contenders=("mkernel", *PEERS, *PARTS))
    for row in made.rows:
        for name, entry in row.entries.items():
            part = name in ("comm", "copy") and row.mode != "kernel"
            state = "absent" if part else "right"
            assert entry.state == state, (row.mode, row.shape.size, name, entry.why)
    for mode in EVERY:
        timing = made.timing[mode]
        assert timing.start == "instant"
        assert timing.median_skew_us is not None
        assert timing.median_skew_us < MOST_SKEW_US, (mode, timing)
        assert timing.turns == 7 * 2 * (6 if mode == "kernel" else 4)
        assert timing.dropped < timing.turns / 4, (mode, timing)
    hidden, graph, eager, first = (
        next(row.entries["mkernel"].figures for row in made.rows if row.mode == mode)
        for mode in ("kernel", "graph", "eager", "first")
    )
    assert hidden is not None
    assert graph is not None
    assert eager is not None
    assert first is not None
    # A first call plans; a call of a loop does less than one alone; a graph costs no launch.
    assert first.median_us > eager.median_us
    assert first.median_us > 2 * hidden.median_us
    assert graph.median_us < 2 * hidden.median_us


@times_ranks
@needs_gpus(2)
@pytest.mark.parametrize("op", [*OPS, "all_reduce"])
def test_peers_with_windows_are_right(op: OpName) -> None:
    """In all modes; that NCCL really takes its symmetric kernels is looked at by itself."""
    sizes: dict[str, int] = {"m": 2560, "n": 1024} | ({} if op == "all_reduce" else {"k": 768})
    shape = Shape(op=op, **sizes)
    made = bench(2, shapes=(shape,), modes=EVERY, contenders=("mkernel", "nccl-windows"))
    for row in made.rows:
        assert row.entries["nccl-windows"].state == "right", row.entries["nccl-windows"].why
    watched = bench(2, shapes=(shape,), contenders=("bench_ranks:WatchedWindows",))
    (row,) = watched.rows
    assert row.entries["bench_ranks:WatchedWindows"].state == "right"


@times_ranks
@needs_gpus(2)
@pytest.mark.parametrize("op", ["all_reduce", "gemm_all_reduce"])
@pytest.mark.parametrize("norm", [False, True])
def test_peers_of_sums_are_right(op: OpName, norm: bool) -> None:
    """In all modes, of one row and of many, with libraries' norms compiled. FlashInfer is right or
    names why it takes no part."""
    sizes: dict[str, int] = {"n": 1024} | ({} if op == "all_reduce" else {"k": 768})
    shapes = tuple(Shape(op=op, m=m, **sizes) for m in (1, 130))
    made = bench(2, shapes=shapes, modes=EVERY, norm=norm, contenders=("mkernel", *SUMS))
    for row in made.rows:
        for name, entry in row.entries.items():
            absent = "flashinfer" in name and entry.state == "absent"
            assert absent or entry.state == "right", (row.mode, row.shape.size, name, entry.why)
            assert not absent or entry.why


@times_ranks
@needs_gpus(2)
def test_the_peer_of_invariant_results_is_right() -> None:
    products = {"m": 260, "n": 520, "k": 1024}
    made = bench(
        2,
        shapes=tuple(Shape(op=op, **products) for op in OPS),
        modes=("graph", "eager"),
        contenders=("mkernel", "invariant-unfused"),
    )
    for row in made.rows:
        for name in ("mkernel", "invariant-unfused"):
            entry = row.entries[name]
            assert entry.state == "right", (row.mode, row.shape.op, name, entry.why)


@times_ranks
@needs_gpus(2)
@pytest.mark.parametrize("nic", ["cx7", "efa"])
def test_peers_between_nodes_are_right(nic: str) -> None:
    """Their hosts put and wait, which no graph captures."""
    products = {"m": 1026, "n": 512, "k": 768}
    experts = {"tokens": 200, "hidden": 512, "features": 256, "experts": 8, "top_k": 2}
    ops: tuple[OpName, ...] = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
    of_experts: tuple[OpName, ...] = ("moe_dispatch_gemm", "moe_gemm_combine")
    made = bench(
        2, {"nodes": 2, "nic": nic, "verbs": "soft"},
        shapes=(*(Shape(op=op, **products) for op in ops),
                *(Shape(op=op, sizes=experts) for op in of_experts)),
        modes=("kernel", "eager"), contenders=("mkernel", "host-puts", "host-puts-by-rank"),
    )  # fmt: skip
    for row in made.rows:
        peer = "host-puts-by-rank" if row.shape.op.startswith("moe") else "host-puts"
        for name in ("mkernel", peer):
            assert row.entries[name].state == "right", (row.mode, row.shape.op, name)


@times_ranks
@needs_gpus(2)
def test_peers_of_e4m3_experts_are_right() -> None:
    """Graphs capture those with a grouped product, of weights that were dequantised or have a scale a
    column; the others wait for numbers of rows there, and say so."""
    sizes = {"tokens": 200, "hidden": 512, "features": 256, "experts": 8, "top_k": 2}
    ops = ("moe_dispatch_gemm", "moe_gemm_combine", "moe_layer")
    captured = ("gather+dequantised", "gather+scaled")
    names = ("nccl+cublas", "gather+grouped", *captured)
    made = bench(
        2, shapes=tuple(Shape(op=op, sizes=sizes) for op in ops), modes=("eager", "graph"),
        dtype="float8_e4m3fn", layout="column", scales="block", capacity=True,
        contenders=("mkernel", *names),
    )  # fmt: skip
    for row in made.rows:
        for name in names:
            entry, about = row.entries[name], (row.mode, row.shape.op, name)
            if row.mode == "eager" or name in captured:
                assert entry.state == "right", (*about, entry.why)
            else:
                assert entry.state == "absent", about
                assert "not in a graph" in entry.why, about


@times_ranks
@needs_gpus(2)
def test_counted_launches_start_together() -> None:
    shape = Shape(op="gemm_all_reduce", m=256, n=512, k=512)
    made = bench(2, shapes=(shape,), launches=True, contenders=("mkernel", *PEERS, *PARTS))
    assert made.passed
    timing = made.timing["kernel"]
    assert timing.launches == "counted"
    assert timing.median_skew_us is not None
    assert timing.median_skew_us < MOST_SKEW_US, timing


@times_ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_gpus(2))])
@pytest.mark.parametrize("mode", ["kernel", "eager", "graph"])
def test_a_predecessors_result_has_no_figure(mode: Mode, ranks: int) -> None:
    name = "wrong_contenders:ReturnsPrevious"
    shape = Shape(op="gemm_all_reduce", m=256, n=512, k=512)
    made = bench(ranks, shapes=(shape,), modes=(mode,), contenders=("mkernel", name, "gemm"))
    (row,) = made.rows
    assert row.entries[name].state == "wrong"
    assert row.entries[name].figures is None
    assert row.entries["mkernel"].state == row.entries["gemm"].state == "right"


@times_ranks
@needs_gpus(2)
@pytest.mark.parametrize("op", OPS)
def test_one_wrong_row_in_one_call_of_a_loop_has_no_figure(op: OpName) -> None:
    """Results have more rows than are compared singly; all 20 results of a large shape fit too."""
    name = "wrong_contenders:OneWrongRow"
    shapes = (Shape(op=op, m=2048, n=512, k=512), Shape(op=op, m=8192, n=8192, k=512))
    made = bench(
        2, shapes=shapes, modes=("eager", "graph"), contenders=("mkernel", name, "symm_mem")
    )
    for row in made.rows:
        assert row.entries[name].state == "wrong", (row.mode, row.shape.size)
        assert row.entries["mkernel"].state == row.entries["symm_mem"].state == "right"


@times_ranks
@pytest.mark.parametrize("mode", ["kernel", "eager", "first"])
def test_what_ends_late_has_no_figure(mode: Mode) -> None:
    name = "wrong_contenders:FinishesLate"
    shape = Shape(op="gemm_reduce_scatter", m=256, n=512, k=512)
    made = bench(1, shapes=(shape,), modes=(mode,), contenders=(name, "gemm"))
    assert made.rows[0].entries[name].state == "wrong"
    assert made.rows[0].entries["gemm"].state == "right"
