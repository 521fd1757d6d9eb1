"""One rank of ``mkernel run`` and ``mkernel bench``: at every problem and in every mode contenders
take turns (:mod:`mkernel.harness.turns`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

from mkernel import api
from mkernel.cases import Case
from mkernel.cases.gemm import GemmCase
from mkernel.errors import ArgumentError, InputFileError, MkernelError
from mkernel.harness import provenance
from mkernel.harness.clock import Meeting
from mkernel.harness.guard import Guard, Progress
from mkernel.harness.inputs import opened
from mkernel.harness.problem import Problem, Tensors
from mkernel.harness.protocol import HostStopwatch, Stopwatch, stopwatch
from mkernel.harness.results import Route
from mkernel.harness.spec import Benched, Job, Mode, size_text, sized_like
from mkernel.harness.turns import Row, Turns
from mkernel.harness.wire import crosses_emulated, wire_us
from mkernel.harness.work import Unseen, clock
from mkernel.host_limits import check_gloo_interfaces
from mkernel.launch import report
from mkernel.plan.model import LaunchPlan
from mkernel.user_files import whole_file
from mkernel.world.lifecycle import current
from mkernel.world.world import World

_GEMM_KEY = {"out": "c"}
"""The file's name of a GEMM's result; other outputs are called as in their op."""


@dataclass
class RankResult:
    """The results that a rank sends back.

    Attributes:
        rows: by mode, in the order of the job's cases, by contender. timing: of each mode.
        platform: the accelerators of this host; empty for views, whose report says nothing of them.
        carrier: what carries bytes between nodes, or as a process group between any ranks; empty where
            peers' memory is all that is written to. routes: of what crosses nodes by a NIC. nic_bytes:
            put through the NIC by views. wire_us: of each case, :func:`mkernel.harness.wire.wire_us`.
        emulated: whether any of them crossed an emulated NIC.
    """

    rows: dict[Mode, list[dict[str, Turns]]] = field(default_factory=dict)
    timing: dict[Mode, dict[str, Any]] = field(default_factory=dict)
    platform: dict[str, Any] = field(default_factory=dict)
    carrier: str = ""
    routes: tuple[Route, ...] = ()
    nic_bytes: int = 0
    wire_us: list[float | None] = field(default_factory=list)
    emulated: bool = False


def run(job: Job, port: int = 0) -> RankResult:
    """Measure and check one rank's part of every row. Collective.

    ``port``: of a store on this host, for agreements on when turns start; views need none.
    """
    world = current()
    if job.views:
        device = torch.device(world.accelerator.device)
        watch = HostStopwatch(world.barrier, lambda: None)
        result = _measured(job, device, None, lambda mode: watch)
        if world.nic is not None and world.nic.flush(world.settings.timeout_s):
            result.nic_bytes = world.nic.statistics().put_bytes
        return result
    device = _device(world)
    guard = Guard()
    made = not distributed.is_initialized()
    with guard.step("the process group", job.timeout_s):
        store = _store(port, job.timeout_s)
        if made:
            _join(world, device, job.timeout_s)
        starts = PrefixStore("starts", store)
        meeting = Meeting(starts, world.rank, world.size, world.seal("starts"))
    try:
        result = _measured(
            job,
            device,
            guard,
            lambda mode: stopwatch(device, clock(mode, job.launches), meeting, job.timeout_s),
        )
        result.platform = provenance.devices(device)
        plans = _plans(job)
        result.wire_us = [
            None if plan is None or plan.op != case.op else wire_us(plan, world.map, world.rank)
            for plan, case in zip(plans, job.cases, strict=True)
        ]
        made_here = [plan for plan in plans if plan is not None]
        result.emulated = any(crosses_emulated(each, world.map, world.rank) for each in made_here)
        result.carrier, result.routes = _carrier(made_here), _routes(made_here)
        return result
    except BaseException:
        made = False  # NCCL would wait here for ranks that wait for this one
        raise
    finally:
        guard.close()
        if made:
            distributed.destroy_process_group()


def _measured(
    job: Job, device: torch.device, guard: Guard | None, watch_for: Callable[[Mode], Stopwatch]
) -> RankResult:
    """Measure the rows of all modes, and note how these are timed."""
    world, result = current(), RankResult()
    unseen, turn = Unseen((each.op, each.sizes) for each in job.cases), 0
    for mode in job.modes:
        watch = watch_for(mode)
        result.rows[mode] = []
        for each in job.cases:
            case = opened(each, job.files)
            if not job.views:
                case = case.with_(device=str(device))
            problem = Problem(
                case, world.rank, world.size, device, world.map.nodes, _barred(world, device)
            )
            row = Row(job, mode, problem, watch, guard, unseen, turn)
            result.rows[mode].append(row.measure())
            turn = row.turn
            if job.views:
                _save(row.traced(), case, job, world.rank)
            elif world.rank == 0:
                report(Progress(f"{mode} {case.op} {size_text(case.op, case.sizes)}"))
        result.timing[mode] = watch.settings()
    return result


def _save(outputs: Tensors, case: Case, job: Job, rank: int) -> None:
    if job.output is None:
        return
    keys = _GEMM_KEY if isinstance(case, GemmCase) else {}
    # Copies that share no memory, as the file format asks.
    packed = {
        keys.get(name, name): each.cpu().clone(memory_format=torch.contiguous_format)
        for name, each in outputs.items()
    }
    file = job.output / f"rank{rank}.safetensors"
    try:
        with whole_file(file) as draft:
            save_file(packed, draft)
    except (OSError, SafetensorError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InputFileError(f"--output {file}: cannot be written: {why}") from error


def _device(world: World) -> torch.device:
    """Return the rank's device: the one that its backend chose, or, where a backend uses whatever
    tensors lie on, one for each rank: all are on this machine."""
    kind = world.accelerator.device
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if world.accelerator.capabilities().process_group:
        count, index = module.device_count(), world.rank
        if index >= count:
            raise ArgumentError("--ranks", index + 1, f"at most {count}, the number of GPUs")
        module.set_device(index)
    return torch.device(kind, module.current_device())


def _barred(world: World, device: torch.device) -> str | None:
    """Return why libraries' collectives cannot take part, or None."""
    if device.type != "cuda":
        return None
    if world.map.nodes > 1:
        return "would go past the NIC: emulated nodes are one host"
    shared = world.settings.ranks_per_device > 1
    return "takes one rank a device" if shared else None


