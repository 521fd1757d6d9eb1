"""Programs for torchrun, in forked ranks: torchrun's own would each import torch anew."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from in_world import DEADLINE_S
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import mkernel
from mkernel.launch import host_store, launch


class Ended(NamedTuple):
    """The end of a program: the first exit code that is not 0, and the output of all ranks."""

    code: int
    said: str


def run(script: Path, *arguments: str, ranks: int = 2) -> Ended:
    """Run a program with the environment that torchrun gives it."""
    store, port = host_store(ranks, DEADLINE_S)
    ended = launch(_rank, str(script), arguments, port, ranks_per_node=ranks, accelerator="streams")
    del store
    return Ended(next((code for code, _ in ended if code), 0), "".join(said for _, said in ended))


def _rank(script: str, arguments: tuple[str, ...], port: int) -> tuple[int, str]:
    rank, size = (str(number) for number in (mkernel.world().rank, mkernel.world().size))
    mkernel.finalize()
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo", "MKERNEL_TIMEOUT_S": "100",
    }  # fmt: skip
    # A pass is met only where a graph is compiled; compiled C++ and headers may be an earlier test's.
    inductor.fx_graph_cache = functorch.enable_autograd_cache = False
    sys.argv = [script, *arguments]
    said, code = io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return code, said.getvalue()
