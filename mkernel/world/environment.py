"""Reads this process's place in a job from the environment (torchrun's variables, or SLURM's), and the
device that it uses or is meant to use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import Store

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import ArgumentError, PeerFailure, Timeout
from mkernel.settings import MAX_TIMEOUT_S
from mkernel.world.bootstrap import STORES_HOST
from mkernel.world.join_deadline import JoinDeadline

_FIRST_PORT, _PORTS = 15000, 15000
"""The ports of SLURM jobs' stores without MASTER_PORT: the first and how many, all below those that
the operating system hands out."""
_hosted: dict[str, Store] = {}
"""A client of each store that this process hosts, which serves other ranks as long as the client lives:
they may still read what ended the last world after this rank has left it."""


class Started(NamedTuple):
    """A rank of a job, as its launcher started it.

    Attributes:
        per_host: ranks on each host.
        url: where the ranks meet, as torch's rendezvous takes it; None: the job is this process.
    """

    rank: int
    size: int
    per_host: int
    url: str | None


def started(environment: Mapping[str, str] = os.environ) -> Started:
    """Read how this process was started. Variables of torchrun come before those of SLURM, since
    torchrun may run in a SLURM job. ArgumentError names the variable that is wrong."""
    if "SLURM_STEP_NODELIST" in environment and not {"RANK", "WORLD_SIZE"} & set(environment):
        return _by_srun(environment)
    size = _integer(environment, "WORLD_SIZE", 1)
    rank = _integer(environment, "RANK", 0)
    _check_rank("RANK", rank, "WORLD_SIZE", size)
    alone = size == 1 and "MASTER_ADDR" not in environment
    per_host = _integer(environment, "LOCAL_WORLD_SIZE", size)
    if per_host < 1:
        raise ArgumentError(
            "LOCAL_WORLD_SIZE", per_host, "the number of ranks on a host, at least 1"
        )
    return Started(rank, size, per_host, None if alone else "env://")


def rendezvous(job: Started, deadline: JoinDeadline) -> tuple[Store, Store]:
    """Wait for the other ranks, and return two clients of the job's store: requests of one client wait
    for each other, and the watchdog must not.

    Raises:
        ArgumentError: the environment does not say where it is. PeerFailure: there is none. Timeout: a
            rank did not come, or what listens there does not answer.
    """
    if job.url is None:
        store = torch.distributed.HashStore()
        return store, store
    if job.url == "env://":
        _check_store(os.environ)
    url, limit_s = job.url, deadline.wait_s(MAX_TIMEOUT_S)

    def clients() -> list[Store]:
        found = []
        for _ in range(2):
            limit = timedelta(seconds=deadline.wait_s(MAX_TIMEOUT_S))
            met = torch.distributed.rendezvous(url, job.rank, job.size, timeout=limit)
            found.append(next(met)[0])
        return found

    silent = (
        f"the store at {_shown(url)} did not answer rank {job.rank} (is it the job's, which rank 0 "
        "hosts at MASTER_ADDR and MASTER_PORT, and does its process go on?)"
    )
    try:
        one, two = deadline.within(silent, clients)
    except Timeout:
        raise
    except torch.distributed.DistStoreError as error:
        raise Timeout(
            f"not all {job.size} ranks came to the store at {_shown(url)} within {limit_s:g} s "
            f"({str(error).splitlines()[0]}); was each of them started, with the same MASTER_ADDR and "
            "MASTER_PORT? (MKERNEL_JOIN_TIMEOUT_S raises the limit)"
        ) from error
    except RuntimeError as error:  # torch raises DistNetworkError and kin, all RuntimeErrors
        raise PeerFailure(
            f"rank {job.rank} finds no store at {_shown(url)} ({str(error).splitlines()[0]}); "
            "it is rank 0 that hosts it, at MASTER_ADDR and MASTER_PORT",
            STORES_HOST,
        ) from error
    if job.rank == STORES_HOST:
        _hosted[_shown(url)] = one
    return one, two


def _shown(url: str) -> str:
    if url != "env://":
        return url
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


# ---- SLURM ---------------------------------------------------------------------------------------


def _by_srun(environment: Mapping[str, str]) -> Started:
    """Read how a task of a job step was started. A batch script is no task of one, and has no
    SLURM_STEP_NODELIST."""
    total = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size, rank = _integer(environment, total, 1), _integer(environment, "SLURM_PROCID", 0)
    _check_rank("SLURM_PROCID", rank, total, size)
    if size == 1:
        return Started(0, 1, 1, None)
    host = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    job = _integer(environment, "SLURM_JOB_ID", 0) + _integer(environment, "SLURM_STEP_ID", 0)
    port = _integer(environment, "MASTER_PORT", _FIRST_PORT + job % _PORTS)
    return Started(rank, size, _tasks_per_host(environment, size), f"tcp://{host}:{port}")


def first_host(nodes: str) -> str:
    """Return the first host of a node list as SLURM writes it: ``gpu[03-07,12]-ib,login`` →
    ``gpu03-ib``."""
    found = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", nodes.strip())
    if found is None:
        raise ArgumentError(
            "SLURM_STEP_NODELIST", repr(nodes), "a node list, such as gpu[03-07,12]"
        )
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found[0])


def _tasks_per_host(environment: Mapping[str, str], size: int) -> int:
    """Return the number of tasks on each host. ``SLURM_STEP_TASKS_PER_NODE`` is ``2`` on one node,
    ``2(x3)`` on three, ``2(x3),1`` where the fourth has fewer, which is refused."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environment.get(name, str(size))
    found = re.fullmatch(r"(\d+)(?:\(x\d+\))?", text)
    if found is None or int(found[1]) < 1:
        raise ArgumentError(
            name, repr(text), "as many tasks on every node, such as srun --ntasks-per-node=8 starts"
        )
    return int(found[1])


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(name, repr(text), "an integer, as the job's launcher sets it") from None


def _check_store(environment: Mapping[str, str]) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ArgumentError(
                name, "nothing", "where rank 0 hosts the job's store, the same on all ranks; "
                "torchrun sets MASTER_ADDR (a host) and MASTER_PORT"
            )  # fmt: skip
    port = _integer(environment, "MASTER_PORT", 0)
    if not 0 < port < 1 << 16:
        raise ArgumentError("MASTER_PORT", port, "a free port of rank 0's host, 1 to 65535")


def _check_rank(name: str, rank: int, total: str, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError(name, rank, f"0 to {total} - 1 = {size - 1}")


def restarts() -> str:
    """Return how often torchrun has started this job's processes anew."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True)
class Chosen:
    """A device of this process: torch's name of its kind, and its index there."""

    kind: str
    index: int

    def described(self, backend: AcceleratorBackend) -> tuple[str | None, int] | None:
        """Return its PCI address, if known, and index; None: it is none of the backend's devices."""
        if backend.device != self.kind:
            return None
        for one in backend.probe():
            if one.index == self.index and not one.emulated:
                return one.pci, one.index
        return None


def chosen() -> Chosen | None:
    """Return the current device, where the process has used any, else that of LOCAL_RANK; None:
    there is neither. Call it before backends look at devices, since to look may be to use one."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    kind, module = found.type, torch.get_device_module(found.type)
    text = os.environ.get("LOCAL_RANK", "")
    if module.is_initialized():
        return Chosen(kind, int(module.current_device()))
    if text.isdecimal() and int(text) < module.device_count():
        return Chosen(kind, int(text))
    return None
