"""The `mkernel` command as a user runs it: output, files, exit codes, messages for bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

MKERNEL = [str(Path(sys.executable).parent / "mkernel")]
SMALL = ["--m", "256", "--n", "128", "--k", "256", "--warmup", "0", "--iterations", "1"]


def mkernel(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MKERNEL, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_run_shows_what_it_did() -> None:
    done = mkernel("run", "all_gather_gemm", *SMALL)
    assert done.returncode == 0, done.stderr
    for part in ("node", "ascend", "cx7", "soft", "compute only", "sequential", "pipelined",
                 "speed-up", "overlap efficiency", "wall time", "modelled time", "PASSED",
                 "float64"):  # fmt: skip
        assert part in done.stdout, part


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 2), (2, 2), (3, 2)])
def test_json_is_one_object(nodes: int, ranks: int) -> None:
    size = ["--m", str(64 * nodes * ranks), "--n", "128", "--k", "256"]
    done = mkernel("run", "ag_gemm", "--json", "--nodes", str(nodes), "--ranks-per-node",
                   str(ranks), *size, "--iterations", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert 0 < report["verification"]["error"] <= report["verification"]["tolerance"]
    for clock in ("wall", "modelled"):
        for view in ("compute_only_ms", "sequential_ms", "pipelined_ms"):
            assert report[clock][view] > 0
    assert len(report["plan"]["placement"]) == nodes * ranks
    assert (report["nic_bytes"] > 0) == (nodes > 1)


@pytest.mark.parametrize("form", ["safetensors", "npy"])
@pytest.mark.parametrize("replicate", [False, True])
def test_own_tensors(tmp_path: Path, form: str, replicate: bool) -> None:
    a, b = torch.randn(256, 192).half(), torch.randn(192, 128).half()
    if form == "safetensors":
        save_file({"a": a, "b": b}, tmp_path / "x.safetensors")
        files = ["--input", str(tmp_path / "x.safetensors")]
    else:
        np.save(tmp_path / "a.npy", a.numpy())
        np.save(tmp_path / "b.npy", b.numpy())
        files = ["--input", str(tmp_path / "a.npy"), "--input", str(tmp_path / "b.npy")]
    out = tmp_path / "out"
    done = mkernel("run", "ag_gemm", *files, *(["--replicate-b"] if replicate else []),
                   "--output", str(out), "--iterations", "1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = [load_file(out / f"rank{rank}.safetensors")["c"] for rank in range(4)]
    wanted = a.double() @ b.double()
    for result in parts if replicate else [torch.cat(parts, 1)]:
        assert result.dtype == torch.float32
        assert (result.double() - wanted).norm() / wanted.norm() <= 1e-5

    trace = json.loads((out / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 4
    assert all("modelled" in name for name in names)
    kinds = {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert kinds == {"comm", "compute"}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def refused(*arguments: str) -> str:
    done = mkernel("run", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["conv"], ["UnknownOp", "conv", "all_gather_gemm"]),
        (["gemm_rs"], ["ascend", "gemm_reduce_scatter"]),
        (["ag_gemm", "--accelerator", "tpu"], ["UnknownBackend", "accelerator", "tpu", "ascend"]),
        (["ag_gemm", "--nic", "e1000"], ["UnknownBackend", "nic", "e1000", "cx7"]),
        (["ag_gemm", "--m", "2047"], ["ShapeError", "m = 2047", "2044", "2048"]),
        (["ag_gemm", "--k", "1001"], ["ShapeError", "k = 1001", "1000", "1008"]),
        (["ag_gemm", "--n", "0"], ["n = 0"]),
        (["ag_gemm", "--nodes", "0"], ["--nodes"]),
        (["ag_gemm", "--dtype", "int8"], ["--dtype", "int8", "float16"]),
        (["ag_gemm", "--chunk", "0"], ["chunk", "0"]),
        (["ag_gemm", "--input", "absent.safetensors"], ["absent.safetensors", "no such file"]),
    ],
)
def test_bad_input_is_refused(arguments: list[str], parts: list[str]) -> None:
    message = refused(*arguments)
    for part in parts:
        assert part in message


def test_wrong_keys_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 4)}, tmp_path / "x.safetensors")
    assert "['x']" in refused("ag_gemm", "--input", str(tmp_path / "x.safetensors"))


def test_sharded_b_must_divide(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(8, 8).half(), "b": torch.ones(8, 6).half()}, tmp_path / "x.safetensors"
    )
    assert "--replicate-b" in refused("ag_gemm", "--input", str(tmp_path / "x.safetensors"))


def test_ctrl_c_ends_everything() -> None:
    process = subprocess.Popen(
        [*MKERNEL, "run", "ag_gemm", "--iterations", "500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(6)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: the whole group
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    group = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False)
    deadline = time.monotonic() + 5
    while group.stdout and time.monotonic() < deadline:
        time.sleep(0.1)
        group = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False)
    assert not group.stdout


@pytest.mark.parametrize("nodes", [1, 2])
def test_example_under_torchrun(nodes: int) -> None:
    example = Path(__file__).parents[2] / "examples" / "all_gather_gemm.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
         "--master-port", str(29600 + nodes), str(example), "--nodes", str(nodes)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error") == 4


def test_world_size_must_match_under_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
         "--master-port", "29610",
         str(Path(__file__).parents[2] / "examples" / "all_gather_gemm.py"), "--nodes", "3"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "nodes x ranks_per_node = WORLD_SIZE = 4" in done.stderr


def test_times_wait_for_the_network() -> None:
    """A NIC that takes 60 ms a message shows up in every view that communicates."""
    done = mkernel("run", "ag_gemm", "--json", "--nodes", "2", "--ranks-per-node", "1", *SMALL,
                   env={**os.environ, "MKERNEL_SOFTVERBS_LATENCY_NS": "60000000"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    wall = json.loads(done.stdout)["wall"]
    for view in ("comm_only_ms", "sequential_ms", "pipelined_ms"):
        assert wall[view] >= 60
    assert wall["compute_only_ms"] < 60
