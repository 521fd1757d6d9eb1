"""How a process learns from its environment which rank of a job it is."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from in_world import TOLD_S, own_port

from mkernel.errors import ArgumentError, PeerFailure, Timeout
from mkernel.world.environment import _FIRST_PORT, Started, first_host, rendezvous, started
from mkernel.world.join_deadline import JoinDeadline

SRUN = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "5", "SLURM_STEP_NODELIST": "gpu[03-07]",
    "SLURM_STEP_NUM_TASKS": "10", "SLURM_STEP_TASKS_PER_NODE": "2(x5)", "SLURM_NTASKS": "10",
    "SLURM_PROCID": "7", "SLURM_LOCALID": "1",
}  # fmt: skip
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
SILENT = """
import os
os.environ |= {{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}}
import mkernel
try:
    mkernel.init(join_timeout_s=1.0)
except mkernel.errors.Timeout as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Started(0, 1, 1, None)),
        (TORCHRUN, Started(3, 4, 2, "env://")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Started(1, 2, 2, "env://")),
        (SRUN, Started(7, 10, 2, "tcp://gpu03:16239")),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}, Started(7, 10, 2, "tcp://10.0.0.1:99")),
        ({n: v for n, v in SRUN.items() if n not in ("SLURM_JOB_ID", "SLURM_STEP_ID")},
         Started(7, 10, 2, f"tcp://gpu03:{_FIRST_PORT}")),
        ({**SRUN, **TORCHRUN}, Started(3, 4, 2, "env://")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Started(0, 1, 1, None)),
        ({"SLURM_STEP_NODELIST": "gpu03", "SLURM_PROCID": "0"}, Started(0, 1, 1, None)),
    ],
    ids=["alone", "torchrun", "by hand", "srun", "srun, store named", "srun, no numbers",
         "torchrun in srun", "one task", "no count"],
)  # fmt: skip
def test_what_launchers_set(environment: dict[str, str], found: Started) -> None:
    assert started(environment) == found


def test_a_batch_script_is_no_task() -> None:
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert started(batch) == Started(0, 1, 1, None)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[03-07,12]-ib,login", "gpu03-ib"),
        ("gpu[5,7]", "gpu5"), ("r[1-2]n[08-09],x", "r1n08"), ("a-b[2]", "a-b2"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SLURM_PROCID": "10"}, "SLURM_PROCID = 10"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID = 'two'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4),1"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK = 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = 0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "-2"}, "LOCAL_WORLD_SIZE = -2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0"}, "SLURM_STEP_TASKS_PER_NODE = '0'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, str], told: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        started({**SRUN, **changes})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("address", "port", "told"),
    [
        ("", "29500", "MASTER_ADDR = nothing is not legal"),
        ("localhost", "", "MASTER_PORT = nothing is not legal"),
        ("localhost", "70000", "MASTER_PORT = 70000 is not legal"),
        ("localhost", "http", "MASTER_PORT = 'http' is not legal"),
    ],
)
def test_where_the_store_is_must_be_told(
    address: str, port: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=told):
        rendezvous(Started(0, 2, 2, "env://"), JoinDeadline(1.0))


def test_ranks_that_do_not_come_are_waited_for_up_to_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own limit is half an hour."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with own_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(Timeout, match=r"not all 2 ranks came .*MKERNEL_JOIN_TIMEOUT_S raises"):
            rendezvous(Started(0, 2, 2, "env://"), JoinDeadline(2.0))


def test_a_store_that_is_gone_is_looked_for_up_to_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One deadline for both clients. Rank 0 died, say, before this rank came."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    began = time.monotonic()
    gone = PeerFailure, Timeout
    with own_port() as port, pytest.raises(gone, match=rf"store at tcp://127\.0\.0\.1:{port}"):
        rendezvous(Started(1, 2, 2, f"tcp://127.0.0.1:{port}"), JoinDeadline(2.0))
    assert time.monotonic() - began < TOLD_S


def test_a_store_that_does_not_answer_is_left_at_the_deadline() -> None:
    """Another service at the store's port, or a host that is stopped: torch waits there for ever."""
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen(8)
        program = SILENT.format(port=service.getsockname()[1])
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            timeout=TOLD_S,
        )
        assert time.monotonic() - began < TOLD_S
    assert re.search(r"did not answer rank 1 .* within 1 s, .*JOIN_TIMEOUT_S", ended.stdout)


def test_any_port_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    found = object(), object()
    stores = iter(found)
    monkeypatch.setattr(
        torch.distributed,
        "rendezvous",
        lambda url, rank, size, timeout: iter([(next(stores), rank, size)]),
    )
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "65535")
    assert rendezvous(Started(0, 2, 2, "env://"), JoinDeadline(10.0)) == found
