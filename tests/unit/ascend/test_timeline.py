"""Record and replay: traces are the schedule's, modelled time follows the machine description."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mkernel.backends.accelerators.ascend.backend import AscendAccelerator, record
from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.accelerators.ascend.trace import Kind, cores
from mkernel.errors import InputFileError

from .rig import (
    A3,
    PATIENCE_S,
    World,
    changed,
    first,
    make_plan,
    modelled_views,
    traces,
)


def test_recording_without_running_gives_the_trace_of_a_run() -> None:
    """Instruction for instruction, although the run's cores were interleaved by the host."""
    plan = make_plan(
        4 * 300, 520, 1032, nodes=2, ranks_per_node=2, dtype="bfloat16", b_layout="column"
    )
    with World(plan) as world:
        world.epoch = 1
        tensors = world.tensors(seed=1)
        launches = [world.launch(r, tensors[r], trace=True) for r in range(4)]
        assert all(launch.wait(PATIENCE_S) for launch in launches)
        ran = [launch.trace() for launch in launches]
    for rank in range(4):
        dry, real = record(plan, rank), ran[rank]
        assert real is not None
        assert len(dry) == len(real) > 10_000
        assert _signals(dry) == _signals(real)
    assert model([t for t in ran if t], A3) == model(traces(plan), A3)


def test_later_epochs_model_the_same() -> None:
    plan = make_plan(512, 256, 512, ranks_per_node=2)
    runs = []
    with World(plan) as world:
        tensors = world.tensors(seed=1)
        for world.epoch in (1, 2, 3, 4):
            launches = [world.launch(r, tensors[r], trace=True) for r in range(2)]
            assert all(launch.wait(PATIENCE_S) for launch in launches)
            runs.append(model([launch.trace() or b"" for launch in launches], A3).total_us)
    assert runs[0] == pytest.approx(runs[1], rel=0.02)  # no release to wait for in calls 1 and 2
    assert runs[2] == runs[3]


def _signals(blob: bytes) -> set[int]:
    kinds = (Kind.TNOTIFY, Kind.TWAIT, Kind.NIC_PUT)
    return {int(s) for _, own in cores(blob) for s in own["signal"][np.isin(own["kind"], kinds)]}


def test_a_signal_that_is_never_raised_is_reported() -> None:
    """Planted fault: one notification goes to another signal. The model must not hang."""
    plan = make_plan(512, 256, 512, ranks_per_node=2)
    good = traces(plan)
    broken = bytearray(good[0])
    notified = first(broken, Kind.TNOTIFY)["signal"]
    signal = int(notified[0])
    notified[0] = 4000
    why = rf"rank 1 AIC core \d+ waits for signal {signal} of rank 0"
    with pytest.raises(RuntimeError, match=why):
        model([bytes(broken), good[1]], A3)
    assert model([bytes(broken), good[1]], A3, "compute_only").total_us > 0


def test_wrong_traces_are_refused() -> None:
    plan = make_plan(512, 256, 512, ranks_per_node=2)
    one, two = traces(plan)
    for wrong, why in (
        ([], "no traces"),
        ([one], "every rank"),
        ([one, one], "every rank"),
        ([one, two[:-1]], "cut short"),
        ([one, b"\0" * 100], "not a trace"),
        ([one, two[:88] + b"\xff" * (len(two) - 88)], "trace"),  # its headers and some of a record
    ):
        with pytest.raises(RuntimeError, match=why):
            model(wrong, A3)
    assert model([two, one], A3) == model([one, two], A3)
    without = model([one, two], A3, tracks=False)
    assert (without.tracks, without.pipes) == ((), ())


@pytest.mark.parametrize("nodes", [1, 2])
def test_views_are_ordered_and_bounded(nodes: int) -> None:
    plan = make_plan(4 * 512, 1024, 2048, nodes=nodes, ranks_per_node=4 // nodes, comm_blocks=8)
    compute, sequential, pipelined = modelled_views(plan)
    comm_us = max(one.end_us - one.start_us for one in pipelined.kernels if one.kernel == "comm")
    assert "comm" not in {one.kernel for one in compute.kernels}
    assert max(compute.total_us, comm_us) <= pipelined.total_us <= sequential.total_us
    assert sequential.total_us >= comm_us + compute.total_us - A3.chip.launch_us
    # Bytes over the slowest resource, and multiply-adds over the matrix units, from below.
    bytes_of_a_rank = 512 * 2048 * 2
    if nodes == 1:
        floor_us = bytes_of_a_rank / A3.fabric.link_rate / 1e3
        assert floor_us <= comm_us <= 1.05 * floor_us + 5
    else:
        floor_us = 4 * bytes_of_a_rank / A3.nic.gbs / 1e3
        assert pipelined.total_us >= floor_us
    macs = 2048 * 1024 * 2048
    rate = A3.cube.macs_per_cycle_16bit * A3.clock_ghz * 1e3 * A3.aic_cores
    assert compute.total_us >= macs / rate


def test_time_follows_the_machine() -> None:
    plan = make_plan(2 * 1024, 1024, 2048, ranks_per_node=2)
    base = modelled_views(plan)
    slow_link = modelled_views(plan, changed(fabric={"link_gbs": A3.fabric.link_gbs / 2}))
    assert slow_link.pipelined.total_us > 1.8 * base.pipelined.total_us
    assert slow_link.alone.total_us == base.alone.total_us
    slow_cube = modelled_views(plan, changed(cube={"macs_per_cycle_16bit": 256.0}))
    assert slow_cube.alone.total_us > 5 * base.alone.total_us
    far = make_plan(2 * 1024, 1024, 2048, nodes=2)
    slow_nic = changed(nic={"gbs": A3.nic.gbs / 4})
    over_slow_nic = modelled_views(far, slow_nic).pipelined.total_us
    assert over_slow_nic > 2.5 * modelled_views(far).pipelined.total_us
    assert modelled_views(plan, slow_nic).pipelined.total_us == base.pipelined.total_us


def test_the_planner_has_the_constants_of_the_modelled_machine() -> None:
    assert AscendAccelerator().capabilities().constants == A3.constants()


def test_machine_files(tmp_path: Path) -> None:
    data = A3.model_dump()
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load_machine(path) == A3
    data["fabric"]["link_gbs"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(InputFileError, match=r"fabric\.link_gbs: Input should be greater than 0"):
        load_machine(path)
    data["fabric"]["link_gbs"] = 1
    data["pipes"]["warp"] = 9
    path.write_text(json.dumps(data))
    with pytest.raises(InputFileError, match=r"pipes\.warp: Extra inputs"):
        load_machine(path)
    with pytest.raises(InputFileError, match="No such file"):
        load_machine(tmp_path / "absent.json")