def _plans(job: Job) -> list[LaunchPlan | None]:
    """Plan the job's cases, of a layer its first op; None: the backend does not have one, as its row
    says."""
    found: list[LaunchPlan | None] = []
    for case in job.cases:
        given: dict[str, Any] = {"dtype": case.dtype, "out_dtype": case.out_dtype, **case.sizes}
        if "scales" in case.options:
            given |= {"scales": case.options["scales"], "b_layout": case.layout}
            given["use_fast_accum"] = case.options.get("use_fast_accum", False)
        try:
            found.append(api.plan(sized_like(cast(Benched, case.op)), **given))
        except MkernelError:
            found.append(None)
    return found


def _carrier(plans: Sequence[LaunchPlan]) -> str:
    names = (name for plan in plans for name in (plan.nic, plan.carrier) if name)
    return " and ".join(dict.fromkeys(names))


def _routes(plans: Sequence[LaunchPlan]) -> tuple[Route, ...]:
    found: dict[Route, None] = {
        "staged" if plan.routes.staged else "direct": None
        for plan in plans
        if plan.nodes > 1 and plan.nic is not None
    }
    return tuple(found)


def _store(port: int, timeout_s: float) -> TCPStore:
    # The guard's word comes first: it knows whose turn it was.
    return TCPStore(
        "127.0.0.1", port, timeout=timedelta(seconds=3 * timeout_s), wait_for_workers=False
    )


def _join(world: World, device: torch.device, timeout_s: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Else a thread of NCCL's group polls the store, which is Python code, until the process ends.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    nccl = device.type == "cuda" and _barred(world, device) is None
    if not nccl:
        check_gloo_interfaces()
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=world.group_store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=3 * timeout_s),
        device_id=device if nccl else None,
    )
