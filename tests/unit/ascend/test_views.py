"""The three views of every op that the backend claims, modelled from records; what its timeline
shows."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.contracts.instrumented import ModelledRun, View
from mkernel.harness import timeline
from mkernel.harness.run_report import Clock, modelled_clock
from mkernel.harness.spec import VIEWS
from mkernel.plan.shapes import sizes_or_defaults

from .rig import A3, changed, slices_follow_each_other
from .rig import traces as recorded

OPS = AscendAccelerator().capabilities().ops
REDUCING = ("gemm_reduce_scatter", "gemm_all_reduce")
INSTRUCTIONS = {
    "all_gather_gemm": {"TPUT", "TMATMUL"},
    "gemm_reduce_scatter": {"TADD", "TPUT", "TMATMUL"},
    "gemm_all_reduce": {"TADD", "TPUT", "TMATMUL"},
    "moe_dispatch": {"SCALAR", "TPUT"},
    "moe_dispatch_gemm": {"SCALAR", "TPUT", "TMATMUL"},
    "moe_combine": {"SCALAR", "TPUT", "TROWEXPANDMUL"},
    "ring_attention": {"TEXP", "TROWSUM", "TMATMUL", "TPUT"},
}
"""Some of what the pipes of each op do."""
WORLDS = ((1, 4), (2, 2), (1, 1))  # nodes, ranks of each


@functools.cache
def traces(op: str, nodes: int, ranks: int) -> tuple[bytes, ...]:
    """Return records at the sizes of ``mkernel run``, of attention at a half of its sequence."""
    sizes = sizes_or_defaults(op, {})
    if op == "ring_attention":
        sizes["sequence"] //= 2
    plan = api.plan(
        op,
        nodes=nodes,
        ranks_per_node=ranks,
        accelerator="ascend",
        nic="cx7",
        verbs="soft",
        **sizes,
    )
    return tuple(recorded(plan))


@functools.cache
def run(op: str, nodes: int, ranks: int, view: View = "pipelined") -> ModelledRun:
    return model(traces(op, nodes, ranks), A3, view)


def clock(op: str, nodes: int, ranks: int) -> Clock:
    return modelled_clock([{view: run(op, nodes, ranks, view) for view in VIEWS}])


def sound(each: Clock) -> bool:
    """What holds of any schedule: communication and compute one after the other take what they take
    alone, together no longer, and no less than either."""
    apart = each.compute_only_ms + each.comm_only_ms
    return (
        each.sequential_ms == pytest.approx(apart, rel=0.01)
        and max(each.compute_only_ms, each.comm_only_ms) <= each.pipelined_ms * (1 + 1e-9)
        and each.pipelined_ms <= each.sequential_ms
        and 0 <= each.overlap_efficiency <= 1
    )


@pytest.mark.parametrize(("nodes", "ranks"), WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_views_of_every_op(op: str, nodes: int, ranks: int) -> None:
    found = clock(op, nodes, ranks)
    assert sound(found), found
    assert found.speedup == pytest.approx(found.sequential_ms / found.pipelined_ms)
    assert (found.speedup > 1) == (nodes * ranks > 1), found
    assert (found.comm_only_ms > 0) == (nodes * ranks > 1), found
    assert (found.compute_only_ms < found.pipelined_ms) == (nodes * ranks > 1), found


@pytest.mark.parametrize("op", OPS)
def test_kernels_follow_each_other_in_the_sequential_view(op: str) -> None:
    """On all ranks: communication first, but where it sends what compute made."""
    kernels = run(op, 1, 4, "sequential").kernels
    first = "compute" if op in REDUCING else "comm"
    starts = [span.start_us for span in kernels if span.kernel != first]
    assert min(starts) >= max(span.end_us for span in kernels if span.kernel == first)


@pytest.mark.parametrize(
    "name", ["compute_only_ms", "comm_only_ms", "sequential_ms", "pipelined_ms"]
)
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_time_would_be_found(name: str, factor: float) -> None:
    """Planted fault."""
    found = clock("all_gather_gemm", 1, 4)
    wrong = found.model_copy(update={name: factor * getattr(found, name)})
    assert not sound(wrong)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_the_timeline_of_every_op(op: str, nodes: int, tmp_path: Path) -> None:
    """Cores and their pipes, what each works on for which chunk and peer, every signal on S."""
    found = run(op, nodes, 4 // nodes)
    for track in (*found.tracks, *found.pipes):
        assert slices_follow_each_other(track, found.total_us), (track.rank, track.name)
    timeline.write_trace(timeline.modelled([found]), tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"]["clock"].startswith("modelled")
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    seen: dict[str, list[dict[str, int]]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            track_name = threads[event["pid"], event["tid"]].split()
            key = " ".join((track_name[0], *track_name[2:], event["name"]))
            seen.setdefault(key, []).append(event["args"])
    assert {rank for rank, _ in threads} == set(range(4))
    raised = [args for key in ("AIV S TNOTIFY", "AIC S TNOTIFY") for args in seen.get(key, [])]
    assert {args["peer"] for args in raised} == set(range(4))
    assert ("AIV S NIC_PUT" in seen) == (nodes == 2)
    assert any("chunk" in args for key, each in seen.items() if "TWAIT" in key for args in each)
    assert seen.keys() & {"AIV TPUT", "AIV VECTOR"}
    assert {key.split()[-1] for key in seen} >= INSTRUCTIONS[op]
    products = op not in ("moe_dispatch", "moe_combine")
    assert ({"AIC TMATMUL", "AIC M TMATMUL", "AIC FIX TSTORE"} <= seen.keys()) == products


def test_calls_that_follow_each_other_share_a_timeline() -> None:
    """A dispatch and its combine, say: tracks go on, times add up."""
    first, then = run("all_gather_gemm", 1, 4), run("gemm_reduce_scatter", 1, 4)
    both = timeline.modelled([first, then])
    assert both.total_us == first.total_us + then.total_us
    names = [(track.rank, track.name, track.kernel) for track in both.tracks]
    assert len(names) == len(set(names))
    for track in (*both.tracks, *both.pipes):
        assert slices_follow_each_other(track, both.total_us)
    drawn = sum(len(track.spans) for track in both.tracks)
    assert drawn == sum(len(track.spans) for call in (first, then) for track in call.tracks)
    views = [
        {view: run(op, 1, 4, view) for view in VIEWS}
        for op in ("all_gather_gemm", "gemm_reduce_scatter")
    ]
    together, apart = modelled_clock(views), [modelled_clock([each]) for each in views]
    for name in ("compute_only_ms", "comm_only_ms", "sequential_ms", "pipelined_ms"):
        assert getattr(together, name) == pytest.approx(sum(getattr(c, name) for c in apart))
    assert sound(together)


def test_sums_take_as_long_as_the_vector_unit_needs() -> None:
    slow = changed(vector={"bytes_per_cycle": A3.vector.bytes_per_cycle / 128})
    reducing, gathering = traces("gemm_reduce_scatter", 1, 4), traces("all_gather_gemm", 1, 4)
    assert model(reducing, slow).total_us > 1.2 * model(reducing, A3).total_us
    assert model(gathering, slow).total_us == model(gathering, A3).total_us
