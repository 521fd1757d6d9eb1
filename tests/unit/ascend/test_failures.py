"""What ends a call early, and what is refused before it starts."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mkernel.backends.accelerators.ascend import AscendAccelerator, _ascend
from mkernel.backends.accelerators.ascend.schedule import GemmSchedule
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport._transport import AbortCode, Waiter
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError, Unsupported
from mkernel.plan.pipeline import GemmTile

from .rig import PATIENCE_S, SIGNALS, World, geometry, make_plan, scheduled


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("strict", [None, _ascend.Strict(), _ascend.Strict(seed=5)])
def test_missing_peer_times_out(nodes: int, strict: _ascend.Strict | None) -> None:
    plan = make_plan(3 * 256, 256, 512, nodes=nodes, ranks_per_node=3 // nodes, tiles_per_chunk=1)
    with World(plan, strict=strict) as world:
        world.epoch = 1
        tensors = world.tensors(seed=1)
        start = time.monotonic()
        launches = [world.launch(r, tensors[r], timeout_s=1) for r in (0, 2)]
        assert not launches[0].wait(0.05)
        assert all(launch.wait(PATIENCE_S) for launch in launches)
        assert time.monotonic() - start > 0.9
        for rank in (0, 2):
            code, seen = world.outcome(rank)
            assert code == AbortCode.timeout
            assert (seen.waiter, seen.peer, seen.op) == (Waiter.compute_kernel, 1, 101)
            assert (seen.seen, seen.wanted) == (0, 1)
            assert seen.signal == geometry(plan).arrived(1, seen.chunk, epoch=1)
            assert seen.core < 24
        for launch in launches:
            report = launch._native.at_deadline
            assert (" of rank 1 to be 1, now 0 (" in report) == (strict is not None), report


def test_staging_is_not_overwritten_before_it_is_released() -> None:
    """The comm kernel of call 3 waits for a peer that has not finished call 1."""
    plan = make_plan(512, 256, 512, ranks_per_node=2)
    shape = geometry(plan)
    with World(plan) as world:
        tensors = world.tensors(seed=1)
        for world.epoch in (1, 2):
            assert world.launch(0, tensors[0], view="compute_only").wait(PATIENCE_S)
        for chunk in range(shape.chunks):  # so that only the comm kernel has to wait
            world.add(0, shape.arrived(1, chunk, epoch=1))
        world.epoch = 3
        world.poison()
        launch = world.launch(0, tensors[0], timeout_s=0.3)
        assert launch.wait(PATIENCE_S)
        code, seen = world.outcome(0)
        assert (code, seen.waiter, seen.peer) == (AbortCode.timeout, Waiter.comm_kernel, 1)
        assert seen.signal == 1  # what rank 1 has released
        assert (seen.seen, seen.wanted) == (0, 1)
        staging = (torch.frombuffer(world.bytes_of(1), dtype=torch.uint8) == 0xFF).all()
        assert staging, "the peer's staging was written"


def test_abort_ends_a_call() -> None:
    with World(make_plan(4 * 256, 256, 512, nodes=2, ranks_per_node=2)) as world:
        world.epoch = 1
        launch = world.launch(0, world.tensors(seed=1)[0], timeout_s=10 * PATIENCE_S)
        assert not launch.wait(0.1)
        world.abort(0, AbortCode.cancelled)
        assert launch.wait(PATIENCE_S)
        assert world.outcome(0)[0] == AbortCode.cancelled


def test_a_launch_that_is_dropped_keeps_its_tensors() -> None:
    with World(make_plan(512, 256, 512, ranks_per_node=2)) as world:
        world.epoch = 1
        world.launch(0, world.tensors(seed=1)[0], timeout_s=0.3)
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S
        while world.outcome(0)[0] == AbortCode.none:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_wrong_tensors_are_refused() -> None:
    with World(make_plan(512, 256, 512, ranks_per_node=2)) as world:
        world.epoch = 1
        good = world.tensors(seed=1)[0]
        with pytest.raises(DtypeError, match=r"a = torch\.float32"):
            world.launch(0, {**good, "a": good["a"].float()})
        with pytest.raises(ShapeError, match=r"b = \(512, 128\)"):
            world.launch(0, {**good, "b": good["b"][:, :128]})
        with pytest.raises(LayoutError, match="out = strides"):
            world.launch(0, {**good, "out": good["out"].t().contiguous().t()})
        with pytest.raises(LayoutError, match="b = strides"):
            world.launch(0, {**good, "b": good["b"].t().contiguous().t()})
        with pytest.raises(LayoutError, match="a = strides"):
            world.launch(0, {**good, "a": good["a"][:1].expand(256, 512)})


def test_wrong_plans_are_refused() -> None:
    backend = AscendAccelerator()
    with pytest.raises(ValueError, match="takes 589824 bytes of L1, which has 524288"):
        backend.workspace(make_plan(512, 512, 512, tile=GemmTile(columns=448)))
    with pytest.raises(ValueError, match="tile_m must be a multiple of 16"):
        backend.workspace(make_plan(512, 512, 512, tile=GemmTile(rows=100)))
    plan = make_plan(512, 512, 512)
    chunking = plan.part(GemmSchedule).chunking.model_copy(update={"chunks_per_rank": 3})
    with pytest.raises(ValueError, match="chunks_per_rank = 3"):
        backend.workspace(scheduled(plan, chunking=chunking))
    with World(make_plan(512, 256, 512, comm_blocks=49)) as world:
        world.epoch = 1
        with pytest.raises(Unsupported, match="48 AIV"):
            world.launch(0, world.tensors(seed=1)[0])


def test_no_signals_left() -> None:
    plan = make_plan(2 * 128 * 64, 256, 256 * 32, ranks_per_node=2, tiles_per_chunk=1)
    assert AscendAccelerator().workspace(plan).signals > 3 * 2 * 64 * 32 > SIGNALS
    with World(make_plan(512, 256, 512, ranks_per_node=2)) as world:
        world.epoch, world.plan = 1, plan
        tensors = {
            "a": torch.zeros(128 * 64, 256 * 32, dtype=torch.float16),
            "b": torch.zeros(256 * 32, 256, dtype=torch.float16),
            "out": torch.zeros(2 * 128 * 64, 256),
        }
        with pytest.raises(
            ValueError, match=rf"needs \d+ words of a signal pad, which has {SIGNALS}"
        ):
            world.launch(0, tensors)


def test_instructions_outside_the_workspace_are_reported() -> None:
    """A planted fault: a fifo is missing, so a NIC put cannot be made; the call ends, by name."""
    with World(make_plan(512, 256, 512, nodes=2)) as world:
        world.epoch = 1
        launch = world.launch(0, world.tensors(seed=1)[0], with_fifo=False)
        with pytest.raises(RuntimeError, match=r"rank 0 AIV core \d+, NIC_PUT: rank 1 is on"):
            launch.wait(PATIENCE_S)


_EXITS = """
import sys
sys.path.insert(0, sys.argv[1])
from ascend.rig import World, make_plan
world = World(make_plan(512, 256, 512, ranks_per_node=2))
world.epoch = 1
launch = world.launch(0, world.tensors(seed=1)[0], timeout_s=1000)
assert not launch.wait(0.1)
world._stop.set()  # the rig's own thread, which Python would end inside of native code
world._nic.join()
{last}
"""


@pytest.mark.parametrize("last", ["", "import os; sys.exit(os.fork() and 0)"])
def test_a_process_ends_cleanly_with_a_call_in_flight(last: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXITS.format(last=last), str(Path(__file__).parents[1])],
        cwd=Path(sys.executable).parent,  # not the repository: its folders are no package
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,  # less than the call has
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_can_launch() -> None:
    """The child has none of the parent's threads and makes its own."""
    with World(make_plan(256, 256, 256)) as world:
        tensors = world.tensors(seed=1)  # before the fork: torch's own threads do not survive it
        world.call(tensors)
        world.epoch += 1
        child = os.fork()
        if child == 0:
            signal.alarm(round(2 * PATIENCE_S))
            status = 1
            try:
                status = 0 if world.launch(0, tensors[0]).wait(PATIENCE_S) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory() -> None:
    memory = HostMemory.create(5000)
    assert memory.address % 4096 == 0
    again = HostMemory.attach(memory.export())
    assert again.nbytes == 5000
    assert again.address != memory.address
    first = (torch.frombuffer(World.view(memory), dtype=torch.uint8), World.view(again))
    assert int(first[0].sum()) == 0
    first[0][17] = 99
    assert bytes(first[1])[17] == 99
    described = memory.export()
    with pytest.raises(ValueError, match="only the rank that allocated"):
        again.export()
    for wrong in ({"cookie": "00" * 16}, {"nbytes": 50000}, {"fd": 0}):
        with pytest.raises(OSError, match=r"was the world finalized there\?|denied|No such|device"):
            HostMemory.attach({**described, **wrong})
    again.close()
    again.close()
    memory.close()
    with pytest.raises(OSError, match=r"."):
        HostMemory.attach(described)
    with pytest.raises(ValueError, match="nbytes = 0"):
        HostMemory.create(0)


def test_what_the_backend_says_of_itself() -> None:
    backend = AscendAccelerator()
    assert backend.status().usable
    assert "torch_npu" not in backend.status().detail, "nobody asked"
    (device,) = backend.probe()
    assert (device.id, device.kind, device.emulated) == ("ascend-sim0", "ascend", True)
    assert backend.capabilities().simulated
    assert sum(AscendAccelerator().workspace(make_plan(256, 256, 256)).areas) == 0
    with pytest.raises(ValueError, match="slots = 0"):
        AscendAccelerator(slots=0)


def test_the_largest_world_and_one_rank_more() -> None:
    with World(make_plan(64, 8, 8, ranks_per_node=64)) as world:
        world.check(epochs=1)
    said = "a world of 65 ranks; at least 1 and at most 64"
    with pytest.raises(ArgumentError, match=said), World(make_plan(65, 8, 8, ranks_per_node=65)):
        pass
